"""The live page's server: on this machine's loopback only, for whoever has the address with its random token.

    GET  /TOKEN/                        the page
    GET  /TOKEN/state?held=N&version=V  the state as JSON, with the rows after the N that the page has
    POST /TOKEN/stop                    ask the run to end after the rounds at work

Every request must name this server in its Host header, so that no foreign page can reach it under a name of its own
(DNS rebinding), and must carry the token, so that no other user of the machine can. A POST from another origin is
refused too.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedscaffold.report.live import Source
from fedscaffold.report.picture import state
from fedscaffold.report.record import STOP

__all__ = ["Server", "live_page"]

ASSETS = files("fedscaffold.report") / "live_page"
SCRIPTS = ("draw", "panels", "live")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LOOPBACK = "127.0.0.1"
LAST_LOOK = 3.0  # seconds that a page which is open gets to see the end
MOST_OPEN = 32  # connections at once: a new one closes the oldest, so that the run keeps its files
PAUSE = 0.1  # seconds before the next try where no connection can be taken


def live_page() -> str:
    """The page, as the text of one HTML file; it asks only the server it came from.

    >>> live_page()[:15]
    '<!DOCTYPE html>'
    """
    parts = {"style": "style.css"} | {name: f"{name}.js" for name in SCRIPTS}
    texts = {name: (ASSETS / part).read_text(encoding="utf-8") for name, part in parts.items()}
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(texts)


class Server:
    """Serves the live page of one folder from a thread of its own.

    >>> import tempfile
    >>> from fedscaffold.report.live import simulated
    >>> with Server(Path(), simulated(Path(tempfile.mkdtemp()))) as server:
    ...     server.address.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, folder: Path, source: Source, port: int = 0, page: str | None = None) -> None:
        self.folder, self.source = folder, source
        self.token = secrets.token_urlsafe(18)
        self.page = live_page() if page is None else page
        self.lock = threading.Lock()
        self.polled, self.saw_end = 0.0, False
        self.http = _Quiet(port, self)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.http.server_port}/{self.token}/"

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def state(self, held: int, version: str) -> dict[str, Any]:
        """The state, for a page that has so many rows of a version."""
        with self.lock:
            told = state(self.source.picture(), held, version)
        self.polled = time.monotonic()
        self.saw_end = told["phase"] not in ("starting", "running")
        return told

    def stop(self) -> bool:
        """Ask the run to end; False where it cannot be asked."""
        with self.lock:
            if not self.source.picture().stoppable:
                return False
            (self.folder / STOP).touch()
        return True

    def wait_for_last_look(self) -> None:
        """Let a page that is open see how the run ended, if it looks soon."""
        until = time.monotonic() + LAST_LOOK
        while self.polled and time.monotonic() - self.polled < LAST_LOOK and not self.saw_end:
            if time.monotonic() > until:
                return
            time.sleep(0.05)


class _Quiet(ThreadingHTTPServer):
    """A server that takes a bounded number of connections, and no error of which reaches the run."""

    daemon_threads = True

    def __init__(self, port: int, live: Server) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.live = live
        self.open: dict[socket.socket, None] = {}
        """The connections there are, the oldest first."""
        self.guard = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take the next connection; where the system has no more files for it, wait a little."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection from a thread of its own, in place of the oldest one where there are too many."""
        with self.guard:
            self.open[request] = None
            oldest = next(iter(self.open)) if len(self.open) > MOST_OPEN else None
            if oldest is not None:
                del self.open[oldest]
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self.guard:
            self.open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the server and the connections that are left."""
        super().server_close()
        with self.guard:
            left = list(self.open)
        for connection in left:
            _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of pages that were closed, and of other errors one line: the terminal is the run's."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            sys.stderr.write(f"fedscaffold: the live page failed to answer: {type(error).__name__}: {error}\n")


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that waits for a connection: it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Quiet
    server_version, sys_version, protocol_version = "fedscaffold", "", "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """The page and the state."""
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address")
            return
        place = self._place(asked.path)
        if place == "":
            self._send(HTTPStatus.OK, self.server.live.page, "text/html; charset=utf-8")
        elif place == "state":
            given = parse_qs(asked.query)
            held = given.get("held", ["0"])[0]
            rows = int(held) if held.isdecimal() and len(held) < 19 else 0
            try:
                told = json.dumps(self.server.live.state(rows, given.get("version", [""])[0]), allow_nan=False)
            except Exception as error:  # of the folder, while the run goes on: it may be mended
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._send(HTTPStatus.OK, told, "application/json")
        elif place is not None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        """The wish to stop."""
        self.close_connection = True  # a body, if there is one, is not read
        place = self._place(self.path.partition("?")[0])
        origin = self.headers.get("Origin")
        if place is None:
            return
        if origin is not None and origin != f"http://{self.headers.get('Host')}":
            self._refuse(HTTPStatus.FORBIDDEN, "this page may not ask for that")
        elif place != "stop":
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        elif self.server.live.stop():
            self._send(HTTPStatus.OK, '{"stopping": true}', "application/json")
        else:
            self._refuse(HTTPStatus.CONFLICT, "the run cannot be stopped from here, or has ended")

    def _place(self, path: str) -> str | None:
        """What comes after the token; None where the request was refused."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._refuse(HTTPStatus.FORBIDDEN, f"this server is http://{LOOPBACK}:{port} and no other")
            return None
        token, _, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.live.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that fedscaffold printed, with its token")
            return None
        return rest

    def _refuse(self, code: HTTPStatus, line: str) -> None:
        self.close_connection = True
        self._send(code, line + "\n", "text/plain; charset=utf-8")

    def _send(self, code: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        """Say nothing on the terminal of the run."""

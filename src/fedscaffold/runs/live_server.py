"""Serve the live page of a run on the loopback interface.

    GET  /TOKEN/        the page
    GET  /TOKEN/state   what the page shows, as JSON (`fedscaffold.runs.view_model`)
    POST /TOKEN/stop    request the run to stop after the current rounds

Every request must name this server in its Host header, which prevents DNS rebinding, and must carry
the token, which keeps other users of the machine out. A POST from another origin is refused.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedscaffold.runs.live import LiveSource
from fedscaffold.runs.page import live_page
from fedscaffold.runs.round_log import STOP
from fedscaffold.runs.view_model import view

__all__ = ["Server"]

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
    "'self'; img-src data:"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LOOPBACK = "127.0.0.1"
LAST_LOOK = 3.0  # seconds for an open page to fetch the final state
# a new one closes the oldest, so that the run does not run out of file descriptors
MAX_CONNECTIONS = 32
PAUSE = 0.1  # seconds before the next attempt if a connection cannot be accepted


class Server:
    """Serve the live page of one folder from a background thread.

    >>> import tempfile
    >>> from fedscaffold.runs.live import Simulated
    >>> with Server(Path(), Simulated(Path(tempfile.mkdtemp()))) as server:
    ...     server.address.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self, folder: Path, source: LiveSource, port: int = 0, page: str | None = None
    ) -> None:
        self.folder, self.source = folder, source
        self.token = secrets.token_urlsafe(18)
        self.page = live_page() if page is None else page
        self.lock = threading.Lock()
        self.polled, self.saw_end = 0.0, False
        self.http = _HTTPServer(port, self)
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )

    @property
    def address(self) -> str:
        """URL of the page, token included."""
        return f"http://{LOOPBACK}:{self.http.server_port}/{self.token}/"

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def state(self) -> dict[str, Any]:
        """Return the view model of the present state."""
        with self.lock:
            source = self.source.poll()
            told = view([source])
        self.polled = time.monotonic()
        self.saw_end = source.progress is None or source.progress.phase not in (
            "starting",
            "running",
        )
        return told

    def stop(self) -> bool:
        """Request the run to stop; return False if it cannot be stopped from here."""
        with self.lock:
            progress = self.source.poll().progress
            if progress is None or not progress.stoppable:
                return False
            (self.folder / STOP).touch()
        return True

    def wait_for_last_look(self) -> None:
        """Wait up to `LAST_LOOK` seconds for an open page to fetch the final state."""
        until = time.monotonic() + LAST_LOOK
        while self.polled and time.monotonic() - self.polled < LAST_LOOK and not self.saw_end:
            if time.monotonic() > until:
                return
            time.sleep(0.05)


class _HTTPServer(ThreadingHTTPServer):
    """HTTP server with a bounded number of connections, whose errors never reach the run."""

    daemon_threads = True
    # the default of 5 makes a burst of connections wait for a second and more
    request_queue_size = 128

    def __init__(self, port: int, live: Server) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.live = live
        self.open: dict[socket.socket, None] = {}
        """Open connections, oldest first."""
        self.guard = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection; pause briefly if the process is out of file descriptors."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, closing the oldest one above `MAX_CONNECTIONS`."""
        with self.guard:
            self.open[request] = None
            oldest = next(iter(self.open)) if len(self.open) > MAX_CONNECTIONS else None
            if oldest is not None:
                del self.open[oldest]
        if oldest is not None:
            _disconnect(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self.guard:
            self.open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the server and all open connections."""
        super().server_close()
        with self.guard:
            left = list(self.open)
        for connection in left:
            _disconnect(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections; print other errors on one line of stderr."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            sys.stderr.write(
                f"fedscaffold: the live page failed to answer: {type(error).__name__}: {error}\n"
            )


def _disconnect(connection: socket.socket) -> None:
    """Shut a connection down, so that its handler thread wakes up and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _HTTPServer
    server_version, sys_version, protocol_version = "fedscaffold", "", "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Serve the page and its state."""
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address")
            return
        place = self._place(asked.path)
        if place == "":
            self._send(HTTPStatus.OK, self.server.live.page, "text/html; charset=utf-8")
        elif place == "state":
            try:
                told = json.dumps(self.server.live.state(), separators=(",", ":"), allow_nan=False)
            except Exception as error:  # an unreadable folder may be readable at the next poll
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._send(HTTPStatus.OK, told, "application/json")
        elif place is not None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        """Handle a request to stop the run."""
        self.close_connection = True  # the body is not read
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
        """Return the path after the token, or None if the request was refused."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._refuse(
                HTTPStatus.FORBIDDEN, f"this server is http://{LOOPBACK}:{port} and no other"
            )
            return None
        token, _, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.live.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "open the address that fedscaffold printed, with its token"
            )
            return None
        return rest

    def _refuse(self, code: HTTPStatus, line: str) -> None:
        self.close_connection = True
        self._send(code, line + "\n", "text/plain; charset=utf-8")

    def _send(self, code: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {
            **HEADERS,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        """Suppress request logging."""

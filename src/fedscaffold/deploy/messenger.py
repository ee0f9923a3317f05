"""Passes a request on to the worker of a site, which it starts where nobody did.

Every message has a process of its own, so this module imports neither torch nor JAX nor what they
work for.

A worker that dies is replaced and asked again: requests can be repeated, as the same request to
the same state gives the same reply. One that does not answer in time is ended, and the server is
told in one line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from fedscaffold.deploy.packets import Packet, decline
from fedscaffold.deploy.worker_wire import (
    FOLDER,
    WORKER,
    Connection,
    Frame,
    code_version,
    connect,
    open_place,
)

__all__ = ["LOG", "ask_worker"]

LOG = "worker.log"
MOST_DEATHS = 3  # of workers on one request
MOST_STRANGE = 3  # starts of a worker that stays one of another installation
POLL = 0.05  # seconds between looks for a worker that starts
STARTING = 60.0  # seconds that a worker may take to listen
MOST_LOG = 4 << 20  # bytes


class _Unanswered(Exception):
    """The worker gave no answer; the message is for the server."""


def ask_worker(
    folder: Path,
    site: str,
    request: Packet,
    *,
    package: Path,
    beside: str,
    patience: float,
    kept: bool,
) -> Packet:
    """Return the worker's reply to a request of the server.

    Args:
        folder: Folder of the site.
        site: Its name.
        request: The request.
        package: Folder of the app's package.
        beside: A copy of the app at the site; "" for none.
        patience: Seconds after which the answer is of no use.
        kept: Whether somebody else starts the worker, and again when it dies; else this does.
    """
    call = {
        "site": site,
        "package": str(package),
        "beside": beside,
        "patience": patience,
        "version": code_version(),
    }
    try:
        with open_place(folder) as place:
            return _ask(folder, place, Frame(call, request), patience, kept)
    except (_Unanswered, ValueError) as why:
        return decline(request, site, f"nothing was trained: {why}")
    except OSError as error:
        return decline(request, site, f"its worker cannot be reached: {type(error).__name__}")


def _ask(folder: Path, place: int, frame: Frame, patience: float, kept: bool) -> Packet:
    """Ask until there is an answer."""
    until = time.monotonic() + patience
    died = strange = 0
    while died < MOST_DEATHS and strange < MOST_STRANGE:
        with _reach(folder, place, until, kept) as connection:
            try:
                reply = _exchange(connection, frame, until)
            except TimeoutError:
                raise _Unanswered(_give_up(folder, connection, patience)) from None
            except ConnectionError:
                died += 1
                continue
        if reply.note.get("word") == "done":
            return reply.packet
        strange += reply.note.get("version") != frame.note["version"]
    raise _Unanswered(
        f"its worker died {died} times at this request"
        if died
        else "its worker is of another installation; end it, and the right one starts"
    )


def _exchange(connection: Connection, frame: Frame, until: float) -> Frame:
    """Send a request and return the last word on it."""
    connection.send(frame, _left(until))
    reply = connection.receive(_left(until))
    if reply.note.get("word") == "begun":
        connection.begun = True
        reply = connection.receive(_left(until))
    return reply


def _reach(folder: Path, place: int, until: float, kept: bool) -> Connection:
    """Connect to the worker; start it if there is none and nobody else does."""
    soon = min(until, time.monotonic() + STARTING)
    started: int | None = None
    while True:
        with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            return connect(place)
        if started is None and not kept:
            started = _start(folder)
        if started is not None and (ended := os.waitpid(started, os.WNOHANG))[0]:
            if ended[1]:
                raise _Unanswered(f"its worker does not start: {FOLDER}/{LOG} there says why")
            started = None  # another was faster
        if time.monotonic() > soon:
            raise _Unanswered("its worker is not running")
        time.sleep(POLL)


def _start(folder: Path) -> int:
    """Start a worker that ends with the engine's process, which has started this one."""
    path = folder / FOLDER / LOG
    fresh = os.O_TRUNC if path.exists() and path.stat().st_size > MOST_LOG else os.O_APPEND
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | fresh
    words = [sys.executable, *WORKER, str(folder), "--until", str(os.getppid())]
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(path), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, words, os.environ, file_actions=streams, setsid=True)


def _give_up(folder: Path, connection: Connection, patience: float) -> str:
    """End a worker that does not answer, unless it is at work for another; return what to say."""
    from fedscaffold.deploy.worker import read_status

    busy_until = (read_status(folder) or {}).get("busy_until") or 0.0
    if not connection.begun and time.time() < busy_until:
        return f"its worker was busy for {patience:.0f} s with another request"
    with suppress(ProcessLookupError):
        os.kill(connection.peer, signal.SIGKILL)
    return f"its worker gave no answer within {patience:.0f} s and was ended"


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left

"""The worker of a site: one process that holds app, model, data and compiled programs.

`python -m fedscaffold.deploy.worker FOLDER` answers requests on the socket in the site's folder
(`worker_wire.py`), one after the other. Flower starts a new process for each message, which only
passes it on to the worker (`messenger.py`).

A process loads one app, once: for another app, after an app that could not be loaded, and where
the messenger's code is another, the worker starts itself anew with the same process id, and the
request is sent again. So no app sees what another one has left in memory.

The site's data are opened when the site greets, which every start of the server asks for, and stay
open until then.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedscaffold.deploy.packets import Packet, decline
from fedscaffold.deploy.worker_wire import (
    FOLDER,
    WORKER,
    Connection,
    Frame,
    OtherLanguage,
    code_version,
    listen,
    open_place,
)
from fedscaffold.parsing import record
from fedscaffold.state.files import write_private

if TYPE_CHECKING:
    from fedscaffold.deploy.client import Learner, Site
    from fedscaffold.deploy.settings import Settings

__all__ = ["Call", "LoadedApp", "answer_call", "main", "read_status", "workers_of"]

LOCK, STATUS = "lock", "status.json"
SPARE = 1.1  # times the patience of its messenger, after which a request ends the worker
SLOWEST = 60.0  # seconds without a byte after which a messenger is given up


class Call(NamedTuple):
    """What a messenger adds to a request."""

    site: str
    package: str
    """Folder of the app's package."""
    beside: str
    """A copy of the app at the site, for files too large to be sent; "" for none."""
    patience: float
    """Seconds after which the answer is of no use."""
    version: str = ""
    """The messenger's `code_version`."""


class LoadedApp(NamedTuple):
    """An app in memory."""

    folder: Path
    settings: Settings
    learner: Learner


def answer_call(
    call: Call, request: Packet, folder: Path, loaded: LoadedApp | None = None
) -> tuple[Packet, LoadedApp | None]:
    """Answer a request of the server; load the app first unless it is loaded.

    Args:
        call: The messenger's word.
        request: The request: training, evaluation, resync or greeting.
        folder: Folder of the site.
        loaded: The app in memory, if it is that of the call.

    Returns:
        The reply and the app, None if it could not be loaded.
    """
    from fedscaffold.deploy.client import answer
    from fedscaffold.deploy.errors import Failed, guarded
    from fedscaffold.deploy.gate import Refused

    try:
        with guarded("loading the app", folder, call.site, (Refused,)):
            loaded = loaded or _load(call, folder)
        if request.facts.get("kind") == "hello" and isinstance(loaded.learner, _HeldData):
            loaded.learner.close()
        with guarded("answering", folder, call.site):
            reply = answer(request, loaded.learner, loaded.settings, call.site, folder)
    except (Failed, Refused) as failed:
        reply = decline(request, call.site, str(failed))
    return reply, loaded


def _load(call: Call, folder: Path) -> LoadedApp:
    """Unpack and import the app of a call."""
    from fedscaffold.deploy.apps import open_app
    from fedscaffold.deploy.secure_rules import open_identity
    from fedscaffold.deploy.site_privacy import open_private

    def check(settings: Settings) -> None:
        open_private(settings, call.site, folder)
        open_identity(settings, call.site, folder)

    place = _unpack(call, folder)
    settings, learner = open_app(place, check)
    return LoadedApp(place, settings, _HeldData(learner))


def _unpack(call: Call, folder: Path) -> Path:
    from fedscaffold.deploy.app_files import unpack_app

    beside = Path(call.beside) if call.beside else None
    return unpack_app(Path(call.package), folder / "apps", beside)


class _HeldData:
    """A learner that keeps the site's data open."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.opened: dict[str, Site] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)

    def site(self, name: str) -> Site:
        """Open a site's data, unless they are open."""
        if name in self.opened:
            return self.opened[name]
        made = self.learner.site(name)
        if made.reusable:
            self.opened[name] = made
        return made

    def close(self) -> None:
        """Forget the data, which the next request opens again."""
        self.opened.clear()


class Worker:
    """The process that answers a site's messengers.

    Args:
        folder: Folder of the site.
        until: Process with which the worker ends; None for none.
    """

    def __init__(self, folder: Path, until: int | None) -> None:
        self.folder = folder
        self.version = code_version()
        self.loaded: LoadedApp | None = None
        self.used = False
        """Whether an app was imported here, or tried to be."""
        self.until = None if until is None else os.pidfd_open(until)
        before = read_status(folder) or {}
        self.status: dict[str, Any] = {
            "pid": os.getpid(),
            "started": time.time(),
            "starts": int(before.get("starts", 0)) + 1,
            "requests": int(before.get("requests", 0)),
            "version": self.version,
        }

    def run(self, listener: socket.socket) -> bool:
        """Answer messengers.

        Returns:
            False where the process `until` has ended, True where this one must start anew.
        """
        self._tell()
        watched: list[Any] = [listener] if self.until is None else [listener, self.until]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self.until in ready:
                return False
            link, _ = listener.accept()
            try:
                with Connection(link) as connection:
                    if not self._serve(connection):
                        return True
            except OtherLanguage:  # the code on disk may know it
                return True
            except (OSError, ValueError):
                continue  # a messenger that has died or is of another user

    def _serve(self, connection: Connection) -> bool:
        """Answer a messenger; return whether this process can go on."""
        frame = connection.receive(SLOWEST)
        try:
            call = Call(**frame.note)
        except TypeError:
            call = Call("", "", "", 0.0)  # of another version
        if call.version != self.version or (self.used and not self._holds(call)):
            connection.send(Frame({"word": "again", "version": self.version}), SLOWEST)
            return False
        connection.send(Frame({"word": "begun"}), SLOWEST)
        began = time.monotonic()
        self._tell(busy_until=time.time() + call.patience)
        # without a handler the kernel ends the process, whatever it hangs in
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, SPARE * call.patience + 1.0)
        self.used = True
        reply, self.loaded = answer_call(call, frame.packet, self.folder, self.loaded)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self.status["requests"] += 1
        self._tell(
            kind=str(frame.packet.facts.get("kind", "")),
            said=str(reply.facts.get("kind", "")),
            seconds=time.monotonic() - began,
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        connection.send(Frame({"word": "done"}, reply), SLOWEST)
        return True

    def _holds(self, call: Call) -> bool:
        """Return whether the app of a call is the one in memory."""
        if self.loaded is None:
            return False
        try:
            return _unpack(call, self.folder) == self.loaded.folder
        except Exception:  # an app that cannot be unpacked is another one
            return False

    def _tell(self, **more: Any) -> None:
        """Write status.json, for metrics."""
        told = {**self.status, "at": time.time(), "busy_until": None, **more}
        self.status |= {key: told[key] for key in more if key != "busy_until"}
        with suppress(OSError):  # a full disk ends no request
            write_private(self.folder / FOLDER / STATUS, json.dumps(told))


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what the worker of a site's folder wrote last; None if there was none."""
    try:
        return record(folder / FOLDER / STATUS, pid=int, starts=int, requests=int, at=float)
    except (OSError, ValueError):
        return None


def workers_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what workers wrote last, by site.

    Args:
        folder: Folder of a site, of its kit, or of a deployment on one machine.
    """
    places = {folder.name: folder}
    if (folder / "site.json").is_file():
        places = {record(folder / "site.json", site=str)["site"]: folder / "state"}
    elif (folder / "sites").is_dir():
        places = {place.name: place for place in sorted((folder / "sites").iterdir())}
    found = {site: read_status(place) for site, place in places.items()}
    return {site: status for site, status in found.items() if status is not None}


def main() -> None:
    """Run the worker of a site; end at once if it has one already and none is waited for."""
    parser = argparse.ArgumentParser(prog="python -m fedscaffold.deploy.worker")
    parser.add_argument("folder", type=Path, help="folder of the site")
    parser.add_argument("--kept", action="store_true", help="wait while there is another worker")
    parser.add_argument("--until", type=int, help="end with this process")
    parser.add_argument("--held", help=argparse.SUPPRESS)  # descriptors of a worker started anew
    asked = parser.parse_args()
    os.umask(0o077)
    with open_place(asked.folder) as place:
        if asked.held:
            lock, number = map(int, asked.held.split(","))
            listener = socket.socket(fileno=number)
            for fd in (lock, number):
                os.set_inheritable(fd, False)
        else:
            lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=place)
            try:  # not inherited by what an app forks
                fcntl.lockf(lock, fcntl.LOCK_EX | (0 if asked.kept else fcntl.LOCK_NB))
            except BlockingIOError:
                return
            listener = listen(place)
        if Worker(asked.folder, asked.until).run(listener):
            _start_anew(lock, listener)


def _start_anew(lock: int, listener: socket.socket) -> None:
    """Replace this process by a new one that has the same lock and socket."""
    words = [word for word in sys.argv[1:] if not word.startswith("--held")]
    for fd in (lock, listener.fileno()):
        os.set_inheritable(fd, True)
    words += [f"--held={lock},{listener.fileno()}"]
    os.execv(sys.executable, [sys.executable, *WORKER, *words])


if __name__ == "__main__":
    main()

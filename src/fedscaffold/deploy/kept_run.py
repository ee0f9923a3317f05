"""Keeps a run going: starts its server app, and again whenever that dies without an outcome.

The server app runs below Flower's executor. It ends when the link is lost, when the executor ends,
or with an error; none of these is an outcome. A new one resumes from the last commit.

`python -m fedscaffold.deploy.kept_run HOME PACKAGE COMMAND ...` starts the server app by a command,
and exits when the run has ended: with 0, or with 3 if it stopped before its last round. A server
app that is at work with another package, of a site more, say, is ended first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedscaffold.deploy.app_files import digest_package
from fedscaffold.deploy.event_log import EventLog, stderr_log
from fedscaffold.deploy.processes import Kin, end_processes, is_alive, start_of
from fedscaffold.state.files import make_folder, write_private

__all__ = ["LOG", "STOPPED", "Backoff", "Gone", "KeptRun", "note_outcome", "note_serving"]

LOG, OUTCOME, SERVING, STATUS = "server.log", "outcome.json", "serving.json", "status.json"
STOPPED = 3  # exit code
MOST_DEATHS = 5  # in a row
LONGEST_PAUSE = 60.0  # seconds
HEALTHY = 300.0  # seconds of life after which earlier deaths do not count
STARTING = 240.0  # seconds that the server app may take to start


class Gone(RuntimeError):
    """A process died too often; the message names its log."""


class Backoff:
    """Pauses before a process is started again: 1, 2, 4 ... seconds; after a few deaths no more.

    >>> pauses = Backoff("link", Path("logs/link.log"))
    >>> [pauses.died(at) for at in (0.0, 1.0, 2.0)], pauses.died(1000.0)
    ([1.0, 2.0, 4.0], 1.0)
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self.row = self.deaths = 0
        self.last: float | None = None

    def died(self, at: float) -> float:
        """Count a death; return the pause in seconds.

        Raises:
            Gone: It was one too many.
        """
        self.deaths += 1
        self.row = self.row + 1 if self.last is not None and at - self.last < HEALTHY else 1
        self.last = at
        if self.row > MOST_DEATHS:
            raise Gone(f"the {self.name} died {self.row} times in a row; see {self.log}")
        return min(LONGEST_PAUSE, 2.0 ** (self.row - 1))


class KeptRun:
    """A run whose server app is started again when it dies.

    Args:
        home: Folder of the server.
        submit: Starts the server app; raises RuntimeError if that fails.
        log: Where deaths are told.
        app: Digest of the app that is submitted; "" for any.
    """

    def __init__(
        self, home: Path, submit: Callable[[], object], log: EventLog, app: str = ""
    ) -> None:
        self.home, self.submit, self.log, self.app = home, submit, log, app
        self.backoff = Backoff("server app", home / LOG)
        self.old: dict[str, Any] | None = None
        """The server app before the one that was submitted."""
        self.since = 0.0
        self.due: float | None = None
        """When to submit again."""
        self.round = -1

    def start(self) -> None:
        """Start the server app, unless one is at work with the same app.

        Raises:
            RuntimeError: It could not be started.
        """
        (self.home / OUTCOME).unlink(missing_ok=True)
        serving = _read(self.home / SERVING)
        if serving is not None and _serves(serving):
            if self.app in ("", serving.get("app")):
                self.since = time.monotonic()
                return
            self.log("server app ends, as the app is another", pid=serving["pid"])
            with suppress(ProcessLookupError):
                os.kill(serving["pid"], signal.SIGTERM)
            end_processes([Kin(serving["pid"], serving.get("started", ""))])
        self.old, self.since = serving, time.monotonic()
        self.submit()

    def look(self, ready: bool = True) -> dict[str, Any] | None:
        """Return the outcome; None while there is none.

        Args:
            ready: Whether a server app could be started now.

        Raises:
            Gone: The server app died too often, without a round in between.
        """
        serving = _read(self.home / SERVING)
        alive = serving is not None and _serves(serving)
        if (outcome := _read(self.home / OUTCOME)) is not None:  # read last: it may just have ended
            return outcome
        now = time.monotonic()
        if self.due is not None:
            if ready and now >= self.due:
                self._submit_again(serving)
        elif serving == self.old:
            if now - self.since > STARTING:
                self._died("did not start")
        elif not alive:
            self._died("died")
        return None

    def _submit_again(self, serving: dict[str, Any] | None) -> None:
        self.old, self.due, self.since = serving, None, time.monotonic()
        try:
            self.submit()
        except RuntimeError as error:
            self._died(f"could not be started: {error}")

    def _died(self, how: str) -> None:
        """Count a death, and put the next start off."""
        done = int((_read(self.home / STATUS) or {}).get("round", -1))
        if done > self.round:  # there was a round in between
            self.round, self.backoff.row = done, 0
        now = time.monotonic()
        pause = self.backoff.died(now)
        self.log("server app " + how, again_in=pause)
        self.due = now + pause


def note_serving(home: Path, app: str = "") -> None:
    """Note that this process is the server app, and the digest of its app."""
    pid = os.getpid()
    told = {"pid": pid, "started": start_of(pid), "at": time.time(), "app": app}
    write_private(home / SERVING, json.dumps(told))


def _serves(serving: dict[str, Any]) -> bool:
    """Return whether a server app is at work."""
    return is_alive(serving["pid"], serving.get("started", ""))


def note_outcome(home: Path, outcome: dict[str, Any]) -> None:
    """Write the outcome of a run, after which no server app is started again."""
    write_private(home / OUTCOME, json.dumps(outcome))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def main() -> None:
    """Keep a run going until it has an outcome."""
    home, package, command = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    log = stderr_log("run")

    def submit() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-300:].strip())

    make_folder(home, private=True)
    run = KeptRun(home, submit, log, digest_package(package))
    try:
        run.start()
        while (outcome := run.look()) is None:
            time.sleep(1.0)
    except Gone as gone:
        outcome = {"error": str(gone)}
    except RuntimeError as error:  # the link may be starting
        log("server app could not be started", why=error)
        sys.exit(1)
    log("run ended", **{key: outcome[key] for key in ("error", "rounds") if key in outcome})
    sys.exit(STOPPED if "error" in outcome else 0)


if __name__ == "__main__":
    main()

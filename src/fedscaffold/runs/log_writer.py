"""Write `rounds.jsonl`, the log of a run's rounds (format: `fedscaffold.runs.round_log`)."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.parsing import plain
from fedscaffold.runs.round_log import (
    FORMAT,
    NAME,
    STOP,
    RoundLog,
    count_agreeing_rounds,
    format_column,
    format_rounds,
)
from fedscaffold.runs.run_folder import remove_study
from fedscaffold.runs.trackers import Tracker
from fedscaffold.simulation import Callback, Look, Run
from fedscaffold.state.platforms import BINARY, CLOSE, NO_LINKS

__all__ = ["LogWriter"]

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINKS | CLOSE | BINARY
MOST_NAMED = 1000  # clients of a round listed by index; above that only their number


class LogWriter(Callback):
    """Callback that appends a run's rounds to its log; used as a context manager.

    The rounds of each block are written at once, and passed on to the trackers. The run is asked to
    stop if the file `stop` exists beside the log.

    >>> import tempfile
    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1)
    >>> folder = Path(tempfile.mkdtemp())
    >>> with LogWriter(folder, {"clients": 4, "rounds": 3}) as log:
    ...     _ = fs.simulate(
    ...         fs.scaffold(), problem, rounds=3, local_steps=2, lr=0.1, callbacks=[log]
    ...     )
    >>> reader = RoundLog(folder)
    >>> reader.update(), reader.columns["round"].tolist(), reader.end["how"]
    (True, [1.0, 2.0, 3.0], 'finished')
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], trackers: Sequence[Tracker] = ()
    ) -> None:
        self.path, self.stop = folder / NAME, folder / STOP
        self.facts, self.trackers = facts, list(trackers)
        self.file: Any = None
        self.done, self.own_seconds, self.tracker_seconds = 0, 0.0, 0.0
        self.next_spent = 0  # round after which it is next written what clients have spent
        self.how: str | None = None

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.file is None:
            return
        how = self.how or "failed"
        if kind is not None:
            how = "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        with suppress(OSError):  # a full disk has already been reported
            self._write(
                [json.dumps({"event": "end", "at": time.time(), "after": self.done, "how": how})]
            )
            self.file.close()
        self._notify("end", how)

    def after(self, look: Look) -> bool:
        """Write the new rounds; return whether the run is asked to stop."""
        began = time.perf_counter()
        self._write_rounds(look, look.start, self._clock_fields(look))
        self._write_spent(look)
        self.done, self.how = look.round, look.outcome
        asked = self.stop.exists()
        if asked:
            self.stop.unlink(missing_ok=True)
        self.own_seconds += time.perf_counter() - began
        return asked

    def end(self, run: Run) -> None:
        """Note how the run ended."""
        self.how = run.outcome

    def begin(self, look: Look) -> None:
        """Open the log and write the rounds of the checkpoint that are missing from it."""
        began = time.perf_counter()
        self.stop.unlink(missing_ok=True)
        remove_study(self.path.parent)  # the results of fewer rounds, now that more are run
        done = len(look.columns["round"])
        before = RoundLog(self.path.parent)
        kept = before.update() and done > 0
        known = count_agreeing_rounds(before.columns, look.columns) if kept else 0
        if not kept:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # readers notice a new file
        self.file = os.fdopen(os.open(self.path, APPEND, 0o666), "ab")
        if self.file.tell() and not _ends_with_newline(self.path):
            self.file.write(b"\n")
        run = before.facts.get("run") if kept else None
        self.facts = {
            "event": "begin",
            "format": FORMAT,
            "run": run or secrets.token_hex(8),
            "at": time.time(),
            "host": platform.node(),
            "pid": os.getpid(),
            "after": known,
            **self.facts,
        }
        self._write([json.dumps(self.facts)])
        self._notify("begin", self.facts)
        self._write_rounds(look, known)
        self._write_spent(look)
        self.done, self.how = look.round, look.outcome
        self.own_seconds += time.perf_counter() - began

    def _write_rounds(self, look: Look, known: int, clock: dict[str, Any] | None = None) -> None:
        """Write a line for each round after the first `known`, the last with the clock."""
        columns = {name: column[known - look.start :] for name, column in look.columns.items()}
        heard = [self._heard_field(look, number) for number in columns["round"].tolist()]
        written = {name: format_column(column) for name, column in columns.items()}
        lines = format_rounds({**written, "heard": heard})
        if clock:
            lines[-1] = f"{lines[-1][:-1]}, {json.dumps(clock)[1:]}"
        self._write(lines)
        if self.trackers:
            self._notify("log", list(map(json.loads, lines)))

    def _write_spent(self, look: Look) -> None:
        """Write what each client has spent, if it is due: the accountant takes a moment for it."""
        if look.privacy is None or (look.round < self.next_spent and look.outcome is None):
            return
        self.next_spent = 2 * look.round
        told = {"event": "spent", "after": look.round, **look.privacy.facts()}
        self._write([json.dumps(plain(told))])

    def _clock_fields(self, look: Look) -> dict[str, Any]:
        seconds = look.seconds | {"record": self.own_seconds - self.tracker_seconds}
        if self.tracker_seconds:
            seconds["trackers"] = self.tracker_seconds
        seconds = {phase: round(spent, 6) for phase, spent in seconds.items()}
        explained = look.explained if math.isfinite(look.explained) else None
        return {"at": time.time(), "explained": explained, "seconds": seconds}

    def _heard_field(self, look: Look, number: int) -> list[int] | int:
        heard = look.cohort(number)
        if len(heard) > MOST_NAMED or len(heard) == self.facts["clients"]:
            return len(heard)
        named: list[int] = heard.tolist()
        return named

    def _write(self, lines: Sequence[str]) -> None:
        self.file.write("".join(f"{line}\n" for line in lines).encode())
        self.file.flush()

    def _notify(self, what: str, *said: Any) -> None:
        """Call a method of each tracker; drop one that fails, with a warning."""
        began = time.perf_counter()
        for tracker in tuple(self.trackers):
            try:
                getattr(tracker, what)(*said)
            except InputError:
                self.trackers.remove(tracker)
                raise
            except Exception as error:
                self.trackers.remove(tracker)
                warnings.warn(
                    f"{type(tracker).__name__} failed and is left out: {error}", stacklevel=2
                )
        self.tracker_seconds += time.perf_counter() - began if self.trackers else 0.0


def _ends_with_newline(path: Path) -> bool:
    """Return whether the last line of a file is complete."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"

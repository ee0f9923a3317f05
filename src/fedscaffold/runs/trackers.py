"""TensorBoard, Weights & Biases and Trackio loggers, fed from a run's log.

Each receives every round once, with the metrics' names and the round as step: `run --log` as rounds
end, `report DIR --log` for a finished run.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.runs.round_log import RoundLog

__all__ = ["Tracker", "check_trackers", "make_trackers", "replay"]

PROJECT = "fedscaffold"
INSTALL = {"tensorboard": "'fedscaffold[log]'", "trackio": "trackio", "wandb": "wandb"}
Line = dict[str, Any]


class Tracker(Protocol):
    """Receiver of a run's log lines."""

    def begin(self, facts: Line) -> None:
        """Start a session that continues after round `facts["after"]`."""

    def log(self, lines: Sequence[Line]) -> None:
        """Receive the log lines of finished rounds."""

    def end(self, how: str) -> None:
        """End the session."""


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the requested trackers, each once, if they are known and installed.

    >>> check_trackers(["tensorbord"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown tracker 'tensorbord' (did you mean 'tensorboard'?);
        known: tensorboard, ...
    """
    for name in names:
        checks.choice("tracker", name, INSTALL)
        found = importlib.util.find_spec(name)
        # a plain folder of that name, such as wandb's, is no package
        if found is None or found.origin is None:
            raise InputError(f"--log {name} needs the package {name}: pip install {INSTALL[name]}")
    return tuple(dict.fromkeys(names))


def make_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """Create the requested trackers for a run's folder."""
    kinds: dict[str, Callable[[Path], Tracker]] = {
        "tensorboard": TensorBoard,
        "trackio": Trackio,
        "wandb": Wandb,
    }
    return [kinds[name](folder) for name in check_trackers(names)]


def replay(folder: Path, names: Sequence[str]) -> int:
    """Send a logged run to trackers, from its first round; return the number of rounds."""
    trackers, log = make_trackers(names, folder), RoundLog(folder)
    if not log.update():
        raise InputError(f"{folder} has no rounds.jsonl: --log needs the log of a run")
    lines: list[Line] = [
        {
            name: value
            for name, value in zip(log.columns, values, strict=True)
            if not math.isnan(value)
        }
        for values in zip(*log.columns.values(), strict=True)
    ]
    lines = [line | {"round": number} for number, line in enumerate(lines, 1)]
    for tracker in trackers:
        tracker.begin(log.facts | {"after": 0})
        tracker.log(lines)
        tracker.end((log.end or {}).get("how", "failed"))
    return len(lines)


def numbers_of(line: Line) -> dict[str, float]:
    """Return the numbers of a log line: metrics, clients heard, and seconds by phase.

    >>> numbers_of({"round": 3, "loss": 0.5, "heard": [1, 4], "seconds": {"rounds": 2.0}})
    {'loss': 0.5, 'clients_heard': 2, 'seconds/rounds': 2.0}
    """
    plain = {
        key: v
        for key, v in line.items()
        if key not in ("round", "at") and isinstance(v, (int, float))
    }
    heard = line.get("heard")
    if heard is not None:
        plain.pop("heard", None)
        plain["clients_heard"] = heard if isinstance(heard, int) else len(heard)
    return plain | {f"seconds/{phase}": spent for phase, spent in line.get("seconds", {}).items()}


class TensorBoard:
    """Write event files to `tensorboard/` in the run's folder, for `tensorboard --logdir DIR`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"

    def begin(self, facts: Line) -> None:
        """Open an event file; earlier events of rounds that are run again are superseded."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(self.folder))
        self._add(facts["after"] + 1, time.time(), session_log=SessionLog(status=SessionLog.START))

    def log(self, lines: Sequence[Line]) -> None:
        """Write one event for each round."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        at = lines[-1].get("at", time.time()) if lines else 0.0
        for line in lines:
            told = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in numbers_of(line).items()
            ]
            self._add(line["round"], at, summary=Summary(value=told))
        self.writer.flush()

    def end(self, how: str) -> None:
        """Close the event file."""
        self.writer.close()

    def _add(self, step: int, at: float, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=at, step=step, **what))


class Wandb:
    """Log to Weights & Biases, continuing the same run on resume.

    WANDB_MODE=offline keeps it on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Line) -> None:
        """Start or continue the run."""
        with _startup_errors("wandb"):
            import wandb

            self.run = wandb.init(
                project=PROJECT,
                name=self.folder.name,
                id=facts.get("run"),
                resume="allow",
                dir=str(self.folder),
                config=facts,
            )

    def log(self, lines: Sequence[Line]) -> None:
        """Log one step for each round."""
        for line in lines:
            self.run.log(numbers_of(line), step=line["round"])

    def end(self, how: str) -> None:
        """Finish the run."""
        self.run.finish(exit_code=int(how == "failed"))


class Trackio:
    """Log to Trackio, which stores runs in the user's cache folder, for `trackio show`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Line) -> None:
        """Start or continue the run."""
        with _startup_errors("trackio"):
            import trackio

            self.trackio = trackio
            name = f"{self.folder.name}-{facts.get('run', '')[:6]}"
            trackio.init(project=PROJECT, name=name, resume="allow", config=facts)

    def log(self, lines: Sequence[Line]) -> None:
        """Log one step for each round."""
        for line in lines:
            self.trackio.log(numbers_of(line), step=line["round"])

    def end(self, how: str) -> None:
        """Finish the run."""
        with redirect_stdout(sys.stderr):
            self.trackio.finish()


@contextmanager
def _startup_errors(name: str) -> Iterator[None]:
    """Convert errors of a tracker's start to an InputError; send its output to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        raise InputError(
            f"--log {name}: it did not start: {' '.join(str(error).split())}"
        ) from error

"""Trackers of others, fed with a run's record: TensorBoard's event files, Weights & Biases, Trackio.

Each is told of every round once, under the names of the metrics and the round as its step. `run --log` tells them as
rounds end, `report DIR --log` of a run that is over.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.report.record import Record

__all__ = ["Tracker", "replay", "tracked", "wanted"]

PROJECT = "fedscaffold"
INSTALL = {"tensorboard": "'fedscaffold[log]'", "trackio": "trackio", "wandb": "wandb"}
Line = dict[str, Any]


class Tracker(Protocol):
    """Somebody who is told of a run."""

    def begin(self, facts: Line) -> None:
        """A session begins, after the round `facts["after"]`."""

    def log(self, lines: Sequence[Line]) -> None:
        """Rounds are over: lines of the record."""

    def end(self, how: str) -> None:
        """The session ends."""


def wanted(names: Sequence[str]) -> tuple[str, ...]:
    """The trackers asked for, if they are known and installed.

    >>> wanted(["tensorbord"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown tracker 'tensorbord' (did you mean 'tensorboard'?); known: tensorboard, ...
    """
    for name in names:
        checks.choice("tracker", name, INSTALL)
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, as wandb leaves one, is no package
            raise InputError(f"--log {name} needs the package {name}: pip install {INSTALL[name]}")
    return tuple(dict.fromkeys(names))


def tracked(names: Sequence[str], folder: Path) -> list[Tracker]:
    """The trackers of a run's folder, not yet begun."""
    kinds: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}
    return [kinds[name](folder) for name in wanted(names)]


def replay(folder: Path, names: Sequence[str]) -> int:
    """Tell trackers of a run that has a record, from its first round; returns how many rounds these were."""
    trackers, record = tracked(names, folder), Record(folder)
    if not record.update():
        raise InputError(f"{folder} has no rounds.jsonl: --log needs the record of a run")
    rounds = zip(*record.columns.values(), strict=True)
    lines = [dict(zip(record.columns, values, strict=True)) for values in rounds]
    for tracker in trackers:
        tracker.begin(record.facts | {"after": 0})
        tracker.log(lines)
        tracker.end((record.end or {}).get("how", "failed"))
    return len(lines)


def values(line: Line) -> dict[str, float]:
    """The numbers of a round: its metrics, how many clients were heard, and the seconds by phase where they are said.

    >>> values({"round": 3, "loss": 0.5, "accuracy": None, "heard": [1, 4], "seconds": {"rounds": 2.0}})
    {'loss': 0.5, 'clients_heard': 2, 'seconds/rounds': 2.0}
    """
    plain = {key: v for key, v in line.items() if key not in ("round", "at") and isinstance(v, (int, float))}
    heard = line.get("heard")
    if heard is not None:
        plain.pop("heard", None)
        plain["clients_heard"] = heard if isinstance(heard, int) else len(heard)
    return plain | {f"seconds/{phase}": spent for phase, spent in line.get("seconds", {}).items()}


class TensorBoard:
    """Event files in the run's folder, under `tensorboard`: `tensorboard --logdir DIR` shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"

    def begin(self, facts: Line) -> None:
        """Open an event file; rounds of before that are run again no longer count."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(self.folder))
        self._add(facts["after"] + 1, time.time(), session_log=SessionLog(status=SessionLog.START))

    def log(self, lines: Sequence[Line]) -> None:
        """One event for each round."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        at = lines[-1].get("at", time.time()) if lines else 0.0
        for line in lines:
            told = [Summary.Value(tag=name, simple_value=value) for name, value in values(line).items()]
            self._add(line["round"], at, summary=Summary(value=told))
        self.writer.flush()

    def end(self, how: str) -> None:
        """Close the event file."""
        self.writer.close()

    def _add(self, step: int, at: float, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=at, step=step, **what))


class Wandb:
    """A run of Weights & Biases; a resumed one goes on with it. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Line) -> None:
        """Start it."""
        with _starting("wandb"):
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
        """One step for each round."""
        for line in lines:
            self.run.log(values(line), step=line["round"])

    def end(self, how: str) -> None:
        """Finish it."""
        self.run.finish(exit_code=int(how == "failed"))


class Trackio:
    """A run of Trackio, in the user's own cache folder: `trackio show` shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Line) -> None:
        """Start it."""
        with _starting("trackio"):
            import trackio

            self.trackio = trackio
            name = f"{self.folder.name}-{facts.get('run', '')[:6]}"
            trackio.init(project=PROJECT, name=name, resume="allow", config=facts)

    def log(self, lines: Sequence[Line]) -> None:
        """One step for each round."""
        for line in lines:
            self.trackio.log(values(line), step=line["round"])

    def end(self, how: str) -> None:
        """Finish it."""
        with redirect_stdout(sys.stderr):
            self.trackio.finish()


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """What a tracker says against starting, in one line; other words of it are not for stdout."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        raise InputError(f"--log {name}: it did not start: {' '.join(str(error).split())}") from error

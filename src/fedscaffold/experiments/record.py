"""Writing the record of a run, `rounds.jsonl`; what its lines mean is said in `fedscaffold.report.record`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import make
from fedscaffold.checks import InputError
from fedscaffold.experiments.config import Config, to_toml
from fedscaffold.experiments.federation import Built
from fedscaffold.metrics import target_of
from fedscaffold.report.record import FORMAT, NAME, STOP
from fedscaffold.report.record import Record as Reader
from fedscaffold.simulation import Stretch
from fedscaffold.simulation.asked import Request, cohort_size

__all__ = ["Listener", "Record", "facts_of"]

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_NAMED = 1000  # clients of a round that are named; of more only the number


class Listener(Protocol):
    """Somebody else who is told what the record is told: TensorBoard, Weights & Biases, Trackio."""

    def begin(self, facts: dict[str, Any]) -> None:
        """A session begins, after the round `facts["after"]`."""

    def log(self, lines: Sequence[dict[str, Any]]) -> None:
        """Rounds are over."""

    def end(self, how: str) -> None:
        """The session ends."""


def facts_of(config: Config, built: Built) -> dict[str, Any]:
    r"""What stands in the record's first line about a configuration.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("cohort.size = 0.2\nproblem.dataset = 'quadratic'\nproblem.clients = 15")
    >>> facts_of(config, build(config.problem))["cohort"]
    3
    """
    algorithm = make(config.algorithm.name, **config.algorithm.parameters)
    size = cohort_size(Request(algorithm, built.problem, config.rounds, cohort=config.cohort.size))
    return {
        "rounds": config.rounds,
        "clients": built.problem.num_clients,
        "cohort": size,
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "precision": config.precision,
        "target": None if config.stop_at is None else list(target_of(config.stop_at)),
        "problem": built.sentence,
        "config": hashlib.sha256(to_toml(config).encode()).hexdigest()[:16],
    }


class Record:
    """The record of a run as it is written: given to `simulate` as `follow`, inside a `with`.

    Each stretch of rounds is one write. Asks the run to end where somebody has put the file `stop` beside the record.

    >>> import tempfile
    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1)
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Record(folder, {"clients": 4, "rounds": 3}) as record:
    ...     _ = fs.simulate(fs.scaffold(), problem, rounds=3, local_steps=2, lr=0.1, cohort=2, follow=record)
    >>> reader = Reader(folder)
    >>> reader.update(), reader.columns["round"], reader.end["how"]
    (True, [1, 2, 3], 'finished')
    """

    def __init__(self, folder: Path, facts: dict[str, Any], listeners: Sequence[Listener] = ()) -> None:
        self.path, self.stop = folder / NAME, folder / STOP
        self.facts, self.listeners = facts, list(listeners)
        self.file: Any = None
        self.done, self.spent, self.told = 0, 0.0, 0.0
        self.how: str | None = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file is None:
            return
        how = self.how or "failed"
        if kind is not None:
            how = "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        with suppress(OSError):  # a full disk has been complained of already
            self._write([json.dumps({"event": "end", "at": time.time(), "after": self.done, "how": how})])
            self.file.close()
        self._tell("end", how)

    def __call__(self, stretch: Stretch) -> bool:
        """Write what is new; returns whether the run is asked to end."""
        began = time.perf_counter()
        if self.file is None:
            self._begin(stretch)
        else:
            self._rounds(stretch, stretch.start, self._clock(stretch))
        self.done, self.how = stretch.start + len(stretch.columns["round"]), stretch.outcome
        asked = self.stop.exists()
        if asked:
            self.stop.unlink(missing_ok=True)
        self.spent += time.perf_counter() - began
        return asked

    def _begin(self, stretch: Stretch) -> None:
        """Open the file; rounds of before that are in the checkpoint and not in the record are written now."""
        self.stop.unlink(missing_ok=True)
        done = len(stretch.columns["round"])
        before = Reader(self.path.parent)
        kept = before.update() and done > 0
        known = agreed(before.columns, stretch.columns) if kept else 0
        if not kept:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # readers see that it is another file
        self.file = os.fdopen(os.open(self.path, APPEND, 0o666), "ab")
        if self.file.tell() and not _ends_well(self.path):
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
        self._tell("begin", self.facts)
        self._rounds(stretch, known)

    def _rounds(self, stretch: Stretch, known: int, clock: dict[str, Any] | None = None) -> None:
        """A line for each round of the stretch after the first `known`, the last one with the clock."""
        columns = {name: column[known - stretch.start :] for name, column in stretch.columns.items()}
        heard = [self._heard(stretch, number) for number in columns["round"].tolist()]
        # as text at once: json takes several times as long, and rounds may be as short as a few dozen microseconds
        pattern = "{" + "".join(f'"{name}": %s, ' for name in columns) + '"heard": %s}'
        lines = [pattern % row for row in zip(*map(texts, columns.values()), heard, strict=True)]
        if clock:
            lines[-1] = f"{lines[-1][:-1]}, {json.dumps(clock)[1:]}"
        self._write(lines)
        if self.listeners:
            self._tell("log", list(map(json.loads, lines)))

    def _clock(self, stretch: Stretch) -> dict[str, Any]:
        own = {"record": self.spent - self.told} | ({"trackers": self.told} if self.told else {})
        seconds = {phase: round(spent, 6) for phase, spent in (stretch.seconds | own).items()}
        explained = stretch.explained if math.isfinite(stretch.explained) else None
        return {"at": time.time(), "explained": explained, "seconds": seconds}

    def _heard(self, stretch: Stretch, number: int) -> list[int] | int:
        heard = stretch.cohort(number)
        if len(heard) > MOST_NAMED or len(heard) == self.facts["clients"]:
            return len(heard)
        named: list[int] = heard.tolist()
        return named

    def _write(self, lines: Sequence[str]) -> None:
        self.file.write("".join(f"{line}\n" for line in lines).encode())
        self.file.flush()

    def _tell(self, what: str, *said: Any) -> None:
        """Tell the listeners; one that fails is left out from then on, as the run is worth more than its log."""
        began = time.perf_counter()
        for listener in tuple(self.listeners):
            try:
                getattr(listener, what)(*said)
            except InputError:
                self.listeners.remove(listener)
                raise
            except Exception as error:
                self.listeners.remove(listener)
                warnings.warn(f"{type(listener).__name__} failed and is left out: {error}", stacklevel=2)
        self.told += time.perf_counter() - began if self.listeners else 0.0


def texts(column: NDArray[Any]) -> list[str]:
    """A column as JSON writes it, where null stands for what is not finite.

    >>> texts(np.array([1.5, np.nan])), texts(np.array([3]))
    (['1.5', 'null'], ['3'])
    """
    written = list(map(repr, column.tolist()))
    if column.dtype.kind == "f":
        for k in np.flatnonzero(~np.isfinite(column)):
            written[k] = "null"
    return written


def agreed(recorded: Mapping[str, Sequence[Any]], columns: Mapping[str, NDArray[Any]]) -> int:
    """The rounds at the beginning of which a record says what the run's own columns say; the others are written anew.

    >>> agreed({"round": [1, 2], "loss": [0.5, 7.0]}, {"round": np.arange(1, 4), "loss": np.array([0.5, 0.4, 0.3])})
    1
    """
    known = min(len(recorded["round"]), len(columns["round"]))
    for name, column in columns.items():
        own = [None if text == "null" else json.loads(text) for text in texts(column[:known])]
        there = recorded.get(name, [])[:known]
        known = next((k for k, (a, b) in enumerate(zip(own, there, strict=False)) if a != b), min(known, len(there)))
    return known


def _ends_well(path: Path) -> bool:
    """Whether the last line of a file has its end."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"

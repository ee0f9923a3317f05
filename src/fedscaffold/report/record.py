"""The record of a run, `rounds.jsonl` in its folder: one line of JSON for each round, appended as rounds end.

    {"event": "begin", "format": 1, "run": "5f0c...", "at": 1763260000.0, "host": "here", "pid": 4711, "after": 0,
     "rounds": 100, "clients": 20, "cohort": 4, "algorithm": "scaffold", "seed": 0, "precision": "float32",
     "target": null, "problem": "digits, ...", "config": "8a1f03c2", "stoppable": true}
    {"round": 1, "loss": 2.1, "residual": 1e-09, "bytes_up": 10400, "bytes_down": 20800, "heard": [3, 7, 12, 19]}
    {"round": 2, ..., "at": 1763260001.5, "explained": 1e-12, "seconds": {"compile": 1.2, "draw": 0.01, "rounds": 0.4,
     "checkpoint": 0.02, "record": 0.001}}
    {"event": "end", "at": 1763260009.0, "after": 100, "how": "finished"}

begin       opens every session, a resumed one too, after the round of its checkpoint: lines of later rounds that stand
            before it no longer count, as these rounds are run again. `run` is the same in all sessions of a run.
a round     has the metrics of `Run.history`; null where there was nothing to measure. `heard` names the clients of the
            round, or is their number where they are everybody or more than 1000. The last round of a stretch
            also has the clock, what rounding explains of the residual so far (`explained`), and the seconds of this
            session by phase.
end         how: finished, target, diverged, stopped (by Ctrl-C, a signal or the page) or failed (an error).

A line may be torn by a crash: whoever reads skips what is not JSON, and a last line without its end is not read yet.
`stop` in the same folder asks the run to end after the rounds at work.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["ENDS", "FORMAT", "NAME", "STOP", "Record", "Tail", "alive", "is_count", "is_number", "sound"]

NAME = "rounds.jsonl"
STOP = "stop"
FORMAT = 1
ENDS = ("finished", "target", "diverged", "stopped", "failed")
HEAD = 400  # bytes by which a file is known
RECENT = 240  # rounds of which is kept who was heard
MOST_STAMPS = 4096
LARGEST = 2**62  # of whole numbers that are taken from a file
SUMMED = {"bytes_up", "bytes_down"}
OWN = {"heard", "at", "explained", "seconds"}  # of a round's line, what is no column

Line = dict[str, Any]


class Tail:
    r"""The lines of a growing file of JSON lines: `new` returns those added since the last call.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines.jsonl"
    >>> _ = path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    >>> Tail(path).new()
    (True, [{'a': 1}, {'a': 2}])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: bytes | None = None
        self.offset = 0

    def new(self) -> tuple[bool, list[Line]]:
        """Whether the file is another one than before, and its whole lines not yet returned."""
        try:
            with self.path.open("rb") as file:
                # by how it begins: the file system may give another file the same number
                same = self.head is not None and file.read(len(self.head)) == self.head
                fresh = not same or os.fstat(file.fileno()).st_size < self.offset
                if fresh:
                    self.head, self.offset = b"", 0
                file.seek(self.offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        if self.offset == 0:
            self.head = whole[:HEAD]
        self.offset += len(whole)
        return fresh, list(_parsed(whole))

    def rewind(self) -> None:
        """Begin with the first line again."""
        self.head = None


def _parsed(data: bytes) -> Iterator[Line]:
    for text in data.split(b"\n"):
        try:
            line = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def sound(line: Line) -> bool:
    """Whether a line of a record is what the record says lines are; others are passed over, as torn ones are.

    >>> sound({"round": 3, "loss": 0.5, "heard": [0, 2]}), sound({"round": "3"}), sound({"round": 3, "loss": [1]})
    (True, False, False)
    """
    event = line.get("event")
    if event == "begin":
        target = line.get("target")
        named = isinstance(target, list) and len(target) == 2 and isinstance(target[0], str) and is_number(target[1])
        counts = all(is_count(line.get(name, 0)) for name in ("after", "clients"))
        words = all(isinstance(line[name], (str, int, float, type(None))) for name in line if name != "target")
        precision = line.get("precision", "float32") in ("float32", "float64")
        planned = line.get("rounds") is None or is_count(line["rounds"])
        return counts and words and precision and planned and (named or target is None) and is_number(line.get("at", 0))
    if event == "end":
        return isinstance(line.get("how", ""), str)
    if event is not None or not is_count(line.get("round")):
        return False
    heard, seconds = line.get("heard"), line.get("seconds", {})
    known = heard is None or is_count(heard) or (isinstance(heard, list) and all(map(is_count, heard)))
    clock = isinstance(seconds, dict) and all(map(is_number, seconds.values())) and is_number(line.get("at", 0))
    rest = (value for name, value in line.items() if name not in ("heard", "seconds"))
    return known and clock and all(value is None or is_number(value) for value in rest)


def is_number(value: Any) -> bool:
    """Whether a value from a file is a finite number that any arithmetic can take.

    >>> is_number(0.5), is_number(True), is_number("1"), is_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Whether a value from a file is a whole number of at least 0.

    >>> is_count(3), is_count(3.0), is_count(-1)
    (True, False, False)
    """
    return isinstance(value, int) and is_number(value) and value >= 0


class Record:
    r"""What the record of a run says so far; `update` reads what was added.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> begin = '{"event": "begin", "after": 0, "clients": 3, "rounds": 9}'
    >>> _ = (folder / NAME).write_text(begin + '\n{"round": 1, "loss": 0.5, "heard": [0, 2]}\n')
    >>> record = Record(folder)
    >>> record.update(), record.columns, record.heard_at
    (True, {'round': [1], 'loss': [0.5]}, {0: 1, 2: 1})
    """

    def __init__(self, folder: Path) -> None:
        self.tail = Tail(folder / NAME)
        self.version = 0
        """Changes whenever something that was there before no longer is."""
        self._empty()

    def _empty(self) -> None:
        self.facts: dict[str, Any] = {}
        """The last `begin` line."""
        self.columns: dict[str, list[Any]] = {"round": []}
        self.heard: deque[list[int] | int | None] = deque(maxlen=RECENT)
        """Of the last rounds: the clients heard, or their number; None where that is not known."""
        self.heard_at: dict[int, int] | None = {}
        """The round in which each client was last heard, after `all_at`; None where only numbers are known."""
        self.all_at = 0
        """The last round in which everybody was heard."""
        self.stamps: deque[tuple[int, float]] = deque(maxlen=MOST_STAMPS)
        """(round, clock) at the ends of this session's last stretches."""
        self.sums: dict[str, int] = {}
        """Bytes in all, by column."""
        self.worst: float | None = None
        """The largest residual."""
        self.explained: float | None = None
        self.seconds: dict[str, float] = {}
        """This session's, by phase."""
        self.earlier: dict[str, float] = {}
        """Earlier sessions', by phase."""
        self.end: Line | None = None

    @property
    def phases(self) -> list[str]:
        """Where time went, in any session."""
        return list(self.seconds | self.earlier)

    @property
    def round(self) -> int:
        """Rounds recorded."""
        return len(self.columns["round"])

    def update(self) -> bool:
        """Read what was added; returns whether there is a record at all."""
        fresh, lines = self._new()
        again = any(line.get("event") == "begin" and line.get("after", 0) < self.round for line in lines)
        if again and not fresh:  # a crash lost rounds that had been recorded: read all anew, without them
            self.tail.rewind()
            fresh, lines = self._new()
        if fresh:
            self.version += 1
            self._empty()
        for line in valid(lines):
            self._take(line)
        return bool(self.facts)

    def _new(self) -> tuple[bool, list[Line]]:
        fresh, lines = self.tail.new()
        return fresh, list(filter(sound, lines))

    def _take(self, line: Line) -> None:
        event = line.get("event")
        if event == "begin":
            for phase, spent in self.seconds.items():
                self.earlier[phase] = self.earlier.get(phase, 0.0) + spent
            self.facts, self.seconds, self.end = line, {}, None
            self.stamps.clear()
            if "at" in line:
                self.stamps.append((line.get("after", 0), line["at"]))
        elif event == "end":
            self.end = line
        elif line.get("round") == self.round + 1:
            self._round(line)

    def _round(self, line: Line) -> None:
        for name in line:
            if name not in OWN and name not in self.columns:
                self.columns[name] = [None] * self.round
        number = self.round + 1
        for name, column in self.columns.items():
            column.append(line.get(name))
        for name in SUMMED & line.keys():
            self.sums[name] = self.sums.get(name, 0) + (line[name] or 0)
        residual = line.get("residual")
        if residual is not None:
            self.worst = residual if self.worst is None else max(self.worst, residual)
        heard: Any = line.get("heard")
        self.heard.append(heard)
        if isinstance(heard, int) and heard == self.facts.get("clients"):
            self.all_at, self.heard_at = number, {}
        elif isinstance(heard, int) or heard is None:
            self.heard_at = None
        elif self.heard_at is not None:
            self.heard_at.update(dict.fromkeys(heard, number))
        if "at" in line:
            self.stamps.append((number, line["at"]))
            self.explained = line.get("explained", self.explained)
            self.seconds = line.get("seconds", self.seconds)


def valid(lines: list[Line]) -> list[Line]:
    """The lines without rounds that a later session runs again.

    >>> valid([{"round": 1}, {"round": 2}, {"event": "begin", "after": 1}, {"round": 2, "loss": 3}])
    [{'round': 1}, {'event': 'begin', 'after': 1}, {'round': 2, 'loss': 3}]
    """
    kept: list[Line] = []
    ceiling = float("inf")
    for line in reversed(lines):
        if line.get("event") == "begin":
            ceiling = min(ceiling, line.get("after", 0))
        elif line.get("event") is None and line.get("round", 0) > ceiling:
            continue
        kept.append(line)
    return kept[::-1]


def alive(pid: Any) -> bool:
    """Whether a process of this machine is there.

    >>> alive(os.getpid()), alive(None)
    (True, False)
    """
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True

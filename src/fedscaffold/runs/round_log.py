"""Read `rounds.jsonl`, the log of a run: one line of JSON for each round, appended as rounds end.

    {"event": "begin", "format": 2, "run": "5f0c...", "at": 1763260000.0, "host": "here",
     "pid": 4711, "after": 0, "rounds": 100, "clients": 20, "cohort": 4, "algorithm": "scaffold",
     "seed": 0, "precision": "float32", "target": null, "problem": "digits, ...",
     "config": "8a1f03c2", "stoppable": true}
    {"round": 1, "loss": 2.1, "residual": 1e-09, "bytes_up": 10400, "bytes_down": 20800,
     "heard": [3, 7, 12, 19]}
    {"round": 2, ..., "at": 1763260001.5, "explained": 1e-12, "seconds": {"compile": 1.2,
     "draw": 0.01, "rounds": 0.4, "checkpoint": 0.02, "record": 0.001}}
    {"event": "spent", "after": 2, "unit": "record", "epsilon": 0.81, "by_client": [0.81, 0.6], ...}
    {"event": "end", "at": 1763260009.0, "after": 100, "how": "finished"}

begin       opens every session, also a resumed one, after the round of its checkpoint (`after`).
            Earlier lines of rounds after that are superseded, because these rounds are run again.
            `run` is the same in all sessions.
a round     has the metrics of `Run.history`; null where nothing was measured. `heard` lists the
            clients of the round, or is their number where they are all clients or more than 1000.
            The last round of a stretch also has the clock, the residual that rounding explains so
            far (`explained`), and the seconds of this session by phase.
spent       of a private run: what it has spent by client, as in `run.json` (`Spent.facts`); at the
            beginning, then after twice as many rounds each time, and at the end.
end         how: finished, target, diverged, budget (no round left within `stop_at_epsilon`),
            stopped (by Ctrl-C, a signal or the page) or failed (an error).

A crash may leave an incomplete line: readers skip what is not JSON, and a last line without a
newline is not read yet. A file `stop` in the same folder asks the run to stop after the current
rounds.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError

__all__ = [
    "ENDS",
    "FORMAT",
    "NAME",
    "STOP",
    "OtherFormatError",
    "RoundLog",
    "Tail",
    "count_agreeing_rounds",
    "format_column",
    "format_rounds",
    "is_count",
    "is_number",
    "is_spent",
    "is_text",
    "is_valid_line",
    "process_exists",
    "write_log",
]

NAME = "rounds.jsonl"
STOP = "stop"
FORMAT = 2  # of the whole folder, see run_folder.py; the lines of format 1 are the same
ENDS = ("finished", "target", "diverged", "budget", "stopped", "failed")
HEAD = 400  # leading bytes that identify a file
RECENT = 240  # rounds for which the clients heard are kept
MOST_STAMPS = 4096
LARGEST = 2**62  # bound of integers accepted from a file
# phases that count as time of rounds; compilation happens once
TIMED = "draw", "rounds", "checkpoint"
NOT_COLUMNS = {"heard", "at", "explained", "seconds"}  # keys of a round's line that are not metrics

Line = dict[str, Any]


class OtherFormatError(InputError):
    """A folder or log written by another version of fedscaffold."""


class Tail:
    r"""Reader of a growing file of JSON lines.

    `read_new` returns the lines added since the last call.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines.jsonl"
    >>> _ = path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    >>> Tail(path).read_new()
    (True, [{'a': 1}, {'a': 2}])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: bytes | None = None
        self.offset = 0

    def read_new(self) -> tuple[bool, list[Line]]:
        """Return whether the file was replaced, and the complete lines not yet returned."""
        try:
            with self.path.open("rb") as file:
                # identified by its first bytes, because inode numbers are reused
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
        return fresh, list(_parse_lines(whole))

    def rewind(self) -> None:
        """Start again at the first line."""
        self.head = None


def _parse_lines(data: bytes) -> Iterator[Line]:
    for text in data.split(b"\n"):
        try:
            line = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def is_valid_line(line: Line) -> bool:
    """Return whether a log line has the documented fields and types; invalid lines are skipped.

    >>> is_valid_line({"round": 3, "loss": 0.5, "heard": [0, 2]})
    True
    >>> is_valid_line({"round": "3"}), is_valid_line({"round": 3, "loss": [1]})
    (False, False)
    """
    event = line.get("event")
    if event == "begin":
        target = line.get("target")
        named = (
            isinstance(target, list)
            and len(target) == 2
            and isinstance(target[0], str)
            and is_number(target[1])
        )
        counts = all(is_count(line.get(name, 0)) for name in ("after", "clients", "format"))
        words = all(
            isinstance(line[name], (str, int, float, type(None)))
            for name in line
            if name != "target"
        )
        precision = line.get("precision", "float32") in ("float32", "float64")
        planned = line.get("rounds") is None or is_count(line["rounds"])
        return (
            counts
            and words
            and precision
            and planned
            and (named or target is None)
            and is_number(line.get("at", 0))
        )
    if event == "end":
        return isinstance(line.get("how", ""), str)
    if event == "spent":
        return is_count(line.get("after")) and is_spent(line)
    if event is not None or not is_count(line.get("round")):
        return False
    heard, seconds = line.get("heard"), line.get("seconds", {})
    known = (
        heard is None or is_count(heard) or (isinstance(heard, list) and all(map(is_count, heard)))
    )
    clock = (
        isinstance(seconds, dict)
        and all(map(is_number, seconds.values()))
        and is_number(line.get("at", 0))
    )
    rest = (value for name, value in line.items() if name not in ("heard", "seconds"))
    return known and clock and all(value is None or is_number(value) for value in rest)


def is_spent(value: Any) -> bool:
    """Return whether a value read from a file says what a private run spent (`Spent.facts`).

    An epsilon that has no bound is null.

    >>> is_spent({"unit": "client", "delta": 1e-5, "epsilon": None}), is_spent({"unit": 3})
    (True, False)
    """
    if not isinstance(value, dict) or value.get("unit") not in ("record", "client"):
        return False
    numbers = (value.get(name) for name in ("epsilon", "before", "stop_at_epsilon"))
    lists = (value.get(name) for name in ("by_client", "quantiles"))
    return (
        is_number(value.get("delta"))
        and all(one is None or is_number(one) for one in numbers)
        and all(
            some is None
            or (isinstance(some, list) and all(one is None or is_number(one) for one in some))
            for some in lists
        )
    )


def is_number(value: Any) -> bool:
    """Return whether a value read from a file is a finite number of ordinary size.

    >>> is_number(0.5), is_number(True), is_number("1"), is_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Return whether a value read from a file is an integer of at least 0.

    >>> is_count(3), is_count(3.0), is_count(-1)
    (True, False, False)
    """
    return isinstance(value, int) and is_number(value) and value >= 0


def is_text(value: Any) -> bool:
    """Return whether a value read from a file is a string."""
    return isinstance(value, str)


class RoundLog:
    r"""The rounds of a run as logged so far; `update` reads what was added since the last call.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> begin = '{"event": "begin", "after": 0, "clients": 3, "rounds": 9}'
    >>> _ = (folder / NAME).write_text(begin + '\n{"round": 1, "loss": 0.5, "heard": [0, 2]}\n')
    >>> log = RoundLog(folder)
    >>> log.update(), log.columns["loss"].tolist(), log.heard_at
    (True, [0.5], {0: 1, 2: 1})
    """

    def __init__(self, folder: Path) -> None:
        self.tail = Tail(folder / NAME)
        self._reset()

    def _reset(self) -> None:
        self.facts: dict[str, Any] = {}
        """The last `begin` line."""
        self.columns: dict[str, array[float]] = {"round": array("d")}
        """By round, in double precision; NaN where nothing was measured."""
        self.heard: deque[list[int] | int | None] = deque(maxlen=RECENT)
        """Clients heard in each of the last rounds, or their number; None where unknown."""
        self.heard_at: dict[int, int] | None = {}
        """The round in which each client was last heard, after `all_at`.

        It is None where only numbers are known.
        """
        self.all_at = 0
        """The last round in which all clients were heard."""
        self.stamps: deque[tuple[int, float]] = deque(maxlen=MOST_STAMPS)
        """(round, clock) at the ends of this session's last blocks of rounds."""
        self.explained: float | None = None
        self.seconds: dict[str, float] = {}
        """Seconds of this session by phase."""
        self.earlier: dict[str, float] = {}
        """Seconds of earlier sessions by phase."""
        self.clock: list[tuple[float, float]] = [(0.0, 0.0)]
        """(round, seconds spent in rounds up to its end), over all sessions."""
        self.spent: Line | None = None
        """What a private run has spent, as it was last written."""
        self.end: Line | None = None

    @property
    def phases(self) -> list[str]:
        """Names of the phases that were timed in any session."""
        return list(self.seconds | self.earlier)

    @property
    def round(self) -> int:
        """Number of rounds recorded."""
        return len(self.columns["round"])

    def update(self) -> bool:
        """Read what was added; return whether a session has begun."""
        fresh, lines = self._read_new()
        again = any(
            line.get("event") == "begin" and line.get("after", 0) < self.round for line in lines
        )
        if again and not fresh:  # a crash lost recorded rounds: read everything again, without them
            self.tail.rewind()
            fresh, lines = self._read_new()
        if fresh:
            self._reset()
        for line in drop_superseded(lines):
            self._apply(line)
        return bool(self.facts)

    def _read_new(self) -> tuple[bool, list[Line]]:
        fresh, lines = self.tail.read_new()
        for line in lines:
            self._refuse_format(line)
        return fresh, list(filter(is_valid_line, lines))

    def _refuse_format(self, line: Line) -> None:
        """Refuse a session of another format, which `is_valid_line` would skip."""
        number = line.get("format", FORMAT)
        if line.get("event") == "begin" and is_count(number) and number not in (1, FORMAT):
            self.tail.rewind()  # the next update refuses it again
            raise OtherFormatError(
                f"{self.tail.path} has format {number}, and this fedscaffold reads formats up to "
                f"{FORMAT}: read it with the version that wrote it, or a later one"
            )

    def _apply(self, line: Line) -> None:
        event = line.get("event")
        if event == "begin":
            for phase, spent in self.seconds.items():
                self.earlier[phase] = self.earlier.get(phase, 0.0) + spent
            self.facts, self.seconds, self.end = line, {}, None
            self.stamps.clear()
            if "at" in line:
                self.stamps.append((line.get("after", 0), line["at"]))
        elif event == "spent":
            self.spent = line
        elif event == "end":
            self.end = line
        elif line.get("round") == self.round + 1:
            self._apply_round(line)

    def _apply_round(self, line: Line) -> None:
        for name in line:
            if name not in NOT_COLUMNS and name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * self.round
        number = self.round + 1
        for name, column in self.columns.items():
            value = line.get(name)
            column.append(math.nan if value is None else value)
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
            spent = self.earlier, self.seconds
            self.clock.append(
                (number, sum(held.get(phase, 0.0) for phase in TIMED for held in spent))
            )


def drop_superseded(lines: list[Line]) -> list[Line]:
    """Return the lines without the rounds that a later session runs again.

    >>> drop_superseded([{"round": 1}, {"round": 2}, {"event": "begin", "after": 1}, {"round": 2}])
    [{'round': 1}, {'event': 'begin', 'after': 1}, {'round': 2}]
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


def process_exists(pid: Any) -> bool:
    """Return whether a process of this machine exists.

    >>> process_exists(os.getpid()), process_exists(None)
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


def format_column(column: NDArray[Any]) -> list[str]:
    """Return a column as JSON literals, with null for values that are not finite.

    >>> format_column(np.array([1.5, np.nan])), format_column(np.array([3]))
    (['1.5', 'null'], ['3'])
    """
    written = list(map(repr, column.tolist()))
    if column.dtype.kind == "f":
        for k in np.flatnonzero(~np.isfinite(column)):
            written[k] = "null"
    return written


def format_rounds(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return one line of JSON for each round, from columns of JSON literals.

    Formatting as text is several times faster than `json.dumps`; rounds may take ten microseconds.

    >>> format_rounds({"round": ["1", "2"], "loss": ["0.5", "null"]})
    ['{"round": 1, "loss": 0.5}', '{"round": 2, "loss": null}']
    """
    keys = (json.dumps(name).replace("%", "%%") for name in columns)
    pattern = "{" + ", ".join(f"{key}: %s" for key in keys) + "}"
    return [pattern % row for row in zip(*columns.values(), strict=True)]


def count_agreeing_rounds(
    recorded: Mapping[str, Sequence[Any]], columns: Mapping[str, NDArray[Any]]
) -> int:
    """Return the number of leading rounds for which a log agrees with the run's own columns.

    >>> logged = {"round": [1, 2], "loss": [0.5, 7.0]}
    >>> count_agreeing_rounds(logged, {"round": np.arange(1, 4), "loss": np.array([0.5, 0.4, 0.3])})
    1
    """
    known = min(len(recorded["round"]), len(columns["round"]))
    for name, column in columns.items():
        own = column[:known].astype(np.float64)
        own[~np.isfinite(own)] = np.nan
        there = np.asarray(recorded.get(name, ()), np.float64)[:known]
        known = min(known, len(there))
        differ = np.flatnonzero((own[:known] != there) & ~(np.isnan(own[:known]) & np.isnan(there)))
        known = int(differ[0]) if len(differ) else known
    return known


def write_log(
    folder: Path, facts: Mapping[str, Any], columns: Mapping[str, NDArray[Any]], how: str
) -> None:
    """Write the complete log of a finished run that kept none; its cohorts are not known."""
    begin = {"event": "begin", "format": FORMAT, "after": 0, **facts}
    rounds = format_rounds({name: format_column(column) for name, column in columns.items()})
    end = {"event": "end", "after": len(rounds), "how": how}
    lines = [json.dumps(begin), *rounds, json.dumps(end)]
    (folder / NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

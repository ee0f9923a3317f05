"""Tamper-evident audit log: JSON lines chained by hashes.

    {"at": "2026-01-31T12:00:00+00:00", "event": "refused", "site": "north", ..., "previous":
    "9f2c", "hash": "41ab"}

`hash` is the SHA-256 of the line without it, `previous` the hash of the line before. Changing,
removing or inserting a line breaks the chain. Truncation does not, so every commit of the server
stores the log's `Head` (number of lines and last hash), which `read_verified` compares. Lines are
flushed to disk before the commit that includes them, so a crash can leave the log longer than its
head, never shorter.

A last line torn by a crash is moved to a separate file. A log that fails verification when the
server starts is moved aside as evidence, and the new log starts with an event `broken`.

The log also tells which sites missed rounds, and why (`Audit.missed`), also after a restart.

Logging never stops the server: values that JSON cannot represent are written as text, and lines
that cannot be written are retried with the next event.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import abbreviate
from fedscaffold.state.files import make_folder, write_all, write_private

__all__ = ["Audit", "Head", "Missed", "read_verified"]

START = "0" * 64
MOST_TEXT = 2000
MOST_KEPT = 1000  # unwritten lines kept for a retry
DEEPEST = 4
LATE = "no reply before the deadline"
IN_VAIN = "its reply was good, but the round missed its quorum"


class Head(NamedTuple):
    """The end of a log: number of lines and hash of the last one."""

    lines: int = 0
    hash: str = START


class Missed(NamedTuple):
    """The last round that a site missed, and how many it has missed."""

    round: int
    kind: str
    """train, evaluate or resync."""
    cause: str
    times: int

    def sentence(self, site: str, never: bool) -> str:
        """Return a one-line description.

        >>> Missed(4, "train", "its node is not online", 2).sentence("bee", never=False)
        'bee missed 2 rounds, the last was round 4: its node is not online'
        >>> Missed(1, "train", "its node is not online", 0).sentence("bee", never=True)
        'bee never counted: its node is not online'
        """
        where = {"evaluate": "the evaluation after round", "resync": "the resync before round"}.get(
            self.kind, "round"
        )
        last = f"{where} {self.round}: {self.cause}"
        if never and self.times:
            return f"{site} never counted, at last not in {last}"
        if never:
            return f"{site} never counted: {self.cause}"
        return (
            f"{site} missed {self.times} round{'s' if self.times != 1 else ''}, the last was {last}"
        )


class Audit:
    """An open audit log.

    Attributes:
        head: The end of the log.
        missed: By site that missed rounds: the last one, and how many.
        round: Number of the last training round that was committed; 0 for none.
        trouble: Why the last lines could not be written; "" if they were.
        broken: Why an existing log failed verification; "" if it did not.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
    >>> log = Audit(path)
    >>> log.write("joined", site="north")
    >>> log.write("committed", round=1, kind="train", missing=["south"])
    >>> [event["event"] for event in read_verified(path, log.head)]
    ['joined', 'committed']
    >>> Audit(path).missed["south"].cause
    'no reply before the deadline'
    """

    def __init__(self, path: Path, expected: Head | None = None) -> None:
        self.path = path
        self.waiting: list[dict[str, Any]] = []
        self.missed: dict[str, Missed] = {}
        self.round, self.trouble, self.broken = 0, "", ""
        make_folder(path.parent, private=True)
        if path.is_symlink():  # `write` refuses links, so all lines would be lost with the process
            raise InputError(
                f"{path} is a symbolic link, and the log is not written through links; put the "
                "file there"
            )
        torn = _repair_torn_line(path)
        try:
            events = read_verified(path, expected)
        except InputError as error:
            self.broken, events = str(error), []
            aside = _move_aside(path)
        for event in events:
            self._note_missed(event)
        self.head = Head(len(events), events[-1]["hash"]) if events else Head()
        self.size = path.stat().st_size if path.exists() else 0
        if self.broken:
            self.write("broken", note=self.broken, kept=aside)
        if torn:
            self.write(
                "torn", bytes=torn, note="the last line was cut off by a crash and set apart"
            )

    def write(self, event: str, **facts: Any) -> None:
        """Append an event durably; if writing fails, retry with the next event."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.waiting.append({"at": now, "event": event, **facts})
        self._note_missed(self.waiting[-1])
        if len(self.waiting) > MOST_KEPT:
            gone = self.waiting.pop(-2).get("lines", 1) + self.waiting.pop(-1).get("lines", 1)
            self.waiting.append({"at": now, "event": "lost", "lines": gone})
        head, lines = self.head, []
        for entry in self.waiting:
            whole = {key: _to_json(value) for key, value in entry.items()} | {"previous": head.hash}
            head = Head(head.lines + 1, _hash_entry(whole))
            lines.append(json.dumps({**whole, "hash": head.hash}, allow_nan=False) + "\n")
        data = "".join(lines).encode("ascii")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
            try:
                os.fchmod(fd, 0o600)
                write_all(fd, data)
                if event != "opened":  # further events of the round sync it
                    os.fsync(fd)
            except OSError:
                os.ftruncate(fd, min(self.size, os.fstat(fd).st_size))  # drop a partial line
                raise
            finally:
                os.close(fd)
        except OSError as error:
            self.trouble = f"{self.path.name} cannot be written: {error.strerror or error}"
            return
        self.head, self.size, self.waiting, self.trouble = head, self.size + len(data), [], ""

    def _note_missed(self, event: Mapping[str, Any]) -> None:
        """Update `missed` and `round` with one event."""
        what, number, kind = event["event"], event.get("round"), event.get("kind", "train")
        if number is None:
            return
        # refused at registration: no round missed yet
        if what == "refused" and event["site"] not in self.missed:
            self.missed[event["site"]] = Missed(number, "train", str(event["reason"]), 0)
        if what not in ("committed", "abandoned", "evaluated", "waiting"):
            return
        if (what, kind) == ("committed", "train"):
            self.round = number
        causes = dict.fromkeys(event.get("heard", ()), IN_VAIN) if what == "abandoned" else {}
        causes |= (
            event.get("absent", {})
            | dict.fromkeys(event.get("missing", ()), LATE)
            | event.get("failed", {})
        )
        for site, cause in causes.items():
            before = self.missed.get(site, Missed(0, kind, "", 0))
            # a retry of the same round
            again = before.times > 0 and (before.round, before.kind) == (number, kind)
            self.missed[site] = Missed(number, kind, str(cause), before.times + (not again))


def read_verified(path: Path, expected: Head | None = None) -> list[dict[str, Any]]:
    """Return all events of a log after verifying it.

    Args:
        path: The log; a missing file is an empty log.
        expected: The head that the log must contain.

    Raises:
        InputError: If the chain is broken, or does not contain the expected head.
    """
    data = path.read_bytes() if path.exists() else b""
    events: list[dict[str, Any]] = []
    head = START
    lines = data.decode("utf-8", errors="replace").split("\n")[:-1]  # ignores a torn last line
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            claimed = entry.pop("hash")
            whole = entry["previous"] == head and _hash_entry(entry) == claimed
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise InputError(
                f"{path}: line {number} was changed, or one before it is missing; keep it as "
                "evidence"
            )
        head = claimed
        events.append({**entry, "hash": claimed})
    _check_head(path, events, expected or Head())
    return events


def _check_head(path: Path, events: list[dict[str, Any]], expected: Head) -> None:
    """Raise if the log does not contain the expected head."""
    lines, last = expected
    if len(events) < lines:
        left = f"{len(events)} lines are left" if path.exists() else "the file is gone"
        raise InputError(f"{path}: {lines} lines were committed and {left}; its end was cut off")
    if lines and events[lines - 1]["hash"] != last:
        raise InputError(
            f"{path}: line {lines} is not the one that was committed; the log was replaced"
        )


def _to_json(value: Any, depth: int = 0) -> Any:
    """Convert a value to one that JSON reproduces exactly."""
    if isinstance(value, str):
        return str(value[:MOST_TEXT])
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if (
        value is None
        or isinstance(value, bool)
        or (type(value) is int and -(2**63) <= value < 2**63)
    ):
        return value
    if depth < DEEPEST and isinstance(value, dict):
        return {
            str(_to_json(key, DEEPEST)): _to_json(inner, depth + 1) for key, inner in value.items()
        }
    if depth < DEEPEST and isinstance(value, (list, tuple)):
        return [_to_json(inner, depth + 1) for inner in value]
    return str(value) if isinstance(value, float) else abbreviate(value)


def _hash_entry(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _repair_torn_line(path: Path) -> int:
    """Move a torn last line to a separate file; return its length in bytes."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    torn = data[keep:]
    if torn:
        write_private(path.with_name(path.name + ".torn"), torn)
        with path.open("r+b") as file:
            file.truncate(keep)
    return len(torn)


def _move_aside(path: Path) -> str:
    """Rename a broken log; return its new name, "" if there is no log."""
    if not path.exists():
        return ""
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside.name

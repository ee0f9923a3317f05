"""The audit log: JSON lines, each with the fingerprint of the line before, so that none can be changed unseen.

    {"at": "2026-01-31T12:00:00+00:00", "event": "refused", "site": "north", ..., "previous": "9f2c", "hash": "41ab"}

`hash` is the SHA-256 of the line without it. Changing, removing or inserting a line breaks the chain from there on. The
chain alone cannot tell that its end was cut off, or all of it: every commit of the server holds the log's `Head`, its
number of lines and last hash, and `verified` compares. Lines are on the disk before the commit that counts them, so a
crash leaves a log that is longer than its head says, never a shorter one.

A crash may leave the last line torn; it is set apart in a file beside, and the log goes on. A log that is broken when
the server starts is set apart as well, as evidence: the new one begins with an event `broken` that says what was found.

No event ends a server: what JSON cannot say is written as text, and lines that the disk does not take are kept until
it does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import shown
from fedscaffold.state.files import make_folder, write_all, write_private

__all__ = ["Audit", "Head", "verified"]

START = "0" * 64
MOST_TEXT = 2000
MOST_KEPT = 1000  # lines that wait for a disk that takes them
DEEPEST = 4


class Head(NamedTuple):
    """Where a log ends: its number of lines and the hash of the last."""

    lines: int = 0
    hash: str = START


class Audit:
    """An open log; `write` appends one event, durably.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
    >>> log = Audit(path)
    >>> log.write("joined", site="north")
    >>> [event["event"] for event in verified(path, log.head)]
    ['joined']
    """

    def __init__(
        self, path: Path, expected: Head | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.path, self.now = path, now
        self.waiting: list[dict[str, Any]] = []
        self.trouble = ""
        """Why the last lines are not on the disk; "" where they are."""
        self.broken = ""
        """What was wrong with the log that was found; "" for nothing."""
        make_folder(path.parent, private=True)
        torn = _mend(path)
        try:
            events = verified(path, expected)
        except InputError as error:
            self.broken, events = str(error), []
            aside = _set_apart(path)
        self.head = Head(len(events), events[-1]["hash"]) if events else Head()
        self.size = path.stat().st_size if path.exists() else 0
        if self.broken:
            self.write("broken", note=self.broken, kept=aside)
        if torn:
            self.write("torn", bytes=torn, note="the last line was cut off by a crash and set apart")

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and bring it to the disk; if that fails, it is tried again with the next."""
        self.waiting.append({"at": self.now().isoformat(timespec="milliseconds"), "event": event, **facts})
        if len(self.waiting) > MOST_KEPT:
            gone = self.waiting.pop(-2).get("lines", 1) + self.waiting.pop(-1).get("lines", 1)
            self.waiting.append({"at": self.now().isoformat(timespec="milliseconds"), "event": "lost", "lines": gone})
        head, lines = self.head, []
        for entry in self.waiting:
            whole = {key: _plain(value) for key, value in entry.items()} | {"previous": head.hash}
            head = Head(head.lines + 1, _hash(whole))
            lines.append(json.dumps({**whole, "hash": head.hash}, allow_nan=False) + "\n")
        data = "".join(lines).encode("ascii")
        try:
            self._append(data, sync=event != "opened")  # the round it opens leaves more lines
        except OSError as error:
            self.trouble = f"{self.path.name} cannot be written: {error.strerror or error}"
            return
        self.head, self.size, self.waiting, self.trouble = head, self.size + len(data), [], ""

    def _append(self, data: bytes, sync: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        except OSError:
            os.ftruncate(fd, min(self.size, os.fstat(fd).st_size))  # no half line
            raise
        finally:
            os.close(fd)


def verified(path: Path, expected: Head | None = None) -> list[dict[str, Any]]:
    """All events of a log, if its chain is whole and holds the `expected` head; else an InputError says where not."""
    data = path.read_bytes() if path.exists() else b""
    events: list[dict[str, Any]] = []
    head = START
    for number, line in enumerate(data.decode("utf-8", errors="replace").split("\n")[:-1], 1):  # torn ones are none
        try:
            entry = json.loads(line)
            claimed = entry.pop("hash")
            whole = entry["previous"] == head and _hash(entry) == claimed
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise InputError(f"{path}: line {number} was changed, or one before it is missing; keep it as evidence")
        head = claimed
        events.append({**entry, "hash": claimed})
    _at(path, events, expected or Head())
    return events


def _at(path: Path, events: list[dict[str, Any]], expected: Head) -> None:
    """Refuse a log whose line of the expected number is not the expected one."""
    lines, last = expected
    if len(events) < lines:
        left = f"{len(events)} lines are left" if path.exists() else "the file is gone"
        raise InputError(f"{path}: {lines} lines were committed and {left}; its end was cut off")
    if lines and events[lines - 1]["hash"] != last:
        raise InputError(f"{path}: line {lines} is not the one that was committed; the log was replaced")


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can say it, and back the same."""
    if isinstance(value, str):
        return str(value[:MOST_TEXT])
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if value is None or isinstance(value, bool) or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    if depth < DEEPEST and isinstance(value, dict):
        return {str(_plain(key, DEEPEST)): _plain(inner, depth + 1) for key, inner in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple)):
        return [_plain(inner, depth + 1) for inner in value]
    return str(value) if isinstance(value, float) else shown(value)


def _hash(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _mend(path: Path) -> int:
    """Set a torn last line apart; returns its length in bytes."""
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


def _set_apart(path: Path) -> str:
    """Keep a broken log under another name; returns it, "" where there is no log."""
    if not path.exists():
        return ""
    number = 1
    while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside.name

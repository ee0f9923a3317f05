"""The audit log: JSON lines, each with the fingerprint of the line before, so that none can be changed unseen.

    {"at": "2026-01-31T12:00:00+00:00", "event": "refused", "site": "north", ..., "previous": "9f2c", "hash": "41ab"}

`hash` is the SHA-256 of the line without it. A crash may leave the last line torn; it is then moved to a file beside,
and the log goes on. Changing, removing or inserting a line breaks the chain from there on: `verified` says where.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError

__all__ = ["Audit", "verified"]

START = "0" * 64


class Audit:
    """An open log; `write` appends one event, durably.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
    >>> log = Audit(path)
    >>> log.write("joined", site="north")
    >>> [event["event"] for event in verified(path)]
    ['joined']
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path, self.now = path, now
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _mend(path)
        events = verified(path)
        self.head = events[-1]["hash"] if events else START
        if torn:
            self.write("torn", bytes=torn, note="the last line was cut off by a crash and set apart")

    def write(self, event: str, **facts: Any) -> None:
        """Append an event and bring it to the disk."""
        entry = {"at": self.now().isoformat(timespec="milliseconds"), "event": event, **facts, "previous": self.head}
        self.head = _hash(entry)
        line = json.dumps({**entry, "hash": self.head}, ensure_ascii=True, allow_nan=False) + "\n"
        with self.path.open("a", encoding="ascii") as file:
            file.write(line)
            file.flush()
            if event != "opened":  # the round it opens leaves more lines
                os.fsync(file.fileno())


def verified(path: Path) -> list[dict[str, Any]]:
    """All events of a log, if its chain is whole; otherwise an InputError that names the line."""
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    head = START
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            entry = json.loads(line)
            claimed = entry.pop("hash")
            whole = entry["previous"] == head and _hash(entry) == claimed
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise InputError(f"{path}: line {number} was changed, or one before it is missing; keep it as evidence")
        head = claimed
        events.append({**entry, "hash": claimed})
    return events


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
        path.with_name(path.name + ".torn").write_bytes(torn)
        with path.open("r+b") as file:
            file.truncate(keep)
    return len(torn)

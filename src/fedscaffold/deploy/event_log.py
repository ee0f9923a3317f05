"""Logs of servers, workers and their keepers: one line an event, as text or as JSON.

With `FEDSCAFFOLD_LOG=json` in the environment, or `deploy local --log-json`, a line is a JSON
object with the keys `at`, `source`, `event` and the event's facts.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "EventLog", "file_log", "format_event", "stderr_log"]

FORMAT = "FEDSCAFFOLD_LOG"
"""Variable of the environment: "json", or text by default."""
MOST = 16 << 20  # bytes of a log file; then it is renamed, and the one before removed


def format_event(source: str, event: str, facts: dict[str, Any]) -> str:
    """Return the line of an event.

    >>> format_event("server", "round committed", {"round": 3}).split(" ", 1)[1].rstrip()
    'server: round committed, round 3'
    """
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    if os.environ.get(FORMAT) == "json":
        row = {"at": at, "source": source, "event": event, **facts}
        return json.dumps(row, default=str) + "\n"
    told = "".join(f", {name} {value}" for name, value in facts.items() if value not in ("", None))
    return f"{at} {source}: {event}{told}\n"


class EventLog:
    """A log.

    Args:
        source: Who writes it.
        write: Called with each line.
    """

    def __init__(self, source: str, write: Callable[[str], object]) -> None:
        self.source, self.write = source, write

    def __call__(self, event: str, **facts: Any) -> None:
        """Write an event; a log that cannot be written ends nothing."""
        try:
            self.write(format_event(self.source, event, facts))
        except OSError:
            return

    def crash(self, error: BaseException) -> None:
        """Write an error with its traceback."""
        self("crashed", error=type(error).__name__, text="".join(traceback.format_exception(error)))


def stderr_log(source: str) -> EventLog:
    """Return a log to the error stream of this process."""

    def write(line: str) -> None:
        sys.stderr.write(line)
        sys.stderr.flush()

    return EventLog(source, write)


def file_log(source: str, path: Path) -> EventLog:
    """Return a log to a file that only its owner can read."""

    def write(line: str) -> None:
        if path.is_file() and path.stat().st_size > MOST:
            path.replace(path.with_name(f"{path.name}.1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, line.encode(errors="backslashreplace"))
        finally:
            os.close(fd)

    return EventLog(source, write)

"""Read the folder of a deployed server: audit log, metrics and status.

A site's outcome in a round is one of: heard; late, if the round was closed without its reply;
refused, if its reply failed validation; failed, if the site or the connection broke down; otherwise
it was not asked. A round that missed its quorum is tried again, and only the last try is shown.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.privacy.accounting import round_up
from fedscaffold.runs.round_log import (
    RECENT,
    Tail,
    is_count,
    is_number,
    is_text,
    process_exists,
)
from fedscaffold.runs.run_folder import RunRecord, Study
from fedscaffold.runs.view_model import Progress, Source

__all__ = ["Deployed", "find_server_folder"]

AUDIT, METRICS, STATUS = "audit.jsonl", "metrics.jsonl", "status.json"
# keys of a metrics line that are not metrics
NOT_COLUMNS = {"epsilon_by_site", "heard", "round", "stale", "unmeasured"}
HOST = ("opened_at", "disk_free", "certificate_days")
MOST_REFUSALS = 5  # kinds of refusals to list


def find_server_folder(folder: Path) -> Path | None:
    """Return the deployed server's folder at or below `folder`, or None.

    >>> find_server_folder(Path("nowhere")) is None
    True
    """
    return next((place for place in (folder, folder / "server") if (place / AUDIT).is_file()), None)


class Deployed:
    """Source that follows the folder of a deployed server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audit, self.metrics = Tail(folder / AUDIT), Tail(folder / METRICS)
        self._reset()

    def _reset(self) -> None:
        self.run = self.algorithm = ""
        self.members: dict[str, int] = {}
        self.refused: set[str] = set()
        self.marks: deque[dict[str, list[str]]] = deque(maxlen=RECENT)
        self.round = self.tries = 0
        self.heard_at: dict[str, int] = {}
        self.opened: float | None = None
        self.closed: float | None = None
        self.seconds = {"in rounds": 0.0, "between rounds": 0.0}
        self.stamps: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.rows: dict[int, dict[str, Any]] = {}
        self.refusals: Counter[str] = Counter()

    def poll(self) -> Source:
        """Read what was added since the last call and return the present state."""
        fresh, events = self.audit.read_new()
        again, lines = self.metrics.read_new()
        if fresh or again:  # a new deployment replaced the files: read both from the start
            self.audit.rewind()
            self.metrics.rewind()
            events, lines = self.audit.read_new()[1], self.metrics.read_new()[1]
            self._reset()
        for event in filter(is_valid_event, events):
            self._apply(event)
        for line in filter(is_valid_metrics, lines):
            self.rows[line["round"]] = line
        status = _read_status(self.folder)
        sites = sorted({*self.members, *status.get("sites", {}), *status.get("absent", [])})
        progress = Progress(
            kind="deployment",
            phase=self._phase(status),
            round=self.round,
            rounds=status.get("rounds"),
            first=self.round - len(self.marks) + 1,
            marks=tuple(self.marks),
            clients=tuple(sites),
            heard_at=self.heard_at,
            stamps=tuple(self.stamps),
            seconds=self.seconds,
            notes=self._notes(status),
        )
        return Source(str(self.folder), self._study(status), progress)

    def _study(self, status: dict[str, Any]) -> Study:
        columns = self._columns()
        explained = status.get("explained")
        run = RunRecord(
            algorithm=self.algorithm or "server",
            seed=0,
            columns=columns,
            explained=math.nan if explained is None else explained,
            digest=self.run,
        )
        precision = status.get("precision", "float32")
        return Study(problem="A deployed server.", runs=[run], precision=precision)

    def _apply(self, event: dict[str, Any]) -> None:
        what, site, at = event.get("event"), event.get("site"), _timestamp(event.get("at"))
        if what == "started":
            self.run, self.algorithm = event.get("run", ""), event.get("algorithm", "")
            self.opened = self.closed = None
            # rounds are lost if the server crashed before a commit or an older state was restored
            back = max(0, self.round - event.get("round", self.round))
            self.round -= back
            for _ in range(min(back, len(self.marks))):
                self.marks.pop()
            self.stamps.clear()
            self.stamps.append((self.round, at))
        elif what in ("joined", "changed") and site is not None:
            self.members[site] = event.get("records", 0)
        elif what == "left":
            self.members.pop(str(site), None)
            self.heard_at.pop(str(site), None)
        elif what == "refused" and site is not None:
            self.refused.add(site)
            self.refusals[f"{site}: {event.get('reason', '')}"] += 1
        elif what == "opened":
            self.refused.clear()
            self.seconds["between rounds"] += (
                0.0 if self.closed is None else max(0.0, at - self.closed)
            )
            self.opened = at
            self.tries = event.get("attempt", 0) + 1
        elif what in ("committed", "abandoned", "evaluated"):
            self.seconds["in rounds"] += 0.0 if self.opened is None else max(0.0, at - self.opened)
            self.opened, self.closed = None, at
            if what == "committed" and event.get("kind") == "train":
                self._apply_round(event, at)

    def _apply_round(self, event: dict[str, Any], at: float) -> None:
        failed = list(event.get("failed", {}))
        marks = {
            "heard": event.get("heard", []),
            "late": event.get("missing", []),
            "refused": [site for site in failed if site in self.refused],
            "failed": [site for site in failed if site not in self.refused],
        }
        self.round = event.get("round", self.round + 1)
        self.marks.append({word: sites for word, sites in marks.items() if sites})
        self.heard_at |= dict.fromkeys(marks["heard"], self.round)
        self.stamps.append((self.round, at))

    def _columns(self) -> dict[str, NDArray[Any]]:
        """Return the metrics by round, of the model that was sent out in that round."""
        rounds = sorted(self.rows)
        names = {
            name: None for number in rounds for name in self.rows[number] if name not in NOT_COLUMNS
        }
        columns = {"round": np.array(rounds, np.int64)}
        for name in names:
            held = [self.rows[number].get(name) for number in rounds]
            columns[name] = np.array(
                [math.nan if value is None else value for value in held], np.float64
            )
        return columns

    def _phase(self, status: dict[str, Any]) -> str:
        phase = status.get("phase", "")
        if phase in ("finished", "stopped"):
            return str(phase)
        if not status:
            return "starting"
        return "running" if process_exists(status.get("pid")) else "silent"

    def _notes(self, status: dict[str, Any]) -> tuple[str, ...]:
        waits, absent = status.get("waiting_for", []), status.get("absent", [])
        running = self._phase(status) == "running"
        opened = status.get("opened_at")
        since = "" if opened is None else f", since {_clock_of(opened)}"
        said = [f"The round waits for {', '.join(waits)}{since}."] if waits and running else []
        failed = status.get("failed", {}) if running else {}
        said += [f"{site} is not in this round: {why}." for site, why in failed.items()]
        missed, unmeasured = status.get("missed", {}), status.get("unmeasured", {})
        unsaid = [site for site in absent if site not in missed]
        said += [f"Absent: {', '.join(unsaid)}."] if unsaid else []
        said += [f"{site['sentence']}." for site in missed.values()]
        said += [
            f"{name} is without {', '.join(sites)}: no finite number there."
            for name, sites in unmeasured.items()
        ]
        spent = {
            site: one["epsilon"]
            for site, one in status.get("sites", {}).items()
            if isinstance(one, dict) and is_number(one.get("epsilon"))
        }
        said += [
            f"{site} has spent epsilon {round_up(value)}, by its own word."
            for site, value in sorted(spent.items())
        ]
        said += [f"Warning: {warning}." for warning in status.get("warnings", [])]
        said += _host_notes(status)
        said += [f"Try {self.tries} of this round."] if running and self.tries > 1 else []
        known = {f"{site}: {one['cause']}" for site, one in missed.items()}
        often = [item for item in self.refusals.most_common(MOST_REFUSALS) if item[0] not in known]
        return (
            *said,
            *(
                f"Refused {line}" + (f" ({times} times)" if times > 1 else "")
                for line, times in often
            ),
        )


def is_valid_event(event: dict[str, Any]) -> bool:
    """Return whether an event of the audit log has values of the right types.

    Invalid events are skipped.

    >>> is_valid_event({"event": "joined", "site": "north", "records": 3})
    True
    >>> is_valid_event({"event": "joined", "site": []})
    False
    """
    words = all(
        is_text(event.get(name, "")) for name in ("event", "run", "algorithm", "kind", "reason")
    )
    counts = all(is_count(event.get(name, 0)) for name in ("round", "attempt", "records"))
    lists = all(_are_texts(event.get(name, [])) for name in ("heard", "missing"))
    failed = event.get("failed", {})
    site = event.get("site")
    return (
        words and counts and lists and isinstance(failed, dict) and (site is None or is_text(site))
    )


def is_valid_metrics(line: dict[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl has a round and numeric values.

    >>> [is_valid_metrics({"round": 3, "loss": loss}) for loss in (0.5, None, "low")]
    [True, True, False]
    """
    numbers = (value for name, value in line.items() if name not in NOT_COLUMNS)
    return is_count(line.get("round")) and all(
        value is None or is_number(value) for value in numbers
    )


def is_valid_status(status: Any) -> bool:
    """Return whether status.json has values of the right types.

    >>> [is_valid_status(one) for one in ({"absent": ["north"]}, {"absent": 3}, [])]
    [True, False, False]
    """
    if not isinstance(status, dict):
        return False
    missed, unmeasured, sites = (status.get(name, {}) for name in ("missed", "unmeasured", "sites"))
    failed = status.get("failed", {})
    tables = all(isinstance(table, dict) for table in (missed, unmeasured, sites, failed))
    return (
        tables
        and is_text(status.get("phase", ""))
        and all(_are_texts(status.get(name, [])) for name in ("waiting_for", "absent", "warnings"))
        and all(
            status.get(name) is None or is_count(status[name])
            for name in ("round", "rounds", "attempt")
        )
        and all(
            status.get(name) is None or is_number(status[name])
            for name in ("explained", "residual", "at", *HOST)
        )
        and status.get("precision", "float32") in ("float32", "float64")
        and all(map(_are_texts, unmeasured.values()))
        and all(map(is_text, failed.values()))
        and all(
            isinstance(one, dict) and {"sentence", "cause"} <= one.keys() for one in missed.values()
        )
    )


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_text, values))


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if is_valid_status(found) else {}


def _host_notes(status: dict[str, Any]) -> list[str]:
    """Say what the server's machine has left."""
    free, days = status.get("disk_free"), status.get("certificate_days")
    said = [] if free is None else [f"Disk: {free / 2**30:.1f} GiB free."]
    return said + ([] if days is None else [f"The certificate lasts {days:.0f} more days."])


def _clock_of(seconds: float) -> str:
    """Return a time for display; "?" for one that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "?"


def _timestamp(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0

"""A deployed server as the live page shows it, from its folder: the audit log, the metrics and the status.

What became of a site in a round: heard; late, if the round was closed without its reply; refused, if the gate did not
let its reply in; failed, if it or the way to it broke down; else it was not asked. Rounds that missed their quorum are
tried again, and only the last try is shown.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from datetime import datetime
from pathlib import Path
from typing import Any

from fedscaffold.report.picture import Picture
from fedscaffold.report.record import RECENT, Tail, alive, is_count, is_number

__all__ = ["Deployed", "home"]

AUDIT, METRICS, STATUS = "audit.jsonl", "metrics.jsonl", "status.json"
LINKED = {"heard", "round", "unmeasured"}  # of a line of metrics, what is no column
MOST_REFUSALS = 5  # kinds of refusals that are listed
ENDS = {"finished": "finished", "stopped": "stopped"}


def home(folder: Path) -> Path | None:
    """The folder of a deployed server in `folder`; None where there is none.

    >>> home(Path("nowhere")) is None
    True
    """
    return next((place for place in (folder, folder / "server") if (place / AUDIT).is_file()), None)


class Deployed:
    """A deployed server by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audit, self.metrics = Tail(folder / AUDIT), Tail(folder / METRICS)
        self.version = 0
        self._empty()

    def _empty(self) -> None:
        self.version += 1
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

    def picture(self) -> Picture:
        """The picture now."""
        fresh, events = self.audit.new()
        again, lines = self.metrics.new()
        if fresh or again:  # somebody started anew here: both from the beginning
            self.audit.rewind()
            self.metrics.rewind()
            events, lines = self.audit.new()[1], self.metrics.new()[1]
            self._empty()
        for event in filter(sound_event, events):
            self._take(event)
        for line in filter(sound_metrics, lines):
            self.version += line["round"] in self.rows  # measured again: what was shown no longer counts
            self.rows[line["round"]] = line
        status = _status(self.folder)
        sites = sorted({*self.members, *status.get("sites", {}), *status.get("absent", [])})
        return Picture(
            "deployment",
            self._phase(status),
            {"folder": str(self.folder), "algorithm": self.algorithm, "clients": len(sites), "run": self.run},
            f"{self.run}-{self.version}",
            status.get("rounds"),
            self.round,
            self._columns(),
            first=self.round - len(self.marks) + 1,
            marks=tuple(self.marks),
            clients=tuple(sites),
            heard_at=self.heard_at,
            stamps=tuple(self.stamps),
            seconds=self.seconds,
            precision=status.get("precision", "float32"),
            explained=status.get("explained"),
            worst=max(
                (r for r in (line.get("residual") for line in self.rows.values()) if r is not None), default=None
            ),
            notes=self._notes(status),
        )

    def _take(self, event: dict[str, Any]) -> None:
        what, site, at = event.get("event"), event.get("site"), _clock(event.get("at"))
        if what == "started":
            self.run, self.algorithm = event.get("run", ""), event.get("algorithm", "")
            self.opened = self.closed = None
            # a crash came before its commit, or the state was put back
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
            self.seconds["between rounds"] += 0.0 if self.closed is None else max(0.0, at - self.closed)
            self.opened = at
            self.tries = event.get("attempt", 0) + 1
        elif what in ("committed", "abandoned", "evaluated"):
            self.seconds["in rounds"] += 0.0 if self.opened is None else max(0.0, at - self.opened)
            self.opened, self.closed = None, at
            if what == "committed" and event.get("kind") == "train":
                self._round(event, at)

    def _round(self, event: dict[str, Any], at: float) -> None:
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

    def _columns(self) -> dict[str, list[Any]]:
        """Metrics by round; a line is of the model that was sent out, before the round after it."""
        rounds = sorted(self.rows)
        names = {name: None for number in rounds for name in self.rows[number] if name not in LINKED}
        return {"round": rounds} | {name: [self.rows[number].get(name) for number in rounds] for name in names}

    def _phase(self, status: dict[str, Any]) -> str:
        phase = status.get("phase", "")
        if phase in ENDS:
            return ENDS[phase]
        if not status:
            return "starting"
        return "running" if alive(status.get("pid")) else "silent"

    def _notes(self, status: dict[str, Any]) -> tuple[str, ...]:
        waits, absent = status.get("waiting_for", []), status.get("absent", [])
        running = self._phase(status) == "running"
        said = [f"The round waits for {', '.join(waits)}."] if waits and running else []
        missed, unmeasured = status.get("missed", {}), status.get("unmeasured", {})
        unsaid = [site for site in absent if site not in missed]
        said += [f"Absent: {', '.join(unsaid)}."] if unsaid else []
        said += [f"{site['sentence']}." for site in missed.values()]
        said += [f"{name} is without {', '.join(sites)}: no finite number there." for name, sites in unmeasured.items()]
        said += [f"Try {self.tries} of this round."] if running and self.tries > 1 else []
        known = {f"{site}: {one['cause']}" for site, one in missed.items()}
        often = [item for item in self.refusals.most_common(MOST_REFUSALS) if item[0] not in known]
        return (*said, *(f"Refused {line}" + (f" ({times} times)" if times > 1 else "") for line, times in often))


def sound_event(event: dict[str, Any]) -> bool:
    """Whether an event of the audit log has values of the right types; others are passed over, as torn lines are.

    >>> sound_event({"event": "joined", "site": "north", "records": 3}), sound_event({"event": "joined", "site": []})
    (True, False)
    """
    words = all(_is_text(event.get(name, "")) for name in ("event", "run", "algorithm", "kind", "reason"))
    counts = all(is_count(event.get(name, 0)) for name in ("round", "attempt", "records"))
    lists = all(_are_texts(event.get(name, [])) for name in ("heard", "missing"))
    failed = event.get("failed", {})
    site = event.get("site")
    return words and counts and lists and isinstance(failed, dict) and (site is None or _is_text(site))


def sound_metrics(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has a round and numbers.

    >>> sound_metrics({"round": 3, "loss": 0.5, "heard": ["north"]}), sound_metrics({"round": 3, "loss": "low"})
    (True, False)
    """
    numbers = (value for name, value in line.items() if name not in LINKED)
    return is_count(line.get("round")) and all(value is None or is_number(value) for value in numbers)


def sound_status(status: Any) -> bool:
    """Whether status.json has values of the right types.

    >>> sound_status({"phase": "waiting", "absent": ["north"]}), sound_status({"absent": 3}), sound_status([])
    (True, False, False)
    """
    if not isinstance(status, dict):
        return False
    missed, unmeasured, sites = (status.get(name, {}) for name in ("missed", "unmeasured", "sites"))
    tables = all(isinstance(table, dict) for table in (missed, unmeasured, sites))
    return (
        tables
        and _is_text(status.get("phase", ""))
        and all(_are_texts(status.get(name, [])) for name in ("waiting_for", "absent"))
        and all(status.get(name) is None or is_count(status[name]) for name in ("round", "rounds", "attempt"))
        and all(status.get(name) is None or is_number(status[name]) for name in ("explained", "residual", "at"))
        and status.get("precision", "float32") in ("float32", "float64")
        and all(map(_are_texts, unmeasured.values()))
        and all(isinstance(one, dict) and {"sentence", "cause"} <= one.keys() for one in missed.values())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_text, values))


def _status(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if sound_status(found) else {}


def _clock(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0

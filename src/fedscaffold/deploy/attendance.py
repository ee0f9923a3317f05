"""Record of the sites that missed rounds and why, rebuilt from the audit log after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Attendance", "Missed", "format_causes"]

LATE = "no reply before the deadline"
IN_VAIN = "its reply was good, but the round missed its quorum"
MOST_LISTED = 6


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
        where = {"evaluate": "the evaluation after round", "resync": "the resync before round"}.get(self.kind, "round")
        last = f"{where} {self.round}: {self.cause}"
        if never and self.times:
            return f"{site} never counted, at last not in {last}"
        if never:
            return f"{site} never counted: {self.cause}"
        return f"{site} missed {self.times} round{'s' if self.times != 1 else ''}, the last was {last}"


class Attendance:
    """Missed rounds by site, from the events of an audit log.

    >>> seen = Attendance([{"event": "committed", "round": 1, "kind": "train", "missing": ["bee"]}])
    >>> seen.missed["bee"].cause
    'no reply before the deadline'
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.missed: dict[str, Missed] = {}
        for event in events:
            self.take(event)

    def take(self, event: Mapping[str, Any]) -> None:
        """Update the record with one event."""
        what, number, kind = event["event"], event.get("round"), event.get("kind", "train")
        if what == "refused" and number is not None and event["site"] not in self.missed:
            self._note(
                event["site"], number, "train", event["reason"], 0
            )  # refused at registration: no round missed yet
        if what not in ("committed", "abandoned", "evaluated", "waiting") or number is None:
            return
        causes = dict.fromkeys(event.get("heard", ()), IN_VAIN) if what == "abandoned" else {}
        causes |= event.get("absent", {}) | dict.fromkeys(event.get("missing", ()), LATE) | event.get("failed", {})
        for site, cause in causes.items():
            self._note(site, number, kind, cause, 1)

    def _note(self, site: str, round: int, kind: str, cause: str, more: int) -> None:
        before = self.missed.get(site, Missed(0, kind, "", 0))
        again = before.times > 0 and (before.round, before.kind) == (round, kind)  # retries of one round count once
        self.missed[site] = Missed(round, kind, str(cause), before.times + (0 if again else more))


def format_causes(causes: Mapping[str, str]) -> str:
    """Format sites and causes in one line, grouped by cause.

    >>> format_causes({"ant": "not finite", "bee": "not finite", "cow": "late"})
    'ant, bee: not finite; cow: late'
    """
    groups: dict[str, list[str]] = {}
    for site, cause in causes.items():
        groups.setdefault(cause, []).append(site)
    lines = [f"{', '.join(sites)}: {cause}" for cause, sites in groups.items()]
    more = len(lines) - MOST_LISTED
    return "; ".join([*lines[:MOST_LISTED], *([f"and {more} more causes"] if more > 0 else [])])

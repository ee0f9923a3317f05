"""`conform`: the identities, run on our own SCAFFOLD or on somebody's adapter; and the faults of deployment."""

from __future__ import annotations

from typing import Any

from fedscaffold.conformance import conform, load_target, ours, table

__all__ = ["judged", "survived"]


def judged(target: str | None) -> tuple[dict[str, Any], list[str], int]:
    """Return the verdicts for programs and for people, and how many identities fail.

    >>> judged(None)[2]
    0
    """
    verdicts = conform(ours if target is None else load_target(target))
    outcomes = [verdict.outcome for verdict in verdicts]
    counts = {name: outcomes.count(name) for name in ("holds", "fails", "not offered")}
    answer = {"target": target or "fedscaffold", **counts, "verdicts": [verdict._asdict() for verdict in verdicts]}
    return answer, [table(verdicts)], counts["fails"]


def survived() -> tuple[dict[str, Any], list[str], int]:
    """Return the fault scorecard for programs and for people, and how many scenarios lose points."""
    from fedscaffold.deploy import faults

    scores = faults.scorecard()
    return faults.answer(scores), faults.lines(scores), sum(score.points < 2 for score in scores)

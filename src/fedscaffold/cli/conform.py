"""`conform`: the identities, run on our own SCAFFOLD or on somebody's adapter; and the faults of deployment."""

from __future__ import annotations

from typing import Any

from fedscaffold.conformance.__main__ import judged

__all__ = ["judged", "survived"]


def survived() -> tuple[dict[str, Any], list[str], int]:
    """Return the fault scorecard for programs and for people, and the exit code: 1 if a scenario loses points."""
    from fedscaffold.deploy import faults

    scores = faults.scorecard()
    return faults.answer(scores), faults.lines(scores), int(any(score.points < 2 for score in scores))

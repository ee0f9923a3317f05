"""Reliability scorecard: faults injected into the real server and clients, two points for each handled correctly.

The scenarios are numbered as in docs/faults.md. Soak tests (28) are not included. Faults of
real processes (kill -9 of a client, the server or the link, with TLS) take minutes and are in the test suite.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from tests.faults.lies import SCENARIOS as LIES
from tests.faults.members import SCENARIOS as MEMBERS
from tests.faults.messages import SCENARIOS as MESSAGES
from tests.faults.privacy import SCENARIOS as PRIVACY
from tests.faults.state import SCENARIOS as STATE

__all__ = ["SCENARIOS", "Score", "answer", "lines", "scorecard"]

SCENARIOS = dict(sorted((STATE | MESSAGES | MEMBERS | PRIVACY | LIES).items()))


class Score(NamedTuple):
    """One scenario's result."""

    number: int
    name: str
    points: int
    """2 if handled correctly, else 0."""
    said: str
    seconds: float


def scorecard(only: list[int] | None = None) -> list[Score]:
    """Run all scenarios, or those with the given numbers.

    >>> [score.points for score in scorecard([7, 16])]
    [2, 2]
    """
    return [_scored(number) for number in SCENARIOS if only is None or number in only]


def _scored(number: int) -> Score:
    name, scenario = SCENARIOS[number]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root, mock.patch.object(tempfile, "tempdir", root):
        good, said = _run(scenario)
    return Score(number, name, 2 if good else 0, said, time.monotonic() - began)


def _run(scenario: Callable[[], bool]) -> tuple[bool, str]:
    try:
        return scenario(), (scenario.__doc__ or "").split("\n")[0]
    except Exception as error:  # a crash is a failed scenario, not the end of the scorecard
        return False, f"{type(error).__name__}: {error}"


def lines(scores: list[Score]) -> list[str]:
    """Return the scorecard as lines of text."""
    rows = [f"{score.number:>3}  {score.points}  {score.name:<46} {score.said}" for score in scores]
    total = sum(score.points for score in scores)
    return [
        *rows,
        f"{total} of {2 * len(scores)} points, {sum(score.seconds for score in scores):.1f} s",
    ]


def answer(scores: list[Score]) -> dict[str, Any]:
    """Return the scorecard as a JSON object."""
    total = sum(score.points for score in scores)
    return {
        "points": total,
        "of": 2 * len(scores),
        "scenarios": [score._asdict() for score in scores],
    }

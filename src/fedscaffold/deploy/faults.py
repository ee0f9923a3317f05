"""The reliability scorecard: faults injected into the real server and clients, two points for each survived as it must.

The scenarios and their numbers are those of the page docs/faults.md. Not among them, and not scored: privacy accounting
(27) and soaking for hours (28). What real processes add (kill -9 of a client, of the server and of the link, with TLS)
is in the test suite, as it takes minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from fedscaffold.deploy.faults_members import SCENARIOS as MEMBERS
from fedscaffold.deploy.faults_messages import SCENARIOS as MESSAGES
from fedscaffold.deploy.faults_state import SCENARIOS as STATE

__all__ = ["SCENARIOS", "Score", "answer", "lines", "scorecard"]

SCENARIOS = dict(sorted((STATE | MESSAGES | MEMBERS).items()))


class Score(NamedTuple):
    """One scenario's result."""

    number: int
    name: str
    points: int
    """2 as it must be; 0 otherwise."""
    said: str
    seconds: float


def scorecard(only: list[int] | None = None) -> list[Score]:
    """Run the scenarios.

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
    """The scorecard for people."""
    rows = [f"{score.number:>3}  {score.points}  {score.name:<46} {score.said}" for score in scores]
    total = sum(score.points for score in scores)
    return [*rows, f"{total} of {2 * len(scores)} points, {sum(score.seconds for score in scores):.1f} s"]


def answer(scores: list[Score]) -> dict[str, Any]:
    """The scorecard for programs."""
    total = sum(score.points for score in scores)
    return {"points": total, "of": 2 * len(scores), "scenarios": [score._asdict() for score in scores]}

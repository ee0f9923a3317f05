"""The tutorial's four exercises and the talk's open question (Richardson-Romberg on SCAFFOLD), measured.

A new exercise is one file with a function that returns an `Exercise`, and one row in `EXERCISES`.
"""

from __future__ import annotations

from collections.abc import Callable

from fedscaffold import checks
from fedscaffold.experiments.exercises.compression import compression
from fedscaffold.experiments.exercises.momentum import momentum
from fedscaffold.experiments.exercises.participation import participation
from fedscaffold.experiments.exercises.record import Exercise, table
from fedscaffold.experiments.exercises.richardson import richardson
from fedscaffold.experiments.exercises.stale import stale

__all__ = [
    "EXERCISES",
    "Exercise",
    "compression",
    "exercise",
    "momentum",
    "participation",
    "richardson",
    "stale",
    "table",
]

EXERCISES: dict[str, Callable[[], Exercise]] = {
    "participation": participation,
    "stale": stale,
    "momentum": momentum,
    "compression": compression,
    "richardson": richardson,
}


def exercise(name: str) -> Exercise:
    """Measure the exercise of this name.

    >>> exercise("momentun")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown exercise 'momentun' (did you mean 'momentum'?); known: ...
    """
    return EXERCISES[checks.choice("exercise", name, EXERCISES)]()

"""Which algorithms can be private: those that ask for one gradient a step, where they are."""

from __future__ import annotations

from functools import cache
from typing import Any

from fedscaffold.algorithms.base import Algorithm
from fedscaffold.algorithms.round import each, fitted, reads_gradient_at_x
from fedscaffold.checks import InputError

__all__ = ["refuse_algorithm"]


@cache
def refuse_algorithm(algorithm: Algorithm) -> None:
    """Raise an InputError for an algorithm that the mechanism does not cover.

    >>> from fedscaffold.algorithms import dane, scaffold
    >>> refuse_algorithm(scaffold())
    >>> refuse_algorithm(dane())
    Traceback (most recent call last):
    fedscaffold.checks.InputError: dane takes gradients over all records at x, which nothing clips
        or noises: it cannot be private; take scaffold(), fedavg(), ...
    """
    others = "take scaffold(), fedavg(), or another that asks for one gradient a step"
    algorithm = fitted(algorithm, None)
    if reads_gradient_at_x(algorithm):
        raise InputError(
            f"{algorithm.name} takes gradients over all records at x, which nothing clips or "
            f"noises: it cannot be private; {others}"
        )
    asked = _places_of_gradients(algorithm)
    if asked != ["y"]:
        raise InputError(
            f"{algorithm.name} asks for gradients at {' and at '.join(asked)} in a step, whose "
            f"equal noise could cancel: it cannot be private; {others}"
        )


def _places_of_gradients(algorithm: Algorithm) -> list[str]:
    """Return where `direction` asks for gradients: at y, at x or elsewhere."""
    x = 0.25
    y: Any = each(lambda z: z + 1.25, algorithm.start(x, algorithm.own(x)))
    shift = algorithm.shift(algorithm.init(x), algorithm.memory(x))
    asked: list[str] = []

    def gradient(z: Any) -> float:
        asked.append("y" if z is y else "x" if z is x else "elsewhere")
        return 3.5

    algorithm.direction(gradient, y, x, shift)
    return asked

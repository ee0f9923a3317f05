"""Local step sizes: one number, or a schedule over rounds, local steps, or both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = ["Schedule", "in_precision", "schedule_of"]

WANTED = (
    "lr must be a number above 0, or a function of `round`, of `step`, or of both by these names"
)


class Schedule(NamedTuple):
    """A step size schedule. Rounds count from 1, as in a run's history; local steps from 0."""

    function: Callable[..., Any]
    by_round: bool
    by_step: bool
    named: bool = True
    """Whether arguments are passed by the names `round` and `step`; a single argument of another
    name is the step."""

    def values(self, round: int, steps: int, least: int, dtype: str) -> NDArray[Any]:
        """Return the step sizes of a round: shape (), or (steps,) if they vary over local steps.

        Args:
            round: The round, counted from 1.
            steps: Largest number of local steps of any client.
            least: Smallest number: at least one of so many step sizes must be above 0, as the mean
                direction is the move divided by their sum.
            dtype: Precision of the run.

        >>> schedule_of(lambda round: 1 / round).values(4, 3, 3, "float64")
        array(0.25)
        >>> schedule_of(lambda round, step: 1 / (round + step)).values(1, 2, 2, "float64")
        array([1. , 0.5])
        """
        if not self.by_step:
            return in_precision(self._at(round, None), dtype)
        checks.fits(f"a schedule of {steps} step sizes", 32 * steps)
        values = in_precision([self._at(round, k) for k in range(steps)], dtype)
        if not values[:least].any():
            where = f" of round {round}" if self.by_round else ""
            whose = "" if least == steps else f" of the client that takes {least}"
            raise InputError(
                f"lr must be above 0 at some of the {least} local steps{where}{whose}, "
                "got zeros only"
            )
        return values

    def _at(self, round: int, step: int | None) -> float:
        if not self.named:
            return checks.number(f"lr({step})", self.function(step), at_least=0)
        given = {"round": round} if self.by_round else {}
        if step is None:  # the mean direction is the move divided by this step size
            return checks.number(f"lr(round={round})", self.function(**given), above=0)
        given |= {"step": step}
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        return checks.number(f"lr({said})", self.function(**given), at_least=0)


def in_precision(lr: Any, dtype: str) -> NDArray[Any]:
    """Return step sizes in the run's precision.

    Raise an InputError if one overflows it, or vanishes in it.

    >>> in_precision(1e-50, "float32")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be from 1.2e-38 to 3.4e+38 in float32, got 1e-50
    """
    wanted, limits = np.array(lr, np.float64), np.finfo(dtype)
    wrong = wanted[(wanted > limits.max) | ((wanted != 0) & (wanted < limits.tiny))]
    if wrong.size:
        raise InputError(
            f"lr must be from {limits.tiny:.2g} to {limits.max:.2g} in {dtype}, got {wrong[0]:g}"
        )
    return wanted.astype(dtype)


def schedule_of(lr: Callable[..., Any]) -> Schedule:
    """Return the schedule of a function, according to the names of its arguments.

    >>> schedule_of(lambda k: 0.1).by_step, schedule_of(lambda round: 0.1).by_step
    (True, False)
    >>> schedule_of(lambda epoch, k: 0.1)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be a number above 0, or a function of `round`, of `step`,
    or of both by these names, got one of (epoch, k)
    """
    try:
        parameters = inspect.signature(lr).parameters.values()
    except (TypeError, ValueError):  # built-in callables have none
        return Schedule(lr, False, True, named=False)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named &= {"round", "step"}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    if named and set(required) <= named:
        return Schedule(lr, "round" in named, "step" in named)
    if not named and len(required) <= 1 and parameters:
        return Schedule(lr, False, True, named=False)
    raise InputError(f"{WANTED}, got one of {inspect.signature(lr)}")

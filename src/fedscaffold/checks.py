"""Argument checks and their sentences: what is wrong, what is allowed, what was received."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

__all__ = ["InputError", "choice", "number", "one_number", "whole"]


class InputError(ValueError):
    """The user's mistake, said in one line; the command line prints it and exits with 2."""


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of `allowed`; otherwise list them and suggest the nearest.

    >>> choice("algorithm", "scafold", ["fedavg", "scaffold"])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown algorithm 'scafold' (did you mean 'scaffold'?); known: fedavg, scaffold
    """
    known = sorted(allowed)
    if value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InputError(f"unknown {name} {value!r}{hint}; known: {', '.join(known)}")


def number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Return `value` as a finite Python float within its bounds.

    >>> number("lr", -0.1, above=0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be a number above 0, got -0.1
    """
    bound = f" above {above:g}" if above > -math.inf else f" of at least {at_least:g}" if at_least > -math.inf else ""
    try:
        real = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        real = math.nan
    if not math.isfinite(real) or real <= above or real < at_least:
        raise InputError(f"{name} must be a number{bound}, got {value!r}")
    return real


def one_number(loss: str, shape: Iterable[int]) -> None:
    """Refuse a loss that is not one number.

    >>> one_number("loss(params, batch)", (4,))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: loss(params, batch) must be one number, the mean over the batch's records, got
    shape (4,); end it with .mean()
    """
    if tuple(shape):
        wanted = "must be one number, the mean over the batch's records"
        raise InputError(f"{loss} {wanted}, got shape {tuple(shape)}; end it with .mean()")


def whole(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as a Python int within its bounds.

    >>> whole("rounds", 2.5)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: rounds must be a whole number of at least 1, got 2.5
    """
    upper = "" if at_most is None else f" and at most {at_most}"
    refusal = InputError(f"{name} must be a whole number of at least {at_least}{upper}, got {value!r}")
    if isinstance(value, (bool, str)):
        raise refusal
    try:
        integer = int(value)
    except (TypeError, ValueError, OverflowError):
        raise refusal from None
    if integer != value or integer < at_least or (at_most is not None and integer > at_most):
        raise refusal
    return integer

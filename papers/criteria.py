"""Criteria of a claim: each makes the check of one measured number."""

from __future__ import annotations

from papers.claim import Check, Number

__all__ = ["at_least", "at_most", "between", "holds", "undecided"]


def between(
    statement: str, expected: Number, measured: float, low: float, high: float, **more: str
) -> Check:
    """The measured number must lie in [low, high].

    >>> [between("slope", -1.0, found, -1.05, -0.95).passed for found in (-0.98, float("nan"))]
    [True, False]
    """
    return Check(
        statement,
        expected,
        measured,
        f"in [{low:.4g}, {high:.4g}]",
        bool(low <= measured <= high),
        **more,
    )


def at_most(statement: str, expected: Number, measured: float, limit: float, **more: str) -> Check:
    """The measured number must not exceed the limit.

    >>> at_most("error", "0", 1e-12, 1e-10).criterion
    'at most 1e-10'
    """
    return Check(
        statement, expected, measured, f"at most {limit:.4g}", bool(measured <= limit), **more
    )


def at_least(statement: str, expected: Number, measured: float, limit: float, **more: str) -> Check:
    """The measured number must not fall short of the limit.

    >>> at_least("order", 2.0, 1.97, 1.9).passed
    True
    """
    return Check(
        statement, expected, measured, f"at least {limit:.4g}", bool(measured >= limit), **more
    )


def holds(
    statement: str, expected: Number, measured: Number, criterion: str, passed: bool, **more: str
) -> Check:
    """A check whose criterion is not one interval.

    >>> holds("rises with H", "yes", "0, 0.1, 0.4", "non-decreasing", True).mark
    'pass'
    """
    return Check(statement, expected, measured, criterion, bool(passed), **more)


def undecided(statement: str, expected: Number, criterion: str, note: str, **more: str) -> Check:
    """A check that this size of the run cannot decide.

    >>> undecided("slope up to N = 10,000", -1.0, "in [-1.05, -0.95]", "needs --full").mark
    'not decided'
    """
    return Check(statement, expected, "not measured", criterion, None, note=note, **more)

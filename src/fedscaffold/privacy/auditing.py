"""Auditing: what an attacker's guesses prove about epsilon.

Canaries are records of which each was put in with probability 1/2. After the run an attacker, who
knows all canaries and sees what was released, guesses for some of them whether they were in. If the
mechanism is (epsilon, delta) private, few of the guesses can be right; many right guesses show that
epsilon must be larger (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846, theorem 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Finding", "guess", "lower_bound"]

SHARES = (0.5, 0.25, 0.1, 0.04)  # of the canaries guessed to be in, and as many to be out
LARGEST = 100.0


class Finding(NamedTuple):
    """What guesses prove."""

    epsilon: float
    """Lower bound on epsilon."""
    guesses: int
    correct: int


def lower_bound(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return the largest epsilon that the number of correct guesses refutes.

    Args:
        canaries: Number of canaries, each in with probability 1/2.
        guesses: Number of canaries that were guessed.
        correct: Number of correct guesses.
        delta: The delta of the claim.
        confidence: Probability that the bound holds, at least.

    >>> lower_bound(canaries=1000, guesses=200, correct=100, delta=1e-5)
    0.0
    >>> 4 < lower_bound(canaries=1000, guesses=200, correct=200, delta=1e-5) < 4.3
    True
    """
    low, high = 0.0, LARGEST
    if _p_value(canaries, guesses, correct, low, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        refuted = _p_value(canaries, guesses, correct, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def _p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of as many correct guesses under (epsilon, delta)."""
    from scipy.stats import binom

    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    steepest = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, tail + 2 * canaries * delta * steepest)


def guess(
    scores: Iterable[NDArray[np.float64]],
    inside: NDArray[np.bool_],
    *,
    delta: float,
    confidence: float = 0.95,
) -> Finding:
    """Guess by each of some scores, and return the largest lower bound that holds for all of them.

    The canaries of largest score are guessed to be in, those of smallest score to be out, for a few
    numbers of guesses; the confidence is divided among all attempts.

    Args:
        scores: For each attack one score per canary, larger if it seems to be in.
        inside: Which canaries were in.
        delta: The delta of the claim.
        confidence: Probability that the bound holds, at least.

    >>> inside = np.arange(1000) % 2 == 0
    >>> guess([inside.astype(float)], inside, delta=1e-5).epsilon > 5
    True
    """
    attempts, found = list(scores), Finding(0.0, 0, 0)
    each = 1 - (1 - confidence) / (len(attempts) * len(SHARES))
    for score in attempts:
        order = np.argsort(-score, kind="stable")
        for share in SHARES:
            number = int(share * len(inside))
            correct = int(inside[order[:number]].sum() + (~inside[order[-number:]]).sum())
            bound = lower_bound(
                canaries=len(inside),
                guesses=2 * number,
                correct=correct,
                delta=delta,
                confidence=each,
            )
            found = max(found, Finding(bound, 2 * number, correct))
    return found

"""Who is heard in a round, and with what share: the moments of a random cohort.

A cohort A is S of the N clients, drawn uniformly without replacement. Client i is heard with the
share

    q_i = [i in A] p_i / h,    h = sum_{j in A} p_j

and an exact law needs E q_i, E q_i q_j and E q_i [j in A]. With equal weights h = S/N and all three
are counts. With others they hold 1/h and 1/h^2 of a random h, which integrals turn into
exponentials,

    1/h = integral e^(-t h) dt,    1/h^2 = integral t e^(-t h) dt        over t > 0

by the trapezoidal rule in log t, whose error is e^(-pi^2 / STEP). For one t, the sum over all
cohorts that hold i and j of prod_{k in A} y_k, y_k = e^(-t p_k), is a coefficient of a polynomial
in z,

    [z^S]  prod_k (1 + z y_k) b_i b_j,    b_i = z y_i / (1 + z y_i)

read off its values on a circle. The radius at which sum b_i = S keeps the digits. There are more
values than coefficients, and an odd number of them, so that z y_i is never -1. All pairs come from
one product of matrices.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedscaffold.problems.problem import Floats

__all__ = ["Cohorts", "cohort_moments", "shares"]

STEP = 0.25  # of log t: an error of 1e-17
REACH = 1e-17  # what the integrals leave out at either end
BISECTIONS = 60
BEYOND = 700.0


class Cohorts(NamedTuple):
    """Moments of a random cohort's shares q of the average."""

    p: Floats
    """(N,) the clients' weights, summing to 1."""
    size: int
    """S."""
    share: Floats
    """(N,) E q_i."""
    shares: Floats
    """(N, N) E q_i q_j."""
    share_with: Floats
    """(N, N) E q_i [j in A]."""

    @property
    def one(self) -> float:
        """P(i in A)."""
        return self.size / len(self.p)

    @property
    def two(self) -> float:
        """P(i in A and j in A), i not j."""
        n = len(self.p)
        return self.size * (self.size - 1) / (n * (n - 1)) if n > 1 else 0.0

    @property
    def plain(self) -> bool:
        """Whether all clients take part in every round with equal weight."""
        return self.size == len(self.p) and bool((self.p == self.p[0]).all())


def cohort_moments(p: Floats, size: int) -> Cohorts:
    """Return the moments of the shares for `size` of the clients with weights `p`.

    >>> cohort_moments(np.array([0.25, 0.25, 0.5]), 2).share.round(6)  # not the weights
    array([0.277778, 0.277778, 0.444444])
    """
    n, p = len(p), np.asarray(p, np.float64)
    if size == n:
        return Cohorts(p, size, p, np.outer(p, p), np.outer(p, np.ones(n)))
    among = size / n
    two = among * (size - 1) / (n - 1)
    if (p == p[0]).all():
        pairs = np.where(np.eye(n, dtype=bool), among, two)
        return Cohorts(p, size, np.full(n, 1 / n), pairs / size**2, pairs / size)
    once, twice = _integrals(tuple(p.tolist()), size)
    return Cohorts(p, size, p * np.diag(once), np.outer(p, p) * twice, p[:, None] * once)


def shares(heard: Cohorts, rng: np.random.Generator, draws: int) -> Floats:
    """Draw the shares q of random cohorts, (draws, N); 0 for clients not in the cohort.

    >>> shares(cohort_moments(np.array([0.25, 0.75]), 2), np.random.default_rng(0), 1)
    array([[0.25, 0.75]])
    """
    if heard.size == len(heard.p):
        return np.tile(heard.p, (draws, 1))
    order = rng.random((draws, len(heard.p))).argsort(axis=1)
    q = np.where(order < heard.size, heard.p, 0.0)
    total = q.sum(axis=1, keepdims=True)
    drawn: Floats = q / np.where(total > 0, total, 1)
    return drawn


@lru_cache(maxsize=8)
def _integrals(shares: tuple[float, ...], size: int) -> tuple[Floats, Floats]:
    """Return E [i, j in A] / h and E [i, j in A] / h^2; entries for weights of 0 are finite too."""
    p = np.array(shares)
    n, weighty = len(p), p[p > 0]
    rising = np.sort(p)
    least = max(float(rising[:size].sum()), float(weighty.min()))  # of h, where it is not 0
    low, high = math.log(REACH), math.log(-math.log(REACH)) + 1
    once, twice = np.zeros((n, n)), np.zeros((n, n))
    for s in np.arange(low - math.log(rising[-size:].sum()), high - math.log(least), STEP):
        t = math.exp(s)
        pairs = t * _both(t * p, size)
        once += pairs
        twice += t * pairs
    return STEP * once, STEP * twice


def _both(decay: Floats, size: int) -> Floats:
    """Return (N, N) E [i, j in A] prod_{k in A} e^(-decay_k)."""
    n = len(decay)
    # e^-BEYOND of the largest term is nothing
    decay = np.minimum(decay, np.sort(decay)[:size].sum() + BEYOND)
    rising = np.sort(decay)
    # log radius at which sum b = S, by bisection; written as sum of the small b = sum of 1 - the
    # large b, as the digits of both would be lost in S
    low, high = rising[0] - BEYOND, rising[-1] + BEYOND
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        off = np.exp(-np.abs(np.clip(rising - middle, -BEYOND, BEYOND)))
        # of b and 1 - b, the one below and the one above 1/2
        near, far = off / (1 + off), 1 / (1 + off)
        inside = np.where(rising > middle, far, near)[:size].sum()  # 1 - b
        outside = np.where(rising > middle, near, far)[size:].sum()  # b
        low, high = (low, middle) if outside > inside else (middle, high)
    log_y = middle - decay
    points = n + 1 + n % 2  # odd
    turn = np.exp(2j * np.pi * np.arange(points) / points)[:, None]
    # 1 + z y = max(1, y) (..) so that nothing overflows
    large = np.maximum(log_y, 0)
    rest = np.exp(-large) + turn * np.exp(log_y - large)
    b = turn * np.exp(log_y - large) / rest
    logs = np.log(rest).sum(axis=1) + large.sum() - size * middle
    count = math.lgamma(n + 1) - math.lgamma(size + 1) - math.lgamma(n - size + 1)
    weights = np.exp(logs - count) * turn[:, 0] ** (-size) / points
    both: Floats = ((b * weights[:, None]).T @ b).real
    both[np.diag_indices(n)] = (weights @ b).real
    return both

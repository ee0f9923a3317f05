"""The best number of local steps: the one that buys a digit of accuracy at the least cost.

With a cost of one round (a message up and down) and of one local step, a factor ten in the error
costs

    (cost_of_round + H cost_of_step) * log 10 / (-log rho(H))

where rho is the factor by which the error shrinks a round. On quadratics rho is the spectral radius
of the round (`rates.py`), exact for every H, and the minimum over all H is found. It is close to

    H* = 1 / (gamma sqrt(lambda_min(mean A_c) L_v))                     F10

with L_v, which replaces L, the largest eigenvalue of S = blockdiag(A_c) - (A_i (mean A)^-1 A_j /
N)_ij: this S is the inverse of P blockdiag(A_c^-1) P on sum v_c = 0, written so that A_c may be
singular. For other problems only mu and L are known: then H* = 1 / (gamma sqrt(mu L)), and rho is
the root of F8' for a spectrum from mu to L.

Symbols: gamma = lr, H = local_steps, L = smoothness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.quadratics import Spectra, lag, linear_round, power, spectra
from fedscaffold.theory.rates import DENSE, rounds_per_digit, spectral_radius
from fedscaffold.theory.round_map import SCAFFOLD, closed_form, is_quadratic

__all__ = ["BestLocalSteps", "best_local_steps"]

EXHAUSTIVE = 12  # small H are all tried: with lr > 1/L odd and even ones may differ
GROWTH = 1.4  # of the coarse grid beyond
VALLEYS = 3  # local minima of the coarse grid that are looked into
POINTS = 8  # of the grid in a valley
FORGOTTEN = 50.0  # gamma a H after which H local steps leave nothing of the start: e^-50


class BestLocalSteps(NamedTuple):
    """The best number of local steps, and what it costs."""

    local_steps: int
    rate: float
    """rho: the factor by which the error shrinks a round."""
    rounds_per_digit: float
    cost: float
    """Cost of reducing the error tenfold; the number of rounds if only rounds cost."""
    estimate: float
    """H* of F10."""
    source: str
    """Source of the rate."""


def best_local_steps(
    problem: Problem, *, lr: float, cost_of_round: float = 1.0, cost_of_step: float = 0.0
) -> BestLocalSteps:
    """Return the number of local steps with which SCAFFOLD gains a digit at the least cost.

    All clients take part.

    Exact on quadratics; an estimate from mu and L otherwise, as `source` says.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=20, mu=0.01, smoothness=1.0, seed=0)
    >>> best = best_local_steps(problem, lr=1.0)
    >>> best.local_steps, round(best.estimate, 1), round(best.rounds_per_digit, 1)
    (3, 2.8, 5.5)
    """
    lr = checks.number("lr", lr, above=0)
    per_round = checks.number("cost_of_round", cost_of_round, at_least=0)
    per_step = checks.number("cost_of_step", cost_of_step, at_least=0)
    if per_round + per_step == 0:
        raise InputError("cost_of_round and cost_of_step must not both be 0")
    exact = is_quadratic(problem)
    rate, estimate, most, smoothness = _exact(problem, lr) if exact else _bounded(problem, lr)

    def cost(steps: int) -> float:
        return (per_round + steps * per_step) * rounds_per_digit(rate(steps))

    best = _least(cost, estimate, most) if exact or per_step > 0 else int(most)
    if not math.isfinite(cost(best)):
        raise InputError(
            f"lr {lr:g} contracts for no number of local steps; keep it below 2/L = "
            f"{2 / smoothness:g}"
        )
    source = (
        "exact: spectral radius of the round"
        if exact
        else "estimate from mu and L: F10, rate by F8'"
    )
    return BestLocalSteps(
        best, rate(best), rounds_per_digit(rate(best)), cost(best), estimate, source
    )


def _exact(problem: Problem, lr: float) -> tuple[Callable[[int], float], float, float, float]:
    """Return rho(H), H*, the largest H worth trying and L, for quadratics."""
    given, form = spectra(problem), closed_form(SCAFFOLD)
    if given.num_clients == 1:
        raise InputError(
            "best_local_steps needs two clients or more: with one, more local steps are always "
            "better"
        )

    @cache
    def rate(steps: int) -> float:
        try:
            return spectral_radius(linear_round(given, form, lr=lr, local_steps=steps))
        except InputError:  # so many steps that a client overflows
            return math.inf

    values = given.values[given.values > 1e-12 * given.values.max()]
    smallest = float(np.linalg.eigvalsh(given.mean(given.values))[0])
    pull = smallest * _drift_smoothness(given)
    estimate = 1 / (lr * math.sqrt(pull)) if pull > 0 else math.inf
    return rate, estimate, FORGOTTEN / (lr * float(values.min())), float(values.max())


def _bounded(problem: Problem, lr: float) -> tuple[Callable[[int], float], float, float, float]:
    """Return the same from mu and L alone.

    rho is that of F8', H* = 1 / (gamma sqrt(mu L)), and no more than H* is tried.
    """
    mu, smoothness = problem.mu, problem.smoothness
    if mu is None or smoothness is None or mu <= 0:
        raise InputError(
            f"best_local_steps needs mu > 0 and L of {problem.name}: give Problem(..., "
            "facts=Facts(mu, L))"
        )
    # u_a^2 + v_a^2 falls, then rises in a: it is largest at an end
    w = lr * np.array([mu, smoothness])

    def rate(steps: int) -> float:
        return math.sqrt(float((power(w, steps) ** 2 + lag(w, steps) ** 2).max()))

    estimate = 1 / (lr * math.sqrt(mu * smoothness))
    return rate, estimate, float(max(1, round(estimate))), smoothness


def _drift_smoothness(given: Spectra) -> float:
    """L_v."""
    a, basis = given.values.ravel(), given.basis
    mean = given.mean(given.values)
    if np.linalg.eigvalsh(mean)[0] <= 0:
        return 0.0
    inner = np.linalg.solve(mean, basis * a) / given.num_clients
    if len(a) <= DENSE:
        return float(np.linalg.eigvalsh(np.diag(a) - (basis * a).T @ inner)[-1])

    def apply(v: Floats) -> Floats:
        v = v.ravel()
        product: Floats = a * (v - (inner @ v) @ basis)
        return product

    start = np.random.default_rng(0).normal(size=len(a))
    operator = LinearOperator((len(a), len(a)), apply, dtype=np.float64)
    return float(eigsh(operator, k=1, which="LA", v0=start, return_eigenvectors=False)[0])


def _least(cost: Callable[[int], float], estimate: float, most: float) -> int:
    """Return the H of least cost.

    A coarse grid is extended while its end is best; then each local minimum is refined.
    """
    end = min(most, 8 * estimate)
    grid = _grid(end)
    while min(grid, key=cost) > end / 2 and end < most:
        end = min(most, 4 * end)
        grid = _grid(end)
    fenced = [grid[0], *grid, grid[-1]]
    valleys = [
        (cost(at), low, high)
        for low, at, high in zip(fenced, grid, fenced[2:], strict=False)
        if cost(at) <= min(cost(low), cost(high))
    ]
    return min((_bottom(cost, low, high) for _, low, high in sorted(valleys)[:VALLEYS]), key=cost)


def _bottom(cost: Callable[[int], float], low: int, high: int) -> int:
    """Return the H of least cost between two others, by successively finer grids."""
    while True:
        points = np.unique(np.linspace(low, high, POINTS).round()).astype(int).tolist()
        at = points.index(min(points, key=cost))
        if high - low < POINTS:
            return int(points[at])
        low, high = points[max(at - 1, 0)], points[min(at + 1, len(points) - 1)]


def _grid(end: float) -> list[int]:
    """Return an increasing grid from 1 to `end`."""
    last = max(1, math.ceil(end))
    number = math.ceil(math.log(max(last / EXHAUSTIVE, 1), GROWTH)) + 1
    beyond = np.geomspace(EXHAUSTIVE, max(last, EXHAUSTIVE), number).round().astype(int)
    return sorted({steps for steps in (*range(1, EXHAUSTIVE), *beyond.tolist()) if steps <= last})

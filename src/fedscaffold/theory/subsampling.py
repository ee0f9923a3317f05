"""Sampling of clients and records of large problems, and the errors that it causes.

A product with all Hessians costs records times d. Up to `WORK` of it, and `MEMORY` of clients times
d, everything is looked at. Beyond:

    near     some clients, in groups, with all their records or many: for what each client is (its
             extreme curvatures, its distance from the mean, its noise). Means over clients get the
             standard error of sampling without replacement, widened as Student's t asks with so few
             clients. An extreme over m of N clients is a lower bound: those not seen may exceed it,
             by their standard deviation times log(N / m) where tails are exponential; twice that is
             stated, as they may be heavier
    wide     all clients, or as many as memory holds, with all records up to `WIDE`, else as many as
             that allows: for what they are together (the mean's curvatures, FedAvg's drift). Taken
             again on its four `quarters` where it is a sample: their spread is the error, and the
             bias of an extreme eigenvalue is four times as large there
    mean     a smaller one of the same kind, for products with the mean Hessian that are needed by
             the dozen

A Hessian H_i of some records only is off by a matrix that has the law of half the difference of the
Hessians of the two halves of these records, so ||H_i1 - H_i2|| / 2 bounds what that adds to any
eigenvalue: `halved` measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.derivatives import client_gradients, client_products
from fedscaffold.theory.lanczos import lanczos

__all__ = ["Look", "Looks", "client_ends", "drift_rate", "extreme_error", "halved", "looks_at"]
__all__ += ["mean_ends", "mean_error", "mean_off", "passes", "quartered", "redrawn"]

# records times d, and clients times d, beyond which both are sampled
WORK, MEMORY = 100_000_000, 2_500_000
WIDE = 3  # times as much, for what all clients are together
GROUPS = 3  # of clients looked at closely
FEWEST = 4  # clients in a group
HALVING = 8  # Lanczos steps for what records not looked at may add
BUDGET = 2_500_000_000  # records times d times products: what one number may cost, a few seconds


class Look(NamedTuple):
    """A problem, or a sample of it that is small enough to be measured."""

    problem: Problem
    p: Floats
    clients: NDArray[np.intp]
    """Their indices in the whole problem."""
    share: Floats
    """Share of each client's records that is in it."""


class Looks(NamedTuple):
    """Samples of a problem; each is the whole problem if that is small."""

    near: list[Look]
    wide: Look
    mean: Look
    quarters: list[Look]
    halves: list[Look]
    """Of `mean`; none if it is the whole."""
    exact: bool
    """By eigenvalues of all matrices."""
    num_clients: int
    rng: np.random.Generator


def looks_at(problem: Problem, p: Floats, exact: bool, rng: np.random.Generator) -> Looks:
    """Choose the samples to measure.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> looks = looks_at(lower_bound_pair(), np.array([0.5, 0.5]), False, np.random.default_rng(0))
    >>> len(looks.near), looks.near[0] is looks.wide, looks.quarters
    (1, True, [])
    """
    n, d = problem.num_clients, problem.dim
    records, most = int(problem.offsets[-1]), max(FEWEST, MEMORY // d)
    if exact or (records * d <= WORK and n <= most):
        whole = Look(problem, p, np.arange(n), np.ones(n))
        return Looks([whole], whole, whole, [], [], exact, n, rng)
    order = rng.permutation(np.flatnonzero(p))
    size = min(max(FEWEST, WORK // (d * max(1, records // n))), most, -(-len(order) // GROUPS))
    near = [
        _part(problem, p, group, WORK // d, rng)
        for group in np.array_split(order[: GROUPS * size], GROUPS)
        if len(group)
    ]
    every = order[: max(FEWEST, 10 * MEMORY // d)]
    wide = _part(problem, p, every, WIDE * WORK // d, rng)
    mean = (
        wide if wide.problem.offsets[-1] * d <= WORK else _part(problem, p, every, WORK // d, rng)
    )
    missed = len(every) < len(order)
    quarters = _split(wide, 4, missed, rng) if missed or wide.share.min() < 1 else []
    halves = _split(mean, 2, missed, rng) if missed or mean.share.min() < 1 else []
    return Looks(near, wide, mean, quarters, halves, False, len(order), rng)


def passes(look: Look, most: int, least: int = 8) -> int:
    """Return the number of Hessian products allowed: `most`, or what `BUDGET` permits."""
    return int(np.clip(BUDGET // (int(look.problem.offsets[-1]) * look.problem.dim), least, most))


def mean_error(values: Floats, q: Floats, num_clients: int) -> float:
    """Return the error of sum q_i v_i over the clients looked at, for the mean over all.

    Twice the error covers as much as 2 sigma would.

    >>> values, half = np.array([1.0, 3.0]), np.array([0.5, 0.5])
    >>> mean_error(values, half, 2), mean_error(values, half, 9) > 0
    (0.0, True)
    """
    seen = len(values)
    if seen >= num_clients or seen < 2:
        return 0.0 if seen >= num_clients else float("nan")
    spread = np.sqrt(np.sum(np.square(q * (values - q @ values))) * seen / (seen - 1))
    return float(np.sqrt(1 - seen / num_clients) * spread * _few(seen))


def extreme_error(values: Floats, num_clients: int) -> float:
    """Return by how much the extreme value over all clients may exceed that over the sample.

    >>> extreme_error(np.array([1.0, 2.0]), 2)
    0.0
    """
    seen = len(values)
    if seen >= num_clients:
        return 0.0
    # a quarter of the mean: a lucky sample may look too even
    spread = np.hypot(np.std(values), np.mean(values) / 4)
    return float(2 * spread * np.log(num_clients / seen) * _few(seen))


def _few(seen: int) -> float:
    """Return the small-sample factor of a standard error.

    It is Student's quantile at 2 sigma over the normal's.
    """
    return float(stdtrit(max(1, seen - 1), ndtr(2)) / 2)


def halved(look: Look, x: Floats, rng: np.random.Generator) -> Floats:
    """Return bounds, one per client, on ||H_i - H_i of all its records||.

    They are zero for clients whose records are all looked at.
    """
    if look.share.min() == 1:
        return np.zeros(len(look.p))
    one, two = (part.problem for part in _split(look, 2, False, rng))
    scale = np.sqrt(1 - look.share)[:, None] / 2

    def apply(v: Floats) -> Floats:
        apart: Floats = scale * (client_products(one, x, v) - client_products(two, x, v))
        return apart

    return _norms(apply, (len(look.p), look.problem.dim), passes(look, HALVING, 5), rng)


def mean_off(looks: Looks, x: Floats) -> float:
    """Return a bound on ||H - H of all records|| for the H of `looks.mean`."""
    if not looks.halves:
        return 0.0
    one, two = looks.halves

    def apply(v: Floats) -> Floats:
        sides = [half.p @ client_products(half.problem, x, v[0]) for half in (one, two)]
        apart: Floats = (sides[0] - sides[1])[None] / 2
        return apart

    return float(
        _norms(apply, (1, looks.mean.problem.dim), passes(looks.mean, HALVING, 5), looks.rng)[0]
    )


def _norms(
    apply: Callable[[Floats], Floats], size: tuple[int, int], steps: int, rng: np.random.Generator
) -> Floats:
    low, high, below, above = lanczos(apply, size, steps, rng)
    norms: Floats = np.maximum(below - low, above + high)
    return norms


def client_ends(
    look: Look, x: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the extreme eigenvalues of the clients' Hessians at x, and their errors."""
    shape, few = (look.problem.num_clients, look.problem.dim), halved(look, x, rng)
    found = lanczos(lambda v: client_products(look.problem, x, v), shape, passes(look, 20), rng)
    return found[0], found[1], found[2] + few, found[3] + few


def mean_ends(look: Look, x: Floats, steps: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the smallest and largest eigenvalue of the mean Hessian at x, and their errors."""
    shape = (1, look.problem.dim)
    found = lanczos(
        lambda v: (look.p @ client_products(look.problem, x, v[0]))[None], shape, steps, rng
    )
    low, high, below, above = np.concatenate(found)
    return np.array([low, high]), np.array([below, above])


def drift_rate(look: Look, x: Floats) -> float:
    """|sum p_i (H_i - H) grad f_i| at x: FedAvg's drift for every unit of lr (K - 1) / 2 (F19)."""
    rows, p = client_gradients(look.problem, x), look.p
    turned = p @ client_products(look.problem, x, rows) - p @ client_products(
        look.problem, x, p @ rows
    )
    return float(np.linalg.norm(turned))


def redrawn(problem: Problem, x: Floats, rng: np.random.Generator) -> Floats:
    """Return the changes of grad f_i(x) when every client resamples its own records.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> redrawn(lower_bound_pair(), np.zeros(1), np.random.default_rng(0)).ravel()
    array([0., 0.])
    """
    cuts = zip(problem.offsets[:-1], problem.counts, strict=True)
    drawn = [first + rng.integers(0, count, count) for first, count in cuts]
    everybody = np.ones(problem.num_clients)
    again = _cut(problem, everybody, np.arange(problem.num_clients), drawn, everybody).problem
    change: Floats = client_gradients(again, x) - client_gradients(problem, x)
    return change


def quartered(whole: Floats, quarters: Floats) -> Floats:
    """Estimate the error of numbers from a sample by those of its quarters, one per row.

    It combines their spread and their bias.

    >>> quartered(np.array([2.0]), np.array([[1.0], [3.0], [1.0], [3.0]])).round(6)
    array([0.57735])
    """
    error: Floats = np.hypot(
        np.std(quarters, axis=0, ddof=1) / 2, (quarters.mean(axis=0) - whole) / 3
    )
    return error


def _part(
    problem: Problem, p: Floats, chosen: NDArray[np.intp], records: int, rng: np.random.Generator
) -> Look:
    """Return a sample of clients with so many records in total, or all of their records."""
    chosen = np.sort(chosen)
    counts = problem.counts[chosen]
    rows = max(2, int(records // len(chosen)))
    share = np.minimum(counts, rows) / counts
    if len(chosen) == problem.num_clients and share.min() == 1:
        return Look(problem, p, chosen, share)
    picked = [problem.offsets[i] + rng.permutation(problem.counts[i])[:rows] for i in chosen]
    return _cut(problem, p, chosen, picked, share)


def _split(look: Look, parts: int, by_clients: bool, rng: np.random.Generator) -> list[Look]:
    """Partition the clients, or the records of each."""
    problem, cut = look.problem, []
    mixed = [
        first + rng.permutation(count)
        for first, count in zip(problem.offsets[:-1], problem.counts, strict=True)
    ]
    for k in range(parts):
        held = np.arange(k, len(mixed), parts) if by_clients else np.arange(len(mixed))
        picked = [mixed[i] if by_clients else mixed[i][k % len(mixed[i]) :: parts] for i in held]
        part = _cut(problem, look.p, held, picked, look.share[held] / (1 if by_clients else parts))
        cut.append(part._replace(clients=look.clients[held]))
    return cut


def _cut(
    problem: Problem,
    p: Floats,
    chosen: NDArray[np.intp],
    picked: list[NDArray[np.intp]],
    share: Floats,
) -> Look:
    some = any(len(rows) < problem.counts[i] for i, rows in zip(chosen, picked, strict=True))
    if some and problem.kinds.gradient != "mean":
        raise InputError(
            f"{problem.name} couples the records of a batch, so some of a client's records are "
            "another loss: measure it on all of them"
        )
    clients = [jax.tree.map(lambda a: a[rows], problem.records) for rows in picked]  # noqa: B023
    part = problem.with_clients(clients)
    return Look(part, p[chosen] / p[chosen].sum(), chosen, share)

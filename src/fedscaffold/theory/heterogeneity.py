"""Heterogeneity of the clients of a problem, measured on the problem itself.

At a point x (the optimum, where one can be found), with f = sum p_i f_i and Hessians H_i and H:

    zeta_1          sqrt( sum p_i |grad f_i - grad f|^2 )
    chance          sqrt( sum p_i (1 - p_i) tr V_i / n_i ), the zeta_1 to expect if all records came
                    from one source
    zeta_2, delta   sqrt( sum p_i ||H_i - H||^2 ), operator norms; the largest ||H_i - H|| or minus
                    eigenvalue of an H_i
    big_g, big_b    G^2 = 2 sum p_i |grad f_i(x*)|^2 and B^2 = 2, with which convex clients always
                    satisfy sum p_i |grad f_i(y)|^2 <= G^2 + 2 L B^2 (f(y) - f*)
    fit_g, fit_b    G and B of the least-squares fit sum p_i |grad f_i|^2 = G^2 + B^2 |grad f|^2 at
                    a few points
    noise           sigma^2 = sum p_i E |g_i - grad f_i|^2 of a minibatch gradient; record_noise:
                    sum p_i tr V_i, of one record's
    mu, smoothness  extreme eigenvalues of any H_i; mean_mu, mean_smoothness: of H;
                    start_smoothness: L at the start
    drift_rate      |sum p_i (H_i - H) grad f_i|: FedAvg's drift for every unit of lr (K - 1) / 2
                    (F19)
    average_drift   |drift|^2 at the lr and local_steps asked for, see `drift`

Exact for small d, by eigenvalues. Else by Lanczos on Hessian-vector products, on samples of clients
and records where the problem is large (`subsampling.py`); standard errors then come from the
samples and from Lanczos' residuals.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.theory.derivatives import (
    batch_sizes,
    client_gradients,
    client_hessians,
    client_products,
    find_optimum,
    noise_level,
)
from fedscaffold.theory.lanczos import lanczos
from fedscaffold.theory.round_map import a_problem
from fedscaffold.theory.subsampling import (
    Look,
    Looks,
    client_ends,
    drift_rate,
    extreme_error,
    halved,
    looks_at,
    mean_ends,
    mean_error,
    mean_off,
    passes,
    quartered,
)

__all__ = ["Heterogeneity", "drift", "heterogeneity"]

SMALL, NUMBERS = 300, 20_000_000  # largest d, and largest N d^2, for eigenvalues of all matrices
# clients of whom ||H_i - H|| is found at most, and steps of Lanczos for each
LOOKED_AT, STEPS = 20, 12
SOLVED = 300_000_000  # records times d up to which the optimum is looked for
ENDS = ("mu", "smoothness", "mean_mu", "mean_smoothness")
# gradient steps from the start to where numbers are taken again if there is no optimum
TRAINED = 50
Numbers: TypeAlias = dict[str, float]


class Heterogeneity(NamedTuple):
    """Heterogeneity of the clients; formulas are in the module's docstring."""

    def __repr__(self) -> str:
        return brief(self)

    where: str
    x: Floats
    weights: Floats
    batch_size: float | int | None
    exact: bool
    """Whether all numbers are exact; else see `errors`."""
    convex: bool
    """Whether f showed no negative curvature, here or at the start."""
    gradient_norm: float
    zeta_1: float
    zeta_2: float
    chance: float
    delta: float
    big_g: float
    """With big_b NaN unless at the optimum and all clients are convex there."""
    big_b: float
    fit_g: float
    fit_b: float
    noise: float
    record_noise: float
    mu: float
    smoothness: float
    mean_mu: float
    mean_smoothness: float
    start_smoothness: float
    drift_rate: float
    average_drift: float
    errors: Numbers
    """Standard errors where there are any; of mu, smoothness and delta: what clients not seen may
    add."""
    later: Heterogeneity | None = None
    """The same after a short training, if there is no optimum to measure at."""

    @property
    def noise_per_coordinate(self) -> float:
        """sigma^2 / d."""
        return self.noise / len(self.x)

    @property
    def unlikeness(self) -> float:
        """(zeta_1 / chance)^2, about 1 if all records could come from one source."""
        if self.zeta_1 <= 1e-9 * self.gradient_norm:
            return 0.0
        return (self.zeta_1 / self.chance) ** 2 if self.chance > 0 else np.inf


class _View(NamedTuple):
    """The problem, the samples that are measured, the curvature at the start, and options."""

    problem: Problem
    p: Floats
    batch_size: float | int | None
    looks: Looks
    first: Numbers
    convex: bool
    lr: float | None
    local_steps: int | None


def heterogeneity(
    problem: Problem,
    *,
    weights: str | ArrayLike = "equal",
    batch_size: float | int | None = None,
    at: Any = None,
    lr: float | None = None,
    local_steps: int | None = None,
    exact: bool | None = None,
    seed: int = 0,
) -> Heterogeneity:
    """Measure the heterogeneity of the clients, at the optimum or at `at`.

    `at` is a model or a flat vector.

    Where f has no optimum (not convex, or falling for ever), the numbers are those at the problem's
    own parameters, and `later` has them a little training away. `exact` forces or forbids the
    eigenvalues of all matrices.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.dialled(
    ...     5, 3, gradient_dissimilarity=2.0, hessian_dissimilarity=0.05, seed=1
    ... )
    >>> found = heterogeneity(problem)
    >>> found.where, round(found.zeta_1, 9), round(found.delta, 9), round(found.mean_smoothness, 9)
    ('the optimum', 2.0, 0.05, 1.0)
    """
    checks.number("lr", 1.0 if lr is None else lr, above=0)
    checks.whole("local_steps", 1 if local_steps is None else local_steps)
    if (lr is None) != (local_steps is None):
        raise InputError("lr and local_steps go together, for average_drift: give both or neither")
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    p = weights_of(a_problem(problem), weights)
    batch_sizes(problem, batch_size)  # refuses a wrong one before the work begins
    small = problem.dim <= SMALL and problem.num_clients * problem.dim**2 <= NUMBERS
    looks = looks_at(problem, p, small if exact is None else exact, rng)
    start = problem.layout.flatten(problem.params)
    first, _ = _ends(looks, start)
    convex = _no_dip(first) or (problem.mu is not None and problem.mu >= 0)
    view = _View(problem, p, batch_size, looks, first, convex, lr, local_steps)
    if at is not None:
        flat = isinstance(at, np.ndarray) and at.shape == start.shape
        return _measured(
            view,
            "the given point",
            np.array(at, float) if flat else problem.layout.flatten(at),
            start,
        )
    if convex and (
        problem.facts.optimum is not None or problem.offsets[-1] * problem.dim <= SOLVED
    ):
        with suppress(InputError):  # there is none
            return _measured(view, "the optimum", find_optimum(problem, p), start)
    trained = start
    for _ in range(TRAINED):
        trained = (
            trained
            - looks.mean.p @ client_gradients(looks.mean.problem, trained) / first["smoothness"]
        )
    later = _measured(view, f"{TRAINED} gradient steps from the start", trained, start)
    return _measured(view, "the problem's own parameters", start, trained)._replace(later=later)


def drift(problem: Problem, x: Floats, p: Floats, lr: float, local_steps: int) -> Floats:
    """Return FedAvg's drift: mean gradient along the clients' steps, less that on f itself.

    More precisely, it is the mean over clients and local steps of grad f_i(y_i), less the same for
    clients that all had f.

    The y_i start at x and follow exact uncorrected gradients; at the optimum the second mean is
    zero.

    >>> import fedscaffold as fs
    >>> pair = fs.problems.lower_bound_pair(mu=1.0, big_g=1.0)
    >>> drift(pair, np.zeros(1), np.array([0.5, 0.5]), 0.1, 2)
    array([-0.05])
    """
    y, z, total = np.broadcast_to(x, (len(p), len(x))), x, np.zeros_like(x)
    for _ in range(local_steps):
        rows, alone = client_gradients(problem, y), p @ client_gradients(problem, z)
        total += p @ rows - alone
        with np.errstate(over="ignore", invalid="ignore"):
            y, z = y - lr * rows, z - lr * alone
        if not np.isfinite(y).all():
            raise InputError(f"local steps of size {lr:g} diverge; take a smaller lr")
    return total / local_steps


def _measured(view: _View, where: str, x: Floats, other: Floats) -> Heterogeneity:
    p, rows = view.p, client_gradients(view.problem, x)
    mean = p @ rows
    ends, apart, noise = _ends(view.looks, x), _apart(view.looks, x), _noise(view, x)
    numbers, errors = (ends[k] | apart[k] | noise[k] for k in (0, 1))
    numbers["delta"] = max(numbers["delta"], -numbers["mu"])
    convex, asked = view.convex and _no_dip(numbers), np.nan
    ideal = where == "the optimum" and numbers["mu"] > -1e-3 * numbers["smoothness"]
    if view.lr is not None and view.local_steps is not None:
        asked = float(np.square(drift(view.problem, x, p, view.lr, view.local_steps)).sum())
    fit_g, fit_b = _fitted(view.looks.mean, x, other)
    return Heterogeneity(
        where=where,
        x=x,
        weights=p,
        batch_size=view.batch_size,
        exact=view.looks.exact,
        convex=convex,
        gradient_norm=float(np.linalg.norm(mean)),
        zeta_1=float(np.sqrt(p @ np.square(rows - mean).sum(axis=1))),
        big_g=float(np.sqrt(2 * p @ np.square(rows).sum(axis=1))) if ideal else np.nan,
        big_b=float(np.sqrt(2)) if ideal else np.nan,
        fit_g=fit_g,
        fit_b=fit_b,
        start_smoothness=view.first["smoothness"],
        average_drift=asked,
        errors=errors,
        later=None,
        **numbers,
    )


def _ends(looks: Looks, x: Floats) -> tuple[Numbers, Numbers]:
    """Return the extreme eigenvalues of the clients' Hessians and of their mean."""
    if looks.exact:
        hessians = client_hessians(looks.wide.problem, x)
        each = np.linalg.eigvalsh(hessians)
        mean = np.linalg.eigvalsh(np.tensordot(looks.wide.p, hessians, 1))
        return dict(
            zip(ENDS, map(float, (each.min(), each.max(), mean[0], mean[-1])), strict=True)
        ), {}
    found = [client_ends(look, x, looks.rng) for look in looks.near]
    low, high, below, above = (np.concatenate(column) for column in zip(*found, strict=True))
    i, j, n = low.argmin(), high.argmax(), looks.num_clients
    low_error = np.hypot(below[i], extreme_error(low, n))
    high_error = np.hypot(above[j], extreme_error(high, n))
    steps = passes(looks.wide, 100)
    mean, errors = mean_ends(looks.wide, x, steps, looks.rng)
    if looks.quarters:
        again = np.array([mean_ends(quarter, x, steps, looks.rng)[0] for quarter in looks.quarters])
        errors = np.hypot(errors, quartered(mean, again))
    values, unsure = (low[i], high[j], *mean), (low_error, high_error, *errors)
    return dict(zip(ENDS, map(float, values), strict=True)), dict(
        zip(ENDS, map(float, unsure), strict=True)
    )


def _apart(looks: Looks, x: Floats) -> tuple[Numbers, Numbers]:
    """Return zeta_2, delta and the drift rate."""
    wide, rate, errors = looks.wide, drift_rate(looks.wide, x), {}
    if looks.quarters:
        again = np.array([drift_rate(quarter, x) for quarter in looks.quarters])
        errors["drift_rate"] = float(quartered(np.array(rate), again))
    if looks.exact:
        hessians = client_hessians(wide.problem, x)
        norms = np.abs(np.linalg.eigvalsh(hessians - np.tensordot(wide.p, hessians, 1))).max(axis=1)
        return {
            "zeta_2": float(np.sqrt(wide.p @ norms**2)),
            "delta": float(norms.max()),
            "drift_rate": rate,
        }, {}
    found = [_distances(looks, look, x) for look in looks.near]
    norms, unsure, q = (np.concatenate(column) for column in zip(*found, strict=True))
    q, n, unsure = q / q.sum(), looks.num_clients, unsure + mean_off(looks, x)
    zeta_2, delta = float(np.sqrt(q @ norms**2)), float(norms.max())
    left_out = mean_error(norms**2, q, n) / (2 * max(zeta_2, 1e-300))
    errors["zeta_2"] = float(np.hypot(np.sqrt(q @ unsure**2), left_out))
    errors["delta"] = float(np.hypot(unsure[norms.argmax()], extreme_error(norms, n)))
    return {"zeta_2": zeta_2, "delta": delta, "drift_rate": rate}, errors


def _distances(looks: Looks, look: Look, x: Floats) -> tuple[Floats, Floats, Floats]:
    """Return ||H_i - H|| of some clients, with errors and weights.

    Each needs products with the Hessians of all clients.
    """
    most = passes(looks.mean, LOOKED_AT * STEPS, 4 * STEPS) // STEPS  # in all groups together
    number = min(len(look.p), -(-most // len(looks.near)))
    chosen = np.sort(looks.rng.choice(len(look.p), number, replace=False))

    def apply(v: Floats) -> Floats:
        own = np.zeros((len(look.p), look.problem.dim))
        own[chosen] = v
        shared = np.stack([looks.mean.p @ client_products(looks.mean.problem, x, u) for u in v])
        apart: Floats = client_products(look.problem, x, own)[chosen] - shared
        return apart

    low, high, below, above = lanczos(apply, (number, look.problem.dim), STEPS, looks.rng)
    few = halved(look, x, looks.rng)[chosen]
    return np.maximum(-low, high), np.where(high >= -low, above, below) + few, look.p[chosen]


def _noise(view: _View, x: Floats) -> tuple[Numbers, Numbers]:
    """Return the gradient noise of a batch and of a record, and the zeta_1 it explains."""
    looks, q = view.looks, np.concatenate([view.p[look.clients] for look in view.looks.near])
    columns = zip(*(_client_noise(view, look, x) for look in looks.near), strict=True)
    q, (noise, record, chance) = q / q.sum(), (np.concatenate(column) for column in columns)
    expected = float(np.sqrt(q @ chance))
    values = {"noise": float(q @ noise), "record_noise": float(q @ record), "chance": expected}
    if len(q) == looks.num_clients:
        return values, {}
    errors = [mean_error(column, q, looks.num_clients) for column in (noise, record, chance)]
    return values, dict(
        zip(values, (*errors[:2], errors[2] / (2 * max(expected, 1e-300))), strict=True)
    )


def _client_noise(view: _View, look: Look, x: Floats) -> tuple[Floats, Floats, Floats]:
    additive = noise_level(view.problem, x)[look.clients]
    whole = look.problem is view.problem
    variance = noise_level(look.problem, x, 1) - (additive if whole else 0)
    sizes, counts = batch_sizes(view.problem, view.batch_size), look.problem.counts
    drawn = 0 if sizes is None else variance / sizes[look.clients]
    unbiased = variance * counts / np.maximum(counts - 1, 1)
    explained = (1 - view.p[look.clients]) * unbiased / view.problem.counts[look.clients]
    return drawn + additive, variance, explained


def _fitted(look: Look, x: Floats, other: Floats) -> tuple[float, float]:
    """Fit G and B by least squares over points around x and between x and another point."""
    from scipy.optimize import nnls

    aside = np.random.default_rng(0).normal(size=(3, len(x)))
    radius = np.linalg.norm(other - x) or 1.0
    points = [x + t * (other - x) for t in (0.0, 0.1, 0.3, 0.6, 1.0)]
    points += list(x + radius * aside / np.linalg.norm(aside, axis=1, keepdims=True))
    rows, p = [client_gradients(look.problem, point) for point in points], look.p
    squares = np.array([[p @ np.square(g).sum(axis=1), np.sum((p @ g) ** 2)] for g in rows])
    (g2, b2), _ = nnls(np.stack([np.ones(len(points)), squares[:, 1]], axis=1), squares[:, 0])
    return float(np.sqrt(g2)), float(np.sqrt(b2))


def _no_dip(numbers: Numbers) -> bool:
    return numbers["mean_mu"] > -1e-3 * numbers["mean_smoothness"]

"""How unlike the clients of a problem are, measured on the problem itself.

At a point x (the optimum, where one can be found), with f = sum p_i f_i and Hessians H_i and H (theory.md 3.0):

    zeta_1          sqrt( sum p_i |grad f_i - grad f|^2 )
    chance          sqrt( sum p_i (1 - p_i) tr V_i / n_i ), the zeta_1 to expect if all records came from one source
    zeta_2, delta   sqrt( sum p_i ||H_i - H||^2 ), operator norms; the largest ||H_i - H|| or minus eigenvalue of an H_i
    big_g, big_b    G^2 = 2 sum p_i |grad f_i(x*)|^2 and B^2 = 2, with which convex clients always satisfy
                    sum p_i |grad f_i(y)|^2 <= G^2 + 2 L B^2 (f(y) - f*)
    fit_g, fit_b    G and B of the least-squares fit sum p_i |grad f_i|^2 = G^2 + B^2 |grad f|^2 at a few points
    noise           sigma^2 = sum p_i E |g_i - grad f_i|^2 of a minibatch gradient; record_noise: sum p_i tr V_i, of one
                    record's
    mu, smoothness  extreme eigenvalues of any H_i; mean_mu, mean_smoothness: of H; start_smoothness: L at the start
    drift_rate      |sum p_i (H_i - H) grad f_i|: FedAvg's drift for every unit of lr (K - 1) / 2 (F19)
    average_drift   |drift|^2 at the lr and local_steps asked for, see `fedscaffold.theory.expansion.drift`

Exact for small d, by eigenvalues. Else by Lanczos on Hessian-vector products, on samples of clients and records where
the problem is large; standard errors then come from the samples' spread and from Lanczos' residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

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
from fedscaffold.theory.expansion import drift, lanczos

__all__ = ["Heterogeneity", "heterogeneity"]

SMALL, NUMBERS = 300, 20_000_000  # largest d, and largest N d^2, for eigenvalues of all matrices
WORK, MEMORY = 100_000_000, 2_500_000  # records times d, and clients times d, beyond which both are sampled
SAMPLES = 3
LOOKED_AT = 20  # clients of whom ||H_i - H|| is found: each of them costs products with all
TRAINED = 50  # gradient steps from the start to where numbers are taken again if there is no optimum
Numbers: TypeAlias = dict[str, float]


class Heterogeneity(NamedTuple):
    """How unlike the clients are; formulas in the module's head."""

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
    """Standard errors of the numbers that have one."""
    later: Heterogeneity | None = None
    """The same a little training away, where there is no optimum to look at."""

    @property
    def noise_per_coordinate(self) -> float:
        """sigma^2 / d."""
        return self.noise / len(self.x)

    @property
    def unlikeness(self) -> float:
        """(zeta_1 / chance)^2: about 1 where gradients differ as if all clients' records came from one source."""
        if self.zeta_1 <= 1e-9 * self.gradient_norm:
            return 0.0
        return (self.zeta_1 / self.chance) ** 2 if self.chance > 0 else np.inf


class Look(NamedTuple):
    """A problem, or a part of one, small enough to be looked at; `clients` are those of the whole problem in it."""

    problem: Problem
    p: Floats
    clients: NDArray[np.intp]
    exact: bool
    rng: np.random.Generator


class _View(NamedTuple):
    """What is looked at, in which parts, and what is asked; `first` is the curvature at the start."""

    problem: Problem
    p: Floats
    batch_size: float | int | None
    looks: list[Look]
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
    """Measure how unlike the clients are, at the optimum or at `at`, a model or a flat vector.

    Where f has no optimum (not convex, or falling for ever), the numbers are those at the problem's own parameters,
    and `later` has them a little training away. `exact` forces or forbids the eigenvalues of all matrices.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.dialled(5, 3, gradient_dissimilarity=2.0, hessian_dissimilarity=0.05, seed=1)
    >>> found = heterogeneity(problem)
    >>> found.where, round(found.zeta_1, 9), round(found.delta, 9), round(found.mean_smoothness, 9)
    ('the optimum', 2.0, 0.05, 1.0)
    """
    p = weights_of(problem, weights)
    batch_sizes(problem, batch_size)  # refuses a wrong one before the work begins
    small = problem.dim <= SMALL and problem.num_clients * problem.dim**2 <= NUMBERS
    looks = looks_at(problem, p, small if exact is None else exact, np.random.default_rng(seed))
    start = problem.layout.flatten(problem.params)
    first, _ = _averaged(looks, lambda look: _ends(look, start))
    convex = _no_dip(first) or (problem.mu is not None and problem.mu >= 0)
    view = _View(problem, p, batch_size, looks, first, convex, lr, local_steps)
    if at is not None:
        flat = isinstance(at, np.ndarray) and at.shape == start.shape
        return _measured(view, "the given point", np.array(at, float) if flat else problem.layout.flatten(at), start)
    if convex and (problem.facts.optimum is not None or problem.offsets[-1] * problem.dim <= 3 * WORK):
        with suppress(InputError):  # there is none
            return _measured(view, "the optimum", find_optimum(problem, p), start)
    trained = start
    for _ in range(TRAINED):
        trained = trained - looks[0].p @ client_gradients(looks[0].problem, trained) / first["smoothness"]
    later = _measured(view, f"{TRAINED} gradient steps from the start", trained, start)
    return _measured(view, "the problem's own parameters", start, trained)._replace(later=later)


def _measured(view: _View, where: str, x: Floats, other: Floats) -> Heterogeneity:
    p, rows = view.p, client_gradients(view.problem, x)
    mean = p @ rows
    numbers, errors = _averaged(
        view.looks, lambda look: tuple(a | b for a, b in zip(_ends(look, x), _apart(look, x), strict=True))
    )
    numbers["delta"] = max(numbers["delta"], -numbers["mu"])
    noise, noise_errors = _averaged(view.looks, lambda look: (_noise(view, look, x), {}))
    convex, asked = view.convex and _no_dip(numbers), np.nan
    ideal = where == "the optimum" and numbers["mu"] > -1e-3 * numbers["smoothness"]
    if view.lr is not None and view.local_steps is not None:
        asked = float(np.square(drift(view.problem, x, p, view.lr, view.local_steps)).sum())
    fit_g, fit_b = _fitted(view.looks[0], x, other)
    return Heterogeneity(
        where=where,
        x=x,
        weights=p,
        batch_size=view.batch_size,
        exact=all(look.exact for look in view.looks),
        convex=convex,
        gradient_norm=float(np.linalg.norm(mean)),
        zeta_1=float(np.sqrt(p @ np.square(rows - mean).sum(axis=1))),
        big_g=float(np.sqrt(2 * p @ np.square(rows).sum(axis=1))) if ideal else np.nan,
        big_b=float(np.sqrt(2)) if ideal else np.nan,
        fit_g=fit_g,
        fit_b=fit_b,
        start_smoothness=view.first["smoothness"],
        average_drift=asked,
        errors=errors | noise_errors,
        later=None,
        **(numbers | noise),
    )


def looks_at(problem: Problem, p: Floats, exact: bool, rng: np.random.Generator) -> list[Look]:
    """The whole problem if it is small enough, else samples of its clients and their records."""
    n, d, counts = problem.num_clients, problem.dim, problem.counts
    most = max(4, MEMORY // d)
    if exact or (problem.offsets[-1] * d <= WORK and n <= most):
        return [Look(problem, p, np.arange(n), exact, rng)]
    looks = []
    for _ in range(SAMPLES):
        chosen = np.sort(rng.permutation(np.flatnonzero(p))[:most])
        rows = max(2, WORK // (d * len(chosen)))
        picked = [problem.offsets[i] + rng.permutation(counts[i])[:rows] for i in chosen]
        clients = [jax.tree.map(lambda a: a[rows], problem.records) for rows in picked]  # noqa: B023
        part = Problem(problem.functions.loss, problem.params, clients, gradient=problem.functions.gradient)
        looks.append(Look(part, p[chosen] / p[chosen].sum(), chosen, False, rng))
    return looks


def _averaged(looks: list[Look], measure: Callable[[Look], tuple[Numbers, ...]]) -> tuple[Numbers, Numbers]:
    """Mean over the samples, and standard errors: their spread, and what each is unsure of itself."""
    found = [measure(look) for look in looks]
    values = {name: float(np.mean([f[0][name] for f in found])) for name in found[0][0]}
    errors = {name: float(np.mean([f[1][name] for f in found])) for name in found[0][1]}
    if len(found) > 1:
        for name in values:
            spread = np.std([f[0][name] for f in found], ddof=1) / np.sqrt(len(found))
            errors[name] = float(np.hypot(errors.get(name, 0.0), spread))
    return values, errors


def _ends(look: Look, x: Floats) -> tuple[Numbers, Numbers]:
    """Extreme eigenvalues of the clients' Hessians and of their mean."""
    problem, p = look.problem, look.p
    names = ("mu", "smoothness", "mean_mu", "mean_smoothness")
    if look.exact:
        hessians = client_hessians(problem, x)
        each, mean = np.linalg.eigvalsh(hessians), np.linalg.eigvalsh(np.tensordot(p, hessians, 1))
        return dict(zip(names, map(float, (each.min(), each.max(), mean[0], mean[-1])), strict=True)), {}
    shape = (problem.num_clients, problem.dim)
    low, high, below, above = lanczos(lambda v: client_products(problem, x, v), shape, 20, look.rng)
    i, j = low.argmin(), high.argmax()
    ends = lanczos(lambda v: (p @ client_products(problem, x, v[0]))[None], (1, problem.dim), 100, look.rng)
    values, errors = (low[i], high[j], *ends[0], *ends[1]), (below[i], above[j], *ends[2], *ends[3])
    return dict(zip(names, map(float, values), strict=True)), dict(zip(names, map(float, errors), strict=True))


def _apart(look: Look, x: Floats) -> tuple[Numbers, Numbers]:
    """zeta_2, delta and the drift rate."""
    problem, p = look.problem, look.p
    rows = client_gradients(problem, x)
    turned = p @ client_products(problem, x, rows) - p @ client_products(problem, x, p @ rows)
    rate = float(np.linalg.norm(turned))
    if look.exact:
        hessians = client_hessians(problem, x)
        norms = np.abs(np.linalg.eigvalsh(hessians - np.tensordot(p, hessians, 1))).max(axis=1)
        return {"zeta_2": float(np.sqrt(p @ norms**2)), "delta": float(norms.max()), "drift_rate": rate}, {}
    chosen = np.sort(look.rng.choice(len(p), min(len(p), LOOKED_AT), replace=False))

    def apply(v: Floats) -> Floats:
        own = np.zeros((len(p), problem.dim))
        own[chosen] = v
        shared = np.stack([p @ client_products(problem, x, u) for u in v])
        apart: Floats = client_products(problem, x, own)[chosen] - shared
        return apart

    low, high, below, above = lanczos(apply, (len(chosen), problem.dim), 12, look.rng)
    norms, unsure = np.maximum(-low, high), np.where(high >= -low, above, below)
    q = p[chosen] / p[chosen].sum()
    zeta_2 = float(np.sqrt(q @ norms**2))
    left_out = np.sqrt((1 - len(chosen) / len(p)) / len(chosen)) * np.std(norms**2) / (2 * max(zeta_2, 1e-300))
    errors = {"zeta_2": float(np.hypot(q @ unsure, left_out)), "delta": float(unsure[norms.argmax()])}
    return {"zeta_2": zeta_2, "delta": float(norms.max()), "drift_rate": rate}, errors


def _noise(view: _View, look: Look, x: Floats) -> Numbers:
    """Gradient noise of a batch and of a record, and the differences between clients that it explains."""
    additive = noise_level(view.problem, x)[look.clients]
    whole = look.problem is view.problem
    variance = noise_level(look.problem, x, 1) - (additive if whole else 0)
    sizes, counts = batch_sizes(view.problem, view.batch_size), look.problem.counts
    drawn = 0 if sizes is None else variance / sizes[look.clients]
    unbiased = variance * counts / np.maximum(counts - 1, 1)
    explained = look.p @ ((1 - view.p[look.clients]) * unbiased / view.problem.counts[look.clients])
    sums = look.p @ (drawn + additive), look.p @ variance, np.sqrt(explained)
    return dict(zip(("noise", "record_noise", "chance"), map(float, sums), strict=True))


def _fitted(look: Look, x: Floats, other: Floats) -> tuple[float, float]:
    """G and B by least squares, over points between x and another one and around x."""
    aside, radius = np.random.default_rng(0).normal(size=(3, len(x))), np.linalg.norm(other - x) or 1.0
    points = [x + t * (other - x) for t in (0.0, 0.1, 0.3, 0.6, 1.0)]
    points += list(x + radius * aside / np.linalg.norm(aside, axis=1, keepdims=True))
    rows, p = [client_gradients(look.problem, point) for point in points], look.p
    squares = np.array([[p @ np.square(g).sum(axis=1), np.sum((p @ g) ** 2)] for g in rows])
    (g2, b2), _ = nnls(np.stack([np.ones(len(points)), squares[:, 1]], axis=1), squares[:, 0])
    return float(np.sqrt(g2)), float(np.sqrt(b2))


def _no_dip(numbers: Numbers) -> bool:
    return numbers["mean_mu"] > -1e-3 * numbers["mean_smoothness"]

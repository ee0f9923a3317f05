"""The quadratic model of a large problem, restricted to the few directions in which a run moves.

Exact plans need all Hessians as matrices and N d^3 work for every round with noise. Beyond `EXACT`
of that, the mean of a run is followed on the span of columns V only, as that of the quadratics
V'H_c V. V holds, with G_c = grad f_c(x*),

    x0 - x*, and H^k (x0 - x*) for small k          the start, and what steps on all data make of it
    H^-1 sum p_c H_c G_c                            where FedAvg's bias points (F19)
    H_c^k v, k <= DEPTH, v = x0 - x*, bias, G_c     of all clients, those that matter most

and the noise is that of equal clients with the mean Hessian H (F11): after K t steps of size g,

    E |x - E x|^2 = g^2 tr( C~ sum_{s < K t} (I - g H)^(2 s) )

with C~ the covariance of the cohort's mean gradient, by Gauss quadrature: for a draw z of
covariance C~, z' phi(H) z = sum_k w_k phi(h_k), with h_k, w_k from Lanczos' chain of z. Neither is
exact, so nothing that rests on them is promised.

Symbols: gamma = g = lr, K = local_steps, theta* = x*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.problems.quadratic import quadratic
from fedscaffold.theory.cohorts import Cohorts, shares
from fedscaffold.theory.derivatives import batch_sizes, client_gradients, client_products, solve
from fedscaffold.theory.lanczos import lanczos_chain
from fedscaffold.theory.quadratics import geometric
from fedscaffold.theory.subsampling import redrawn

__all__ = ["EXACT", "Reduced", "reduce", "spread"]

# N d^3 up to which all is exact: a round with noise takes a tenth of a second there
EXACT = 50_000_000
DEPTH = 3
CHAIN = 30  # Lanczos steps for a draw of the noise
BUDGET = 3_000_000_000  # records times d times products, for V and for the noise each
DIRECTIONS, DRAWS = 120, 12  # at most


class Reduced(NamedTuple):
    """A small problem whose noiseless runs approximate a large one's, and its noise."""

    problem: Problem
    """Quadratics in the coordinates of V, starting where the large problem starts."""
    values: Floats
    """h_k."""
    weights: Floats
    """w_k: the noise of the clients' mean gradient near the curvature h_k."""

    @property
    def floor(self) -> float:
        """Noise at rest for every unit of lr, tr A.C~ = tr(H^-1 C~) / 2 (F16)."""
        return float(np.sum(self.weights / (2 * self.values)))


def reduce(
    problem: Problem, best: Floats, batch_size: int | float | None, heard: Cohorts
) -> Reduced:
    """Reduce a problem with the optimum `best`, of clients with these weights.

    >>> import fedscaffold as fs
    >>> from fedscaffold.theory.cohorts import cohort_moments
    >>> problem = fs.problems.quadratic(num_clients=3, dim=4, mu=0.1, noise=0.5, x0=np.ones(4))
    >>> small = reduce(problem, problem.optimum(), None, cohort_moments(np.ones(3) / 3, 3))
    >>> away = np.linalg.norm(small.problem.params - small.problem.optimum())
    >>> bool(abs(away - np.linalg.norm(1 - problem.optimum())) < 1e-9)
    True
    """
    passes = BUDGET // (int(problem.offsets[-1]) * problem.dim)
    basis = _basis(problem, best, heard.p, int(np.clip(passes, 20, DIRECTIONS)))
    hessians = np.stack([client_products(problem, best, v) @ basis for v in basis.T], axis=2)
    gradients = client_gradients(problem, best)
    gradients = gradients - heard.p @ gradients  # rounding, that flat directions would magnify
    start = problem.layout.flatten(problem.params) - best
    small = quadratic(
        hessians=(hessians + np.swapaxes(hessians, 1, 2)) / 2,
        linear=-gradients @ basis,
        x0=start @ basis,
    )
    draws = int(np.clip(passes // CHAIN, 2, DRAWS))
    return Reduced(small, *_noise_spectrum(problem, best, batch_size, heard, draws))


def spread(
    small: Reduced, *, lr: float, local_steps: int, rounds: int, gap: bool = False
) -> Floats:
    """Return E |x - E x|^2 after 0 .. rounds rounds, for equal clients (F11).

    With `gap`, return by how much f is higher for it.

    >>> from fedscaffold.problems import lower_bound_pair
    >>> one = Reduced(lower_bound_pair(), np.array([0.5]), np.array([1.0]))
    >>> found = spread(one, lr=0.1, local_steps=3, rounds=1)
    >>> bool(np.allclose(found, [0, 0.1**2 * (1 + 0.95**2 + 0.95**4)]))
    True
    """
    lost = lr * small.values * (2 - lr * small.values)
    weights = small.weights * small.values / 2 if gap else small.weights
    counts = local_steps * np.arange(1, rounds + 1)[:, None]
    return np.concatenate([[0.0], lr**2 * (geometric(lost, counts) @ weights)])


def _basis(problem: Problem, best: Floats, p: Floats, most: int) -> Floats:
    """Return V (d, m) with orthonormal columns."""
    n = problem.num_clients
    start = problem.layout.flatten(problem.params) - best
    pulls = client_gradients(problem, best)
    bias = solve(problem, best, p @ client_products(problem, best, pulls), p, relative=1e-3)
    chain = lanczos_chain(_mean_product(problem, best, p), start[None], most // 4).basis[0]
    own = [pulls]
    for v in (np.tile(start, (n, 1)), np.tile(bias, (n, 1)), pulls):
        for _ in range(DEPTH):
            v = client_products(problem, best, v)
            own.append(v)
    kept = _orthonormal(np.vstack([start, bias, chain]).T, most)
    rest = np.concatenate(own).T
    return np.hstack(
        [kept, _orthonormal(rest - kept @ (kept.T @ rest), most - kept.shape[1], kept)]
    )


def _mean_product(problem: Problem, x: Floats, p: Floats) -> Callable[[Floats], Floats]:
    """Map rows v to rows H v."""
    return lambda rows: np.stack([p @ client_products(problem, x, v) for v in rows])


def _orthonormal(columns: Floats, most: int, beside: Floats | None = None) -> Floats:
    """Return orthonormal columns for the dominant directions of the normalised vectors."""
    sizes = np.linalg.norm(columns, axis=0)
    scaled = columns[:, sizes > 1e-12 * sizes.max()] if sizes.any() else columns[:, :0]
    scaled = scaled / np.linalg.norm(scaled, axis=0)
    if beside is not None:  # again: of what was left the first time, some was rounding
        scaled = scaled - beside @ (beside.T @ scaled)
    left, values, _ = np.linalg.svd(scaled, full_matrices=False)
    found: Floats = left[:, : min(most, int((values > 1e-8).sum()))]
    return found


def _noise_spectrum(
    problem: Problem, best: Floats, batch_size: int | float | None, heard: Cohorts, draws: int
) -> tuple[Floats, Floats]:
    """Return h_k and w_k of all draws combined."""
    sizes, rng = batch_sizes(problem, batch_size), np.random.default_rng(0)
    if sizes is None and problem.noise is None:
        return np.ones(1), np.zeros(1)
    z = np.stack(
        [shares(heard, rng, 1)[0] @ _drawn(problem, best, sizes, rng) for _ in range(draws)]
    )
    chain = lanczos_chain(_mean_product(problem, best, heard.p), z, CHAIN)
    nodes = [chain.tridiagonal(k) for k in range(draws)]
    weights = [
        np.square(vectors[0]) * (v @ v) / draws for (_, vectors, _), v in zip(nodes, z, strict=True)
    ]
    return np.concatenate([values for values, *_ in nodes]), np.concatenate(weights)


def _drawn(problem: Problem, x: Floats, sizes: Floats | None, rng: np.random.Generator) -> Floats:
    """Draw the noise of the clients' gradients, (N, d)."""
    rows = np.zeros((problem.num_clients, problem.dim))
    if sizes is not None:
        rows += np.sqrt(problem.counts / sizes)[:, None] * redrawn(problem, x, rng)
    if problem.noise is not None:
        plain = rng.normal(size=rows.shape)
        rows += (
            problem.noise * plain
            if problem.noise.ndim == 0
            else (problem.noise @ plain[..., None])[..., 0]
        )
    return rows

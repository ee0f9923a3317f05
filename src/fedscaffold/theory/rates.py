"""How fast a round contracts on quadratics, and where it ends, exactly.

The spectral radius lim |X^t - X*|^(1/t) of a round is what a long run of the whole state (x, xi_1
.. xi_N) shows, on sum xi_c - xi_c* = 0, from the closed form of `quadratics.py`: its cost does not
depend on the number H of local steps. The error of x alone may shrink faster: clients with an
eigenvalue in common can carry a mode of the control variates that x never shows, as all do when the
clients are equal.

Symbols: gamma = lr, H = local_steps, u = x - x*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

from fedscaffold.algorithms import Algorithm
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.quadratics import LinearRound, Spectra, linear_round, spectra
from fedscaffold.theory.round_map import SCAFFOLD, form_of, round_map

__all__ = [
    "ContractionRate",
    "bias",
    "contraction_curve",
    "contraction_rate",
    "fixed_point",
    "rounds_per_digit",
]

ROUNDING = 1e-12  # a step computed as 1 / L must be found to meet lr <= 1 / L
# (N + 1) d up to which eigenvalues come from the full matrix; above it, from Krylov spaces
DENSE = 700


class ContractionRate(NamedTuple):
    """Contraction of one round."""

    local_steps: int
    spectral_radius: float
    """Asymptotic factor by which the error shrinks per round."""

    @property
    def rounds_per_digit(self) -> float:
        """Rounds per tenfold reduction of the error, asymptotically."""
        return rounds_per_digit(self.spectral_radius)


def rounds_per_digit(rate: float) -> float:
    """Return the rounds in which an error that shrinks by `rate` a round becomes a tenth.

    These are log 10 / -log rate, and infinitely many from a rate of 1 on.

    >>> round(rounds_per_digit(0.1), 12), rounds_per_digit(1.0)
    (1.0, inf)
    """
    if rate <= 0:
        return 0.0
    return math.log(10) / -math.log(rate) if rate < 1 else math.inf


def contraction_rate(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> ContractionRate:
    """Return the exact contraction of one noiseless round with all clients, on quadratics.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> rate = contraction_rate(problem, lr=0.2, local_steps=4)
    >>> round(rate.spectral_radius**2, 10), round(rate.rounds_per_digit, 2)
    (0.3177239083, 4.02)
    """
    return contraction_curve(problem, lr=lr, local_steps=[local_steps], algorithm=algorithm)[0]


def contraction_curve(
    problem: Problem, *, lr: float, local_steps: Sequence[int], algorithm: Algorithm = SCAFFOLD
) -> list[ContractionRate]:
    """Return `contraction_rate` at several numbers of local steps.

    The clients' Hessians are decomposed once.

    >>> import fedscaffold as fs
    >>> pair = fs.problems.lower_bound_pair()
    >>> rates = contraction_curve(pair, lr=0.1, local_steps=[1, 2, 5, 10])
    >>> [round(rate.spectral_radius, 10) for rate in rates]
    [0.9, 0.8081286641, 0.5, 0.5261592398]
    """
    form = form_of(algorithm)
    given = spectra(problem)
    if form is None:
        maps = [
            round_map(problem, lr=lr, local_steps=steps, algorithm=algorithm)
            for steps in local_steps
        ]
        radii = [found.spectral_radius() for found in maps]
    else:
        radii = [
            spectral_radius(linear_round(given, form, lr=lr, local_steps=steps))
            for steps in local_steps
        ]
    return [ContractionRate(*pair) for pair in zip(local_steps, radii, strict=True)]


def fixed_point(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> Floats:
    """Return the x that a noiseless round with all clients does not change: x* + `bias`.

    It is also the mean of x in the long run when gradients carry noise of mean zero.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> fixed_point(problem, lr=0.2, local_steps=4)
    array([0.4])
    >>> fixed_point(problem, lr=0.2, local_steps=4, algorithm=fs.fedavg())
    array([0.28278679])
    """
    return np.asarray(
        spectra(problem).optimum
        + bias(problem, lr=lr, local_steps=local_steps, algorithm=algorithm)
    )


def bias(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> Floats:
    """Return where a method ends minus the optimum: 0 for SCAFFOLD, F7 for FedAvg and its kin.

    (mean A_c M_c)^-1 mean M_c xi_c*, with xi_c* = -grad f_c(x*); as sum xi_c* = 0 this is also
    -gamma H (mean A_c M_c)^-1 mean B_c xi_c*, which loses no digits when it is small.

    >>> import fedscaffold as fs
    >>> bias(fs.problems.lower_bound_pair(), lr=0.1, local_steps=10, algorithm=fs.fedavg())
    array([0.62029025])
    """
    form = form_of(algorithm)
    given = spectra(problem)
    if form is None:
        at = round_map(problem, lr=lr, local_steps=local_steps, algorithm=algorithm).fixed_point()
        return at[: given.dim] - given.optimum
    return bias_of(given, linear_round(given, form, lr=lr, local_steps=local_steps))


def bias_of(given: Spectra, one: LinearRound) -> Floats:
    """`bias` of a closed-form round."""
    if one.form.memory:
        return np.zeros(given.dim)
    push = one.basis @ (one.lag * given.xi) / given.num_clients
    return np.asarray(-one.travel * np.linalg.solve(one.mean(one.lost), push))


def spectral_radius(one: LinearRound) -> float:
    """Largest |eigenvalue| of a closed-form round on sum r_c = 0.

    >>> import fedscaffold as fs
    >>> pair = spectra(fs.problems.lower_bound_pair())
    >>> one = linear_round(pair, form_of(fs.scaffold()), lr=0.1, local_steps=1)
    >>> round(spectral_radius(one), 12)
    0.9
    """
    d, n = one.basis.shape
    if not one.form.memory:
        return float(np.abs(1 - one.form.server_lr * np.linalg.eigvalsh(one.mean(one.lost))).max())
    if one.form.at_x:
        return _option_one(one)
    if d + n <= DENSE:
        return float(np.abs(np.linalg.eigvals(one.matrix())).max())
    return _krylov_radius(one)


def _round(one: LinearRound) -> LinearOperator:
    """Return the round as a linear operator on the stacked (u, r)."""
    d, n = one.basis.shape

    def forward(states: Floats) -> Floats:
        u, r = np.split(states.reshape(d + n, -1), [d])
        return np.concatenate(one.forward(u, one.centred(r)))

    return LinearOperator((d + n, d + n), forward, matmat=forward, dtype=np.float64)


def _from_one(one: LinearRound) -> LinearOperator:
    """Return (I - T)^-1 for a round T, as a linear operator.

    Its largest eigenvalues belong to the eigenvalues of T that are nearest to 1.

    (u, r) = (I - T)^-1 (p, q) has r_c = R_c (Upsilon_c u - w + q_c), R_c = (I - B_c)^-1 and w = u -
    p / eta_g, so that sum r_c = 0 leaves (mean R_c (I - Upsilon_c)) u = mean R_c q_c + mean R_c p /
    eta_g.
    """
    d, n = one.basis.shape
    reach = 1 / one.leak
    inverse = np.linalg.inv(one.mean(reach * one.lost))
    mean_reach = one.mean(reach) / one.form.server_lr

    def apply(states: Floats) -> Floats:
        p, q = np.split(states.reshape(d + n, -1), [d])
        q = reach[:, None] * one.centred(q)
        u = inverse @ (mean_reach @ p + one.basis @ q / one.num_clients)
        moved = one.basis.T @ (p / one.form.server_lr) - one.lost[:, None] * (one.basis.T @ u)
        return np.concatenate([u, reach[:, None] * moved + q])

    return LinearOperator((d + n, d + n), apply, matmat=apply, dtype=np.float64)


def _option_one(one: LinearRound) -> float:
    """Return the spectral radius of option I, whose r_c are those of the last u.

    It is that of u'' = P u' + C u, with 2d unknowns.
    """
    d, eta = len(one.basis), one.form.server_lr
    now = np.eye(d) - eta * one.mean(one.lost)
    last = eta * (one.mean(one.lag * one.turn) - one.mean(one.lag) @ one.mean(one.turn))
    return float(
        np.abs(np.linalg.eigvals(np.block([[now, last], [np.eye(d), np.zeros((d, d))]]))).max()
    )


def _krylov_radius(one: LinearRound) -> float:
    """Return the largest |eigenvalue| from Krylov spaces of (I - T)^-1 and of T.

    The largest eigenvalues crowd together near 1 when H is large: the first settles fast there, and
    to full relative precision of 1 - rho. The second settles fast elsewhere. With lr <= 1/L and
    server_lr 1 an eigenvalue of modulus close to 1 is close to 1 (T hardly shrinks its vector only
    where Upsilon = 1, B = 0 or the other way round), so then the second need not be pressed.
    """
    curvature = np.linalg.eigvalsh(one.mean(one.lost / one.leak))  # of gamma H mean A_c
    flat = curvature[0] <= ROUNDING * curvature[-1]
    near = np.ones(1) if flat else np.abs(1 - 1 / _extreme(_from_one(one), patience=12))
    tame = one.form.server_lr == 1 and one.rates.max() <= 1 + ROUNDING and one.rates.min() >= 0
    patience = 2 if tame and near.max(initial=0) > 0.9 else 20
    found = np.concatenate([near, np.abs(_extreme(_round(one), patience))])
    return float(found.max() if found.size else np.abs(np.linalg.eigvals(one.matrix())).max())


def _extreme(operator: LinearOperator, patience: int) -> Floats:
    """Return some of the largest eigenvalues: those that converge within the given restarts.

    Copies of a multiple eigenvalue come out of rounding errors only and would be waited for in
    vain.
    """
    start = np.random.default_rng(0).normal(size=operator.shape[0])
    try:
        found: Floats = eigs(
            operator, k=4, ncv=50, v0=start, tol=1e-13, maxiter=patience, return_eigenvectors=False
        )
    except ArpackNoConvergence as unfinished:
        found = unfinished.eigenvalues
    return found

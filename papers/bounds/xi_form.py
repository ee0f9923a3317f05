"""The round and its stationary covariance in (theta, xi_1 .. xi_N), block by block, as in 000.

Two independent forms of what `fedscaffold.theory` computes: F4 for `round_map`, F6 for
    `stationary`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold.algorithms import Algorithm
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.quadratics import linear_round, spectra, to_xi
from fedscaffold.theory.round_map import SCAFFOLD, client_quadratics, form_of

__all__ = ["XiMap", "block_residual", "xi_round_map"]


class XiMap(NamedTuple):
    """X+ = matrix X + offset for X = (theta, xi_1 .. xi_N), or (theta) without clients' memory."""

    def __repr__(self) -> str:
        return brief(self)

    matrix: Floats
    offset: Floats


def xi_round_map(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> XiMap:
    """F4 as printed, on all of R^((N+1)d), or F7: the closed form that `round_map` must agree with.

    theta row: Upsilon u - (1/N) sum M_i v_i; xi_c row: Delta_c u + B_c v_c + (1/(N gamma H)) sum
    M_i v_i, with u = theta - theta*, v = xi - xi*, Delta_c = (Upsilon_c - Upsilon) / (gamma H),
    Upsilon = mean Upsilon_c.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> xi_round_map(problem, lr=0.2, local_steps=4).matrix[0].round(5)
    array([ 0.61205, -0.2952 , -0.37099])
    """
    form = form_of(algorithm)
    if form is None:
        raise InputError("no closed form is known for this algorithm; round_map differentiates it")
    given = spectra(problem)
    one = linear_round(given, form, lr=lr, local_steps=local_steps)
    d, n = one.basis.shape
    pushes = (one.basis * (one.travel * (1 - one.lag))).reshape(
        d, -1, d
    )  # E diag(m), so M_c = pushes_c V_c'
    if not form.memory:
        mean_push = (
            np.einsum("icj,ckj,ck->i", pushes, given.vectors, given.linear) / given.num_clients
        )
        return XiMap(one.matrix()[:d, :d], form.server_lr * mean_push)
    everything = np.eye(n, d + n, d)
    u, r = one.forward(np.eye(d, d + n), everything)
    # `forward` takes sum r = 0 for granted; a sum that is not zero moves theta and is conserved
    lost = one.basis @ everything / given.num_clients
    stacked = np.concatenate([u - form.server_lr * lost, r + one.basis.T @ lost])
    matrix = to_xi(given, to_xi(given, stacked, one.travel).T, 1 / one.travel).T
    star = np.concatenate([given.optimum, given.xi])
    star = to_xi(given, star[:, None], 1.0)[:, 0]
    return XiMap(matrix, star - matrix @ star)


def block_residual(
    problem: Problem, *, lr: float, local_steps: int, noise: ArrayLike, covariance: Floats
) -> float:
    """Return the largest relative residual of the corrected equations F6 at a covariance.

    An independent check of `stationary`, for SCAFFOLD: powers by repeated products, no eigenvalues,
        no doubling.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=3, dim=2, mu=0.1, seed=0)
    >>> law = fs.theory.stationary(problem, lr=0.5, local_steps=5, noise=0.1)
    >>> block_residual(problem, lr=0.5, local_steps=5, noise=0.1, covariance=law.covariance) < 1e-12
    True
    """
    hessians, _ = client_quadratics(problem)
    n, d = hessians.shape[:2]
    g, given = lr * local_steps, np.asarray(noise, np.float64)
    noises = given * np.eye(d) if given.ndim == 0 else given
    powers = [np.broadcast_to(np.eye(d), hessians.shape)]
    for _ in range(local_steps):
        powers.append(powers[-1] @ (np.eye(d) - lr * hessians))
    eps = np.sum([f @ noises @ f for f in powers[:-1]], axis=0)
    b = np.eye(d) - np.mean(powers[:-1], axis=0)
    y, yt = powers[-1].mean(axis=0), powers[-1] - powers[-1].mean(axis=0)
    blocks = covariance.reshape(n + 1, d, n + 1, d).swapaxes(1, 2)
    s, tx, xx = blocks[0, 0], blocks[0, 1:], blocks[1:, 1:]
    x_with_mean = g * np.mean(tx @ b, axis=0)  # covariance of u with (g/N) sum B_i v_i
    mean_with = g * np.mean(b[:, None] @ xx, axis=0)  # of (g/N) sum B_i v_i with every v_c
    mean_with_mean = g * np.mean(mean_with @ b, axis=0)
    first = (
        y @ s @ y
        + y @ x_with_mean
        + x_with_mean.T @ y
        + mean_with_mean
        + lr**2 / n * eps.mean(axis=0)
        - s
    )
    second = (
        y @ s @ yt
        + g * y @ tx @ b
        - y @ x_with_mean
        + x_with_mean.T @ yt
        + g * mean_with @ b
        - mean_with_mean
    )
    second = second + lr**2 / n * (eps - eps.mean(axis=0)) - g * tx
    half = (
        yt[:, None] @ s @ yt / 2
        + g * yt[:, None] @ (tx @ b)
        - yt[:, None] @ x_with_mean
        - g * mean_with @ b
    )
    half = half + (g**2 * b[:, None] @ xx @ b + mean_with_mean - g**2 * xx) / 2
    third = (
        half
        + np.transpose(half, (1, 0, 3, 2))
        + lr**2 / n * (eps.mean(axis=0) - eps - eps[:, None])
    )
    third[range(n), range(n)] += lr**2 * eps
    scale = max(np.abs(s).max(), g**2 * np.abs(xx).max())
    return float(max(np.abs(residual).max() for residual in (first, second, third)) / scale)

"""Where SCAFFOLD and FedAvg rest, and how they shake there.

First order in the step size, smooth strongly convex f.

With x* the optimum, g = lr, K = local_steps, H_c and T_c second and third derivatives of f_c at x*,
H = sum p_c H_c, T = sum p_c T_c, C_c the gradient noise, C~ = sum p_c^2 C_c (C/N for equal weights)
and A.C the X with H X + X H = C:

    F16   Cov x             = g A.C~                                          covariance
          Cov (x, xi_c)     = -(Cov x)(H_c - H) + g (p_c C_c - C~)            cross_covariance
          Cov (xi_c, xi_k)  = ([c = k] C_c - p_c C_c - p_k C_k + C~) / K      control_covariance
    F17   E x - x*          = -1/2 H^-1 T[Cov x]   (SCAFFOLD)                 bias
    F18   E xi_c - xi_c*    = -(H_c - H) bias - 1/2 (T_c - T)[Cov x]          control_bias
    F19   E x - x*          = bias + g (K-1)/2 H^-1 sum p_c (H_c - H) G_c     fedavg_bias
    F20   N -> infinity     : -(g^2/2) s(K) H^-1 sum p_c T_c[C_c],            residual_bias
                              s(K) = (K-1)/2 + (K-1)(2K-1)/(6K)
          MSE(N)            = a/N + |residual_bias|^2,   a = N tr Cov x       mse, saturation

where saturation is a / |residual_bias|^2 and G_c = grad f_c(x*). The signs of the first terms of
Cov(x, xi_c) and of control_bias are the corrected ones; the paper prints "+". With equal weights
all are the formulas of the papers; the weighted forms follow from the same one-round recursion.

Richardson-Romberg, 2 x_g - x_2g, cancels the terms in g. What FedAvg without noise then keeps is -2
g^2 b, where E x - x* = g b_1 + g^2 b + O(g^3) and, with G_c = grad f_c(x*), by expanding the fixed
point of one round,

    H b = (K-1)/2 sum p_c (T_c[b_1, G_c] + H_c^2 b_1) - 1/2 T[b_1, b_1]
          - (K-1)(K-2)/6 sum p_c H_c^2 G_c - (K-1)(2K-1)/12 sum p_c T_c[G_c, G_c]  richardson_bias

Symbols: theta = x, gamma = lr, H (local steps) = K = local_steps, xi_c = c - c_c, nabla^2 f_c =
    H_c, nabla^3 f_c = T_c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.theory.derivatives import (
    client_gradients,
    client_hessians,
    client_thirds,
    find_optimum,
    noise_covariance,
)
from fedscaffold.theory.lanczos import lanczos
from fedscaffold.theory.round_map import a_problem
from fedscaffold.theory.stationary import lyapunov

__all__ = ["Expansion", "contract", "expand", "residual_factor"]


class Expansion(NamedTuple):
    """Stationary law of SCAFFOLD and FedAvg to first order in the step size.

    Formulas in the module's docstring.
    """

    def __repr__(self) -> str:
        return brief(self)

    optimum: Floats
    hessian: Floats
    """H (d, d)."""
    noise: Floats
    """C_c (N, d, d), the covariance of client c's stochastic gradient at the optimum."""
    weights: Floats
    local_steps: int
    covariance: Floats
    """Of the server model (d, d); FedAvg's is the same to this order."""
    cross_covariance: Floats
    """Of the server model and every xi_c (N, d, d)."""
    bias: Floats
    """SCAFFOLD's, of order lr / N."""
    control_bias: Floats
    """Of every xi_c (N, d)."""
    fedavg_bias: Floats
    """FedAvg's, of order lr K."""
    residual_bias: Floats
    """Bias of SCAFFOLD with infinitely many clients, of order lr^2 K."""
    richardson_bias: Floats
    """Noiseless bias of FedAvg after Richardson-Romberg: the term of order lr^2."""
    richardson_order: float
    """Order in lr of the bias after Richardson-Romberg: 2 without noise; with noise 3/2 is proved,
    2 observed."""
    caveats: tuple[str, ...]
    """Conditions of the expansions that do not hold; empty if all do."""

    @property
    def variance(self) -> float:
        """Coefficient a of MSE(N) = a/N + b^2."""
        return float(len(self.weights) * np.trace(self.covariance))

    @property
    def saturation(self) -> float:
        """Number of clients beyond which more of them hardly help: a / b^2."""
        square = float(self.residual_bias @ self.residual_bias)
        return self.variance / square if square > 0 else np.inf

    def mse(self, num_clients: int | None = None) -> float:
        """Return E |x - x*|^2 of SCAFFOLD with so many clients like these."""
        clients = (
            len(self.weights) if num_clients is None else checks.whole("num_clients", num_clients)
        )
        return self.variance / clients + float(self.residual_bias @ self.residual_bias)

    def control_covariance(self, c: int, k: int) -> Floats:
        """Of xi_c and xi_k (d, d), to leading order."""
        p, noise = self.weights, self.noise
        own = noise[c] * (c == k)
        block: Floats = (
            own - p[c] * noise[c] - p[k] * noise[k] + _of_mean(p, noise)
        ) / self.local_steps
        return block


def expand(
    problem: Problem,
    *,
    lr: float,
    local_steps: int,
    batch_size: float | int | None = None,
    weights: str | ArrayLike = "equal",
) -> Expansion:
    """Expand SCAFFOLD's and FedAvg's law at rest around the optimum.

    All clients take part in every round.

    >>> import fedscaffold as fs
    >>> matrices = {"hessians": [[[1.0]], [[3.0]]], "linear": [[1.0], [-2.0]]}
    >>> problem = fs.problems.quadratic(**matrices, noise=0.1)
    >>> found = expand(problem, lr=0.01, local_steps=5)
    >>> found.covariance.round(9), found.bias, found.fedavg_bias.round(9)
    (array([[0.000125]]), array([-0.]), array([0.0125]))
    """
    lr, local_steps = checks.number("lr", lr, above=0), checks.whole("local_steps", local_steps)
    p = weights_of(a_problem(problem), weights)
    x = find_optimum(problem, p)
    hessians, noise = client_hessians(problem, x), noise_covariance(problem, x, batch_size)
    mean: Floats = np.tensordot(p, hessians, 1)
    covariance = lr * lyapunov(mean, _of_mean(p, noise))
    apart = hessians - mean
    thirds = contract(problem, x, covariance)
    third = p @ thirds
    bias = -0.5 * np.linalg.solve(mean, third)
    shaken = p @ contract(problem, x, noise)
    drift, second = _drift(problem, x, p, hessians, mean, local_steps)
    return Expansion(
        x,
        mean,
        noise,
        p,
        local_steps,
        covariance,
        -covariance @ apart + lr * (p[:, None, None] * noise - _of_mean(p, noise)),
        bias,
        -apart @ bias - 0.5 * (thirds - third),
        bias + lr * drift,
        -0.5 * lr**2 * residual_factor(local_steps) * np.linalg.solve(mean, shaken),
        -2 * lr**2 * second,
        1.5 if noise.any() else 2.0,
        _caveats(lr, local_steps, hessians, mean),
    )


def contract(problem: Problem, x: ArrayLike, matrix: ArrayLike) -> Floats:
    """Return the rows T_i[S_i]; `matrix` is one symmetric S for all clients, or (N, d, d).

    T_i[S] is the sum of T_i[v, v] over the scaled eigenvectors v of S, so that nothing of size d^3
    is stored.

    >>> cubic = Problem(lambda x, batch: (batch * x**3).mean(), np.zeros(1), [np.ones((4, 1))])
    >>> contract(cubic, [7.0], [[2.0]])
    array([[12.]])
    """
    values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    total = np.zeros((problem.num_clients, problem.dim))
    for k in np.flatnonzero(
        np.abs(values.reshape(-1, problem.dim)).max(axis=0) > 1e-15 * np.abs(values).max()
    ):
        v = vectors[..., k]
        total += client_thirds(problem, x, values[..., k, None] * v, v)
    return total


def residual_factor(local_steps: int) -> float:
    """s(K) = (K-1)/2 + (K-1)(2K-1)/(6K), about 5K/6.

    The mean over local steps k of k + k^2/K (F20).

    >>> residual_factor(1), residual_factor(2)
    (0.0, 0.75)
    """
    k = checks.whole("local_steps", local_steps)
    return (k - 1) / 2 + (k - 1) * (2 * k - 1) / (6 * k)


def _of_mean(p: Floats, noise: Floats) -> Floats:
    """C~, the covariance of the clients' weighted mean gradient."""
    found: Floats = np.tensordot(p * p, noise, 1)
    return found


def _drift(
    problem: Problem, x: Floats, p: Floats, hessians: Floats, mean: Floats, steps: int
) -> tuple[Floats, Floats]:
    """Return b_1 and b of FedAvg's bias without noise, lr b_1 + lr^2 b."""
    gradients = client_gradients(problem, x)
    turned = np.einsum("nij,nj->ni", hessians, gradients)
    first = (steps - 1) / 2 * np.linalg.solve(mean, p @ turned)
    along = p @ client_thirds(problem, x, first, first)
    mixed = p @ (
        client_thirds(problem, x, first, gradients)
        + np.einsum("nij,nj->ni", hessians, hessians @ first)
    )
    twice = p @ np.einsum("nij,nj->ni", hessians, turned)
    bent = p @ client_thirds(problem, x, gradients, gradients)
    second = (steps - 1) / 2 * mixed - along / 2
    second -= (steps - 1) * (steps - 2) / 6 * twice + (steps - 1) * (2 * steps - 1) / 12 * bent
    return first, np.linalg.solve(mean, second)


def _caveats(lr: float, steps: int, hessians: Floats, mean: Floats) -> tuple[str, ...]:
    """Return the conditions on lr and the number of local steps (F9, F15) that do not hold."""
    largest, apart, smallest = (
        _largest(hessians),
        _largest(hessians - mean),
        float(np.linalg.eigvalsh(mean)[0]),
    )
    asked = {
        "lr K (L + mu)": lr * steps * (largest + smallest),
        "lr K L |H_c - H| / mu": lr * steps * largest * apart / smallest,
    }
    return tuple(
        f"{name} is about {value:.2g}, above 1: the terms left out may be as large as those kept"
        for name, value in asked.items()
        if value > 1
    )


def _largest(matrices: Floats) -> float:
    """Return an estimate of the largest operator norm among symmetric matrices, for warnings."""
    low, high, *_ = lanczos(
        lambda v: np.einsum("nij,nj->ni", matrices, v),
        matrices.shape[:2],
        20,
        np.random.default_rng(0),
    )
    return float(max(-low.min(), high.max()))

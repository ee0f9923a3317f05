"""The exact contraction of one round of SCAFFOLD in the Lambda-norm of the bounds of 000 and 002.

    max |X+ - X*| / |X - X*|,    |X|^2 = |u|^2 + (gamma^2 H^2 / N) sum |v_c|^2,

with u = x - x* and v_c = xi_c - xi_c*, on sum v_c = 0 (F3). The bounds `rho`, `chi` and `rho_sharp`
of `papers.bounds.quadratic` are on its square.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.quadratics import LinearRound, linear_round, spectra
from fedscaffold.theory.rates import DENSE, ROUNDING, spectral_radius
from fedscaffold.theory.round_map import SCAFFOLD, form_of

__all__ = ["lambda_norm", "operator", "scaled"]


def lambda_norm(
    problem: Problem, *, lr: float, local_steps: int, algorithm: Algorithm = SCAFFOLD
) -> float:
    """Return the largest factor of one noiseless round with all clients, in the Lambda-norm.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> round(lambda_norm(problem, lr=0.2, local_steps=4) ** 2, 10)
    0.4171264558
    """
    form = form_of(algorithm)
    if form is None:
        raise InputError(f"the memory of {algorithm.name} is not SCAFFOLD's: it has no Lambda-norm")
    one = linear_round(spectra(problem), form, lr=lr, local_steps=local_steps)
    if not form.memory:
        return spectral_radius(one)  # a symmetric map of x alone
    small = sum(one.basis.shape) <= DENSE
    return float(np.linalg.norm(scaled(one), 2)) if small else largest_singular_value(one)


def scaled(one: LinearRound) -> Floats:
    """Return the round as a matrix of (u, r / sqrt N); its spectral norm is the Lambda-norm."""
    matrix, d = one.matrix(), len(one.basis)
    matrix[d:] /= math.sqrt(one.num_clients)
    matrix[:, d:] *= math.sqrt(one.num_clients)
    return matrix


def operator(one: LinearRound) -> LinearOperator:
    """Return `scaled` as a linear operator."""
    (d, n), root = one.basis.shape, math.sqrt(one.num_clients)

    def forward(states: Floats) -> Floats:
        u, r = np.split(states.reshape(d + n, -1), [d])
        u, r = one.forward(u, one.centred(r * root))
        return np.concatenate([u, r / root])

    def backward(states: Floats) -> Floats:
        u, r = np.split(states.reshape(d + n, -1), [d])
        u, r = one.backward(u, one.centred(r / root))
        return np.concatenate([u, r * root])

    return LinearOperator((d + n, d + n), forward, backward, forward, np.float64, backward)


def largest_singular_value(one: LinearRound) -> float:
    """The Lambda-norm of a round, by Lanczos, or by bisection with the number of larger values.

    With eta_g = 1 and option II the singular values are those of B (I - G) + Upsilon G, G = E'E / N
    a projection. So s - T T' = (s - B^2) + B G B - Upsilon G Upsilon, and by Sylvester's law it has
    as many negative eigenvalues as s - B^2 and a (2d, 2d) matrix have together, less d.
    """
    if one.form.at_x or one.form.server_lr != 1:
        start, map_ = np.random.default_rng(0).normal(size=sum(one.basis.shape)), operator(one)
        squares = eigsh(map_.T @ map_, k=1, ncv=60, v0=start, tol=1e-13, return_eigenvectors=False)
        return math.sqrt(squares[0])
    d, eye = len(one.basis), np.eye(len(one.basis))

    def mean(function: Floats) -> Floats:
        product: Floats = (one.basis * (function / one.num_clients)) @ one.basis.T
        return product

    def larger(s: float) -> int:
        reach = 1 / np.where(s == one.lag**2, 1e-16 * s, s - one.lag**2)
        cross = mean(one.lag * one.upsilon * reach)
        border = [
            [eye + mean(one.lag**2 * reach), cross],
            [cross, mean(one.upsilon**2 * reach) - eye],
        ]
        return int((one.lag**2 > s).sum() + (np.linalg.eigvalsh(np.block(border)) > 0).sum() - d)

    low, high = 0.0, one.squared_norm_bound * (1 + ROUNDING)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if larger(middle) > 0 else (low, middle)
    return math.sqrt(high)

"""The stationary law of a run with noisy gradients on quadratics: mean and covariance.

Both are exact (F5-F7, F11-F13).

Around its mean the state follows X+ = A X + noise, so in the long run its covariance solves the
discrete Lyapunov equation, for SCAFFOLD on sum xi_c = 0:

    Sigma = A Sigma A' + B                                                    F5; FedAvg: F7

Up to a thousand unknowns it is solved by doubling: Sigma <- Sigma + A Sigma A', A <- A A. Beyond,
only the covariance of x is computed, as the integral over the unit circle of what each frequency of
the noise does to x. With u, r_c, e_c of `error_dynamics.py` and R_c = (zI - B_c)^-1, a round at
frequency z = e^(i omega) is r_c = R_c (Upsilon_c u - w - e_c) with eta_g w = (z - 1 + eta_g) u, and
sum r_c = 0 leaves d equations:

    F(z) u = -eta_g mean R_c e_c,    F(z) = (z - 1) mean R_c + eta_g mean R_c (I - Upsilon_c)
    Sigma_x = (1 / 2 pi) integral of (eta_g / N)^2 F^-1 (sum R_c Cov(e_c) R_c*) F^-* d omega

Each z costs N d^3 operations. With tan(omega / 2) = e^tau the integrand is analytic in a strip
around the tau axis however close to 1 the eigenvalues come, so the trapezoidal rule converges
geometrically: half the step, squared error.

Symbols: gamma = lr, H = local_steps, C_c = noise, xi_c = c - c_c, state order (theta, xi_1 ..
xi_N), theta = x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold.algorithms import Algorithm
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.error_dynamics import Chain, chain
from fedscaffold.theory.quadratics import LinearRound, to_xi
from fedscaffold.theory.rates import spectral_radius
from fedscaffold.theory.round_map import SCAFFOLD

__all__ = ["Stationary", "by_transfer", "doubled", "entry", "lyapunov", "stationary"]

DENSE = 1000  # (N + 1) d up to which the whole covariance is computed
REACH = 1e-11  # how far the integral goes: to what is left out being this small
BATCH = 16  # frequencies at once: enough to keep matrix products busy
AGREE = 1e-6  # two step sizes agree to this: the error of the smaller one is about its square


class Stationary(NamedTuple):
    """Stationary mean and covariance."""

    def __repr__(self) -> str:
        return brief(self)

    x_mean: Floats
    """(d,) the optimum for SCAFFOLD, the biased fixed point for FedAvg."""
    x_covariance: Floats
    """(d, d)"""
    covariance: Floats | None
    """((N+1)d, (N+1)d) of (x, xi_1 .. xi_N), or of x alone without memory; None if too large to
    compute."""


def stationary(
    problem: Problem,
    *,
    lr: float,
    local_steps: int,
    noise: ArrayLike,
    algorithm: Algorithm = SCAFFOLD,
) -> Stationary:
    """Return the exact stationary mean and covariance with all clients.

    `noise` is a variance of every coordinate, one (d, d) covariance, or (N, d, d).

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> law = stationary(problem, lr=0.2, local_steps=4, noise=[[[1.0]], [[0.5]]])
    >>> law.x_mean, law.covariance.round(6)
    (array([0.4]), array([[ 0.064902, -0.00202 ,  0.00202 ],
           [-0.00202 ,  0.069359, -0.069359],
           [ 0.00202 , -0.069359,  0.069359]]))
    """
    law = chain(problem, lr=lr, local_steps=local_steps, noise=noise, algorithm=algorithm)
    _refuse_unstable(law.one, algorithm)
    d = len(law.fixed)
    if not law.one.form.memory:
        only = _memoryless(law)
        return Stationary(law.fixed, only, only)
    if sum(law.one.basis.shape) > DENSE:
        return Stationary(law.fixed, by_transfer(law), None)
    full = _by_doubling(law)
    return Stationary(law.fixed, full[:d, :d], full)


def _refuse_unstable(one: LinearRound, algorithm: Algorithm) -> None:
    plain = one.form.memory and not one.form.at_x and one.form.server_lr == 1
    if plain and one.squared_norm_bound < 1:
        return  # F8': a contraction
    radius = spectral_radius(one)
    if radius >= 1:
        raise InputError(
            f"{algorithm.name} does not settle here: its spectral radius is {radius:.6g}, not "
            "below 1"
        )


def _memoryless(law: Chain) -> Floats:
    """Return Sigma of a method without memory (F7), in the eigenbasis of the symmetric P.

    Sigma = P Sigma P + eta_g^2 gamma^2 / N mean Sigma_eps^c.
    """
    one = law.one
    lost, vectors = np.linalg.eigh(one.form.server_lr * one.mean(one.lost))
    (source,) = law.sources
    spread = np.sum(
        law.spectra.vectors @ source.covariance @ np.swapaxes(law.spectra.vectors, 1, 2), axis=0
    )
    added = vectors.T @ spread @ vectors * (source.to_u / one.num_clients) ** 2
    solved = added / (lost[:, None] + lost - lost[:, None] * lost)  # 1 - p_j p_k, p = 1 - lost
    back: Floats = vectors @ solved @ vectors.T
    return back


def _added(law: Chain) -> Floats:
    """Return B, the covariance of the noise added to (u, r) in a round."""
    d, n = law.one.basis.shape
    total = np.zeros((d + n, d + n))
    for source in law.sources:
        spread = np.zeros((n, n))
        for c, covariance in enumerate(source.covariance):
            spread[c * d : (c + 1) * d, c * d : (c + 1) * d] = covariance
        enters = entry(law.one, source.to_u, source.to_r)
        total += enters @ spread @ enters.T
    return total


def entry(one: LinearRound, to_u: float, to_r: float) -> Floats:
    """Return the map, up to sign, from noise e_1 .. e_N to (u, r), ((N+1) d, N d).

    The noise is in the clients' own coordinates.
    """
    return np.concatenate(
        [to_u * one.basis / one.num_clients, to_r * one.centred(np.eye(one.basis.shape[1]))]
    )


def doubled(power: Floats, added: Floats) -> Floats:
    """Solve X = A X A' + B, the sum over t of A^t B A'^t, for A of spectral radius below 1.

    >>> doubled(np.array([[0.5]]), np.array([[3.0]]))
    array([[4.]])
    """
    while True:
        more = power @ added @ power.T
        added = added + more
        if np.abs(more).max() <= 1e-17 * np.abs(added).max():
            return added
        power = power @ power


def lyapunov(hessian: ArrayLike, noise: ArrayLike) -> Floats:
    """Solve H X + X H = C, H positive definite.

    >>> lyapunov([[2.0, 0.0], [0.0, 1.0]], [[4.0, 3.0], [3.0, 2.0]])
    array([[1., 1.],
           [1., 1.]])
    """
    values, vectors = np.linalg.eigh(np.asarray(hessian, np.float64))
    if values[0] <= 1e-12 * values[-1]:
        raise InputError(
            "the mean Hessian must be positive definite, its smallest eigenvalue is "
            f"{values[0]:.3g}; add l2"
        )
    rotated = vectors.T @ np.asarray(noise, np.float64) @ vectors
    found: Floats = vectors @ (rotated / (values[:, None] + values)) @ vectors.T
    return found


def _by_doubling(law: Chain) -> Floats:
    """Return the full covariance of (theta, xi_1 .. xi_N)."""
    half = to_xi(law.spectra, doubled(law.one.matrix(), _added(law)), law.one.travel)
    both: Floats = to_xi(law.spectra, half.T, law.one.travel)
    return (both + both.T) / 2


def by_transfer(law: Chain) -> Floats:
    """Return the covariance of x alone, by the trapezoidal rule in tau = log tan(omega / 2).

    Option I is refused.
    """
    one = law.one
    if one.form.at_x:
        raise InputError(
            f"option I is solved up to (N + 1) d = {DENSE}, got {sum(one.basis.shape)}: take "
            "option II"
        )
    slowest = min(1.0, float(one.leak.min()), float(np.linalg.eigvalsh(one.mean(one.lost))[0]))
    low, high = np.log(REACH * slowest), -np.log(REACH)
    density, step = _density(law), 0.5
    total = density(np.arange(low, high, step))
    for _ in range(8):
        between = density(np.arange(low + step / 2, high, step))
        change = np.abs(between - total).max()
        total, step = total + between, step / 2
        if change <= AGREE * np.abs(total).max():
            sigma: Floats = step / 2 * (total + total.T)
            return sigma
    raise InputError(
        "the stationary covariance did not settle: a complex eigenvalue is too close to the unit "
        "circle"
    )


def _density(law: Chain) -> Callable[[Floats], Floats]:
    """(taus) -> the sum of the integrand over them.

    In the clients' own coordinates R_j Cov_jk conj(R_k) is Q + Q* - D with D_jk = Cov_jk / (1 -
    beta_j beta_k) and Q = z R_j D_jk, beta being the eigenvalues of B_c: so all three sums over
    clients are linear in R.
    """
    one, given, (source,) = law.one, law.spectra, law.sources
    d, n, eta = given.dim, given.num_clients, one.form.server_lr
    leak = one.leak.reshape(n, d)
    weighed = source.covariance / (
        leak[:, :, None] + leak[:, None, :] - leak[:, :, None] * leak[:, None, :]
    )
    turned = (weighed @ np.swapaxes(given.vectors, 1, 2)).reshape(-1, d)
    flat = one.basis @ turned
    sums = np.concatenate([one.basis.T / n, one.lost[:, None] * one.basis.T / n, turned], axis=1)

    def summed(weights: Floats) -> Floats:
        """Return (K, d, 3d) sums over clients, such as of V_c weights V_c', for K weights."""
        products: Floats = (one.basis * weights[:, None, :]).reshape(-1, n * d) @ sums
        return products.reshape(-1, d, 3 * d)

    def integrand(taus: Floats) -> Floats:
        y = np.exp(taus)[:, None]
        shift = 2j * y / (1 - 1j * y)  # z - 1, to full precision
        reach = 1 / (shift + one.leak)
        mean_reach, mean_lost, q = np.split(summed(reach.real) + 1j * summed(reach.imag), 3, axis=2)
        gain = np.linalg.inv(shift[:, None] * mean_reach + eta * mean_lost)
        q = (1 + shift[:, None]) * q
        spectra = (gain @ (q + _adjoint(q) - flat) @ _adjoint(gain)).real
        total: Floats = np.tensordot((eta / n) ** 2 / (np.pi * np.cosh(taus)), spectra, 1)
        return total

    return lambda taus: sum(
        (integrand(taus[k : k + BATCH]) for k in range(0, len(taus), BATCH)), np.zeros((d, d))
    )


def _adjoint(matrices: Floats) -> Floats:
    return np.swapaxes(matrices, 1, 2).conj()

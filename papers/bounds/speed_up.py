"""Linear speed-up of SCAFFOLD on quadratics, proved.

N Cov(x) is bounded whatever N, H and the clients' eigenbases.

The conjectures of the quadratics paper (000, after Corollary 1) say that in the long run tr Sigma
<~ gamma sigma^2 / N for any number H of local steps and Hessians that are not diagonal, up to a
constant that may depend on H. They are true. With the symbols of `theory/quadratics.py`, S_c =
Cov(e_c) of `theory/error_dynamics.py`, and R_c = (z I - B_c)^-1 on the circle |z| = 1,

    N Sigma = (1 / 2 pi) integral F^-1 (mean R_c S_c R_c*) F^-* d omega,
    F(z)    = mean R_c (z I - Upsilon_c)

(`theory/stationary.py`). N is nowhere but in the means: N Sigma depends on how (A_c, C_c) are
distributed over the clients, not on how many there are. Let f_a(z) = (z - u_a) / (z - v_a) for an
eigenvalue a, u_a = (1 - gamma a)^H and v_a = 1 - (1 - u_a) / (gamma a H), with 0 < gamma a < 2, so
that |u_a| < 1 and 0 <= v_a < 1; F is the mean of f(A_c).

1.  |R_a|^2 and Re f_a depend linearly on each other as z goes round, from z = 1, where they are
    1 / (1 - v)^2 and gamma a H, to z = -1, where they are 1 / (1 + v)^2 and (1 + u) / (1 + v). So
    Re f_a >= m, the least of these values of Re f over all a, hence Re F >= m I > 0 on |z| = 1,
    and, F being harmonic outside and I at infinity, on |z| >= 1. F^-1 is then analytic there and at
    most 1 / m, and no eigenvalue of a round lies there: every lr < 2 / L is stable.

2.  Noise C_c <= s^2 I. Then S_c <= s^2 gamma^2 sum_h Gamma_c^2h, a function of A_c. Choose t >= 0
    and k with
    S_a |R_a|^2 <= k (Re f_a - t) for all a; by 1. it is enough at z = 1 and z = -1. As F^-1 (Re F)
    F^-* = Re F^-1, whose mean over the circle is its value at infinity, I, and as the mean of F^-1
    F^-* is at least I + Delta^2, from the first two coefficients of F^-1 = I + Delta / z + ..,
    Delta = mean (Upsilon_c - B_c),

        N Sigma <= k (1 - t (1 + delta^2)) I

    (-> round_noise) with delta the least |u_a - v_a|, 0 if they differ in sign.

    By hand, for lr <= 1/L: with t = 0 where gamma mu H <= 1 and t = 1/2 beyond, at most 5 gamma s^2
    / mu. With the best t, and over a fine grid of gamma, H and L / mu, 1.12 gamma s^2 / mu. Equal
    clients have gamma s^2 / (mu (2 - gamma mu)) in their flattest direction (F11), at least half of
    that.

3.  Any noise with tr C_c <= sigma^2. By 1. alone, the mean of R_c S_c R_c* having entries in the
    eigenbasis of A_c that are on the diagonal at most gamma^2 H C_jj (1 + u) / ((2 - gamma a)(1 +
    v)),

        N tr Sigma <= sigma^2 gamma^2 H max_a (1 + u_a) / ((2 - gamma a)(1 + v_a)) / m^2

    (-> any_noise).

    In units of gamma sigma^2 / mu this grows like 1 / (gamma mu H) where that is large. Some growth
    is real: N = d clients that are each stiff and noisy in a direction of their own show it
    (docs/conjectures.md).

Symbols: gamma = lr, H = local_steps, mu and L the least and the largest eigenvalue of any A_c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.theory.quadratics import geometric
from papers.bounds.quadratic import branches

__all__ = ["SpeedUp", "speed_up"]

SEARCH = 80  # steps of the golden section: the bracket is then 1e-16 of its first length
GOLDEN = (np.sqrt(5) - 1) / 2


class SpeedUp(NamedTuple):
    """Bounds on N Cov(x) of SCAFFOLD in the long run that hold for every N."""

    round_noise: float
    """N Cov(x) <= this times s^2 I where every client's noise has covariance at most s^2 I."""
    any_noise: float
    """N tr Cov(x) <= this times sigma^2 where every client's noise has E|noise|^2 at most sigma^2.
    """


def speed_up(eigenvalues: ArrayLike, *, lr: float, local_steps: int) -> SpeedUp:
    """Bound N Cov(x), from the eigenvalues of all clients' Hessians, or a grid over their range.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
    >>> proved = speed_up(fs.theory.spectra(problem).values, lr=0.5, local_steps=8)
    >>> law = fs.theory.stationary(problem, lr=0.5, local_steps=8, noise=1.0)
    >>> bool(5 * np.linalg.eigvalsh(law.x_covariance).max() <= proved.round_noise)
    True
    """
    lr, steps = checks.number("lr", lr, above=0), checks.whole("local_steps", local_steps)
    try:
        a = np.ravel(np.asarray(eigenvalues, np.float64))
    except (TypeError, ValueError):
        a = np.empty(0)
    if not a.size or not np.isfinite(a).all() or a.min() <= 0:
        raise InputError("eigenvalues must be numbers, finite and above 0, at least one")
    if lr * a.max() >= 2:
        raise InputError(f"lr must be below 2/L = {2 / a.max():g}, got {lr:g}")
    u, v = branches(a, lr=lr, local_steps=steps)
    rest = geometric(lr * a, steps) / steps  # 1 - v, to full precision
    walked = lr**2 * geometric(lr * a * (2 - lr * a), steps)
    # Re f and S |R|^2 at z = 1 and at z = -1
    real = np.concatenate([lr * steps * a, (1 + u) / (1 + v)])
    spread = np.concatenate([walked / rest**2, walked / (1 + v) ** 2])
    delta = 0.0 if (u - v).min() < 0 < (u - v).max() else float(np.abs(u - v).min())
    least = float(real.min())

    def bound(t: float) -> float:
        return float((spread / (real - t)).max() * (1 - t * (1 + delta**2)))

    return SpeedUp(_lowest(bound, least), float((walked / (rest * (1 + v))).max()) / least**2)


def _lowest(bound: Callable[[float], float], end: float) -> float:
    """Minimise a maximum of monotone functions on [0, end) by golden section."""
    low, high = 0.0, end
    for _ in range(SEARCH):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if bound(left) <= bound(right) else (left, high)
    return min(bound(0.0), bound(low))

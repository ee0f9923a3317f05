"""Bounds of "A Sharper Analysis of Scaffold on Quadratics" (tag 000), in corrected form.

The clients' Hessians have eigenvalues a between mu and L; all clients take part in every round;
gamma = lr, H = local_steps. Distances are in the Lambda-norm ||X||^2 = ||theta||^2 + (gamma H)^2 /
N sum ||xi_c||^2, on states with sum xi_c = 0. F-numbers are those of docs/theory-formulas.md; what
is wrong in print is in docs/errata.md.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.theory.quadratics import lag, power
from papers.bounds import stochastic
from papers.bounds.conditions import (
    Bound,
    Prescription,
    at_most,
    bounded,
    convexity,
    not_negative,
    positive,
)

__all__ = [
    "branches",
    "chi",
    "error_noiseless",
    "factor_lemma_1",
    "factor_sharp",
    "prescribe",
    "published_local_steps",
    "rho",
    "rho_opt",
    "rho_sharp",
    "variance",
    "variance_equal_hessians",
]

Floats: TypeAlias = NDArray[Any]  # of float64

SHARE = 1.0 - 1.0 / math.e
"""1 - 1/e, the constant of Lemma 1."""


def branches(eigenvalues: ArrayLike, *, lr: float, local_steps: int) -> tuple[Floats, Floats]:
    """u_a = (1 - gamma a)^H and v_a = 1 - (1 - u_a) / (gamma a H).

    What a round leaves of theta and of xi (F8).

    >>> [x.round(4).tolist() for x in branches([0.0, 0.5], lr=0.5, local_steps=4)]
    [[1.0, 0.3164], [0.0, 0.3164]]
    """
    positive(lr=lr)
    steps = checks.whole("local_steps", local_steps)
    a = np.asarray(eigenvalues, np.float64)
    if not (np.isfinite(a).all() and (a >= 0).all()):
        raise InputError("eigenvalues must be finite and not negative")
    return power(lr * a, steps), lag(lr * a, steps)


def factor_sharp(u: Floats, v: Floats) -> float:
    """F8': the largest u_a^2 + v_a^2.

    >>> factor_sharp(np.array([0.5, 0.25]), np.array([0.0, 0.5]))
    0.3125
    """
    return float((u**2 + v**2).max())


def factor_lemma_1(*, mu: float, smoothness: float, lr: float, local_steps: int) -> float:
    """F8: max{(1 - gamma mu)^H, 1 - (1 - 1/e) / (gamma L H)}.

    >>> factor_lemma_1(mu=0.5, smoothness=1.0, lr=1.0, local_steps=1)
    0.5
    """
    return max(
        float(power(np.asarray(lr * mu), local_steps)),
        1.0 - SHARE / (lr * smoothness * local_steps),
    )


def chi(eigenvalues: ArrayLike, *, lr: float, local_steps: int) -> Floats:
    """chi_a = max(u_a, v_a): contraction of one eigendirection, F8, 000 equation (9) and Figure 2.

    u_a is the larger for gamma a H <= 1, v_a beyond; the smallest value, about 1/e, is at gamma a H
    = 1.

    >>> chi([0.01, 0.1, 1.0], lr=0.1, local_steps=100).round(3).tolist()
    [0.905, 0.366, 0.9]
    """
    u, v = branches(eigenvalues, lr=lr, local_steps=local_steps)
    largest = float(np.max(eigenvalues, initial=0.0))
    if not at_most("lr <= 1 / a", lr * largest, 1.0).met:
        raise InputError(
            f"lr must be at most 1 / a = {1 / largest:g} for the largest eigenvalue a, got {lr}"
        )
    return np.maximum(u, v)


def rho(*, mu: float, smoothness: float, lr: float, local_steps: int) -> Bound:
    """One round's factor rho = max{(1 - gamma mu)^H, 1 - (1 - 1/e) / (gamma L H)}: F8, 000 Lemma 1.

    It bounds E||X+ - Y+||^2 / ||X - Y||^2 for two runs on the same noise, any H >= 1. See
    `rho_sharp` for less.

    >>> round(rho(mu=0.25, smoothness=1.0, lr=0.2, local_steps=4).value, 10)
    0.81450625
    """
    convexity(mu, smoothness)
    positive(lr=lr)
    steps = checks.whole("local_steps", local_steps)
    factor = factor_lemma_1(mu=mu, smoothness=smoothness, lr=lr, local_steps=steps)
    return bounded(factor, "000 Lemma 1", at_most("lr <= 1 / L", lr, 1 / smoothness))


def rho_sharp(eigenvalues: ArrayLike, *, lr: float, local_steps: int) -> Bound:
    """One round's factor max_a (u_a^2 + v_a^2) <= max_a chi_a over the eigenvalues a of all A_c.

    F8', derived here.

    Lemma 1 with Cauchy-Schwarz in place of Young: (u x + v y)^2 <= (u^2 + v^2)(x^2 + y^2). Over H
    its least value is 1 - 2 sqrt(mu / L) + O(mu / L), at gamma H sqrt(mu L) = 1. No condition on lr
    beyond what makes it less than 1.

    >>> round(rho_sharp([1.0, 0.25], lr=0.2, local_steps=4).value, 10)
    0.6686812135
    """
    u, v = branches(eigenvalues, lr=lr, local_steps=local_steps)
    if not u.size:
        raise InputError("eigenvalues must hold at least one eigenvalue, got none")
    return bounded(factor_sharp(u, v), "000 Lemma 1 with Cauchy-Schwarz (F8')")


def error_noiseless(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    rounds: int,
    lambda_distance: float,
) -> Bound:
    """||theta^t - theta*||^2 <= rho^t ||X^0 - X*||_Lambda^2: F8, 000 Theorem 2 (exact gradients).

    Args:
        mu: smallest eigenvalue of any A_c.
        smoothness: L.
        lr: gamma.
        local_steps: H.
        rounds: t.
        lambda_distance: ||X^0 - X*||_Lambda, not squared.

    >>> run = {"lr": 1.0, "local_steps": 1, "rounds": 2}
    >>> error_noiseless(mu=0.5, smoothness=1.0, lambda_distance=1.0, **run).value
    0.25
    """
    not_negative(lambda_distance=lambda_distance)
    factor = rho(mu=mu, smoothness=smoothness, lr=lr, local_steps=local_steps)
    value = factor.value ** checks.whole("rounds", rounds, at_least=0) * lambda_distance**2
    return bounded(value, "000 Theorem 2", *factor.conditions)


def published_local_steps(*, mu: float, smoothness: float, lr: float) -> int:
    """H_gamma = ceil(sqrt(2 (1 - 1/e)) / (gamma sqrt(L mu))): F10, 000 equation (11).

    It balances the two terms of Lemma 1 up to a factor, not the true rate: with ten clients or
    more, the fewest rounds are needed near gamma H = 1 / sqrt(lambda_min(mean A) L), often a third
    of this.

    >>> published_local_steps(mu=0.01, smoothness=1.0, lr=1.0)
    12
    """
    convexity(mu, smoothness)
    positive(lr=lr)
    return math.ceil(math.sqrt(2 * SHARE) / (lr * math.sqrt(smoothness * mu)))


def rho_opt(*, mu: float, smoothness: float, lr: float) -> Bound:
    """rho_opt = 1 - sqrt((1 - 1/e) mu / (2 L)) = 1 - 0.562 sqrt(mu / L).

    F10, 000 (12) corrected by a factor 2.

    It is Lemma 1 at H_gamma of (11) before rounding up; after rounding up it still holds, through
    F8'.

    >>> round(rho_opt(mu=0.01, smoothness=1.0, lr=1.0).value, 4)
    0.9438
    """
    steps = published_local_steps(mu=mu, smoothness=smoothness, lr=lr)
    return bounded(
        1.0 - math.sqrt(SHARE * mu / (2 * smoothness)),
        f"000 (12) corrected, at local_steps = {steps}",
        at_most("lr <= 1 / L", lr, 1 / smoothness),
    )


def prescribe(
    *,
    mu: float,
    smoothness: float,
    num_clients: int,
    target: float,
    distance: float,
    control_distance: float,
    noise_trace: float = 0.0,
) -> Prescription:
    """Step size, local steps and rounds for a target eps: F10.

    gamma = min(1/L, N mu eps^2 / sigma^2), H by (11), T = ceil(2 log(||X^0 - X*|| / eps) /
    log(1/rho)). From 000 after (14). Without noise the promise is Theorem 2's: an error of at most
    `target`. With noise it rests on the paper's conjectures of linear speed-up and drops constants,
    which the conditions say; the exact mean squared error at T was then about an eighth of
    target^2. rho is Lemma 1's, never the printed (12).

    Args:
        mu: smallest eigenvalue of any A_c.
        smoothness: L.
        num_clients: N.
        target: eps, root of the mean squared error of theta.
        distance: ||theta^0 - theta*||.
        control_distance: root mean square of ||xi_c^0 - xi_c*||; zeta_1 when the control variates
            start at zero.
        noise_trace: sigma^2 = E||noise||^2, d times the variance of one coordinate.

    >>> start = {"distance": 1.0, "control_distance": 1.0}
    >>> plan = prescribe(mu=0.01, smoothness=1.0, num_clients=10, target=1e-3, **start)
    >>> plan.lr, plan.local_steps, plan.rounds, plan.bound.value <= 1e-6
    (1.0, 12, 348, True)
    """
    convexity(mu, smoothness)
    positive(target=target)
    not_negative(distance=distance, control_distance=control_distance, noise_trace=noise_trace)
    n = checks.whole("num_clients", num_clients)
    lr = 1.0 / smoothness
    if noise_trace > 0:
        lr = min(lr, n * mu * target**2 / noise_trace)
    steps = published_local_steps(mu=mu, smoothness=smoothness, lr=lr)
    lambda_distance = math.hypot(distance, lr * steps * control_distance)
    factor = rho(mu=mu, smoothness=smoothness, lr=lr, local_steps=steps).value
    decades = 2 * math.log(lambda_distance / target) if lambda_distance > target else 0.0
    # Equal Hessians at gamma = 1 / L and H = 1 can have rho = 0: then one round is enough.
    rounds = max(1, math.ceil(decades / -math.log(factor))) if factor > 0 else 1
    transient = error_noiseless(
        mu=mu,
        smoothness=smoothness,
        lr=lr,
        local_steps=steps,
        rounds=rounds,
        lambda_distance=lambda_distance,
    )
    value = transient.value + lr * noise_trace / (n * mu)
    conjecture = at_most("noise_trace <= 0, or else two conjectures are needed", noise_trace, 0.0)
    return Prescription(
        lr, steps, rounds, bounded(value, "000 (14)", *transient.conditions, conjecture)
    )


def variance_equal_hessians(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    num_clients: int,
    noise_trace: float,
    zeta_2: float = 0.0,
) -> Bound:
    """Trace of Sigma^theta <= gamma sigma^2 / (N mu) where all A_c are equal, any H.

    F11, 000 Corollary 1 corrected.

    Args:
        mu: smallest eigenvalue of the common Hessian.
        smoothness: L.
        lr: gamma.
        num_clients: N.
        noise_trace: sigma^2 = E||noise||^2.
        zeta_2: Hessian heterogeneity, 0 where the corollary speaks.

    >>> constants = {"mu": 0.01, "smoothness": 1.0, "noise_trace": 1.0}
    >>> variance_equal_hessians(lr=0.5, num_clients=10, **constants).value
    5.0
    """
    convexity(mu, smoothness)
    positive(lr=lr)
    not_negative(noise_trace=noise_trace, zeta_2=zeta_2)
    return bounded(
        lr * noise_trace / (checks.whole("num_clients", num_clients) * mu),
        "000 Corollary 1 corrected",
        at_most("zeta_2 <= 0 (equal Hessians)", zeta_2, 0.0),
        at_most("lr <= 1 / L", lr, 1 / smoothness),
    )


def variance(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    num_clients: int,
    noise_trace: float,
    zeta_2: float,
) -> Bound:
    """||Sigma^theta|| <= 10 gamma sigma^2 / (N mu) if gamma H L zeta_2 <= mu / 10.

    F15, 000 Theorem 3 corrected.

    The paper's "<~" is 002 Theorem 4.8 without third derivatives; constants and thresholds are
    those of its appendix.

    >>> constants = dict(mu=0.5, smoothness=1.0, num_clients=10, noise_trace=1.0, zeta_2=0.1)
    >>> bound = variance(lr=0.01, local_steps=1, **constants)
    >>> round(bound.value, 6), bound.holds
    (0.02, True)
    """
    general = stochastic.covariance(
        mu=mu,
        smoothness=smoothness,
        lr=lr,
        local_steps=local_steps,
        num_clients=num_clients,
        noise_trace=noise_trace,
        zeta_2=zeta_2,
        third_derivative=0.0,
        noise_growth=0.0,  # the paper's noise does not depend on theta
    )
    return general._replace(source="000 Theorem 3 corrected (002 Theorem 4.8, Q = 0)")

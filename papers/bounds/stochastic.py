"""Bounds of "Scaffold with Stochastic Gradients.

New Analysis with Linear Speed-Up" (Mangold et al. 2025; tag 002).

Strongly convex smooth clients (mu, L), all in every round, server step 1; gamma = lr, H =
local_steps, T = rounds. sigma^2 = `noise_trace` bounds E||noise||^2 at the optimum, beta =
`noise_growth` its growth with ||theta - theta*||^2 (A5); Q = `third_derivative` bounds third
derivatives (A3); zeta_1, zeta_2 are the root mean squares of the clients' gradients and Hessian
deviations at the optimum (A4). Constants and thresholds are those of the paper's appendix, where
its text writes "<~". They are large: the bounds are safe, not close.
"""

from __future__ import annotations

import math

from fedscaffold import checks
from papers.bounds.conditions import (
    Bound,
    Condition,
    Prescription,
    at_most,
    bounded,
    convexity,
    not_negative,
    positive,
)

__all__ = [
    "contraction",
    "covariance",
    "error",
    "error_controls",
    "error_lambda",
    "error_local",
    "error_stationary",
    "prescribe",
    "speed_up_range",
]


def contraction(*, mu: float, smoothness: float, lr: float, local_steps: int) -> Bound:
    """(1 - gamma mu / 4)^H bounds a round's factor for the squared Lambda-norm: F9, 002 Lemma 4.1.

    >>> contraction(mu=0.5, smoothness=1.0, lr=0.5, local_steps=2).broken[0].text
    'lr H (L + mu) <= 1'
    """
    convexity(mu, smoothness)
    positive(lr=lr)
    steps = checks.whole("local_steps", local_steps)
    return bounded(
        (1.0 - lr * mu / 4) ** steps,
        "002 Lemma 4.1",
        at_most("lr <= 1 / (2 L)", lr, 1 / (2 * smoothness)),
        _travel(mu, smoothness, lr, steps, 1.0),
    )


def error_lambda(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    rounds: int,
    lambda_distance: float,
    noise_trace: float,
) -> Bound:
    """E||X^T - X*||^2 <= (1 - gamma mu / 4)^(HT) ||X^0 - X*||^2 + 8 gamma sigma^2 / mu.

    F14, 002 Theorem 4.4.

    `lambda_distance` is ||X^0 - X*|| in the Lambda-norm, not squared. No speed-up with the number
    of clients.

    >>> constants = dict(mu=0.5, smoothness=1.0, lr=0.25, local_steps=2)
    >>> error_lambda(rounds=1000, lambda_distance=1.0, noise_trace=1.0, **constants).value
    4.0
    """
    not_negative(lambda_distance=lambda_distance, noise_trace=noise_trace)
    factor = contraction(mu=mu, smoothness=smoothness, lr=lr, local_steps=local_steps).value
    transient = factor ** checks.whole("rounds", rounds, at_least=0) * lambda_distance**2
    return bounded(
        transient + 8 * lr * noise_trace / mu,
        "002 Theorem 4.4",
        at_most("lr <= 1 / (4 L)", lr, 1 / (4 * smoothness)),
        _travel(mu, smoothness, lr, local_steps, 1.0),
    )


def error_stationary(
    *, mu: float, smoothness: float, lr: float, local_steps: int, noise_trace: float
) -> Bound:
    """E||theta - theta*||^2 <= 8 gamma sigma^2 / mu in the stationary law: F14, 002 Corollary 4.5.

    >>> error_stationary(mu=0.5, smoothness=1.0, lr=0.125, local_steps=2, noise_trace=1.0).value
    2.0
    """
    limit = error_lambda(
        mu=mu,
        smoothness=smoothness,
        lr=lr,
        local_steps=local_steps,
        rounds=0,
        lambda_distance=0.0,
        noise_trace=noise_trace,
    )
    return limit._replace(source="002 Corollary 4.5")


def error_local(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    noise_trace: float,
    noise_growth: float,
) -> Bound:
    """E||theta_c^h - theta*||^2 <= 28 gamma sigma^2 / mu for every client and local step.

    F14, 002 Lemma 4.6 (9).

    >>> noise = {"noise_trace": 1.0, "noise_growth": 0.0}
    >>> error_local(mu=0.5, smoothness=1.0, lr=0.05, local_steps=1, **noise).holds
    True
    """
    conditions = _local_conditions(mu, smoothness, lr, local_steps, noise_trace, noise_growth)
    return bounded(28 * lr * noise_trace / mu, "002 Lemma 4.6 (9)", *conditions)


def error_controls(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    noise_trace: float,
    noise_growth: float,
) -> Bound:
    """E||xi_c - xi_c*||^2 <= 54 L sigma^2 / (mu H) for every client: F14, 002 Lemma 4.6 (10).

    >>> noise = {"noise_trace": 1.0, "noise_growth": 0.0}
    >>> error_controls(mu=0.5, smoothness=1.0, lr=0.01, local_steps=4, **noise).value
    27.0
    """
    conditions = _local_conditions(mu, smoothness, lr, local_steps, noise_trace, noise_growth)
    return bounded(
        54 * smoothness * noise_trace / (mu * local_steps), "002 Lemma 4.6 (10)", *conditions
    )


def covariance(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    num_clients: int,
    noise_trace: float,
    zeta_2: float,
    third_derivative: float,
    noise_growth: float,
) -> Bound:
    """The covariance of theta: F15.

    ||Sigma^theta|| <= 10 g s^2 / (N mu) + 90480 g^1.5 Q s^3 / mu^2.5 + 1.728e7 g^3 H Q^2 s^4 / mu^3

    002 Theorem 4.8 with g = gamma, s = sigma; 90480 = 6 * 15080 and 1.728e7 = 48 * 600^2. The norm
    is the operator's.

    >>> zero = dict.fromkeys(("zeta_2", "third_derivative", "noise_growth"), 0.0)
    >>> quadratic = dict(mu=1.0, smoothness=1.0, noise_trace=1.0, **zero)
    >>> round(covariance(lr=0.001, local_steps=10, num_clients=10, **quadratic).value, 6)
    0.001
    """
    conditions = _stationary_conditions(mu, smoothness, lr, local_steps, zeta_2, noise_growth)
    terms = _variance_terms(mu, lr, local_steps, num_clients, noise_trace, third_derivative)
    return bounded(sum(terms), "002 Theorem 4.8", *conditions)


def error(
    *,
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    rounds: int,
    num_clients: int,
    dim: int,
    distance: float,
    zeta_1: float,
    noise_trace: float,
    zeta_2: float,
    third_derivative: float,
    noise_growth: float,
) -> Bound:
    """The error after T rounds: F21.

    E||theta^T - theta*||^2 <= (1 - g mu / 4)^(HT) {4 D^2 + 4 g^2 H^2 zeta_1^2 + 32 g s^2 / mu}
                               + 2 d V

    002 Theorem 4.9 with control variates starting at zero; g = gamma, D = `distance` = ||theta^0 -
    theta*||, d = `dim`, V the bound of Theorem 4.8. The statement prints 2, 2 and 64 / L in the
    transient; its proof, (77), gives these.

    >>> names = ("noise_trace", "zeta_1", "zeta_2", "third_derivative", "noise_growth")
    >>> start = dict.fromkeys(names, 0.0) | {"mu": 1.0, "smoothness": 1.0, "distance": 0.5}
    >>> error(lr=0.01, local_steps=1, rounds=0, num_clients=10, dim=2, **start).value
    1.0
    """
    conditions = _stationary_conditions(mu, smoothness, lr, local_steps, zeta_2, noise_growth)
    terms = _variance_terms(mu, lr, local_steps, num_clients, noise_trace, third_derivative)
    not_negative(distance=distance, zeta_1=zeta_1)
    factor = contraction(mu=mu, smoothness=smoothness, lr=lr, local_steps=local_steps).value
    start = 4 * distance**2 + 4 * (lr * local_steps * zeta_1) ** 2 + 32 * lr * noise_trace / mu
    transient = factor ** checks.whole("rounds", rounds, at_least=0) * start
    return bounded(
        transient + 2 * checks.whole("dim", dim) * sum(terms), "002 Theorem 4.9", *conditions
    )


def speed_up_range(
    *, mu: float, smoothness: float, target: float, third_derivative: float
) -> float:
    """N <~ min((mu / (Q eps))^(2/3), sqrt(L mu) / (Q eps)).

    Clients up to which each client's work falls as 1/N (F22).

    >>> speed_up_range(mu=1.0, smoothness=1.0, target=0.001, third_derivative=1.0).__round__(6)
    100.0
    """
    convexity(mu, smoothness)
    positive(target=target)
    not_negative(third_derivative=third_derivative)
    spread = third_derivative * target
    return (
        min((mu / spread) ** (2 / 3), math.sqrt(smoothness * mu) / spread)
        if spread > 0
        else math.inf
    )


def prescribe(
    *,
    mu: float,
    smoothness: float,
    num_clients: int,
    dim: int,
    target: float,
    distance: float,
    zeta_1: float,
    zeta_2: float,
    noise_trace: float,
    third_derivative: float,
    noise_growth: float,
) -> Prescription:
    """Step, local steps and rounds for E||theta^T - theta*||^2 <= eps^2.

    F22, 002 Corollary 4.10 corrected.

    gamma = min(1/L, N mu eps^2 / s^2, mu^(5/3) eps^(4/3) / (Q^(2/3) s^2), L^(1/2) mu^(3/2) eps / (Q
    s^2)), H = min(1, mu / zeta_2) / (gamma L), T = (L / mu) max(1, zeta_2 / mu) log(psi / eps^2),
    with s = sigma, psi = ||theta^0 - theta*||^2 + zeta_1^2 / L^2 + s^2 / (L mu). All constants
    hidden in the paper's "<~" are 1 here, so the bound returned, Theorem 4.9 at these values, does
    not hold; exact errors on quadratics were 0.15 to 0.27 of eps^2. The printed exponents of H are
    wrong; written through gamma they cannot be.

    >>> start = dict(distance=1.0, zeta_1=1.0, zeta_2=0.05, noise_trace=1.0)
    >>> start |= dict(third_derivative=0.0, noise_growth=0.0)
    >>> plan = prescribe(mu=0.1, smoothness=1.0, num_clients=10, dim=5, target=0.1, **start)
    >>> round(plan.lr, 6), plan.local_steps, plan.rounds
    (0.01, 100, 71)
    """
    convexity(mu, smoothness)
    positive(target=target)
    not_negative(distance=distance, zeta_1=zeta_1, zeta_2=zeta_2, noise_trace=noise_trace)
    not_negative(third_derivative=third_derivative)
    q, s2 = third_derivative, noise_trace
    lr = 1 / smoothness
    if s2 > 0:
        lr = min(lr, checks.whole("num_clients", num_clients) * mu * target**2 / s2)
    if s2 > 0 and q > 0:
        lr = min(lr, mu ** (5 / 3) * target ** (4 / 3) / (q ** (2 / 3) * s2))
        lr = min(lr, math.sqrt(smoothness) * mu**1.5 * target / (q * s2))
    likeness = min(1.0, mu / zeta_2) if zeta_2 > 0 else 1.0
    local_steps = max(1, math.floor(likeness / (lr * smoothness) * (1 + 1e-12)))
    psi = distance**2 + (zeta_1 / smoothness) ** 2 + s2 / (smoothness * mu)
    log = math.log(psi / target**2) if psi > target**2 else 0.0
    rounds = max(1, math.ceil(smoothness / mu / likeness * log))
    promise = error(
        mu=mu,
        smoothness=smoothness,
        lr=lr,
        local_steps=local_steps,
        rounds=rounds,
        num_clients=num_clients,
        dim=dim,
        distance=distance,
        zeta_1=zeta_1,
        noise_trace=s2,
        zeta_2=zeta_2,
        third_derivative=q,
        noise_growth=noise_growth,
    )
    return Prescription(lr, local_steps, rounds, promise)


def _travel(mu: float, smoothness: float, lr: float, local_steps: int, most: float) -> Condition:
    share = "1" if most == 1 else f"1 / {round(1 / most)}"
    return at_most(f"lr H (L + mu) <= {share}", lr * local_steps * (smoothness + mu), most)


def _local_conditions(
    mu: float,
    smoothness: float,
    lr: float,
    local_steps: int,
    noise_trace: float,
    noise_growth: float,
) -> tuple[Condition, Condition]:
    convexity(mu, smoothness)
    positive(lr=lr)
    not_negative(noise_trace=noise_trace, noise_growth=noise_growth)
    steps = checks.whole("local_steps", local_steps)
    # The second is assumed by Lemma B.2, on which Lemma 4.6 rests, and forgotten in its statement.
    return _travel(mu, smoothness, lr, steps, 1 / 12), at_most(
        "lr beta <= L", lr * noise_growth, smoothness
    )


def _stationary_conditions(
    mu: float, smoothness: float, lr: float, local_steps: int, zeta_2: float, noise_growth: float
) -> tuple[Condition, Condition, Condition]:
    convexity(mu, smoothness)
    positive(lr=lr)
    not_negative(zeta_2=zeta_2, noise_growth=noise_growth)
    steps = checks.whole("local_steps", local_steps)
    return (
        at_most("lr H L zeta_2 <= mu / 10", lr * steps * smoothness * zeta_2, mu / 10),
        _travel(mu, smoothness, lr, steps, 1 / 48),
        at_most("lr beta <= mu / 19", lr * noise_growth, mu / 19),
    )


def _variance_terms(
    mu: float,
    lr: float,
    local_steps: int,
    num_clients: int,
    noise_trace: float,
    third_derivative: float,
) -> tuple[float, float, float]:
    not_negative(noise_trace=noise_trace, third_derivative=third_derivative)
    s, q = math.sqrt(noise_trace), third_derivative
    return (
        10 * lr * s**2 / (checks.whole("num_clients", num_clients) * mu),
        6 * 15080 * lr**1.5 * q * s**3 / mu**2.5,
        48 * 600**2 * lr**3 * local_steps * q**2 * s**4 / mu**3,
    )

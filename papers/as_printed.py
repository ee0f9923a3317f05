"""Formulas as the papers print them, where they are wrong: here only to show that they are.

Never use them.

Each name ends in `_as_printed`; the page docs/errata.md has the list in words, and
tests/papers/test_errata.py shows each one failing and its corrected form passing the same check.
Tags: 000 quadratics, 002 stochastic, 004 original.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from papers.bounds.conditions import Condition, Federation, at_most

Floats: TypeAlias = NDArray[Any]  # of float64


def step_1_as_printed(ends: Floats, xi_next: Floats, reach: float) -> float:
    """||theta+||^2 = sum ||z_c||^2 / N^2 - (gamma H / N)^2 sum ||xi_c+||^2: 000 Step 1.

    Right with 1 / N both times.

    `ends` are z_c = theta_c + gamma H xi_c and `reach` is gamma H, all as deviations from the fixed
    point.

    >>> step_1_as_printed(np.ones((2, 1)), np.zeros((2, 1)), 1.0)  # theta+ = 1
    0.5
    """
    return float((np.sum(ends**2) - reach**2 * np.sum(xi_next**2)) / len(ends) ** 2)


def control_factor_as_printed(a: float, *, lr: float, local_steps: int) -> float:
    """1 - (1 - (1 - gamma a)^H) / a: 000 (6) and (7).

    Right is 1 - (1 - (1 - gamma a)^H) / (gamma H a).

    >>> round(control_factor_as_printed(0.25, lr=0.2, local_steps=4), 4)
    0.258
    """
    return 1 - (1 - (1 - lr * a) ** local_steps) / a


def contraction_v_as_printed(a: float, *, lr: float, local_steps: int) -> float:
    """Young's v = gamma H |1 - (1 - (1 - gamma a)^H) / (gamma H a)|: 000 below (8).

    Right without the factor gamma H.

    >>> contraction_v_as_printed(1.0, lr=1.0, local_steps=3)
    2.0
    """
    reach = lr * local_steps
    return reach * abs(1 - (1 - (1 - lr * a) ** local_steps) / (reach * a))


def rho_opt_as_printed(*, mu: float, smoothness: float) -> float:
    """rho_opt = 1 - sqrt(2 (1 - 1/e) mu / L): 000 (12); Lemma 1 gives half the gap.

    >>> round(rho_opt_as_printed(mu=0.01, smoothness=1.0), 4)
    0.8876
    """
    return 1 - math.sqrt(2 * (1 - 1 / math.e) * mu / smoothness)


def large_steps_rate_as_printed(*, mu: float, smoothness: float) -> float:
    """1 - mu / L as the contraction at H = 1 / (gamma mu): 000 below (12).

    Right is 1 - (1 - 1/e) mu / L.

    >>> large_steps_rate_as_printed(mu=0.5, smoothness=1.0)
    0.5
    """
    return 1 - mu / smoothness


def corollary_1_as_printed(*, lr: float, num_clients: int, noise_trace: float) -> float:
    """Trace of Sigma^theta <= gamma sigma^2 / N: 000 Corollary 1 and Theorem 3.

    Right is gamma sigma^2 / (N mu).

    >>> corollary_1_as_printed(lr=0.5, num_clients=10, noise_trace=1.0)
    0.05
    """
    return lr * noise_trace / num_clients


def theorem_3_condition_as_printed(
    *, lr: float, local_steps: int, zeta_2: float, mu: float
) -> Condition:
    """Condition gamma H zeta_2 <= mu: 000 Theorem 3.

    Right is gamma H L zeta_2 <= mu, which has no unit.

    >>> theorem_3_condition_as_printed(lr=0.1, local_steps=5, zeta_2=1.0, mu=1.0).met
    True
    """
    return at_most("lr H zeta_2 <= mu", lr * local_steps * zeta_2, mu)


class Blocks(NamedTuple):
    """A stationary covariance in blocks, and what its equations need.

    Upsilon_c, B_c and the noise of a round.
    """

    theta: Floats  # (d, d)
    theta_xi: Floats  # (N, d, d)
    xi: Floats  # (N, N, d, d)
    upsilon: Floats  # (N, d, d), (I - gamma A_c)^H
    b: Floats  # (N, d, d), I - (gamma H A_c)^-1 (I - Upsilon_c)
    noise: Floats  # (N, d, d), covariance of the noise accumulated in a round
    lr: float
    local_steps: int


def block_sign_as_printed(blocks: Blocks, c: int) -> Floats:
    """Right side for gamma H Sigma_c^(theta xi): 000 after Theorem 2.

    The second term in braces needs a minus (F6).

    >>> zero = np.zeros((1, 1, 1))
    >>> block_sign_as_printed(Blocks(zero[0], zero, zero[None], zero, zero, zero, 0.1, 2), 0)
    array([[0.]])
    """
    s, g, n = blocks, blocks.lr * blocks.local_steps, len(blocks.b)
    mean, gap = s.upsilon.mean(axis=0), s.upsilon[c] - s.upsilon.mean(axis=0)
    braces = sum(mean @ s.theta_xi[i] @ s.b[i] + s.b[i] @ s.theta_xi[i].T @ gap for i in range(n))
    one = sum(s.b[i] @ s.xi[i, c] @ s.b[c] for i in range(n))
    both = sum(s.b[i] @ s.xi[i, j] @ s.b[j] for i in range(n) for j in range(n))
    right: Floats = mean @ s.theta @ gap + g * mean @ s.theta_xi[c] @ s.b[c] - g / n * braces
    right += g**2 / n * one - g**2 / n**2 * both + s.lr**2 / n * (s.noise[c] - s.noise.mean(axis=0))
    return right


def block_index_as_printed(blocks: Blocks, c: int, k: int) -> Floats:
    """Right side for (gamma H)^2 Sigma_ck^xi, c != k: 000 after Theorem 2.

    Its third term needs xi_c, not xi_k (F6).

    >>> zero = np.zeros((2, 1, 1))
    >>> blocks = Blocks(zero[0], zero, np.zeros((2, 2, 1, 1)), zero, zero, zero, 0.1, 2)
    >>> block_index_as_printed(blocks, 0, 1)
    array([[0.]])
    """
    s, g, n = blocks, blocks.lr * blocks.local_steps, len(blocks.b)
    gaps, every = s.upsilon - s.upsilon.mean(axis=0), range(len(blocks.b))
    braces = sum(
        gaps[c] @ s.theta_xi[i] @ s.b[i] + s.b[i] @ s.theta_xi[i].T @ gaps[k] for i in every
    )
    one = sum(s.b[c] @ s.xi[c, i] @ s.b[i] + s.b[i] @ s.xi[i, k] @ s.b[k] for i in every)
    both = sum(s.b[i] @ s.xi[i, j] @ s.b[j] for i in every for j in every)
    right: Floats = gaps[c] @ s.theta @ gaps[k] + g * gaps[c] @ s.theta_xi[k] @ s.b[k]
    right += g * s.b[c] @ s.theta_xi[k].T @ gaps[k] - g / n * braces
    right += g**2 * (s.b[c] @ s.xi[c, k] @ s.b[k] + both / n**2 - one / n)
    right += s.lr**2 / n * (s.noise.mean(axis=0) - s.noise[c] - s.noise[k])
    return right


def control_sign_as_printed(xi: Floats, end: Floats, x_next: Floats, reach: float) -> Floats:
    """xi+ = xi + (theta+ - theta_c) / (gamma H): 002 below (16).

    Right is theta_c - theta+, as in its own (5).

    >>> control_sign_as_printed(np.zeros(1), np.ones(1), np.zeros(1), 1.0)
    array([-1.])
    """
    return xi + (x_next - end) / reach


def lemma_c12_as_printed(hessians: Floats) -> float:
    """||Delta_c|| <= zeta_2 for every client: 002 Lemma C.12.

    True of the clients' average only, up to constants.

    Returns zeta_2, the root mean square of ||A_c - mean A||, Delta_c being (Upsilon_c - mean
    Upsilon) / (gamma H).

    >>> lemma_c12_as_printed(np.array([[[1.0]], [[2.0]]]))
    0.5
    """
    gaps = np.linalg.norm(hessians - hessians.mean(axis=0), 2, axis=(1, 2))
    return float(np.sqrt(np.mean(gaps**2)))


def covariance_theta_xi_as_printed(
    solution: Floats, hessian_gap: Floats, noise_gap: Floats, *, lr: float, num_clients: int
) -> Floats:
    """Sigma_c^(theta xi) = (gamma/N) (A C)(H_c - H) + (gamma/N)(C_c - C): 002 Lemma 5.1.

    Right with a minus (F16).

    `solution` is A C, the X with H X + X H = C; `hessian_gap` H_c - H; `noise_gap` C_c - C.

    >>> one, zero = np.eye(1), np.zeros((1, 1))
    >>> covariance_theta_xi_as_printed(one, one, zero, lr=0.1, num_clients=2)
    array([[0.05]])
    """
    return lr / num_clients * (solution @ hessian_gap + noise_gap)


def lemma_e1_remainder_as_printed(*, lr: float, local_steps: int, smoothness: float) -> float:
    """B_c = gamma (H - 1) / 2 H_c + O(gamma^2 H): 002 Lemma E.1.

    The remainder grows as gamma^2 H^2 (F16).

    >>> lemma_e1_remainder_as_printed(lr=0.1, local_steps=10, smoothness=1.0).__round__(6)
    0.1
    """
    return lr**2 * local_steps * smoothness**2


def lemma_e2_as_printed(hessian_gap: float, bias: float) -> float:
    """b_c^xi = (H_c - H) b^theta + O(gamma), in one dimension: 002 Lemma E.2.

    The sign is wrong and a term lacks (F18).

    >>> lemma_e2_as_printed(2.0, 0.1)
    0.2
    """
    return hessian_gap * bias


def lemma_e4_as_printed(
    hessian: float, third: float, variance: float, *, num_clients: int
) -> float:
    """b^theta = -H^-1 f''' Sigma^theta / (2 N), in one dimension: 002 Lemma E.4.

    Right without 1/N (it is in Sigma).

    >>> lemma_e4_as_printed(1.0, 1.0, 1.0, num_clients=5)
    -0.1
    """
    return -third * variance / (2 * num_clients * hessian)


def cor_4_10_exponents_as_printed(
    *, mu: float, smoothness: float, num_clients: int, third_derivative: float, target: float
) -> float:
    """max(1/N, (Q eps)^(2/3) / mu, Q L^(1/2) eps / mu^(1/2)).

    002 Corollary 4.10, the factor of H and of T H.

    Right is max(1/N, (Q eps / mu)^(2/3), Q eps / (L mu)^(1/2)): F22; only these have no unit.

    >>> constants = {"mu": 1.0, "smoothness": 1.0, "third_derivative": 1.0}
    >>> cor_4_10_exponents_as_printed(num_clients=4, target=0.001, **constants)
    0.25
    """
    q = third_derivative * target
    return max(1 / num_clients, math.pow(q, 2 / 3) / mu, q * math.sqrt(smoothness / mu))


def option_two_eq19_as_printed(
    c: Floats, c_i: Floats, x: Floats, y: Floats, *, lr: float, local_steps: int
) -> Floats:
    """c_i+ = c - c_i + (x - y) / (K eta): 004 (19).

    Right is c_i - c + ..., as in its own Algorithm 1.

    >>> zero, one = np.zeros(1), np.ones(1)
    >>> option_two_eq19_as_printed(zero, one, one, zero, lr=0.5, local_steps=2)
    array([0.])
    """
    return c - c_i + (x - y) / (local_steps * lr)


def ideal_update_eq6_as_printed(y: Floats, gradient: Floats) -> Floats:
    """y+ = y + grad f(y): 004 (6); right is y - eta grad f(y).

    >>> ideal_update_eq6_as_printed(np.ones(1), np.ones(1))
    array([2.])
    """
    return y + gradient


def pair_b_as_printed(big_g: float) -> tuple[float, float]:
    """(G, B) = (G, 3) for the lower-bound pair: 004 proof of Theorem VI.

    Right is (sqrt(2) G, sqrt(3)).

    >>> pair_b_as_printed(1.0)
    (1.0, 3.0)
    """
    return big_g, 3.0


def lemma_8_as_printed(offset: Floats, gradient: Floats, *, lr: float, local_steps: int) -> float:
    """(1 - 1/(K-1)) ||y - x||^2 + K eta^2 ||g||^2 >= ||y - x - eta g||^2: 004 Lemma 8.

    Right with 1 + 1/(K-1).

    >>> lemma_8_as_printed(np.ones(1), np.zeros(1), lr=0.1, local_steps=2)  # bounds 1
    0.0
    """
    return float(
        (1 - 1 / (local_steps - 1)) * offset @ offset + local_steps * lr**2 * gradient @ gradient
    )


def lemma_22_as_printed(setting: Federation) -> float:
    """E f(x^r) - f(E x^r) <= 3 K beta sigma^2 / N: 004 Lemma 22; a factor eta^2 is lacking.

    >>> noise = {"smoothness": 1.0, "noise_trace": 1.0}
    >>> lemma_22_as_printed(Federation(local_steps=2, num_clients=3, **noise))
    2.0
    """
    return 3 * setting.local_steps * setting.smoothness * setting.noise_trace / setting.num_clients


def fedavg_step_as_printed(setting: Federation, rounds: int) -> float:
    """Step s = min{log(max(1, mu^2 R d / c_1)) / (mu R), 1 / (8 (1 + B^2) beta)}, d = 3 D^2.

    004 proof of Theorem V.

    The recursion contracts by 1 - mu s / 2, so that Lemma 1 gives twice this; and where c_1 = 0 (no
    noise, no sampling) the drift 36 beta G^2 s^2 must limit the step, which it does not. See
    `original.fedavg`.

    >>> constants = {"smoothness": 1.0, "mu": 0.1, "big_g": 1.0, "big_b": 1.0, "distance": 1.0}
    >>> setting = Federation(local_steps=2, num_clients=2, **constants)
    >>> fedavg_step_as_printed(setting, 10**6)  # however many rounds
    0.0625
    """
    it = setting
    c_1 = 2 * it.noise + 8 * it.sampling
    largest = 1 / (8 * (1 + it.need("big_b") ** 2) * it.smoothness)
    log = (
        math.log(max(1.0, it.mu**2 * rounds * 3 * it.need("distance") ** 2 / c_1))
        if c_1 > 0
        else math.inf
    )
    return min(log / (it.mu * rounds), largest)


def fedavg_non_convex_as_printed(setting: Federation, rounds: int) -> float:
    """Rate beta M sqrt(F / (R K S)) + F^(2/3) (beta G^2)^(1/3) / (R+1)^(2/3) + B^2 beta F / R.

    004 Theorem V.

    By units, the first needs sqrt(beta) and the second beta^2.

    >>> constants = {"smoothness": 2.0, "big_g": 0.0, "big_b": 1.0, "suboptimality": 1.0}
    >>> fedavg_non_convex_as_printed(Federation(local_steps=2, num_clients=2, **constants), 4)
    0.5
    """
    beta, f, r = setting.smoothness, setting.need("suboptimality"), rounds
    noise = beta * math.sqrt(
        (setting.noise + setting.sampling) * f / r
    )  # M^2 = K S (noise + sampling)
    drift = math.pow((f / (r + 1)) ** 2 * beta * setting.need("big_g") ** 2, 1 / 3)
    return noise + drift + setting.need("big_b") ** 2 * beta * f / r


def scaffold_non_convex_as_printed(setting: Federation, rounds: int) -> float:
    """Rate sigma sqrt(F / (R K S)) sqrt(1 + N / eta_g^2) + (beta F / R) (N / S)^(2/3).

    004 Theorem VII.

    By units, the first needs sqrt(beta); by Lemma 18, S in place of N.

    >>> constants = {"smoothness": 2.0, "suboptimality": 1.0}
    >>> setting = Federation(local_steps=2, num_clients=2, **constants)
    >>> scaffold_non_convex_as_printed(setting, 4)
    0.5
    """
    it, n, f = setting, setting.num_clients, setting.need("suboptimality")
    noise = math.sqrt(it.noise_trace * f / (rounds * it.local_steps * it.heard))
    rest = it.smoothness * f / rounds * math.pow(n / it.heard, 2 / 3)
    return noise * math.sqrt(1 + n / it.server_lr**2) + rest

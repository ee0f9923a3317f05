"""Bounds of "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (tag 004).

The theorems state rates up to constants and logarithms. Here every number has its constants: a
theorem's one-round inequality is summed with the step its tuning lemma gives, so that the result is
a promise and not an order. Steps are effective steps s = K eta_l eta_g; lr = s / (K eta_g) is what
a client uses. Output: a past model drawn with the theorem's weights (004 (22)), not the last one.
`lr` is the tuned one unless given. Far too careful for practice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fedscaffold import checks
from papers.bounds.conditions import (
    Bound,
    Condition,
    Federation,
    Prescription,
    Tuned,
    at_most,
    bounded,
    positive,
    tuned_linear,
    tuned_sublinear,
)

__all__ = [
    "Rounds",
    "fedavg",
    "fedavg_lower_bound",
    "fedavg_round",
    "lower_bound_constant",
    "pair_best_lr",
    "pair_round",
    "scaffold",
    "scaffold_quadratic",
    "scaffold_round",
    "table_2",
]


LARGEST = "step <= its largest value"


class Rounds(NamedTuple):
    """Rounds to the target, logarithms and constants dropped.

    None where a method has no such rate.
    """

    strongly_convex: float | None
    non_convex: float | None


def fedavg(setting: Federation, rounds: int, *, lr: float | None = None) -> Prescription:
    """FedAvg after R rounds: F23, 004 Theorem I (V), for eta_g >= 1, s <= 1 / (8 (1 + B^2) beta).

    mu > 0   E f(x) - f*      <= 3 D^2 / (s W) + 3 s (noise + 4 sampling) + 54 beta G^2 s^2
    mu = 0   the same with W = R + 1
    else     E||grad f(x)||^2 <= 5 F / (s (R+1)) + 5 beta s (noise + 2 sampling) + 20 beta^2 G^2 s^2

    noise = sigma^2 (1 + S / eta_g^2) / (K S), sampling = (1 - S/N) G^2 / S, W the sum over r =
    1..R+1 of the weights (1 - mu s / 2)^(1-r). 3, 12, 54 are the proof's (printed 2, 8, 36); the
    last line's constants were derived here.

    >>> constants = {"smoothness": 1.0, "mu": 0.1, "big_g": 1.0, "big_b": 1.0, "distance": 1.0}
    >>> setting = Federation(local_steps=10, num_clients=10, **constants)
    >>> plan = fedavg(setting, 1000)
    >>> plan.bound.holds, round(plan.bound.value, 3)
    (True, 0.106)
    """
    it, beta, g, b = setting, setting.smoothness, setting.need("big_g"), setting.need("big_b")
    largest = 1 / (8 * (1 + b**2) * beta)
    if it.convex:
        start, first, second = (
            3 * it.need("distance") ** 2,
            3 * it.noise + 12 * it.sampling,
            54 * beta * g**2,
        )
    else:
        start, first = 5 * it.need("suboptimality"), 5 * beta * (it.noise + 2 * it.sampling)
        second = 20 * (beta * g) ** 2
    needs = []
    if it.mu > 0:
        needs.append(at_most("8 (1 + B^2) beta / mu <= rounds", 1 / (largest * it.mu), rounds))
    tuned = _tuned(
        it.mu / 2, rounds, start, first, second, largest, lr, it.local_steps * it.server_lr
    )
    needs.append(at_most(LARGEST, tuned.step, largest))
    return _prescription(it, rounds, tuned, f"004 Theorem V, {it.case}", *needs)


def fedavg_round(setting: Federation, step: float, *, distance: float, gap: float) -> Bound:
    """One round of FedAvg.

    E||x+ - x*||^2 <= (1 - mu s / 2) ||x - x*||^2 - s (f - f*) / 3
                      + s^2 (noise + 4 sampling + 18 beta s G^2)

    F23, 004 Lemmas 7 and 8 together; `step` is s = K eta_l eta_g, `distance` ||x - x*||, `gap` f(x)
    - f*.

    >>> setting = Federation(smoothness=1.0, local_steps=2, num_clients=2, big_g=0.0, big_b=0.0)
    >>> fedavg_round(setting, 0.25, distance=1.0, gap=0.0).broken[0].text
    's <= 1 / (8 (1 + B^2) beta)'
    """
    it, s, g, b = setting, step, setting.need("big_g"), setting.need("big_b")
    added = s**2 * (it.noise + 4 * it.sampling + 18 * it.smoothness * s * g**2)
    value = (1 - it.mu * s / 2) * distance**2 - s * gap / 3 + added
    limit = at_most("s <= 1 / (8 (1 + B^2) beta)", s, 1 / (8 * (1 + b**2) * it.smoothness))
    return bounded(value, "004 Lemmas 7 and 8", limit, _server(it))


def scaffold(setting: Federation, rounds: int, *, lr: float | None = None) -> Prescription:
    """SCAFFOLD after R rounds: F24, 004 Theorem III (VII), whatever the clients' dissimilarity.

    mu > 0   E f(x) - f*      <= V / (s W) + 12 s noise,      s <= min(1 / (81 beta), S / (15 mu N))
    mu = 0   E f(x) - f*      <= V / (s (R+1)) + 12 s noise,  s <= 1 / (81 beta)
    else     E||grad f(x)||^2 <= 14 F / (s (R+1)) + 70 beta s noise,   s <= (S/N)^(2/3) / (24 beta)

    V = ||x^0 - x*||^2 + (9 N s^2 / S) C_0, C_0 = `control_distance`^2, W the sum of the weights (1
    - mu s / 2)^(1-r), noise = sigma^2 (1 + S / eta_g^2) / (K S). The non-convex case starts at c_i
    = grad f_i(x^0).

    >>> constants = {"smoothness": 1.0, "mu": 0.1, "distance": 1.0, "control_distance": 1.0}
    >>> setting = Federation(local_steps=10, num_clients=10, cohort=2, **constants)
    >>> scaffold(setting, 1000).bound.broken[0].text
    '162 beta / mu <= rounds'
    """
    it, beta, share = setting, setting.smoothness, setting.heard / setting.num_clients
    lag, needs = it.need("control_distance"), list[Condition]()
    if it.convex:
        largest = 1 / (81 * beta)
        if it.mu > 0:
            largest = min(largest, share / (15 * it.mu))
            needs = [
                at_most("162 beta / mu <= rounds", 162 * beta / it.mu, rounds),
                at_most("30 N / S <= rounds", 30 / share, rounds),
            ]
        start = it.need("distance") ** 2 + 9 * (largest * lag) ** 2 / share
        first = 12 * it.noise
    else:
        largest = share ** (2 / 3) / (24 * beta)
        start, first = 14 * it.need("suboptimality"), 70 * beta * it.noise
        needs = [at_most("control_distance <= 0 (c_i starts at the gradient)", lag, 0.0)]
    tuned = _tuned(it.mu / 2, rounds, start, first, 0.0, largest, lr, it.local_steps * it.server_lr)
    needs.append(at_most(LARGEST, tuned.step, largest))
    return _prescription(it, rounds, tuned, f"004 Theorem VII, {it.case}", *needs)


def scaffold_round(
    setting: Federation, step: float, *, distance: float, control_gap: float, gap: float
) -> Bound:
    """E V+ <= (1 - mu s / 2) V - s (f - f*) + 12 s^2 noise,  V = ||x - x*||^2 + (9 N s^2 / S) C.

    F24, 004 Lemma 14.

    `control_gap` is C = mean E||c_i - grad f_i(x*)||^2, where gradient noise is averaged inside the
    norm and cohorts outside it ((24) prints both inside); `step` is s = K eta_l eta_g, `gap` f(x) -
    f*.

    >>> setting = Federation(smoothness=1.0, local_steps=2, num_clients=2)
    >>> scaffold_round(setting, 0.01, distance=1.0, control_gap=0.0, gap=0.5).value
    0.995
    """
    it, s, share = setting, step, setting.heard / setting.num_clients
    lyapunov = distance**2 + 9 * s**2 / share * control_gap
    value = (1 - it.mu * s / 2) * lyapunov - s * gap + 12 * s**2 * it.noise
    limit = at_most("s <= 1 / (81 beta)", s, 1 / (81 * it.smoothness))
    lag = at_most("15 mu s <= S / N", 15 * it.mu * s, share)
    return bounded(value, "004 Lemma 14", limit, lag, _server(it))


def scaffold_quadratic(
    setting: Federation, rounds: int, *, lr: float | None = None
) -> Prescription:
    """E||grad f(x)||^2 on quadratics that are alike.

    F25, 004 Theorem IV (Theorem VIII), the value of local steps.

    mu > 0   6 F / (eta W) + 48 beta eta sigma^2 / N
    else     6 F / (eta K R) + 60 beta eta sigma^2 / N

    with W the sum over the K R inner steps of (1 - mu eta / 6)^(1-k), eta <= min(1 / (10 beta), 1 /
    (22 delta K), 1 / (10 mu K)), all clients, eta_g = 1, corrections taken at the current server
    model (004 (28)) and an inner average as output. 48 and 60 restore the beta eta^2 of Lemma 24,
    where 8 eta is printed; F = f(x^0) - f* stands where mu D^2 is printed, which has another unit.

    >>> constants = {"smoothness": 1.0, "delta": 0.0, "suboptimality": 1.0}
    >>> setting = Federation(local_steps=10, num_clients=10, **constants)
    >>> round(scaffold_quadratic(setting, 100).bound.value, 6)
    0.06
    """
    it, beta, k, delta = setting, setting.smoothness, setting.local_steps, setting.unlikeness
    largest = 1 / max(10 * beta, 22 * delta * k, 10 * it.mu * k)
    inner, start = max(1, rounds * k - 1), 6 * it.need("suboptimality")
    needs = [
        at_most("N <= cohort", it.num_clients, it.heard),
        at_most("server_lr <= 1", it.server_lr, 1.0),
    ]
    if it.mu > 0:
        least = max(20 * beta / it.mu, (44 * delta + 20 * it.mu) * k / it.mu, 20 * k)
        needs.append(
            at_most("max(20 beta / mu, (44 delta + 20 mu) K / mu, 20 K) <= rounds", least, rounds)
        )
    first = (48 if it.mu > 0 else 60) * beta * it.noise_trace / it.num_clients
    tuned = _tuned(it.mu / 6, inner, start, first, 0.0, largest, lr, 1.0)
    effective = Tuned(tuned.step * k * it.server_lr, tuned.value)
    needs.append(at_most(LARGEST, tuned.step, largest))
    return _prescription(it, rounds, effective, "004 Theorem VIII, quadratics", *needs)


def lower_bound_constant(local_steps: int) -> float:
    """c_K = 2 (1 - 1/K)^2: the limit of mu R^2 f(x^R) / G^2 for FedAvg with the best steps (F27).

    >>> [round(lower_bound_constant(k), 3) for k in (2, 3, 10)]
    [0.5, 0.889, 1.62]
    """
    return 2 * (1 - 1 / checks.whole("local_steps", local_steps)) ** 2


def pair_round(x: float, *, lr: float, local_steps: int, mu: float, big_g: float) -> float:
    """x+ = x (q^K + 1) / 2 + (eta G / 2) sum_{t<K} (1 - q^t),  q = 1 - 2 mu eta.

    F27, 004 proof of Theorem VI.

    One FedAvg round on f_1 = mu x^2 + G x and f_2 = -G x: from the optimum x = 0 it moves away.

    >>> pair_round(0.0, lr=0.25, local_steps=2, mu=1.0, big_g=1.0)
    0.0625
    """
    q = 1 - 2 * mu * lr
    return x * (q**local_steps + 1) / 2 + lr * big_g / 2 * sum(1 - q**t for t in range(local_steps))


def pair_best_lr(x: float, *, local_steps: int, mu: float, big_g: float) -> float:
    """Best eta = (1 - (1 + 2 mu x / G)^(-1/(K-1))) / (2 mu).

    Up to 1 / (2 mu), it makes `pair_round` smallest.

    There the round's derivative in eta is zero (F27, derived here); for x > 0 and K >= 2.

    >>> pair_best_lr(1.5, local_steps=2, mu=1.0, big_g=1.0)
    0.375
    """
    return (1 - math.pow(1 + 2 * mu * x / big_g, -1 / (local_steps - 1))) / (2 * mu)


def fedavg_lower_bound(
    *, mu: float, big_g: float, local_steps: int, rounds: int, suboptimality: float
) -> Bound:
    """f(x^R) - f* >= (mu / 2) / (1 / x_0 + mu R / (2 (1 - 1/K) G))^2 on the pair of `pair_round`.

    F27, 004 Theorem VI.

    For FedAvg from x > 0 with any steps eta_r <= 1 / mu; x_0 = min(sqrt(2 F / mu), G / mu), F =
    `suboptimality`. It tends to the sharp c_K G^2 / (mu R^2) of `lower_bound_constant`, where the
    paper has 1/131072 for c_K. Proof: in units of G / mu, `pair_best_lr` gives x+ = x/2 + (K-1)/4
    (1 - (1 + 2x)^(-1/(K-1))), whose derivative is at least (1 + 2x)^-c >= (1 + c x)^-2 with c = K /
    (2 (K-1)), hence 1 / x+ <= 1 / x + c; a step above 1 / (2 mu) gives more than that, or x+ >= 1.

    >>> fedavg_lower_bound(mu=1.0, big_g=1.0, local_steps=2, rounds=1, suboptimality=0.5).value
    0.125
    """
    positive(mu=mu, big_g=big_g, suboptimality=suboptimality)
    k, r = checks.whole("local_steps", local_steps), checks.whole("rounds", rounds)
    start = min(math.sqrt(2 * suboptimality / mu), big_g / mu)
    value = mu / 2 / (1 / start + mu * r / (2 * (1 - 1 / k) * big_g)) ** 2 if k > 1 else 0.0
    return bounded(value, "004 Theorem VI, sharp", at_most("2 <= local_steps", 2, k))


def table_2(setting: Federation, target: float) -> dict[str, Rounds]:
    """Rounds to `target` = eps of every method of 004 Table 2.

    Eps bounds f - f*, or ||grad f||^2 if non-convex.

    Logarithms and constants dropped. The table sets beta = F = 1; both are put back, by the
    theorems and by units.

    >>> constants = {"smoothness": 1.0, "mu": 0.1, "big_g": 1.0, "big_b": 1.0, "suboptimality": 1.0}
    >>> setting = Federation(local_steps=10, num_clients=20, cohort=5, **constants)
    >>> table_2(setting, 0.01)["SCAFFOLD"].strongly_convex
    14.0
    """
    positive(target=target)
    smooth = _strongly_convex_rows(setting, target) if setting.mu > 0 else {}
    rough = _non_convex_rows(setting, target)
    return {name: Rounds(smooth.get(name), rough.get(name)) for name in {**smooth, **rough}}


def _strongly_convex_rows(it: Federation, e: float) -> dict[str, float]:
    beta, mu, k, n, s = it.smoothness, it.mu, it.local_steps, it.num_clients, it.heard
    s2, g, b2 = it.noise_trace, it.need("big_g"), it.need("big_b") ** 2
    m2 = s2 + k * (1 - s / n) * g**2
    whole, root = s2 / (mu * n * k * e), math.sqrt(beta / e) / mu
    return {
        "SGD": whole + beta / mu,
        "FedAvg (Li et al. 2019)": whole * beta / mu + g**2 * k * beta / (mu**2 * e),
        "FedAvg (Khaled et al. 2020)": (s2 + g**2) / (mu * n * k * e)
        + (s2**0.5 + g) * root
        + n * b2 * beta / mu,
        "FedAvg": m2 / (mu * s * k * e) + g * root + b2 * beta / mu,
        "FedAvg, at least": whole + g / math.sqrt(mu * e),
        "FedProx": b2 * beta / mu,
        "DANE (quadratic)": (it.unlikeness / mu) ** 2,
        "SCAFFOLD": s2 / (mu * s * k * e) + beta / mu + n / s,
        "SCAFFOLD (quadratic)": whole + beta / (mu * k) + it.unlikeness / mu,
    }


def _non_convex_rows(it: Federation, e: float) -> dict[str, float]:
    k, n, s, s2 = it.local_steps, it.num_clients, it.heard, it.noise_trace
    g, b2, f = it.need("big_g"), it.need("big_b") ** 2, it.need("suboptimality")
    m2 = s2 + k * (1 - s / n) * g**2
    way = it.smoothness * f / e
    whole = way * s2 / (n * k * e)
    return {
        "SGD": whole + way,
        "FedAvg (Yu et al. 2019)": whole + g**2 * n * k / e,
        "FedAvg": way * (m2 / (s * k * e) + g / math.sqrt(e) + b2),
        "FedProx": way * b2,
        "VRL-SGD": way * n * (s2 / (k * e) + 1),
        "SCAFFOLD": way * (s2 / (s * k * e) + (n / s) ** (2 / 3)),
        "SCAFFOLD (quadratic)": whole + way / k + it.unlikeness * f / e,
    }


def _tuned(
    rate: float,
    rounds: int,
    start: float,
    first: float,
    second: float,
    largest: float,
    lr: float | None,
    reach: float,
) -> Tuned:
    step = None if lr is None else checks.number("lr", lr, above=0) * reach
    if rate > 0:
        return tuned_linear(
            rate=rate,
            rounds=rounds,
            start=start,
            first=first,
            second=second,
            largest=largest,
            step=step,
        )
    return tuned_sublinear(
        rounds=rounds, start=start, first=first, second=second, largest=largest, step=step
    )


def _prescription(
    it: Federation, rounds: int, tuned: Tuned, source: str, *conditions: Condition
) -> Prescription:
    lr = tuned.step / (it.local_steps * it.server_lr)
    return Prescription(
        lr, it.local_steps, rounds, bounded(tuned.value, source, *conditions, _server(it))
    )


def _server(it: Federation) -> Condition:
    return at_most("1 <= server_lr", 1, it.server_lr)

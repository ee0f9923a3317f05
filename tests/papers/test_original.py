"""The theorems of the original paper (004) against one round over all cohorts, and whole runs by second moments."""

import itertools
import math

import numpy as np
import pytest
from oracles import CONSTANTS, accumulated, local_maps, random_hessians, rescaled
from scipy.linalg import block_diag

from papers.bounds import original
from papers.bounds.conditions import Federation, tuned_linear, tuned_sublinear

# 004: one round over all cohorts, and whole runs by second moments.


def fedavg_maps(a, pulls, lr, steps, server_lr, cohort, variance):
    """For every cohort, the affine map of (u, 1) and the covariance added; `pulls` are the gradients at x*."""
    n, d, _ = a.shape
    ends, drags = local_maps(a, lr, steps)
    spread = lr**2 * accumulated(a, np.broadcast_to(variance * np.eye(d), a.shape), lr, steps)
    for heard in map(list, itertools.combinations(range(n), cohort)):
        move = np.eye(d + 1)
        move[:d, :d] += server_lr * (ends[heard].mean(axis=0) - np.eye(d))
        move[:d, d] = -server_lr * np.einsum("nij,nj->i", drags[heard], pulls[heard]) / cohort
        added = server_lr**2 * spread[heard].sum(axis=0) / cohort**2
        yield move, block_diag(added, 0.0)


def scaffold_maps(a, lr, steps, server_lr, cohort, variance):
    """For every cohort, the linear map of (u, w_1..w_N), w_i = c_i - grad f_i(x*), and the covariance added."""
    n, d, _ = a.shape
    ends, drags = local_maps(a, lr, steps)
    spread = lr**2 * accumulated(a, np.broadcast_to(variance * np.eye(d), a.shape), lr, steps)
    size = (n + 1) * d
    rows = np.eye(size).reshape(n + 1, d, size)
    mean = rows[1:].mean(axis=0)
    for heard in map(list, itertools.combinations(range(n), cohort)):
        move, noise = rows.copy(), np.zeros((n + 1, d, n, d))
        for i in heard:
            end = ends[i] @ rows[0] - drags[i] @ (mean - rows[1 + i])
            move[0] += server_lr / cohort * (end - rows[0])
            move[1 + i] = rows[1 + i] - mean + (rows[0] - end) / (steps * lr)
            noise[0, :, i] = server_lr / cohort * np.eye(d)
            noise[1 + i, :, i] = -np.eye(d) / (steps * lr)
        gains = noise.reshape(size, n * d)
        yield move.reshape(size, size), gains @ block_diag(*spread) @ gains.T


def second_moments(maps, z, rounds):
    """E z z' after 0..R rounds, exactly: every cohort equally likely in every round."""
    maps = list(maps)
    moves, added = np.array([m for m, _ in maps]), np.mean([c for _, c in maps], axis=0)
    moment = np.outer(z, z)
    yield moment
    for _ in range(rounds):
        moment = (moves @ moment @ np.swapaxes(moves, 1, 2)).mean(axis=0) + added
        yield moment


def random_federation(rng, server_lr=1.0, convex=True):
    n, d, steps = int(rng.integers(2, 5)), int(rng.integers(1, 3)), int(rng.integers(1, 6))
    cohort = int(rng.integers(1, n + 1))
    a = random_hessians(rng, n, d, 10 ** rng.uniform(-2, 0), 1.0) * 10 ** rng.uniform(-1, 1)
    pulls = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 1)
    pulls -= pulls.mean(axis=0)
    if not convex:  # clients bend both ways, their mean does not
        tilt = rng.normal(size=(n, 1, 1)) * np.eye(d)
        a = a + 2 * np.abs(a).max() * (tilt - tilt.mean(axis=0))
    spectrum = np.linalg.eigvalsh(a)
    mean = a.mean(axis=0)
    inverse = np.linalg.inv(mean)
    b2 = 2.0 if convex else 2 * np.linalg.norm(inverse @ (a @ a).mean(axis=0) @ inverse, 2)
    constants = {
        "smoothness": float(np.abs(spectrum).max()),
        "mu": float(spectrum.min()) if convex else 0.0,
        "convex": convex,
        "local_steps": steps,
        "num_clients": n,
        "cohort": cohort,
        "big_g": float(np.sqrt(2 * np.mean(np.sum(pulls**2, axis=1)))),
        "big_b": float(np.sqrt(b2)),
        "server_lr": server_lr,
        "noise_trace": float(rng.uniform(0, 1)) * d,
    }
    return a, pulls, constants


@pytest.mark.slow
def test_one_round_inequalities_over_all_cohorts():
    """F23 (Lemmas 7 and 8) and F24 (Lemma 14), with noise."""
    rng = np.random.default_rng(7)
    for _ in range(120):
        a, pulls, constants = random_federation(rng, server_lr=float(rng.choice([1.0, 2.0])))
        setting, (n, d, _) = Federation(**constants), a.shape
        steps, variance, mean = setting.local_steps, setting.noise_trace / d, a.mean(axis=0)
        u = rng.normal(size=d) * 10 ** rng.uniform(-2, 1)
        gap, start = 0.5 * u @ mean @ u, np.linalg.norm(u)
        s = float(rng.uniform(0.1, 1)) / (24 * setting.smoothness)
        lr = s / (steps * setting.server_lr)
        maps = fedavg_maps(a, pulls, lr, steps, setting.server_lr, setting.heard, variance)
        _, after = second_moments(maps, np.append(u, 1.0), 1)
        bound = original.fedavg_round(setting, s, distance=start, gap=gap)
        assert bound.holds
        assert np.trace(after[:d, :d]) <= bound.value + 1e-12
        s = min(1 / (81 * setting.smoothness), setting.heard / n / (15 * setting.mu))
        lr = s / (steps * setting.server_lr)
        w = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 1)
        quiet, noisy = (
            list(
                second_moments(
                    scaffold_maps(a, lr, steps, setting.server_lr, setting.heard, x), z, 1
                )
            )[1]
            for x, z in [(0.0, np.append(u, w)), (variance, np.append(u, w))]
        )
        # Lemma 14's C has the gradient noise averaged out of c_i: the lag of the noiseless run.
        total = np.trace(noisy[:d, :d]) + 9 * n * s**2 / setting.heard * np.trace(quiet[d:, d:]) / n
        lag = np.mean(np.sum(w**2, axis=1))
        bound = original.scaffold_round(setting, s, distance=start, control_gap=lag, gap=gap)
        assert bound.holds
        assert total <= bound.value + 1e-12


def averaged(values, rate, step):
    """Mean of the R + 1 values with weights (1 - rate s)^(1-r)."""
    weights = (1 - rate * step) ** -np.arange(len(values), dtype=float)
    return float(weights @ values / weights.sum())


@pytest.mark.parametrize("case", ["strongly convex", "convex", "non-convex"])
def test_theorems_v_and_vii_hold_for_whole_runs(case):
    rng = np.random.default_rng(8)
    for _ in range(8):
        server_lr, convex = float(rng.choice([1.0, 2.0])), case != "non-convex"
        a, pulls, constants = random_federation(rng, server_lr, convex)
        if case == "convex":
            constants["mu"] = (
                0.0  # functions that happen to be strongly convex, and a theorem that does not know
            )
        (n, d, _), mean = a.shape, a.mean(axis=0)
        u = rng.normal(size=d)
        w = -pulls if convex else a @ u  # c_i = 0, or the gradient at x^0
        lag = float(np.sqrt(np.mean(np.sum(w**2, axis=1)))) if convex else 0.0
        start = {
            "distance": np.linalg.norm(u),
            "suboptimality": 0.5 * u @ mean @ u,
            "control_distance": lag,
        }
        setting, measure = Federation(**constants, **start), 0.5 * mean if convex else mean @ mean
        assert setting.case == case
        for method, need in [("fedavg", [24]), ("scaffold", [162, 30 * n / setting.heard])]:
            rounds = 300 if method == "fedavg" else 600
            plan = getattr(original, method)(setting, rounds)
            kappa = setting.smoothness / setting.mu if setting.mu else 0.0
            assert plan.bound.holds == (
                not setting.mu or max(need[0] * kappa, *need[1:], 0) <= rounds
            )
            common = (
                plan.lr,
                setting.local_steps,
                server_lr,
                setting.heard,
                setting.noise_trace / d,
            )
            maps = (
                fedavg_maps(a, pulls, *common) if method == "fedavg" else scaffold_maps(a, *common)
            )
            z = np.append(u, 1.0) if method == "fedavg" else np.append(u, w)
            values = np.array(
                [np.trace(measure @ m[:d, :d]) for m in second_moments(maps, z, rounds)]
            )
            s = plan.lr * setting.local_steps * server_lr
            assert averaged(values, setting.mu / 2, s) <= plan.bound.value
            given = getattr(original, method)(setting, rounds, lr=plan.lr).bound
            assert given.value == pytest.approx(plan.bound.value)
            assert not getattr(original, method)(setting, rounds, lr=1e3).bound.holds


def test_theorem_viii_holds_for_whole_runs():
    """F25: update (28), all clients; the mean over inner steps of E||grad f||^2, exactly, with noise."""
    rng = np.random.default_rng(9)
    for weak in (False, True) * 6:
        n, d, steps, rounds = 3, 2, int(rng.integers(1, 6)), 150
        a = np.eye(d) * rng.uniform(0.5, 1) + 0.03 * rng.normal(size=(n, 1, 1)) * np.diag(
            [1.0, -1.0]
        )
        mean, variance = a.mean(axis=0), 0.05
        u = rng.normal(size=d)
        setting = Federation(
            smoothness=float(np.linalg.eigvalsh(a).max()),
            mu=0.0 if weak else float(np.linalg.eigvalsh(a).min()),
            delta=float(np.linalg.norm(a - mean, 2, axis=(1, 2)).max()),
            local_steps=steps,
            num_clients=n,
            noise_trace=variance * d,
            suboptimality=0.5 * u @ mean @ u,
        )
        plan = original.scaffold_quadratic(setting, rounds)
        assert plan.bound.holds
        moment, values = np.outer(u, u), []
        for _ in range(rounds):
            ends, spread = np.broadcast_to(np.eye(d), a.shape), np.zeros_like(a)
            for _ in range(steps):
                ends = ends - plan.lr * (a @ ends + mean - a)
                shrink = np.eye(d) - plan.lr * a
                spread = shrink @ spread @ shrink + plan.lr**2 * variance * np.eye(d)
                inner = ends.mean(axis=0) @ moment @ ends.mean(axis=0).T + spread.sum(axis=0) / n**2
                values.append(np.trace(mean @ mean @ inner))
            moment = inner
        assert averaged(np.array(values), setting.mu / 6, plan.lr) <= plan.bound.value
    sampled = Federation(smoothness=1.0, local_steps=2, num_clients=4, cohort=2, suboptimality=1.0)
    assert [c.text for c in original.scaffold_quadratic(sampled, 10).bound.broken] == [
        "N <= cohort"
    ]


def test_tuning_lemmas():
    rng = np.random.default_rng(10)
    for _ in range(200):
        rounds = int(10 ** rng.uniform(0, 5))
        start, first, second, largest, rate = 10 ** rng.uniform(-3, 3, size=5)
        sub = tuned_sublinear(
            rounds=rounds, start=start, first=first, second=second, largest=largest
        )
        share = start / (rounds + 1)
        lemma = (
            share / largest
            + 2 * math.sqrt(first * share)
            + 2 * share ** (2 / 3) * second ** (1 / 3)
        )
        assert sub.step <= largest
        assert sub.value <= lemma * (1 + 1e-12)
        largest = min(largest, 0.9 / rate)
        lin = tuned_linear(rate=rate, rounds=rounds, start=start, first=first, largest=largest)
        log = math.log(max(1.0, rate**2 * rounds * start / first))
        assert lin.step == pytest.approx(min(largest, max(log, 0.5) / (rate * rounds)))
        if rounds >= 1 / (
            2 * rate * largest
        ):  # the lemma's condition; its proof then gives 3 a d_0 (1 - a s)^R + c s
            assert (
                lin.value
                <= 3 * rate * start * (1 - rate * lin.step) ** rounds
                + first * lin.step
                + 1e-12 * lin.value
            )
        d, total, weight = (
            start,
            0.0,
            0.0,
        )  # a sequence that meets the recursion with equality and ends at 0
        if rounds < 50:
            for r in range(1, rounds + 2):
                w = (1 - rate * lin.step) ** (1 - r)
                following = 0.0 if r == rounds + 1 else d * rng.uniform(0, 1)
                total += w * (((1 - rate * lin.step) * d - following) / lin.step + first * lin.step)
                weight, d = weight + w, following
            assert total / weight <= lin.value * (1 + 1e-9)


def test_lower_bound_is_sharp():
    for k in (2, 3, 10):
        for x in (0.05, 1.0, 30.0):
            units = {"mu": 2.0, "big_g": 3.0}
            first = 0.5 * units["mu"] * x**2
            for r in range(1, 4001):
                lrs = [original.pair_best_lr(x, local_steps=k, **units), 1 / units["mu"]]
                x = min(original.pair_round(x, lr=lr, local_steps=k, **units) for lr in lrs)
                bound = original.fedavg_lower_bound(
                    local_steps=k, rounds=r, suboptimality=first, **units
                )
                assert 0.5 * units["mu"] * x**2 >= bound.value * (1 - 1e-9)
            exact = 0.5 * units["mu"] * x**2 * units["mu"] * r**2 / units["big_g"] ** 2
            assert exact == pytest.approx(original.lower_bound_constant(k), rel=0.03)
    grid = np.linspace(0, 1, 2001)
    rounds = [original.pair_round(0.7, lr=lr, local_steps=4, mu=1.0, big_g=1.0) for lr in grid]
    best = original.pair_best_lr(0.7, local_steps=4, mu=1.0, big_g=1.0)
    assert original.pair_round(0.7, lr=best, local_steps=4, mu=1.0, big_g=1.0) <= min(rounds)
    assert not original.fedavg_lower_bound(
        mu=1, big_g=1, local_steps=1, rounds=1, suboptimality=1
    ).holds


def test_one_round_on_the_pair_is_fedavg():
    lr, k, mu, big_g, x = 0.13, 5, 1.7, 2.3, 0.4
    y_1 = y_2 = x
    for _ in range(k):
        y_1, y_2 = y_1 - lr * (2 * mu * y_1 + big_g), y_2 + lr * big_g
    expected = original.pair_round(x, lr=lr, local_steps=k, mu=mu, big_g=big_g)
    assert (y_1 + y_2) / 2 == pytest.approx(expected, rel=1e-13)


def test_table_2():
    unit = Federation(**{**CONSTANTS, "smoothness": 1.0, "suboptimality": 1.0})
    table = original.table_2(unit, 0.01)
    s2, mu, n, s, k, g, e = 0.3, 0.2, 8, 2, 5, 0.7, 0.01
    assert table["SCAFFOLD"].strongly_convex == pytest.approx(
        s2 / (mu * s * k * e) + 1 / mu + n / s
    )
    assert table["SCAFFOLD"].non_convex == pytest.approx(
        s2 / (s * k * e**2) + (n / s) ** (2 / 3) / e
    )
    m2 = s2 + k * (1 - s / n) * g**2
    assert table["FedAvg"].strongly_convex == pytest.approx(
        m2 / (mu * s * k * e) + g / (mu * e**0.5) + 1.4**2 / mu
    )
    assert table["SCAFFOLD (quadratic)"].strongly_convex == pytest.approx(
        s2 / (mu * n * k * e) + 1 / (mu * k) + 0.4 / mu
    )
    assert table["DANE (quadratic)"] == (pytest.approx(4.0), None)
    assert (
        original.table_2(Federation(**{**CONSTANTS, "mu": 0.0}), e)["SGD"].strongly_convex is None
    )
    other = original.table_2(Federation(**rescaled(CONSTANTS, 3.0, 7.0)), 7.0 * e)
    squared = original.table_2(Federation(**rescaled(CONSTANTS, 3.0, 7.0)), 49 / 9 * e)
    for name, rounds in original.table_2(Federation(**CONSTANTS), e).items():
        if rounds.strongly_convex is not None:
            assert other[name].strongly_convex == pytest.approx(rounds.strongly_convex)
        if rounds.non_convex is not None:
            assert squared[name].non_convex == pytest.approx(rounds.non_convex)

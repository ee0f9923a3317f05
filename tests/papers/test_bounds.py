"""The bounds of the quadratics and the stochastic papers against exact dynamics written from the algorithms."""

import math

import numpy as np
import pytest
from oracles import (
    accumulated,
    lambda_norm2,
    local_maps,
    mean_squared_error,
    one_round,
    random_hessians,
    reduced_map,
    stationary,
    zeta_2,
)

from fedscaffold.checks import InputError
from papers import as_printed
from papers.bounds import quadratic, stochastic
from papers.bounds.conditions import Federation, at_most, bounded

G1 = {"a": [[[1.0]], [[0.25]]], "lr": 0.2, "steps": 4}


# The records.


def test_a_bound_says_which_condition_is_broken():
    bound = bounded(2.0, "here", at_most("a <= b", 1.0, 1.0), at_most("c <= d", 3.0, 2.0))
    assert not bound.holds
    assert [c.text for c in bound.broken] == ["c <= d"]
    assert "does not hold: c <= d (3 > 2)" in str(bound)
    assert str(bounded(1.0, "here")).endswith("holds")


@pytest.mark.parametrize("smoothness", [1.0, 3.0, 7.0, 0.1, 49.0])
def test_conditions_at_their_edges(smoothness):
    mu = smoothness / 3
    for most, make in [
        (1 / smoothness, quadratic.rho),
        (min(1 / (2 * smoothness), 1 / (4 * (smoothness + mu))), stochastic.contraction),
    ]:
        for factor, holds in [(1.0, True), (1 - 1e-9, True), (1 + 1e-9, False)]:
            bound = make(mu=mu, smoothness=smoothness, lr=most * factor, local_steps=4)
            assert bound.holds is holds
            assert len(bound.broken) == (0 if holds else 1)
    constants = {
        "mu": mu,
        "smoothness": smoothness,
        "local_steps": 2,
        "num_clients": 3,
        "noise_trace": 1.0,
    }
    constants["third_derivative"] = 1.0
    lr = 1 / (96 * (smoothness + mu))
    tight = mu / (20 * lr * smoothness)
    assert stochastic.covariance(lr=lr, zeta_2=tight, noise_growth=mu / 19 / lr, **constants).holds
    for change in [
        {"lr": lr * 1.001},
        {"zeta_2": tight * 1.001},
        {"noise_growth": mu / 19 / lr * 1.001},
    ]:
        given = {"lr": lr, "zeta_2": tight, "noise_growth": mu / 19 / lr, **change}
        assert not stochastic.covariance(**given, **constants).holds


def test_bad_input_is_one_line():
    for call in [
        lambda: quadratic.rho(mu=2.0, smoothness=1.0, lr=0.1, local_steps=1),
        lambda: quadratic.rho(mu=0.5, smoothness=1.0, lr=-0.1, local_steps=1),
        lambda: quadratic.chi([-1.0], lr=0.1, local_steps=1),
        lambda: quadratic.chi([1.0], lr=1.1, local_steps=1),
        lambda: quadratic.rho_sharp([], lr=0.1, local_steps=1),
        lambda: stochastic.contraction(mu=0.5, smoothness=1.0, lr=0.1, local_steps=1.5),
        lambda: Federation(smoothness=1.0, mu=0.5, convex=False, local_steps=1, num_clients=1),
    ]:
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)


# 000: contraction.


def test_golden_values():
    a = np.array(G1["a"])
    keywords = {"lr": G1["lr"], "local_steps": G1["steps"]}
    move = reduced_map(a, G1["lr"], G1["steps"])
    assert np.linalg.norm(move, 2) ** 2 == pytest.approx(0.41712645581459185, rel=1e-12)
    assert quadratic.rho(mu=0.25, smoothness=1.0, **keywords).value == pytest.approx(
        0.81450625, rel=1e-12
    )
    assert quadratic.rho_sharp(a.ravel(), **keywords).value == pytest.approx(
        0.6686812135156247, rel=1e-12
    )
    sigma = stationary(a, np.array([[[1.0]], [[0.5]]]), G1["lr"], G1["steps"])
    assert sigma[0] == pytest.approx(
        [0.06490161389521962, -0.00202027589375116, 0.00202027589375116], rel=1e-10
    )


@pytest.mark.parametrize("gamma_a", [0.1, 0.01, 0.001])
def test_chi_as_figure_2(gamma_a):
    steps = np.append(np.arange(1, 2 / gamma_a), np.geomspace(2, 100, 20) / gamma_a).astype(int)
    pairs = [quadratic.branches(gamma_a, lr=1.0, local_steps=int(h)) for h in steps]
    u, v = np.array(pairs).T
    assert (u >= v - 1e-14)[gamma_a * steps <= 1].all()
    assert (v >= u - 1e-14)[gamma_a * steps >= 1].all()
    chi = np.array([quadratic.chi(gamma_a, lr=1.0, local_steps=int(h)) for h in steps])
    assert 0.9 <= gamma_a * steps[np.argmin(chi)] <= 1.1
    assert 0.34 <= chi.min() <= 0.37
    assert 0.98 <= chi[-1] < 1


def test_branches_keep_their_digits_for_a_million_steps():
    u, v = quadratic.branches([1e-6], lr=1.0, local_steps=10**6)
    exact = math.exp(10**6 * math.log1p(-1e-6))
    assert u[0] == pytest.approx(exact, rel=1e-14)
    assert v[0] == pytest.approx(exact, rel=1e-14)  # gamma a H = 1: both are the same
    assert quadratic.chi([0.0, 1.0], lr=1.0, local_steps=5).tolist() == [1.0, 0.8]


def test_contraction_bounds_hold_on_random_quadratics():
    rng = np.random.default_rng(0)
    met = 0
    for _ in range(150):
        n, d = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        kappa, steps = float(10 ** rng.uniform(0, 3)), int(10 ** rng.uniform(0, 2.3))
        a = random_hessians(rng, n, d, 1 / kappa, 1.0)
        lr = float(rng.choice([1.0, 0.5, 0.1, 0.01, 0.001]))
        exact = np.linalg.norm(reduced_map(a, lr, steps), 2) ** 2
        eigenvalues = np.linalg.eigvalsh(a)
        sharp = quadratic.rho_sharp(eigenvalues, lr=lr, local_steps=steps).value
        worst = quadratic.chi(eigenvalues, lr=lr, local_steps=steps).max()
        mu = eigenvalues.min()
        published = quadratic.rho(mu=mu, smoothness=1.0, lr=lr, local_steps=steps)
        assert published.holds
        assert exact <= sharp + 1e-12
        assert sharp <= worst + 1e-12
        assert worst <= published.value + 1e-12 < 1 + 1e-12
        general = stochastic.contraction(mu=mu, smoothness=1.0, lr=lr, local_steps=steps)
        if general.holds:
            met += 1
            assert exact <= (1 - lr * mu) ** steps + 1e-12 <= general.value + 2e-12
    assert met > 20


def test_theorem_2_along_a_run():
    rng = np.random.default_rng(1)
    a = random_hessians(rng, 3, 2, 0.05, 1.0)
    u, v = rng.normal(size=2), rng.normal(size=(3, 2))
    v -= v.mean(axis=0)
    for steps in (1, 8, 200):
        start = math.sqrt(lambda_norm2(u, v, steps))
        x, xi = u[:, None], v[..., None]
        for t in range(1, 30):
            x, xi, _ = one_round(a, x, xi, 1.0, steps)
            bound = quadratic.error_noiseless(
                mu=0.05, smoothness=1.0, lr=1.0, local_steps=steps, rounds=t, lambda_distance=start
            )
            assert float((x**2).sum()) <= bound.value * (1 + 1e-12)


@pytest.mark.parametrize("gamma_l", [1.0, 0.7, 0.3, 0.05])
def test_rho_opt_is_half_the_printed_gap(gamma_l):
    """E-000.6: Lemma 1 at (11) gives 1 - 0.562 sqrt(mu / L); the printed (12) fails for small condition numbers."""
    printed_fails = []
    for kappa in np.concatenate([np.linspace(1.3, 5, 38), np.geomspace(5, 1e4, 30)]):
        mu = 1 / kappa
        steps = quadratic.published_local_steps(mu=mu, smoothness=1.0, lr=gamma_l)
        lemma = quadratic.rho(mu=mu, smoothness=1.0, lr=gamma_l, local_steps=steps).value
        sharp = quadratic.rho_sharp(np.geomspace(mu, 1, 200), lr=gamma_l, local_steps=steps).value
        corrected = quadratic.rho_opt(mu=mu, smoothness=1.0, lr=gamma_l).value
        printed = as_printed.rho_opt_as_printed(mu=mu, smoothness=1.0)
        assert 1 - printed == pytest.approx(2 * (1 - corrected), rel=1e-12)
        assert lemma >= corrected - 1e-12 > printed
        assert sharp <= corrected
        # the exact factor of two equal clients per eigenvalue, a bound from below on what any bound can claim
        u, v = quadratic.branches([mu, 1.0], lr=gamma_l, local_steps=steps)
        if max((u**2).max(), (v**2).max()) > printed:
            printed_fails.append(kappa)
    assert printed_fails
    assert max(printed_fails) < 5
    close = quadratic.rho(mu=1e-8, smoothness=1.0, lr=1e-3, local_steps=11243821).value
    assert 1 - close == pytest.approx(0.562 * 1e-4, rel=2e-3)


def test_prescriptions_of_the_quadratics_paper():
    rng = np.random.default_rng(2)
    a = random_hessians(rng, 4, 2, 0.05, 1.0)
    u, v = rng.normal(size=2), rng.normal(size=(4, 2))
    v -= v.mean(axis=0)
    start = {
        "distance": np.linalg.norm(u),
        "control_distance": np.sqrt(np.mean(np.sum(v**2, axis=1))),
    }
    constants = {"mu": 0.05, "smoothness": 1.0, "num_clients": 4, **start}
    sure = quadratic.prescribe(target=1e-2, **constants)
    assert sure.bound.holds
    assert sure.bound.value <= 1e-4
    assert (
        mean_squared_error(a, np.zeros_like(a), sure.lr, sure.local_steps, sure.rounds, u, v)
        <= 1e-4
    )
    noise = np.broadcast_to(0.05 * np.eye(2), a.shape)
    for target in (0.3, 0.1):
        plan = quadratic.prescribe(target=target, noise_trace=0.1, **constants)
        assert not plan.bound.holds  # it rests on conjectures, and says so
        assert plan.gradients == plan.rounds * plan.local_steps
        assert (
            mean_squared_error(a, noise, plan.lr, plan.local_steps, plan.rounds, u, v) <= target**2
        )
    there = quadratic.prescribe(target=100.0, **constants)
    assert there.rounds == 1


def test_published_local_steps_are_not_the_best():
    """Figure 4's "perfectly matches": with ten clients (11) takes far more rounds than the best H."""
    a = random_hessians(np.random.default_rng(3), 10, 8, 0.01, 1.0)
    radius = {
        h: max(abs(np.linalg.eigvals(reduced_map(a, 0.1, h))))
        for h in (15, 20, 25, 30, 35, 40, 60, 113)
    }
    best = min(radius, key=radius.__getitem__)
    assert quadratic.published_local_steps(mu=0.01, smoothness=1.0, lr=0.1) == 113
    assert best <= 40
    assert math.log(radius[best]) / math.log(radius[113]) > 3.5


# 002: stationary law and rates.


def test_stationary_bounds_hold_on_random_quadratics():
    rng = np.random.default_rng(4)
    for i in range(60):
        n, d, kappa = (
            int(rng.integers(2, 5)),
            int(rng.integers(1, 4)),
            float(10 ** rng.uniform(0, 1.5)),
        )
        a = random_hessians(rng, n, d, 1 / kappa, 1.0)
        mu, spread = np.linalg.eigvalsh(a).min(), zeta_2(a)
        half = rng.normal(size=(n, d, d))
        noise = half @ np.swapaxes(half, 1, 2)
        sigma2 = float(np.trace(noise, axis1=1, axis2=2).max())
        steps = int(rng.integers(1, 12))
        reach = min(1 / 48 / (1 + mu), mu / 10 / max(spread, 1e-9)) if i % 2 else 1 / (1 + mu)
        lr = min(0.25, reach / steps)
        sigma = stationary(a, noise, lr, steps)
        constants = {
            "mu": mu,
            "smoothness": 1.0,
            "lr": lr,
            "local_steps": steps,
            "noise_trace": sigma2,
        }
        additive = constants | {"noise_growth": 0.0}
        whole = np.trace(sigma[:d, :d]) + (lr * steps) ** 2 * np.trace(sigma[d:, d:]) / n
        limit = stochastic.error_stationary(**constants)
        assert limit.holds
        assert whole <= limit.value
        assert (
            limit.value
            == stochastic.error_lambda(rounds=10**6, lambda_distance=1e-9, **constants).value
        )
        if i % 2:
            thm = stochastic.covariance(
                num_clients=n, zeta_2=spread, third_derivative=0.0, **additive
            )
            assert thm.holds
            assert np.linalg.norm(sigma[:d, :d], 2) <= thm.value
            assert thm.value == quadratic.variance(num_clients=n, zeta_2=spread, **constants).value
            local, control = (
                stochastic.error_local(**additive),
                stochastic.error_controls(**additive),
            )
            assert local.holds
            assert control.holds
            blocks = [np.trace(sigma[k : k + d, k : k + d]) for k in range(d, (n + 1) * d, d)]
            assert max(blocks) <= control.value
            ends, drags = local_maps(a, lr, steps)
            spread = lr**2 * accumulated(a, noise, lr, steps)
            for c in range(n):
                row = np.concatenate([ends[c], *(-drags[c] * (i == c) for i in range(n))], axis=1)
                assert np.trace(row @ sigma @ row.T + spread[c]) <= local.value


def test_rates_hold_on_random_quadratics():
    rng = np.random.default_rng(5)
    a = np.eye(2) * 0.5 + 0.02 * random_hessians(rng, 3, 2, 0.1, 1.0)
    mu, smoothness = np.linalg.eigvalsh(a).min(), np.linalg.eigvalsh(a).max()
    noise = np.broadcast_to(0.01 * np.eye(2), a.shape)
    v, u, steps = rng.normal(size=(3, 2)), np.array([1.0, -1.0]), 5
    v -= v.mean(axis=0)
    lr = 1 / 48 / (smoothness + mu) / steps
    zeta_1 = float(np.sqrt(np.mean(np.sum(v**2, axis=1))))
    constants = {
        "mu": mu,
        "smoothness": smoothness,
        "lr": lr,
        "local_steps": steps,
        "noise_trace": 0.02,
    }
    start = {
        "distance": 2**0.5,
        "zeta_1": zeta_1,
        "zeta_2": zeta_2(a),
        "third_derivative": 0.0,
        "noise_growth": 0.0,
    }
    for rounds in (0, 1, 10, 300):
        exact = mean_squared_error(a, noise, lr, steps, rounds, u, v)
        bound = stochastic.error(rounds=rounds, num_clients=3, dim=2, **start, **constants)
        assert bound.holds
        assert exact <= bound.value
        far = math.sqrt(lambda_norm2(u, v, lr * steps))
        assert (
            exact <= stochastic.error_lambda(rounds=rounds, lambda_distance=far, **constants).value
        )


def prescribed(**change):
    constants = {
        "mu": 0.1,
        "smoothness": 1.0,
        "num_clients": 4,
        "dim": 2,
        "target": 0.1,
        "noise_trace": 1.0,
    }
    constants |= {
        "distance": 1.0,
        "zeta_1": 1.0,
        "zeta_2": 0.05,
        "third_derivative": 0.0,
        "noise_growth": 0.0,
    }
    return stochastic.prescribe(**{**constants, **change})


def test_corollary_4_10_reaches_its_target_and_scales_as_it_says():
    rng = np.random.default_rng(6)
    a = np.array([0.1 * np.eye(2), np.diag([0.15, 0.1]), np.diag([0.1, 0.2]), np.diag([0.2, 0.1])])
    v = rng.normal(size=(4, 2))
    v -= v.mean(axis=0)
    v /= np.sqrt(np.mean(np.sum(v**2, axis=1)))
    for target in (0.3, 0.1):
        plan = prescribed(target=target, zeta_2=zeta_2(a), smoothness=0.2)
        noise = np.broadcast_to(0.5 * np.eye(2), a.shape)
        exact = mean_squared_error(
            a, noise, plan.lr, plan.local_steps, plan.rounds, np.array([1.0, 0.0]), v
        )
        assert exact <= target**2
        assert not plan.bound.holds  # constants 1 are not the theorem's
        assert plan.bound.value > target**2
    assert prescribed(num_clients=8).gradients / prescribed().gradients == pytest.approx(
        1 / 2, rel=0.02
    )
    assert prescribed(num_clients=8).rounds == prescribed().rounds
    assert 4 < prescribed(target=0.05).gradients / prescribed().gradients < 5.5
    assert stochastic.speed_up_range(mu=1, smoothness=1, target=0.1, third_derivative=0) == math.inf

"""Published bounds against exact dynamics written here from the algorithms, and the misprints against both."""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import block_diag, solve_continuous_lyapunov, solve_discrete_lyapunov

from fedscaffold.checks import InputError
from fedscaffold.theory import as_printed, bounds_original, bounds_quadratic, bounds_stochastic
from fedscaffold.theory.bounds import Federation, at_most, bounded, tuned_linear, tuned_sublinear

G1 = {"a": [[[1.0]], [[0.25]]], "lr": 0.2, "steps": 4}


# Exact dynamics: SCAFFOLD with all clients, as deviations u = theta - theta*, v_c = xi_c - xi_c*.


def random_hessians(rng, n, d, mu, smoothness):
    hessians = []
    for c in range(n):
        rotation, _ = np.linalg.qr(rng.normal(size=(d, d)))
        spectrum = np.exp(rng.uniform(np.log(mu), np.log(smoothness), d))
        if c == 0:
            spectrum[0], spectrum[-1] = mu, smoothness
        hessians.append((rotation * spectrum) @ rotation.T)
    return np.array(hessians)


def one_round(a, u, v, lr, steps):
    """The algorithm itself, on many states at once: u (d, m), v (N, d, m)."""
    y = np.broadcast_to(u, v.shape)
    for _ in range(steps):
        y = y - lr * (a @ y + v)
    x = y.mean(axis=0)
    return x, v + (y - x) / (lr * steps), y


def state_map(a, lr, steps):
    n, d, _ = a.shape
    columns = np.eye((n + 1) * d)
    x, xi, _ = one_round(a, columns[:d], columns[d:].reshape(n, d, -1), lr, steps)
    return np.concatenate([x, xi.reshape(n * d, -1)])


def lambda_frame(n, d, lr, steps):
    """Coordinates of {sum v = 0} in which the Lambda-norm is the plain one: state = out @ z, z = back @ state."""
    basis = np.linalg.qr(np.eye(n) - 1 / n)[0][:, : n - 1]
    scale = lr * steps / np.sqrt(n)
    out = block_diag(np.eye(d), np.kron(basis, np.eye(d)) / scale)
    return out, block_diag(np.eye(d), np.kron(basis.T, np.eye(d)) * scale)


def reduced_map(a, lr, steps):
    out, back = lambda_frame(*a.shape[:2], lr, steps)
    return back @ state_map(a, lr, steps) @ out


def accumulated(a, noise, lr, steps):
    """Covariance of sum_h (I - lr A)^h e_h for every client."""
    return np.array(
        [
            sum(g @ c @ g for g in (np.linalg.matrix_power(np.eye(len(h)) - lr * h, k) for k in range(steps)))
            for h, c in zip(a, noise, strict=True)
        ]
    )


def injected(a, noise, lr, steps):
    """Covariance that one round adds to the state."""
    n, d, _ = a.shape
    gains = np.concatenate([np.full((1, n), -lr / n), -(np.eye(n) - 1 / n) / steps])
    gains = np.kron(gains, np.eye(d))
    return gains @ block_diag(*accumulated(a, noise, lr, steps)) @ gains.T


def stationary(a, noise, lr, steps):
    out, back = lambda_frame(*a.shape[:2], lr, steps)
    added = back @ injected(a, noise, lr, steps) @ back.T
    return out @ solve_discrete_lyapunov(reduced_map(a, lr, steps), added) @ out.T


def mean_squared_error(a, noise, lr, steps, rounds, u, v):
    """Exact E||theta^T - theta*||^2 from a fixed start."""
    move, added = state_map(a, lr, steps), injected(a, noise, lr, steps)
    z, cov, d = np.concatenate([u, v.ravel()]), np.zeros_like(added), len(u)
    for _ in range(rounds):
        z, cov = move @ z, move @ cov @ move.T + added
    return float(z[:d] @ z[:d] + np.trace(cov[:d, :d]))


def lambda_norm2(u, v, reach):
    return float(np.sum(u**2) + reach**2 * np.mean(np.sum(v**2, axis=1)))


def zeta_2(a):
    return as_printed.lemma_c12_as_printed(a)


def slope(x, y):
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


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
        (1 / smoothness, bounds_quadratic.rho),
        (min(1 / (2 * smoothness), 1 / (4 * (smoothness + mu))), bounds_stochastic.contraction),
    ]:
        for factor, holds in [(1.0, True), (1 - 1e-9, True), (1 + 1e-9, False)]:
            bound = make(mu=mu, smoothness=smoothness, lr=most * factor, local_steps=4)
            assert bound.holds is holds
            assert len(bound.broken) == (0 if holds else 1)
    constants = {"mu": mu, "smoothness": smoothness, "local_steps": 2, "num_clients": 3, "noise_trace": 1.0}
    constants["third_derivative"] = 1.0
    lr = 1 / (96 * (smoothness + mu))
    tight = mu / (20 * lr * smoothness)
    assert bounds_stochastic.covariance(lr=lr, zeta_2=tight, noise_growth=mu / 19 / lr, **constants).holds
    for change in [{"lr": lr * 1.001}, {"zeta_2": tight * 1.001}, {"noise_growth": mu / 19 / lr * 1.001}]:
        given = {"lr": lr, "zeta_2": tight, "noise_growth": mu / 19 / lr, **change}
        assert not bounds_stochastic.covariance(**given, **constants).holds


def test_bad_input_is_one_line():
    for call in [
        lambda: bounds_quadratic.rho(mu=2.0, smoothness=1.0, lr=0.1, local_steps=1),
        lambda: bounds_quadratic.rho(mu=0.5, smoothness=1.0, lr=-0.1, local_steps=1),
        lambda: bounds_quadratic.chi([-1.0], lr=0.1, local_steps=1),
        lambda: bounds_quadratic.chi([1.0], lr=1.1, local_steps=1),
        lambda: bounds_quadratic.rho_sharp([], lr=0.1, local_steps=1),
        lambda: bounds_stochastic.contraction(mu=0.5, smoothness=1.0, lr=0.1, local_steps=1.5),
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
    assert bounds_quadratic.rho(mu=0.25, smoothness=1.0, **keywords).value == pytest.approx(0.81450625, rel=1e-12)
    assert bounds_quadratic.rho_sharp(a.ravel(), **keywords).value == pytest.approx(0.6686812135156247, rel=1e-12)
    sigma = stationary(a, np.array([[[1.0]], [[0.5]]]), G1["lr"], G1["steps"])
    assert sigma[0] == pytest.approx([0.06490161389521962, -0.00202027589375116, 0.00202027589375116], rel=1e-10)


@pytest.mark.parametrize("gamma_a", [0.1, 0.01, 0.001])
def test_chi_as_figure_2(gamma_a):
    steps = np.append(np.arange(1, 2 / gamma_a), np.geomspace(2, 100, 20) / gamma_a).astype(int)
    pairs = [bounds_quadratic.branches(gamma_a, lr=1.0, local_steps=int(h)) for h in steps]
    u, v = np.array(pairs).T
    assert (u >= v - 1e-14)[gamma_a * steps <= 1].all()
    assert (v >= u - 1e-14)[gamma_a * steps >= 1].all()
    chi = np.array([bounds_quadratic.chi(gamma_a, lr=1.0, local_steps=int(h)) for h in steps])
    assert 0.9 <= gamma_a * steps[np.argmin(chi)] <= 1.1
    assert 0.34 <= chi.min() <= 0.37
    assert 0.98 <= chi[-1] < 1


def test_branches_keep_their_digits_for_a_million_steps():
    u, v = bounds_quadratic.branches([1e-6], lr=1.0, local_steps=10**6)
    exact = math.exp(10**6 * math.log1p(-1e-6))
    assert u[0] == pytest.approx(exact, rel=1e-14)
    assert v[0] == pytest.approx(exact, rel=1e-14)  # gamma a H = 1: both are the same
    assert bounds_quadratic.chi([0.0, 1.0], lr=1.0, local_steps=5).tolist() == [1.0, 0.8]


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
        sharp = bounds_quadratic.rho_sharp(eigenvalues, lr=lr, local_steps=steps).value
        worst = bounds_quadratic.chi(eigenvalues, lr=lr, local_steps=steps).max()
        mu = eigenvalues.min()
        published = bounds_quadratic.rho(mu=mu, smoothness=1.0, lr=lr, local_steps=steps)
        assert published.holds
        assert exact <= sharp + 1e-12
        assert sharp <= worst + 1e-12
        assert worst <= published.value + 1e-12 < 1 + 1e-12
        general = bounds_stochastic.contraction(mu=mu, smoothness=1.0, lr=lr, local_steps=steps)
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
            bound = bounds_quadratic.error_noiseless(
                mu=0.05, smoothness=1.0, lr=1.0, local_steps=steps, rounds=t, lambda_distance=start
            )
            assert float((x**2).sum()) <= bound.value * (1 + 1e-12)


@pytest.mark.parametrize("gamma_l", [1.0, 0.7, 0.3, 0.05])
def test_rho_opt_is_half_the_printed_gap(gamma_l):
    """E-000.6: Lemma 1 at (11) gives 1 - 0.562 sqrt(mu / L); the printed (12) fails for small condition numbers."""
    printed_fails = []
    for kappa in np.concatenate([np.linspace(1.3, 5, 38), np.geomspace(5, 1e4, 30)]):
        mu = 1 / kappa
        steps = bounds_quadratic.published_local_steps(mu=mu, smoothness=1.0, lr=gamma_l)
        lemma = bounds_quadratic.rho(mu=mu, smoothness=1.0, lr=gamma_l, local_steps=steps).value
        sharp = bounds_quadratic.rho_sharp(np.geomspace(mu, 1, 200), lr=gamma_l, local_steps=steps).value
        corrected = bounds_quadratic.rho_opt(mu=mu, smoothness=1.0, lr=gamma_l).value
        printed = as_printed.rho_opt_as_printed(mu=mu, smoothness=1.0)
        assert 1 - printed == pytest.approx(2 * (1 - corrected), rel=1e-12)
        assert lemma >= corrected - 1e-12 > printed
        assert sharp <= corrected
        # the exact factor of two equal clients per eigenvalue, a bound from below on what any bound can claim
        u, v = bounds_quadratic.branches([mu, 1.0], lr=gamma_l, local_steps=steps)
        if max((u**2).max(), (v**2).max()) > printed:
            printed_fails.append(kappa)
    assert printed_fails
    assert max(printed_fails) < 5
    close = bounds_quadratic.rho(mu=1e-8, smoothness=1.0, lr=1e-3, local_steps=11243821).value
    assert 1 - close == pytest.approx(0.562 * 1e-4, rel=2e-3)


def test_prescriptions_of_the_quadratics_paper():
    rng = np.random.default_rng(2)
    a = random_hessians(rng, 4, 2, 0.05, 1.0)
    u, v = rng.normal(size=2), rng.normal(size=(4, 2))
    v -= v.mean(axis=0)
    start = {"distance": np.linalg.norm(u), "control_distance": np.sqrt(np.mean(np.sum(v**2, axis=1)))}
    constants = {"mu": 0.05, "smoothness": 1.0, "num_clients": 4, **start}
    sure = bounds_quadratic.prescribe(target=1e-2, **constants)
    assert sure.bound.holds
    assert sure.bound.value <= 1e-4
    assert mean_squared_error(a, np.zeros_like(a), sure.lr, sure.local_steps, sure.rounds, u, v) <= 1e-4
    noise = np.broadcast_to(0.05 * np.eye(2), a.shape)
    for target in (0.3, 0.1):
        plan = bounds_quadratic.prescribe(target=target, noise_trace=0.1, **constants)
        assert not plan.bound.holds  # it rests on conjectures, and says so
        assert plan.gradients == plan.rounds * plan.local_steps
        assert mean_squared_error(a, noise, plan.lr, plan.local_steps, plan.rounds, u, v) <= target**2
    there = bounds_quadratic.prescribe(target=100.0, **constants)
    assert there.rounds == 1


def test_published_local_steps_are_not_the_best():
    """Figure 4's "perfectly matches": with ten clients (11) takes far more rounds than the best H."""
    a = random_hessians(np.random.default_rng(3), 10, 8, 0.01, 1.0)
    radius = {h: max(abs(np.linalg.eigvals(reduced_map(a, 0.1, h)))) for h in (15, 20, 25, 30, 35, 40, 60, 113)}
    best = min(radius, key=radius.__getitem__)
    assert bounds_quadratic.published_local_steps(mu=0.01, smoothness=1.0, lr=0.1) == 113
    assert best <= 40
    assert math.log(radius[best]) / math.log(radius[113]) > 3.5


# 002: stationary law and rates.


def test_stationary_bounds_hold_on_random_quadratics():
    rng = np.random.default_rng(4)
    for i in range(60):
        n, d, kappa = int(rng.integers(2, 5)), int(rng.integers(1, 4)), float(10 ** rng.uniform(0, 1.5))
        a = random_hessians(rng, n, d, 1 / kappa, 1.0)
        mu, spread = np.linalg.eigvalsh(a).min(), zeta_2(a)
        half = rng.normal(size=(n, d, d))
        noise = half @ np.swapaxes(half, 1, 2)
        sigma2 = float(np.trace(noise, axis1=1, axis2=2).max())
        steps = int(rng.integers(1, 12))
        reach = min(1 / 48 / (1 + mu), mu / 10 / max(spread, 1e-9)) if i % 2 else 1 / (1 + mu)
        lr = min(0.25, reach / steps)
        sigma = stationary(a, noise, lr, steps)
        constants = {"mu": mu, "smoothness": 1.0, "lr": lr, "local_steps": steps, "noise_trace": sigma2}
        additive = constants | {"noise_growth": 0.0}
        whole = np.trace(sigma[:d, :d]) + (lr * steps) ** 2 * np.trace(sigma[d:, d:]) / n
        limit = bounds_stochastic.error_stationary(**constants)
        assert limit.holds
        assert whole <= limit.value
        assert limit.value == bounds_stochastic.error_lambda(rounds=10**6, lambda_distance=1e-9, **constants).value
        if i % 2:
            thm = bounds_stochastic.covariance(num_clients=n, zeta_2=spread, third_derivative=0.0, **additive)
            assert thm.holds
            assert np.linalg.norm(sigma[:d, :d], 2) <= thm.value
            assert thm.value == bounds_quadratic.variance(num_clients=n, zeta_2=spread, **constants).value
            local, control = bounds_stochastic.error_local(**additive), bounds_stochastic.error_controls(**additive)
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
    constants = {"mu": mu, "smoothness": smoothness, "lr": lr, "local_steps": steps, "noise_trace": 0.02}
    start = {"distance": 2**0.5, "zeta_1": zeta_1, "zeta_2": zeta_2(a), "third_derivative": 0.0, "noise_growth": 0.0}
    for rounds in (0, 1, 10, 300):
        exact = mean_squared_error(a, noise, lr, steps, rounds, u, v)
        bound = bounds_stochastic.error(rounds=rounds, num_clients=3, dim=2, **start, **constants)
        assert bound.holds
        assert exact <= bound.value
        far = math.sqrt(lambda_norm2(u, v, lr * steps))
        assert exact <= bounds_stochastic.error_lambda(rounds=rounds, lambda_distance=far, **constants).value


def prescribed(**change):
    constants = {"mu": 0.1, "smoothness": 1.0, "num_clients": 4, "dim": 2, "target": 0.1, "noise_trace": 1.0}
    constants |= {"distance": 1.0, "zeta_1": 1.0, "zeta_2": 0.05, "third_derivative": 0.0, "noise_growth": 0.0}
    return bounds_stochastic.prescribe(**{**constants, **change})


def test_corollary_4_10_reaches_its_target_and_scales_as_it_says():
    rng = np.random.default_rng(6)
    a = np.array([0.1 * np.eye(2), np.diag([0.15, 0.1]), np.diag([0.1, 0.2]), np.diag([0.2, 0.1])])
    v = rng.normal(size=(4, 2))
    v -= v.mean(axis=0)
    v /= np.sqrt(np.mean(np.sum(v**2, axis=1)))
    for target in (0.3, 0.1):
        plan = prescribed(target=target, zeta_2=zeta_2(a), smoothness=0.2)
        noise = np.broadcast_to(0.5 * np.eye(2), a.shape)
        exact = mean_squared_error(a, noise, plan.lr, plan.local_steps, plan.rounds, np.array([1.0, 0.0]), v)
        assert exact <= target**2
        assert not plan.bound.holds  # constants 1 are not the theorem's
        assert plan.bound.value > target**2
    assert prescribed(num_clients=8).gradients / prescribed().gradients == pytest.approx(1 / 2, rel=0.02)
    assert prescribed(num_clients=8).rounds == prescribed().rounds
    assert 4 < prescribed(target=0.05).gradients / prescribed().gradients < 5.5
    assert bounds_stochastic.speed_up_range(mu=1, smoothness=1, target=0.1, third_derivative=0) == math.inf


# 004: one round over all cohorts, and whole runs by second moments.


def local_maps(a, lr, steps):
    """Upsilon_i and M_i: what K steps do to the start and to a constant gradient."""
    d = a.shape[1]
    powers = [np.array([np.linalg.matrix_power(np.eye(d) - lr * h, k) for h in a]) for k in range(steps + 1)]
    return powers[-1], lr * sum(powers[:-1])


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
        bound = bounds_original.fedavg_round(setting, s, distance=start, gap=gap)
        assert bound.holds
        assert np.trace(after[:d, :d]) <= bound.value + 1e-12
        s = min(1 / (81 * setting.smoothness), setting.heard / n / (15 * setting.mu))
        lr = s / (steps * setting.server_lr)
        w = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 1)
        quiet, noisy = (
            list(second_moments(scaffold_maps(a, lr, steps, setting.server_lr, setting.heard, x), z, 1))[1]
            for x, z in [(0.0, np.append(u, w)), (variance, np.append(u, w))]
        )
        # Lemma 14's C has the gradient noise averaged out of c_i: the lag of the noiseless run.
        total = np.trace(noisy[:d, :d]) + 9 * n * s**2 / setting.heard * np.trace(quiet[d:, d:]) / n
        lag = np.mean(np.sum(w**2, axis=1))
        bound = bounds_original.scaffold_round(setting, s, distance=start, control_gap=lag, gap=gap)
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
            constants["mu"] = 0.0  # functions that happen to be strongly convex, and a theorem that does not know
        (n, d, _), mean = a.shape, a.mean(axis=0)
        u = rng.normal(size=d)
        w = -pulls if convex else a @ u  # c_i = 0, or the gradient at x^0
        lag = float(np.sqrt(np.mean(np.sum(w**2, axis=1)))) if convex else 0.0
        start = {"distance": np.linalg.norm(u), "suboptimality": 0.5 * u @ mean @ u, "control_distance": lag}
        setting, measure = Federation(**constants, **start), 0.5 * mean if convex else mean @ mean
        assert setting.case == case
        for method, need in [("fedavg", [24]), ("scaffold", [162, 30 * n / setting.heard])]:
            rounds = 300 if method == "fedavg" else 600
            plan = getattr(bounds_original, method)(setting, rounds)
            kappa = setting.smoothness / setting.mu if setting.mu else 0.0
            assert plan.bound.holds == (not setting.mu or max(need[0] * kappa, *need[1:], 0) <= rounds)
            common = (plan.lr, setting.local_steps, server_lr, setting.heard, setting.noise_trace / d)
            maps = fedavg_maps(a, pulls, *common) if method == "fedavg" else scaffold_maps(a, *common)
            z = np.append(u, 1.0) if method == "fedavg" else np.append(u, w)
            values = np.array([np.trace(measure @ m[:d, :d]) for m in second_moments(maps, z, rounds)])
            s = plan.lr * setting.local_steps * server_lr
            assert averaged(values, setting.mu / 2, s) <= plan.bound.value
            given = getattr(bounds_original, method)(setting, rounds, lr=plan.lr).bound
            assert given.value == pytest.approx(plan.bound.value)
            assert not getattr(bounds_original, method)(setting, rounds, lr=1e3).bound.holds


def test_theorem_viii_holds_for_whole_runs():
    """F25: update (28), all clients; the mean over inner steps of E||grad f||^2, exactly, with noise."""
    rng = np.random.default_rng(9)
    for weak in (False, True) * 6:
        n, d, steps, rounds = 3, 2, int(rng.integers(1, 6)), 150
        a = np.eye(d) * rng.uniform(0.5, 1) + 0.03 * rng.normal(size=(n, 1, 1)) * np.diag([1.0, -1.0])
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
        plan = bounds_original.scaffold_quadratic(setting, rounds)
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
    assert [c.text for c in bounds_original.scaffold_quadratic(sampled, 10).bound.broken] == ["N <= cohort"]


def test_tuning_lemmas():
    rng = np.random.default_rng(10)
    for _ in range(200):
        rounds = int(10 ** rng.uniform(0, 5))
        start, first, second, largest, rate = 10 ** rng.uniform(-3, 3, size=5)
        sub = tuned_sublinear(rounds=rounds, start=start, first=first, second=second, largest=largest)
        share = start / (rounds + 1)
        lemma = share / largest + 2 * math.sqrt(first * share) + 2 * share ** (2 / 3) * second ** (1 / 3)
        assert sub.step <= largest
        assert sub.value <= lemma * (1 + 1e-12)
        largest = min(largest, 0.9 / rate)
        lin = tuned_linear(rate=rate, rounds=rounds, start=start, first=first, largest=largest)
        log = math.log(max(1.0, rate**2 * rounds * start / first))
        assert lin.step == pytest.approx(min(largest, max(log, 0.5) / (rate * rounds)))
        if rounds >= 1 / (2 * rate * largest):  # the lemma's condition; its proof then gives 3 a d_0 (1 - a s)^R + c s
            assert (
                lin.value <= 3 * rate * start * (1 - rate * lin.step) ** rounds + first * lin.step + 1e-12 * lin.value
            )
        d, total, weight = start, 0.0, 0.0  # a sequence that meets the recursion with equality and ends at 0
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
                lrs = [bounds_original.pair_best_lr(x, local_steps=k, **units), 1 / units["mu"]]
                x = min(bounds_original.pair_round(x, lr=lr, local_steps=k, **units) for lr in lrs)
                bound = bounds_original.fedavg_lower_bound(local_steps=k, rounds=r, suboptimality=first, **units)
                assert 0.5 * units["mu"] * x**2 >= bound.value * (1 - 1e-9)
            exact = 0.5 * units["mu"] * x**2 * units["mu"] * r**2 / units["big_g"] ** 2
            assert exact == pytest.approx(bounds_original.lower_bound_constant(k), rel=0.03)
    grid = np.linspace(0, 1, 2001)
    rounds = [bounds_original.pair_round(0.7, lr=lr, local_steps=4, mu=1.0, big_g=1.0) for lr in grid]
    best = bounds_original.pair_best_lr(0.7, local_steps=4, mu=1.0, big_g=1.0)
    assert bounds_original.pair_round(0.7, lr=best, local_steps=4, mu=1.0, big_g=1.0) <= min(rounds)
    assert not bounds_original.fedavg_lower_bound(mu=1, big_g=1, local_steps=1, rounds=1, suboptimality=1).holds


def test_one_round_on_the_pair_is_fedavg():
    lr, k, mu, big_g, x = 0.13, 5, 1.7, 2.3, 0.4
    y_1 = y_2 = x
    for _ in range(k):
        y_1, y_2 = y_1 - lr * (2 * mu * y_1 + big_g), y_2 + lr * big_g
    expected = bounds_original.pair_round(x, lr=lr, local_steps=k, mu=mu, big_g=big_g)
    assert (y_1 + y_2) / 2 == pytest.approx(expected, rel=1e-13)


def rescaled(constants, length, value):
    """The same federation in other units: x -> length x, f -> value f."""
    powers = {"smoothness": (-2, 1), "mu": (-2, 1), "delta": (-2, 1), "noise_trace": (-2, 2), "big_g": (-1, 1)}
    powers |= {"distance": (1, 0), "suboptimality": (0, 1), "control_distance": (-1, 1)}
    return {k: v * length ** powers[k][0] * value ** powers[k][1] if k in powers else v for k, v in constants.items()}


CONSTANTS = {
    "smoothness": 1.3, "mu": 0.2, "delta": 0.4, "noise_trace": 0.3, "big_g": 0.7, "big_b": 1.4, "distance": 1.1,
    "suboptimality": 0.9, "control_distance": 0.8, "local_steps": 5, "num_clients": 8, "cohort": 2,
}  # fmt: skip


def test_table_2():
    unit = Federation(**{**CONSTANTS, "smoothness": 1.0, "suboptimality": 1.0})
    table = bounds_original.table_2(unit, 0.01)
    s2, mu, n, s, k, g, e = 0.3, 0.2, 8, 2, 5, 0.7, 0.01
    assert table["SCAFFOLD"].strongly_convex == pytest.approx(s2 / (mu * s * k * e) + 1 / mu + n / s)
    assert table["SCAFFOLD"].non_convex == pytest.approx(s2 / (s * k * e**2) + (n / s) ** (2 / 3) / e)
    m2 = s2 + k * (1 - s / n) * g**2
    assert table["FedAvg"].strongly_convex == pytest.approx(m2 / (mu * s * k * e) + g / (mu * e**0.5) + 1.4**2 / mu)
    assert table["SCAFFOLD (quadratic)"].strongly_convex == pytest.approx(
        s2 / (mu * n * k * e) + 1 / (mu * k) + 0.4 / mu
    )
    assert table["DANE (quadratic)"] == (pytest.approx(4.0), None)
    assert bounds_original.table_2(Federation(**{**CONSTANTS, "mu": 0.0}), e)["SGD"].strongly_convex is None
    other = bounds_original.table_2(Federation(**rescaled(CONSTANTS, 3.0, 7.0)), 7.0 * e)
    squared = bounds_original.table_2(Federation(**rescaled(CONSTANTS, 3.0, 7.0)), 49 / 9 * e)
    for name, rounds in bounds_original.table_2(Federation(**CONSTANTS), e).items():
        if rounds.strongly_convex is not None:
            assert other[name].strongly_convex == pytest.approx(rounds.strongly_convex)
        if rounds.non_convex is not None:
            assert squared[name].non_convex == pytest.approx(rounds.non_convex)


# Errata: each printed formula fails a check that its corrected form passes. Numbers as in docs/errata.md.


def random_state(seed, n=3, d=2, lr=0.3, steps=4):
    rng = np.random.default_rng(seed)
    a = random_hessians(rng, n, d, 0.1, 1.0)
    u, v = rng.normal(size=d), rng.normal(size=(n, d))
    return a, u, v - v.mean(axis=0), lr, steps


def test_000_2_step_1_has_one_over_n():
    a, u, v, lr, steps = random_state(0)
    x, xi, y = (z[..., 0] for z in one_round(a, u[:, None], v[..., None], lr, steps))
    reach, ends = lr * steps, y + lr * steps * v
    assert abs(as_printed.step_1_as_printed(ends, xi, reach) - x @ x) > 0.05
    assert (np.sum(ends**2) - reach**2 * np.sum(xi**2)) / len(a) == pytest.approx(x @ x, rel=1e-12)


@pytest.mark.parametrize("a", [0.1, 0.5, 1.0])
def test_000_3_and_4_the_factors_of_a_coordinate(a):
    lr, steps = 0.3, 12
    y = 0.0
    for _ in range(steps):
        y -= lr * (a * y + 1.0)  # u = 0, v = 1
    left = y / (lr * steps) + 1.0  # what is left of gamma H v, over gamma H
    u, v = bounds_quadratic.branches([a], lr=lr, local_steps=steps)
    assert v[0] == pytest.approx(left, rel=1e-12)
    assert u[0] + v[0] <= 1
    assert abs(as_printed.control_factor_as_printed(a, lr=lr, local_steps=steps) - left) > 0.1
    assert u[0] + as_printed.contraction_v_as_printed(a, lr=lr, local_steps=steps) > 1


def test_000_5_the_bound_used_is_from_above():
    """(1 - x)^H <= 1 - x H / 2 for x H <= 1; Bernoulli's 1 - x H is below; gamma mu H <= 1 needs kappa >= 1.264."""
    for x, steps in itertools.product([0.5, 0.1, 0.01], [1, 2, 5, 10, 100]):
        if x * steps <= 1:
            assert 1 - x * steps <= (1 - x) ** steps + 1e-15 <= 1 - x * steps / 2 + 2e-15
    assert math.sqrt(2 * (1 - 1 / math.e) / 1.264) == pytest.approx(1, abs=2e-4)


def test_000_7_large_steps():
    mu, lr = 0.01, 0.1
    steps = round(1 / (lr * mu))
    value = bounds_quadratic.rho(mu=mu, smoothness=1.0, lr=lr, local_steps=steps).value
    assert value == pytest.approx(1 - (1 - 1 / math.e) * mu, rel=1e-12)
    assert as_printed.large_steps_rate_as_printed(mu=mu, smoothness=1.0) < value - 0.003


def stationary_blocks(seed=1):
    a, _, _, lr, steps = random_state(seed)
    n, d, _ = a.shape
    half = np.random.default_rng(seed).normal(size=a.shape)
    noise = half @ np.swapaxes(half, 1, 2)
    sigma = stationary(a, noise, lr, steps).reshape(n + 1, d, n + 1, d).transpose(0, 2, 1, 3)
    ends, drags = local_maps(a, lr, steps)
    left = np.eye(d) - drags / (lr * steps)
    spread = accumulated(a, noise, lr, steps)
    return as_printed.Blocks(sigma[0, 0], sigma[0, 1:], sigma[1:, 1:], ends, left, spread, lr, steps)


def test_000_8_the_block_equations():
    s = stationary_blocks()
    g, n, gaps = s.lr * s.local_steps, len(s.b), s.upsilon - s.upsilon.mean(axis=0)
    for c in range(n):
        printed = as_printed.block_sign_as_printed(s, c)
        corrected = printed + 2 * g / n * sum(s.b[i] @ s.theta_xi[i].T @ gaps[c] for i in range(n))
        size = np.abs(g * s.theta_xi[c]).max()
        assert np.abs(corrected - g * s.theta_xi[c]).max() < 1e-12 * size
        assert np.abs(printed - g * s.theta_xi[c]).max() > 1e-3 * size
    c, k = 0, 1
    printed, size = as_printed.block_index_as_printed(s, c, k), np.abs(g**2 * s.xi[c, k]).max()
    corrected = printed + g * s.b[c] @ (s.theta_xi[c] - s.theta_xi[k]).T @ gaps[k]
    assert np.abs(corrected - g**2 * s.xi[c, k]).max() < 1e-12 * size
    assert np.abs(printed - g**2 * s.xi[c, k]).max() > 1e-3 * size


@pytest.mark.parametrize("steps", [1, 7])
def test_000_9_corollary_1_lacks_mu(steps):
    a = np.broadcast_to(np.diag([0.01, 1.0]), (10, 2, 2))
    noise = np.broadcast_to(np.eye(2) / 2, a.shape)
    exact = np.trace(stationary(a, noise, 0.5, steps)[:2, :2])
    assert exact == pytest.approx(1.27, abs=0.01)  # whatever H
    assert as_printed.corollary_1_as_printed(lr=0.5, num_clients=10, noise_trace=1.0) < exact / 25
    bound = bounds_quadratic.variance_equal_hessians(mu=0.01, smoothness=1.0, lr=0.5, num_clients=10, noise_trace=1.0)
    assert bound.holds
    assert exact <= bound.value
    assert not bounds_quadratic.variance_equal_hessians(
        mu=0.01, smoothness=1.0, lr=0.5, num_clients=10, noise_trace=1.0, zeta_2=0.1
    ).holds


def test_000_9_theorem_3_condition_depends_on_units():
    """f -> 100 f and gamma -> gamma / 100 is the same run: a condition must give the same answer."""
    met = [
        as_printed.theorem_3_condition_as_printed(lr=0.1 / f, local_steps=5, zeta_2=0.5 * f, mu=0.2 * f).met
        for f in (1, 100)
    ]
    assert met == [False, True]
    for f in (1, 100):
        constants = {"mu": 0.2 * f, "smoothness": 1.0 * f, "num_clients": 4, "noise_trace": 1.0, "zeta_2": 0.5 * f}
        broken = bounds_quadratic.variance(lr=0.1 / f, local_steps=5, **constants).broken
        assert [c.text for c in broken] == ["lr H L zeta_2 <= mu / 10", "lr H (L + mu) <= 1 / 48"]


def test_002_2_sign_of_the_control_update():
    a, u, v, lr, steps = random_state(2)
    right, wrong = (u[:, None], v[..., None]), (u[:, None], v[..., None])
    for _ in range(60):
        right = one_round(a, *right, lr, steps)[:2]
        x, _, y = one_round(a, *wrong, lr, steps)
        wrong = x, as_printed.control_sign_as_printed(wrong[1], y, x, lr * steps)
    assert np.abs(right[0]).max() < 1e-3
    assert not np.abs(wrong[0]).max() < 1


def test_002_6_lemma_c12_is_false_per_client():
    a = np.ones((50, 1, 1))
    a[0] = 1.5
    ends = (1 - 0.01 * a) ** 5
    gaps = np.abs(ends - ends.mean(axis=0)).ravel() / 0.05
    printed = as_printed.lemma_c12_as_printed(a)
    assert printed == pytest.approx(0.070, abs=1e-3)
    assert gaps[0] > 0.46
    assert np.sqrt(np.mean(gaps**2)) <= printed  # the clients' average keeps the bound


@pytest.mark.parametrize("steps", [1, 5])
def test_002_7_covariance_of_theta_and_xi(steps):
    a, _, _, _, _ = random_state(3)
    half = np.random.default_rng(3).normal(size=a.shape)
    noise = half @ np.swapaxes(half, 1, 2)
    mean, lrs, errors = a.mean(axis=0), [0.02, 0.01, 0.005], {"printed": [], "corrected": []}
    solution = solve_continuous_lyapunov(mean, noise.mean(axis=0))
    for lr in lrs:
        exact = stationary(a, noise, lr, steps)[:2, 2:4]
        gaps = (a[0] - mean, noise[0] - noise.mean(axis=0))
        printed = as_printed.covariance_theta_xi_as_printed(solution, *gaps, lr=lr, num_clients=3)
        corrected = lr / 3 * (gaps[1] - solution @ gaps[0])
        errors["printed"].append(np.abs(printed - exact).max())
        errors["corrected"].append(np.abs(corrected - exact).max())
    assert slope(lrs, errors["printed"]) == pytest.approx(1, abs=0.15)
    assert slope(lrs, errors["corrected"]) == pytest.approx(2, abs=0.15)


def softplus_clients(n):
    """One-dimensional strongly convex clients with third derivatives, optimum of the mean at 0."""
    rng = np.random.default_rng(11)
    curve, bend, turn, pull = rng.uniform(0.3, 1, n), rng.uniform(1, 3, n), rng.uniform(-1, 2, n), rng.normal(size=n)
    pull -= pull.mean()

    def gradient(x):
        gate = 1 / (1 + np.exp(-(np.multiply.outer(np.ones(n), x).T - turn)))
        zero = 1 / (1 + np.exp(turn))
        return np.multiply.outer(x, curve) + bend * (gate - zero) + pull

    gate = 1 / (1 + np.exp(turn))
    return gradient, curve + bend * gate * (1 - gate), bend * gate * (1 - gate) * (1 - 2 * gate)


def stationary_density(gradient, n, lr, variance):
    """Law of theta for H = 1, where the server runs SGD on the mean: exact on a grid, noise N(0, variance / N)."""
    x = np.linspace(-1, 1, 601) * 9 * np.sqrt(lr * variance / n)
    spread = lr * np.sqrt(variance / n)
    kernel = np.exp(-0.5 * ((x - (x - lr * gradient(x).mean(axis=1))[:, None]) / spread) ** 2)
    kernel /= kernel.sum(axis=1, keepdims=True)
    system = kernel.T - np.eye(len(x))
    system[0] = 1.0  # in place of one balance equation, which the others imply: the law sums to 1
    return x, np.linalg.solve(system, np.eye(len(x))[0])


def test_002_8_and_9_biases():
    """Lemma E.2's sign and lost term, Lemma E.4's spurious 1/N: against the exact stationary law of a small problem."""
    n, lrs = 4, [0.2, 0.1, 0.05]
    gradient, second, third = softplus_clients(n)
    mean, errors = second.mean(), {"e2": [], "e2 corrected": [], "e4": [], "e4 corrected": []}
    for lr in lrs:
        x, law = stationary_density(gradient, n, lr, 1.0)
        bias, variance = law @ x, law @ x**2
        exact = -(law @ gradient(x) - gradient(np.zeros(1))[0])[0]  # xi_c+ = -(gradient seen) + its mean over clients
        printed = as_printed.lemma_e2_as_printed(second[0] - mean, bias)
        errors["e2"].append(abs(printed - exact))
        errors["e2 corrected"].append(abs(-printed - 0.5 * (third[0] - third.mean()) * variance - exact))
        wrong = as_printed.lemma_e4_as_printed(mean, third.mean(), variance, num_clients=n)
        errors["e4"].append(abs(wrong - bias))
        errors["e4 corrected"].append(abs(wrong * n - bias))
    for name in ("e2", "e4"):
        assert slope(lrs, errors[name]) == pytest.approx(1, abs=0.2)  # the error is of the order of the term
        assert slope(lrs, errors[f"{name} corrected"]) == pytest.approx(2, abs=0.2)


def test_002_9_lemma_e1_remainder_grows_with_the_square_of_h():
    steps = np.array([10, 40, 160])
    _, v = np.array([bounds_quadratic.branches(1.0, lr=1e-4, local_steps=int(h)) for h in steps]).T
    remainder = np.abs(v - 1e-4 * (steps - 1) / 2)
    printed = [as_printed.lemma_e1_remainder_as_printed(lr=1e-4, local_steps=int(h), smoothness=1.0) for h in steps]
    assert slope(steps, remainder) == pytest.approx(2, abs=0.2)
    assert (remainder / printed)[-1] > 10 * (remainder / printed)[0]
    assert (remainder <= (1e-4 * steps) ** 2).all()


def test_002_11_corollary_4_10_exponents():
    """By units, and against the step: H is min(1, mu / zeta_2) / (gamma L)."""
    q, numbers = 2.0, {"mu": 0.1, "smoothness": 1.0, "num_clients": 50, "target": 0.05}
    printed = []
    for length, value in [(1.0, 1.0), (10.0, 1.0), (1.0, 10.0)]:
        unit = value / length**2
        here = numbers | {"mu": 0.1 * unit, "smoothness": unit, "target": 0.05 * length}
        third = q * value / length**3
        printed.append(as_printed.cor_4_10_exponents_as_printed(third_derivative=third, **here))
        sigma2 = unit * value
        plan = bounds_stochastic.prescribe(
            dim=2,
            distance=length,
            zeta_1=value / length,
            zeta_2=0.0,
            noise_trace=sigma2,
            third_derivative=third,
            noise_growth=0.0,
            **here,
        )
        mu, smoothness, target = here["mu"], here["smoothness"], here["target"]
        factor = max(1 / 50, (third * target / mu) ** (2 / 3), third * target / math.sqrt(smoothness * mu))
        steps = sigma2 / (smoothness * mu * target**2) * factor
        assert plan.local_steps == math.floor(steps * (1 + 1e-9))
        assert plan.lr * smoothness == pytest.approx(1 / steps)
    assert max(printed) > 3 * min(printed)


def test_004_1_option_two():
    rng = np.random.default_rng(12)
    c, c_i, x = rng.normal(size=(3, 4))
    a, lr, steps = random_hessians(rng, 1, 4, 0.1, 1.0)[0], 0.1, 6
    y, seen = x, []
    for _ in range(steps):
        seen.append(a @ y)
        y = y - lr * (seen[-1] - c_i + c)
    mean = np.mean(seen, axis=0)
    printed = as_printed.option_two_eq19_as_printed(c, c_i, x, y, lr=lr, local_steps=steps)
    assert np.abs(printed - mean).max() > 0.1
    assert printed + 2 * (c_i - c) == pytest.approx(mean, rel=1e-12)


def test_004_2_the_ideal_update_goes_down():
    y = np.array([1.0, -2.0])
    assert np.sum(as_printed.ideal_update_eq6_as_printed(y, 0.5 * y) ** 2) > np.sum(y**2)
    assert np.sum((y - 0.1 * 0.5 * y) ** 2) < np.sum(y**2)


def test_004_3_4_and_6_the_pair():
    mu, big_g = 1.0, 2.0
    x = np.linspace(-20, 20, 4001)
    square = 0.5 * ((2 * mu * x + big_g) ** 2 + big_g**2)
    g, b = as_printed.pair_b_as_printed(big_g)
    assert (square > g**2 + b**2 * (mu * x) ** 2 + 1e-9).any()
    assert (square <= 2 * big_g**2 + 3 * (mu * x) ** 2 + 1e-9).all()
    assert np.isclose(square, 2 * big_g**2 + 3 * (mu * x) ** 2).any()  # no smaller constants do
    curvatures = np.array([2 * mu, 0.0])
    assert (curvatures.max(), np.abs(curvatures - curvatures.mean()).max()) == (2.0, 1.0)  # beta = 2, delta = 1
    assert x[0] - (1 / mu) * mu * x[0] == 0  # Figure 3: SGD with its best step is done after one round


def test_004_8_rates_by_units_and_by_steps():
    length, value, rounds = 10.0, 3.0, 50
    constants = {**CONSTANTS, "mu": 0.0, "convex": False, "control_distance": 0.0, "server_lr": 2.0}
    pair = [Federation(**constants), Federation(**rescaled(constants, length, value))]
    for printed, corrected in [
        (as_printed.fedavg_non_convex_as_printed, bounds_original.fedavg),
        (as_printed.scaffold_non_convex_as_printed, bounds_original.scaffold),
    ]:
        unit = (value / length) ** 2
        values = [printed(setting, rounds) for setting in pair]
        assert values[1] != pytest.approx(unit * values[0], rel=0.1)
        values = [corrected(setting, rounds).bound.value for setting in pair]
        assert values[1] == pytest.approx(unit * values[0], rel=1e-12)


def test_004_8_the_step_of_theorem_v():
    """At the printed step the theorem's own bound falls as R^(-1/2), or not at all; at the corrected one as 1/R."""
    setting = Federation(**{**CONSTANTS, "big_g": 0.3})
    quiet = Federation(**{**CONSTANTS, "noise_trace": 0.0, "cohort": None})
    many = np.array([10**5, 10**6, 10**7])
    for federation, printed_slope, slope_corrected in [(setting, -0.5, -1), (quiet, 0, -2)]:
        per_lr = federation.local_steps * federation.server_lr
        printed = [as_printed.fedavg_step_as_printed(federation, int(r)) / per_lr for r in many]
        values = [
            bounds_original.fedavg(federation, int(r), lr=lr).bound.value for r, lr in zip(many, printed, strict=True)
        ]
        assert slope(many, values) == pytest.approx(printed_slope, abs=0.1)
        values = [bounds_original.fedavg(federation, int(r)).bound.value for r in many]
        assert slope(many, values) == pytest.approx(slope_corrected, abs=0.25)  # up to logarithms


def test_004_9_and_10_lemmas_8_and_9():
    y, g, lr = np.array([1.0, 2.0]), np.array([-0.5, 0.3]), 0.05
    for k in (2, 5, 20):
        exact = np.sum((y - lr * g) ** 2)
        assert exact > as_printed.lemma_8_as_printed(y, g, lr=lr, local_steps=k)
        assert exact <= (1 + 1 / (k - 1)) * y @ y + k * lr**2 * g @ g
        assert k - 1 >= k / 2  # Lemma 9 prints <=


def test_004_13_lemma_22_lacks_the_step():
    beta, k, n, sigma2 = 0.01, 5, 3, 1.0
    setting = Federation(smoothness=beta, local_steps=k, num_clients=n, noise_trace=sigma2)
    lr = 1 / (10 * beta)
    spread = lr**2 * sigma2 / n * sum((1 - lr * beta) ** (2 * h) for h in range(k))
    exact = 0.5 * beta * spread  # E f(x) - f(E x) for equal clients of curvature beta
    printed = as_printed.lemma_22_as_printed(setting)
    assert exact > 5 * printed
    assert exact <= lr**2 * printed

"""The misprints of the papers: each printed formula fails a check that its corrected form passes. See docs/errata.md."""

import itertools
import math

import numpy as np
import pytest
from oracles import (
    CONSTANTS,
    accumulated,
    local_maps,
    one_round,
    random_hessians,
    rescaled,
    slope,
    stationary,
)
from scipy.linalg import solve_continuous_lyapunov

from papers import as_printed
from papers.bounds import original, quadratic, stochastic
from papers.bounds.conditions import Federation

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
    u, v = quadratic.branches([a], lr=lr, local_steps=steps)
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
    value = quadratic.rho(mu=mu, smoothness=1.0, lr=lr, local_steps=steps).value
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
    return as_printed.Blocks(
        sigma[0, 0], sigma[0, 1:], sigma[1:, 1:], ends, left, spread, lr, steps
    )


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
    bound = quadratic.variance_equal_hessians(
        mu=0.01, smoothness=1.0, lr=0.5, num_clients=10, noise_trace=1.0
    )
    assert bound.holds
    assert exact <= bound.value
    assert not quadratic.variance_equal_hessians(
        mu=0.01, smoothness=1.0, lr=0.5, num_clients=10, noise_trace=1.0, zeta_2=0.1
    ).holds


def test_000_9_theorem_3_condition_depends_on_units():
    """f -> 100 f and gamma -> gamma / 100 is the same run: a condition must give the same answer."""
    met = [
        as_printed.theorem_3_condition_as_printed(
            lr=0.1 / f, local_steps=5, zeta_2=0.5 * f, mu=0.2 * f
        ).met
        for f in (1, 100)
    ]
    assert met == [False, True]
    for f in (1, 100):
        constants = {
            "mu": 0.2 * f,
            "smoothness": 1.0 * f,
            "num_clients": 4,
            "noise_trace": 1.0,
            "zeta_2": 0.5 * f,
        }
        broken = quadratic.variance(lr=0.1 / f, local_steps=5, **constants).broken
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
    curve, bend, turn, pull = (
        rng.uniform(0.3, 1, n),
        rng.uniform(1, 3, n),
        rng.uniform(-1, 2, n),
        rng.normal(size=n),
    )
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
        exact = -(law @ gradient(x) - gradient(np.zeros(1))[0])[
            0
        ]  # xi_c+ = -(gradient seen) + its mean over clients
        printed = as_printed.lemma_e2_as_printed(second[0] - mean, bias)
        errors["e2"].append(abs(printed - exact))
        errors["e2 corrected"].append(
            abs(-printed - 0.5 * (third[0] - third.mean()) * variance - exact)
        )
        wrong = as_printed.lemma_e4_as_printed(mean, third.mean(), variance, num_clients=n)
        errors["e4"].append(abs(wrong - bias))
        errors["e4 corrected"].append(abs(wrong * n - bias))
    for name in ("e2", "e4"):
        assert slope(lrs, errors[name]) == pytest.approx(
            1, abs=0.2
        )  # the error is of the order of the term
        assert slope(lrs, errors[f"{name} corrected"]) == pytest.approx(2, abs=0.2)


def test_002_9_lemma_e1_remainder_grows_with_the_square_of_h():
    steps = np.array([10, 40, 160])
    _, v = np.array([quadratic.branches(1.0, lr=1e-4, local_steps=int(h)) for h in steps]).T
    remainder = np.abs(v - 1e-4 * (steps - 1) / 2)
    printed = [
        as_printed.lemma_e1_remainder_as_printed(lr=1e-4, local_steps=int(h), smoothness=1.0)
        for h in steps
    ]
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
        plan = stochastic.prescribe(
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
        factor = max(
            1 / 50, (third * target / mu) ** (2 / 3), third * target / math.sqrt(smoothness * mu)
        )
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
    assert (curvatures.max(), np.abs(curvatures - curvatures.mean()).max()) == (
        2.0,
        1.0,
    )  # beta = 2, delta = 1
    assert (
        x[0] - (1 / mu) * mu * x[0] == 0
    )  # Figure 3: SGD with its best step is done after one round


def test_004_8_rates_by_units_and_by_steps():
    length, value, rounds = 10.0, 3.0, 50
    constants = {**CONSTANTS, "mu": 0.0, "convex": False, "control_distance": 0.0, "server_lr": 2.0}
    pair = [Federation(**constants), Federation(**rescaled(constants, length, value))]
    for printed, corrected in [
        (as_printed.fedavg_non_convex_as_printed, original.fedavg),
        (as_printed.scaffold_non_convex_as_printed, original.scaffold),
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
            original.fedavg(federation, int(r), lr=lr).bound.value
            for r, lr in zip(many, printed, strict=True)
        ]
        assert slope(many, values) == pytest.approx(printed_slope, abs=0.1)
        values = [original.fedavg(federation, int(r)).bound.value for r in many]
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

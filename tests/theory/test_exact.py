"""Exact theory on quadratics against golden numbers, the engine's own code, dense solves and Monte Carlo."""

import math
from decimal import Decimal, localcontext
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import theory
from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.algorithms.round import exchange
from fedscaffold.theory import local_steps, rates
from fedscaffold.theory.error_dynamics import chain
from fedscaffold.theory.quadratics import geometric, lag, linear_round, power, spectra
from fedscaffold.theory.round_map import form_of
from fedscaffold.theory.stable_step import stable_step
from fedscaffold.theory.stationary import by_transfer
from papers.bounds import quadratic
from papers.bounds.lambda_norm import lambda_norm, largest_singular_value, operator, scaled
from papers.bounds.sample_rounds import sample_rounds
from papers.bounds.xi_form import block_residual, xi_round_map

SCAFFOLD, FEDAVG = fs.scaffold(), fs.fedavg()
CLOSED = [make for make in ALGORITHMS.values() if make().form is not None]


@pytest.fixture
def one_dimension():
    """G1: two clients in one dimension."""
    return fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])


G1 = {"lr": 0.2, "local_steps": 4}
G1_NOISE = np.array([1.0, 0.5]).reshape(2, 1, 1)


def covariances(n, d, seed=0):
    roots = np.random.default_rng(seed).normal(size=(n, d, d))
    return roots @ roots.transpose(0, 2, 1) / d


def to_xi(n, d):
    """(x, c, c_1 .. c_N) -> (x, xi_1 .. xi_N), xi_c = c - c_c."""
    change = np.zeros(((n + 1) * d, (n + 2) * d))
    change[:d, :d] = np.eye(d)
    change[d:, d : 2 * d] = np.tile(np.eye(d), (n, 1))
    change[d:, 2 * d :] = -np.eye(n * d)
    return change


# --- golden numbers -------------------------------------------------------------------------------------------------


def test_golden_round_map_and_trajectory(one_dimension):
    closed = xi_round_map(one_dimension, **G1)
    expected = [
        [0.612053125, -0.2952, -0.3709875],
        [-0.25306640625, 0.631, 0.463734375],
        [0.25306640625, 0.369, 0.536265625],
    ]
    np.testing.assert_allclose(closed.matrix, expected, rtol=0, atol=1e-14)
    state = np.zeros(3)
    for theta, xi in [
        (0.10970625, 0.6008671875),
        (0.2223905251171875, 0.6736086467285156),
        (0.29687218118230296, 0.6572591878249924),
    ]:
        state = closed.matrix @ state + closed.offset
        np.testing.assert_allclose(state, [theta, xi, -xi], rtol=0, atol=1e-14)


def test_golden_rates_and_law(one_dimension):
    rate = theory.contraction_rate(one_dimension, **G1)
    assert rate.spectral_radius**2 == pytest.approx(0.31772390829780034, abs=1e-12)
    assert lambda_norm(one_dimension, **G1) ** 2 == pytest.approx(0.41712645581459185, abs=1e-12)
    np.testing.assert_allclose(theory.fixed_point(one_dimension, **G1), [0.4], atol=1e-15)
    fedavg = theory.fixed_point(one_dimension, algorithm=FEDAVG, **G1)
    np.testing.assert_allclose(fedavg, [0.2827867862062295], atol=1e-14)
    law = theory.stationary(one_dimension, noise=G1_NOISE, **G1)
    sigma = [
        [0.06490161389521962, -0.00202027589375116, 0.00202027589375116],
        [-0.00202027589375116, 0.06935851695491621, -0.06935851695491621],
        [0.00202027589375116, -0.06935851695491621, 0.06935851695491621],
    ]
    np.testing.assert_allclose(law.covariance, sigma, rtol=0, atol=1e-14)


def test_golden_lower_bound_pair():
    pair = fs.problems.lower_bound_pair()
    curve = theory.contraction_curve(pair, lr=0.1, local_steps=[1, 2, 5, 10])
    expected = [0.9, 0.8081286641361126, 0.5, 0.5261592397744241]
    assert [rate.spectral_radius for rate in curve] == pytest.approx(expected, abs=1e-10)
    assert all(lambda_norm(pair, lr=0.1, local_steps=k) <= 1 for k in (1, 2, 5, 10))
    biases = [theory.bias(pair, lr=0.1, local_steps=k, algorithm=FEDAVG)[0] for k in (1, 2, 10)]
    assert biases == pytest.approx([0, 0.055555555555555566, 0.6202902496016713], abs=1e-14)


# --- the closed form is the code -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "n", "d", "lr", "steps"),
    [
        (fs.scaffold(), 3, 4, 0.9, 7),
        (fs.scaffold(server_lr=0.7), 4, 2, 1.6, 2),
        (fs.scaffold(option=1, server_lr=1.3), 3, 2, 0.3, 3),
        (fs.fedavg(server_lr=0.5), 3, 4, 0.9, 7),
        (fs.fedprox(mu=0.4), 3, 2, 0.5, 4),
        (fs.sgd(), 2, 2, 0.5, 4),
    ],
)
def test_the_differentiated_code_is_the_closed_form(algorithm, n, d, lr, steps):
    problem = fs.problems.quadratic(n, d, mu=0.05, seed=n, noise=0.3)
    code = theory.round_map(problem, lr=lr, local_steps=steps, algorithm=algorithm)
    closed = xi_round_map(problem, lr=lr, local_steps=steps, algorithm=algorithm)
    change = to_xi(n, d) if code.memory else np.eye(d)
    np.testing.assert_allclose(change @ code.matrix, closed.matrix @ change, rtol=0, atol=1e-12)
    np.testing.assert_allclose(change @ code.offset, closed.offset, rtol=0, atol=1e-12)
    rate = theory.contraction_rate(problem, lr=lr, local_steps=steps, algorithm=algorithm)
    assert rate.spectral_radius == pytest.approx(code.spectral_radius(), abs=1e-10)
    at = theory.fixed_point(problem, lr=lr, local_steps=steps, algorithm=algorithm)
    np.testing.assert_allclose(at, code.fixed_point()[:d], rtol=0, atol=1e-11)
    if code.memory:
        eigenvalues = np.linalg.eigvals(code.matrix)
        assert (np.abs(eigenvalues - 1) < 1e-6).sum() == d  # I15: what c - mean c_i conserves
        np.testing.assert_allclose(
            code.fixed_point()[2 * d :], problem.ideal_controls().ravel(), atol=1e-11
        )


REGISTERED = {"lr": 0.4, "local_steps": 5}


@cache
def radii_of_forms():
    problem = fs.problems.quadratic(3, 2, mu=0.1, seed=7)
    return [
        theory.round_map(problem, **REGISTERED, algorithm=make()).spectral_radius()
        for make in CLOSED
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_registered_algorithm_has_the_form_that_it_declares(name):
    algorithm, n, d = ALGORITHMS[name](), 3, 2
    problem = fs.problems.quadratic(n, d, mu=0.1, seed=7)
    options = {**REGISTERED, "algorithm": algorithm}
    counts = any(np.ndim(value) == 0 for value in algorithm.init(np.zeros(d)))
    if counts or exchange(algorithm).sums:
        with pytest.raises(fs.InputError, match="counts its rounds" if counts else "sums over"):
            theory.round_map(problem, **options)
        assert algorithm.form is None
        return
    code = theory.round_map(problem, **options)
    if algorithm.form is None:
        with pytest.raises(fs.InputError, match="no closed form is known"):
            xi_round_map(problem, **options)
        if name == "ca2fl":  # its h_i are a memory, but with all clients x is FedAvg's
            plain = theory.round_map(problem, **REGISTERED, algorithm=fs.fedavg())
            assert code.spectral_radius() == pytest.approx(plain.spectral_radius(), abs=1e-12)
            return
        # not one that was forgotten
        assert np.abs(np.subtract(radii_of_forms(), code.spectral_radius())).min() > 1e-4
        return
    closed = xi_round_map(problem, **options)
    change = to_xi(n, d) if algorithm.form.memory else np.eye(d)
    common = change.shape[1]  # what follows is of the clients' own, and acts on nobody else
    np.testing.assert_allclose(
        change @ code.matrix[:common, :common], closed.matrix @ change, rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(change @ code.offset[:common], closed.offset, rtol=0, atol=1e-10)
    assert not code.matrix[:common, common:].any()


def half_shift(gradient, y, x, shift):
    return gradient(y) + 0.5 * shift


STALE = {
    "direction": fs.scaffold()._replace(direction=half_shift),
    "direction of fedavg": fs.fedavg()._replace(
        direction=lambda gradient, y, x, shift: gradient(y) + 0.1 * y
    ),
    "message": fs.scaffold()._replace(message=fs.scaffold(option=1).message),
    "update": fs.scaffold()._replace(update=fs.scaffold(server_lr=0.9).update),
    "update with a cohort": fs.scaffold()._replace(update=fs.scaffold_xi().update),
    "remember": fs.scaffold()._replace(remember=lambda memory, shift, message: memory),
    "shift": fs.scaffold()._replace(shift=lambda server, memory: memory.c_i - server.c),
    "work": fs.fedavg()._replace(work=fs.sgd().work),
    "coin": fs.scaffold()._replace(work=fs.scaffnew().work),
}


@pytest.mark.parametrize("part", sorted(STALE))
def test_a_declared_form_that_the_functions_do_not_have_is_refused(part):
    stale, problem = STALE[part], fs.problems.quadratic(3, 2, mu=0.2, seed=0)
    stationary = partial(theory.stationary, noise=covariances(3, 2))
    for ask in (theory.contraction_rate, theory.bias, xi_round_map, stationary):
        with pytest.raises(
            fs.InputError, match=r"declares a form that its functions do not have; .*form=None"
        ):
            ask(problem, lr=0.3, local_steps=4, algorithm=stale)
    found = stable_step(
        problem, lr=0.3, local_steps=4, algorithm=stale
    )  # a diagnosis goes on, and promises nothing
    assert found.radius is None


@pytest.mark.slow
def test_without_its_stale_form_an_algorithm_is_differentiated():
    stale, problem = STALE["direction"], fs.problems.quadratic(3, 2, mu=0.2, seed=0)
    options = {"lr": 0.3, "local_steps": 4, "algorithm": stale._replace(form=None)}
    rate = theory.contraction_rate(problem, **options)
    assert rate.spectral_radius == pytest.approx(
        theory.round_map(problem, **options).spectral_radius(), abs=1e-12
    )


@pytest.mark.parametrize("server_lr", [1e-3, 0.7, 3.0])
def test_declared_forms_hold_for_all_parameters(server_lr):
    made = [
        fs.scaffold(server_lr=server_lr),
        fs.scaffold(option=1, server_lr=server_lr),
        fs.sgd(server_lr),
    ]
    made += [fs.fedprox(mu, server_lr) for mu in (0.0, 1e-4, 1.0, 1e6)]
    made += [make(server_lr=server_lr) for make in CLOSED]
    for algorithm in made:
        assert form_of(algorithm) == algorithm.form


@pytest.mark.slow
def test_a_simulated_run_follows_the_map_and_contracts_at_its_spectral_radius():
    # no two eigenvalues alike: where clients share one, control variates can carry a mode that x never shows
    hessians, linear = (
        covariances(4, 3, seed=3) + 0.1 * np.eye(3),
        np.arange(12.0).reshape(4, 3) / 5,
    )
    problem = fs.problems.quadratic(hessians=hessians, linear=linear, x0=[1.0, -2.0, 0.5])
    one = theory.round_map(problem, lr=0.2, local_steps=10)
    state = np.concatenate([problem.params, np.zeros(15)])
    run = fs.simulate(SCAFFOLD, problem, rounds=80, local_steps=10, lr=0.2, precision="float64")
    for _ in range(80):
        state = one(state)
    np.testing.assert_allclose(run.vector, state[:3], rtol=0, atol=1e-13)
    np.testing.assert_allclose(run.clients.c_i.ravel(), state[6:], rtol=0, atol=1e-13)
    logs = np.log(run.history["distance"])
    assert math.exp((logs[79] - logs[59]) / 20) == pytest.approx(one.spectral_radius(), rel=1e-4)


def test_linear_regression_is_a_quadratic():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (5, 8, 6)]
    problem = fs.problems.linear(clients, l2=0.1)
    run = fs.simulate(FEDAVG, problem, rounds=300, local_steps=6, lr=0.2, precision="float64")
    at = theory.fixed_point(problem, lr=0.2, local_steps=6, algorithm=FEDAVG)
    np.testing.assert_allclose(run.vector, at, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_algorithm_without_a_closed_form_is_differentiated():
    # half the memory of SCAFFOLD: linear, but of no known form
    half = fs.scaffold()._replace(
        name="half", direction=lambda gradient, y, x, shift: gradient(y) + 0.5 * shift, form=None
    )
    problem = fs.problems.quadratic(3, 2, mu=0.2, seed=0)
    assert form_of(half) is None
    options = {"lr": 0.3, "local_steps": 4}
    rate = theory.contraction_rate(problem, algorithm=half, **options)
    assert 0 < rate.spectral_radius < 1
    with pytest.raises(fs.InputError, match="no Lambda-norm"):
        lambda_norm(problem, algorithm=half, **options)
    one = theory.round_map(problem, algorithm=half, **options)
    rest = one.fixed_point()
    np.testing.assert_allclose(one(rest), rest, rtol=0, atol=1e-13)
    np.testing.assert_allclose(
        theory.fixed_point(problem, algorithm=half, **options), rest[:2], rtol=0, atol=1e-13
    )
    np.testing.assert_allclose(
        theory.bias(problem, algorithm=half, **options), rest[:2] - problem.optimum(), atol=1e-13
    )
    squared = fs.fedavg()._replace(
        direction=lambda gradient, y, x, shift: gradient(y) * gradient(y)
    )
    with pytest.raises(fs.InputError, match="not affine"):
        theory.round_map(problem, algorithm=squared, **options)


# --- accuracy at every size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_powers_and_sums_to_full_precision(count):
    ws = [0.0, 1e-300, 1e-17, 1e-9, 1e-4, 0.3, 0.5, 1 - 1e-9, 1.0, 1.2, 1.9, 2.0, -1e-9, -1e-3]
    with localcontext(prec=700):
        exact = [[(1 - Decimal(w)) ** h if h else Decimal(1) for h in range(count + 1)] for w in ws]
        powers = [float(p[-1]) for p in exact]
        sums = [float(sum(p[:-1])) for p in exact]
        behind = [float(sum(1 - q for q in p[:-1]) / count) for p in exact]
    w = np.array(ws)
    np.testing.assert_allclose(power(w, count), powers, rtol=1e-13, atol=1e-300)
    np.testing.assert_allclose(geometric(w, count), sums, rtol=1e-13)
    np.testing.assert_allclose(lag(w, count), behind, rtol=1e-13, atol=0 if count > 2 else 3e-16)


def test_bias_is_exact_when_it_is_tiny():
    """F7 against F19's first order: the ratio tends to 1 with an error of order gamma, down to gamma = 1e-12."""
    problem = fs.problems.quadratic(4, 3, mu=0.2, seed=1)
    hessians, _ = theory.client_quadratics(problem)
    mean = hessians.mean(axis=0)
    push = np.einsum("cij,cj->i", hessians - mean, problem.ideal_controls()) / 4
    first_order = np.linalg.solve(mean, push) * 4 / 2
    for lr in (1e-4, 1e-8, 1e-12):
        found = theory.bias(problem, lr=lr, local_steps=5, algorithm=FEDAVG) / lr
        np.testing.assert_allclose(found, first_order, rtol=100 * lr + 1e-11)


@pytest.mark.parametrize("algorithm", [SCAFFOLD, fs.scaffold(server_lr=1.2)])
@pytest.mark.parametrize(("lr", "steps"), [(0.05, 3), (1.0, 3), (1.0, 40), (1.7, 5), (1.0, 10**6)])
def test_krylov_spaces_find_what_the_full_matrix_has(algorithm, lr, steps):
    problem = fs.problems.quadratic(20, 6, seed=4)
    one = linear_round(spectra(problem), form_of(algorithm), lr=lr, local_steps=steps)
    matrix = scaled(one)
    assert rates._krylov_radius(one) == pytest.approx(
        np.abs(np.linalg.eigvals(matrix)).max(), abs=1e-11
    )
    norm = largest_singular_value(one)
    assert norm == pytest.approx(np.linalg.norm(matrix, 2), abs=1e-11)
    np.testing.assert_allclose(operator(one).rmatmat(np.eye(len(matrix))), matrix.T, atol=1e-13)


def test_a_flat_direction_never_contracts():
    hessians = np.random.default_rng(0).uniform(0.1, 1, size=(400, 2, 1)) * np.diag([1.0, 0.0])
    problem = fs.problems.quadratic(hessians=hessians, linear=np.zeros((400, 2)))
    rate = theory.contraction_rate(problem, lr=0.5, local_steps=5)
    norm = lambda_norm(problem, lr=0.5, local_steps=5)
    assert [rate.spectral_radius, norm] == pytest.approx([1, 1], abs=1e-12)
    with pytest.raises(fs.InputError, match="no single optimum"):
        theory.fixed_point(problem, lr=0.5, local_steps=5)


def test_option_one_has_the_radius_of_its_matrix():
    problem = fs.problems.quadratic(5, 3, mu=0.1, seed=4)
    one = linear_round(spectra(problem), form_of(fs.scaffold(option=1)), lr=0.3, local_steps=6)
    full = np.abs(np.linalg.eigvals(scaled(one))).max()
    assert rates.spectral_radius(one) == pytest.approx(
        full, abs=1e-7
    )  # its zero eigenvalues are defective


def test_every_bound_is_above_the_exact_value():
    rng = np.random.default_rng(0)
    for seed in range(40):
        n, d = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        problem = fs.problems.quadratic(n, d, mu=10 ** rng.uniform(-3, -0.1), seed=seed)
        steps, lr = int(10 ** rng.uniform(0, 3.5)), 10 ** rng.uniform(-2, 0)
        a, options = spectra(problem).values, {"lr": lr, "local_steps": steps}
        chain_of_bounds = [
            theory.contraction_rate(problem, **options).spectral_radius ** 2,
            lambda_norm(problem, **options) ** 2,
            quadratic.rho_sharp(a, **options).value,
            quadratic.chi(a, **options).max(),
            quadratic.rho(mu=a.min(), smoothness=a.max(), **options).value,
        ]
        for smaller, larger in pairwise(chain_of_bounds):
            assert smaller <= larger + 1e-12
    beyond = {"lr": 1.5, "local_steps": 3}
    assert not quadratic.rho(mu=a.min(), smoothness=a.max(), **beyond).holds
    assert lambda_norm(problem, **beyond) ** 2 <= quadratic.rho_sharp(a, **beyond).value


# --- the stationary law ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [SCAFFOLD, fs.scaffold(server_lr=1.3), FEDAVG, fs.fedprox(mu=0.2)]
)
def test_the_covariance_solves_its_equation(algorithm):
    """Against the Kronecker solve with F5's noise covariance, on an orthonormal basis of sum xi = 0."""
    n, d, lr, steps = 3, 2, 0.6, 4
    problem = fs.problems.quadratic(n, d, mu=0.1, seed=5)
    noise = covariances(n, d)
    law = theory.stationary(problem, lr=lr, local_steps=steps, noise=noise, algorithm=algorithm)
    form = form_of(algorithm)
    gammas = np.eye(d) - lr * (theory.client_quadratics(problem)[0] + form.drag * np.eye(d))
    eps = sum(
        np.linalg.matrix_power(gammas, h) @ noise @ np.linalg.matrix_power(gammas, h)
        for h in range(steps)
    )
    enters = np.zeros(((n + 1) * d, n * d))  # what E_1 .. E_N do to (theta, xi)
    enters[:d] = -form.server_lr * lr / n * np.tile(np.eye(d), n)
    enters[d:] = -(np.eye(n * d) - np.tile(np.eye(d), (n, n)) / n) / steps
    size = (n + 1) * d if form.memory else d
    spread = np.zeros((n * d, n * d))
    for c in range(n):
        spread[c * d : (c + 1) * d, c * d : (c + 1) * d] = eps[c]
    added = (enters @ spread @ enters.T)[:size, :size]
    matrix = xi_round_map(problem, lr=lr, local_steps=steps, algorithm=algorithm).matrix
    q = np.eye(size)
    if form.memory:
        conserved = np.concatenate([np.zeros((d, d)), np.tile(np.eye(d), (n, 1)) / math.sqrt(n)])
        q = np.linalg.svd(np.eye(size) - conserved @ conserved.T)[0][:, : size - d]
    a, b = q.T @ matrix @ q, q.T @ added @ q
    solved = np.linalg.solve(np.eye(len(a) ** 2) - np.kron(a, a), b.ravel()).reshape(len(a), -1)
    np.testing.assert_allclose(
        law.covariance, q @ solved @ q.T, rtol=0, atol=1e-12 * np.abs(solved).max()
    )


@pytest.mark.parametrize(
    ("lr", "steps", "server_lr"),
    [(0.3, 6, 1.0), (1.0, 3, 1.0), (1.8, 3, 1.0), (0.5, 10**5, 1.0), (0.4, 5, 1.5)],
)
def test_the_integral_is_the_doubling(lr, steps, server_lr):
    problem = fs.problems.quadratic(8, 5, mu=0.02, seed=6)
    options = {
        "lr": lr,
        "local_steps": steps,
        "noise": covariances(8, 5),
        "algorithm": fs.scaffold(server_lr=server_lr),
    }
    dense = theory.stationary(problem, **options).x_covariance
    np.testing.assert_allclose(
        by_transfer(chain(problem, **options)), dense, rtol=0, atol=2e-10 * dense.max()
    )


def test_block_equations():
    """F6, corrected: an independent transcription holds at our solution; the printed sign does not."""
    problem = fs.problems.quadratic(5, 3, mu=0.05, seed=7)
    options = {"lr": 0.7, "local_steps": 9, "noise": covariances(5, 3)}
    law = theory.stationary(problem, **options)
    assert block_residual(problem, covariance=law.covariance, **options) < 1e-13
    wrong = law.covariance.copy()
    wrong[:3, 3:] *= -1
    wrong[3:, :3] *= -1
    assert block_residual(problem, covariance=wrong, **options) > 1e-3


def test_replicated_clients_divide_the_covariance():
    """F12, and the noiseless rate unchanged (I13); 600 copies go through the integral."""
    base = fs.problems.quadratic(3, 2, mu=0.1, seed=8)
    hessians, linear = theory.client_quadratics(base)
    noise = covariances(3, 2)
    alone = theory.stationary(base, lr=0.5, local_steps=7, noise=noise)
    for copies in (4, 200):
        many = fs.problems.quadratic(
            hessians=np.tile(hessians, (copies, 1, 1)), linear=np.tile(linear, (copies, 1))
        )
        law = theory.stationary(many, lr=0.5, local_steps=7, noise=np.tile(noise, (copies, 1, 1)))
        assert (law.covariance is None) == (copies == 200)
        np.testing.assert_allclose(copies * law.x_covariance, alone.x_covariance, rtol=1e-9)
        norm = lambda_norm(many, lr=0.5, local_steps=7)
        assert norm >= lambda_norm(base, lr=0.5, local_steps=7) - 1e-12


def test_equal_clients_and_endless_local_steps():
    """F11: independent of H, with its closed form. F13: the limit, with an error of order 1/H."""
    a = np.diag([0.05, 0.4, 1.0])
    equal = fs.problems.quadratic(
        hessians=np.tile(a, (4, 1, 1)), linear=np.arange(12.0).reshape(4, 3)
    )
    expected = 0.6 / 4 * 0.3 / (np.diag(a) * (2 - 0.6 * np.diag(a)))
    for steps in (1, 5, 1000):
        law = theory.stationary(equal, lr=0.6, local_steps=steps, noise=0.3)
        np.testing.assert_allclose(law.x_covariance, np.diag(expected), rtol=0, atol=1e-12)
        largest = max(
            power(0.6 * np.diag(a), steps).max(), lag(0.6 * np.diag(a), steps).max()
        )  # F8'
        rate = theory.contraction_rate(equal, lr=0.6, local_steps=steps)
        norm = lambda_norm(equal, lr=0.6, local_steps=steps)
        assert [rate.spectral_radius, norm] == pytest.approx([largest, largest], abs=1e-12)
    problem = fs.problems.quadratic(4, 3, mu=0.1, seed=9)
    gammas = np.eye(3) - 0.5 * theory.client_quadratics(problem)[0]
    limit = sum(np.linalg.matrix_power(gammas, 2 * h) for h in range(600)).mean(axis=0) * 0.5**2 / 4
    errors = [
        np.abs(
            theory.stationary(problem, lr=0.5, local_steps=h, noise=1.0).x_covariance - limit
        ).max()
        for h in (2_000, 20_000, 200_000)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)


def test_a_method_that_does_not_settle_is_refused():
    problem = fs.problems.quadratic(3, 2, seed=0)
    with pytest.raises(fs.InputError, match="does not settle"):
        theory.stationary(
            problem, lr=2.5, local_steps=1, noise=1.0, algorithm=fs.fedavg(server_lr=2.0)
        )
    with pytest.raises(fs.InputError, match="noise must be a variance"):
        theory.stationary(problem, lr=0.5, local_steps=1, noise=np.ones(3))
    logistic = fs.problems.two_datasets("logistic", 2, records=10)
    with pytest.raises(fs.InputError, match="made of quadratics"):
        theory.contraction_rate(logistic, lr=0.5, local_steps=1)


# --- runs with noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [SCAFFOLD, fs.scaffold(option=1), fs.scaffold(server_lr=0.6), FEDAVG]
)
def test_drawn_runs_have_the_exact_mean_squared_error(algorithm):
    problem = fs.problems.quadratic(4, 3, mu=0.1, seed=10, x0=np.ones(3))
    options = {
        "lr": 0.3,
        "local_steps": 4,
        "noise": covariances(4, 3),
        "rounds": 40,
        "algorithm": algorithm,
    }
    exact = theory.mean_squared_error(problem, **options)
    paths = sample_rounds(problem, seed=0, runs=4000, **options)
    errors = np.sum((paths - problem.optimum()) ** 2, axis=2)
    assert errors.shape == (4000, 41)
    assert exact[0] == pytest.approx(errors[0, 0], rel=1e-12)
    rounds = [1, 2, 5, 40]
    off = np.abs(errors[:, rounds].mean(axis=0) - exact[rounds])
    assert (off <= 4 * errors[:, rounds].std(axis=0) / math.sqrt(4000)).all()
    law = theory.stationary(problem, **{k: v for k, v in options.items() if k != "rounds"})
    late = theory.mean_squared_error(problem, **options | {"rounds": 1500})[-1]
    bias = np.sum((law.x_mean - problem.optimum()) ** 2)
    assert late == pytest.approx(np.trace(law.x_covariance) + bias, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SCAFFOLD, fs.scaffold(option=1)])
def test_simulated_runs_have_the_exact_mean_squared_error(algorithm):
    noise = covariances(4, 3)
    problem = fs.problems.quadratic(4, 3, mu=0.1, seed=10, noise=noise, x0=np.ones(3))
    runs = 400
    sweep = fs.sweep(
        algorithm, problem, rounds=12, local_steps=4, lr=0.3, seeds=range(runs), precision="float64"
    )
    errors = np.stack([run.history["distance"] for run in sweep.runs[0]]) ** 2
    exact = theory.mean_squared_error(
        problem, lr=0.3, local_steps=4, noise=noise, rounds=12, algorithm=algorithm
    )
    rounds = np.array([1, 3, 12])
    off = np.abs(errors[:, rounds - 1].mean(axis=0) - exact[rounds])
    assert (off <= 4 * errors[:, rounds - 1].std(axis=0) / math.sqrt(runs)).all()


# --- the best number of local steps ----------------------------------------------------------------------------------


def test_best_local_steps_is_the_brute_force_one():
    rng = np.random.default_rng(3)
    for seed in range(16):
        n, d, lr = (
            int(rng.integers(2, 5)),
            int(rng.integers(1, 4)),
            rng.choice([0.1, 0.5, 1.0, 1.7]),
        )
        problem = fs.problems.quadratic(n, d, mu=10 ** rng.uniform(-2, -0.3), seed=seed)
        per_step = rng.choice([0.0, 0.05])
        best = theory.best_local_steps(problem, lr=lr, cost_of_step=per_step)
        every = np.arange(1, max(80, 2 * best.local_steps))
        given, form = spectra(problem), form_of(SCAFFOLD)
        radii = [
            rates.spectral_radius(linear_round(given, form, lr=lr, local_steps=int(h)))
            for h in every
        ]
        cost = (1 + per_step * every) * [theory.rounds_per_digit(radius) for radius in radii]
        assert best.cost == pytest.approx(cost.min(), rel=1e-12)
        assert best.cost == pytest.approx(cost[best.local_steps - 1], rel=1e-12)
    assert best.source.startswith("exact")


def test_the_published_choice_needs_about_four_times_the_rounds():
    """In the quadratics paper's own set-up: N = 10, d = 20, mu = .01, L = 1 (F10)."""
    settings = [(1.0, 0), (1.0, 1), (0.2, 2)]
    ratios = []
    for lr, seed in settings:
        problem = fs.problems.quadratic(10, 20, seed=seed)
        best = theory.best_local_steps(problem, lr=lr)
        assert best.local_steps == pytest.approx(best.estimate, rel=0.2, abs=0.6)
        published = quadratic.published_local_steps(mu=0.01, smoothness=1.0, lr=lr)
        rate = theory.contraction_rate(problem, lr=lr, local_steps=published)
        ratios.append(rate.rounds_per_digit / best.rounds_per_digit)
    assert 3.5 < np.mean(ratios) < 5


def test_best_local_steps_of_the_pair_and_of_other_problems():
    pair = theory.best_local_steps(fs.problems.lower_bound_pair(), lr=0.1)
    curve = theory.contraction_curve(
        fs.problems.lower_bound_pair(), lr=0.1, local_steps=range(1, 60)
    )
    assert pair.rate == min(rate.spectral_radius for rate in curve)
    logistic = fs.problems.two_datasets("logistic", 2, records=20, l2=0.1)
    best = theory.best_local_steps(logistic, lr=0.05)
    assert best.local_steps == round(1 / (0.05 * math.sqrt(0.1 * logistic.smoothness)))
    assert best.source.startswith("estimate")
    assert (
        theory.best_local_steps(logistic, lr=0.05, cost_of_step=5.0).local_steps < best.local_steps
    )
    with pytest.raises(fs.InputError, match="two clients"):
        theory.best_local_steps(fs.problems.quadratic(1, 2), lr=0.1)


def test_the_estimate_holds_with_singular_clients():
    """L_v by its definition, 1/L_v = least eigenvalue of P blockdiag(A^-1) P, where A^-1 exists."""
    problem = fs.problems.quadratic(4, 3, mu=0.1, seed=11)
    hessians, _ = theory.client_quadratics(problem)
    inverse = np.zeros((12, 12))
    for c in range(4):
        inverse[3 * c : 3 * c + 3, 3 * c : 3 * c + 3] = np.linalg.inv(hessians[c])
    mean = np.tile(np.eye(3), (4, 1)) / 2
    q = np.linalg.svd(np.eye(12) - mean @ mean.T)[0][:, :9]
    expected = 1 / np.linalg.eigvalsh(q.T @ inverse @ q)[0]
    assert local_steps._drift_smoothness(spectra(problem)) == pytest.approx(expected, rel=1e-12)

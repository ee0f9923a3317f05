"""Heterogeneity measured exactly, by Lanczos and from samples, and the advice that rests on it."""

import sys

import numpy as np
import pytest
from oracles import net

import fedscaffold as fs
from fedscaffold.data import federate, load
from fedscaffold.problems import Facts, Problem
from fedscaffold.theory.advice import advise
from fedscaffold.theory.derivatives import client_gradients, client_hessians, client_products
from fedscaffold.theory.heterogeneity import drift, heterogeneity
from fedscaffold.theory.subsampling import mean_error


def test_heterogeneity_of_quadratics_is_exact():
    problem = fs.problems.quadratic(num_clients=6, dim=4, mu=0.05, noise=0.3, seed=2)
    p = np.array([3, 1, 1, 2, 2, 1]) / 10
    a, b = problem.records
    mean, x = np.tensordot(p, a, 1), problem.optimum(p)
    rows = a @ x - b
    norms = np.array([np.linalg.norm(m - mean, 2) for m in a])
    found = heterogeneity(problem, weights=p, lr=0.2, local_steps=4)
    expected = {
        "zeta_1": np.sqrt(p @ (rows**2).sum(1)),
        "zeta_2": np.sqrt(p @ norms**2),
        "delta": norms.max(),
        "big_g": np.sqrt(2 * p @ (rows**2).sum(1)),
        "big_b": np.sqrt(2),
        "noise": 1.2,
        "record_noise": 0,
        "chance": 0,
        "mu": 0.05,
        "smoothness": 1.0,
        "mean_mu": np.linalg.eigvalsh(mean)[0],
        "mean_smoothness": np.linalg.eigvalsh(mean)[-1],
        "start_smoothness": 1.0,
        "noise_per_coordinate": 0.3,
        "drift_rate": np.linalg.norm(p @ np.einsum("nij,nj->ni", a - mean, rows)),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-12), name
    powers = np.eye(4) - np.stack([np.linalg.matrix_power(np.eye(4) - 0.2 * m, 4) for m in a])
    pulled = (
        p @ np.einsum("nij,nj->ni", np.linalg.solve(a, powers), rows) / (0.2 * 4)
    )  # M_c grad f_c / (lr K)
    assert found.average_drift == pytest.approx(pulled @ pulled, rel=1e-9)
    assert (found.where, found.exact, found.convex, found.errors, found.unlikeness) == (
        "the optimum",
        True,
        True,
        {},
        np.inf,
    )


def test_the_lower_bound_pair_fits_its_constants():
    """F27: sum p |grad f_i|^2 = 2 G^2 + 2 G ... is fitted by G' and B of the same size."""
    found = heterogeneity(fs.problems.lower_bound_pair(mu=1.0, big_g=2.0))
    assert found.zeta_1 == pytest.approx(2.0)
    assert found.delta == pytest.approx(1.0)
    assert (found.mu, found.smoothness) == pytest.approx((0.0, 2.0))
    assert found.fit_g == pytest.approx(2.0, rel=0.5)


@pytest.mark.slow
def test_heterogeneity_of_regressions_is_that_of_their_facts():
    for kind in ("logistic", "linear"):
        problem = fs.problems.two_datasets(kind, 6, records=200)
        found = heterogeneity(problem, batch_size=5)
        ideal = problem.ideal_controls()
        assert found.zeta_1 == pytest.approx(np.sqrt((ideal**2).sum(1).mean()))
        stated = np.trace(
            problem.facts.noise_covariance(problem.optimum(), 5), axis1=1, axis2=2
        ).mean()
        assert found.noise == pytest.approx(stated)
        assert found.smoothness <= problem.smoothness + 1e-9
        assert found.mu >= problem.mu - 1e-9
        assert found.unlikeness > 3


@pytest.mark.slow
def test_clients_of_one_source_are_told_from_unlike_ones():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=(2000, 4)), np.ones(2000)])
    y = (rng.random(2000) < 1 / (1 + np.exp(-x[:, 0]))).astype(float)
    alike = fs.problems.logistic([(x[i::20], y[i::20]) for i in range(20)], l2=0.01)
    order = np.argsort(y)
    apart = fs.problems.logistic([(x[part], y[part]) for part in np.split(order, 20)], l2=0.01)
    assert 0.6 < heterogeneity(alike).unlikeness < 1.5
    assert heterogeneity(apart).unlikeness > 5


@pytest.fixture(scope="module")
def pictures():
    data = load("digits")

    def made(similarity, clients=20, keep=slice(None), **settings):
        federated = federate(data, f"similarity:{similarity}", clients)
        cut = [
            (x[keep, :: 64 // 16] if settings.get("small") else x[keep], y[keep])
            for x, y in federated.clients
        ]
        test = federated.test if not settings.get("small") else None
        return fs.problems.softmax(cut, classes=10, l2=settings.get("l2", 1e-3), test=test)

    return made


NUMBERS = ("zeta_2", "delta", "mu", "smoothness", "mean_mu", "mean_smoothness")


@pytest.mark.slow
def test_lanczos_agrees_with_eigenvalues_within_its_errors(pictures):
    problem = pictures(0, keep=slice(None, None, 3), small=True)  # d = 170
    dense, sparse = heterogeneity(problem), heterogeneity(problem, exact=False)
    assert dense.exact
    assert not sparse.exact
    for name in NUMBERS:
        off = abs(getattr(dense, name) - getattr(sparse, name))
        assert off <= 4 * sparse.errors[name] + 1e-9, name
        assert sparse.errors[name] < 0.02 * dense.smoothness, name
    assert sparse.drift_rate == pytest.approx(dense.drift_rate)


def many_clients(seed):
    """Clients of many scales and noises, so that a sample of them has something to miss; equal sizes compile once."""
    rng = np.random.default_rng(seed)
    truth, clients = rng.normal(size=(12, 4)), []
    for i in range(40):
        scale = np.exp(-np.arange(12) / 4 + 0.15 * rng.normal())
        x = scale * (rng.normal(size=(80, 12)) + 0.5 * rng.normal(size=12))
        clients.append((x, (x @ truth + (1 + i % 3) * rng.normal(size=4)).argmax(axis=1)))
    return fs.problems.softmax(clients, classes=4, l2=1e-3)


SAMPLED = (
    "zeta_2",
    "delta",
    "smoothness",
    "mean_smoothness",
    "noise",
    "record_noise",
    "chance",
    "drift_rate",
)


@pytest.fixture(scope="module")
def many():
    problem = many_clients(0)  # 3,200 records of 40 clients
    x = 0.1 * np.random.default_rng(1).normal(size=problem.dim)
    return problem, x, heterogeneity(problem, batch_size=5, at=x)


@pytest.mark.slow
def test_samples_of_a_large_problem_are_as_wrong_as_they_say(monkeypatch, many):
    """All within 5 errors and their root mean square below 2.5; an error that is as large as the number says nothing."""
    problem, x, dense = many
    room = sys.modules["fedscaffold.theory.subsampling"]
    assert dense.exact
    monkeypatch.setattr(room, "WORK", 250 * problem.dim)
    monkeypatch.setattr(room, "MEMORY", 20 * problem.dim)
    off = {name: [] for name in SAMPLED}
    for seed in range(4):
        sampled = heterogeneity(problem, batch_size=5, at=x, exact=False, seed=seed)
        assert not sampled.exact
        assert sampled.zeta_1 == pytest.approx(dense.zeta_1)  # gradients of all are affordable
        for name in SAMPLED:
            away = getattr(sampled, name) - getattr(dense, name)
            off[name].append(away / np.hypot(sampled.errors[name], 1e-9))
            assert sampled.errors[name] < 1.5 * getattr(dense, name), name
    for name, values in off.items():
        assert np.abs(values).max() < 5, (name, values)
        assert np.sqrt(np.mean(np.square(values))) < 2.5, (name, values)


@pytest.mark.slow
def test_the_whole_is_a_sample_without_error(monkeypatch):
    problem = many_clients(2)
    room = sys.modules["fedscaffold.theory.subsampling"]
    monkeypatch.setattr(room, "MEMORY", 14 * problem.dim)  # three groups of 14 are all 40 clients
    x = np.zeros(problem.dim)
    dense, grouped = heterogeneity(problem, at=x), heterogeneity(problem, at=x, exact=False)
    for name in (
        "smoothness",
        "mean_smoothness",
        "mean_mu",
        "record_noise",
        "chance",
        "drift_rate",
    ):
        assert getattr(grouped, name) == pytest.approx(getattr(dense, name), rel=1e-6, abs=1e-6), (
            name
        )


@pytest.mark.parametrize("seen", [4, 10])
def test_two_errors_of_a_mean_cover_what_two_sigma_would(seen):
    """4.55 % of the means lie farther off, however few clients are seen: 0.019 are four standard errors of that share."""
    rng, q = np.random.default_rng(3), np.full(seen, 1 / seen)
    off = []
    for _ in range(2000):
        values = rng.normal(size=30)
        off.append(abs(values[:seen].mean() - values.mean()) / mean_error(values[:seen], q, 30))
    assert abs(np.mean(np.array(off) > 2) - 0.0455) < 0.019


@pytest.mark.slow
def test_what_is_not_convex_is_measured_where_it_stands():
    problem = net()
    dense, sparse = heterogeneity(problem), heterogeneity(problem, exact=False)
    start = problem.layout.flatten(problem.params)
    curvature = np.linalg.eigvalsh(client_hessians(problem, start).mean(0))
    for found in (dense, sparse):
        assert not found.convex
        assert found.mean_mu == pytest.approx(curvature[0], abs=1e-8)
        assert found.mean_mu < 0
        assert np.isnan(found.big_g)
        assert found.delta >= -found.mu
        assert found.later is not None
        assert found.later.gradient_norm < found.gradient_norm
    again = heterogeneity(problem, at=problem.params)
    assert (again.where, again.zeta_1) == ("the given point", pytest.approx(dense.zeta_1))


# advice


@pytest.mark.slow
def test_advice_on_quadratics_is_the_theorys():
    unlike = fs.problems.dialled(
        8, 5, gradient_dissimilarity=9.0, hessian_dissimilarity=0.1, seed=1
    )
    equal = fs.problems.dialled(8, 5, gradient_dissimilarity=9.0, hessian_dissimilarity=0.0, seed=1)
    round_one = fs.problems.dialled(
        8, 5, mu=0.7, gradient_dissimilarity=9.0, hessian_dissimilarity=0.1, seed=1
    )
    for name, problem in {"scaffold": unlike, "fedavg": equal, "sgd": round_one}.items():
        advice = advise(heterogeneity(problem), problem, rounds=100 if name == "sgd" else 20)
        assert advice.algorithm == name
        assert advice.promised
        assert name in str(advice)
    wild = advise(heterogeneity(unlike), unlike, lr=5.0, local_steps=3)
    assert "lr 5 is above 2/L" in str(wild)
    assert "Nothing that was tried ends below the start" in str(wild)


@pytest.mark.slow
def test_digits_without_an_optimum_get_different_advice_too(pictures):
    said = {}
    for similarity in (0, 100):
        problem = pictures(similarity, clients=10, keep=slice(None, None, 3), l2=0.0, small=True)
        said[similarity] = advise(heterogeneity(problem, batch_size=14), problem, rounds=25)
    assert (said[0].algorithm, said[100].algorithm) == ("scaffold", "fedavg")


@pytest.mark.soak  # docs/heterogeneity.md is given both advices; `test_simulated_runs_end_where_the_advice_says` simulates
def test_digits_get_different_and_right_advice(pictures):
    settings = {"rounds": 25, "batch_size": 14, "metrics": ["loss", "accuracy"]}
    advice, runs = {}, {}
    for similarity in (0, 100):
        problem = pictures(similarity, clients=10, l2=1e-3)
        said = advice[similarity] = advise(
            heterogeneity(problem, batch_size=14), problem, rounds=25
        )
        for algorithm in (fs.fedavg(), fs.scaffold()):
            runs[similarity, algorithm.name] = fs.simulate(
                algorithm, problem, lr=said.lr, local_steps=said.local_steps, **settings
            )
    assert advice[0].algorithm == "scaffold"
    assert advice[100].algorithm == "fedavg"
    assert "truly unlike" in str(advice[0])
    assert "by chance only" in str(advice[100])
    unlike, like = runs[0, "fedavg"].history, runs[0, "scaffold"].history
    assert like["loss"][-1] < 0.7 * unlike["loss"][-1]
    reached = {
        name: np.argmax(runs[100, name].history["accuracy"] >= 0.95) + 1
        for name in ("fedavg", "scaffold")
    }
    sent = {
        name: (runs[100, name].history["bytes_up"] + runs[100, name].history["bytes_down"])[
            :r
        ].sum()
        for name, r in reached.items()
    }
    assert runs[100, "fedavg"].history["accuracy"][-1] >= 0.95
    assert sent["fedavg"] <= sent["scaffold"]
    assert (
        runs[100, "fedavg"].history["accuracy"][-1]
        >= runs[100, "scaffold"].history["accuracy"][-1] - 0.01
    )


@pytest.mark.slow
def test_a_network_on_digits_gets_advice_too():
    federated = federate(load("digits"), "similarity:0", 10)
    some = [(x[::3], y[::3]) for x, y in federated.clients]
    problem = fs.problems.mlp(some, 10, classes=10)  # d = 760, too large for all eigenvalues
    found = heterogeneity(problem, batch_size=0.2)
    advice = advise(found, problem, rounds=20)
    assert (found.convex, found.exact, advice.algorithm) == (False, False, "scaffold")
    assert "not convex" in str(advice)


def test_bad_input_gets_one_clear_line():
    problem = fs.problems.quadratic(num_clients=2, dim=3)
    large = Problem(problem.functions.loss, np.zeros(2000), [np.ones((1, 1))], facts=Facts())
    asked = {
        "x and vectors must be 3 finite numbers": lambda: client_gradients(problem, np.ones(4)),
        "or 2 rows of them": lambda: client_products(problem, np.ones(3), np.ones((3, 3))),
        "exact matrices need": lambda: client_hessians(large, np.zeros(2000)),
        "batch_size must be": lambda: heterogeneity(problem, batch_size=1.5),
        "diverge": lambda: drift(problem, np.ones(3), np.array([0.5, 0.5]), 1e200, 9),
        "rounds must be": lambda: advise(heterogeneity(problem), problem, rounds=0),
    }
    for words, call in asked.items():
        with pytest.raises(fs.InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)

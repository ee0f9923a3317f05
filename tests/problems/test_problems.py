"""Problems know their facts: checked against finite differences, eigenvalues and other optimisers."""

import jax
import numpy as np
import optax
import pytest
from scipy.optimize import minimize

import fedscaffold as fs
from fedscaffold.problems import weights_of
from fedscaffold.problems.regression import log_loss

RNG = np.random.default_rng(0)


def client_data(sizes=(6, 11, 8), d=4, kind="logistic"):
    rng = np.random.default_rng(1)
    out = []
    for n in sizes:
        x = rng.normal(size=(n, d)) + rng.normal(size=d)
        out.append(
            (x, (rng.random(n) < 0.4).astype(int) if kind == "logistic" else rng.normal(size=n))
        )
    return out


PROBLEMS = {
    "random quadratic": lambda: fs.problems.quadratic(num_clients=5, dim=4, mu=0.05, seed=2),
    "dialled quadratic": lambda: fs.problems.dialled(5, 4, hessian_dissimilarity=0.05, seed=2),
    "lower-bound pair": lambda: fs.problems.lower_bound_pair(mu=0.7, big_g=3.0),
    "linear": lambda: fs.problems.linear(client_data(kind="linear"), l2=0.1),
    "logistic": lambda: fs.problems.logistic(client_data(), l2=0.1),
}
EACH = pytest.mark.parametrize("name", sorted(PROBLEMS))


def mean_loss(problem, x, p):
    """f(x) by the problem's own loss, client by client, in double precision."""
    with jax.enable_x64(True):
        params = problem.layout.unflatten(np.asarray(x, float))
        cuts = zip(problem.offsets, problem.offsets[1:], strict=False)
        return sum(
            w
            * float(problem.functions.loss(params, jax.tree.map(lambda a: a[i:j], problem.records)))  # noqa: B023
            for w, (i, j) in zip(p, cuts, strict=True)
        )


@EACH
def test_losses_and_gradients_in_closed_form_are_those_of_the_loss(name):
    problem = PROBLEMS[name]()
    x = RNG.normal(size=problem.dim)
    each = np.eye(problem.num_clients)
    np.testing.assert_allclose(
        problem.facts.client_losses(x),
        [mean_loss(problem, x, p) for p in each],
        rtol=1e-12,
        atol=1e-12,
    )
    step = 1e-6
    for i, p in enumerate(each):
        slope = [
            (mean_loss(problem, x + e, p) - mean_loss(problem, x - e, p)) / (2 * step)
            for e in step * np.eye(problem.dim)
        ]
        np.testing.assert_allclose(problem.facts.client_gradients(x)[i], slope, atol=1e-7)


@EACH
def test_the_optimum_is_one(name):
    problem = PROBLEMS[name]()
    for weights in ("equal", "records", RNG.uniform(0.5, 1, problem.num_clients)):
        p = weights_of(problem, weights)
        best = problem.optimum(weights)
        assert np.abs(p @ problem.facts.client_gradients(best)).max() < 1e-12
        assert problem.optimal_loss(weights) <= mean_loss(problem, best + 0.1, p)
        np.testing.assert_allclose(
            problem.ideal_controls(weights), problem.facts.client_gradients(best)
        )


@EACH
def test_mu_and_smoothness_bound_every_clients_curvature(name):
    problem = PROBLEMS[name]()
    x, step = RNG.normal(size=problem.dim), 1e-5
    columns = [
        (problem.facts.client_gradients(x + e) - problem.facts.client_gradients(x - e)) / (2 * step)
        for e in step * np.eye(problem.dim)
    ]
    curvature = np.linalg.eigvalsh(np.stack(columns, axis=2))
    assert curvature.max() <= problem.smoothness + 1e-6
    assert curvature.min() >= problem.mu - 1e-6
    if "logistic" not in name:  # there they are bounds, here they are the extremes
        assert curvature.max() == pytest.approx(problem.smoothness, abs=1e-6)
        assert curvature.min() == pytest.approx(problem.mu, abs=1e-6)


def test_dialled_heterogeneity_is_what_was_asked_for_and_leaves_the_mean_alone():
    small = fs.problems.dialled(8, 5, gradient_dissimilarity=0.0, hessian_dissimilarity=0.0, seed=4)
    large = fs.problems.dialled(
        8, 5, gradient_dissimilarity=7.0, hessian_dissimilarity=0.08, seed=4
    )
    np.testing.assert_allclose(small.optimum(), large.optimum(), atol=1e-12)
    assert np.abs(small.ideal_controls()).max() < 1e-14
    assert np.sqrt((large.ideal_controls() ** 2).sum(1).mean()) == pytest.approx(7.0)
    a = large.records[0]
    assert np.abs(np.linalg.eigvalsh(a - a.mean(0))).max() == pytest.approx(0.08)
    np.testing.assert_allclose(np.linalg.eigvalsh(a.mean(0))[[0, -1]], [0.1, 1.0])


def test_the_random_family_has_the_papers_spectrum():
    problem = fs.problems.quadratic(num_clients=20, dim=6, mu=0.01, smoothness=1.0, seed=5)
    values = np.linalg.eigvalsh(problem.records[0])
    grid = np.geomspace(0.01, 1, 6)
    assert np.abs(values[..., None] - grid).min(-1).max() < 1e-12
    assert (problem.mu, problem.smoothness) == pytest.approx((0.01, 1.0))


def test_the_logistic_optimum_agrees_with_another_optimiser():
    problem = PROBLEMS["logistic"]()
    p = weights_of(problem, "records")
    found = minimize(
        lambda w: p @ problem.facts.client_losses(w),
        np.zeros(problem.dim),
        jac=lambda w: p @ problem.facts.client_gradients(w),
        method="BFGS",
        options={"gtol": 1e-10},
    )
    np.testing.assert_allclose(problem.optimum("records"), found.x, atol=1e-7)


def test_the_slope_of_the_logistic_loss_is_right_where_exponentials_overflow():
    scores = np.array([-800.0, -40.0, -1.5, 0.0, 0.7, 40.0, 800.0])
    labels = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-scores))
    with jax.enable_x64(True):
        value, slope = jax.vmap(jax.value_and_grad(log_loss))(scores, labels)
        curvature = jax.vmap(jax.grad(jax.grad(log_loss)))(scores, labels)
    np.testing.assert_allclose(value, np.logaddexp(0, scores) - labels * scores, rtol=1e-15)
    np.testing.assert_allclose(slope, sigmoid - labels, rtol=0, atol=4e-16)
    np.testing.assert_allclose(curvature, sigmoid * (1 - sigmoid), rtol=0, atol=4e-16)


def test_noise_covariance_is_that_of_drawn_batches():
    clients = client_data(sizes=(30, 40))
    problem = fs.problems.logistic(clients, l2=0.1)
    w = problem.optimum()
    rng = np.random.default_rng(0)
    x, y = clients[0]
    rows = rng.integers(0, 30, size=(20000, 5))
    each = (1 / (1 + np.exp(-x @ w)) - y)[:, None] * x
    drawn = each[rows].mean(axis=1)
    stated = problem.facts.noise_covariance(w, 5)[0]
    assert np.abs(np.cov(drawn.T) - stated).max() < 5 * np.abs(stated).max() * np.sqrt(2 / 20000)


def test_two_datasets_come_from_two_models():
    problem = fs.problems.two_datasets("linear", 20, records=200)
    ideal = problem.ideal_controls()
    assert problem.counts.tolist() == [200] * 20
    assert np.linalg.norm(ideal[:10].mean(0) + ideal[10:].mean(0)) < 1e-10
    assert np.linalg.norm(ideal[:10].mean(0)) > 0.1


def test_models_score_what_they_should():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.integers(0, 3, 30)
    for problem in (fs.problems.softmax([(x, y)], l2=0.2), fs.problems.mlp([(x, y)], 7, l2=0.2)):
        vector = rng.normal(size=problem.dim)
        params = problem.layout.unflatten(vector)
        layers = [params] if isinstance(params, dict) else params
        out = x
        for layer in layers[:-1]:
            out = np.maximum(out @ layer["w"].T + layer["b"], 0)
        out = out @ layers[-1]["w"].T + layers[-1]["b"]
        chosen = np.exp(out)[np.arange(30), y] / np.exp(out).sum(1)
        with jax.enable_x64(True):
            loss = problem.functions.loss(params, (x, y))
            right = problem.functions.accuracy(params, (x, y))
        assert float(loss) == pytest.approx(
            -np.log(chosen).mean() + 0.1 * vector @ vector, rel=1e-10
        )
        assert float(right) == pytest.approx((out.argmax(1) == y).mean())


@pytest.mark.slow
def test_softmax_knows_a_largest_stable_step():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 3, 40)
    problem = fs.problems.softmax([(x, y)], l2=0.01)

    def flat_gradient(v):
        with jax.enable_x64(True):
            return problem.layout.flatten(
                jax.grad(problem.functions.loss)(problem.layout.unflatten(v), (x, y))
            )

    v, step = rng.normal(size=problem.dim), 1e-5
    hessian = np.stack(
        [
            (flat_gradient(v + e) - flat_gradient(v - e)) / (2 * step)
            for e in step * np.eye(problem.dim)
        ]
    )
    assert np.linalg.eigvalsh((hessian + hessian.T) / 2).max() <= problem.smoothness + 1e-6


def loss(w, batch):
    return (batch[0] @ w).mean()


BAD = {
    "an empty list": (lambda: fs.Problem(loss, np.ones(2), []), "at least one client"),
    "unequal lengths": (
        lambda: fs.Problem(loss, np.ones(2), [(np.ones((3, 2)), np.ones(4))]),
        r"client 0 .* lengths \[3, 4\]",
    ),
    "no records": (
        lambda: fs.Problem(loss, np.ones(2), [(np.ones((0, 2)),)]),
        "client 0 holds no records",
    ),
    "no rows": (lambda: fs.Problem(loss, np.ones(2), [(1.0,)]), "one row per record"),
    "another width": (
        lambda: fs.Problem(loss, np.ones(2), [(np.ones((3, 2)),), (np.ones((3, 4)),)]),
        "same structure",
    ),
    "another structure": (
        lambda: fs.Problem(loss, np.ones(2), [(np.ones((3, 2)),), [np.ones((3, 2))]]),
        "same structure",
    ),
    "NaN in data": (
        lambda: fs.Problem(loss, np.ones(2), [(np.full((3, 2), np.nan),)]),
        "6 NaN or infinite values",
    ),
    "NaN in params": (
        lambda: fs.Problem(loss, np.array([1, np.inf]), [(np.ones((3, 2)),)]),
        "params must be finite",
    ),
    "half a quadratic": (lambda: fs.problems.quadratic(hessians=np.eye(2)[None]), "go together"),
    "a flat quadratic": (
        lambda: fs.problems.quadratic(hessians=np.eye(2), linear=np.ones(2)),
        "shape",
    ),
    "a lopsided quadratic": (
        lambda: fs.problems.quadratic(hessians=[[[1, 2], [0, 1]]], linear=[[1, 1]]),
        "symmetric",
    ),
    "NaN in a quadratic": (
        lambda: fs.problems.quadratic(hessians=[[[np.nan]]], linear=[[1]]),
        "finite",
    ),
    "negative noise": (lambda: fs.problems.quadratic(noise=-1.0), "variance"),
    "noise of another shape": (lambda: fs.problems.quadratic(dim=3, noise=np.eye(2)), "covariance"),
    "noise that is none": (
        lambda: fs.problems.quadratic(dim=2, noise=[[1, 2], [2, 1]]),
        "covariance",
    ),
    "delta above mu": (
        lambda: fs.problems.dialled(hessian_dissimilarity=0.5, mu=0.1),
        "at most mu",
    ),
    "labels of three kinds": (
        lambda: fs.problems.logistic([(np.ones((3, 1)), np.arange(3))]),
        "0 or 1",
    ),
    "labels above classes": (
        lambda: fs.problems.softmax([(np.ones((3, 1)), np.arange(3))], classes=2),
        "below classes",
    ),
    "labels that are not whole": (
        lambda: fs.problems.softmax([(np.ones((2, 1)), np.array([0.5, 1]))]),
        "whole numbers",
    ),
    "an odd number of halves": (lambda: fs.problems.two_datasets("linear", 3), "even"),
    "no such kind": (lambda: fs.problems.two_datasets("cubic", 4), "unknown kind"),
    "no optimum": (
        lambda: fs.Problem(loss, np.ones(2), [(np.ones((3, 2)),)]).optimum(),
        "not known",
    ),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_bad_input_gets_one_clear_line(what):
    make, words = BAD[what]
    with pytest.raises(fs.InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


ASK = {"rounds": 2, "local_steps": 2, "lr": 0.1}
BAD_RUNS = {
    "negative lr": ({"lr": -0.1}, "lr must be a number above 0, got -0.1"),
    "text for lr": ({"lr": "fast"}, "lr must be a number"),
    "no lr": ({"lr": None}, "lr must be given"),
    "lr and an optimizer": ({"local_optimizer": optax.sgd(0.1)}, "either lr or local_optimizer"),
    "no optimizer": ({"lr": None, "local_optimizer": object()}, "optax"),
    "a schedule below zero": ({"lr": lambda k: -1.0}, r"lr\(0\) must be"),
    "cohort above N": (
        {"cohort": 11},
        "cohort must be a whole number of at least 1 and at most 10, got 11",
    ),
    "share above 1": ({"cohort": 1.5}, r"share in \(0, 1\]"),
    "share of nothing": ({"cohort": 0.0}, r"share in \(0, 1\]"),
    "cohort in words": ({"cohort": "all"}, "cohort must be"),
    "no rounds": ({"rounds": 0}, "rounds must be"),
    "steps and epochs": ({"local_epochs": 1}, "either local_steps or local_epochs"),
    "steps for other clients": ({"local_steps": [1, 2]}, "one for each of the 10 clients"),
    "half a step": ({"local_steps": 1.5}, "local_steps must be"),
    "batch of nothing": ({"batch_size": 0}, "batch_size must be"),
    "batch above all": ({"batch_size": 1.5}, "batch_size must be a share"),
    "few cohorts": ({"cohorts": [[0]]}, "all 2 rounds"),
    "a stranger": ({"cohorts": [[0], [10]]}, "clients 0 to 9"),
    "twice": ({"cohorts": [[0, 0], [1]]}, "once a round"),
    "no such metric": ({"metrics": ["los"]}, "did you mean 'loss'"),
    "no accuracy": ({"metrics": ["accuracy"]}, "has no accuracy"),
    "no such target": ({"stop_at": ("lss", 1.0)}, "did you mean 'loss'"),
    "half a target": ({"stop_at": "loss"}, "a metric and a value"),
    "no such precision": ({"precision": "half"}, "unknown precision"),
    "a wide block": ({"block": 11}, "block must be"),
    "weights for others": ({"weights": [1.0]}, "each of the 10 clients"),
    "negative weights": ({"weights": [-1.0] * 10}, "not negative"),
    "weights in words": ({"weights": "size"}, "'equal', 'records'"),
    "x0 of another shape": ({"x0": np.zeros(3)}, "x0 must be shaped"),
    "NaN in x0": ({"x0": np.full(20, np.nan)}, "x0 must be finite"),
    "a negative seed": ({"seed": -1}, "seed must be"),
    "epochs with replacement": (
        {"local_steps": None, "local_epochs": 1, "draw": "replacement"},
        "an epoch goes through",
    ),
    "no such draw": ({"draw": "random"}, "unknown draw"),
}


@pytest.mark.parametrize("what", sorted(BAD_RUNS))
def test_bad_runs_get_one_clear_line(what):
    changes, words = BAD_RUNS[what]
    with pytest.raises(fs.InputError, match=words) as caught:
        fs.simulate(fs.scaffold(), fs.problems.quadratic(), **(ASK | changes))
    assert "\n" not in str(caught.value)


def test_wrong_kinds_of_things_are_named():
    with pytest.raises(fs.InputError, match=r"such as fs.scaffold\(\)"):
        fs.simulate("scaffold", fs.problems.quadratic(), **ASK)
    with pytest.raises(fs.InputError, match="must be a Problem"):
        fs.simulate(fs.scaffold(), "quadratic", **ASK)

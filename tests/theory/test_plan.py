"""A plan's predictions against simulation, its choices against brute force, and what it refuses."""

import math
import sys

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.data import federate, load
from fedscaffold.theory import krylov
from fedscaffold.theory.cohorts import cohort_moments
from fedscaffold.theory.derivatives import client_hessians, noise_level
from fedscaffold.theory.error_dynamics import mean_squared_error
from fedscaffold.theory.planning import plan, verify
from fedscaffold.theory.subsampling import redrawn

room = sys.modules["fedscaffold.theory.planning"]
models = sys.modules["fedscaffold.theory.quadratic_model"]

PROBLEMS = {
    "noisy quadratics": (
        lambda: fs.problems.quadratic(
            num_clients=6, dim=4, mu=0.1, noise=0.02, x0=np.ones(4), seed=3
        ),
        None,
        ["scaffold"],
    ),
    "exact quadratics": (
        lambda: fs.problems.quadratic(num_clients=6, dim=4, mu=0.1, x0=np.ones(4), seed=3),
        None,
        ["scaffold"],
    ),
    "dialled": (
        lambda: fs.problems.dialled(
            5, 3, gradient_dissimilarity=3.0, hessian_dissimilarity=0.05, noise=0.05, seed=1
        ),
        None,
        ["fedavg"],
    ),
    "linear regression": (
        lambda: fs.problems.two_datasets("linear", 6, records=60, dim=4, l2=0.1),
        10,
        ["sgd", "fedavg"],
    ),
    "logistic regression": (
        lambda: fs.problems.two_datasets("logistic", 6, records=60, dim=4, l2=0.1),
        10,
        ["scaffold"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_measured_is_within_a_factor_two_of_predicted_or_not_promised(name):
    make, batch, names = PROBLEMS[name]
    problem = make()
    made = plan(problem, target=0.1, batch_size=batch, algorithms=names)
    assert made.best is not None
    promised = {one.algorithm: one.promised for one in made.proposals}
    for one in verify(problem, made, seeds=24):
        assert one.predicted <= 0.1
        if promised[one.algorithm]:  # exact: within four standard errors
            assert abs(one.measured - one.predicted) <= 4 * one.standard_error + 1e-9
        assert 0.5 < one.ratio < 2


@pytest.mark.slow
def test_a_reduced_plan_is_the_exact_one_where_nothing_is_left_out(monkeypatch):
    problem = fs.problems.quadratic(num_clients=4, dim=6, mu=0.1, x0=np.ones(6), seed=3)
    exact = plan(problem, target=0.05)
    monkeypatch.setattr(models, "EXACT", 0)
    for one, other in zip(exact.proposals, plan(problem, target=0.05).proposals, strict=True):
        assert (one.promised, other.promised) == (True, False)
        assert "no promise" in other.why
        assert (one.rounds, one.local_steps, one.bytes_sent) == (
            other.rounds,
            other.local_steps,
            other.bytes_sent,
        )
        assert other.lr == pytest.approx(one.lr, rel=1e-6)
        np.testing.assert_allclose(other.curve, one.curve, rtol=1e-4)


def test_the_spectrum_of_the_noise_integrates_any_function():
    """sum w_k phi(h_k) = z' phi(H) z, averaged over the draws z."""
    problem = fs.problems.two_datasets("linear", 6, records=30, dim=4, l2=0.1)
    best, sizes = problem.optimum(), np.full(6, 3.0)
    rng, h = np.random.default_rng(0), client_hessians(problem, best).mean(axis=0)
    z = np.stack([krylov._drawn(problem, best, sizes, rng).mean(axis=0) for _ in range(6)])
    heard = cohort_moments(np.full(6, 1 / 6), 6)
    values, weights = krylov._noise_spectrum(problem, best, 3, heard, 6)
    a, basis = np.linalg.eigh(h)
    for phi in (np.ones_like, np.reciprocal, lambda t: (1 - 0.1 * t) ** 20):
        assert weights @ phi(values) == pytest.approx(np.mean((z @ basis) ** 2 @ phi(a)), rel=1e-8)


@pytest.mark.slow
def test_redrawn_gradients_have_the_noise_of_full_batches():
    problem = fs.problems.two_datasets("linear", 4, records=20, dim=3, l2=0.1)
    rng, best = np.random.default_rng(0), problem.optimum()
    squares = np.array([np.square(redrawn(problem, best, rng)).sum(axis=1) for _ in range(300)])
    error = squares.std(axis=0, ddof=1) / np.sqrt(300)
    assert (np.abs(squares.mean(axis=0) - noise_level(problem, best, 20)) < 4 * error).all()


@pytest.mark.slow
def test_a_large_problem_is_planned_in_few_directions_and_simulated():
    federated = federate(load("digits"), "similarity:0", 8)
    problem = fs.problems.softmax(
        [(x[::3, ::4], y[::3]) for x, y in federated.clients], classes=10, l2=1e-2
    )  # d = 170
    made = plan(problem, target=0.5, algorithms=["scaffold"])
    assert made.distance > 2
    assert not made.proposals[0].promised
    [one] = verify(problem, made, seeds=6)
    assert 0.5 < one.ratio < 2


def test_the_pair_chosen_needs_no_more_rounds_than_its_neighbours():
    problem = PROBLEMS["noisy quadratics"][0]()
    [one] = plan(problem, target=0.1, algorithms=["scaffold"]).proposals
    noise = problem.facts.noise_covariance(problem.optimum(), None)
    for lr, steps in (
        (one.lr / 2, one.local_steps),
        (one.lr, max(1, one.local_steps // 4)),
        (one.lr, 4 * one.local_steps),
    ):
        errors = mean_squared_error(
            problem,
            lr=lr,
            local_steps=steps,
            noise=noise,
            rounds=max(1, one.rounds - 2),
            x0=np.ones(4),
        )
        assert math.sqrt(errors[-1]) > 0.1


def test_fedavg_with_many_local_steps_is_ruled_out_by_its_bias():
    problem = fs.problems.dialled(
        5, 3, gradient_dissimilarity=5.0, hessian_dissimilarity=0.09, seed=1
    )
    fedavg, scaffold = plan(
        problem, target=1e-4, algorithms=["fedavg", "scaffold"], cost_of_step=0.0
    ).proposals
    assert scaffold.rounds < fedavg.rounds
    assert fedavg.lr * (fedavg.local_steps - 1) < scaffold.lr * scaffold.local_steps


def test_costs_move_the_choice():
    problem = PROBLEMS["noisy quadratics"][0]()
    dear_rounds = plan(problem, target=0.1, algorithms=["scaffold"]).proposals[0]
    dear_steps = plan(
        problem, target=0.1, algorithms=["scaffold"], cost_of_round=0.0, cost_of_step=1.0
    ).proposals[0]
    assert dear_steps.gradients <= dear_rounds.gradients
    assert dear_rounds.rounds <= dear_steps.rounds


def test_a_target_out_of_reach_is_said_beforehand():
    problem = fs.problems.quadratic(num_clients=2, dim=3, mu=0.1, noise=10.0, x0=np.ones(3), seed=0)
    made = plan(problem, target=1e-6, max_rounds=100)
    assert made.best is None
    assert all(one.rounds is None and "cannot reach" in one.why for one in made.proposals)
    assert verify(problem, made) == []


@pytest.mark.slow
def test_what_is_too_large_to_solve_is_refused(monkeypatch):
    monkeypatch.setattr(room, "SOLVED", 10)
    known = fs.problems.two_datasets("logistic", 2, records=5, dim=20, l2=0.1)
    clients = [tuple(a[i : i + 5] for a in known.records) for i in (0, 5)]
    with pytest.raises(fs.InputError, match="too large to plan: records times d may be 10"):
        plan(fs.problems.Problem(known.functions.loss, known.params, clients), target=0.1)
    assert plan(known, target=0.5, algorithms=["sgd"]).best == "sgd"  # its optimum is known


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": -1.0}, "target must be a number above 0"),
        ({"target": 0.1, "cost_of_round": 0.0}, "must not both be 0"),
        ({"target": 0.1, "max_rounds": 0}, "max_rounds must be"),
        ({"target": 0.1, "algorithms": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"target": 0.1, "algorithms": []}, "algorithms must name one or more"),
        ({"target": 0.1, "cohort": 0}, "cohort must be"),
        ({"target": 0.1, "weights": [1.0]}, "weights must be one number for each"),
    ],
)
def test_bad_questions_get_one_line(asked, said):
    with pytest.raises(fs.InputError, match=said):
        plan(PROBLEMS["exact quadratics"][0](), **asked)


@pytest.mark.slow
def test_a_plan_is_for_the_cohort_and_the_weights_that_were_asked_for():
    problem = PROBLEMS["noisy quadratics"][0]()
    weights = [4.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    asked = {"cohort": 4, "weights": weights, "local_steps": 3}
    made = plan(problem, target=1.0, algorithms=["fedavg", fs.scaffold(option=1)], **asked)
    assert made.distance == pytest.approx(np.linalg.norm(1 - problem.optimum(weights)))
    for algorithm, one in zip(made.algorithms, made.proposals, strict=True):
        assert (one.promised, one.local_steps) == (True, 3)
        errors = mean_squared_error(
            problem, lr=one.lr, noise=0.02, rounds=one.rounds, algorithm=algorithm, **asked
        )
        np.testing.assert_allclose(one.curve**2, errors, rtol=1e-12)
        assert (one.curve[-1] <= 1.0, bool((one.curve[1:-1] > 1.0).all())) == (True, True)
        run = fs.simulate(algorithm, problem, rounds=one.rounds, lr=one.lr, metrics=(), **asked)
        assert one.bytes_sent == (run.history["bytes_up"] + run.history["bytes_down"]).sum()
    for one in verify(problem, made, seeds=30):
        assert abs(one.measured - one.predicted) <= 4 * one.standard_error


@pytest.mark.slow
def test_fedavg_with_cohorts_of_unequal_weights_is_biased_at_any_step_size():
    """A client's share of a cohort is not its weight on average, so smaller steps do not help."""
    problem = PROBLEMS["exact quadratics"][0]()
    fedavg, scaffold = plan(
        problem,
        target=0.05,
        algorithms=["fedavg", "scaffold"],
        cohort=2,
        weights=[9.0, 1, 1, 1, 1, 1],
        max_rounds=3000,
    ).proposals
    assert fedavg.rounds is None
    assert scaffold.rounds is not None


def test_a_given_step_size_is_kept():
    problem = PROBLEMS["noisy quadratics"][0]()
    [one] = plan(problem, target=0.3, lr=0.07, algorithms=["scaffold"]).proposals
    assert one.lr == 0.07
    with pytest.raises(fs.InputError, match="lr must be a number above 0"):
        plan(problem, target=0.3, lr=-1.0)

"""A plan's predictions against simulation, its choices against brute force, and what it refuses."""

import math

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.theory.law import mean_squared_error
from fedscaffold.theory.planning import plan, verify

PROBLEMS = {
    "noisy quadratics": (
        lambda: fs.problems.quadratic(num_clients=6, dim=4, mu=0.1, noise=0.02, x0=np.ones(4), seed=3),
        None,
    ),
    "exact quadratics": (lambda: fs.problems.quadratic(num_clients=6, dim=4, mu=0.1, x0=np.ones(4), seed=3), None),
    "dialled": (
        lambda: fs.problems.dialled(5, 3, gradient_dissimilarity=3.0, hessian_dissimilarity=0.05, noise=0.05, seed=1),
        None,
    ),
    "linear regression": (lambda: fs.problems.two_datasets("linear", 6, records=60, dim=4, l2=0.1), 10),
    "logistic regression": (lambda: fs.problems.two_datasets("logistic", 6, records=60, dim=4, l2=0.1), 10),
}


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_measured_is_within_a_factor_two_of_predicted_or_not_promised(name):
    make, batch = PROBLEMS[name]
    problem = make()
    made = plan(problem, target=0.1, batch_size=batch)
    assert made.best is not None
    promised = {one.algorithm: one.promised for one in made.proposals}
    for one in verify(problem, made, seeds=24):
        assert one.predicted <= 0.1
        if promised[one.algorithm]:  # exact: within four standard errors
            assert abs(one.measured - one.predicted) <= 4 * one.standard_error + 1e-9
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
            problem, lr=lr, local_steps=steps, noise=noise, rounds=max(1, one.rounds - 2), x0=np.ones(4)
        )
        assert math.sqrt(errors[-1]) > 0.1


def test_fedavg_with_many_local_steps_is_ruled_out_by_its_bias():
    problem = fs.problems.dialled(5, 3, gradient_dissimilarity=5.0, hessian_dissimilarity=0.09, seed=1)
    fedavg, scaffold = plan(problem, target=1e-4, algorithms=["fedavg", "scaffold"], cost_of_step=0.0).proposals
    assert scaffold.rounds < fedavg.rounds
    assert fedavg.lr * (fedavg.local_steps - 1) < scaffold.lr * scaffold.local_steps


def test_costs_move_the_choice():
    problem = PROBLEMS["noisy quadratics"][0]()
    dear_rounds = plan(problem, target=0.1, algorithms=["scaffold"]).proposals[0]
    dear_steps = plan(problem, target=0.1, algorithms=["scaffold"], cost_of_round=0.0, cost_of_step=1.0).proposals[0]
    assert dear_steps.gradients <= dear_rounds.gradients
    assert dear_rounds.rounds <= dear_steps.rounds


def test_a_target_out_of_reach_is_said_beforehand():
    problem = fs.problems.quadratic(num_clients=2, dim=3, mu=0.1, noise=10.0, x0=np.ones(3), seed=0)
    made = plan(problem, target=1e-6, max_rounds=100)
    assert made.best is None
    assert all(one.rounds is None and "cannot reach" in one.why for one in made.proposals)
    assert verify(problem, made) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": -1.0}, "target must be a number above 0"),
        ({"target": 0.1, "cost_of_round": 0.0}, "must not both be 0"),
        ({"target": 0.1, "max_rounds": 0}, "max_rounds must be"),
        ({"target": 0.1, "algorithms": ["fedavgg"]}, "did you mean 'fedavg'"),
    ],
)
def test_bad_questions_get_one_line(asked, said):
    with pytest.raises(fs.InputError, match=said):
        plan(PROBLEMS["exact quadratics"][0](), **asked)

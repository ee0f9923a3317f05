"""What theory is asked in vain: every wrong question gets one clear line, and at once."""

import time

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import theory
from papers.bounds.expansion import expand
from papers.bounds.sample_rounds import sample_rounds
from papers.conjecture_search import conjectures

STEPS = {"lr": 0.1, "local_steps": 3}
SCAFFNEW = fs.algorithms.make("scaffnew")


def problem():
    return fs.problems.quadratic(num_clients=3, dim=2, mu=0.1, seed=0)


def bent():
    """One client is not convex, their mean is."""
    return fs.problems.quadratic(hessians=[[[-0.5]], [[2.0]]], linear=[[1.0], [0.0]])


ASKED = {
    "ragged noise": (
        lambda: theory.stationary(problem(), **STEPS, noise=[[1.0, 2.0], [3.0]]),
        "noise must be numbers",
    ),
    "text as noise": (
        lambda: theory.stationary(problem(), **STEPS, noise="loud"),
        "noise must be numbers",
    ),
    "noise that is not finite": (
        lambda: theory.stationary(problem(), **STEPS, noise=np.nan),
        "noise must be finite",
    ),
    "negative noise": (
        lambda: theory.stationary(problem(), **STEPS, noise=-1.0),
        "without negative eigenvalues",
    ),
    "noise of another size": (
        lambda: theory.stationary(problem(), **STEPS, noise=np.eye(3)),
        "got shape",
    ),
    "a negative seed": (
        lambda: sample_rounds(problem(), **STEPS, noise=0.1, rounds=3, seed=-1),
        "seed must be a whole number of at least 0",
    ),
    "a negative seed of samples": (lambda: fs.heterogeneity(problem(), seed=-1), "seed must be"),
    "a negative seed of draws": (lambda: conjectures(seed=-1), "seed must be"),
    "a negative lr": (
        lambda: theory.contraction_rate(problem(), lr=-1.0, local_steps=3),
        "lr must be a number above",
    ),
    "lr of zero": (
        lambda: theory.bias(problem(), lr=0.0, local_steps=3),
        "lr must be a number above 0",
    ),
    "text as lr": (
        lambda: theory.best_local_steps(problem(), lr="large"),
        "lr must be a number above 0",
    ),
    "a negative lr of expansions": (
        lambda: expand(problem(), lr=-0.1, local_steps=3),
        "lr must be",
    ),
    "a negative lr of drifts": (
        lambda: fs.heterogeneity(problem(), lr=-0.1, local_steps=3),
        "lr must be",
    ),
    "a drift without steps": (
        lambda: fs.heterogeneity(problem(), lr=0.1),
        "lr and local_steps go together",
    ),
    "half a step": (
        lambda: theory.contraction_rate(problem(), lr=0.1, local_steps=2.5),
        "local_steps must be",
    ),
    "a name to plan for": (lambda: fs.plan("digits", target=1.0), "must be a Problem, got str"),
    "a matrix to measure": (lambda: fs.heterogeneity(np.eye(2)), "must be a Problem, got ndarray"),
    "a list to expand": (lambda: expand([1], **STEPS), "must be a Problem, got list"),
    "nothing to contract": (
        lambda: theory.contraction_rate(None, **STEPS),
        "must be a Problem, got NoneType",
    ),
    "a client that flies away": (
        lambda: theory.contraction_rate(bent(), lr=0.1, local_steps=10**6),
        "overflows",
    ),
    "a law that does not settle": (
        lambda: theory.stationary(bent(), lr=0.1, local_steps=200, noise=0.1),
        "does not settle here: its spectral radius",
    ),
    "a law without closed form": (
        lambda: theory.stationary(problem(), **STEPS, noise=0.1, algorithm=SCAFFNEW),
        "has no closed form here: simulate it",
    ),
    "an error without closed form": (
        lambda: theory.mean_squared_error(
            problem(), **STEPS, noise=0.1, rounds=3, algorithm=SCAFFNEW
        ),
        "has no closed form here: simulate it",
    ),
    "a plan without closed form": (
        lambda: fs.plan(problem(), target=0.1, algorithms=["scaffold", "scaffnew"]),
        "scaffnew has no closed form to plan with",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_wrong_questions_get_one_line_at_once(asked):
    ask, said = ASKED[asked]
    before = time.process_time()
    with pytest.raises(fs.InputError, match=said) as caught:
        ask()
    assert "\n" not in str(caught.value)
    assert time.process_time() - before < 5


def test_a_client_that_is_not_convex_alone_can_be_planned_for():
    rate = theory.contraction_rate(bent(), **STEPS)
    assert rate.spectral_radius < 1
    [made] = fs.plan(bent(), target=0.1, algorithms=["scaffold"]).proposals
    assert made.promised
    assert made.curve[-1] <= 0.1

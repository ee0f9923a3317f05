"""A plan before the first round: step size, local steps, rounds, gradients and bytes for a target error.

The target is the root mean squared distance to the optimum, sqrt(E |x - x*|^2). For quadratics every number is exact
(F4-F7): of a grid of step sizes 2^-k / L and numbers of local steps, the pair that reaches the target most cheaply,

    cost = rounds (cost_of_round + local_steps cost_of_step)
    rounds from the exact error curve |mean|^2 + tr(covariance), round by round

For other smooth strongly convex problems the same is done on their quadratic model at the optimum (Hessians, gradients
and noise of every client there), with the bias of the expansions added (F17, F19); far from the optimum that model does
not bind the problem, so such a plan says that it cannot promise. All clients take part in every round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.problems.quadratic import quadratic
from fedscaffold.simulation import sweep
from fedscaffold.theory.derivatives import client_gradients, client_hessians, find_optimum, noise_covariance
from fedscaffold.theory.expansion import lyapunov
from fedscaffold.theory.law import mean_squared_error
from fedscaffold.theory.rates import bias, contraction_curve
from fedscaffold.theory.round_map import client_quadratics, is_quadratic

__all__ = ["Plan", "Proposal", "Verified", "plan", "verify"]

HALVINGS = 12  # step sizes tried: 1/L and its halves
LOCAL_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 1000)
MOST_ROUNDS = 20_000
FLOAT = 4  # bytes of a number on the wire
ROOM = 0.8  # share of the squared target that noise and bias may take up, so that the transient can still end


class Proposal(NamedTuple):
    """What one algorithm should do; the numbers are None where it cannot reach the target within the budget."""

    algorithm: str
    lr: float | None
    local_steps: int | None
    rounds: int | None
    gradients: int | None
    """Stochastic gradients that each client computes."""
    bytes_sent: int | None
    """Up and down, all clients."""
    cost: float
    curve: Floats
    """Predicted root mean squared distance, before the first round and after each."""
    promised: bool
    """Whether the prediction is exact; otherwise `why` says what it rests on."""
    why: str


class Plan(NamedTuple):
    """Proposals for the same target side by side; `best` is the cheapest."""

    target: float
    distance: float
    """|x0 - x*|."""
    proposals: tuple[Proposal, ...]
    best: str | None
    batch_size: int | float | None


class Verified(NamedTuple):
    """A proposal simulated: predicted against measured."""

    algorithm: str
    predicted: float
    measured: float
    standard_error: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


class _Model(NamedTuple):
    """The quadratics that a plan is made on."""

    problem: Problem
    noise: Floats
    exact: bool
    why: str


def plan(
    problem: Problem,
    *,
    target: float,
    batch_size: int | float | None = None,
    algorithms: Sequence[str] = ("sgd", "fedavg", "scaffold"),
    cost_of_round: float = 1.0,
    cost_of_step: float = 0.0,
    max_rounds: int = MOST_ROUNDS,
) -> Plan:
    """Plan a run that brings the root mean squared distance to the optimum down to `target`.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=5, mu=0.1, noise=0.01, x0=np.ones(5), seed=0)
    >>> made = plan(problem, target=0.05)
    >>> made.best, made.proposals[-1].promised
    ('scaffold', True)
    """
    target = checks.number("target", target, above=0)
    checks.number("cost_of_round", cost_of_round, at_least=0)
    checks.number("cost_of_step", cost_of_step, at_least=0)
    if cost_of_round + cost_of_step == 0:
        raise InputError("cost_of_round and cost_of_step must not both be 0")
    checks.whole("max_rounds", max_rounds, at_most=MOST_ROUNDS)
    proposals = []
    for name in algorithms:
        algorithm = make(name)
        model = _model(problem, None if algorithm.one_step else batch_size)
        proposals.append(_propose(model, algorithm, target, cost_of_round, cost_of_step, max_rounds))
    found = [one for one in proposals if one.rounds is not None]
    best = min(found, key=lambda one: one.cost).algorithm if found else None
    start = problem.layout.flatten(problem.params)
    distance = float(np.linalg.norm(start - find_optimum(problem)))
    return Plan(target, distance, tuple(proposals), best, batch_size)


def verify(problem: Problem, made: Plan, *, seeds: int = 16) -> list[Verified]:
    """Simulate every proposal of a plan, and compare the distance at its last round with the predicted one.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=5, mu=0.1, noise=0.01, x0=np.ones(5), seed=0)
    >>> bool(abs(verify(problem, plan(problem, target=0.05))[-1].ratio - 1) < 0.5)
    True
    """
    best = find_optimum(problem)
    outcomes = []
    for one in made.proposals:
        if one.rounds is None or one.lr is None:
            continue
        algorithm = make(one.algorithm)
        batch = None if algorithm.one_step else made.batch_size
        found = sweep(
            algorithm, problem, rounds=one.rounds, local_steps=one.local_steps, lr=one.lr, seeds=seeds,
            batch_size=batch, metrics=(), precision="float64", progress=False,
        )  # fmt: skip
        squares = np.array([np.sum((run.vector - best) ** 2) for run in found.runs[0]])
        measured = float(np.sqrt(squares.mean()))
        error = float(squares.std(ddof=1) / math.sqrt(seeds) / (2 * measured)) if seeds > 1 else math.nan
        outcomes.append(Verified(one.algorithm, float(one.curve[-1]), measured, error))
    return outcomes


def _model(problem: Problem, batch_size: int | float | None) -> _Model:
    """The problem as quadratics: itself if it is made of them, else its quadratic model at the optimum."""
    best = find_optimum(problem)
    noise = noise_covariance(problem, best, batch_size)
    start = problem.layout.flatten(problem.params)
    if is_quadratic(problem):
        hessians, linear = client_quadratics(problem)
        exact = batch_size is None or bool((problem.counts == 1).all())
        why = "exact for quadratics (F4-F7)" if exact else "noise of batches taken at the optimum: larger far from it"
    else:
        hessians = client_hessians(problem, best)
        linear = hessians @ best - client_gradients(problem, best)
        exact, why = False, "quadratic model at the optimum: far from it the curvature differs, so this is no promise"
    return _Model(quadratic(hessians=hessians, linear=linear, x0=start), noise, exact, why)


def _propose(
    model: _Model, algorithm: Algorithm, target: float, per_round: float, per_step: float, most: int
) -> Proposal:
    """The cheapest pair of step size and local steps for one algorithm."""
    tried = _candidates(model, algorithm, target)
    ranked = sorted(tried, key=lambda one: one[2] * (per_round + one[1] * per_step))
    for lr, steps, guess in ranked[:6]:
        if guess > most:
            break
        horizon = min(most, int(1.5 * guess) + 10)
        errors = np.sqrt(_curve(model, algorithm, lr, steps, horizon))
        met = np.flatnonzero(errors[1:] <= target)
        if len(met):
            return _proposal(model, algorithm, lr, steps, errors[: met[0] + 2], per_round, per_step)
    why = f"cannot reach {target:g} within {most} rounds: its bias or its noise is above that at every step size tried"
    return Proposal(algorithm.name, None, None, None, None, None, math.inf, np.zeros(0), model.exact, why)


def _candidates(model: _Model, algorithm: Algorithm, target: float) -> list[tuple[float, int, float]]:
    """(lr, local_steps, rounds at a guess) for every pair whose noise and bias leave room for the target."""
    near = model.problem
    largest = near.smoothness
    assert largest is not None
    mean = near.records[0].mean(axis=0)
    floor = np.trace(lyapunov(mean, model.noise.mean(axis=0))) / near.num_clients
    start = float(np.sum((near.params - near.optimum()) ** 2))
    steps = (1,) if algorithm.one_step else LOCAL_STEPS
    out = []
    for lr in (2.0**-k / largest for k in range(HALVINGS)):
        for rate in contraction_curve(near, lr=lr, local_steps=steps, algorithm=algorithm):
            off = bias(near, lr=lr, local_steps=rate.local_steps, algorithm=algorithm)
            room = target**2 - float(off @ off) - lr * floor
            if rate.spectral_radius < 1 and room > (1 - ROOM) * target**2:
                needed = math.log(max(start / room, 1.1)) / -(2 * math.log(max(rate.spectral_radius, 1e-12)))
                out.append((lr, rate.local_steps, max(1.0, needed)))
    return out


def _curve(model: _Model, algorithm: Algorithm, lr: float, steps: int, rounds: int) -> Floats:
    near = model.problem
    return mean_squared_error(
        near, lr=lr, local_steps=steps, noise=model.noise, rounds=rounds, x0=near.params, algorithm=algorithm
    )


def _proposal(
    model: _Model, algorithm: Algorithm, lr: float, steps: int, curve: Floats, per_round: float, per_step: float
) -> Proposal:
    rounds = len(curve) - 1
    vectors = 1 + 1 + (algorithm.shift is not None)  # one up; x down, and c where there is one
    size = vectors * model.problem.num_clients * model.problem.dim * FLOAT
    cost = rounds * (per_round + steps * per_step)
    return Proposal(
        algorithm.name, lr, steps, rounds, rounds * steps, rounds * size, cost, curve, model.exact, model.why
    )

"""A plan before the first round: step size, local steps, rounds, gradients and bytes for a target error.

The target is the root mean squared distance to the optimum, sqrt(E |x - x*|^2). For quadratics every number is exact
(F4-F7): of a grid of step sizes 2^-k / L and numbers of local steps, the pair that reaches the target most cheaply,

    cost = rounds (cost_of_round + local_steps cost_of_step)
    rounds from the exact error curve |mean|^2 + tr(covariance), round by round

For other smooth strongly convex problems the same is done on their quadratic model at the optimum (Hessians, gradients
and noise of every client there), with the bias of the expansions added (F17, F19); far from the optimum that model does
not bind the problem, so such a plan says that it cannot promise. Nor can that of a problem too large for exact
matrices, which is made on few directions (`reduced.py`). All clients take part in every round.
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
from fedscaffold.theory.derivatives import (
    batch_sizes,
    client_gradients,
    client_hessians,
    find_optimum,
    noise_covariance,
)
from fedscaffold.theory.expansion import lyapunov
from fedscaffold.theory.heterogeneity import SOLVED
from fedscaffold.theory.law import mean_squared_error
from fedscaffold.theory.quadratics import LinearRound, Spectra, linear_round, spectra
from fedscaffold.theory.rates import DENSE, bias_of, spectral_radius
from fedscaffold.theory.reduced import EXACT, Reduced, reduce, spread
from fedscaffold.theory.round_map import a_problem, client_quadratics, form_of, is_quadratic
from fedscaffold.theory.samples import Look, client_ends

__all__ = ["Plan", "Proposal", "Verified", "plan", "verify"]

HALVINGS = 12  # step sizes tried: 1/L and its halves
LOCAL_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 1000)
MOST_ROUNDS = 20_000
FLOAT = 4  # bytes of a number on the wire
TRIED = 6  # pairs whose error curves are computed, the best by a guess
GROWTH = 20.0  # log of the growth in a round that a client alone may show: beyond, nothing is left to plan
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
    noise: Floats | None
    """(N, d, d); None where it is in `reduced`."""
    exact: bool
    why: str
    steepest: float
    """L, at the optimum and at the start."""
    reduced: Reduced | None
    dim: int  # of the problem planned for

    @property
    def floor(self) -> float:
        """Noise at rest for every unit of lr (F16)."""
        if self.noise is None:
            return 0.0 if self.reduced is None else self.reduced.floor
        near = self.problem
        return float(np.trace(lyapunov(near.records[0].mean(axis=0), self.noise.mean(axis=0)))) / near.num_clients

    @property
    def large(self) -> bool:
        """Whether spectral radii cost so much that fewer pairs are tried, ranked by a guess."""
        return (self.problem.num_clients + 1) * self.problem.dim > DENSE


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
    a_problem(problem)
    target = checks.number("target", target, above=0)
    checks.number("cost_of_round", cost_of_round, at_least=0)
    checks.number("cost_of_step", cost_of_step, at_least=0)
    if cost_of_round + cost_of_step == 0:
        raise InputError("cost_of_round and cost_of_step must not both be 0")
    checks.whole("max_rounds", max_rounds, at_most=MOST_ROUNDS)
    made = [make(name) for name in algorithms]
    for algorithm in made:
        if form_of(algorithm) is None:
            raise InputError(f"{algorithm.name} has no closed form to plan with: take sgd, fedavg, fedprox or scaffold")
    if problem.facts.optimum is None and problem.offsets[-1] * problem.dim > SOLVED:
        raise InputError(f"too large to plan: records times d may be {SOLVED:g}; plan for some clients, or diagnose it")
    best, proposals = find_optimum(problem), []
    models: dict[int | float | None, _Model] = {}
    for algorithm in made:
        batch = None if algorithm.one_step else batch_size
        models[batch] = models.get(batch) or _model(problem, best, batch)
        proposals.append(_propose(models[batch], algorithm, target, cost_of_round, cost_of_step, max_rounds))
    found = [one for one in proposals if one.rounds is not None]
    cheapest = min(found, key=lambda one: one.cost).algorithm if found else None
    distance = float(np.linalg.norm(problem.layout.flatten(problem.params) - best))
    return Plan(target, distance, tuple(proposals), cheapest, batch_size)


def verify(problem: Problem, made: Plan, *, seeds: int = 16) -> list[Verified]:
    """Simulate every proposal of a plan, and compare the distance at its last round with the predicted one.

    One seed is enough, and taken, where nothing is drawn: full batches and no noise.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=5, mu=0.1, noise=0.01, x0=np.ones(5), seed=0)
    >>> [one] = verify(problem, plan(problem, target=0.05, algorithms=["scaffold"]))
    >>> bool(abs(one.ratio - 1) < 0.5)
    True
    """
    best = find_optimum(problem)
    outcomes = []
    for one in made.proposals:
        if one.rounds is None or one.lr is None:
            continue
        algorithm = make(one.algorithm)
        batch = None if algorithm.one_step else made.batch_size
        runs = 1 if problem.noise is None and batch_sizes(problem, batch) is None else seeds
        found = sweep(
            algorithm, problem, rounds=one.rounds, local_steps=one.local_steps, lr=one.lr, seeds=runs,
            batch_size=batch, metrics=(), precision="float64", progress=False,
        )  # fmt: skip
        squares = np.array([np.sum((run.vector - best) ** 2) for run in found.runs[0]])
        measured = float(np.sqrt(squares.mean()))
        error = float(squares.std(ddof=1) / math.sqrt(runs) / (2 * measured)) if runs > 1 and measured else 0.0
        outcomes.append(Verified(one.algorithm, float(one.curve[-1]), measured, error))
    return outcomes


def _model(problem: Problem, best: Floats, batch_size: int | float | None) -> _Model:
    """The problem as quadratics: itself if it is made of them, else its quadratic model at the optimum."""
    start = problem.layout.flatten(problem.params)
    steepest = 0.0 if is_quadratic(problem) else _steepest(problem, start)
    why = "quadratic model at the optimum: far from it the curvature differs, so no promise"
    if problem.num_clients * problem.dim**3 > EXACT:
        small, steepest = reduce(problem, best, batch_size), max(steepest, _steepest(problem, best))
        left = f"too large to be exact, followed in {small.problem.dim} of {problem.dim} directions: no promise"
        why = left if is_quadratic(problem) else f"{why}; {left}"
        return _Model(small.problem, None, False, why, steepest, small, problem.dim)
    noise, exact = noise_covariance(problem, best, batch_size), False
    if is_quadratic(problem):
        hessians, linear = client_quadratics(problem)
        exact = batch_size is None or bool((problem.counts == 1).all())
        why = "exact for quadratics (F4-F7)" if exact else "noise of batches taken at the optimum: larger far from it"
    else:
        hessians = client_hessians(problem, best)
        linear = hessians @ best - client_gradients(problem, best)
    near = quadratic(hessians=hessians, linear=linear, x0=start)
    return _Model(near, noise, exact, why, max(steepest, near.smoothness or 0.0), None, problem.dim)


def _steepest(problem: Problem, x: Floats) -> float:
    """Largest eigenvalue of any client's Hessian at x."""
    p = np.full(problem.num_clients, 1 / problem.num_clients)
    _, high, _, above = client_ends(Look(problem, p, np.arange(len(p)), np.ones_like(p)), x, np.random.default_rng(0))
    return float((high + above).max())


def _propose(
    model: _Model, algorithm: Algorithm, target: float, per_round: float, per_step: float, most: int
) -> Proposal:
    """The cheapest pair of step size and local steps for one algorithm."""
    tried = _candidates(model, algorithm, target)
    ranked = sorted(tried, key=lambda one: one[2] * (per_round + one[1] * per_step))
    best: Proposal | None = None
    for lr, steps, guess in ranked[:TRIED]:
        if guess > most:
            break
        horizon = min(most, int((3 if model.large else 1.5) * guess) + 10)
        if best is not None:  # only what is cheaper counts
            horizon = min(horizon, math.ceil(best.cost / (per_round + steps * per_step)) - 1)
        errors = np.sqrt(_curve(model, algorithm, lr, steps, horizon)) if horizon > 0 else np.zeros(0)
        met = np.flatnonzero(errors[1:] <= target)
        if len(met):
            best = _proposal(model, algorithm, lr, steps, errors[: met[0] + 2], per_round, per_step)
    why = f"cannot reach {target:g} within {most} rounds: its bias or its noise is above that at every step size tried"
    return best or Proposal(algorithm.name, None, None, None, None, None, math.inf, np.zeros(0), model.exact, why)


def _candidates(model: _Model, algorithm: Algorithm, target: float) -> list[tuple[float, int, float]]:
    """(lr, local_steps, rounds at a guess) for every pair whose noise and bias leave room for the target."""
    near, floor = model.problem, model.floor
    assert near.mu is not None
    start = float(np.sum((near.params - near.optimum()) ** 2))
    form, given, large = form_of(algorithm), spectra(near), model.large
    assert form is not None
    steps = (1,) if algorithm.one_step else LOCAL_STEPS[:: 2 if large else 1]
    out = []
    for lr in (2.0**-k / model.steepest for k in range(0, HALVINGS, 2 if large else 1)):
        grown = math.log1p(lr * max(0.0, -near.mu))  # by a client that is not convex, in every step
        for count in (count for count in steps if count * grown < GROWTH):
            one = linear_round(given, form, lr=lr, local_steps=count)
            off = bias_of(given, one)
            room = target**2 - float(off @ off) - lr * floor
            if room > (1 - ROOM) * target**2:
                radius = _like_equals(given, one) if large and form.memory else spectral_radius(one)
                if radius < 1:
                    needed = math.log(max(start / room, 1.1)) / -(2 * math.log(max(radius, 1e-12)))
                    out.append((lr, count, max(1.0, needed)))
    return out


def _like_equals(given: Spectra, one: LinearRound) -> float:
    """A guess at the spectral radius where the exact one costs too much: that of equal clients."""
    return max(1 - float(np.linalg.eigvalsh(given.mean(one.lost))[0]), float(one.lag.max()))


def _curve(model: _Model, algorithm: Algorithm, lr: float, steps: int, rounds: int) -> Floats:
    near, small = model.problem, model.reduced
    noise = 0.0 if model.noise is None else model.noise
    errors = mean_squared_error(
        near, lr=lr, local_steps=steps, noise=noise, rounds=rounds, x0=near.params, algorithm=algorithm
    )
    return errors if small is None else errors + spread(small, lr=lr, local_steps=steps, rounds=rounds)


def _proposal(
    model: _Model, algorithm: Algorithm, lr: float, steps: int, curve: Floats, per_round: float, per_step: float
) -> Proposal:
    rounds = len(curve) - 1
    vectors = 1 + 1 + (algorithm.shift is not None)  # one up; x down, and c where there is one
    size = vectors * model.problem.num_clients * model.dim * FLOAT
    cost = rounds * (per_round + steps * per_step)
    return Proposal(
        algorithm.name, lr, steps, rounds, rounds * steps, rounds * size, cost, curve, model.exact, model.why
    )

"""Plan a run: step size, local steps, rounds, gradients and bytes for a target error.

The target is the root mean squared distance to the optimum, sqrt(E |x - x*|^2). For quadratics
every number is exact: of a grid of step sizes 2^-k / L and numbers of local steps, the pair that
reaches the target most cheaply,

    cost = rounds (cost_of_round + local_steps cost_of_step)
    rounds from the exact error curve |mean|^2 + tr(covariance), round by round

with the cohorts and weights that were asked for. For other smooth strongly convex problems, and for
those too large for exact matrices, the same is done on a model of them that cannot promise
(`quadratic_model.py`).

Where all clients take part with equal weight, pairs are ranked by a guess from spectral radii, and
the curves of the best are computed. Else the grid is searched downhill, each pair being followed
until it is known to be no cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.algorithms.round import work_of
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import sweep
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.result import count_bytes
from fedscaffold.theory.derivatives import batch_sizes, find_optimum
from fedscaffold.theory.heterogeneity import SOLVED
from fedscaffold.theory.quadratic_model import (
    QuadraticModel,
    cohorts_of,
    model_of,
    search,
    settings_tried,
)
from fedscaffold.theory.quadratics import LinearRound, linear_round
from fedscaffold.theory.rates import DENSE, bias_of, spectral_radius
from fedscaffold.theory.round_map import a_problem, closed_form, form_of
from fedscaffold.theory.stationary import lyapunov

__all__ = ["Plan", "Proposal", "Verified", "plan", "verify"]

MOST_ROUNDS = 20_000
HALVINGS = 12  # step sizes tried: 1/L and its halves
TRIED = 6  # pairs whose error curves are computed, the best by a guess
# log of the growth in a round that a client alone may show: beyond, nothing is left to plan
GROWTH = 20.0
# share of the squared target that noise and bias may take up, so that the transient can still end
ROOM = 0.8
FAR = 1e30  # times the error of a pair that does not reach the target, its cost in a search
FOLLOWED = 64  # rounds after which a curve is first asked whether it will reach the target


class Proposal(NamedTuple):
    """Settings for one algorithm.

    Numbers are None if it cannot reach the target within the budget.
    """

    def __repr__(self) -> str:
        return brief(self)

    algorithm: str
    lr: float | None
    local_steps: int | None
    rounds: int | None
    gradients: int | None
    """Mean number of stochastic gradients that a client computes in the rounds in which it takes
    part."""
    bytes_sent: int | None
    """Bytes up and down over all clients, as `simulate` counts them in single precision."""
    cost: float
    curve: Floats
    """Predicted root mean squared distance, before the first round and after each."""
    promised: bool
    """Whether the prediction is exact; otherwise `why` gives its basis."""
    why: str


class Plan(NamedTuple):
    """Proposals for the same target side by side; `best` is the cheapest."""

    def __repr__(self) -> str:
        return brief(self)

    target: float
    distance: float
    """|x0 - x*|."""
    proposals: tuple[Proposal, ...]
    best: str | None
    batch_size: int | float | None
    cohort: int
    """Clients in a round."""
    weights: Floats
    """(N,) weights of the clients, summing to 1."""
    algorithms: tuple[Algorithm, ...]
    """Those of the proposals."""


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


class _Asked(NamedTuple):
    """Validated requirements of a plan."""

    target: float
    per_round: float
    per_step: float
    most: int
    lr: float | None
    local_steps: int | None

    def cost(self, steps: int) -> float:
        """Return the cost of one round."""
        return self.per_round + steps * self.per_step

    def settings(
        self, model: QuadraticModel, algorithm: Algorithm
    ) -> tuple[list[float], list[int]]:
        """Return the step sizes and numbers of local steps to try."""
        return settings_tried(
            model, algorithm, lr=self.lr, local_steps=self.local_steps, halvings=HALVINGS
        )


def plan(
    problem: Problem,
    *,
    target: float,
    batch_size: int | float | None = None,
    cohort: float | int = 1.0,
    weights: str | ArrayLike = "equal",
    lr: float | None = None,
    local_steps: int | None = None,
    algorithms: Sequence[str | Algorithm] = ("sgd", "fedavg", "scaffold"),
    cost_of_round: float = 1.0,
    cost_of_step: float = 0.0,
    max_rounds: int = MOST_ROUNDS,
) -> Plan:
    """Plan a run that brings the root mean squared distance to the optimum down to `target`.

    `batch_size`, `cohort` and `weights` are those of `simulate`, the optimum being that of the
    weighted mean. A given `lr` or `local_steps` is kept; what is not given is chosen.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=5, mu=0.1, noise=0.01, x0=np.ones(5))
    >>> made = plan(problem, target=0.05)
    >>> made.best, made.proposals[-1].promised
    ('scaffold', True)
    """
    a_problem(problem)
    asked = _Asked(
        checks.number("target", target, above=0),
        checks.number("cost_of_round", cost_of_round, at_least=0),
        checks.number("cost_of_step", cost_of_step, at_least=0),
        checks.whole("max_rounds", max_rounds, at_most=MOST_ROUNDS),
        None if lr is None else checks.number("lr", lr, above=0),
        None if local_steps is None else checks.whole("local_steps", local_steps),
    )
    if cost_of_round + cost_of_step == 0:
        raise InputError("cost_of_round and cost_of_step must not both be 0")
    made = _with_closed_forms(algorithms)
    heard = cohorts_of(problem, made, cohort, weights)
    batch_sizes(problem, batch_size)  # refuses a wrong one before the work begins
    if problem.facts.optimum is None and problem.offsets[-1] * problem.dim > SOLVED:
        raise InputError(
            f"too large to plan: records times d may be {SOLVED:g}; plan for some clients, or "
            "diagnose it"
        )
    best, proposals = find_optimum(problem, heard.p), []
    models: dict[int | float | None, QuadraticModel] = {}
    for algorithm in made:
        batch = work_of(algorithm, 1, batch_size).batch_size
        models[batch] = models.get(batch) or model_of(problem, best, batch, heard)
        one = _propose(models[batch], algorithm, asked)
        proposals.append(
            one
            if one.rounds is None
            else one._replace(bytes_sent=_bytes(problem, algorithm, cohort, one))
        )
    found = [one for one in proposals if one.rounds is not None]
    cheapest = min(found, key=lambda one: one.cost).algorithm if found else None
    distance = float(np.linalg.norm(problem.layout.flatten(problem.params) - best))
    return Plan(
        asked.target,
        distance,
        tuple(proposals),
        cheapest,
        batch_size,
        heard.size,
        heard.p,
        tuple(made),
    )


def _with_closed_forms(given: Sequence[str | Algorithm]) -> list[Algorithm]:
    """Return the algorithms to plan with; raise InputError for one that theory does not cover."""
    made = [make(one) if isinstance(one, str) else one for one in given]
    if not made:
        raise InputError("algorithms must name one or more, such as scaffold; got none")
    for algorithm in made:
        if form_of(algorithm) is None:
            raise InputError(
                f"{algorithm.name} has no closed form to plan with: take sgd, fedavg, fedprox or "
                "scaffold"
            )
    return made


def verify(problem: Problem, made: Plan, *, seeds: int = 16) -> list[Verified]:
    """Simulate the proposals of a plan, and compare the last distances with the predicted.

    One seed is enough, and taken, where nothing is drawn: all clients, full batches and no noise.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=10, dim=5, mu=0.1, noise=0.01, x0=np.ones(5))
    >>> [one] = verify(problem, plan(problem, target=0.05, algorithms=["scaffold"]))
    >>> bool(abs(one.ratio - 1) < 0.5)
    True
    """
    best = find_optimum(problem, made.weights)
    outcomes = []
    for algorithm, one in zip(made.algorithms, made.proposals, strict=True):
        if one.rounds is None or one.lr is None:
            continue
        batch = work_of(algorithm, 1, made.batch_size).batch_size
        still = (
            problem.noise is None
            and batch_sizes(problem, batch) is None
            and made.cohort == problem.num_clients
        )
        runs = 1 if still else seeds
        found = sweep(
            algorithm,
            problem,
            rounds=one.rounds,
            local_steps=one.local_steps,
            lr=one.lr,
            seeds=runs,
            batch_size=batch,
            cohort=made.cohort,
            weights=made.weights,
            metrics=(),
            precision="float64",
            progress=False,
        )
        squares = np.array([np.sum((run.vector - best) ** 2) for run in found.runs[0]])
        measured = float(np.sqrt(squares.mean()))
        error = (
            float(squares.std(ddof=1) / math.sqrt(runs) / (2 * measured))
            if runs > 1 and measured
            else 0.0
        )
        outcomes.append(Verified(one.algorithm, float(one.curve[-1]), measured, error))
    return outcomes


def _bytes(problem: Problem, algorithm: Algorithm, cohort: float | int, one: Proposal) -> int:
    """Return the bytes up and down of all rounds, as the simulator counts them."""
    assert one.rounds is not None
    config = RunConfig(
        algorithm,
        problem,
        rounds=1,
        local_steps=one.local_steps,
        lr=one.lr,
        cohort=cohort,
        metrics=(),
    )
    sent = count_bytes(config, prepare(config), 0, 1)
    return one.rounds * int(sent["bytes_up"][0] + sent["bytes_down"][0])


def _propose(model: QuadraticModel, algorithm: Algorithm, asked: _Asked) -> Proposal:
    """Return the cheapest pair of step size and local steps for one algorithm."""
    best = _by_guess(model, algorithm, asked) if model.heard.plain else None
    best = best or _by_search(model, algorithm, asked)
    within = f"cannot reach {asked.target:g} within {asked.most} rounds"
    why = f"{within}: its bias or its noise is above that at every step size tried"
    return best or Proposal(
        algorithm.name, None, None, None, None, None, math.inf, np.zeros(0), False, why
    )


def _by_guess(model: QuadraticModel, algorithm: Algorithm, asked: _Asked) -> Proposal | None:
    """Return the cheapest of the most promising pairs by spectral radius."""
    tried = _candidates(model, algorithm, asked)
    best: Proposal | None = None
    for lr, steps, guess in sorted(tried, key=lambda one: one[2] * asked.cost(one[1]))[:TRIED]:
        if guess > asked.most:
            break
        horizon = min(asked.most, int((3 if _large(model) else 1.5) * guess) + 10)
        if best is not None:  # only what is cheaper counts
            horizon = min(horizon, math.ceil(best.cost / asked.cost(steps)) - 1)
        if horizon > 0:
            errors, _ = model.errors(algorithm, lr=lr, steps=steps, rounds=horizon, gap=False)
            best = _proposal(model, algorithm, asked, lr, steps, errors) or best
    return best


def _by_search(model: QuadraticModel, algorithm: Algorithm, asked: _Asked) -> Proposal | None:
    """Return the cheapest pair by descent on the grid.

    A pair is dropped once its cost is above the best, or it is hopeless.
    """
    best: list[Proposal] = []

    def cost(lr: float, steps: int) -> float:
        horizon = (
            min(asked.most, math.ceil(best[-1].cost / asked.cost(steps)) - 1)
            if best
            else asked.most
        )
        followed = 0
        while followed < horizon:
            followed = min(4 * followed or FOLLOWED, horizon)
            errors, _ = model.errors(algorithm, lr=lr, steps=steps, rounds=followed, gap=False)
            found = _proposal(model, algorithm, asked, lr, steps, errors)
            if found is not None:
                best.append(found)
                return found.cost
            if _hopeless(errors, asked.target**2, horizon):
                return float(FAR * errors[-1])  # the nearer the better
        return math.inf

    search(cost, *asked.settings(model, algorithm))
    return best[-1] if best else None


def _hopeless(errors: Floats, target: float, horizon: int) -> bool:
    """Return whether a curve, extrapolated from its last half, misses the target."""
    last, half = len(errors) - 1, errors[len(errors) // 2]
    if not errors[-1] < half:
        return True
    rate = math.log(half / errors[-1]) / (last - len(errors) // 2)
    return last + math.log(errors[-1] / target) / rate > horizon


def _candidates(
    model: QuadraticModel, algorithm: Algorithm, asked: _Asked
) -> list[tuple[float, int, float]]:
    """Return (lr, local_steps, estimated rounds) of all pairs that permit the target."""
    near, floor, target = model.problem, _floor(model), asked.target
    assert near.mu is not None
    start = float(np.sum((near.params - near.optimum()) ** 2))
    form, given, large = closed_form(algorithm), model.spectra, _large(model)
    stride = 2 if large else 1
    lrs, steps = asked.settings(model, algorithm)
    out = []
    for lr in lrs[::stride]:
        grown = math.log1p(lr * max(0.0, -near.mu))  # by a client that is not convex, in every step
        for count in (count for count in steps[::stride] if count * grown < GROWTH):
            one = linear_round(given, form, lr=lr, local_steps=count)
            off = bias_of(given, one)
            room = target**2 - float(off @ off) - lr * floor
            if room > (1 - ROOM) * target**2:
                radius = _like_equals(one) if large and form.memory else spectral_radius(one)
                if radius < 1:
                    needed = math.log(max(start / room, 1.1)) / -(2 * math.log(max(radius, 1e-12)))
                    out.append((lr, count, max(1.0, needed)))
    return out


def _floor(model: QuadraticModel) -> float:
    """Return the stationary noise per unit of lr to first order (F16), for estimates."""
    if model.noise is None:
        return 0.0 if model.reduced is None else model.reduced.floor
    near = model.problem
    return (
        float(np.trace(lyapunov(near.records[0].mean(axis=0), model.noise.step.mean(axis=0))))
        / near.num_clients
    )


def _large(model: QuadraticModel) -> bool:
    """Return whether spectral radii are expensive, so that fewer pairs are tried."""
    return (model.problem.num_clients + 1) * model.problem.dim > DENSE


def _like_equals(one: LinearRound) -> float:
    """Estimate the spectral radius by that of equal clients."""
    return max(1 - float(np.linalg.eigvalsh(one.mean(one.lost))[0]), float(one.lag.max()))


def _proposal(
    model: QuadraticModel,
    algorithm: Algorithm,
    asked: _Asked,
    lr: float,
    steps: int,
    errors: Floats,
) -> Proposal | None:
    """Return the proposal for a curve of squared errors; None if it stays above the target."""
    met = np.flatnonzero(errors[1:] <= asked.target**2)
    if not len(met):
        return None
    rounds = int(met[0]) + 1
    gradients = round(rounds * steps * model.heard.one)
    curve = np.sqrt(errors[: rounds + 1])
    return Proposal(
        algorithm.name,
        lr,
        steps,
        rounds,
        gradients,
        None,
        rounds * asked.cost(steps),
        curve,
        *model.promise(algorithm),
    )

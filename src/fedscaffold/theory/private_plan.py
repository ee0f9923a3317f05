"""Plan a private run: noise, clip, batches, local steps and step size for an epsilon and rounds.

For each probability q of drawing a record and each number K of local steps, the accountant gives
the least noise multiplier; the private gradient then has the covariance of `theory.privacy`, and
the error after the last round follows from the law of the run, transient, bias and noise together
(F4-F7). Of all pairs and step sizes the one with the least error is proposed.

The clip is the norm of the longest gradient of a record at the start and at the optimum, so that
the law holds: it says nothing of clipped gradients. Between the two no record's gradient is longer
on quadratics, as its norm is convex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import noise_for
from fedscaffold.privacy.methods import refuse_algorithm
from fedscaffold.privacy.records import Records
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import sweep
from fedscaffold.simulation.program import prepare
from fedscaffold.theory.derivatives import find_optimum
from fedscaffold.theory.privacy import batch_covariance, noise_deviation, record_norms
from fedscaffold.theory.quadratic_model import QuadraticModel, cohorts_of, model_of
from fedscaffold.theory.second_moments import Noise

__all__ = [
    "PrivatePlan",
    "PrivateProposal",
    "VerifiedPrivacy",
    "plan_privacy",
    "verify_privacy",
]

RATES = (0.1, 1.0)
LOCAL_STEPS = (1, 3, 10, 30)
HALVINGS = 10  # step sizes tried: 1/L and its halves


class PrivateProposal(NamedTuple):
    """Settings for one algorithm and one epsilon."""

    def __repr__(self) -> str:
        return brief(self)

    algorithm: str
    epsilon: float
    noise: float
    """The noise multiplier."""
    rate: float
    """Probability with which a step draws a record: `batch_size`, as a fraction."""
    local_steps: int
    lr: float
    error: float
    """Predicted root mean squared distance to the optimum after the last round."""
    without: float
    """The same of the best settings without privacy."""
    promised: bool
    """Whether the prediction is exact, but for what is clipped."""
    why: str


class PrivatePlan(NamedTuple):
    """Proposals for some epsilons, each algorithm beside the others."""

    def __repr__(self) -> str:
        return brief(self)

    proposals: tuple[PrivateProposal, ...]
    delta: float
    rounds: int
    clip: float
    clipped: float
    """Share of the records whose gradient is longer than the clip at the start or the optimum."""
    distance: float
    """|x0 - x*|."""
    cohort: int
    weights: Floats

    def settings(self, one: PrivateProposal) -> dict[str, Any]:
        """Return the arguments of `simulate` for a proposal."""
        private = Records(clip=self.clip, noise=one.noise, delta=self.delta)
        batch = None if one.rate == 1 else one.rate
        run = {"rounds": self.rounds, "local_steps": one.local_steps, "lr": one.lr}
        shared = {"cohort": self.cohort, "weights": self.weights}
        return run | shared | {"batch_size": batch, "privacy": private}


def plan_privacy(
    problem: Problem,
    *,
    epsilons: Sequence[float],
    delta: float,
    rounds: int,
    clip: float | None = None,
    rate: float | None = None,
    local_steps: int | None = None,
    lr: float | None = None,
    cohort: float | int = 1.0,
    weights: str | ArrayLike = "equal",
    algorithms: Sequence[str | Algorithm] = ("scaffold", "fedavg"),
) -> PrivatePlan:
    """Plan runs that protect records within some epsilons, and predict their errors.

    What is given of `clip`, `rate`, `local_steps` and `lr` is kept; what is not given is chosen.
    The records are looked at: settings chosen on private data tell of them.

    Args:
        problem: The problem; its optimum must be known or found.
        epsilons: The budgets, at `delta`.
        delta: The probability in (epsilon, delta).
        rounds: Number of rounds.
        clip: The norm that gradients of records are clipped to.
        rate: Probability with which a step draws a record.
        local_steps: Local steps of a round.
        lr: The local step size.
        cohort: As in `simulate`.
        weights: As in `simulate`.
        algorithms: The algorithms that are compared.

    Returns:
        For each epsilon and algorithm the settings with the least error after the last round.

    Raises:
        InputError: The problem is too large, an algorithm cannot be private or has no closed form,
            or no noise suffices.

    >>> import fedscaffold as fs
    >>> rng = np.random.default_rng(0)
    >>> clients = [(rng.normal(size=(80, 2)), rng.normal(size=80) + i) for i in range(3)]
    >>> problem = fs.problems.linear(clients, l2=0.1)
    >>> made = fs.plan_privacy(
    ...     problem, epsilons=[1, 8], delta=1e-5, rounds=20, rate=1.0, local_steps=3
    ... )
    >>> [one.algorithm for one in made.proposals]
    ['scaffold', 'fedavg', 'scaffold', 'fedavg']
    >>> made.proposals[0].error > made.proposals[2].error > made.proposals[2].without
    True
    """
    made = [make(one) if isinstance(one, str) else one for one in algorithms]
    for algorithm in made:
        refuse_algorithm(algorithm)
    heard = cohorts_of(problem, made, cohort, weights)
    best, start = find_optimum(problem, heard.p), problem.layout.flatten(problem.params)
    model = model_of(problem, best, None, heard)
    if model.reduced is not None:
        raise InputError(
            f"too large to plan: {problem.num_clients} clients and d = {problem.dim}; "
            "`fedscaffold privacy plan` finds the noise alone"
        )
    norms = np.maximum(record_norms(problem, best), record_norms(problem, start))
    bound = float(norms.max()) if clip is None else checks.number("clip", clip, above=0)
    private = Records(clip=bound, noise=1.0, delta=delta)
    shared = {"rounds": rounds, "cohort": cohort, "weights": weights, "privacy": private}
    config = RunConfig(made[0], problem, local_steps=1, lr=1.0, **shared)  # type: ignore[arg-type]
    grid = _Grid(
        RATES if rate is None else (checks.number("rate", rate, above=0),),
        LOCAL_STEPS if local_steps is None else (checks.whole("local_steps", local_steps),),
        tuple(2.0**-k / model.steepest for k in range(HALVINGS)) if lr is None else (lr,),
    )
    attended = _rounds_attended(config)
    proposals: list[PrivateProposal] = []
    for epsilon in epsilons:
        pairs = _pairs(config, checks.number("epsilon", epsilon, above=0), grid, attended)
        proposals += [_propose(model, one, epsilon, pairs, grid, rounds) for one in made]
    return PrivatePlan(
        proposals=tuple(proposals),
        delta=delta,
        rounds=rounds,
        clip=bound,
        clipped=float((norms > bound).mean()),
        distance=float(np.linalg.norm(start - best)),
        cohort=heard.size,
        weights=heard.p,
    )


class _Grid(NamedTuple):
    """The settings that are tried."""

    rates: tuple[float, ...]
    steps: tuple[int, ...]
    lrs: tuple[float, ...]


class _Pair(NamedTuple):
    """A rate and a number of local steps, with the noise that keeps the epsilon."""

    rate: float
    steps: int
    noise: float
    covariance: Floats
    """(N, d, d) of a private gradient at the optimum."""


def _propose(
    model: QuadraticModel,
    algorithm: Algorithm,
    epsilon: float,
    pairs: Sequence[_Pair],
    grid: _Grid,
    rounds: int,
) -> PrivateProposal:
    """Return the settings of an algorithm with the least error after the last round."""
    tried = []
    for pair in pairs:
        noise = Noise(pair.covariance, pair.covariance)
        error, lr = _least_error(model, algorithm, grid.lrs, pair.steps, rounds, noise)
        tried.append((error, lr, pair))
    error, lr, pair = min(tried, key=lambda one: one[0])
    silent = Noise(0 * pair.covariance, 0 * pair.covariance)
    without = min(
        _least_error(model, algorithm, grid.lrs, steps, rounds, silent)[0] for steps in grid.steps
    )
    promised, why = model.promise(algorithm)
    return PrivateProposal(
        algorithm=algorithm.name,
        epsilon=float(epsilon),
        noise=pair.noise,
        rate=pair.rate,
        local_steps=pair.steps,
        lr=lr,
        error=error,
        without=without,
        promised=promised and pair.rate == 1,
        why=why if pair.rate == 1 else f"{why}; noise of batches as at the optimum",
    )


def _rounds_attended(config: RunConfig) -> int:
    """Return the most rounds that any client attends, by the cohorts of the seed."""
    budget = prepare(config).budget
    assert budget is not None
    return int(budget.steps(config.rounds).max())


def _pairs(config: RunConfig, epsilon: float, grid: _Grid, attended: int) -> list[_Pair]:
    """Return all pairs for which there is a noise that keeps an epsilon.

    Raises:
        InputError: There are none.
    """
    assert config.privacy is not None
    found, failed, delta = list[_Pair](), None, config.privacy.delta
    for rate in grid.rates:
        batches = batch_covariance(config, rate)
        for steps in grid.steps:
            try:
                noise = noise_for(epsilon=epsilon, rate=rate, steps=steps * attended, delta=delta)
            except InputError as error:
                failed = error
                continue
            own = replace(config.privacy, noise=noise)
            deviation = noise_deviation(
                replace(config, privacy=own, batch_size=None if rate == 1 else rate)
            )
            mechanism = deviation[:, None, None] ** 2 * np.eye(config.problem.dim)
            found.append(_Pair(rate, steps, noise, mechanism + batches))
    if not found and failed is not None:
        raise failed
    return found


def _least_error(
    model: QuadraticModel,
    algorithm: Algorithm,
    lrs: Sequence[float],
    steps: int,
    rounds: int,
    noise: Noise,
) -> tuple[float, float]:
    """Return the least root mean squared error after the last round, and its step size."""
    noised, found = model._replace(noise=noise), []
    with np.errstate(over="ignore", invalid="ignore"):  # of step sizes that diverge
        for lr in lrs:
            errors, _ = noised.errors(algorithm, lr=lr, steps=steps, rounds=rounds, gap=False)
            error = float(errors[-1])
            found.append((math.sqrt(error) if error >= 0 else math.inf, lr))
    return min(found)


class VerifiedPrivacy(NamedTuple):
    """A proposal simulated: predicted against measured."""

    algorithm: str
    epsilon: float
    predicted: float
    measured: float
    standard_error: float


def verify_privacy(
    problem: Problem, made: PrivatePlan, *, seeds: int = 16
) -> list[VerifiedPrivacy]:
    """Simulate the proposals of a plan, and compare the last distances with the predicted.

    The distances are of runs on the records: they are for whoever simulates, not to be published.

    >>> import fedscaffold as fs
    >>> rng = np.random.default_rng(0)
    >>> clients = [(rng.normal(size=(80, 2)), rng.normal(size=80)) for i in range(2)]
    >>> problem = fs.problems.linear(clients, l2=0.1)
    >>> made = fs.plan_privacy(problem, epsilons=[8], delta=1e-5, rounds=5, rate=1.0, local_steps=1)
    >>> one = verify_privacy(problem, made, seeds=8)[0]
    >>> 0.3 < one.measured / one.predicted < 3
    True
    """
    best, found = find_optimum(problem, made.weights), []
    for one in made.proposals:
        given = made.settings(one) | {"metrics": (), "precision": "float64", "progress": False}
        swept = sweep(make(one.algorithm), problem, seeds=seeds, **given)
        squares = np.array([np.sum((run.vector - best) ** 2) for run in swept.runs[0]])
        measured = math.sqrt(squares.mean())
        error = float(squares.std(ddof=1) / math.sqrt(seeds) / (2 * measured)) if seeds > 1 else 0.0
        found.append(VerifiedPrivacy(one.algorithm, one.epsilon, one.error, measured, error))
    return found

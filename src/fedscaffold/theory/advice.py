"""Which of SGD, FedAvg and SCAFFOLD to use, with which step size and local steps, and why.

Where f has an optimum, settings are compared by E f(x) - f(x*) after the T rounds that can be
afforded, from the problem's own start, with its cohorts, weights and noise (`quadratic_model.py`):
exact on quadratics, on the quadratic model at the optimum otherwise. Tried are

    step sizes      1/L and its halves, L the largest curvature of any client, at the optimum and at
                    the start
    local steps     1 to 1000
    methods         SGD (one step on all data a round), FedAvg, SCAFFOLD

on a grid that is searched downhill. Advised is the simplest method whose best setting is within
SIMPLER times the best of all, with the fewest local steps that are: SGD and FedAvg send two vectors
a round and client, SCAFFOLD three. Where the model is no promise, differences within half the
sampling error do not count either: other records from the same sources would move grad f by a
random e of covariance sum p_i^2 V_i / n_i, so the minimum itself is known to e' H^-1 e / 2 only
(sampling_excess).

Where no optimum is found (a network; separable data without l2) nothing can be predicted, and rules
of thumb are used, with C~ the covariance of the cohort's mean gradient, D FedAvg's drift, and Delta
what 50 gradient steps gained:

    step            1/L, or where noise asks for less, Delta / (5 T tr C~): with lr K = 10 / L,
                    noise then adds no more to the mean |grad f|^2 of the descent lemma than the
                    distance to go does
    local steps     10 / (lr L); where f is convex 1 / (lr sqrt(mu L)) (F10), at most T / (lr L)
    FedAvg          if its drift, |D|^2 / (2 L) or D' (H + I / (lr K T))^-1 D / 2, is lost in the
                    noise, lr tr C~ / 4, or within half the sampling error; else SCAFFOLD
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, fedavg, make, scaffold, sgd
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.cohorts import Cohorts
from fedscaffold.theory.derivatives import client_gradients, find_optimum, noise_level, solve
from fedscaffold.theory.heterogeneity import Heterogeneity, drift
from fedscaffold.theory.quadratic_model import (
    LOCAL_STEPS,
    STRIDE,
    QuadraticModel,
    cohorts_of,
    model_of,
    search,
    settings_tried,
)
from fedscaffold.theory.round_map import is_quadratic
from fedscaffold.theory.subsampling import Look, looks_at, redrawn

__all__ = ["Advice", "Tried", "advise"]

SIMPLER = 1.25  # times the best error that a simpler method may leave
ROUNDING = 1e-26  # of the gap at the start: nobody will see the difference
HALVINGS = 21  # step sizes tried: 1/L and its halves, down to a millionth
WITHIN = 0.5  # share of the sampling error within which differences do not matter
# (zeta_1 / chance)^2 up to which gradients may differ by chance only: then it is 1 on average
ALIKE = 1.5
FEW = 4  # local steps below which FedAvg gains too little
DRAWS = 3  # of the sampling error
HARDLY = 0.95  # of the gap at the start: a setting that leaves more hardly beats the start


class Tried(NamedTuple):
    """A setting and the excess loss that it is expected to leave."""

    algorithm: str
    lr: float
    local_steps: int
    gap: float
    standard_error: float
    """Of `gap` if estimated from simulated runs; else 0."""

    def __str__(self) -> str:
        steps = "one step a round" if self.local_steps == 1 else f"{self.local_steps} local steps"
        return f"{self.algorithm} with lr {self.lr:.2g} and {steps}"


class Advice(NamedTuple):
    """Recommended method and settings; the rules are in the module's docstring."""

    algorithm: str
    """sgd, fedavg or scaffold."""
    lr: float
    local_steps: int
    why: tuple[str, ...]
    """Reasons, as sentences."""
    gap: float | None
    """E f(x) - f(x*) after the rounds; None if nothing can be predicted."""
    start_gap: float | None
    """f(x0) - f(x*); None if nothing can be predicted."""
    promised: bool
    """Whether `gap` is exact."""
    sampling_excess: float
    """Expected excess loss of this minimum for other records from the same sources."""
    tried: tuple[Tried, ...]
    """All settings compared."""

    def __str__(self) -> str:
        steps = "" if self.algorithm == "sgd" else f" and {self.local_steps} local steps"
        return f"Use {self.algorithm} with lr {self.lr:.2g}{steps}.\n" + "\n".join(
            f"- {line}" for line in self.why
        )


class _Case(NamedTuple):
    """The question: problem, cohorts, rounds and given settings."""

    found: Heterogeneity
    problem: Problem
    heard: Cohorts
    rounds: int
    lr: float | None
    local_steps: int | None

    @property
    def at(self) -> Heterogeneity:
        return self.found.later or self.found

    @property
    def sample(self) -> Look:
        """The problem, or a sample of it for products with the mean Hessian."""
        return looks_at(self.problem, self.heard.p, False, np.random.default_rng(0)).mean

    @property
    def steepest(self) -> float:
        return max(self.at.smoothness, self.found.start_smoothness)


def advise(
    found: Heterogeneity,
    problem: Problem,
    *,
    rounds: int = 100,
    cohort: float | int = 1.0,
    lr: float | None = None,
    local_steps: int | None = None,
) -> Advice:
    """Recommend an algorithm, a step size and a number of local steps for `problem`.

    Args:
        found: Result of `heterogeneity`, whose weights and batch size are used.
        problem: The problem.
        rounds: Number of rounds that can be afforded.
        cohort: Share or number of clients that take part in each round.
        lr: Step size; chosen by default.
        local_steps: Number of local steps; chosen by default.

    >>> import fedscaffold as fs
    >>> from fedscaffold.theory.heterogeneity import heterogeneity
    >>> unlike = fs.problems.dialled(
    ...     5, 4, gradient_dissimilarity=9.0, hessian_dissimilarity=0.1, seed=1
    ... )
    >>> advice = advise(heterogeneity(unlike), unlike)
    >>> advice.algorithm, advice.promised
    ('scaffold', True)
    """
    rounds = checks.whole("rounds", rounds)
    lr = None if lr is None else checks.number("lr", lr, above=0)
    local_steps = None if local_steps is None else checks.whole("local_steps", local_steps)
    heard = cohorts_of(problem, [sgd(), fedavg(), scaffold()], cohort, found.weights)
    case = _Case(found, problem, heard, rounds, lr, local_steps)
    best = _optimum(case)
    return _by_rule(case) if best is None else _by_model(case, best)


def _optimum(case: _Case) -> Floats | None:
    """Return the optimum around which f can be modelled; None if there is none."""
    if case.found.where == "the optimum":
        return case.found.x if case.found.mean_mu > 0 else None
    if not is_quadratic(case.problem):
        return None
    try:
        return find_optimum(case.problem, case.heard.p)
    except InputError:  # not strictly convex
        return None


# By the model


def _by_model(case: _Case, best: Floats) -> Advice:
    found = case.found
    whole = model_of(case.problem, best, None, case.heard)
    batches = (
        whole
        if found.batch_size is None
        else model_of(case.problem, best, found.batch_size, case.heard)
    )
    choices = [_compared(case, whole, sgd())] if case.local_steps in (None, 1) else []
    choices += [_compared(case, batches, algorithm) for algorithm in (fedavg(), scaffold())]
    ends = [min(tried, key=lambda one: one.gap) for tried in choices]
    start = float(whole.errors(sgd(), lr=1e-9 / whole.steepest, steps=1, rounds=1, gap=True)[0][0])
    least = min(one.gap for one in ends)
    sampling = _sampling_excess(case, found, max(ends, key=lambda one: one.lr * one.local_steps))
    slack = 0.0 if batches.exact else WITHIN * sampling
    allowed = max(SIMPLER * least, ROUNDING * start, least + slack)
    some = next(some for some in choices if min(one.gap for one in some) <= allowed)
    chosen = min(
        (one for one in some if one.gap <= allowed), key=lambda one: (one.local_steps, one.gap)
    )
    model = whole if chosen.algorithm == "sgd" else batches
    promised, basis = model.promise(make(chosen.algorithm))
    said = [_likeness(found), _prediction(case, chosen, start, basis)]
    tried = tuple(one for some in choices for one in some)
    said += [*_comparison(chosen, ends, sampling), *_fewer(chosen, tried)]
    said += _outlook(case, chosen, start, batches.steepest)
    return Advice(
        chosen.algorithm,
        chosen.lr,
        chosen.local_steps,
        tuple(said),
        chosen.gap,
        start,
        promised,
        sampling,
        tried,
    )


def _compared(case: _Case, model: QuadraticModel, algorithm: Algorithm) -> list[Tried]:
    """Return the settings tried for one algorithm with their predicted errors."""
    unsure: dict[tuple[float, int], float] = {}

    def gap(lr: float, count: int) -> float:
        try:
            errors, unsure[lr, count] = model.errors(
                algorithm, lr=lr, steps=count, rounds=case.rounds, gap=True
            )
        except InputError:  # a client alone overflows in one round
            return np.inf
        return float(errors[-1])

    tried = settings_tried(
        model, algorithm, lr=case.lr, local_steps=case.local_steps, halvings=HALVINGS
    )
    found = search(gap, *tried)
    return [
        Tried(algorithm.name, *pair, end, unsure.get(pair, 0.0))
        for pair, end in sorted(found.items())
    ]


def _prediction(case: _Case, chosen: Tried, start: float, basis: str) -> str:
    cohort = f" of {case.heard.size} of the {len(case.heard.p)} clients" * (
        case.heard.size < len(case.heard.p)
    )
    unsure = f" +- {chosen.standard_error:.1g}" if chosen.standard_error else ""
    return (
        f"After {case.rounds} rounds{cohort} f is expected to be {chosen.gap:.2g}{unsure} above "
        f"its minimum; it starts {start:.2g} above it ({basis})."
    )


def _comparison(chosen: Tried, ends: list[Tried], sampling: float) -> list[str]:
    best = min(ends, key=lambda one: one.gap)
    others = [one for one in ends if one.algorithm != chosen.algorithm or one.gap < chosen.gap]
    listed = "; ".join(f"{one.gap:.2g} by {one}" for one in others)
    lines = [f"The best found for each method: {listed}."] if others else []
    if chosen.gap > SIMPLER * best.gap:
        lines.append(
            f"Such differences do not count: the records fix the minimum itself to {sampling:.2g} "
            "only."
        )
    elif sampling > 0:
        lines.append(f"The records fix the minimum itself to {sampling:.2g}.")
    if best.algorithm == "scaffold" and chosen.algorithm != "scaffold":
        lines.append("SCAFFOLD sends 3 vectors a round and client, the others 2.")
    return lines


def _fewer(chosen: Tried, tried: tuple[Tried, ...]) -> list[str]:
    """Describe the errors with fewer local steps, whose cost is not counted."""
    own = [one for one in tried if one.algorithm == chosen.algorithm]
    known = {one.local_steps for one in own}
    counts = [
        count for count in LOCAL_STEPS[::STRIDE] if count < chosen.local_steps and count in known
    ]
    ends = [
        min((one for one in own if one.local_steps == count), key=lambda one: one.gap)
        for count in counts
    ]
    listed = ", ".join(f"{one.gap:.2g} with {one.local_steps} (lr {one.lr:.2g})" for one in ends)
    return [f"Fewer local steps would leave: {listed}."] if ends else []


def _outlook(case: _Case, chosen: Tried, start: float, steepest: float) -> list[str]:
    limit, lines = 1 / steepest, []
    if chosen.lr >= 2 * limit:
        lines.append(
            f"lr {chosen.lr:.2g} is above 2/L = {2 * limit:.2g} of the steepest client, where "
            "local steps diverge."
        )
    else:
        lowered = ": noise or drift asks for smaller steps" * (
            chosen.lr < 0.9 * limit and case.lr is None
        )
        lines.append(f"1/L is {limit:.2g} for the steepest client{lowered}.")
    if not chosen.gap < start:
        lines.append(
            "Nothing that was tried ends below the start: take larger batches, larger cohorts or "
            "more rounds, or keep the model you have."
        )
    elif chosen.gap > HARDLY * start:
        lines.append(
            "That hardly beats the start: larger batches, larger cohorts or more rounds would help."
        )
    return lines


# By rules of thumb


def _by_rule(case: _Case) -> Advice:
    """Advise by the rules of thumb in the module's docstring, if nothing can be predicted."""
    at, found, rounds = case.at, case.found, case.rounds
    # tr C~
    noise = float(np.diag(case.heard.shares) @ noise_level(case.problem, at.x, found.batch_size))
    lr = (
        min(1 / case.steepest, _gained(case) / (5 * rounds * noise))
        if noise > 0
        else 1 / case.steepest
    )
    lr = case.lr or max(lr, 2.0 ** (1 - HALVINGS) / case.steepest)
    useful = min(LOCAL_STEPS[-1], _useful_steps(at, lr * case.steepest, rounds))
    steps = case.local_steps or useful
    here = Tried("", lr, steps, np.nan, 0.0)
    sampling, kept = _sampling_excess(case, at, here), lr * noise / 4
    allowed, drifting = max(kept, WITHIN * sampling), _drifting(case, lr, steps)
    # fewer local steps may do: then FedAvg is simpler
    if case.local_steps is None and at.unlikeness <= ALIKE:
        while drifting > allowed and steps >= 2 * FEW:
            steps //= 2
            drifting = _drifting(case, lr, steps)
        if drifting > allowed:
            steps, drifting = useful, _drifting(case, lr, useful)
    name = "sgd" if steps == 1 else "fedavg" if drifting <= allowed else "scaffold"
    convex = "f is convex, but no optimum was found" if at.convex else "f is not convex"
    said = [
        _likeness(at),
        f"{convex}: these are rules of thumb from where it was measured, and they promise nothing.",
        f"{steps} local steps make FedAvg drift by {drifting:.2g} in f, noise costs {kept:.2g}, "
        f"and the records fix a minimum to {sampling:.2g}: control variates "
        f"{'are worth' if name == 'scaffold' else 'would not be worth'} their one more vector a "
        "round.",
    ]
    said += _outlook(case, Tried(name, lr, steps, 0.0, 0.0), np.inf, case.steepest)
    return Advice(name, lr, steps, tuple(said), None, None, False, sampling, ())


def _gained(case: _Case) -> float:
    """Return the decrease of f over a short training, by the trapezoidal rule."""
    away = case.problem.layout.flatten(case.problem.params) - case.at.x
    slopes = sum(
        case.heard.p @ client_gradients(case.problem, x) for x in (case.at.x, case.at.x + away)
    )
    steep = case.heard.p @ client_gradients(case.problem, case.at.x + away)
    return max(float(slopes @ away) / 2, float(steep @ steep) / (2 * case.steepest))


def _useful_steps(at: Heterogeneity, lr_times_smoothness: float, rounds: int) -> int:
    if not at.convex:
        return max(1, round(10 / lr_times_smoothness))
    condition = at.smoothness / max(at.mean_mu, 1e-12 * at.smoothness)
    return max(1, round(min(float(np.sqrt(condition)), rounds) / lr_times_smoothness))


def _drifting(case: _Case, lr: float, steps: int) -> float:
    """Return the excess loss caused by FedAvg's drift with so many local steps."""
    look = case.sample
    return _excess(case, case.at, lr * steps, drift(look.problem, case.at.x, look.p, lr, steps))


# Both


def _excess(case: _Case, at: Heterogeneity, travel: float, slope: Floats) -> float:
    """Return the excess loss where grad f = slope, damped by the number of rounds."""
    if not at.convex:
        return float(slope @ slope) / (2 * case.steepest)
    look, damping = case.sample, 1 / (travel * case.rounds)
    return float(slope @ solve(look.problem, at.x, slope, look.p, damping, relative=1e-3)) / 2


def _sampling_excess(case: _Case, at: Heterogeneity, setting: Tried) -> float:
    """Return the mean excess loss when every client resamples its records with replacement."""
    look, rng = case.sample, np.random.default_rng(0)
    errors = [look.p @ redrawn(look.problem, at.x, rng) for _ in range(DRAWS)]
    return float(
        np.mean([_excess(case, at, setting.lr * setting.local_steps, error) for error in errors])
    )


def _likeness(at: Heterogeneity) -> str:
    found = (
        f"Where measured ({at.where}), gradients differ by zeta_1 = {at.zeta_1:.2g} and Hessians "
        f"by {at.zeta_2:.2g}"
    )
    if at.chance == 0:
        return f"{found}."
    if at.unlikeness <= ALIKE:
        return (
            f"{found}; records from one source would give {at.chance:.2g}: gradients differ by "
            "chance only."
        )
    return (
        f"{found}; records from one source would give {at.chance:.2g}: the clients are truly "
        "unlike."
    )

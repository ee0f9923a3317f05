"""Which of SGD, FedAvg and SCAFFOLD to use on a problem, with which step size and number of local steps, and why.

With g = lr, K = local_steps, T rounds to be afforded, L the largest curvature of any client (at the start and where it
was measured), mu and H the mean Hessian's smallest eigenvalue and itself, C~ = sum p_i^2 C_i the mean gradient's noise:

    step          g = 1/L
    local steps   K = 1 / (g sqrt(mu L)), the number that needs the fewest rounds (F10), but at most T / (g L): T rounds
                  cannot tell a direction flatter than 1 / (g K T) from a flat one. Where f is not convex, 10 / (g L)
    excess of u   E(u) = u' (H + I / (g K T))^-1 u / 2, how far f is above its minimum where grad f = u, as far as T
                  rounds can tell; |u|^2 / (2 L) where f is not convex
    drift         FedAvg rests where grad f = -D, D its drift (`expansion.drift`; F19: |D| = g (K-1)/2 drift_rate), that
                  is, E(D) above the minimum                                                        drift_excess
    noise         keeps every method g tr C~ / 4 above it                                           noise_excess
    sampling      other records from the same sources would move grad f by a random e of covariance sum p_i^2 V_i / n_i:
                  the minimum itself is known to E(e) only                                          sampling_excess

SGD where K is 1. FedAvg where its drift is lost in the noise or within half the sampling error: there it does as well,
and sends two vectors a round and client where SCAFFOLD sends three; clients that differ by chance alone may take fewer
local steps for its sake. SCAFFOLD otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.problems.problem import Floats, Problem
from fedscaffold.theory.derivatives import client_gradients, client_products, noise_covariance, solve
from fedscaffold.theory.expansion import drift
from fedscaffold.theory.heterogeneity import SMALL, Heterogeneity
from fedscaffold.theory.samples import looks_at, redrawn

__all__ = ["Advice", "advise"]

WITHIN = 0.5  # share of the sampling error within which a drift does not matter
NEGLIGIBLE = 1e-6  # share of the gap at the start that nobody will see
ALIKE = 1.5  # (zeta_1 / chance)^2 up to which gradients may differ by chance only: then it is 1 on average
FEW = 4  # local steps below which FedAvg gains too little
DRAWS = 3  # of the sampling error


class Advice(NamedTuple):
    """What to use and why; formulas in the module's head."""

    algorithm: str
    """sgd, fedavg or scaffold."""
    lr: float
    local_steps: int
    why: tuple[str, ...]
    """Sentences."""
    drift_excess: float
    noise_excess: float
    sampling_excess: float
    fedavg_bias: float
    """F19: distance of FedAvg's resting point from the optimum, to first order; NaN without one, as the next two."""
    noise_floor: float
    """Distance from the optimum that noise keeps, sqrt(g tr A.C~) (F16); NaN for large d, too."""
    distance: float
    """From the start to the optimum."""

    def __str__(self) -> str:
        steps = "" if self.algorithm == "sgd" else f" and {self.local_steps} local steps"
        return f"Use {self.algorithm} with lr {self.lr:.2g}{steps}.\n" + "\n".join(f"- {line}" for line in self.why)


class _Case(NamedTuple):
    """Where advice is sought."""

    problem: Problem
    p: Floats
    at: Heterogeneity
    lr: float
    local_steps: int
    useful: int
    """Local steps, by the rule."""
    rounds: int
    steepest: float


def advise(
    found: Heterogeneity,
    problem: Problem,
    *,
    rounds: int = 100,
    lr: float | None = None,
    local_steps: int | None = None,
) -> Advice:
    """Say which algorithm to use on `problem`, from what `heterogeneity` found; `rounds` are those to be afforded.

    >>> import fedscaffold as fs
    >>> from fedscaffold.theory.heterogeneity import heterogeneity
    >>> unlike = fs.problems.dialled(5, 4, gradient_dissimilarity=9.0, hessian_dissimilarity=0.1, seed=1)
    >>> advise(heterogeneity(unlike), unlike).algorithm
    'scaffold'
    """
    at = found.later or found
    steepest = max(at.smoothness, found.start_smoothness)
    step = 1 / steepest if lr is None else checks.number("lr", lr, above=0)
    useful = _useful_steps(at, step * steepest, checks.whole("rounds", rounds))
    steps = useful if local_steps is None else checks.whole("local_steps", local_steps)
    look = looks_at(problem, found.weights, False, np.random.default_rng(0)).mean
    case = _Case(look.problem, look.p, at, step, steps, useful, rounds, steepest)
    noise = step * at.noise * float(found.weights @ found.weights) / 4
    sampling = float(np.mean([_excess(case, error) for error in _sampling_errors(case)]))
    allowed = max(noise, WITHIN * sampling, NEGLIGIBLE * _gap(problem, at))
    drifting = _drifting(case, steps)
    if local_steps is None and at.unlikeness <= ALIKE:  # fewer local steps may do: then FedAvg is the simpler choice
        while drifting > allowed and steps >= 2 * FEW:
            steps //= 2
            drifting = _drifting(case, steps)
        if drifting > allowed:
            steps, drifting = useful, _drifting(case, useful)
    name = "sgd" if steps == 1 else "fedavg" if drifting <= allowed else "scaffold"
    why = (_likeness(at), _reason(name, steps, drifting, noise, sampling), *_settings(name, case, steps))
    return Advice(name, step, steps, why, drifting, noise, sampling, *_distances(problem, at, step, steps))


def _useful_steps(at: Heterogeneity, lr_times_smoothness: float, rounds: int) -> int:
    if not at.convex:
        return max(1, round(10 / lr_times_smoothness))
    condition = at.smoothness / max(at.mean_mu, 1e-12 * at.smoothness)
    return max(1, round(min(float(np.sqrt(condition)), rounds) / lr_times_smoothness))


def _drifting(case: _Case, steps: int) -> float:
    """How far above the minimum FedAvg rests with so many local steps."""
    return _excess(case, drift(case.problem, case.at.x, case.p, case.lr, steps))


def _excess(case: _Case, slope: Floats) -> float:
    if not case.at.convex:
        return float(slope @ slope) / (2 * case.steepest)
    damping = 1 / (case.lr * case.local_steps * case.rounds)
    return float(slope @ solve(case.problem, case.at.x, slope, case.p, damping, relative=1e-3)) / 2


def _sampling_errors(case: _Case) -> list[Floats]:
    """Changes of grad f when every client draws as many records anew, with replacement, from those it has."""
    rng = np.random.default_rng(0)
    return [case.p @ redrawn(case.problem, case.at.x, rng) for _ in range(DRAWS)]


def _gap(problem: Problem, at: Heterogeneity) -> float:
    """How far f at the start is above its minimum, to second order; 0 where that is not known."""
    if at.where != "the optimum":
        return 0.0
    away = problem.layout.flatten(problem.params) - at.x
    return float(away @ (at.weights @ client_products(problem, at.x, away))) / 2


def _distances(problem: Problem, at: Heterogeneity, lr: float, steps: int) -> tuple[float, float, float]:
    """FedAvg's bias, the noise floor, and the distance from the start."""
    if at.where != "the optimum" or at.mean_mu <= 0:
        return np.nan, np.nan, np.nan
    p, rows = at.weights, client_gradients(problem, at.x)
    turned = p @ client_products(problem, at.x, rows) - p @ client_products(problem, at.x, p @ rows)
    bias = lr * (steps - 1) / 2 * float(np.linalg.norm(solve(problem, at.x, turned, p)))
    floor = np.nan
    if problem.dim <= SMALL:
        noise = np.tensordot(p * p, noise_covariance(problem, at.x, at.batch_size), 1)
        columns = np.stack([solve(problem, at.x, column, p) for column in noise])
        floor = float(np.sqrt(lr * np.trace(columns) / 2))  # tr A.C = tr(H^-1 C) / 2
    return bias, floor, float(np.linalg.norm(problem.layout.flatten(problem.params) - at.x))


def _likeness(at: Heterogeneity) -> str:
    found = f"Where measured ({at.where}), gradients differ by zeta_1 = {at.zeta_1:.2g} and Hessians by {at.zeta_2:.2g}"
    if at.chance == 0:
        return f"{found}."
    if at.unlikeness <= ALIKE:
        return f"{found}; records from one source would give {at.chance:.2g}: gradients differ by chance only."
    return f"{found}; records from one source would give {at.chance:.2g}: the clients are truly unlike."


def _reason(name: str, steps: int, drifting: float, noise: float, sampling: float) -> str:
    if name == "sgd":
        return "So well conditioned a problem gains nothing from local steps: take one step on all data a round."
    scales = f"noise keeps it {noise:.2g} above, and the records fix the minimum to {sampling:.2g}"
    halts = f"{steps} local steps make FedAvg halt {drifting:.2g} above the minimum by its drift; {scales}"
    if name == "fedavg":
        return f"{halts}: control variates would gain nothing, and FedAvg sends 2 vectors a round, SCAFFOLD 3."
    return f"{halts}: SCAFFOLD's control variates are worth their one more vector a round."


def _settings(name: str, case: _Case, steps: int) -> list[str]:
    at, lr, limit = case.at, case.lr, 1 / case.steepest
    lines = [f"lr {lr:.2g}: 1/L is {limit:.2g} for the steepest client."]
    if lr >= 2 * limit:
        lines = [
            f"lr {lr:.2g} is above 2/L = {2 * limit:.2g} of the steepest client and will diverge; take {limit:.2g}."
        ]
    if name != "sgd":
        rule = f"mu = {at.mean_mu:.2g} makes" if at.convex else "lr K L = 10, where f is not convex, makes"
        fewer = "; as many as FedAvg's drift allows" if steps < case.local_steps else ""
        lines.append(f"{steps} local steps: {rule} {case.useful} useful with {case.rounds} rounds to spend{fewer}.")
    if at.noise > 0 and name != "sgd":
        lines.append("Half the lr and twice the local steps would halve what the noise costs, in as many rounds.")
    if not at.convex:
        lines.append("f is not convex: the numbers describe where they were measured, and promise nothing elsewhere.")
    return lines

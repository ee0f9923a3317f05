"""Quadratic model for plans and advice, and the error of a run on it for any cohorts.

    quadratics      themselves: every number is exact (F4-F7, and `second_moments.py` for cohorts
                    and weights)
    smooth          the quadratic model at the optimum: Hessians, gradients and noise of every
                    client there. Far from the optimum that model does not bind the problem, so
                    nothing that rests on it is promised
    large           the mean of a run on few directions, the noise as that of equal clients
                    (`krylov.py`)

Where the exact second moments cost too much, the error is estimated from runs drawn on the same
quadratics, with the same draws for every setting that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import work_of
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.problems.quadratic import quadratic
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import resolve
from fedscaffold.simulation.compatibility import refuse
from fedscaffold.theory.cohorts import Cohorts, cohort_moments
from fedscaffold.theory.derivatives import client_gradients, client_hessians, noise_covariance
from fedscaffold.theory.error_dynamics import exact_errors
from fedscaffold.theory.krylov import EXACT, Reduced, reduce, spread
from fedscaffold.theory.quadratics import Spectra, spectra
from fedscaffold.theory.round_map import Form, client_quadratics, closed_form, is_quadratic
from fedscaffold.theory.second_moments import Noise, Run, drawn_curve
from fedscaffold.theory.subsampling import Look, client_ends

__all__ = [
    "LOCAL_STEPS",
    "STRIDE",
    "QuadraticModel",
    "cohorts_of",
    "model_of",
    "search",
    "settings_tried",
]

LOCAL_STEPS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 1000)
# N^2 d^3 and N d^3 up to which second moments are exact
EXACT_MEMORY, EXACT_FORGETFUL = 3_000_000, 10_000_000
RUNS = 64  # drawn where they are not
STRIDE = 4  # of the coarse grid that a search starts from
STARTS = 2  # points of it from which the search goes downhill


class QuadraticModel(NamedTuple):
    """The quadratics, the cohorts and the noise."""

    problem: Problem
    spectra: Spectra
    """Of `problem`."""
    heard: Cohorts
    noise: Noise | None
    """None if it is in `reduced`."""
    exact: bool
    why: str
    """Basis of a prediction, in words."""
    steepest: float
    """L, at the optimum and at the start."""
    reduced: Reduced | None
    dim: int
    """Of the modelled problem."""

    def _drawn(self, form: Form) -> bool:
        """Return whether errors are estimated from simulated runs, as exact ones cost much."""
        n, d = self.problem.num_clients, self.problem.dim
        most = EXACT_MEMORY / n if form.memory else EXACT_FORGETFUL
        return not self.heard.plain and n * d**3 > most

    def promise(self, algorithm: Algorithm) -> tuple[bool, str]:
        """Return whether the prediction for an algorithm is exact, and its basis."""
        if self._drawn(closed_form(algorithm)):
            return (
                False,
                f"{self.why}; too large for exact moments, estimated from {RUNS} drawn runs: no "
                "promise",
            )
        return self.exact, self.why if self.exact else f"{self.why}: no promise"

    def errors(
        self, algorithm: Algorithm, *, lr: float, steps: int, rounds: int, gap: bool
    ) -> tuple[Floats, float]:
        """Return E|x - x*|^2, or E f(x) - f(x*), and the last one's standard error.

        The errors are those after 0 .. rounds rounds.
        """
        run = Run(
            spectra=self.spectra,
            cohorts=self.heard,
            start=self.problem.layout.flatten(self.problem.params),
            form=closed_form(algorithm),
            lr=lr,
            steps=np.full(self.problem.num_clients, steps),
            rounds=rounds,
            noise=self.noise,
        )
        drawn = self._drawn(run.form)
        errors, unsure = drawn_curve(run, gap, RUNS) if drawn else (exact_errors(run, gap), 0.0)
        if self.reduced is not None:
            errors = errors + spread(self.reduced, lr=lr, local_steps=steps, rounds=rounds, gap=gap)
        return errors, unsure


def settings_tried(
    model: QuadraticModel,
    algorithm: Algorithm,
    *,
    lr: float | None,
    local_steps: int | None,
    halvings: int,
) -> tuple[list[float], list[int]]:
    """Return the step sizes and numbers of local steps to try; those that are given are kept.

    Step sizes are 1/L and its halves.
    """
    lrs = [2.0**-k / model.steepest for k in range(halvings)] if lr is None else [lr]
    asked = LOCAL_STEPS if local_steps is None else (local_steps,)
    return lrs, list(dict.fromkeys(work_of(algorithm, steps).steps for steps in asked))


def cohorts_of(
    problem: Problem, algorithms: Sequence[Algorithm], cohort: float | int, weights: ArrayLike
) -> Cohorts:
    """Return the cohorts, validated as `simulate` does for each of the algorithms.

    >>> import fedscaffold as fs
    >>> cohorts_of(fs.problems.quadratic(num_clients=10, dim=2), [fs.fedavg()], 0.2, "equal").size
    2
    """
    p, size = weights_of(problem, weights), 0
    for algorithm in algorithms:
        config = RunConfig(algorithm, problem, rounds=1, local_steps=1, cohort=cohort)
        size = resolve.cohort_size(config)
        refuse(config, resolve.local_work(config).steps, size, scheduled=False)
    return cohort_moments(p, size)


def model_of(
    problem: Problem, best: Floats, batch_size: int | float | None, heard: Cohorts
) -> QuadraticModel:
    """Return the problem as quadratics: itself, or its model at the optimum `best`."""
    start = problem.layout.flatten(problem.params)
    steepest = 0.0 if is_quadratic(problem) else _steepest(problem, start)
    why = "quadratic model at the optimum, far from which the curvature differs"
    if problem.num_clients * problem.dim**3 > EXACT:
        small = reduce(problem, best, batch_size, heard)
        steepest = max(steepest, _steepest(problem, best))
        left = f"too large to be exact, followed in {small.problem.dim} of {problem.dim} directions"
        why = left if is_quadratic(problem) else f"{why}; {left}"
        near = small.problem
        return QuadraticModel(
            near, spectra(near), heard, None, False, why, steepest, small, problem.dim
        )
    noise = Noise(*(noise_covariance(problem, best, size) for size in (batch_size, None)))
    exact = False
    if is_quadratic(problem):
        hessians, linear = client_quadratics(problem)
        exact = batch_size is None or bool((problem.counts == 1).all())
        why = (
            "exact for quadratics (F4-F7)"
            if exact
            else "noise of batches taken at the optimum, far from which it is larger"
        )
    else:
        hessians = client_hessians(problem, best)
        linear = hessians @ best - client_gradients(problem, best)
    near = quadratic(hessians=hessians, linear=linear, x0=start)
    steepest = max(steepest, near.smoothness or 0.0)
    return QuadraticModel(
        near, spectra(near), heard, noise, exact, why, steepest, None, problem.dim
    )


def search(
    cost: Callable[[float, int], float], lrs: Sequence[float], steps: Sequence[int]
) -> dict[tuple[float, int], float]:
    """Search a grid for the pair of least cost: coarsely first, then downhill from the best points.

    Returns every pair tried and its cost.

    >>> tried = search(lambda lr, steps: abs(lr - 5) + abs(steps - 9), range(10), range(20))
    >>> min(tried, key=tried.get), len(tried) < 100
    ((5, 9), True)
    """
    known: dict[tuple[int, int], float] = {}

    def at(i: int, j: int) -> float:
        if (i, j) not in known:
            known[i, j] = cost(lrs[i], steps[j])
        return known[i, j]

    coarse = [(i, j) for i in range(0, len(lrs), STRIDE) for j in range(0, len(steps), STRIDE)]
    for start in sorted(coarse, key=lambda place: at(*place))[:STARTS]:
        here, stride = start, STRIDE // 2
        while stride:
            i, j = here
            around = [(i + a * stride, j + b * stride) for a in (-1, 0, 1) for b in (-1, 0, 1)]
            around = [(i, j) for i, j in around if 0 <= i < len(lrs) and 0 <= j < len(steps)]
            best = min(around, key=lambda place: at(*place))
            here, stride = (best, stride) if at(*best) < at(*here) else (here, stride // 2)
    return {(lrs[i], steps[j]): value for (i, j), value in known.items()}


def _steepest(problem: Problem, x: Floats) -> float:
    """Return the largest eigenvalue of any client's Hessian at x."""
    p = np.full(problem.num_clients, 1 / problem.num_clients)
    _, high, _, above = client_ends(
        Look(problem, p, np.arange(len(p)), np.ones_like(p)), x, np.random.default_rng(0)
    )
    return float((high + above).max())

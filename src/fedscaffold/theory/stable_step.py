"""The largest stable step size for a problem and, if curvature varies, at a point.

    quadratics     the least lr at which the spectral radius of a round with all clients reaches 1,
                   if there are not too many; else 2 / L beside the radius itself
    else           2 / lambda, lambda the largest eigenvalue of any client's Hessian at x: with
                   larger steps two local runs of that client move apart. For methods of one step a
                   round, of the mean Hessian
    L known        2 / L, where lr is below it: no curvature anywhere is larger, and nothing need be
                   measured

A radius below 1 is proved for noiseless rounds that hear everybody; sampling and noise may ask for
smaller steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import work_of
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.theory.declared_form import has_declared_form
from fedscaffold.theory.quadratics import Overflows, Spectra, linear_round, spectra
from fedscaffold.theory.rates import DENSE, spectral_radius
from fedscaffold.theory.round_map import SCAFFOLD, Form, a_problem, is_quadratic
from fedscaffold.theory.subsampling import client_ends, looks_at, mean_ends, passes

__all__ = ["StableStep", "stable_step"]

FACTOR = 1.25  # between two step sizes that are tried on the way up
BISECTIONS = 10  # to 3e-4
# (N + 1) d up to which the largest step is looked for: it takes the eigenvalues of a dozen rounds
SEARCHED = 250
# a radius of 1 belongs to directions without curvature; rounding may lift it by so much
FLAT = 1e-9


class StableStep(NamedTuple):
    """Result of `stable_step`."""

    lr: float
    """The largest stable step size; infinite without curvature."""
    source: str
    """"spectral radius", "2/L", or "curvature at x"."""
    radius: float | None
    """Spectral radius of a round at the given step size, if known exactly."""

    @property
    def unstable(self) -> bool | None:
        """Whether the given step size is provably too large; None if nothing is proved."""
        return None if self.radius is None else self.radius > 1 + FLAT


def stable_step(
    problem: Problem,
    *,
    lr: float,
    local_steps: int,
    algorithm: Algorithm = SCAFFOLD,
    at: Floats | None = None,
    exact: bool = True,
) -> StableStep:
    """Return the largest stable step size for a number of local steps.

    Args:
        problem: The problem.
        lr: The step size whose stability is asked for.
        local_steps: Number of local steps.
        algorithm: The algorithm. If it does not have the form that it declares, only the curvature
            is used.
        at: Point of the curvature; the problem's start by default.
        exact: Whether the exact theory of quadratics may be used.

    >>> import fedscaffold as fs
    >>> pair = fs.problems.quadratic(hessians=[[[1.0]], [[4.0]]], linear=[[1.0], [0.0]])
    >>> found = stable_step(pair, lr=0.1, local_steps=1, algorithm=fs.fedavg())
    >>> round(found.lr, 2), found.source, round(found.radius, 12)  # 2 over the mean curvature, 2.5
    (0.8, 'spectral radius', 0.75)
    >>> stable_step(pair, lr=0.1, local_steps=9).lr > 2 / 4  # where one client alone would diverge
    True
    """
    lr, steps = checks.number("lr", lr, above=0), checks.whole("local_steps", local_steps)
    form = algorithm.form if exact and is_quadratic(a_problem(problem)) else None
    if form is not None and has_declared_form(algorithm):
        known = spectra(problem)
        size, radius = known.dim + known.values.size, None
        if size <= DENSE:
            radius = _radius(known, form, lr, steps)
        if size <= SEARCHED:
            return StableStep(_boundary(known, form, steps), "spectral radius", radius)
        steepest = (
            float(known.values.max())
            if not form.one_step
            else _steepest(problem, np.zeros(known.dim), True)
        )
        return StableStep(2 / steepest if steepest > 0 else np.inf, "2/L", radius)
    smoothness, one_step = problem.smoothness, work_of(algorithm, 2).steps == 1
    if smoothness is not None and lr * smoothness < 2 and not one_step:
        return StableStep(2 / smoothness, "2/L", None)
    point = problem.layout.flatten(problem.params) if at is None else np.asarray(at, np.float64)
    steepest = _steepest(problem, point, one_step)
    return StableStep(2 / steepest if steepest > 0 else np.inf, "curvature at x", None)


def _radius(known: Spectra, form: Form, lr: float, steps: int) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            one = linear_round(known, form, lr=lr, local_steps=1 if form.one_step else steps)
        except Overflows:
            # the search for the largest step meets it with many local steps, however small lr is
            return np.inf
        if np.isfinite(one.lag).all() and np.isfinite(one.upsilon).all():
            return spectral_radius(one)
        return np.inf


def _boundary(known: Spectra, form: Form, steps: int) -> float:
    """Return the least lr with a radius above 1, searched from below.

    Larger ones may be stable again.
    """
    steepest = float(known.values.max())
    if steepest <= 0:
        return np.inf
    low = 2 / steepest / max(1.0, form.server_lr)  # with server_lr of at most 1 all below is stable
    while _radius(known, form, low, steps) > 1 + FLAT and low * steepest > 1e-9:
        low /= 2
    high = low
    while _radius(known, form, high, steps) <= 1 + FLAT:
        low, high = high, high * FACTOR
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _radius(known, form, middle, steps) <= 1 + FLAT else (low, middle)
        )
    return low


def _steepest(problem: Problem, x: Floats, of_mean: bool) -> float:
    """Return the largest eigenvalue of any client's Hessian at x, or of their mean.

    Large problems are sampled.
    """
    rng = np.random.default_rng(0)
    looks = looks_at(problem, weights_of(problem, "equal"), False, rng)
    if of_mean:
        ends, _ = mean_ends(looks.mean, x, passes(looks.mean, 20), rng)
        return float(ends[1])
    return max(float(client_ends(look, x, rng)[1].max()) for look in looks.near)

"""The law of a run with noisy gradients on quadratics: exact mean squared errors, any H at once.

With noise eps_c^h of covariance C_c on every local gradient, client c ends its H steps off by gamma
E_c (F1, F5),

    E_c = sum_{h=1}^H Gamma_c^(H-h) eps_c^h
    Sigma_eps^c = Cov E_c = sum_{h<H} Gamma_c^h C_c Gamma_c^h

and a round adds to (u, r) of `quadratics.py`, r_c = gamma H (xi_c - xi_c*), with e_c = gamma E_c,

    u+ = ... - eta_g mean e_i,    r_c+ = ... - (e_c - mean e_i)

In the eigenbasis of A_c the (j, k) entry of Sigma_eps^c is C_jk (1 - (f_j f_k)^H) / (1 - f_j f_k),
f = 1 - gamma a. Option I remembers a gradient at x with noise of its own: a second source, into r.

All of this is for rounds that hear every client with equal weight. Where cohorts are drawn at
random, or weights or numbers of local steps differ, `mean_squared_error` follows
`second_moments.py` instead.

Symbols: gamma = lr, H = local_steps, eta_g = server_lr, C = noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.problems.records import reals
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import resolve
from fedscaffold.simulation.compatibility import refuse
from fedscaffold.theory.cohorts import cohort_moments
from fedscaffold.theory.quadratics import LinearRound, Spectra, geometric, linear_round, spectra
from fedscaffold.theory.rates import bias_of
from fedscaffold.theory.round_map import SCAFFOLD, Form, a_problem, closed_form
from fedscaffold.theory.second_moments import Noise, Run, error_curve, root

__all__ = ["Chain", "Source", "chain", "exact_errors", "mean_squared_error", "started", "walked"]


class Source(NamedTuple):
    """Noise e_c, fresh every round.

    It enters as u+ = .. - to_u mean e_i and r_c+ = .. - to_r (e_c - mean e_i).
    """

    covariance: Floats
    """(N, d, d) of the e_c, in the clients' own coordinates."""
    to_u: float
    to_r: float


class Chain(NamedTuple):
    """A run with noise as a Markov chain of (u, r) around its stationary mean."""

    spectra: Spectra
    one: LinearRound
    sources: tuple[Source, ...]
    fixed: Floats
    """The stationary mean of x."""

    def start(self, x0: Floats) -> tuple[Floats, Floats]:
        """Return (u, r) of a run that starts at x0 with all control variates at zero."""
        remembered = (
            self.one.travel * self.spectra.xi
            if self.one.form.memory
            else np.zeros_like(self.spectra.xi)
        )
        return (x0 - self.fixed)[:, None], -remembered[:, None]


def started(x0: ArrayLike | None, problem: Problem) -> Floats:
    """Return the start of a run as a flat vector: x0, or the problem's own parameters."""
    given = problem.layout.flatten(problem.params) if x0 is None else np.asarray(x0, np.float64)
    if given.shape != (problem.dim,) or not np.isfinite(given).all():
        raise InputError(f"x0 must be {problem.dim} finite numbers, got shape {given.shape}")
    return given


def chain(
    problem: Problem,
    *,
    lr: float,
    local_steps: int,
    noise: ArrayLike,
    algorithm: Algorithm,
    noise_at_x: ArrayLike | None = None,
) -> Chain:
    """Return the chain of `algorithm` on quadratics, with gradient covariance `noise`.

    `noise_at_x` is that of the gradient at x which option I remembers; the same unless given.

    >>> import fedscaffold as fs
    >>> pair = fs.problems.lower_bound_pair()
    >>> made = chain(pair, lr=0.1, local_steps=2, noise=1.0, algorithm=fs.scaffold())
    >>> made.sources[0].covariance.ravel()
    array([0.0164, 0.02  ])
    """
    given = spectra(problem)
    return _chain(given, closed_form(algorithm), lr, local_steps, _noise(given, noise, noise_at_x))


def _chain(given: Spectra, form: Form, lr: float, local_steps: int, noise: Noise | None) -> Chain:
    one = linear_round(given, form, lr=lr, local_steps=local_steps)
    fixed = given.optimum + bias_of(given, one)
    if noise is None:
        return Chain(given, one, (), fixed)
    turned = np.swapaxes(given.vectors, 1, 2) @ noise.step @ given.vectors
    sources = [Source(turned * walked(one), form.server_lr, float(form.memory and not form.at_x))]
    if form.memory and form.at_x:
        still = np.swapaxes(given.vectors, 1, 2) @ noise.at_x @ given.vectors
        sources.append(Source(one.travel**2 * still, 0.0, 1.0))
    return Chain(given, one, tuple(sources), fixed)


def walked(one: LinearRound) -> Floats:
    """Return (N, d, d) Cov(e_c)_jk / C_jk, in the eigenbasis of A_c.

    It is the effect of the local steps on C_c.

    >>> import fedscaffold as fs
    >>> pair = spectra(fs.problems.lower_bound_pair())
    >>> walked(linear_round(pair, closed_form(fs.scaffold()), lr=0.1, local_steps=2)).ravel()
    array([0.0164, 0.02  ])
    """
    w = one.rates
    pair = w[:, :, None] + w[:, None, :] - w[:, :, None] * w[:, None, :]  # 1 - f_j f_k
    gain: Floats = (one.travel / one.steps) ** 2 * geometric(pair, one.steps)
    return gain


def mean_squared_error(
    problem: Problem,
    *,
    lr: float,
    local_steps: int | ArrayLike,
    noise: ArrayLike,
    rounds: int,
    x0: ArrayLike | None = None,
    algorithm: Algorithm = SCAFFOLD,
    cohort: float | int = 1.0,
    weights: str | ArrayLike = "equal",
    noise_at_x: ArrayLike | None = None,
    gap: bool = False,
) -> Floats:
    """Return the exact E|x^t - x*|^2 for t = 0 .. rounds (F4, F5).

    The run starts at x0 with control variates zero. `cohort` (a share or a number of clients, drawn
    at random every round), `weights` and `local_steps` (one number, or one a client) are those of
    `simulate`; `noise` is the covariance of every gradient, `noise_at_x` that of the one which
    option I remembers, the same unless given. With `gap` the error is the excess loss, E f(x^t) -
    f(x*).

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(hessians=[[[1.0]], [[0.25]]], linear=[[1.0], [-0.5]])
    >>> steps = {"lr": 0.2, "local_steps": 4}
    >>> errors = mean_squared_error(problem, **steps, noise=[[[1.0]], [[0.5]]], rounds=200)
    >>> errors[[0, 1, 200]].round(6)
    array([0.16    , 0.124648, 0.064902])
    >>> mean_squared_error(problem, **steps, noise=0.0, rounds=2, cohort=1, gap=True).round(6)
    array([0.05    , 0.098543, 0.067807])
    """
    form, p = closed_form(algorithm), weights_of(a_problem(problem), weights)
    config = RunConfig(algorithm, problem, rounds=1, local_steps=local_steps, lr=lr, cohort=cohort)  # type: ignore[arg-type]
    steps, size = resolve.local_work(config).steps, resolve.cohort_size(config)
    refuse(config, steps, size, scheduled=False)
    # the server scales by how far each went
    if exchange(algorithm).travel and (steps != steps[0]).any():
        raise InputError(
            f"{algorithm.name} with unequal local steps has no closed form here: simulate it"
        )
    given = spectra(problem)
    run = Run(
        spectra=given,
        cohorts=cohort_moments(p, size),
        start=started(x0, problem),
        form=form,
        lr=checks.number("lr", lr, above=0),
        steps=steps,
        rounds=checks.whole("rounds", rounds),
        noise=_noise(given, noise, noise_at_x),
    )
    return exact_errors(run, gap)


def _noise(given: Spectra, noise: ArrayLike, noise_at_x: ArrayLike | None) -> Noise:
    shape = (given.num_clients, given.dim, given.dim)
    step = np.broadcast_to(_covariances(noise, given), shape)
    return Noise(
        step,
        step if noise_at_x is None else np.broadcast_to(_covariances(noise_at_x, given), shape),
    )


def exact_errors(run: Run, gap: bool) -> Floats:
    """Return the exact E u' W u after 0 .. rounds rounds; see `Run.measure` for W."""
    if run.cohorts.plain and (run.steps == run.steps[0]).all():
        return _of_chain(run, gap)
    return error_curve(run, gap)


def _of_chain(run: Run, gap: bool) -> Floats:
    """Return the errors where all clients have equal weight.

    The covariance of u after t rounds is the sum over k < t of W_k' B W_k.

    W_k is the transposed round applied k times to (root of the measure, 0), B the covariance of
    what a round adds.
    """
    given = run.spectra
    law = _chain(given, run.form, run.lr, int(run.steps[0]), run.noise)
    off = (law.fixed - given.optimum)[:, None]
    u, r = law.start(run.start)
    half = root(given.mean(given.values)[None] / 2)[0] if gap else np.eye(len(off))
    back_u, back_r = half, np.zeros((r.size, len(off)))
    curve, spread = np.empty(run.rounds + 1), 0.0
    curve[0] = np.sum((half.T @ (u + off)) ** 2)
    noisy = any(source.covariance.any() for source in law.sources)
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(1, run.rounds + 1):
            u, r = law.one.forward(u, r)
            if noisy:
                spread += sum(_trace(law.one, source, back_u, back_r) for source in law.sources)
                back_u, back_r = law.one.backward(back_u, back_r)
            curve[t] = np.sum((half.T @ (u + off)) ** 2) + spread
    return np.where(np.isfinite(curve), curve, np.inf)


def _trace(one: LinearRound, source: Source, back_u: Floats, back_r: Floats) -> float:
    """Return tr(W' B W) of the noise added in a round.

    The rows of W for r sum to zero over clients.
    """
    push = source.to_u / one.num_clients * (one.basis.T @ back_u) + source.to_r * back_r
    push = push.reshape(source.covariance.shape[0], source.covariance.shape[1], -1)
    return float(np.sum(push * (source.covariance @ push)))


def _covariances(noise: ArrayLike, given: Spectra) -> Floats:
    """Return (N, d, d) or (1, d, d) covariances, from a variance or from matrices."""
    n, d = given.num_clients, given.dim
    covariance = reals("noise", noise)
    if not np.isfinite(covariance).all():
        raise InputError("noise must be finite, got NaN or infinite values")
    if covariance.ndim == 0:
        covariance = covariance * np.eye(d)
    if covariance.shape not in ((d, d), (n, d, d)):
        raise InputError(
            f"noise must be a variance, one ({d}, {d}) covariance, or ({n}, {d}, {d}), got shape "
            f"{covariance.shape}"
        )
    stacked = covariance.reshape(-1, d, d)
    level = 1e-10 * np.abs(stacked).max()
    if (np.linalg.eigvalsh(stacked) < -level).any() or (
        np.abs(stacked - np.swapaxes(stacked, 1, 2)) > level
    ).any():
        raise InputError(
            "noise must be a variance or a covariance: symmetric without negative eigenvalues"
        )
    return stacked

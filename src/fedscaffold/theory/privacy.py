"""What privacy costs: the noise that a budget needs, and the error that the noise leaves.

The private gradient of client i, with n_i records drawn with probability q_i, is its gradient plus
noise of covariance

    (noise C / (q_i n_i))^2 I  +  (1 - q_i) / (q_i n_i^2) sum_r g_r g_r^T

from the mechanism and from the sampling of records, as long as no gradient g_r is clipped. The
first part is constant; the second depends on x, and is taken at the optimum. On quadratics the
stationary law with this noise is exact where all records are drawn (q = 1), and to first order in
the step size otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import noise_for
from fedscaffold.privacy.records import Records
from fedscaffold.problems.batches import record_gradients
from fedscaffold.problems.problem import Floats, Problem, weights_of
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import resolve
from fedscaffold.simulation.program import prepare
from fedscaffold.theory.derivatives import find_optimum
from fedscaffold.theory.round_map import is_quadratic
from fedscaffold.theory.stationary import stationary

__all__ = [
    "PrivacyCost",
    "batch_covariance",
    "noise_deviation",
    "privacy_cost",
    "private_covariance",
    "record_norms",
    "share_clipped",
    "stationary_errors",
]


class PrivacyCost(NamedTuple):
    """What an epsilon costs."""

    epsilon: float
    noise: float
    """The least noise multiplier."""
    errors: dict[str, float] | None
    """Root mean squared distance to the optimum in the long run, by algorithm; None where it is
    not known: the problem is not quadratic, or a step size is not stable."""
    clipped: float
    """Share of the records whose gradient at the optimum is longer than the clip; NaN if there is
    no optimum to look at."""


def privacy_cost(
    config: RunConfig,
    epsilons: Sequence[float],
    algorithms: Sequence[Algorithm] = (scaffold(), fedavg()),
) -> list[PrivacyCost]:
    """Return what each epsilon costs in a run.

    Args:
        config: The run. Its rounds, local steps, batch size, cohorts, clip and delta are kept, and
            its noise is replaced.
        epsilons: The budgets.
        algorithms: The algorithms whose errors are compared.

    Raises:
        InputError: The run is not private.

    >>> import fedscaffold as fs
    >>> rng = np.random.default_rng(0)
    >>> problem = fs.problems.linear([(rng.normal(size=(60, 2)), rng.normal(size=60))] * 2, l2=0.1)
    >>> private = fs.privacy.records(clip=5.0, noise=1.0, delta=1e-5)
    >>> config = fs.RunConfig(
    ...     fs.scaffold(), problem, rounds=20, local_steps=2, lr=0.1, privacy=private
    ... )
    >>> dear, cheap = privacy_cost(config, [1.0, 8.0])
    >>> dear.noise > cheap.noise, dear.errors["scaffold"] > cheap.errors["scaffold"]
    (True, True)
    """
    if config.privacy is None:
        raise InputError("privacy_cost is of a private run: give privacy=fs.privacy.records(...)")
    found = []
    for wanted in epsilons:
        noise = _noise_for(config, wanted)
        private = replace(config, privacy=replace(config.privacy, noise=noise))
        errors, clipped = stationary_errors(private, algorithms), share_clipped(private)
        found.append(PrivacyCost(wanted, noise, errors, clipped))
    return found


def _noise_for(config: RunConfig, epsilon: float) -> float:
    """Return the noise that keeps every client within an epsilon."""
    assert config.privacy is not None
    with jax.enable_x64(config.precision == "float64"):
        budget = prepare(replace(config, privacy=replace(config.privacy, noise=1.0))).budget
    assert budget is not None
    steps, most, found = budget.steps(config.rounds), 0, 0.0
    for i in np.lexsort((-steps, -budget.rates)):
        if steps[i] > most:
            most, rate = int(steps[i]), float(budget.rates[i])
            needed = noise_for(epsilon=epsilon, rate=rate, steps=most, delta=config.privacy.delta)
            found = max(found, needed)
    return found


def stationary_errors(
    config: RunConfig, algorithms: Sequence[Algorithm] = (scaffold(), fedavg())
) -> dict[str, float] | None:
    """Return the root mean squared distance to the optimum in the long run, by algorithm.

    None where it is not known: whole clients are private, whose noise adds up in c; the problem is
    not quadratic; or a step size is not stable.
    """
    lr = config.lr
    if not isinstance(config.privacy, Records) or not isinstance(lr, (int, float)):
        return None
    if not is_quadratic(config.problem):
        return None
    optimum = np.asarray(config.problem.optimum(config.weights), float)
    covariance, errors = private_covariance(config), {}
    for algorithm in algorithms:
        try:
            law = stationary(
                config.problem,
                lr=lr,
                local_steps=int(np.max(resolve.local_work(config).steps)),
                noise=covariance,
                algorithm=algorithm,
            )
        except InputError:
            return None
        square = float(((law.x_mean - optimum) ** 2).sum() + np.trace(law.x_covariance))
        errors[algorithm.name] = square**0.5
    return errors


def share_clipped(config: RunConfig) -> float:
    """Return the share of records that are clipped at the optimum; NaN if it is not known."""
    if not isinstance(config.privacy, Records) or config.problem.facts.optimum is None:
        return np.nan
    norms = record_norms(config.problem, config.problem.optimum(config.weights))
    return float((norms > config.privacy.clip).mean())


def noise_deviation(config: RunConfig) -> Floats:
    """Return noise C / (q_i n_i): the (N,) deviations of the mechanism's noise in a gradient."""
    private = config.privacy
    assert isinstance(private, Records)
    found: Floats = (
        private.noise * private.clip / (resolve.poisson_rates(config) * config.problem.counts)
    )
    return found


def private_covariance(config: RunConfig) -> Floats:
    """Return the (N, d, d) covariances of the private gradients at the optimum."""
    mechanism = noise_deviation(config)[:, None, None] ** 2 * np.eye(config.problem.dim)
    return mechanism + batch_covariance(config, resolve.poisson_rates(config))


def batch_covariance(config: RunConfig, rates: float | Floats) -> Floats:
    """Return (1 - q_i) / (q_i n_i^2) sum_r g_r g_r^T, of Poisson batches, for clipped g_r at x*."""
    problem, private = config.problem, config.privacy
    assert isinstance(private, Records)
    best = np.asarray(find_optimum(problem, weights_of(problem, config.weights)), float)
    products = np.zeros((problem.num_clients, problem.dim, problem.dim))
    for i, rows in enumerate(_record_gradients(problem, best)):
        norms = np.linalg.norm(rows, axis=1)
        rows = rows / np.maximum(norms / private.clip, 1)[:, None]
        products[i] = rows.T @ rows
    shares = (1 - np.asarray(rates)) / (rates * problem.counts**2)
    found: Floats = shares[:, None, None] * products
    return found


def record_norms(problem: Problem, x: Floats) -> Floats:
    """Return the norms of the gradients of all records at x, client by client."""
    return np.concatenate([np.linalg.norm(rows, axis=1) for rows in _record_gradients(problem, x)])


def _record_gradients(problem: Problem, x: Floats) -> Iterator[Floats]:
    """Yield the (n_i, d) gradients of each client's records at x."""
    with jax.enable_x64(True):
        params = problem.layout.unflatten(np.asarray(x, float))
        for i, count in enumerate(problem.counts.tolist()):
            own = slice(problem.offsets[i], problem.offsets[i + 1])
            records = jax.tree.map(lambda a: jnp.asarray(np.asarray(a[own])), problem.records)  # noqa: B023
            rows = record_gradients(problem.functions, params, records, jnp.arange(count))
            yield np.hstack([np.asarray(a).reshape(count, -1) for a in jax.tree.leaves(rows)])

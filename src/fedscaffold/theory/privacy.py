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

from collections.abc import Sequence
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
from fedscaffold.problems.problem import Floats
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import resolve
from fedscaffold.simulation.program import prepare
from fedscaffold.theory.round_map import is_quadratic
from fedscaffold.theory.stationary import stationary

__all__ = ["PrivacyCost", "noise_deviation", "privacy_cost", "private_covariance"]


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
    if not isinstance(config.privacy, Records):
        raise InputError("privacy_cost is of a private run: give privacy=fs.privacy.records(...)")
    found = []
    for wanted in epsilons:
        noise = _noise_for(config, wanted)
        private = replace(config, privacy=replace(config.privacy, noise=noise))
        errors, clipped = _errors(private, algorithms)
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


def _errors(
    config: RunConfig, algorithms: Sequence[Algorithm]
) -> tuple[dict[str, float] | None, float]:
    try:
        optimum = np.asarray(config.problem.optimum(config.weights), float)
        covariance, clipped = private_covariance(config)
        if not is_quadratic(config.problem) or not isinstance(config.lr, (int, float)):
            return None, clipped
    except InputError:
        return None, np.nan
    errors = {}
    for algorithm in algorithms:
        try:
            law = stationary(
                config.problem,
                lr=config.lr,
                local_steps=int(np.max(resolve.local_work(config).steps)),
                noise=covariance,
                algorithm=algorithm,
            )
        except InputError:
            return None, clipped
        square = float(((law.x_mean - optimum) ** 2).sum() + np.trace(law.x_covariance))
        errors[algorithm.name] = square**0.5
    return errors, clipped


def noise_deviation(config: RunConfig) -> Floats:
    """Return noise C / (q_i n_i): the (N,) deviations of the mechanism's noise in a gradient."""
    private = config.privacy
    assert isinstance(private, Records)
    found: Floats = (
        private.noise * private.clip / (resolve.poisson_rates(config) * config.problem.counts)
    )
    return found


def private_covariance(config: RunConfig) -> tuple[Floats, float]:
    """Return the (N, d, d) covariances of the private gradients at the optimum.

    Also the share of records that are clipped there.
    """
    problem, private = config.problem, config.privacy
    assert private is not None
    rates, scales = resolve.poisson_rates(config), noise_deviation(config)
    with jax.enable_x64(True):
        params = problem.layout.unflatten(np.asarray(problem.optimum(config.weights), float))
        found, clipped = np.zeros((problem.num_clients, problem.dim, problem.dim)), 0
        for i, (rate, count) in enumerate(zip(rates, problem.counts.tolist(), strict=True)):
            own = slice(problem.offsets[i], problem.offsets[i + 1])
            records = jax.tree.map(lambda a: jnp.asarray(np.asarray(a[own])), problem.records)  # noqa: B023
            rows = record_gradients(problem.functions, params, records, jnp.arange(count))
            flat = np.hstack([np.asarray(a).reshape(count, -1) for a in jax.tree.leaves(rows)])
            norms = np.linalg.norm(flat, axis=1)
            clipped += int((norms > private.clip).sum())
            flat = flat / np.maximum(norms / private.clip, 1)[:, None]
            found[i] = scales[i] ** 2 * np.eye(problem.dim)
            found[i] += (1 - rate) / (rate * count**2) * flat.T @ flat
    return found, clipped / int(problem.offsets[-1])

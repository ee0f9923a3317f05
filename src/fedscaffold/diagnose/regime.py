"""Whether a run is one in which control variates are worth their vector.

With S of N clients a round, K local steps, sigma^2 the variance of a gradient and
G^2 = sum |g_i - g|^2 / (N - 1), a round at the optimum moves x by a random vector of variance

    (K lr)^2 / S [sigma^2 / K + (1 - S/N) G^2]             FedAvg
    (K lr)^2 / S [sigma^2 / K + (1 - S/N) sigma^2 / K]     SCAFFOLD

so that SCAFFOLD is behind where sigma^2 / K > G^2. If all clients take part, the corrections sum to
zero and their noise leaves x alone, unless the local optimizer is not linear in the gradient. And a
client's control variate serves from the second round on in which the client is heard.

sigma^2 / K stands for the variance of a mean of K gradients. Batches that are drawn with
replacement have it; batches of shuffled passes over n records have less, and none after whole
passes with batches of one size. In a pass, record j enters the sum of the gradients with the
weight a_j, one over the size of its batch, or 0 if the steps end before it. With v the mean over
records of |g_j - g|^2, this sum has the variance v n / (n - 1) sum_j (a_j - mean a)^2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold.diagnose.control_checks import Finding
from fedscaffold.problems import Problem
from fedscaffold.problems.problem import Floats
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.resolve import local_work
from fedscaffold.theory.derivatives import noise_level

__all__ = [
    "check_noise_of_controls",
    "check_visits",
    "has_linear_steps",
    "noise_of_means",
    "noise_over_difference",
]

INSTEAD = "algorithm.name = 'fedavg' sends two vectors a round for three"


def check_visits(rounds: int, share: float) -> Finding | None:
    """Return a finding if clients are heard less than once on average in the planned rounds.

    Args:
        rounds: Number of rounds that are planned.
        share: Mean share of the clients heard in a round.

    >>> check_visits(100, 0.1) is None
    True
    >>> check_visits(5, 0.1).number
    0.5
    """
    visits = rounds * share
    if visits >= 1:
        return None
    said = (
        f"In {rounds} rounds a client is heard {visits:.2g} times on average, and its control "
        "variate serves from the second time on: SCAFFOLD gains little here."
    )
    return Finding("visits", "watch", said, f"more rounds or larger cohorts; {INSTEAD}", visits)


def has_linear_steps(config: RunConfig) -> bool:
    """Return whether local steps are linear in the gradient, as those of SGD with momentum are.

    An optimizer is tried: gradients twice as large must give steps twice as large.

    Args:
        config: The run.
    """
    if config.clip_norm is not None:
        return False
    optimizer = config.local_optimizer
    if optimizer is None:
        return True
    y, gradients = np.zeros(2), np.array([[1.0, -3.0], [0.5, 2.0]])

    def steps(scale: float) -> list[Any]:
        memory, taken = optimizer.init(y), []
        for gradient in scale * gradients:
            step, memory = optimizer.update(gradient, memory, y)
            taken.append(step)
        return taken

    return np.allclose(steps(2.0), 2 * np.asarray(steps(1.0)), rtol=1e-5, atol=0)


def noise_of_means(
    config: RunConfig, part: Problem, clients: NDArray[np.int64], x: ArrayLike
) -> Floats:
    """Return E |mean of a round's K_i gradients at x - grad f_i(x)|^2 of some clients.

    Args:
        config: The run, which says how batches are drawn.
        part: The problem of these clients.
        clients: Their numbers.
        x: The point.

    >>> import fedscaffold as fs
    >>> records = [np.arange(4.0)[:, None]]
    >>> problem = Problem(lambda x, batch: ((x - batch) ** 2).mean() / 2, np.zeros(1), records)
    >>> same = {"rounds": 1, "lr": 0.1, "batch_size": 1}
    >>> ways = {"local_steps": 2}, {"local_steps": 2, "draw": "shuffle"}, {"local_epochs": 1}
    >>> runs = [RunConfig(fs.scaffold(), problem, **same, **way) for way in ways]
    >>> [round(float(noise_of_means(run, problem, np.array([0]), [0.0])[0]), 3) for run in runs]
    [0.625, 0.417, 0.0]
    """
    plan = local_work(config)
    steps, additive = plan.steps[clients], noise_level(part, x)
    if plan.batch is None:
        return additive / steps
    variance, batch = noise_level(part, x, 1) - additive, plan.batch[clients]
    if not plan.shuffle:
        return (additive + variance / batch) / steps
    n = part.counts
    used = n if plan.used is None else plan.used[clients]
    whole, last = np.divmod(used, batch)
    per_pass = whole + (last > 0)
    passes, rest = np.divmod(steps, per_pass)
    squares = whole / batch + np.where(last > 0, 1 / np.maximum(last, 1), 0) - per_pass**2 / n
    squares = passes * squares + rest / batch - rest**2 / n
    return additive / steps + variance * n / np.maximum(n - 1, 1) * squares / steps**2


def noise_over_difference(p: Floats, noise: Floats, gradients: Floats) -> float:
    """Return sigma^2 / (K G^2), above 1 where control variates are noisier than clients are unlike.

    Args:
        p: Weights of the clients, of sum 1; with unequal ones sum p_i |g_i - g|^2 / (1 - sum p_i^2)
            stands for G^2.
        noise: The variance of each client's mean gradient, sigma^2 / K.
        gradients: Their gradients g_i.

    >>> p, g = np.array([0.5, 0.5]), np.array([[1.0], [-1.0]])
    >>> noise_over_difference(p, np.array([3.0, 3.0]), g)
    1.5
    """
    apart, others = p @ np.square(gradients - p @ gradients).sum(axis=1), 1 - p @ p
    if not apart:
        return math.inf if others * (p @ noise) > 0 else 0.0
    return float(p @ noise * others / apart)


def check_noise_of_controls(ratio: float, share: float, linear: bool) -> Finding | None:
    """Return a finding if control variates are noisier than the clients are unlike.

    Args:
        ratio: sigma^2 / (K G^2).
        share: Mean share of the clients heard in a round.
        linear: Whether local steps are linear in the gradient.

    >>> check_noise_of_controls(4.0, 1.0, linear=True) is None
    True
    >>> check_noise_of_controls(4.0, 0.1, linear=True).number
    4.0
    """
    if ratio <= 1 or (share >= 1 and linear):
        return None
    why = (
        "with sampled clients the corrections add more variance than they remove"
        if share < 1
        else "with this local optimizer the noise of the corrections does not cancel in the mean"
    )
    said = (
        f"The noise of a client's mean gradient, sigma^2 / K, is {ratio:.2g} times the clients' "
        f"difference at x, G^2: {why}, and FedAvg is ahead in such runs."
    )
    do = f"larger batches or more local steps bring it below 1; {INSTEAD}"
    return Finding("regime", "watch", said, do, ratio)

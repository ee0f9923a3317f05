"""Whether a run is one in which control variates are worth their vector.

With S of N clients a round, K local steps, sigma^2 the variance of a gradient and G^2 = mean
|g_i - g|^2, a round at the optimum moves x by a random vector of variance

    (K lr)^2 / S [sigma^2 / K + (1 - S/N) G^2 N / (N - 1)]       FedAvg
    (K lr)^2 / S [sigma^2 / K + (1 - S/N) sigma^2 / K]           SCAFFOLD

so that SCAFFOLD is behind where sigma^2 / K > G^2. If all clients take part, the corrections sum to
zero and their noise leaves x alone, unless the local optimizer is not linear in the gradient. And a
client's control variate serves from the second round on in which the client is heard.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedscaffold.diagnose.control_checks import Finding
from fedscaffold.run_config import RunConfig

__all__ = ["check_noise_of_controls", "check_visits", "has_linear_steps"]

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


def check_noise_of_controls(noise: float, share: float, linear: bool) -> Finding | None:
    """Return a finding if control variates are noisier than the clients are unlike.

    Args:
        noise: sigma / (sqrt(K) G), as `Alignment.noise` has it.
        share: Mean share of the clients heard in a round.
        linear: Whether local steps are linear in the gradient.

    >>> check_noise_of_controls(2.0, 1.0, linear=True) is None
    True
    >>> check_noise_of_controls(2.0, 0.1, linear=True).number
    4.0
    """
    if noise <= 1 or (share >= 1 and linear):
        return None
    why = (
        "with sampled clients the corrections add more variance than they remove"
        if share < 1
        else "with this local optimizer the noise of the corrections does not cancel in the mean"
    )
    said = (
        f"The noise of a client's mean gradient, sigma^2 / K, is {noise**2:.2g} times the clients' "
        f"difference at x, G^2: {why}, and FedAvg is ahead in such runs."
    )
    do = f"larger batches or more local steps bring it below 1; {INSTEAD}"
    return Finding("regime", "watch", said, do, noise**2)

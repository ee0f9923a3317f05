"""Compare where a method ends on quadratics, at the optimum or at a bias, with theory.

The predicted limit is the fixed point of the algorithm's noiseless round map with all clients taking part equally.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm, fedavg
from fedscaffold.checks import InputError
from fedscaffold.experiments.config_file import Config
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import RunRecord
from fedscaffold.simulation.resolve import cohort_size
from fedscaffold.theory import bias, is_quadratic

__all__ = ["all_participate", "compare_with_limit", "describe_limit"]

SETTLED = 0.01  # relative distance to the limit within which a run has arrived
EXACT = 1e-6  # share of the initial distance that counts as zero


def compare_with_limit(
    config: Config, problem: Problem, algorithm: Algorithm, lr: float, runs: list[RunRecord]
) -> dict[str, Any]:
    """Return the measured and predicted |x - x*| of the limit, and a phrase; {} if the optimum is unknown.

    >>> from fedscaffold import fedavg, problems
    >>> compare_with_limit(Config(), problems.quadratic(num_clients=2, dim=2), fedavg(), 0.1, [])
    {}
    """
    if not is_quadratic(problem) or any("distance" not in run.columns or run.diverged_at for run in runs) or not runs:
        return {}
    ends = float(np.mean([run.columns["distance"][-1] for run in runs]))
    begun = float(np.linalg.norm(problem.layout.flatten(problem.params) - problem.optimum(config.weights)))
    known = _predicted_bias(config, problem, algorithm, lr)
    return {"ends_at": ends, "bias": known, "ends": describe_limit(ends, known, begun)}


def describe_limit(ends: float, bias: float | None, begun: float) -> str:
    """Describe the two distances; `begun` is the distance at the start, their scale.

    >>> describe_limit(1e-9, 0.0, 1.0), describe_limit(0.2501, 0.25, 1.0), describe_limit(0.3, 0.25, 1.0)
    ('at the optimum', 'at its bias, 0.25', 'on the way (bias 0.25)')
    >>> describe_limit(1e-9, None, 1.0), describe_limit(0.1, None, 1.0), describe_limit(0.1, 0.0, 1.0)
    ('at the optimum', 'off by 0.1', 'on the way (no bias)')
    """
    if ends <= EXACT * begun:
        return "at the optimum"
    if bias is None:
        return f"off by {ends:.3g}"
    if bias <= EXACT * begun:
        return "on the way (no bias)"
    return f"at its bias, {bias:.3g}" if abs(ends - bias) <= SETTLED * bias else f"on the way (bias {bias:.3g})"


def all_participate(config: Config, problem: Problem) -> bool:
    """Return whether all clients take part in every round.

    >>> from fedscaffold import problems
    >>> three = problems.quadratic(num_clients=3, dim=2)
    >>> [all_participate(Config(cohort={"size": size}), three) for size in (1, 1.0, 3)]  # one client; all; all
    [False, True, True]
    """
    size = cohort_size(RunConfig(fedavg(), problem, cohort=config.cohort.size))
    return config.cohort.availability is None and size == problem.num_clients


def _predicted_bias(config: Config, problem: Problem, algorithm: Algorithm, lr: float) -> float | None:
    """Return the |bias| by theory, or None if theory does not cover the run."""
    local = config.local
    covered = (
        all_participate(config, problem)
        and config.weights == "equal"
        and config.compression == "none"
        and local.optimizer == "sgd"
        and local.batch_size is None
        and isinstance(local.steps, int)
        and problem.noise is None
    )
    if not covered or not isinstance(local.steps, int):
        return None
    try:
        return float(np.linalg.norm(bias(problem, lr=lr, local_steps=local.steps, algorithm=algorithm)))
    except InputError:  # a round of it has no matrix, as it counts its rounds
        return None

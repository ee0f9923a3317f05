"""Where a method ends on quadratics: at the optimum or at a bias, measured beside what theory says.

The limit is that of the noiseless rounds with all clients taking part equally, which theory knows exactly for every
algorithm: the fixed point of its round map.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm, fedavg
from fedscaffold.experiments.config import Config
from fedscaffold.problems import Problem
from fedscaffold.report import Curve
from fedscaffold.simulation.asked import Request, cohort_size
from fedscaffold.theory import bias, is_quadratic

__all__ = ["everyone", "limit", "words"]

SETTLED = 0.01  # of the limit's distance: nearer than that is there
EXACT = 1e-6  # of the distance to begin with, and rounding of the precision allows less


def limit(config: Config, problem: Problem, algorithm: Algorithm, lr: float, runs: list[Curve]) -> dict[str, Any]:
    """Measured and predicted |x - x*| of the limit, and the two in words; nothing where no optimum is measured.

    >>> from fedscaffold import fedavg, problems
    >>> limit(Config(), problems.quadratic(num_clients=2, dim=2), fedavg(), 0.1, [])
    {}
    """
    if not is_quadratic(problem) or any("distance" not in run.columns or run.diverged_at for run in runs) or not runs:
        return {}
    ends = float(np.mean([run.columns["distance"][-1] for run in runs]))
    begun = float(np.linalg.norm(problem.layout.flatten(problem.params) - problem.optimum(config.weights)))
    known = _predicted(config, problem, algorithm, lr)
    return {"ends_at": ends, "bias": known, "ends": words(ends, known, begun)}


def words(ends: float, bias: float | None, begun: float) -> str:
    """What the two numbers say; `begun` is the distance at the start, their scale.

    >>> words(1e-9, 0.0, 1.0), words(0.2501, 0.25, 1.0), words(0.3, 0.25, 1.0)
    ('at the optimum', 'at its bias, 0.25', 'on the way (bias 0.25)')
    >>> words(1e-9, None, 1.0), words(0.1, None, 1.0), words(0.1, 0.0, 1.0)
    ('at the optimum', 'off by 0.1', 'on the way (no bias)')
    """
    if ends <= EXACT * begun:
        return "at the optimum"
    if bias is None:
        return f"off by {ends:.3g}"
    if bias <= EXACT * begun:
        return "on the way (no bias)"
    return f"at its bias, {bias:.3g}" if abs(ends - bias) <= SETTLED * bias else f"on the way (bias {bias:.3g})"


def everyone(config: Config, problem: Problem) -> bool:
    """Whether all clients take part in every round.

    >>> from fedscaffold import problems
    >>> three = problems.quadratic(num_clients=3, dim=2)
    >>> [everyone(Config(cohort={"size": size}), three) for size in (1, 1.0, 3)]  # one client; all; all
    [False, True, True]
    """
    request = Request(fedavg(), problem, 1, cohort=config.cohort.size)
    return config.cohort.availability is None and cohort_size(request) == problem.num_clients


def _predicted(config: Config, problem: Problem, algorithm: Algorithm, lr: float) -> float | None:
    """|bias| by theory, where the run is one that theory covers."""
    local = config.local
    covered = (
        everyone(config, problem)
        and config.weights == "equal"
        and config.compression == "none"
        and local.optimizer == "sgd"
        and local.batch_size is None
        and isinstance(local.steps, int)
        and problem.noise is None
    )
    if not covered or not isinstance(local.steps, int):
        return None
    return float(np.linalg.norm(bias(problem, lr=lr, local_steps=local.steps, algorithm=algorithm)))

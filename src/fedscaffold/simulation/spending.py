"""What the rounds of a private run cost: epsilon by round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedscaffold.privacy.accounting import capacity
from fedscaffold.privacy.budget import Budget
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.sampling import Drawer, Streams, draw_local_steps

__all__ = ["budget_of"]


def budget_of(config: RunConfig, drawer: Drawer) -> Budget | None:
    """Return the budget of a run; None if it is not private."""
    if config.privacy is None:
        return None
    streams, clients = Streams(config.seed), len(drawer.counts)
    rates, overflows = np.ones(clients), np.zeros(clients)
    if drawer.rates is not None:
        rates = drawer.rates
        pairs = zip(drawer.counts.tolist(), rates.tolist(), strict=True)
        overflows = np.array([capacity(*pair)[1] for pair in pairs])

    def attended(round: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        cohort = drawer.cohort(streams, round)
        if drawer.mean_steps is None:
            return cohort, drawer.steps[cohort]
        return cohort, np.full(len(cohort), draw_local_steps(streams, round, drawer.mean_steps))

    return Budget(config.privacy, rates, overflows, attended)

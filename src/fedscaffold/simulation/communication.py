"""Communication cost of a run: bytes sent and received per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.sampling import Streams

__all__ = ["count_bytes"]


def count_bytes(
    config: RunConfig,
    ready: PreparedRun,
    start: int,
    stop: int,
    heard_at: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Return the bytes sent up and down in rounds start + 1 .. stop.

    `heard_at` is the round in which each client was last heard, 0 for never; under the `refresh`
    policy it is updated in place. It may be omitted if `start` is 0.
    """
    spec, drawer = ready.spec, ready.drawer
    itemsize = np.dtype(config.precision).itemsize
    dim = config.problem.dim - sum(end - begin for begin, end in spec.algorithm.private)
    vector = dim * itemsize
    message = vector if spec.compressor is None else spec.compressor.bytes(dim, itemsize)
    heard = np.full(stop - start, drawer.size, np.int64)
    renewed = np.zeros(stop - start, np.int64)
    after = spec.policy.refresh_after
    varying = drawer.schedule is not None or drawer.available is not None
    if varying or callable(drawer.sampling) or after is not None:
        streams = Streams(config.seed)
        cohorts = [drawer.cohort(streams, r) for r in range(start, stop)]
        heard = np.array([len(cohort) for cohort in cohorts], np.int64)
        if after is not None:
            last = np.zeros(drawer.num_clients, np.int64) if heard_at is None else heard_at
            renewed = _count_renewals(cohorts, start, last, after)
    gradients = vector * (spec.algorithm.prepare is not None) + itemsize * len(
        spec.exchange.numbers
    )
    # what clients find from the models they receive, they find only after plain steps of clients
    # and server
    plain = spec.constant_step and not spec.unequal and spec.server_optimizer is None
    found = 0 if plain else len(spec.algorithm.finds)
    buffers = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(ready.start.buffers))
    return {
        "bytes_up": (len(spec.sent) * message + gradients + buffers) * heard + vector * renewed,
        "bytes_down": ((1 + len(spec.exchange.down) + found) * vector + buffers) * heard,
    }


def _count_renewals(
    cohorts: Sequence[NDArray[Any]], start: int, heard_at: NDArray[np.int64], after: int
) -> NDArray[np.int64]:
    """Return the number of clients of each cohort that renewed their control variate.

    Update `heard_at`.
    """
    counts = np.zeros(len(cohorts), np.int64)
    for k, cohort in enumerate(cohorts):
        counts[k] = np.sum(start + k - heard_at[cohort] >= after)
        heard_at[cohort] = start + k + 1
    return counts

"""What the cohorts of a run send and receive, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.simulation.draws import Streams
from fedscaffold.simulation.setup import Ready, Request

__all__ = ["traffic"]


def traffic(
    request: Request, ready: Ready, seed: int, start: int, stop: int, heard_at: NDArray[np.int64] | None = None
) -> dict[str, NDArray[np.int64]]:
    """Bytes up and down in rounds start + 1 .. stop, as vectors of the run's precision or compressed.

    `heard_at` is when each client was last heard, 0 for never, and is kept up to date here where a policy asks for it;
    it may be left out for rounds that begin with the first.
    """
    spec, drawer = ready.spec, ready.drawer
    itemsize = np.dtype(request.precision).itemsize
    vector = request.problem.dim * itemsize
    message = vector if spec.compressor is None else spec.compressor.bytes(request.problem.dim, itemsize)
    heard = np.full(stop - start, drawer.size, np.int64)
    renewed = np.zeros(stop - start, np.int64)
    after = spec.policy.refresh_after
    if drawer.schedule is not None or drawer.available is not None or after is not None:
        streams = Streams(seed)
        cohorts = [drawer.cohort(streams, r) for r in range(start, stop)]
        heard = np.array([len(cohort) for cohort in cohorts], np.int64)
        if after is not None:
            last = np.zeros(drawer.num_clients, np.int64) if heard_at is None else heard_at
            renewed = _renewals(cohorts, start, last, after)
    anchors = vector * (spec.algorithm.anchor is not None)
    return {
        "bytes_up": (spec.vectors_up * message + anchors) * heard + vector * renewed,
        "bytes_down": spec.vectors_down * vector * heard,
    }


def _renewals(
    cohorts: Sequence[NDArray[Any]], start: int, heard_at: NDArray[np.int64], after: int
) -> NDArray[np.int64]:
    """How many clients of each cohort renewed their control variate."""
    counts = np.zeros(len(cohorts), np.int64)
    for k, cohort in enumerate(cohorts):
        counts[k] = np.sum(start + k - heard_at[cohort] >= after)
        heard_at[cohort] = start + k + 1
    return counts

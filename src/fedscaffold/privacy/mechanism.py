"""The formulas of the private gradient, for arrays of any library with the Python array API.

The simulator calls them on JAX arrays (`gradients`), deployed sites on NumPy (`site_steps`).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

__all__ = ["clip_factors", "expected_batch", "noised_mean", "records_at_once", "sampling_rate"]

Array: TypeAlias = Any
CACHE = 1 << 21  # bytes of the gradients of single records


def clip_factors(norms: Array, real: Array, clip: float) -> tuple[Array, Array]:
    """Return by what each record's gradient is multiplied, and which records count.

    A record whose gradient has no finite norm does not count: to report it would be a release.

    Args:
        norms: Norms of the gradients, over all parameters jointly.
        real: Which rows are records, not padding.
        clip: The largest norm.

    >>> import numpy as np
    >>> clip_factors(np.array([4.0, 0.5, np.inf]), np.array([True, True, True]), clip=1.0)
    (array([0.25, 1.  , 0.  ]), array([ True,  True, False]))
    """
    xp = norms.__array_namespace__()
    counts = real & xp.isfinite(norms)
    return xp.where(counts, clip / xp.maximum(norms, clip), 0), counts


def noised_mean(total: Array, noise: Array, *, clip: float, scale: float, expected: Array) -> Array:
    """Return the private gradient from a sum of clipped gradients.

    Args:
        total: The sum.
        noise: Independent standard normal numbers.
        clip: The norm to which the gradients were clipped.
        scale: The noise multiplier.
        expected: The expected number of records in the sum; the actual one is private.

    >>> noised_mean(3.0, 0.5, clip=1.0, scale=2.0, expected=8)
    0.5
    """
    return (total + scale * clip * noise) / expected


def expected_batch(batch: int | float | None, records: Array) -> Array:
    """Return the expected size q n of a Poisson batch.

    Args:
        batch: A number of records, a fraction of them, or None for all.
        records: Number of the client's records, an array of floating-point numbers.

    >>> import numpy as np
    >>> [float(expected_batch(batch, np.float64(20))) for batch in (8, 50, 0.25, None)]
    [8.0, 20.0, 5.0, 20.0]
    """
    if batch is None:
        return records
    if isinstance(batch, float):
        return batch * records
    return records.__array_namespace__().minimum(records, batch)


def sampling_rate(batch: int | float | None, records: Array) -> Array:
    """Return the probability q with which a Poisson batch draws a record.

    >>> import numpy as np
    >>> [float(sampling_rate(batch, np.float64(20))) for batch in (8, 50, 0.25, None)]
    [0.4, 1.0, 0.25, 1.0]
    """
    if batch is None:
        return 1.0
    if isinstance(batch, float):
        return batch
    return records.__array_namespace__().minimum(batch / records, 1.0)


def records_at_once(mean: float, dim: int, itemsize: int, room: int = CACHE) -> int:
    """Return how many records' gradients to hold at once: most batches, if there is room.

    Args:
        mean: The expected batch.
        dim: Number of parameters.
        itemsize: Bytes of each.
        room: Bytes; by default what a cache holds.

    >>> records_at_once(32, 1000, 4), records_at_once(32, 10**6, 4)
    (44, 1)
    """
    return max(1, min(math.ceil(mean + 2 * math.sqrt(mean)), room // (dim * itemsize)))

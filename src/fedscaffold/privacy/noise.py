"""Gaussian noise whose tails are long enough for small deltas.

`jax.random.normal` inverts the distribution function at one of 2^23 places: in float32 it never
exceeds 5.3. A record could then move the noised sum to where it cannot be without the record, with
a probability of about 1e-5 in each step, which is as large as usual deltas.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = ["box_muller", "gaussian_noise"]

Array: TypeAlias = Any


def gaussian_noise(key: Array, size: int, dtype: Any) -> Array:
    """Return independent standard normal numbers, up to 9.4 in either precision.

    >>> import jax
    >>> gaussian_noise(jax.random.key(0), 3, np.float32).shape
    (3,)
    """
    import jax

    return box_muller(jax.random.bits(key, (3, -(-size // 2)), np.uint32), dtype)[:size]


def box_muller(words: Array, dtype: Any) -> Array:
    """Return two standard normal numbers for each column of three random words of 32 bits.

    By the transform of Box and Muller, with 64 bits for the radius and 32 for the angle of a pair.

    Args:
        words: A (3, pairs) array of uint32, of NumPy or JAX.
        dtype: Type of the numbers.

    >>> box_muller(np.full((3, 1), 1 << 31, np.uint32), np.float64).round(3).tolist()
    [-1.177, 0.0]
    """
    xp = words.__array_namespace__()
    kind = np.dtype(dtype).type
    part = kind(2.0**-32)
    high, low, turn = words.astype(dtype)
    # at least 2^-65, whose radius is 9.5
    uniform = (high + (low + kind(0.5)) * part) * part
    radius = xp.sqrt(-2 * xp.log(xp.minimum(uniform, 1)))
    angle = kind(2 * np.pi) * (turn * part)
    return xp.concat([radius * xp.cos(angle), radius * xp.sin(angle)])

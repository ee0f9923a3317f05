"""Gaussian noise whose tails are long enough for small deltas.

`jax.random.normal` inverts the distribution function at one of 2^23 places: in float32 it never
exceeds 5.3. A record could then move the noised sum to where it cannot be without the record, with
a probability of about 1e-5 in each step, which is as large as usual deltas.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["gaussian_noise"]

Array: TypeAlias = Any


def gaussian_noise(key: Array, size: int, dtype: Any) -> Array:
    """Return independent standard normal numbers, up to 9.4 in either precision.

    By the transform of Box and Muller, with 64 bits for the radius and 32 for the angle of a pair.

    >>> gaussian_noise(jax.random.key(0), 3, np.float32).shape
    (3,)
    """
    return _transformed(jax.random.bits(key, (3, -(-size // 2)), np.uint32), dtype)[:size]


def _transformed(words: Array, dtype: Any) -> Array:
    """Return two normal numbers for each column of three words of 32 bits."""
    kind = np.dtype(dtype).type
    part = kind(2.0**-32)
    high, low, turn = words.astype(dtype)
    # at least 2^-65, whose radius is 9.5
    uniform = (high + (low + kind(0.5)) * part) * part
    radius = jnp.sqrt(-2 * jnp.log(jnp.minimum(uniform, 1)))
    angle = kind(2 * np.pi) * (turn * part)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)])

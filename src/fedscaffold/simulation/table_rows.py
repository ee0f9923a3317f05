"""Rows of arrays by indices known to be in bounds and not negative.

Indexing by brackets compares each index with zero and adds the length to those below it, which is
a fifth of the operations of a small program, traced and compiled for nothing.
"""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["take_row", "take_rows"]


def take_row(array: Any, index: Any) -> Any:
    """Return `array[index]` for one index.

    >>> import jax.numpy as jnp
    >>> take_row(jnp.array([[1, 2], [3, 4]]), 1).tolist()
    [3, 4]
    """
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def take_rows(array: Any, indices: Any) -> Any:
    """Return `array[indices]` for an array of indices.

    >>> import jax.numpy as jnp
    >>> take_rows(jnp.array([5, 6, 7]), jnp.array([2, 0])).tolist()
    [7, 5]
    """
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)

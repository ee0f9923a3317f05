"""The private gradient: clipped record by record, summed, noised, divided by the expected batch.

This is the only place where records meet noise. Everything that a client does with the result is
post-processing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.privacy.mechanism import clip_factors, expected_batch, noised_mean

__all__ = ["Mechanism", "clipped_sum", "private_gradient"]

Array: TypeAlias = Any
Tree: TypeAlias = Any


class Mechanism(NamedTuple):
    """The mechanism of a program; static."""

    clip: float
    noise: float
    batch: int | float | None
    """Expected batch: a number of records, a fraction of the client's, or None for all of them."""
    at_once: int
    """Records whose gradients are in memory at the same time."""

    def expected_batch(self, records: Array, dtype: Any) -> Array:
        """Return the expected batch size q n of a client with n records."""
        return expected_batch(self.batch, jnp.asarray(records).astype(dtype))


def clipped_sum(gradients: Tree, real: Array, clip: float) -> Tree:
    """Return the sum of the records' gradients, each clipped to a norm, over all leaves jointly.

    A record whose gradient has no finite norm adds nothing: to report it would be a release.

    Args:
        gradients: Gradients, one row per record in each leaf.
        real: Which rows are records, not padding.
        clip: The largest norm.

    >>> rows = {"a": jnp.array([[3.0], [0.1]]), "b": jnp.array([[4.0], [0.0]])}
    >>> total = clipped_sum(rows, jnp.array([True, True]), clip=1.0)
    >>> [round(float(leaf[0]), 3) for leaf in total.values()]
    [0.7, 0.8]
    """
    squares = [
        jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1)
        for leaf in jax.tree.leaves(gradients)
    ]
    norm = jnp.sqrt(sum(squares[1:], squares[0]))
    factor, counts = clip_factors(norm, real, clip)

    def total(leaf: Array) -> Array:
        rows = jnp.where(counts.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)
        return jnp.tensordot(factor, rows, 1, precision="highest")

    return jax.tree.map(total, gradients)


def private_gradient(
    mechanism: Mechanism,
    gradients: Callable[[Tree, Array], Tree],
    batch: Tree,
    weights: Array | None,
    records: Array,
    noise: Tree,
) -> Tree:
    """Return the noised mean of clipped gradients on a Poisson batch.

    Args:
        mechanism: The mechanism.
        gradients: (records, their places in the batch) -> their gradients, one row per record.
        batch: Records, the real ones first.
        weights: Zero for padding; None for a batch without padding.
        records: Number of the client's records.
        noise: Independent standard normal numbers, one for each parameter.
    """
    size = len(jax.tree.leaves(batch)[0])
    real = jnp.ones(size, bool) if weights is None else weights > 0
    at_once = min(mechanism.at_once, size)

    def add(j: Array | int, total: Tree) -> Tree:
        places = j * at_once + jnp.arange(at_once)
        some = jax.tree.map(lambda a: jnp.take(a, places, axis=0, mode="clip"), batch)
        there = (places < size) & jnp.take(real, places, mode="clip")
        return jax.tree.map(
            jnp.add, total, clipped_sum(gradients(some, places), there, mechanism.clip)
        )

    zero = jax.tree.map(jnp.zeros_like, noise)
    # as many parts as hold records: a batch rarely needs more than one of them
    parts = 1 if at_once == size else -(-jnp.count_nonzero(real) // at_once)
    total = add(0, zero) if at_once == size else jax.lax.fori_loop(0, parts, add, zero)
    dtype = jax.tree.leaves(noise)[0].dtype
    expected = mechanism.expected_batch(records, dtype)

    def private(leaf: Array, noise: Array) -> Array:
        clip, scale = mechanism.clip, mechanism.noise
        return noised_mean(leaf, noise, clip=clip, scale=scale, expected=expected)

    return jax.tree.map(private, total, noise)

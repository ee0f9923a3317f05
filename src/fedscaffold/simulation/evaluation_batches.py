"""Evaluation batches, for functions that are not means over records.

A client's value is the mean over its batches, weighted by their sizes: one batch of all its
records, or consecutive batches of the size given in the problem, the last of which may be smaller.
Batches of equal size are vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.problems.batches import Kind
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.spec import Array, Spec
from fedscaffold.simulation.table_rows import take_rows

__all__ = [
    "EVALUATION_BYTES",
    "Batches",
    "client_batches",
    "split_into_batches",
    "sum_over",
    "test_batches",
]

# evaluated at once: large enough for efficient matrix products, small beside the records
EVALUATION_BYTES = 1 << 22


class Batches(NamedTuple):
    """Batches of one size, in a table with `width` per row, padded with batches of share 0."""

    first: Array
    """(rows, width) first record of each batch."""
    count: Array
    """(rows, width) number of real records: all, unless the function takes weights."""
    share: Array
    """(rows, width) weight in the mean over all batches."""
    place: Array
    """(size,) 0, 1, ..., size - 1."""


def split_into_batches(
    offsets: NDArray[np.int64],
    shares: NDArray[Any],
    batch: int | None,
    kind: Kind,
    width_of: Callable[[int], int],
) -> list[Batches]:
    """Split clients' records into batches, grouped by size.

    Args:
        offsets: (N + 1,) offsets of the clients' records.
        shares: The clients' weights.
        batch: Batch size, or None for all records of a client.
        kind: Kind of the function; one that takes weights gets padded batches of one size.
        width_of: (size) -> number of batches to evaluate at once.

    >>> offsets, shares = np.array([0, 2, 4]), np.array([0.5, 0.5])
    >>> [b] = split_into_batches(offsets, shares, None, "coupled", lambda size: 2)
    >>> b.first.tolist(), b.count.tolist(), b.share.tolist(), b.place.tolist()
    ([[0, 2]], [[2, 2]], [[0.5, 0.5]], [0, 1])
    """
    counts = np.diff(offsets)
    sizes = counts if batch is None else np.minimum(batch, counts)
    parts = -(-counts // sizes)
    client = np.repeat(np.arange(len(counts)), parts)
    turn = np.arange(len(client)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = offsets[client] + turn * sizes[client]
    count = np.minimum(sizes[client], offsets[client + 1] - first)
    share = (shares[client] * (count / counts[client])).astype(shares.dtype)
    if kind == "weighted":
        return [_table(first, count, share, int(count.max()), width_of)]
    tables = []
    for size in np.unique(count).tolist():
        own = count == size
        tables.append(_table(first[own], count[own], share[own], size, width_of))
    return tables


def _table(
    first: NDArray[Any],
    count: NDArray[Any],
    share: NDArray[Any],
    size: int,
    width_of: Callable[[int], int],
) -> Batches:
    width = min(len(first), width_of(size))
    rows = -(-len(first) // width)

    def laid(column: NDArray[Any], filling: int, dtype: Any) -> NDArray[Any]:
        table = np.full(rows * width, filling, dtype)
        table[: len(column)] = column
        return table.reshape(rows, width)

    return Batches(
        laid(first, 0, np.int32),
        laid(count, 1, np.int32),
        laid(share, 0, share.dtype),
        np.arange(size, dtype=np.int32),
    )


def client_batches(problem: Problem, spec: Spec, p: NDArray[Any]) -> dict[str, list[Batches]]:
    """Return the batches of the clients' records, by kind of the functions measured on them."""
    of = {"loss": spec.kinds.loss, "gap": spec.kinds.loss, "grad_norm": spec.kinds.gradient}
    of |= {"accuracy": spec.kinds.accuracy} if problem.test is None else {}
    kinds = {of[name] for name in spec.metrics if name in of}
    return _batches(problem, kinds, problem.records, problem.offsets, p)


def test_batches(problem: Problem, spec: Spec, dtype: str) -> dict[str, list[Batches]]:
    """Return the batches of the test records, by kind of the functions measured on them."""
    if problem.test is None or "accuracy" not in spec.metrics:
        return {}
    offsets = np.array([0, len(jax.tree.leaves(problem.test)[0])])
    return _batches(problem, {spec.kinds.accuracy}, problem.test, offsets, np.ones(1, dtype))


def _batches(
    problem: Problem,
    kinds: set[Kind],
    records: Any,
    offsets: NDArray[np.int64],
    shares: NDArray[Any],
) -> dict[str, list[Batches]]:
    """Return batches by kind of function, except for means over records, which need none."""
    total = max(1, int(offsets[-1]))
    row: int = sum(a.size * a.itemsize for a in jax.tree.leaves(records)) // total
    model = problem.dim * shares.itemsize

    def width_of(size: int) -> int:
        return max(1, EVALUATION_BYTES // (size * row + model))

    return {
        kind: split_into_batches(offsets, shares, problem.evaluation_batch, kind, width_of)
        for kind in sorted(kinds - {"mean"})
    }


def sum_over(
    records: Any, batches: list[Batches], kind: Kind, measure: Callable[[Any, Array | None], Any]
) -> Any:
    """Return the sum of `measure(batch, weights)` over batches, weighted by their shares.

    Weights may be None.
    """

    def one(first: Array, count: Array, place: Array) -> Any:
        rows = first + jnp.minimum(place, count - 1) if kind == "weighted" else first + place
        batch = jax.tree.map(lambda a: take_rows(a, rows), records)
        dtype = next(iter(batches)).share.dtype
        weights = (
            jnp.where(place < count, 1 / count.astype(dtype), 0) if kind == "weighted" else None
        )
        return measure(batch, weights)

    def of_size(part: Batches) -> Any:
        def row(total: Any, entries: tuple[Array, Array, Array]) -> tuple[Any, None]:
            first, count, share = entries
            values = jax.vmap(one, in_axes=(0, 0, None))(first, count, part.place)
            return jax.tree.map(lambda t, v: t + _weighted_sum(share, v), total, values), None

        shape = jax.eval_shape(one, part.first[0, 0], part.count[0, 0], part.place)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, part.share.dtype), shape)
        return jax.lax.scan(row, nothing, (part.first, part.count, part.share))[0]

    first, *others = [of_size(part) for part in batches]
    return jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), first, *others)


def _weighted_sum(share: Array, values: Array) -> Array:
    """Return the sum of shares times values.

    Values of share 0 are ignored even if they are not finite.
    """
    real = (share > 0).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.tensordot(share, jnp.where(real, values, 0).astype(share.dtype), 1)

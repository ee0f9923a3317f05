"""Problems whose records stay on disk and are read per cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem
from fedscaffold.state import Records

__all__ = ["problem_on_disk"]


def problem_on_disk(
    loss: Callable[[Any, Any], Any] | None,
    params: Any,
    source: Records | Any,
    offsets: ArrayLike | None = None,
    **more: Any,
) -> Problem:
    """Return a problem whose records are read when a round needs them.

    Use it with `simulate(..., client_state="sparse")` or "file", which read a cohort's records
    only. Values are not
    validated beforehand: a NaN among them shows up as a divergence.

    Args:
        loss: As for `Problem`.
        params: As for `Problem`.
        source: A `fedscaffold.state.Records` (written client by client with `write_records`), or a
            pytree of arrays, possibly memory-mapped, with all clients' records concatenated.
        offsets: (N + 1,) offsets of the clients' records in `source`: client i has rows offsets[i]
            to offsets[i + 1]. Not needed for `Records`.
        **more: Further arguments of `Problem`.

    Raises:
        InputError: `offsets` is missing or does not fit `source`.

    >>> import numpy as np
    >>> def loss(w, batch):
    ...     return ((w - batch) ** 2).mean()
    >>> problem = problem_on_disk(loss, np.zeros(()), np.arange(5.0), [0, 2, 5])
    >>> problem
    Problem(problem, 2 clients, 5 records, d = 1)
    """
    if isinstance(source, Records):
        offsets, source = source.offsets, memory_map(source)
    if offsets is None:
        raise InputError(
            "offsets must say where each client's records begin, and where the last one's end"
        )
    bounds: NDArray[np.int64] = np.asarray(offsets, np.int64)
    lengths = {len(column) for column in jax.tree.leaves(source)}
    if (
        bounds.ndim != 1
        or len(bounds) < 2
        or bounds[0] != 0
        or (np.diff(bounds) < 1).any()
        or lengths != {bounds[-1]}
    ):
        raise InputError(
            f"offsets must rise from 0 to the number of records, which all columns share; got "
            f"columns of {lengths}"
        )
    first = jax.tree.map(lambda column: np.asarray(column[: bounds[1]]), source)
    problem = Problem(loss, params, [first], **more)
    problem.offsets, problem.records = bounds, source
    return problem


def memory_map(records: Records) -> dict[str, NDArray[Any]]:
    """Return the columns of a `Records` folder as memory maps."""
    total = int(records.offsets[-1])
    return {
        name: np.memmap(
            records.folder / f"column-{place}", column.dtype, "r", shape=(total, *column.shape)
        )
        for place, (name, column) in enumerate(records.columns.items())
    }

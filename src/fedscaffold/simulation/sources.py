"""Problems whose records stay where they are: in files, read by cohort."""

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
    """A problem with the records of `source`, which are not read until a round needs them.

    `source` is a `fedscaffold.state.Records` (clients' data written one by one with `write_records`), or a tree of
    arrays, memory-mapped ones too, that hold all clients' records one after the other, client i at rows offsets[i] to
    offsets[i + 1]. Use it with `simulate(..., client_state="sparse")` or "file", which read a cohort's records only.
    Values are not looked at beforehand, so that a NaN among them shows as a divergence. The other arguments are
    those of `Problem`.

    >>> import numpy as np
    >>> problem = problem_on_disk(lambda w, b: ((w - b) ** 2).mean(), np.zeros(()), np.arange(5.0), [0, 2, 5])
    >>> problem
    Problem(problem, 2 clients, 5 records, d = 1)
    """
    if isinstance(source, Records):
        offsets, source = source.offsets, mapped(source)
    if offsets is None:
        raise InputError("offsets must say where each client's records begin, and where the last one's end")
    bounds: NDArray[np.int64] = np.asarray(offsets, np.int64)
    lengths = {len(column) for column in jax.tree.leaves(source)}
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < 1).any() or lengths != {bounds[-1]}:
        raise InputError(
            f"offsets must rise from 0 to the number of records, which all columns share; got columns of {lengths}"
        )
    first = jax.tree.map(lambda column: np.asarray(column[: bounds[1]]), source)
    problem = Problem(loss, params, [first], **more)
    problem.offsets, problem.records = bounds, source
    return problem


def mapped(records: Records) -> dict[str, NDArray[Any]]:
    """The columns of a folder of records as memory maps."""
    total = int(records.offsets[-1])
    return {
        name: np.memmap(records.folder / f"column-{place}", column.dtype, "r", shape=(total, *column.shape))
        for place, (name, column) in enumerate(records.columns.items())
    }

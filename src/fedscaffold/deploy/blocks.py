"""Blocks of coordinates: what a server computes on whole vectors, block by block.

The formulas of an algorithm are elementwise, so a vector's block depends only on the same block of
others, and the result has the same bits whatever the size of a block. A server therefore needs
memory for x and its means, for the new ones, and for some blocks; vectors of clients are in files
if the model is `LARGE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedscaffold.deploy.schema import Array, Record
from fedscaffold.state.vectors import FileVector, VectorWriter

__all__ = [
    "Builder",
    "Vector",
    "assemble",
    "is_large",
    "join_norms",
    "norm",
    "slices",
    "spill",
    "take",
]

SIZE = 1 << 17
"""Coordinates of a block: the dozen blocks of a round then stay in the caches."""
CHUNK = 1 << 13
"""Coordinates that are squared and summed together: BLAS takes several threads for more, and the
bits of a norm would depend on the number of cores."""
LARGE = 1 << 20
"""Coordinates above which vectors of clients are kept in files."""

Vector: TypeAlias = Array | FileVector


def is_large(size: int) -> bool:
    """Return whether vectors of clients are kept in files, at this number of coordinates."""
    return size > LARGE


def slices(size: int) -> Iterator[slice]:
    """Yield the blocks of a vector; an empty vector has one.

    >>> list(slices(3))
    [slice(0, 3, None)]
    """
    for begin in range(0, max(1, size), SIZE):
        yield slice(begin, min(size, begin + SIZE))


def take(record: Record, place: slice) -> Record:
    """Return a block of every vector of a record; numbers and None stay.

    >>> from fedscaffold.algorithms.scaffold import Server
    >>> take(Server(np.arange(3), np.array(2.0)), slice(1, 2))
    Server(x=array([1]), c=array(2.))
    """
    if record is None:
        return None
    return type(record)(*(value[place] if getattr(value, "ndim", 0) else value for value in record))


class Builder:
    """A record, or a tuple of vectors, that is made block by block.

    Args:
        size: Number of coordinates.
        folder: Where to write its vectors; they are held in memory if None.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self.size, self.folder, self.done = size, folder, 0
        self.make: Callable[[Iterable[Any]], Record] = tuple
        self.fields: list[Any] = []

    def append(self, record: Record) -> None:
        """Add the next block of each field; of a number, the last one given counts."""
        if not self.fields:
            self.make = getattr(record, "_make", tuple)
            self.fields = [self._begin(value) for value in record]
        length = 0
        for i, value in enumerate(record):
            field = self.fields[i]
            if not np.ndim(value):
                self.fields[i] = value
                continue
            length = len(value)
            if isinstance(field, VectorWriter):
                field.append(value)
            else:
                field[self.done : self.done + length] = value
        self.done += length

    def _begin(self, value: Any) -> Any:
        if not np.ndim(value):
            return value
        if self.folder is None:
            return np.empty(self.size, value.dtype)
        return VectorWriter(self.folder, value.dtype)

    def finish(self) -> Record:
        """Return the record."""
        return self.make(
            one.finish() if isinstance(one, VectorWriter) else one for one in self.fields
        )


def assemble(size: int, function: Callable[[slice], Record]) -> Record:
    """Return the record whose block at every slice is `function(slice)`.

    >>> from fedscaffold.algorithms.scaffold import Memory
    >>> x = np.arange(3.0)
    >>> assemble(3, lambda place: Memory(2 * x[place]))
    Memory(c_i=array([0., 2., 4.]))
    """
    builder = Builder(size)
    for place in slices(size):
        builder.append(function(place))
    return builder.finish()


def spill(vector: Vector, folder: Path) -> FileVector:
    """Write a vector to a file that lives as long as what is returned."""
    writer = VectorWriter(folder, vector.dtype, passing=True)
    for place in slices(vector.size):
        writer.append(vector[place])
    return writer.finish()


def norm(vector: Vector) -> float:
    """Return the Euclidean norm in double precision, without intermediate overflow or underflow.

    >>> [f"{norm(np.array(values)):.6g}" for values in ([3e200, 4e200], np.float32([3e30, 4e30]))]
    ['5e+200', '5e+30']
    """
    flat = vector if isinstance(vector, FileVector) else np.ravel(vector)
    blocks = (flat[place] for place in slices(vector.size))
    return join_norms(
        _norm(block[begin : begin + CHUNK])
        for block in blocks
        for begin in range(0, max(1, len(block)), CHUNK)
    )


def join_norms(norms: Iterable[float]) -> float:
    """Return the norm of a vector from those of its blocks."""
    return math.hypot(*norms)


def _norm(chunk: Array) -> float:
    """Return the norm of one chunk."""
    most = float(np.abs(chunk).max(initial=0.0))
    if most == 0.0 or not math.isfinite(most):
        return most
    return most * float(np.linalg.norm(chunk.astype(np.float64) / most))

"""Arithmetic on an algorithm's records, which are NamedTuples of vectors and numbers, or None where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, rebuild, shift_of
from fedscaffold.deploy.schema import Array

__all__ = [
    "Record",
    "add_scaled",
    "blank_memory",
    "cast",
    "flatten",
    "message_of",
    "pack",
    "unflatten",
    "unpack",
    "update_memory",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
Record: TypeAlias = Any  # a NamedTuple of vectors and numbers that the algorithm defines, or None


def cast(record: Record, dtype: Any) -> Record:
    """Convert every field of a record to a dtype.

    >>> from fedscaffold.algorithms.scaffold import Memory
    >>> cast(Memory(np.zeros(2, np.float32)), np.float64)
    Memory(c_i=array([0., 0.]))
    """
    return None if record is None else type(record)(*(np.asarray(value, dtype) for value in record))


def blank_memory(algorithm: Algorithm, like: Array) -> Record:
    """Return a client's initial memory: zeros, or None where the algorithm has no memory."""
    return None if algorithm.memory is None else cast(algorithm.memory(np.zeros_like(like)), like.dtype)


def flatten(record: Record) -> Array:
    """Concatenate the fields of a record; a number is a vector of one.

    >>> from fedscaffold.algorithms.scaffold import Server
    >>> flatten(Server(np.array([1.0]), np.array(2.0)))
    array([1., 2.])
    """
    return record[0] if len(record) == 1 else np.concatenate([np.ravel(field) for field in record])


def unflatten(like: Record, vector: Array) -> Record:
    """Invert `flatten`, for a record with the fields of `like`."""
    parts = np.split(vector, np.cumsum([field.size for field in like])[:-1])
    return type(like)(*(part.reshape(field.shape) for part, field in zip(parts, like, strict=True)))


def add_scaled(total: Record, weight: float, record: Record) -> Record:
    """Add weight times record to `total` in place, in double precision; a `total` of None starts a new sum.

    >>> from fedscaffold.algorithms.scaffold import Memory
    >>> add_scaled(add_scaled(None, 0.5, Memory(np.ones(2))), 2.0, Memory(np.ones(2)))
    Memory(c_i=array([2.5, 2.5]))
    """
    parts = [weight * np.asarray(value, np.float64) for value in record]
    if total is None:
        return type(record)(*(np.asarray(0.0 + part) for part in parts))
    for sum_, part in zip(total, parts, strict=True):
        sum_ += part
    return total


def pack(vector: Array, private: Ranges) -> Array:
    """Remove the private coordinates, which never leave a client, from a vector; a number has none.

    >>> pack(np.arange(5), ((1, 3),))
    array([0, 3, 4])
    """
    if not private or vector.ndim == 0:
        return vector
    return np.concatenate([vector[begin:end] for begin, end in _public_ranges(len(vector), private)])


def unpack(vector: Array, private: Ranges, size: int) -> Array:
    """Invert `pack`, with zeros for the private coordinates.

    >>> unpack(np.array([1, 4, 5]), ((1, 3),), 5)
    array([1, 0, 0, 4, 5])
    """
    if not private or vector.ndim == 0:
        return vector
    whole, at = np.zeros(size, vector.dtype), 0
    for begin, end in _public_ranges(size, private):
        whole[begin:end] = vector[at : at + end - begin]
        at += end - begin
    return whole


def _public_ranges(size: int, private: Ranges) -> list[tuple[int, int]]:
    """Return the ranges between the private ones."""
    begins, ends = zip(*((0, 0), *private, (size, size)), strict=True)
    return [*zip(ends[:-1], begins[1:], strict=True)]


def message_of(algorithm: Algorithm, vectors: Mapping[str, Array], travel: float) -> Record:
    """Return the message in double precision from received vectors; a missing move is `travel` times the direction.

    >>> from fedscaffold.algorithms import scaffold
    >>> message_of(scaffold(), {"d": np.array([3.0])}, travel=0.5)
    Message(d=array([3.]), move=array([1.5]))
    """
    wide = {name: value.astype(np.float64) for name, value in vectors.items()}
    return rebuild(algorithm, wide, travel, plain=exchange(algorithm).move not in vectors)


def update_memory(algorithm: Algorithm, sent: Record, memory: Record, message: Record) -> Record:
    """Return a client's memory after an applied message, in double precision.

    The shift is recomputed from the sent record and the stored memory, since the shift that was sent is rounded and the
    server record would drift from the mean of the memories by that rounding.
    """
    assert algorithm.remember is not None
    wide = cast(memory, np.float64)
    return algorithm.remember(wide, shift_of(algorithm, cast(sent, np.float64), wide), message)

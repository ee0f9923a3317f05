"""Serialisation: a model is one flat vector with a schema of named arrays.

A record is a few vectors and numbers.

Messages contain raw little-endian numbers only. The receiver knows their number, shape and dtype in
advance, so no claim of the sender is trusted, parsed or allocated for; bytes of any other length
are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.deploy.packets import Blob, Fact, Packet
from fedscaffold.layers import Split, split
from fedscaffold.state.safetensors_io import bfloat16
from fedscaffold.state.vectors import FileVector

__all__ = [
    "Array",
    "Blob",
    "Fact",
    "Packet",
    "Ranges",
    "Record",
    "Schema",
    "blob",
    "cast",
    "digest_inputs",
    "digest_of",
    "fingerprint",
    "flatten",
    "pack",
    "unpack",
]

Array: TypeAlias = NDArray[Any]
Record: TypeAlias = Any  # a NamedTuple of vectors and numbers that the algorithm defines, or None
Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Schema(NamedTuple):
    """The arrays of a model: trained ones, all of one dtype, buffers, and frozen ones.

    >>> schema = Schema(("w", "b"), ((2, 3), (2,)), "float32")
    >>> schema.size
    8
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """(name, shape, dtype) of arrays that change but are not trained: running means, counters."""
    frozen: tuple[tuple[str, tuple[int, ...], str, str], ...] = ()
    """(name, shape, dtype, fingerprint) of arrays that never change and must be identical
    everywhere."""
    stored: tuple[tuple[str, str, str], ...] = ()
    """(name in the model's file, name of the array, dtype in the file); () to store all arrays
    unchanged."""

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Array],
        dtype: str,
        buffers: Mapping[str, Array] | None = None,
        frozen: Mapping[str, Array] | None = None,
        stored: tuple[tuple[str, str, str], ...] = (),
    ) -> Schema:
        """Return the schema of named arrays that are sent as `dtype`.

        >>> Schema.of({"w": np.zeros((2, 2))}, "float64").shapes
        ((2, 2),)
        """
        if not arrays:
            raise InputError("the model has no trained arrays; at least one is needed")
        kept = tuple(
            (name, np.shape(a), np.asarray(a).dtype.name)
            for name, a in sorted((buffers or {}).items())
        )
        fixed = tuple(
            (name, a.shape, a.dtype.name, fingerprint(a))
            for name, a in sorted((frozen or {}).items())
        )
        return cls(
            tuple(arrays), tuple(np.shape(a) for a in arrays.values()), dtype, kept, fixed, stored
        )

    @property
    def size(self) -> int:
        """Number of coordinates, d."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def digest(self) -> str:
        """Digest of names, shapes, dtypes and the values of frozen arrays."""
        return digest_of(list(self))

    def split(self, chosen: Collection[str]) -> Split:
        """Split the coordinates into those of the named arrays and the rest."""
        return split(self.names, self.shapes, chosen)

    def flatten(self, arrays: Mapping[str, Array]) -> Array:
        """Lay named arrays one after the other.

        >>> Schema(("b", "w"), ((1,), (1, 2)), "float64").flatten({"b": [1], "w": [[2, 3]]})
        array([1., 2., 3.])
        """
        return np.concatenate([np.asarray(arrays[name], self.dtype).ravel() for name in self.names])

    def unflatten(self, vector: Any) -> dict[str, Any]:
        """Return views of the named arrays of a NumPy or torch vector."""
        bounds = [0, *accumulate(prod(shape) for shape in self.shapes)]
        slices = zip(self.names, pairwise(bounds), self.shapes, strict=True)
        return {name: vector[begin:end].reshape(shape) for name, (begin, end), shape in slices}

    def filed(self, vector: Array, kept: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of the model's file, tied ones under each of their names.

        >>> tied = (("in", "w", "float16"), ("out", "w", "float64"))
        >>> Schema.of({"w": np.zeros(1)}, "float64", stored=tied).filed(np.array([3.0]), {})
        {'in': array([3.], dtype=float16), 'out': array([3.])}
        """
        arrays = {**kept, **self.unflatten(vector)}
        if not self.stored:
            return arrays
        return {
            name: bfloat16(arrays[source])
            if dtype == "bfloat16"
            else np.asarray(arrays[source], dtype)
            for name, source, dtype in self.stored
        }


def blob(array: Array) -> Blob:
    """Serialise an array.

    >>> blob(np.array([1.0, 2.0], np.float32)).shape
    (2,)
    """
    array = np.asarray(array)
    return Blob(
        array.dtype.name,
        array.shape,
        array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(),
    )


def cast(record: Record, dtype: Any) -> Record:
    """Convert every field of a record to arrays of a dtype; None stays None."""
    return None if record is None else type(record)(*(np.asarray(value, dtype) for value in record))


def flatten(record: Record) -> Array:
    """Concatenate the fields of a record; a number is a vector of one.

    >>> from fedscaffold.algorithms.scaffold import Server
    >>> flatten(Server(np.array([1.0]), np.array(2.0)))
    array([1., 2.])
    """
    return np.concatenate([np.ravel(field) for field in record])


def pack(vector: Array, private: Ranges) -> Array:
    """Remove the private coordinates, which never leave a client, from a vector; a number has none.

    >>> pack(np.arange(5), ((1, 3),))
    array([0, 3, 4])
    """
    if not private or vector.ndim == 0:
        return vector
    return np.delete(vector, np.concatenate([np.arange(*limits) for limits in private]))


def unpack(vector: Array, private: Ranges, size: int) -> Array:
    """Invert `pack`, with zeros for the private coordinates.

    >>> unpack(np.array([1, 4, 5]), ((1, 3),), 5)
    array([1, 0, 0, 4, 5])
    """
    if not private or vector.ndim == 0:
        return vector
    whole = np.zeros(size, vector.dtype)
    whole[pack(np.arange(size), private)] = vector
    return whole


def fingerprint(vector: Array | FileVector | tuple[Array | FileVector, ...] | None) -> str:
    """Return a digest of a vector's bits; "" for None, which stands for the initial zeros.

    That of several vectors is that of all of them, one after the other.

    >>> fingerprint(None), len(fingerprint(np.zeros(3)))
    ('', 32)
    """
    if vector is None:
        return ""
    found = hashlib.sha256()
    for part in vector if isinstance(vector, tuple) else (vector,):
        found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:32]


def digest_of(value: Any) -> str:
    """Return a short digest of a JSON value.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:16]


def digest_inputs(words: Any, arrays: dict[str, Array]) -> str:
    """Return a digest of arrays and of a JSON value, by which no two inputs are confused.

    >>> digest_inputs([1], {"x": np.zeros(2)}) == digest_inputs([1], {"x": np.zeros(3)})
    False
    """
    found = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()

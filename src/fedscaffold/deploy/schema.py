"""A model on the wire: one flat vector, and a schema that says which slice of it is which array.

Only raw little-endian numbers travel. Their number, shape and dtype are known to the receiver beforehand, so that
nothing a sender claims is believed, parsed or allocated: bytes have the one length they must have, or are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.state.tensors import bfloat16

__all__ = ["Array", "Blob", "Fact", "Packet", "Schema", "blob", "digest_of", "fingerprint"]

Array: TypeAlias = NDArray[Any]
Fact: TypeAlias = str | int | float | bool


class Blob(NamedTuple):
    """An array as it travels: what it claims to be, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Packet(NamedTuple):
    """A message: a few scalars by name, and arrays by name. Nothing else can travel."""

    facts: dict[str, Fact]
    blobs: dict[str, Blob]


class Schema(NamedTuple):
    """What a model is made of: trained arrays, all of one dtype, and buffers and frozen arrays, kept apart by name.

    >>> schema = Schema(("w", "b"), ((2, 3), (2,)), "float32")
    >>> schema.size, schema.nbytes
    (8, 32)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """(name, shape, dtype) of what a model keeps but does not train: running means, counters."""
    frozen: tuple[tuple[str, tuple[int, ...], str, str], ...] = ()
    """(name, shape, dtype, fingerprint) of what never changes, and must be the same on the server and at every site."""
    stored: tuple[tuple[str, str, str], ...] = ()
    """(name in the model's file, name of the array, dtype in the file); () for the arrays as they are."""

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Array],
        dtype: str,
        buffers: Mapping[str, Array] | None = None,
        frozen: Mapping[str, Array] | None = None,
        stored: tuple[tuple[str, str, str], ...] = (),
    ) -> Schema:
        """Return the schema of named arrays that are to travel as `dtype`.

        >>> Schema.of({"w": np.zeros((2, 2))}, "float64").digest == Schema.of({"w": np.zeros(4)}, "float64").digest
        False
        """
        if not arrays:
            raise InputError("the model has no trained arrays; at least one is needed")
        kept = tuple((name, np.shape(a), np.asarray(a).dtype.name) for name, a in sorted((buffers or {}).items()))
        fixed = tuple((name, a.shape, a.dtype.name, fingerprint(a)) for name, a in sorted((frozen or {}).items()))
        return cls(tuple(arrays), tuple(np.shape(a) for a in arrays.values()), dtype, kept, fixed, stored)

    @property
    def size(self) -> int:
        """Number of coordinates, d."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of one vector on the wire."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def digest(self) -> str:
        """Short fingerprint of names, shapes, dtypes and the values of frozen arrays: equal models, equal digests."""
        return digest_of(list(self))

    def flatten(self, arrays: Mapping[str, Array]) -> Array:
        """Lay named arrays one after the other.

        >>> Schema.of({"b": np.zeros(1), "w": np.zeros((1, 2))}, "float64").flatten({"b": [1], "w": [[2, 3]]})
        array([1., 2., 3.])
        """
        return np.concatenate([np.asarray(arrays[name], self.dtype).ravel() for name in self.names])

    def unflatten(self, vector: Any) -> dict[str, Any]:
        """Cut a vector into its named arrays: views, NumPy in, NumPy out; torch in, torch out."""
        bounds = [0, *accumulate(prod(shape) for shape in self.shapes)]
        slices = zip(self.names, pairwise(bounds), self.shapes, strict=True)
        return {name: vector[begin:end].reshape(shape) for name, (begin, end), shape in slices}

    def filed(self, vector: Array, kept: Mapping[str, Array]) -> dict[str, Array]:
        """The model as its file has it: the trained arrays, and those it keeps; tied ones under each of their names.

        >>> schema = Schema.of({"w": np.zeros(1)}, "float64", stored=(("in", "w", "float16"), ("out", "w", "float64")))
        >>> schema.filed(np.array([3.0]), {})
        {'in': array([3.], dtype=float16), 'out': array([3.])}
        """
        arrays = {**kept, **self.unflatten(vector)}
        if not self.stored:
            return arrays
        return {
            name: bfloat16(arrays[source]) if dtype == "bfloat16" else np.asarray(arrays[source], dtype)
            for name, source, dtype in self.stored
        }


def blob(array: Array) -> Blob:
    """Make an array ready to travel.

    >>> blob(np.array([1.0, 2.0], np.float32)).shape
    (2,)
    """
    array = np.asarray(array)
    return Blob(array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def fingerprint(vector: Array | None) -> str:
    """Fingerprint of a vector's bits; "" for None, which stands for zeros that nobody needs to keep.

    >>> fingerprint(None), len(fingerprint(np.zeros(3)))
    ('', 32)
    """
    if vector is None:
        return ""
    return hashlib.sha256(np.ascontiguousarray(vector).tobytes()).hexdigest()[:32]


def digest_of(value: Any) -> str:
    """Short fingerprint of plain JSON.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

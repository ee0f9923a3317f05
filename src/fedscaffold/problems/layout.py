"""A model is a vector: which slice of it is which layer.

`Layout` is the only thing that knows of layers. A tree of arrays is flattened where it enters and unflattened where a
gradient is computed; everything that is kept, sent or averaged is the flat vector in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout"]


class Layout(NamedTuple):
    """Names, shapes and order of the arrays of a model; equal layouts have equal digests."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    structure: Any

    @classmethod
    def of(cls, tree: Any) -> Layout:
        """Return the layout of a tree of arrays.

        >>> Layout.of({"w": np.zeros((2, 3)), "b": np.zeros(2)}).size
        8
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        return cls(names, tuple(np.shape(leaf) for _, leaf in leaves), structure)

    @property
    def bounds(self) -> list[int]:
        """Where each array begins in the vector, and where the last one ends."""
        return [0, *np.cumsum([prod(shape) for shape in self.shapes]).tolist()]

    @property
    def size(self) -> int:
        """Number of coordinates, d."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def digest(self) -> str:
        """Short fingerprint of names and shapes."""
        return hashlib.sha256(repr((self.names, self.shapes)).encode()).hexdigest()[:12]

    def flatten(self, tree: Any, dtype: Any = np.float64) -> NDArray[Any]:
        """Lay the arrays of `tree` one after the other.

        >>> Layout.of([np.zeros(1), np.zeros((1, 2))]).flatten([np.ones(1), np.zeros((1, 2))])
        array([1., 0., 0.])
        """
        return np.concatenate([np.asarray(leaf, dtype).ravel() for leaf in jax.tree.leaves(tree)])

    def leaves(self, vector: Any) -> list[Any]:
        """Cut a vector into its arrays: NumPy in, NumPy out; traced in, traced out."""
        return [
            vector[start:end].reshape(shape)
            for (start, end), shape in zip(pairwise(self.bounds), self.shapes, strict=True)
        ]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Put arrays back into the user's own structure."""
        return jax.tree.unflatten(self.structure, leaves)

    def unflatten(self, vector: Any) -> Any:
        """Return the tree that `vector` stands for."""
        return self.tree(self.leaves(vector))

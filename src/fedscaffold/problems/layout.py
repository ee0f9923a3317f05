"""`Layout`: the mapping between a model's pytree and its flat vector.

Pytrees are flattened on input and unflattened where a gradient is computed; everything that is
stored, sent or averaged is a flat vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.layers import Split, split

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
        """Offsets of the arrays in the vector, and its length."""
        return [0, *np.cumsum([prod(shape) for shape in self.shapes]).tolist()]

    @property
    def size(self) -> int:
        """Length d of the vector."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def digest(self) -> str:
        """Short hash of names and shapes."""
        return hashlib.sha256(repr((self.names, self.shapes)).encode()).hexdigest()[:12]

    def split(self, chosen: Collection[str]) -> Split:
        """Return the coordinates of some layers, chosen by name.

        >>> Layout.of({"w": np.zeros((2, 3)), "b": np.zeros(2)}).split(["b"]).ranges
        ((0, 2),)
        """
        return split(self.names, self.shapes, chosen)

    def flatten(self, tree: Any, dtype: Any = np.float64) -> NDArray[Any]:
        """Concatenate the arrays of `tree` into a vector.

        >>> Layout.of([np.zeros(1), np.zeros((1, 2))]).flatten([np.ones(1), np.zeros((1, 2))])
        array([1., 0., 0.])
        """
        return np.concatenate([np.asarray(leaf, dtype).ravel() for leaf in jax.tree.leaves(tree)])

    def leaves(self, vector: Any) -> list[Any]:
        """Split a vector into its arrays; works on NumPy and traced arrays."""
        return [
            vector[start:end].reshape(shape)
            for (start, end), shape in zip(pairwise(self.bounds), self.shapes, strict=True)
        ]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Return the pytree with these arrays as leaves."""
        return jax.tree.unflatten(self.structure, leaves)

    def unflatten(self, vector: Any) -> Any:
        """Return the pytree of a flat vector."""
        return self.tree(self.leaves(vector))

"""`Leaves`: a vector in layers, on which the directions of algorithms are computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Leaves"]


class Leaves:
    """A vector stored as a list of layers.

    >>> y = Leaves([1.0, 2.0])
    >>> (y - 0.5 * (y + y)).parts
    [0.0, 0.0]
    """

    __slots__ = ("parts",)
    __array_ufunc__ = None  # a NumPy number on the left leaves the operation to this class

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)

    def tree_flatten(self) -> tuple[list[Any], None]:
        """Return the layers, for JAX."""
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Iterable[Any]) -> Leaves:
        """Build from layers, for JAX."""
        return cls(parts)

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> Leaves:
        others = other.parts if isinstance(other, Leaves) else [other] * len(self.parts)
        return Leaves(operation(a, b) for a, b in zip(self.parts, others, strict=True))

    def __add__(self, other: Any) -> Leaves:
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b + a)

    def __sub__(self, other: Any) -> Leaves:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Leaves:
        return self._with(other, operator.mul)

    def __rmul__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b * a)

    def __truediv__(self, other: Any) -> Leaves:
        return self._with(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b / a)

    def __neg__(self) -> Leaves:
        return Leaves(-a for a in self.parts)

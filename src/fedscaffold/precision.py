"""Types that the user's arrays have in a run of float32 or float64.

In float32 runs JAX has no 64-bit numbers, integers included: it would keep the low 32 bits of wider
ones and say nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError

__all__ = ["narrowed", "type_in"]


def type_in(precision: Any, dtype: Any) -> np.dtype[Any]:
    """Return the type that numbers of a type have in a run of this precision.

    >>> type_in("float32", "int64"), type_in("float64", "int64"), type_in("float64", "float16")
    (dtype('int32'), dtype('int64'), dtype('float64'))
    """
    given: np.dtype[Any] = np.dtype(dtype)
    run: np.dtype[Any] = np.dtype(precision)
    if given.kind == "f":
        return run
    if given.kind in "iu" and given.itemsize > run.itemsize:
        return np.dtype(f"{given.kind}{run.itemsize}")
    return given


def narrowed(name: str, array: Any, precision: Any) -> NDArray[Any]:
    """Return an array with its type in a run of this precision, the same one if it has it already.

    Raise an InputError if numbers overflow there.

    >>> narrowed("the records", np.array([1e39]), "float32")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: the records hold 1e+39, which is too large for float32: take
        precision='float64'
    >>> narrowed("the records", np.array([3, 1 << 40]), "float32")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: the records hold 1099511627776, which is too large for int32, the
        integers of float32 runs: take precision='float64', or smaller numbers
    """
    array = np.asarray(array)
    kind = type_in(precision, array.dtype)
    if array.size and array.dtype.itemsize > kind.itemsize:
        floats = kind.kind == "f"
        limits = np.finfo(kind) if floats else np.iinfo(kind)
        for extreme in (array.max().item(), array.min().item()):
            if np.isfinite(extreme) and not float(limits.min) <= extreme <= float(limits.max):
                raise InputError(
                    f"{name} hold {extreme:g}, which is too large for {kind}: take "
                    "precision='float64'"
                    if floats
                    else f"{name} hold {extreme}, which is too large for {kind}, the integers of "
                    f"{precision} runs: take precision='float64', or smaller numbers"
                )
    cast: NDArray[Any] = array.astype(kind, copy=False)
    return cast

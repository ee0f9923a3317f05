"""Select layers of a model by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError

__all__ = ["Split", "split"]


class Split(NamedTuple):
    """Some layers of a model, and the others."""

    ranges: tuple[tuple[int, int], ...]
    """Start and end of each chosen layer in the vector."""
    chosen: NDArray[np.bool_]
    others: NDArray[np.bool_]


def split(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], chosen: Collection[str]
) -> Split:
    """Find layers by name.

    Args:
        names: Names of all arrays, in the order of the vector: `conv.bn.weight` or
            `['conv']['bn']['scale']`.
        shapes: Their shapes.
        chosen: Names or patterns (`bn*`) of one part of an array's name, or of the whole name with
            dots.

    Raises:
        InputError: A name matches no layer.

    >>> split(["fc.weight", "bn1.weight", "bn1.bias"], [(2,), (1,), (1,)], ["bn*"]).ranges
    ((2, 3), (3, 4))
    """
    parts = [re.findall(r"[^\W]+", name) for name in names]
    known = [".".join(one) or name for one, name in zip(parts, names, strict=True)]
    ends = [0, *accumulate(prod(shape) for shape in shapes)]
    found: set[int] = set()
    for pattern in chosen:
        of_it = {
            k
            for k, one in enumerate(parts)
            if any(fnmatchcase(part, pattern) for part in (*one, known[k]))
        }
        if not of_it:
            raise InputError(f"no layer is called {pattern!r}; layers: {', '.join(known)}")
        found |= of_it
    ranges = tuple(pair for k, pair in enumerate(pairwise(ends)) if k in found)
    mask = np.zeros(ends[-1], bool)
    for begin, end in ranges:
        mask[begin:end] = True
    return Split(ranges, mask, ~mask)

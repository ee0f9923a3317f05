"""How replies to older models count in asynchronous rounds, simulated and deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = ["damping_of"]


def damping_of(text: str) -> Callable[[NDArray[np.int64]], NDArray[np.float64]] | None:
    """Return by how much the move of a reply counts that is so many server steps late.

    Args:
        text: "none", or "polynomial:A" for (1 + staleness)^-A, as in FedBuff.

    Returns:
        A function of the staleness, or None for "none".

    >>> damping_of("polynomial:0.5")(np.array([0, 3])).tolist()
    [1.0, 0.5]
    """
    name, _, value = text.partition(":")
    checks.choice("staleness", name, ("none", "polynomial"))
    if name == "none":
        return None
    number: Any = checks.written(value)
    if isinstance(number, str):
        raise InputError("polynomial needs a number, such as polynomial:0.5")
    power = checks.number("the power of staleness", number, at_least=0)
    return lambda staleness: np.power(1.0 + staleness, -power, dtype=np.float64)

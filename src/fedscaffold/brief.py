"""Short representations of results: arrays by type and shape, long lists by length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["brief"]

MOST_TEXT = 60
MOST_ITEMS = 4
MOST_KEYS = 12
MOST_FIELDS = 2


def brief(held: Any) -> str:
    """Return a short `repr` of a NamedTuple that holds arrays.

    >>> from typing import NamedTuple
    >>> class Found(NamedTuple):
    ...     rounds: int
    ...     curve: list[int]
    >>> brief(Found(3, list(range(1000))))
    'Found(rounds=3, curve=1000 x int)'
    """
    fields = (f"{name}={short(value)}" for name, value in zip(held._fields, held, strict=True))
    return f"{type(held).__name__}({', '.join(fields)})"


def short(value: Any) -> str:
    """Return a value in a few characters.

    >>> import numpy as np
    >>> short(np.zeros((3, 4))), short(0.1 + 0.2), short({"loss": np.zeros(5)})
    ('float64 (3, 4)', '0.3', '{loss: float64 (5,)}')
    """
    if hasattr(value, "_fields") and not isinstance(value, type):
        return brief(value) if len(value) <= MOST_FIELDS else f"{type(value).__name__}(...)"
    if getattr(value, "shape", ()) != ():
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        items = [f"{key}: {short(item)}" for key, item in list(value.items())[:MOST_KEYS]]
        return f"{{{', '.join([*items, '...'] if len(value) > MOST_KEYS else items)}}}"
    if isinstance(value, (list, tuple)):
        if len(value) > MOST_ITEMS:
            return f"{len(value)} x {type(value[0]).__name__}"
        inside = ", ".join(map(short, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."

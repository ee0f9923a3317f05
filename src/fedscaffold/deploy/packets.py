"""What travels between server and sites: packets, and the package of an app.

This module imports no array library, as a messenger starts for every message (`messenger.py`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["BUNDLE", "ECHOED", "Blob", "Fact", "Packet", "decline"]

BUNDLE = "bundle.json"
"""The file of an app's package that holds the app's files (`app_files.py`)."""
ECHOED = ("site", "round", "nonce", "schema")
"""Facts of a request that the reply repeats."""

Fact: TypeAlias = str | int | float | bool


class Blob(NamedTuple):
    """A serialised array: claimed dtype and shape, and raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Packet(NamedTuple):
    """A message: named scalars and named arrays."""

    facts: dict[str, Fact]
    blobs: dict[str, Blob]


def decline(request: Packet, name: str, reason: str, kind: str = "refusal") -> Packet:
    """Return a reply that declines a request, with the reason.

    >>> decline(Packet({"kind": "train", "round": 2}, {}), "north", "no data").facts["reason"]
    'no data'
    """
    echo = {key: request.facts.get(key, "") for key in ECHOED}
    return Packet({**echo, "site": name, "kind": kind, "reason": reason[:400]}, {})

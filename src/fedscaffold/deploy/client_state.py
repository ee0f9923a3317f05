"""Durable client state, with `state = "client"`: the c_i that the server has applied, and the pending one.

After a round the client holds two vectors: the c_i that the server has acknowledged, and that of its last reply, which
may or may not have been applied. Every request names the valid one by the digest of its bits:

    waiting     the reply was applied: the pending vector becomes the acknowledged one
    counted     the reply was lost, late or refused: the pending vector is dropped
    before      the server was restored to one round earlier, and so is the client
    none        lost, outdated or of another run: the client reports this, does not train, and a resync follows
    ""          zeros: a new member, or one that a resync has reset

An algorithm's private client state (`Algorithm.own`) is stored in the same way, in a file of its own. Every run has a
folder of its own, so state of another run is never found.
"""

from __future__ import annotations

from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.deploy.schema import Array, fingerprint
from fedscaffold.state import StateError, commit, latest

__all__ = ["Lost", "load_vector", "save_pending"]

NAMES = ("waiting", "counted", "before")


class Lost(InputError):
    """The c_i that the server expects was not found."""


def load_vector(folder: Path, expect: str, like: Array, what: str = "c_i") -> Array:
    """Load the vector with a given digest.

    Args:
        folder: Folder of the state.
        expect: The digest; "" for the initial vector.
        like: The initial vector, which also gives the shape.
        what: What the vector is called in the error message.

    Raises:
        Lost: If no stored vector has this digest.

    >>> import tempfile
    >>> import numpy as np
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_pending(folder, None, np.ones(2))
    >>> load_vector(folder, fingerprint(np.ones(2)), np.zeros(2))
    array([1., 1.])
    >>> load_vector(folder, "", np.zeros(2))
    array([0., 0.])
    """
    if expect == "":
        return like
    here = _read_vectors(folder)
    for name in NAMES:
        if name in here and fingerprint(here[name]) == expect and here[name].shape == like.shape:
            return here[name]
    have = ", ".join(f"{name} {fingerprint(here[name])[:8]}" for name in NAMES if name in here) or "nothing"
    raise Lost(f"{what} {expect[:8]} is expected and is not here; here is {have}")


def save_pending(folder: Path, counted: Array | None, waiting: Array) -> None:
    """Store a new vector durably until the server confirms or rejects it.

    Args:
        folder: Folder of the state.
        counted: The acknowledged vector that training started from; None for the initial one.
        waiting: The new vector.
    """
    here = _read_vectors(folder)
    arrays = {"waiting": waiting}
    if counted is not None:
        arrays["counted"] = counted
        before = here.get("counted")
        if before is not None and fingerprint(before) == fingerprint(counted):
            before = here.get("before")
        if before is not None:
            arrays["before"] = before
    commit(folder, arrays, {"kind": "c_i"}, private=True)


def _read_vectors(folder: Path) -> dict[str, Array]:
    """Return the stored vectors; none if the file is damaged, in which case a resync repairs the client."""
    try:
        snapshot = latest(folder)
    except StateError:
        return {}
    return {} if snapshot is None else snapshot.arrays

"""Durable client state, with `state = "client"`: the applied c_i and the pending one.

After a round the client holds two vectors: the c_i that the server has acknowledged, and that of
its last reply, which may or may not have been applied. Every request names the valid one by the
digest of its bits:

    waiting     the reply was applied: the pending vector becomes the acknowledged one
    counted     the reply was lost, late or refused: the pending vector is dropped
    before      the server was restored to one round earlier, and so is the client
    none        lost, outdated or of another run: the client reports this, does not train, and a
                resync follows
    ""          zeros: a new member, or one that a resync has reset

The digest tells who holds a guess of the vector whether it is right, and who sees it twice that
nothing changed. With secure sums it is of the vector and a salt that stays at the client.

An algorithm's private client state (`Algorithm.own`) is stored in the same way, in a file of its
own. Every run has a folder of its own, so state of another run is never found.

Buffers that stay at the client (`local.buffers = "local"`) are stored with the round that trained
them and the buffers before it: a request that comes again trains from these, to the same reply.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import Array, Record, fingerprint, flatten
from fedscaffold.state import StateError, commit, latest

__all__ = ["Lost", "LostOwn", "load_buffers", "load_record", "save_buffers", "save_record"]

NAMES = ("waiting", "counted", "before")
SALT = "salt"
BEFORE = "before/"


class Lost(InputError):
    """The state that the server expects was not found.

    `kind` is the kind of the reply that says so.
    """

    kind, what = "lost", "c_i"


class LostOwn(Lost):
    """The private state that the server expects (`Algorithm.own`) was not found."""

    kind, what = "lost own", "what it keeps for itself,"


def load_record(folder: Path, expect: str, initial: Record, lost: type[Lost] = Lost) -> Record:
    """Load the record whose vector has a given digest.

    Args:
        folder: Folder of the state.
        expect: The digest; "" for the initial record.
        initial: The initial record, which also gives the shapes.
        lost: The error to raise.

    Raises:
        Lost: If no stored vector has this digest.

    >>> import tempfile
    >>> from fedscaffold.algorithms.scaffold import Memory
    >>> folder = Path(tempfile.mkdtemp())
    >>> digest = save_record(folder, None, Memory(np.ones(2)))
    >>> load_record(folder, digest, Memory(np.zeros(2)))
    Memory(c_i=array([1., 1.]))
    >>> load_record(folder, "", Memory(np.zeros(2)))
    Memory(c_i=array([0., 0.]))
    """
    if expect == "":
        return initial
    here, size = _read_vectors(folder), flatten(initial).size
    for name in NAMES:
        if name in here and _digest(here, name) == expect and here[name].shape == (size,):
            parts = np.split(here[name], np.cumsum([field.size for field in initial])[:-1])
            return type(initial)(
                *(part.reshape(field.shape) for part, field in zip(parts, initial, strict=True))
            )
    have = (
        ", ".join(f"{name} {_digest(here, name)[:8]}" for name in NAMES if name in here)
        or "nothing"
    )
    raise lost(f"{lost.what} {expect[:8]} is expected and is not here; here is {have}")


def save_record(folder: Path, counted: Record, waiting: Record, salted: bool = False) -> str:
    """Store a new record durably until the server confirms or rejects it.

    Args:
        folder: Folder of the state.
        counted: The acknowledged record that training started from; None for the initial one.
        waiting: The new record.
        salted: Whether its digest must tell nothing about it.

    Returns:
        The digest of the new record.

    Raises:
        Refused: If the new record is not finite.
    """
    arrays = {"waiting": flatten(waiting)}
    if not np.isfinite(arrays["waiting"]).all():
        raise Refused("not finite", "local training diverged; take a smaller local.lr")
    here = _read_vectors(folder)
    if salted:
        arrays[SALT] = here.get(SALT, np.frombuffer(secrets.token_bytes(32), np.uint8))
    if counted is not None:
        arrays["counted"] = flatten(counted)
        before = here.get("counted")
        if before is not None and fingerprint(before) == fingerprint(arrays["counted"]):
            before = here.get("before")
        if before is not None:
            arrays["before"] = before
    commit(folder, arrays, {"kind": "c_i"}, private=True)
    return _digest(arrays, "waiting")


def load_buffers(
    folder: Path, initial: dict[str, Array], round: int | None = None
) -> dict[str, Array]:
    """Load the buffers that a round trains from.

    Args:
        folder: Folder of the buffers.
        initial: The buffers before the first round.
        round: The round; None for the buffers after the last one.

    >>> import tempfile
    >>> folder, initial = Path(tempfile.mkdtemp()), {"mean": np.zeros(2)}
    >>> save_buffers(folder, 3, initial, {"mean": np.ones(2)})
    >>> load_buffers(folder, initial, 3), load_buffers(folder, initial, 4)
    ({'mean': array([0., 0.])}, {'mean': array([1., 1.])})
    """
    stored = latest(folder)
    if stored is None:
        return initial
    begin = BEFORE if round is not None and stored.facts.get("round") == round else ""
    return {name: stored.arrays[begin + name] for name in initial}


def save_buffers(
    folder: Path, round: int, before: dict[str, Array], after: dict[str, Array]
) -> None:
    """Store the buffers that a round has trained, and those before it, durably."""
    arrays = {BEFORE + name: before[name] for name in after} | after
    commit(folder, arrays, {"kind": "buffers", "round": round}, private=True)


def _digest(arrays: dict[str, Array], name: str) -> str:
    """Return the digest of a stored vector, with the salt that is stored beside it."""
    if SALT not in arrays:
        return fingerprint(arrays[name])
    return fingerprint(np.frombuffer(arrays[SALT].tobytes() + arrays[name].tobytes(), np.uint8))


def _read_vectors(folder: Path) -> dict[str, Array]:
    """Return the stored vectors.

    There are none if the file is damaged; a resync then repairs the client.
    """
    try:
        snapshot = latest(folder)
    except StateError:
        return {}
    return {} if snapshot is None else snapshot.arrays

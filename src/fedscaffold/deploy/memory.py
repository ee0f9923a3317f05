"""A client's own c_i, where clients keep them: a durable file with what counted and what waits to be counted.

After a round the client holds two vectors: the c_i that the server has acknowledged, and the one of its last reply,
of which it cannot know whether it counted. Every request says which one does, by the digest of its bits:

    the waiting one        the reply counted: it takes the place of the other
    the acknowledged one   the reply was lost, late or refused: the waiting one is dropped
    the one before         the server was put back by a round: so are we
    none of them           lost, too old, or of another run: the client says so, trains nothing, and is repaired
    ""                     zeros: a new member, or one that was repaired

Files of every run lie in a folder of its own, so what another run left behind is never found.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.schema import Array, fingerprint
from fedscaffold.state import StateError, commit, latest

__all__ = ["Lost", "held", "wait_for_word"]

NAMES = ("waiting", "counted", "before")


class Lost(InputError):
    """The c_i that the server expects is not here."""


def held(folder: Path, expect: str, like: Array) -> Array:
    """The c_i whose digest is `expect`; raises `Lost` where it is not here.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> wait_for_word(folder, None, np.ones(2))
    >>> held(folder, fingerprint(np.ones(2)), np.zeros(2))
    array([1., 1.])
    >>> held(folder, "", np.zeros(2))
    array([0., 0.])
    """
    if expect == "":
        return np.zeros_like(like)
    here = _here(folder)
    for name in NAMES:
        if name in here and fingerprint(here[name]) == expect and here[name].shape == like.shape:
            return here[name]
    have = ", ".join(f"{name} {fingerprint(here[name])[:8]}" for name in NAMES if name in here) or "nothing"
    raise Lost(f"c_i {expect[:8]} is expected and is not here; here is {have}")


def wait_for_word(folder: Path, counted: Array | None, waiting: Array) -> None:
    """Keep the new c_i, durably, until the server says whether it counted; `counted` is the one it came from."""
    here = _here(folder)
    arrays = {"waiting": waiting}
    if counted is not None:
        arrays["counted"] = counted
        before = here.get("counted")
        if before is not None and fingerprint(before) == fingerprint(counted):
            before = here.get("before")
        if before is not None:
            arrays["before"] = before
    commit(folder, arrays, {"kind": "c_i"}, private=True)


def _here(folder: Path) -> dict[str, Array]:
    """What the file holds; nothing where it is damaged beyond repair: the server will then mend us."""
    try:
        snapshot = latest(folder)
    except StateError:
        return {}
    return {} if snapshot is None else snapshot.arrays

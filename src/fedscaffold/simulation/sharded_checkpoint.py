"""Sharded checkpoints: each process writes its clients' rows, process 0 the shared arrays.

    folder/part-0-500/state-00000003-<SHA-256>.safetensors       rows of clients 0 to 499
    folder/part-500-1000/state-00000003-<SHA-256>.safetensors
    folder/state-00000003-<SHA-256>.safetensors                  x, c, metrics, names of its parts

Parts are ordinary commits. Once all of them are on disk, process 0 commits the shared arrays with
the names of the parts, which contain their checksums: so a checkpoint is complete or absent,
whichever process is killed at any time. Any number of processes can read it; each reads the parts
with its own clients. Parts that no commit names are removed after the next commit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.state import StateError, commit, load
from fedscaffold.state.commit import LOCK, TEMPORARY, generations

__all__ = ["names", "read", "sweep", "write"]

NAME = re.compile(r"part-([0-9]{1,18})-([0-9]{1,18})/state-[0-9]{8,18}-[0-9a-f]{64}\.safetensors")
ALL = 1 << 40  # generations to keep: `sweep` removes them


def write(folder: Path, own: slice, rows: Mapping[str, NDArray[Any]], round: int) -> str:
    """Commit the rows of a range of clients; return the part's name, for the shared commit."""
    place = folder / f"part-{own.start}-{own.stop}"
    commit(place, rows, {"round": round}, keep=ALL)
    return f"{place.name}/{generations(place)[0][1].name}"


def names(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts that a commit refers to."""
    listed = facts.get("parts")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def read(folder: Path, parts: Sequence[str], own: slice) -> dict[str, NDArray[Any]]:
    """Return the rows of a range of clients; raise StateError if a part is missing or damaged."""
    pieces: list[dict[str, NDArray[Any]]] = []
    at = own.start
    for first, last, name in sorted(map(_range, parts)):
        if last <= own.start or first >= own.stop:
            continue
        if first > at:
            break
        path = folder / name
        if not path.is_file():
            raise StateError(
                f"{name} is not in {folder}: all processes' parts must be in the one folder"
            )
        rows = load(path).arrays
        pieces.append({key: a[at - first : own.stop - first] for key, a in rows.items()})
        at = min(last, own.stop)
    if at < own.stop:
        raise StateError(f"the parts in {folder} have no rows of client {at}")
    return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}


def sweep(folder: Path, named: Collection[str]) -> None:
    """Remove the parts whose names are not in `named`."""
    for place in folder.glob("part-*-*"):
        files = [path for _, path in generations(place)]
        gone = [path for path in files if f"{place.name}/{path.name}" not in named]
        for path in gone:
            path.unlink(missing_ok=True)
        if len(gone) == len(files):
            for name in (LOCK, TEMPORARY):
                (place / name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's file is in it
                place.rmdir()


def _range(name: str) -> tuple[int, int, str]:
    match = NAME.fullmatch(name)
    if match is None:
        raise StateError(f"{name!r} is not the name of a part of a checkpoint")
    return int(match[1]), int(match[2]), name

"""One atomic commit: arrays and facts become durable together, or nothing changes.

A folder holds one file for each generation, the last two by default:

    state-00000007-<SHA-256 of the file, 64 hexadecimal digits>.safetensors

Its metadata hold `fedscaffold` (the version of the format, "1"), `generation` and `facts` (a JSON object). A commit

    1  takes the lock of the folder              flock on .lock: one writer at a time
    2  writes a temporary file                   .commit.tmp, in the same folder, hashed on its way
    3  fsyncs it                                 its bytes are on the disk
    4  renames it to its name                    atomic: the name, and with it the checksum, is there or not
    5  fsyncs the folder                         the name is on the disk: only now is the generation committed
    6  removes generations too old to keep

A process killed, or a machine losing power, between any two of these leaves the old or the new generation as the
latest, bit for bit, never a mixture: before 4 the old one is untouched and the temporary file has no valid name;
after 4 the new one is complete, as its bytes were synced in 3; nothing old is removed before 5 is done.

Reading trusts nothing. The name must fit the bytes (`sha256sum` can check it too), the header the size, the generation
the name. What fails is passed over for the generation before, and the warning says which file, why, and what was used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedscaffold import checks
from fedscaffold.state import tensors
from fedscaffold.state.files import StateError, create, locked, make_folder, refuse_link, reported, sync_folder
from fedscaffold.state.tensors import Array

__all__ = ["JSON", "Snapshot", "commit", "latest", "load"]

JSON: TypeAlias = Any
"""None, bool, int, float (finite), str, and lists and dicts (with text keys) of these."""

VERSION = "1"
NAME = re.compile(r"state-([0-9]{8,18})-([0-9a-f]{64})\.safetensors")
LOCK = ".lock"
TEMPORARY = ".commit.tmp"


class Snapshot(NamedTuple):
    """What was committed together."""

    arrays: dict[str, Array]
    """Arrays of its own memory, dtype, shape and bits as committed."""
    facts: dict[str, JSON]
    generation: int
    """1 for the first commit to a folder, one more for each."""
    warnings: tuple[str, ...] = ()
    """One sentence for each file that was passed over: which, why, what was used instead."""


def commit(
    folder: Path | str,
    arrays: Mapping[str, Array],
    facts: Mapping[str, JSON],
    keep: int = 2,
    *,
    after: int | None = None,
    private: bool = False,
) -> int:
    """Make `arrays` and `facts` the latest state of `folder`, atomically and durably; return its generation.

    The folder is created where it is missing; the newest `keep` generations stay in it (two at least). `facts` is a
    JSON object; numbers that may be NaN or infinite belong in an array. Arrays are bool, whole numbers or floats of
    16 to 64 bits. When this returns, the state survives a crash; when it raises StateError (disk full, no
    permission, a dtype that cannot be kept, another writer), the state committed before is intact.

    `after` is the generation this state continues, as a reader got it from `latest`. Damaged newer files, which
    `latest` passed over, then no longer count among those kept; a whole newer file means that somebody else wrote
    here meanwhile, and is refused. A `private` state is its owner's only: files of mode 0600, in a folder of mode 0700
    where it has to be made.

    >>> import tempfile, numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> commit(folder, {"x": np.array([0.1, 0.2])}, {"round": 7})
    1
    >>> commit(folder, {"x": np.array([0.3, 0.4])}, {"round": 8}, after=1)
    2
    >>> latest(folder)
    Snapshot(arrays={'x': array([0.3, 0.4])}, facts={'round': 8}, generation=2, warnings=())
    """
    folder = Path(folder)
    keep = checks.whole("keep", keep, at_least=2)
    text = plain(facts)
    with reported(f"committing to {folder}"):
        refuse_link(folder)
        make_folder(folder, private)
        with locked(folder / LOCK):
            before = generations(folder)
            generation = 1 + max((number for number, _ in before), default=0)
            good = before if after is None else continued(before, after, folder)
            publish(folder, encode(arrays, text, generation), generation, private)
            kept = {path for _, path in good[: keep - 1]}
            for _, path in before:
                if path not in kept:
                    path.unlink(missing_ok=True)
    return generation


def latest(folder: Path | str, accept: Callable[[Snapshot], None] | None = None) -> Snapshot | None:
    """Return the newest whole generation of `folder`; None where nothing was ever committed.

    Damaged generations are passed over with a warning; when there are some and none is whole, StateError lists
    them. `accept` may raise StateError to pass over a snapshot that is whole but of no use, because a file beside it
    is damaged, say. Nothing in the folder is changed, so a running one may be looked at.

    >>> latest("nowhere") is None
    True
    """
    folder = Path(folder)
    reasons: list[str] = []
    found = generations(folder)
    for _, path in found:
        try:
            snapshot = load(path)
            if accept is not None:
                accept(snapshot)
        except StateError as error:
            if not os.path.lexists(path):  # a writer has moved on while we read: newer generations are there
                return latest(folder, accept)
            reasons.append(str(error))
            continue
        passed = tuple(f"{reason}; generation {snapshot.generation} is used instead" for reason in reasons)
        return snapshot._replace(warnings=passed + foreign(folder))
    if found:
        raise StateError(f"no whole state in {folder}: {'; '.join(reasons)}")
    return None


def load(path: Path | str) -> Snapshot:
    """Read one generation from its file, whatever folder it lies in; StateError says what is wrong with it."""
    path = Path(path)
    match = NAME.fullmatch(path.name)
    if match is None:
        raise StateError(f"{path.name} is not the name of a state; expected state-<generation>-<sha256>.safetensors")
    arrays, metadata, digest = tensors.read(path)
    if digest != match[2]:
        raise StateError(f"{path.name} is damaged: its bytes do not match the checksum in its name")
    if metadata.get("fedscaffold") != VERSION:
        raise StateError(f"{path.name} has format {metadata.get('fedscaffold')!r}; this version reads {VERSION!r}")
    if metadata.get("generation") != str(int(match[1])):
        raise StateError(f"{path.name} was written as generation {metadata.get('generation')!r}")
    facts = tensors.strict_json(metadata.get("facts", ""), f"facts of {path.name}")
    return Snapshot(arrays, facts, int(match[1]))


def generations(folder: Path) -> list[tuple[int, Path]]:
    """(generation, file) of all that have the name of a state, newest first."""
    refuse_link(folder)
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def foreign(folder: Path) -> tuple[str, ...]:
    """A sentence for every safetensors file in the folder that is not named as a state."""
    strangers = sorted(path.name for path in folder.glob("*.safetensors") if not NAME.fullmatch(path.name))
    return tuple(f"{name} is not a state of this folder; it is ignored" for name in strangers)


def continued(before: list[tuple[int, Path]], after: int, folder: Path) -> list[tuple[int, Path]]:
    """The files up to generation `after`; refused when a newer one is whole: somebody else wrote it."""
    for number, path in before:
        if number > after:
            try:
                load(path)
            except StateError:
                continue
            raise StateError(f"{folder} has moved on to generation {number} while this run continued {after}")
    return [(number, path) for number, path in before if number <= after]


def publish(folder: Path, encoded: tensors.Encoded, generation: int, private: bool = False) -> None:
    """Write the temporary file, sync it, rename it, sync the folder."""
    temporary = folder / TEMPORARY
    try:
        fd = create(temporary, private)
        try:
            digest = tensors.write(fd, encoded)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(folder / f"state-{generation:08d}-{digest}.safetensors")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def encode(arrays: Mapping[str, Array], facts: str, generation: int) -> tensors.Encoded:
    """The file of one generation, laid out."""
    return tensors.encode(arrays, {"fedscaffold": VERSION, "generation": str(generation), "facts": facts})


def plain(facts: Mapping[str, JSON]) -> str:
    """Facts as JSON text that comes back as it was given.

    >>> plain({"shape": (3, 4)})
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: facts must be plain JSON that comes back as given (text keys, lists, finite
    numbers, no tuples): 'shape' does not
    """
    for key, value in facts.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            allowed = "plain JSON that comes back as given (text keys, lists, finite numbers, no tuples)"
            raise StateError(f"facts must be {allowed}: {key!r} does not")
    return json.dumps(dict(facts), separators=(",", ":"), sort_keys=True)

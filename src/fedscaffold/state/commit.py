"""Atomic commits: arrays and facts become durable together, or nothing changes.

A folder holds one file for each generation, the last two by default:

    state-00000007-<SHA-256 of the file, 64 hexadecimal digits>.safetensors

Its metadata hold `fedscaffold` (the version of the format, "1"), `generation` and `facts` (a JSON
object). Arrays that are a `vectors.FileVector` stand in files of their own, `vector-<SHA-256>`:
the version is then "2", and the metadata also hold `vectors` (a JSON object: name, dtype, size and
SHA-256 of each). A commit

    1  takes the lock of the folder              flock on .lock: one writer at a time
    -  syncs and renames new vectors, and fsyncs the folder, if there are vectors
    2  writes a temporary file                   .commit.tmp, in the same folder, hashed on its way
    3  fsyncs it                                 its bytes are on the disk
    4  renames it to its name                    atomic: the name, and with it the checksum, is
                                                 there or not
    5  fsyncs the folder                         the name is on the disk: only now is the generation
                                                 committed
    6  removes generations too old to keep       and vectors that none of the others refers to

A process killed, or a machine losing power, between any two of these leaves the old or the new
generation as the latest, bit for bit, never a mixture: before 4 the old one is untouched and the
temporary file has no valid name; after 4 the new one is complete, as its bytes were synced in 3;
nothing old is removed before 5 is done.

Reading validates everything: the name against the bytes (`sha256sum` can check it too), the header
against the size, the generation against the name, each vector against its checksum. A generation
that fails is skipped for the one before it, with a warning.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedscaffold import checks
from fedscaffold.state import safetensors_io
from fedscaffold.state.files import (
    StateError,
    create,
    locked,
    make_folder,
    refuse_link,
    reported,
    sync_folder,
)
from fedscaffold.state.safetensors_io import CODES, DTYPES, Array
from fedscaffold.state.vectors import FileVector, publish_vector, remove_vectors

__all__ = ["JSON", "Snapshot", "commit", "latest", "load"]

JSON: TypeAlias = Any
"""None, bool, int, float (finite), str, and lists and dicts (with text keys) of these."""

VERSION, WITH_VECTORS = "1", "2"
NAME = re.compile(r"state-([0-9]{8,18})-([0-9a-f]{64})\.safetensors")
LOCK = ".lock"
TEMPORARY = ".commit.tmp"


class Snapshot(NamedTuple):
    """Contents of one commit."""

    arrays: dict[str, Any]
    """Writable copies of the committed arrays; vectors of their own files as `FileVector`."""
    facts: dict[str, JSON]
    generation: int
    """Number of the commit in its folder, from 1."""
    warnings: tuple[str, ...] = ()
    """One message per skipped file: which, why, and what was used instead."""


def commit(
    folder: Path | str,
    arrays: Mapping[str, Array | FileVector],
    facts: Mapping[str, JSON],
    keep: int = 2,
    *,
    after: int | None = None,
    private: bool = False,
) -> int:
    """Commit `arrays` and `facts` to `folder`, atomically and durably, and return the generation.

    Args:
        folder: The folder; created if missing.
        arrays: Arrays of bool, integers, or floats of 16 to 64 bits. A `FileVector` must have been
            written into `folder`; it is not copied, and not written again if it was committed.
        facts: A JSON object; numbers that may be NaN or infinite belong in an array.
        keep: Number of newest generations to keep, at least 2.
        after: The generation that this state continues, as returned by `latest`. Damaged newer
            files, which `latest` skipped, are then removed; an intact newer file, written by
            another process, is an error.
        private: Whether only the owner can read the files (mode 0600, new folders 0700).

    Raises:
        StateError: The commit failed (disk full, no permission, unsupported dtype, another writer);
            the state committed before is intact.

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
    text = encode_facts(facts)
    apart = {name: array for name, array in arrays.items() if isinstance(array, FileVector)}
    held = {name: array for name, array in arrays.items() if not isinstance(array, FileVector)}
    with reported(f"committing to {folder}"):
        refuse_link(folder)
        make_folder(folder, private)
        with locked(folder / LOCK):
            before = generations(folder)
            generation = 1 + max((number for number, _ in before), default=0)
            good = before if after is None else generations_until(before, after, folder)
            for vector in apart.values():
                publish_vector(folder, vector)
            if apart:
                sync_folder(folder)
            publish(folder, encode(held, text, generation, apart), generation, private)
            kept = {path for _, path in good[: keep - 1]}
            for _, path in before:
                if path not in kept:
                    path.unlink(missing_ok=True)
            remove_unused(folder, kept, apart)
    return generation


def latest(folder: Path | str, accept: Callable[[Snapshot], None] | None = None) -> Snapshot | None:
    """Return the newest intact generation of `folder`; None if nothing was ever committed.

    Damaged generations are skipped with a warning. The folder is not changed, so that of a running
    process can be read.

    Args:
        folder: The folder.
        accept: May raise StateError to skip an intact snapshot, for example if a file it depends on
            is damaged.

    Raises:
        StateError: There are generations, but none is intact.

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
            # removed by a concurrent writer: there are newer generations
            if not os.path.lexists(path):
                return latest(folder, accept)
            reasons.append(str(error))
            continue
        passed = tuple(
            f"{reason}; generation {snapshot.generation} is used instead" for reason in reasons
        )
        return snapshot._replace(warnings=passed + foreign_warnings(folder))
    if found:
        raise StateError(f"no whole state in {folder}: {'; '.join(reasons)}")
    return None


def load(path: Path | str) -> Snapshot:
    """Read one generation from its file; raise StateError if it is damaged."""
    path = Path(path)
    match = NAME.fullmatch(path.name)
    if match is None:
        raise StateError(
            f"{path.name} is not the name of a state; expected "
            "state-<generation>-<sha256>.safetensors"
        )
    arrays, metadata, digest = safetensors_io.read(path)
    if digest != match[2]:
        raise StateError(f"{path.name} is damaged: its bytes do not match the checksum in its name")
    found = metadata.get("fedscaffold")
    if found not in (VERSION, WITH_VECTORS):
        raise StateError(
            f"{path.name} has format {found!r}, and this version reads {VERSION!r} and "
            f"{WITH_VECTORS!r}: update fedscaffold"
        )
    if metadata.get("generation") != str(int(match[1])):
        raise StateError(f"{path.name} was written as generation {metadata.get('generation')!r}")
    facts = safetensors_io.strict_json(metadata.get("facts", ""), f"facts of {path.name}")
    vectors = listed_vectors(path, metadata) if found == WITH_VECTORS else {}
    for vector in vectors.values():
        vector.check()
    return Snapshot({**arrays, **vectors}, facts, int(match[1]))


def listed_vectors(path: Path, metadata: Mapping[str, str]) -> dict[str, FileVector]:
    """Return the vectors that a generation refers to, unread."""
    listed = safetensors_io.strict_json(metadata.get("vectors", ""), f"vectors of {path.name}")
    vectors = {}
    for name, entry in listed.items():
        match entry:
            case [str(dtype), int(size), str(digest)] if dtype in DTYPES and size >= 0:
                if re.fullmatch("[0-9a-f]{64}", digest):
                    file = path.with_name(f"vector-{digest}")
                    vectors[name] = FileVector(file, DTYPES[dtype], size, digest)
                    continue
        raise StateError(f"{path.name}: vector {name!r} is not a known dtype, a size and a SHA-256")
    return vectors


def remove_unused(folder: Path, kept: Iterable[Path], now: Mapping[str, FileVector]) -> None:
    """Remove vectors to which neither this commit nor the kept generations refer."""
    used = {vector.digest for vector in now.values()}
    for path in kept:
        try:
            metadata = safetensors_io.read_metadata(path)
            if metadata.get("fedscaffold") == WITH_VECTORS:
                used |= {vector.digest for vector in listed_vectors(path, metadata).values()}
        except StateError:
            return  # it cannot be said what a damaged generation refers to
    remove_vectors(folder, used)


def generations(folder: Path) -> list[tuple[int, Path]]:
    """Return (generation, file) of all commits in a folder, newest first."""
    refuse_link(folder)
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def foreign_warnings(folder: Path) -> tuple[str, ...]:
    """Return a warning for every safetensors file in the folder that is not a commit."""
    strangers = sorted(
        path.name for path in folder.glob("*.safetensors") if not NAME.fullmatch(path.name)
    )
    return tuple(f"{name} is not a state of this folder; it is ignored" for name in strangers)


def generations_until(
    before: list[tuple[int, Path]], after: int, folder: Path
) -> list[tuple[int, Path]]:
    """Return the files up to generation `after`; raise StateError if a newer one is intact."""
    for number, path in before:
        if number > after:
            try:
                load(path)
            except StateError:
                continue
            raise StateError(
                f"{folder} has moved on to generation {number} while this run continued {after}"
            )
    return [(number, path) for number, path in before if number <= after]


def publish(
    folder: Path, encoded: safetensors_io.Encoded, generation: int, private: bool = False
) -> None:
    """Write the temporary file, sync it, rename it, sync the folder."""
    temporary = folder / TEMPORARY
    try:
        fd = create(temporary, private)
        try:
            digest = safetensors_io.write(fd, encoded)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(folder / f"state-{generation:08d}-{digest}.safetensors")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def encode(
    arrays: Mapping[str, Array],
    facts: str,
    generation: int,
    vectors: Mapping[str, FileVector] | None = None,
) -> safetensors_io.Encoded:
    """Encode the file of one generation, which refers to `vectors`."""
    metadata = {"fedscaffold": VERSION, "generation": str(generation), "facts": facts}
    if vectors:
        listed = {name: [CODES[v.dtype], v.size, v.digest] for name, v in vectors.items()}
        metadata |= {"fedscaffold": WITH_VECTORS, "vectors": json.dumps(listed)}
    return safetensors_io.encode(arrays, metadata)


def encode_facts(facts: Mapping[str, JSON]) -> str:
    """Encode facts as JSON; raise StateError unless decoding returns an equal value.

    >>> encode_facts({"shape": (3, 4)})
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: facts must be plain JSON that comes back as given (text
        keys, lists, finite
    numbers, no tuples): 'shape' does not
    """
    for key, value in facts.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            allowed = (
                "plain JSON that comes back as given (text keys, lists, finite numbers, no tuples)"
            )
            raise StateError(f"facts must be {allowed}: {key!r} does not")
    return json.dumps(dict(facts), separators=(",", ":"), sort_keys=True)

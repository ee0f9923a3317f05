"""Vectors in files of their own: written block by block, read slice by slice.

A vector that is too large to be held for every client stands in a file of raw little-endian
numbers. It is read with pread (`rowfile` says why not by a memory map), so that it takes no more
memory than the slice that is read.

A vector that is written is a draft: its file is removed with the last reference to it. `commit`
makes it durable under the name

    vector-<SHA-256 of its bytes>

beside the generations that refer to it, and removes it with the last of them. A generation that is
committed again with the same vector only refers to it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedscaffold.state.files import CHUNK, StateError, create, open_file, reported, write_all
from fedscaffold.state.platforms import require
from fedscaffold.state.safetensors_io import Array, raw

__all__ = ["FileVector", "VectorWriter", "publish_vector", "remove_vectors"]

NAME = re.compile(r"vector-([0-9a-f]{64})")
DRAFT = ".draft-"
_token = secrets.token_hex(4)  # a process that is started again may have the same number
_numbers = itertools.count()


class FileVector:
    """A vector in a file; a slice of it is a NumPy array, as is `np.asarray` of it.

    >>> import tempfile
    >>> writer = VectorWriter(Path(tempfile.mkdtemp()), "float32")
    >>> writer.append(np.arange(3, dtype=np.float32))
    >>> writer.append(np.arange(3, 5, dtype=np.float32))
    >>> vector = writer.finish()
    >>> vector.shape, vector[2:4], np.asarray(vector, np.float64)
    ((5,), array([2., 3.], dtype=float32), array([0., 1., 2., 3., 4.]))
    """

    ndim = 1

    def __init__(self, path: Path, dtype: npt.DTypeLike, size: int, digest: str) -> None:
        self.path, self.dtype, self.size, self.digest = path, np.dtype(dtype), size, digest
        self.remove: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"FileVector({self.path.name!r}, {self.dtype}, {self.size})"

    def __len__(self) -> int:
        return self.size

    @property
    def shape(self) -> tuple[int]:
        """The length, as a shape."""
        return (self.size,)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, place: slice) -> Array:
        begin, end, step = place.indices(self.size)
        if step != 1:
            raise IndexError("a vector in a file is read by slices of step 1")
        block = np.empty(max(0, end - begin), self.dtype)
        view, done, offset = raw(block), 0, begin * self.dtype.itemsize
        with reported(f"reading {self.path.name}"):
            fd = open_file(self.path)
            try:
                while done < len(view):
                    count = os.preadv(fd, [view[done : done + CHUNK]], offset + done)
                    if not count:
                        raise StateError(f"{self.path.name} is truncated")
                    done += count
            finally:
                os.close(fd)
        return block

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def check(self) -> None:
        """Raise StateError unless the file has the vector's length and digest."""
        with reported(f"reading {self.path.name}"):
            fd = open_file(self.path)
            try:
                size, found = os.fstat(fd).st_size, hashlib.sha256()
                buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
                while size == self.nbytes and (count := os.readv(fd, [buffer])):
                    found.update(buffer[:count])
            finally:
                os.close(fd)
        if size != self.nbytes or found.hexdigest() != self.digest:
            raise StateError(f"{self.path.name} is damaged: its bytes do not match its checksum")


class VectorWriter:
    """Writes a draft of a vector block by block; only its owner may read it.

    Args:
        folder: The folder to write it into.
        dtype: Type of its numbers.
        passing: Whether it will never be committed, so that it needs no digest.
    """

    def __init__(self, folder: Path, dtype: npt.DTypeLike, passing: bool = False) -> None:
        require("preadv", "a model of this size")
        self.path = folder / f"{_mine()}{next(_numbers)}"
        self.dtype, self.size = np.dtype(dtype).newbyteorder("<"), 0
        self.digest = None if passing else hashlib.sha256()
        with reported(f"writing a vector into {folder}"):
            self.fd = create(self.path, private=True)
        self.remove = weakref.finalize(self, _abandon, self.path, self.fd)

    def append(self, block: Array) -> None:
        """Write the next numbers."""
        view = raw(np.ascontiguousarray(block, self.dtype))
        if self.digest is not None:
            self.digest.update(view)
        with reported(f"writing a vector into {self.path.parent}"):
            write_all(self.fd, view)
        self.size += len(block)

    def finish(self) -> FileVector:
        """Close the file and return its vector."""
        self.remove.detach()
        os.close(self.fd)
        digest = "" if self.digest is None else self.digest.hexdigest()
        vector = FileVector(self.path, self.dtype, self.size, digest)
        vector.remove = weakref.finalize(vector, _abandon, self.path)
        return vector


def _mine() -> str:
    """Return how the names of this process's drafts begin."""
    return f"{DRAFT}{_token}-{os.getpid()}-"


def _abandon(path: Path, fd: int | None = None) -> None:
    """Close and remove the file of a draft, unless a fork of its writer ends."""
    if not path.name.startswith(_mine()):
        return
    if fd is not None:
        os.close(fd)
    path.unlink(missing_ok=True)


def publish_vector(folder: Path, vector: FileVector) -> None:
    """Make a vector durable under its name; its folder must be synced afterwards.

    Raises:
        StateError: If it was written into another folder.
    """
    name = f"vector-{vector.digest}"
    if vector.path.parent.resolve() != folder.resolve():
        raise StateError(f"{vector.path} is not in {folder}, where it would be committed")
    if vector.remove is None or not vector.remove.alive:  # it was committed before
        return
    fd = open_file(vector.path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    vector.path.replace(folder / name)
    vector.remove.detach()
    vector.path = folder / name


def remove_vectors(folder: Path, kept: Collection[str]) -> None:
    """Remove drafts that a killed process left, and vectors whose digest is not in `kept`."""
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        left = path.name.startswith(DRAFT) and not path.name.startswith(_mine())
        if left or (match and match[1] not in kept):
            path.unlink(missing_ok=True)

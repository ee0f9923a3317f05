"""Client records on disk, read per cohort.

A folder holds one file per column (`column-0`, `column-1`, ...: the records of all clients
concatenated, little-endian, C order) and one commit (see `commit.py`) with the clients' offsets as
an array and the columns' names, dtypes, shapes and checksums as facts. The commit is written last:
a folder without it is incomplete.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedscaffold import checks
from fedscaffold.state.commit import commit, latest
from fedscaffold.state.files import CHUNK, StateError, create, make_folder, open_file, reported
from fedscaffold.state.safetensors_io import CODES, DTYPES, Array, raw

__all__ = ["Records", "write_records"]


class Column(NamedTuple):
    """One field of all records."""

    fd: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one record."""
    width: int
    """Size of one record in bytes."""
    crc: int


class Records:
    """Client records in a folder written by `write_records`, read by client.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> clients = ({"x": np.full((i, 2), float(i)), "y": np.arange(i)} for i in (1, 2, 3))
    >>> records = write_records(folder, clients)
    >>> len(records), records.counts.tolist(), records[1]["y"].tolist()
    (3, [1, 2, 3], [0, 1])
    >>> rows, offsets = records.gather([2, 0])
    >>> rows["y"].tolist(), offsets.tolist()
    ([0, 1, 2, 0], [0, 3, 4])
    >>> records.close()
    """

    def __init__(self, folder: Path | str) -> None:
        snapshot = latest(folder)
        if snapshot is None:
            raise StateError(f"{folder} holds no records; write some with write_records")
        offsets, columns = snapshot.arrays.get("offsets"), snapshot.facts.get("columns")
        if (
            offsets is None
            or offsets.dtype != np.int64
            or offsets.ndim != 1
            or not isinstance(columns, list)
        ):
            raise StateError(f"{folder} holds a state, but no records")
        if len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise StateError(f"{folder}: the offsets of its records do not ascend from 0")
        self.folder, self.offsets, self.columns = Path(folder), offsets, dict[str, Column]()
        try:
            for number, facts in enumerate(columns):
                self.open_column(number, facts)
        except StateError:
            self.close()
            raise

    def open_column(self, number: int, facts: Mapping[str, Any]) -> None:
        """Open the file of a column and check its size."""
        path = self.folder / f"column-{number}"
        try:
            name = str(facts["name"])
            dtype = np.dtype(DTYPES[facts["dtype"]])
            crc = int(facts["crc"])
            shape = tuple(checks.whole("shape", length) for length in facts["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{path} is not described by its name, dtype, shape and checksum"
            ) from error
        width = dtype.itemsize * math.prod(shape)
        with reported(f"opening {path}", intact="nothing was changed"):
            fd = open_file(path)
        self.columns[name] = Column(fd, dtype, shape, width, crc)
        if (size := os.fstat(fd).st_size) != (right := width * int(self.offsets[-1])):
            raise StateError(f"{path} has {size} bytes and should have {right}; copy it again")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of records of each client."""
        counts: npt.NDArray[np.int64] = np.diff(self.offsets)
        return counts

    def __getitem__(self, client: int) -> dict[str, Array]:
        rows, _ = self.gather([client])
        return rows

    def gather(self, clients: npt.ArrayLike) -> tuple[dict[str, Array], npt.NDArray[np.int64]]:
        """Return the concatenated records of some clients, and their offsets."""
        who = np.asarray(clients, np.int64)
        if who.ndim != 1 or (who.size and (who.min() < 0 or who.max() >= len(self))):
            raise checks.InputError(
                f"clients must be a list of numbers from 0 to {len(self) - 1}, got {clients!r}"
            )
        begin, counts = self.offsets[who], self.offsets[who + 1] - self.offsets[who]
        ends = np.concatenate([[0], np.cumsum(counts)])
        rows = {
            name: np.empty((int(ends[-1]), *column.shape), column.dtype)
            for name, column in self.columns.items()
        }
        with reported(f"reading records in {self.folder}", intact="nothing was changed"):
            for name, column in self.columns.items():
                view = raw(rows[name])
                for start, end, place in zip(
                    ends[:-1].tolist(), ends[1:].tolist(), begin.tolist(), strict=True
                ):
                    piece = view[start * column.width : end * column.width]
                    read_at(column.fd, piece, place * column.width)
        return rows, ends

    def verify(self) -> None:
        """Read all columns and compare checksums; raise StateError for a damaged one."""
        for name, column in self.columns.items():
            total, place = 0, 0
            with reported(f"reading {self.folder}", intact="nothing was changed"):
                while piece := os.pread(column.fd, CHUNK, place):
                    total, place = zlib.crc32(piece, total), place + len(piece)
            if total != column.crc:
                raise StateError(f"column {name!r} of {self.folder} is damaged; copy it again")

    def close(self) -> None:
        """Close the files."""
        for column in self.columns.values():
            os.close(column.fd)
        self.columns = {}


class Writing(NamedTuple):
    """A column while it is written."""

    name: str
    file: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def read_at(fd: int, view: memoryview, place: int) -> None:
    """Fill `view` from the file at byte `place`, repeating short reads."""
    while view:
        if not (count := os.preadv(fd, [view], place)):
            raise StateError("a column was cut short while it was in use; copy the folder again")
        view, place = view[count:], place + count


def write_records(folder: Path | str, clients: Iterable[Mapping[str, npt.ArrayLike]]) -> Records:
    """Write client records to a new folder, one client at a time, and open it.

    Args:
        folder: The folder; must hold no records or state.
        clients: Yields a dict of columns per client, all with the same number of rows. Names,
            dtypes and row shapes must be those of the first client.
    """
    folder = Path(folder)
    if latest(folder) is not None:
        raise StateError(f"{folder} holds records or a state already; take another folder")
    columns: list[Writing] = []
    counts: list[int] = []
    sums: list[int] = []
    with reported(f"writing records to {folder}", intact="the folder is no source yet"):
        make_folder(folder)
        try:
            for number, client in enumerate(clients):
                given = {name: np.asarray(column) for name, column in client.items()}
                if not columns:
                    columns = [
                        create_column(folder, place, name, given[name])
                        for place, name in enumerate(given)
                    ]
                    sums = [0] * len(columns)
                counts.append(check_columns(number, given, columns))
                for place, column in enumerate(columns):
                    view = raw(np.ascontiguousarray(given[column.name], column.dtype))
                    column.file.write(view)
                    sums[place] = zlib.crc32(view, sums[place])
            for column in columns:
                column.file.flush()
                os.fsync(column.file.fileno())
        finally:
            for column in columns:
                column.file.close()
    if not counts:
        raise checks.InputError("clients must hold at least one client, got an empty iterable")
    facts = [
        {
            "name": column.name,
            "dtype": CODES[column.dtype],
            "shape": list(column.shape),
            "crc": total,
        }
        for column, total in zip(columns, sums, strict=True)
    ]
    commit(
        folder,
        {"offsets": np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])},
        {"columns": facts},
    )
    return Records(folder)


def create_column(folder: Path, number: int, name: str, first: Array) -> Writing:
    """Create the file of a column, with dtype and row shape of the first client's."""
    little = first.dtype.newbyteorder("<")
    if little not in CODES or first.ndim == 0 or 0 in first.shape[1:] or not isinstance(name, str):
        raise checks.InputError(
            f"column {name!r} must be an array of numbers with one row for each record"
        )
    return Writing(
        name, os.fdopen(create(folder / f"column-{number}"), "wb", 1 << 20), little, first.shape[1:]
    )


def check_columns(number: int, given: Mapping[str, Array], columns: list[Writing]) -> int:
    """Return a client's number of records, after checking its columns.

    They must be like the first client's, equally long and finite.
    """
    if given.keys() != {column.name for column in columns}:
        raise checks.InputError(
            f"client {number} has columns {sorted(given)}, the first has other ones"
        )
    rows = {len(array) if array.ndim else -1 for array in given.values()}
    if len(rows) != 1:
        raise checks.InputError(f"client {number} has columns of different length")
    for column in columns:
        array = given[column.name]
        if array.dtype.newbyteorder("<") != column.dtype or array.shape[1:] != column.shape:
            raise checks.InputError(
                f"client {number}: column {column.name!r} is not like the first client's"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise checks.InputError(
                f"client {number}: column {column.name!r} must be finite, found NaN or inf"
            )
    return rows.pop()

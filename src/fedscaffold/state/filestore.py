"""File store of client vectors, limited by the disk only.

The cost of a round does not depend on the number of clients.

Files of a store, named after a random identity so that two runs never mix:

    rows-<id>            the base: row i of N at offset i * stride; sparse, clients never heard take
                         no space
    rows-<id>-<number>   a segment: the rows written between two commits, in order of writing

Rows are written to the current segment only: nothing that a commit refers to is changed, and no
fsync is needed before the next commit. `snapshot` syncs the segment and returns what the commit
must hold: the bitmap of clients seen, and the segments above the base with their clients and
checksums. After a crash, `restore` uses these and ignores later writes.

Segments are merged into the base. Let s(g) be the rows written between the commits g-1 and g.
Commit g lists s(g-1) and s(g), so once it is done, both generations that may have to be restored, g
and g-1, list s(g-1): its rows may be copied to the base, as many with each write as are written,
the rest with the next snapshot. Either generation still reads them from the segment, so a partly
written base does no harm. A segment is deleted when neither of the last two commits lists it; older
generations can then not be restored.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedscaffold import checks
from fedscaffold.state.files import (
    StateError,
    locked,
    make_folder,
    refuse_link,
    reported,
    sync_folder,
)
from fedscaffold.state.rowfile import RowFile, Segment
from fedscaffold.state.safetensors_io import Array
from fedscaffold.state.stores import (
    Clients,
    check_clients,
    check_rows,
    check_snapshot_clients,
    snapshot_array,
)

__all__ = ["FileStore"]

INTACT = "the generations committed before are intact; resume from the last"


class FileStore:
    """Store of client vectors in files of `folder`; see the module docstring.

    One process may write. With `read_only`, other processes may restore a generation and read it;
    their reads are valid if the commit still exists afterwards, as nothing that it refers to
    changes before it is deleted.

    >>> import tempfile
    >>> store = FileStore(tempfile.mkdtemp(), 1_000_000, 3, "float64")
    >>> store.write([999_999], np.array([[1.0, 2.0, 3.0]]))
    >>> store.read([999_999, 4])
    array([[1., 2., 3.],
           [0., 0., 0.]])
    >>> store.close()
    """

    def __init__(
        self,
        folder: Path | str,
        num_clients: int,
        dim: int,
        dtype: npt.DTypeLike = np.float32,
        *,
        read_only: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.num_clients = checks.whole("num_clients", num_clients)
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.identity = secrets.token_hex(8)
        self.seen = np.zeros((num_clients + 7) // 8, np.uint8)
        self.base: RowFile | None = None
        self.spent: list[
            Segment
        ] = []  # listed by the last commit but one only; merged into the base
        self.listed: list[Segment] = []  # listed by the last commit, the newer one last
        self.current: Segment | None = None
        self.due: list[
            int
        ] = []  # clients of the older listed segment whose rows are not yet in the base
        self.pending = False  # between snapshot() and committed(): no writes
        self.read_only, self.held = read_only, ExitStack()
        if not read_only:
            with reported(f"opening {folder}", intact=INTACT):
                refuse_link(self.folder)
                make_folder(self.folder)
                self.held.enter_context(locked(self.folder / ".rows.lock"))

    def read(self, clients: npt.ArrayLike) -> Array:
        """Return the (S, d) vectors of some clients; raise StateError for a damaged row."""
        who = check_clients(clients, self.num_clients)
        rows = np.zeros((len(who), self.dim), self.dtype)
        heard = np.flatnonzero(get_bits(self.seen, who))
        places = [
            (place, client, self.find_segment(client))
            for place, client in zip(heard, who[heard].tolist(), strict=True)
        ]
        with reported(f"reading client rows in {self.folder}", intact=INTACT):
            for _, client, segment in places:
                if segment is None:
                    self.base_file().prefetch(client)
            for place, client, segment in places:
                if segment is None:
                    self.base_file().get(client, client, rows[place])
                else:
                    segment.get(client, rows[place])
        return rows

    def write(self, clients: npt.ArrayLike, rows: Array) -> None:
        """Write the vectors of some clients to the current segment."""
        who = check_clients(clients, self.num_clients)
        given = check_rows(rows, len(who), self.dim, self.dtype)
        if self.pending:
            raise StateError("rows must not be written between snapshot() and committed()")
        with reported(f"writing client rows in {self.folder}", intact=INTACT):
            segment = self.current_segment()
            for client, row in zip(who.tolist(), given, strict=True):
                segment.put(client, row)
            self.merge_rows(len(who))
        np.bitwise_or.at(self.seen, who >> 3, np.left_shift(1, who & 7).astype(np.uint8))

    def chunks(self, size: int = 256) -> Iterator[tuple[Clients, Array]]:
        """Yield the clients ever written and their vectors, `size` at a time."""
        step = 1 << 16
        for start in range(0, len(self.seen), step):
            heard = (
                np.flatnonzero(np.unpackbits(self.seen[start : start + step], bitorder="little"))
                + 8 * start
            )
            for first in range(0, len(heard), size):
                yield heard[first : first + size], self.read(heard[first : first + size])

    def snapshot(self) -> dict[str, Array]:
        """Sync all rows and return the arrays that the commit must hold.

        Rows must not be written until `committed` is called.
        """
        with reported(f"keeping client rows in {self.folder}", intact=INTACT):
            segment = self.current_segment()
            self.merge_rows(len(self.due))
            for file in (segment.file, self.base):
                if file is not None:
                    file.sync()
            sync_folder(self.folder)
        self.pending = True
        listed = [*self.listed[-1:], segment]
        return {
            "identity": np.frombuffer(bytes.fromhex(self.identity), np.uint8),
            "shape": np.array([self.num_clients, self.dim, self.dtype.itemsize]),
            "seen": self.seen,
            "segments": np.array([each.number for each in listed]),
            "counts": np.array([len(each.slots) for each in listed]),
            "clients": np.concatenate([np.fromiter(each.slots, np.int64) for each in listed]),
            "sums": np.concatenate([np.array(each.sums, np.uint32) for each in listed]),
        }

    def committed(self) -> None:
        """Start a new segment and delete those that neither of the last two commits lists."""
        if not self.pending or self.current is None:
            raise StateError(
                "committed() must follow snapshot() and the commit of what it returned"
            )
        for segment in self.spent:
            segment.file.close()
        self.spent, self.listed = self.listed[:-1], [*self.listed[-1:], self.current]
        self.current, self.pending = None, False
        self.schedule_merge()
        kept = {segment.number for segment in self.spent + self.listed}
        with reported(f"tidying {self.folder}", intact="all that was committed is intact"):
            for number in self.segment_numbers() - kept:
                self.path(number).unlink(missing_ok=True)

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state of a snapshot, after checking every row above the base."""
        self.reset()
        try:
            self.open_snapshot(arrays)
        except BaseException:
            self.reset()
            raise

    def close(self) -> None:
        """Close all files; rows written since the last commit are lost."""
        self.reset()
        self.held.close()

    def find_segment(self, client: int) -> Segment | None:
        """Return the newest segment with a row of this client; None if its row is in the base."""
        for segment in (self.current, *reversed(self.listed)):
            if segment is not None and client in segment.slots:
                return segment
        return None

    def base_file(self) -> RowFile:
        """Return the base file; raise StateError if it is missing."""
        if self.base is None:
            raise StateError(
                f"{self.path().name} is missing from {self.folder}; it holds rows of clients"
            )
        return self.base

    def current_segment(self) -> Segment:
        """Return the current segment, creating it with an unused number if needed."""
        if self.read_only:
            raise StateError(f"the rows in {self.folder} were opened to be read only")
        if self.current is None:
            number = 1 + max(self.segment_numbers(), default=0)
            self.current = Segment(number, RowFile(self.path(number), self.dim, self.dtype))
        return self.current

    def schedule_merge(self) -> None:
        """Schedule the rows of the older of two listed segments for merging into the base."""
        self.due = sorted(self.listed[0].slots, reverse=True) if len(self.listed) == 2 else []

    def merge_rows(self, count: int) -> None:
        """Copy up to `count` scheduled rows into the base."""
        if self.due and self.base is None:
            self.base = RowFile(self.path(), self.dim, self.dtype)
        row = np.empty(self.dim, self.dtype)
        for client in self.due[: -count - 1 : -1]:
            self.listed[0].get(client, row)
            self.base_file().put(client, client, row)
            self.due.pop()

    def open_snapshot(self, arrays: Mapping[str, Array]) -> None:
        """Open the files of a snapshot and check every row above the base."""
        self.identity, seen, segments = parse_snapshot(
            arrays, self.num_clients, self.dim, self.dtype
        )
        row = np.empty(self.dim, self.dtype)
        for number, clients, sums in segments:
            segment = Segment(number, self.open_rows(self.path(number)))
            self.listed.append(segment)
            segment.slots = {client: slot for slot, client in enumerate(clients.tolist())}
            segment.sums.extend(sums.tolist())
            with reported(
                f"reading {segment.file.path}", intact="an older generation may be whole"
            ):
                for client in segment.slots:
                    segment.get(client, row)
        above = {client for segment in self.listed for client in segment.slots}
        if self.path().exists() or np.bitwise_count(seen).sum() > len(above):
            self.base = self.open_rows(self.path())
        self.seen = seen
        self.schedule_merge()

    def open_rows(self, path: Path) -> RowFile:
        """Open an existing file of rows."""
        with reported(
            f"opening {path.name} in {self.folder}", intact="an older generation may be whole"
        ):
            return RowFile(path, self.dim, self.dtype, os.O_RDONLY if self.read_only else os.O_RDWR)

    def path(self, number: int | None = None) -> Path:
        """Return the path of the base, or of a segment."""
        return self.folder / (
            f"rows-{self.identity}" + ("" if number is None else f"-{number:08d}")
        )

    def segment_numbers(self) -> set[int]:
        """Return the numbers of this store's segments on disk."""
        begin = f"rows-{self.identity}-"
        return {int(path.name.removeprefix(begin)) for path in self.folder.glob(begin + "[0-9]*")}

    def reset(self) -> None:
        """Close all files and reset the store; a segment that no commit lists is deleted."""
        current = [] if self.current is None else [self.current]
        for segment in current:
            if not self.pending:
                segment.file.path.unlink(missing_ok=True)
        for file in [segment.file for segment in self.spent + self.listed + current] + [self.base]:
            if file is not None:
                file.close()
        self.base, self.current, self.pending = None, None, False
        self.spent, self.listed, self.due = [], [], []
        self.seen = np.zeros_like(self.seen)


def parse_snapshot(
    arrays: Mapping[str, Array], num_clients: int, dim: int, dtype: np.dtype[np.generic]
) -> tuple[str, Array, list[tuple[int, Clients, Array]]]:
    """Parse a snapshot: identity, bitmap, and segments of (number, clients, checksums)."""
    identity = snapshot_array(arrays, "identity", np.uint8, (8,)).tobytes().hex()
    shape = snapshot_array(arrays, "shape", np.int64, (3,)).tolist()
    if shape != [num_clients, dim, dtype.itemsize]:
        raise StateError(
            f"the snapshot has {shape[0]} clients, d = {shape[1]} and {shape[2]} bytes for a number"
        )
    seen = snapshot_array(arrays, "seen", np.uint8, ((num_clients + 7) // 8,)).copy()
    numbers = snapshot_array(arrays, "segments", np.int64, (None,))
    counts = snapshot_array(arrays, "counts", np.int64, (len(numbers),))
    clients = snapshot_array(arrays, "clients", np.int64, (None,))
    sums = snapshot_array(arrays, "sums", np.uint32, (len(clients),))
    if not 1 <= len(numbers) <= 2 or min(*counts, *numbers) < 0 or counts.sum() != len(clients):
        raise StateError("the snapshot's segments do not fit their lists of clients")
    ends = np.cumsum(counts)
    segments = [
        (number, clients[end - count : end], sums[end - count : end])
        for number, count, end in zip(numbers.tolist(), counts, ends, strict=True)
    ]
    for _, who, _ in segments:
        if not get_bits(seen, check_snapshot_clients(who, num_clients)).all():
            raise StateError("the snapshot has rows of clients it has not seen")
    return identity, seen, segments


def get_bits(packed: Array, places: Clients) -> npt.NDArray[np.bool_]:
    """Return which bits of a bitmap are set.

    >>> get_bits(np.array([0b101], np.uint8), np.array([0, 1, 2]))
    array([ True, False,  True])
    """
    flags: npt.NDArray[np.bool_] = np.right_shift(packed[places >> 3], places & 7) % 2 == 1
    return flags

"""Files of client rows: fixed width, one checksum per row, read and written by position.

    a row     d numbers, then their CRC-32, seeded with the client number, which detects misplaced
              rows too

Rows are read with pread and written with pwrite. A memory map would read ahead far more than the
wanted row, signal disk errors with SIGBUS, and count as memory of the process.
"""

from __future__ import annotations

import os
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedscaffold.state.files import StateError, create, open_file
from fedscaffold.state.safetensors_io import Array

__all__ = ["RowFile", "Segment"]


class RowFile:
    """A file of rows of one width; slot j starts at byte j * stride.

    Creates a new file, or opens an existing one if `flags` is given.
    """

    def __init__(
        self, path: Path, dim: int, dtype: npt.DTypeLike, flags: int | None = None
    ) -> None:
        self.path, self.stride = path, dim * np.dtype(dtype).itemsize + 4
        self.fd = create(path) if flags is None else open_file(path, flags)
        if hasattr(os, "posix_fadvise"):
            # rows are read in random order: no readahead
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def prefetch(self, slot: int) -> None:
        """Advise the system to prefetch a row."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, slot * self.stride, self.stride, os.POSIX_FADV_WILLNEED)

    def get(self, slot: int, client: int, row: Array) -> int:
        """Read the row at `slot` into `row` and return its checksum.

        Raises:
            StateError: If the row is damaged, or not that client's.
        """
        stored = bytearray(4)
        count = os.preadv(self.fd, [row.view(np.uint8).data, stored], slot * self.stride)
        total = checksum(row, client)
        if count != self.stride or stored != total.to_bytes(4, "little"):
            raise StateError(f"the row of client {client} in {self.path.name} is damaged")
        return total

    def put(self, slot: int, client: int, row: Array) -> int:
        """Write the row and its checksum at `slot`; return the checksum."""
        total = checksum(row, client)
        pieces: list[Any] = [row.view(np.uint8).data, total.to_bytes(4, "little")]
        offset = slot * self.stride
        done = os.pwritev(self.fd, pieces, offset)
        if done < self.stride:  # a short write, when the disk is nearly full
            whole = b"".join(pieces)
            while done < self.stride:
                done += os.pwrite(self.fd, whole[done:], offset + done)
        return total

    def sync(self) -> None:
        """Sync the file to disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class Segment:
    """Rows written between two commits, with the slot of each client and the checksums."""

    def __init__(self, number: int, file: RowFile) -> None:
        self.number, self.file = number, file
        self.slots: dict[int, int] = {}
        self.sums = array("I")

    def put(self, client: int, row: Array) -> None:
        """Write the row of a client, replacing an earlier one in this segment."""
        slot = self.slots.get(client, len(self.slots))
        total = self.file.put(slot, client, row)
        self.sums[slot : slot + 1] = array("I", [total])
        self.slots[client] = slot

    def get(self, client: int, row: Array) -> None:
        """Read the row of a client; raise StateError if it is not the one written."""
        slot = self.slots[client]
        if self.file.get(slot, client, row) != self.sums[slot]:
            raise StateError(
                f"the row of client {client} in {self.file.path.name} is not the one committed"
            )


def checksum(row: Array, client: int) -> int:
    """Return the CRC-32 of a row, seeded with the client number."""
    return zlib.crc32(row.view(np.uint8).data, client & 0xFFFFFFFF)

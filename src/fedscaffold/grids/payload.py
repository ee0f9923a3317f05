"""The cells of a grid as bytes, for processes that belong to it.

Losses, schedules and metrics are often closures, which cloudpickle can send; arrays are kept apart,
so that workers map them from one file instead of copying them. Such bytes are code: they are read
only by processes that this grid started, or by the executor that the user gave it, from an unlinked
file, a private file or the task itself. No folder of results holds them after the grid has ended.
"""

from __future__ import annotations

import copy
import mmap
import os
import pickle  # noqa: TID251 (to our own processes only, see above)
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from fedscaffold.grids.cells import Cell
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import RunConfig

__all__ = ["dump", "load", "load_file"]

ALIGNED = 64  # bytes; XLA uses aligned host arrays without a copy
SIZE = struct.Struct("<Q")


def dump(cells: Sequence[Cell], file: BinaryIO) -> None:
    """Write the runs' configurations to a file.

    Raises:
        Exception: Something in them cannot be sent to another process.
    """
    import cloudpickle

    sent: dict[int, Problem] = {}
    configs = [replace(cell.config, problem=_without_device(cell, sent)) for cell in cells]
    buffers: list[pickle.PickleBuffer] = []
    stream = cloudpickle.dumps(configs, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [len(stream), *(view.nbytes for view in views)]
    file.write(SIZE.pack(len(sizes)) + b"".join(map(SIZE.pack, sizes)))
    for part in (stream, *views):
        file.write(bytes(-file.tell() % ALIGNED))
        file.write(part)
    file.flush()


def load(data: bytes | memoryview) -> list[RunConfig]:
    """Return the configurations of `dump`; their arrays are read-only views of `data`."""
    view = memoryview(data)
    [number] = SIZE.unpack_from(view)
    sizes = [SIZE.unpack_from(view, SIZE.size * (1 + i))[0] for i in range(number)]
    at, parts = SIZE.size * (1 + number), []
    for size in sizes:
        at += -at % ALIGNED
        parts.append(view[at : at + size])
        at += size
    configs: list[RunConfig] = pickle.loads(parts[0], buffers=parts[1:])
    return configs


def load_file(fd: int) -> list[RunConfig]:
    """Return the configurations in an open file, whose arrays are mapped and not copied."""
    mapped = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
    return load(memoryview(mapped))


def _without_device(cell: Cell, sent: dict[int, Problem]) -> Any:
    """Return a cell's problem without its copies on devices, the same object for all its cells."""
    problem = cell.config.problem
    if id(problem) not in sent:
        sent[id(problem)] = copy.copy(problem)
        sent[id(problem)]._device = {}
    return sent[id(problem)]

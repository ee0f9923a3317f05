"""Readers of npz, idx, libsvm and CSV files.

Each takes the bytes of a file, and its name for messages. It returns arrays, or raises InputError
if the file is damaged or has another format.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from fedscaffold.checks import InputError
from fedscaffold.data.dataset import Array, Floats, Indices

__all__ = ["csv_table", "idx_array", "libsvm_table", "npz_arrays"]

FLOAT32_MAX = float(np.finfo(np.float32).max)


def npz_arrays(raw: bytes, names: Sequence[str], where: str) -> list[Array]:
    """Return the named arrays of an npz archive; never unpickles.

    >>> np.savez(file := io.BytesIO(), y=np.arange(3), objects=np.array([{}]))
    >>> npz_arrays(file.getvalue(), ["y"], "mine.npz")
    [array([0, 1, 2])]
    >>> npz_arrays(file.getvalue(), ["objects"], "mine.npz")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: mine.npz is damaged or not an npz with the arrays objects; fetch
        it again
    """
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            return [archive[name] for name in names]
    # damaged bytes raise whatever zipfile, zlib, struct, ast and numpy raise, MemoryError included
    except Exception:
        wanted = f"an npz with the arrays {', '.join(names)}"
        raise InputError(f"{where} is damaged or not {wanted}; fetch it again") from None


def idx_array(raw: bytes, ndim: int, where: str) -> npt.NDArray[np.uint8]:
    """Return the unsigned bytes of an idx file (the format of MNIST) with `ndim` dimensions.

    The header is 0, 0, 8 (unsigned bytes), ndim and one big-endian 32-bit number per dimension.

    >>> idx_array(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1, "labels")
    array([7, 9], dtype=uint8)
    >>> idx_array(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7]), 1, "labels")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: labels is damaged or not an idx file of unsigned bytes with 1
    dimension(s); fetch it again
    """
    start = 4 + 4 * ndim
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if raw[:4] != bytes([0, 0, 8, ndim]) or len(raw) != start + math.prod(shape):
        wanted = f"an idx file of unsigned bytes with {ndim} dimension(s)"
        raise InputError(f"{where} is damaged or not {wanted}; fetch it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def libsvm_table(raw: bytes, features: int, where: str) -> tuple[Floats, npt.NDArray[np.float64]]:
    r"""Return the dense (n, features) matrix and the labels of lines `label index:value ...`.

    Indices count from 1. Every distinct word is parsed once, which makes files of 0/1 features
    cheap to read.

    >>> x, labels = libsvm_table(b"-1 2:1 3:0.5\n+1 1:1\n", 3, "tiny")
    >>> x.tolist(), labels.tolist()
    ([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]], [-1.0, 1.0])
    """
    lines = [line.split() for line in raw.splitlines()]
    sizes = np.fromiter(map(len, lines), np.intp, len(lines))
    words = list(chain.from_iterable(lines))
    if not words:
        raise InputError(f"{where} is empty; fetch it again")
    ids = {word: k for k, word in enumerate(dict.fromkeys(words))}
    parsed = np.array([libsvm_word(word, features) for word in ids])
    index, value = parsed[np.fromiter(map(ids.__getitem__, words), np.intp, len(words))].T
    # a word without an index is a label: exactly the first of every line must be one
    first = np.zeros(len(words), bool)
    first[(np.cumsum(sizes) - sizes)[sizes > 0]] = True
    wrong = np.flatnonzero((index < 0) | ((index == 0) != first))
    if wrong.size:
        line = 1 + int(np.searchsorted(np.cumsum(sizes), wrong[0], side="right"))
        rule = f"'label index:value ...' with indices 1 to {features} and finite numbers"
        raise InputError(f"line {line} of {where} is not {rule}; fetch it again")
    row: Indices = np.cumsum(first) - 1
    x = np.zeros((row[-1] + 1, features), np.float32)
    x[row[~first], index[~first].astype(np.intp) - 1] = value[~first]
    return x, value[first]


def libsvm_word(word: bytes, features: int) -> tuple[int, float]:
    """Return index and value of a libsvm word: index 0 for a label, -1 if it is invalid.

    >>> [libsvm_word(word, 9) for word in (b"3:0.5", b"+1", b"10:1", b"3:nan")]
    [(3, 0.5), (0, 1.0), (-1, 0.0), (-1, 0.0)]
    """
    head, colon, tail = word.rpartition(b":")
    try:
        index, value = int(head) if colon else 0, float(tail)
    except ValueError:
        return -1, 0.0
    # NaN fails the comparison
    good = abs(value) <= FLOAT32_MAX and (not colon or 1 <= index <= features)
    return (index, value) if good else (-1, 0.0)


def csv_table(raw: bytes, columns: int, where: str) -> npt.NDArray[np.float64]:
    r"""Return the (n, columns) numbers of comma-separated lines; `?`, a missing one, becomes NaN.

    >>> csv_table(b"63,1.5,?\n", 3, "tiny")
    array([[63. ,  1.5,  nan]])
    """
    lines = enumerate(raw.splitlines(), start=1)
    rows = [
        csv_row(line, columns, f"line {number} of {where}")
        for number, line in lines
        if line.strip()
    ]
    if not rows:
        raise InputError(f"{where} is empty; fetch it again")
    return np.array(rows)


def csv_row(line: bytes, columns: int, where: str) -> list[float]:
    """The numbers of one line, NaN for `?`.

    >>> csv_row(b"1,NaN", 2, "line 1 of tiny")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: line 1 of tiny is not 2 finite numbers or ? parted by commas;
    fetch it again
    """
    cells = [cell.strip() for cell in line.split(b",")]
    try:
        row = [math.nan if cell == b"?" else float(cell) for cell in cells]
    except ValueError:
        row = []
    # numbers beyond float32 would become inf later, and a NaN that was not written as ? is no
    # missing value
    sound = all(
        cell == b"?" or abs(value) <= FLOAT32_MAX for cell, value in zip(cells, row, strict=False)
    )
    if len(row) != columns or not sound:
        raise InputError(
            f"{where} is not {columns} finite numbers or ? parted by commas; fetch it again"
        )
    return row

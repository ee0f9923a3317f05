"""Strict reader and writer of the safetensors format: named arrays and text metadata in one file.

    8 bytes    n, the length of the header, little-endian
    n bytes    JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets"}, ...}
    the rest   the arrays' bytes, one after the other without holes, little-endian, C order

NumPy has no bfloat16, so such arrays are pairs of bytes (V2). Any safetensors reader opens these
files. The format is implemented here because the SHA-256 is computed while writing, without copying
the arrays, and because files may come from untrusted sources: everything is validated, and arrays
take no more memory than the file has bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedscaffold.state.files import CHUNK, StateError, open_file, reported, write_all

__all__ = [
    "Array",
    "Encoded",
    "bfloat16",
    "encode",
    "read",
    "read_metadata",
    "strict_json",
    "write",
]

Array: TypeAlias = npt.NDArray[Any]

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "|V2",
    "BOOL": "|b1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
}
BYTES = np.dtype("V2")
CODES = {np.dtype(text): code for code, text in DTYPES.items()}
HEADER_LIMIT = 3 << 20
"""Largest JSON header in bytes; parsed, it takes less than 100 MB."""
METADATA = "__metadata__"


class Encoded(NamedTuple):
    """An encoded file: its header bytes, and its arrays in file order."""

    head: bytes
    arrays: list[Array]


def encode(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Encoded:
    """Check arrays and metadata and encode the header.

    Arrays are copied only to make them C-ordered and little-endian.

    >>> encode({"x": np.array([1j])}, {})
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: array 'x' has dtype complex128, which cannot be kept;
    allowed: bool, float16, float32, float64, int16, int32, int64, int8, uint16, uint32, uint64,
    uint8
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    ordered: list[Array] = []
    given = {name: np.asarray(array) for name, array in arrays.items()}
    begin = 0
    # widest first: all aligned
    for name in sorted(given, key=lambda name: (-given[name].itemsize, name)):
        array = given[name]
        little = array.dtype.newbyteorder("<")
        if little not in CODES or name == METADATA:
            allowed = ", ".join(sorted(dtype.name for dtype in CODES if dtype != BYTES))
            reason = (
                "is a reserved name"
                if name == METADATA
                else f"has dtype {array.dtype}, which cannot be kept"
            )
            raise StateError(f"array {name!r} {reason}; allowed: {allowed}")
        end = begin + array.nbytes
        header[name] = {
            "dtype": CODES[little],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        ordered.append(np.asarray(array, dtype=little, order="C"))
        begin = end
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise StateError(
            f"facts and names take {len(text)} bytes, at most {HEADER_LIMIT} are kept; use arrays"
        )
    return Encoded(len(text).to_bytes(8, "little") + text, ordered)


def bfloat16(array: Array) -> Array:
    """Round to bfloat16, ties to even; the result has dtype V2, as NumPy has no bfloat16.

    >>> bfloat16(np.array([1.0, 1.00390625])).tobytes().hex()  # 1 + 2^-8 lies in the middle
    '803f803f'
    """
    bits = np.asarray(array, "<f4").view("<u4")
    rounded: Array = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(BYTES)
    return rounded


def write(fd: int, encoded: Encoded) -> str:
    """Write the file and return the SHA-256 of its bytes."""
    digest = hashlib.sha256(encoded.head)
    write_all(fd, encoded.head)
    for array in encoded.arrays:
        view = raw(array)
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            digest.update(piece)
            write_all(fd, piece)
    return digest.hexdigest()


def read(path: Path) -> tuple[dict[str, Array], dict[str, str], str]:
    """Return the arrays, the metadata and the SHA-256 of a file.

    Raise StateError if it is invalid.
    """
    with reported(f"reading {path.name}"):
        fd = open_file(path)
        try:
            return read_open_file(fd, os.fstat(fd).st_size, path.name)
        finally:
            os.close(fd)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file, whose arrays are not read; StateError if it is invalid."""
    with reported(f"reading {path.name}"):
        fd = open_file(path)
        try:
            return read_header(fd, os.fstat(fd).st_size, path.name, hashlib.sha256())[1]
        finally:
            os.close(fd)


def read_open_file(fd: int, size: int, name: str) -> tuple[dict[str, Array], dict[str, str], str]:
    """Return the arrays, metadata and SHA-256 of an open file; `name` is for messages."""
    digest = hashlib.sha256()
    header, metadata, room = read_header(fd, size, name, digest)
    arrays = {}
    for key, (dtype, shape) in parse_layout(header, room, name).items():
        arrays[key] = allocate(shape, dtype, name)
        fill(fd, raw(arrays[key]), digest, name)
        if dtype == np.bool_ and arrays[key].view(np.uint8).max(initial=0) > 1:
            raise StateError(f"{name}: array {key!r} has truth values other than 0 and 1")
    if os.read(fd, 1):
        raise StateError(f"{name} grew while it was read")
    return arrays, metadata, digest.hexdigest()


def read_header(
    fd: int, size: int, name: str, digest: Any
) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return the entries of the arrays, the metadata, and the number of bytes after the header."""
    if size < 8:
        raise StateError(f"{name} is truncated: {size} bytes")
    length = int.from_bytes(fill(fd, bytearray(8), digest, name), "little")
    if length > min(size - 8, HEADER_LIMIT):
        raise StateError(
            f"{name} claims a header of {length} bytes; it has {size} and {HEADER_LIMIT} are "
            "allowed"
        )
    header = strict_json(fill(fd, bytearray(length), digest, name), name)
    metadata = header.pop(METADATA, None)
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise StateError(f"{name} has no metadata of texts")
    return header, metadata, size - 8 - length


def parse_layout(
    header: dict[str, Any], room: int, name: str
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return dtype and shape of the arrays in file order; they must fill `room` bytes."""
    rows = []
    for key, entry in header.items():
        wanted = {"dtype", "shape", "data_offsets"}
        if (
            not isinstance(entry, dict)
            or entry.keys() != wanted
            or entry["dtype"] not in list(DTYPES)
        ):
            raise StateError(
                f"{name}: array {key!r} is not described by a known dtype, a shape and offsets"
            )
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not (are_sizes(shape) and are_sizes(offsets)) or len(offsets) != 2 or len(shape) > 32:
            raise StateError(
                f"{name}: array {key!r} has a shape or offsets that are not whole numbers"
            )
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise StateError(
                f"{name}: array {key!r} of shape {shape} does not fit its offsets {offsets}"
            )
        rows.append((offsets, key, dtype, tuple(shape)))
    rows.sort(key=lambda row: row[0])
    edges = [edge for offsets, *_ in rows for edge in offsets]
    if [0, *edges[1::2]] != [*edges[::2], room]:
        raise StateError(
            f"{name}: its arrays do not fill the {room} bytes after its header; it is cut or "
            "overlaps"
        )
    return {key: (dtype, shape) for _, key, dtype, shape in rows}


def are_sizes(values: Any) -> bool:
    """Return whether `values` is a list of non-negative integers below 2^63."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Allocate an array to read into; raise StateError if there is no memory for it."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, MemoryError) as error:
        raise StateError(f"{name}: no memory for an array of shape {shape}: {error}") from error


def raw(array: Array) -> memoryview:
    """Return a view of the bytes of a C-ordered array."""
    return array.reshape(-1).view(np.uint8).data


def fill(fd: int, buffer: Any, digest: Any, name: str) -> Any:
    """Fill `buffer` from the file, update the digest, and return the buffer."""
    view = memoryview(buffer)
    done = 0
    while done < len(view):
        count = os.readv(fd, [view[done : done + CHUNK]])
        if not count:
            raise StateError(f"{name} is truncated")
        digest.update(view[done : done + count])
        done += count
    return buffer


def strict_json(text: bytes | bytearray | str, name: str) -> dict[str, Any]:
    """Parse an untrusted JSON object: repeated keys, NaN and excessive depth are errors.

    >>> strict_json('{"round": 3, "round": 4}', "facts")
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: facts is not plain JSON: 'round' stands there twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r} stands there twice")
            found[key] = value
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        decoded = text if isinstance(text, str) else bytes(text).decode()
        parsed = json.loads(decoded, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{name} is not plain JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise StateError(f"{name} is not plain JSON: an object is expected")
    return parsed

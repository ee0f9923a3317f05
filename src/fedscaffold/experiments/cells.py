"""Results that are kept one by one as they are made, so that long work goes on where it was.

JSON and arrays in npz files, never pickle, each with a checksum of all that is read from it. A key is everything its
result depends on, so what is there is not computed again, and what is damaged or torn counts as not there. The claims
of `reproduce` and the runs of a comparison are kept with this code.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Data", "Memo", "Store", "afresh", "digest", "read", "write"]

Data: TypeAlias = dict[str, Any]  # numbers, texts, lists, dictionaries and NumPy arrays
Memo: TypeAlias = Callable[[str, Callable[[], Data]], Data]  # (key, make) -> what make returned, now or earlier

TEXT = "json"  # the member of the npz that holds all but the arrays
CHECKSUM = "sha256"  # the member that holds the digest of all others
ARRAY = "array "  # how the text refers to an array


def afresh(key: str, make: Callable[[], Data]) -> Data:
    """The memo that remembers nothing."""
    return make()


def digest(*parts: Any) -> str:
    """Fingerprint of JSON values, texts and arrays.

    >>> digest({"b": 1, "a": (1, 2)}) == digest({"a": [1, 2], "b": 1})
    True
    """
    return _sha256(*parts)[:20]


def _sha256(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(f"{part.dtype.str} {part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        else:
            total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return total.hexdigest()


class Store:
    """A folder of results.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     first = store("one", lambda: {"x": np.arange(3), "y": [1.5, None]})
    ...     again = store("one", lambda: {"never": "called"})
    >>> again["x"].tolist(), again["y"]
    ([0, 1, 2], [1.5, None])
    """

    def __init__(self, folder: Path, *, fresh: bool = False, tell: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.fresh, self.tell = folder, fresh, tell
        self.made: list[str] = []
        """Keys that were computed, not found."""

    def __call__(self, key: str, make: Callable[[], Data]) -> Data:
        """Return what is kept under the key, or make and keep it."""
        path = self.folder / f"{key}.npz"
        kept = None if self.fresh and key not in self.made else read(path)
        if kept is not None:
            return kept
        began = time.perf_counter()
        data = make()
        self.made.append(key)
        seconds = time.perf_counter() - began
        self.tell(f"{key}: {seconds:.0f} s")
        write(path, {"seconds": seconds} | data)
        found = read(path)
        assert found is not None, path
        return found

    def within(self, name: str) -> Store:
        """The folder of one claim's cells."""
        inner = Store(self.folder / name, fresh=self.fresh, tell=self.tell)
        inner.made = self.made
        return inner


def write(path: Path, data: Data) -> None:
    """Keep a result: the whole file or nothing."""
    arrays: dict[str, NDArray[Any]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[f"a{len(arrays)}"] = value
            return ARRAY + f"a{len(arrays) - 1}"
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    held = {TEXT: np.frombuffer(json.dumps(plain(data)).encode(), np.uint8), **arrays}
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **{CHECKSUM: _checksum(held)}, **held)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(buffer.getvalue())
    Path(file.name).replace(path)


def read(path: Path) -> Data | None:
    """Return what `write` kept; None where there is nothing, or something damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            held = {name: archive[name] for name in archive.files}
        if not np.array_equal(held.pop(CHECKSUM), _checksum(held)):
            return None
        data: Data = json.loads(held[TEXT].tobytes())
    except Exception:  # whatever the readers of zip, of npy and of JSON make of a damaged file
        return None

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        if isinstance(value, list):
            return [full(item) for item in value]
        return held[value.removeprefix(ARRAY)] if isinstance(value, str) and value.startswith(ARRAY) else value

    return {key: full(item) for key, item in data.items()}


def _checksum(held: dict[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Of names, types, shapes and values."""
    parts = [part for name in sorted(held) for part in (name, held[name])]
    return np.frombuffer(bytes.fromhex(_sha256(*parts)), np.uint8)

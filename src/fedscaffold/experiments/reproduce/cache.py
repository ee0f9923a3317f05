"""Results by content hash: JSON and arrays in npz files, never pickle; what is there is not computed again.

A result's key is everything it depends on: the claim, its settings, the text of the module that measures it and the
package's version. Inside a long claim every cell has a key of its own, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedscaffold
from fedscaffold.experiments.reproduce.claim import Claim, Data

__all__ = ["Store", "digest", "home", "key_of"]

TEXT = "json"  # the member of the npz that holds all but the arrays
ARRAY = "array "  # how the text refers to an array


def home() -> Path:
    """The folder in the user's cache where results are kept.

    >>> home().name
    'reproduce'
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedscaffold" / "reproduce"


def digest(*parts: Any) -> str:
    """Fingerprint of JSON values, texts and arrays.

    >>> digest({"b": 1, "a": (1, 2)}) == digest({"a": [1, 2], "b": 1})
    True
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(f"{part.dtype.str} {part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        else:
            total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return total.hexdigest()[:20]


def key_of(claim: Claim, size: str) -> str:
    """What a claim's result depends on: its name, settings, the module that measures it, the package's version."""
    measure: Any = claim.measure
    while isinstance(measure, partial):
        measure = measure.func
    source = inspect.getsource(sys.modules[measure.__module__])
    settings = claim.settings(size)
    return digest(claim.name, dict(settings), claim.depends(settings), source, fedscaffold.__version__)


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

    text = np.frombuffer(json.dumps(plain(data)).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **{TEXT: text}, **arrays)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(buffer.getvalue())
    Path(file.name).replace(path)


def read(path: Path) -> Data | None:
    """Return what `write` kept; None where there is nothing, or something damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            held = {name: archive[name] for name in archive.files}
        data: Data = json.loads(held[TEXT].tobytes())
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        if isinstance(value, list):
            return [full(item) for item in value]
        return held[value.removeprefix(ARRAY)] if isinstance(value, str) and value.startswith(ARRAY) else value

    return {key: full(item) for key, item in data.items()}

"""Cache of results, written one by one, so that interrupted work continues where it stopped.

Results are npz files of JSON and arrays, without pickle, each with a checksum of its contents. A
key encodes everything its result depends on: the claim, its settings, the text of the module that
measures it and the package's version. Damaged or incomplete files count as absent.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

import fedscaffold
from fedscaffold.state.files import write_whole

if TYPE_CHECKING:
    from papers.claim import Claim

__all__ = ["Data", "Memo", "Part", "Store", "digest", "home", "key_of", "read", "write"]

Data: TypeAlias = dict[str, Any]  # numbers, texts, lists, dictionaries and NumPy arrays
Tell: TypeAlias = Callable[[int, int, float], None]  # (parts done, parts, seconds left)

TEXT = "json"  # npz member with everything but the arrays
CHECKSUM = "sha256"  # npz member with the digest of all others
ARRAY = "array "  # prefix of a reference to an array in the JSON


def home() -> Path:
    """The folder in the user's cache where results are kept.

    >>> home().name
    'reproduce'
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedscaffold" / "reproduce"


def key_of(claim: Claim, size: str) -> str:
    """What a claim's result depends on.

    Its name, settings, the module that measures it, the package's version.
    """
    measure: Any = claim.measure
    while isinstance(measure, partial):
        measure = measure.func
    source = inspect.getsource(sys.modules[measure.__module__])
    settings = claim.settings(size)
    return digest(
        claim.name, dict(settings), claim.depends(settings), source, fedscaffold.__version__
    )


def digest(*parts: Any) -> str:
    """Return a fingerprint of JSON values, strings and arrays.

    >>> digest({"b": 1, "a": (1, 2)}) == digest({"a": [1, 2], "b": 1})
    True
    """
    return _sha256(*parts)[:20]


def _sha256(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(
                f"{part.dtype.str} {part.shape}".encode() + np.ascontiguousarray(part).tobytes()
            )
        else:
            total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return total.hexdigest()


class Part(NamedTuple):
    """A part of a measurement, kept as soon as it is done."""

    key: str
    make: Callable[[], Data]
    size: float = 1.0
    """Its work in comparison with other parts."""


class Memo(Protocol):
    """Cache of the parts of a measurement."""

    def __call__(self, key: str, make: Callable[[], Data]) -> Data:
        """Return the result of `make`, computed or cached."""

    def all(self, parts: Sequence[Part]) -> list[Data]:
        """Return the results of all parts, and tell the progress after each."""


class Store:
    """Memo that caches results in a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     first = store("one", lambda: {"x": np.arange(3), "y": [1.5, None]})
    ...     again = store("one", lambda: {"never": "called"})
    >>> again["x"].tolist(), again["y"]
    ([0, 1, 2], [1.5, None])
    """

    def __init__(
        self,
        folder: Path,
        *,
        fresh: bool = False,
        tell: Tell = lambda done, parts, left: None,
    ) -> None:
        self.folder, self.fresh, self.tell = folder, fresh, tell
        self.made: list[str] = []
        """Keys that were computed rather than found."""

    def __call__(self, key: str, make: Callable[[], Data]) -> Data:
        """Return the cached result of a key, or compute and cache it."""
        path = self.folder / f"{key}.npz"
        kept = None if self.fresh and key not in self.made else read(path)
        if kept is not None:
            return kept
        began = time.perf_counter()
        data = make()
        self.made.append(key)
        write(path, {"seconds": time.perf_counter() - began} | data)
        found = read(path)
        assert found is not None, path
        return found

    def all(self, parts: Sequence[Part]) -> list[Data]:
        """Return the results of all parts, computed or cached.

        The remaining time is estimated from the parts that were computed here.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder), tell=lambda *told: print(*map(round, told)))
        ...     found = store.all([Part(key, lambda: {"x": 1}) for key in "ab"])
        1 2 0
        2 2 0
        """
        results: list[Data] = []
        left, worked, spent = sum(part.size for part in parts), 0.0, 0.0
        for number, part in enumerate(parts, 1):
            began = time.perf_counter()
            results.append(self(part.key, part.make))
            left -= part.size
            if part.key in self.made:
                worked, spent = worked + part.size, spent + time.perf_counter() - began
                self.tell(number, len(parts), spent / worked * left)
        return results

    def within(self, name: str) -> Store:
        """Return the cache of a subfolder."""
        inner = Store(self.folder / name, fresh=self.fresh, tell=self.tell)
        inner.made = self.made
        return inner


def write(path: Path, data: Data) -> None:
    """Write a result atomically."""
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
    write_whole(path, buffer.getvalue())


def read(path: Path) -> Data | None:
    """Return a result that `write` wrote; None if it is absent or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            held = {name: archive[name] for name in archive.files}
        if not np.array_equal(held.pop(CHECKSUM), _checksum(held)):
            return None
        data: Data = json.loads(held[TEXT].tobytes())
    except Exception:  # readers of zip, npy and JSON raise anything on a damaged file
        return None

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        if isinstance(value, list):
            return [full(item) for item in value]
        return (
            held[value.removeprefix(ARRAY)]
            if isinstance(value, str) and value.startswith(ARRAY)
            else value
        )

    return {key: full(item) for key, item in data.items()}


def _checksum(held: dict[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return the checksum of names, types, shapes and values."""
    parts = [part for name in sorted(held) for part in (name, held[name])]
    return np.frombuffer(bytes.fromhex(_sha256(*parts)), np.uint8)

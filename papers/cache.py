"""Cache of results, written one by one, so that interrupted work continues where it stopped.

Results are npz files of JSON and arrays, without pickle, each with a checksum of its contents. A
key encodes everything its result depends on: the claim, its settings, the text of the module that
measures it and of those that it imports from this package, and the library's version. Damaged
or incomplete files count as absent.

Parts that take hours and were measured before can be part of the repository (`RECORDED`). They are
read where the cache has none, and their number is told.

Several processes may measure a claim at a time: a part is locked by the process that measures it,
and the others take the next one. The lock of a process that was killed is free again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

import fedscaffold
from fedscaffold.checks import InputError
from fedscaffold.state.files import write_whole
from fedscaffold.state.platforms import CLOSE, lock

if TYPE_CHECKING:
    from papers.claim import Claim

__all__ = [
    "RECORDED",
    "Data",
    "Memo",
    "Part",
    "Selected",
    "Store",
    "digest",
    "home",
    "key_of",
    "read",
    "write",
]

Data: TypeAlias = dict[str, Any]  # numbers, texts, lists, dictionaries and NumPy arrays
Tell: TypeAlias = Callable[[int, int, float], None]  # (parts done, parts, seconds left)

TEXT = "json"  # npz member with everything but the arrays
CHECKSUM = "sha256"  # npz member with the digest of all others
ARRAY = "array "  # prefix of a reference to an array in the JSON
RECORDED = Path(__file__).parent / "recorded"  # results of the repository, laid out as the cache
# modules that change no result: they keep, judge and draw what others measure
NOT_MEASURING = {"papers.cache", "papers.claim", "papers.criteria", "papers.plotting"}
PAUSE = 0.2  # seconds until a part that another process measures is looked at again


def home() -> Path:
    """The folder in the user's cache where results are kept.

    >>> home().name
    'reproduce'
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedscaffold" / "reproduce"


def key_of(claim: Claim, size: str) -> str:
    """What a claim's result depends on.

    Its name, settings, the modules that measure it, the package's version.
    """
    measure: Any = claim.measure
    while isinstance(measure, partial):
        measure = measure.func
    source = "".join(_sources(measure.__module__))
    settings = claim.settings(size)
    return digest(
        claim.name, dict(settings), claim.depends(settings), source, fedscaffold.__version__
    )


def _sources(module: str) -> list[str]:
    """Return the text of a module, and of the modules of this package that it imports in turn.

    >>> len(_sources("papers.emnist")), len(_sources("papers.niid_bench"))
    (1, 2)
    """
    found: dict[str, str] = {}
    names = [module]
    while names:
        name = names.pop(0)
        if name not in found and name not in NOT_MEASURING:
            found[name] = inspect.getsource(importlib.import_module(name))
            names += _imported(found[name])
    return list(found.values())


def _imported(source: str) -> list[str]:
    """Return the modules of this package that a text imports, in order."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == __package__:
            found += [f"{__package__}.{one.name}" for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.append(node.module)
    return [name for name in found if name.startswith(f"{__package__}.") and find_spec(name)]


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
    make: Callable[..., Data]
    """Called with the results of the parts that it comes after."""
    size: float = 1.0
    """Its work in comparison with other parts."""
    after: Sequence[str] = ()
    """Keys of the parts whose results it needs."""


class Memo(Protocol):
    """Cache of the parts of a measurement."""

    def __call__(self, key: str, make: Callable[[], Data]) -> Data:
        """Return the result of `make`, computed or cached."""

    def all(self, parts: Sequence[Part]) -> list[Data]:
        """Return the results of all parts, and tell the progress after each."""


class Selected(Exception):
    """The parts that were asked for are there; those of the rest of the claim may not be."""

    def __init__(self, results: dict[str, Data]) -> None:
        super().__init__(f"{len(results)} parts")
        self.results = results


class Store:
    """Memo that caches results in a folder.

    Args:
        folder: The folder.
        tell: Called after every part that was measured meanwhile, with the parts done, the parts
            and the seconds left.
        processes: Tells how many processes measure at present.
        recorded: A folder of results that were measured before; None for none.
        only: A pattern with `*` and `?`: of several parts, measure those whose keys match it, and
            what they come after, and raise `Selected`; None for all.

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
        tell: Tell = lambda done, parts, left: None,
        processes: Callable[[], int] = lambda: 1,
        recorded: Path | None = None,
        only: str | None = None,
    ) -> None:
        self.folder, self.tell, self.processes = folder, tell, processes
        self.recorded, self.only = recorded, only
        self.made: list[str] = []
        """Keys that were computed rather than found."""
        self.taken: set[str] = set()
        """Keys that were found among the recorded results."""

    def __call__(self, key: str, make: Callable[[], Data]) -> Data:
        """Return the cached result of a key, or compute and cache it."""
        kept = self._find(key)
        if kept is not None:
            return kept
        path = self._path(key)
        began = time.perf_counter()
        data = make()
        self.made.append(key)
        write(path, {"seconds": time.perf_counter() - began} | data)
        found = read(path)
        assert found is not None, path
        return found

    def all(self, parts: Sequence[Part]) -> list[Data]:
        """Return the results of all parts, computed here, by another process, or cached.

        The remaining time is estimated from the parts that were measured since the call.

        Raises:
            Selected: If `only` is given, once these parts are there.
            InputError: If no part's key matches.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder), tell=lambda *told: print(*map(round, told)))
        ...     last = Part("c", lambda a, b: {"x": a["x"] + b["x"]}, after=["a", "b"])
        ...     found = store.all([last, *(Part(key, lambda: {"x": 1}) for key in "ab")])
        1 3 0
        2 3 0
        3 3 0
        >>> [one["x"] for one in found]
        [2, 1, 1]
        """
        if self.only is not None:
            raise Selected(self._selected(parts, self.only))
        return self._measured(parts)

    def _selected(self, parts: Sequence[Part], only: str) -> dict[str, Data]:
        by_key = {part.key: part for part in parts}
        keys = [key for key in by_key if fnmatchcase(key, only)]
        if not keys:
            known = ", ".join(by_key)
            raise InputError(f"--only: no part's name matches {only!r}; the parts are: {known}")
        for key in keys:  # which grows by what they come after
            keys += [one for one in by_key[key].after if one not in keys]
        wanted = [part for part in parts if part.key in keys]
        return dict(zip((part.key for part in wanted), self._measured(wanted), strict=True))

    def _measured(self, parts: Sequence[Part]) -> list[Data]:
        kept = {part.key: self._find(part.key) for part in parts}
        results = {key: data for key, data in kept.items() if data is not None}
        missing = [part for part in parts if part.key not in results]
        worked, spent = 0.0, 0.0
        while missing:
            part, data = self._next(missing, results)
            missing.remove(part)
            results[part.key] = data
            worked, spent = worked + part.size, spent + data["seconds"]
            at_once = max(1, min(self.processes(), len(missing)))
            left = spent / worked * sum(one.size for one in missing) / at_once
            self.tell(len(parts) - len(missing), len(parts), left)
        return [results[part.key] for part in parts]

    def _next(self, missing: Sequence[Part], results: dict[str, Data]) -> tuple[Part, Data]:
        """Return the first part that can be had: measured here, or meanwhile by another process."""
        ready = [part for part in missing if all(key in results for key in part.after)]
        if not ready:
            raise ValueError(f"{missing[0].key} comes after parts that are not there")
        while True:
            for part in ready:
                with _locked(self.folder / f"{part.key}.lock") as mine:
                    if mine:
                        needed = [results[key] for key in part.after]
                        return part, self(part.key, partial(part.make, *needed))
            time.sleep(PAUSE)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npz"

    def _find(self, key: str) -> Data | None:
        kept = read(self._path(key))
        if kept is None and self.recorded is not None:
            kept = read(self.recorded / f"{key}.npz")
            if kept is not None:
                self.taken.add(key)
        return kept

    def within(self, name: str, recorded: Path | None = None) -> Store:
        """Return the cache of a subfolder, with these recorded results."""
        inner = Store(
            self.folder / name,
            tell=self.tell,
            processes=self.processes,
            recorded=recorded,
            only=self.only,
        )
        inner.made = self.made
        return inner


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file, or tell that another process has locked it.

    The file is removed once the work is done. Who has opened it before then locks a file that is no
    longer there, and finds the work done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | CLOSE, 0o600)
    try:
        try:
            lock(fd)
        except BlockingIOError:
            yield False
        else:
            yield True
            with suppress(OSError):  # Windows removes no file that is open
                path.unlink()
    finally:
        os.close(fd)


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

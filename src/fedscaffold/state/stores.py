"""Stores of client vectors behind one interface: a sparse table in memory, or files.

A client that was never written has the zero vector. All stores return exactly the bits that were
written, and raise an InputError for a request that names a client twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedscaffold import checks
from fedscaffold.state.files import StateError
from fedscaffold.state.safetensors_io import Array

__all__ = ["Clients", "SparseStore", "Store", "choose", "mean"]

Clients: TypeAlias = npt.NDArray[np.int64]


class Store(Protocol):
    """Interface of stores."""

    num_clients: int
    dim: int
    dtype: np.dtype[Any]

    def read(self, clients: npt.ArrayLike) -> Array:
        """Return a copy of the (S, d) vectors of some clients."""

    def write(self, clients: npt.ArrayLike, rows: Array) -> None:
        """Write the (S, d) vectors of some clients, in the store's dtype."""

    def chunks(self, size: int = 256) -> Iterator[tuple[Clients, Array]]:
        """Yield (clients, vectors) of clients that may be non-zero, in ascending order."""

    def snapshot(self) -> dict[str, Array]:
        """Return the arrays that the next commit must hold, valid until the next write."""

    def committed(self) -> None:
        """Notify the store of a commit; what only older commits need may be deleted."""

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore a snapshot; raise StateError if it does not fit or files are damaged."""

    def close(self) -> None:
        """Release files and threads; what was not committed is lost."""


def check_clients(clients: npt.ArrayLike, num_clients: int) -> Clients:
    """Return client numbers as int64, after checking that they are distinct and in range.

    >>> check_clients([3, 1, 3], 5)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: clients must be named once in a request, got client 3 more than
        once
    """
    given = np.asarray(clients)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise checks.InputError(
            f"clients must be a list of whole numbers, got {given.dtype} of shape {given.shape}"
        )
    order = np.sort(given)
    if order.size and (order[0] < 0 or order[-1] >= num_clients):
        raise checks.InputError(
            f"clients must be from 0 to {num_clients - 1}, got {order[0]} to {order[-1]}"
        )
    if (twice := order[1:][order[1:] == order[:-1]]).size:
        raise checks.InputError(
            f"clients must be named once in a request, got client {twice[0]} more than once"
        )
    return given.astype(np.int64)


def check_snapshot_clients(clients: Array, num_clients: int) -> Clients:
    """Return the client numbers of a snapshot; raise StateError if they are invalid."""
    try:
        return check_clients(clients, num_clients)
    except checks.InputError as error:
        raise StateError(f"the snapshot does not fit this store: {error}") from error


def check_rows(rows: Any, count: int, dim: int, dtype: np.dtype[Any]) -> Array:
    """Return rows as a contiguous array, after checking shape and dtype; nothing is cast."""
    given = np.asarray(rows)
    if given.shape != (count, dim) or given.dtype != dtype:
        raise checks.InputError(
            f"rows must be {dtype} of shape {(count, dim)}, got {given.dtype} of {given.shape}"
        )
    return np.ascontiguousarray(given)


def snapshot_array(
    arrays: Mapping[str, Array], name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
) -> Array:
    """Return an array of a snapshot, after checking its dtype and shape (None: any length)."""
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != len(shape):
        raise StateError(
            f"the snapshot has no {np.dtype(dtype)} array {name!r} of {len(shape)} dimensions"
        )
    if any(
        want is not None and have != want for have, want in zip(array.shape, shape, strict=True)
    ):
        raise StateError(
            f"{name!r} of the snapshot has shape {array.shape}; this store needs {shape}"
        )
    return array


class SparseStore:
    """Sparse store: the vectors of clients ever written, in memory.

    All others are zero and take no space.

    >>> store = SparseStore(1_000_000_000, 2, "float64")
    >>> store.write([999_999_999, 5], np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> store.read([5, 6])
    array([[3., 4.],
           [0., 0.]])
    >>> store.snapshot()["clients"]
    array([999999999,         5])
    """

    def __init__(self, num_clients: int, dim: int, dtype: npt.DTypeLike = np.float32) -> None:
        self.num_clients = checks.whole("num_clients", num_clients)
        self.dim = dim
        self.dtype = np.dtype(dtype)
        self.slots: dict[int, int] = {}
        self.rows = np.empty((0, dim), dtype)

    def read(self, clients: npt.ArrayLike) -> Array:
        """Return the (S, d) vectors of some clients, zero for those never written."""
        places = [
            self.slots.get(client, -1)
            for client in check_clients(clients, self.num_clients).tolist()
        ]
        slots = np.array(places, np.int64)
        out = np.zeros((len(slots), self.dim), self.dtype)
        out[slots >= 0] = self.rows[slots[slots >= 0]]
        return out

    def write(self, clients: npt.ArrayLike, rows: Array) -> None:
        """Write the vectors of some clients; the capacity doubles when it is exceeded."""
        who = check_clients(clients, self.num_clients)
        given = check_rows(rows, len(who), self.dim, self.dtype)
        slots = [self.slots.setdefault(client, len(self.slots)) for client in who.tolist()]
        if len(self.slots) > len(self.rows):
            grown = np.empty((min(2 * len(self.slots), self.num_clients), self.dim), self.dtype)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
        self.rows[slots] = given

    def chunks(self, size: int = 256) -> Iterator[tuple[Clients, Array]]:
        """Yield the clients ever written and their vectors, `size` at a time."""
        heard = np.array(sorted(self.slots), np.int64)
        for start in range(0, len(heard), size):
            yield heard[start : start + size], self.read(heard[start : start + size])

    def snapshot(self) -> dict[str, Array]:
        """Return the clients ever written, in order of first write, and their rows, not copied."""
        return {
            "clients": np.array(list(self.slots), np.int64),
            "rows": self.rows[: len(self.slots)],
        }

    def committed(self) -> None:
        """Nothing to let go."""

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the clients and rows of a snapshot."""
        clients = check_snapshot_clients(
            snapshot_array(arrays, "clients", np.int64, (None,)), self.num_clients
        )
        self.rows = snapshot_array(arrays, "rows", self.dtype, (len(clients), self.dim)).copy()
        self.slots = {client: slot for slot, client in enumerate(clients.tolist())}

    def close(self) -> None:
        """Nothing to give back."""


def mean(store: Store, weights: Array | None = None) -> npt.NDArray[np.float64]:
    """Return sum p_i c_i over all clients in float64, chunk by chunk; p_i = 1/N by default.

    >>> store = SparseStore(4, 1, "float64")
    >>> store.write([0, 2], np.array([[1.0], [2.0]]))
    >>> mean(store), mean(store, np.array([0.1, 0.2, 0.3, 0.4]))
    (array([0.75]), array([0.7]))
    """
    total = np.zeros(store.dim)
    for clients, rows in store.chunks():
        share = (
            np.full(len(clients), 1.0 / store.num_clients)
            if weights is None
            else np.asarray(weights)[clients]
        )
        total += share.astype(np.float64) @ rows.astype(np.float64)
    return total


def choose(
    num_clients: int,
    dim: int,
    dtype: npt.DTypeLike,
    cohort: int,
    rounds: int,
    memory_limit: int = 1 << 30,
) -> str:
    """Choose the kind of store that fits `memory_limit` bytes: "array", else "sparse", else "file".

    "array" holds all N vectors; "sparse" those of the clients expected to take part, N (1 - (1 -
    S/N)^R) plus a margin.

    >>> choose(1000, 100, "float32", cohort=10, rounds=1000)
    'array'
    >>> choose(1_000_000, 10_000, "float32", cohort=100, rounds=100)
    'sparse'
    >>> choose(1_000_000, 10_000, "float32", cohort=100, rounds=100_000)
    'file'
    """
    row = dim * np.dtype(dtype).itemsize
    if num_clients * row <= memory_limit:
        return "array"
    heard = num_clients * -np.expm1(rounds * np.log1p(-min(cohort / num_clients, 1 - 1e-16)))
    room = 2 * (heard + 3 * np.sqrt(heard))  # capacity doubles; margin of three standard deviations
    return "sparse" if room * (row + 200) <= memory_limit else "file"

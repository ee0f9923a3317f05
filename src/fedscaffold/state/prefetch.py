"""Prefetching: the next cohort's rows are read from disk while the current round computes.

One thread does all reads and writes of the store in order, so no row is read while it is written.
Clients that are also in the current cohort, whose new rows are not written yet, are not prefetched;
they are read after the write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from fedscaffold.state.safetensors_io import Array
from fedscaffold.state.stores import Clients, Store, check_clients, check_rows

__all__ = ["Prefetched"]


class Prefetched:
    """A store with an I/O thread and a method `ask` to prefetch rows.

        rows = store.read(cohort)       # waits only for rows not prefetched
        store.ask(next_cohort)          # starts reading; returns at once
        ...                             # compute
        store.write(cohort, new_rows)   # starts writing; `new_rows` must not be modified afterwards

    Clients that were read but not yet written are not prefetched, as their rows would be stale.
    Errors of the thread are raised by the next call.

    >>> from fedscaffold.state.stores import SparseStore
    >>> store = Prefetched(SparseStore(3, 1, "float64"))
    >>> rows = store.read([0, 1])
    >>> store.ask([1, 2])
    >>> store.write([0, 1], rows + 5)
    >>> store.read([1, 2])
    array([[5.],
           [0.]])
    >>> store.close()
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_clients, self.dim, self.dtype = store.num_clients, store.dim, store.dtype
        self.thread = ThreadPoolExecutor(1, "client state")
        self.at_work: set[int] = set()
        self.asked: list[int] = []
        self.early: dict[int, int] = {}
        self.ahead: Future[Array] | None = None
        self.writing: list[Future[None]] = []

    def ask(self, clients: npt.ArrayLike) -> None:
        """Start reading the rows of the next cohort."""
        self.asked = check_clients(clients, self.num_clients).tolist()
        ready = [client for client in self.asked if client not in self.at_work]
        self.early = {client: place for place, client in enumerate(ready)}
        self.ahead = self.thread.submit(self.store.read, ready)

    def read(self, clients: npt.ArrayLike) -> Array:
        """Return the (S, d) vectors of clients, which are not prefetched until written."""
        who = check_clients(clients, self.num_clients).tolist()
        self.check_writes(wait=False)
        early = self.early if self.asked == who else {}
        late = [client for client in who if client not in early]
        rest = self.thread.submit(self.store.read, late)
        if self.ahead is None or not early:
            rows = rest.result()
        else:
            known = np.isin(who, list(early))
            rows = np.empty((len(who), self.dim), self.dtype)
            rows[known] = self.ahead.result()[list(early.values())]  # both in the order asked for
            rows[~known] = rest.result()
        self.asked, self.early, self.ahead = [], {}, None
        self.at_work.update(who)
        return rows

    def write(self, clients: npt.ArrayLike, rows: Array) -> None:
        """Start writing `rows`; later reads of these clients return them."""
        who = check_clients(clients, self.num_clients).tolist()
        rows = check_rows(rows, len(who), self.dim, self.dtype)
        self.check_writes(wait=False)
        for client in who:
            self.early.pop(client, None)  # prefetched, but stale now
        self.writing.append(self.thread.submit(self.store.write, who, rows))
        self.at_work.difference_update(who)

    def check_writes(self, wait: bool = True) -> None:
        """Raise the error of a failed write; with `wait`, wait for all writes first."""
        while self.writing and (wait or self.writing[0].done()):
            self.writing.pop(0).result()

    def call(self, function: Any, *arguments: Any) -> Any:
        """Run `function` in the store's thread, after all earlier requests."""
        self.check_writes()
        return self.thread.submit(function, *arguments).result()

    def chunks(self, size: int = 256) -> Iterator[tuple[Clients, Array]]:
        """Yield the store's chunks, after all writes are done."""
        chunks = self.call(self.store.chunks, size)
        while (chunk := self.call(next, chunks, None)) is not None:
            yield chunk

    def snapshot(self) -> dict[str, Array]:
        """Return the store's snapshot, after all writes are done."""
        result: dict[str, Array] = self.call(self.store.snapshot)
        return result

    def committed(self) -> None:
        """Notify the store of a commit."""
        self.call(self.store.committed)

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the store and discard prefetched rows."""
        self.asked, self.early, self.ahead = [], {}, None
        self.at_work.clear()
        self.call(self.store.restore, arrays)

    def close(self) -> None:
        """Finish the writes, end the thread, close the store."""
        try:
            self.check_writes()
        finally:
            self.thread.shutdown()
            self.store.close()

"""Who takes part in a round, and on which records: all random choices of a run but its gradient noise.

Every round has random streams of its own, found from (seed, round, purpose) by counting (Philox), so a round's draws do
not depend on how rounds are grouped, and a run can go on from any round. Drawing on the host costs a few nanoseconds
a record and nothing that grows with N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.simulation.spec import Draws

__all__ = ["Drawer"]

Ints = NDArray[np.int64]
COHORT, ROWS = 0, 1


class Drawer(NamedTuple):
    """The random choices of a run: `draw` makes those of any rounds."""

    num_clients: int
    size: int
    """S, clients in a round."""
    slots: int
    """S filled up with ghosts to whole blocks."""
    schedule: Sequence[Sequence[int]] | None
    """The user's own cohorts, one per round."""
    first: Ints
    counts: Ints
    steps: Ints
    """(N,) local steps of each client."""
    batch: Ints | None
    """(N,) records in a batch of each client; None for full batches."""
    shuffle: bool
    """Go through all records in a fresh order each epoch, instead of drawing each with replacement."""
    precision: str = "float64"
    """Float type of the record weights."""

    @property
    def ragged(self) -> bool:
        """Whether batches differ in size."""
        if self.batch is None:
            return False
        short = self.shuffle and bool((self.counts % self.batch != 0).any())
        return short or bool((self.batch != self.batch[0]).any())

    def cohort(self, seed: int, round: int) -> Ints:
        """Clients of one round, in rising order."""
        if self.schedule is not None:
            return np.sort(np.asarray(self.schedule[round], np.int64))
        if self.size == self.num_clients:
            return np.arange(self.num_clients)
        chosen = _stream(seed, round, COHORT).choice(self.num_clients, self.size, replace=False, shuffle=False)
        return np.sort(chosen)

    def draw(self, seed: int, start: int, number: int, room: int) -> Draws:
        """Draws of rounds start .. start + number, in arrays with room for `room` rounds."""
        most = int(self.steps.max())
        shape = (room, self.slots)
        cohort = np.full(shape, self.num_clients, np.int32)
        steps = np.ones(shape, np.int32)
        rows = weights = None
        if self.batch is not None:
            rows = np.zeros((*shape, most, int(self.batch.max())), np.int32)
            weights = np.zeros(rows.shape, self.precision) if self.ragged else None
        for r in range(number):
            chosen = self.cohort(seed, start + r)
            cohort[r, : len(chosen)] = chosen
            steps[r, : len(chosen)] = self.steps[chosen]
            if rows is not None:
                stream = _stream(seed, start + r, ROWS)
                fill = self._shuffled if self.shuffle else self._replaced
                fill(stream, chosen, rows[r], None if weights is None else weights[r])
        return Draws(cohort, steps, rows, weights)

    def _replaced(
        self, stream: np.random.Generator, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None
    ) -> None:
        """Each record drawn apart: a 32-bit number scaled to the client's count (bias below count / 2^32)."""
        assert self.batch is not None
        bits = stream.integers(0, 1 << 32, size=(len(chosen), *rows.shape[1:]), dtype=np.uint32)
        scaled = (bits.astype(np.uint64) * self.counts[chosen, None, None].astype(np.uint64)) >> np.uint64(32)
        rows[: len(chosen)] = scaled.astype(np.int64) + self.first[chosen, None, None]
        if weights is not None:
            size = self.batch[chosen, None, None]
            weights[: len(chosen)] = np.where(np.arange(rows.shape[-1]) < size, 1 / size, 0)

    def _shuffled(
        self, stream: np.random.Generator, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None
    ) -> None:
        """Each client's records in fresh orders, cut into batches; the last batch of an epoch may be short."""
        assert self.batch is not None
        for slot, client in enumerate(chosen):
            count, batch, steps = int(self.counts[client]), int(self.batch[client]), int(self.steps[client])
            per_epoch = -(-count // batch)
            epochs = -(-steps // per_epoch)
            order = stream.permuted(np.broadcast_to(np.arange(count), (epochs, count)), axis=1)
            padded = np.full((epochs, per_epoch * batch), -1)
            padded[:, :count] = order
            batches = padded.reshape(-1, batch)[:steps]
            rows[slot, :steps, :batch] = np.maximum(batches, 0) + self.first[client]
            if weights is not None:
                real = batches >= 0
                weights[slot, :steps, :batch] = real / real.sum(axis=1, keepdims=True)


def _stream(seed: int, round: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(counter=[0, 0, round, purpose], key=[seed, 0x5CAFF01D]))

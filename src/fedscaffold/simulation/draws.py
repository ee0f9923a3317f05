"""Who takes part in a round, and on which records: all random choices of a run but its gradient noise.

Every round has random streams of its own, started from (seed, round, purpose), so a round's draws do not depend on how
rounds are grouped, and a run can go on from any round. Drawing on the host costs a few nanoseconds
a record and nothing that grows with N.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.simulation.spec import Draws

__all__ = ["Drawer", "most_steps"]

Ints = NDArray[np.int64]
COHORT, ROWS, COIN = 0, 1, 2
WARM_UP = 18  # steps after which three words, however alike, are mixed


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
    available: NDArray[np.bool_] | None = None
    """(T, N) who can be reached in each round, over and over."""
    mean_steps: int | None = None
    """The mean number of local steps where a coin decides: one number for all clients."""
    known: tuple[int, int, bool] | None = None
    """`shape`, where all N clients are not to be looked at in every round."""

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Most local steps, the largest batch, and whether batches differ in size."""
        return int(self.steps.max()), 0 if self.batch is None else int(self.batch.max()), self.ragged

    @property
    def ragged(self) -> bool:
        """Whether batches differ in size."""
        if self.batch is None:
            return False
        short = self.shuffle and bool((self.counts % self.batch != 0).any())
        return short or bool((self.batch != self.batch[0]).any())

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that batches may have, in rising order; empty for full batches."""
        if self.batch is None:
            return ()
        last = self.counts % self.batch if self.shuffle else np.zeros_like(self.counts)
        return tuple(np.unique(np.concatenate([self.batch, last[last > 0]])).tolist())

    def cohort(self, streams: Streams, round: int) -> Ints:
        """Clients of one round, in rising order."""
        if self.schedule is not None:
            return np.sort(np.asarray(self.schedule[round], np.int64))
        if self.available is not None:
            reached = np.flatnonzero(self.available[round % len(self.available)])
            size = min(self.size, len(reached))
            return np.sort(streams.start(round, COHORT).choice(reached, size, replace=False, shuffle=False))
        if self.size == self.num_clients:
            return np.arange(self.num_clients)
        stream = streams.start(round, COHORT)
        return np.sort(stream.choice(self.num_clients, self.size, replace=False, shuffle=False))

    def heard(self, seed: int, rounds: int) -> list[Ints]:
        """The cohorts of the first rounds."""
        streams = Streams(seed)
        return [self.cohort(streams, r) for r in range(rounds)]

    @property
    def always(self) -> bool:
        """Whether all clients take part in every round."""
        return self.schedule is None and self.available is None and self.size == self.num_clients

    def draw(self, seed: int, start: int, number: int, room: int) -> Draws:
        """Draws of rounds start .. start + number, in arrays with room for `room` rounds."""
        most, widest, ragged = self.known or self.shape
        shape = (room, self.slots)
        cohort = np.full(shape, self.num_clients, np.int32)
        rows = weights = None
        if self.batch is not None:
            rows = np.zeros((*shape, most, widest), np.int32)
            weights = np.zeros(rows.shape, self.precision) if ragged else None
        streams = Streams(seed)
        steps = None
        if self.mean_steps is not None:
            steps = np.zeros(room, np.int32)
            steps[:number] = [coin(streams, start + r, self.mean_steps) for r in range(number)]
        if self.batch is None and self.always:
            cohort[:, : self.size] = np.arange(self.size)
            return Draws(cohort, None, None, steps)
        fill = self._shuffled if self.shuffle else self._replaced
        for r in range(number):
            chosen = self.cohort(streams, start + r)
            cohort[r, : len(chosen)] = chosen
            if rows is not None:
                streams.start(start + r, ROWS)
                fill(streams, chosen, rows[r], None if weights is None else weights[r])
        return Draws(cohort, rows, weights, steps)

    def _replaced(self, streams: Streams, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None) -> None:
        """Each record drawn apart: a 32-bit number scaled to the client's count (bias below count / 2^32)."""
        assert self.batch is not None
        words = streams.words(len(chosen), *rows.shape[1:])
        scaled = (words * self.counts[chosen, None, None].astype(np.uint64)) >> np.uint64(32)
        scaled += self.first[chosen, None, None].astype(np.uint64)
        rows[: len(chosen)] = scaled
        if weights is not None:
            size = self.batch[chosen, None, None]
            weights[: len(chosen)] = np.where(np.arange(rows.shape[-1]) < size, 1 / size, 0)

    def _shuffled(self, streams: Streams, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None) -> None:
        """Each client's records in fresh orders, cut into batches; the last batch of an epoch may be short."""
        assert self.batch is not None
        for slot, client in enumerate(chosen):
            count, batch, steps = int(self.counts[client]), int(self.batch[client]), int(self.steps[client])
            per_epoch = -(-count // batch)
            epochs = -(-steps // per_epoch)
            order = streams.generator.permuted(np.broadcast_to(np.arange(count), (epochs, count)), axis=1)
            padded = np.full((epochs, per_epoch * batch), -1)
            padded[:, :count] = order
            batches = padded.reshape(-1, batch)[:steps]
            rows[slot, :steps, :batch] = np.maximum(batches, 0) + self.first[client]
            if weights is not None:
                real = batches >= 0
                weights[slot, :steps, :batch] = real / real.sum(axis=1, keepdims=True)


def coin(streams: Streams, round: int, mean: int) -> int:
    """How many local steps a shared coin of probability 1 / mean allows in a round."""
    return int(streams.start(round, COIN).geometric(1 / mean))


def most_steps(mean: int, seeds: Sequence[int], rounds: int) -> int:
    """The most local steps that the coin allows in any round of these runs, up to a whole number of means.

    >>> most_steps(5, [0], 100) % 5
    0
    """
    most = max(coin(streams, r, mean) for streams in map(Streams, seeds) for r in range(rounds))
    return mean * -(-most // mean)


class Streams:
    """Random streams by (seed, round, purpose): one generator, started anew for each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bits = np.random.SFC64(0)
        self.generator = np.random.Generator(self.bits)

    def start(self, round: int, purpose: int) -> np.random.Generator:
        """Return the generator, at the start of the stream: SFC64 from three words, by its author's recipe."""
        words = np.array([self.seed, round, purpose, 1], np.uint64)
        self.bits.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
        self.bits.random_raw(WARM_UP, output=False)
        return self.generator

    def words(self, *shape: int) -> NDArray[np.uint32]:
        """Random 32-bit words."""
        size = prod(shape)
        return self.bits.random_raw(-(-size // 2)).view(np.uint32)[:size].reshape(shape)

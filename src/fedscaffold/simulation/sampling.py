"""Sampling of cohorts and batches: all random choices of a run except gradient noise.

Every round has its own random streams, seeded with (seed, round, purpose), so draws do not depend
on how rounds are grouped and a run can resume at any round. Drawing on the host takes a few
nanoseconds per record and no time that grows with N, unless cohorts are sampled by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.random_streams import start_stream
from fedscaffold.simulation.delays import Law
from fedscaffold.simulation.participation import (
    Availability,
    Sampling,
    call_sampler,
    sample_by_weight,
)
from fedscaffold.simulation.spec import Draws
from fedscaffold.simulation.virtual_clock import VirtualClock

__all__ = ["Drawer", "most_steps"]

Ints = NDArray[np.int64]
COHORT, ROWS, COIN, DELAY = 0, 1, 2, 3
# least and most bytes of record indices for which a round has room, whatever its local steps
ROOM_BYTES = 1 << 10, 1 << 16


@dataclass(frozen=True)
class Drawer:
    """Sampler of cohorts and batches; `draw` returns the draws of any rounds."""

    num_clients: int
    size: int
    """Clients of a round: cohort size S, or replies of a server step with a `buffer`."""
    slots: int
    """S rounded up to whole blocks."""
    schedule: Sequence[Sequence[int]] | None
    """Explicit cohorts, one per round, or None."""
    first: Ints
    counts: Ints
    steps: Ints
    """(N,) local steps of each client."""
    batch: Ints | None
    """(N,) batch size of each client; None for full batches."""
    shuffle: bool
    """Shuffle the records in each epoch, instead of sampling with replacement."""
    lr: Callable[[int], NDArray[Any]]
    """(round, counted from 1) -> its step size, or those of its local steps."""
    precision: str = "float64"
    """Dtype of the record weights."""
    available: NDArray[np.bool_] | Availability | None = None
    """(T, N) availability mask, repeated every T rounds, or a function (round, counted from 1) ->
    (N,) mask."""
    mean_steps: int | None = None
    """Mean number of local steps if it is geometric and shared by all clients, else None."""
    sampling: Sampling | None = None
    """The user's function, or (N,) weights; None for uniform sampling."""
    used: Ints | None = None
    """(N,) records of a shuffled epoch, where its incomplete last batch is left out; None for all.
    """
    rates: NDArray[np.float64] | None = None
    """(N,) probabilities of Poisson batches, whose capacities `batch` holds; None for others."""
    delays: Law | None = None
    """How long tasks take; None without a clock."""
    at_work: int | None = None
    """Clients at work at a time in asynchronous rounds, of which `size` reply per server step; None
    for synchronous rounds."""
    damping: Callable[[Ints], NDArray[np.float64]] | None = None
    """(staleness) -> by how much the moves of these replies count; None for all alike."""
    room: int = ROOM_BYTES[0]
    """Bytes of record indices for which a round has room, whatever its local steps."""

    @cached_property
    def shape(self) -> tuple[int, int, bool]:
        """Largest number of local steps, largest batch size, and whether batch sizes differ."""
        if self.batch is None:
            return int(self.steps.max()), 0, False
        unlike = bool(self._last.any() or (self.batch != self.batch[0]).any())
        ragged = unlike or self.rates is not None
        return int(self.steps.max()), int(self.batch.max()), ragged

    @property
    def steps_room(self) -> int:
        """Number of local steps for which there is room in the draws, a power of two.

        It depends on the number of local steps only where a round's draws are large, so that runs
        with other numbers share a compiled program.
        """
        steps, batch, _ = self.shape
        small = self.room // max(1, 4 * self.slots * batch)
        return max(1 << (steps - 1).bit_length(), 1 << max(0, small.bit_length() - 1))

    @property
    def bytes(self) -> int:
        """Bytes of the draws of one round."""
        _, batch, ragged = self.shape
        return self.slots * (4 + self.steps_room * batch * (8 if ragged else 4))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Possible batch sizes in ascending order; empty for full batches."""
        if self.batch is None:
            return ()
        last = self._last
        return tuple(np.unique(np.concatenate([self.batch, last[last > 0]])).tolist())

    @property
    def _last(self) -> Ints:
        """(N,) sizes of the last batch of an epoch where it is smaller than the others, else 0."""
        if self.batch is None or not self.shuffle:
            return np.zeros_like(self.counts)
        return (self.counts if self.used is None else self.used) % self.batch

    def cohort(self, streams: Streams, round: int) -> Ints:
        """Return the clients of a round (counted from 0) in ascending order.

        A user's function is asked once a round: those who are charged for it are those who come.
        """
        if self.at_work is not None:
            return self.clock(streams.seed).step(round).client
        if not (callable(self.sampling) or callable(self.available)):
            return self._choose(streams, round)
        if (streams.seed, round) not in self._named:
            self._named[streams.seed, round] = self._choose(streams, round)
        return self._named[streams.seed, round]

    @cached_property
    def _named(self) -> dict[tuple[int, int], Ints]:
        """Cohorts that a user's function has named, by seed and round."""
        return {}

    def clock(self, seed: int) -> VirtualClock:
        """Return the virtual clock of a run with delays."""
        if seed not in self._clocks:
            assert self.delays is not None
            streams, synchronous = Streams(seed), self.at_work is None
            self._clocks[seed] = VirtualClock(
                self.delays,
                lambda round, busy, number: (
                    self.cohort(streams, round)
                    if synchronous
                    else _choose_idle(streams.start(round, COHORT), busy, number)
                ),
                lambda round: streams.start(round, DELAY),
                self.num_clients,
                self.size if self.at_work is None else self.at_work,
                buffer=None if synchronous else self.size,
            )
        return self._clocks[seed]

    @cached_property
    def _clocks(self) -> dict[int, VirtualClock]:
        """Virtual clocks by seed."""
        return {}

    def _choose(self, streams: Streams, round: int) -> Ints:
        if self.schedule is not None:
            return np.sort(np.asarray(self.schedule[round], np.int64))
        if self.always:
            return np.arange(self.num_clients)
        if callable(self.sampling):
            # a separate generator: the user's function may advance or keep it
            own = Streams(streams.seed).start(round, COHORT)
            return call_sampler(self.sampling, round + 1, own, self.num_clients, self.size)
        stream = streams.start(round, COHORT)
        reached = None
        if callable(self.available):
            reached = np.flatnonzero(self.available(round + 1))
        elif self.available is not None:
            reached = np.flatnonzero(self.available[round % len(self.available)])
        if self.sampling is not None:
            among = np.arange(self.num_clients) if reached is None else reached
            return sample_by_weight(self.sampling, among, self.size, stream)
        if reached is not None:
            return np.sort(
                stream.choice(reached, min(self.size, len(reached)), replace=False, shuffle=False)
            )
        return np.sort(stream.choice(self.num_clients, self.size, replace=False, shuffle=False))

    def heard(self, seed: int, rounds: int) -> list[Ints]:
        """Return the cohorts of the first rounds."""
        streams = Streams(seed)
        return [self.cohort(streams, r) for r in range(rounds)]

    @cached_property
    def always(self) -> bool:
        """Whether all clients take part in every round."""
        given = self.schedule, self.available, self.sampling, self.at_work
        return all(one is None for one in given) and self.size == self.num_clients

    def draw(self, seed: int, start: int, number: int, room: int) -> Draws:
        """Return the draws of `number` rounds after round `start`, with room for `room` rounds."""
        most, widest, ragged = self.shape
        shape = (room, self.slots)
        cohort = np.full(shape, self.num_clients, np.int32)
        rows = weights = None
        if self.batch is not None:
            rows = np.zeros((*shape, self.steps_room, widest), np.int32)
            weights = np.zeros(rows.shape, self.precision) if ragged else None
        slot = damping = None
        if self.at_work is not None:
            slot = np.full(shape, self.at_work, np.int32)
            damping = None if self.damping is None else np.zeros(shape, self.precision)
        streams = Streams(seed)
        steps = None
        if self.mean_steps is not None:
            steps = np.zeros(room, np.int32)
            steps[:number] = [
                draw_local_steps(streams, start + r, self.mean_steps) for r in range(number)
            ]
        lr = np.zeros((room, *self.lr(start + 1).shape), self.precision)
        for r in range(number):
            lr[r] = self.lr(start + r + 1)
        key = np.broadcast_to(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), (room, 2))
        if self.batch is None and self.always:
            cohort[:, : self.size] = np.arange(self.size)
            return Draws(cohort, None, None, steps, lr, key)
        fill = self._sample_epochs if self.shuffle else self._sample_with_replacement
        fill = fill if self.rates is None else self._sample_poisson
        for r in range(number):
            chosen = self.cohort(streams, start + r)
            cohort[r, : len(chosen)] = chosen
            if slot is not None:
                step = self.clock(seed).step(start + r)
                slot[r, : len(chosen)] = step.slot
                if damping is not None and self.damping is not None:
                    damping[r, : len(chosen)] = self.damping(step.staleness)
            if rows is not None:
                streams.start(start + r, ROWS)
                # only the steps of this round are drawn: draws must not depend on the largest
                # number of any round
                own = most if steps is None else int(steps[r])
                fill(
                    streams,
                    chosen,
                    rows[r, :, :own],
                    None if weights is None else weights[r, :, :own],
                )
        return Draws(cohort, rows, weights, steps, lr, key, slot, damping)

    def _sample_with_replacement(
        self, streams: Streams, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None
    ) -> None:
        """Sample records with replacement.

        32-bit words scaled to the client's count (bias below count / 2^32).
        """
        assert self.batch is not None
        shape = len(chosen), *rows.shape[1:]
        size = prod(shape)
        words = streams.bits.random_raw(-(-size // 2)).view(np.uint32)[:size].reshape(shape)
        scaled = (words * self.counts[chosen, None, None].astype(np.uint64)) >> np.uint64(32)
        scaled += self.first[chosen, None, None].astype(np.uint64)
        rows[: len(chosen)] = scaled
        if weights is not None:
            batch = self.batch[chosen, None, None]
            weights[: len(chosen)] = np.where(np.arange(rows.shape[-1]) < batch, 1 / batch, 0)

    def _sample_epochs(
        self, streams: Streams, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None
    ) -> None:
        """Shuffle each client's records per epoch and split them into batches.

        The last may be smaller.
        """
        assert self.batch is not None
        for slot, client in enumerate(chosen):
            count, batch = int(self.counts[client]), int(self.batch[client])
            used = count if self.used is None else int(self.used[client])
            steps = min(int(self.steps[client]), rows.shape[1])
            per_epoch = -(-used // batch)
            epochs = -(-steps // per_epoch)
            order = streams.generator.permuted(
                np.broadcast_to(np.arange(count), (epochs, count)), axis=1
            )
            padded = np.full((epochs, per_epoch * batch), -1)
            padded[:, :used] = order[:, :used]
            batches = padded.reshape(-1, batch)[:steps]
            rows[slot, :steps, :batch] = np.maximum(batches, 0) + self.first[client]
            if weights is not None:
                real = batches >= 0
                weights[slot, :steps, :batch] = real / real.sum(axis=1, keepdims=True)

    def _sample_poisson(
        self, streams: Streams, chosen: Ints, rows: NDArray[np.int32], weights: NDArray[Any] | None
    ) -> None:
        """Draw each record with the client's probability, independently in each step.

        The distances between the records drawn are geometric.
        """
        assert self.batch is not None
        assert self.rates is not None
        assert weights is not None
        for slot, client in enumerate(chosen):
            count, room = int(self.counts[client]), int(self.batch[client])
            steps = min(int(self.steps[client]), rows.shape[1])
            gaps = streams.generator.geometric(self.rates[client], (steps, room + 1))
            places = np.cumsum(np.minimum(gaps, count + 1), axis=1) - 1
            there = places < count
            if there[:, room].any():
                raise InputError(
                    f"a Poisson batch of client {client} has more than {room} records, which has a "
                    "probability below 1e-60 and is accounted for: the run ends here"
                )
            rows[slot, :steps, :room] = np.where(there, places, 0)[:, :room] + self.first[client]
            weights[slot, :steps, :room] = there[:, :room]


def _choose_idle(stream: np.random.Generator, busy: NDArray[np.bool_], number: int) -> Ints:
    """Return so many clients that are not at work, drawn uniformly, in ascending order."""
    idle = np.flatnonzero(~busy)
    if number == len(idle):
        return idle
    return np.sort(stream.choice(idle, number, replace=False, shuffle=False))


def draw_local_steps(streams: Streams, round: int, mean: int) -> int:
    """Draw the number of local steps of a round, geometric and shared by all clients."""
    return int(streams.start(round, COIN).geometric(1 / mean))


def most_steps(mean: int, seeds: Sequence[int], rounds: int) -> int:
    """Return the largest number of local steps in any round, rounded up to a multiple of `mean`.

    >>> most_steps(5, [0], 100) % 5
    0
    """
    most = max(
        draw_local_steps(streams, r, mean) for streams in map(Streams, seeds) for r in range(rounds)
    )
    return mean * -(-most // mean)


class Streams:
    """Random streams by (seed, round, purpose), from one generator that is reseeded for each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bits = np.random.SFC64(0)
        self.generator = np.random.Generator(self.bits)

    def start(self, round: int, purpose: int) -> np.random.Generator:
        """Return the generator at the start of a stream."""
        start_stream(self.bits, self.seed, round, purpose)
        return self.generator

"""The virtual clock of a run: which client begins when, and whose replies make which server step.

A client has one task at a time. Of the tasks at work, the `buffer` that end first make a server
step; it is taken when the last of them ends, and as many new tasks begin from the new model. So
nobody waits for a client that is slow, and a reply may be several server steps late. Without a
buffer the step takes the replies of all clients of the round, so a round lasts as long as its
slowest client.

A task at work has a slot, in which the engine keeps what its client was sent. The slots of the
replies that make a server step are those of the tasks that begin after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.simulation.delays import Law, Tasks, draw_seconds

__all__ = ["ServerStep", "VirtualClock"]

Ints = NDArray[np.int64]


class ServerStep(NamedTuple):
    """A server step, and the replies that make it, in ascending order of clients."""

    time: float
    """Virtual seconds since the run began."""
    client: Ints
    slot: Ints
    staleness: Ints
    """Server steps that were taken while each of these clients worked."""


class VirtualClock:
    """The server steps of a run, found one after the other when they are asked for.

    Args:
        law: How long tasks take.
        begin: (round, busy, number) -> the clients that begin a task, in ascending order; rounds
            count from 0, `busy` marks clients at work, and `number` slots are free.
        stream: (round) -> generator of the delays of the tasks that begin in it.
        num_clients: Number of all clients.
        at_work: Largest number of tasks at work.
        buffer: Replies that make a server step; None for all that are at work.

    >>> from fedscaffold.simulation.delays import of
    >>> every = lambda round, busy, number: np.flatnonzero(~busy)[:number]
    >>> clock = VirtualClock(of([[1.0, 2.5]], 2), every, np.random.default_rng, 2, 2, buffer=1)
    >>> [(clock.step(r).time, clock.step(r).client.tolist()) for r in range(4)]
    [(1.0, [0]), (2.0, [0]), (2.5, [1]), (3.0, [0])]
    >>> clock.step(2).staleness.tolist()
    [2]
    """

    def __init__(
        self,
        law: Law,
        begin: Callable[[int, NDArray[np.bool_], int], Ints],
        stream: Callable[[int], np.random.Generator],
        num_clients: int,
        at_work: int,
        buffer: int | None = None,
    ) -> None:
        self.law, self.begin, self.stream, self.buffer = law, begin, stream, buffer
        self.num_clients, self.at_work = num_clients, at_work
        self._steps: list[ServerStep] = []
        self._coming = self._replay()

    def step(self, round: int) -> ServerStep:
        """Return the server step of a round, counted from 0."""
        while len(self._steps) <= round:
            self._steps.append(next(self._coming))
        return self._steps[round]

    def times(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the virtual seconds at the end of rounds start + 1 .. stop."""
        return np.array([self.step(r).time for r in range(start, stop)], np.float64)

    def _replay(self) -> Iterator[ServerStep]:
        busy = np.zeros(self.num_clients, np.bool_)
        tasks_before = np.zeros(self.num_clients, np.int64)
        free = np.arange(self.at_work)
        at_work: list[tuple[float, int, int, int]] = []  # end, round of the begin, client, slot
        now = 0.0
        for round in count():
            client = self.begin(round, busy, len(free))
            tasks = Tasks(client, tasks_before[client], self.num_clients)
            ends = now + draw_seconds(self.law, tasks, self.stream(round))
            tasks_before[client] += 1
            busy[client] = True
            for task in zip(ends.tolist(), client.tolist(), free.tolist(), strict=False):
                heapq.heappush(at_work, (task[0], round, *task[1:]))
            number = len(at_work) if self.buffer is None else self.buffer
            replies = [heapq.heappop(at_work) for _ in range(number)]
            now = max((reply[0] for reply in replies), default=now)
            replies.sort(key=lambda reply: reply[2])
            begun, client, slot = (
                np.array([reply[k] for reply in replies], np.int64) for k in (1, 2, 3)
            )
            busy[client] = False
            free = slot if self.buffer is not None else np.arange(self.at_work)
            yield ServerStep(now, client, slot, round - begun)

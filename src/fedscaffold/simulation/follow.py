"""Following a run: what is known after every stretch of rounds, for whoever records or shows it.

Nothing of this is in the compiled program: metrics are the rows it returns anyway, and cohorts are drawn on the host,
from (seed, round). So a run that is followed has the bits of one that is not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold.brief import brief
from fedscaffold.metrics import met
from fedscaffold.simulation.checkpoint import Checkpoint, Progress
from fedscaffold.simulation.draws import Streams
from fedscaffold.simulation.health import level
from fedscaffold.simulation.setup import Ready, Request
from fedscaffold.simulation.spec import Draws
from fedscaffold.simulation.traffic import traffic

__all__ = ["Follow", "Follower", "Stretch"]


class Stretch(NamedTuple):
    """What is known after some rounds in a row."""

    def __repr__(self) -> str:
        return brief(self)

    start: int
    """Rounds before these."""
    columns: dict[str, NDArray[Any]]
    """By round, as in `Run.history`."""
    cohort: Callable[[int], NDArray[Any]]
    """The clients of a round (counted from 1)."""
    explained: float
    """What rounding explains of the residual so far (see `Run.explained`)."""
    seconds: dict[str, float]
    """Where the time of this session went so far: compile, draw, rounds, checkpoint."""
    outcome: str | None
    """None while the run goes on, else "finished", "target" or "diverged"."""


Follow: TypeAlias = Callable[[Stretch], bool | None]


class Follower:
    """Tells `see` of every round once: first of all rounds of earlier sessions, then of each stretch as it ends.

    Where `see` returns True the run ends as by Ctrl-C: with a checkpoint, if it keeps any.
    """

    def __init__(self, request: Request, ready: Ready, seed: int, see: Follow, keeper: Checkpoint | None) -> None:
        self.request, self.ready, self.seed, self.see, self.keeper = request, ready, seed, see, keeper
        self.streams = Streams(seed)
        self.heard_at = np.zeros(ready.drawer.num_clients, np.int64)
        self.told = 0
        self.drawn: tuple[int, Any] = 0, ()
        self.seconds = dict.fromkeys(("compile", "draw", "rounds", "checkpoint"), 0.0)

    def timed(self, draw: Callable[[int, int], Draws]) -> Callable[[int, int], Draws]:
        """The same draws, remembered, with the time they take noted."""

        def noted(start: int, number: int) -> Draws:
            began = time.perf_counter()
            drawn = draw(start, number)
            self.seconds["draw"] += time.perf_counter() - began
            self.drawn = start, drawn.cohort if isinstance(drawn.cohort, np.ndarray) else ()
            return drawn

        return noted

    def begin(self, now: Progress, seconds: float) -> None:
        """The program is compiled; `now` is where the checkpoint stands."""
        self.seconds["compile"] += seconds
        self.tell(now, np.concatenate(now.table) if now.table else np.zeros((0, len(self.ready.spec.metrics))))

    def after(self, now: Progress, seconds: float) -> None:
        """A stretch is over: it took so many seconds, draws included."""
        self.seconds["rounds"] += seconds
        self.tell(now, now.table[-1])

    def tell(self, now: Progress, rows: NDArray[Any]) -> None:
        """Say what is new; `rows` begin with the first round not yet told."""
        over = bool(now.state.done)
        start = self.told
        self.told = stop = int(now.state.round) if over else now.done  # one that is over has no rows for the rest
        columns = {"round": np.arange(start + 1, stop + 1)}
        columns |= {name: rows[: stop - start, j] for j, name in enumerate(self.ready.spec.metrics)}
        columns |= traffic(self.request, self.ready, self.seed, start, stop, self.heard_at)
        spent = {} if self.keeper is None else {"checkpoint": self.keeper.spent}
        seconds = self.seconds | {"rounds": max(0.0, self.seconds["rounds"] - self.seconds["draw"])} | spent
        outcome = self.outcome(now, over, columns)
        clients = self.request.problem.num_clients
        wants_end = self.see(Stretch(start, columns, self.cohort, level(now.state, clients), seconds, outcome))
        if wants_end and outcome is None:
            if self.keeper is None:
                raise KeyboardInterrupt
            self.keeper.signals.append(signal.SIGINT)

    def cohort(self, round: int) -> NDArray[Any]:
        """The clients of a round, which count from 1: as they were drawn, or drawn again."""
        start, cohorts = self.drawn
        if start < round <= min(start + len(cohorts), self.told):
            row: NDArray[Any] = cohorts[round - 1 - start]
            return row if row[-1] < self.ready.drawer.num_clients else row[row < self.ready.drawer.num_clients]
        return self.ready.drawer.cohort(self.streams, round - 1)

    def outcome(self, now: Progress, over: bool, columns: dict[str, NDArray[Any]]) -> str | None:
        """How the run has ended, None if it has not."""
        if not over:
            return "finished" if now.done >= self.request.rounds else None
        stop = self.ready.spec.stop
        reached = stop is not None and len(columns[stop]) and bool(met(stop, columns[stop][-1], self.ready.target))
        return "target" if reached else "diverged"

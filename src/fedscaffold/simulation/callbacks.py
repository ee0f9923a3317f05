"""Callbacks: observe a run while it is going on, and stop it early.

Callbacks run on the host, outside the compiled program, so they do not change a run's results: they
are bit-identical with and without callbacks. Rounds run in chunks of about half a second; a
callback is called after each chunk, or every `every` rounds, at which a chunk then ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import explained
from fedscaffold.privacy.budget import Budget, Spent
from fedscaffold.problems.layout import Layout
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.checkpoint import Checkpoint, Progress
from fedscaffold.simulation.distributed import allreduce_max
from fedscaffold.simulation.forecast import Forecast
from fedscaffold.simulation.invariants import InvariantMonitor
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.result import Run, history_of
from fedscaffold.simulation.sampling import Streams
from fedscaffold.simulation.spec import Draws
from fedscaffold.status_line import StatusLine

__all__ = ["Callback", "Look", "Observers", "ProgressLine"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """Snapshot of a run that is passed to callbacks."""

    start: int
    """Number of rounds before those in `columns`."""
    columns: dict[str, NDArray[Any]]
    """History of the rounds since this callback was last called, as in `Run.history`."""
    cohort: Callable[[int], NDArray[Any]]
    """(round, counted from 1) -> the clients that took part in it."""
    explained: float
    """Largest residual that rounding explains so far (see `Run.explained`)."""
    seconds: dict[str, float]
    """Seconds spent so far in this session on compile, draw, rounds, checkpoint."""
    outcome: str | None
    """None while the run is going on, else "finished", "target" or "diverged"."""
    state: Any
    """State of the federation. Its buffers are donated to the next rounds: copy what you keep."""
    layout: Layout
    budget: Budget | None = None
    """The budget of a private run; None without `privacy`."""

    @property
    def round(self) -> int:
        """Number of rounds done."""
        return self.start + len(self.columns["round"])

    @cached_property
    def model(self) -> Any:
        """Copy of the model, with the pytree structure of the problem's params."""
        return self.layout.unflatten(np.array(self.state.x))

    @cached_property
    def privacy(self) -> Spent | None:
        """What a private run has spent so far; None without `privacy`."""
        return None if self.budget is None else self.budget.spent(self.round)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last round; NaN for those that were not measured in it."""
        return {name: column[-1].item() for name, column in self.columns.items() if len(column)}

    def __repr__(self) -> str:
        told = ", ".join(
            f"{name} {value:.4g}" for name, value in self.metrics.items() if name != "round"
        )
        return f"Look(round {self.round}{', ' * bool(told)}{told})"


class Callback:
    """Base class of callbacks; override the methods you need.

    Callbacks are called in the order given. Each sees every round once; `begin` receives the rounds
    of earlier sessions, restored from a checkpoint.

    >>> import fedscaffold as fs
    >>> class Patience(fs.Callback):
    ...     every = 5
    ...     best = float("inf")
    ...     def after(self, look):
    ...         before, self.best = self.best, min(self.best, look.metrics["distance"])
    ...         return self.best > 0.99 * before  # True ends the run
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
    >>> run = fs.simulate(
    ...     fs.fedavg(), problem, rounds=1000, local_steps=5, lr=0.5, callbacks=[Patience()]
    ... )
    >>> run.outcome, run.rounds % 5, run.rounds < 1000
    ('stopped', 0, True)
    """

    every: int | None = None
    """Rounds between two calls of `after`; None for about twice a second."""

    def begin(self, look: Look) -> None:
        """Called once the program is compiled; `look` holds the rounds of earlier sessions."""

    def after(self, look: Look) -> bool | None:
        """Called after some rounds; return True to stop the run."""

    def end(self, run: Run) -> None:
        """Called with the result at the end of the run."""


class _FunctionCallback(Callback):
    """Callback that calls a function."""

    def __init__(self, function: Callable[[Look], bool | None]) -> None:
        self.function = function

    def after(self, look: Look) -> bool | None:
        return self.function(look)


class ProgressLine:
    """Progress of a run, with an estimate of the remaining time.

    Args:
        wanted: Whether to show it; None shows it on a terminal and in notebooks only.
        rounds: Number of rounds of the run.
    """

    def __init__(self, wanted: bool | None, rounds: int) -> None:
        self.line = StatusLine(wanted)
        self.rounds, self.before, self.began = rounds, 0, time.perf_counter()

    def begin(self, done: int, size: Forecast) -> None:
        """Show the size of a run that has been compiled, before its next round.

        In a notebook it is replaced by the progress, so that a run is one line of the output.
        """
        self.before, self.began = done, time.perf_counter()
        (self.line.show if self.line.notebook else self.line.keep)(str(size))

    def until(self, done: int) -> int:
        """Return the number of rounds to run before `after` must be called."""
        return self.rounds

    def after(self, now: Progress, seconds: float) -> bool:
        """Show the progress; never stops the run."""
        each = (time.perf_counter() - self.began) / (now.done - self.before)
        left = each * (self.rounds - now.done)
        self.line.show(f"round {now.done}/{self.rounds}, about {left:.0f} s left")
        return False

    def end(self, done: int) -> None:
        """Show how many rounds were run, and their time."""
        seconds = time.perf_counter() - self.began
        self.line.keep(f"round {done}/{self.rounds}, {seconds:.1f} s")


class Observers:
    """Dispatcher to everything that observes a run.

    Callbacks, progress line, invariant checks, checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        ready: PreparedRun,
        monitor: InvariantMonitor,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.ready, self.checkpoint = config, ready, checkpoint
        self.monitor = monitor if ready.spec.keeps else None
        self.callbacks: list[Callback] = [_as_callback(one) for one in config.callbacks]
        line = ProgressLine(config.progress, config.rounds)
        self.line = line if line.line.shown else None
        self.pending: list[list[dict[str, NDArray[Any]]]] = [[] for _ in self.callbacks]
        self.heard_at = np.zeros(ready.drawer.num_clients, np.int64)
        self.reported = 0
        self.drawn: tuple[int, Any] = 0, ()
        self.seconds = dict.fromkeys(("compile", "draw", "rounds", "checkpoint"), 0.0)

    def time_draws(self, draw: Callable[[int, int], Draws]) -> Callable[[int, int], Draws]:
        """Wrap `draw` to record the time it takes and the last cohorts drawn."""

        def noted(start: int, number: int) -> Draws:
            began = time.perf_counter()
            drawn = draw(start, number)
            self.seconds["draw"] += time.perf_counter() - began
            self.drawn = start, drawn.cohort if isinstance(drawn.cohort, np.ndarray) else ()
            return drawn

        return noted

    def until(self, done: int) -> int:
        """Return the number of rounds to run before the next callback or checkpoint is due."""
        wanted = [one.every - done % one.every for one in self.callbacks if one.every is not None]
        return min(
            [
                self.config.rounds if self.checkpoint is None else self.checkpoint.until(done),
                *wanted,
            ]
        )

    def begin(self, now: Progress, seconds: float) -> None:
        """Call `begin` of all callbacks; `now` is the progress restored from the checkpoint."""
        self.seconds["compile"] += seconds
        if self.line is not None:
            self.line.begin(now.done, self.ready.size)
        if self.callbacks:
            rows = np.zeros((0, len(self.ready.spec.metrics)))
            rows = np.concatenate(now.table) if now.table else rows
            columns = self._columns(now, rows)
            for callback in self.callbacks:
                callback.begin(self._look(now, [columns]))

    def after(self, now: Progress, seconds: float) -> bool:
        """Process a chunk of rounds and return whether a callback stops the run."""
        self.seconds["rounds"] += seconds
        stop = bool(self.callbacks) and self._call_callbacks(now)
        if self.ready.several:
            stop = bool(allreduce_max(int(stop))[0])
        if self.line is not None:
            self.line.after(now, seconds)
        if self.checkpoint is not None:
            self.checkpoint.after(now, stop)
        elif self.monitor is not None and self.monitor.due():
            self.monitor(now.state)
        return stop

    def end(self, run: Run) -> None:
        """End the progress line, and call `end` of all callbacks."""
        if self.line is not None:
            self.line.end(run.rounds)
        for callback in self.callbacks:
            callback.end(run)

    def _call_callbacks(self, now: Progress) -> bool:
        columns = self._columns(now, now.table[-1])
        over = bool(now.state.done) or now.done >= self.config.rounds
        stop = False
        for callback, pending in zip(self.callbacks, self.pending, strict=True):
            pending.append(columns)
            if over or callback.every is None or now.done % callback.every == 0:
                stop |= bool(callback.after(self._look(now, pending)))
                pending.clear()
        if stop and not over:  # each callback sees every round, also those since it was last called
            for callback, pending in zip(self.callbacks, self.pending, strict=True):
                if pending:
                    callback.after(self._look(now, pending))
                    pending.clear()
        return stop and not over

    def _columns(self, now: Progress, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the history columns of the rounds not yet reported.

        `rows` starts with the first of them.
        """
        over = bool(now.state.done)
        start = self.reported
        self.reported = stop = (
            int(now.state.round) if over else now.done
        )  # no rows after an early end
        return history_of(self.config, self.ready, rows, start, stop, self.heard_at)

    def _look(self, now: Progress, told: Sequence[dict[str, NDArray[Any]]]) -> Look:
        columns = {name: np.concatenate([one[name] for one in told]) for name in told[0]}
        spent = {} if self.checkpoint is None else {"checkpoint": self.checkpoint.spent}
        seconds = (
            self.seconds
            | {"rounds": max(0.0, self.seconds["rounds"] - self.seconds["draw"])}
            | spent
        )
        return Look(
            start=self.reported - len(columns["round"]),
            columns=columns,
            cohort=self._cohort,
            explained=explained(
                int(now.state.round), self.config.problem.num_clients, float(now.state.scale)
            ),
            seconds=seconds,
            outcome=self._outcome(now, columns),
            state=now.state,
            layout=self.ready.spec.layout,
            budget=self.ready.budget,
        )

    def _cohort(self, round: int) -> NDArray[Any]:
        """Return the clients of a round, counted from 1.

        Redraw them if they are not in the last draws.
        """
        start, cohorts = self.drawn
        if start < round <= min(start + len(cohorts), self.reported):
            row: NDArray[Any] = cohorts[round - 1 - start]
            return (
                row
                if row[-1] < self.ready.drawer.num_clients
                else row[row < self.ready.drawer.num_clients]
            )
        return self.ready.drawer.cohort(Streams(self.config.seed), round - 1)

    def _outcome(self, now: Progress, columns: dict[str, NDArray[Any]]) -> str | None:
        """Return how the run ended, or None while it is going on."""
        if not bool(now.state.done):
            return "finished" if now.done >= self.config.rounds else None
        stop = self.ready.spec.stop
        reached = stop is not None and bool(
            stop.met(columns[stop.metric][-1:], self.ready.federation.target).any()
        )
        return "target" if reached else "diverged"


def _as_callback(given: Any) -> Callback:
    """Return `given` as a `Callback`.

    A callback, an object with some of its methods, or a function.
    """
    if isinstance(given, Callback):
        return given
    return _adapt_object(given) if hasattr(given, "after") else _FunctionCallback(given)


def _adapt_object(given: Any) -> Callback:
    """Return a `Callback` with the methods that `given` has."""
    made = Callback()
    for name in ("every", "begin", "after", "end"):
        if hasattr(given, name):
            setattr(made, name, getattr(given, name))
    return made

"""The engine: compile the rounds once, then run them in chunks.

Between chunks the host draws the next cohorts and batches, stores the metrics, calls the listener
and checks whether the run has ended. The results do not depend on how rounds are grouped into
chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from fedscaffold.simulation.blocks import compile_blocks, compile_sweep
from fedscaffold.simulation.checkpoint import Progress
from fedscaffold.simulation.distributed import allreduce_min
from fedscaffold.simulation.out_of_core import OutOfCoreClients
from fedscaffold.simulation.own_metrics import OnHost
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.rounds import rounds, trace_in_precision
from fedscaffold.simulation.sampling import Drawer
from fedscaffold.simulation.sharding import Shards, on_all_devices
from fedscaffold.simulation.spec import Draws, State

__all__ = ["Engine", "Listener", "Seconds", "compile_rounds", "run_rounds"]

DRAW_BYTES = 1 << 25  # memory for the draws of one chunk of rounds
MOST_ROUNDS = 64  # rounds in a chunk: more gain nothing
STRETCH_SECONDS = 0.5  # duration of a chunk


class Seconds(NamedTuple):
    """Seconds spent compiling and running."""

    compile: float
    """Tracing and compiling, or a cache lookup."""
    wall: float
    """All rounds."""
    cpu: float
    """All rounds, over all threads."""


class Engine(NamedTuple):
    """A compiled program and its inputs; `advance` runs the next rounds."""

    ready: PreparedRun
    program: Any
    federation: Any
    """The federation on the devices."""
    draw: Callable[[int, int], Draws]
    """(start, number) -> the draws of these rounds."""
    room: int
    """Largest number of rounds in one call."""
    every: int
    """Rounds between two evaluations."""
    away: OutOfCoreClients | None = None
    runs: int | None = None
    """Number of runs of a sweep; None for a single run."""
    charge: Callable[[int], None] = lambda rounds: None
    """(rounds) -> None, called before the last of these rounds is run: enters what they spend."""

    def until(self, done: int) -> int:
        """Return the largest number of rounds for the next call.

        It ends where a metric is due that is evaluated on the host.
        """
        if self.ready.host is None:
            return self.room
        return min(self.room, self.every - done % self.every)

    def place(self, state: State) -> State:
        """Copy a state to the devices, into buffers that may be donated.

        A sweep gets one copy per run.
        """
        if self.ready.shards is not None:
            return self.ready.shards.state(state)
        if self.runs is not None:
            state = _repeated(state, self.runs)
        with jax.enable_x64(True):
            placed: State = jax.device_put(jax.tree.map(np.asarray, state), may_alias=False)
        return placed

    def collect(self, state: State) -> State:
        """Copy a state to the host."""
        if self.ready.shards is not None:
            return self.ready.shards.collect(state)
        collected: State = jax.tree.map(np.asarray, state)
        return collected

    def advance(
        self, state: State, done: int, number: int, rounds: int = 0
    ) -> tuple[State, NDArray[Any]]:
        """Run rounds done + 1 .. done + number and return the new state and their metrics.

        The buffers of the old state are donated. `rounds`, the length of the run, limits
        prefetching of clients that are out of core.
        """
        self.charge(done + number)
        if self.away is not None:
            state, rows = self.away.advance(self.program, state, done, rounds, self.every)
        else:
            lengths = np.int32(number), np.int32(self.every), np.int32(done)
            if self.ready.shards is not None:
                lengths = self.ready.shards.put(lengths, None)
            draws = self.draw(done, number)
            state, rows = self.program(self.federation, state, draws, *lengths)
        table = np.asarray(rows)[..., :number, :]
        if self.ready.host is None or (done + number) % self.every:
            return state, table
        return self._fill_host_metrics(self.ready.host, state, table.copy(), done + number)

    def _fill_host_metrics(
        self, host: OnHost, state: State, rows: NDArray[Any], round: int
    ) -> tuple[State, NDArray[Any]]:
        """Fill in the host metrics of the last round, if it was run.

        Set `done` where a target is met.
        """
        here = self.collect(state)
        runs = [(here, rows)]
        if self.runs is not None:
            runs = [(jax.tree.map(lambda a: a[i], here), rows[i]) for i in range(self.runs)]  # noqa: B023
        reached = [int(run.round) == round and host.fill(run, table) for run, table in runs]
        if not any(reached):
            return state, rows
        done, shards = np.reshape(reached, np.shape(here.done)) | here.done, self.ready.shards
        if shards is not None:
            return state._replace(done=shards.put(done, None)), rows
        return state._replace(done=jax.device_put(done, may_alias=False)), rows


class Listener(Protocol):
    """Protocol of what `run_rounds` calls after every chunk of rounds."""

    def until(self, done: int) -> int:
        """Return the number of rounds to run before `after` must be called."""

    def after(self, now: Progress, seconds: float) -> bool:
        """Process a chunk that took `seconds`; return whether to stop the run."""


def compile_rounds(
    ready: PreparedRun,
    seeds: list[int],
    every: int,
    *,
    lrs: Any = None,
    group: int | None = None,
    away: OutOfCoreClients | None = None,
) -> Engine:
    """Compile the rounds, or reuse a compiled program, and copy the federation to the devices.

    Args:
        ready: The prepared run.
        seeds: One seed per run.
        every: Rounds between two evaluations.
        lrs: One step size per run of a sweep, or its schedule.
        group: Number of runs of a sweep to vectorise over; None for a single run.
        away: Out-of-core clients, if any; rounds then run one at a time.
    """
    room = 1
    if away is None:
        room = int(np.clip(DRAW_BYTES // (len(seeds) * ready.drawer.bytes), 1, MOST_ROUNDS))
    draw: Callable[[int, int], Draws] = partial(ready.drawer.draw, seeds[0], room=room)
    if group is not None:
        draw = partial(_draws_of_sweep, ready.drawer, seeds, lrs, room)
    if ready.shards is None:
        with jax.enable_x64(True):
            federation = jax.device_put(ready.federation)
    else:
        federation = ready.shards.federation(ready.federation)
        draw = partial(_draws_of_shards, ready.shards, draw)
    runs = len(seeds) if group else None
    engine = Engine(ready, None, federation, draw, room, every, away, runs)
    lengths = (np.int32(0),) * 3
    if ready.shards is not None:
        lengths = ready.shards.put(lengths, None)
    start = ready.start if ready.shards is None else engine.place(ready.start)
    if runs is not None:
        start = _repeated(start, runs)
    arguments = federation, start, draw(0, 0), *lengths
    leaves, structure = jax.tree.flatten(arguments)
    program = _compile(ready.spec, group, tuple(map(_shape, leaves)), structure)
    jax.block_until_ready(federation)
    return engine._replace(program=program)


def _repeated(state: State, runs: int) -> State:
    """Return a view of a state with one copy per run."""
    copies: State = jax.tree.map(lambda a: np.broadcast_to(a, (runs, *np.shape(a))), state)
    return copies


def _draws_of_sweep(
    drawer: Drawer, seeds: list[int], lrs: list[Any], room: int, start: int, number: int
) -> Draws:
    """Return the draws of a sweep's runs, stacked; runs of one seed draw the same."""
    each = {seed: drawer.draw(seed, start, number, room) for seed in set(seeds)}
    runs = [
        each[seed] if callable(lr) else each[seed]._replace(lr=np.full_like(each[seed].lr, lr))
        for seed, lr in zip(seeds, lrs, strict=True)
    ]
    stacked: Draws = jax.tree.map(lambda *arrays: np.stack(arrays), *runs)
    return stacked


def _draws_of_shards(
    shards: Shards, draw: Callable[[int, int], Draws], start: int, number: int
) -> Draws:
    return shards.draws(draw(start, number))


def run_rounds(engine: Engine, now: Progress, rounds: int, listener: Listener) -> Progress:
    """Run the remaining rounds in chunks of half a second; call the listener after each."""
    number = 1
    while now.done < rounds and not np.all(now.state.done):
        number = min(number, rounds - now.done, engine.until(now.done), listener.until(now.done))
        number = number if engine.ready.shards is None else allreduce_min(number)
        began = time.perf_counter()
        state, rows = engine.advance(now.state, now.done, number, rounds)
        now.table.append(rows)
        now = Progress(state, now.table, now.done + number)
        seconds = time.perf_counter() - began
        if listener.after(now, seconds):
            break
        number = max(1, int(number * STRETCH_SECONDS / max(seconds, 1e-6)))
    jax.block_until_ready(now.state)
    return now


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding over several devices."""
    place = getattr(array, "sharding", None)
    spread = place if isinstance(place, NamedSharding) else None
    return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=spread)


@lru_cache(maxsize=64)
def _compile(spec: Any, group: int | None, leaves: Any, structure: Any) -> Any:
    """Compile the program for a spec and shapes of its arguments, whose state is donated."""
    arguments = jax.tree.unflatten(structure, leaves)
    if spec.by_blocks:
        return (compile_blocks if group is None else compile_sweep)(spec, *arguments)

    def run(*given: Any) -> Any:
        return trace_in_precision(arguments[1].server.x.dtype, partial(rounds, spec), given)

    def sweep(federation: Any, state: Any, draws: Any, *lengths: Any) -> Any:
        def one(of_run: Any) -> Any:
            return run(federation, *of_run, *lengths)

        return jax.lax.map(one, (state, draws), batch_size=None if group == 1 else group)

    function = run if group is None else sweep
    function = function if spec.mesh is None else on_all_devices(spec, function, arguments)
    with jax.enable_x64(True):
        return jax.jit(function, donate_argnums=1).lower(*arguments).compile()

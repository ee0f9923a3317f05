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

from fedscaffold.simulation.checkpoint import Progress
from fedscaffold.simulation.distributed import allreduce_min
from fedscaffold.simulation.double_precision import enable_float64
from fedscaffold.simulation.out_of_core import OutOfCoreClients
from fedscaffold.simulation.own_metrics import OnHost
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.rounds import rounds as all_rounds
from fedscaffold.simulation.sharding import Shards, on_all_devices
from fedscaffold.simulation.spec import Draws, Settings, State

__all__ = ["Engine", "Listener", "Seconds", "compile_rounds", "noise_key", "run_rounds"]

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

    program: Any
    federation: Any
    settings: Settings
    draw: Callable[[int, int], Draws]
    """(start, number) -> the draws of these rounds."""
    room: int
    """Largest number of rounds in one call."""
    every: int
    away: OutOfCoreClients | None = None
    shards: Shards | None = None
    runs: int | None = None
    """Number of runs of a sweep; None for a single run."""
    host: OnHost | None = None
    """The user's metrics that are evaluated on the host."""

    def until(self, done: int) -> int:
        """Return the largest number of rounds for the next call, which ends where a host metric is due."""
        return self.room if self.host is None else min(self.room, self.every - done % self.every)

    def place(self, state: State) -> State:
        """Copy a state to the devices, into buffers that may be donated.

        A sweep gets one copy per run.
        """
        if self.shards is not None:
            return self.shards.state(state)
        if (runs := self.runs) is not None:
            state = jax.tree.map(lambda a: np.broadcast_to(a, (runs, *np.shape(a))), state)
        with enable_float64():
            placed: State = jax.device_put(jax.tree.map(np.asarray, state), may_alias=False)
        return placed

    def collect(self, state: State) -> State:
        """Copy a state to the host."""
        collected: State = (
            jax.tree.map(np.asarray, state) if self.shards is None else self.shards.collect(state)
        )
        return collected

    def advance(
        self, state: State, done: int, number: int, rounds: int = 0
    ) -> tuple[State, NDArray[Any]]:
        """Run rounds done + 1 .. done + number and return the new state and their metrics.

        The buffers of the old state are donated. `rounds`, the length of the run, limits
        prefetching of clients that are out of core.
        """
        if self.away is not None:
            state, rows = self.away.advance(
                self.program, self.settings, state, done, rounds, self.every
            )
        else:
            draws = self.draw(done, number)
            length = _loop_arguments(self.shards, number, self.every, done)
            state, rows = self.program(self.federation, self.settings, state, draws, *length)
        table = np.asarray(rows)[..., :number, :]
        return (
            (state, table)
            if self.host is None
            else self._fill_host_metrics(self.host, state, table, done + number)
        )

    def _fill_host_metrics(
        self, host: OnHost, state: State, rows: NDArray[Any], round: int
    ) -> tuple[State, NDArray[Any]]:
        """Fill in the host metrics of the last round, if it is due and was run.

        Set `done` where a target is met.
        """
        if round % self.every:
            return state, rows
        rows, here = rows.copy(), self.collect(state)
        runs = [(here, rows)]
        if self.runs is not None:
            runs = [(jax.tree.map(lambda a: a[i], here), rows[i]) for i in range(self.runs)]  # noqa: B023
        reached = [int(run.round) == round and host.fill(run, table) for run, table in runs]
        if not any(reached):
            return state, rows
        done = np.reshape(reached, np.shape(here.done)) | here.done
        placed = (
            jax.device_put(done, may_alias=False)
            if self.shards is None
            else self.shards.put(done, None)
        )
        return state._replace(done=placed), rows


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
        lrs: One step size per run of a sweep; defaults to that of `ready`.
        group: Number of runs of a sweep to vectorise over; None for a single run.
        away: Out-of-core clients, if any; rounds then run one at a time.
    """
    room = int(np.clip(DRAW_BYTES // _draw_bytes(ready), 1, MOST_ROUNDS)) if away is None else 1
    draw = partial(_draws, ready, seeds, room, group)
    settings = _settings(ready, seeds, lrs)
    shards = ready.shards
    if shards is None:
        with enable_float64():
            federation = jax.device_put(ready.federation)
    else:
        federation, settings = shards.federation(ready.federation), shards.put(settings, None)
    runs = len(seeds) if group else None
    engine = Engine(None, federation, settings, draw, room, every, away, shards, runs, ready.host)
    arguments = (
        federation,
        settings,
        engine.place(ready.start),
        draw(0, 0),
        *_loop_arguments(shards, 0, every, 0),
    )
    program = _compile(ready.spec, group, *_signature(arguments))
    jax.block_until_ready(federation)
    return engine._replace(program=program)


def _settings(ready: PreparedRun, seeds: list[int], lrs: Any) -> Settings:
    """Return the settings of a run, or the stacked settings of a sweep's runs."""
    dtype = ready.lr.dtype
    if lrs is None:
        return Settings(ready.lr, noise_key(seeds[0]), np.array(ready.target, dtype))
    keys: NDArray[np.uint32] = np.stack([noise_key(seed) for seed in seeds])
    sizes = np.stack([ready.lr if callable(lr) else np.array(lr, dtype) for lr in lrs])
    return Settings(sizes, keys, np.full(len(lrs), ready.target, dtype))


def noise_key(seed: int) -> NDArray[np.uint32]:
    """Return the raw random key of the gradient noise: the upper and lower 32 bits of the seed."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def run_rounds(engine: Engine, now: Progress, rounds: int, listener: Listener) -> Progress:
    """Run the remaining rounds in chunks of about half a second and call the listener after each."""
    number = 1
    while now.done < rounds and not np.all(now.state.done):
        number = min(number, rounds - now.done, engine.until(now.done), listener.until(now.done))
        number = number if engine.shards is None else allreduce_min(number)
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


def _draw_bytes(ready: PreparedRun) -> int:
    drawer = ready.drawer
    rows = (
        0
        if drawer.batch is None
        else int(drawer.steps.max()) * int(drawer.batch.max()) * (8 if drawer.ragged else 4)
    )
    return drawer.slots * (4 + rows)


def _draws(
    ready: PreparedRun, seeds: list[int], room: int, group: int | None, start: int, number: int
) -> Draws:
    if ready.shards is not None:
        return ready.shards.draws(ready.drawer.draw(seeds[0], start, number, room))
    if group is None:
        return ready.drawer.draw(seeds[0], start, number, room)
    each = {seed: ready.drawer.draw(seed, start, number, room) for seed in set(seeds)}
    stacked: Draws = jax.tree.map(lambda *arrays: np.stack(arrays), *(each[seed] for seed in seeds))
    return stacked


def _loop_arguments(
    shards: Shards | None, number: int, every: int, done: int
) -> tuple[Any, Any, Any]:
    """Return the last arguments of a program.

    Rounds to run, rounds between evaluations, rounds done.
    """
    lengths = np.int32(number), np.int32(every), np.int32(done)
    return lengths if shards is None else shards.put(lengths, None)


def _signature(arguments: Any) -> tuple[Any, Any]:
    """Return shapes, dtypes and shardings of the arguments, hashable.

    With the spec, the key of a program.
    """
    leaves, structure = jax.tree.flatten(arguments)
    places = (getattr(a, "sharding", None) for a in leaves)
    spread = [place if isinstance(place, NamedSharding) else None for place in places]
    shapes = (
        jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=s)
        for a, s in zip(leaves, spread, strict=True)
    )
    return tuple(shapes), structure


@lru_cache(maxsize=64)
def _compile(spec: Any, group: int | None, leaves: Any, structure: Any) -> Any:
    """Compile the program for one spec and one signature; the state's buffers are donated."""
    arguments = jax.tree.unflatten(structure, leaves)

    def swept(federation: Any, settings: Any, state: Any, draws: Any, *lengths: Any) -> Any:
        def one(run: Any) -> Any:
            return all_rounds(spec, federation, *run, *lengths)

        return jax.lax.map(one, (settings, state, draws), batch_size=None if group == 1 else group)

    function = partial(all_rounds, spec) if group is None else swept
    function = function if spec.mesh is None else on_all_devices(spec, function, arguments)
    with enable_float64():
        return jax.jit(function, donate_argnums=2).lower(*arguments).compile()

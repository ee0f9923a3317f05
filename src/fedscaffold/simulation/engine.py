"""The engine: compile once, then feed the program a few rounds' draws at a time.

Between two stretches of rounds the host draws the next cohorts and batches, keeps the metrics, shows progress and sees
whether the run is over. How rounds are grouped into stretches changes no bit of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from fedscaffold.simulation.away import Away
from fedscaffold.simulation.checkpoint import Checkpoint, Progress
from fedscaffold.simulation.double import doubles
from fedscaffold.simulation.follow import Follower
from fedscaffold.simulation.health import Watch
from fedscaffold.simulation.hosts import least
from fedscaffold.simulation.mesh import Shards, on_all_devices
from fedscaffold.simulation.rounds import rounds as all_rounds
from fedscaffold.simulation.setup import Ready
from fedscaffold.simulation.spec import Draws, Settings, State

__all__ = ["Engine", "Outcome", "Seconds", "drive", "start"]

DRAW_BYTES = 1 << 25  # memory for the draws of one stretch of rounds
MOST_ROUNDS = 64  # rounds in a stretch: more gain nothing
STRETCH_SECONDS = 0.5  # how often the host looks up


class Seconds(NamedTuple):
    """Where the time went."""

    compile: float
    """Tracing and compiling, or finding the program in the cache."""
    wall: float
    """All rounds."""
    cpu: float
    """All rounds, over all threads."""


class Outcome(NamedTuple):
    """The state after the last round, metrics by round, and the time it took; runs of a sweep on the leading axis."""

    state: State
    table: NDArray[Any]
    seconds: Seconds


class Engine(NamedTuple):
    """A compiled program and what it is fed: `advance` runs the next rounds."""

    program: Any
    federation: Any
    settings: Settings
    draw: Callable[[int, int], Draws]
    """(start, number) -> the draws of these rounds."""
    room: int
    """Most rounds in one call."""
    every: int
    rounds: int
    away: Away | None = None
    shards: Shards | None = None

    def advance(self, state: State, done: int, number: int) -> tuple[State, NDArray[Any]]:
        """Run rounds done + 1 .. done + number; returns the new state (the old one is used up) and their metrics."""
        if self.away is not None:
            return self.away.advance(self.program, self.settings, state, done, self.rounds, self.every)
        draws = self.draw(done, number)
        length = _lengths(self.shards, number, self.every)
        state, rows = self.program(self.federation, self.settings, state, draws, *length)
        return state, np.asarray(rows)[..., :number, :]


def start(
    ready: Ready,
    settings: Settings,
    seeds: list[int],
    every: int,
    group: int | None,
    rounds: int = 0,
    away: Away | None = None,
) -> tuple[Engine, State]:
    """Compile the program, or find it compiled, and lay out the first state.

    `group` is None for a single run, else how many runs of a sweep are run at once. Of clients who are `away` one
    round is run at a time.
    """
    room = int(np.clip(DRAW_BYTES // _draw_bytes(ready), 1, MOST_ROUNDS)) if away is None else 1
    draw = partial(_draws, ready, seeds, room, group)
    shards = ready.shards
    if shards is None:
        with doubles():
            state = jax.device_put(_spread(ready.start, seeds, group), may_alias=False)  # its memory is the program's
            federation = jax.device_put(ready.federation)
    else:
        state, federation = shards.state(ready.start), shards.federation(ready.federation)
        settings = shards.put(settings, None)
    arguments = (federation, settings, state, draw(0, 0), *_lengths(shards, 0, every))
    program = _compiled(ready.spec, group, *_signature(arguments))
    jax.block_until_ready((state, federation))
    return Engine(program, federation, settings, draw, room, every, rounds, away, shards), state


def drive(
    ready: Ready,
    settings: Settings,
    seeds: list[int],
    rounds: int,
    every: int,
    group: int | None,
    tell: Callable[[int], None],
    checkpoint: Checkpoint | None = None,
    away: Away | None = None,
    follow: Follower | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Run all rounds, or those that a checkpoint still lacks, in stretches of about half a second."""
    began = time.perf_counter()
    now = Progress(ready.start, [], 0) if checkpoint is None else checkpoint.begin(ready.start)
    if now.done >= rounds or np.all(now.state.done):  # the checkpoint is of the end
        return Outcome(now.state, np.concatenate(now.table), Seconds(time.perf_counter() - began, 0.0, 0.0))
    engine, state = start(ready._replace(start=now.state), settings, seeds, every, group, rounds, away)
    now = now._replace(state=state)
    compiled, cpu = time.perf_counter(), time.process_time()
    if follow is not None:
        engine = engine._replace(draw=follow.timed(engine.draw))
        follow.begin(now, compiled - began)
    number = 1
    while now.done < rounds and not np.all(now.state.done):
        number = min(
            number, rounds - now.done, engine.room, rounds if checkpoint is None else checkpoint.until(now.done)
        )
        at = time.perf_counter()
        state, rows = engine.advance(now.state, now.done, number)
        now.table.append(rows)
        now = Progress(state, now.table, now.done + number)
        tell(now.done)
        took = time.perf_counter() - at
        number = max(1, int(number * STRETCH_SECONDS / max(took, 1e-6)))
        number = number if ready.shards is None else least(number)
        if follow is not None:
            follow.after(now, took)
        if checkpoint is not None:
            checkpoint.after(now)
        elif watch is not None and watch.due():
            watch(now.state)
    jax.block_until_ready(now.state)
    seconds = Seconds(compiled - began, time.perf_counter() - compiled, time.process_time() - cpu)
    state = jax.tree.map(np.asarray, now.state) if ready.shards is None else ready.shards.collected(now.state)
    return Outcome(state, np.concatenate(now.table, axis=-2), seconds)


def _draw_bytes(ready: Ready) -> int:
    drawer = ready.drawer
    rows = (
        0 if drawer.batch is None else int(drawer.steps.max()) * int(drawer.batch.max()) * (8 if drawer.ragged else 4)
    )
    return drawer.slots * (4 + rows)


def _draws(ready: Ready, seeds: list[int], room: int, group: int | None, start: int, number: int) -> Draws:
    if ready.shards is not None:
        return ready.shards.draws(ready.drawer.draw(seeds[0], start, number, room))
    if group is None:
        return ready.drawer.draw(seeds[0], start, number, room)
    each = {seed: ready.drawer.draw(seed, start, number, room) for seed in set(seeds)}
    stacked: Draws = jax.tree.map(lambda *arrays: np.stack(arrays), *(each[seed] for seed in seeds))
    return stacked


def _spread(start: State, seeds: list[int], group: int | None) -> State:
    """One copy of the starting state for each run of a sweep."""
    if group is None:
        return start
    spread: State = jax.tree.map(lambda a: np.broadcast_to(a, (len(seeds), *np.shape(a))), start)
    return spread


def _lengths(shards: Shards | None, number: int, every: int) -> tuple[Any, Any]:
    """The last two arguments of a program: rounds to run, and rounds between two measurements."""
    lengths = np.int32(number), np.int32(every)
    return lengths if shards is None else shards.put(lengths, None)


def _signature(arguments: Any) -> tuple[Any, Any]:
    """Shapes, types and places of the arguments, hashable: what the program is compiled for besides its spec."""
    leaves, structure = jax.tree.flatten(arguments)
    places = (getattr(a, "sharding", None) for a in leaves)
    spread = [place if isinstance(place, NamedSharding) else None for place in places]
    shapes = (jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=s) for a, s in zip(leaves, spread, strict=True))
    return tuple(shapes), structure


@lru_cache(maxsize=64)
def _compiled(spec: Any, group: int | None, leaves: Any, structure: Any) -> Any:
    """Compile the program for one spec and one set of shapes; the state is updated in place."""
    arguments = jax.tree.unflatten(structure, leaves)

    def swept(federation: Any, settings: Any, state: Any, draws: Any, number: Any, every: Any) -> Any:
        def one(run: Any) -> Any:
            return all_rounds(spec, federation, run[0], run[1], run[2], number, every)

        return jax.lax.map(one, (settings, state, draws), batch_size=None if group == 1 else group)

    function = partial(all_rounds, spec) if group is None else swept
    function = function if spec.mesh is None else on_all_devices(spec, function, arguments)
    with doubles():
        return jax.jit(function, donate_argnums=2).lower(*arguments).compile()

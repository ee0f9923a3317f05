"""Rounds whose blocks of clients run on several cores: one program per block, called by threads.

The compiled loop of `rounds` runs one block after another, on one core. Where a client's local
steps take long, the parts of a round (its begin, a block, its end) are compiled apart instead, and
the host calls the program of a block from several threads. The sums of the blocks are added in the
order of the blocks and every block is the same program, so results do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import SingleDeviceSharding

from fedscaffold.problems.compilation import QUICK
from fedscaffold.simulation.evaluation import ON_RECORDS, SHARES, evaluate, sum_records
from fedscaffold.simulation.rounds import (
    Sums,
    begin_round,
    end_round,
    read_clients,
    run_block,
    sum_gradients,
    trace_in_precision,
    write_rows,
)
from fedscaffold.simulation.spec import (
    Array,
    ClientState,
    Draws,
    Federation,
    Spec,
    State,
    Work,
)
from fedscaffold.simulation.threads import lane, threads

__all__ = ["RoundsByBlocks", "compile_blocks", "compile_sweep"]


class Lanes:
    """Threads that run the blocks of a cohort, each with a device of its own.

    Args:
        pool: The threads.
        number: Number of lanes.
        federation: The clients' data, which all lanes share.
    """

    def __init__(self, pool: ThreadPoolExecutor, number: int, federation: Federation) -> None:
        self._pool = pool
        self._devices = [lane(i) for i in range(number)]
        self._federations = [jax.device_put(federation, device) for device in self._devices]
        self._home = jax.devices()[0]

    def map(self, programs: Sequence[Any], parts: int, *given: Any) -> Iterator[Any]:
        """Yield the result of each of `parts`, in their order; `programs` has one for each lane."""
        with jax.enable_x64(True):
            placed = [jax.device_put(given, device) for device in self._devices]
        free: SimpleQueue[int] = SimpleQueue()
        for i in range(len(placed)):
            free.put(i)

        def run(part: int) -> Any:
            i = free.get()
            try:
                result = programs[i](self._federations[i], *placed[i], np.int32(part))
                return jax.block_until_ready(result)
            finally:
                free.put(i)

        for result in self._pool.map(run, range(parts)):
            yield jax.device_put(result, self._home)
        placed.clear()  # these arrays share memory with the state, which is to be donated


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    """Return threads for so many lanes, the same for all runs.

    The allocator of the C library keeps what a thread has freed for that thread: with threads of
    their own, each stretch of rounds would take its memory anew.
    """
    return ThreadPoolExecutor(number)


class RoundsByBlocks(NamedTuple):
    """The compiled parts of a round. Called like the compiled loop, it runs rounds."""

    spec: Spec
    blocks: int
    """Blocks of a cohort."""
    begin: Any
    slope: Any
    """For each lane, sum of the gradients at x of a block, for algorithms that begin with it."""
    prepare: Any
    block: Any
    """For each lane, the local steps of a block."""
    add: Any
    add_slopes: Any
    end: Any
    shares: Any
    """For each lane, sums over a share of the records, if metrics need them."""
    add_shares: Any
    nothing: Any
    """Sums of a round that is not measured."""
    measure: Any

    def __call__(
        self,
        federation: Federation,
        state: State,
        draws: Draws,
        number: Any,
        every: Any,
        start: Any,
    ) -> tuple[State, Any]:
        """Run the first `number` rounds of `draws`, as `rounds` does."""
        table = np.full((len(draws.cohort), len(self.spec.metrics)), np.nan, state.x.dtype)
        with jax.enable_x64(True):
            lanes = Lanes(_pool(len(self.block)), len(self.block), federation)
            federation = jax.device_put(federation)
            for r in range(int(number)):
                if bool(state.done):  # also before the first: a run of a sweep that ended earlier
                    break
                draw = jax.device_put(jax.tree.map(lambda a, r=r: a[r], draws))
                due = (int(start) + r + 1) % int(every) == 0
                state, row = self._round(lanes, federation, state, draw, np.bool_(due))
                table[r] = row
        return state, table

    def _round(
        self, lanes: Lanes, federation: Federation, state: State, draw: Draws, due: np.bool_
    ) -> tuple[State, Any]:
        state, work = self.begin(federation, state, draw)
        draw = draw._replace(rows=None, row_weights=None)  # they are part of the work
        server = None
        if self.slope is not None:
            slopes = lanes.map(self.slope, self.blocks, state, work)
            server = self.prepare(state, reduce(self.add_slopes, slopes), work)
        replies = lanes.map(self.block, self.blocks, state, server, draw, np.bool_(False), work)
        sums, rows = self._fold(replies)
        state, drift = self.end(federation, state, server, draw, sums, rows)
        totals = self.nothing
        if due and self.shares is not None:
            totals = reduce(self.add_shares, lanes.map(self.shares, SHARES, state))
        outcome: tuple[State, Any] = self.measure(federation, state, drift, due, totals)
        return outcome

    def _fold(self, replies: Iterable[tuple[Sums, ClientState]]) -> tuple[Sums, list[ClientState]]:
        """Add the sums in the order of the blocks, and list the rows."""
        total, each = None, []
        for sums, rows in replies:
            total = sums if total is None else self.add(total, sums)
            each.append(rows)
        assert total is not None
        return total, each


def compile_blocks(
    spec: Spec, federation: Federation, state: State, draws: Draws, *lengths: Any
) -> RoundsByBlocks:
    """Compile the parts of a round, for arguments with these shapes and dtypes."""
    draw = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), draws)
    number, never = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.bool_)

    def compiled(function: Callable[..., Any], *given: Any, donate: Any = ()) -> tuple[Any, Any]:
        """Return a part of the round and the shapes of its results."""
        lowered = _jit(spec, function, state.x.dtype, donate)(*given)
        return lowered.compile(QUICK), lowered.out_info

    def on_lanes(function: Callable[..., Any], *given: Any) -> tuple[list[Any], Any]:
        """Return a part of the round on each lane, compiled once, and its shapes."""
        lower = _jit(spec, function, state.x.dtype)
        first, *others = [lane(i) for i in range(min(threads(), blocks))]
        lowered = lower(*_on(first, given))
        programs = [lowered.compile(QUICK)]
        if others and _caches_programs():  # what comes out of the cache cannot be serialised again
            again = [lower(*_on(device, given)) for device in others]
            programs += [one.compile(QUICK) for one in again]
        elif others:
            programs += _load(programs[0], others)
        return programs, _on(None, lowered.out_info)

    begin, (state, work) = compiled(begin_round, federation, state, draw, donate=1)
    blocks = len(jax.tree.leaves(work)[0]) // spec.block
    draw = draw._replace(rows=None, row_weights=None)
    slope = add_slopes = prepare = server = None
    if spec.algorithm.prepare is not None:
        slope, total = on_lanes(_slope, federation, state, work, number)
        add_slopes, _ = compiled(_add, total, total, donate=0)
        prepare, server = compiled(_prepare, state, total, work)
    block, (sums, rows) = on_lanes(_block, federation, state, server, draw, never, work, number)
    add, _ = compiled(_add, sums, sums, donate=0)
    replies = sums, [rows] * blocks
    end, (state, drift) = compiled(_end, federation, state, server, draw, *replies, donate=1)
    shares = add_shares = totals = None
    if set(spec.metrics) & ON_RECORDS:
        shares, totals = on_lanes(sum_records, federation, state, number)
        add_shares, _ = compiled(_add, totals, totals, donate=0)
    measure, _ = compiled(evaluate, federation, state, drift, never, totals, donate=1)
    nothing = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), totals)
    return RoundsByBlocks(
        spec=spec,
        blocks=blocks,
        begin=begin,
        slope=slope,
        prepare=prepare,
        block=block,
        add=add,
        add_slopes=add_slopes,
        end=end,
        shares=shares,
        add_shares=add_shares,
        nothing=nothing,
        measure=measure,
    )


def _jit(
    spec: Spec, function: Callable[..., Any], dtype: Any, donate: Any = ()
) -> Callable[..., jax.stages.Lowered]:
    """Return a function that lowers a part of the round for arguments with these shapes."""

    def traced(*given: Any) -> Any:
        return trace_in_precision(dtype, partial(function, spec), given)

    jitted = jax.jit(traced, donate_argnums=donate)

    def lower(*given: Any) -> jax.stages.Lowered:
        with jax.enable_x64(True):
            return jitted.lower(*given)

    return lower


def _caches_programs() -> bool:
    """Return whether JAX keeps compiled programs in a folder."""
    config: Any = jax.config  # which does not declare its options
    return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


def _load(program: Any, devices: Sequence[Any]) -> list[Any]:
    """Return a compiled program on other devices, by its machine code: none compiles it again."""
    code, given, results = serialize(program)
    return [
        deserialize_and_load(
            code, given, results, backend=device.client, execution_devices=[device]
        )
        for device in devices
    ]


def _on(device: Any, tree: Any) -> Any:
    """Return the shapes of arrays on a device, or of arrays on any if it is None."""
    place = None if device is None else SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)


def compile_sweep(
    spec: Spec, federation: Federation, state: State, draws: Draws, *lengths: Any
) -> Callable[..., tuple[State, Any]]:
    """Compile the parts of a round, for the runs of a sweep one after another."""

    def of_run(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), tree)

    program = compile_blocks(spec, federation, of_run(state), of_run(draws), *lengths)

    def run(federation: Federation, state: State, draws: Draws, *lengths: Any) -> Any:
        with jax.enable_x64(True):
            ended = [
                program(federation, *jax.tree.map(lambda a, i=i: a[i], (state, draws)), *lengths)
                for i in range(len(draws.cohort))
            ]
            return jax.tree.map(lambda *runs: jnp.stack(runs), *ended)

    return run


def _cut(spec: Spec, work: Work, block: Array) -> Work:
    """Return the work of a block."""
    part: Work = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, block * spec.block, spec.block), work
    )
    return part


def _slope(spec: Spec, federation: Federation, state: State, work: Work, block: Array) -> Array:
    return sum_gradients(spec, federation, state, _cut(spec, work, block))


def _prepare(spec: Spec, state: State, total: Array, work: Work) -> Any:
    assert spec.algorithm.prepare is not None
    heard = work.p.sum()
    return spec.algorithm.prepare(state.server, total / jnp.where(heard > 0, heard, 1))


def _told(state: State, server: Any) -> State:
    return state if server is None else state._replace(server=server)


def _block(
    spec: Spec,
    federation: Federation,
    state: State,
    server: Any,
    draw: Draws,
    never: Array,
    work: Work,
    block: Array,
) -> tuple[Sums, ClientState]:
    state, own = _told(state, server), _cut(spec, work, block)
    # the rows of a block are no whole table, even if everyone takes part
    _, old = read_clients(spec._replace(everyone=False), state, state.clients, own.client)
    return run_block(spec, federation, state, draw, never, None, (own, old))


def _add(spec: Spec, total: Any, new: Any) -> Any:
    with jax.enable_x64(True):
        return jax.tree.map(jnp.add, total, new)


def _end(
    spec: Spec,
    federation: Federation,
    state: State,
    server: Any,
    draw: Draws,
    sums: Sums,
    rows: list[ClientState],
) -> tuple[State, Array]:
    clients = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    if not spec.everyone:
        write = partial(write_rows, spec, draw.cohort)
        clients = jax.tree.map(write, state.clients, clients)
    return end_round(spec, federation, state, _told(state, server), draw, clients, sums)

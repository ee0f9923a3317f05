"""The compiled program: rounds, blocks of clients, server step.

A round runs its cohort block by block (the clients of a block under vmap), sums their messages and
applies the server step. With several devices, each runs its own clients; the sums are reduced over
devices and every device takes the same server step. Rounds run in one while loop whose length is an
argument, so one program serves any number of rounds; the loop ends early at a target or at the
first non-finite value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedscaffold.algorithms.round import absorb, shift_of
from fedscaffold.simulation.double_precision import (
    enable_float64,
    in_float64,
    prevent_recomputation,
    to_float64,
)
from fedscaffold.simulation.evaluation import evaluate
from fedscaffold.simulation.local import ClientState, Reply, Work, gradient_at_x, train
from fedscaffold.simulation.sharding import sum_over_devices
from fedscaffold.simulation.spec import Array, Draws, Federation, Settings, Spec, State
from fedscaffold.simulation.staleness import (
    apply_policy,
    decay_memory,
    needs_refresh,
    store_rows,
    update_heard_at,
)

__all__ = ["Sums", "loop_length", "rounds", "select_cohort", "with_round_lr"]


class Sums(NamedTuple):
    """Sums over a cohort that the server step needs, weighted by p_i."""

    heard: Array
    message: Any
    """Messages; a field that the server rebuilds from the mean direction is None."""
    change: tuple[Array, ...]
    """Changes of the stored memories, for each pair of the algorithm's `means`."""
    size: Array
    """Squared norms of the memories."""
    move: Array
    """x - y, if drift is measured."""
    spread: Array
    """|x - y|^2."""
    renewed: Any = None
    """Changes of the memories by the `refresh` policy, before the local steps."""
    rounded: Any = None
    """Rounding errors of storing the memories in the run's precision."""
    buffers: Any = None
    """States that the loss updates."""


def rounds(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draws: Draws,
    number: Array,
    every: Array,
    start: Array = 0,
) -> tuple[State, Array]:
    """Run the first `number` rounds of `draws` and return the new state and one row of metrics per round.

    `start` is the number of rounds before them. It is shared by all runs of a sweep, so that the
    condition to evaluate is not vectorised and rounds that are not due skip the evaluation.
    """
    given = (federation, settings, state, draws, number, every, start)
    with jax.enable_x64(state.x.dtype == jnp.float64):
        traced, shape = jax.make_jaxpr(partial(_rounds, spec), return_shape=True)(*given)
    # Trace here in the run's precision, but map over runs with x64 on: without it vmap would demote
    # float64 to float32.
    results = jaxpr_as_fun(traced)(*jax.tree.leaves(given))
    outcome: tuple[State, Array] = jax.tree.unflatten(jax.tree.structure(shape), results)
    return outcome


def _rounds(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draws: Draws,
    number: Array,
    every: Array,
    start: Array,
) -> tuple[State, Array]:
    def more(carry: tuple[Array, State, Array]) -> Array:
        r, state, _ = carry
        return r < number if _runs_to_the_end(spec) else (r < number) & ~state.done

    def one(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        r, state, table = carry
        draw, due = jax.tree.map(lambda a: a[r], draws), (start + r + 1) % every == 0
        state, row = _round(spec, federation, settings, state, draw, due, number < 0)
        return r + 1, state, table.at[r].set(row)

    table = jnp.full((draws.cohort.shape[0], len(spec.metrics)), jnp.nan, state.x.dtype)
    _, state, table = jax.lax.while_loop(more, one, (jnp.int32(0), state, table))
    return state, table


def _round(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draw: Draws,
    due: Array,
    never: Array,
) -> tuple[State, Array]:
    settings = with_round_lr(settings, draw)
    before = state = apply_policy(spec, federation, state, len(draw.cohort))
    cohort = select_cohort(spec, federation, settings, state, draw)
    if spec.algorithm.prepare is not None:
        mean = _mean_gradient(spec, federation, state, draw, cohort)
        state = state._replace(server=spec.algorithm.prepare(state.server, mean))
    held, sums = _run_cohort(spec, federation, settings, state, draw, cohort, never)
    step = partial(_server_step, spec)
    old = ServerState(state.server, state.mean, state.scale)
    new, drift = (in_float64(step) if spec.keeps else step)(settings.lr, old, state.told, sums)
    with enable_float64():
        server, kept_up, scale = jax.tree.map(
            lambda after, kept: after.astype(kept.dtype), new, old
        )
    x, optimizer = _apply_server_optimizer(spec, state, server.x)
    server = server._replace(x=x)
    if spec.silences:
        was, now = (before.server, before.optimizer), (server, optimizer)
        with enable_float64():
            server, optimizer = jax.tree.map(lambda a, b: jnp.where(sums.heard > 0, b, a), was, now)
    last = state
    state = State(
        server,
        held.memory,
        kept_up,
        scale,
        state.round + ~state.done,
        state.done,
        optimizer,
        update_heard_at(spec, state, draw.cohort),
        held.errors,
        held.own,
        _average_buffers(state.buffers, sums),
        held.buffers,
    )
    if _runs_to_the_end(spec):
        state = _unless_done(last, state)
    row, done = evaluate(spec, federation, settings, state, drift.astype(x.dtype), due)
    return state._replace(done=state.done | done), row


def _runs_to_the_end(spec: Spec) -> bool:
    """Return whether vectorised runs go on together after one has diverged, so that the loop needs no select."""
    return spec.side_by_side and spec.stop is None


def _unless_done(last: State, new: State) -> State:
    """Return the new state, or the last one of a run that has ended.

    Tables of clients are kept by `_run_cohort`.
    """
    last, kept = (
        one._replace(memory=None, errors=None, own=None, own_buffers=None) for one in (last, new)
    )
    with enable_float64():
        frozen: State = jax.tree.map(lambda a, b: jnp.where(last.done, a, b), last, kept)
    return frozen._replace(
        memory=new.memory, errors=new.errors, own=new.own, own_buffers=new.own_buffers
    )


def with_round_lr(settings: Settings, draw: Draws) -> Settings:
    """Return the settings with the step sizes of this round, if they vary over rounds."""
    return settings if draw.lr is None else settings._replace(lr=draw.lr)


class ServerState(NamedTuple):
    """The fields of a state that the server step updates."""

    server: Any
    mean: tuple[Array, ...]
    scale: Array


def _server_step(
    spec: Spec, lr: Array, old: ServerState, told: Any, sums: Sums
) -> tuple[ServerState, Array]:
    """Apply the server step; return its new fields and the drift of the cohort."""
    safe = jnp.where(sums.heard > 0, sums.heard, 1)
    mean = jax.tree.map(lambda total: total / safe, sums.message)
    if spec.rebuilt is not None and getattr(mean, spec.rebuilt) is None:
        mean = mean._replace(
            **{spec.rebuilt: (spec.travel_steps * lr) * getattr(mean, str(spec.exchange.d))}
        )
    server = spec.algorithm.update(old.server, told, mean, sums.heard)
    for changes in (sums.renewed, sums.rounded):
        server = server if changes is None else absorb(spec.algorithm, server, changes)
    drift = jnp.zeros((), sums.heard.dtype)
    if sums.move is not None:
        move = sums.move / safe
        drift = jnp.sqrt(jnp.maximum(sums.spread / safe - move @ move, 0))
    kept_up = tuple(mean + change for mean, change in zip(old.mean, sums.change, strict=True))
    return ServerState(server, kept_up, jnp.maximum(old.scale, jnp.sqrt(sums.size / safe))), drift


def _average_buffers(old: Any, sums: Sums) -> Any:
    """Return the weighted mean of the buffers of the clients heard.

    Means of whole numbers are rounded.
    """

    def mean(before: Array, total: Array) -> Array:
        new = total / jnp.where(sums.heard > 0, sums.heard, 1)
        new = new if jnp.issubdtype(before.dtype, jnp.floating) else jnp.round(new)
        return jnp.where(sums.heard > 0, new.astype(before.dtype), before)

    with enable_float64():
        return jax.tree.map(mean, old, sums.buffers)


def _apply_server_optimizer(spec: Spec, state: State, x: Array) -> tuple[Array, Any]:
    """Apply the server optimizer to x, with the negative of the algorithm's step as gradient."""
    if spec.server_optimizer is None:
        return x, None
    updates, memory = spec.server_optimizer.update(state.x - x, state.optimizer, state.x)
    return state.x + updates, memory


class Cohort(NamedTuple):
    """The clients of a round, padded with clients of weight 0."""

    work: Work
    p: Array
    """Weights; float64 for algorithms with client memory, and so are all sums over clients."""


def select_cohort(
    spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws
) -> Cohort:
    """Return the cohort of a round and its work."""
    everyone = jnp.arange(len(federation.first))
    client = everyone if spec.everyone else jnp.minimum(draw.cohort, len(federation.first) - 1)
    weights = federation.weights if federation.shares is None else federation.shares
    with enable_float64():
        p = jnp.where(spec.everyone | (draw.cohort < len(federation.first)), weights[client], 0)
    key = jax.random.fold_in(settings.key, state.round)
    random = federation.noise is not None or spec.compressor is not None or spec.functions.random
    who = (
        client
        if federation.who is None
        else federation.who
        if spec.everyone
        else federation.who[client]
    )
    keys = jax.vmap(partial(jax.random.fold_in, key))(who) if random else None
    steps = federation.steps[client]
    work = Work(
        client, steps, keys, draw.rows, draw.row_weights, needs_refresh(spec, state, client)
    )
    return Cohort(work, p)


def _split_into_blocks(spec: Spec, cohort: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape(-1, spec.block, *a.shape[1:]), cohort)


def _mean_gradient(
    spec: Spec, federation: Federation, state: State, draw: Draws, cohort: Cohort
) -> Array:
    """Return the weighted mean of the cohort's gradients at x, for algorithms that exchange it first."""

    def one(work: Work) -> Array:
        buffers = state.buffers
        if spec.local_buffers:
            buffers = jax.tree.map(lambda a: a[work.client], state.own_buffers)
        return gradient_at_x(spec, federation, state.x, work, buffers)

    def block(total: Array, part: Cohort) -> Array:
        return total + _weighted_sum(part.p, _map_clients(spec, one, part.work))

    total, heard = sum_over_devices(
        spec,
        (
            _fold_blocks(spec, federation, draw, block, jnp.zeros_like(state.x), cohort),
            cohort.p.sum(),
        ),
    )
    return total / jnp.where(heard > 0, heard, 1)


def _fold_blocks(
    spec: Spec, federation: Federation, draw: Draws, block: Any, begin: Any, cohort: Any
) -> Any:
    """Fold `block` over the blocks of a cohort.

    With several devices, over those that hold members of it.
    """
    parts = _split_into_blocks(spec, cohort)
    if spec.mesh is None:
        return jax.lax.scan(lambda value, part: (block(value, part), None), begin, parts)[0]
    members = jnp.sum(draw.cohort < len(federation.first))

    def one(b: Array, value: Any) -> Any:
        return block(value, jax.tree.map(lambda a: a[b], parts))

    return jax.lax.fori_loop(0, -(-members // spec.block), one, begin)


def _run_cohort(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draw: Draws,
    cohort: Cohort,
    never: Array,
) -> tuple[ClientState, Sums]:
    """Run the cohort block by block and return the updated client tables and the weighted sums.

    The cohort's rows are gathered once and written once, so XLA updates the tables in place and a
    round costs O(S), not O(N). With several devices rows are gathered and written per block,
    because a device has room for more members than usually come.
    """
    tables = ClientState(state.memory, state.own, state.errors, state.own_buffers)
    run = partial(_run_block, spec, federation, settings, state, draw, never)
    if spec.mesh is not None:

        def turn(
            carry: tuple[ClientState, Sums], part: tuple[Cohort, Array]
        ) -> tuple[ClientState, Sums]:
            own, slots = part
            sums, rows = run(
                carry[1], (own, _read_client_state(spec, state, carry[0], own.work.client))
            )
            return jax.tree.map(partial(store_rows, spec, slots), carry[0], rows), sums

        begin = (tables, _zero_sums(spec, state))
        tables, sums = _fold_blocks(spec, federation, draw, turn, begin, (cohort, draw.cohort))
        return tables, sum_over_devices(spec, sums)
    old = _read_client_state(spec, state, tables, cohort.work.client)
    sums, new = jax.lax.scan(run, _zero_sums(spec, state), _split_into_blocks(spec, (cohort, old)))
    rows = jax.tree.map(lambda a: a.reshape(len(cohort.p), *a.shape[2:]), new)
    if _runs_to_the_end(spec):
        stored = jax.tree.map(partial(_rows, spec, cohort.work.client), tables)
        rows = jax.tree.map(lambda a, b: jnp.where(state.done, a, b), stored, rows)
    return jax.tree.map(partial(store_rows, spec, draw.cohort), tables, rows), sums


def _read_client_state(spec: Spec, state: State, tables: ClientState, client: Array) -> ClientState:
    """Return the rows of some clients at the start of the round."""
    old: ClientState = jax.tree.map(partial(_rows, spec, client), tables)
    return old._replace(memory=decay_memory(spec, state, old.memory, client, ahead=1))


def _run_block(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draw: Draws,
    never: Array,
    sums: Sums,
    part: tuple[Cohort, ClientState],
) -> tuple[Sums, ClientState]:
    """Run a block of clients; return the updated sums and the clients' new state.

    `never` is always false at run time, but unknown to the compiler (see `prevent_recomputation`).
    """
    (work, p), old = part
    most = loop_length(spec, draw, work)

    def client(own: tuple[ClientState, Work]) -> Reply:
        buffers = own[0].buffers if spec.local_buffers else state.buffers
        return train(spec, federation, settings, state.told, *own, most, buffers)

    replies = prevent_recomputation(never, _map_clients(spec, client, (old, work)))
    with enable_float64():
        if spec.rebuilt is not None and spec.unequal:
            move = (work.steps * settings.lr)[:, None] * getattr(
                replies.message, str(spec.exchange.d)
            )
            replies = replies._replace(message=replies.message._replace(**{spec.rebuilt: move}))
        held, renewed, rounded = _update_memory(spec, state, replies, old)
        new = _sum_block(spec, p, replies, old, held)._replace(
            renewed=_weighted_sums(p, renewed),
            rounded=_weighted_sums(p, rounded),
            buffers=None if spec.local_buffers else _weighted_sums(p, replies.buffers),
        )
        return jax.tree.map(jnp.add, sums, new), held


def _update_memory(
    spec: Spec, state: State, replies: Reply, old: ClientState
) -> tuple[ClientState, Any, Any]:
    """Return the clients' new state, and the changes of their memories by renewal and by rounding.

    The new memory is computed in float64 and then rounded to the run's precision, so that the
    rounding error can be added to the server's mean.
    """
    kept = ClientState(
        None, replies.own, replies.errors, replies.buffers if spec.local_buffers else None
    )
    if spec.algorithm.remember is None:
        return kept, None, None
    dtype = state.x.dtype
    before, told, message = (
        jax.tree.map(to_float64, a) for a in (old.memory, state.told, replies.message)
    )
    begun = before if replies.memory is None else jax.tree.map(to_float64, replies.memory)
    exact = jax.vmap(lambda memory, message: _new_memory(spec, told, memory, message))(
        begun, message
    )
    new = jax.tree.map(lambda a: a.astype(dtype), exact)
    renewed = None if replies.memory is None else jax.tree.map(jnp.subtract, begun, before)
    rounded = None
    if dtype != jnp.float64:
        rounded = jax.tree.map(lambda stored, a: to_float64(stored) - a, new, exact)
    return kept._replace(memory=new), renewed, rounded


def _new_memory(spec: Spec, told: Any, memory: Any, message: Any) -> Any:
    """Return a client's new memory, with its shift recomputed in float64."""
    assert spec.algorithm.remember is not None
    return spec.algorithm.remember(memory, shift_of(spec.algorithm, told, memory), message)


def _sum_block(spec: Spec, p: Array, replies: Reply, old: ClientState, held: ClientState) -> Sums:
    """Return the sums over a block, in the precision of p."""
    fields = [of for _, of in spec.algorithm.means]
    new, was = ([getattr(a.memory, of).astype(p.dtype) for of in fields] for a in (held, old))
    return Sums(
        p.sum(),
        _weighted_sums(p, replies.message),
        tuple(_weighted_sum(p, a - b) for a, b in zip(new, was, strict=True)),
        sum(
            (_weighted_square_sum(p, getattr(held.memory, of)) for of in fields),
            jnp.zeros((), p.dtype),
        ),
        _weighted_sum(p, replies.move),
        _weighted_square_sum(p, replies.move),
    )


def _map_clients(spec: Spec, client: Callable[[Any], Any], clients: Any) -> Any:
    """Map over the clients of a block: vmap, or a loop if batch sizes select branches."""
    return jax.lax.map(client, clients) if spec.one_by_one else jax.vmap(client)(clients)


def loop_length(spec: Spec, draw: Draws, work: Work) -> Array | int:
    """Return the number of iterations of a block's loop over local steps."""
    if draw.steps is not None:
        return draw.steps
    # under vmap, a bound that differs between runs would turn every iteration into a select
    return jnp.max(work.steps) if spec.unequal and not spec.side_by_side else spec.max_steps


def _rows(spec: Spec, client: Array, table: Array) -> Array:
    return table if spec.everyone else table.at[client].get(mode="promise_in_bounds")


def _zero_sums(spec: Spec, state: State) -> Sums:
    """Return sums of zero."""
    with enable_float64():
        kind = jnp.float64 if spec.keeps else state.x.dtype
        zero = jnp.zeros((), kind)
        empty = jnp.zeros(state.x.shape, kind)
        memory = jax.tree.map(lambda table: jnp.zeros(table.shape[1:], kind), state.memory)
        buffers = jax.tree.map(lambda a: jnp.zeros(a.shape, kind), state.buffers)
    known = spec.exchange
    fields = known.record._fields  # type: ignore[attr-defined]
    message: dict[str, Any] = {name: empty if name in known.vectors else zero for name in fields}
    if spec.rebuilt is not None and not spec.unequal:
        message[spec.rebuilt] = None
    return Sums(
        zero,
        known.record(**message),
        (empty,) * len(spec.algorithm.means),
        zero,
        empty if "drift" in spec.metrics else None,
        zero,
        memory if spec.policy.refresh_after is not None else None,
        memory if spec.keeps and state.x.dtype != jnp.float64 else None,
        buffers,
    )


def _weighted_sums(p: Array, record: Any) -> Any:
    """Return the weighted sum of each field of a record."""
    return jax.tree.map(lambda rows: _weighted_sum(p, rows), record)


def _weighted_sum(p: Array, rows: Array) -> Array:
    """Return sum p_i row_i; rows of weight 0 are ignored even if they are not finite."""
    if rows is None:
        return None
    some = (p > 0).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.tensordot(p, jnp.where(some, rows, 0).astype(p.dtype), 1)


def _weighted_square_sum(p: Array, rows: Array) -> Array:
    """Return sum p_i |row_i|^2; 0 if `rows` is None."""
    return (
        jnp.zeros((), p.dtype)
        if rows is None
        else _weighted_sum(p, jnp.sum(rows * rows, axis=1, keepdims=True))[0]
    )

"""The compiled program: rounds, blocks of clients, server step.

A round runs its cohort block by block (the clients of a block under vmap), sums their messages and
applies the server step. With several devices, each runs its own clients; the sums are reduced over
devices and every device takes the same server step. Rounds run in one while loop whose length is an
argument, so one program serves any number of rounds; the loop ends early at a target or at the
first non-finite value.

c, the mean of the c_i and the sums over clients are float64 in every run that has client memory. In
float32, c would drift from the mean of the c_i by rounding alone, until a lost c_i could not be
told from it. The c_i are stored in the run's precision, and their rounding errors are added to c.
JAX creates no float64 arrays unless x64 is enabled, but a program traced with x64 enabled may
contain them. Compensated float32 sums would be an alternative, but compilers may optimise the
compensation away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedscaffold.algorithms.round import absorb
from fedscaffold.privacy.messages import noise_sum
from fedscaffold.simulation.evaluation import evaluate
from fedscaffold.simulation.filtering import filter_cohort
from fedscaffold.simulation.local import compute_once, gradient_at_x, train
from fedscaffold.simulation.sharding import sum_over_devices
from fedscaffold.simulation.spec import (
    Array,
    ClientState,
    Draws,
    Federation,
    Spec,
    State,
    Work,
)
from fedscaffold.simulation.staleness import apply_policy, decay_memory, needs_refresh
from fedscaffold.simulation.table_rows import take_row, take_rows

__all__ = [
    "Sums",
    "begin_round",
    "end_round",
    "loop_length",
    "read_clients",
    "rounds",
    "run_block",
    "select_cohort",
    "sum_gradients",
    "trace_in_precision",
    "write_rows",
]


SERVER = 2**31  # stream of the run's key: noise at the server; clients' streams follow the round


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
    """|x - y|^2, if drift is measured."""
    renewed: Any = None
    """Changes of the memories by the `refresh` policy, before the local steps."""
    rounded: Any = None
    """Rounding errors of storing the memories in the run's precision."""
    buffers: Any = None
    """States that the loss updates."""
    late: Any = None
    """Differences of the server's records that the clients were sent from the present one, in
    asynchronous rounds."""


def rounds(
    spec: Spec,
    federation: Federation,
    state: State,
    draws: Draws,
    number: Array,
    every: Array,
    start: Array = 0,
) -> tuple[State, Array]:
    """Run the first `number` rounds of `draws`.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        state: The state to continue from.
        draws: Cohorts, batches and step sizes of the rounds.
        number: How many of these rounds to run.
        every: Rounds between two evaluations.
        start: Number of rounds done before. It is shared by all runs of a sweep, so that the
            condition to evaluate is not vectorised and rounds that are not due skip it.

    Returns:
        The new state, and one row of metrics per round.
    """

    def more(carry: tuple[Array, State, Array]) -> Array:
        r, state, _ = carry
        return r < number if spec.runs_on else (r < number) & ~state.done

    def one(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        r, state, table = carry
        draw, due = jax.tree.map(lambda a: take_row(a, r), draws), (start + r + 1) % every == 0
        state, row = _round(spec, federation, state, draw, due, number < 0)
        return (
            r + 1,
            state,
            jax.lax.dynamic_update_index_in_dim(
                table, row, r, axis=0, allow_negative_indices=False
            ),
        )

    table = jnp.full((draws.cohort.shape[0], len(spec.metrics)), jnp.nan, state.x.dtype)
    _, state, table = jax.lax.while_loop(more, one, (jnp.int32(0), state, table))
    return state, table


def trace_in_precision(dtype: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Call a function that is traced in the precision of a run, in a program with x64 enabled.

    The program is transformed with x64 on: without it vmap would demote float64 to float32. In
    double precision one trace does.
    """
    if dtype == jnp.float64:
        return function(*given)
    with jax.enable_x64(False):
        traced, shape = jax.make_jaxpr(function, return_shape=True)(*given)
    results = jaxpr_as_fun(traced)(*jax.tree.leaves(given))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _round(
    spec: Spec, federation: Federation, state: State, draw: Draws, due: Array, never: Array
) -> tuple[State, Array]:
    """Run one round: the clients' local steps, the server's step, the metrics."""
    before = state
    state, work = begin_round(spec, federation, before, draw)
    told = state
    if spec.algorithm.prepare is not None:
        mean = _mean_gradient(spec, federation, state, draw, work)
        told = state._replace(server=spec.algorithm.prepare(state.server, mean))
    clients, sums = _run_cohort(spec, federation, told, draw, work, never)
    new, drift = end_round(spec, federation, state, told, draw, clients, sums)
    if spec.runs_on:
        new = _unless_done(before, new)
    return evaluate(spec, federation, new, drift, due)


def begin_round(
    spec: Spec, federation: Federation, state: State, draw: Draws
) -> tuple[State, Work]:
    """Apply the staleness policy and return the state and the work of the cohort."""
    if spec.policy.name != "keep":
        state = apply_policy(spec, federation, state, len(draw.cohort))
    return state, select_cohort(spec, federation, state, draw)


def end_round(
    spec: Spec,
    federation: Federation,
    old: State,
    told: State,
    draw: Draws,
    clients: ClientState,
    sums: Sums,
) -> tuple[State, Array]:
    """Take the server's step; return the new state and the drift of the cohort.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        old: The state as `begin_round` returned it.
        told: The same, with the server's record as the clients were sent it.
        draw: Cohort and step size of the round.
        clients: The new client tables.
        sums: The sums over the cohort.
    """
    if spec.message_privacy is not None:
        sums = _noised(spec, federation, old, draw, sums)
    steps = spec.travel_steps(federation.steps[0])
    new, drift = _server_step(spec, old, told, steps, draw.lr, sums)
    new = new._replace(**clients._asdict(), round=told.round + 1)
    if new.sent is not None:
        new = new._replace(sent=_send(new, draw.slot))
    if spec.ages:
        heard_at = _heard_at(spec, told, draw.cohort)
        if clients.guard is not None:
            refused = clients.guard.refused > old.guard.refused
            heard_at = jnp.where(refused, old.heard_at, heard_at)
        new = new._replace(heard_at=heard_at)
    return new, drift.astype(new.x.dtype)


def _send(state: State, slot: Array) -> Any:
    """Return what the tasks at work were sent, after new ones have begun in these slots."""

    def put(table: Array, now: Array) -> Array:
        return table.at[slot].set(now, mode="drop", unique_indices=True)

    with jax.enable_x64(True):
        return jax.tree.map(put, state.sent, state.told)


def _noised(spec: Spec, federation: Federation, state: State, draw: Draws, sums: Sums) -> Sums:
    """Return the sums of a run that protects clients, with noise of this round."""
    assert spec.message_privacy is not None
    weights = federation.weights if federation.shares is None else federation.shares
    key = jax.random.fold_in(jax.random.fold_in(draw.key, SERVER), state.round)
    with jax.enable_x64(True):
        share = jnp.max(weights)  # all are equal, but for padding
        message = noise_sum(spec.message_privacy, sums.message, share, spec.sent, key)
    return sums._replace(message=message)


def _unless_done(last: State, new: State) -> State:
    """Return the new state, or the last one of a run that has ended.

    Tables of clients are kept by `_run_cohort`, and by `apply_policy`.
    """
    tables: dict[str, Any] = dict.fromkeys(ClientState._fields)
    with jax.enable_x64(True):
        frozen: State = jax.tree.map(
            lambda a, b: jnp.where(last.done, a, b), last._replace(**tables), new._replace(**tables)
        )
    return frozen._replace(**{name: getattr(new, name) for name in tables})


def _server_step(
    spec: Spec, old: State, state: State, steps: Array | int, lr: Array, sums: Sums
) -> tuple[State, Array]:
    """Apply the server step; return the new state and the drift of the cohort.

    `steps` is the number of local steps, where it is the same for all clients.
    It is computed in float64 for algorithms with client memory. A round in which nobody is heard
    leaves the server as it was in `old`, before the algorithm's `prepare`.
    """
    algorithm, before = spec.algorithm, (state.server, state.mean, state.scale)
    given = (*before, state.told, lr, sums)
    with jax.enable_x64(spec.keeps or state.x.dtype == jnp.float64):
        if spec.keeps:
            given = jax.tree.map(lambda a: a.astype(jnp.float64), given)
        server, means, scale, told, lr, sums = given
        safe = jnp.where(sums.heard > 0, sums.heard, 1)
        mean = jax.tree.map(lambda total: total / safe, sums.message)
        if spec.rebuilt is not None and not spec.moves_apart:
            move = (steps * lr) * getattr(mean, str(spec.exchange.d))
            mean = mean._replace(**{spec.rebuilt: move})
        if sums.late is not None:
            told = jax.tree.map(lambda now, late: now + late / safe, told, sums.late)
        server = algorithm.update(server, told, mean, sums.heard)
        # where clients are protected, what their memories lost by rounding is not told
        hidden = None if spec.message_privacy is not None else sums.rounded
        for changes in (sums.renewed, hidden):
            server = server if changes is None else absorb(algorithm, server, changes)
        drift = jnp.zeros((), sums.heard.dtype)
        if sums.move is not None:
            move = sums.move / safe
            drift = jnp.sqrt(jnp.maximum(sums.spread / safe - move @ move, 0))
        means = tuple(mean + change for mean, change in zip(means, sums.change, strict=True))
        after = server, means, jnp.maximum(scale, jnp.sqrt(sums.size / safe))
    with jax.enable_x64(True):
        server, means, scale = jax.tree.map(lambda a, b: a.astype(b.dtype), after, before)
    optimizer, buffers = state.optimizer, state.buffers
    if spec.server_optimizer is not None:  # its gradient is the negative of the algorithm's step
        updates, optimizer = spec.server_optimizer.update(
            state.x - server.x, state.optimizer, state.x
        )
        server = server._replace(x=state.x + updates)
    with jax.enable_x64(True):
        server, optimizer = jax.tree.map(
            lambda a, b: jnp.where(sums.heard > 0, a, b),
            (server, optimizer),
            (old.server, old.optimizer),
        )
    if buffers is not None:
        buffers = _average_buffers(buffers, sums)
    new = state._replace(
        server=server, mean=means, scale=scale, optimizer=optimizer, buffers=buffers
    )
    return new, drift


def _average_buffers(old: Any, sums: Sums) -> Any:
    """Return the weighted mean of the buffers of the clients heard.

    Means of whole numbers are rounded.
    """

    def mean(before: Array, total: Array) -> Array:
        new = total / jnp.where(sums.heard > 0, sums.heard, 1)
        new = new if jnp.issubdtype(before.dtype, jnp.floating) else jnp.round(new)
        return jnp.where(sums.heard > 0, new.astype(before.dtype), before)

    with jax.enable_x64(True):
        return jax.tree.map(mean, old, sums.buffers)


def select_cohort(spec: Spec, federation: Federation, state: State, draw: Draws) -> Work:
    """Return the work of the clients of a round, padded with clients of weight 0."""
    clients = len(federation.first)
    client = jnp.arange(clients) if spec.everyone else jnp.minimum(draw.cohort, clients - 1)
    weights = federation.weights if federation.shares is None else federation.shares
    with jax.enable_x64(True):
        p = jnp.where(spec.everyone | (draw.cohort < clients), weights[client], 0)
    keys = returns = None
    draws = spec.compressor is not None or spec.functions.random or spec.privacy is not None
    if federation.noise is not None or draws:
        who = client
        if federation.who is not None:
            who = federation.who if spec.everyone else federation.who[client]
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(draw.key, state.round)))(who)
    if spec.policy.refresh_after is not None:
        returns = needs_refresh(spec, state, client)
    steps, sent = federation.steps[client], None
    if draw.slot is not None:  # padding reads the last row, whose weight is 0
        sent = jax.tree.map(lambda table: table[jnp.minimum(draw.slot, len(table) - 1)], state.sent)
    work = Work(client, p, steps, keys, draw.rows, draw.row_weights, returns)
    return work._replace(sent=sent, damping=draw.damping)


def _split_into_blocks(spec: Spec, cohort: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape(-1, spec.block, *a.shape[1:]), cohort)


def _mean_gradient(
    spec: Spec, federation: Federation, state: State, draw: Draws, work: Work
) -> Array:
    """Return the weighted mean of the cohort's gradients at x."""

    def block(total: Array, part: Work) -> Array:
        return total + sum_gradients(spec, federation, state, part)

    begin = jnp.zeros_like(state.x)
    total, heard = _fold_blocks(spec, federation, draw, block, begin, work), work.p.sum()
    if spec.mesh is not None:
        total, heard = sum_over_devices(spec, (total, heard))
    return total / jnp.where(heard > 0, heard, 1)


def sum_gradients(spec: Spec, federation: Federation, state: State, work: Work) -> Array:
    """Return the weighted sum of the gradients at x of a block of clients."""

    def one(work: Work) -> Array:
        buffers = state.buffers
        if spec.local_buffers:
            buffers = jax.tree.map(lambda a: a[work.client], state.own_buffers)
        return gradient_at_x(spec, federation, state.x, work, buffers)

    return _weighted_sum(work.p, _map_clients(spec, one, work))


def _run_cohort(
    spec: Spec, federation: Federation, state: State, draw: Draws, work: Work, never: Array
) -> tuple[ClientState, Sums]:
    """Run the cohort block by block and return the updated client tables and the weighted sums.

    The rows of a block are read before its local steps and written after them. XLA updates the
    tables in place, so a round costs O(S), not O(N). If all clients take part, their tables are
    replaced instead.
    """
    if spec.compares:
        return _run_compared(spec, federation, state, draw, work, never)
    run = partial(run_block, spec, federation, state, draw, never)
    tables, begin = state.clients, _zero_sums(spec, state)
    if spec.everyone and spec.mesh is None:
        stored, old = read_clients(spec, state, tables, work.client)
        sums, new = jax.lax.scan(run, begin, _split_into_blocks(spec, (work, old)))
        rows = jax.tree.map(lambda a: a.reshape(len(work.p), *a.shape[2:]), new)
        return _unless_ended(state, stored, rows) if spec.runs_on else rows, sums

    def turn(carry: tuple[ClientState, Sums], part: tuple[Work, Array]) -> Any:
        (tables, sums), (work, slots) = carry, part
        stored, old = read_clients(spec, state, tables, work.client)
        sums, rows = run(sums, (work, old))
        rows = _unless_ended(state, stored, rows) if spec.runs_on else rows
        return jax.tree.map(partial(write_rows, spec, slots), tables, rows), sums

    tables, sums = _fold_blocks(spec, federation, draw, turn, (tables, begin), (work, draw.cohort))
    return tables, sums if spec.mesh is None else sum_over_devices(spec, sums)


def _run_compared(
    spec: Spec, federation: Federation, state: State, draw: Draws, work: Work, never: Array
) -> tuple[ClientState, Sums]:
    """Run the cohort, and count those whose messages are accepted once all are known.

    A client that is refused keeps its rows, and has no part in the sums.
    """
    stored, old = read_clients(spec, state, state.clients, work.client)
    _, replies = jax.lax.scan(
        lambda _, part: (None, train_block(spec, federation, state, draw, never, part)),
        None,
        _split_into_blocks(spec, (work, old)),
    )
    message, *rest = jax.tree.map(lambda a: a.reshape(len(work.p), *a.shape[2:]), replies)
    message, accepted, guard = filter_cohort(spec, federation, state, draw, work, message, old)
    with jax.enable_x64(True):
        work = work._replace(p=jnp.where(accepted, work.p, 0))
    parts = _split_into_blocks(spec, (work, old, (message, *rest)))
    sums, new = jax.lax.scan(
        partial(count_block, spec, state, draw), _zero_sums(spec, state), parts
    )
    new = jax.tree.map(lambda a: a.reshape(len(work.p), *a.shape[2:]), new)
    rows: ClientState = jax.tree.map(
        lambda a, b: jnp.where(accepted.reshape(-1, *[1] * (a.ndim - 1)), a, b),
        new,
        stored._replace(guard=None),
    )
    rows = rows._replace(guard=guard)
    rows = _unless_ended(state, stored, rows) if spec.runs_on else rows
    if spec.everyone:
        return rows, sums
    return jax.tree.map(partial(write_rows, spec, draw.cohort), state.clients, rows), sums


def _unless_ended(state: State, stored: ClientState, new: ClientState) -> ClientState:
    """Return the new rows of clients, or the stored ones of a run that ended before others."""
    kept: ClientState = jax.tree.map(lambda a, b: jnp.where(state.done, a, b), stored, new)
    return kept


def _fold_blocks(
    spec: Spec, federation: Federation, draw: Draws, block: Any, begin: Any, cohort: Any
) -> Any:
    """Fold `block` over the blocks of a cohort.

    A device has room for more members than usually come: it runs those blocks that hold some.
    """
    parts = _split_into_blocks(spec, cohort)
    if spec.mesh is None:
        return jax.lax.scan(lambda value, part: (block(value, part), None), begin, parts)[0]
    members = jnp.sum(draw.cohort < len(federation.first))

    def one(b: Array, value: Any) -> Any:
        return block(value, jax.tree.map(lambda a: a[b], parts))

    return jax.lax.fori_loop(0, -(-members // spec.block), one, begin)


def read_clients(
    spec: Spec, state: State, tables: ClientState, client: Array
) -> tuple[ClientState, ClientState]:
    """Return the rows of some clients as they are stored, and at the start of this round."""
    stored = tables
    if not spec.everyone:
        stored = jax.tree.map(lambda table: take_rows(table, client), tables)
    if spec.policy.rate is None:
        return stored, stored
    memory = decay_memory(spec, state, stored.memory, client, ahead=1)
    return stored, stored._replace(memory=memory)


def run_block(
    spec: Spec,
    federation: Federation,
    state: State,
    draw: Draws,
    never: Array,
    sums: Sums | None,
    part: tuple[Work, ClientState],
) -> tuple[Sums, ClientState]:
    """Run a block of clients; return the updated sums and the clients' new state.

    Without `sums`, those of the block alone are returned. `never` is false at run time, but
    unknown to the compiler.
    """
    work, old = part
    # rows that are read again after others have been written would make XLA copy their table
    old = compute_once(never, old)
    reply = train_block(spec, federation, state, draw, never, (work, old))
    return count_block(spec, state, draw, sums, (work, old, reply))


def train_block(
    spec: Spec,
    federation: Federation,
    state: State,
    draw: Draws,
    never: Array,
    part: tuple[Work, ClientState],
) -> tuple[Any, ClientState, Array]:
    """Run the local training of a block; return messages, the clients' new state and moves."""
    work, old = part

    def client(own: tuple[ClientState, Work]) -> tuple[Any, ClientState, Array]:
        most = loop_length(spec, federation, draw, own[1] if spec.one_by_one else work)
        return train(spec, federation, state, draw.lr, *own, most)

    reply: tuple[Any, ClientState, Array] = compute_once(
        never, _map_clients(spec, client, (old, work))
    )
    return reply


def count_block(
    spec: Spec,
    state: State,
    draw: Draws,
    sums: Sums | None,
    part: tuple[Work, ClientState, tuple[Any, ClientState, Array]],
) -> tuple[Sums, ClientState]:
    """Add the messages of a block to the sums; return these and the clients' new state."""
    work, old, (message, held, move) = part
    p = work.p
    with jax.enable_x64(True):
        if spec.rebuilt is not None and spec.moves_apart:
            d = getattr(message, str(spec.exchange.d))
            message = message._replace(**{spec.rebuilt: (work.steps * draw.lr)[:, None] * d})
        if work.damping is not None:  # before it counts: in the memory as at the server
            name = str(spec.exchange.move)
            message = message._replace(**{name: work.damping[:, None] * getattr(message, name)})
        renewed = rounded = buffers = None
        if not spec.local_buffers:
            buffers, held = _weighted_sum(p, held.own_buffers), held._replace(own_buffers=None)
        if spec.keeps:
            held, renewed, rounded = _update_memory(spec, state, work, message, old, held)
        fields = [of for _, of in spec.algorithm.means]
        new, was = ([getattr(a.memory, of) for of in fields] for a in (held, old))
        added = Sums(
            heard=p.sum(),
            message=_weighted_sum(p, message),
            change=tuple(
                _weighted_sum(p, a.astype(p.dtype) - b.astype(p.dtype))
                for a, b in zip(new, was, strict=True)
            ),
            size=sum((_weighted_square_sum(p, a) for a in new), jnp.zeros((), p.dtype)),
            move=_weighted_sum(p, move),
            spread=None if move is None else _weighted_square_sum(p, move),
            renewed=_weighted_sum(p, renewed),
            rounded=_weighted_sum(p, rounded),
            buffers=buffers,
            late=None if work.sent is None else _weighted_sum(p, _lateness(state, work)),
        )
        return added if sums is None else jax.tree.map(jnp.add, sums, added), held


def _lateness(state: State, work: Work) -> Any:
    """Return how the records that clients were sent differ from the present one."""
    return jax.tree.map(lambda sent, now: sent - now, work.sent, state.told)


def _update_memory(
    spec: Spec, state: State, work: Work, message: Any, old: ClientState, held: ClientState
) -> tuple[ClientState, Any, Any]:
    """Return the clients' new state, and the changes of their memories by renewal and by rounding.

    The new memory is computed in float64 and then rounded to the run's precision, so that the
    rounding error can be added to the server's mean.
    """
    dtype, remember = state.x.dtype, spec.algorithm.remember
    told = state.told if work.sent is None else work.sent
    before, told, message, begun = jax.tree.map(
        lambda a: a.astype(jnp.float64), (old.memory, told, message, held.memory)
    )
    renewed = None if begun is None else jax.tree.map(jnp.subtract, begun, before)
    exact = jax.vmap(
        lambda own, told, sent: remember(own, spec.algorithm.shift(told, own), sent),
        in_axes=(0, None if work.sent is None else 0, 0),
    )(before if begun is None else begun, told, message)
    new = jax.tree.map(lambda a: a.astype(dtype), exact)
    rounded = None
    if dtype != jnp.float64:
        rounded = jax.tree.map(lambda stored, a: stored.astype(jnp.float64) - a, new, exact)
    return held._replace(memory=new), renewed, rounded


def _map_clients(spec: Spec, client: Callable[[Any], Any], clients: Any) -> Any:
    """Map over the clients of a block: vmap, or a loop if batch sizes select branches.

    A single client is not mapped: with an axis of one, XLA chooses slower layouts for products.
    """
    if spec.block == 1:
        reply = client(jax.tree.map(lambda a: a[0], clients))
        return jax.tree.map(lambda a: a[None], reply)
    return jax.lax.map(client, clients) if spec.one_by_one else jax.vmap(client)(clients)


def loop_length(spec: Spec, federation: Federation, draw: Draws, work: Work) -> Array:
    """Return the number of local steps of a block of clients, the largest of any."""
    if draw.steps is not None:
        return draw.steps
    if not spec.unequal:
        return federation.steps[0]
    # under vmap, a bound that differs between runs would turn every iteration into a select
    return jnp.max(federation.steps if spec.side_by_side else work.steps)


def write_rows(spec: Spec, cohort: Array, table: Array, new: Array) -> Array:
    """Write the cohort's rows into a table, without padding, which is at the end.

    Rows are written one by one, which XLA does in place, whereas a scatter copies the table. Under
    vmap single writes become scatters too, so one scatter is faster there.
    """
    if spec.side_by_side:
        return table.at[cohort].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def put(s: Array, table: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(
            table, take_row(new, s), take_row(cohort, s), axis=0, allow_negative_indices=False
        )

    return jax.lax.fori_loop(0, jnp.sum(cohort < len(table)), put, table)


def _heard_at(spec: Spec, state: State, cohort: Array) -> Array:
    """Return the round in which each client was last heard, after this round."""
    now = state.round + 1
    if spec.everyone:
        return jnp.full_like(state.heard_at, now)
    return state.heard_at.at[cohort].set(now, mode="drop")


def _zero_sums(spec: Spec, state: State) -> Sums:
    """Return sums of zero."""
    with jax.enable_x64(True):
        kind = jnp.float64 if spec.keeps else state.x.dtype
        zero = jnp.zeros((), kind)
        empty = jnp.zeros(state.x.shape, kind)
        memory = jax.tree.map(lambda table: jnp.zeros(table.shape[1:], kind), state.memory)
        buffers = jax.tree.map(lambda a: jnp.zeros(a.shape, kind), state.buffers)
        late = jax.tree.map(lambda table: jnp.zeros(table.shape[1:], kind), state.sent)
    known = spec.exchange
    fields = known.record._fields  # type: ignore[attr-defined]
    message: dict[str, Any] = {name: empty if name in known.vectors else zero for name in fields}
    if spec.rebuilt is not None and not spec.moves_apart:
        message[spec.rebuilt] = None
    return Sums(
        heard=zero,
        message=known.record(**message),
        change=(empty,) * len(spec.algorithm.means),
        size=zero,
        move=empty if "drift" in spec.metrics else None,
        spread=zero if "drift" in spec.metrics else None,
        renewed=memory if spec.policy.refresh_after is not None else None,
        rounded=memory if spec.keeps and state.x.dtype != jnp.float64 else None,
        buffers=buffers,
        late=late,
    )


def _weighted_sum(p: Array, record: Any) -> Any:
    """Return sum p_i row_i for each array of a record.

    Rows of weight 0 are ignored even if they are not finite.
    """

    def total(rows: Array) -> Array:
        some = (p > 0).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.tensordot(p, jnp.where(some, rows, 0).astype(p.dtype), 1)

    return jax.tree.map(total, record)


def _weighted_square_sum(p: Array, rows: Array) -> Array:
    """Return sum p_i |row_i|^2."""
    return _weighted_sum(p, jnp.sum(rows * rows, axis=1, keepdims=True))[0]

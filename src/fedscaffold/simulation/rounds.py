"""The compiled program: rounds, blocks of clients, the server's step.

A round runs its cohort block by block (a block's clients at once, under vmap), adds up what they send, and lets the
algorithm's server step. On many devices each does so for its own clients, and their sums are joined before the step,
which all of them take. Rounds follow one another inside one while loop whose length is an argument, so one program
serves any number of rounds; it ends early at a target or at the first value that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedscaffold.simulation.aging import begun, faded, heard_now, returning, stored
from fedscaffold.simulation.double import computed_once, double, doubles, in_double
from fedscaffold.simulation.evaluation import evaluate
from fedscaffold.simulation.local import Held, Reply, Work, gradient_at_x, local_round
from fedscaffold.simulation.mesh import joined
from fedscaffold.simulation.spec import Array, Draws, Federation, Settings, Spec, State

__all__ = ["Sums", "called", "longest", "rounds"]


class Sums(NamedTuple):
    """What the server needs of a cohort; sums over clients weighted by p_i."""

    heard: Array
    d: Array
    move: Array
    change: Array
    """of c_i, as stored"""
    size: Array
    """of |c_i|^2"""
    spread: Array
    """of |move|^2"""
    travel: Array = None
    renewed: Array = None
    """of c_i, before the local steps"""
    rounded: Array = None
    """of c_i, by storing it"""


def rounds(
    spec: Spec, federation: Federation, settings: Settings, state: State, draws: Draws, number: Array, every: Array
) -> tuple[State, Array]:
    """Run the first `number` rounds of `draws`; returns the new state and one row of metrics for each."""
    given = (federation, settings, state, draws, number, every)
    with jax.enable_x64(state.x.dtype == jnp.float64):
        traced, shape = jax.make_jaxpr(partial(_rounds, spec), return_shape=True)(*given)
    # What is mapped over runs must be so with x64 on: off, the rules of vmap would make the doubles single.
    results = jaxpr_as_fun(traced)(*jax.tree.leaves(given))
    outcome: tuple[State, Array] = jax.tree.unflatten(jax.tree.structure(shape), results)
    return outcome


def _rounds(
    spec: Spec, federation: Federation, settings: Settings, state: State, draws: Draws, number: Array, every: Array
) -> tuple[State, Array]:
    # Runs side by side that have no target go on together, even past a divergence: their loop needs no selection.
    together = spec.side_by_side and spec.stop is None

    def more(carry: tuple[Array, State, Array]) -> Array:
        r, state, _ = carry
        return (r < number) & (together | ~state.done)

    def one(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        r, state, table = carry
        state, row = _round(spec, federation, settings, state, jax.tree.map(lambda a: a[r], draws), every)
        return r + 1, state, table.at[r].set(row)

    table = jnp.full((draws.cohort.shape[0], len(spec.metrics)), jnp.nan, state.x.dtype)
    _, state, table = jax.lax.while_loop(more, one, (jnp.int32(0), state, table))
    return state, table


def _round(
    spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws, every: Array
) -> tuple[State, Array]:
    before = state = begun(spec, federation, state, len(draw.cohort))
    cohort = called(spec, federation, settings, state, draw)
    if spec.algorithm.anchor is not None:
        mean = _mean_gradient(spec, federation, state.x, draw, cohort)
        state = state._replace(c=spec.algorithm.anchor(state.c, mean))
    held, sums = _cohort(spec, federation, settings, state, draw, cohort, every < 0)
    step = partial(_step, spec)
    old = Kept(state.x, state.c, state.mean, state.scale)
    new, drift = (in_double(step) if spec.keeps else step)(settings.lr, old, state.told, sums)
    with doubles():
        x, c, mean, scale = jax.tree.map(lambda after, kept: after.astype(kept.dtype), new, old)
    x, optimizer = _optimised(spec, state, x)
    if spec.silences:
        was, now = (before.x, before.c, before.optimizer), (x, c, optimizer)
        with doubles():
            x, c, optimizer = jax.tree.map(lambda a, b: jnp.where(sums.heard > 0, b, a), was, now)
    state = State(
        x,
        c,
        held.c_i,
        mean,
        scale,
        state.round + ~state.done,
        state.done,
        optimizer,
        heard_now(spec, state, draw.cohort),
        held.errors,
    )
    row, done = evaluate(spec, federation, settings, state, drift.astype(x.dtype), every)
    return state._replace(done=state.done | done), row


class Kept(NamedTuple):
    """What the server and its gauge keep; the fields of a state."""

    x: Array
    c: Array
    mean: Array
    scale: Array


def _step(spec: Spec, lr: Array, old: Kept, told: Array, sums: Sums) -> tuple[Kept, Array]:
    """The server's step on the c that clients were told, and the drift of the cohort.

    c takes the change, so that what rounding hides from the clients stays in it, and what storing rounds off the c_i.
    """
    safe = jnp.where(sums.heard > 0, sums.heard, 1)
    d = None if sums.d is None else sums.d / safe
    length = _length(spec, lr, sums, safe)
    sent: Array = sums.move / safe if spec.sums_moves else d
    x, c = spec.algorithm.server(old.x, told, length * sent, d, sums.heard)
    if spec.keeps:
        c = sum((change for change in (sums.renewed, sums.rounded) if change is not None), old.c + (c - told))
    drift = length * jnp.sqrt(jnp.maximum(sums.spread / safe - sent @ sent, 0))
    mean = None if sums.change is None else old.mean + sums.change
    return Kept(x, c, mean, jnp.maximum(old.scale, jnp.sqrt(sums.size / safe))), drift


def _length(spec: Spec, lr: Array, sums: Sums, safe: Array) -> Array | int:
    """What the averaged message is multiplied by to give the mean move."""
    if spec.algorithm.normalised:
        return sums.travel / safe
    return 1 if spec.sums_moves else spec.travel_steps * lr


def _optimised(spec: Spec, state: State, x: Array) -> tuple[Array, Any]:
    """The server's optimiser takes the algorithm's step as its gradient, and leaves c alone."""
    if spec.server_optimizer is None:
        return x, None
    updates, memory = spec.server_optimizer.update(state.x - x, state.optimizer, state.x)
    return state.x + updates, memory


class Cohort(NamedTuple):
    """The clients of a round, ghosts included, with weight 0."""

    work: Work
    p: Array
    """In double precision where clients remember something, and so are all sums over them."""


def called(spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws) -> Cohort:
    """Whom a round calls, with what each is to do."""
    everyone = jnp.arange(len(federation.first))
    client = everyone if spec.everyone else jnp.minimum(draw.cohort, len(federation.first) - 1)
    weights = federation.weights if federation.shares is None else federation.shares
    with doubles():
        p = jnp.where(spec.everyone | (draw.cohort < len(federation.first)), weights[client], 0)
    key = jax.random.fold_in(settings.key, state.round)
    random = federation.noise is not None or spec.compressor is not None
    who = client if federation.who is None else federation.who if spec.everyone else federation.who[client]
    keys = jax.vmap(partial(jax.random.fold_in, key))(who) if random else None
    steps = federation.steps[client]
    work = Work(client, steps, keys, draw.rows, draw.row_weights, returning(spec, state, client))
    return Cohort(work, p)


def _blocks(spec: Spec, cohort: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape(-1, spec.block, *a.shape[1:]), cohort)


def _mean_gradient(spec: Spec, federation: Federation, x: Array, draw: Draws, cohort: Cohort) -> Array:
    """The exchange before the local steps: the weighted mean of the cohort's gradients at x."""

    def block(total: Array, part: Cohort) -> Array:
        own = _each(spec, lambda work: gradient_at_x(spec, federation, x, work), part.work)
        return total + _weighted(part.p, own)

    total, heard = joined(spec, (_folded(spec, federation, draw, block, jnp.zeros_like(x), cohort), cohort.p.sum()))
    return total / jnp.where(heard > 0, heard, 1)


def _folded(spec: Spec, federation: Federation, draw: Draws, block: Any, begin: Any, cohort: Any) -> Any:
    """Carry a value from block to block: of the whole cohort, or of a device's own members, however many they are."""
    parts = _blocks(spec, cohort)
    if spec.mesh is None:
        return jax.lax.scan(lambda value, part: (block(value, part), None), begin, parts)[0]
    members = jnp.sum(draw.cohort < len(federation.first))

    def one(b: Array, value: Any) -> Any:
        return block(value, jax.tree.map(lambda a: a[b], parts))

    return jax.lax.fori_loop(0, -(-members // spec.block), one, begin)


def _cohort(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draw: Draws,
    cohort: Cohort,
    never: Array,
) -> tuple[Held, Sums]:
    """Run the cohort block by block; returns the new tables of what clients hold and the weighted sums.

    The cohort's rows are read from the tables once and written once, so that XLA updates them in place: a round costs
    in proportion to its cohort, not to N. A device that runs some of a cohort does so block by block, as it has room
    for more members than come.
    """
    tables = Held(state.c_i, state.errors)
    run = partial(_block, spec, federation, settings, state, draw, never)
    if spec.mesh is not None:

        def turn(carry: tuple[Held, Sums], part: tuple[Cohort, Array]) -> tuple[Held, Sums]:
            own, slots = part
            sums, rows = run(carry[1], (own, _held(spec, state, carry[0], own.work.client)))
            return jax.tree.map(partial(stored, spec, slots), carry[0], rows), sums

        begin = (tables, _nothing(spec, state.x))
        tables, sums = _folded(spec, federation, draw, turn, begin, (cohort, draw.cohort))
        return tables, joined(spec, sums)
    old = _held(spec, state, tables, cohort.work.client)
    sums, new = jax.lax.scan(run, _nothing(spec, state.x), _blocks(spec, (cohort, old)))
    rows = jax.tree.map(lambda a: a.reshape(len(cohort.p), *a.shape[2:]), new)
    return jax.tree.map(partial(stored, spec, draw.cohort), tables, rows), sums


def _held(spec: Spec, state: State, tables: Held, client: Array) -> Held:
    """What some clients hold as the round begins."""
    old: Held = jax.tree.map(partial(_rows, spec, client), tables)
    return old._replace(c_i=faded(spec, state, old.c_i, client, ahead=1))


def _block(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    state: State,
    draw: Draws,
    never: Array,
    sums: Sums,
    part: tuple[Cohort, Held],
) -> tuple[Sums, Held]:
    """Run a block of clients; returns the sums with theirs added, and what they hold now.

    `never` is false, which the compiler cannot know.
    """
    (work, p), old = part
    most = longest(spec, draw, work)

    def client(own: tuple[Held, Work]) -> Reply:
        return local_round(spec, federation, settings, state.x, state.told, *own, most)

    replies = computed_once(never, _each(spec, client, (old, work)))
    with doubles():
        if spec.sums_moves and not spec.sends_move:
            replies = replies._replace(move=(work.steps * settings.lr)[:, None] * replies.d)
        held, renewed, rounded = _remembered(spec, state, replies, old)
        new = _summed(spec, p, replies, old, held)._replace(
            renewed=_weighted(p, renewed), rounded=_weighted(p, rounded)
        )
        return jax.tree.map(jnp.add, sums, new), held


def _remembered(spec: Spec, state: State, replies: Reply, old: Held) -> tuple[Held, Array, Array]:
    """What clients hold now; by how much c_i changed before the local steps, and by storing it.

    In double precision up to the storing, so that it is known to c what that rounds off.
    """
    if spec.algorithm.remember is None:
        return Held(None, replies.errors), None, None
    before, dtype = double(old.c_i), state.x.dtype
    begun = before if replies.c_i is None else double(replies.c_i)
    seen = replies.move if spec.algorithm.by_move else replies.d
    exact = spec.algorithm.remember(double(state.told), begun, double(seen))
    new = exact.astype(dtype)
    rounded = None if dtype == exact.dtype else double(new) - exact
    return Held(new, replies.errors), None if replies.c_i is None else begun - before, rounded


def _summed(spec: Spec, p: Array, replies: Reply, old: Held, held: Held) -> Sums:
    """The sums over a block, in the precision of p."""
    new = held.c_i
    sent = replies.move if spec.sums_moves else replies.d
    return Sums(
        p.sum(),
        _weighted(p, replies.d) if spec.sends_direction else None,
        _weighted(p, replies.move),
        None if new is None else _weighted(p, new.astype(p.dtype) - old.c_i.astype(p.dtype)),
        _squared(p, new),
        _squared(p, sent if "drift" in spec.metrics else None),
        None if replies.travel is None else p @ replies.travel,
    )


def _each(spec: Spec, client: Callable[[Any], Any], clients: Any) -> Any:
    """Run the clients of a block: side by side, or one after the other where their batches' sizes decide what runs."""
    return jax.lax.map(client, clients) if spec.one_by_one else jax.vmap(client)(clients)


def longest(spec: Spec, draw: Draws, work: Work) -> Array | int:
    """How many local steps a block takes."""
    if draw.steps is not None:
        return draw.steps
    # a bound that differs between runs side by side would make every step of the loop a selection
    return jnp.max(work.steps) if spec.unequal and not spec.side_by_side else spec.max_steps


def _rows(spec: Spec, client: Array, table: Array) -> Array:
    return table if spec.everyone else table.at[client].get(mode="promise_in_bounds")


def _nothing(spec: Spec, x: Array) -> Sums:
    with doubles():
        zero = jnp.zeros((), jnp.float64 if spec.keeps else x.dtype)
        empty = jnp.zeros(x.shape, zero.dtype)

    def if_(wanted: bool, sum: Array) -> Array:
        return sum if wanted else None

    return Sums(
        zero,
        if_(spec.sends_direction, empty),
        if_(spec.sums_moves, empty),
        if_(spec.keeps, empty),
        zero,
        zero,
        if_(spec.algorithm.normalised, zero),
        if_(spec.policy.refresh_after is not None, empty),
        if_(spec.keeps and x.dtype != jnp.float64, empty),
    )


def _weighted(p: Array, rows: Array) -> Array:
    """Sum of p_i times row i; rows of no weight do not count even where they are not finite."""
    return None if rows is None else p @ jnp.where(p[:, None] > 0, rows, 0).astype(p.dtype)


def _squared(p: Array, rows: Array) -> Array:
    """Sum of p_i times |row i|^2; 0 where nobody asks."""
    return jnp.zeros((), p.dtype) if rows is None else _weighted(p, jnp.sum(rows * rows, axis=1, keepdims=True))[0]

"""The compiled program: rounds, blocks of clients, the server's step.

A round runs its cohort block by block (a block's clients at once, under vmap), adds up what they send, and lets the
algorithm's server step. Rounds follow one another inside one while loop whose length is an argument, so one program
serves any number of rounds; it ends early at a target or at the first value that is not finite.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedscaffold.simulation.evaluation import evaluate
from fedscaffold.simulation.local import Work, local_round
from fedscaffold.simulation.spec import Array, Draws, Federation, Settings, Spec, State

__all__ = ["Sums", "rounds"]


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


def rounds(
    spec: Spec, federation: Federation, settings: Settings, state: State, draws: Draws, number: Array, every: Array
) -> tuple[State, Array]:
    """Run the first `number` rounds of `draws`; returns the new state and one row of metrics for each."""
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
    key = jax.random.fold_in(settings.key, state.round)
    c_i, sums = _cohort(spec, federation, settings, state, draw, key)
    safe = jnp.where(sums.heard > 0, sums.heard, 1)
    d = None if sums.d is None else sums.d / safe
    length = 1 if spec.sends_move else spec.max_steps * settings.lr
    sent: Array = sums.move / safe if spec.sends_move else d
    move = length * sent
    x, c = spec.algorithm.server(state.x, state.c, move, d, sums.heard)
    mean = None if sums.change is None else state.mean + sums.change
    drift = length * jnp.sqrt(jnp.maximum(sums.spread / safe - sent @ sent, 0))
    scale = jnp.maximum(state.scale, jnp.sqrt(sums.size / safe))
    state = State(x, c, c_i, mean, scale, state.round + ~state.done, state.done)
    row, done = evaluate(spec, federation, settings, state, drift, every)
    return state._replace(done=state.done | done), row


def _cohort(
    spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws, key: Array
) -> tuple[Array, Sums]:
    """Run the cohort block by block; returns the new table of c_i and the weighted sums.

    The cohort's rows are read from the table once and written once, so that XLA updates the table in place: a round
    costs in proportion to its cohort, not to N.
    """
    everyone = jnp.arange(len(federation.first))
    client = everyone if spec.everyone else jnp.minimum(draw.cohort, len(federation.first) - 1)
    p = jnp.where(spec.everyone | (draw.cohort < len(federation.first)), federation.weights[client], 0)
    old = state.c_i if state.c_i is None or spec.everyone else state.c_i.at[client].get(mode="promise_in_bounds")
    keys = None if federation.noise is None else jax.vmap(partial(jax.random.fold_in, key))(client)
    cohort = (Work(client, federation.steps[client], keys, draw.rows, draw.row_weights), p, old)

    def block(sums: Sums, part: tuple[Work, Array, Array]) -> tuple[Sums, Array]:
        work, p, old = part
        # a bound that differs between runs side by side would make every step of the loop a selection
        most = jnp.max(work.steps) if spec.unequal and not spec.side_by_side else spec.max_steps
        client = partial(local_round, spec, federation, settings, state.x, state.c)
        replies = jax.vmap(client, in_axes=(0, 0, None))(old, work, most)
        change = None if old is None else replies.c_i - old
        sent = replies.move if spec.sends_move else replies.d
        new = Sums(
            p.sum(),
            _weighted(p, replies.d),
            _weighted(p, replies.move),
            _weighted(p, change),
            _squared(p, replies.c_i),
            _squared(p, sent if "drift" in spec.metrics else None),
        )
        return jax.tree.map(jnp.add, sums, new), replies.c_i

    blocks = jax.tree.map(lambda a: a.reshape(-1, spec.block, *a.shape[1:]), cohort)
    sums, new = jax.lax.scan(block, _nothing(spec, state.x), blocks)
    if state.c_i is None:
        return None, sums
    return _stored(spec, state.c_i, draw.cohort, new.reshape(len(client), -1)), sums


def _stored(spec: Spec, table: Array, cohort: Array, new: Array) -> Array:
    """Write the cohort's rows, ghosts (at the end) left out.

    Row by row, because XLA does that in place while a scatter copies the table; but under vmap the rows would become
    scatters themselves, so there one scatter for all of them is best.
    """
    if spec.everyone:
        return new
    if spec.side_by_side:
        return table.at[cohort].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def put(s: Array, table: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(table, new[s], cohort[s], axis=0)

    return jax.lax.fori_loop(0, jnp.sum(cohort < len(table)), put, table)


def _nothing(spec: Spec, x: Array) -> Sums:
    zero, empty = jnp.zeros((), x.dtype), jnp.zeros_like(x)
    heard = empty if spec.sends_direction else None
    return Sums(zero, heard, empty if spec.sends_move else None, heard, zero, zero)


def _weighted(p: Array, rows: Array) -> Array:
    """Sum of p_i times row i; rows of no weight do not count even where they are not finite."""
    return None if rows is None else p @ jnp.where(p[:, None] > 0, rows, 0)


def _squared(p: Array, rows: Array) -> Array:
    """Sum of p_i times |row i|^2; 0 where nobody asks."""
    return jnp.zeros((), p.dtype) if rows is None else _weighted(p, jnp.sum(rows * rows, axis=1, keepdims=True))[0]

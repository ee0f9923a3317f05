"""The compiled program: rounds, blocks of clients, the server's step.

A round runs its cohort block by block (a block's clients at once, under vmap), adds up what they send, and lets the
algorithm's server step. Rounds follow one another inside one while loop whose length is an argument, so one program
serves any number of rounds; it ends early at a target or at the first value that is not finite.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedscaffold.simulation.local import Reply, Work, local_round
from fedscaffold.simulation.metrics import evaluate
from fedscaffold.simulation.spec import Array, Draws, Federation, Settings, Spec, State

__all__ = ["Sums", "rounds"]


class Sums(NamedTuple):
    """What the server needs of a cohort; sums over clients weighted by p_i."""

    heard: Array
    d: Array | None
    move: Array | None
    change: Array | None
    """of c_i, as stored"""
    spread: Array
    """of |move|^2"""


def rounds(
    spec: Spec, federation: Federation, settings: Settings, state: State, draws: Draws, number: Array, every: Array
) -> tuple[State, Array]:
    """Run the first `number` rounds of `draws`; returns the new state and one row of metrics for each."""

    def more(carry: tuple[Array, State, Array]) -> Array:
        r, state, _ = carry
        return (r < number) & ~state.done

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
    length = 1 if spec.sends_move else draw.steps[0].astype(state.x.dtype) * settings.lr
    sent = sums.move / safe if spec.sends_move else d
    move = length * sent
    x, c = spec.algorithm.server(state.x, state.c, move, d, sums.heard)
    mean = None if sums.change is None else state.mean + sums.change
    drift = length * jnp.sqrt(jnp.maximum(sums.spread / safe - sent @ sent, 0))
    state = State(x, c, c_i, mean, state.round + 1, state.done)
    row, done = evaluate(spec, federation, settings, state, drift, every)
    return state._replace(done=done), row


def _cohort(
    spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws, key: Array
) -> tuple[Array | None, Sums]:
    """Run the cohort block by block; returns the new table of c_i and the weighted sums."""
    size = draw.cohort.shape[0]
    blocks = jax.tree.map(lambda a: a.reshape(size // spec.block, spec.block, *a.shape[1:]), draw)

    def block(carry: tuple[Array | None, Sums], draw: Draws) -> tuple[tuple[Array | None, Sums], None]:
        c_i, sums = carry
        replies, old, p = _block(spec, federation, settings, state, c_i, draw, key)
        new = Sums(p.sum(), *(_weighted(p, a) for a in _summed(replies, old)), _spread(spec, p, replies))
        if c_i is not None:
            c_i = c_i.at[draw.cohort].set(replies.c_i, mode="drop", unique_indices=True, indices_are_sorted=True)
        return (c_i, jax.tree.map(jnp.add, sums, new)), None

    empty = jnp.zeros_like(state.x)
    nothing = Sums(
        jnp.zeros((), state.x.dtype),
        empty if spec.sends_direction else None,
        empty if spec.sends_move else None,
        empty if spec.sends_direction else None,
        jnp.zeros((), state.x.dtype),
    )
    (c_i, sums), _ = jax.lax.scan(block, (state.c_i, nothing), blocks)
    return c_i, sums


def _block(
    spec: Spec, federation: Federation, settings: Settings, state: State, table: Array | None, draw: Draws, key: Array
) -> tuple[Reply, Array | None, Array]:
    """Run one block of clients at once; returns their replies, the c_i they had, and their weights (0 for ghosts)."""
    real = draw.cohort < len(federation.first)
    client = jnp.minimum(draw.cohort, len(federation.first) - 1)
    p = jnp.where(real, federation.weights[client], 0)
    old = None if table is None else table[client]
    keys = jax.vmap(partial(jax.random.fold_in, key))(client) if federation.noise is not None else client
    work = Work(client, draw.steps, keys, draw.rows, draw.row_weights)
    most = jnp.max(draw.steps)
    replies = jax.vmap(
        lambda c_i, work: local_round(spec, federation, settings, state.x, state.c, c_i, work, most)
    )(old, work)
    return replies, old, p


def _summed(replies: Reply, old: Array | None) -> tuple[Array | None, Array | None, Array | None]:
    return replies.d, replies.move, None if old is None else replies.c_i - old


def _weighted(p: Array, rows: Array | None) -> Array | None:
    """Sum of p_i times row i; rows of no weight do not count even where they are not finite."""
    return None if rows is None else p @ jnp.where(p[:, None] > 0, rows, 0)


def _spread(spec: Spec, p: Array, replies: Reply) -> Array:
    if "drift" not in spec.metrics:
        return jnp.zeros((), p.dtype)
    rows: Any = replies.move if spec.sends_move else replies.d
    return p @ jnp.sum(rows * rows, axis=1)

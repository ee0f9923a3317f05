"""One client's round: K local steps from x, leaf by leaf, flat again at the end.

The records of a client are rows `first .. first + count` of the flat record arrays. A batch is a set of rows; where
batches differ in size they are padded with rows of weight zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedscaffold.algorithms import travelled
from fedscaffold.problems.batches import gradient as slope_on_batch
from fedscaffold.simulation.spec import Array, Federation, Settings, Spec

__all__ = ["Held", "Reply", "Work", "gradient", "gradient_at_x", "local_round"]

Leaves = list[Any]
Batch = tuple[Any, Array, tuple[int, ...]]
"""Records, their weights where some may be padding, and how many may be real where that must be known."""
UNROLL = 4  # local steps in one turn of the loop: some 10 % faster on small models, little more to compile


class Work(NamedTuple):
    """One client's part in a round."""

    client: Array
    steps: Array
    key: Array
    """Random key of its gradient noise and its messages."""
    rows: Array
    row_weights: Array
    returns: Array = None
    """Whether it has been away so long that its c_i is to be renewed."""


class Held(NamedTuple):
    """What a client holds from round to round; None for what it has no use for."""

    c_i: Array
    errors: Array
    """(d,) what compression left out of its moves so far."""


class Reply(NamedTuple):
    """What one client hands back; None for what need not be sent."""

    d: Array
    """Its mean direction (the direction at x for option I)."""
    move: Array
    """x - y, or that per unit of travel."""
    errors: Array = None
    """What compression left out of its moves so far."""
    travel: Array = None
    """The sum of its step sizes, where moves are averaged per unit of travel."""
    c_i: Array = None
    """What it held before the first step, where that may be new."""


def local_round(
    spec: Spec,
    federation: Federation,
    settings: Settings,
    x: Array,
    c: Array,
    held: Held,
    work: Work,
    most: Array | int,
) -> Reply:
    """Run one client for its steps of the round; `most` is the largest number of steps among its block."""
    c_i = _begun(spec, federation, x, held.c_i, work)
    start = spec.layout.leaves(x)
    shifts = _shifts(spec, c, c_i)
    noise = _noise(spec, federation, work, x.dtype)
    batch = _batches(spec, federation, work)
    advance = _stepper(spec, settings)
    collect = spec.sends_direction and not spec.constant_step and not spec.algorithm.at_x

    def direction(y: Leaves, k: Array | int, batch: Batch) -> Leaves:
        g = gradient(spec, y, *batch)
        if spec.algorithm.anchor is not None:  # the same batch and the same noise at x
            g = [at_y - at_x for at_y, at_x in zip(g, gradient(spec, start, *batch), strict=True)]
        elif noise is not None:
            g = [leaf + n for leaf, n in zip(g, spec.layout.leaves(noise[k]), strict=True)]
        return [spec.algorithm.direction(*leaf) for leaf in zip(g, y, start, shifts, strict=True)]

    def step(k: Array, carry: tuple[Leaves, Any, Any]) -> tuple[Leaves, Any, Any]:
        y, total, memory = carry
        d = direction(y, k, batch(k))
        new, memory = advance(k, y, d, memory)
        after = new, [t + leaf for t, leaf in zip(total, d, strict=True)] if collect else None, memory
        return jax.tree.map(lambda a, b: jnp.where(k < work.steps, a, b), after, carry) if spec.unequal else after

    memory = None if spec.optimizer is None else spec.optimizer.init(start)
    total = [jnp.zeros_like(leaf) for leaf in start] if collect else None
    unroll = UNROLL if isinstance(most, int) and not spec.one_by_one else None
    y, total, _ = jax.lax.fori_loop(0, most, step, (start, total, memory), unroll=unroll)
    d = None
    if spec.sends_direction and spec.algorithm.at_x:
        d = _flat(direction(start, spec.max_steps, _whole(spec, federation, work.client)))
    elif collect:
        d = _flat(total) / (work.steps.astype(x.dtype) if spec.unequal else spec.max_steps)
    elif spec.sends_direction:
        d = travelled(x, _flat(y), work.steps.astype(x.dtype) if spec.unequal else spec.travel_steps, settings.lr)
    travel = _travel(spec, settings, work, x.dtype)
    move = x - _flat(y) if spec.sends_move else None
    d, move, errors = _sent(spec, c, held, work, d, move if travel is None else move / travel)
    return Reply(d, move, errors, travel, None if work.returns is None else c_i)


def gradient_at_x(spec: Spec, federation: Federation, x: Array, work: Work) -> Array:
    """The client's gradient at x over all its data, as a flat vector, with the noise of one more step."""
    g = _flat(gradient(spec, spec.layout.leaves(x), *_whole(spec, federation, work.client)))
    noise = _noise(spec, federation, work, x.dtype)
    return g if noise is None else g + noise[spec.max_steps]


def _begun(spec: Spec, federation: Federation, x: Array, c_i: Array, work: Work) -> Array:
    """c_i as the local steps begin: renewed where the client was away for long."""
    return c_i if work.returns is None else jnp.where(work.returns, gradient_at_x(spec, federation, x, work), c_i)


def _travel(spec: Spec, settings: Settings, work: Work, dtype: Any) -> Array:
    """The sum of the client's step sizes, where moves are averaged per unit of it."""
    if not spec.algorithm.normalised:
        return None
    if spec.scheduled:
        return jnp.sum(jnp.where(jnp.arange(spec.max_steps) < work.steps, settings.lr, 0))
    return work.steps.astype(dtype) * settings.lr


def _sent(spec: Spec, c: Array, held: Held, work: Work, d: Array, move: Array) -> tuple[Array, Array, Array]:
    """What both sides see of the messages, and the error of its move that the client keeps."""
    if spec.compressor is None:
        return d, move, None
    first, second = jax.random.split(jax.random.fold_in(work.key, 1))
    if d is not None:
        # what is left out of d - c is in the next one again; kept as an error as well it would count twice, and grow
        d = c + spec.compressor.decoded(d - c, first)
    if move is None:
        return d, None, None
    move = move + held.errors
    seen = spec.compressor.decoded(move, second)
    return d, seen, move - seen


def gradient(spec: Spec, y: Leaves, batch: Any, weights: Array, sizes: tuple[int, ...] = ()) -> Leaves:
    """The gradient on a batch, leaf by leaf; `weights` are given where the batch may be padded."""
    params = spec.layout.tree(y)
    return jax.tree.leaves(slope_on_batch(spec.functions, spec.kinds, params, batch, weights, sizes))


def _shifts(spec: Spec, c: Array, c_i: Array) -> list[Any]:
    """The correction of every leaf, once a round."""
    if spec.algorithm.shift is None:
        return [None] * len(spec.layout.shapes)
    return spec.layout.leaves(spec.algorithm.shift(c, c_i if c_i is None else c_i.astype(c.dtype)))


def _stepper(spec: Spec, settings: Settings) -> Callable[[Array, Leaves, Leaves, Any], tuple[Leaves, Any]]:
    """The local optimiser: (k, y, d, memory) -> y, memory."""

    def sgd(k: Array, y: Leaves, d: Leaves, memory: Any) -> tuple[Leaves, Any]:
        lr = settings.lr[k] if spec.scheduled else settings.lr
        return [leaf - lr * along for leaf, along in zip(y, d, strict=True)], memory

    def optax(k: Array, y: Leaves, d: Leaves, memory: Any) -> tuple[Leaves, Any]:
        updates, memory = spec.optimizer.update(d, memory, y)
        return [leaf + update for leaf, update in zip(y, updates, strict=True)], memory

    return sgd if spec.optimizer is None else optax


def _batches(spec: Spec, federation: Federation, work: Work) -> Callable[[Array], Batch]:
    """(k) -> the batch of local step k; a full batch is read once a round."""
    if spec.full_batch:
        whole = _whole(spec, federation, work.client)
        return lambda k: whole
    assert work.rows is not None

    def drawn(k: Array) -> Batch:
        weights = None if work.row_weights is None else work.row_weights[k]
        return _rows(federation, work.rows[k]), weights, spec.batch_sizes

    return drawn


def _whole(spec: Spec, federation: Federation, client: Array) -> Batch:
    """All records of a client, padded to the largest client where clients differ."""
    first, count = federation.first[client], federation.counts[client]
    place = jnp.arange(spec.max_rows)
    batch = _rows(federation, first + jnp.minimum(place, count - 1))
    if not spec.ragged_clients:
        return batch, None, ()
    weights = jnp.where(place < count, 1 / count.astype(federation.weights.dtype), 0)
    return batch, weights, spec.client_sizes


def _rows(federation: Federation, rows: Array) -> Any:
    return jax.tree.map(lambda a: a.at[rows].get(mode="promise_in_bounds"), federation.records)


def _noise(spec: Spec, federation: Federation, work: Work, dtype: Any) -> Array:
    """Gaussian gradient noise of all local steps at once, and one more for the gradient at x."""
    if federation.noise is None:
        return None
    z = jax.random.normal(work.key, (spec.max_steps + 1, spec.layout.size), dtype)
    factor = federation.noise
    return z * factor if factor.ndim == 0 else z @ factor[work.client if len(factor) > 1 else 0]


def _flat(leaves: Leaves) -> Array:
    return jnp.concatenate([leaf.ravel() for leaf in leaves])

"""Local training: K local steps of one client, computed layer by layer.

Algorithms are written as formulas on vectors. In the loop over local steps these run layer by
layer (`Leaves`), because flattening the gradient at every step would cost up to 40 % of the time.

A client's records are rows `first .. first + count` of the concatenated record arrays. A batch is a
set of rows; batches of different sizes are padded with rows of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedscaffold.algorithms.base import Leaves, Walk, travelled
from fedscaffold.algorithms.round import each, reply_of
from fedscaffold.privacy.gradients import private_gradient
from fedscaffold.privacy.messages import clip_message
from fedscaffold.privacy.noise import gaussian_noise
from fedscaffold.problems.batches import gradient as slope_on_batch
from fedscaffold.problems.batches import record_gradients
from fedscaffold.simulation.normals import normals
from fedscaffold.simulation.spec import Array, ClientState, Federation, Spec, State, Work
from fedscaffold.simulation.table_rows import take_row, take_rows

__all__ = ["UNROLL", "compute_once", "flat", "gradient", "gradient_at_x", "train"]

Batch = tuple[Any, Array, tuple[int, ...]]
"""Records; their weights, or None without padding; the possible sizes, if each needs a branch of
its own."""
# streams of a client's key: local steps, gradient at x, noise of privacy (1: compression)
STEPS, AT_X, PRIVACY = 2, 3, 4
# local steps in an iteration of an unrolled loop: about 10 % faster on small models, and quick to
# compile
UNROLL = 4

jax.tree_util.register_pytree_node_class(Leaves)


def flat(leaves: Leaves) -> Any:
    """Concatenate the layers into a flat vector."""
    return jnp.concatenate([leaf.ravel() for leaf in leaves.parts])


def train(
    spec: Spec,
    federation: Federation,
    state: State,
    lr: Array,
    held: ClientState,
    work: Work,
    most: Array,
) -> tuple[Any, ClientState, Array]:
    """Run one client's local training.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        state: The state of the federation, of which the client is sent the server's part.
        lr: Its step size, or one per local step.
        held: The client's own state.
        work: The client's work in this round.
        most: Number of loop iterations: the largest number of steps in its block.

    Returns:
        The message, in which a field that the server rebuilds is None. The client's new state,
        whose memory is that before the first step if the `refresh` policy may have renewed it, and
        else None. The move x - y, None unless drift is measured.
    """
    told = state.told if work.sent is None else work.sent
    memory, renewed = held.memory, None
    begun = buffers = held.own_buffers if spec.local_buffers else state.buffers
    if work.returns is not None:
        memory = renewed = _renew_memory(spec, federation, told.x, memory, work, buffers)
    shift = spec.algorithm.shift(told, jax.tree.map(lambda a: a.astype(told.x.dtype), memory))
    start = spec.algorithm.start(told.x, held.own)
    y, total, buffers = _run_local_steps(
        spec, federation, start, told.x, shift, lr, work, most, buffers
    )
    steps = spec.travel_steps(work.steps.astype(told.x.dtype))

    def mean_direction() -> Any:
        if total is not None:
            return each(lambda sum: flat(sum) / steps, total)
        return each(lambda begun, over: travelled(begun, over, steps, lr), start, y)

    walk = Walk(
        x=lambda: told.x,
        y=lambda: y,
        move=lambda: each(jnp.subtract, start, y),
        travel=lambda: _sum_of_step_sizes(spec, lr, work, told.x.dtype),
        d=mean_direction,
        gradient=lambda: gradient_at_x(spec, federation, told.x, work, begun),
    )
    message, own = reply_of(spec.algorithm, walk, shift, held.own)
    if (rebuilt := spec.rebuilt) is not None:
        message = message._replace(**{rebuilt: None})
    errors = move = None
    if spec.compressor is not None:
        message, errors = _compress_message(spec, told, held.errors, work, message)
    if spec.message_privacy is not None:
        known = {name: of(told) for name, of in spec.algorithm.references}
        message = clip_message(spec.message_privacy, message, known, spec.sent)
    if "drift" in spec.metrics:
        move = walk.move[0] if isinstance(walk.move, tuple) else walk.move
    return message, ClientState(renewed, own, errors, buffers), move


def _run_local_steps(
    spec: Spec,
    federation: Federation,
    start: Any,
    x: Array,
    shift: Array,
    lr: Array,
    work: Work,
    most: Array,
    buffers: Any,
) -> tuple[Any, Any, Any]:
    """Run the local steps.

    Returns:
        The end y; the sum of the directions, None if the move tells it; and the new state that the
        loss updates.
    """
    noise = None if federation.noise is None else _noise(spec, federation, work, x.dtype)
    whole = _full_batch(spec, federation, work.client) if spec.full_batch else None
    stream = jax.random.fold_in(_typed_key(work.key), STEPS) if spec.functions.random else None
    cut = partial(_split_layers, spec)
    y, at_x, along = each(cut, start), cut(x), None if shift is None else each(cut, shift)
    collect = "d" in spec.exchange.reads and not spec.constant_step
    together = not spec.one_by_one and (spec.block > 1 or spec.side_by_side)
    waits = spec.unequal and together  # for others of its block

    def step(k: Array, carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        y, total, memory, buffers = carry
        batch = whole or (
            _rows(federation, take_row(work.rows, k)),
            None if work.row_weights is None else take_row(work.row_weights, k),
            spec.batch_sizes,
        )
        new = buffers

        def slope(z: Leaves) -> Leaves:
            nonlocal new
            key = None if stream is None else jax.random.fold_in(stream, k)
            if spec.privacy is not None:
                g = _private_gradient(spec, federation, z.parts, work, k, batch, key)
            else:
                g, seen = gradient(spec, z.parts, *batch, key=key, buffers=buffers)
                g = compute_once(k < 0, g) if spec.heavy and not batch[2] else g
                new = new if z is at_x else seen  # a gradient at x leaves no trace
            return Leaves(g) if noise is None else Leaves(g) + cut(take_row(noise, k))

        d = spec.algorithm.direction(slope, y, at_x, along)
        taken = d if spec.clip_norm is None else each(partial(_clip, spec.clip_norm), d)
        if spec.optimizer is None:
            size = take_row(lr, k) if spec.scheduled else lr
            y = jax.tree.map(lambda leaf, along: leaf - size * along, y, taken)
        else:
            y, memory = _optimizer_step(spec, y, taken, memory)
        after = y, jax.tree.map(jnp.add, total, d) if collect else None, memory, new
        if not waits:
            return after
        stepped: tuple[Any, Any, Any, Any] = jax.tree.map(
            lambda a, b: jnp.where(k < work.steps, a, b), after, carry
        )
        return stepped

    memory = None if spec.optimizer is None else each(spec.optimizer.init, y)
    total = jax.tree.map(jnp.zeros_like, y) if collect else None
    unroll = spec.unrolls and not jax.config.read("jax_disable_most_optimizations")
    y, total, _, buffers = _repeat(step, most, (y, total, memory, buffers), unroll)
    return each(flat, y), total, buffers


def _repeat(step: Callable[[Array, Any], Any], number: Array, carry: Any, unroll: bool) -> Any:
    """Return the carry after steps 0 .. number - 1, of which `unroll` joins several at a time."""

    def several(i: Array, carry: Any) -> Any:
        for j in range(UNROLL):
            carry = step(UNROLL * i + j, carry)
        return carry

    joined = number // UNROLL if unroll else 0
    if unroll:
        carry = jax.lax.fori_loop(0, joined, several, carry)
    return jax.lax.fori_loop(UNROLL * joined, number, step, carry)


def compute_once(never: Array, arrays: Any) -> Any:
    """Return `arrays` unchanged, as the result of a conditional, which is computed once, and first.

    Without it the compiler may recompute a message for each of its uses and round it differently,
    so that a client would store another direction than the one the server sums. And it could not
    tell that all products with a layer come before the layer's update in place, and would copy the
    model at each local step. `never` is false, which the compiler does not know.
    """
    return jax.lax.cond(
        never, lambda same: jax.tree.map(jnp.zeros_like, same), lambda same: same, arrays
    )


def _clip(most: float, d: Leaves) -> Leaves:
    """Return a direction, scaled down to the norm `most` if its own is larger."""
    norm = jnp.sqrt(sum(jnp.vdot(part, part) for part in d.parts))
    return d * jnp.where(norm > most, most / norm, 1)


def _split_layers(spec: Spec, value: Array) -> Any:
    """Split a flat vector into layers; a number is returned unchanged."""
    return value if jnp.ndim(value) == 0 else Leaves(spec.layout.leaves(value))


def gradient_at_x(
    spec: Spec, federation: Federation, x: Array, work: Work, buffers: Any = None
) -> Array:
    """Return the client's gradient at x over all its data, flat, with noise of its own."""
    key = jax.random.fold_in(_typed_key(work.key), AT_X) if spec.functions.random else None
    batch = _full_batch(spec, federation, work.client)
    g = flat(Leaves(gradient(spec, spec.layout.leaves(x), *batch, key=key, buffers=buffers)[0]))
    if federation.noise is None:
        return g
    return g + _noise(spec, federation, work, x.dtype)[spec.noise_steps]


def _renew_memory(
    spec: Spec, federation: Federation, x: Array, memory: Any, work: Work, buffers: Any
) -> Any:
    """Return the memory before the local steps, renewed if the `refresh` policy says so."""
    new = spec.algorithm.renew(memory, gradient_at_x(spec, federation, x, work, buffers))  # type: ignore[misc]
    return jax.tree.map(lambda renewed, old: jnp.where(work.returns, renewed, old), new, memory)


def _sum_of_step_sizes(spec: Spec, lr: Array, work: Work, dtype: Any) -> Array:
    """Return the sum of the client's step sizes."""
    if spec.scheduled:
        return jnp.sum(jnp.where(jnp.arange(len(lr)) < work.steps, lr, 0))
    return work.steps.astype(dtype) * lr


def _compress_message(
    spec: Spec, told: Any, errors: Any, work: Work, message: Any
) -> tuple[Any, Any]:
    """Compress the message; return it as decoded by both sides, and the new error feedback.

    Fields that are sent as a difference from a reference known to both sides need no error
    feedback: what compression leaves out is part of the next difference, and storing it as well
    would count it twice.
    """
    assert spec.compressor is not None
    keys = jax.random.split(jax.random.fold_in(work.key, 1), len(spec.sent))
    seen, left, references = {}, {}, dict(spec.algorithm.references)
    for key, name in zip(keys, spec.sent, strict=True):
        value = getattr(message, name)
        if name in references:
            known = references[name](told)
            seen[name] = known + spec.compressor.decoded(value - known, key)
        else:
            value = value + errors[name]
            seen[name] = spec.compressor.decoded(value, key)
            left[name] = value - seen[name]
    return message._replace(**seen), left or None


def gradient(
    spec: Spec,
    y: list[Any],
    batch: Any,
    weights: Array,
    sizes: tuple[int, ...] = (),
    key: Array = None,
    buffers: Any = None,
    train: bool = True,
) -> tuple[list[Any], Any]:
    """Return the gradient on a batch as a list of leaves, and the new buffers.

    `weights` is None for a batch without padding.
    """
    params = spec.layout.tree(y)
    found = slope_on_batch(
        spec.functions, spec.kinds, params, batch, weights, sizes, key, buffers, train
    )
    slope, buffers = found if spec.functions.stateful else (found, None)
    return jax.tree.leaves(slope), buffers


def _private_gradient(
    spec: Spec,
    federation: Federation,
    y: list[Any],
    work: Work,
    k: Array,
    batch: Batch,
    key: Array | None,
) -> list[Any]:
    """Return the private gradient of local step k as a list of leaves.

    Its noise has a stream of its own for each client, round and step.
    """
    assert spec.privacy is not None
    params = spec.layout.tree(y)
    stream = jax.random.fold_in(jax.random.fold_in(_typed_key(work.key), PRIVACY), k)
    noise = spec.layout.leaves(gaussian_noise(stream, spec.layout.size, y[0].dtype))

    def gradients(records: Any, places: Array) -> list[Any]:
        return jax.tree.leaves(record_gradients(spec.functions, params, records, places, key))

    records, weights, _ = batch
    count = federation.counts[work.client]
    return list(private_gradient(spec.privacy, gradients, records, weights, count, noise))


def _typed_key(key: Array) -> Array:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _optimizer_step(spec: Spec, y: Any, d: Any, memory: Any) -> tuple[Any, Any]:
    """Return y and the memory of the local optimizer after its step along d."""
    if isinstance(y, tuple):  # two models, each with an optimizer of its own
        new = [_optimizer_step(spec, *parts) for parts in zip(y, d, memory, strict=True)]
        return type(y)(*(one for one, _ in new)), type(y)(*(state for _, state in new))
    updates, memory = spec.optimizer.update(d, memory, y)
    return jax.tree.map(jnp.add, y, updates), memory


def _full_batch(spec: Spec, federation: Federation, client: Array) -> Batch:
    """Return all records of a client, padded to the largest client if sizes differ."""
    first, count = federation.first[client], federation.counts[client]
    place = jnp.arange(spec.max_rows)
    batch = _rows(federation, first + jnp.minimum(place, count - 1))
    if not spec.ragged_clients:
        return batch, None, ()
    weights = jnp.where(place < count, 1 / count.astype(federation.weights.dtype), 0)
    return batch, weights, spec.client_sizes


def _rows(federation: Federation, rows: Array) -> Any:
    return jax.tree.map(lambda a: take_rows(a, rows), federation.records)


def _noise(spec: Spec, federation: Federation, work: Work, dtype: Any) -> Array:
    """Return the gradient noise of all local steps, and in the last row that at x."""
    z = normals(work.key, (spec.noise_steps + 1, spec.layout.size), dtype)
    factor = federation.noise
    return z * factor if factor.ndim == 0 else z @ factor[work.client if len(factor) > 1 else 0]

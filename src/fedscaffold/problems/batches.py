"""Evaluation of functions of (params, batch) on records, for three kinds of functions.

mean       Its value on a batch is the mean of its values on the single records. Records can be
           evaluated in any grouping, so a batch may be padded with records of weight zero.
weighted   It takes `weights` by name: one number for each record, summing to 1, zero for padding.
coupled    Anything else: Cox, contrastive losses, batch normalisation, AUC. It is only ever called
           with real batches of real records, so every batch size that occurs has a branch of its
           own in the program.

A function may also take by name

key        A random key in training, None where the function is measured. What it draws with a key
           depends on the batch's shape, so its gradient has a kind of its own, found with the key
           held fixed.
state      Arrays that gradients do not train, such as running statistics. A loss (or gradient) that
           takes them returns a pair: its value and the new state. It is called with real batches
           only, as it may compute statistics of them.
train      True in training, False where it is measured: running statistics are used instead of the
           batch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.checks import InputError, one_number, taken_by_name
from fedscaffold.model_functions import bound, even_weights, measured, new_state
from fedscaffold.problems.convolutions import CACHED, divisor_near
from fedscaffold.problems.rewriting import as_products, largest_result, patch_bytes

__all__ = [
    "Functions",
    "Kind",
    "Kinds",
    "bound",
    "call",
    "gradient",
    "measured",
    "no_loss",
    "record_gradients",
    "record_values",
    "value",
    "work_bytes",
]

Tree: TypeAlias = Any
Array: TypeAlias = Any
Kind: TypeAlias = Literal["mean", "weighted", "coupled"]
NO_LOSS = (
    "{} has an oracle but no loss: watch 'distance' or 'grad_norm' instead of 'loss' and 'gap'"
)


def no_loss(params: Tree, batch: Tree) -> Any:
    """Loss of a problem that has only an oracle; raises an InputError."""
    raise InputError(NO_LOSS.format("this problem"))


class Functions(NamedTuple):
    """The functions of a problem, without its data; static in compiled programs."""

    loss: Callable[..., Any]
    """(params, batch) -> the batch's loss; may take `weights`."""
    accuracy: Callable[..., Any] | None = None
    """(params, batch) -> share of the batch's records predicted right, or another score; may take
    `weights`."""
    gradient: Callable[..., Tree] | None = None
    """(params, batch) -> descent direction of the clients; None for the gradient of the loss."""

    @property
    def has_loss(self) -> bool:
        """Whether the problem has a loss."""
        return self.loss is not no_loss

    @property
    def random(self) -> bool:
        """Whether the gradient takes a random key."""
        return "key" in taken_by_name(self.gradient or self.loss)

    @property
    def stateful(self) -> bool:
        """Whether the gradient takes a state and returns a new one."""
        return "state" in taken_by_name(self.gradient or self.loss)


class Kinds(NamedTuple):
    """The kind of each of a problem's functions."""

    loss: Kind = "mean"
    accuracy: Kind = "mean"
    gradient: Kind = "mean"
    """Kind of the gradient: that of the loss, unless a gradient is given."""


def call(function: Callable[..., Any], kind: Kind, params: Tree, batch: Tree) -> Any:
    """Return a function's value on a batch without padding."""
    if kind != "weighted":
        return function(params, batch)
    return function(params, batch, weights=even_weights(params, batch))


def record_values(function: Callable[[Tree, Tree], Any], params: Tree, batch: Tree) -> Any:
    """Return a function's value on each record, as batches of one."""
    return jax.vmap(function, in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))


def value(
    function: Callable[..., Any],
    kind: Kind,
    params: Tree,
    batch: Tree,
    weights: Array | None,
    state: Tree = None,
) -> Array:
    """Return a function's value on a batch where it is measured; padding has weight 0.

    `weights` is None for a batch without padding, as it must be for a coupled function.
    """
    function = measured(function, state)
    if weights is None:
        return as_products(partial(call, function, kind))(params, batch)
    if kind == "mean":
        return weights @ as_products(partial(record_values, function))(params, batch)
    assert kind == "weighted", "a coupled function is evaluated on real batches only"
    return as_products(function)(params, batch, weights=weights)


def gradient(
    functions: Functions,
    kinds: Kinds,
    params: Tree,
    batch: Tree,
    weights: Array | None,
    sizes: Sequence[int] = (),
    key: Array | None = None,
    state: Tree = None,
    train: bool = True,
) -> Tree:
    """Return a client's gradient on a batch, which may be padded with records of weight 0.

    Args:
        functions: The problem's functions.
        kinds: Their kinds.
        params: The model.
        batch: Records, the real ones first.
        weights: Record weights, 0 for padding; None for a batch without padding.
        sizes: Numbers of records, ascending, for which there is a branch each; a batch is cut to
            the least that holds its real records. A coupled function needs all that occur.
        key: A random key for a function that takes one.
        state: The state of a function that takes one.
        train: Whether it is a step of training; False where the gradient is measured.

    Returns:
        A pytree like `params`; for functions with a state, a pair of it and the new state.
    """
    slope = _slope(functions, key, state, train)
    plain = functions.gradient is None and not functions.random and not functions.stateful
    if weights is None and kinds.gradient == "mean" and plain:
        size = _records_at_once(bound(functions.loss, train=train), params, batch)
        if size is not None:
            return jax.lax.platform_dependent(
                params, batch, cpu=partial(_in_parts, slope, size), default=slope
            )

    def on_padded(params: Tree, batch: Tree, weights: Array) -> Tree:
        if kinds.gradient == "weighted":
            return slope(params, batch, weights=weights)
        if kinds.gradient == "coupled":  # not padded any more: there is a branch for its size
            return slope(params, batch)
        if (
            functions.gradient is None
        ):  # one backward pass: those of all records hold d numbers each
            loss = bound(functions.loss, key, state, train)
            return jax.grad(lambda p: weights @ record_values(loss, p, batch))(params)
        each = record_values(slope, params, batch)
        return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), each)

    def on_batch(params: Tree, batch: Tree, weights: Array | None) -> Tree:
        if weights is None:
            return call(slope, kinds.gradient, params, batch)
        if sizes:
            return _by_size(partial(on_padded, params), batch, weights, sizes)
        return on_padded(params, batch, weights)

    return as_products(on_batch)(params, batch, weights)


def _records_at_once(loss: Callable[..., Any], params: Tree, batch: Tree) -> int | None:
    """Return how many records of a batch to take at a time; None for all of them.

    Networks for pictures compute arrays that are much larger than their model. If one of them is
    larger than a cache, every operation waits for memory, and the gradient is taken faster on a few
    records at a time. It is not if the model is as large, which is read and written for each part.
    """
    rows = len(jax.tree.leaves(batch)[0])
    largest = largest_result(loss, params, batch)
    if largest is None or largest <= CACHED:
        return None
    size = divisor_near(rows, max(1, CACHED * rows // largest))
    model = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return size if rows % size == 0 and rows // size * model <= largest else None


def _in_parts(slope: Callable[..., Tree], size: int, params: Tree, batch: Tree) -> Tree:
    """Return the gradient on a batch as the mean of those on parts of `size` records."""
    parts = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), batch)
    number = len(jax.tree.leaves(parts)[0])

    def add(total: Tree, part: Tree) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, as_products(slope)(params, part)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda a: a / number, total)


def record_gradients(
    functions: Functions, params: Tree, batch: Tree, places: Array, key: Array | None = None
) -> Tree:
    """Return the gradient on each record, as batches of one: one row per record in each leaf.

    Args:
        functions: The problem's functions, without a state.
        params: The model.
        batch: Records.
        places: Their places in the batch, each of which has randomness of its own.
        key: A random key for a function that takes one.
    """

    def one(params: Tree, record: Tree, place: Array) -> Tree:
        own = None if key is None else jax.random.fold_in(key, place)
        return _slope(functions, own, None, train=True)(
            params, jax.tree.map(lambda a: a[None], record)
        )

    return as_products(jax.vmap(one, in_axes=(None, 0, 0)))(params, batch, places)


def _slope(
    functions: Functions, key: Array | None, state: Tree, train: bool
) -> Callable[..., Tree]:
    """Return (params, batch) -> the gradient, and with a state the pair of it and the new state."""
    if functions.gradient is not None:
        given = bound(functions.gradient, key, state, train)
        if not functions.stateful:
            return given
        return lambda *batch, **by_name: new_state("gradient", given(*batch, **by_name), state)
    of_batch = bound(functions.loss, key, state, train)

    def loss(params: Tree, batch: Tree, **by_name: Array) -> Any:
        result = of_batch(params, batch, **by_name)
        number, new = new_state("loss", result, state) if functions.stateful else (result, None)
        one_number("loss(params, batch)", number)
        return (number, new) if functions.stateful else number

    return jax.grad(loss, has_aux=functions.stateful)


@lru_cache(maxsize=64)
def work_bytes(
    functions: Functions, kinds: Kinds, tree: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]
) -> int:
    """Return the bytes that the patches of convolutions take in a gradient on a batch.

    0 without convolutions.

    `tree` and `shapes` are the structure and the leaves of (params, batch, state), so that runs of
    one problem trace it once.
    """
    key = jax.random.key(0) if functions.random else None

    def on_batch(params: Tree, batch: Tree, state: Tree) -> Any:
        return call(
            bound(functions.gradient or functions.loss, key, state, train=True),
            kinds.gradient,
            params,
            batch,
        )

    return patch_bytes(on_batch, *jax.tree.unflatten(tree, shapes))


def _by_size(
    evaluate: Callable[[Tree, Array], Tree], batch: Tree, weights: Array, sizes: Sequence[int]
) -> Tree:
    """Evaluate on the first records of a padded batch, with one branch per size."""

    def branch(size: int) -> Callable[[Any], Tree]:
        return lambda padded: evaluate(*jax.tree.map(lambda a: a[:size], padded))

    place = jnp.searchsorted(jnp.array(sizes), jnp.count_nonzero(weights))
    return jax.lax.switch(place, [branch(size) for size in sizes], (batch, weights))

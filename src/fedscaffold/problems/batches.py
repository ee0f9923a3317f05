"""How a function of (params, batch) is evaluated on records: the three kinds of functions that users bring.

mean       Its value on a batch is the mean of its values on the single records. Records can be evaluated in any
           grouping, so a batch may be padded with records of weight zero.
weighted   It takes `weights` by name: one number for each record, summing to 1, zero for padding.
coupled    Anything else: Cox, contrastive losses, batch normalisation, AUC. It is only ever called with real
           batches of real records, so every batch size that occurs has a branch of its own in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.checks import InputError, one_number

__all__ = ["Functions", "Kind", "Kinds", "call", "gradient", "no_loss", "record_values", "value"]

Tree: TypeAlias = Any
Array: TypeAlias = Any
Kind: TypeAlias = Literal["mean", "weighted", "coupled"]
NO_LOSS = "{} has an oracle but no loss: watch 'distance' or 'grad_norm' instead of 'loss' and 'gap'"


def no_loss(params: Tree, batch: Tree) -> Any:
    """The loss of a problem that has only an oracle: whoever asks for it is told so."""
    raise InputError(NO_LOSS.format("this problem"))


class Functions(NamedTuple):
    """The problem's mathematics, apart from its data: what a compiled program depends on."""

    loss: Callable[..., Any]
    """(params, batch) -> the batch's loss; may take `weights`."""
    accuracy: Callable[..., Any] | None = None
    """(params, batch) -> share of the batch's records predicted right, or another score; may take `weights`."""
    gradient: Callable[..., Tree] | None = None
    """(params, batch) -> what the clients descend along; the gradient of the loss unless given."""

    @property
    def has_loss(self) -> bool:
        """Whether the oracle is the gradient of anything."""
        return self.loss is not no_loss


class Kinds(NamedTuple):
    """The kind of each of a problem's functions."""

    loss: Kind = "mean"
    accuracy: Kind = "mean"
    gradient: Kind = "mean"
    """Of what the clients descend along: that of the loss, unless a gradient is given."""


def call(function: Callable[..., Any], kind: Kind, params: Tree, batch: Tree) -> Any:
    """A function's value on a real batch."""
    if kind != "weighted":
        return function(params, batch)
    leaf = jax.tree.leaves(batch)[0]
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return function(params, batch, weights=jnp.full(len(leaf), 1 / len(leaf), dtype))


def record_values(function: Callable[[Tree, Tree], Any], params: Tree, batch: Tree) -> Any:
    """A function's value on every record alone: on batches of one."""
    return jax.vmap(function, in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))


def value(function: Callable[..., Any], kind: Kind, params: Tree, batch: Tree, weights: Array | None) -> Array:
    """A function's value on a batch, or on one padded with records of weight zero.

    A coupled function must be given a real batch, and `weights` None.
    """
    if weights is None:
        return call(function, kind, params, batch)
    if kind == "mean":
        return weights @ record_values(function, params, batch)
    assert kind == "weighted", "a coupled function is evaluated on real batches only"
    return function(params, batch, weights=weights)


def gradient(
    functions: Functions,
    kinds: Kinds,
    params: Tree,
    batch: Tree,
    weights: Array | None,
    sizes: Sequence[int] = (),
) -> Tree:
    """What a client descends along on a batch, which may be padded with records of weight zero.

    Args:
        functions: the problem's functions.
        kinds: their kinds.
        params: the model.
        batch: records, the real ones first.
        weights: of the records, zero for padding; None for a batch without padding.
        sizes: for a coupled function, the numbers of real records that may occur, in rising order.

    Returns:
        A tree like `params`.
    """
    given = functions.gradient

    def loss(params: Tree, batch: Tree, **by_name: Array) -> Any:
        result = functions.loss(params, batch, **by_name)
        one_number("loss(params, batch)", jnp.shape(result))
        return result

    slope = given or jax.grad(loss)
    if weights is None:
        return call(slope, kinds.gradient, params, batch)
    if kinds.gradient == "weighted":
        return slope(params, batch, weights=weights)
    if kinds.gradient == "coupled":
        return _on_real_records(partial(slope, params), batch, weights, sizes)
    if given is None:  # one backward pass: the gradients of all records would hold d numbers each
        return jax.grad(lambda p: weights @ record_values(loss, p, batch))(params)
    each = record_values(given, params, batch)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), each)


def _on_real_records(evaluate: Callable[[Tree], Tree], batch: Tree, weights: Array, sizes: Sequence[int]) -> Tree:
    """Evaluate on the records of a padded batch that are real, of which there are as many as one of `sizes`."""

    def branch(size: int) -> Callable[[Tree], Tree]:
        return lambda batch: evaluate(jax.tree.map(lambda a: a[:size], batch))

    place = jnp.searchsorted(jnp.array(sizes), jnp.count_nonzero(weights))
    return jax.lax.switch(place, [branch(size) for size in sizes], batch)

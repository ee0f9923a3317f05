"""Evaluation of functions of (params, batch) on records, for three kinds of functions.

mean       Its value on a batch is the mean of its values on the single records. Records can be evaluated in any
           grouping, so a batch may be padded with records of weight zero.
weighted   It takes `weights` by name: one number for each record, summing to 1, zero for padding.
coupled    Anything else: Cox, contrastive losses, batch normalisation, AUC. It is only ever called with real
           batches of real records, so every batch size that occurs has a branch of its own in the program.

A function may also take `key` by name: a random key in training, None where it is measured. What it draws with a key
depends on the batch's shape, so its gradient has a kind of its own, found with the key held fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.checks import InputError, one_number, takes_key

__all__ = ["Functions", "Kind", "Kinds", "call", "gradient", "keyed", "no_loss", "record_values", "value"]

Tree: TypeAlias = Any
Array: TypeAlias = Any
Kind: TypeAlias = Literal["mean", "weighted", "coupled"]
NO_LOSS = "{} has an oracle but no loss: watch 'distance' or 'grad_norm' instead of 'loss' and 'gap'"


def no_loss(params: Tree, batch: Tree) -> Any:
    """Loss of a problem that has only an oracle; raises an InputError."""
    raise InputError(NO_LOSS.format("this problem"))


class Functions(NamedTuple):
    """The functions of a problem, without its data; static in compiled programs."""

    loss: Callable[..., Any]
    """(params, batch) -> the batch's loss; may take `weights`."""
    accuracy: Callable[..., Any] | None = None
    """(params, batch) -> share of the batch's records predicted right, or another score; may take `weights`."""
    gradient: Callable[..., Tree] | None = None
    """(params, batch) -> descent direction of the clients; None for the gradient of the loss."""

    @property
    def has_loss(self) -> bool:
        """Whether the problem has a loss."""
        return self.loss is not no_loss

    @property
    def random(self) -> bool:
        """Whether the gradient takes a random key."""
        return takes_key(self.gradient or self.loss)


class Kinds(NamedTuple):
    """The kind of each of a problem's functions."""

    loss: Kind = "mean"
    accuracy: Kind = "mean"
    gradient: Kind = "mean"
    """Kind of the gradient: that of the loss, unless a gradient is given."""


def keyed(function: Callable[..., Any], key: Array | None) -> Callable[..., Any]:
    """Bind the random key of a function that takes one; None means evaluation without randomness."""
    if not takes_key(function):
        return function

    def fixed(params: Tree, batch: Tree, **by_name: Array) -> Any:
        return function(params, batch, key=key, **by_name)

    return fixed


def call(function: Callable[..., Any], kind: Kind, params: Tree, batch: Tree, key: Array | None = None) -> Any:
    """Return a function's value on a batch without padding."""
    function = keyed(function, key)
    if kind != "weighted":
        return function(params, batch)
    leaf = jax.tree.leaves(batch)[0]
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return function(params, batch, weights=jnp.full(len(leaf), 1 / len(leaf), dtype))


def record_values(function: Callable[[Tree, Tree], Any], params: Tree, batch: Tree) -> Any:
    """Return a function's value on each record, as batches of one."""
    return jax.vmap(function, in_axes=(None, 0))(params, jax.tree.map(lambda a: a[:, None], batch))


def value(function: Callable[..., Any], kind: Kind, params: Tree, batch: Tree, weights: Array | None) -> Array:
    """Return a function's value on a batch, without randomness; padding has weight 0.

    `weights` is None for a batch without padding, as it must be for a coupled function.
    """
    function = keyed(function, None)
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
    key: Array | None = None,
) -> Tree:
    """Return a client's gradient on a batch, which may be padded with records of weight 0.

    Args:
        functions: The problem's functions.
        kinds: Their kinds.
        params: The model.
        batch: Records, the real ones first.
        weights: Record weights, 0 for padding; None for a batch without padding.
        sizes: For a coupled function, the possible numbers of real records in ascending order.
        key: A random key for a function that takes one.

    Returns:
        A pytree like `params`.
    """
    given = None if functions.gradient is None else keyed(functions.gradient, key)
    of_batch = keyed(functions.loss, key)

    def loss(params: Tree, batch: Tree, **by_name: Array) -> Any:
        result = of_batch(params, batch, **by_name)
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
    """Evaluate on the real records of a padded batch, with one branch per size."""

    def branch(size: int) -> Callable[[Tree], Tree]:
        return lambda batch: evaluate(jax.tree.map(lambda a: a[:size], batch))

    place = jnp.searchsorted(jnp.array(sizes), jnp.count_nonzero(weights))
    return jax.lax.switch(place, [branch(size) for size in sizes], batch)

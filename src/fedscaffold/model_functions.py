"""Losses and metrics as users write them: functions of (params, batch) in JAX.

They may take `weights`, `key`, `state` and `train` by name (`checks.taken_by_name`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.checks import InputError, shown, taken_by_name

__all__ = ["bound", "even_weights", "measured", "new_state", "refuse_state"]

Tree: TypeAlias = Any
Array: TypeAlias = Any


def bound(
    function: Callable[..., Any], key: Array | None = None, state: Tree = None, train: bool = False
) -> Callable[..., Any]:
    """Bind what a function takes by name, apart from `weights`.

    A key of None means without randomness.
    """
    given, names = {"key": key, "state": state, "train": train}, taken_by_name(function)
    taken = {name: value for name, value in given.items() if name in names}
    return partial(function, **taken) if taken else function


def measured(function: Callable[..., Any], state: Tree = None) -> Callable[..., Any]:
    """Return (params, batch) -> the value of a function where it is measured.

    Without randomness, not in training.

    >>> def loss(params, batch, state, train):
    ...     return (1.0 if train else state), state
    >>> measured(loss, state=3.0)(None, None)
    3.0
    """
    at_rest = bound(function, state=state)
    if "state" not in taken_by_name(function):
        return at_rest

    def value_alone(params: Tree, batch: Tree, **by_name: Array) -> Any:
        result = at_rest(params, batch, **by_name)
        return result[0] if isinstance(result, tuple) else result

    return value_alone


def even_weights(params: Tree, batch: Tree) -> Array:
    """Return the weights of a batch without padding: 1 / n for each of its n records."""
    number = len(jax.tree.leaves(batch)[0])
    return jnp.full(number, 1 / number, jnp.result_type(*jax.tree.leaves(params)))


def new_state(name: str, result: Any, state: Tree) -> tuple[Any, Tree]:
    """Check the pair (value, new state) that a function with a state returns.

    The state keeps its types.
    """
    wanted = (
        f"{name} takes a state, so it must return a pair: its value, and a new state like the "
        "old one"
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"{wanted}; got {shown(result)}")
    value, new = result
    was, now = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (state, new))
    structure: Any = jax.tree.structure(state)
    if jax.tree.structure(new) != structure or was != now:
        raise InputError(f"{wanted}; it had arrays of shapes {was}, got {now}")
    return value, jax.tree.map(lambda a, b: jnp.asarray(a, jnp.asarray(b).dtype), new, state)


def refuse_state(
    functions: Mapping[str, Callable[..., Any]], stateful: bool, state: Tree, owner: str
) -> None:
    """Raise if functions and a state do not fit.

    Args:
        functions: The functions, by name.
        stateful: Whether the function that is trained takes a state.
        state: The state, a pytree of NumPy arrays, or None.
        owner: What they were given to, such as "Problem".
    """
    takers = [name for name, one in functions.items() if "state" in taken_by_name(one, name)]
    if takers and state is None:
        raise InputError(
            f"{takers[0]} takes a state: give the one to begin with, {owner}(..., state=...)"
        )
    if state is not None and not stateful:
        raise InputError(
            "a state needs a loss that takes it by name, loss(params, batch, state), and returns "
            "a pair: its value and the new state"
        )
    for leaf in jax.tree.leaves(state):
        if leaf.dtype.kind not in "biuf":
            raise InputError(f"state must hold numbers only, got an array of {leaf.dtype}")

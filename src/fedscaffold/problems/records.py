"""Conversion of the user's model and client records to arrays, with validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = [
    "counted",
    "is_float",
    "joined",
    "model",
    "reals",
    "refuse_non_finite",
    "tables",
]

Tree: TypeAlias = Any
Table: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


def model(params: Tree) -> Tree:
    """Return the initial model as NumPy arrays.

    All leaves are trained, so they must be floating point.

    >>> model({"w": [0.0, 1.0], "steps": 0})
    Traceback (most recent call last):
    fedscaffold.checks.InputError: params must hold floating-point numbers only, got int64 in
    ['steps']; write 0.0 for 0, and keep what is not trained out of params
    """

    def array(path: Any, leaf: Any) -> NDArray[Any]:
        held = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        if not jnp.issubdtype(held.dtype, jnp.floating):
            kind = type(leaf).__name__ if held.dtype == object else held.dtype
            raise InputError(
                f"params must hold floating-point numbers only, got {kind}{_at(path)}; write 0.0 "
                "for 0, and keep "
                "what is not trained out of params"
            )
        return np.asarray(leaf)

    if not jax.tree.leaves(params):
        raise InputError("params must hold at least one array of floating-point numbers, got none")
    return jax.tree_util.tree_map_with_path(array, params)


def counted(clients: Sequence[Tree]) -> NDArray[np.int64]:
    """Return the number of records of each client."""
    if len(clients) == 0:
        raise InputError("clients must hold at least one client, got an empty list")
    return np.array([_rows(i, client) for i, client in enumerate(clients)], np.int64)


def joined(clients: Sequence[Tree]) -> Tree:
    """Concatenate the records of all clients."""
    if any(hasattr(leaf, "columns") for leaf in jax.tree.leaves(clients[0])):
        _refuse_other_columns(clients)
    try:
        records = jax.tree.map(lambda *arrays: _numbers(np.concatenate(arrays)), *clients)
    except ValueError as error:
        reason = _odd_one(clients) or str(error).splitlines()[0]
        raise InputError(
            f"the clients' arrays must all have the same structure and row shape: {reason}"
        ) from None
    refuse_words("the clients' data", records)
    return records


def tables(clients: Sequence[Any]) -> list[Table]:
    """Return the clients' x (records, features) and y (records,) as arrays, after checking them.

    >>> tables([([[1.0, 2.0]], [1]), ([[3.0]], [0])])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: the clients' arrays must all have the same structure and row
    shape: client 1 holds rows of shape (1,) in [0], client 0 of shape (2,)
    """
    for i, client in enumerate(clients):
        if not isinstance(client, (tuple, list)) or [np.ndim(part) for part in client] != [2, 1]:
            shapes = (
                [np.shape(part) for part in client]
                if isinstance(client, (tuple, list))
                else type(client).__name__
            )
            raise InputError(
                "clients must be a list of (x, y) with x of shape (records, features) and y of "
                "shape (records,), "
                f"got {shapes} of client {i}"
            )
    pairs = [(_numbers(np.asarray(x)), _numbers(np.asarray(y))) for x, y in clients]
    counted(pairs)
    if any(hasattr(x, "columns") for x, _ in clients):
        _refuse_other_columns([(x,) for x, _ in clients])
    odd = _odd_one(pairs)
    if odd is not None:
        raise InputError(
            f"the clients' arrays must all have the same structure and row shape: {odd}"
        )
    for i, pair in enumerate(pairs):
        refuse_words(f"the data of client {i}", pair)
    return pairs


def reals(name: str, given: ArrayLike) -> NDArray[Any]:
    """Convert numbers to a float64 array; raise InputError for text, bools and ragged rows.

    >>> reals("weights", [1, 2])
    array([1., 2.])
    """
    try:
        array = np.asarray(given)
        if array.dtype.kind in "iufO":
            return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):  # refused below
        pass
    raise InputError(f"{name} must be numbers, got {checks.shown(given)}")


def is_float(array: NDArray[Any]) -> bool:
    """Return whether an array is of floating point."""
    return bool(np.issubdtype(array.dtype, np.floating))


def refuse_non_finite(what: str, tree: Tree) -> None:
    """Raise an InputError if a leaf has NaN or infinite values."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_float(leaf) and not np.isfinite(leaf).all():
            bad = int((~np.isfinite(leaf)).sum())
            raise InputError(f"{what} must be finite, got {bad} NaN or infinite values{_at(path)}")


def refuse_words(what: str, tree: Tree) -> None:
    """Raise an InputError if a leaf holds text, dates or objects instead of numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.dtype.kind in "OUSTMm":
            words = (
                value for value in leaf.ravel().tolist() if not isinstance(value, (int, float))
            )
            sample = repr(next(words, "objects"))
            raise InputError(
                f"{what} must be numbers, got {sample[:40]}{_at(path)}; encode what is not a "
                "number, or leave it out"
            )


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Convert an object array of numbers, as pandas returns for mixed columns, to a numeric one."""
    if array.dtype == object:
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError):  # refused later, with a sample
            return array
    return array


def _rows(i: int, client: Tree) -> int:
    leaves = jax.tree.leaves(client)
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise InputError(
            f"client {i} must hold arrays with one row per record, got {type(client).__name__} "
            "without rows"
        )
    rows = {len(leaf) for leaf in leaves}
    if len(rows) > 1:
        raise InputError(
            f"the arrays of client {i} must have one row per record each, got lengths "
            f"{sorted(rows)}"
        )
    if rows == {0}:
        raise InputError(
            f"client {i} holds no records; every client needs at least one, so leave it out"
        )
    return rows.pop()


def _odd_one(clients: Sequence[Tree]) -> str | None:
    """Describe the first client whose rows are not shaped like those of client 0.

    None if all are.
    """
    first = _shapes(clients[0])
    for i, client in enumerate(clients):
        here = _shapes(client)
        for name in {**first, **here}:
            if name not in here:
                return f"client {i} lacks {name}, which client 0 has"
            if name not in first:
                return f"client {i} has {name}, which client 0 lacks"
            if here[name] != first[name]:
                where = name and f" in {name}"
                rows = f"rows of shape {here[name]}{where}"
                return f"client {i} holds {rows}, client 0 of shape {first[name]}"
    return None


def _shapes(client: Tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(client)
    return {jax.tree_util.keystr(path): np.shape(leaf)[1:] for path, leaf in leaves}


def _refuse_other_columns(clients: Sequence[Tree]) -> None:
    """Raise an InputError if tables do not have the columns of client 0, in its order."""
    first: list[Any] = []
    for i, client in enumerate(clients):
        names = [list(getattr(leaf, "columns", ())) for leaf in jax.tree.leaves(client)]
        first = first or names
        if names != first:
            here, there = next((a, b) for a, b in zip(names, first, strict=True) if a != b)
            raise InputError(
                f"client {i} has the columns {here}, client 0 has {there}; give all the same, in "
                "the same order: "
                "frame[names]"
            )


def _at(path: Any) -> str:
    where = jax.tree_util.keystr(path)
    return f" in {where}" if where else ""

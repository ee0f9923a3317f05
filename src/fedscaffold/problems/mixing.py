"""Detect functions that couple records, by abstract interpretation of their jaxpr.

Values at a few points cannot reveal a coupling that is inactive there, such as one far from the
start or for a rare record. The jaxpr does. Every value in it has one of the labels

    None       computed without records
    an axis    along which it has one entry for each record, computed from that record alone
    SUM        linear in sums over records: what a mean may become
    MIXED      anything else of several records: a maximum, a sorted batch, a product of two sums
    UNKNOWN    the result of an operation that is not analysed

Only a MIXED result is conclusive; the rest is left to the numerical comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr

__all__ = ["mixes_records"]

Tree: TypeAlias = Any
Label: TypeAlias = int | str | None
SUM, MIXED, UNKNOWN = "sum", "mixed", "unknown"
MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "neg",
    "reshape",
    "squeeze",
}
MOVES |= {
    "reduce_sum",
    "reduce_precision",
    "stop_gradient",
    "transpose",
    "slice",
    "optimization_barrier",
}
ADDS = {"add", "add_any", "sub", "concatenate"}
CUMULATIVE = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}


def mixes_records(traced: ClosedJaxpr, batch: Tree) -> bool:
    """Return whether a function certainly depends on records other than by sums over single ones.

    Args:
        traced: The jaxpr of `function(params, batch)`.
        batch: The batch it was traced with.

    >>> import jax.numpy as jnp
    >>> w, x = jnp.ones(()), jnp.ones(5)
    >>> mixes_records(jax.make_jaxpr(lambda w, x: jnp.mean((x - w) ** 2))(w, x), x)
    False
    >>> rarely = lambda w, x: jnp.where(w > 9, jnp.var(w * x), jnp.mean(w * x))
    >>> mixes_records(jax.make_jaxpr(rarely)(w, x), x)
    True
    """
    leaves = jax.tree.leaves(batch)
    if len(leaves[0]) == 1:
        return False
    without: list[Label] = [None] * (len(traced.jaxpr.invars) - len(leaves))
    return MIXED in _follow(traced.jaxpr, [*without, *[0 for _ in leaves]])


def _follow(jaxpr: Any, labels: Sequence[Label]) -> list[Label]:
    """Return the labels of a jaxpr's results, from those of its arguments."""
    known: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))

    def label(atom: Any) -> Label:
        return (
            None if hasattr(atom, "val") else known.get(atom)
        )  # literals and constants are no records

    for equation in jaxpr.eqns:
        found = _result(equation, [label(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [label(atom) for atom in jaxpr.outvars]


def _result(equation: Any, labels: list[Label]) -> list[Label]:
    number = len(equation.outvars)
    if all(one is None for one in labels):
        return [None] * number
    name = equation.primitive.name
    inner = next(
        (equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None
    )
    if name == "cond":
        return _branches(equation, labels)
    if inner is not None and name not in ("scan", "while"):
        program = getattr(inner, "jaxpr", inner)
        if len(program.invars) == len(labels) and len(program.outvars) == number:
            return _follow(program, labels)
    if MIXED in labels:
        return [MIXED] * number
    if UNKNOWN in labels or name in ("scan", "while"):
        return [UNKNOWN] * number
    if SUM in labels:
        return [_of_sums(name, labels)] * number
    return [_of_records(equation, name, labels, out) for out in equation.outvars]


def _branches(equation: Any, labels: list[Label]) -> list[Label]:
    """Return the labels of a conditional.

    Mixed if a branch is, or if the predicate depends on several records.
    """
    if labels[0] is not None:
        return [MIXED if labels[0] in (SUM, MIXED) else UNKNOWN] * len(equation.outvars)
    ways = [_follow(branch.jaxpr, labels[1:]) for branch in equation.params["branches"]]
    return [
        MIXED if MIXED in ends else ends[0] if len(set(ends)) == 1 else UNKNOWN
        for ends in zip(*ways, strict=True)
    ]


def _of_sums(name: str, labels: list[Label]) -> Label:
    """Return the label of an operation on sums.

    A sum if it is linear and its other operands contain no records.
    """
    if any(one not in (SUM, None) for one in labels):
        return MIXED
    linear = name in MOVES | ADDS or (name in ("mul", "dot_general") and labels.count(SUM) == 1)
    linear |= name in ("div", "select_n") and labels[-1 if name == "div" else 0] is None
    return SUM if linear else MIXED


def _of_records(equation: Any, name: str, labels: list[Label], out: Any) -> Label:
    """Return the label of an operation on values with one entry per record."""
    axes = {one for one in labels if isinstance(one, int)}
    params, operand = equation.params, equation.invars[0].aval
    if name == "dot_general":
        return _product(
            params["dimension_numbers"], labels, [len(atom.aval.shape) for atom in equation.invars]
        )
    if len(axes) > 1:  # records along one axis meet records along another
        ranks = {len(atom.aval.shape) for atom in equation.invars} - {0}
        return MIXED if ranks == {len(out.aval.shape)} else UNKNOWN
    (axis,) = axes
    moved = _moved(name, params, operand.shape, out.aval.shape, axis)
    if moved is not None:
        return moved
    along = params.get("axis", params.get("dimension"))
    if (name in CUMULATIVE or name == "sort") and along == axis:
        return MIXED
    shapes = [
        atom.aval.shape
        for atom, one in zip(equation.invars, labels, strict=True)
        if one is not None
    ]
    kept = len(out.aval.shape) > axis and out.aval.shape[axis] == shapes[0][axis]
    return axis if kept and name != "rev" else UNKNOWN


def _moved(name: str, params: Any, old: Sequence[int], new: Sequence[int], axis: int) -> Label:
    """Return the record axis after an operation that moves or removes axes.

    None for other operations.
    """
    if name == "reshape":
        return _reshaped(old, new, axis)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return int(params["permutation"].index(axis))
    if name == "squeeze":
        return int(axis - sum(one < axis for one in params["dimensions"]))
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        if axis in params["axes"]:
            return SUM if name == "reduce_sum" else MIXED
        return int(axis - sum(one < axis for one in params["axes"]))
    return None


def _reshaped(old: Sequence[int], new: Sequence[int], axis: int) -> Label:
    """Return the record axis after a reshape that preserves it."""
    for place, size in enumerate(new):
        if size == old[axis] and prod(new[:place]) == prod(old[:axis]):
            return place
    return UNKNOWN


def _product(numbers: Any, labels: list[Label], ranks: list[int]) -> Label:
    """Return the label of a dot_general: summed over records, record by record, or mixed."""
    contracted, together = numbers
    places: list[int | tuple[str, int] | None] = []
    for side, label in enumerate(labels):
        if not isinstance(label, int):
            places.append(None)
        elif label in contracted[side]:
            places.append((SUM, list(contracted[side]).index(label)))
        elif label in together[side]:
            places.append(list(together[side]).index(label))
        else:
            used = {*contracted[side], *together[side]}
            free = [axis for axis in range(ranks[side]) if axis not in used]
            before = len(together[0]) + (
                0 if side == 0 else ranks[0] - len(contracted[0]) - len(together[0])
            )
            places.append(before + free.index(label))
    known = {place for place in places if place is not None}
    if len(known) > 1:
        return MIXED
    (place,) = known
    return place if isinstance(place, int) else SUM

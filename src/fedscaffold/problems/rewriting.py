"""Rewriting of traced functions.

On CPUs, convolutions and pooling become slices and matrix products, products over several axes
become products of matrices, those that a scan adds up become one, and matrices that a scan
transposes in each step are transposed once.

The jaxpr of the user's function is copied with every convolution, every pooling window and every
such scan replaced by a call of the rule in `convolutions` or `scans`, also inside loops,
conditionals, `jax.checkpoint` and functions with custom derivatives, which keep their derivatives.
Functions without any are left alone. On accelerators the original runs: which of the two is decided
when the program is lowered for its platform.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.linear_util import wrap_init

from fedscaffold.problems.batch_last import convolution_batch_last, suits_batch_last
from fedscaffold.problems.convolutions import convolution, max_pool, min_pool, sum_pool
from fedscaffold.problems.layouts import is_batch_last, lay_out
from fedscaffold.problems.products import contract_rows, transposed_products
from fedscaffold.problems.scans import (
    adds_up_products,
    contract_after,
    transpose_before,
    transposes,
)

__all__ = ["as_products", "largest_result", "patch_bytes"]

Tree: TypeAlias = Any
Array: TypeAlias = Any
Rule: TypeAlias = Callable[..., Any]

LOG = logging.getLogger("fedscaffold")
SHORT = 64  # entries along the last axes of a sum up to which they are summed apart
SUFFIX = "_as_products"  # of the names of rewritten operations
_told: set[str] = set()


def as_products(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wrap a function so that, on CPUs, its slow operations run as matrix products.

    Args:
        function: Any function of pytrees of arrays that JAX can trace.

    Returns:
        A function with the same values, up to the rounding of sums, that can be transformed as any
        other. A function without operations that have a rule (convolutions, pooling, sums and
        products over several axes, scans that add up products or transpose constants) is left as
        it is.

    >>> import jax.numpy as jnp
    >>> x, kernel = jnp.arange(5.0), jnp.array([1.0, 0.0, -1.0])
    >>> as_products(jnp.convolve)(x, kernel).tolist()
    [0.0, 1.0, 2.0, 2.0, 2.0, -3.0, -4.0]
    """

    def wrapped(*arguments: Tree, **by_name: Tree) -> Tree:
        leaves, tree = jax.tree.flatten((arguments, by_name))

        def of_leaves(*leaves: Array) -> Tree:
            positional, named = jax.tree.unflatten(tree, leaves)
            return function(*positional, **named)

        closed, shape = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        found = jaxpr_as_fun(closed)
        if _has_rules(closed.jaxpr):
            found = partial(
                jax.lax.platform_dependent, cpu=jaxpr_as_fun(_rewrite(closed)), default=found
            )
        return jax.tree.unflatten(jax.tree.structure(shape), found(*leaves))

    return wrapped


def patch_bytes(function: Callable[..., Any], *arguments: Tree) -> int:
    """Return the bytes of all patches and products that the rewritten function holds.

    0 if nothing is rewritten.

    Args:
        function: The function.
        *arguments: Its arguments, or their shapes (`jax.ShapeDtypeStruct`).

    >>> import jax.numpy as jnp
    >>> patch_bytes(lambda w, x: jnp.convolve(x, w, mode="valid").sum(), jnp.ones(3), jnp.ones(10))
    128
    >>> patch_bytes(lambda w, x: jnp.dot(w, x), jnp.ones(3), jnp.ones(3))
    0
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return _bytes_in(_rewrite(closed).jaxpr if _has_rules(closed.jaxpr) else closed.jaxpr)


def _bytes_in(jaxpr: Any, rewritten: bool = False) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if rewritten and equation.primitive.name in ("concatenate", "dot_general", "scan"):
            total += sum(out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
        within = rewritten or str(equation.params.get("name", "")).endswith(SUFFIX)
        total += sum(_bytes_in(inner, within) for inner in _inner(equation))
    return total


def largest_result(function: Callable[..., Any], *arguments: Tree) -> int | None:
    """Return the bytes of the largest array that a function computes; None if it has a loop.

    Args:
        function: The function.
        *arguments: Its arguments, or their shapes (`jax.ShapeDtypeStruct`).

    >>> import jax.numpy as jnp
    >>> largest_result(lambda x: jnp.sum(jnp.outer(x, x)), jnp.ones(10))
    400
    """
    sizes = list(_result_sizes(jax.make_jaxpr(function)(*arguments).jaxpr))
    return None if None in sizes else max(sizes, default=0)  # type: ignore[type-var]


def _result_sizes(jaxpr: Any) -> Iterator[int | None]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "while"):
            yield None
        yield from (out.aval.size * out.aval.dtype.itemsize for out in equation.outvars)
        for inner in _inner(equation):
            yield from _result_sizes(inner)


def _inner(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(one, (Jaxpr, ClosedJaxpr)):
                yield getattr(one, "jaxpr", one)


def _has_rules(jaxpr: Jaxpr) -> bool:
    return any(
        _has_rule(equation) or any(_has_rules(inner) for inner in _inner(equation))
        for equation in jaxpr.eqns
        if not _by_platform(equation)
    )


def _has_rule(equation: Any) -> bool:
    name = equation.primitive.name
    if name == "reduce_sum":
        return bool(_last_axes(equation.invars[0].aval.shape, equation.params["axes"]))
    if name == "dot_general":  # over several axes, with others in both factors, and no batch
        (axes, _), batch = equation.params["dimension_numbers"]
        free = min(atom.aval.ndim for atom in equation.invars) > len(axes)
        return len(axes) > 1 and free and not any(batch)
    if name == "scan":
        return adds_up_products(equation) or transposes(equation)
    return name in _RULES


def _by_platform(equation: Any) -> bool:
    """Return whether an equation chooses between platforms, as rewritten functions do."""
    return equation.params.get("branches_platforms") is not None


def _rewrite(program: Any) -> Any:
    """Return a Jaxpr or ClosedJaxpr with every operation that has a rule replaced."""
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=_rewrite(program.jaxpr))
    program = lay_out(program)
    products = [e for e in program.eqns if e.primitive.name == "dot_general" and _has_rule(e)]
    transposed = transposed_products(products, program.eqns, program.outvars)
    return program.replace(
        eqns=[
            _apply_rule(equation, transposed=True)
            if transposed.intersection(equation.outvars)
            else _rewrite_equation(equation)
            for equation in program.eqns
        ]
    )


def _rewrite_equation(equation: Any) -> Any:
    name = equation.primitive.name
    if _has_rule(equation):
        return _apply_rule(equation)
    if _by_platform(equation) or not any(_has_rules(inner) for inner in _inner(equation)):
        return equation
    params = {key: _rewrite_parameter(value) for key, value in equation.params.items()}
    if name == "custom_jvp_call":
        params["jvp_jaxpr_fun"] = _rewrite_traced(params["jvp_jaxpr_fun"])
    elif name == "custom_vjp_call":
        params["fwd_jaxpr_thunk"] = _rewrite_traced(params["fwd_jaxpr_thunk"])
        params["bwd"] = wrap_init(
            partial(_backward, params["bwd"]), debug_info=params["bwd"].debug_info
        )
    return equation.replace(params=params)


def _rewrite_parameter(value: Any) -> Any:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return _rewrite(value)
    if type(value) in (tuple, list):
        return type(value)(_rewrite_parameter(one) for one in value)
    return value


def _rewrite_traced(thunk: Any) -> Any:
    """Rewrite a custom rule that is traced when a derivative is taken.

    Its result is (jaxpr, constants, ...).
    """

    def traced(*which: bool) -> Any:
        jaxpr, *others = thunk.call_wrapped(*which)
        return (_rewrite(jaxpr), *others)

    return wrap_init(traced, debug_info=thunk.debug_info)


def _backward(rule: Any, *arguments: Any) -> list[Any]:
    """Run a custom backward rule with its convolutions rewritten.

    Its results may be symbolic zeros.
    """
    if not all(isinstance(one, jax.Array) for one in arguments):
        return list(rule.call_wrapped(*arguments))
    zeros: dict[int, Any] = {}

    def arrays(*arguments: Array) -> list[Array]:
        found = list(rule.call_wrapped(*arguments))
        zeros.update({j: one for j, one in enumerate(found) if not isinstance(one, jax.Array)})
        return [one for j, one in enumerate(found) if j not in zeros]

    closed = jax.make_jaxpr(arrays)(*arguments)
    found = jaxpr_as_fun(_rewrite(closed))(*arguments)
    for j, zero in sorted(zeros.items()):
        found.insert(j, zero)
    return list(found)


def _apply_rule(equation: Any, **more: Any) -> Any:
    """Replace an equation by a call of its rule, with `more` arguments.

    Keep it, and say so once, if the rule does not apply.
    """
    name, params = equation.primitive.name, equation.params | more

    def products(*arrays: Array) -> Array:
        return _RULES[name](*arrays, **params)

    products.__name__ = name + SUFFIX
    avals = [atom.aval for atom in equation.invars]
    if all(isinstance(size, int) for aval in avals for size in aval.shape):
        call = jax.make_jaxpr(jax.jit(products))(*avals).eqns
        if len(call) == 1 and [out.aval for out in call[0].outvars] == [
            out.aval for out in equation.outvars
        ]:
            return call[0].replace(invars=equation.invars, outvars=equation.outvars)
    _say_once(f"{name} of shapes {', '.join(str(aval.shape) for aval in avals)}")
    return equation


def _say_once(what: str) -> None:
    if what not in _told:
        _told.add(what)
        LOG.warning(
            "%s is left to XLA, which is slow inside compiled loops on CPUs: no rule fits", what
        )


def _scatter_add(source: Array, operand: Array, *, select_prim: Any, **params: Any) -> Array:
    """Gradient of a pooling window, in functions that take derivatives themselves."""
    return jax.vjp(partial(_pool_of(select_prim), **params, **_undilated(operand)), operand)[1](
        source
    )[0]


def _gather_add(tangents: Array, operand: Array, *, select_prim: Any, **params: Any) -> Array:
    """Derivative of a pooling window along a direction."""
    return jax.jvp(partial(_pool_of(select_prim), **params), (operand,), (tangents,))[1]


def _convolution(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """Convolution in the forms of the layout of its result."""
    if is_batch_last(params) and suits_batch_last(lhs, rhs, params):
        return convolution_batch_last(lhs, rhs, **params)
    return convolution(lhs, rhs, **params)


def _sum_in_turn(x: Array, *, axes: tuple[int, ...], **params: Any) -> Array:
    """Sum over separated axes, the last ones last: XLA would sum over all in plain loops."""
    last = _last_axes(x.shape, axes)
    outer = jax.lax.reduce_sum_p.bind(
        x, axes=tuple(axis for axis in axes if axis not in last), **params
    )
    outer = jax.lax.optimization_barrier(outer)  # or XLA would make one sum of the two
    return jax.lax.reduce_sum_p.bind(
        outer, axes=tuple(range(outer.ndim - len(last), outer.ndim)), **params
    )


def _last_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that are better summed over after the others: short ones at the end.

    Empty if one sum is best.
    """
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    last = tuple(axis for axis in axes if not kept or axis > max(kept))
    short = 1 < prod(shape[axis] for axis in last) <= SHORT
    return last if short and len(last) < len(axes) else ()


def _scan(*given: Array, **params: Any) -> list[Array]:
    """Scan with products in fast forms, and with whatever else its body has to be rewritten."""
    arrays, params = transpose_before(given, params | {"jaxpr": _rewrite(params["jaxpr"])})
    return contract_after(*arrays, **params)


def _pool_of(select_prim: Any) -> Rule:
    return max_pool if select_prim.name == "ge" else min_pool


def _undilated(operand: Array) -> dict[str, Any]:
    return dict.fromkeys(("base_dilation", "window_dilation"), (1,) * operand.ndim)


_RULES: dict[str, Rule] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": max_pool,
    "reduce_window_min": min_pool,
    "reduce_window_sum": sum_pool,
    "select_and_gather_add": _gather_add,
    "select_and_scatter_add": _scatter_add,
    "dot_general": contract_rows,
    "reduce_sum": _sum_in_turn,
    "scan": _scan,
}

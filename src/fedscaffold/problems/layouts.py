"""Layout of the arrays of convolutional networks, whatever layout they were written in.

Convolutions are fast on CPUs with features last, and those of networks with few features with the
batch last. A network that is written in another layout, as torch's modules are, would be transposed
before and after each of its convolutions, and pooling would run along the last axis. Here the
results of convolutions stay as they were computed; operations that work in any layout follow them,
and an array is transposed only where another operation reads it. Results are the same, up to the
order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var, jaxpr_as_fun

from fedscaffold.problems.batch_last import suits_batch_last

__all__ = ["is_batch_last", "lay_out"]

Array: TypeAlias = Any
Order: TypeAlias = tuple[int, ...]

CONVOLUTION = "conv_general_dilated"
# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite",
    "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
    "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"))
POOLING = frozenset(
    (
        "reduce_window_sum",
        "reduce_window_max",
        "reduce_window_min",
        "select_and_scatter_add",
        "select_and_gather_add",
    )
)
# parameters of pooling with an entry for each axis
BY_AXIS = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


class Transposed(NamedTuple):
    """An array that was not transposed yet: its value is `transpose(base, order)`."""

    base: Array
    order: Order


Value: TypeAlias = Array | Transposed


def lay_out(jaxpr: Jaxpr) -> Jaxpr:
    """Return the same function with its convolutions in the layout in which they are fast.

    It is that with features first and the batch last if all convolutions have few features, else
    that with the batch first and features last.

    Args:
        jaxpr: A traced function. Only its own equations are changed and those of functions compiled
            by themselves (`jax.jit`), not the bodies of loops and conditionals.

    Returns:
        A function of the same arguments and results. It is the given one, if it has no convolution
        or is laid out so.
    """
    convolutions = list(_convolutions(jaxpr))
    batch_last = all(
        suits_batch_last(one.invars[0].aval, one.invars[1].aval, one.params) for one in convolutions
    )
    if not any(batch_last or _is_elsewhere(one) for one in convolutions):
        return jaxpr
    avals: list[Any] = [var.aval for var in (*jaxpr.constvars, *jaxpr.invars)]
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals
    ]
    constants = len(jaxpr.constvars)

    def moved(*arrays: Array) -> list[Array]:
        closed = ClosedJaxpr(jaxpr, arrays[:constants])
        found = _evaluate(closed, arrays[constants:], batch_last)
        return [_transpose(one) for one in found]

    closed = jax.make_jaxpr(moved)(*shapes)
    if closed.consts:
        return jaxpr
    found = closed.jaxpr
    result: Jaxpr = jaxpr.replace(
        constvars=found.invars[:constants],
        invars=found.invars[constants:],
        outvars=found.outvars,
        eqns=found.eqns,
        effects=found.effects,
    )
    return result


def _convolutions(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the convolutions that `lay_out` may change."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == CONVOLUTION:
            yield equation
        elif equation.primitive.name == "jit":
            yield from _convolutions(equation.params["jaxpr"].jaxpr)


def _is_elsewhere(equation: Any) -> bool:
    """Return whether a convolution has the batch first and features not last.

    If the batch is not first, it is the gradient of a kernel, of which any network has some.
    """
    batch, features, *_ = equation.params["dimension_numbers"].out_spec
    return bool(batch == 0 and features != len(equation.outvars[0].aval.shape) - 1)


def is_batch_last(params: dict[str, Any]) -> bool:
    """Return whether a convolution's result is laid out as (features, space, batch)."""
    batch, features, *space = params["dimension_numbers"].out_spec
    return bool(features == 0 and batch == len(space) + 1 and space == sorted(space))


def _evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Value], batch_last: bool = False
) -> list[Value]:
    """Run the equations of a function on values in any layout."""
    jaxpr = closed.jaxpr
    values: dict[Var, Value] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Value:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(atom) for atom in equation.invars], batch_last)
        if results is None:
            for atom in equation.invars:
                if isinstance(read(atom), Transposed):  # once, for whatever else reads it
                    values[atom] = _transpose(values[atom])
            results = _run_alone(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_alone(equation: Any, arrays: Sequence[Array]) -> list[Array]:
    """Run an equation as it stands."""
    given = {
        atom: array
        for atom, array in zip(equation.invars, arrays, strict=True)
        if not isinstance(atom, Literal)
    }
    about = DebugInfo("jit", equation.primitive.name, None, None)
    jaxpr = Jaxpr([], list(given), equation.outvars, [equation], equation.effects, about)
    results: list[Array] = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*given.values())
    return results


def _apply(equation: Any, arguments: Sequence[Value], batch_last: bool) -> Sequence[Value] | None:
    """Apply an operation in the layout of its arguments; None if that cannot be done."""
    name = equation.primitive.name
    if name == CONVOLUTION:
        return [_convolve(equation, arguments[0], arguments[1], batch_last)]
    waiting = any(isinstance(argument, Transposed) for argument in arguments)
    if name == "jit" and (waiting or any(_convolutions(equation.params["jaxpr"].jaxpr))):
        return _evaluate(equation.params["jaxpr"], arguments, batch_last)
    if not waiting:
        return None
    if name == "custom_jvp_call" and _is_elementwise(equation.params["call_jaxpr"].jaxpr):
        return _keep_derivative(equation, arguments)
    rule = _RULES.get(name)
    return None if rule is None else [rule(equation, arguments)]


def _is_elementwise(jaxpr: Jaxpr) -> bool:
    """Return whether a function works in any layout: activations with derivatives of their own."""
    return all(
        equation.primitive.name in ELEMENTWISE
        or (equation.primitive.name == "jit" and _is_elementwise(equation.params["jaxpr"].jaxpr))
        for equation in jaxpr.eqns
    )


def _keep_derivative(equation: Any, arguments: Sequence[Value]) -> list[Value]:
    """Apply an elementwise function that has a derivative of its own, which it keeps."""
    arrays, order = _alike(arguments)

    def waiting(arrays: Sequence[Array]) -> list[Value]:
        return [one if np.ndim(one) == 0 else _in_order(one, order) for one in arrays]

    @jax.custom_jvp
    def function(*arrays: Array) -> list[Array]:
        found = _evaluate(equation.params["call_jaxpr"], waiting(arrays))
        return [_laid_out(one, order) for one in found]

    def as_it_stands(*arrays: Array) -> list[Array]:
        found = _run_alone(equation, [_transpose(one) for one in waiting(arrays)])
        return [_laid_out(one, order) for one in found]

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(as_it_stands, primals, tangents)

    return waiting(function(*arrays))


def _convolve(equation: Any, lhs: Value, rhs: Value, batch_last: bool) -> Value:
    """Convolve arrays as they are laid out; space is in the middle of the result."""
    numbers = equation.params["dimension_numbers"]
    (lhs, lhs_order), (rhs, rhs_order) = _waiting(lhs), _waiting(rhs)
    last = lhs.ndim - 1
    batch, features, *space = numbers.out_spec
    at = {batch: last, features: 0} if batch_last else {batch: 0, features: last}
    # space stays in the order in which it was written: ties of pooling windows go to the first
    at |= {axis: place for place, axis in enumerate(sorted(space), 1)}
    moved = lax.ConvDimensionNumbers(
        tuple(lhs_order[axis] for axis in numbers.lhs_spec),
        tuple(rhs_order[axis] for axis in numbers.rhs_spec),
        tuple(at[axis] for axis in numbers.out_spec),
    )
    found = equation.primitive.bind(lhs, rhs, **equation.params | {"dimension_numbers": moved})
    return _in_order(found, tuple(at[axis] for axis in range(last + 1)))


def _elementwise(equation: Any, arguments: Sequence[Value]) -> Value:
    arrays, order = _alike(arguments)
    return Transposed(equation.primitive.bind(*arrays, **equation.params), order)


def _pool(equation: Any, arguments: Sequence[Value]) -> Value:
    arrays, order = _alike(arguments)
    params = {
        name: _permute(value, order) if name in BY_AXIS else value
        for name, value in equation.params.items()
    }
    return Transposed(equation.primitive.bind(*arrays, **params), order)


def _reduce(equation: Any, arguments: Sequence[Value]) -> Value:
    ((base, order),) = map(_waiting, arguments)
    axes = equation.params["axes"]
    kept = [order[axis] for axis in range(base.ndim) if axis not in axes]
    moved = equation.params | {"axes": tuple(sorted(order[axis] for axis in axes))}
    return _in_order(
        equation.primitive.bind(base, **moved), tuple(sorted(kept).index(axis) for axis in kept)
    )


def _pad(equation: Any, arguments: Sequence[Value]) -> Value:
    base, order = _waiting(arguments[0])
    config = _permute(equation.params["padding_config"], order)
    return Transposed(lax.pad(base, _transpose(arguments[1]), config), order)


def _concatenate(equation: Any, arguments: Sequence[Value]) -> Value:
    arrays, order = _alike(arguments)
    return Transposed(lax.concatenate(arrays, order[equation.params["dimension"]]), order)


def _again(equation: Any, arguments: Sequence[Value]) -> Value:
    """Transpose an array that waits for another transposition."""
    base, order = _waiting(arguments[0])
    return _in_order(base, tuple(order[axis] for axis in equation.params["permutation"]))


def _alike(arguments: Sequence[Value]) -> tuple[list[Array], Order]:
    """Bring arrays into the layout of the largest that waits; numbers stay as they are."""
    waiting = [one for one in arguments if isinstance(one, Transposed)]
    order = max(waiting, key=lambda one: one.base.size).order
    return [_laid_out(one, order) for one in arguments], order


def _laid_out(value: Value, order: Order) -> Array:
    base, own = _waiting(value)
    if np.ndim(base) == 0 or own == order:
        return base
    return lax.transpose(_transpose(value), np.argsort(order))


def _permute(entries: Iterable[Any], order: Order) -> tuple[Any, ...]:
    """Return what belongs to each axis of the base."""
    listed = list(entries)
    return tuple(listed[axis] for axis in np.argsort(order))


def _waiting(value: Value) -> Transposed:
    if isinstance(value, Transposed):
        return value
    return Transposed(value, tuple(range(np.ndim(value))))


def _in_order(base: Array, order: Order) -> Value:
    return base if order == tuple(range(len(order))) else Transposed(base, order)


def _transpose(value: Value) -> Array:
    return lax.transpose(*value) if isinstance(value, Transposed) else value


_RULES: dict[str, Callable[[Any, Sequence[Value]], Value]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(POOLING, _pool),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "pad": _pad,
    "concatenate": _concatenate,
    "transpose": _again,
}

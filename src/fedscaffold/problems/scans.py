"""Matrix products in scans, in the forms that CPUs multiply fast.

The gradient of a recurrent network accumulates the gradient of its weights step by step: in each, a
small product and a pass over an array of the weights' size. Their sum over all steps is one product
that contracts the steps as well. On CPUs that is a third of the time of an LSTM's gradient.

A product with the transpose of a matrix that is the same in all steps takes up to twice the time of
one with the matrix itself. Such a matrix is transposed once, before the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun

from fedscaffold.problems.products import contract_rows, swaps

__all__ = ["adds_up_products", "contract_after", "transpose_before", "transposes"]

Array: TypeAlias = Any
ADDITIONS = ("add", "add_any")
LINEAR = ("transpose", "reshape", "squeeze")  # what may stand between a product and its addition
LONG = 8  # steps from which transposing a matrix once costs less than it saves


class Addition(NamedTuple):
    """A product that a scan adds to one of its carries, which nothing else in its body reads."""

    carry: int
    """Place of the carry."""
    product: Any
    """The equation of the product."""
    shaping: tuple[Any, ...]
    """Equations between the product and the addition, in order."""
    last: Any
    """The equation of the addition."""


def adds_up_products(equation: Any) -> bool:
    """Return whether an equation is a scan that adds up products."""
    return equation.primitive.name == "scan" and any(True for _ in _additions(**equation.params))


def contract_after(*arrays: Array, **params: Any) -> list[Array]:
    """Compute a scan, with the products that it adds up contracted over all its steps afterwards.

    Args:
        *arrays: Its constants, carries and inputs.
        **params: The parameters of the primitive.
    """
    closed, constants, carries = params["jaxpr"], params["num_consts"], params["num_carry"]
    body, additions = closed.jaxpr, list(_additions(**params))
    dropped = {addition.carry for addition in additions}
    gone = {
        id(equation)
        for _, product, shaping, last in additions
        for equation in (product, *shaping, last)
    }
    operands = [atom for addition in additions for atom in addition.product.invars]
    inputs = list(body.invars[constants + carries :])
    extra = [atom for atom in dict.fromkeys(operands) if atom not in inputs]
    kept = [j for j in range(carries) if j not in dropped]
    reduced = closed.replace(
        jaxpr=body.replace(
            invars=[
                *body.invars[:constants],
                *(body.invars[constants + j] for j in kept),
                *inputs,
            ],
            outvars=[*(body.outvars[j] for j in kept), *body.outvars[carries:], *extra],
            eqns=[equation for equation in body.eqns if id(equation) not in gone],
            debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
        )
    )
    fixed, xs = arrays[:constants], arrays[constants + carries :]

    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        found = jaxpr_as_fun(reduced)(*fixed, *carry, *x)
        return found[: len(kept)], found[len(kept) :]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    begun = [arrays[constants + j] for j in kept]
    ended, stacked = lax.scan(step, begun, list(xs), **how)
    ys, stacks = stacked[: len(stacked) - len(extra)], stacked[len(stacked) - len(extra) :]
    over_steps = dict(zip([*inputs, *extra], [*xs, *stacks], strict=True))
    last = dict(zip(kept, ended, strict=True))
    for addition in additions:
        total = _contract(addition, [over_steps[atom] for atom in addition.product.invars])
        last[addition.carry] = arrays[constants + addition.carry] + total
    return [*(last[j] for j in range(carries)), *ys]


def _additions(jaxpr: Any, num_consts: int, num_carry: int, **others: Any) -> Iterator[Addition]:
    """Yield the products that a scan adds to carries."""
    body = jaxpr.jaxpr
    made = {out: equation for equation in body.eqns for out in equation.outvars}
    atoms = [atom for equation in body.eqns for atom in equation.invars]
    uses = Counter(atom for atom in [*atoms, *body.outvars] if isinstance(atom, Var))
    fixed = set(body.invars[:num_consts])
    for j in range(num_carry):
        carried, out = body.invars[num_consts + j], body.outvars[j]
        last = made.get(out) if isinstance(out, Var) else None
        if last is None or last.primitive.name not in ADDITIONS or carried not in last.invars:
            continue
        (term,) = [atom for atom in last.invars if atom is not carried] or [carried]
        if uses[carried] > 1 or uses[out] > 1:
            continue
        found = _product(term, made, uses)
        if found is not None and not any(_is_fixed(atom, fixed) for atom in found[-1].invars):
            yield Addition(j, found[-1], tuple(reversed(found[:-1])), last)


def _product(term: Any, made: dict[Any, Any], uses: Counter[Any]) -> list[Any] | None:
    """Return the equations from a term back to the product it is, or None."""
    found = []
    while isinstance(term, Var) and uses[term] == 1 and term in made:
        equation = made[term]
        found.append(equation)
        if equation.primitive.name == "dot_general":
            return found
        if equation.primitive.name not in LINEAR:
            return None
        term = equation.invars[0]
    return None


def _is_fixed(atom: Any, constants: set[Any]) -> bool:
    """Return whether an operand is the same in all steps: a constant of the scan, or a literal."""
    return not isinstance(atom, Var) or atom in constants


def _contract(addition: Addition, operands: Sequence[Array]) -> Array:
    """Return the sum of a product over the steps, which are the first axis of its operands."""
    params, shaping = dict(addition.product.params), addition.shaping
    contracted, batch = params["dimension_numbers"]
    over = tuple((0, *(axis + 1 for axis in axes)) for axes in contracted)
    params["dimension_numbers"] = over, tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    if any(batch):
        total = addition.product.primitive.bind(*operands, **params)
    else:
        again = bool(shaping) and swaps(shaping[0])  # what JAX makes of the gradient of a matrix
        total = contract_rows(*operands, **params, transposed=again)
    for equation in shaping:
        total = equation.primitive.bind(total, **equation.params)
    return total


class Transposed(NamedTuple):
    """A product in a scan with a constant matrix, which is to be multiplied in its other layout."""

    product: Any
    """The equation of the product."""
    constant: Any
    """The matrix, a constant of the scan."""
    copied: bool
    """Whether the transpose of the constant is needed; else the body transposes it for nothing."""


def transposes(equation: Any) -> bool:
    """Return whether an equation is a long scan with products that transpose a constant matrix."""
    return equation.primitive.name == "scan" and any(True for _ in _transposed(**equation.params))


def transpose_before(
    arrays: Sequence[Array], params: dict[str, Any]
) -> tuple[list[Array], dict[str, Any]]:
    """Return a scan whose products need no transpose of a constant matrix.

    Args:
        arrays: Its constants, carries and inputs.
        params: The parameters of the primitive.

    Returns:
        The arrays, with the transposed matrices among the constants, and the parameters.
    """
    found = list(_transposed(**params))
    closed, constants = params["jaxpr"], params["num_consts"]
    body = closed.jaxpr
    value = dict(zip(body.invars[:constants], arrays[:constants], strict=True))
    matrices = dict.fromkeys(one.constant for one in found if one.copied)
    # JAX has no public way to make a variable: those of a traced function serve
    avals = [jax.ShapeDtypeStruct(m.aval.shape[::-1], m.aval.dtype) for m in matrices]
    fresh = dict(zip(matrices, jax.make_jaxpr(lambda *a: a)(*avals).jaxpr.invars, strict=True))
    changed = {}
    for product, constant, copied in found:
        matrix = fresh[constant] if copied else constant
        (lhs, _), batch = product.params["dimension_numbers"]
        how = product.params | {"dimension_numbers": ((lhs, (0,)), batch)}
        changed[id(product)] = product.replace(invars=[product.invars[0], matrix], params=how)
    jaxpr = body.replace(
        invars=[*fresh.values(), *body.invars],
        eqns=[changed.get(id(equation), equation) for equation in body.eqns],
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    columns = [lax.optimization_barrier(value[matrix].T) for matrix in matrices]
    more = {"jaxpr": closed.replace(jaxpr=jaxpr), "num_consts": constants + len(fresh)}
    return [*columns, *arrays], params | more


def _transposed(jaxpr: Any, num_consts: int, length: int, **others: Any) -> Iterator[Transposed]:
    """Yield the products of a scan with constant matrices that are slow in their layout."""
    body = jaxpr.jaxpr
    long = isinstance(length, int) and length >= LONG  # it may be symbolic
    fixed = set(body.invars[:num_consts]) if long else set()
    within = {
        equation.outvars[0]: equation.invars[0]
        for equation in body.eqns
        if swaps(equation) and equation.invars[0] in fixed
    }
    for equation in body.eqns:
        if equation.primitive.name != "dot_general":
            continue
        (_, contracted), batch = equation.params["dimension_numbers"]
        matrix: Any = equation.invars[1]
        if any(batch) or len(matrix.aval.shape) != 2 or not isinstance(matrix, Var):
            continue
        if matrix in fixed and contracted == (1,):
            yield Transposed(equation, matrix, True)
        elif matrix in within and len(contracted) == 1:
            yield Transposed(equation, within[matrix], contracted == (0,))

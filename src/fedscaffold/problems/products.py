"""Products of two arrays over several axes, as products of matrices.

The gradient of a dense layer that is applied to sequences contracts records and places at once. XLA
copies the larger factor for such a product and then multiplies slowly on CPUs: an LSTM's 65 classes
take six times as long as the same product of matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from jax import lax
from jax.extend.core import Var

__all__ = ["contract_rows", "swaps", "transposed_products"]

Array: TypeAlias = Any


def transposed_products(
    products: Sequence[Any], equations: Sequence[Any], results: Sequence[Any]
) -> set[Any]:
    """Return the results of some products of which only the transpose is used.

    Args:
        products: The equations of the products.
        equations: All equations of their program.
        results: What the program returns.
    """
    made = {one.outvars[0] for one in products}
    atoms = [atom for one in equations for atom in one.invars]
    uses = Counter(atom for atom in [*atoms, *results] if isinstance(atom, Var))
    taken = {one.invars[0] for one in equations if swaps(one) and one.invars[0] in made}
    return {out for out in taken if uses[out] == 1}


def swaps(equation: Any) -> bool:
    """Return whether an equation transposes a matrix."""
    return bool(equation.primitive.name == "transpose" and equation.params["permutation"] == (1, 0))


def contract_rows(
    lhs: Array, rhs: Array, *, dimension_numbers: Any, transposed: bool = False, **params: Any
) -> Array:
    """Compute a product without a batch as one of two matrices.

    Args:
        lhs: The first factor.
        rhs: The second factor.
        dimension_numbers: Those of `lax.dot_general`, without axes of a batch.
        transposed: Whether the product of the factors in the other order is computed, and
            transposed: the form to take where the result will be transposed once more.
        **params: Other parameters of the primitive.

    Returns:
        The product, with the free axes of `lhs` before those of `rhs`.
    """
    contracted, _ = dimension_numbers
    factors = [_as_rows(*one) for one in zip((lhs, rhs), contracted, strict=True)]
    first, second = factors[::-1] if transposed else factors
    columns = lax.optimization_barrier(first.matrix.T)  # or XLA would choose what it copies
    both = ((1,), (0,)), ((), ())
    found = lax.dot_general_p.bind(columns, second.matrix, dimension_numbers=both, **params)
    found = found.T if transposed else found
    return found.reshape(*factors[0].free, *factors[1].free)


class Rows(NamedTuple):
    """A factor as a matrix with a row for each place along its contracted axes."""

    matrix: Array
    free: tuple[int, ...]
    """Sizes of its other axes."""


def _as_rows(factor: Array, contracted: Sequence[int]) -> Rows:
    others = [axis for axis in range(factor.ndim) if axis not in contracted]
    free = tuple(factor.shape[axis] for axis in others)
    rows = prod(factor.shape[axis] for axis in contracted)
    return Rows(factor.transpose(*contracted, *others).reshape(rows, prod(free)), free)

"""Double precision within a program of single precision, for c, the mean of the c_i, and what both are made from.

In single precision c drifts from the mean of the c_i by rounding alone, more with every round, until a lost c_i cannot
be told from it. So sums over clients, `remember` and the server's step are computed in float64 in every run, and c and
the mean are kept in it. The c_i are stored in the run's precision, and what that rounds off them goes to c as well.

JAX makes no float64 arrays unless x64 is on, but a program may hold some where it is traced with x64 on. Sums in single
precision with compensation would do as well, were they not at the mercy of what a compiler makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedscaffold.simulation.spec import Array

__all__ = ["computed_once", "double", "doubles", "in_double"]


def doubles() -> Any:
    """A context in which a program may compute in float64, whatever the precision of the run."""
    return jax.enable_x64(True)


def double(a: Array) -> Array:
    """An array in double precision, where it is one of floating point; to be called within `doubles`."""
    return a.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, given all of its arrays in double precision.

    >>> float(in_double(lambda a, b: a + b)(jnp.float32(1), jnp.float32(2**-40))) == 1 + 2**-40
    True
    """

    def widened(*arguments: Any) -> Any:
        with doubles():
            return function(*jax.tree.map(double, arguments))

    return widened


def computed_once(never: Array, arrays: Any) -> Any:
    """The same arrays, so that all who use them see the same bits.

    A compiler may compute an expression anew for each of its uses, and round it in another way: then a client would
    remember another direction than the server adds up. What comes out of a conditional is computed once. `never` is
    false, but must not be known to be.
    """
    return jax.lax.cond(never, lambda same: jax.tree.map(jnp.zeros_like, same), lambda same: same, arrays)

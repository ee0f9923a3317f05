"""float64 inside float32 programs, for c, the mean of the c_i, and the sums they are computed from.

In float32, c would drift from the mean of the c_i by rounding alone, until a lost c_i could not be
told from it. So sums over clients, `remember` and the server step are computed in float64 in every
run, and c and the mean are stored in float64. The c_i are stored in the run's precision, and their
rounding errors are added to c.

JAX creates no float64 arrays unless x64 is enabled, but a program traced with x64 enabled may
contain them. Compensated float32 sums would be an alternative, but compilers may optimise the
compensation away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedscaffold.simulation.spec import Array

__all__ = ["enable_float64", "in_float64", "prevent_recomputation", "to_float64"]


def enable_float64() -> Any:
    """Return a context in which float64 is enabled, whatever the precision of the run."""
    return jax.enable_x64(True)


def to_float64(a: Array) -> Array:
    """Cast a floating-point array to float64, inside `enable_float64()`.

    Other arrays are returned unchanged.
    """
    return a.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that all its array arguments are cast to float64.

    >>> float(in_float64(lambda a, b: a + b)(jnp.float32(1), jnp.float32(2**-40))) == 1 + 2**-40
    True
    """

    def widened(*arguments: Any) -> Any:
        with enable_float64():
            return function(*jax.tree.map(to_float64, arguments))

    return widened


def prevent_recomputation(never: Array, arrays: Any) -> Any:
    """Return `arrays` unchanged, but prevent the compiler from recomputing them for each use.

    A recomputed expression may be rounded differently, so that a client would store another
    direction than the one the server sums. The result of a conditional is computed once. `never`
    must be false at run time, but not a constant.
    """
    return jax.lax.cond(
        never, lambda same: jax.tree.map(jnp.zeros_like, same), lambda same: same, arrays
    )

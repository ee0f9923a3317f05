"""Options of XLA for programs whose compilation takes long beside their run."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

__all__ = ["quick_options"]

# on CPUs, the older of XLA's two generators of loops: the newer one takes half as long again, and
# large models run no faster by it (small ones by some percent)
QUICK = {"xla_cpu_use_fusion_emitters": False}
ONCE = {"xla_backend_optimization_level": 0}


@cache
def quick_options(once: bool = False) -> dict[str, Any]:
    """Return options that save time in the compiler, for `compiler_options` of `jax.jit`.

    Args:
        once: Whether the program runs once, on little data, so that its own time does not matter.

    Returns:
        The options; none where XLA does not know them.

    >>> import jax.numpy as jnp
    >>> float(jax.jit(jnp.cos, compiler_options=quick_options(once=True))(0.0))
    1.0
    """
    options: dict[str, Any] = QUICK | (ONCE if once else {})
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options

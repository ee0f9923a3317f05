"""Options of XLA for programs whose compilation takes long, for `compiler_options` of `jax.jit`."""

from __future__ import annotations

from typing import Any

__all__ = ["ONCE", "QUICK"]

# for large models on CPUs: the older of XLA's two generators of loops; the newer one takes half as
# long again, and only small models run faster by it
QUICK: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
# for what runs once, on little data
ONCE: dict[str, Any] = QUICK | {"xla_backend_optimization_level": 0}

"""The matrix products of a client step alone, in XLA and in torch, one thread, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.workloads import Workload, num_steps, widths

__all__ = ["product_seconds"]

LOOP, TURNS = 10, 30  # products in a call, so that calls cost little; calls


def product_seconds(workload: Workload) -> dict[str, float]:
    """CPU seconds of the products of all client steps of a work load, by library.

    Each product is timed by itself on arrays of one client, the least of many calls: what a
    simulator could not do without, were everything else free.
    """
    import jax
    import torch

    from fedscaffold.simulation.threads import choose_threads

    choose_threads()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    total = {"xla": 0.0, "torch": 0.0}
    for a, b in _products(workload):
        left, right = (rng.standard_normal(shape, np.float32) for shape in (a, b))
        compiled = jax.jit(_repeated)
        x, y = jax.device_put((left, right))
        s, t = torch.from_numpy(left), torch.from_numpy(right)
        out = torch.empty(a[0], b[1])
        calls: dict[str, Callable[[], Any]] = {
            "xla": lambda: jax.block_until_ready(compiled(x, y)),  # noqa: B023
            "torch": lambda: [torch.mm(s, t, out=out) for _ in range(LOOP)],  # noqa: B023
        }
        least = dict.fromkeys(calls, float("inf"))
        for turn in range(TURNS + 1):
            for name, call in calls.items():
                began = time.process_time()
                call()
                if turn:  # the first compiles
                    least[name] = min(least[name], time.process_time() - began)
        for name, seconds in least.items():
            total[name] += seconds / LOOP * num_steps(workload)
    return total


def _products(workload: Workload) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Shapes of the operands: outputs, gradients of weights, gradients of inputs but the first."""
    n, found = workload.batch_size, []
    for depth, (i, o) in enumerate(pairwise(widths(workload))):
        found += [((n, i), (i, o)), ((o, n), (n, i))]
        found += [((n, o), (o, i))] if depth else []
    return found


def _repeated(a: Any, b: Any) -> Any:
    """The product LOOP times, one after the other: each waits for the one before."""
    import jax

    def once(_: int, last: Any) -> Any:
        return (a + 0 * last[0, 0]) @ b

    return jax.lax.fori_loop(0, LOOP, once, jax.numpy.zeros((len(a), b.shape[1]), a.dtype))

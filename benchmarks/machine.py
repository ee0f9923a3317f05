"""The machine beneath a benchmark.

Its threads, its rate of matrix products, and how much of it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.networks import NETWORKS, torch_module
from benchmarks.workloads import Workload, num_steps, widths
from fedscaffold import checks

__all__ = ["gemm_flops", "num_threads", "sgemm_rate"]


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Torch with so many threads inside an operation, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(checks.whole("threads", threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sgemm_rate(threads: int = 1) -> float:
    """GFLOP/s of a large float32 matrix product, the best of ten.

    What no simulator here can exceed.
    """
    n = 1024
    a, product = torch.ones(n, n), torch.empty(n, n)
    best = float("inf")
    with num_threads(threads):
        for _ in range(10):
            start = time.perf_counter()
            torch.mm(a, a, out=product)
            best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e9


def gemm_flops(workload: Workload) -> float:
    """Floating point operations of all matrix products of a work load, over all its rounds.

    A layer needs three products of 2 x batch x in x out: its output, the gradient of its weights,
    and that of its input, which the first layer does without. Those of the convolutional networks
    are counted by torch, which leaves out what is inside an LSTM.
    """
    if workload.model in NETWORKS:
        return _counted(workload) * num_steps(workload)
    products = sum(
        i * o * (3 if depth else 2) for depth, (i, o) in enumerate(pairwise(widths(workload)))
    )
    steps = workload.rounds * workload.cohort * workload.local_steps
    return 2.0 * workload.batch_size * products * steps


def _counted(workload: Workload) -> float:
    """Operations of the gradient on one batch, counted by torch."""
    model = torch_module(workload.model, workload.classes, seed=0)
    records = torch.from_numpy(workload.clients[0][0][:1])
    records = records.movedim(-1, 1) if records.ndim == 4 else records
    batch = records.repeat(workload.batch_size, *[1] * (records.ndim - 1))
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    return float(counter.get_total_flops())

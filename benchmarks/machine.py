"""The machine beneath a benchmark.

Its threads, its rate of matrix products, and how much of it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.networks import NETWORKS, torch_module
from benchmarks.workloads import Workload, num_steps, widths
from fedscaffold import checks

__all__ = ["Floor", "copy_rate", "floor_of", "gemm_flops", "num_threads", "sgemm_rate"]

CACHED = 1 << 18  # bytes of an array that is copied: with its copy it fits a second-level cache


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
            start = time.thread_time()
            torch.mm(a, a, out=product)
            best = min(best, time.thread_time() - start)
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


def copy_rate() -> float:
    """Bytes a second, in GB/s, that one thread reads and writes where all is in its cache."""
    a, copied = torch.ones(CACHED // 4), torch.empty(CACHED // 4)
    best = float("inf")
    with num_threads(1):
        for _ in range(100):
            start = time.thread_time()
            copied.copy_(a)
            best = min(best, time.thread_time() - start)
    return 2 * CACHED / best / 1e9


def moved_bytes(workload: Workload) -> float:
    """Bytes that all client steps of a work load without a network read and write at least.

    Each record of a batch is copied into the batch (read and written), and the model goes through
    the cache six times: read for the outputs; its gradient written; gradient, correction and model
    read, and the model written.

    >>> from benchmarks.workloads import w4
    >>> moved_bytes(w4()) / num_steps(w4())
    2080.0
    """
    layers = list(pairwise(widths(workload)))
    biases = 0 if workload.model == "logistic" else sum(o for _, o in layers)
    model = biases + sum(i * o for i, o in layers)
    batch = workload.batch_size * int(workload.clients[0][0].shape[1])
    return 4.0 * (2 * batch + 6 * model) * num_steps(workload)


class Floor(NamedTuple):
    """The roofline of a work load: the least CPU time, where all is done at the machine's rates."""

    flops: float
    """Floating point operations of the products of a client step."""
    bytes: float
    """Bytes that a client step reads and writes."""
    products: float
    """Seconds of all products."""
    moves: float
    """Seconds of all reading and writing."""

    @property
    def seconds(self) -> float:
        """The larger of the two: products and memory may overlap."""
        return max(self.products, self.moves)


def floor_of(workload: Workload, gflops: float, gigabytes: float) -> Floor:
    """Return the roofline of a work load without a network.

    Args:
        workload: The work load.
        gflops: Rate of products, from `sgemm_rate`.
        gigabytes: Rate of reading and writing, from `copy_rate`.
    """
    flops, moved, steps = gemm_flops(workload), moved_bytes(workload), num_steps(workload)
    return Floor(flops / steps, moved / steps, flops / gflops / 1e9, moved / gigabytes / 1e9)


def _counted(workload: Workload) -> float:
    """Operations of the gradient on one batch, counted by torch."""
    model = torch_module(workload.model, workload.classes, seed=0)
    records = torch.from_numpy(workload.clients[0][0][:1])
    records = records.movedim(-1, 1) if records.ndim == 4 else records
    batch = records.repeat(workload.batch_size, *[1] * (records.ndim - 1))
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    return float(counter.get_total_flops())

"""SCAFFOLD in PyTorch, one client after the other, as tight as that goes.

The second opponent of our simulator.

The backward pass is written by hand, every product and sum goes into a buffer made beforehand, the
correction and the step are one `foreach` call each over all parameters, c - c_i is formed once a
round, autograd is off. The rounds are those of `torch_loops`, on the same cohorts and records with
the same seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from benchmarks.machine import num_threads
from benchmarks.torch_loops import LoopResult
from benchmarks.workloads import L2, Given, Workload, initial, sampled

__all__ = ["tight"]

Tensor: TypeAlias = Any  # torch.Tensor


def tight(
    workload: Workload,
    rounds: int,
    seed: int,
    threads: int,
    cohorts: Given = None,
    draws: Given = None,
) -> LoopResult:
    """Train client by client; arguments as for `torch_loops.tutorial`."""
    rng = np.random.default_rng(seed)
    n, size, length = len(workload.clients), workload.cohort, workload.local_steps * workload.lr
    with num_threads(threads), torch.inference_mode():
        x = [torch.from_numpy(array) for array in initial(workload, seed)]
        c, y, shift, slopes, move = ([torch.zeros_like(leaf) for leaf in x] for _ in range(5))
        memory = [[torch.zeros_like(leaf) for leaf in x] for _ in range(n)]
        local = _local(workload, y, slopes)
        starts = np.cumsum([0, *(len(labels) for _, labels in workload.clients)])
        cpu, wall = time.process_time(), time.perf_counter()
        for r in range(rounds):
            clients, records = sampled(rng, workload, r, cohorts, draws)
            torch._foreach_zero_(move)
            for i, rows in zip(
                clients, torch.from_numpy(records + starts[clients][:, None, None]), strict=True
            ):
                torch._foreach_copy_(y, x)
                torch._foreach_copy_(shift, c)
                torch._foreach_sub_(shift, memory[i])
                for batch in rows.unbind():
                    local(batch)
                    torch._foreach_add_(slopes, shift)
                    torch._foreach_add_(y, slopes, alpha=-workload.lr)
                gone = torch._foreach_sub(x, y)
                torch._foreach_add_(move, gone)
                torch._foreach_div_(gone, length)
                torch._foreach_sub_(gone, shift)
                torch._foreach_copy_(memory[i], gone)
            torch._foreach_sub_(x, move, alpha=1 / size)
            torch._foreach_mul_(c, 1 - size / n)
            torch._foreach_add_(c, move, alpha=1 / (n * length))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    means = [
        np.mean([held[j].numpy() for held in memory], axis=0, dtype=np.float64)
        for j in range(len(x))
    ]
    off = np.concatenate(
        [(leaf.numpy() - mean).ravel() for leaf, mean in zip(c, means, strict=True)]
    )
    flat = np.concatenate([leaf.numpy().ravel() for leaf in x])
    return LoopResult(
        cpu, wall, rounds * size * workload.local_steps, flat, float(np.linalg.norm(off)), 1
    )


def _local(workload: Workload, y: list[Tensor], slopes: list[Tensor]) -> Callable[[Tensor], None]:
    """What writes the gradient at y on a batch of rows into `slopes`."""
    features, labels = (
        torch.from_numpy(np.concatenate(part)) for part in zip(*workload.clients, strict=True)
    )
    x = torch.empty(workload.batch_size, features.shape[1])
    if workload.model == "logistic":
        targets = labels[:, None].float()
    else:
        targets = functional.one_hot(labels, workload.classes).float()
    wanted = torch.empty(workload.batch_size, targets.shape[1])
    backward = (
        _logistic(y, slopes, x, wanted)
        if workload.model == "logistic"
        else _network(y, slopes, x, wanted)
    )

    def local(batch: Tensor) -> None:
        torch.index_select(features, 0, batch, out=x)
        torch.index_select(targets, 0, batch, out=wanted)
        backward()

    return local


def _network(
    y: list[Tensor], slopes: list[Tensor], x: Tensor, wanted: Tensor
) -> Callable[[], None]:
    """Cross entropy of one layer, or of two with ReLU between."""
    rows = len(x)
    weights, biases = y[::2], y[1::2]
    outputs, errors = ([torch.empty(rows, len(bias)) for bias in biases] for _ in range(2))
    inputs = [x, *outputs[:-1]]
    weights_t, errors_t = [w.t() for w in weights], [e.t() for e in errors]
    last = len(weights) - 1
    relu_backward = torch.ops.aten.threshold_backward.grad_input

    def backward() -> None:
        for i in range(last + 1):
            torch.addmm(biases[i], inputs[i], weights_t[i], out=outputs[i])
            if i < last:
                outputs[i].relu_()
        torch.softmax(outputs[last], 1, out=errors[last]).sub_(wanted).mul_(1 / rows)
        for i in range(last, -1, -1):
            torch.mm(errors_t[i], inputs[i], out=slopes[2 * i])
            torch.sum(errors[i], 0, out=slopes[2 * i + 1])
            if i:
                torch.mm(errors[i], weights[i], out=errors[i - 1])
                relu_backward(errors[i - 1], outputs[i - 1], 0, grad_input=errors[i - 1])

    return backward


def _logistic(
    y: list[Tensor], slopes: list[Tensor], x: Tensor, wanted: Tensor
) -> Callable[[], None]:
    """Logistic loss and its penalty."""
    (w,), (slope,) = y, slopes
    error = torch.empty_like(wanted)
    error_t, w_t = error.t(), w.t()

    def backward() -> None:
        torch.mm(x, w_t, out=error).sigmoid_().sub_(wanted)
        torch.addmm(w, error_t, x, beta=L2, alpha=1 / len(x), out=slope)

    return backward

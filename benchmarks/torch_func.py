"""SCAFFOLD with `torch.func`: the gradients of a block of clients by one `vmap(grad(...))`.

The module stays as it is (`functional_call`); parameters and control variates of a block are
stacked. Clients whose epochs have fewer or shorter batches than others' are padded with records of
weight 0. The rounds are those of `torch_loops`.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from benchmarks.machine import num_threads
from benchmarks.torch_loops import LoopResult, State, Tensor, module, tensor, zeros
from benchmarks.workloads import Given, Indices, Workload, sampled

__all__ = ["vectorised"]

Slopes = Callable[[State, Tensor, Tensor, Tensor], State]


def vectorised(
    workload: Workload,
    rounds: int,
    seed: int,
    threads: int,
    cohorts: Given = None,
    draws: Given = None,
) -> LoopResult:
    """Train with `torch.func`; arguments as for `torch_loops.tutorial`."""
    rng = np.random.default_rng(seed)
    model = module(workload, seed)
    x = {name: p.detach().clone() for name, p in model.named_parameters()}
    c, num = zeros(model), len(workload.clients)
    memories = {name: torch.zeros(num, *p.shape) for name, p in x.items()}
    features, labels = (
        torch.from_numpy(np.concatenate(part)) for part in zip(*workload.clients, strict=True)
    )
    features = tensor(features.numpy())
    sizes = np.array([len(y) for _, y in workload.clients])
    starts, done = np.cumsum(sizes) - sizes, 0

    def loss(params: State, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        scores = functional_call(model, params, (inputs,))
        each = functional.cross_entropy(scores, targets, reduction="none")
        return each.flatten(1).mean(1) @ weights if each.ndim > 1 else each @ weights

    slopes: Slopes = vmap(grad(loss))
    with num_threads(threads):
        block = _best_block(workload, slopes, x, features, labels)
        cpu, wall = time.process_time(), time.perf_counter()
        for r in range(rounds):
            clients, records = sampled(rng, workload, r, cohorts, draws)
            rows, weights, steps = _arranged(workload, starts[clients], records)
            move = {name: torch.zeros_like(p) for name, p in x.items()}
            change = {name: torch.zeros_like(p) for name, p in x.items()}
            for at in range(0, len(clients), block):
                part = slice(at, at + block)
                ids = torch.from_numpy(clients[part])
                shift = {name: c[name] - memories[name][ids] for name in c}
                y = {name: p.expand(len(ids), *p.shape).clone() for name, p in x.items()}
                most = int(steps[part].max())
                for k in range(most):
                    batch = rows[part, k]
                    g = slopes(y, features[batch], labels[batch], weights[part, k])
                    going = steps[part] > k
                    for name, p in y.items():
                        rate = (workload.lr * going).view(-1, *[1] * (p.ndim - 1))
                        p.sub_(rate * g[name].add_(shift[name]))
                for name, p in y.items():
                    gone = x[name] - p
                    travel = (workload.lr * steps[part]).view(-1, *[1] * (p.ndim - 1))
                    new = gone / travel - shift[name]
                    change[name] += (new - memories[name][ids]).sum(0)
                    memories[name][ids] = new
                    move[name] += gone.sum(0)
            for name in x:
                x[name] -= move[name] / len(clients)
                c[name] += change[name] / num
            done += int(steps.sum())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    off = torch.cat([(c[k] - memories[k].double().mean(0)).flatten() for k in c])
    end = torch.cat([p.flatten() for p in x.values()]).numpy()
    return LoopResult(cpu, wall, done, end, float(off.norm()), block)


def _arranged(workload: Workload, starts: Indices, records: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers and weights of all batches (S, K, B), and every client's number of steps."""
    size = workload.batch_size
    if workload.local_steps:
        rows = torch.from_numpy(records + starts[:, None, None])
        steps = torch.full((len(starts),), workload.local_steps)
        return rows, torch.full(rows.shape, 1 / size), steps
    steps = torch.tensor([-(-len(one) // size) for one in records])
    rows = torch.zeros(len(records), int(steps.max()), size, dtype=torch.int64)
    weights = torch.zeros(rows.shape)
    for i, one in enumerate(records):
        for k in range(int(steps[i])):
            batch = one[k * size : (k + 1) * size]
            rows[i, k, : len(batch)] = torch.from_numpy(batch + starts[i])
            weights[i, k, : len(batch)] = 1 / len(batch)
    return rows, weights, steps


def _best_block(
    workload: Workload, slopes: Slopes, x: State, features: Tensor, labels: Tensor
) -> int:
    """The number of clients at once, among some, that costs least CPU time per client."""

    def cost(width: int) -> float:
        y = {name: p.expand(width, *p.shape).clone() for name, p in x.items()}
        rows = torch.arange(width * workload.batch_size).view(width, -1) % len(labels)
        weights = torch.full(rows.shape, 1 / workload.batch_size)
        times = timeit.repeat(
            lambda: slopes(y, features[rows], labels[rows], weights),
            timer=time.process_time,
            number=1,
            repeat=2,
        )
        return min(times) / width

    most = workload.cohort
    return min(sorted({1, min(5, most), min(10, most), most}), key=cost)

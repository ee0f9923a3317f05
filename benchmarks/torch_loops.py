"""SCAFFOLD in PyTorch, to be timed beside our simulator.

As a tutorial teaches it, and whole blocks of clients at once.

Both run the same rounds (option II, server step 1), and with the same seed on the same cohorts and
records:

    y <- y - lr (g_i(y) - c_i + c)   K times from y = x,    c_i+ = c_i - c + (x - y) / (K lr)
    x <- mean of y,                  c <- c + S/N * mean of (c_i+ - c_i)

`tutorial` is organised as tutorials are: an `nn.Module` copied for every client, a `DataLoader`,
autograd, a dict of tensors per control variate, Python loops over parameters, a running loss. The
accuracy they measure after every
client's round is left out: no contestant measures one. `batched` keeps a block of clients in one
tensor, has its backward pass written by hand, adds a weight gradient to the weights in the product
that forms it, and measures which block is best.

Times are of the training loop alone: data are tensors and models built before the clock starts. The
    loops are
opponents in a race, kept as other people write them: the algorithm of this package is in
    `algorithms/`.
"""

from __future__ import annotations

import copy
import math
import time
import timeit
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import num_threads
from benchmarks.networks import NETWORKS, torch_module
from benchmarks.workloads import L2, Given, Indices, Workload, initial, sampled, widths

__all__ = ["LoopResult", "batched", "tutorial"]

Tensor: TypeAlias = Any  # torch.Tensor
State: TypeAlias = dict[str, Tensor]
Step: TypeAlias = Callable[[], None]


class LoopResult(NamedTuple):
    """What a training loop cost and where it ended."""

    cpu_seconds: float
    wall_seconds: float
    client_steps: int
    x: NDArray[np.float32]  # the final model, flat, in the order of `workloads.initial`
    residual: float  # |c - mean of all c_i|: rounding only, if the loop is right
    block: int  # clients run at once


def tutorial(
    workload: Workload,
    rounds: int,
    seed: int,
    threads: int,
    cohorts: Given = None,
    draws: Given = None,
) -> LoopResult:
    """Train with the tutorial's loop.

    Cohorts (R, S) and record numbers (R, S, K, B) may be given.
    """
    rng = np.random.default_rng(seed)
    model = module(workload, seed)
    kind = (
        torch.float32 if workload.model == "logistic" else torch.int64
    )  # as its loss wants the labels
    datasets = [TensorDataset(tensor(x), torch.from_numpy(y).to(kind)) for x, y in workload.clients]
    c = zeros(model)
    memories = [zeros(model) for _ in datasets]
    steps = 0
    with num_threads(threads):
        # The first optimiser of a process makes torch import for seconds: not the loop's fault.
        train_client(
            model, c, c, DataLoader(datasets[0], workload.batch_size, sampler=[0]), workload
        )
        cpu, wall = time.process_time(), time.perf_counter()
        for r in range(rounds):
            replies = []
            for i, records in zip(*sampled(rng, workload, r, cohorts, draws), strict=True):
                loader = DataLoader(
                    datasets[i], workload.batch_size, sampler=records.ravel().tolist()
                )
                steps += len(loader)
                state, change, memories[i] = train_client(model, c, memories[i], loader, workload)
                replies.append((state, change))
            aggregate(model, c, replies, len(datasets))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    off = torch.cat(
        [(c[k] - torch.stack([c_i[k] for c_i in memories]).double().mean(0)).flatten() for k in c]
    )
    x = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    return LoopResult(cpu, wall, steps, x, float(off.norm()), 1)


def tensor(features: NDArray[np.float32]) -> Tensor:
    """Features as they are; pictures with their channels first."""
    found = torch.from_numpy(features)
    return found.movedim(-1, 1).contiguous() if features.ndim == 4 else found


def module(workload: Workload, seed: int) -> Any:
    """The model as an `nn.Sequential`, at its initial parameters."""
    if workload.model in NETWORKS:
        return torch_module(workload.model, workload.classes, seed)
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths(workload)):
        layers += [
            torch.nn.Linear(inputs, outputs, bias=workload.model != "logistic"),
            torch.nn.ReLU(),
        ]
    model = torch.nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), initial(workload, seed), strict=True):
            parameter.copy_(torch.from_numpy(array))
    return model


def zeros(model: Any) -> State:
    """A control variate: zeros under every parameter's name."""
    return {name: torch.zeros_like(p, requires_grad=False) for name, p in model.named_parameters()}


def train_client(
    model: Any, c: State, c_i: State, loader: Any, workload: Workload
) -> tuple[State, State, State]:
    """One client's round: its model, and the change and new value of its control variate."""
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=workload.lr)
    running_loss = 0.0
    for features, labels in loader:
        optimizer.zero_grad()
        loss = mean_loss(local, features, labels, workload)
        loss.backward()
        with torch.no_grad():
            for name, p in local.named_parameters():
                p.grad += c[name] - c_i[name]
        optimizer.step()
        running_loss += loss.item()
    start, end = ({name: p.detach() for name, p in m.named_parameters()} for m in (model, local))
    travel = len(loader) * workload.lr
    new = {name: c_i[name] - c[name] + (start[name] - end[name]) / travel for name in c}
    return end, {name: new[name] - c_i[name] for name in c}, new


def mean_loss(model: Any, features: Tensor, labels: Tensor, workload: Workload) -> Tensor:
    """The loss of a batch, with the penalty of the logistic model."""
    if workload.model != "logistic":
        return functional.cross_entropy(model(features), labels)
    penalty = sum(p.square().sum() for p in model.parameters())
    return (
        functional.binary_cross_entropy_with_logits(model(features).squeeze(1), labels)
        + L2 / 2 * penalty
    )


def aggregate(model: Any, c: State, replies: list[tuple[State, State]], num_clients: int) -> None:
    """The server's half: x is the mean of the models, c moves by the sum of the changes / N."""
    model.load_state_dict(
        {name: sum(state[name] for state, _ in replies) / len(replies) for name in c}
    )
    for _, change in replies:
        for name in c:
            c[name] += change[name] / num_clients


class Federation(NamedTuple):
    """What the batched loop keeps.

    Flat x, c and the cohort's summed move x - y, every c_i, every record.
    """

    x: Tensor
    c: Tensor
    move: Tensor
    memories: list[Tensor]  # all c_i, leaf by leaf: weights (N, out, in), biases (N, out, 1)
    # client after client, a row is features and then targets (one-hot; the label if logistic)
    table: Tensor
    starts: Indices  # a client's first row


class Block(NamedTuple):
    """The parameters of the b clients run at once, and the records of one batch of each."""

    # one vector, leaf after leaf: the correction is one operation and bmm can take each leaf
    y: Tensor
    shift: Tensor  # c - c_i, laid out as y
    y_leaves: list[Tensor]  # views (b, *leaf)
    shift_leaves: list[Tensor]
    records: Tensor  # (b, B, features + targets)


def batched(
    workload: Workload,
    rounds: int,
    seed: int,
    threads: int,
    cohorts: Given = None,
    draws: Given = None,
) -> LoopResult:
    """Train with the batched loop; arguments as for `tutorial`."""
    rng = np.random.default_rng(seed)
    with num_threads(threads), torch.inference_mode():
        fed = assemble(workload, seed)
        block = best_block(workload, fed)
        b, step = allocate(workload, fed, block)
        cpu, wall = time.process_time(), time.perf_counter()
        for r in range(rounds):
            clients, records = sampled(rng, workload, r, cohorts, draws)
            rows = torch.from_numpy(records + fed.starts[clients, None, None])
            for ids, part in zip(
                torch.from_numpy(clients).split(block), rows.split(block), strict=True
            ):
                train_block(workload, fed, b, step, ids, part)
            serve(workload, fed)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        off = fed.c - torch.cat([leaf.double().mean(0).flatten() for leaf in fed.memories])
    steps = rounds * workload.cohort * workload.local_steps
    return LoopResult(cpu, wall, steps, fed.x.numpy(), float(off.norm()), block)


def assemble(workload: Workload, seed: int) -> Federation:
    """The state before the first round, and all data in one table."""
    arrays = initial(workload, seed)
    x = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    sizes = np.array([len(y) for _, y in workload.clients])
    memories = [torch.zeros(len(sizes), *array.reshape(len(array), -1).shape) for array in arrays]
    features, labels = (
        torch.from_numpy(np.concatenate(part)) for part in zip(*workload.clients, strict=True)
    )
    targets = (
        labels[:, None]
        if workload.model == "logistic"
        else functional.one_hot(labels, workload.classes)
    )
    table = torch.cat([features, targets.float()], 1)
    return Federation(
        x, torch.zeros_like(x), torch.zeros_like(x), memories, table, np.cumsum(sizes) - sizes
    )


def allocate(workload: Workload, fed: Federation, width: int) -> tuple[Block, Step]:
    """The buffers of a block of clients, and the local step of them all."""
    inputs, *_, outputs = widths(workload)
    y, shift = fed.x.repeat(width), torch.zeros(width * len(fed.x))
    records = torch.empty(width, workload.batch_size, inputs + outputs)
    b = Block(y, shift, leaves(y, fed, width), leaves(shift, fed, width), records)
    make = logistic_step if workload.model == "logistic" else network_step
    return b, make(workload, b, *records.mT.split([inputs, outputs], 1))


def leaves(vector: Tensor, fed: Federation, width: int = 1) -> list[Tensor]:
    """A flat vector seen as weights (b, out, in) and biases (b, out, 1)."""
    shapes = [(width, *memory.shape[1:]) for memory in fed.memories]
    parts = vector.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def best_block(workload: Workload, fed: Federation) -> int:
    """The divisor of the cohort that costs least CPU time per client in a short trial."""

    def cost(width: int) -> float:
        b, step = allocate(workload, fed, width)
        rows = torch.randint(
            len(fed.table), (width, 4, workload.batch_size), generator=torch.Generator()
        )
        times = timeit.repeat(
            lambda: local_steps(fed, b, step, rows), timer=time.process_time, number=1
        )
        return min(times) / width

    return min((n for n in range(1, workload.cohort + 1) if workload.cohort % n == 0), key=cost)


def train_block(
    workload: Workload, fed: Federation, b: Block, step: Step, ids: Tensor, rows: Tensor
) -> None:
    """One round of a block of clients: K steps, new c_i, and their part of the cohort's move."""
    xs, cs, moves = (leaves(vector, fed) for vector in (fed.x, fed.c, fed.move))
    for y, shift, memory, x, c in zip(
        b.y_leaves, b.shift_leaves, fed.memories, xs, cs, strict=True
    ):
        torch.index_select(memory, 0, ids, out=shift)
        torch.sub(c, shift, out=shift)
        y.copy_(x)
    local_steps(fed, b, step, rows)
    for y, x, move in zip(b.y_leaves, xs, moves, strict=True):
        torch.sub(x, y, out=y)
        move.add_(y.sum(0))
    b.y.mul_(1 / (workload.local_steps * workload.lr)).sub_(b.shift)
    for y, memory in zip(b.y_leaves, fed.memories, strict=True):
        memory.index_copy_(0, ids, y)


def local_steps(fed: Federation, b: Block, step: Step, rows: Tensor) -> None:
    """Steps on the table's rows (b, K, B), batch after batch."""
    records = b.records.flatten(0, 1)
    for batch in rows.transpose(0, 1).flatten(1).unbind():
        torch.index_select(fed.table, 0, batch, out=records)
        step()


def serve(workload: Workload, fed: Federation) -> None:
    """The server's half: x takes the mean move, c goes S/N of the way to the mean direction."""
    num_clients = len(workload.clients)
    fed.x.sub_(fed.move, alpha=1 / workload.cohort)
    fed.c.mul_(1 - workload.cohort / num_clients)
    fed.c.add_(fed.move, alpha=1 / (num_clients * workload.local_steps * workload.lr))
    fed.move.zero_()


def network_step(workload: Workload, b: Block, features: Tensor, targets: Tensor) -> Step:
    """A step on the cross-entropy of one or two layers.

    A record is a column, which is faster than a row.
    """
    scale = -workload.lr / workload.batch_size
    weights, biases = b.y_leaves[::2], b.y_leaves[1::2]
    outputs, errors = (
        [torch.empty(*p.shape[:2], workload.batch_size) for p in biases] for _ in range(2)
    )
    inputs = [features, *outputs[:-1]]
    weights_t, inputs_t = [w.mT for w in weights], [below.mT for below in inputs]
    slopes = [torch.empty_like(p) for p in biases]
    last = len(weights) - 1
    relu_backward = torch.ops.aten.threshold_backward.grad_input

    def step() -> None:
        for i in range(last + 1):
            torch.baddbmm(biases[i], weights[i], inputs[i], out=outputs[i])
            if i < last:
                outputs[i].relu_()
        torch.softmax(outputs[last], 1, out=errors[last]).sub_(targets)
        for i in range(last, -1, -1):
            if i:
                torch.bmm(weights_t[i], errors[i], out=errors[i - 1])
                relu_backward(errors[i - 1], outputs[i - 1], 0, grad_input=errors[i - 1])
            weights[i].baddbmm_(errors[i], inputs_t[i], alpha=scale)
            torch.sum(errors[i], 2, keepdim=True, out=slopes[i])
            biases[i].add_(slopes[i], alpha=scale)
        b.y.sub_(b.shift, alpha=workload.lr)

    return step


def logistic_step(workload: Workload, b: Block, features: Tensor, targets: Tensor) -> Step:
    """A step on the logistic loss and its penalty.

    For so small a matrix product and sum beat `baddbmm`.
    """
    scale = -workload.lr / workload.batch_size
    (w,) = b.y_leaves
    features_t, error, slope = features.mT, torch.empty(targets.shape), torch.empty_like(w)
    products, error_t = torch.empty(features_t.shape), error.mT

    def step() -> None:
        torch.bmm(w, features, out=error).sigmoid_().sub_(targets)
        torch.mul(features_t, error_t, out=products)
        torch.sum(products, 1, keepdim=True, out=slope)
        b.y.mul_(1 - workload.lr * L2).sub_(b.shift, alpha=workload.lr)
        w.add_(slope, alpha=scale)

    return step

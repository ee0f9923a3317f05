"""The runs of Flower's baseline niid_bench on Fashion-MNIST.

As in the baseline (adap/flower, baselines/niid_bench): ten clients, all in every round, weighed by
their pictures; one label each, two labels each, or Dirichlet(0.5); the small CNN of NIID-Bench; 10
local epochs of batches of 64, local step 0.01, momentum 0.9 that begins anew every round, weight
decay 1e-5; the score is the best test accuracy of any round. The splits are the baseline's, draw
for draw. Its command has a seed that does not reach them (`load_datasets` is called without it), so
that all its runs share one split, and runs here do too: a seed chooses a start and the order of the
batches.

Three things are told apart. FedAvg, with momentum and without. SCAFFOLD as the baseline has it:
momentum acts on the gradient alone, c - c_i is added beside it, c_i is computed from the whole move
as if there were no momentum, and c and c_i begin as the model. SCAFFOLD as it should be: momentum
acts on the corrected gradient, c_i is the mean of the raw gradients, both begin at zero. Without
momentum the two are the same, as all clients are present.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import algorithms, data
from fedscaffold.algorithms import Walk, reference, travelled
from fedscaffold.data.dataset import Dataset
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.rewriting import as_products
from papers.cache import digest
from papers.claim import Data, Memo, Part, Settings

__all__ = ["SPLITS", "VARIANTS", "Variant", "depends", "divide", "measure", "play", "start"]

Array = NDArray[Any]
Keep: TypeAlias = Callable[[int, Callable[[], Data]], Data]  # (rounds done, make) -> state
CLIENTS, CLASSES, EPOCHS, BATCH, LR, DECAY = 10, 10, 10, 64, 0.01, 1e-5
SPLIT_SEED = 42  # of every run of the baseline
SEGMENT = 10  # rounds after which the state of a run is kept
LEAST = 10  # records of a client, or the Dirichlet split is drawn again
SPLITS = {"1 label": "labels:1", "2 labels": "labels:2", "Dirichlet 0.5": "dirichlet:0.5"}


class Variant(NamedTuple):
    """A method, its momentum, and where its control variates go wrong."""

    label: str
    algorithm: str
    momentum: float
    as_flower: bool = False


VARIANTS = {
    "fedavg-momentum": Variant("FedAvg, momentum", "fedavg", 0.9),
    "flower-momentum": Variant("SCAFFOLD as in the baseline, momentum", "scaffold", 0.9, True),
    "scaffold-momentum": Variant("SCAFFOLD, momentum", "scaffold", 0.9),
    "fedavg": Variant("FedAvg", "fedavg", 0.0),
    "scaffold": Variant("SCAFFOLD", "scaffold", 0.0),
}


@cache
def _pictures(number: int, test: int) -> Dataset:
    found = data.load("fashion-mnist")
    rng = np.random.default_rng(0)
    some, few = (
        np.sort(rng.permutation(len(y))[:n]) for y, n in ((found.y, number), (found.y_test, test))
    )
    return found._replace(
        x=found.x[some], y=found.y[some], x_test=found.x_test[few], y_test=found.y_test[few]
    )


def divide(labels: Array, split: str) -> list[Array]:
    """Return the records of each client, as the baseline draws them.

    With `labels:K`, client i has label i and K - 1 others at random, and the clients of a label
    share its records evenly. With `dirichlet:A`, the clients' shares of each label are drawn from
    Dirichlet(A); a client that has its tenth of all records already gets no more.
    """
    kind, _, value = split.partition(":")
    rng = np.random.default_rng(SPLIT_SEED)
    if kind == "labels":
        return _by_labels(labels, int(value), rng)
    while True:
        own = _by_shares(labels, float(value), rng)
        if min(len(rows) for rows in own) >= LEAST:
            return own


def _by_labels(labels: Array, number: int, rng: np.random.Generator) -> list[Array]:
    has = np.eye(CLIENTS, CLASSES, dtype=bool)
    for mine in has:
        while mine.sum() < number:
            mine[rng.choice(CLASSES, 1)[0]] = True
    own: list[list[Array]] = [[] for _ in range(CLIENTS)]
    for label in range(CLASSES):
        records = _shuffled(labels, label, rng)
        having = np.flatnonzero(has[:, label])
        for i, some in zip(having, np.array_split(records, len(having)), strict=True):
            own[i].append(some)
    return [np.concatenate(some) for some in own]


def _by_shares(labels: Array, alpha: float, rng: np.random.Generator) -> list[Array]:
    own = [np.zeros(0, int)] * CLIENTS
    for label in range(CLASSES):
        records = _shuffled(labels, label, rng)
        shares = rng.dirichlet(np.full(CLIENTS, alpha))
        shares = shares * [len(rows) < len(labels) / CLIENTS for rows in own]
        ends = (np.cumsum(shares / shares.sum()) * len(records)).astype(int)[:-1]
        parts = np.split(records, ends)
        own = [np.append(rows, some) for rows, some in zip(own, parts, strict=True)]
    return own


def _shuffled(labels: Array, label: int, rng: np.random.Generator) -> Array:
    records = np.flatnonzero(labels == label)
    rng.shuffle(records)
    return records


def start(seed: int) -> tuple[Layout, Array]:
    """Return the network with torch's default start: uniform within 1 / sqrt(inputs)."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in (
        ("conv1", (6, 1, 5, 5)),
        ("conv2", (16, 6, 5, 5)),
        ("fc1", (120, 256)),
        ("fc2", (84, 120)),
        ("fc3", (CLASSES, 84)),
    ):
        most = 1 / math.sqrt(math.prod(shape[1:]))
        params[name] = {
            "w": rng.uniform(-most, most, shape),
            "b": rng.uniform(-most, most, shape[:1]),
        }
    layout = Layout.of(params)
    return layout, layout.flatten(params, "float32")


def scores(params: Any, x: Any) -> Any:
    """Scores of the classes of flat pictures."""
    x = x.reshape(-1, 1, 28, 28)
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, params[name]["w"], (1, 1), "VALID")
        x = jax.nn.relu(x + params[name]["b"][:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for name in ("fc1", "fc2"):
        x = jax.nn.relu(x @ params[name]["w"].T + params[name]["b"])
    return x @ params["fc3"]["w"].T + params["fc3"]["b"]


def loss(params: Any, x: Any, y: Any, weights: Any) -> Any:
    """Weighted cross entropy, and the weight decay."""
    logs = jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], 1)[:, 0]
    size = sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params))
    return -jnp.sum(weights * logs) + 0.5 * DECAY * size


@partial(jax.jit, static_argnums=(0, 1))
def local(
    layout: Layout,
    inside: bool,
    x: Any,
    shift: Any,
    records: Any,
    batches: Any,
    steps: Any,
    momentum: Any,
    lr: Any,
) -> Any:
    """Run the local steps: (the last model, the mean of the corrected gradients).

    `inside`: momentum acts on the corrected gradient; else on the gradient, beside the correction.
    """
    slope = as_products(jax.grad(lambda y, *batch: loss(layout.unflatten(y), *batch)))

    def step(k: Any, carry: Any) -> Any:
        y, velocity, total = carry
        rows, weights = batches[0][k], batches[1][k]
        gradient = slope(y, records[0][rows], records[1][rows], weights)
        velocity = momentum * velocity + gradient + (shift if inside else 0)
        y = y - lr * (velocity if inside else velocity + shift)
        return y, velocity, total + gradient + shift

    y, _, total = jax.lax.fori_loop(0, steps, step, (x, 0 * x, 0 * x))
    return y, total / steps


@partial(jax.jit, static_argnums=0)
def accuracy(layout: Layout, x: Any, pictures: Any, labels: Any) -> Any:
    """Share of pictures that are classified correctly."""
    return jnp.mean(
        jnp.argmax(as_products(scores)(layout.unflatten(x), pictures), axis=1) == labels
    )


def _batches(
    records: Array, room: int, rng: np.random.Generator
) -> tuple[tuple[Array, Array], int]:
    """Rows and weights of ten shuffled epochs, in arrays for `room` batches; the steps."""
    rows, weights = np.zeros((room, BATCH), np.int32), np.zeros((room, BATCH), np.float32)
    k = 0
    for _ in range(EPOCHS):
        order = rng.permutation(records)
        for first in range(0, len(order), BATCH):
            some = order[first : first + BATCH]
            rows[k, : len(some)], weights[k, : len(some)] = some, 1 / len(some)
            k += 1
    return (rows, weights), k


def play(
    variant: Variant,
    pictures: Dataset,
    split: str,
    seed: int,
    rounds: int,
    lr: float = LR,
    keep: Keep = lambda until, make: make(),
) -> Data:
    """Run a variant: test accuracy after every round, and the last model.

    A model that is not finite stays so, and so does its accuracy: nothing is computed any more.
    `keep(until, make)` returns the state after every tenth round: it makes it, or has it of a run
    that was interrupted, which then goes on from there.
    """
    layout, x0 = start(seed)
    rng = np.random.default_rng(seed)
    algorithm = algorithms.make(variant.algorithm)
    clients = _clients(variant, layout, pictures, split, rng, lr)
    begun = _begin(variant, algorithm, x0)

    def advance(before: Data, until: int) -> Data:
        rng.bit_generator.state = before["rng"]
        state = jax.tree.unflatten(jax.tree.structure(begun), before["state"])
        seen = before["accuracy"].tolist()
        while len(seen) < until:
            state = reference.play(algorithm, state, clients, range(CLIENTS))
            found = float(accuracy(layout, state.server.x, pictures.x_test, pictures.y_test))
            finite = np.isfinite(state.server.x).all()
            seen += [found] * (1 if finite else rounds - len(seen))
        return {
            "accuracy": np.array(seen),
            "model": np.asarray(state.server.x),
            "state": jax.tree.leaves(state),
            "rng": rng.bit_generator.state,
        }

    leaves, draws = jax.tree.leaves(begun), rng.bit_generator.state
    first: Data = {"accuracy": np.zeros(0), "state": leaves, "rng": draws}

    def reach(until: int) -> Data:
        if until == 0:
            return first
        return keep(until, lambda: advance(reach(until - SEGMENT), until))

    last = advance(reach((rounds - 1) // SEGMENT * SEGMENT), rounds)
    return {name: last[name] for name in ("accuracy", "model")}


def _begin(variant: Variant, algorithm: Any, x0: Array) -> reference.State:
    """The state before the first round: with c and c_i as the baseline begins them."""
    state = reference.begin(algorithm, x0, CLIENTS)
    if not variant.as_flower:
        return state
    memory = tuple(one._replace(c_i=x0) for one in state.memory)
    return state._replace(server=state.server._replace(c=x0), memory=memory)


def _clients(
    variant: Variant,
    layout: Layout,
    pictures: Dataset,
    split: str,
    rng: np.random.Generator,
    lr: float,
) -> reference.Federation:
    """The ten clients, who draw their batches from `rng`."""
    own = divide(pictures.y, split)
    records = jnp.asarray(pictures.x), jnp.asarray(pictures.y)
    room = EPOCHS * -(-len(pictures.y) // BATCH)  # for any split: one compiled program for all

    def descend(i: int, begun: Array, x: Array, shift: Any) -> Walk:
        batches, steps = _batches(own[i], room, rng)
        shift = np.zeros_like(x) if shift is None else shift
        inside = not variant.as_flower
        end, mean = local(layout, inside, x, shift, records, batches, steps, variant.momentum, lr)
        y, d = np.asarray(end), np.asarray(mean)
        if variant.as_flower:
            d = travelled(begun, y, steps, lr)
        return Walk(move=lambda: begun - y, d=lambda: d)

    return reference.Federation([len(rows) / len(pictures.y) for rows in own], descend)


def _part(name: str, split: str, seed: int, pictures: Dataset, rounds: int, memo: Memo) -> Part:
    """A run; what is kept of it is small, as it may become part of the repository."""
    key = f"{SPLITS[split]}-{name}-{seed}".replace(":", "")

    def make() -> Data:
        keep: Keep = lambda until, advance: memo(f"{key}-round-{until}", advance)  # noqa: E731
        found = play(VARIANTS[name], pictures, SPLITS[split], seed, rounds, keep=keep)
        return {"accuracy": found["accuracy"]}

    return Part(key, make)


def measure(settings: Settings, memo: Memo) -> Data:
    """Every variant on every split from every seed."""
    pictures = _pictures(settings["pictures"], settings["test"])
    asked = [
        (split, name, seed)
        for split in settings["splits"]
        for name in settings["variants"]
        for seed in settings["seeds"]
    ]
    parts = [
        _part(name, split, seed, pictures, settings["rounds"], memo) for split, name, seed in asked
    ]
    found: dict[str, dict[str, list[Array]]] = {split: {} for split in settings["splits"]}
    for (split, name, _), one in zip(asked, memo.all(parts), strict=True):
        found[split].setdefault(name, []).append(one["accuracy"])
    cells = {
        split: {name: np.stack(curves) for name, curves in some.items()}
        for split, some in found.items()
    }
    about = (
        f"Fashion-MNIST: {settings['pictures']:,} of 60,000 pictures for training, "
        f"{settings['test']:,} for the test, {settings['rounds']} rounds (50 published), seeds "
        f"{settings['seeds']}."
    )
    return {"cells": cells, "about": [about]}


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    found = _pictures(settings["pictures"], settings["test"])
    return digest(found.y, found.y_test, found.x[::50], found.x_test[::50])

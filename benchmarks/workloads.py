"""The work loads of the speed benchmark: float32 NumPy data with a fixed seed, the same for every contestant.

    name  model             clients x records    cohort  local steps  batch  lr    rounds
    w1    MLP 32-64-10      50 x 50-199          5       20           32     0.1   50
    w2    softmax 784-10    1000 x 60            10      6            10     0.05  100
    w3    MLP 784-300-62    100 x 1000           20      25           200    0.1   4
    w4    logistic, d = 20  100 x 200            all     100          10     0.05  10

Batches are drawn with replacement, cohorts without. Losses are means over the batch: cross-entropy for `mlp`
(one ReLU layer) and `softmax`; for `logistic`, which has no bias, the logistic loss of labels in {0, 1} plus
L2 / 2 |w|^2. The data are synthetic: only their shapes matter to the time a simulator takes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks

__all__ = ["L2", "WORKLOADS", "Workload", "initial", "sampled", "w1", "w2", "w3", "w4", "widths"]

Arrays: TypeAlias = list[NDArray[np.float32]]
Indices: TypeAlias = NDArray[np.int64]
Given: TypeAlias = Indices | None
Client: TypeAlias = tuple[NDArray[np.float32], Indices]

DATA_SEED = 18  # one data set per work load, whatever the seed of a run
LABEL_SKEW = 0.1  # Dirichlet parameter of a client's label shares: small is heterogeneous
L2 = 0.01


class Workload(NamedTuple):
    """One federation to simulate; client i holds records x (n_i, features) with labels y (n_i,)."""

    name: str
    clients: list[Client]
    model: Literal["mlp", "softmax", "logistic"]
    hidden: int
    """Width of the one hidden layer; 0 where there is none."""
    classes: int
    cohort: int
    local_steps: int
    batch_size: int
    lr: float
    rounds: int


def w1(num_clients: int = 50) -> Workload:
    """The tutorial's federation: a small MLP, few clients a round; any number of clients to choose from.

    >>> len(w1().clients), w1().clients[0][0].shape[1], widths(w1())
    (50, 32, [32, 64, 10])
    """
    num_clients = checks.whole("num_clients", num_clients, at_least=5)
    rng = np.random.default_rng(DATA_SEED)
    sizes = rng.integers(50, 200, num_clients)
    labels = skewed_labels(rng, sizes, 10)
    features = rng.standard_normal((len(labels), 32), np.float32)
    features[np.arange(len(labels)), labels] += 2
    return Workload("w1", divided(features, labels, sizes), "mlp", 64, 10, 5, 20, 32, 0.1, 50)


def w2() -> Workload:
    """Softmax regression at the size of MNIST, with many small clients and short rounds."""
    clients = noisy_prototypes(np.full(1000, 60), classes=10)
    return Workload("w2", clients, "softmax", 0, 10, 10, 6, 10, 0.05, 100)


def w3() -> Workload:
    """An MLP at the size of EMNIST: nearly all the time goes into matrix products."""
    clients = noisy_prototypes(np.full(100, 1000), classes=62)
    return Workload("w3", clients, "mlp", 300, 62, 20, 25, 200, 0.1, 4)


def w4(num_clients: int = 100) -> Workload:
    """Logistic regression with every client in every round, as in the paper on stochastic gradients.

    Half of the clients draw their labels from one true model, half from another.
    """
    num_clients = checks.whole("num_clients", num_clients, at_least=2)
    rng = np.random.default_rng(DATA_SEED)
    features = rng.standard_normal((num_clients, 200, 20), np.float32)
    truth = rng.standard_normal((2, 20), np.float32)[np.arange(num_clients) * 2 // num_clients]
    chance = 1 / (1 + np.exp(-np.einsum("nij,nj->ni", features, truth)))
    labels = (rng.random(chance.shape) < chance).astype(np.int64)
    return Workload("w4", list(zip(features, labels, strict=True)), "logistic", 0, 2, num_clients, 100, 10, 0.05, 10)


WORKLOADS: dict[str, Callable[..., Workload]] = {"w1": w1, "w2": w2, "w3": w3, "w4": w4}


def widths(workload: Workload) -> list[int]:
    """The layer widths of the model, input first; the logistic model has one output."""
    features = workload.clients[0][0].shape[1]
    outputs = 1 if workload.model == "logistic" else workload.classes
    return [features, workload.hidden, outputs] if workload.model == "mlp" else [features, outputs]


def initial(workload: Workload, seed: int) -> Arrays:
    """The parameters to start from: for every layer its weights (out, in), then its bias (out,).

    Weights are normal with variance 2 / in before a ReLU and 1 / in elsewhere; biases are zero.

    >>> [array.shape for array in initial(w1(), seed=0)]
    [(64, 32), (64,), (10, 64), (10,)]
    """
    rng = np.random.default_rng(seed)
    layers = list(pairwise(widths(workload)))
    arrays: Arrays = []
    for depth, (inputs, outputs) in enumerate(layers):
        gain = 2.0 if depth + 1 < len(layers) else 1.0
        arrays.append(rng.standard_normal((outputs, inputs), np.float32) * np.float32((gain / inputs) ** 0.5))
        if workload.model != "logistic":
            arrays.append(np.zeros(outputs, np.float32))
    return arrays


def sampled(
    rng: np.random.Generator, workload: Workload, r: int = 0, cohorts: Given = None, draws: Given = None
) -> tuple[Indices, Indices]:
    """The clients of round r (S,), without replacement, and the numbers of their records (S, K, B), with.

    They are drawn, unless the cohorts (R, S) and draws (R, S, K, B) of all rounds are given.

    >>> clients, records = sampled(np.random.default_rng(0), w1())
    >>> len(set(clients)), records.shape
    (5, (5, 20, 32))
    """
    if cohorts is not None and draws is not None:
        return cohorts[r], draws[r]
    clients = rng.choice(len(workload.clients), workload.cohort, replace=False)
    sizes = np.array([len(workload.clients[i][1]) for i in clients])
    uniform = rng.random((workload.cohort, workload.local_steps, workload.batch_size), np.float32)
    return clients, (uniform * sizes[:, None, None]).astype(np.int64)


def noisy_prototypes(sizes: Indices, classes: int) -> list[Client]:
    """Clients with 784 features: the label's prototype plus noise, of about the norm of an MNIST picture."""
    rng = np.random.default_rng(DATA_SEED)
    prototypes = 0.2 * rng.standard_normal((classes, 784), np.float32)
    labels = skewed_labels(rng, sizes, classes)
    features = rng.standard_normal((len(labels), 784), np.float32)
    features *= np.float32(0.3)
    features += prototypes[labels]
    return divided(features, labels, sizes)


def skewed_labels(rng: np.random.Generator, sizes: Indices, classes: int) -> Indices:
    """Labels of all clients, one after the other; each client has its own Dirichlet shares."""
    shares = rng.dirichlet(np.full(classes, LABEL_SKEW), len(sizes))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    passed = rng.random((len(owner), 1)) > np.cumsum(shares, axis=1)[owner, :-1]
    labels: Indices = passed.sum(axis=1)
    return labels


def divided(features: NDArray[np.float32], labels: Indices, sizes: Indices) -> list[Client]:
    """Clients of the given sizes, as views of the arrays that hold them one after the other."""
    ends = np.cumsum(sizes)
    return [(features[a:b], labels[a:b]) for a, b in zip(ends - sizes, ends, strict=True)]

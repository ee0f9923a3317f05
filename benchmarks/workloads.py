"""The work loads of the speed benchmark.

Float32 NumPy data with a fixed seed, the same for every contestant.

    name  model             clients x records    cohort  local steps  batch  lr    rounds
    w1    MLP 32-64-10      50 x 50-199          5       20           32     0.1   50
    w2    softmax 784-10    1000 x 60            10      6            10     0.05  100
    w3    MLP 784-300-62    100 x 1000           20      25           200    0.1   4
    w4    logistic, d = 20  100 x 200            all     100          10     0.05  10
    w5    LeNet             50 x 200             10      10           20     0.05  3
    w6    CNN, 2 x (3x3)    520 writers, 1-44    50      one epoch    10     0.05  2
    w7    LSTM, characters  141 speakers         10      20           10     0.5   1
    w8    ResNet-8          20 x 100             5       5            32     0.05  3
    w9    w5 as a torch module
    w10   LeNet-5           50 x 200             10      10           64     0.05  3

Batches are drawn with replacement, cohorts without. Losses are means over the batch: cross-entropy
for `mlp` (one ReLU layer) and `softmax`; for `logistic`, which has no bias, the logistic loss of
labels in {0, 1} plus L2 / 2 |w|^2. The data are synthetic: only their shapes matter to the time a
simulator takes. The networks of w5 to w10 are in `networks`; w5, w6, w9 and w10 take EMNIST's
pictures and w7 the speakers of tinyshakespeare where FEDSCAFFOLD_DATA has them, else random ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks

__all__ = ["L2", "WORKLOADS", "Workload", "initial", "num_steps", "sampled"]
__all__ += ["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9", "w10", "widths"]

Arrays: TypeAlias = list[NDArray[np.float32]]
Indices: TypeAlias = NDArray[np.int64]
Given: TypeAlias = Indices | None
Client: TypeAlias = tuple[NDArray[np.float32], Indices]

DATA_SEED = 18  # one data set per work load, whatever the seed of a run
LABEL_SKEW = 0.1  # Dirichlet parameter of a client's label shares: small is heterogeneous
L2 = 0.01
SPEAKERS, LEAST, LENGTH = 141, 1000, 40  # of w7: clients, characters of one, characters of a record


class Workload(NamedTuple):
    """One federation to simulate.

    Client i holds records x (n_i, features) or pictures with labels y (n_i,).
    """

    name: str
    clients: list[Client]
    model: Literal["mlp", "softmax", "logistic", "lenet", "lenet5", "cnn", "resnet8", "lstm"]
    hidden: int
    """Width of the one hidden layer; 0 where there is none."""
    classes: int
    cohort: int
    local_steps: int
    """Local steps of every client; 0 for one epoch."""
    batch_size: int
    lr: float
    rounds: int


def w1(num_clients: int = 50) -> Workload:
    """The tutorial's federation: a small MLP, few clients a round.

    Any number of clients to choose from.

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
    """Logistic regression with all clients in every round, as in the paper on stochastic gradients.

    Half of the clients draw their labels from one true model, half from another.
    """
    num_clients = checks.whole("num_clients", num_clients, at_least=2)
    rng = np.random.default_rng(DATA_SEED)
    features = rng.standard_normal((num_clients, 200, 20), np.float32)
    truth = rng.standard_normal((2, 20), np.float32)[np.arange(num_clients) * 2 // num_clients]
    chance = 1 / (1 + np.exp(-np.einsum("nij,nj->ni", features, truth)))
    labels = (rng.random(chance.shape) < chance).astype(np.int64)
    return Workload(
        "w4",
        list(zip(features, labels, strict=True)),
        "logistic",
        0,
        2,
        num_clients,
        100,
        10,
        0.05,
        10,
    )


def w5() -> Workload:
    """LeNet on EMNIST."""
    pictures, labels = _pictures("emnist_byclass62.npz", "x_train", "y_train", 10_000)
    clients = divided(pictures[:10_000], labels[:10_000], np.full(50, 200))
    return Workload("w5", clients, "lenet", 0, 62, 10, 10, 20, 0.05, 3)


def w6() -> Workload:
    """A CNN of two 3x3 convolutions on FEMNIST by writer, one epoch a round."""
    pictures, labels = _pictures("femnist_writers.npz", "x", "y", 11_687)
    found = _file("femnist_writers.npz")
    if found is None:
        writer = np.sort(np.random.default_rng(DATA_SEED).integers(0, 520, len(labels)))
    else:
        with np.load(found) as data:
            writer = data["writer"]
    order = np.argsort(writer, kind="stable")
    sizes = np.bincount(writer)
    return Workload(
        "w6", divided(pictures[order], labels[order], sizes), "cnn", 0, 62, 50, 0, 10, 0.05, 2
    )


def w7() -> Workload:
    """An LSTM that predicts the next character, on tinyshakespeare by speaker."""
    texts = _speeches()
    characters = sorted(set("".join(texts)))
    number = {character: j for j, character in enumerate(characters)}
    clients = []
    for text in texts:
        codes = np.array([number[character] for character in text], np.int64)
        rows = (len(codes) - 1) // LENGTH
        x, y = (codes[j : j + rows * LENGTH].reshape(rows, LENGTH) for j in (0, 1))
        clients.append((x, y))
    return Workload("w7", clients, "lstm", 0, len(characters), 10, 20, 10, 0.5, 1)  # type: ignore[arg-type]


def _speeches() -> list[str]:
    """The text of each speaker with enough characters, or random letters."""
    found = _file("tinyshakespeare.txt")
    if found is None:
        rng = np.random.default_rng(DATA_SEED)
        sizes = rng.integers(LEAST, 14 * LEAST, SPEAKERS)
        return ["".join(map(chr, rng.integers(32, 97, size))) for size in sizes]
    speeches: dict[str, str] = {}
    for part in found.read_text().split("\n\n"):
        speaker, _, words = part.partition(":\n")
        speeches[speaker] = speeches.get(speaker, "") + words + "\n"
    return [text for text in speeches.values() if len(text) >= LEAST]


def w9() -> Workload:
    """The network of w5 as a torch module."""
    return w5()._replace(name="w9")


def w8() -> Workload:
    """ResNet-8 on random pictures, 32 x 32, three colours."""
    rng = np.random.default_rng(DATA_SEED)
    pictures = rng.standard_normal((2000, 32, 32, 3), np.float32)
    clients = divided(pictures, rng.integers(0, 10, 2000), np.full(20, 100))
    return Workload("w8", clients, "resnet8", 0, 10, 5, 5, 32, 0.05, 3)


def w10() -> Workload:
    """The classic LeNet, with few features, on EMNIST."""
    return w5()._replace(name="w10", model="lenet5", batch_size=64)


def _file(name: str) -> Path | None:
    """A file of the data folder, or None."""
    folder = os.environ.get("FEDSCAFFOLD_DATA")
    places = (
        []
        if folder is None
        else [Path(folder, *inner, name) for inner in ((), ("emnist",), ("text",))]
    )
    return next((path for path in places if path.exists()), None)


def _pictures(name: str, x: str, y: str, size: int) -> tuple[NDArray[np.float32], Indices]:
    """Grey pictures (n, 28, 28, 1) with values from 0 to 1 and labels of a file, or random ones."""
    found = _file(name)
    if found is None:
        rng = np.random.default_rng(DATA_SEED)
        return rng.random((size, 28, 28, 1), np.float32), rng.integers(0, 62, size)
    with np.load(found) as data:
        return data[x][..., None].astype(np.float32) / np.float32(255), data[y].astype(np.int64)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "w1": w1,
    "w2": w2,
    "w3": w3,
    "w4": w4,
    "w5": w5,
    "w6": w6,
    "w7": w7,
    "w8": w8,
    "w9": w9,
    "w10": w10,
}


def num_steps(workload: Workload) -> float:
    """Client steps of all rounds; with epochs, the expected number.

    >>> num_steps(w1())
    5000
    """
    steps: float = workload.local_steps
    if not steps:
        steps = float(np.mean([-(-len(y) // workload.batch_size) for _, y in workload.clients]))
    return workload.rounds * workload.cohort * steps


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
        arrays.append(
            rng.standard_normal((outputs, inputs), np.float32) * np.float32((gain / inputs) ** 0.5)
        )
        if workload.model != "logistic":
            arrays.append(np.zeros(outputs, np.float32))
    return arrays


def sampled(
    rng: np.random.Generator,
    workload: Workload,
    r: int = 0,
    cohorts: Given = None,
    draws: Given = None,
) -> tuple[Indices, Any]:
    """The clients of round r (S,), drawn without replacement, and their records (S, K, B), with.

    For an epoch, they are the numbers of all records of each client, in random order. They are
    drawn, unless the cohorts (R, S) and draws (R, S, K, B) of all rounds are given.

    >>> clients, records = sampled(np.random.default_rng(0), w1())
    >>> len(set(clients)), records.shape
    (5, (5, 20, 32))
    """
    if cohorts is not None and draws is not None:
        return cohorts[r], draws[r]
    clients = rng.choice(len(workload.clients), workload.cohort, replace=False)
    sizes = np.array([len(workload.clients[i][1]) for i in clients])
    if not workload.local_steps:
        return clients, [rng.permutation(size) for size in sizes]
    uniform = rng.random((workload.cohort, workload.local_steps, workload.batch_size), np.float32)
    return clients, (uniform * sizes[:, None, None]).astype(np.int64)


def noisy_prototypes(sizes: Indices, classes: int) -> list[Client]:
    """Clients with 784 features.

    The label's prototype plus noise, of about the norm of an MNIST picture.
    """
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

"""Softmax regression and a two-layer network, for any number of classes.

Weights are stored as (out, in), records are columns, and the loss selects the true class with a
one-hot product; all three are fast on CPU kernels. Loss objects with equal parameters are equal, so
problems that are built twice share one compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Facts, Problem
from fedscaffold.problems.records import tables

__all__ = ["mlp", "softmax"]

Client = tuple[NDArray[Any], NDArray[Any]]


def softmax(
    clients: Sequence[Client],
    *,
    classes: int | None = None,
    l2: float = 0.0,
    test: Client | None = None,
) -> Problem:
    """Softmax (multinomial logistic) regression on clients with x (n, features) and labels y (n,).

    >>> rng = np.random.default_rng(0)
    >>> clients = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (5, 9)]
    >>> softmax(clients, classes=3)
    Problem(softmax regression, 2 clients, 14 records, d = 15)
    """
    clients, l2 = tables(clients), checks.number("l2", l2, at_least=0)
    features, classes = _sizes(clients, classes, test)
    params = {"w": np.zeros((classes, features)), "b": np.zeros(classes)}
    smoothness = 0.5 * max(_largest_eigenvalue(x) for x, _ in clients) + l2
    facts = Facts(mu=l2 if l2 > 0 else None, smoothness=smoothness)
    loss = CrossEntropy(classes, l2)
    about: dict[str, Any] = {"test": test, "accuracy": accuracy, "facts": facts, "coupled": False}
    return Problem(loss, params, _typed(clients), **about, name="softmax regression")


def mlp(
    clients: Sequence[Client],
    hidden: int = 300,
    *,
    classes: int | None = None,
    l2: float = 0.0,
    test: Client | None = None,
    seed: int = 0,
) -> Problem:
    """Two-layer network with ReLU between, on clients that hold x (n, features) and labels y (n,).

    The weights start Gaussian with variance 2 / inputs, drawn from `seed`.

    >>> rng = np.random.default_rng(0)
    >>> clients = [(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in (5, 9)]
    >>> mlp(clients, 8, classes=3)
    Problem(two-layer network, 2 clients, 14 records, d = 67)
    """
    clients = tables(clients)
    features, classes = _sizes(clients, classes, test)
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    widths = [features, checks.whole("hidden", hidden), classes]
    checks.fits(f"a network with {hidden} hidden units", 8 * hidden * (features + classes))
    params = [
        {"w": rng.normal(size=(out, into)) * np.sqrt(2 / into), "b": np.zeros(out)}
        for into, out in pairwise(widths)
    ]
    loss = CrossEntropy(classes, checks.number("l2", l2, at_least=0))
    about: dict[str, Any] = {"test": test, "accuracy": accuracy, "coupled": False}
    return Problem(loss, params, _typed(clients), **about, name="two-layer network")


def logits(params: Any, x: Any) -> Any:
    """Scores (classes, n) of records (n, features): one layer, or two with ReLU between."""
    layers = [params] if isinstance(params, dict) else params
    x = x.T
    for layer in layers[:-1]:
        x = jax.nn.relu(layer["w"] @ x + layer["b"][:, None])
    return layers[-1]["w"] @ x + layers[-1]["b"][:, None]


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross entropy over a batch, plus l2/2 |params|^2."""

    classes: int
    l2: float

    def __call__(self, params: Any, batch: Any) -> Any:
        """(params, (x, y)) -> loss."""
        x, y = batch
        scores = jax.nn.log_softmax(logits(params, x), axis=0)
        chosen = jax.nn.one_hot(y, self.classes, dtype=scores.dtype, axis=0)
        value = -jnp.sum(scores * chosen) / len(y)
        if self.l2:
            value += 0.5 * self.l2 * sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params))
        return value


def accuracy(params: Any, batch: Any) -> Any:
    """(params, (x, y)) -> share of records whose highest score is the right class's."""
    x, y = batch
    scores = logits(params, x)
    return jnp.mean(jnp.argmax(scores, axis=0) == y, dtype=scores.dtype)


def _sizes(clients: Sequence[Client], classes: int | None, test: Client | None) -> tuple[int, int]:
    """Numbers of features and classes, with the labels checked."""
    labels = np.concatenate(
        [np.asarray(y).ravel() for _, y in clients]
        + ([] if test is None else [np.asarray(test[1])])
    )
    if labels.size == 0 or (labels != labels.astype(np.int64)).any() or labels.min() < 0:
        raise InputError("labels must be whole numbers from 0")
    classes = (
        int(labels.max()) + 1 if classes is None else checks.whole("classes", classes, at_least=2)
    )
    if labels.max() >= classes:
        raise InputError(f"labels must be below classes = {classes}, got {int(labels.max())}")
    features, classes = np.shape(clients[0][0])[-1], max(2, classes)
    checks.fits(f"a model of {features} features and {classes} classes", 8 * features * classes)
    return features, classes


def _typed(clients: Sequence[Client]) -> list[Client]:
    return [(np.asarray(x, np.float32), np.asarray(y, np.int32)) for x, y in clients]


def _largest_eigenvalue(x: NDArray[Any]) -> float:
    """Of the mean of [x, 1][x, 1]' over a client's records.

    By the smaller of the two Gram matrices.
    """
    rows = np.hstack([np.asarray(x, np.float64), np.ones((len(x), 1))])
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return float(np.linalg.eigvalsh(gram)[-1]) / len(rows)

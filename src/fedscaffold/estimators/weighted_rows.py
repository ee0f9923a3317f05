"""Problems of the estimators: weights of rows and a penalty that are data, not constants.

    f_i(w) = sum_r s_r loss_r(w) / sum_r s_r + l2/2 |w|^2        rows r of client i with weights s_r

The compiled program takes weights and penalty as inputs, so fits with other values do not compile
again. Each row carries its weight, scaled to mean 1 over the client's rows, and the penalty; f_i is
then a mean over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import problems
from fedscaffold.problems import Problem
from fedscaffold.problems.models import logits
from fedscaffold.problems.problem import Facts
from fedscaffold.problems.regression import log_loss

__all__ = ["Client", "weighted_problem"]

Client = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Features, targets and weights of a client's rows."""
CURVATURE = {"softmax": 0.5, "logistic": 0.25, "linear": 1.0}
"""Bound on the second derivative of a row's loss by its score."""


@dataclass(frozen=True)
class RowLoss:
    """Weighted mean of the rows' losses, plus the penalty."""

    model: str
    classes: int = 0

    def __call__(self, params: Any, batch: Any) -> Any:
        """(params, (x, y, weights, l2)) -> loss."""
        x, y, weights, l2 = batch
        squares = sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params))
        return jnp.mean(weights * self._rows(params, x, y)) + 0.5 * jnp.mean(l2) * squares

    def _rows(self, params: Any, x: Any, y: Any) -> Any:
        if self.model == "linear":
            error = x @ params - y
            return 0.5 * error * error
        if self.model == "logistic":
            return log_loss(x @ params, y)
        scores = jax.nn.log_softmax(logits(params, x), axis=0)
        chosen = jax.nn.one_hot(y, self.classes, dtype=scores.dtype, axis=0)
        return -jnp.sum(scores * chosen, axis=0)


def weighted_problem(
    model: str,
    clients: Sequence[Client],
    *,
    l2: float,
    classes: int = 0,
    hidden: int = 0,
    seed: int = 0,
) -> Problem:
    """Return the problem of an estimator.

    Args:
        model: "softmax", "mlp", "logistic" or "linear"; the last two have the intercept as last
            parameter.
        clients: The rows of each client; weights are positive.
        l2: The penalty.
        classes: Number of classes.
        hidden: Width of the hidden layer of "mlp".
        seed: Seed of the initial weights of "mlp".

    >>> rows = np.array([[1.0], [2.0]]), np.array([3.0, 5.0]), np.array([1.0, 1.0])
    >>> weighted_problem("linear", [rows], l2=0.0)
    Problem(linear regression, 1 clients, 2 records, d = 2)
    """
    held = [(x, y) for x, y, _ in clients]
    if model == "softmax":
        plain = problems.softmax(held, classes=classes, l2=l2)
    elif model == "mlp":
        plain = problems.mlp(held, hidden, classes=classes, l2=l2, seed=seed)
    else:
        held = [(np.hstack([x, np.ones((len(x), 1))]), y) for x, y in held]
        plain = (problems.linear if model == "linear" else problems.logistic)(held, l2=l2)
    kinds = [leaf.dtype for leaf in plain.records]
    records = []
    for (x, y), (_, _, weights) in zip(held, clients, strict=True):
        scaled = np.asarray(weights, np.float64) / np.mean(weights)
        records.append(
            (np.asarray(x, kinds[0]), np.asarray(y, kinds[1]), scaled, np.full(len(x), float(l2)))
        )
    smoothness = plain.smoothness
    if smoothness is not None and any((weights != weights[0]).any() for *_, weights in clients):
        smoothness = l2 + CURVATURE[model] * max(
            _largest_eigenvalue(x, weights) for x, _, weights in clients
        )
    loss = RowLoss("softmax" if model == "mlp" else model, classes)
    facts = Facts(mu=l2 if l2 > 0 else None, smoothness=smoothness)
    return Problem(loss, plain.params, records, facts=facts, coupled=False, name=plain.name)


def _largest_eigenvalue(x: NDArray[Any], weights: NDArray[Any]) -> float:
    """Return the largest eigenvalue of the weighted mean of [x, 1][x, 1]'."""
    rows = np.hstack([np.asarray(x, np.float64), np.ones((len(x), 1))])
    rows = rows * np.sqrt(weights / weights.sum())[:, None]
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return float(np.linalg.eigvalsh(gram)[-1])

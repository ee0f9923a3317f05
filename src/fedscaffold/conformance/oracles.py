"""Independent oracles: other methods and equivalent forms that SCAFFOLD must agree with.

Nothing here uses `fedscaffold.algorithms`, so that an error there cannot confirm itself.
"""

from __future__ import annotations

import numpy as np

from fedscaffold.conformance.case import Array, Case, Trace

__all__ = [
    "centred",
    "clipped",
    "descent",
    "large_batch",
    "local_steps",
    "optimum",
    "rounding",
    "saga",
    "size",
    "statistics",
]


def gradients(case: Case, y: Array) -> Array:
    """Return all clients' gradients, each at its own row of y."""
    each: Array = np.einsum("nij,nj->ni", case.hessians, y)
    return each - case.linear


def optimum(case: Case) -> Array:
    """Return the minimiser of sum p_i f_i.

    >>> from fedscaffold.conformance.federations import GOLDEN_CENTRED
    >>> optimum(GOLDEN_CENTRED)
    array([0.4])
    """
    hessian: Array = np.einsum("n,nij->ij", case.weights, case.hessians)
    return np.asarray(np.linalg.solve(hessian, case.weights @ case.linear), np.float64)


def large_batch(case: Case) -> Array:
    """Return x of every round of large-batch SGD: x <- x - lr * server_lr * sum p_i grad f_i(x)."""
    xs = [case.x0]
    for _ in range(case.rounds):
        everywhere = np.tile(xs[-1], (case.num_clients, 1))
        xs.append(
            xs[-1] - case.lr[0] * case.server_lr * (case.weights @ gradients(case, everywhere))
        )
    return np.stack(xs)


def descent(case: Case) -> Array:
    """Return x of every round of gradient descent on the first client's loss, K steps each."""
    xs = [case.x0]
    for _ in range(case.rounds):
        y = xs[-1]
        for lr in case.lr[: case.local_steps[0]]:
            y = y - lr * (case.hessians[0] @ y - case.linear[0])
        xs.append(y)
    return np.stack(xs)


def saga(case: Case, met: bool = False) -> Trace:
    """Run SAGA (Defazio et al. 2014): one client a round, and a table of the last gradient of each.

    x <- x - lr * (grad f_j(x) - table_j + mean of table),   then table_j <- grad f_j(x)

    With `met` the mean is over the rows of the table that have been filled.
    """
    x, table, filled = case.x0, np.zeros_like(case.linear), set[int]()
    states = [(x, table.mean(0), table)]
    for (j,) in case.cohorts:
        new = case.hessians[j] @ x - case.linear[j]
        x = x - case.lr[0] * (new - table[j] + states[-1][1])
        table = np.where(np.arange(case.num_clients)[:, None] == j, new, table)
        filled.add(j)
        states.append((x, table.sum(0) / (len(filled) if met else case.num_clients), table))
    return Trace(*(np.stack(column) for column in zip(*states, strict=True)))


def local_steps(case: Case, i: int, x: Array, c: Array, c_i: Array) -> tuple[Array, Array]:
    """Run client i's local steps from states (..., d); return the end and the gradients.

    m <- momentum * m + clipped(clipped(grad f_i(y)) + c - c_i),   y <- y - lr m
    """
    y, m, seen = x, np.zeros_like(x), []
    for lr in case.lr[: case.local_steps[i]]:
        g = clipped(y @ case.hessians[i] - case.linear[i], case.clip)  # a Hessian is symmetric
        m = case.momentum * m + clipped(g + c - c_i, case.clip_corrected)
        y = y - lr * m
        seen.append(g)
    return y, np.array(seen)


def clipped(vectors: Array, bound: float | None) -> Array:
    """Scale vectors, (..., d), down to a norm of at most `bound`.

    >>> clipped(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    if bound is None:
        return vectors
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    shortened: Array = vectors * (bound / np.maximum(norms, bound))
    return shortened


def statistics(case: Case) -> Array:
    """Return the running statistics of every round, averaged over the clients heard."""
    means = [np.asarray(case.buffers, np.float64)]
    for r in range(case.rounds):
        heard = np.array(case.heard(r), int)
        kept = 0.9 ** np.array([case.local_steps[i] for i in heard])[:, None]
        ends = kept * means[-1] + (1 - kept) * case.linear[heard, : len(means[0])]
        means.append(
            case.weights[heard] @ ends / case.weights[heard].sum() if len(heard) else means[-1]
        )
    return np.stack(means)


def centred(case: Case) -> tuple[Array, Array]:
    """Run SCAFFOLD in its centred form with all clients, where xi_i stands for c - c_i.

    y_i <- y_i - lr * (grad f_i(y_i) + xi_i)     K times from y_i = x
    x   <- x + server_lr * (mean y - x),         xi_i <- xi_i + (y_i - mean y) / (K lr)

    Returns:
        x and xi of every round.
    """
    x, xi = case.x0, np.zeros_like(case.linear)
    xs, xis = [x], [xi]
    for _ in range(case.rounds):
        y = np.tile(x, (case.num_clients, 1))
        for lr in case.lr:
            y = y - lr * (gradients(case, y) + xi)
        mean = case.weights @ y
        x, xi = x + case.server_lr * (mean - x), xi + (y - mean) / sum(case.lr)
        xs.append(x)
        xis.append(xi)
    return np.stack(xs), np.stack(xis)


def size(case: Case) -> float:
    """Return the size of the numbers in a correct run: models, gradients, and moves over lr."""
    models = float(np.abs(case.x0).max() + np.abs(optimum(case)).max())
    steepest = float(np.abs(case.hessians).sum(axis=2).max())
    # Control variates may be computed as (x - y) / (K lr), which magnifies the rounding of x.
    return models * (1.0 + steepest + 1.0 / min(case.lr)) + float(np.abs(case.linear).max())


def rounding(case: Case, rounds: int | None = None) -> float:
    """Return the rounding error allowed in x, c and c_i after so many rounds (default: all).

    It is the unit roundoff times the number of consecutive operations (one per local step and
    reply) times the size of the numbers.
    """
    rounds = case.rounds if rounds is None else rounds
    operations = rounds * (max(case.local_steps) + case.num_clients)
    return float(np.finfo(case.precision).eps) * operations * size(case)

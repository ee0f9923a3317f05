"""What a right SCAFFOLD is compared with: other methods and other forms, each written out on its own.

Nothing here uses `fedscaffold.algorithms`, so that a mistake there cannot agree with itself.
"""

from __future__ import annotations

import numpy as np

from fedscaffold.conformance.case import Array, Case, Trace

__all__ = ["centred", "descent", "large_batch", "optimum", "rounding", "saga", "size"]


def gradients(case: Case, y: Array) -> Array:
    """All clients' gradients, each at its own row of y."""
    each: Array = np.einsum("nij,nj->ni", case.hessians, y)
    return each - case.linear


def optimum(case: Case) -> Array:
    """Where the gradient of sum p_i f_i is zero.

    >>> from fedscaffold.conformance.federations import GOLDEN_CENTRED
    >>> optimum(GOLDEN_CENTRED)
    array([0.4])
    """
    hessian: Array = np.einsum("n,nij->ij", case.weights, case.hessians)
    return np.asarray(np.linalg.solve(hessian, case.weights @ case.linear), np.float64)


def large_batch(case: Case) -> Array:
    """Large-batch SGD: x <- x - lr * server_lr * sum p_i grad f_i(x). Returns x of every round."""
    xs = [case.x0]
    for _ in range(case.rounds):
        everywhere = np.tile(xs[-1], (case.num_clients, 1))
        xs.append(xs[-1] - case.lr[0] * case.server_lr * (case.weights @ gradients(case, everywhere)))
    return np.stack(xs)


def descent(case: Case) -> Array:
    """Gradient descent on the first client's function, its K steps a round. Returns x of every round."""
    xs = [case.x0]
    for _ in range(case.rounds):
        y = xs[-1]
        for lr in case.lr[: case.local_steps[0]]:
            y = y - lr * (case.hessians[0] @ y - case.linear[0])
        xs.append(y)
    return np.stack(xs)


def saga(case: Case) -> Trace:
    """SAGA (Defazio et al. 2014): one client a round, and a table of the last gradient of each.

    x <- x - lr * (grad f_j(x) - table_j + mean of table),   then table_j <- grad f_j(x)
    """
    x, table = case.x0, np.zeros_like(case.linear)
    states = [(x, table.mean(0), table)]
    for (j,) in case.cohorts:
        new = case.hessians[j] @ x - case.linear[j]
        x = x - case.lr[0] * (new - table[j] + table.mean(0))
        table = np.where(np.arange(case.num_clients)[:, None] == j, new, table)
        states.append((x, table.mean(0), table))
    return Trace(*(np.stack(column) for column in zip(*states, strict=True)))


def centred(case: Case) -> tuple[Array, Array]:
    """SCAFFOLD in its centred form, all clients in every round: xi_i stands for c - c_i, and there is no c.

    y_i <- y_i - lr * (grad f_i(y_i) + xi_i)     K times from y_i = x
    x   <- x + server_lr * (mean y - x),         xi_i <- xi_i + (y_i - mean y) / (K lr)

    Returns x and xi of every round.
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
    """The size that numbers have in a right run of the case: models, gradients, and moves over lr."""
    models = float(np.abs(case.x0).max() + np.abs(optimum(case)).max())
    steepest = float(np.abs(case.hessians).sum(axis=2).max())
    # Control variates may be had from x - y over K lr, which magnifies the rounding of x.
    return models * (1.0 + steepest + 1.0 / min(case.lr)) + float(np.abs(case.linear).max())


def rounding(case: Case, rounds: int | None = None) -> float:
    """The error that float64 may leave in x, c and c_i after so many rounds (default: all of the case's).

    Unit roundoff, times the operations in a row (every local step and every reply adds one), times the size
    of the numbers.
    """
    rounds = case.rounds if rounds is None else rounds
    operations = rounds * (max(case.local_steps) + case.num_clients)
    return float(np.finfo(np.float64).eps) * operations * size(case)

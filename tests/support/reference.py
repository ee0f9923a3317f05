"""A SCAFFOLD written apart from the package, on NumPy, straight from the paper: the oracle of the engine's tests.

It follows Algorithm 1 line by line with explicit differences (dy, dc), and knows nothing of mean directions: with
momentum or a schedule it keeps the gradients it saw and averages them.
"""

import numpy as np


def scaffold(
    gradient,
    num_clients,
    x,
    cohorts,
    steps,
    lrs,
    server_lr=1.0,
    weights=None,
    momentum=0.0,
    option=2,
):
    """`gradient(i, y, round, k)`; `k = -1` asks for the gradient over all data. Returns x, c, c_i."""
    p = (
        np.full(num_clients, 1 / num_clients)
        if weights is None
        else np.asarray(weights) / np.sum(weights)
    )
    x = np.array(x, float)
    c, c_i = np.zeros_like(x), np.zeros((num_clients, len(x)))
    for r, cohort in enumerate(cohorts):
        dy, dc = np.zeros_like(x), np.zeros_like(x)
        heard = sum(p[i] for i in cohort)
        fresh = {}
        for i in cohort:
            y, buffer, seen = x.copy(), np.zeros_like(x), []
            for k in range(steps[i]):
                g = gradient(i, y, r, k)
                seen.append(g)
                buffer = momentum * buffer + g - c_i[i] + c
                y = y - lrs[k] * buffer
            fresh[i] = gradient(i, x, r, -1) if option == 1 else np.mean(seen, axis=0)
            dy += p[i] * (y - x)
            dc += p[i] * (fresh[i] - c_i[i])
        if cohort:
            x = x + server_lr * dy / heard
        c = c + dc
        for i in cohort:
            c_i[i] = fresh[i]
    return x, c, c_i


def fedavg(gradient, num_clients, x, cohorts, steps, lr, mu=0.0, server_lr=1.0):
    """FedAvg (mu = 0) and FedProx, equal weights."""
    x = np.array(x, float)
    for r, cohort in enumerate(cohorts):
        moves = []
        for i in cohort:
            y = x.copy()
            for k in range(steps):
                y = y - lr * (gradient(i, y, r, k) + mu * (y - x))
            moves.append(y - x)
        x = x + server_lr * np.mean(moves, axis=0)
    return x

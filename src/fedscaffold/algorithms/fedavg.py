"""FedAvg (McMahan et al. 2017): local steps along the client's own gradient, then the average.

    client     d = g_i(y),   y <- y - lr d      K times                     direction
    server     x+ = x - server_lr * move,   move = sum p_i (x - y_i) / heard

It is SCAFFOLD with every control variate held at zero. With K > 1 and unlike clients its fixed point is not the
optimum: the bias is about lr (K - 1) / 2 times the mean of H^-1 (H_i - H) grad f_i.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, ServerStep, Vector
from fedscaffold.checks import memoised


@memoised
def fedavg(server_lr: float = 1.0) -> Algorithm:
    """FedAvg with a server step.

    >>> fedavg().shift is None
    True
    """
    return Algorithm("fedavg", direction, stepping(server_lr))


def direction(g: Vector, y: Vector, x: Vector, shift: Vector) -> Vector:
    """The client's own gradient."""
    return g


def stepping(server_lr: float) -> ServerStep:
    """The server step of every method without control variates: x moves along the clients' mean move."""
    server_lr = checks.number("server_lr", server_lr, above=0)

    def server(x: Vector, c: Vector, move: Vector, d: Vector, heard: float) -> tuple[Vector, Vector]:
        return x - server_lr * move, c

    return server

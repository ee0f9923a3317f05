"""FedAvg (McMahan et al. 2017): local steps along the client's own gradient, then the average.

    client     d = g_i(y),   y <- y - lr d      K times                     direction
    server     x+ = x - server_lr * move,   move = sum p_i (x - y_i) / heard

It is SCAFFOLD with every control variate held at zero. With K > 1 and unlike clients its fixed
point is not the optimum: the bias is about lr (K - 1) / 2 times the mean of H^-1 (H_i - H) grad
f_i.
"""

from __future__ import annotations

from collections.abc import Callable

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Form, Gradient, Model, Move, Vector, Walk
from fedscaffold.checks import memoised


@memoised
def fedavg(server_lr: float = 1.0) -> Algorithm:
    """FedAvg with a server step.

    >>> fedavg().has_memory
    False
    """
    return Algorithm("fedavg", direction, message, stepping(server_lr), form=form(server_lr))


def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
    """The client's own gradient."""
    return gradient(y)


def message(walk: Walk, shift: Vector) -> Move:
    """Where the local steps led."""
    return Move(walk.move)


def stepping(server_lr: float) -> Callable[[Model, Model, Move, float], Model]:
    """Return the server's step of methods that average models: x follows the clients' mean move."""
    server_lr = checks.number("server_lr", server_lr, above=0)

    def update(server: Model, sent: Model, mean: Move, heard: float) -> Model:
        return server._replace(x=server.x - server_lr * mean.move)

    return update


def form(server_lr: float, drag: float = 0.0, one_step: bool = False) -> Form:
    """The affine structure of a method without memory."""
    return Form(memory=False, at_x=False, drag=drag, server_lr=server_lr, one_step=one_step)

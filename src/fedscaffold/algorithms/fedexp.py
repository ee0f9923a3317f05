"""FedExP (Jhunjhunwala, Wang, Joshi 2023): FedAvg whose server step is found by extrapolation.

    client     as FedAvg; sends move_i = x - y_i and its square |move_i|^2
    server     x+ = x - server_lr * move,     move = sum p_i move_i / heard
               server_lr = max(1, sum p_i |move_i|^2 / heard / (2 (|move|^2 + eps)))        update

Moves of unlike clients cancel in their mean, and the server then takes a longer step, as in the
extrapolated projections onto convex sets. Clients that agree give 1/2 in place of the maximum, and
the method is FedAvg. Its local steps are FedAvg's, and so is the bias of its fixed point. The paper
returns the mean of the last two models, as long steps make them oscillate; a run here returns the
last one.

The paper's clients weigh the same. Symbols: Delta_i = -move_i, eta_g = server_lr, M = clients of a
round.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Model, Vector, Walk
from fedscaffold.algorithms.fedavg import direction
from fedscaffold.checks import memoised


class Message(NamedTuple):
    """Where the local steps led, and how far."""

    move: Vector
    square: float


@memoised
def fedexp(eps: float = 1e-3) -> Algorithm:
    """FedExP; `eps` bounds the server's step where the mean move is near zero.

    >>> import numpy as np
    >>> update, mean = fedexp(eps=0.5).update, Message(np.array([1.0, 0.0]), square=9.0)
    >>> update(Model(np.array([5.0, 1.0])), None, mean, 1.0).x    # a step of 9 / (2 * 1.5)
    array([2., 1.])
    """
    eps = checks.number("eps", eps, above=0)

    def update(server: Model, sent: Model, mean: Message, heard: float) -> Model:
        ratio = mean.square / (2 * ((mean.move * mean.move).sum() + eps))
        step = 1 + (ratio - 1) * (ratio > 1)
        return Model(server.x - step * mean.move)

    return Algorithm("fedexp", direction, message, update)


def message(walk: Walk, shift: Vector) -> Message:
    """The move and its square."""
    return Message(walk.move, (walk.move * walk.move).sum())

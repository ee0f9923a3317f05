"""Mime (Karimireddy et al. 2021): SGD with the server's momentum, fixed while clients step.

    all heard     a = mean of grad f_i(x),   s+ = beta s + (1 - beta) a     prepare
    client i      d = (1 - beta) (g_i(y) - g_i(x) + a) + beta s             direction
                    = (1 - beta) (g_i(y) - g_i(x)) + s+
    server        x+ = x - server_lr * move

g_i(y) and g_i(x) are gradients on the same batch. s is kept by the server.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector
from fedscaffold.algorithms.dane import UNCOMPRESSED
from fedscaffold.algorithms.fedavg import message, stepping
from fedscaffold.checks import InputError, memoised


class Server(NamedTuple):
    """What the server keeps; `s` is the momentum."""

    x: Vector
    s: Vector


@memoised
def mime(beta: float = 0.9, server_lr: float = 1.0) -> Algorithm:
    """Mime with momentum `beta` in [0, 1); with 0 it is DANE with mu = 0.

    >>> mime(beta=0.5).direction(lambda y: 2 * y, 3.0, 1.0, 1.0)
    3.0
    """
    beta = checks.number("beta", beta, at_least=0)
    if beta >= 1:
        raise InputError(f"beta must be a number of at least 0 and below 1, got {beta:g}")

    def prepare(server: Server, gradient: Vector) -> Server:
        return Server(server.x, beta * server.s + (1 - beta) * gradient)

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return (1 - beta) * (gradient(y) - gradient(x)) + shift

    return Algorithm(
        "mime",
        direction,
        message,
        stepping(server_lr),
        init,
        shift=shift,
        prepare=prepare,
        needs=(UNCOMPRESSED,),
    )


def init(x: Vector) -> Server:
    """The server begins without momentum."""
    return Server(x, 0 * x)


def shift(server: Server, memory: None) -> Vector:
    """The same for all clients."""
    return server.s

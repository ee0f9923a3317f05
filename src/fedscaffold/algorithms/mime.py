"""Mime (Karimireddy et al. 2021) with SGD and momentum: the server's momentum, held fixed while clients step.

    all heard     a = mean of grad f_i(x),   s+ = beta s + (1 - beta) a     anchor
    client i      d = (1 - beta) (g_i(y) - g_i(x) + a) + beta s             direction
                    = (1 - beta) (g_i(y) - g_i(x)) + s+
    server        x+ = x - server_lr * move

g_i(y) and g_i(x) are gradients on the same batch. s is kept by the server, as c.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Vector
from fedscaffold.algorithms.dane import shift
from fedscaffold.algorithms.fedavg import stepping
from fedscaffold.checks import InputError, memoised


@memoised
def mime(beta: float = 0.9, server_lr: float = 1.0) -> Algorithm:
    """Mime with momentum `beta` in [0, 1); with 0 it is DANE with mu = 0.

    >>> mime(beta=0.5).direction(4.0, 0.0, 0.0, 1.0)
    3.0
    """
    beta = checks.number("beta", beta, at_least=0)
    if beta >= 1:
        raise InputError(f"beta must be a number of at least 0 and below 1, got {beta:g}")

    def anchor(c: Vector, a: Vector) -> Vector:
        return beta * c + (1 - beta) * a

    def direction(g: Vector, y: Vector, x: Vector, shift: Vector) -> Vector:
        return (1 - beta) * g + shift

    return Algorithm("mime", direction, stepping(server_lr), shift, anchor=anchor)

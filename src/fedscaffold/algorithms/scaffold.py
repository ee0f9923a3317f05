"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al. 2020, Algorithm 1).

The server keeps x and c, client i keeps c_i between rounds, and c = sum p_i c_i at all times (zeros to begin with).
In a round, client i starts at y = x and takes K steps of size lr:

    d = g_i(y) - c_i + c                                       shift, direction
    y <- y - lr d

With d_i the mean of the d it used, it keeps

    option II (default)     c_i+ = c_i - c + d_i               remember

and sends d_i. For plain SGD d_i = (x - y) / (K lr), so this is the paper's c_i - c + (x - y) / (K lr); written with
the mean direction it is the mean of the raw gradients whatever led from x to y: momentum, Adam, a schedule, unequal
numbers of steps. Option I remembers the gradient at x over all local data: the same line, with d_i = g_i(x) - c_i + c.

With D = sum p_i d_i / heard over the clients heard, heard = sum of their p_i (S/N when all weigh the same):

    x+ = x - server_lr * move,    move = sum p_i (x - y_i) / heard          ( = K lr D for plain SGD )
    c+ = c + heard * (D - c)                                                server

Why c stays the mean: c_i+ - c_i = d_i - c for the clients heard and 0 for the rest, so sum p_i (c_i+ - c_i) is
heard * (D - c). A mismatch c - sum p_i c_i would be kept for ever, and shift the limit of x by as much.

Symbols: x, y_i, c, c_i, K = local_steps, eta_l = lr, eta_g = server_lr, S/N = heard; xi_i = c - c_i is the shift.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Vector
from fedscaffold.checks import memoised


@memoised
def scaffold(option: int = 2, server_lr: float = 1.0) -> Algorithm:
    """SCAFFOLD with option 1 or 2 for the clients' control variates.

    >>> scaffold(option=1, server_lr=0.5).name
    'scaffold'
    """
    checks.whole("option", option, at_most=2)
    server_lr = checks.number("server_lr", server_lr, above=0)

    def server(x: Vector, c: Vector, move: Vector, d: Vector, heard: float) -> tuple[Vector, Vector]:
        return x - server_lr * move, c + heard * (d - c)

    return Algorithm("scaffold", direction, server, shift, remember, at_x=option == 1)


def shift(c: Vector, c_i: Vector) -> Vector:
    """What client i adds to its gradients all round long."""
    return c - c_i


def direction(g: Vector, y: Vector, x: Vector, shift: Vector) -> Vector:
    """The corrected gradient: its mean over clients is the mean gradient, whatever the heterogeneity."""
    return g + shift


def remember(c: Vector, c_i: Vector, d: Vector) -> Vector:
    """The new c_i: the mean gradient the client saw (option II) or its gradient at x (option I)."""
    return c_i - c + d

"""FedDyn (Acar et al. 2021): clients' objectives are bent towards a common minimiser.

    client     d = g_i(y) - c_i + alpha (y - x)        K times from y = x   shift, direction
               c_i+ = c_i + alpha (x - y)                                   remember
    server     c+ = c + alpha * heard * move,    move = sum p_i (x - y_i) / heard
               x+ = x - server_lr * (move + c+ / alpha)

c_i is the gradient the client reached if it solved its problem exactly, and c = sum p_i c_i at all
times, as in SCAFFOLD: the same gauge watches it. At a fixed point y_i = x and c = 0, hence c_i =
grad f_i(x) and sum p_i grad f_i(x) = 0: no bias, whatever the heterogeneity. alpha is a step size
in disguise: the clients must come near their minimisers.

Symbols: lambda_i (the paper's gradient of L_i) = c_i, h = c.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Move, Vector
from fedscaffold.algorithms.fedavg import message
from fedscaffold.algorithms.scaffold import Memory, Server, init, memory
from fedscaffold.checks import memoised


@memoised
def feddyn(alpha: float = 1.0, server_lr: float = 1.0) -> Algorithm:
    """FedDyn with regularisation `alpha`.

    >>> feddyn(alpha=0.5).direction(lambda y: 1.0, 3.0, 1.0, -0.25)
    1.75
    """
    alpha = checks.number("alpha", alpha, above=0)
    server_lr = checks.number("server_lr", server_lr, above=0)

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return gradient(y) + shift + alpha * (y - x)

    def remember(memory: Memory, shift: Vector, message: Move) -> Memory:
        return Memory(alpha * message.move - shift)

    def update(server: Server, sent: Server, mean: Move, heard: float) -> Server:
        c = server.c + (alpha * heard) * mean.move
        return Server(server.x - server_lr * (mean.move + c / alpha), c)

    why = (
        "remembers its moves, so what compression leaves out of one would count twice, in its "
        "memory and in its error feedback, and grow; compress scaffold instead"
    )
    return Algorithm(
        "feddyn",
        direction,
        message,
        update,
        init,
        memory,
        shift,
        remember,
        means=(("c", "c_i"),),
        needs=(("exact messages", why),),
    )


def shift(server: Server, memory: Memory) -> Vector:
    """What the client adds to its gradients all round long."""
    return -memory.c_i

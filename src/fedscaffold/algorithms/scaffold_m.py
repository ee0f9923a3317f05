"""SCAFFOLD-M (Cheng et al. 2024): local steps that mix in the direction of the last round.

The server keeps x, c and m, client i keeps c_i; c = sum p_i c_i at all times. In a round, client i
takes K steps along

    d = beta (g_i(y) - c_i + c) + (1 - beta) m                              shift, direction

and with d_i the mean of the d it used, its new c_i is the mean of the gradients it saw:

    c_i+ = (d_i - shift_i) / beta,    shift_i = beta (c - c_i) + (1 - beta) m              remember

With D = sum p_i d_i / heard over the clients heard, the server takes

    x+ = x - server_lr * move,    m+ = D                                    update
    c+ = c + heard * ((D - (1 - beta) m) / beta - c)

(D - (1 - beta) m) / beta is the D of SCAFFOLD, so c stays the mean for the same reason. With beta =
1 it is SCAFFOLD.

The lines are the paper's from memory; its text was not at hand to compare. There clients weigh the
same.

Symbols: g^r = m, eta = lr, gamma = server_lr K lr.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector
from fedscaffold.algorithms.fedavg_m import mixing
from fedscaffold.algorithms.scaffold import Memory, Message, scaffold
from fedscaffold.checks import memoised


class Server(NamedTuple):
    """What the server keeps."""

    x: Vector
    c: Vector
    m: Vector


@memoised
def scaffold_m(beta: float = 0.2, server_lr: float = 1.0) -> Algorithm:
    """SCAFFOLD-M with the weight `beta` in (0, 1] of the new gradient.

    >>> scaffold_m(beta=0.5).direction(lambda y: 2 * y, 3.0, 1.0, 1.0)
    4.0
    """
    beta = mixing(beta)
    server_lr = checks.number("server_lr", server_lr, above=0)

    plain = scaffold()
    correction: Any = plain.shift
    recall: Any = plain.remember

    def shift(server: Server, memory: Memory) -> Vector:
        return beta * correction(server, memory) + (1 - beta) * server.m

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return beta * gradient(y) + shift

    def remember(memory: Memory, shift: Vector, message: Message) -> Memory:
        return Memory(recall(memory, shift, message).c_i / beta)

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        corrected = (mean.d - (1 - beta) * sent.m) / beta
        return Server(
            server.x - server_lr * mean.move, server.c + heard * (corrected - sent.c), mean.d
        )

    def reference(server: Server) -> Vector:
        return beta * server.c + (1 - beta) * server.m

    return plain._replace(
        name="scaffold-m",
        direction=direction,
        update=update,
        init=init,
        shift=shift,
        remember=remember,
        references=(("d", reference),),
        form=None,
    )


def init(x: Vector) -> Server:
    """The server begins with c = m = 0."""
    return Server(x, 0 * x, 0 * x)

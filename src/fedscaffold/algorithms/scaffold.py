"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al. 2020, Algorithm 1).

The server keeps x and c, client i keeps c_i between rounds, and c = sum p_i c_i at all times (zeros
to begin with). In a round, client i starts at y = x and takes K steps of size lr:

    d = g_i(y) - c_i + c                                       shift, direction
    y <- y - lr d

With d_i the mean of the d it used, it keeps

    option II (default)     c_i+ = d_i - (c - c_i)             remember

and sends d_i. For plain SGD d_i = (x - y) / (K lr), so this is the paper's c_i - c + (x - y) / (K
lr); written with the mean direction it is the mean of the raw gradients whatever led from x to y:
momentum, Adam, a schedule, unequal numbers of steps. Option I remembers the gradient at x over all
local data: the same line, with d_i = g_i(x) - c_i + c.

With D = sum p_i d_i / heard over the clients heard, heard = sum of their p_i (S/N when all weigh
the same):

    x+ = x - server_lr * move,    move = sum p_i (x - y_i) / heard    ( = K lr D for plain SGD )
    c+ = c + heard * (D - c)                                                update

Why c stays the mean: c_i+ - c_i = d_i - c for the clients heard and 0 for the rest, so sum p_i
(c_i+ - c_i) is heard * (D - c). A mismatch c - sum p_i c_i would be kept for ever, and shift the
limit of x by as much.

Symbols: x, y_i, c, c_i, K = local_steps, eta_l = lr, eta_g = server_lr, S/N = heard; xi_i = c - c_i
is the shift.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Form, Gradient, Vector, Walk
from fedscaffold.checks import memoised


class Server(NamedTuple):
    """What the server keeps."""

    x: Vector
    c: Vector


class Memory(NamedTuple):
    """What a client keeps."""

    c_i: Vector


class Message(NamedTuple):
    """What a client sends; for plain SGD move = K lr d, and one vector carries both."""

    d: Vector
    move: Vector


@memoised
def scaffold(option: int = 2, server_lr: float = 1.0) -> Algorithm:
    """SCAFFOLD with option 1 or 2 for the clients' control variates.

    >>> scaffold(option=1, server_lr=0.5).name
    'scaffold'
    """
    option = checks.whole("option", option, at_most=2)
    server_lr = checks.number("server_lr", server_lr, above=0)

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        return Server(server.x - server_lr * mean.move, server.c + heard * (mean.d - sent.c))

    return Algorithm(
        "scaffold",
        direction,
        message_at_x if option == 1 else message,
        update,
        init,
        memory,
        shift,
        remember,
        means=(("c", "c_i"),),
        renew=renew,
        references=(("d", reference),),
        form=Form(memory=True, at_x=option == 1, drag=0.0, server_lr=server_lr, one_step=False),
    )


def init(x: Vector) -> Server:
    """The server begins with c = 0."""
    return Server(x, 0 * x)


def memory(x: Vector) -> Memory:
    """A client begins with c_i = 0."""
    return Memory(0 * x)


def shift(server: Server, memory: Memory) -> Vector:
    """What client i adds to its gradients all round long."""
    return server.c - memory.c_i


def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
    """The corrected gradient: its mean over clients is the mean gradient."""
    return gradient(y) + shift


def message(walk: Walk, shift: Vector) -> Message:
    """Option II."""
    return Message(walk.d, walk.move)


def message_at_x(walk: Walk, shift: Vector) -> Message:
    """Option I: the direction at x, over all local data."""
    return Message(walk.gradient + shift, walk.move)


def remember(memory: Memory, shift: Vector, message: Message) -> Memory:
    """The new c_i: the mean gradient the client saw (option II) or its gradient at x (option I)."""
    return Memory(message.d - shift)


def renew(memory: Memory, gradient: Vector) -> Memory:
    """A client that was away for long begins with its gradient at x."""
    return Memory(gradient)


def reference(server: Server) -> Vector:
    """What both sides know of a client's direction: c_i+ is then c_i with a compressed change."""
    return server.c

"""CA2FL (Wang et al. 2024): FedAvg for asynchronous rounds, calibrated by the clients' last moves.

The server keeps x and h, and of each client its last move h_i; h = sum p_i h_i at all times. Client
i starts from the x it was sent and takes K steps along its own gradient, as in FedAvg. With S the
clients whose replies make a server step, and means over them weighted by p_i:

    x+ = x - server_lr * (h + mean over S of (move_i - h_i))                update
    h+ = h + heard * mean over S of (move_i - h_i),    h_i+ = move_i        update, remember

So the step is an estimate of the mean move of all clients, not of those alone that happened to
reply: SAGA with moves in place of gradients. In synchronous rounds it is FedVARP (Jhunjhunwala et
al. 2022). The local steps are FedAvg's, and so is the bias of its fixed point. Calibration removes
the noise of who replied, and SCAFFOLD's correction also the drift.

Here the client adds what calibrates its move, shift = h - h_i, and sends v_i = move_i + shift; the
server, which knows the h it sent, takes v_i - h for move_i - h_i. The paper's server keeps the h_i
and adds them itself: the same numbers, with one vector fewer down.

The paper's text was not at hand. The lines were compared with three public implementations of its
Algorithm 2, FLGo's among them, which agree: v_t = h_t + (1/M) sum over S of (Delta_i - h_t^i) with
the h_t before the step, x += eta v_t, then h_t^i = Delta_i and h_t = (1/n) sum h_t^i. There clients
weigh the same. Symbols: h_t = h, h_t^i = h_i, Delta_i = -move_i, eta = server_lr, M = |S|.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Vector, Walk
from fedscaffold.algorithms.fedavg import direction
from fedscaffold.checks import memoised


class Server(NamedTuple):
    """What the server keeps."""

    x: Vector
    h: Vector


class Memory(NamedTuple):
    """A client's last move."""

    h_i: Vector


class Message(NamedTuple):
    """The calibrated move."""

    v: Vector


@memoised
def ca2fl(server_lr: float = 1.0) -> Algorithm:
    """CA2FL with a server step.

    >>> ca2fl().means
    (('h', 'h_i'),)
    """
    server_lr = checks.number("server_lr", server_lr, above=0)

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        change = mean.v - sent.h
        return Server(server.x - server_lr * (server.h + change), server.h + heard * change)

    return Algorithm(
        "ca2fl",
        direction,
        message,
        update,
        init,
        memory,
        shift,
        remember,
        means=(("h", "h_i"),),
        references=(("v", reference),),
    )


def init(x: Vector) -> Server:
    """The server begins with h = 0."""
    return Server(x, 0 * x)


def memory(x: Vector) -> Memory:
    """A client begins with h_i = 0."""
    return Memory(0 * x)


def shift(server: Server, memory: Memory) -> Vector:
    """What calibrates a client's move."""
    return server.h - memory.h_i


def reference(server: Server) -> Vector:
    """What both sides know of v_i: h_i+ is then h_i with a compressed change."""
    return server.h


def message(walk: Walk, shift: Vector) -> Message:
    """The move, calibrated."""
    return Message(walk.move + shift)


def remember(memory: Memory, shift: Vector, message: Message) -> Memory:
    """The client's last move."""
    return Memory(message.v - shift)

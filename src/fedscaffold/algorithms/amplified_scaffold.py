"""Amplified SCAFFOLD (Crawshaw and Liu 2024): SCAFFOLD for clients that come and go in turns.

Rounds are grouped in windows of P. The local steps use control variates h and h_i that do not
change in a window, so that the clients of its first round and of its last are corrected alike; c
and c_i collect what the next window will use. In a round, client i takes K steps of size lr along

    d = g_i(y) - h_i + h                                                    shift, direction

and with g_i the mean of the gradients it saw, in its n-th round of this window,

    c_i+ = c_i + gain,    gain = (g_i - c_i) / n                            message, remember

so that c_i is the mean of its gradients over the window: its first round puts the last window's
away. The server takes

    x+ = x - server_lr * move,    c+ = c + heard * mean gain                update

and at the window's end, with x_0 the model at its beginning,

    x+ = x_0 + gamma (x - x_0),    h+ = c+,    h_i+ = c_i for all clients

A client that is away then takes h_i+ = c_i when it comes again, which is the same. So c = sum p_i
c_i at all times, and in every window h = sum p_i h_i. Who does not come in a window keeps its c_i.

With P = 1 and gamma = 1 it is SCAFFOLD. Rounds in which nobody is heard do not count towards a
window.

Checked against the authors' code (the periodic control variates of its synthetic experiment):
windows, amplification and means of gradients are the same. There eta = lr / gamma, clients weigh
the same and server_lr = 1.

Symbols: P = window, gamma, I = local_steps, G_i = h_i, G = h; the paper writes x^bar for x.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector, Walk
from fedscaffold.checks import memoised


class Server(NamedTuple):
    """What the server keeps."""

    x: Vector
    c: Vector
    h: Vector
    x_0: Vector
    rounds: float
    """How many there have been."""


class Memory(NamedTuple):
    """What a client keeps."""

    c_i: Vector
    h_i: Vector
    came: float
    """In how many rounds of its last window."""
    window: float
    """Which that was, counted from 1; 0 for none."""


class Shift(NamedTuple):
    """What a client is sent beside x."""

    h: Vector
    """h - h_i."""
    c_i: Vector
    came: float
    window: float


class Message(NamedTuple):
    """What a client sends; for plain SGD move = K lr d."""

    d: Vector
    move: Vector
    gain: Vector


PLAIN_SERVER = (
    "plain server step",
    "amplifies the server's own steps, which a server_optimizer would replace; leave "
    "server_optimizer out",
)


SAME_WINDOW = (
    "synchronous rounds",
    "counts rounds in windows, and a reply from the last window would be in c_i but not in h",
)


@memoised
def amplified_scaffold(window: int = 5, gamma: float = 1.5, server_lr: float = 1.0) -> Algorithm:
    """Amplified SCAFFOLD with windows of so many rounds, whose moves are multiplied by `gamma`.

    >>> amplified_scaffold(window=20).init(2.0)
    Server(x=2.0, c=0.0, h=0.0, x_0=2.0, rounds=0.0)
    """
    window = checks.whole("window", window)
    gamma = checks.number("gamma", gamma, above=0)
    server_lr = checks.number("server_lr", server_lr, above=0)

    def shift(server: Server, memory: Memory) -> Shift:
        now = server.rounds // window + 1
        return Shift(
            server.h - _frozen(memory, now), memory.c_i, (memory.window == now) * memory.came, now
        )

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        rounds = server.rounds + 1
        ends, goes_on = rounds % window == 0, rounds % window != 0
        x, c = server.x - server_lr * mean.move, server.c + heard * mean.gain
        x = x + ends * ((gamma - 1) * (x - server.x_0))
        return Server(x, c, ends * c + goes_on * server.h, ends * x + goes_on * server.x_0, rounds)

    return Algorithm(
        "amplified-scaffold",
        direction,
        message,
        update,
        init,
        memory,
        shift,
        remember,
        means=(("c", "c_i"),),
        references=(("d", frozen), ("gain", nothing)),
        needs=(PLAIN_SERVER, SAME_WINDOW),
    )


def init(x: Vector) -> Server:
    """The server begins with c = h = 0."""
    return Server(x, 0 * x, 0 * x, x, 0.0)


def memory(x: Vector) -> Memory:
    """A client begins with c_i = h_i = 0."""
    return Memory(0 * x, 0 * x, 0.0, 0.0)


def direction(gradient: Gradient, y: Vector, x: Vector, shift: Shift) -> Vector:
    """The corrected gradient."""
    return gradient(y) + shift.h


def message(walk: Walk, shift: Shift) -> Message:
    """The direction, and what it adds to c_i."""
    return Message(walk.d, walk.move, (walk.d - shift.h - shift.c_i) / (shift.came + 1))


def remember(memory: Memory, shift: Shift, message: Message) -> Memory:
    """The mean of the gradients of this window so far."""
    return Memory(
        memory.c_i + message.gain, _frozen(memory, shift.window), shift.came + 1, shift.window
    )


def _frozen(memory: Memory, window: float) -> Vector:
    """The h_i of a window: c_i as the window found it."""
    return (memory.window == window) * memory.h_i + (memory.window != window) * memory.c_i


def frozen(server: Server) -> Vector:
    """What both sides know of a direction."""
    return server.h


def nothing(server: Server) -> Vector:
    """Zero: what compression omits of a gain is in the next one, the difference from c_i."""
    return 0 * server.c

"""SCAFCOM (Huang et al. 2024): SCAFFOLD for compressed messages, with a momentum at each client.

The server keeps x and c, client i keeps c_i and, for itself, v_i; c = sum p_i c_i at all times. In
a round, client i takes K steps as in SCAFFOLD, along d = g_i(y) - c_i + c. With g_i the mean of the
gradients it saw:

    v_i+ = (1 - beta) v_i + beta g_i                                        keep
    sends   d_i = v_i+ + (c - c_i), as its difference from c: C(v_i+ - c_i)      message, reference
    c_i+ = d_i - (c - c_i)  =  c_i + C(v_i+ - c_i)                          remember
    x+ = x - server_lr * K lr * D,    c+ = c + heard * (D - c)              update

A biased compressor such as top_k leaves much of a noisy gradient out; of the momentum, which moves
slowly, it leaves out little that the next rounds do not bring. With beta = 1 it is SCAFFOLD,
compressed as SCALLION with alpha = 1. The server multiplies the mean direction by the mean travel,
so with unequal numbers of steps nobody pulls harder.

The lines are the paper's from memory; its text was not at hand to compare. There all steps are
equal, and clients weigh the same.

Symbols: v_i, c_i, c, beta; delta_i = v_i+ - c_i, eta_l = lr, eta_g = server_lr.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold.algorithms.base import Algorithm, Vector, Walk
from fedscaffold.algorithms.fedavg_m import mixing
from fedscaffold.algorithms.scaffold import Message as Direction
from fedscaffold.algorithms.scaffold import Server, scaffold
from fedscaffold.checks import memoised


class Own(NamedTuple):
    """What a client keeps for itself: its momentum."""

    v: Vector


class Message(NamedTuple):
    """What a client sends; the server knows its travel."""

    d: Vector
    travel: float


@memoised
def scafcom(beta: float = 0.2, server_lr: float = 1.0) -> Algorithm:
    """SCAFCOM with the weight `beta` in (0, 1] of the new gradient in the clients' momenta.

    >>> scafcom(beta=0.5).name
    'scafcom'
    """
    beta = mixing(beta)
    plain = scaffold(server_lr=server_lr)

    def keep(own: Own, walk: Walk, shift: Vector) -> Own:
        return Own((1 - beta) * own.v + beta * (walk.d - shift))

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        after: Server = plain.update(server, sent, Direction(mean.d, mean.travel * mean.d), heard)
        return after

    why = (
        "makes the server's step from the sum of step sizes, which says how far SGD goes but not "
        "how far an optimizer does; use scaffold, compressed"
    )
    return plain._replace(
        name="scafcom",
        message=message,
        update=update,
        own=own,
        keep=keep,
        needs=(("sgd", why),),
        form=None,
    )


def own(x: Vector) -> Own:
    """A client begins without momentum."""
    return Own(0 * x)


def message(walk: Walk, shift: Vector) -> Message:
    """The direction of the momentum."""
    return Message(walk.own.v + shift, walk.travel)

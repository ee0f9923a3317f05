"""Ditto (Li et al. 2021): FedAvg, and personal models that are held near the common one.

    client     y <- y - lr g_i(y)                                           K times from y = x
               v <- v - lr (g_i(v) + lam (v - x))                           K times from its own v
    server     as FedAvg, on the y alone

v never leaves the client. With lam = 0 it trains alone; with lam large it follows the common model.
Clients send what FedAvg's send, so x is FedAvg's to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Move, Vector, Walk
from fedscaffold.algorithms.fedavg import form, stepping
from fedscaffold.checks import memoised


class Own(NamedTuple):
    """A client's private record: its personal model."""

    v: Vector


class Pair(NamedTuple):
    """The two models that a client trains."""

    y: Vector
    v: Vector


@memoised
def ditto(lam: float = 1.0, server_lr: float = 1.0) -> Algorithm:
    """Ditto with the pull `lam` of the personal models towards the common one.

    >>> ditto(lam=0.5).direction(lambda y: 2 * y, Pair(3.0, 1.0), 5.0, None)
    Pair(y=6.0, v=0.0)
    """
    lam = checks.number("lam", lam, at_least=0)

    def direction(gradient: Gradient, y: Pair, x: Vector, shift: Vector) -> Pair:
        return Pair(gradient(y.y), gradient(y.v) + lam * (y.v - x))

    return Algorithm(
        "ditto",
        direction,
        message,
        stepping(server_lr),
        own=Own,
        start=start,
        keep=keep,
        personal=personal,
        form=form(server_lr),
    )


def start(x: Vector, own: Own) -> Pair:
    """Start the common model at x and the personal one where it was."""
    return Pair(x, own.v)


def message(walk: Walk, shift: Vector) -> Move:
    """Send the move of the common model."""
    return Move(walk.move.y)


def keep(own: Own, walk: Walk, shift: Vector) -> Own:
    """Keep the personal model."""
    return Own(walk.y.v)


def personal(x: Vector, own: Own) -> Vector:
    """The model that a client uses."""
    return own.v

"""FedAvg-M, or FedCM: FedAvg whose local steps mix in the direction of the last round.

By Cheng et al. (2024) and Xu et al. (2021).

    client     d = beta g_i(y) + (1 - beta) m      K times from y = x       shift, direction
    server     x+ = x - server_lr * move,    m+ = D, the mean of the d_i    update

m is the direction in which all clients went together, so a small beta holds each to the common way.
Where it stands still m = 0, so with all clients in every round it ends where FedAvg with the step
beta lr does: beta shrinks the bias and does not remove it. With beta = 1 it is FedAvg. The lines
are the paper's from memory; its text was not at hand to compare.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector
from fedscaffold.algorithms.scaffold import Message, message
from fedscaffold.checks import InputError, memoised


class Server(NamedTuple):
    """What the server keeps."""

    x: Vector
    m: Vector


@memoised
def fedavg_m(beta: float = 0.2, server_lr: float = 1.0) -> Algorithm:
    """FedAvg-M with the weight `beta` in (0, 1] of the new gradient.

    >>> fedavg_m(beta=0.5).direction(lambda y: 2 * y, 3.0, 1.0, 1.0)
    4.0
    """
    beta = mixing(beta)
    server_lr = checks.number("server_lr", server_lr, above=0)

    def shift(server: Server, memory: None) -> Vector:
        return (1 - beta) * server.m

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return beta * gradient(y) + shift

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        return Server(server.x - server_lr * mean.move, mean.d)

    return Algorithm("fedavg-m", direction, message, update, init, shift=shift)


def mixing(beta: float) -> float:
    """The weight of a new gradient, checked."""
    beta = checks.number("beta", beta, above=0)
    if beta > 1:
        raise InputError(f"beta must be a number above 0 and at most 1, got {beta:g}")
    return beta


def init(x: Vector) -> Server:
    """The server begins with m = 0."""
    return Server(x, 0 * x)

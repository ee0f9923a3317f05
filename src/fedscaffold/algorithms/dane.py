"""DANE (Shamir et al. 2014), its local problems solved by K gradient steps.

    all heard     a = mean of grad f_i(x)                                   prepare, one exchange
    client i      min over y of f_i(y) - <grad f_i(x) - a, y> + mu/2 |y - x|^2,      by steps along
                  d = g_i(y) - g_i(x) + a + mu (y - x)                      direction
    server        x+ = mean y_i

SCAFFOLD with mu = 0 and control variates that are never stale: the update (28) that the SCAFFOLD
paper analyses on quadratics, at the price of a second exchange every round. With K large the local
problems are solved exactly.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector
from fedscaffold.algorithms.fedavg import message, stepping
from fedscaffold.checks import memoised

UNCOMPRESSED = (
    "exact messages",
    "exchanges gradients before the local steps, and these have no error feedback; compress "
    "scaffold instead",
)


class Server(NamedTuple):
    """What the server keeps; `a` is the mean gradient at x."""

    x: Vector
    a: Vector


@memoised
def dane(mu: float = 0.0, server_lr: float = 1.0) -> Algorithm:
    """DANE with proximal weight `mu`; no memory between rounds.

    >>> dane(mu=2.0).direction(lambda y: y, 3.0, 2.0, 0.5)
    3.5
    """
    mu = checks.number("mu", mu, at_least=0)

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return gradient(y) - gradient(x) + shift + mu * (y - x)

    return Algorithm(
        "dane",
        direction,
        message,
        stepping(server_lr),
        init,
        shift=shift,
        prepare=prepare,
        needs=(UNCOMPRESSED,),
    )


def init(x: Vector) -> Server:
    """The mean gradient is found in each round."""
    return Server(x, 0 * x)


def prepare(server: Server, gradient: Vector) -> Server:
    """The mean gradient at x, afresh in every round."""
    return Server(server.x, gradient)


def shift(server: Server, memory: None) -> Vector:
    """The same for all clients: they subtract their own gradient at x themselves."""
    return server.a

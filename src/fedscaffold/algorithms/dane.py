"""DANE (Shamir et al. 2014), its local problems solved by K gradient steps.

    all heard     a = mean of grad f_i(x)                                   anchor: one exchange more
    client i      min over y of f_i(y) - <grad f_i(x) - a, y> + mu/2 |y - x|^2,      by steps along
                  d = g_i(y) - g_i(x) + a + mu (y - x)                      direction
    server        x+ = mean y_i

SCAFFOLD with mu = 0 and control variates that are never stale: the update (28) that the SCAFFOLD paper analyses on
quadratics, at the price of a second exchange every round. With K large the local problems are solved exactly.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Vector
from fedscaffold.algorithms.fedavg import stepping
from fedscaffold.checks import memoised


@memoised
def dane(mu: float = 0.0, server_lr: float = 1.0) -> Algorithm:
    """DANE with proximal weight `mu`; no memory between rounds.

    >>> dane(mu=2.0).direction(1.0, 3.0, 2.0, 0.5)
    3.5
    """
    mu = checks.number("mu", mu, at_least=0)

    def direction(g: Vector, y: Vector, x: Vector, shift: Vector) -> Vector:
        return g + shift + mu * (y - x)

    return Algorithm("dane", direction, stepping(server_lr), shift, anchor=anchor)


def anchor(c: Vector, a: Vector) -> Vector:
    """The mean gradient at x, afresh in every round."""
    return a


def shift(c: Vector, c_i: Vector) -> Vector:
    """The same for all clients: their own gradient at x is in g already."""
    return c

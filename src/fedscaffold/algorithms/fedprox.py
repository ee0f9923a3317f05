"""FedProx (Li et al. 2020), with SGD as local solver, as the SCAFFOLD paper uses it.

    client     d = g_i(y) + mu (y - x),   y <- y - lr d     K times         direction
    server     as FedAvg

The pull towards x damps the drift and the progress alike; it does not remove the bias.
"""

from __future__ import annotations

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Gradient, Vector
from fedscaffold.algorithms.fedavg import form, message, stepping
from fedscaffold.checks import memoised


@memoised
def fedprox(mu: float = 1.0, server_lr: float = 1.0) -> Algorithm:
    """FedProx with proximal weight `mu` (1 in the SCAFFOLD paper's experiments; 0 is FedAvg).

    >>> fedprox(mu=0.5).direction(lambda y: 1.0, 3.0, 1.0, None)
    2.0
    """
    mu = checks.number("mu", mu, at_least=0)

    def direction(gradient: Gradient, y: Vector, x: Vector, shift: Vector) -> Vector:
        return gradient(y) + mu * (y - x)

    return Algorithm(
        "fedprox", direction, message, stepping(server_lr), form=form(server_lr, drag=mu)
    )

"""FedNova (Wang et al. 2020): FedAvg whose clients pull equally hard however many steps they take.

    client     y <- y - lr_k g_i(y)      K_i times;    T_i = sum of its lr_k
    server     x+ = x - server_lr * T * mean of (x - y_i) / T_i,    T = mean T_i

Means are weighted by p_i. With equal numbers of steps it is FedAvg. With unequal ones FedAvg
minimises an objective in which busy clients weigh more; FedNova keeps the weights p_i, but not
SCAFFOLD's exactness: the drift of each client stays.
"""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, Model, Vector, Walk
from fedscaffold.algorithms.fedavg import direction, form
from fedscaffold.checks import memoised


class Message(NamedTuple):
    """What a client sends: the server knows the travel of each by the steps it admitted."""

    pace: Vector
    travel: float


@memoised
def fednova(server_lr: float = 1.0) -> Algorithm:
    """FedNova for plain SGD, with a constant step or a schedule.

    >>> fednova().needs[0][0]
    'sgd'
    """
    server_lr = checks.number("server_lr", server_lr, above=0)

    def update(server: Model, sent: Model, mean: Message, heard: float) -> Model:
        return Model(server.x - (server_lr * mean.travel) * mean.pace)

    why = (
        "divides moves by the sum of step sizes, which says how far SGD goes but not how far an "
        "optimizer does; use scaffold, whose mean direction holds for any optimizer"
    )
    return Algorithm(
        "fednova", direction, message, update, needs=(("sgd", why),), form=form(server_lr)
    )


def message(walk: Walk, shift: Vector) -> Message:
    """The move per unit of travel."""
    return Message(walk.move / walk.travel, walk.travel)

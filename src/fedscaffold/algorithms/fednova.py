"""FedNova (Wang et al. 2020): FedAvg whose clients pull equally hard however many steps they take.

    client     y <- y - lr_k g_i(y)      K_i times;    T_i = sum of its lr_k
    server     x+ = x - server_lr * T * mean of (x - y_i) / T_i,    T = mean T_i          (means weighted by p_i)

With equal numbers of steps it is FedAvg. With unequal ones FedAvg minimises an objective in which busy clients
weigh more; FedNova keeps the weights p_i, but not SCAFFOLD's exactness: the drift of each client stays.
"""

from __future__ import annotations

from fedscaffold.algorithms.base import Algorithm
from fedscaffold.algorithms.fedavg import direction, stepping
from fedscaffold.checks import memoised


@memoised
def fednova(server_lr: float = 1.0) -> Algorithm:
    """FedNova for plain SGD, with a constant step or a schedule.

    >>> fednova().normalised
    True
    """
    return Algorithm("fednova", direction, stepping(server_lr), normalised=True)

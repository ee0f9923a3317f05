"""SCAFFOLD as its two analyses write it (Mangold et al. 2025), for full participation.

One vector is sent each way.

    client     y <- y - lr (g_i(y) + xi_i)      K times from y = x
    server     x+ = x - server_lr * (x - mean y)
    client     xi_i <- xi_i + (y_i - mean y) / (K lr)                       once it has received x+

The last line needs no second message: with d_i = (x - y_i) / (K lr) and D = mean d_i it reads xi_i
<- xi_i - d_i + D, and every client finds D = (x - x+) / (server_lr K lr) from the two models it has
seen. What it keeps between rounds is d_i - xi_i, which is SCAFFOLD's c_i; what it finds is
SCAFFOLD's c, for c + heard (D - c) = D when all are heard. So client and correction are SCAFFOLD's
own, xi_i = c - c_i, and only the server's line differs. With sampling D is not c, hence the need
for every client in every round. With server_lr = 1 it is VRL-SGD (Liang et al. 2019), whose Delta_i
is -xi_i.

Symbols: theta = x, xi_c = xi_i = shift, gamma = lr, H = local_steps.
"""

from __future__ import annotations

from fedscaffold.algorithms.base import Algorithm
from fedscaffold.algorithms.scaffold import Message, Server, scaffold
from fedscaffold.checks import memoised

EVERYONE = (
    "everyone",
    "is right only when all clients take part in every round, as they take the mean direction for "
    "c; use scaffold with sampling",
)


@memoised
def scaffold_xi(server_lr: float = 1.0) -> Algorithm:
    """SCAFFOLD in the xi form: `scaffold()`'s models with all clients, half its messages down.

    >>> scaffold_xi().finds
    ('c',)
    """
    plain = scaffold(server_lr=server_lr)

    def update(server: Server, sent: Server, mean: Message, heard: float) -> Server:
        after: Server = plain.update(server, sent, mean, 1)
        return after

    return plain._replace(name="scaffold-xi", update=update, finds=("c",), needs=(EVERYONE,))

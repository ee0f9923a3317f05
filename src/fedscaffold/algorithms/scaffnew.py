"""Scaffnew, or ProxSkip on the consensus problem (Mishchenko et al. 2022).

A shared coin decides when clients communicate.

    each step      y_i <- y_i - lr (g_i(y_i) - h_i)
    with prob. p   x = mean y_j,   h_i <- h_i + (p / lr) (x - y_i),   y_i = x      one coin for all

Between two communications every client takes the same number of steps, geometric with mean K = 1/p.
So it is SCAFFOLD with h_i = c_i - c and a shared random number of local steps, but with the mean
direction divided by the expected travel lr / p = K lr instead of the actual one:

    d_i = p (x - y_i) / lr,    c_i+ = c_i - c + d_i,    c+ = D = mean d_i

(then h_i+ = h_i + d_i - D, the line above). With p = sqrt(lr mu), lr = 1/L it needs O(sqrt(L/mu)
log 1/eps) rounds.

Symbols: gamma = lr, p = 1 / local_steps, x_i,t = y, h_i = c_i - c.
"""

from __future__ import annotations

from fedscaffold.algorithms.base import Algorithm, LocalWork
from fedscaffold.algorithms.scaffold import scaffold
from fedscaffold.algorithms.scaffold_xi import EVERYONE
from fedscaffold.checks import memoised


@memoised
def scaffnew() -> Algorithm:
    """Scaffnew with p = 1 / local_steps; all clients take part in every round.

    >>> scaffnew().work(LocalWork(steps=4, batch_size=None)).geometric
    True
    """
    displacement = (
        "divides x - y by the expected travel, a displacement form that is a mean direction only "
        "for plain SGD steps of one size; use scaffold with an optimizer or a schedule"
    )
    shared = "has one number of local steps for all clients, drawn by a coin; use scaffold instead"
    return scaffold()._replace(
        name="scaffnew",
        work=geometric,
        finds=("c",),
        needs=(EVERYONE, ("plain sgd", displacement), ("equal steps", shared)),
        form=None,
    )


def geometric(work: LocalWork) -> LocalWork:
    """The number of local steps is drawn by a shared coin."""
    return work._replace(geometric=True)

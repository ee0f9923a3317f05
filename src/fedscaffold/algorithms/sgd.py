"""Large-batch SGD, the papers' baseline: one step a round on all local data of the cohort.

    client     d = grad f_i(x)                                              direction
    server     x+ = x - server_lr * lr * sum p_i d_i / heard

There is no local work, hence no drift, and nothing gained from the clients' computers between two
messages.
"""

from __future__ import annotations

from fedscaffold.algorithms.base import Algorithm, one_full_step
from fedscaffold.algorithms.fedavg import direction, form, message, stepping
from fedscaffold.checks import memoised


@memoised
def sgd(server_lr: float = 1.0) -> Algorithm:
    """Large-batch SGD: by definition one local step on the full batch, whatever `local_steps` says.

    >>> sgd().form.one_step
    True
    """
    known = form(server_lr, one_step=True)
    return Algorithm("sgd", direction, message, stepping(server_lr), work=one_full_step, form=known)

"""WHAT is computed: one file per algorithm, no array library. Read `scaffold.py` first.

A new algorithm is one file here and one row in `ALGORITHMS`; the contract tests then run on it by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedscaffold import checks
from fedscaffold.algorithms.base import Algorithm, travelled
from fedscaffold.algorithms.dane import dane
from fedscaffold.algorithms.fedavg import fedavg
from fedscaffold.algorithms.feddyn import feddyn
from fedscaffold.algorithms.fednova import fednova
from fedscaffold.algorithms.fedprox import fedprox
from fedscaffold.algorithms.mime import mime
from fedscaffold.algorithms.scaffnew import scaffnew
from fedscaffold.algorithms.scaffold import scaffold
from fedscaffold.algorithms.scaffold_xi import scaffold_xi
from fedscaffold.algorithms.sgd import sgd

__all__ = [
    "ALGORITHMS", "Algorithm", "dane", "fedavg", "feddyn", "fednova", "fedprox", "make", "mime", "scaffnew", "scaffold",
    "scaffold_xi", "sgd", "travelled",
]  # fmt: skip

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "dane": dane,
    "fedavg": fedavg,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedprox": fedprox,
    "mime": mime,
    "scaffnew": scaffnew,
    "scaffold": scaffold,
    "scaffold-xi": scaffold_xi,
    "sgd": sgd,
}


def make(name: str, **parameters: Any) -> Algorithm:
    """Return the algorithm called `name`, with its own parameters.

    >>> make("scaffold", option=1).at_x
    True
    >>> make("fedavg", mu=1.0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown parameter of fedavg 'mu'; known: server_lr
    """
    factory = ALGORITHMS[checks.choice("algorithm", name, ALGORITHMS)]
    known = inspect.signature(factory).parameters
    for parameter in parameters:
        checks.choice(f"parameter of {name}", parameter, known)
    return factory(**parameters)

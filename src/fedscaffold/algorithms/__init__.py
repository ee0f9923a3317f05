"""Algorithms: one file per method, free of any array library. Read `scaffold.py` first.

A new algorithm is one file here and one row in `ALGORITHMS`; the contract tests then cover it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedscaffold import checks
from fedscaffold.algorithms.amplified_scaffold import amplified_scaffold
from fedscaffold.algorithms.base import Algorithm, Form, LocalWork, Model, Walk, travelled
from fedscaffold.algorithms.ca2fl import ca2fl
from fedscaffold.algorithms.dane import dane
from fedscaffold.algorithms.ditto import ditto
from fedscaffold.algorithms.fedavg import fedavg
from fedscaffold.algorithms.fedavg_m import fedavg_m
from fedscaffold.algorithms.fedbn import fedbn, local_layers
from fedscaffold.algorithms.feddyn import feddyn
from fedscaffold.algorithms.fedexp import fedexp
from fedscaffold.algorithms.fednova import fednova
from fedscaffold.algorithms.fedprox import fedprox
from fedscaffold.algorithms.mime import mime
from fedscaffold.algorithms.scafcom import scafcom
from fedscaffold.algorithms.scaffnew import scaffnew
from fedscaffold.algorithms.scaffold import scaffold
from fedscaffold.algorithms.scaffold_m import scaffold_m
from fedscaffold.algorithms.scaffold_xi import scaffold_xi
from fedscaffold.algorithms.sgd import sgd

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Form",
    "LocalWork",
    "Model",
    "Walk",
    "amplified_scaffold",
    "ca2fl",
    "dane",
    "ditto",
    "fedavg",
    "fedavg_m",
    "fedbn",
    "feddyn",
    "fedexp",
    "fednova",
    "fedprox",
    "local_layers",
    "make",
    "mime",
    "scafcom",
    "scaffnew",
    "scaffold",
    "scaffold_m",
    "scaffold_xi",
    "sgd",
    "travelled",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "amplified-scaffold": amplified_scaffold,
    "ca2fl": ca2fl,
    "dane": dane,
    "ditto": ditto,
    "fedavg": fedavg,
    "fedavg-m": fedavg_m,
    "fedbn": fedbn,
    "feddyn": feddyn,
    "fedexp": fedexp,
    "fednova": fednova,
    "fedprox": fedprox,
    "mime": mime,
    "scafcom": scafcom,
    "scaffnew": scaffnew,
    "scaffold": scaffold,
    "scaffold-m": scaffold_m,
    "scaffold-xi": scaffold_xi,
    "sgd": sgd,
}


def make(name: str, **parameters: Any) -> Algorithm:
    """Return the algorithm called `name`, with its own parameters.

    >>> make("scaffold", option=1).name
    'scaffold'
    >>> make("fedavg", mu=1.0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown parameter of fedavg 'mu'; known: server_lr
    """
    factory = ALGORITHMS[checks.choice("algorithm", name, ALGORITHMS)]
    known = inspect.signature(factory).parameters
    for parameter in parameters:
        checks.choice(f"parameter of {name}", parameter, known)
    return factory(**parameters)

"""Targets of the suite: an adapter, an algorithm, or a function that returns an algorithm.

An adapter wraps a whole implementation. An `Algorithm` needs none: the reference engine runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, needs, work_of
from fedscaffold.conformance.case import Adapter, Case, Trace, Unsupported, offers
from fedscaffold.conformance.reference_target import OFFERED, run

__all__ = ["Target", "adapter_of"]

Target: TypeAlias = Adapter | Algorithm | Callable[..., Algorithm]


def adapter_of(target: Target) -> Adapter:
    """Return the adapter for a target.

    A function with a required argument is an adapter. One without returns an algorithm; it is
    called with the `server_lr` and the `option` of the case if it has parameters of these names. An
    `Algorithm` has both fixed: cases with other values are not offered.

    >>> from fedscaffold.algorithms import scaffold
    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=1, steps=1, lr=0.5)
    >>> adapter_of(scaffold)(case._replace(server_lr=0.5)).x.ravel().tolist()
    [0.0, 0.25]
    """
    if isinstance(target, Algorithm):
        return offers(*OFFERED)(lambda case: run_algorithm(lambda: target, case))
    try:
        inspect.signature(target).bind()
    except (TypeError, ValueError):  # it needs arguments, or has no signature
        return cast(Adapter, target)
    return offers(*OFFERED)(lambda case: run_algorithm(target, case))


def run_algorithm(make: Callable[..., Any], case: Case) -> Trace:
    """Make the algorithm for a case and run it.

    Raise `Unsupported` if it does not cover the case.
    """
    known = inspect.signature(make).parameters
    wanted = {"server_lr": case.server_lr, "option": case.option}
    algorithm = make(**{name: value for name, value in wanted.items() if name in known})
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"what needs no argument makes an Algorithm, not a {type(algorithm).__name__}"
        )
    if case.server_lr != 1 and "server_lr" not in known:
        raise Unsupported("a server step: no parameter server_lr")
    if ("gradient" in exchange(algorithm).reads) != (case.option == 1):
        raise Unsupported(f"option {'I' * case.option}")
    if work_of(algorithm, 1).geometric:
        raise Unsupported("a number of steps drawn by a coin")
    if needs(algorithm, "everyone") and any(
        len(case.heard(r)) < case.num_clients for r in range(case.rounds)
    ):
        raise Unsupported("clients that are not heard")
    return run(algorithm, case)

"""What may stand before the judge: an adapter, an algorithm, or a function that makes an algorithm.

An adapter wraps a whole implementation. Who has written only the mathematics, as `fedscaffold.algorithms.base` asks for
it, needs none: the plain engine runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from fedscaffold.algorithms import Algorithm
from fedscaffold.conformance.case import Adapter, Case, Trace, Unsupported, offers
from fedscaffold.conformance.plain import OFFERED, run

__all__ = ["Target", "adapter_of"]

Target: TypeAlias = Adapter | Algorithm | Callable[..., Algorithm]


def adapter_of(target: Target) -> Adapter:
    """Return the adapter that a target stands for.

    A function that needs an argument is an adapter, and its argument a case. One that needs none makes an algorithm; it
    is given the `server_lr` and the `option` of the case where it has parameters of these names. An algorithm that is
    made already has both inside: cases with others are not offered.

    >>> from fedscaffold.algorithms import scaffold
    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=1, steps=1, lr=0.5)
    >>> adapter_of(scaffold)(case._replace(server_lr=0.5)).x.ravel().tolist()
    [0.0, 0.25]
    """
    if isinstance(target, Algorithm):
        return offers(*OFFERED)(lambda case: tried(lambda: target, case))
    try:
        inspect.signature(target).bind()
    except (TypeError, ValueError):  # it needs arguments, or nobody knows
        return cast(Adapter, target)
    return offers(*OFFERED)(lambda case: tried(target, case))


def tried(make: Callable[..., Any], case: Case) -> Trace:
    """Run the algorithm on a case, if it can be made for it."""
    known = inspect.signature(make).parameters
    wanted = {"server_lr": case.server_lr, "option": case.option}
    algorithm = make(**{name: value for name, value in wanted.items() if name in known})
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"what needs no argument makes an Algorithm, not a {type(algorithm).__name__}")
    if case.server_lr != 1 and "server_lr" not in known:
        raise Unsupported("a server step: no parameter server_lr")
    if algorithm.at_x != (case.option == 1):
        raise Unsupported(f"option {'I' * case.option}")
    if algorithm.coin:
        raise Unsupported("a number of steps drawn by a coin")
    if algorithm.everyone and any(len(case.heard(r)) < case.num_clients for r in range(case.rounds)):
        raise Unsupported("clients that are not heard")
    return run(algorithm, case)

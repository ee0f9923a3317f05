"""Combinations that are mathematically wrong are refused here, each with the reason and what to do instead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.simulation.asked import Request
from fedscaffold.simulation.stale import Policy

__all__ = ["refuse"]


def refuse(request: Request, steps: NDArray[np.int64], size: int, policy: Policy) -> None:
    """Raise an InputError if parts of the request do not go together."""
    algorithm, problem = request.algorithm, request.problem
    name = algorithm.name
    for layer in problem.inspected.statistics[:1]:
        raise InputError(
            f"{layer} looks like batch statistics: they have no gradient, and control variates would drive them "
            "off; leave them out of params (group or layer normalisation needs none)"
        )
    absent = size < problem.num_clients or request.availability is not None
    absent |= request.cohorts is not None and any(len(cohort) < problem.num_clients for cohort in request.cohorts)
    if algorithm.everyone and absent:
        raise InputError(
            f"{name} is right only when all clients take part in every round: its clients take the mean direction "
            "for c; use scaffold with sampling"
        )
    plain = request.local_optimizer is None and not callable(request.lr)
    if algorithm.coin and not plain:
        raise InputError(
            f"{name} divides x - y by the expected travel, a displacement form that is a mean direction only for plain "
            "SGD steps of one size; use scaffold with an optimizer or a schedule"
        )
    if algorithm.coin and (steps != steps[0]).any():
        raise InputError(f"{name} has one number of local steps for all clients, drawn by a coin; use scaffold instead")
    if algorithm.normalised and request.local_optimizer is not None:
        raise InputError(
            f"{name} divides moves by the sum of step sizes, which says how far SGD goes but not how far an optimizer "
            "does; use scaffold, whose mean direction holds for any optimizer"
        )
    if algorithm.anchor is not None and request.compression not in (None, "none"):
        raise InputError(
            f"{name} exchanges gradients before the local steps, and these have no error feedback; "
            "compress scaffold instead"
        )
    if algorithm.by_move and request.compression not in (None, "none"):
        raise InputError(
            f"{name} remembers its moves, so what compression leaves out of one would count twice, in its memory and "
            "in its error feedback, and grow; compress scaffold instead"
        )
    _refuse_policy(request, policy)


def _refuse_policy(request: Request, policy: Policy) -> None:
    algorithm = request.algorithm
    if policy.name == "keep":
        return
    if algorithm.remember is None:
        raise InputError(f"{algorithm.name} keeps no control variates, so none grow stale: leave stale='keep'")
    if algorithm.everyone:
        raise InputError(f"{algorithm.name} hears all clients in every round, so no control variate grows stale")
    if policy.refresh_after is not None and algorithm.by_move:
        raise InputError(
            f"{algorithm.name} does not remember gradients, so a gradient cannot renew its memory; use decay or drop"
        )

"""User-defined participation: sampling by a function or weights, availability by a function.

Functions are called on the host, possibly several times per round, so they must depend on their
arguments only. Rounds count from 1, as in a run's history.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.records import reals

__all__ = [
    "Availability",
    "Sampling",
    "call_sampler",
    "check_availability",
    "check_sampling",
    "sample_by_weight",
]

Ints: TypeAlias = NDArray[np.int64]
Sampling: TypeAlias = Callable[[int, np.random.Generator], Any] | NDArray[np.float64]
Availability: TypeAlias = Callable[[int], NDArray[np.bool_]]


def check_sampling(sampling: Any, num_clients: int, size: int) -> Sampling | None:
    """Check the `sampling` argument; return a function, (N,) weights, or None for uniform sampling.

    >>> check_sampling([1, 1, 0], 3, 3)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: sampling draws cohorts of 3 among clients of weight above 0, got
        2 of these
    """
    if callable(sampling):
        _check_arguments("sampling", sampling, "round", "rng")
        return _refuse_nondeterministic(sampling, num_clients, size)
    if isinstance(sampling, str):
        if sampling == "uniform":
            return None
        raise InputError(
            f"sampling must be 'uniform', one weight for each client, or a function (round, rng) "
            "-> clients, "
            f"got {sampling!r}"
        )
    weights = reals("sampling", sampling)
    if weights.shape != (num_clients,):
        raise InputError(
            f"sampling must be one weight for each of the {num_clients} clients, got "
            f"{weights.shape}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError("sampling must be weights that are finite and not negative")
    if (positive := int(np.count_nonzero(weights))) < size:
        raise InputError(
            f"sampling draws cohorts of {size} among clients of weight above 0, got {positive} of "
            "these"
        )
    return None if size == num_clients else weights


def _check_arguments(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise an InputError for a function that cannot be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not every built-in function has one
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise InputError(
            f"{name} must be a function of ({', '.join(arguments)}), got {signature}"
        ) from None


def _refuse_nondeterministic(
    function: Callable[..., Any], num_clients: int, size: int
) -> Callable[..., Any]:
    """Raise an InputError for a function that is not deterministic.

    Such a run could not be resumed.
    """
    first, again = (
        call_sampler(function, 1, np.random.default_rng(0), num_clients, size) for _ in range(2)
    )
    if not np.array_equal(first, again):
        raise InputError(
            "sampling must depend on round and rng only: asked twice for the same round it named "
            "other clients; "
            "draw from the rng that it is given"
        )
    return function


def call_sampler(
    function: Callable[..., Any], round: int, rng: np.random.Generator, num_clients: int, size: int
) -> Ints:
    """Call the user's sampling function for a round and return its clients in ascending order.

    >>> call_sampler(lambda round, rng: [4, round], 2, np.random.default_rng(0), 5, 2)
    array([2, 4])
    >>> call_sampler(lambda round, rng: [5], 3, np.random.default_rng(0), 5, 2)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: sampling must name clients 0 to 4, each once, got [5] in round 3
    """
    named = function(round, rng)
    try:
        clients = np.asarray(named)
    except ValueError:  # rows of unlike lengths
        clients = np.empty(())
    clients = clients.astype(np.int64) if clients.size == 0 and clients.ndim == 1 else clients
    sound = (
        clients.ndim == 1 and clients.dtype.kind in "iu" and len(np.unique(clients)) == len(clients)
    )
    if not sound or (len(clients) and not 0 <= clients.min() <= clients.max() < num_clients):
        raise InputError(
            f"sampling must name clients 0 to {num_clients - 1}, each once, got "
            f"{checks.shown(named)} in round {round}"
        )
    if len(clients) > size:
        raise InputError(
            f"sampling must name at most as many clients as cohort says, {size}, got "
            f"{len(clients)} in round {round}"
        )
    return np.sort(clients.astype(np.int64))


def sample_by_weight(
    weights: NDArray[np.float64], among: Ints, size: int, rng: np.random.Generator
) -> Ints:
    """Sample clients one after the other, each with probability proportional to its weight.

    These are the `size` clients of smallest E_i / w_i, with E_i exponential (Efraimidis and
    Spirakis 2006). Fewer are returned if fewer have positive weight.
    """
    waiting = rng.standard_exponential(len(among))
    with np.errstate(divide="ignore"):
        waiting = waiting / weights[among]
    size = min(size, int(np.count_nonzero(weights[among])))
    return np.sort(among[np.argsort(waiting, kind="stable")[:size]])


def check_availability(function: Callable[[int], Any], num_clients: int) -> Availability:
    """Wrap the user's availability function.

    (round, counted from 1) -> checked mask of available clients.

    >>> check_availability(lambda round: [1, 0], 3)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: availability must return 3 zeros and ones, got [1, 0] for round 1
    """
    _check_arguments("availability", function, "round")

    def reached(round: int) -> NDArray[np.bool_]:
        given = function(round)
        try:
            mask = np.asarray(given)
        except ValueError:  # rows of unlike lengths
            mask = np.empty(())
        if (
            mask.shape != (num_clients,)
            or mask.dtype.kind not in "biuf"
            or not np.isin(mask, (0, 1)).all()
        ):
            raise InputError(
                f"availability must return {num_clients} zeros and ones, got {checks.shown(given)} "
                f"for round {round}"
            )
        return mask.astype(bool)

    if not np.array_equal(reached(1), reached(1)):
        raise InputError(
            "availability must depend on the round only: asked twice for the same it gave other "
            "clients"
        )
    return reached

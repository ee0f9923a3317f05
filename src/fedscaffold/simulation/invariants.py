"""Invariant checks: is c still the mean of the c_i?

Every correct round preserves c = sum p_i c_i, so the residual |c - sum p_i c_i| is rounding, in
float64 whatever the precision of the run. A larger residual is permanent: training then converges
to grad f(x) = -(c - sum p_i c_i).

The running mean, which rounds update from the changes they store, reveals errors of an algorithm.
The exact mean of the stored c_i also reveals lost or damaged state, but reads all clients: it is
computed when a run resumes, at checkpoints, at the end, and from time to time in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import complaint, explained
from fedscaffold.simulation.distributed import allreduce_max
from fedscaffold.simulation.spec import Spec, State
from fedscaffold.simulation.staleness import decay_factor

__all__ = ["InvariantMonitor", "describe_fault", "exact_mean", "explained_residual", "residual_of"]

SECONDS = 20.0  # least time between two checks
SHARE = 100.0  # checks take at most 1 / SHARE of the time


class InvariantMonitor:
    """Periodic check of the stored c_i during a run, with at most 1 % overhead.

    `found` keeps the first fault.

    Args:
        look: Returns a description of what is wrong with a state, or None.
        several: Whether there are several processes, which must call `due` and check together.
    """

    def __init__(self, look: Callable[[State], str | None], several: bool = False) -> None:
        self.look, self.several = look, several
        self.found: str | None = None
        self.at, self.pause = time.perf_counter(), SECONDS

    def due(self) -> bool:
        """Return whether the next check is due."""
        due = time.perf_counter() - self.at >= self.pause
        return bool(allreduce_max(int(due))[0]) if self.several else due

    def __call__(self, state: State) -> str | None:
        """Check a state and return what is wrong with it, or None."""
        began = time.perf_counter()
        wrong = self.look(state)
        self.found = self.found or wrong
        self.at = time.perf_counter()
        self.pause = max(SECONDS, SHARE * (self.at - began))
        return wrong


def exact_mean(spec: Spec, state: State, p: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return sum p_i c_i over all clients in float64, for each pair of the algorithm's `means`."""
    p = p if spec.policy.rate is None else p * decay_factor(spec, state)
    # einsum without BLAS, whose threads would keep spinning into the next run
    return tuple(
        np.einsum("n,nd->d", p, getattr(state.memory, of), dtype=np.float64)
        for _, of in spec.algorithm.means
    )


def residual_of(spec: Spec, state: State, mean: tuple[NDArray[Any], ...]) -> float:
    """Return |c - sum p_i c_i| for exact means; 0 for algorithms without client memory."""
    kept = [np.asarray(getattr(state.server, field)) for field, _ in spec.algorithm.means]
    return _distance(kept, mean)


def _distance(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> float:
    """Return the Euclidean distance between two lists of vectors."""
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverged
        return math.hypot(
            *(float(np.linalg.norm(np.asarray(a) - b)) for a, b in zip(some, others, strict=True))
        )


def explained_residual(state: State, clients: int) -> float:
    """Return the largest residual that rounding explains in a state."""
    return explained(int(state.round), clients, float(state.scale))


def describe_fault(
    spec: Spec, state: State, mean: tuple[NDArray[Any], ...], clients: int
) -> str | None:
    """Return a description of a violated invariant.

    None if rounding explains the residual or the run diverged.

    Both c and the running means must agree with the exact means `mean`.
    """
    if not mean or not all(np.isfinite(a).all() for a in (state.x, *mean)):
        return None
    largest = max(residual_of(spec, state, mean), _distance(state.mean, mean))
    return complaint(int(state.round), largest, explained_residual(state, clients))

"""The health of a run's state: is c still the mean of the c_i?

Every correct round keeps c = sum p_i c_i, so the residual |c - sum p_i c_i| is rounding, in double precision whatever
the precision of the run. Anything above never heals: training ends where grad f(x) = -(c - sum p_i c_i).

The mean that rounds keep up, from what they change, tells of an algorithm that is wrong. The mean of the c_i as they
are stored also tells of state that was lost or damaged, but takes a look at all of them: when a run resumes, when it
writes a checkpoint, at its end, and in between every so often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import complaint, explained
from fedscaffold.simulation.aging import fading
from fedscaffold.simulation.spec import Spec, State

__all__ = ["Watch", "exact_mean", "fault", "level", "residual_of"]

SECONDS = 20.0  # between two looks at all clients
SHARE = 100.0  # a look takes at most one part in so many of the time


class Watch:
    """Looks at all clients' c_i every so often while a run goes on, and keeps what it finds first.

    `look` tells what is wrong with a state from the c_i as they are stored; at most one part in a hundred of the time
    is spent on it. Of several processes all must ask `due` and look together: `agree` is the largest of their answers.
    """

    def __init__(self, look: Callable[[State], str | None], agree: Callable[[int], int] = int) -> None:
        self.look, self.agree = look, agree
        self.found: str | None = None
        self.at, self.pause = time.perf_counter(), SECONDS

    def due(self) -> bool:
        """Whether it is time to look again."""
        return bool(self.agree(time.perf_counter() - self.at >= self.pause))

    def __call__(self, state: State) -> str | None:
        """What is wrong with a state now."""
        began = time.perf_counter()
        wrong = self.look(state)
        self.found = self.found or wrong
        self.at = time.perf_counter()
        self.pause = max(SECONDS, SHARE * (self.at - began))
        return wrong


def exact_mean(spec: Spec, state: State, p: NDArray[Any]) -> NDArray[Any]:
    """Sum of p_i c_i over all clients, as they stand now, in double precision."""
    p = p if spec.policy.rate is None else p * fading(spec, state)
    # not by BLAS, whose threads would go on spinning into the next run
    total: NDArray[Any] = np.einsum("n,nd->d", p, state.c_i, dtype=np.float64)
    return total


def residual_of(state: State, mean: NDArray[Any] | None) -> float:
    """|c - sum p_i c_i| for the exact mean; 0 where clients remember nothing."""
    return 0.0 if mean is None else float(np.linalg.norm(np.asarray(state.c) - mean))


def level(state: State, clients: int) -> float:
    """The residual that rounding explains in a state of so many clients."""
    return explained(int(state.round), clients, float(state.scale))


def fault(state: State, mean: NDArray[Any] | None, clients: int) -> str | None:
    """What is wrong with a state, in words; None where rounding explains everything, or where the run diverged.

    `mean` is the exact one, and c and the mean that rounds keep up must both agree with it.
    """
    if mean is None or not (np.isfinite(state.x).all() and np.isfinite(mean).all()):
        return None
    kept = float(np.linalg.norm(np.asarray(state.mean) - mean))
    return complaint(int(state.round), max(residual_of(state, mean), kept), level(state, clients))

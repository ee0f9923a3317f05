"""The health of a run's state: is c still the mean of the c_i?

Every correct round keeps c = sum p_i c_i, so the residual |c - sum p_i c_i| is rounding, which R rounds may add up to
about sqrt(R) times that of one. Anything above never heals: training ends where grad f(x) = -(c - sum p_i c_i).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.metrics import explained
from fedscaffold.simulation.aging import faded
from fedscaffold.simulation.spec import Spec, State

__all__ = ["complaint", "exact_mean", "fault", "residual_of"]


def exact_mean(spec: Spec, state: State, p: NDArray[Any]) -> NDArray[Any]:
    """Sum of p_i c_i over all clients, as they stand now, in double precision."""
    # not by BLAS, whose threads would go on spinning into the next run
    total: NDArray[Any] = np.einsum("n,nd->d", p, faded(spec, state, state.c_i), dtype=np.float64)
    return total


def residual_of(state: State, mean: NDArray[Any] | None) -> float:
    """|c - sum p_i c_i| for the exact mean; 0 where clients remember nothing."""
    return 0.0 if mean is None else float(np.linalg.norm(np.asarray(state.c) - mean))


def fault(state: State, mean: NDArray[Any] | None) -> str | None:
    """What is wrong with a state, in words; None where rounding explains everything, or where the run diverged.

    `mean` is the exact one, and c and the mean that rounds keep up must both agree with it.
    """
    if mean is None or not (np.isfinite(state.x).all() and np.isfinite(mean).all()):
        return None
    kept = float(np.linalg.norm(np.asarray(state.mean) - mean))
    return complaint(int(state.round), max(residual_of(state, mean), kept), float(state.scale), state.x.dtype)


def complaint(round: int, residual: float, scale: float, dtype: Any) -> str | None:
    """The sentence about a residual that rounding does not explain.

    >>> complaint(10, 1e-15, 1.0, "float64") is None
    True
    >>> complaint(10, 0.5, 1.0, "float64")
    'after round 10 c differs from the mean of the c_i by 0.5, where rounding explains 7e-13: a bias that never ...
    """
    level = explained(dtype, round, scale)
    if not math.isfinite(residual) or residual <= level:
        return None
    return (
        f"after round {round} c differs from the mean of the c_i by {residual:.3g}, where rounding explains "
        f"{level:.2g}: a bias that never heals. Likely causes: an algorithm whose server step and remember do not "
        "agree (factor S/N, weights), or state that was changed or damaged between rounds (memory, disk)"
    )

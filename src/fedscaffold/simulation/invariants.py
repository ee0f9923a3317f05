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
from collections.abc import Callable

import jax
import numpy as np

from fedscaffold.metrics import complaint, explained
from fedscaffold.problems.problem import weights_of
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.distributed import allreduce_max
from fedscaffold.simulation.out_of_core import OutOfCoreClients
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.spec import State
from fedscaffold.simulation.staleness import decay_factor

__all__ = ["InvariantMonitor", "check_means", "find_fault"]

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


def check_means(
    config: RunConfig, ready: PreparedRun, state: State, away: OutOfCoreClients | None = None
) -> tuple[float, float, str | None]:
    """Compare c, and the running mean, with the exact mean of the stored c_i.

    Args:
        config: The run.
        ready: The prepared run.
        state: A state on the host.
        away: Out-of-core clients, if any.

    Returns:
        The residual |c - sum p_i c_i|, 0 for algorithms without client memory; the largest that
        rounding explains; and what is wrong, None if rounding explains it or the run diverged.
    """
    spec, shards, round = ready.spec, ready.shards, int(state.round)
    if away is not None:
        exact = away.mean(round)
    else:
        p = weights_of(config.problem, config.weights)
        p = p if shards is None else p[shards.own]
        p = p if spec.policy.rate is None else p * decay_factor(spec, state)
        # einsum without BLAS, whose threads would keep spinning into the next run
        exact = tuple(
            np.einsum("n,nd->d", p, getattr(state.memory, of), dtype=np.float64)
            for _, of in spec.algorithm.means
        )
        exact = exact if shards is None else tuple(map(shards.total, exact))
    kept = [getattr(state.server, field) for field, _ in spec.algorithm.means]
    with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverged
        residual, running = (
            math.hypot(*(float(np.linalg.norm(a - b)) for a, b in zip(some, exact, strict=True)))
            for some in (kept, state.mean)
        )
    limit = explained(round, config.problem.num_clients, float(state.scale))
    if not exact or not all(np.isfinite(a).all() for a in (state.x, *exact)):
        return residual, limit, None
    # where clients are protected, c is the server's own: it holds the noise, and the c_i do not
    worst = running if spec.message_privacy is not None else max(residual, running)
    return residual, limit, complaint(round, worst, limit)


def find_fault(
    config: RunConfig, ready: PreparedRun, away: OutOfCoreClients | None, state: State
) -> str | None:
    """Return what is wrong with a state on the devices, or None."""
    if ready.shards is not None and isinstance(state.x, jax.Array):
        here = ready.shards.collect(state)
    else:
        here = jax.tree.map(np.asarray, state)
    return check_means(config, ready, here, away)[2]

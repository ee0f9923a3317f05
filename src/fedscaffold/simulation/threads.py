"""Number of threads that JAX uses on a CPU, chosen by the size of the local steps."""

from __future__ import annotations

import os

import jax

from fedscaffold.problems.problem import Problem

__all__ = ["choose_threads"]

VARIABLE = "PJRT_NPROC"
# Operations of a local step below which a second thread costs more than it brings. At 3e8 (an MLP
# 784-300-62 on batches of 200) two threads save a quarter of the wall time for a third more CPU
# time.
SMALL = 1e9


def choose_threads(problem: Problem, batch_size: int | float | None) -> None:
    """Start JAX with one thread if the local steps are small.

    JAX chooses its threads once, when it first runs something, so this does nothing in a process
    that has used JAX before. The environment variable PJRT_NPROC takes precedence.

    Args:
        problem: The problem to simulate.
        batch_size: Records per local step, as a number or a fraction; None for all of a client's.
    """
    if os.environ.get(VARIABLE) or _has_started() or step_operations(problem, batch_size) >= SMALL:
        return
    os.environ[VARIABLE] = "1"
    try:
        jax.devices()
    finally:
        del os.environ[VARIABLE]  # processes started from here choose for themselves


def step_operations(problem: Problem, batch_size: int | float | None) -> float:
    """Estimate the floating-point operations of a local step: six per parameter and record.

    >>> import fedscaffold as fs
    >>> step_operations(fs.problems.quadratic(num_clients=3, dim=10, seed=0), None)
    60.0
    """
    rows: float = int(problem.counts.max())
    if batch_size is not None:
        rows = batch_size * rows if isinstance(batch_size, float) else batch_size
    return 6.0 * problem.dim * rows


def _has_started() -> bool:
    """Return whether JAX has chosen its threads; True if this version of JAX does not tell."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return bool(backends_are_initialized())

"""Cores of a CPU: how JAX starts, which runs use several, and how many."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.problems.problem import Problem
from fedscaffold.state.platforms import cores

__all__ = ["HEAVY", "choose_threads", "client_operations", "lane", "threads"]

LOG = logging.getLogger("fedscaffold")
VARIABLE = "PJRT_NPROC"
# Operations of a client in a round from which blocks of clients run on several cores. There the
# rounds take little more than half the wall time on two cores, for up to a tenth more CPU time.
# With fewer, handing over programs, their memory and their sums took up to 40 % more CPU time.
HEAVY = 5e8


def choose_threads() -> None:
    """Start JAX with one thread.

    The order in which XLA adds up a product depends on the number of its threads, so that the
    machine would show in the bits of a result; and a second thread costs small programs more than
    it brings. Large ones share cores by `lane`.

    JAX chooses its threads once, when it first runs something, so this does nothing in a process
    that has used JAX before. The environment variable PJRT_NPROC takes precedence.
    """
    if os.environ.get(VARIABLE) or _has_started():
        return
    with _one_thread():
        jax.devices()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let JAX start with one thread; processes started later choose for themselves."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


@cache
def lane(number: int) -> Any:
    """Return a CPU device that computes with one thread of its own, the same one for a number.

    JAX has one pool of threads, which all programs share, and the bits of a product depend on its
    size. A device of a further client has its own pool, whatever JAX was started with; arrays are
    shared, not copied. Where jaxlib has no such client the first device of JAX is returned, and the
    log says what follows.
    """
    try:
        from jaxlib import xla_client

        with _one_thread():
            client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=1)
        return client.devices()[0]
    except (ImportError, AttributeError, TypeError):
        LOG.warning(
            "this jaxlib gives blocks of clients no threads of their own: the last bits of results "
            "depend on the number of cores; set %s=1 for the same bits everywhere",
            VARIABLE,
        )
        return jax.devices()[0]


def threads() -> int:
    """Return the number of threads that run blocks of clients: one per core, at most PJRT_NPROC."""
    given = os.environ.get(VARIABLE, "")
    return min(cores(), int(given)) if given.isdigit() and int(given) else cores()


def client_operations(
    problem: Problem, steps: NDArray[np.int64], batch: NDArray[np.int64] | None
) -> float:
    """Estimate the floating-point operations of a client in a round: six per parameter and record.

    Args:
        problem: The problem.
        steps: The (N,) numbers of local steps.
        batch: The (N,) numbers of records of a step; None for all of a client's.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=3, dim=10, seed=0)
    >>> client_operations(problem, np.array([5, 5, 5]), None)
    300.0
    """
    records = steps * (problem.counts if batch is None else batch)
    return 6.0 * problem.dim * float(records.mean())


def _has_started() -> bool:
    """Return whether JAX has chosen its threads; True if this version of JAX does not tell."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return bool(backends_are_initialized())

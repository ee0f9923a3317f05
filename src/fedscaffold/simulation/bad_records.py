"""Find data whose loss is not finite at the initial model, to tell them from a step too large.

A label or an index out of range, the logarithm of zero: compiled code returns NaN and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.model_functions import measured
from fedscaffold.problems.batches import call, record_values
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.spec import State

__all__ = ["find_bad_records"]

CHUNK = 64  # records evaluated at once
MOST_RECORDS, MOST_CLIENTS = 1 << 14, 64  # that are searched

Loss: TypeAlias = Callable[..., Any]


def find_bad_records(problem: Problem, precision: str, start: State) -> str | None:
    """Say which record, or which client's records together, have a loss that is not finite.

    Args:
        problem: The problem.
        precision: Precision of the run.
        start: State before the first round, whose model is the initial one.

    Returns:
        The first one, such as "the loss of record 3 of client 0 is nan"; None if there is none
        among the first records or clients.

    >>> import fedscaffold as fs
    >>> clients = [np.array([1.0, 0.0])]
    >>> problem = fs.Problem(lambda w, x: jnp.log(w * x).mean(), np.ones(()), clients)
    >>> run = fs.simulate(fs.fedavg(), problem, rounds=5, local_steps=1, lr=0.1)
    >>> print(run.advice)
    diverged at round 1: the loss of client 0 is -inf at the initial model, whatever the step size
    """
    if not problem.functions.has_loss or start.own_buffers is not None:
        return None
    loss = measured(problem.functions.loss, start.buffers)
    params = problem.layout.unflatten(np.asarray(start.x))
    search = _search_records if problem.kinds.loss == "mean" else _search_clients
    with jax.enable_x64(precision == "float64"):
        return search(problem, loss, params, problem.on_device(precision)[0])


def _search_records(problem: Problem, loss: Loss, params: Any, records: Any) -> str | None:
    """Search with a loss that is a mean over records."""
    total = int(problem.offsets[-1])

    @jax.jit
    def values(rows: Any) -> Any:
        return record_values(loss, params, jax.tree.map(lambda a: a[rows], records))

    for first in range(0, min(total, MOST_RECORDS), CHUNK):
        rows = np.minimum(np.arange(first, first + CHUNK), total - 1)
        found = np.asarray(values(jnp.asarray(rows)))
        if not np.isfinite(found).all():
            at = int(np.argmin(np.isfinite(found)))
            client = int(np.searchsorted(problem.offsets, rows[at], side="right")) - 1
            place = rows[at] - problem.offsets[client]
            return f"the loss of record {place} of client {client} is {found[at]:g}"
    return None


def _search_clients(problem: Problem, loss: Loss, params: Any, records: Any) -> str | None:
    """Search with a loss that depends on whole batches: it may have none on a single record."""
    value = jax.jit(partial(call, loss, problem.kinds.loss))
    for client in range(min(problem.num_clients, MOST_CLIENTS)):
        first, end = problem.offsets[client : client + 2]
        found = float(value(params, jax.tree.map(lambda a: a[first:end], records)))  # noqa: B023
        if not np.isfinite(found):
            return f"the loss of client {client} is {found:g}"
    return None

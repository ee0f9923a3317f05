"""The reference engine as a target of the suite.

The formulas are those of `fedscaffold.algorithms`, the round is that of
`fedscaffold.algorithms.reference`; a case adds gradients, clipping, lost replies and restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm, Walk, scaffold
from fedscaffold.algorithms.base import Vector
from fedscaffold.algorithms.reference import Federation, State, begin, descend, heavy_ball, play
from fedscaffold.algorithms.round import work_of
from fedscaffold.conformance.case import Case, Trace, offers
from fedscaffold.conformance.oracles import clipped

__all__ = ["OFFERED", "ours", "run"]

OFFERED = ("clipping", "loss scaling")
"""Features of this engine; its models are single vectors without buffers."""


def run(algorithm: Algorithm, case: Case, asarray: Callable[[Any], Any] = np.asarray) -> Trace:
    """Run an algorithm on a case; `asarray` selects the array library, for example `torch.asarray`.

    The server step and the option are those of the algorithm; those of the case are ignored.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=2, steps=1, lr=0.5)
    >>> run(scaffold(), case).x.ravel().tolist()
    [0.0, 0.5, 0.75]
    """
    clients = clients_of(algorithm, case, asarray)
    states = [begin(algorithm, asarray(case.x0), case.num_clients)]
    for r in range(case.rounds):
        before = states[-1]
        after = play(algorithm, before, clients, case.cohorts[r], case.heard(r))
        if case.frozen:
            after = before._replace(
                round=after.round, server=before.server._replace(x=after.server.x)
            )
        states.append(reload_state(after, asarray) if after.round == case.restart else after)
    return to_trace(algorithm, case, states)


@offers(*OFFERED)
def ours(case: Case) -> Trace:
    """Run the SCAFFOLD of this package on a case.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=1, steps=1, lr=0.5)
    >>> ours(case._replace(server_lr=0.5)).x.ravel().tolist()
    [0.0, 0.25]
    """
    return run(scaffold(option=case.option, server_lr=case.server_lr), case)


def clients_of(algorithm: Algorithm, case: Case, asarray: Callable[[Any], Any]) -> Federation:
    """Return the clients of a case for the reference engine."""

    def gradient(i: int, y: Vector) -> Vector:
        return clipped(asarray(case.gradient(i, y)) / case.loss_scale, case.clip)

    def steps(i: int, start: Any, x: Vector, shift: Vector) -> Walk:
        return descend(
            algorithm,
            lambda y: gradient(i, y),
            start,
            x,
            shift,
            lrs=case.lr[: work_of(algorithm, case.local_steps[i]).steps],
            advance=heavy_ball(case.momentum) if case.momentum else None,
            watch=lambda d: clipped(d, case.clip_corrected),
        )

    return Federation(case.weights.tolist(), steps, gradient)


def reload_state(state: State, asarray: Callable[[Any], Any]) -> State:
    """Return copies of the state's arrays, as a restarted process would load them."""

    def reread(record: Any) -> Any:
        if record is None:
            return None
        return type(record)(*(asarray(np.array(np.asarray(value))) for value in record))

    memory, own = (
        tuple(reread(record) for record in records) for records in (state.memory, state.own)
    )
    return State(state.round, reread(state.server), memory, own)


def to_trace(algorithm: Algorithm, case: Case, states: list[State]) -> Trace:
    """Return the states as NumPy arrays, with zeros for control variates not kept."""
    c, c_i = (*algorithm.means, ("c", "c_i"))[0]

    def array(record: Any, field: str) -> Any:
        return np.asarray(getattr(record, field, np.zeros_like(case.x0)))

    return Trace(
        np.stack([array(state.server, "x") for state in states]),
        np.stack([array(state.server, c) for state in states]),
        np.stack([[array(one, c_i) for one in state.memory] for state in states]),
    )

"""The algorithms on plain arrays, one client after the other: the slowest engine and the easiest to read.

It holds no formula of its own: all arithmetic of a method comes from `fedscaffold.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm, scaffold, travelled
from fedscaffold.algorithms.base import Vector
from fedscaffold.conformance.case import Case, Trace, offers
from fedscaffold.conformance.oracles import clipped

__all__ = ["OFFERED", "ours", "run"]

OFFERED = ("clipping", "loss scaling")
"""What this engine does beyond the plainest case: its models are single vectors, without buffers."""


class State(NamedTuple):
    """All that a federation must save to go on as if nothing had happened."""

    round: int
    x: Vector
    c: Vector
    c_i: tuple[Vector, ...]


class Reply(NamedTuple):
    """What client i sends, and the memory it keeps once it knows that it was heard."""

    i: int
    move: Vector
    d: Vector
    c_i: Vector
    travel: float
    """The sum of its step sizes."""


def run(algorithm: Algorithm, case: Case, asarray: Callable[[Any], Any] = np.asarray) -> Trace:
    """Run an algorithm on a case; `asarray` chooses the array library (`torch.asarray`, say).

    The server step and the option belong to the algorithm: those of the case are not looked at.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=2, steps=1, lr=0.5)
    >>> run(scaffold(), case).x.ravel().tolist()
    [0.0, 0.5, 0.75]
    """
    zero = asarray(np.zeros_like(case.x0))
    c, c_i = (zero if kept else None for kept in (algorithm.shift, algorithm.remember))
    states = [State(0, asarray(case.x0), c, (c_i,) * case.num_clients)]
    while states[-1].round < case.rounds:
        states.append(advance(algorithm, case, states[-1], asarray))
        if states[-1].round == case.restart:
            states[-1] = restored(saved(states[-1]), asarray)
    return traced(case, states)


@offers(*OFFERED)
def ours(case: Case) -> Trace:
    """Our own SCAFFOLD as a target of the suite.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[1.0]]], [[1.0]], [0.0], rounds=1, steps=1, lr=0.5)
    >>> ours(case._replace(server_lr=0.5)).x.ravel().tolist()
    [0.0, 0.25]
    """
    return run(scaffold(option=case.option, server_lr=case.server_lr), case)


def advance(algorithm: Algorithm, case: Case, state: State, asarray: Callable[[Any], Any]) -> State:
    """Play one round."""
    r, p = state.round, case.weights.tolist()
    if algorithm.anchor is not None and case.heard(r):
        state = state._replace(c=algorithm.anchor(state.c, mean_gradient(case, state.x, case.heard(r), asarray)))
    # The whole cohort trains; a client whose reply is lost has trained in vain and keeps the memory it had.
    replies = [train(algorithm, case, state, i, asarray) for i in case.cohorts[r]]
    replies = [reply for reply in replies if reply.i in case.heard(r)]
    if not replies:
        return state._replace(round=r + 1)
    heard = sum(p[reply.i] for reply in replies)
    if algorithm.normalised:
        travel = sum(p[reply.i] * reply.travel for reply in replies) / heard
        replies = [reply._replace(move=reply.move * (travel / reply.travel)) for reply in replies]
    move = sum(p[reply.i] * reply.move for reply in replies) / heard
    d = sum(p[reply.i] * reply.d for reply in replies) / heard
    x, c = algorithm.server(state.x, state.c, move, d, heard)
    if case.frozen:
        return state._replace(round=r + 1, x=x)
    c_i = list(state.c_i)
    for reply in replies:
        c_i[reply.i] = reply.c_i
    return State(r + 1, x, c, tuple(c_i))


def mean_gradient(case: Case, x: Vector, cohort: tuple[int, ...], asarray: Callable[[Any], Any]) -> Vector:
    """The exchange before the local steps: the mean of the gradients at x of the clients heard."""
    p = case.weights.tolist()
    total = sum(p[i] * asarray(case.gradient(i, x)) for i in cohort)
    return total / (case.loss_scale * sum(p[i] for i in cohort))


def train(algorithm: Algorithm, case: Case, state: State, i: int, asarray: Callable[[Any], Any]) -> Reply:
    """Client i's part of a round."""
    x, c, c_i = state.x, state.c, state.c_i[i]
    shift = None if algorithm.shift is None else algorithm.shift(c, c_i)

    def direction(y: Vector) -> Vector:
        g = clipped(asarray(case.gradient(i, y)) / case.loss_scale, case.clip)
        if algorithm.anchor is not None:
            g = g - asarray(case.gradient(i, x)) / case.loss_scale
        return clipped(algorithm.direction(g, y, x, shift), case.clip_corrected)

    lrs = case.lr[: 1 if algorithm.one_step else case.local_steps[i]]
    y, m, total = x, 0.0, 0.0
    for lr in lrs:
        d = direction(y)
        m = case.momentum * m + d
        y = y - lr * m
        total = total + d
    if algorithm.at_x:
        d = direction(x)
    elif case.momentum == 0 and len(set(lrs)) == 1:
        d = travelled(x, y, len(lrs), lrs[0])
    else:
        d = total / len(lrs)
    seen = x - y if algorithm.by_move else d
    kept = None if algorithm.remember is None else algorithm.remember(c, c_i, seen)
    return Reply(i, x - y, d, kept, sum(lrs))


def saved(state: State) -> dict[str, Any]:
    """What goes to disk: copies, so that nothing of the state thrown away can leak into the one restored."""

    def written(value: Vector) -> Any:
        return None if value is None else np.asarray(value).copy()

    x, c, c_i = written(state.x), written(state.c), [written(one) for one in state.c_i]
    return {"round": state.round, "x": x, "c": c, "c_i": c_i}


def restored(file: dict[str, Any], asarray: Callable[[Any], Any]) -> State:
    """The state in a new process."""

    def read(value: Any) -> Any:
        return None if value is None else asarray(value)

    return State(file["round"], read(file["x"]), read(file["c"]), tuple(read(one) for one in file["c_i"]))


def traced(case: Case, states: list[State]) -> Trace:
    """The states as NumPy arrays, with zeros for the memory of a method that has none."""
    zero = np.zeros_like(case.x0)

    def array(value: Vector) -> Any:
        return zero if value is None else np.asarray(value)

    return Trace(
        np.stack([array(state.x) for state in states]),
        np.stack([array(state.c) for state in states]),
        np.stack([[array(one) for one in state.c_i] for state in states]),
    )

"""Check of a declared `Form`: does a round of the algorithm's own functions do what the form says?

A form is a declaration, and `algorithm._replace(direction=...)` keeps it. The check runs a few
rounds of the reference engine on two quadratic clients of unequal weights, one round of them with
one client only, and compares each move of x with that of the round that the form stands for:

    y_i <- y_i - lr (g_i(y_i) + drag (y_i - x) + c - c_i)       K times from y_i = x
    x+ = x - server_lr sum p_i (x - y_i) / heard                over the clients heard
    c_i+ = (x - y_i) / (K lr) - (c - c_i), or g_i(x) (at_x)     for the clients heard

where c = sum p_i c_i, and c_i = 0 without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm, Form, Walk, travelled
from fedscaffold.algorithms.base import Vector
from fedscaffold.algorithms.reference import Federation, begin, descend, play
from fedscaffold.algorithms.round import needs, work_of
from fedscaffold.problems.problem import Floats

__all__ = ["has_declared_form"]

HESSIANS = np.array([[[1.0, 0.3], [0.3, 0.6]], [[0.4, -0.2], [-0.2, 0.9]]])
LINEAR = np.array([[1.0, -2.0], [-0.5, 1.5]])
WEIGHTS = np.array([0.7, 0.3])
START = np.array([0.8, -1.3])
STEPS = 3
TOLERANCE = 1e-5  # relative to a move: functions may compute in single precision


@cache
def has_declared_form(algorithm: Algorithm) -> bool:
    """Return whether the functions of an algorithm have the form that it declares.

    The algorithm must declare one.

    >>> from fedscaffold.algorithms import fedavg, scaffold
    >>> wrong = scaffold()._replace(direction=fedavg().direction)
    >>> has_declared_form(scaffold()), has_declared_form(wrong)
    (True, False)
    """
    form, work = algorithm.form, work_of(algorithm, STEPS)
    assert form is not None
    if work.geometric:
        return False
    lr = 0.5 / (1 + form.drag)

    def train(i: int, start: Any, x: Vector, shift: Vector) -> Walk:
        return descend(algorithm, partial(_gradient, i), start, x, shift, lrs=[lr] * work.steps)

    federation = Federation(WEIGHTS.tolist(), train, _gradient)
    second = [0, 1] if needs(algorithm, "everyone") else [0]
    state, x, c_i = begin(algorithm, START, len(WEIGHTS)), START, np.zeros_like(LINEAR)
    with np.errstate(all="ignore"):
        for cohort in ([0, 1], second, [0, 1]):
            before, state = state.server.x, play(algorithm, state, federation, cohort)
            moved = state.server.x - before
            x_next, c_i = _declared_round(form, lr, cohort, x, c_i)
            if not np.linalg.norm(moved - (x_next - x)) <= TOLERANCE * np.linalg.norm(x_next - x):
                return False
            x = x_next
    return True


def _gradient(i: int, x: Floats) -> Floats:
    gradient: Floats = HESSIANS[i] @ x - LINEAR[i]
    return gradient


def _declared_round(
    form: Form, lr: float, cohort: Sequence[int], x: Floats, c_i: Floats
) -> tuple[Floats, Floats]:
    """Return x and the c_i after the round that a form stands for; see the module's head."""
    steps = 1 if form.one_step else STEPS
    c, after, move = WEIGHTS @ c_i, c_i.copy(), np.zeros_like(x)
    for i in cohort:
        shift, y = c - c_i[i], x
        for _ in range(steps):
            y = y - lr * (_gradient(i, y) + form.drag * (y - x) + shift)
        move += WEIGHTS[i] * (x - y)
        if form.memory:
            after[i] = _gradient(i, x) if form.at_x else travelled(x, y, steps, lr) - shift
    return x - form.server_lr * move / WEIGHTS[list(cohort)].sum(), after

"""How far a run is from an identity: a measure is the size of the violation and what rounding explains.

Differences are divided by how far the numbers have outgrown a right run, round by round. So a target that
diverges fails the rows in which it is wrong, not all others by the rounding of its huge numbers; and what it
did wrong while they were small counts in full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.conformance import oracles, plain
from fedscaffold.conformance.case import Array, Call, Case, Run

__all__ = ["Measure"]


class Measure(NamedTuple):
    """The identity holds when the violation is at most the tolerance."""

    violation: float
    tolerance: float


def largest(*differences: Any) -> float:
    """The largest of all numbers, by absolute value."""
    return max(float(np.max(np.abs(difference), initial=0.0)) for difference in differences)


def growth(*runs: Run) -> Array:
    """(rounds + 1,): how many times the size of a right run the numbers have had so far; at least 1."""
    sizes = [
        np.abs(states).reshape(len(states), -1).max(axis=1) / oracles.size(run.case)
        for run in runs
        for states in run.trace
    ]
    return np.maximum.accumulate(np.max([np.ones_like(sizes[0]), *sizes], axis=0))


def relative(runs: tuple[Run, ...], *differences: Array) -> Measure:
    """The measure of differences that should be zero in all rounds, or in all but the first states."""
    grown = growth(*runs)
    sizes = [difference.reshape(len(difference), -1) for difference in differences]
    violation = largest(*(one / grown[-len(one) :, None] for one in sizes))
    return Measure(violation, sum(oracles.rounding(run.case) for run in runs))


def mismatch(run: Run) -> Array:
    """The gauge c - sum p_i c_i, before the first round and after every round."""
    mean: Array = np.einsum("n,rnd->rd", run.case.weights, run.trace.c_i)
    return run.trace.c - mean


def heard(case: Case) -> NDArray[np.bool_]:
    """(rounds, N, 1): whose reply reaches the server."""
    return np.array([[[i in case.heard(r)] for i in range(case.num_clients)] for r in range(case.rounds)])


def mean(run: Run) -> Measure:
    """After every round c is the mean of the c_i (I2); before the first is a row of its own."""
    return relative((run,), mismatch(run)[1:])


def conserved(run: Run) -> Measure:
    """The mismatch stays what it was before the first round (I1, I3)."""
    gauge = mismatch(run)
    return relative((run,), gauge - gauge[0])


def optimum(run: Run) -> Measure:
    """The last x is the optimum (I11)."""
    return Measure(largest(run.trace.x[-1] - oracles.optimum(run.case)), oracles.rounding(run.case))


def first_round(run: Run) -> Measure:
    """From control variates of zero, x after one round is FedAvg's (I5)."""
    once = run.case._replace(cohorts=run.case.cohorts[:1])
    x = plain.run(fedavg(run.case.server_lr), once).x
    return Measure(largest(run.trace.x[:2] - x), oracles.rounding(run.case, rounds=1))


def frozen(run: Run) -> Measure:
    """With control variates held at zero, x is FedAvg's all along (I5)."""
    x, c, c_i = run.trace
    return relative((run,), x - plain.run(fedavg(run.case.server_lr), run.case).x, c, c_i)


def start(run: Run) -> Measure:
    """The model starts where it is told to, every control variate at zero."""
    x, c, c_i = (states[0] for states in run.trace)
    return Measure(largest(x - run.case.x0, c, c_i), 0.0)


def gradients_seen(run: Run) -> Measure:
    """After each of its rounds c_i is the mean gradient that the client saw in it (I9).

    The mean weighted by the step sizes is as good under a schedule, and is accepted.
    """
    case, grown, worst = run.case, growth(run), 0.0
    for i, steps in enumerate(case.local_steps):
        rounds = [r for r in range(case.rounds) if i in case.cohorts[r]]
        after = np.array(rounds) + 1
        seen, lr = by_round(run, i, steps, len(rounds)), np.array(case.lr[:steps])
        means = seen.mean(axis=1), np.einsum("k,rkd->rd", lr, seen) / lr.sum()
        wrong = [(run.trace.c_i[after, i] - mean) / grown[after, None] for mean in means]
        worst = max(worst, min(largest(one) for one in wrong))
    return Measure(worst, oracles.rounding(case))


def by_round(run: Run, i: int, steps: int, rounds: int) -> Array:
    """Client i's gradients, (rounds, steps, d): those it asked for, if there is one for every step."""
    mine = [call.g for call in run.calls if call.i == i]
    if len(mine) != rounds * steps:  # a compiled program asks for none: walk its steps for it
        mine = [call.g for call in walked(run, i)]
    return np.array(mine).reshape(rounds, steps, -1)


def walked(run: Run, i: int) -> list[Call]:
    """The gradients on client i's way through every one of its rounds, given the states of the trace."""
    case, (x, c, c_i) = run.case.private(), run.trace
    for r, cohort in enumerate(case.cohorts):
        if i in cohort:
            plain.train(scaffold(), case, plain.State(r, x[r], c[r], tuple(c_i[r])), i, np.asarray)
    return case.calls or []


def gradients_at_x(run: Run) -> Measure:
    """After each of its rounds c_i is the client's gradient at the model it received (option I)."""
    there: Array = np.einsum("nij,rj->rni", run.case.hessians, run.trace.x[:-1]) - run.case.linear
    return relative((run,), (run.trace.c_i[1:] - there) * heard(run.case))


def kept(run: Run) -> Measure:
    """Who is not heard in a round keeps its c_i."""
    return relative((run,), np.diff(run.trace.c_i, axis=0) * ~heard(run.case))


def silence(run: Run) -> Measure:
    """A round in which nobody is heard changes nothing."""
    silent = ~heard(run.case).any(axis=(1, 2))
    changes = [np.diff(states, axis=0)[silent] for states in run.trace]
    return Measure(largest(*changes), oracles.rounding(run.case))


def large_batch(run: Run) -> Measure:
    """One local step of all clients is a step of large-batch SGD (I6)."""
    return relative((run,), run.trace.x - oracles.large_batch(run.case))


def saga(run: Run) -> Measure:
    """One local step of one client is a step of SAGA, with c_i its table (I7)."""
    return relative((run,), *(ours - its for ours, its in zip(run.trace, oracles.saga(run.case), strict=True)))


def centred(run: Run) -> Measure:
    """Models and shifts c - c_i are those of the centred form (I8)."""
    x, xi = oracles.centred(run.case)
    return relative((run,), run.trace.x - x, run.trace.c[:, None] - run.trace.c_i - xi)


def equal_clients(run: Run) -> Measure:
    """Where all clients are the same, x is plain gradient descent and every c_i is c (I11)."""
    x, c, c_i = run.trace
    return relative((run,), x - oracles.descent(run.case), c_i - c[:, None])


def same(run: Run, other: Run) -> Measure:
    """Two runs went the same way."""
    return relative((run, other), *(one - two for one, two in zip(run.trace, other.trace, strict=True)))


def repeatable(run: Run, other: Run) -> Measure:
    """Two runs of one case agree to the last bit."""
    return Measure(same(run, other).violation, 0.0)


def same_x(run: Run, other: Run) -> Measure:
    """Two runs had the same models."""
    return relative((run, other), run.trace.x - other.trace.x)


def replicated(run: Run, other: Run) -> Measure:
    """`other` has every client of `run` twice in a row: x, c and each c_i are the same (I13)."""
    (x, c, c_i), twice = run.trace, other.trace
    return relative((run, other), x - twice.x, c - twice.c, np.repeat(c_i, 2, axis=1) - twice.c_i)


def translated(run: Run, other: Run) -> Measure:
    """`other` is `run` moved in space: x moves along, gradients and control variates do not."""
    (x, c, c_i), moved = run.trace, other.trace
    return relative((run, other), moved.x - x - (other.case.x0 - run.case.x0), moved.c - c, moved.c_i - c_i)


def rescaled(run: Run, other: Run) -> Measure:
    """`other` measures the losses in other units: x is the same, control variates are in the new unit."""
    unit = other.case.hessians[0, 0, 0] / run.case.hessians[0, 0, 0]
    (x, c, c_i), scaled = run.trace, other.trace
    return relative((run, other), x - scaled.x, unit * c - scaled.c, unit * c_i - scaled.c_i)


def server_step(run: Run, other: Run) -> Measure:
    """`other` has another server step: after one round its move is in proportion, its c and c_i the same."""
    (x, c, c_i), stepped = run.trace, other.trace
    moves = (x[1] - x[0]) / run.case.server_lr, (stepped.x[1] - stepped.x[0]) / other.case.server_lr
    differences = moves[0] - moves[1], c[1] - stepped.c[1], c_i[1] - stepped.c_i[1]
    return Measure(largest(*differences), oracles.rounding(run.case, rounds=1))

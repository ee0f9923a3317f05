"""Measures of identities: the size of the violation, and the tolerance that rounding justifies.

Differences are divided, round by round, by the factor by which the numbers exceed those of a
correct run. A target that diverges thus fails the rows in which it is wrong, and not all others
because of rounding in huge numbers; errors made while numbers were small count in full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg
from fedscaffold.conformance import oracles, reference_target
from fedscaffold.conformance.case import Array, Case, Run

__all__ = ["Measure"]

# the error still falls if the later of two consecutive windows is below this fraction of the
# earlier
FALLING = 0.995


class Measure(NamedTuple):
    """A violation and its tolerance: the identity holds if the former is at most the latter."""

    violation: float
    tolerance: float
    note: str = ""
    unfinished: bool = False
    """Whether the violation was still falling, so that more rounds are needed."""


def largest(*differences: Any) -> float:
    """Return the largest absolute value."""
    return max(float(np.max(np.abs(difference), initial=0.0)) for difference in differences)


def growth(*runs: Run) -> Array:
    """Return (rounds + 1,) how much larger than in a correct run numbers became, at least 1."""
    sizes = [
        np.max(
            [np.abs(states).reshape(len(states), -1).max(axis=1) for states in run.trace.vectors],
            axis=0,
        )
        / oracles.size(run.case)
        for run in runs
    ]
    return np.maximum.accumulate(np.max([np.ones_like(sizes[0]), *sizes], axis=0))


def relative(runs: tuple[Run, ...], *differences: Array, rounds: int | None = None) -> Measure:
    """Return the measure of differences that should be zero in all rounds.

    Args:
        runs: The runs compared.
        differences: Arrays whose first axis is the round.
        rounds: Number of rounds over which rounding accumulates; all by default.
    """
    grown = growth(*runs)
    sizes = [difference.reshape(len(difference), -1) for difference in differences]
    violation = largest(*(one / grown[-len(one) :, None] for one in sizes))
    return Measure(violation, sum(oracles.rounding(run.case, rounds) for run in runs))


def mismatch(run: Run) -> Array:
    """Return c - sum p_i c_i before the first round and after every round.

    Where c is the mean over the clients met so far, it is c - sum p_i c_i / (weight met).
    """
    total: Array = np.einsum("n,rnd->rd", run.case.weights, run.trace.c_i)
    if not run.met:
        return run.trace.c - total
    met = np.logical_or.accumulate(heard(run.case)[:, :, 0], axis=0) @ run.case.weights
    share = np.concatenate([[0.0], met])[:, None]
    mean: Array = np.divide(total, share, out=np.zeros_like(total), where=share > 0)
    return run.trace.c - mean


def heard(case: Case) -> NDArray[np.bool_]:
    """Return (rounds, N, 1) whether a client's reply reaches the server."""
    return np.array(
        [[[i in case.heard(r)] for i in range(case.num_clients)] for r in range(case.rounds)]
    )


def mean(run: Run) -> Measure:
    """After every round c is the mean of the c_i (I2).

    The state before the first has its own row.
    """
    return relative((run,), mismatch(run)[1:])


def conserved(run: Run) -> Measure:
    """The mismatch stays what it was before the first round (I1, I3)."""
    gauge = mismatch(run)
    return relative((run,), gauge - gauge[0])


def optimum(run: Run) -> Measure:
    """The last x is the optimum (I11); if not, report whether it was still converging."""
    distances = np.abs(run.trace.x - oracles.optimum(run.case)).max(axis=1)
    violation, tolerance = float(distances[-1]), oracles.rounding(run.case)
    window = max(1, run.case.rounds // 4)  # cohorts cycle, so compare the worst rounds of windows
    last, before = float(distances[-window:].max()), float(distances[-2 * window : -window].max())
    if violation <= tolerance or not 0 < last < np.inf:
        return Measure(violation, tolerance)
    rate = (last / before) ** (1 / window)
    if last < FALLING * before:
        return Measure(
            violation, tolerance, f"slow: the distance still falls, by {rate:.3g} a round", True
        )
    rest = "grows" if last * FALLING > before else "rests"
    return Measure(violation, tolerance, f"wrong: the distance {rest} at {last:.2g}")


def first_round(run: Run) -> Measure:
    """From control variates of zero, x after one round is FedAvg's (I5)."""
    once = run.case._replace(cohorts=run.case.cohorts[:1])
    x = reference_target.run(fedavg(run.case.server_lr), once).x
    return Measure(largest(run.trace.x[:2] - x), oracles.rounding(run.case, rounds=1))


def frozen(run: Run) -> Measure:
    """With control variates held at zero, x is FedAvg's all along (I5)."""
    x, c, c_i = run.trace.vectors
    return relative(
        (run,), x - reference_target.run(fedavg(run.case.server_lr), run.case).x, c, c_i
    )


def start(run: Run) -> Measure:
    """The model starts at x0 and every control variate at zero."""
    x, c, c_i = (states[0] for states in run.trace.vectors)
    return Measure(largest(x - run.case.x0, c, c_i), 0.0)


def moves(run: Run) -> Measure:
    """In every round x moves as the state before the round determines.

    With weights and sampling, the mean over the weight heard and the unbiased mean are both
    accepted.
    """
    case, (x, c, c_i) = run.case, run.trace.vectors
    counted = heard(case)[:, :, 0] * case.weights
    ends = [
        oracles.local_steps(case, i, x[:-1], c[:-1], c_i[:-1, i])[0]
        for i in range(case.num_clients)
    ]
    total = np.einsum("rn,nrd->rd", counted, np.array(ends) - x[:-1])
    means = [
        np.divide(total, share[:, None], out=np.zeros_like(total), where=share[:, None] > 0)
        for share in (counted.sum(axis=1), np.count_nonzero(counted, axis=1) / case.num_clients)
    ]
    return min(
        slackened(relative((run,), np.diff(x, axis=0) - case.server_lr * mean, rounds=1), case)
        for mean in means
    )


def slackened(measure: Measure, case: Case) -> Measure:
    """With clipping, tolerate the 1e-6 that torch adds to a norm before it divides."""
    clips = case.clip is not None or case.clip_corrected is not None
    return measure._replace(tolerance=measure.tolerance + clips * 1e-6 * oracles.size(case))


def gradients_seen(run: Run) -> Measure:
    """After each of its rounds c_i is the mean gradient that the client saw in it (I9).

    Under a schedule the mean weighted by the step sizes is accepted too.
    """
    case, grown, worst = run.case, growth(run), 0.0
    for i, steps in enumerate(case.local_steps):
        rounds = [r for r in range(case.rounds) if i in case.cohorts[r]]
        after = np.array(rounds) + 1
        seen, lr = gradients(run, i), np.array(case.lr[:steps])
        means = seen.mean(axis=1), np.einsum("k,rkd->rd", lr, seen) / lr.sum()
        wrong = [(run.trace.c_i[after, i] - mean) / grown[after, None] for mean in means]
        worst = max(worst, min(largest(one) for one in wrong))
    return slackened(Measure(worst, oracles.rounding(case, rounds=1)), case)


def gradients(run: Run, i: int) -> Array:
    """Return the gradients of client i, (its rounds, steps, d).

    They are the recorded ones if there is one per step.
    """
    case, (x, c, c_i) = run.case, run.trace.vectors
    rounds = [r for r, cohort in enumerate(case.cohorts) if i in cohort]
    asked = [oracles.clipped(call.g, case.clip) for call in run.calls if call.i == i]
    if len(asked) == len(rounds) * case.local_steps[i]:
        return np.array(asked).reshape(len(rounds), case.local_steps[i], -1)
    # A compiled program records none: recompute its steps.
    return oracles.local_steps(case, i, x[rounds], c[rounds], c_i[rounds, i])[1].swapaxes(0, 1)


def gradients_at_x(run: Run) -> Measure:
    """After each of its rounds c_i is the client's gradient at the model it received (option I)."""
    there: Array = np.einsum("nij,rj->rni", run.case.hessians, run.trace.x[:-1]) - run.case.linear
    return relative((run,), (run.trace.c_i[1:] - there) * heard(run.case), rounds=1)


def kept(run: Run) -> Measure:
    """A client that is not heard in a round keeps its c_i."""
    return relative((run,), np.diff(run.trace.c_i, axis=0) * ~heard(run.case), rounds=1)


def silence(run: Run) -> Measure:
    """A round in which nobody is heard changes nothing."""
    silent = ~heard(run.case).any(axis=(1, 2))
    changes = [np.diff(states, axis=0)[silent] for states in run.trace.vectors]
    return Measure(largest(*changes), oracles.rounding(run.case, rounds=1))


def large_batch(run: Run) -> Measure:
    """One local step of all clients is a step of large-batch SGD (I6)."""
    return relative((run,), run.trace.x - oracles.large_batch(run.case))


def saga(run: Run) -> Measure:
    """One local step of one client is a step of SAGA, with c_i its table (I7)."""
    its = oracles.saga(run.case, run.met).vectors
    return relative(
        (run,), *(one - other for one, other in zip(run.trace.vectors, its, strict=True))
    )


def centred(run: Run) -> Measure:
    """Models and shifts c - c_i are those of the centred form (I8)."""
    x, xi = oracles.centred(run.case)
    return relative((run,), run.trace.x - x, run.trace.c[:, None] - run.trace.c_i - xi)


def equal_clients(run: Run) -> Measure:
    """Where all clients are the same, x is plain gradient descent and every c_i is c (I11)."""
    x, c, c_i = run.trace.vectors
    return relative((run,), x - oracles.descent(run.case), c_i - c[:, None])


def same(run: Run, other: Run) -> Measure:
    """Two runs have the same states."""
    return relative(
        (run, other),
        *(one - two for one, two in zip(run.trace.vectors, other.trace.vectors, strict=True)),
    )


def repeatable(run: Run, other: Run) -> Measure:
    """Two runs of one case agree to the last bit."""
    return Measure(same(run, other).violation, 0.0)


def same_x(run: Run, other: Run) -> Measure:
    """Two runs have the same models."""
    return relative((run, other), run.trace.x - other.trace.x)


def replicated(run: Run, other: Run) -> Measure:
    """`other` has every client of `run` twice in a row: x, c and each c_i are the same (I13)."""
    (x, c, c_i), twice = run.trace.vectors, other.trace
    return relative((run, other), x - twice.x, c - twice.c, np.repeat(c_i, 2, axis=1) - twice.c_i)


def translated(run: Run, other: Run) -> Measure:
    """`other` is `run` moved in space: x moves along, gradients and control variates do not."""
    (x, c, c_i), moved = run.trace.vectors, other.trace
    return relative(
        (run, other), moved.x - x - (other.case.x0 - run.case.x0), moved.c - c, moved.c_i - c_i
    )


def rescaled(run: Run, other: Run) -> Measure:
    """`other` has losses in other units: the same x, control variates in the new unit."""
    unit = other.case.hessians[0, 0, 0] / run.case.hessians[0, 0, 0]
    (x, c, c_i), scaled = run.trace.vectors, other.trace
    return relative((run, other), x - scaled.x, unit * c - scaled.c, unit * c_i - scaled.c_i)


def server_step(run: Run, other: Run) -> Measure:
    """`other` has another server step: its first move is in proportion, c and c_i are the same."""
    (x, c, c_i), stepped = run.trace.vectors, other.trace
    moves = (x[1] - x[0]) / run.case.server_lr, (stepped.x[1] - stepped.x[0]) / other.case.server_lr
    differences = moves[0] - moves[1], c[1] - stepped.c[1], c_i[1] - stepped.c_i[1]
    return Measure(largest(*differences), oracles.rounding(run.case, rounds=1))


def same_clipped(run: Run, other: Run) -> Measure:
    """Two runs that clip have the same states."""
    return slackened(same(run, other), run.case)


def noise_drawn(run: Run) -> Array:
    """Return the means of the noise that clients drew, a row for each visit: their new c_i.

    The gradients themselves vanish beside it.
    """
    return run.trace.c_i[1:][heard(run.case)[:, :, 0]]


def noise_independent(run: Run) -> Measure:
    """The noise of two visits, of clients or rounds, is uncorrelated: six standard errors."""
    drawn = noise_drawn(run)
    lengths = np.maximum(np.linalg.norm(drawn, axis=1), np.finfo(float).tiny)
    cosines = drawn @ drawn.T / np.outer(lengths, lengths)
    worst = largest(cosines - np.diag(np.diag(cosines)))
    return Measure(worst, 6 / np.sqrt(drawn.shape[1]))


def noise_size(run: Run) -> Measure:
    """c_i is a mean of K gradients with independent noise: its variance is noise^2 / K."""
    drawn = noise_drawn(run)
    ratio = np.mean(drawn**2) * run.case.local_steps[0] / run.case.noise**2
    return Measure(abs(float(ratio) - 1), 6 * np.sqrt(2 / drawn.size))


def noised_moves(run: Run) -> Measure:
    """Moves of x are K lr times the mean of c_i+ - c_i + c over the clients heard.

    So what c_i remembers is what the model stepped by, noise included, plus the correction.
    """
    case, (x, c, c_i) = run.case, run.trace.vectors
    there = heard(case)
    steps = (np.diff(c_i, axis=0) + c[:-1, None]) * there
    means = sum(case.lr) * steps.sum(axis=1) / there.sum(axis=1)
    return relative((run,), np.diff(x, axis=0) + case.server_lr * means, rounds=1)


def statistics(run: Run) -> Measure:
    """Running statistics that the server keeps are the mean of the clients'."""
    if run.trace.buffers is None:
        return Measure(0.0, oracles.rounding(run.case), "clients keep their own")
    return relative((run,), run.trace.buffers - oracles.statistics(run.case))

"""Explain in words why an implementation fails, from its states and gradients.

The four update rules of SCAFFOLD are fitted to the run: the correction added to the gradients, the
new c_i, the change of c and the move of x. Every wrong coefficient yields a sentence. Then the
trajectories and the failing rows are compared with those of every known mistake in `mistakes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np

from fedscaffold.algorithms import fedavg
from fedscaffold.conformance import measures, oracles, reference_target
from fedscaffold.conformance.case import Array, Run, Trace
from fedscaffold.conformance.federations import CONDITIONS, brief
from fedscaffold.conformance.identities import IDENTITIES
from fedscaffold.conformance.judge import Judgement
from fedscaffold.conformance.mistakes import MISTAKES, Scaffold, over_met, right, travelling

__all__ = ["diagnose", "signatures"]

EARLY = 12  # rounds examined: mistakes differ in the transient, and no number is huge yet
FIRST = 2  # rounds that tell most mistakes apart: the others are run only where these agree
CLOSE = 1e-3  # of coefficients; mistakes are factors, signs and zeros
NAMED = 3
FEDERATIONS = {name: condition.case for name, condition in CONDITIONS.items()} | {
    identity.name: identity.cases[-1] for identity in IDENTITIES if identity.cases[-1].asks
}
"""Federations examined, by the name used in sentences."""


def diagnose(judgement: Judgement) -> list[str]:
    """Return sentences on what is wrong, the most widespread first; none if nothing fails.

    >>> from fedscaffold.conformance import judge, select
    >>> judgement = judge(MISTAKES["c_i is never stored"], select(["mean", "optimum"]))
    >>> diagnose(judgement)[0]
    'c_i is never written back (everywhere)'
    """
    if not any(verdict.outcome == "fails" for verdict in judgement.verdicts):
        return []
    runs = early_runs(judgement)
    said: dict[str, list[str]] = {}
    with np.errstate(all="ignore"):
        plain_runs = {
            name: run
            for name, run in runs.items()
            if not {"clipping", "private noise"} & set(run.case.asks)
        }
        for name, run in plain_runs.items():
            for sentence in (
                *about_correction(run),
                *about_memory(run),
                *about_control(run),
                *about_model(run),
            ):
                said.setdefault(sentence, []).append(name)
        mistakes = nearest_mistakes(judgement, runs, guess=not said)
    sentences = sorted(said.items(), key=lambda item: -len(item[1]))
    return [
        f"{one} ({'everywhere' if len(w) == len(plain_runs) else ', '.join(w)})"
        for one, w in sentences
    ] + mistakes


def early_runs(judgement: Judgement) -> dict[str, Run]:
    """Return the first rounds of every federation that was run, while numbers are finite."""
    found = {}
    for name, case in FEDERATIONS.items():
        run = judgement.runs.get(id(case))
        run = run if run is None or isinstance(run, Run) else run.run
        if run is None:
            continue
        finite = [
            np.isfinite(states.reshape(len(states), -1)).all(axis=1) for states in run.trace.vectors
        ]
        rounds = min(
            EARLY, run.case.rounds, int(np.logical_and.accumulate(np.all(finite, axis=0)).sum()) - 1
        )
        if rounds >= 1:
            x, c, c_i = (states[: rounds + 1] for states in run.trace.vectors)
            buffers = None if run.trace.buffers is None else run.trace.buffers[: rounds + 1]
            trace = Trace(x, c, c_i, buffers)
            found[name] = run._replace(case=brief(run.case, rounds), trace=trace, met=judgement.met)
    return found


def fit_coefficients(values: list[Array], *columns: list[Array]) -> Array | None:
    """Fit values by a linear combination of columns; None unless exact and unique."""
    if not values:
        return None
    target = np.concatenate(values)
    matrix = np.stack([np.concatenate(column) for column in columns], axis=1)
    coefficients, _, rank, _ = np.linalg.lstsq(matrix, target, rcond=1e-9)
    wrong = measures.largest(matrix @ coefficients - target)
    if rank < len(columns) or not wrong <= CLOSE * measures.largest(target, matrix) / 10:
        return None
    return np.asarray(coefficients)


def equal(coefficients: Array, *wanted: float) -> bool:
    """Return whether the coefficients equal those wanted."""
    return bool(np.allclose(coefficients, wanted, rtol=0, atol=CLOSE))


def visits(run: Run) -> Iterator[tuple[int, int, Array, Array]]:
    """Yield (round, client, points, gradients) of visits of two steps or more.

    Only visits whose gradients were all recorded are yielded.
    """
    case = run.case
    asked = {i: [call for call in run.calls if call.i == i] for i in range(case.num_clients)}
    for i, calls in asked.items():
        steps = case.local_steps[i]
        rounds = [r for r, cohort in enumerate(case.cohorts) if i in cohort]
        # A run has more calls than its first rounds need; a whole number of visits is all that can
        # be checked.
        if case.option == 1 or steps < 2 or len(calls) % steps or len(calls) < steps * len(rounds):
            continue
        for n, r in enumerate(rounds):
            visit = calls[n * steps : (n + 1) * steps]
            yield r, i, np.array([call.y for call in visit]), np.array([call.g for call in visit])


def about_correction(run: Run) -> Iterator[str]:
    """Check what is added to the gradients: a c + b c_i, where a = 1 and b = -1 is right."""
    case, (x, c, c_i) = run.case, run.trace.vectors
    found = correction(run)
    if found is not None and not equal(found, 1, -1):
        yield correction_in_words(*found)
    its = reference_target.run(fedavg(case.server_lr), case).x
    if case.rounds > 1 and measures.largest(c, c_i) > 0 and within_rounding(run, x - its):
        yield "x equals FedAvg's: the correction never reaches the model"


def correction(run: Run) -> Array | None:
    """Return a and b of the correction a c + b c_i; None if they cannot be determined."""
    case, (_, c, c_i) = run.case, run.trace.vectors
    if case.momentum:
        return None
    added, of_c, of_c_i = [], [], []
    for r, i, y, g in visits(run):
        for k, lr in enumerate(case.lr[: len(y) - 1]):
            added.append((y[k] - y[k + 1]) / lr - g[k])
            of_c.append(c[r])
            of_c_i.append(c_i[r, i])
    return fit_coefficients(added, of_c, of_c_i)


def correction_in_words(a: float, b: float) -> str:
    """Describe a correction of a c + b c_i."""
    if equal(np.array([a, b]), 0, 0):
        return "nothing is added to the gradients: the correction never reaches them"
    if equal(np.array([a, b]), -1, 1):
        return "the sign of the correction is wrong: c_i - c is added to the gradients, not c - c_i"
    if equal(np.array([a]), -b):
        return (
            f"the correction is {a:.3g} (c - c_i): is it divided by a loss scale, a weight or a "
            "number of steps?"
        )
    a, b = (round(one, 3) + 0.0 for one in (a, b))
    return f"the correction is {a:.3g} c {b:+.3g} c_i, not c - c_i"


def about_memory(run: Run) -> Iterator[str]:
    """Check that c_i becomes the mean gradient seen."""
    case, (_, c, c_i) = run.case, run.trace.vectors
    if not np.diff(c_i, axis=0).any():
        yield "c_i is never written back"
        return
    if case.num_clients > 1 and not np.ptp(c_i, axis=1).any():
        yield "all clients share one c_i"
        return
    renewed, of_g, of_c, of_c_i = [], [], [], []
    for i in range(case.num_clients if case.option == 2 else 0):
        rounds = (r for r in range(case.rounds) if i in case.cohorts[r])
        for r, seen in zip(rounds, gradients_early(run, i), strict=True):
            if i in case.heard(r):
                renewed.append(c_i[r + 1, i])
                of_g.append(seen.mean(axis=0))
                of_c.append(c[r])
                of_c_i.append(c_i[r, i])
    found = fit_coefficients(renewed, of_g, of_c, of_c_i)
    if found is None or equal(found, 1, 0, 0) or case.momentum or len(set(case.lr)) > 1:
        return
    added = correction(run)
    # else what a wrong correction makes of x - y
    if added is None or not equal(found, 1, added[0] - 1, added[1] + 1):
        yield memory_in_words(*found)


def gradients_early(run: Run, i: int) -> Array:
    """Return client i's gradients of the first rounds, recomputed if not recorded."""
    asked = [g for _, j, _, g in visits(run) if j == i]
    return np.array(asked) if asked else measures.gradients(run._replace(calls=()), i)


def memory_in_words(g: float, c: float, c_i: float) -> str:
    """Describe a c_i that becomes g times the mean gradient, plus c times c, plus c_i times c_i."""
    if equal(np.array([g, c, c_i]), -1, 0, 0):
        return "the sign of c_i is wrong: it becomes minus the mean gradient"
    if equal(np.array([c, c_i]), g - 1, 1 - g):  # c_i - c + g (x - y) / (K lr)
        if equal(np.array([g]), -1):
            return "the sign of c_i is wrong: y - x is taken for x - y"
        guess = (
            "steps counted as records"
            if g < 1
            else "steps counted as epochs, or the step size left out"
        )
        return f"c_i is renewed with {g:.3g} (x - y) / (K lr), not (x - y) / (K lr): {guess}?"
    for left_out, coefficients in {
        "- c": (1, 1, 0),
        "the old c_i": (1, 0, -1),
        "c_i - c": (1, 1, -1),
    }.items():
        if equal(np.array([g, c, c_i]), *coefficients):
            return f"{left_out} is left out where c_i becomes c_i - c + (x - y) / (K lr)"
    if equal(np.array([c, c_i]), 0, 1 - g):
        return f"c_i changes by {g:.3g} times what it should"
    g, c, c_i = (round(one, 3) + 0.0 for one in (g, c, c_i))
    return f"c_i becomes {g:.3g} g {c:+.3g} c {c_i:+.3g} c_i, not the mean gradient g"


def about_control(run: Run) -> Iterator[str]:
    """Check that c moves by the sum of p_i (change of c_i)."""
    case, (_, c, c_i) = run.case, run.trace.vectors
    gauge = measures.mismatch(run)
    if within_rounding(run, gauge) or not np.diff(c_i, axis=0).any():
        return
    moved = np.diff(c, axis=0)
    heard = measures.heard(case)[:, :, 0]
    changes = np.einsum("rn,rnd->rd", heard * case.weights, np.diff(c_i, axis=0))
    share = heard @ case.weights
    sent = np.array([case.weights[list(cohort)].sum() for cohort in case.cohorts])
    if not moved.any():
        yield "c never moves"
        return
    factors = proportion(run, moved, changes)
    kept = np.ones(1) if factors is None else factors[share > 0]
    if within_rounding(run, gauge[:1]) and not np.allclose(kept, 1, atol=CLOSE):
        if np.allclose(kept * share[share > 0], sent[share > 0], atol=CLOSE):
            yield "c is scaled by the clients sent for, not by those heard"
        elif np.allclose(kept * share[share > 0], 1, atol=CLOSE):
            yield "c is not scaled by S/N: it moves by the mean change of the cohort's c_i"
        elif np.allclose(kept, case.server_lr, atol=CLOSE):
            yield "the server step is applied to c as well"
        elif np.allclose(kept, case.num_clients, atol=CLOSE):
            yield "the changes of c_i are summed, not averaged over the clients"
        elif np.allclose(kept, kept[0], atol=CLOSE):
            yield f"c moves by {kept[0]:.3g} times the sum of p_i (change of c_i)"
    else:
        yield first_mismatch(run, gauge)


def first_mismatch(run: Run, gauge: Array) -> str:
    """Describe the round in which c first differs from the mean of the c_i."""
    case, bound = run.case, rounding_bound(run)
    jumps = np.abs(np.diff(gauge, axis=0)).max(axis=1) > bound
    if not jumps.any():
        return "c and the c_i do not begin at zero"
    r = int(np.argmax(jumps))
    before = {i for earlier in range(r) for i in case.heard(earlier)}
    special = [
        ("server and clients were restarted", case.restart == r + 1),
        ("replies were lost", bool(case.lost[r])),
        ("clients came for the first time", r > 0 and not set(case.cohorts[r]) <= before),
    ]
    words = [text for text, so in special if so]
    return f"c leaves the mean of the c_i in round {r + 1}" + (
        f", in which {' and '.join(words)}" if words else ""
    )


def about_model(run: Run) -> Iterator[str]:
    """Check how far x moves, given the state before the round."""
    case, x = run.case, run.trace.x
    if measures.moves(run).violation <= rounding_bound(run):
        return
    _, c, c_i = run.trace.vectors
    heard = measures.heard(case)[:, :, 0]
    ends = [
        oracles.local_steps(case, i, x[:-1], c[:-1], c_i[:-1, i])[0]
        for i in range(case.num_clients)
    ]
    total = np.einsum("rn,nrd->rd", heard * case.weights, np.array(ends) - x[:-1])
    factors = proportion(run, np.diff(x, axis=0), total)
    counts = heard.sum(axis=1)
    if factors is None:
        return
    # of a sum of moves, where clients weigh the same
    divisors = case.num_clients / factors[counts > 0]
    if np.allclose(factors[counts > 0] * (heard @ case.weights)[counts > 0], 1, atol=CLOSE):
        yield "the server step is not used"
    elif np.allclose(factors[counts > 0], case.server_lr, atol=CLOSE):
        yield "the moves of x are divided by N, not by the replies: x moves by S/N times their mean"
    elif np.ptp(divisors) < CLOSE and np.ptp(counts[counts > 0]):
        yield f"the moves of x are divided by {divisors[0]:.3g}, whatever the number of replies"
    else:
        low, high = np.min(counts[counts > 0] / divisors), np.max(counts[counts > 0] / divisors)
        much = f"{low:.3g}" if high - low < CLOSE else f"{low:.3g} to {high:.3g}"
        yield f"x moves {much} times the mean move of the replies, not {case.server_lr:g} times"


def proportion(run: Run, values: Array, of: Array) -> Array | None:
    """Return the factor between two vectors for every round; None if they are not parallel."""
    square = (of * of).sum(axis=1)
    factors = np.divide(
        (values * of).sum(axis=1), square, out=np.zeros_like(square), where=square > 0
    )
    return factors if within_rounding(run, values - factors[:, None] * of) else None


def within_rounding(run: Run, differences: Array) -> bool:
    """Return whether rounding explains the differences."""
    return scaled_difference(run, differences) <= rounding_bound(run)


def scaled_difference(run: Run, differences: Array) -> float:
    """Return the largest difference relative to the growth of the numbers."""
    return measures.largest(differences / measures.growth(run)[-len(differences) :, None])


def rounding_bound(run: Run) -> float:
    """Return ten times the rounding bound, as two implementations are compared."""
    return 10 * oracles.rounding(run.case)


class Likeness(NamedTuple):
    """Similarity between the target and a known mistake."""

    name: str
    same: frozenset[str]
    """Wrong federations in which all numbers equal those of the mistake.

    Empty if it contradicts the numbers of a federation that is right.
    """
    rows: float
    """Rows that fail in both, as a share of those that fail in either."""


def nearest_mistakes(judgement: Judgement, runs: dict[str, Run], guess: bool) -> list[str]:
    """Return the mistakes that reproduce the target's numbers.

    With `guess` and no such mistake, return those with similar failing rows.

    Failing rows alone are weak evidence: counting K in epochs fails the same rows as a wrong sign.
    """
    failed = {verdict.name for verdict in judgement.verdicts if verdict.outcome == "fails"}
    compared = {
        verdict.name for verdict in judgement.verdicts if verdict.violation is not None
    } | failed
    growths = {name: measures.growth(run) for name, run in runs.items()}
    bounds = {name: rounding_bound(run) for name, run in runs.items()}
    ill = {
        id(case) for identity in IDENTITIES if identity.name in failed for case in identity.cases
    }
    wrong = {
        name
        for name, run in runs.items()
        if id(FEDERATIONS[name]) in ill and gap(None, name, run, growths[name]) > bounds[name]
    }

    def equals(name: str, where: str) -> bool:
        gaps = (gap(name, where, runs[where], growths[where], rounds) for rounds in (FIRST, EARLY))
        return all(one <= bounds[where] for one in gaps)

    def apart(one: Likeness) -> float:
        """Return the median distance from its numbers in the federations that are wrong."""
        gaps = [gap(one.name, where, runs[where], growths[where]) for where in wrong]
        return float(np.median(gaps)) if gaps else 0.0

    likenesses = []
    for name in MISTAKES:
        theirs = signatures()[name] & compared
        share = len(theirs & failed) / max(1, len(theirs | failed))
        same = frozenset(where for where in wrong if equals(name, where))
        if same and not all(equals(name, where) for where in runs.keys() - wrong):
            same = frozenset()
        likenesses.append(Likeness(name, same, share))
    found = cover_by_mistakes(likenesses, wrong)
    if found or not guess:
        return found
    least = max(0.5, 0.8 * max(one.rows for one in likenesses))
    best = sorted((one for one in likenesses if one.rows >= least), key=apart)[:NAMED]
    return [
        f"the rows that fail are most like those of the mistake {one.name!r} ({one.rows:.0%})"
        for one in best
    ]


def cover_by_mistakes(likenesses: list[Likeness], wrong: set[str]) -> list[str]:
    """Cover the wrong federations greedily with mistakes that explain them.

    A mistake explains a federation if it gives the same numbers and contradicts no other one.
    """
    exact = [one for one in likenesses if one.same]
    left, said = set(wrong), list[str]()
    while exact and (explains := max((one.same & left for one in exact), key=len)):
        alternatives = sorted(
            (one for one in exact if one.same & left == explains), key=lambda one: -one.rows
        )
        for one in alternatives[:NAMED]:
            where = f"in {len(one.same)} of {len(wrong)} federations that go wrong"
            said.append(f"the numbers are those of the mistake {one.name!r}, {where}")
        left -= explains
    return said


def gap(name: str | None, federation: str, run: Run, growth: Array, rounds: int = EARLY) -> float:
    """Return the distance to a mistake's run in the first rounds.

    A mistake of None is a correct run. The distance is relative to the growth of the run's
    numbers. c_i is made from gradients or from the move, whichever is closer.
    """
    rounds = min(rounds, run.case.rounds)
    seen = slice(rounds + 1)
    mistake, forms = right if name is None else MISTAKES[name], [False]
    if (
        isinstance(mistake, Scaffold)
        and mistake.renew is right.renew
        and mistake.correct is not right.correct
    ):
        forms.append(True)  # elsewhere both forms are the same
    gaps = [np.inf]
    for moved in forms:
        trace = run_mistake(name, federation, rounds, run.case.precision, run.met, moved)
        if trace is not None:
            pairs = zip(trace.vectors, run.trace.vectors, strict=True)
            differences = [(one - other[seen]).reshape(len(one), -1) for one, other in pairs]
            if run.trace.buffers is not None and trace.buffers is not None:
                differences.append(trace.buffers - run.trace.buffers[seen])
            relative = np.concatenate(differences, axis=1) / growth[seen, None]
            gaps.append(measures.largest(relative))
    return min(gaps)


@cache
def run_mistake(
    name: str | None, federation: str, rounds: int, precision: str, met: bool, moved: bool
) -> Trace | None:
    """Run the first rounds of a federation with a mistake; None if the arithmetic fails."""
    mistake = right if name is None else MISTAKES[name]
    if isinstance(mistake, Scaffold) and met and mistake.control is right.control:
        mistake = replace(mistake, control=over_met)
    if isinstance(mistake, Scaffold) and moved:
        mistake = replace(mistake, renew=travelling(lambda v: sum(v.lr)))
    try:
        return mistake(brief(FEDERATIONS[federation], rounds).computed_in(precision).copy())
    except ArithmeticError:
        return None


@cache
def signatures() -> dict[str, frozenset[str]]:
    """Return the rows that fail for each mistake.

    `tests/conformance/test_conformance.py` checks the file.
    """
    text = (resources.files("fedscaffold.conformance") / "signatures.json").read_text(
        encoding="utf-8"
    )
    return {name: frozenset(rows) for name, rows in json.loads(text).items()}

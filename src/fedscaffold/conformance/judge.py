"""Run a target on every federation of the table and decide which identities hold."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.conformance.case import Adapter, Call, Case, Run, Trace, Unsupported
from fedscaffold.conformance.federations import prolonged
from fedscaffold.conformance.identities import ABOUT_C, IDENTITIES, Identity
from fedscaffold.conformance.measures import Measure
from fedscaffold.conformance.targets import Target, adapter_of

__all__ = ["Judgement", "Outcome", "Verdict", "conform", "judge", "load_target", "table"]

Outcome: TypeAlias = Literal["holds", "fails", "not offered", "error"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "not offered", "error")
PRECISIONS = ("float64", "float32")
PATIENCE = 16  # factor of the rounds of a case up to which a converging run is repeated
ENOUGH_ERRORS = 3


class Verdict(NamedTuple):
    """Result for one identity; numbers are None if nothing could be measured."""

    name: str
    statement: str
    outcome: Outcome
    violation: float | None = None
    tolerance: float | None = None
    note: str = ""


class Failure(NamedTuple):
    """Reason why a run cannot be measured."""

    outcome: Outcome
    note: str
    run: Run | None = None
    """The run, if it has numbers that are not finite."""


class Judgement(NamedTuple):
    """All verdicts on a target, and its runs."""

    verdicts: list[Verdict]
    runs: dict[int, Run | Failure]
    """By `id` of the case in the table."""
    met: bool
    """Whether the target's c was judged as the mean over the clients met so far."""


def conform(
    target: Target, identities: Sequence[Identity] = IDENTITIES, precision: str = "float64"
) -> list[Verdict]:
    """Check every identity on an adapter, an algorithm, or a function that returns one.

    Exceptions, wrong shapes and divergence become verdicts and do not stop the suite.

    >>> from fedscaffold.conformance import ours, select
    >>> {verdict.outcome for verdict in conform(ours, select(["mean", "optimum"]))}
    {'holds'}
    """
    return judge(target, identities, precision).verdicts


def judge(
    target: Target, identities: Sequence[Identity] = IDENTITIES, precision: str = "float64"
) -> Judgement:
    """Return the verdicts, and the runs that `diagnose` uses.

    Before all clients have been heard, c may be the mean over all with zeros for the others, or the
    mean over the clients met: either is correct if used in all rows. The target is judged by the
    one that fails fewer rows.
    """
    checks.choice("precision", precision, PRECISIONS)
    adapter = adapter_of(target)
    with np.errstate(all="ignore"):  # a target that diverges overflows; its verdict says so
        runs = run_cases(adapter, identities, precision)
        longer: dict[str, Run | Failure] = {}
        verdicts = [
            judge_identity(adapter, identity, runs, longer, met=False) for identity in identities
        ]
        if any(verdict.outcome == "fails" for verdict in verdicts):
            others = [
                judge_identity(adapter, identity, runs, longer, met=True)
                if identity.check in ABOUT_C
                else verdict
                for identity, verdict in zip(identities, verdicts, strict=True)
            ]
            if count_failures(others) < count_failures(verdicts):
                return Judgement(others, runs, True)
    return Judgement(verdicts, runs, False)


def count_failures(verdicts: Sequence[Verdict]) -> int:
    """Return the number of rows that fail."""
    return sum(verdict.outcome == "fails" for verdict in verdicts)


def run_cases(
    adapter: Adapter, identities: Sequence[Identity], precision: str
) -> dict[int, Run | Failure]:
    """Run all federations of the table once; stop if the first few all end in an error."""
    runs: dict[int, Run | Failure] = {}  # by object: many rows look at the same federation
    for case in (case for identity in identities for case in identity.cases):
        if id(case) in runs:
            continue
        tried = [
            run
            for run in runs.values()
            if not isinstance(run, Failure) or run.outcome != "not offered"
        ]
        if len(tried) >= ENOUGH_ERRORS and all(
            isinstance(run, Failure) and run.outcome == "error" for run in tried
        ):
            runs[id(case)] = Failure(
                "error", f"not run: the first {ENOUGH_ERRORS} federations all ended in an error"
            )
        else:
            runs[id(case)] = run_case(adapter, case.computed_in(precision))
    return runs


def run_case(adapter: Adapter, case: Case) -> Run | Failure:
    """Run one case, on a copy that the adapter may modify."""
    missing = [name for name in case.asks if name not in getattr(adapter, "offers", ())]
    if missing:
        return Failure(
            "not offered", f"{', '.join(missing)}: the adapter does not say that it offers it"
        )
    own = case.copy()
    try:
        trace = adapter(own)
    except Unsupported as unsupported:
        return Failure("not offered", one_line(unsupported))
    except (Exception, SystemExit) as error:
        return Failure(
            "error", f"{type(error).__name__}: {one_line(error)} ({error_location(error, adapter)})"
        )
    return check_trace(case, trace, tuple(own.calls or ()))


def error_location(error: BaseException, adapter: Adapter) -> str:
    """Return where an error was raised, outside this package, and the adapter's line."""
    room = str(Path(__file__).parent)
    everything = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in everything if not frame.filename.startswith(room)] or everything
    raised = frames[-1]
    home = getattr(getattr(adapter, "__code__", None), "co_filename", frames[0].filename)
    own = [frame for frame in frames if frame.filename == home and frame is not raised]
    calling = (
        f", from {own[-1].filename}:{own[-1].lineno}" if own and raised.filename != home else ""
    )
    return f"{raised.filename}:{raised.lineno}{calling}"


def check_trace(case: Case, trace: Any, calls: tuple[Call, ...]) -> Run | Failure:
    """Validate shapes, types and finiteness of a trace and convert it to float64."""
    if not isinstance(trace, Trace):
        return Failure("error", f"the adapter returned a {type(trace).__name__}, not a Trace")
    if case.buffers is None:
        trace = trace._replace(buffers=None)
    arrays = {
        name: np.asarray(states) for name, states in trace._asdict().items() if states is not None
    }
    model: tuple[int, ...] = (case.rounds + 1, len(case.x0))
    shapes = {"x": model, "c": model, "c_i": (case.rounds + 1, *case.linear.shape)}
    if case.buffers is not None:
        shapes["buffers"] = (case.rounds + 1, len(case.buffers))
    allowed = PRECISIONS[: PRECISIONS.index(case.precision) + 1]
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            return Failure(
                "error", f"{name} has shape {array.shape}, not {shapes[name]}: rounds + 1 states"
            )
        if str(array.dtype) not in allowed:
            hint = "; in float32, ask for --precision float32" if array.dtype == np.float32 else ""
            return Failure("error", f"{name} is {array.dtype}, not {' or '.join(allowed)}{hint}")
    run = Run(
        case, Trace(**{name: array.astype(np.float64) for name, array in arrays.items()}), calls
    )
    for name, array in arrays.items():
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            first = int(np.argmin(finite))
            return Failure("fails", f"diverged: {name} is not finite after round {first}", run)
    return run


def judge_identity(
    adapter: Adapter,
    identity: Identity,
    runs: dict[int, Run | Failure],
    longer: dict[str, Run | Failure],
    met: bool,
) -> Verdict:
    """Return the verdict on one identity.

    "Not offered" takes precedence, as nothing was compared then. A run that is still converging is
    repeated with more rounds, to tell slow from wrong; such runs are stored in `longer`.
    """
    tried = [runs[id(case)] for case in identity.cases]
    name, statement = identity.name, identity.statement
    lost = [run for run in tried if isinstance(run, Failure)]
    if lost:
        first = max(lost, key=lambda failure: OUTCOMES.index(failure.outcome) % 3)
        return Verdict(name, statement, first.outcome, note=first.note)
    found = [run for run in tried if isinstance(run, Run)]
    measure = identity.check(*(run._replace(met=met) for run in found))
    if measure.unfinished:
        if name not in longer:
            longer[name] = run_longer(adapter, identity, found[0])
        measure = measure_longer(identity, measure, found[0], longer[name])
    violation, tolerance, note = measure[:3]
    if not np.isfinite(violation):
        return Verdict(
            name, statement, "fails", None, tolerance, "diverged: numbers too large to compare"
        )
    return Verdict(
        name, statement, "holds" if violation <= tolerance else "fails", violation, tolerance, note
    )


def run_longer(adapter: Adapter, identity: Identity, run: Run) -> Run | Failure:
    """Repeat a case with more rounds until it converges, settles, or `PATIENCE` ends."""
    times, last = 1, run
    while times < PATIENCE:
        times *= 4
        tried = run_case(adapter, prolonged(run.case, times))
        if isinstance(tried, Failure):
            return tried
        last = tried
        if not identity.check(last).unfinished:
            break
    return last


def measure_longer(
    identity: Identity, measure: Measure, run: Run, longer: Run | Failure
) -> Measure:
    """Measure a row that was not finished on the longer run."""
    if isinstance(longer, Failure):
        return measure
    found = identity.check(longer)
    if found.violation <= found.tolerance:
        note = (
            f"slow: {measure.violation:.0e} after {run.case.rounds} rounds, there after "
            f"{longer.case.rounds}"
        )
        return found._replace(note=note)
    # cohorts that never repeat look so
    if found.unfinished and found.violation > 0.9 * measure.violation:
        return found._replace(note=f"wrong: the distance rests at {found.violation:.2g}")
    return found._replace(note=f"{found.note} after {longer.case.rounds} rounds")


def one_line(error: BaseException) -> str:
    """Return an exception's text on one line."""
    return " ".join(str(error).split())


def load_target(target: str) -> Target:
    """Import the target `module:name`; the current folder is searched too.

    >>> load_target("fedscaffold.conformance:ours").__name__
    'ours'
    >>> load_target("fedscaffold.conformance:our")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown adapter in fedscaffold.conformance 'our' (did you mean
        'ours'?)...
    """
    path, _, name = target.partition(":")
    if not (path and name):
        raise checks.InputError(f"a target is written module:name, got {target!r}")
    names = vars(import_path(path))
    if name in names and not is_target(names[name]):
        kind = type(names[name]).__name__
        raise checks.InputError(
            f"{target!r} must be a function from Case to Trace or an Algorithm, got a {kind}"
        )
    known = [one for one, value in names.items() if is_target(value) and not one.startswith("_")]
    found: Target = names[
        name if name in names else checks.choice(f"adapter in {path}", name, known)
    ]
    return found


def is_target(value: Any) -> bool:
    """Return whether a value can be a target."""
    return callable(value) or isinstance(value, Algorithm)


def import_path(path: str) -> ModuleType:
    """Import a module; raise a one-line `InputError` if that fails."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may have been written after this process started
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{path}.".startswith(f"{missing.name}."):
            raise checks.InputError(
                f"no module {path!r} in this folder or among those installed"
            ) from None
        raise checks.InputError(
            f"module {path!r} cannot be imported: {one_line(missing)}"
        ) from missing
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise checks.InputError(f"module {path!r} cannot be imported: {reason}") from error


def table(verdicts: Sequence[Verdict]) -> str:
    """Format the verdicts as lines of text, one per identity, followed by the counts.

    >>> mean = Verdict("mean: all", "", "holds", 2e-16, 3e-12)
    >>> print(table([mean, Verdict("start", "", "fails", 0.5, 0.0)]))
    holds        mean: all  2e-16 <= 3e-12
    fails        start      5e-01 >  0e+00
    1 hold, 1 fail, 0 not offered
    """
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines = [
        f"{one.outcome:12} {one.name:{width}}  {format_measure(one)}".rstrip() for one in verdicts
    ]
    total = f"{counts['holds']} hold, {counts['fails']} fail, {counts['not offered']} not offered"
    errors = f", {counts['error']} in error" if counts["error"] else ""
    return "\n".join([*lines, total + errors])


def format_measure(verdict: Verdict) -> str:
    """Format the violation, the tolerance and the note of a verdict."""
    if verdict.violation is None or verdict.tolerance is None:
        return verdict.note
    sign = "<=" if verdict.outcome == "holds" else "> "
    return f"{verdict.violation:.0e} {sign} {verdict.tolerance:.0e}  {verdict.note}".rstrip()

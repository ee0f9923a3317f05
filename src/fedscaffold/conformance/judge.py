"""The judge: runs a target on every federation of the table and says which identities hold."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.conformance.case import Adapter, Case, Run, Trace, Unsupported
from fedscaffold.conformance.identities import IDENTITIES, Identity
from fedscaffold.conformance.targets import Target, adapter_of

__all__ = ["Outcome", "Verdict", "conform", "load_target", "table"]

Outcome: TypeAlias = Literal["holds", "fails", "not offered"]


class Verdict(NamedTuple):
    """What became of one identity; numbers are None where nothing could be measured."""

    name: str
    statement: str
    outcome: Outcome
    violation: float | None = None
    tolerance: float | None = None
    note: str = ""


class Failure(NamedTuple):
    """Why there is no run to measure."""

    outcome: Outcome
    note: str


def conform(target: Target, identities: Sequence[Identity] = IDENTITIES) -> list[Verdict]:
    """Try every identity on somebody's SCAFFOLD: an adapter, an algorithm, or a function that makes an algorithm.

    Nothing the target does stops the suite: an exception, a wrong shape, a divergence are verdicts.

    >>> from fedscaffold.conformance import ours
    >>> {verdict.outcome for verdict in conform(ours)}
    {'holds'}
    """
    adapter = adapter_of(target)
    runs: dict[int, Run | Failure] = {}  # by object: many rows look at the same federation, which is run once
    with np.errstate(all="ignore"):  # a target that diverges overflows; its verdict says so
        for identity in identities:
            for case in identity.cases:
                if id(case) not in runs:
                    runs[id(case)] = attempt(adapter, case)
        return [judged(identity, [runs[id(case)] for case in identity.cases]) for identity in identities]


def attempt(adapter: Adapter, case: Case) -> Run | Failure:
    """Run one case. The adapter gets a copy, and may do with it what it likes."""
    private = case.private()
    try:
        trace = measurable(case, adapter(private))
    except Unsupported as missing:
        return Failure("not offered", one_line(missing))
    except (Exception, SystemExit) as error:
        return Failure("fails", f"{type(error).__name__}: {one_line(error)}")
    return trace if isinstance(trace, Failure) else Run(case, trace, tuple(private.calls or ()))


def measurable(case: Case, trace: Any) -> Trace | Failure:
    """The trace as arrays that can be compared, or why it is none."""
    if not isinstance(trace, Trace):
        return Failure("fails", f"the adapter returned a {type(trace).__name__}, not a Trace")
    arrays = Trace(*(np.asarray(states) for states in trace))
    model = (case.rounds + 1, len(case.x0))
    shapes = model, model, (case.rounds + 1, *case.linear.shape)
    for name, array, shape in zip(Trace._fields, arrays, shapes, strict=True):
        if array.shape != shape:
            return Failure("fails", f"{name} has shape {array.shape}, not {shape}: rounds + 1 states")
        if array.dtype != np.float64:
            return Failure("fails", f"{name} is {array.dtype}; identities are exact and need float64")
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            return Failure("fails", f"diverged: {name} is not finite after round {int(np.argmin(finite))}")
    return arrays


def judged(identity: Identity, runs: Sequence[Run | Failure]) -> Verdict:
    """The verdict on one identity; what is not offered goes before what fails: then nothing was compared."""
    failures = [run for run in runs if isinstance(run, Failure)]
    name, statement = identity.name, identity.statement
    if failures:
        first = min(failures, key=lambda failure: failure.outcome != "not offered")
        return Verdict(name, statement, first.outcome, note=first.note)
    violation, tolerance = identity.check(*runs)
    if not np.isfinite(violation):
        return Verdict(name, statement, "fails", None, tolerance, "diverged: numbers too large to compare")
    return Verdict(name, statement, "holds" if violation <= tolerance else "fails", violation, tolerance)


def one_line(error: BaseException) -> str:
    """An exception's text on one line."""
    return " ".join(str(error).split())


def load_target(target: str) -> Target:
    """What `module:name` stands for; modules of the current folder are found too.

    >>> load_target("fedscaffold.conformance:ours").__name__
    'ours'
    >>> load_target("fedscaffold.conformance:our")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: unknown adapter in fedscaffold.conformance 'our' (did you mean 'ours'?)...
    """
    path, _, name = target.partition(":")
    if not (path and name):
        raise checks.InputError(f"a target is written module:name, got {target!r}")
    names = vars(imported(path))
    if name in names and not judgeable(names[name]):
        kind = type(names[name]).__name__
        raise checks.InputError(f"{target!r} must be a function from Case to Trace or an Algorithm, got a {kind}")
    known = [one for one, value in names.items() if judgeable(value) and not one.startswith("_")]
    found: Target = names[name if name in names else checks.choice(f"adapter in {path}", name, known)]
    return found


def judgeable(value: Any) -> bool:
    """Whether it may be a target."""
    return callable(value) or isinstance(value, Algorithm)


def imported(path: str) -> ModuleType:
    """The module, with one line for what stands in the way."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than this process
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{path}.".startswith(f"{missing.name}."):
            raise checks.InputError(f"no module {path!r} in this folder or among those installed") from None
        raise checks.InputError(f"module {path!r} cannot be imported: {one_line(missing)}") from missing
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise checks.InputError(f"module {path!r} cannot be imported: {reason}") from error


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as lines of text, one for each identity, and their number at the end.

    >>> mean, start = Verdict("mean: all", "", "holds", 2e-16, 3e-12), Verdict("start", "", "fails", 0.5, 0.0)
    >>> print(table([mean, start]))
    holds        mean: all  2e-16 <= 3e-12
    fails        start      5e-01 >  0e+00
    1 hold, 1 fail, 0 not offered
    """
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    counts = Counter(verdict.outcome for verdict in verdicts)
    lines = [f"{one.outcome:12} {one.name:{width}}  {measured(one)}".rstrip() for one in verdicts]
    total = f"{counts['holds']} hold, {counts['fails']} fail, {counts['not offered']} not offered"
    return "\n".join([*lines, total])


def measured(verdict: Verdict) -> str:
    """The numbers behind a verdict, or its note."""
    if verdict.violation is None or verdict.tolerance is None:
        return verdict.note
    sign = "<=" if verdict.outcome == "holds" else "> "
    return f"{verdict.violation:.0e} {sign} {verdict.tolerance:.0e}"

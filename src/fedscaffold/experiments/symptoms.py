"""What may be wrong with the course of a run: its step size, its drift, its control variates, its progress.

Numbers in, sentences out, as in `findings.py`; what is measured, and how, is in `diagnosis.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.experiments.findings import Finding, listed
from fedscaffold.theory.alignment import Alignment
from fedscaffold.theory.stable_step import StableStep

__all__ = ["Slope", "aligned", "drifting", "left_rounding", "progress", "step_size"]

FALLING = ("gap", "distance", "grad_norm", "loss")  # what tells most about progress comes first
NEAR = 0.95  # of the largest stable step
FLAT = 0.05  # of what descending the gradient would bring: less than that is standing still
OUTLIER = 10.0
FEWEST = 8  # measurements below which nothing is said about a trend


class Slope(NamedTuple):
    """The gradient of f."""

    now: float
    """|grad f(x)|."""
    start: float
    """The same at the start."""
    descent: float
    """What a round that descends it takes off the loss: |grad f|^2 times K lr, at most half a stable step."""


def left_rounding(columns: dict[str, NDArray[Any]], level: float) -> int | None:
    """The first round whose recorded residual is above the level that rounding explains; None where there is none.

    >>> left_rounding({"round": np.array([1, 2]), "residual": np.array([0.0, 0.1])}, 1e-14)
    2
    """
    pairs = zip(columns.get("round", ()), columns.get("residual", ()), strict=False)
    return next((int(r) for r, value in pairs if value > level), None)


def step_size(lr: float, steps: int, found: StableStep, ailing: bool) -> Finding:
    """The step size against the largest stable one; `ailing` says whether the run shows it.

    A bound from the curvature at x is of x only, so a run that does well all the same is to be watched, not wrong.
    """
    share, limit = lr / found.lr, f"{found.lr:.3g} ({found.source})"
    tall = f", radius {found.radius:.4g} a round" if found.radius is not None and math.isfinite(found.radius) else ""
    if share < NEAR or (found.unstable is False and found.source == "2/L"):
        said = f"lr {lr:g} with {steps} local steps is {share:.2g} of the largest stable step, {limit}{tall}."
        return Finding("step size", "ok", said, number=share)
    if share < 1 and not found.unstable:
        said = f"lr {lr:g} with {steps} local steps is just below the largest stable step, {limit}{tall}."
        return Finding("step size", "watch", said, f"noise or sampling may tip it over: try {found.lr / 2:.2g}", share)
    sure = bool(found.unstable) or ailing
    said = f"lr {lr:g} with {steps} local steps is {share:.3g} times the largest stable step, {limit}{tall}."
    if sure:
        return Finding("step size", "wrong", said, f"take a smaller step: local.lr = {found.lr / 2:.2g}", share)
    do = f"the run does well all the same; should it jump or diverge, local.lr = {found.lr / 2:.2g}"
    return Finding("step size", "watch", said, do, share)


def drifting(
    lengths: NDArray[Any] | None,
    recorded: float | None,
    name: Callable[[int], str],
    clients: NDArray[np.int64],
    reach: NDArray[Any],
) -> Finding | None:
    """How far one local round takes the clients from x, and who goes much further than the others.

    `recorded` is the metric, for when no round could be tried; `reach` is how far K steps along the gradients at x
    would go: who goes further than that is driven by something else.
    """
    if lengths is None:
        if recorded is None:
            return None
        return Finding("drift", "ok", f"Local models ended {recorded:.2g} apart in the last round.", number=recorded)
    lost = [name(int(i)) for i in clients[~np.isfinite(lengths)]]
    if lost:
        said = f"The local steps of {listed(lost)} diverge within one round from the present model."
        return Finding("drift", "wrong", said, "take a smaller local.lr or fewer local steps", math.inf, tuple(lost))
    middle, top = float(np.median(lengths)), float(lengths.max())
    far = [name(int(i)) for i in clients[(lengths > OUTLIER * middle) & (lengths > 3 * reach)]]
    last = name(int(clients[lengths.argmax()]))
    said = f"One local round takes clients {middle:.2g} away from the model, {last} the furthest, {top:.2g}"
    said += f" (K steps along their own gradients: {np.median(reach):.2g})" if reach.any() else ""
    if not far:
        return Finding("drift", "ok", f"{said}.", number=top)
    do = "its correction c - c_i drives it, not its gradient: see the residual and the ages"
    return Finding("drift", "watch", f"{said}: {top / middle:.2g} times the middle.", do, top, tuple(far))


def aligned(found: Alignment, with_c: NDArray[Any], age: NDArray[Any], name: Callable[[int], str], of: str) -> Finding:
    """Do the control variates still know the gradients: what they leave of the drift, cosines, and who is worst.

    All arrays are of the clients that were heard and looked at; `of` says how many these are.
    """
    low, worst = float(found.cosines.min()), int(found.errors.argmax())
    cosine = f"cosines with the gradients at x {low:.2g} to {found.cosines.max():.2g}, with c {with_c.min():.2g} to "
    said = f"The control variates leave {found.left:.2g} of the clients' difference at x ({of}; {cosine}"
    said += f"{with_c.max():.2g})"
    if found.left < 1:
        return Finding("alignment", "ok", f"{said}.", number=found.left)
    if found.left <= 2 * found.noise:
        return Finding(
            "alignment", "ok", f"{said}: no more than the noise of batches, {found.noise:.2g}.", number=found.left
        )
    said += f": they add more drift than they remove, worst {name(worst)}, {int(age[worst])} rounds old."
    do = (
        "they are stale or the model moves too far in a round: smaller local.lr, larger cohorts, or stale = 'refresh:5'"
    )
    return Finding("alignment", "watch", said, do, found.left, (name(worst),))


def progress(
    columns: dict[str, NDArray[Any]],
    diverged_at: int | None,
    slope: Slope | None,
    dtype: Any,
    noisy: bool,
    remembers: bool,
) -> Finding | None:
    """Does the run get on: diverged, rising, standing still, and where; None where nothing that falls was measured."""
    if diverged_at is not None:
        said = f"The run diverged at round {diverged_at}."
        return Finding("progress", "wrong", said, "take a smaller step size", float(diverged_at))
    metric = next((name for name in FALLING if name in columns), None)
    values = np.array([]) if metric is None else _finite(columns, metric)[1]
    if metric is None or not len(values):
        return None
    last = float(values[-1])
    where = f"{metric} {values[0]:.4g} at first, {last:.4g} now"
    if len(values) < FEWEST:
        return Finding("progress", "ok", f"Too early to say: {where}.", number=last)
    if (lost := _lost(values)) > 0.5:
        severity = "wrong" if lost > 1 else "watch"
        said = f"The run gets worse: {where}, {min(values):.4g} at best."
        return Finding("progress", severity, said, "take a smaller local.lr or fewer local steps", last)
    if slope is not None and slope.now <= math.sqrt(float(np.finfo(dtype).eps)) * slope.start:
        return Finding(
            "progress", "ok", f"The run has arrived, at a gradient of {slope.now:.2g}: {where}.", number=last
        )
    if slope is None or not _rests(columns, slope, dtype):
        return Finding("progress", "ok", f"The run gets on: {where}.", number=last)
    return _standing_still(where, slope, noisy, remembers)


def _finite(columns: dict[str, NDArray[Any]], metric: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rounds in which a metric was measured, and its values."""
    values = columns[metric].astype(np.float64)
    there = np.isfinite(values)
    return columns["round"][there], values[there]


def _lost(values: NDArray[Any]) -> float:
    """Share of what was gained that is lost again, or 0 where jumps between rounds explain it."""
    late, best = float(np.median(values[-max(1, len(values) // 8) :])), float(values.min())
    jumps = float(np.median(np.abs(np.diff(values))))
    gained = float(values[0]) - best
    if late - best <= 5 * jumps:
        return 0.0
    return (late - best) / gained if gained > 0 else math.inf


def _rests(columns: dict[str, NDArray[Any]], slope: Slope, dtype: Any) -> bool:
    """Whether the loss fell, in the last quarter, by next to nothing of what descending its gradient would bring."""
    metric = next((name for name in ("gap", "loss") if name in columns), None)
    if metric is None:
        return False
    rounds, values = _finite(columns, metric)
    quarter = len(values) // 4
    parts = (slice(-2 * quarter, -quarter), slice(-quarter, None))
    (before, after), (early, late) = ([float(np.median(a[part])) for part in parts] for a in (values, rounds))
    due = slope.descent * (late - early)
    seen = due > 10 * float(np.finfo(dtype).eps) * abs(after)  # else rounding hides it
    return seen and before - after < FLAT * due


def _standing_still(where: str, slope: Slope, noisy: bool, remembers: bool) -> Finding:
    share = slope.now / slope.start if slope.start > 0 else math.inf
    said = f"The run stands still at a gradient of {slope.now:.2g}, {share:.2g} of that at the start ({where})"
    if noisy:
        why = "noise of batches keeps it there; a smaller step or larger batches go lower"
        return Finding("progress", "ok", f"{said}: {why}.", number=slope.now)
    if remembers:
        do = "see the residual and the ages: a c that is not the mean of the c_i, or clients no longer heard, end so"
        return Finding("progress", "watch", f"{said}, and no noise explains it.", do, slope.now)
    do = "this is the bias of a method without control variates: algorithm.name = 'scaffold', or fewer local steps"
    return Finding("progress", "watch", f"{said}, beside the optimum.", do, slope.now)

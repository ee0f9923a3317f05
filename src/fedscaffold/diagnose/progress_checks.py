"""Findings about the course of a run: step size, drift, alignment and progress.

The measurements come from `state_checks.py` and `diagnose_run.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.diagnose.alignment import Alignment
from fedscaffold.diagnose.control_checks import Finding, join_names
from fedscaffold.theory.stable_step import StableStep

__all__ = [
    "Slope",
    "check_alignment",
    "check_drift",
    "check_progress",
    "check_step_size",
    "first_excess_round",
]

FALLING = ("gap", "distance", "grad_norm", "loss")  # most informative first
NEAR = 0.95  # of the largest stable step
FLAT = 0.05  # share of the decrease that descent would bring, below which a run has stalled
OUTLIER = 10.0
FEWEST = 8  # measurements needed to judge a trend


class Slope(NamedTuple):
    """Gradient of f, and the decrease it promises."""

    now: float
    """|grad f(x)|."""
    start: float
    """The same at the start."""
    descent: float
    """Decrease of the loss by a round of descent: |grad f|^2 times min(K lr, half the largest
    stable step)."""


def first_excess_round(columns: Mapping[str, NDArray[Any]], level: float) -> int | None:
    """Return the first round whose recorded residual rounding does not explain, or None.

    >>> first_excess_round({"round": np.array([1, 2]), "residual": np.array([0.0, 0.1])}, 1e-14)
    2
    """
    pairs = zip(columns.get("round", ()), columns.get("residual", ()), strict=False)
    return next((int(r) for r, value in pairs if value > level), None)


def check_step_size(lr: float, steps: int, found: StableStep, ailing: bool) -> Finding:
    """Compare the step size with the largest stable one.

    A bound from the curvature at x holds near x only, so a step above it is "watch" if the run
    shows no trouble.

    Args:
        lr: The step size.
        steps: Number of local steps.
        found: The largest stable step.
        ailing: Whether the run shows signs of instability.
    """
    share, limit = lr / found.lr, f"{found.lr:.3g} ({found.source})"
    tall = (
        f", radius {found.radius:.4g} a round"
        if found.radius is not None and math.isfinite(found.radius)
        else ""
    )
    if share < NEAR or (found.unstable is False and found.source == "2/L"):
        said = (
            f"lr {lr:g} with {steps} local steps is {share:.2g} of the largest stable step, "
            f"{limit}{tall}."
        )
        return Finding("step size", "ok", said, number=share)
    if share < 1 and not found.unstable:
        said = (
            f"lr {lr:g} with {steps} local steps is just below the largest stable step, "
            f"{limit}{tall}."
        )
        return Finding(
            "step size",
            "watch",
            said,
            f"noise or sampling may tip it over: try {found.lr / 2:.2g}",
            share,
        )
    sure = bool(found.unstable) or ailing
    said = (
        f"lr {lr:g} with {steps} local steps is {share:.3g} times the largest stable step, "
        f"{limit}{tall}."
    )
    if sure:
        return Finding(
            "step size", "wrong", said, f"take a smaller step: local.lr = {found.lr / 2:.2g}", share
        )
    do = f"the run does well all the same; should it jump or diverge, local.lr = {found.lr / 2:.2g}"
    return Finding("step size", "watch", said, do, share)


def check_drift(
    lengths: NDArray[Any] | None,
    recorded: float | None,
    name: Callable[[int], str],
    clients: NDArray[np.int64],
    reach: NDArray[Any],
) -> Finding | None:
    """Check how far a local round takes the clients from x, and which go much further.

    Args:
        lengths: |y_i - x| of the clients, or None if no round could be tried.
        recorded: The last recorded drift, used if `lengths` is None.
        name: (i) -> display name of client i.
        clients: Client indices.
        reach: Distance of K steps along each client's gradient at x; a client that goes much
            further is driven by its correction.
    """
    if lengths is None:
        if recorded is None:
            return None
        return Finding(
            "drift",
            "ok",
            f"Local models ended {recorded:.2g} apart in the last round.",
            number=recorded,
        )
    lost = [name(int(i)) for i in clients[~np.isfinite(lengths)]]
    if lost:
        said = (
            f"The local steps of {join_names(lost)} diverge within one round from the present "
            "model."
        )
        return Finding(
            "drift",
            "wrong",
            said,
            "take a smaller local.lr or fewer local steps",
            math.inf,
            tuple(lost),
        )
    middle, top = float(np.median(lengths)), float(lengths.max())
    far = [name(int(i)) for i in clients[(lengths > OUTLIER * middle) & (lengths > 3 * reach)]]
    last = name(int(clients[lengths.argmax()]))
    said = (
        f"After one local round clients are {middle:.2g} (median) from the model, at most "
        f"{top:.2g} ({last})"
    )
    if reach.any():
        said += f"; steps along their own gradients alone would lead to {np.median(reach):.2g}"
    if not far:
        return Finding("drift", "ok", f"{said}.", number=top)
    do = "its correction c - c_i drives it, not its gradient: see the residual and the ages"
    return Finding(
        "drift", "watch", f"{said}: {top / middle:.2g} times the median.", do, top, tuple(far)
    )


def check_alignment(
    found: Alignment, with_c: NDArray[Any], age: NDArray[Any], name: Callable[[int], str], of: str
) -> Finding:
    """Check whether control variates match the gradients: the drift they leave, and cosines.

    Args:
        found: Alignment of the clients that were heard and examined; the other arrays are of the
            same clients.
        with_c: Cosines with c.
        age: Rounds since each was heard.
        name: (index into these arrays) -> display name.
        of: Phrase that says how many clients these are.
    """
    low, worst = float(found.cosines.min()), int(found.errors.argmax())
    cosine = (
        f"cosines with the gradients at x {low:.2g} to {found.cosines.max():.2g}, with c "
        f"{with_c.min():.2g} to "
    )
    said = (
        f"After correction by the control variates, {found.left:.2g} of the differences between "
        f"the clients' gradients at x is left ({of}; {cosine}"
    )
    said += f"{with_c.max():.2g})"
    if found.left < 1:
        return Finding("alignment", "ok", f"{said}.", number=found.left)
    if found.left <= 2 * found.noise:
        return Finding(
            "alignment",
            "ok",
            f"{said}: the noise of batches, {found.noise:.2g}, explains it.",
            number=found.left,
        )
    said += (
        f": they add more drift than they remove, worst {name(worst)}, {int(age[worst])} rounds "
        "old."
    )
    do = (
        "they are stale or the model moves too far in a round: smaller local.lr, larger cohorts, "
        "or stale = 'refresh:5'"
    )
    return Finding("alignment", "watch", said, do, found.left, (name(worst),))


def check_progress(
    columns: Mapping[str, NDArray[Any]],
    diverged_at: int | None,
    slope: Slope | None,
    dtype: Any,
    noisy: bool,
    remembers: bool,
) -> Finding | None:
    """Check whether the run diverged, gets worse or stalls.

    Returns:
        The finding; None if no decreasing metric was recorded.
    """
    if diverged_at is not None:
        said = f"The run diverged at round {diverged_at}."
        do = "take a smaller step size"
        return Finding("progress", "wrong", said, do, diverged_at, (), "round of divergence")
    metric = next((name for name in FALLING if name in columns), None)
    values = np.array([]) if metric is None else _finite(columns, metric)[1]
    if metric is None or not len(values):
        return None
    last = float(values[-1])
    where = f"{metric} {values[0]:.4g} at first, {last:.4g} now"
    named = (last, (), f"last {metric}")
    if len(values) < FEWEST:
        return Finding("progress", "ok", f"Too early to say: {where}.", "", *named)
    if (lost := _lost_share(values)) > 0.5:
        severity = "wrong" if lost > 1 else "watch"
        said = f"The run is getting worse: {where}, {min(values):.4g} at best."
        do = "take a smaller local.lr or fewer local steps"
        return Finding("progress", severity, said, do, *named)
    if slope is not None and slope.now <= math.sqrt(float(np.finfo(dtype).eps)) * slope.start:
        said = f"The run has converged, to a gradient norm of {slope.now:.2g}: {where}."
        return Finding("progress", "ok", said, "", *named)
    if slope is None or not _has_stalled(columns, slope, dtype):
        return Finding("progress", "ok", f"The run is making progress: {where}.", "", *named)
    return _stalled_finding(where, slope, noisy, remembers)


def _finite(columns: Mapping[str, NDArray[Any]], metric: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rounds in which a metric was measured, and its values."""
    values = columns[metric].astype(np.float64)
    there = np.isfinite(values)
    return columns["round"][there], values[there]


def _lost_share(values: NDArray[Any]) -> float:
    """Return the share of the improvement that was lost again, or 0 if fluctuations explain it."""
    late, best = float(np.median(values[-max(1, len(values) // 8) :])), float(values.min())
    jumps = float(np.median(np.abs(np.diff(values))))
    gained = float(values[0]) - best
    if late - best <= 5 * jumps:
        return 0.0
    return (late - best) / gained if gained > 0 else math.inf


def _has_stalled(columns: Mapping[str, NDArray[Any]], slope: Slope, dtype: Any) -> bool:
    """Return whether the loss of the last quarter fell much less than descent would bring."""
    metric = next((name for name in ("gap", "loss") if name in columns), None)
    if metric is None:
        return False
    rounds, values = _finite(columns, metric)
    quarter = len(values) // 4
    parts = (slice(-2 * quarter, -quarter), slice(-quarter, None))
    (before, after), (early, late) = (
        [float(np.median(a[part])) for part in parts] for a in (values, rounds)
    )
    due = slope.descent * (late - early)
    seen = due > 10 * float(np.finfo(dtype).eps) * abs(after)  # otherwise hidden by rounding
    return seen and before - after < FLAT * due


def _stalled_finding(where: str, slope: Slope, noisy: bool, remembers: bool) -> Finding:
    share = slope.now / slope.start if slope.start > 0 else math.inf
    said = (
        f"The run has stalled at a gradient norm of {slope.now:.2g}, {share:.2g} of that at the "
        f"start ({where})"
    )
    named = (slope.now, (), "norm of the gradient")
    if noisy:
        why = "noise of batches keeps it there; a smaller step or larger batches go lower"
        return Finding("progress", "ok", f"{said}: {why}.", "", *named)
    if remembers:
        do = (
            "see the residual and the ages: a c that is not the mean of the c_i, or clients no "
            "longer heard, end so"
        )
        return Finding("progress", "watch", f"{said}, and noise does not explain it.", do, *named)
    do = (
        "this is the bias of a method without control variates: algorithm.name = 'scaffold', or "
        "fewer local steps"
    )
    return Finding("progress", "watch", f"{said}, away from the optimum.", do, *named)

"""A run as it can be shown, wherever it is read from, and the state that a page is sent of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.report.record import RECENT

__all__ = ["Picture", "state"]

PACE_SECONDS = 20.0  # the time left goes by so many of the last seconds
OLDEST = 10
MOST_ROWS = 20_000  # that a page is sent: of longer runs a row stands for several rounds
BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of ages: from this up to below the next


class Picture(NamedTuple):
    """What there is to show."""

    kind: str
    """simulation, deployment or study"""
    phase: str
    """starting, running, silent (its process is gone), or how it ended: see `record.ENDS`"""
    facts: dict[str, Any]
    """In words, to be listed."""
    version: str
    """Another one means that rounds shown before no longer count."""
    rounds: int | None
    """Rounds planned."""
    round: int
    columns: dict[str, list[Any]]
    """By row; `round` says which."""
    first: int = 1
    """The round of the first entry of `marks`."""
    marks: tuple[dict[str, Any] | int | None, ...] = ()
    """Of the last rounds: clients by what became of them (heard, late, refused, failed), or how many were heard."""
    clients: tuple[str, ...] | int = 0
    """Their names, or their number."""
    heard_at: dict[Any, int] | None = None
    """The round in which each was last heard, after `all_at`; None where it is not known."""
    all_at: int = 0
    """The last round in which everybody was heard; 0 for none."""
    stamps: tuple[tuple[int, float], ...] = ()
    """(round, clock)"""
    seconds: Mapping[str, float] = MappingProxyType({})
    precision: str = "float32"
    explained: float | None = None
    """What rounding explains of the residual."""
    worst: float | None = None
    """The largest residual of all rounds."""
    sums: Mapping[str, int] = MappingProxyType({})
    """Bytes of all rounds, by column."""
    target: tuple[str, float] | None = None
    stoppable: bool = False
    notes: tuple[str, ...] = ()


def state(picture: Picture, held: int = 0, version: str = "", now: float | None = None) -> dict[str, Any]:
    """What the page is sent: all about the run, and the rows after the `held` ones it has of this `version`.

    Of a very long run a row stands for `stride` rounds, with the last values known in them.

    >>> picture = Picture("simulation", "running", {}, "a", 9, 2, {"round": [1, 2], "loss": [3.0, None]})
    >>> state(picture, 1, "a/1")["columns"]
    {'round': [2], 'loss': [None]}
    """
    stride = max(1, math.ceil(len(picture.columns["round"]) / MOST_ROWS))
    stride = 1 << (stride - 1).bit_length()
    named = f"{picture.version}/{stride}"
    held = held if version == named and 0 <= held * stride <= len(picture.columns["round"]) else 0
    old = picture.columns["round"][held * stride - 1] if held else 0
    fresh = max(0, old + 1 - picture.first)  # of the marks, those of rounds that are new
    pace = _pace(picture.stamps)
    left = None
    if picture.phase == "running" and pace and picture.rounds is not None:
        left = (picture.rounds - picture.round) / pace
    return {
        "kind": picture.kind,
        "phase": picture.phase,
        "facts": picture.facts,
        "version": named,
        "round": picture.round,
        "rounds": picture.rounds,
        "held": held,
        "stride": stride,
        "columns": {name: _thinned(column, held, stride) for name, column in picture.columns.items()},
        "first": picture.first + fresh,
        "marks": list(picture.marks[fresh:]),
        "recent": RECENT,
        "clients": picture.clients,
        "ages": _ages(picture),
        "gauge": _gauge(picture),
        "bytes": {way: picture.sums.get(f"bytes_{way}") for way in ("up", "down")},
        "seconds": dict(picture.seconds),
        "pace": pace,
        "left": left,
        "quiet": None if not picture.stamps else (time.time() if now is None else now) - picture.stamps[-1][1],
        "target": picture.target,
        "stoppable": picture.stoppable,
        "notes": list(picture.notes),
    }


def _pace(stamps: tuple[tuple[int, float], ...]) -> float | None:
    """Rounds in a second, by the last ones: at least the last stretch, at most the last seconds.

    >>> _pace(((0, 10.0), (1, 14.0), (5, 16.0), (9, 18.0))), _pace(((0, 10.0),))
    (1.125, None)
    """
    if len(stamps) < 2:
        return None
    last, now = stamps[-1]
    first, then = next((s for s in stamps[:-1] if now - s[1] <= PACE_SECONDS), stamps[-2])
    return (last - first) / (now - then) if now > then else None


def _ages(picture: Picture) -> dict[str, Any] | None:
    """How long ago clients were last heard: how many by age, the oldest, the mean over those ever heard."""
    if picture.heard_at is None or not picture.clients:
        return None
    number = picture.clients if isinstance(picture.clients, int) else len(picture.clients)
    heard = list(picture.heard_at)
    ages = np.maximum(0, picture.round - np.fromiter(picture.heard_at.values(), np.int64, len(heard)))
    rest, since = number - len(heard), picture.round - picture.all_at  # those heard with everybody, and not since
    counts = np.bincount(np.searchsorted(BINS, ages, side="right") - 1, minlength=len(BINS))
    ever = number if picture.all_at else len(heard)
    if picture.all_at:
        counts[np.searchsorted(BINS, since, side="right") - 1] += rest
    total = ages.sum() + (rest * since if picture.all_at else 0)
    oldest = [] if picture.all_at and rest else np.argsort(-ages, kind="stable")[:OLDEST].tolist()
    return {
        "bins": list(BINS),
        "counts": counts.tolist(),
        "never": number - ever,
        "mean": float(total / ever) if ever else None,
        "oldest": [[heard[k], int(ages[k])] for k in oldest],
    }


def _gauge(picture: Picture) -> dict[str, Any]:
    """The largest residual of all rounds against what rounding explains: healthy, broken, none or unknown."""
    last = next((r for r in reversed(picture.columns.get("residual", [])) if r is not None), None)
    worst, limit = picture.worst, picture.explained
    word = "unknown"
    if worst is not None and limit is not None:
        word = "healthy" if worst <= limit else "broken"
        if worst == limit == 0:
            word = "none"
    return {"state": word, "residual": last, "largest": worst, "limit": limit}


def _thinned(column: list[Any], held: int, stride: int) -> list[Any]:
    """The rows after the `held` ones, each of `stride` entries: the last that is known of them.

    >>> _thinned([1, 2, None, 4, 5, None, 7], 1, 2)
    [4, 5]
    """
    if stride == 1:
        return column[held:]
    starts = range(held * stride, len(column) - stride + 1, stride)
    return [next((v for v in reversed(column[k : k + stride]) if v is not None), None) for k in starts]

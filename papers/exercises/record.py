"""What an exercise hands back.

Its rows, what they say in plain words, and the settings that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm
from fedscaffold.problems import Problem
from fedscaffold.simulation import Run, simulate

__all__ = [
    "Exercise",
    "Row",
    "best",
    "bytes_until",
    "ends_at",
    "grid",
    "mean_and_error",
    "middle",
    "reached",
    "residual",
    "said",
    "table",
]

Row = dict[str, Any]


class Exercise(NamedTuple):
    """One of the tutorial's exercises, measured."""

    name: str
    question: str
    rows: list[Row]
    finding: str
    settings: Row


def grid(
    algorithm: Algorithm, problem: Problem, lr: Sequence[float], seeds: int, **same: Any
) -> list[list[Run]]:
    """Runs for every step size and seed.

    They share one program, which compiles sooner than that of a `sweep`.
    """
    return [
        [simulate(algorithm, problem, lr=step, seed=seed, **same) for seed in range(seeds)]
        for step in lr
    ]


def reached(run: Run, goal: float, metric: str = "distance") -> int | None:
    """The first round at which a metric that falls is at most `goal`."""
    hits = np.flatnonzero(run.history[metric] <= goal)
    return int(hits[0]) + 1 if len(hits) else None


def bytes_until(run: Run, round: int | None) -> int | None:
    """What the clients sent up to and with a round."""
    return None if round is None else int(run.history["bytes_up"][:round].sum())


def middle(values: Sequence[float | None]) -> float | None:
    """The median; None if a value is missing, for then the median depends on which.

    >>> middle([3, 1, 2]), middle([1, None])
    (2.0, None)
    """
    return (
        None
        if None in values
        else float(np.median([value for value in values if value is not None]))
    )


def ends_at(runs: Sequence[Run], metric: str = "distance") -> float:
    """Root mean square of a metric over runs and the last quarter of their rounds."""
    tails = [run.history[metric][-max(1, run.rounds // 4) :] for run in runs]
    return float(np.sqrt(np.nanmean(np.square(np.concatenate(tails)))))


def residual(runs: Sequence[Run]) -> float:
    """The health gauge: the largest |c - sum p_i c_i| of the runs, over the size of their c_i."""
    return max(run.residual / run.scale if run.scale else run.residual for run in runs)


def best(scores: Sequence[float | None]) -> int:
    """Index of the lowest score, the first one if there are several; missing ones lose.

    >>> best([None, 3.0, 2.0])
    2
    """
    return int(
        np.argmin([np.inf if score is None or np.isnan(score) else score for score in scores])
    )


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned plain text: a column for each key, '-' where a row has nothing.

    >>> print(table([{"method": "sgd", "rounds": 12.0, "ends": None}]))
    method  rounds  ends
    sgd         12     -
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [key.replace("_", " ") for key in keys],
        *([said(row.get(key)) for key in keys] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [
        all(isinstance(row.get(key), (str, type(None))) for row in rows)
        and any(row.get(key) for row in rows)
        for key in keys
    ]
    aligned = (
        [
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, words, strict=True)
        ]
        for line in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def said(value: Any) -> str:
    """A cell for people.

    >>> said(None), said(1234567), said(0.00012345), said(12.0)
    ('-', '1,234,567', '0.000123', '12')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.3g}"
    return (
        f"{value:,}"
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        else str(value)
    )


def mean_and_error(samples: NDArray[Any]) -> tuple[float, float]:
    """Mean and its standard error over independent samples.

    >>> mean_and_error(np.array([1.0, 3.0]))
    (2.0, 1.0)
    """
    return float(samples.mean()), float(samples.std(ddof=1) / np.sqrt(len(samples)))

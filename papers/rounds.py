"""What Tables 3 to 5 of 004 share.

The sizes they are run in, and how rounds to a target are told and compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from papers.claim import Data
from papers.emnist import median

__all__ = ["EMNIST", "FULL", "QUICK", "TIED", "edges", "no_slower", "over", "spread", "told"]

QUICK = {
    "dataset": "digits",
    "validation": 350,
    "test": 350,
    "clients": 100,
    "cohorts": [0.2],
    "batch": 0.2,
    "grid": [0.03, 0.1, 0.3, 1.0, 3.0],
    "sgd_grid": [0.3, 1.0, 3.0, 10.0, 30.0],
    "tune_work": 200,
    "tune_least": 40,
    "tune_most": 40,
    "seeds": [0, 1, 2, 3, 4],
    "at_once": 5,
}
# what the quick size runs where EMNIST is there: a sixth of its records, the paper's targets
EMNIST = {
    "dataset": "emnist",
    "records": 20_000,
    "validation": 2000,
    "test": 4000,
    "sgd_grid": [0.1, 0.3, 1.0, 3.0, 10.0],
    "tune_least": 15,
    "tune_most": 60,
    "seeds": [0, 1, 2],
    "at_once": 3,
}
FULL = {
    "dataset": "emnist",
    "validation": 5000,
    "clients": 100,
    "cohorts": [0.2],
    "batch": 0.2,
    "grid": [0.03, 0.1, 0.3, 1.0, 3.0],
    "sgd_grid": [0.1, 0.3, 1.0, 3.0, 10.0],
    "tune_work": 300,
    "tune_least": 15,
    "tune_most": 100,
    "seeds": [0, 1, 2],
    "at_once": 1,
}
TIED = "medians out of order, but the seeds overlap: a tie, to be decided by --full"


def told(rounds: float, most: int) -> str:
    """A number of rounds, or that there were more."""
    return f"{rounds:.0f}" if math.isfinite(rounds) else f"{most}+"


def spread(cell: Data, most: int) -> str:
    """The median of a cell, and the range over its seeds."""
    found = [run["reached"] for run in cell["runs"] if run["reached"] is not None]
    return told(median(cell), most) + (
        f" ({min(found)}-{max(found)})" if len(set(found)) > 1 else ""
    )


def over(first: float, second: float) -> float | None:
    """The ratio of two numbers of rounds; None where one was not reached.

    >>> over(3.0, 2.0), over(3.0, math.inf)
    (1.5, None)
    """
    return first / second if math.isfinite(first) and math.isfinite(second) else None


def edges(cells: Sequence[Data]) -> str:
    """Which cells' best step size is the first or the last of the grid.

    A better one may lie beyond.

    >>> edges([{"method": "sgd", "epochs": 1, "similarity": 0, "edge": True}])
    ' Best step size at the end of the grid: sgd 1 epochs 0 %.'
    """
    found = [f"{c['method']} {c['epochs']} epochs {c['similarity']} %" for c in cells if c["edge"]]
    return f" Best step size at the end of the grid: {', '.join(found)}." if found else ""


def reached(cell: Data) -> list[float]:
    """Rounds of every seed."""
    return [math.inf if run["reached"] is None else float(run["reached"]) for run in cell["runs"]]


def no_slower(pairs: Sequence[tuple[Data, Data]], slack: float, ties: bool) -> bool | None:
    """Whether each pair's first median is at most the second, but for a share and two rounds.

    With `ties`, a pair whose seeds overlap decides nothing against it: None, where no other pair
    fails.
    """
    wrong = [
        (a, b)
        for a, b in pairs
        if not median(a) <= median(b) + (max(2, slack * median(b)) if slack else 0)
    ]
    clear = [(a, b) for a, b in wrong if not ties or min(reached(a)) > max(reached(b))]
    return False if clear else None if wrong else True

"""Results of a grid: one record per run, and one table of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.grids.cells import describe
from fedscaffold.privacy.several import Together, spend_together
from fedscaffold.simulation import notebook
from fedscaffold.simulation.engine import Seconds

__all__ = ["Grid", "GridRun"]

NO_TIME = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """One run of a grid, with the fields of `fs.Run` of the same names.

    It holds no client states: `fs.simulate` with its arguments and one thread gives them, with the
    same bits.

    Attributes:
        cell: What distinguishes the run from the others, by key.
        error: Why the run failed, in one line; None if it did not. The other fields are then empty.
        traceback: Traceback of the failure, or None.
        x: The model, with the structure of the problem's params.
        vector: The model as a flat vector.
        history: Columns with one entry per round.
        rounds: Number of rounds run.
        outcome: "finished", "target" or "diverged"; "failed" if there was an error.
        seed: The seed of its draws.
        privacy: What a private run spent, as `Run.privacy.facts()` says it; None for others.
        reached_at: Round in which `stop_at` was reached, or None.
        diverged_at: First round with a non-finite value, or None.
        advice: What to change after a divergence.
        residual: |c - sum p_i c_i| at the end.
        explained: Largest residual that rounding explains.
        fault: Description of a violated invariant, or None.
        digest: Hash of the model's bytes.
        seconds: Compile, wall and CPU time of the run.
    """

    cell: dict[str, Any]
    error: str | None = None
    traceback: str | None = None
    x: Any = None
    vector: NDArray[Any] | None = None
    history: dict[str, NDArray[Any]] = field(default_factory=dict)
    rounds: int = 0
    outcome: str = "failed"
    seed: int = 0
    privacy: dict[str, Any] | None = None
    reached_at: int | None = None
    diverged_at: int | None = None
    advice: str | None = None
    residual: float = np.nan
    explained: float = np.nan
    fault: str | None = None
    digest: str = ""
    seconds: Seconds = NO_TIME

    def __repr__(self) -> str:
        said = f"failed: {self.error}" if self.error else f"{self.outcome}, {self.rounds} rounds"
        return f"GridRun({', '.join(filter(None, [describe(self.cell), said]))})"

    def to_pandas(self) -> Any:
        """Return the history as a pandas DataFrame with one row per round."""
        return notebook.to_pandas(self.history)

    @property
    def row(self) -> dict[str, Any]:
        """The run's row of the table: its cell, how it ended, and the last value of each metric."""
        sums = ("bytes_up", "bytes_down")
        last = {
            name: column.sum().item() if name in sums else column[-1].item()
            for name, column in self.history.items()
            if name != "round" and len(column)
        }
        ended = {"outcome": self.outcome, "rounds": self.rounds, "reached_at": self.reached_at}
        ended |= {"diverged_at": self.diverged_at}
        return (
            self.cell
            | ended
            | last
            | {"seconds": self.seconds.wall, "digest": self.digest, "error": self.error}
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a grid, in the order of its cells.

    Attributes:
        keys: The keys that vary.
        runs: All runs; those that failed have an `error`.
        seconds: Wall time of the call.
    """

    keys: tuple[str, ...]
    runs: list[GridRun]
    seconds: float = 0.0

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"Grid({' x '.join(self.keys)}: {len(self.runs)} runs{failed})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.to_pandas().to_html()}"

    @property
    def failed(self) -> list[GridRun]:
        """Runs that failed."""
        return [run for run in self.runs if run.error is not None]

    @property
    def privacy(self) -> Together | None:
        """What the private runs spend, each and all; None if none is private.

        They are taken to be of the same records.
        """
        private = [(run.seed, run.privacy) for run in self.runs if run.privacy is not None]
        return spend_together(private)

    def select(self, **cell: Any) -> list[GridRun]:
        """Return the runs with these labels.

        Raises:
            InputError: No run of the grid has them.

        >>> found = Grid(keys=("lr",), runs=[GridRun(cell={"lr": 0.1}), GridRun(cell={"lr": 0.2})])
        >>> found.select(lr=0.2)
        [GridRun(lr 0.2, failed, 0 rounds)]
        """
        found = [
            run
            for run in self.runs
            if all(run.cell.get(key, self) == value for key, value in cell.items())
        ]
        if not found:
            raise InputError(f"no run of the grid has {describe(cell)}; its keys: {self.keys}")
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of rows, all with the same columns."""
        return table([run.row for run in self.runs])

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame with one row per run."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise InputError(
                "to_pandas() needs pandas: pip install pandas; grid.rows has the same rows"
            ) from None
        return pd.DataFrame(self.rows)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same columns: None where a row has no value, the error last.

    >>> table([{"lr": 1, "error": None}, {"lr": 2, "loss": 0.5, "error": None}])
    [{'lr': 1, 'loss': None, 'error': None}, {'lr': 2, 'loss': 0.5, 'error': None}]
    """
    last: Mapping[str, None] = dict.fromkeys(("seconds", "digest", "error"))
    known = dict.fromkeys(key for row in rows for key in row)
    names = [name for name in known if name not in last] + [name for name in last if name in known]
    return [{name: row.get(name) for name in names} for row in rows]

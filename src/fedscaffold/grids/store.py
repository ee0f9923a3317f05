"""Keep finished runs of a grid in a folder, each as one atomic commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedscaffold.grids.cells import Cell
from fedscaffold.grids.grid_run import GridRun
from fedscaffold.parsing import plain
from fedscaffold.simulation import Run
from fedscaffold.simulation.engine import Seconds
from fedscaffold.state import StateError, commit, latest

__all__ = ["CELLS", "load", "save"]

CELLS = "cells"
NUMBERS = ("residual", "explained")
FACTS = ("rounds", "outcome", "reached_at", "diverged_at", "advice", "fault", "digest")


def save(place: Path, run: Run) -> None:
    """Commit the result of a run to a folder."""
    arrays = {f"columns.{name}": column for name, column in run.history.items()}
    arrays |= {name: np.array(getattr(run, name), np.float64) for name in NUMBERS}
    arrays |= {"seconds": np.array(run.seconds, np.float64), "vector": np.asarray(run.vector)}
    facts: dict[str, Any] = {name: getattr(run, name) for name in FACTS}
    if run.privacy is not None:
        facts["privacy"] = plain(run.privacy.facts())
    # the order of the columns is not that of the arrays
    commit(place, arrays, facts | {"columns": list(run.history)})


def load(place: Path, cell: Cell) -> GridRun | None:
    """Return the result of a cell; None if it is absent or damaged."""
    try:
        found = latest(place)
    except StateError:
        return None
    if found is None:
        return None
    facts, arrays = found.facts, found.arrays
    if not {*FACTS, "columns"} <= facts.keys() or "vector" not in arrays:
        return None
    return GridRun(
        cell=cell.labels,
        seed=cell.config.seed,
        privacy=facts.get("privacy"),
        x=cell.config.problem.layout.unflatten(arrays["vector"]),
        vector=arrays["vector"],
        history={name: arrays[f"columns.{name}"] for name in facts["columns"]},
        seconds=Seconds(*arrays["seconds"].tolist()),
        **{name: arrays[name].item() for name in NUMBERS},
        **{name: facts[name] for name in FACTS},
    )

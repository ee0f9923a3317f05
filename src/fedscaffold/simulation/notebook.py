"""Notebook display of a run: pandas DataFrame, matplotlib axes, HTML table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedscaffold.checks import InputError, choice

if TYPE_CHECKING:
    from fedscaffold.simulation.result import Run

__all__ = ["plot", "table", "to_pandas"]

COSTS = ("round", "residual", "bytes_up", "bytes_down", "time")


def to_pandas(history: Mapping[str, NDArray[Any]]) -> Any:
    """Return a run's history as a pandas DataFrame with one row per round.

    >>> import numpy as np
    >>> to_pandas({"round": np.array([1, 2]), "loss": np.array([0.5, 0.25])})["loss"].tolist()
    [0.5, 0.25]
    """
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise InputError(
            "run.to_pandas() needs pandas: pip install pandas; run.history has the same columns"
        ) from None
    return pd.DataFrame(dict(history)).set_index("round")


def plot(history: Mapping[str, NDArray[Any]], metrics: str | Sequence[str] | None = None) -> Any:
    """Plot metrics against rounds and return the matplotlib axes, one per metric.

    Args:
        history: The history of a run.
        metrics: Names of the metrics; by default all but the residual and the bytes.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise InputError("run.plot() needs matplotlib: pip install 'fedscaffold[report]'") from None
    known = [name for name in history if name != "round"]
    names = [metrics] if isinstance(metrics, str) else metrics
    if names is None:
        names = [name for name in known if name not in COSTS] or ["residual"]
    for name in names:
        choice("metric", name, known)
    _, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 3.2), layout="constrained", squeeze=False
    )
    for panel, name in zip(axes[0], names, strict=True):
        there = history[name] == history[name]  # skip NaN: rounds that were not evaluated
        panel.plot(history["round"][there], history[name][there])
        panel.set(xlabel="round", ylabel=name.replace("_", " "))
        panel.grid(visible=True, alpha=0.3)
    return axes[0]


def table(run: Run) -> str:
    """Return an HTML table of a run's final metrics and outcome."""
    last = (
        {name.replace("_", " "): f"{column[-1]:.6g}" for name, column in run.history.items()}
        if run.rounds
        else {}
    )
    facts = {
        "parameters": str(run.vector.size),
        "target reached in round": run.reached_at,
        "advice": run.advice,
    }
    rows = last | {name: str(value) for name, value in facts.items() if value is not None}
    rows |= {} if run.fault is None else {"fault": run.fault}
    cells = (
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"

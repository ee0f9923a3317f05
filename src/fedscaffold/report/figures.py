"""The figures of a study, as plain dictionaries that Plotly draws.

Colours of ink and grid are left out: the page adds them, light or dark. An algorithm has the same colour and
the same marker in every figure, and either tells it apart: on screen, in grey print, to colour-blind eyes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.report.study import Curve, Study
from fedscaffold.report.tables import HUGE, named, size

__all__ = ["METRICS", "Band", "Look", "Panel", "band", "curves", "looks", "panel", "split", "split_page"]

Array = NDArray[Any]

METRICS = {
    "accuracy": "Accuracy: share of records predicted right",
    "loss": "Loss f(x)",
    "gap": "Loss above the optimum's, f(x) - f(x*)",
    "distance": "Distance from the optimum, |x - x*|",
    "grad_norm": "Norm of the gradient, |grad f(x)|",
    "drift": "Drift: spread of the local models at the round's end",
    "control_error": "Control error: distance of the c_i from grad f_i(x*)",
    "age": "Age: rounds since a client was last heard, on average",
}
NOT_SHOWN = ("round", "residual", "bytes_up", "bytes_down")
POINTS = 400  # of a line: more than a panel has pixels to show
CLIENTS = 200  # rows of the split's picture: more cannot be told apart
DECADES = 1.5

# Okabe and Ito's colours, the two lightest darkened so that each has contrast of 3 on white and on near-black
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3d8fc6", "#808080")
MARKERS = (
    ("circle", "●"),
    ("square", "■"),
    ("triangle-up", "▲"),
    ("diamond", "◆"),
    ("cross", "✚"),
    ("x", "✖"),
)
RAMP = ("rgba(0, 114, 178, 0.08)", "rgba(0, 114, 178, 0.9)")  # see-through, so right on light and on dark


class Look(NamedTuple):
    """How an algorithm is drawn."""

    colour: str
    symbol: str
    glyph: str
    """The symbol as text."""

    @property
    def mark(self) -> str:
        """The symbol as HTML."""
        return f'<i style="color:{self.colour}">{self.glyph}</i> '


class Panel(NamedTuple):
    """A figure with its heading."""

    heading: str
    figure: dict[str, Any]
    height: int


class Band(NamedTuple):
    """One metric of one algorithm over its seeds."""

    rounds: Array
    sent: Array | None  # bytes, both ways, until then
    median: Array
    low: Array
    high: Array


def looks(study: Study) -> dict[str, Look]:
    """Colour and marker of every algorithm, in order of appearance."""
    names = dict.fromkeys(curve.algorithm for curve in study.curves)
    return {name: Look(COLOURS[i % len(COLOURS)], *MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def band(runs: Sequence[Curve], column: str) -> Band | None:
    """Median, lowest and highest over the seeds, in the rounds where at least half of them were measured.

    >>> two = [Curve("a", s, 0.1, {"round": np.array([1, 2, 3]), "loss": np.array([s, np.nan, 4.0])},
    ...              None, None, None, 0.0, 0.0, "") for s in (1, 2)]
    >>> found = band(two, "loss")
    >>> found.rounds.tolist(), found.median.tolist(), found.low.tolist(), found.high.tolist()
    ([1, 3], [1.5, 4.0], [1.0, 4.0], [2.0, 4.0])
    """
    last = max((int(run.columns["round"].max(initial=0)) for run in runs), default=0)
    values, sent = np.full((2, len(runs), last), np.nan)
    for run, held, bytes_held in zip(runs, values, sent, strict=True):
        at = run.columns["round"] - 1
        measured = np.asarray(run.columns.get(column, np.nan), float)
        held[at] = np.where(np.abs(measured) < HUGE, measured, np.nan)
        bytes_held[at] = np.cumsum(run.columns.get("bytes_up", 0 * at) + run.columns.get("bytes_down", 0 * at))
    kept = np.flatnonzero(2 * np.isfinite(values).sum(0) >= max(1, len(runs)))
    if len(kept) == 0:
        return None
    kept = kept[np.unique(np.linspace(0, len(kept) - 1, POINTS).round().astype(int))]
    values, cost = values[:, kept], np.nanmedian(sent[:, kept], axis=0)
    middle, low, high = np.nanmedian(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    return Band(kept + 1, cost if cost[-1] > 0 else None, middle, low, high)


def curves(study: Study, *, against: str) -> list[Panel]:
    """One panel for each metric, against "rounds" or "bytes"."""
    there = dict.fromkeys(name for run in study.curves for name in run.columns if name not in NOT_SHOWN)
    order = [*(name for name in METRICS if name in there), *(name for name in there if name not in METRICS)]
    made = []
    for metric in order:
        goal = study.target[1] if study.target and study.target[0] == metric else None
        words = (METRICS.get(metric, metric), "" if goal is None else f"target {goal:g}")
        made.append(panel(study, study.curves, metric, words, goal, against))
    return [one for one in made if one]


def panel(
    study: Study, runs: Sequence[Curve], column: str, words: tuple[str, str], goal: float | None, against: str
) -> Panel | None:
    """Curves of one column of some of a study's runs, bands over seeds, and a dashed line at the goal.

    `words` are the heading and what is written at the goal. None where nothing was measured.
    """
    look = looks(study)
    groups = {name: [run for run in runs if run.algorithm == name] for name in look}
    bands = {name: found for name, own in groups.items() if (found := band(own, column))}
    if against == "bytes":
        bands = {name: one for name, one in bands.items() if one.sent is not None}
    if not bands:
        return None
    calm = [one for name, one in bands.items() if all(run.diverged_at is None for run in groups[name])]
    shown = np.concatenate(
        [[] if goal is None else [goal], *(part for one in calm or bands.values() for part in one[2:])]
    )
    decades = 0.0 if column == "accuracy" else _decades(shown, float(np.finfo(study.precision).eps))
    floor = shown[shown > 0].min() if decades else -np.inf
    unit = _unit(bands) if against == "bytes" else ("", 1.0)
    traces = [
        trace
        for name, one in bands.items()
        for trace in _traces(name, one, look[name], floor, len(groups[name]), against, unit[1])
    ]
    title = "round" if against == "rounds" else f"data sent, both ways ({unit[0]})"
    layout = _layout(title, decades, "x unified" if against == "rounds" else "closest")
    if len(calm) < len(bands):  # a run that blows up must not flatten the others
        starts = [one.median[0] for one in bands.values()]
        layout["yaxis"] |= {"range": _range(np.append(shown, starts), decades)}
    layout |= {} if goal is None else _goal_line(goal, words[1], decades)
    return Panel(words[0], {"data": traces, "layout": layout}, 300)


def _decades(values: Array, eps: float) -> float:
    """The decades a logarithmic scale has to cover; 0 where values are few or, beyond rounding, negative."""
    positive = values[values > 0]
    if len(positive) == 0 or values.min() < -1e3 * eps * positive.max():
        return 0.0
    decades = float(np.log10(positive.max()) - np.log10(positive.min()))
    return decades if decades > DECADES else 0.0


def _range(values: Array, decades: float) -> list[float]:
    ends = np.log10(values[values > 0]) if decades else values
    low, high = float(ends.min()), float(ends.max())
    room = 0.08 * (high - low) or 1.0
    return [low - room, high + room]


def _unit(bands: dict[str, Band]) -> tuple[str, float]:
    most = max(float(one.sent[-1]) for one in bands.values() if one.sent is not None)
    unit = size(most).split()[1]
    return unit, 1000.0 ** ("", "k", "M", "G", "T").index(unit[:-1])


def _traces(
    name: str, one: Band, look: Look, floor: float, seeds: int, against: str, unit: float
) -> list[dict[str, Any]]:
    x = one.rounds if against == "rounds" or one.sent is None else one.sent / unit
    low, high = np.maximum(one.low, floor), np.maximum(one.high, floor)
    across = "" if seeds == 1 else " (%{customdata[1]:.3g} to %{customdata[2]:.3g})"
    when = "" if against == "rounds" else "round %{customdata[0]}: "
    shared = {"type": "scatter", "legendgroup": name, "showlegend": False}
    line = shared | {
        "name": html.escape(named(name)),
        "mode": "lines+markers",
        "x": _short(x),
        "y": _short(np.where(one.median > 0, one.median, np.nan) if floor > 0 else one.median),
        "customdata": list(zip(one.rounds.tolist(), _short(one.low), _short(one.high), strict=True)),
        "hovertemplate": when + "%{y:.4g}" + across + "<extra>%{fullData.name}</extra>",
        "line": {"color": look.colour, "width": 2},
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 8, "maxdisplayed": 8},
    }
    if seeds == 1:
        return [line]
    area = shared | {
        "mode": "lines",
        "x": _short(np.concatenate([x, x[::-1]])),
        "y": _short(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": look.colour + "30",  # the last two digits: how much covers what is behind
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    return [area, line]


def _short(values: Array) -> list[float | int | None]:
    """Five digits draw the same picture as sixteen, in a third of the space; rounds stay whole numbers."""
    if values.dtype.kind == "i":
        return list(values.tolist())
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in values.tolist()]


def _layout(title: str, decades: float, hover: str) -> dict[str, Any]:
    side: dict[str, Any] = {"automargin": True, "nticks": 7}
    if decades:  # a few round numbers, or a few powers of ten
        few = {"dtick": "D2", "tickformat": "~g"} if decades < 2.5 else {"dtick": int(np.ceil(decades / 7))}
        side = {"automargin": True, "type": "log", "exponentformat": "power"} | few
    return {
        "xaxis": {"title": {"text": title, "standoff": 8}, "rangemode": "tozero", "automargin": True, "nticks": 7},
        "yaxis": side,
        "margin": {"l": 48, "r": 12, "t": 28, "b": 44},
        "hovermode": hover,
        "font": {"size": 13},
    }


def _goal_line(goal: float, text: str, decades: float) -> dict[str, Any]:
    if decades and goal <= 0:
        return {}
    at = float(np.log10(goal)) if decades else goal  # annotations count in decades, shapes do not
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal}
    note = {"xref": "paper", "x": 0, "y": at, "text": html.escape(text), "showarrow": False}
    return {
        "shapes": [line | {"line": {"dash": "dash", "width": 1.5}}],
        "annotations": [note | {"xanchor": "left", "yanchor": "bottom", "yshift": 1, "font": {"size": 12}}],
    }


def split(counts: NDArray[np.int64]) -> Panel:
    """Who holds what: a map of clients and labels, a client's records beside it; without labels, only these.

    >>> split(np.array([[3, 0], [1, 1]])).figure["data"][0]["z"]
    [[1.0, None], [0.5, 0.5]]
    """
    clients, labels = counts.shape
    shown = np.unique(np.linspace(0, clients - 1, CLIENTS).round().astype(int))
    some, total = counts[shown], counts[shown].sum(1)
    rows = np.arange(len(shown))
    ticks = rows if len(rows) <= 30 else rows[:: -(-len(rows) // 10)]
    height = int(np.clip(22 * len(rows), 120, 640)) + 70
    bars: dict[str, Any] = {"type": "bar", "orientation": "h", "x": total.tolist(), "y": rows.tolist()}
    bars |= {"text": shown.tolist(), "hovertemplate": "client %{text}: %{x} records<extra></extra>"}
    bars |= {"textposition": "none", "showlegend": False, "marker": {"color": "#808080"}}
    side = {"tickvals": ticks.tolist(), "ticktext": shown[ticks].tolist(), "autorange": "reversed"}
    layout = _layout("records", 0.0, "closest")
    blank = {"showgrid": False, "zeroline": False}
    layout["yaxis"] = side | blank | {"title": {"text": "client"}, "automargin": True}
    heading = f"{clients} clients hold {int(counts.sum())} records" + f" of {labels} labels" * (labels > 1)
    heading += f" ({CLIENTS} of the clients are drawn, evenly chosen)" * (clients > CLIENTS)
    if labels == 1:
        return Panel(heading, {"data": [bars], "layout": layout}, height)
    layout["xaxis2"] = layout["xaxis"] | {"domain": [0.82, 1], "nticks": 3}
    layout["xaxis"] = {"domain": [0, 0.8], "title": {"text": "label", "standoff": 8}, **blank}
    layout["xaxis"] |= {"dtick": 1} if labels <= 12 else {}
    heat = _heat(some, shown, in_cells=labels <= 12 and len(rows) <= 30)
    return Panel(heading, {"data": [heat, bars | {"xaxis": "x2"}], "layout": layout}, height)


def _heat(counts: NDArray[np.int64], clients: Array, *, in_cells: bool) -> dict[str, Any]:
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    return {
        "type": "heatmap",
        "z": [[float(f"{v:.4g}") or None for v in row] for row in share.tolist()],
        "text": [[v or "" for v in row] for row in counts.tolist()],
        "customdata": np.broadcast_to(clients[:, None], counts.shape).tolist(),
        "hoverongaps": False,
        "hovertemplate": "client %{customdata}, label %{x}: %{text} records (%{z:.0%})<extra></extra>",
        "texttemplate": "%{text}" if in_cells else "",
        "colorscale": [[0, RAMP[0]], [1, RAMP[1]]],
        "zmin": 0,
        "zmax": float(share.max()),
        "showscale": False,
        "xgap": 1 if len(counts) <= 30 else 0,
        "ygap": 1 if len(counts) <= 30 else 0,
    }


def split_page(counts: NDArray[np.int64], title: str) -> str:
    """A page with nothing but the picture of a split, before any run."""
    from fedscaffold.report.page import page  # a page is made of figures: imported here, it makes no circle

    return page(Study(title, "", None, [], [], counts, "float32", "", "", {}, {}))

"""The page of a study: one HTML file that opens offline, on a laptop, a phone or paper, light or dark.

Everything is inside, Plotly too (packed: the browser unpacks it), and the page's own security policy forbids
the browser to ask the network for anything.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Sequence
from html import escape
from string import Template
from typing import NamedTuple

import numpy as np

from fedscaffold.report import figures, tables
from fedscaffold.report.figures import Panel
from fedscaffold.report.study import Curve, Study
from fedscaffold.report.tables import Row, named

__all__ = ["Gauge", "gauges", "page", "verdict"]


def page(study: Study) -> str:
    """Return the page of a study, as the text of one HTML file.

    >>> text = page(Study("A title", "A problem.", None, [], [], None, "float32", "", "demo", {}, {}))
    >>> text[:15], "A title" in text, "This study holds no runs." in text
    ('<!DOCTYPE html>', True, True)
    """
    table = _complete(study)
    panels: list[Panel] = []
    parts = [_table(study, table), _curves(study, panels), _split(study, panels), _health(study, panels)]
    drawn = json.dumps([panel.figure for panel in panels], separators=(",", ":"), allow_nan=False)
    return Template(PAGE).substitute(
        style=STYLE,
        script=SCRIPT,
        title=escape(study.title),
        problem=escape(study.problem),
        verdict=escape(verdict(table)),
        diverged=_diverged(study),
        parts="".join([*parts, _origin(study)]),
        figures=drawn.replace("<", "\\u003c"),  # no text inside may end the script element
        plotly=_plotly() if panels else "",
    )


def verdict(table: Sequence[Row]) -> str:
    """What came out, in one sentence, the quickest first.

    >>> row = {"algorithm": "scaffold", "rounds_to_target": 12.0, "seeds": 3, "reached": 3, "diverged": 0,
    ...        "metric": "accuracy", "target": 0.9, "rounds": 60}
    >>> verdict([row | {"algorithm": "fedavg", "rounds_to_target": None, "reached": 0}, row])
    'SCAFFOLD reached accuracy 0.9 after 12 rounds (median of 3 seeds); FedAvg did not within 60 rounds.'
    """
    if not table:
        return "This study holds no runs."
    metric, target, seeds = table[0]["metric"].replace("_", " "), table[0]["target"], table[0]["seeds"]
    if target is None:
        known = [row for row in table if row["best_metric"] is not None]
        known.sort(key=lambda row: float(row["best_metric"]), reverse=metric == "accuracy")
        best = ", ".join(f"{named(row['algorithm'])} {row['best_metric']:.4g}" for row in known)
        over = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
        return f"Best {metric}: {best} ({over})." if best else "Nothing was measured."
    order = sorted(table, key=lambda row: (row["rounds_to_target"] or math.inf, -row["reached"], row["diverged"]))
    first, *others = (f"{named(row['algorithm'])} {_how(row)}" for row in order)
    first = first.replace(")

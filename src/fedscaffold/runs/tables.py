"""The table of a comparison, one row for each algorithm, and its output formats.

A row holds plain numbers, or None where a value is unknown. `COLUMNS` defines headings and formats
for LaTeX and the terminal; the page has the same columns (`run_page/numbers.js`). CSV has raw keys
and full precision.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from csv import DictWriter
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from fedscaffold.metrics import Stop, rises

if TYPE_CHECKING:
    from fedscaffold.runs.run_folder import RunRecord

__all__ = [
    "COLUMNS",
    "Row",
    "cells",
    "csv",
    "display_name",
    "first_reached",
    "latex",
    "rows",
    "terminal",
]

Row = dict[str, Any]
Target = tuple[str, float]

NAMES = {
    "scaffold": "SCAFFOLD",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "sgd": "SGD",
    "ca2fl": "CA2FL",
    "dane": "DANE",
    "ditto": "Ditto",
    "fedavg-m": "FedAvg-M",
    "feddyn": "FedDyn",
    "fedexp": "FedExP",
    "fednova": "FedNova",
    "mime": "Mime",
    "scafcom": "SCAFCOM",
    "scaffnew": "Scaffnew",
    "scaffold-m": "SCAFFOLD-M",
    "scaffold-xi": "SCAFFOLD (xi)",
}
NOTHING = "-"
HUGE = 1e300  # larger values count as infinite, because their sums and squares overflow
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {">": "$>$", "<": "$<$", "±": r"$\pm$"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def display_name(algorithm: str) -> str:
    """Return the name of an algorithm as printed in text.

    >>> display_name("fedavg"), display_name("mine")
    ('FedAvg', 'mine')
    """
    return NAMES.get(algorithm, algorithm)


def format_bytes(number: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(640), format_bytes(1_234_000)
    ('640 B', '1.234 MB')
    """
    power = min(4, int(math.log10(number)) // 3) if number >= 1 else 0
    return f"{number / 1000**power:.4g} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def first_reached(columns: Mapping[str, NDArray[Any]], target: Target | None) -> int | None:
    """Return the first round in which the metric meets the target, or None.

    Accuracy must be at least the target, other metrics at most.

    >>> import numpy as np
    >>> columns = {"round": np.arange(1, 4), "loss": np.array([0.9, np.nan, 0.2])}
    >>> first_reached(columns, ("loss", 0.5))
    3
    """
    if target is None or target[0] not in columns:
        return None
    metric, goal = target
    there = Stop(metric, rises(metric)).met(columns[metric], goal)
    return int(columns["round"][there.argmax()]) if there.any() else None


def rows(runs: Sequence[RunRecord], target: Target | None, rounds: int) -> list[Row]:
    """Return the table of some runs: one row for each algorithm, in order of appearance.

    Seeds that did not reach the target count as later than any that did. Without a target, the best
    value is that of the accuracy, or of the first metric recorded. Losses and best values are means
    over seeds.

    >>> import numpy as np
    >>> from fedscaffold.runs import RunRecord
    >>> loss = {"round": np.arange(1, 3), "loss": np.array([0.5, 0.25])}
    >>> run = RunRecord(algorithm="sgd", seed=0, columns=loss)
    >>> [row] = rows([run], ("loss", 0.3), 2)
    >>> row["rounds_to_target"], row["reached"], row["seeds"], row["best_metric"]
    (2.0, 1, 1, 0.25)
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.algorithm, []).append(run)
    metric = target[0] if target else _leading_metric(runs)
    return [_row(name, group, target, metric, rounds) for name, group in groups.items()]


def _row(
    algorithm: str, runs: list[RunRecord], target: Target | None, metric: str, rounds: int
) -> Row:
    when = [first_reached(run.columns, target) for run in runs]
    hits = [at for at in when if at is not None]
    low, high = (min(hits), max(hits)) if len(hits) == len(when) else (None, None)
    paid = [None if at is None else _bytes_sent(c, at) for at, c in zip(when, runs, strict=True)]
    cost = _median(paid)
    best = [
        max(v) if rises(metric) else min(v) for v in (_finite_values(c, metric) for c in runs) if v
    ]
    last = [v[-1] for v in (_finite_values(c, "loss") for c in runs if c.diverged_at is None) if v]
    residuals = [
        v for c in runs for v in (c.residual, *_finite_values(c, "residual")) if math.isfinite(v)
    ]
    return {
        "algorithm": algorithm,
        "lr": runs[0].lr if len({c.lr for c in runs}) == 1 else None,
        "rounds_to_target": _median(when),
        "rounds_low": low,
        "rounds_high": high,
        "reached": len(hits),
        "seeds": len(runs),
        "bytes_to_target": None if cost is None else round(cost),
        "best_metric": statistics.fmean(best) if best else None,
        "best_spread": statistics.stdev(best) if len(best) > 1 else 0.0,
        "final_loss": statistics.fmean(last) if last else None,
        "residual": max(residuals, default=None),
        "diverged": sum(c.diverged_at is not None for c in runs),
        "metric": metric,
        "target": target[1] if target else None,
        "rounds": rounds,
    }


def _leading_metric(runs: Sequence[RunRecord]) -> str:
    """Return accuracy if recorded, else the first metric recorded, else the loss."""
    measured = dict.fromkeys(name for run in runs for name in run.columns)
    costs = ("round", "residual", "bytes_up", "bytes_down", "time")
    found = [name for name in measured if name not in costs]
    if "accuracy" in found:
        return "accuracy"
    return found[0] if found else "loss"


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, where None counts as infinite; None if the median is infinite."""
    middle = statistics.median(math.inf if value is None else float(value) for value in values)
    return middle if math.isfinite(middle) else None


def _bytes_sent(run: RunRecord, at: int) -> int | None:
    """Return the bytes sent in both directions until the end of round `at`."""
    ways = [run.columns[name] for name in ("bytes_up", "bytes_down") if name in run.columns]
    until = run.columns["round"] <= at
    return sum(int(way[until].sum()) for way in ways) if ways else None


def _finite_values(run: RunRecord, name: str) -> list[float]:
    return [v for v in map(float, run.columns.get(name, ())) if abs(v) < HUGE]


class Column(NamedTuple):
    """One column of the printed table."""

    heading: str
    """Template with {metric} and {goal}."""
    show: Callable[[Row], str]
    needs: str = "algorithm"
    """The column is shown only if some row has this key."""


def _number(key: str, digits: int = 4) -> Callable[[Row], str]:
    return lambda row: NOTHING if row[key] is None else f"{row[key]:.{digits}g}"


def _rounds(row: Row) -> str:
    if row["rounds_to_target"] is None:
        return f"> {row['rounds']}" if "rounds" in row else "not reached"
    low, high = row["rounds_low"], row["rounds_high"]
    spread = "" if None in (low, high) or low == high else f" ({low} to {high})"
    return f"{row['rounds_to_target']:.10g}{spread}"


def _best(row: Row) -> str:
    shown = _number("best_metric")(row)
    return shown if shown == NOTHING or row["seeds"] == 1 else f"{shown} ± {row['best_spread']:.2g}"


def _data(row: Row) -> str:
    if row["rounds_to_target"] is None or row["bytes_to_target"] is None:
        return NOTHING
    return format_bytes(row["bytes_to_target"])


COLUMNS = (
    Column("algorithm", lambda row: display_name(row["algorithm"])),
    Column("lr", _number("lr")),
    Column("rounds to {goal}", _rounds, needs="target"),
    Column(
        "seeds that reached it", lambda row: f"{row['reached']} of {row['seeds']}", needs="target"
    ),
    Column("data sent until then", _data, needs="target"),
    Column("best {metric}", _best),
    Column("final loss", _number("final_loss")),
    Column("ends", lambda row: row.get("ends", NOTHING), needs="ends"),
    Column("residual", _number("residual", 2)),
    Column("diverged", lambda row: f"{row['diverged']} of {row['seeds']}"),
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the printed table: the headings, then one list of cells for each row.

    >>> cells([])[0][0]
    'algorithm'
    """
    first: Row = {"metric": "metric", "target": "target"} | (
        dict(rows[0]) if rows else {"target": None}
    )
    known = {key for row in (first, *rows) for key, value in row.items() if value is not None} | {
        "algorithm"
    }
    columns = [c for c in COLUMNS if c.needs in known]
    metric = first["metric"].replace("_", " ")
    goal = f"{metric} {first['target']:g}" if isinstance(first["target"], float | int) else "target"
    headings = [c.heading.format(metric=metric, goal=goal) for c in columns]
    return [headings, *([c.show(row) for c in columns] for row in rows)]


def csv(rows: Sequence[Row]) -> str:
    r"""Return the table as CSV: one column for each key, full precision, empty for None.

    >>> csv([{"algorithm": "sgd", "lr": 0.1, "final_loss": None}])
    'algorithm,lr,final_loss\nsgd,0.1,\n'
    """
    text = io.StringIO()
    writer = DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def latex(rows: Sequence[Row]) -> str:
    r"""Return the table in LaTeX, for the booktabs package.

    >>> print(latex([]).splitlines()[2])
    algorithm & lr & best metric & final loss & residual & diverged \\
    """
    head, *body = (
        " & ".join("".join(LATEX.get(c, c) for c in cell) for cell in line) + r" \\"
        for line in cells(rows)
    )
    layout = "l" + "r" * head.count(" & ")
    lines = [
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
    ]
    return "\n".join([*lines, r"\end{tabular}", ""])


def terminal(rows: Sequence[Row]) -> str:
    """Return the table as aligned plain text, with long headings wrapped.

    >>> print(terminal([]))
    algorithm  lr  best metric  final loss  residual  diverged
    """
    heads, *body = cells(rows)
    widths = [max(11, *(len(line[i]) for line in body)) if body else 11 for i in range(len(heads))]
    wrapped = [textwrap.wrap(head, width) for head, width in zip(heads, widths, strict=True)]
    tall = max(map(len, wrapped))
    lines = [
        *map(list, zip(*([""] * (tall - len(head)) + head for head in wrapped), strict=True)),
        *body,
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)

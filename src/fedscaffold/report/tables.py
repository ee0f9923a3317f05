"""The table of a study: one row for each algorithm, over its seeds, and the ways to print it.

A row holds plain numbers (None where there is nothing to tell); `COLUMNS` is the one place that says how they
are headed and shown, in Markdown, LaTeX, on a terminal and on the page alike. CSV is for machines: keys and
full numbers.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from csv import DictWriter
from html import escape
from typing import Any, NamedTuple

from numpy.typing import NDArray

from fedscaffold.metrics import met, rises
from fedscaffold.report.study import Curve, Study

__all__ = ["COLUMNS", "Row", "cells", "csv", "latex", "markdown", "named", "reached", "rows", "terminal"]

Row = dict[str, Any]
Target = tuple[str, float]

NAMES = {
    "scaffold": "SCAFFOLD",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "sgd": "SGD",
    "dane": "DANE",
    "feddyn": "FedDyn",
    "fednova": "FedNova",
    "mime": "Mime",
    "scaffnew": "Scaffnew",
    "scaffold-xi": "SCAFFOLD (xi)",
}
NOTHING = "-"
HUGE = 1e300  # as good as infinite: sums and squares of more are
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {">": "$>$", "<": "$<$", "±": r"$\pm$"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def named(algorithm: str) -> str:
    """How an algorithm is written in text.

    >>> named("fedavg"), named("mine")
    ('FedAvg', 'mine')
    """
    return NAMES.get(algorithm, algorithm)


def size(number: float) -> str:
    """A number of bytes in words.

    >>> size(640), size(1_234_000)
    ('640 B', '1.234 MB')
    """
    power = min(4, int(math.log10(number)) // 3) if number >= 1 else 0
    return f"{number / 1000**power:.4g} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def reached(columns: dict[str, NDArray[Any]], target: Target | None) -> int | None:
    """The first round whose metric meets the target: at least it for accuracy, at most it for all others.

    >>> import numpy as np
    >>> reached({"round": np.arange(1, 4), "loss": np.array([0.9, np.nan, 0.2])}, ("loss", 0.5))
    3
    """
    if target is None or target[0] not in columns:
        return None
    metric, goal = target
    there = met(metric, columns[metric], goal)
    return int(columns["round"][there.argmax()]) if there.any() else None


def rows(curves: Sequence[Curve], target: Target | None, rounds: int) -> list[Row]:
    """Return the table of some runs: one row for each algorithm, in order of appearance.

    Seeds that did not reach the target count as later than any that did. Without a target, the best values
    are those of the accuracy, or of the first metric there is. Losses and best values are means over seeds.

    >>> import numpy as np
    >>> loss = {"round": np.arange(1, 3), "loss": np.array([0.5, 0.25])}
    >>> run = Curve("sgd", 0, 0.1, loss, None, None, None, 0.0, 0.0, "")
    >>> [row] = rows([run], ("loss", 0.3), 2)
    >>> row["rounds_to_target"], row["reached"], row["seeds"], row["best_metric"]
    (2.0, 1, 1, 0.25)
    """
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.algorithm, []).append(curve)
    metric = target[0] if target else _leading(curves)
    return [_row(name, group, target, metric, rounds) for name, group in groups.items()]


def complete(study: Study) -> list[Row]:
    """A study's table, or one made of its runs; each row knows the metric, the target and the rounds."""
    longest = max((len(curve.columns["round"]) for curve in study.curves), default=0)
    made = rows(study.curves, study.target, longest)
    known = {key: made[0][key] for key in ("metric", "target", "rounds")} if made else {}
    return [known | row for row in study.rows or made]


def _row(algorithm: str, curves: list[Curve], target: Target | None, metric: str, rounds: int) -> Row:
    when = [reached(curve.columns, target) for curve in curves]
    hits = [at for at in when if at is not None]
    low, high = (min(hits), max(hits)) if len(hits) == len(when) else (None, None)
    paid = [None if at is None else _sent(c, at) for at, c in zip(when, curves, strict=True)]
    cost = _median(paid)
    best = [max(v) if rises(metric) else min(v) for v in (_finite(c, metric) for c in curves) if v]
    last = [v[-1] for v in (_finite(c, "loss") for c in curves if c.diverged_at is None) if v]
    residuals = [v for c in curves for v in (c.residual, *_finite(c, "residual")) if math.isfinite(v)]
    return {
        "algorithm": algorithm,
        "lr": curves[0].lr if len({c.lr for c in curves}) == 1 else None,
        "rounds_to_target": _median(when),
        "rounds_low": low,
        "rounds_high": high,
        "reached": len(hits),
        "seeds": len(curves),
        "bytes_to_target": None if cost is None else round(cost),
        "best_metric": statistics.fmean(best) if best else None,
        "best_spread": statistics.stdev(best) if len(best) > 1 else 0.0,
        "final_loss": statistics.fmean(last) if last else None,
        "residual": max(residuals, default=None),
        "diverged": sum(c.diverged_at is not None for c in curves),
        "metric": metric,
        "target": target[1] if target else None,
        "rounds": rounds,
    }


def _leading(curves: Sequence[Curve]) -> str:
    """The metric that tells most: accuracy, else the first that was measured, else the loss."""
    measured = dict.fromkeys(name for curve in curves for name in curve.columns)
    found = [name for name in measured if name not in ("round", "residual", "bytes_up", "bytes_down")]
    return "accuracy" if "accuracy" in found else found[0] if found else "loss"


def _median(values: Sequence[float | None]) -> float | None:
    """The median, where None is later than everything; None if it is None."""
    middle = statistics.median(math.inf if value is None else float(value) for value in values)
    return middle if math.isfinite(middle) else None


def _sent(curve: Curve, at: int) -> int | None:
    """Bytes sent both ways until the end of round `at`."""
    ways = [curve.columns[name] for name in ("bytes_up", "bytes_down") if name in curve.columns]
    until = curve.columns["round"] <= at
    return sum(int(way[until].sum()) for way in ways) if ways else None


def _finite(curve: Curve, name: str) -> list[float]:
    return [v for v in map(float, curve.columns.get(name, ())) if abs(v) < HUGE]


class Column(NamedTuple):
    """One column of the printed table."""

    heading: str
    """With places for {metric} and {goal}."""
    show: Callable[[Row], str]
    needs: str = "algorithm"
    """Only there when the rows know this."""


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
    return size(row["bytes_to_target"])


COLUMNS = (
    Column("algorithm", lambda row: named(row["algorithm"])),
    Column("lr", _number("lr")),
    Column("rounds to {goal}", _rounds, needs="target"),
    Column("seeds that reached it", lambda row: f"{row['reached']} of {row['seeds']}", needs="target"),
    Column("data sent until then", _data, needs="target"),
    Column("best {metric}", _best),
    Column("final loss", _number("final_loss")),
    Column("ends", lambda row: row.get("ends", NOTHING), needs="ends"),
    Column("residual", _number("residual", 2)),
    Column("diverged", lambda row: f"{row['diverged']} of {row['seeds']}"),
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The printed table: the headings, then one list of texts for each row.

    >>> cells([])[0][0]
    'algorithm'
    """
    first: Row = {"metric": "metric", "target": "target"} | (dict(rows[0]) if rows else {"target": None})
    known = {key for row in (first, *rows) for key, value in row.items() if value is not None} | {"algorithm"}
    columns = [c for c in COLUMNS if c.needs in known]
    metric = first["metric"].replace("_", " ")
    goal = f"{metric} {first['target']:g}" if isinstance(first["target"], float | int) else "target"
    headings = [c.heading.format(metric=metric, goal=goal) for c in columns]
    return [headings, *([c.show(row) for c in columns] for row in rows)]


def runs(study: Study) -> list[list[str]]:
    """Every single run, printed: the headings, then one list of texts for each."""
    lines = [["algorithm", "seed", "lr", "rounds", "reached at", "diverged at", "digest of the model"]]
    for run in study.curves:
        facts = [run.seed, run.lr, len(run.columns["round"]), run.reached_at, run.diverged_at]
        lines.append([named(run.algorithm), *(NOTHING if v is None else str(v) for v in facts), run.digest])
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown.

    >>> print(markdown([]).splitlines()[0])
    | algorithm | lr | best metric | final loss | residual | diverged |
    """
    escaped = [[re.sub(r"([\\|<*`])", r"\\\1", cell) for cell in line] for line in cells(rows)]
    rule = ["---", *["---:"] * (len(escaped[0]) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [escaped[0], rule, *escaped[1:]])


def csv(rows: Sequence[Row]) -> str:
    r"""The table for machines: a column for each key, numbers in full, nothing where a row has None.

    >>> csv([{"algorithm": "sgd", "lr": 0.1, "final_loss": None}])
    'algorithm,lr,final_loss\nsgd,0.1,\n'
    """
    text = io.StringIO()
    writer = DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def latex(rows: Sequence[Row]) -> str:
    r"""The table in LaTeX, for the booktabs package.

    >>> print(latex([]).splitlines()[2])
    algorithm & lr & best metric & final loss & residual & diverged \\
    """
    head, *body = (" & ".join("".join(LATEX.get(c, c) for c in cell) for cell in line) + r" \\" for line in cells(rows))
    layout = "l" + "r" * head.count(" & ")
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", ""])


def html(lines: Sequence[Sequence[str]], marks: Sequence[str]) -> str:
    """A printed table in HTML; the marks, HTML already, stand before the first cell of each row."""
    body = "".join(
        f"<tr><th>{mark}{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for mark, (first, *rest) in zip(marks, lines[1:], strict=True)
    )
    head = "".join(f"<th>{escape(cell)}</th>" for cell in lines[0])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def terminal(rows: Sequence[Row]) -> str:
    """The table as aligned plain text, long headings in two or three lines.

    >>> print(terminal([]))
    algorithm  lr  best metric  final loss  residual  diverged
    """
    heads, *body = cells(rows)
    widths = [max(11, *(len(line[i]) for line in body)) if body else 11 for i in range(len(heads))]
    wrapped = [textwrap.wrap(head, width) for head, width in zip(heads, widths, strict=True)]
    tall = max(map(len, wrapped))
    lines = [*map(list, zip(*([""] * (tall - len(head)) + head for head in wrapped), strict=True)), *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)

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
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import NamedTuple

import numpy as np

from fedscaffold.report import figures, tables
from fedscaffold.report.figures import Panel
from fedscaffold.report.study import Study
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
    """What came out, in one sentence.

    >>> row = {"algorithm": "scaffold", "rounds_to_target": 12.0, "seeds": 3, "reached": 3, "diverged": 0,
    ...        "metric": "accuracy", "target": 0.9, "rounds": 60}
    >>> verdict([row, row | {"algorithm": "fedavg", "rounds_to_target": None, "reached": 0}])
    'SCAFFOLD reached accuracy 0.9 after 12 rounds (median of 3 seeds); FedAvg did not within 60 rounds.'
    """
    if not table:
        return "This study holds no runs."
    if table[0]["target"] is None:
        return _best(table)
    goal = f"{table[0]['metric'].replace('_', ' ')} {table[0]['target']:g}"
    done = sorted(
        (r for r in table if r["rounds_to_target"] is not None), key=lambda r: r["rounds_to_target"]
    )
    late = [row for row in table if row["rounds_to_target"] is None]
    clauses = []
    if done:
        first, after = done[0], f"{done[0]['rounds_to_target']:g}"
        rounds = f"{after} round{'s' * (after != '1')} ({_over('median', table)})"
        others = "".join(f", {named(r['algorithm'])} after {r['rounds_to_target']:g}" for r in done[1:])
        clauses = [f"{named(first['algorithm'])} reached {goal} after {rounds}{others}"]
    gone = [row for row in late if row["diverged"] == row["seeds"]]
    if slow := [row for row in late if row not in gone and not row["reached"]]:
        clauses += [
            f"{_names(slow)} did not{'' if done else f' reach {goal}'} within {slow[0]['rounds']} rounds"
        ]
    for row in late:
        if row["reached"]:
            clauses += [
                f"{named(row['algorithm'])} reached {goal} in {row['reached']} of {row['seeds']} seeds only"
            ]
    return "; ".join(clauses + ([f"{_names(gone)} diverged"] if gone else [])) + "."


def _best(table: Sequence[Row]) -> str:
    metric = table[0]["metric"]
    known = sorted((r for r in table if r["best_metric"] is not None), key=lambda r: r["best_metric"])
    order = known[::-1] if metric == "accuracy" else known
    best = ", ".join(f"{named(row['algorithm'])} {row['best_metric']:.4g}" for row in order)
    return (
        f"Best {metric.replace('_', ' ')}: {best} ({_over('mean', table)})."
        if best
        else "Nothing was measured."
    )


def _over(what: str, table: Sequence[Row]) -> str:
    seeds = max(row["seeds"] for row in table)
    return "one seed" if seeds == 1 else f"{what} of {seeds} seeds"


def _names(some: Sequence[Row]) -> str:
    *most, last = [named(row["algorithm"]) for row in some]
    return f"{', '.join(most)} and {last}" if most else last


def _complete(study: Study) -> list[Row]:
    """The study's table, with what a reader of the table alone has to know: metric, target, rounds."""
    longest = max((len(curve.columns["round"]) for curve in study.curves), default=0)
    made = tables.rows(study.curves, study.target, longest)
    known = {key: made[0][key] for key in ("metric", "target", "rounds")} if made else {}
    return [known | row for row in study.rows or made]


class Gauge(NamedTuple):
    """The health of one algorithm's control variates."""

    algorithm: str
    state: str
    """"healthy", "broken", "none" (there are no control variates) or "unknown" (all runs diverged)."""
    relative: float
    """The largest |c - sum p_i c_i| of all rounds and seeds, relative to the size of the c_i."""
    limit: float
    """What rounding explains."""


def gauges(study: Study) -> list[Gauge]:
    """Judge c = sum p_i c_i for every algorithm: rounding explains 1000 eps sqrt(rounds), anything above is a fault."""
    eps = float(np.finfo(study.precision).eps)
    found = []
    for name in figures.looks(study):
        runs = [curve for curve in study.curves if curve.algorithm == name]
        limit = 1e3 * eps * math.sqrt(max(1, *(len(run.columns["round"]) for run in runs), 1))
        known = [run for run in runs if math.isfinite(run.residual) and math.isfinite(run.scale)]
        worst = 0.0
        for run in known:
            by_round = run.columns.get("residual", np.zeros(1))
            largest = max(run.residual, float(by_round[np.isfinite(by_round)].max(initial=0)))
            worst = max(worst, largest / run.scale if run.scale > 0 else math.inf if largest > 0 else 0.0)
        none = known and all(run.scale == 0 for run in known) and worst == 0
        state = "none" if none else "unknown" if not known else "healthy" if worst < limit else "broken"
        found.append(Gauge(name, state, worst, limit))
    return found


def _diverged(study: Study) -> str:
    told = [
        f"{named(run.algorithm)}, seed {run.seed}: {run.advice or f'diverged at round {run.diverged_at}'}"
        for run in study.curves
        if run.diverged_at is not None
    ]
    several = f"{len(told)} of {len(study.curves)} runs diverged"
    return f'<div class="box broken"><b>{several}</b>{_list(told)}</div>' if told else ""


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _grid(lines: Sequence[Sequence[str]], first: Sequence[str] = ()) -> str:
    """An HTML table; `first` holds what stands before the first cell of each row, as HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in lines[0])
    marks = [*first, *[""] * len(lines)]
    body = "".join(
        f"<tr><th>{mark}{escape(line[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in line[1:])}</tr>"
        for mark, line in zip(marks, lines[1:], strict=False)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(heading: str, *content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(content)}</section>" if any(content) else ""


def _figure(panel: Panel, panels: list[Panel]) -> str:
    """A place to draw in; the figure itself goes to the list."""
    panels.append(panel)
    place = f'class="plot" data-figure="{len(panels) - 1}" style="height:{panel.height}px"'
    heading = escape(panel.heading)
    return f'<figure><figcaption>{heading}</figcaption><div {place} role="img" aria-label="{heading}"></div></figure>'


def _table(study: Study, table: list[Row]) -> str:
    looks = figures.looks(study)
    marks = [_mark(looks[row["algorithm"]]) if row["algorithm"] in looks else "" for row in table]
    return _section("Table", _grid(tables.cells(table), marks)) if table else ""


def _mark(look: figures.Look) -> str:
    return f'<i style="color:{look.colour}">{look.glyph}</i> '


def _curves(study: Study, panels: list[Panel]) -> str:
    looks = figures.looks(study)
    buttons = "".join(
        f'<button data-name="{escape(name)}" aria-pressed="true">{_mark(look)}{escape(named(name))}</button>'
        for name, look in looks.items()
    )
    seeds = max((sum(run.algorithm == name for run in study.curves) for name in looks), default=0)
    note = "<p>Line: median of the seeds; band: from the lowest to the highest.</p>" if seeds > 1 else ""
    made = [
        _section(heading, note, f'<div class="panels">{"".join(_figure(one, panels) for one in drawn)}</div>')
        for heading, against in (("By round", "rounds"), ("By data sent", "bytes"))
        if (drawn := figures.curves(study, against=against))
    ]
    return f"<div><nav>{buttons}</nav>{''.join(made)}</div>" if made else ""


def _split(study: Study, panels: list[Panel]) -> str:
    counts = study.label_counts
    if counts is None or counts.size == 0:
        return ""
    clients, labels = counts.shape
    words = f"{clients} clients hold {int(counts.sum())} records" + (
        f" of {labels} labels." if labels > 1 else "."
    )
    if clients > figures.CLIENTS:
        words += f" {figures.CLIENTS} clients are shown, evenly chosen."
    top = float((counts / np.maximum(1, counts.sum(1, keepdims=True))).max())
    ramp = f'<p>Share of the client\'s records: 0 <span class="ramp"></span> {top:.0%}. Blank: none.</p>'
    figure = _figure(figures.split(counts), panels)
    return _section("Who holds what", f"<p>{words}</p>", ramp if labels > 1 else "", figure)


def _health(study: Study, panels: list[Panel]) -> str:
    found = gauges(study)
    boxes = [f'<div class="box {g.state}">{_gauge_words(g, study.precision)}</div>' for g in found]
    if not found:
        return ""
    kept = [run for run in study.curves if "residual" in run.columns and 0 < run.scale < math.inf]
    relative = [
        run._replace(columns=run.columns | {"residual": run.columns["residual"] / run.scale}) for run in kept
    ]
    limit = max(gauge.limit for gauge in found)
    panel = figures.panel(
        study._replace(curves=relative),
        "residual",
        HEALTH_AXIS,
        goal=limit,
        goal_text="explained by rounding",
    )
    return _section("Health of the control variates", HEALTH, *boxes, _figure(panel, panels) if panel else "")


def _gauge_words(gauge: Gauge, precision: str) -> str:
    name, seen = escape(named(gauge.algorithm)), f"{gauge.relative:.2g}"
    return {
        "none": f"<b>{name}</b> keeps no control variates: nothing to gauge.",
        "unknown": f"<b>{name}</b> diverged: its control variates are not finite, so there is nothing to judge.",
        "healthy": f"<b>✔ {name}: healthy.</b> The largest mismatch is {seen} of the control variates' size; "
        f"rounding in {escape(precision)} explains up to {gauge.limit:.2g}.",
        "broken": f"<b>✘ {name}: broken.</b> The largest mismatch is {seen} of the control variates' size, and "
        f"rounding in {escape(precision)} explains only {gauge.limit:.2g}. Client state was lost, repeated or "
        "computed wrong somewhere; the curves end at a biased model.",
    }[gauge.state]


def _origin(study: Study) -> str:
    runs = [["algorithm", "seed", "lr", "rounds", "reached at", "diverged at", "digest of the model"]]
    for run in study.curves:
        ends = ["-" if at is None else str(at) for at in (run.reached_at, run.diverged_at)]
        lr = "-" if run.lr is None else f"{run.lr:g}"
        runs.append(
            [named(run.algorithm), str(run.seed), lr, str(len(run.columns["round"])), *ends, run.digest]
        )
    seconds = [f"{name} {value:.3g} s" for name, value in study.seconds.items()]
    versions = [f"{name} {version}" for name, version in study.versions.items()]
    return _section(
        "Where this came from",
        f"<pre>{escape(study.command)}</pre>",
        f"<p>{escape(', '.join(seconds))}</p>" if seconds else "",
        f"<p>{escape(', '.join(versions))}; {escape(study.precision)}</p>",
        f"<details><summary>Runs and digests (equal digests, equal models)</summary>{_grid(runs)}</details>",
        f"<details><summary>Resolved configuration</summary><pre>{escape(study.config)}</pre></details>",
    )


@functools.cache
def _plotly() -> str:
    """Plotly's script, packed: 2 MB instead of 5."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a page needs plotly: pip install 'fedscaffold[report]'") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


HEALTH_AXIS = "|c - sum p_i c_i|, relative to the size of the c_i"
HEALTH = """<p>The server's control variate must be the mean of the clients': c = sum p<sub>i</sub> c<sub>i</sub>.
A mismatch never heals by itself: training then ends where grad f(x) = -(c - sum p<sub>i</sub> c<sub>i</sub>), beside
the optimum, without any other sign.</p>"""

PAGE = """<!DOCTYPE html>
<html lang="en-GB"><head><meta charset="utf-8"><title>$title</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>$style</style></head><body>
<main><h1>$title</h1><p>$problem</p><p class="verdict">$verdict</p>$diverged$parts
<noscript><div class="box broken">The figures need JavaScript; everything else is here.</div></noscript></main>
<script type="application/json" id="figures">$figures</script>
<script type="application/gzip" id="plotly">$plotly</script>
<script>$script</script></body></html>
"""

STYLE = """
:root { --ink: #1c1e21; --soft: #5b6168; --line: #dfe2e6; --page: #fff; --tint: #f4f6f8; --good: #1a7f45; --bad: #c0281c }
@media screen and (prefers-color-scheme: dark) { :root:not(.paper) { --ink: #e8eaed; --soft: #a2a9b1; --line: #363b41;
  --page: #15171a; --tint: #1f2226; --good: #4cc281; --bad: #ff7b6b } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 1120px; margin: auto; padding: 24px 20px 60px; overflow-wrap: break-word }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 } h2 { font-size: 1.25rem; margin: 40px 0 8px }
p { margin: 8px 0; max-width: 75ch } .verdict { font-size: 1.2rem; margin: 16px 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid var(--line) } td { white-space: nowrap }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; max-width: 9em } tbody th { font-weight: 600 }
th:first-child { text-align: left; padding-left: 0 } i { font-style: normal }
nav { position: sticky; top: 0; z-index: 5; background: var(--page); padding: 8px 0; margin-top: 32px;
  display: flex; flex-wrap: wrap; gap: 6px }
nav + section h2 { margin-top: 8px }
button { font: inherit; font-size: .95rem; color: inherit; background: var(--tint); border: 1px solid var(--line);
  border-radius: 16px; padding: 3px 12px; cursor: pointer } button[aria-pressed=false] { opacity: .45 }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 8px 24px }
figure { margin: 12px 0 0; min-width: 0 } figcaption { font-weight: 600; font-size: .95rem }
.box { border-left: 4px solid var(--line); background: var(--tint); padding: 8px 14px; margin: 10px 0; border-radius: 4px }
.healthy { border-color: var(--good) } .healthy b { color: var(--good) }
.broken { border-color: var(--bad) } .broken b { color: var(--bad) }
.ramp { display: inline-block; width: 90px; height: .8em; background: linear-gradient(90deg, RAMP) }
pre { background: var(--tint); padding: 10px 14px; border-radius: 4px; white-space: pre-wrap; font-size: .9rem }
ul { margin: 4px 0; padding-left: 20px } summary { cursor: pointer; margin: 8px 0 }
@media print { nav { display: none } .panels { display: block } figure, .box { break-inside: avoid } }
""".replace("RAMP", ", ".join(figures.RAMP))

SCRIPT = """
(async () => {
  const drawn = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll(".plot")];
  if (!places.length) return;
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(unpacked).text();
  document.head.append(plotly);
  const touch = matchMedia("(pointer: coarse)").matches, root = document.documentElement;
  const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"], toImageButtonOptions: { format: "svg" } };
  const draw = extra => places.forEach(place => {
    const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
    const { data, layout } = structuredClone(drawn[place.dataset.figure]);
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--soft") };
    ["xaxis", "xaxis2", "yaxis"].forEach(name => layout[name] && Object.assign(layout[name], axis));
    (layout.shapes || []).forEach(shape => { shape.line.color = colour("--ink"); });
    data.forEach(trace => { if (trace.type === "heatmap") trace.textfont = { color: colour("--ink") }; });
    Object.assign(layout.font, { color: colour("--ink"), family: "system-ui, sans-serif" });
    Object.assign(layout, { paper_bgcolor: "transparent", plot_bgcolor: "transparent" }, extra);
    layout.hoverlabel = { bgcolor: colour("--page"), font: { color: colour("--ink") } };
    if (touch) layout.dragmode = false;  // a finger scrolls the page
    Plotly.react(place, data, layout, config);
  });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => { root.classList.add("paper"); draw({ width: 640 }); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); draw({ autosize: true }); });
  document.querySelectorAll("nav button").forEach(button => button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    drawn.flatMap(one => one.data).forEach(trace => {
      if (trace.legendgroup === button.dataset.name) trace.visible = shown;
    });
    draw();
  }));
})().catch(error => document.querySelectorAll(".plot").forEach(place => {
  place.textContent = "This browser cannot draw the figure: " + error.message;
}));
"""

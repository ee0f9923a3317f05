"""The page of a study: one HTML file that opens offline, on a laptop, a phone or paper, light or dark.

Everything is inside, Plotly too (packed: the browser unpacks it), and the page's own security policy forbids
the browser to ask the network for anything.
"""

from __future__ import annotations

import base64
import functools
import gzip
import itertools
import json
import math
from html import escape
from string import Template
from typing import NamedTuple

import numpy as np

from fedscaffold.report import figures, tables
from fedscaffold.report.study import Curve, Study
from fedscaffold.report.tables import Row, named

__all__ = ["Gauge", "gauges", "page", "verdict"]


def page(study: Study) -> str:
    """Return the page of a study, as the text of one HTML file.

    >>> text = page(Study("A title", "A problem.", None, [], [], None, "float32", "", "demo", {}, {}))
    >>> text[:15], "A title" in text, "This study holds no runs." in text
    ('<!DOCTYPE html>', True, True)
    """
    table = tables.complete(study)
    panels: list[figures.Panel] = []
    parts = [_table(study, table), _curves(study, panels), _split(study, panels)]
    parts += [_health(study, panels), _diverged(study), _origin(study)] if study.curves else []
    drawn = json.dumps([panel.figure for panel in panels], separators=(",", ":"), allow_nan=False)
    return Template(PAGE).substitute(
        style=STYLE,
        script=SCRIPT,
        title=escape(study.title),
        problem=escape(study.problem),
        verdict=escape(verdict(table) if study.curves or study.label_counts is None else ""),
        parts="".join(parts),
        figures=drawn.replace("<", "\\u003c"),  # no text inside may end the script element
        plotly=_plotly() if panels else "",
    )


def verdict(table: list[Row]) -> str:
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
    text = f"{named(order[0]['algorithm'])} {_how(order[0], f'{metric} {target:g}')}"
    for how, rows in itertools.groupby(order[1:], lambda row: _how(row, "")):
        names = " and ".join(named(row["algorithm"]) for row in rows)
        text += f"{', ' if how.startswith('after') else '; '}{names} {how}"
    return text + "."


def _how(row: Row, goal: str) -> str:
    """How an algorithm did; the goal is named for the first only."""
    at, seeds = row["rounds_to_target"], row["seeds"]
    if at is not None:
        over = "one seed" if seeds == 1 else f"median of {seeds} seeds"
        return f"reached {goal} after {at:.10g} round{'s' * (at != 1)} ({over})" if goal else f"after {at:.10g}"
    if row["diverged"] == seeds:
        return "diverged"
    if row["reached"]:
        return f"reached {goal or 'it'} in {row['reached']} of {seeds} seeds only"
    return f"did not {goal and f'reach {goal} '}within {row['rounds']} rounds"


class Gauge(NamedTuple):
    """The health of an algorithm's control variates, over its seeds."""

    algorithm: str
    state: str  # "healthy", "broken", "none" (there are no control variates), "unknown" (not finite)
    relative: float  # the largest |c - sum p_i c_i| of all rounds and seeds, in units of what rounding explains


def gauges(study: Study) -> list[Gauge]:
    """Judge c = sum p_i c_i: more than rounding explains is a fault."""
    found = []
    for name in figures.looks(study):
        runs = [curve for curve in study.curves if curve.algorithm == name]
        worst = max((r for r in map(_relative, runs) if not math.isnan(r)), default=math.nan)
        state = "unknown" if math.isnan(worst) else "healthy" if worst <= 1 else "broken"
        none = worst == 0 and all(run.explained == 0 for run in runs)
        found.append(Gauge(name, "none" if none else state, worst))
    return found


def _relative(run: Curve) -> float:
    """A run's largest mismatch in units of what rounding explains; NaN where its c_i are not finite."""
    seen = [run.residual, *run.columns.get("residual", np.zeros(0)).tolist()]
    largest = max((r for r in seen if math.isfinite(r)), default=math.nan)
    if run.explained == 0:
        return math.inf if largest > 0 else 0.0
    return largest / run.explained if math.isfinite(run.explained) else math.nan


def _diverged(study: Study) -> str:
    told = "".join(
        f"<li>{escape(named(run.algorithm))}, seed {run.seed}: {escape(run.advice or f'at {run.diverged_at}')}</li>"
        for run in study.curves
        if run.diverged_at is not None
    )
    some = f"{told.count('<li>')} of {len(study.curves)} runs diverged"
    return _section(some, f'<div class="box broken"><ul>{told}</ul></div>') if told else ""


def _section(heading: str, *content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(content)}</section>"


def _figure(panel: figures.Panel, panels: list[figures.Panel]) -> str:
    """A place to draw in; the figure itself joins the list."""
    panels.append(panel)
    place = f'class="plot" data-figure="{len(panels) - 1}" style="height:{panel.height}px" role="img"'
    words = escape(panel.heading)
    return f'<figure><figcaption>{words}</figcaption><div {place} aria-label="{words}"></div></figure>'


def _table(study: Study, table: list[Row]) -> str:
    looks = figures.looks(study)
    marks = [looks[row["algorithm"]].mark if row["algorithm"] in looks else "" for row in table]
    return _section("Results", tables.html(tables.cells(table), marks)) if table else ""


def _curves(study: Study, panels: list[figures.Panel]) -> str:
    buttons = "".join(
        f'<button data-name="{escape(name)}" aria-pressed="true">{look.mark}{escape(named(name))}</button>'
        for name, look in figures.looks(study).items()
    )
    several = len({curve.seed for curve in study.curves}) > 1
    note = "<p>Line: median of the seeds. Band: from the lowest to the highest.</p>" if several else ""
    sections = [
        _section(heading, note, '<div class="panels">', *(_figure(one, panels) for one in drawn), "</div>")
        for heading, against in (("By round", "rounds"), ("By data sent", "bytes"))
        if (drawn := figures.curves(study, against=against))
    ]
    return f"<div><nav>{buttons}</nav>{''.join(sections)}</div>" if sections else ""


def _split(study: Study, panels: list[figures.Panel]) -> str:
    counts = study.label_counts
    if counts is None or counts.size == 0:
        return ""
    top = float((counts / np.maximum(1, counts.sum(1, keepdims=True))).max())
    ramp = f'<p>Share of the client\'s records: 0 <span class="ramp"></span> {top:.0%}; blank: none.</p>'
    return _section("Who holds what", ramp * (counts.shape[1] > 1), _figure(figures.split(counts), panels))


def _health(study: Study, panels: list[figures.Panel]) -> str:
    found = gauges(study)
    boxes = [f'<div class="box {one.state}">{_judgement(one)}</div>' for one in found if one.state != "none"]
    without = ", ".join(named(one.algorithm) for one in found if one.state == "none")
    rest = f"<p>Without control variates, so nothing to gauge: {escape(without)}.</p>" if without else ""
    kept = [run for run in study.curves if "residual" in run.columns and 0 < run.explained < math.inf]
    sizes = [run.columns | {"residual": run.columns["residual"].astype(float) / run.explained} for run in kept]
    ratios = [run._replace(columns=columns) for run, columns in zip(kept, sizes, strict=True)]
    panel = figures.panel(study, ratios, "residual", (RATIO, "explained by rounding"), 1.0, "rounds")
    figure = _figure(panel, panels) if panel else ""
    return _section("Health of the control variates", HEALTH, *boxes, rest, figure)


def _judgement(gauge: Gauge) -> str:
    name = escape(named(gauge.algorithm))
    times = f"{gauge.relative:.2g}" if math.isfinite(gauge.relative) else "infinitely many"
    seen = f"The largest mismatch is {times} times what rounding explains."
    return {
        "unknown": f"<b>{name}: not judged.</b> Its control variates are not finite: the runs diverged.",
        "healthy": f"<b>✔ {name}: healthy.</b> {seen}",
        "broken": f"<b>✘ {name}: broken.</b> {seen} Client state was lost, repeated or "
        "computed wrong, and these curves end at a biased model.",
    }[gauge.state]


def _origin(study: Study) -> str:
    table = tables.html(tables.runs(study), [figures.looks(study)[run.algorithm].mark for run in study.curves])
    command = " ".join(f"<span>{escape(word)}</span>" for word in study.command.split(" "))  # no break at hyphens
    took = ", ".join(f"{name} {value:.3g}" for name, value in study.seconds.items())
    made = ", ".join(f"{name} {version}" for name, version in study.versions.items())
    return _section(
        "Where this came from",
        f"<pre>{command}</pre><p>Seconds: {escape(took or 'unknown')}.<br>",
        f"Made with {escape(made or 'unknown versions')}; {escape(study.precision)}.</p>",
        f"<details><summary>Runs (equal digests, equal models)</summary>{table}</details>",
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


RATIO = "|c - sum p_i c_i|, in units of what rounding explains"
HEALTH = """<p>The server's control variate must be the mean of the clients', c = sum p_i c_i. A mismatch never heals:
training then ends where grad f(x) = -(c - sum p_i c_i), beside the optimum, without any other sign.</p>"""

PAGE = """<!DOCTYPE html><html lang="en-GB"><head><meta charset="utf-8"><title>$title</title>
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>$style</style></head>
<body><h1>$title</h1><p>$problem</p><p class="verdict">$verdict</p>$parts
<noscript><p class="box broken">The figures need JavaScript; all else is here.</p></noscript>
<script type="application/json" id="figures">$figures</script>
<script type="application/gzip" id="plotly">$plotly</script><script>$script</script></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6168; --line: #dfe2e6; --page: #fff; --tint: #f4f6f8;
  --good: #1a7f45; --bad: #c0281c }
@media screen and (prefers-color-scheme: dark) { :root:not(.paper) { --ink: #e8eaed; --soft: #a2a9b1; --line: #363b41;
  --page: #15171a; --tint: #1f2226; --good: #4cc281; --bad: #ff7b6b } }
body { max-width: 1120px; margin: auto; padding: 24px 20px 60px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 } h2 { font-size: 1.25rem; margin: 40px 0 8px }
h1, p, li { overflow-wrap: anywhere } p { margin: 12px 0; max-width: 75ch } .verdict { font-size: 1.2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; white-space: normal; text-wrap: balance }
th:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--page) }
i { font-style: normal } summary { margin: 8px 0 } pre { white-space: pre-wrap } pre span { white-space: nowrap }
nav { position: sticky; top: 0; z-index: 5; background: var(--page); padding: 8px 0; margin-top: 32px }
button { font: inherit; color: inherit; background: var(--tint); border: 1px solid var(--line); cursor: pointer;
  border-radius: 16px; padding: 3px 12px; margin: 2px 6px 2px 0 } [aria-pressed=false] { opacity: .45 }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 24px }
figure { margin: 12px 0 0; min-width: 0 } figcaption { font-weight: 600 } nav + section h2 { margin-top: 8px }
.box, pre { background: var(--tint); padding: 8px 14px; border-radius: 4px; max-width: none; overflow-x: auto }
.box { border-left: 4px solid var(--state); margin: 10px 0 } .box b { color: var(--state) }
.healthy { --state: var(--good) } .broken { --state: var(--bad) } .unknown { --state: var(--soft) }
.ramp { display: inline-block; width: 90px; height: .8em; background: linear-gradient(90deg, RAMP) }
@media print { nav { display: none } .panels { grid-template-columns: 1fr 1fr } figure, tr { break-inside: avoid }
  h2, p { break-after: avoid } th, td { padding: 4px 6px; font-size: .8rem } }
""".replace("RAMP", ", ".join(figures.RAMP))

SCRIPT = """
(async () => {
  const text = id => document.getElementById(id).textContent, root = document.documentElement;
  const drawn = JSON.parse(text("figures")), places = [...document.querySelectorAll(".plot")];
  const packed = new Blob([Uint8Array.from(atob(text("plotly")), c => c.charCodeAt(0))]);
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(plotly);
  const touch = matchMedia("(hover: none), (pointer: coarse)").matches;  // a finger scrolls the page instead
  const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"], toImageButtonOptions: { format: "svg" } };
  const draw = paper => places.forEach(place => {
    const { data, layout } = structuredClone(drawn[place.dataset.figure]), css = getComputedStyle(root);
    const [ink, line, page] = ["--ink", "--line", "--page"].map(name => css.getPropertyValue(name).trim());
    for (const axis of [layout.xaxis, layout.xaxis2, layout.yaxis])
      if (axis) Object.assign(axis, { gridcolor: line, zerolinecolor: line, linecolor: line });
    for (const shape of layout.shapes || []) shape.line.color = ink;
    for (const trace of data) if (trace.type === "heatmap") trace.textfont = { color: ink };
    Object.assign(layout.font, { color: ink, family: "system-ui, sans-serif" });
    Plotly.react(place, data, { ...layout, paper_bgcolor: page, plot_bgcolor: page, dragmode: !touch && "zoom",
      hoverlabel: { bgcolor: page, font: { color: ink } }, autosize: !paper,
      width: paper ? (place.closest(".panels") ? 330 : 660) : undefined }, config);
  });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => { root.classList.add("paper"); draw(true); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); draw(); });
  for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true"; button.setAttribute("aria-pressed", shown);
    for (const one of drawn) for (const trace of one.data)
      if (trace.legendgroup === button.dataset.name) trace.visible = shown;
    draw();
  });
})().catch(error => { for (const place of document.querySelectorAll(".plot"))
  place.textContent = "This browser cannot draw the figure: " + error.message; });
"""

"""The reviewer's page: verdicts, then each claim with figure, numbers, criteria and errata.

One HTML file that opens offline; its own security policy forbids the browser to ask the network for
anything.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from papers.claim import Check, Outcome, Table

__all__ = ["page", "shown", "terminal"]

SIGNS = {"reproduced": ("✔", "good"), "partly": ("◐", "some"), "not": ("✘", "bad")}
TEXTS = {
    "000": "Mangold and Moulines, A Sharper Analysis of Scaffold on Quadratics",
    "001": "Tutorial 018: SCAFFOLD Algorithm (PyTorch)",
    "002": "Mangold, Durmus, Dieuleveut and Moulines, Scaffold with Stochastic Gradients (2025)",
    "003": "Mangold, slides on FedAvg's bias, Richardson-Romberg and Scaffold (2025)",
    "004": "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning "
    "(2020)",
}
MARKS = {
    "pass": ("✔", "good"),
    "fail": ("✘", "bad"),
    "not decided": ("–", "soft"),
    "shown": ("·", "soft"),
}


def shown(value: Any) -> str:
    """A number or a text as it is printed.

    >>> shown(0.12341), shown(12345.0), shown(1.5e-9), shown(None), shown(10_000), shown("yes")
    ('0.1234', '12,345', '1.5e-09', '-', '10,000', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "not reached" if value > 0 else str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:.4g}"


def page(outcomes: Sequence[Outcome], figures: Mapping[str, str], facts: Mapping[str, str]) -> str:
    """The page of some outcomes.

    `figures` has the SVG text by name, `facts` what to say about the run.
    """
    told = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()
    )
    counts = {word: sum(o.verdict == word for o in outcomes) for word in SIGNS}
    failed = sum(o.failed for o in outcomes)
    summary = ", ".join(f"{number} {word}" for word, number in counts.items())
    words = f"{summary}. " + (f"{failed} criteria failed." if failed else "No criterion failed.")
    return Template(PAGE).substitute(
        style=STYLE,
        verdict=escape(words),
        summary=_summary(outcomes),
        claims="".join(_claim(o, figures) for o in outcomes),
        texts="".join(f"<dt>{tag}</dt><dd>{escape(text)}</dd>" for tag, text in TEXTS.items()),
        facts=told,
    )


def _summary(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f'<tr><td><a href="#{o.name}">{o.name}</a></td><td>{escape(o.source)}</td>'
        f"<td>{escape(o.title)}</td><td>{_sign(*SIGNS[o.verdict])} {o.verdict}</td>"
        f"<td>{escape(o.words)}</td><td>{o.size}</td><td>{o.seconds:.0f} s</td></tr>"
        for o in outcomes
    )
    head = "".join(
        f"<th>{h}</th>" for h in ("name", "source", "claim", "verdict", "why", "size", "time")
    )
    return (
        f'<div class="wide"><table class="words all"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _sign(sign: str, look: str) -> str:
    return f'<i class="{look}">{sign}</i>'


def _claim(o: Outcome, figures: Mapping[str, str]) -> str:
    drawn = "".join(
        f'<figure><img alt="{escape(caption)}" style="width:{_width(figures[name]):.0f}px" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(figures[name].encode()).decode()}"><figcaption>{escape(caption)}</figcaption></figure>'
        for name, caption in o.figures
    )
    wrong = "".join(f"<li>{escape(text)}</li>" for text in o.errata)
    errata = (
        f'<div class="box"><b>Where the paper is wrong, or silent</b><ul>{wrong}</ul></div>'
        if wrong
        else ""
    )
    about = "".join(f'<p class="about">{escape(text)}</p>' for text in o.about)
    settings = escape(", ".join(f"{key} = {value}" for key, value in o.settings.items()))
    command = f"python -m papers {o.name} --{o.size}"
    measured = f"{_checks(o.checks)}{''.join(map(_table, o.tables))}"
    return (
        f'<section id="{o.name}"><h2>{_sign(*SIGNS[o.verdict])} {escape(o.title)} '
        f"<small>{o.name}</small></h2><p><b>{escape(o.source)}:</b> {escape(o.says)}</p>"
        f'<p class="verdict {SIGNS[o.verdict][1]}">{o.verdict}: {escape(o.words)}.</p>'
        f"{about}{o.film}{drawn}{measured}{errata}<details><summary>Settings, command, "
        f"time</summary><pre>{command}\n{settings}\n{o.seconds:.1f} "
        "s</pre></details></section>"
    )


def _width(svg: str) -> float:
    """How wide a figure is shown, in pixels: half as wide again as it is in print."""
    found = re.search(r'<svg[^>]* width="([0-9.]+)pt"', svg)
    return 1.5 * float(found.group(1)) if found else 900.0


def _checks(checks: Sequence[Check]) -> str:
    rows = "".join(
        f"<tr><td>{_sign(*MARKS[c.mark])} {c.mark}</td><td>{escape(c.statement)}{_note(c)}</td>"
        f"<td>{escape(shown(c.expected))}{' (published)' * (c.source == 'published')}</td>"
        f"<td>{escape(shown(c.measured))}</td>"
        f"<td>{shown(c.ratio)}</td><td>{escape(c.criterion)}</td></tr>"
        for c in checks
    )
    head = "".join(
        f"<th>{h}</th>" for h in ("", "check", "expected", "measured", "ratio", "criterion")
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="wide"><table class="words">{table}</table></div>'


def _note(check: Check) -> str:
    kind = {"paper": "the paper's words; ", "report": "", "criterion": ""}[check.kind]
    text = (kind + check.note).removesuffix("; ")
    return f"<br><small>{escape(text)}</small>" if text else ""


def _words(table: Table) -> list[bool]:
    """Whether a column has words, which are aligned on the left, or numbers.

    >>> _words(Table("", ["a", "b", "c"], [["1 label", "FedAvg", 0.1], ["2", "-", "0.1 ± 0.2"]]))
    [True, True, False]
    """
    rest = range(1, len(table.head))
    return [True] + [
        any(isinstance(row[i], str) and row[i][:1].isalpha() for row in table.rows) for i in rest
    ]


def _table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=word' * word}>{escape(cell)}</{tag}>"
            for cell, word in zip(cells, _words(table), strict=True)
        )

    head = line("th", table.head)
    rows = "".join(f"<tr>{line('td', [shown(v) for v in row])}</tr>" for row in table.rows)
    note = f"<p><small>{escape(table.note)}</small></p>" if table.note else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h3>{escape(table.title)}</h3><div class="wide">{body}</div>{note}'


def terminal(o: Outcome) -> list[str]:
    """An outcome as lines of text: the verdict, every check, and the tables."""
    lines = [f"{o.name} ({o.source}): {o.verdict}. {o.words}"]
    lines += [f"  {text}" for text in o.about]
    for c in o.checks:
        ratio = "" if c.ratio is None else f", ratio {shown(c.ratio)}"
        lines.append(
            f"  {c.mark:11} {c.statement}: {c.source} {shown(c.expected)}, measured "
            f"{shown(c.measured)}{ratio} "
            f"({c.criterion})"
        )
    for table in o.tables:
        cells = [table.head, *([shown(v) for v in row] for row in table.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(table.head))]
        lines += ["", f"  {table.title}"]
        lines += [
            "  "
            + "  ".join(
                cell.ljust(width) if word else cell.rjust(width)
                for cell, width, word in zip(row, widths, _words(table), strict=True)
            ).rstrip()
            for row in cells
        ]
    return [*lines, *(f"  erratum: {text}" for text in o.errata)]


PAGE = """<!DOCTYPE html><html lang="en-GB"><head><meta charset="utf-8"><title>Reproduction</title>
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>$style</style></head>
<body><h1>The papers' figures and tables, run again</h1><p class="verdict">$verdict</p>
<p>A claim is <b>reproduced</b> if every check that could be decided passes, <b>partly</b> if at
least half do, <b>not</b> otherwise. A check is a criterion of ours, or the paper's own words taken
literally; what a size cannot decide is marked so and counts for nothing. Numbers stand beside the
published ones, which are marked, or where the paper prints none beside what its statement or theory
gives. F-numbers name formulas in the docstrings of <code>fedscaffold.theory</code>; 000 to 004 are
the <a href="#texts">texts</a>.</p> $summary$claims<section id="texts"><h2>The
texts</h2><dl>$texts</dl></section> <section><h2>How this was
made</h2><dl>$facts</dl></section></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6168; --line: #dfe2e6; --page: #fff;
--tint: #f4f6f8;
  --good: #1a7f45; --bad: #c0281c; --some: #9a6a00 }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a2a9b1; --line:
#363b41;
  --page: #15171a; --tint: #1f2226; --good: #4cc281; --bad: #ff7b6b; --some: #e0b040 } }
body { max-width: 1120px; margin: auto; padding: 24px 20px 60px; background: var(--page); color:
var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.25rem; margin: 48px 0 8px }
h3 { font-size: 1rem; margin: 18px 0 4px }
h2 small { color: var(--soft); font-weight: 400 }
p { max-width: 80ch; overflow-wrap: anywhere } small { color: var(--soft) }
.verdict { font-size: 1.1rem } i { font-style: normal; font-weight: 700 }
.good { color: var(--good) } .bad { color: var(--bad) } .some { color: var(--some) } .soft { color:
var(--soft) } .wide { overflow-x: auto } table { border-collapse: collapse; font-size: .92rem;
font-variant-numeric: tabular-nums } th, td { padding: 5px 10px; text-align: right; border-bottom:
1px solid var(--line); vertical-align: top } thead th { color: var(--soft); font-weight: 500;
vertical-align: bottom } .word, .words th, .words td {
text-align: left } .words td:first-child, .all td:nth-child(4) { white-space: nowrap } .words
td:nth-child(4) { min-width: 7em } .panels { display: grid; grid-template-columns: repeat(auto-fit,
minmax(min(100%, 320px), 1fr)); gap: 0 24px;
  max-width: 900px }
figure { margin: 14px 0; break-inside: avoid } figcaption { color: var(--soft); font-size: .92rem;
max-width: 80ch } img { max-width: 100%; height: auto; background: #fff; border-radius: 4px;
padding: 6px } .box, pre { background: var(--tint); padding: 8px 14px; border-radius: 4px;
white-space: pre-wrap } .box { border-left: 4px solid var(--some) } .about { color: var(--soft) } dt
{ float: left; clear: left; width: 9em; color: var(--soft) } dd { margin-left: 9.5em } button {
font: inherit; color: inherit; background: var(--tint); border: 1px solid var(--line);
border-radius: 16px;
  padding: 3px 14px }
@media print { button, input[type=range] { display: none } h2 { break-after: avoid } table {
font-size: .75rem } }
"""

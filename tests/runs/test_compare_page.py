"""The compare page: its numbers are the library's (under node), it works in a real browser, and strangers' words in
configurations stay words."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from browser import CHROMIUM, WHY, Browser

from fedscaffold import cli
from fedscaffold.runs import RunRecord, Source, Study, sources, tables, write
from fedscaffold.runs.page import asset
from fedscaffold.runs.page import page as page_of
from fedscaffold.runs.run_folder import find_studies
from fedscaffold.runs.view_model import view

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(
    NODE is None, reason="node is not installed: it runs the page's formulas"
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=WHY)
VERSIONS = {"fedscaffold": "0", "python": "3"}
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "\"quoted\", 'twice'",
    "=HYPERLINK(1)",
    r"\input{x} $a_b^c$ 50% {#~&",
    "@x\n+y",
)


def curve(rng, algorithm, seed, lr, rounds=40, kind=np.float32, diverged=False):
    """A run that learns, more or less: no two values the same, some not measured."""
    falling = np.exp(-np.arange(1, rounds + 1) * rng.uniform(0.02, 0.2)) + 0.02 * rng.random(rounds)
    loss, accuracy = (1 + falling).astype(kind), (1 - falling).astype(kind)
    loss[rng.random(rounds) < 0.2] = np.nan
    accuracy[rng.random(rounds) < 0.2] = np.nan
    if diverged:
        loss[-1] = np.inf
    memory = algorithm == "scaffold"
    columns = {
        "round": np.arange(1, rounds + 1),
        "loss": loss,
        "accuracy": accuracy,
        "residual": np.full(rounds, 1e-9 * memory, kind),
        "bytes_up": rng.integers(100, 200, rounds),
        "bytes_down": rng.integers(100, 200, rounds),
    }
    end = rounds if diverged else None
    return RunRecord(
        algorithm=algorithm,
        seed=seed,
        lr=lr,
        columns=columns,
        diverged_at=end,
        advice="take less" if diverged else None,
        residual=1e-9 * memory,
        explained=1.0 * memory,
        digest="d",
    )


def study(runs, target, config="", rows=(), seconds=None):
    runs = [replace(run, config=config) for run in runs]
    known = {"command": "fedscaffold", "versions": VERSIONS, "seconds": seconds or {}}
    return Study(problem="A problem.", target=target, runs=runs, rows=list(rows), **known)


@pytest.fixture(scope="module")
def several():
    """Three groups of three seeds, of one study: single precision, double precision, and one that stops early."""
    rng = np.random.default_rng(5)
    curves = [curve(rng, "scaffold", seed, 0.1) for seed in range(3)]
    curves += [
        curve(rng, "fedavg", seed, 0.1, kind=np.float64, diverged=seed == 2) for seed in range(3)
    ]
    curves += [curve(rng, "sgd", seed, 0.1, rounds=5 + seed) for seed in range(2)]
    measured = curves[1].columns["accuracy"][np.isfinite(curves[1].columns["accuracy"])]
    target = ("accuracy", float(measured[12]))  # met exactly, in single precision
    spent = {name: 2.0 + k for k, name in enumerate(("scaffold", "fedavg", "sgd"))}
    curves = [replace(run, seconds=spent[run.algorithm]) for run in curves]
    return study(curves, target, "rounds = 40\n[local]\nlr = 0.1")


def scripted(driver, given):
    script = f"{asset('numbers.js')}\n{asset('exports.js')}\n{driver}"
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DRIVER = """
const { data, targets } = JSON.parse(require("fs").readFileSync(0, "utf8"));
Numbers.prepare(data);
console.log(JSON.stringify({
  rows: targets.map(target => data.groups.map(group => Numbers.row(group, target, data.rises))),
  bands: data.groups.map(group => ["rounds", "up", "sent", "seconds"].map(axis => Numbers.band(group, "loss", axis))),
  shown: data.groups.map(group => Numbers.columns([], true).slice(1).map(c => c.show(Numbers.row(group, targets[0], data.rises)))),
}));
"""


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_the_numbers_are_the_librarys(several):
    values = [curve.columns["loss"][4] for curve in several.runs]
    targets = [
        several.target,
        ("loss", float(np.nanmedian(values))),
        ("accuracy", 2.0),
        ("loss", 9.0),
        ("drift", 1.0),
    ]
    asked = [{"metric": metric, "value": value} for metric, value in targets]
    told = scripted(DRIVER, {"data": view([Source("here", several)]), "targets": asked})
    for target, page in zip(targets, told["rows"], strict=True):
        expected = tables.rows(several.runs, target, 40)
        assert len(page) == len(expected) == 3
        for mine, theirs in zip(page, expected, strict=True):
            for key in (
                "rounds_to_target",
                "rounds_low",
                "rounds_high",
                "reached",
                "seeds",
                "bytes_to_target",
                "diverged",
            ):
                assert mine[key] == theirs[key], (target, key)
            for key in ("best_metric", "best_spread", "final_loss", "residual"):
                assert (mine[key] is None) == (theirs[key] is None), (target, key)
                assert mine[key] is None or mine[key] == pytest.approx(
                    theirs[key], rel=1e-12, abs=1e-15
                ), (target, key)
    assert told["rows"][0][0]["reached"] >= 1
    at = [tables.first_reached(run.columns, several.target) for run in several.runs[:3]]
    spent = [2.0 * round / 40 for round in at]  # rounds share the time of a run equally
    told_of = [told["rows"][0][0][f"seconds_{key}"] for key in ("to_target", "low", "high")]
    assert told_of == pytest.approx([np.median(spent), min(spent), max(spent)])
    assert {row["rounds_to_target"] for row in told["rows"][2]} == {None}
    cells = tables.cells(
        [row | {"rounds": len(told)} for row in tables.rows(several.runs, several.target, 40)]
    )
    for mine, theirs in zip(told["shown"], cells[1:], strict=True):
        assert mine[1:3] == theirs[3:5]  # seeds that reached it, data sent
        if not theirs[2].startswith(">"):
            assert mine[0] == theirs[2]  # rounds, with their range


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_the_curves_are_the_librarys(several):
    told = scripted(
        DRIVER,
        {"data": view([Source("here", several)]), "targets": [{"metric": "loss", "value": 1.0}]},
    )
    for name, (rounds, up, sent, _) in zip(
        ("scaffold", "fedavg", "sgd"), told["bands"], strict=True
    ):
        runs = [run for run in several.runs if run.algorithm == name]
        table = np.full((len(runs), 40), np.nan)
        for row, run in zip(table, runs, strict=True):
            loss = run.columns["loss"].astype(float)
            row[: len(loss)] = np.where(np.isfinite(loss), loss, np.nan)
        kept = np.flatnonzero(
            2 * np.isfinite(table).sum(0) >= len(runs)
        )  # where half of the seeds were measured
        assert [p["round"] for p in rounds] == (kept + 1).tolist() == [p["x"] for p in rounds]
        for key, made in (("y", np.nanmedian), ("low", np.nanmin), ("high", np.nanmax)):
            np.testing.assert_allclose(
                [p[key] for p in rounds], made(table[:, kept], axis=0), rtol=1e-6
            )
        one = [run for run in runs if np.isfinite(run.columns["loss"][rounds[0]["round"] - 1])]
        first = [int(run.columns["bytes_up"][: rounds[0]["round"]].sum()) for run in one]
        both = [
            f + int(run.columns["bytes_down"][: rounds[0]["round"]].sum())
            for f, run in zip(first, one, strict=True)
        ]
        assert (up[0]["x"], sent[0]["x"]) == (np.median(first), np.median(both))


@needs_node
def test_between_the_rounds_that_are_given_data_sent_is_linear():
    run = {"along": {"round": [1, 5, 9], "sent": [10, 50, 70], "seconds": None}}
    driver = "const run = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    driver += (
        "console.log(JSON.stringify([1, 4, 5, 7, 9, 12].map(r => Numbers.along(run, 'sent', r))"
    )
    driver += ".concat(Numbers.along(run, 'rounds', 3), Numbers.along(run, 'seconds', 3))))"
    assert scripted(driver, run) == [10, 40, 50, 60, 70, 70, 3, None]


def test_runs_equal_but_for_the_seed_are_one_group(tmp_path):
    rng = np.random.default_rng(0)
    for name, seed, lr, more in (
        ("a", 0, 0.1, ""),
        ("b", 1, 0.1, ""),
        ("c", 0, 0.2, ""),
        ("d", 0, 0.1, "weights = 'records'\n"),
    ):
        config = f"seed = {seed}\n{more}metrics = ['{name}']\n[local]\nlr = {lr}\n[output]\ndir = '{name}'"
        write(
            study([curve(rng, "scaffold", seed, lr)], None, config, seconds={"wall": 8.0}),
            tmp_path / "runs" / name,
        )
    found = sources([tmp_path / "runs", tmp_path / "runs" / "a"])  # given twice, there once
    held = view(found)
    assert [[run["seed"] for run in group["runs"]] for group in held["groups"]] == [
        [0, 1],
        [0],
        [0],
    ]
    assert held["keys"] == ["local.lr", "weights"]
    assert [group["detail"] for group in held["groups"]] == [
        "local.lr 0.1, weights -",
        "local.lr 0.2, weights -",
        "local.lr 0.1, weights records",
    ]
    assert (
        held["groups"][0]["runs"][0]["along"]["seconds"][-1] == 8.0
    )  # all rounds, shared out evenly
    assert held["groups"][0]["runs"][0]["along"]["seconds"][9] == pytest.approx(2.0)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        find_studies([tmp_path / "nowhere"])


def test_seconds_come_from_the_record_where_there_is_one(tmp_path):
    """Two sessions: the second begins after round 10 again, so what the first did later does not count."""
    write(
        study([curve(np.random.default_rng(0), "scaffold", 0, 0.1)], None, seconds={"wall": 8.0}),
        tmp_path,
    )
    said = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    begin, rounds = said[0], said[1:-1]
    rounds[9] |= {"at": 1.0, "seconds": {"compile": 5.0, "draw": 0.5, "rounds": 1.0}}
    lost = rounds[19] | {"at": 2.0, "seconds": {"rounds": 9.0}}
    rounds[39] |= {"at": 3.0, "seconds": {"compile": 5.0, "rounds": 3.0, "checkpoint": 0.25}}
    lines = [begin, *rounds[:19], lost, begin | {"after": 10}, *rounds[10:], said[-1]]
    (tmp_path / "rounds.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"torn', encoding="utf-8"
    )
    [group] = view(sources([tmp_path]))["groups"]
    seconds = group["runs"][0]["along"]["seconds"]
    assert (seconds[9], seconds[39]) == (1.5, 1.5 + 3.25)
    assert seconds[24] == pytest.approx(1.5 + 3.25 / 2)


def test_the_page_asks_nobody_for_anything(several):
    page = page_of([Source("here", several)])
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(|innerHTML|eval\(",
        re.sub(r"(?m)//[ ].*$", "", page),
    )
    assert "default-src 'none'" in page
    assert len(page.encode()) < 100_000


# what eyes that lack one kind of cone see, in linear light (Machado, Oliveira and Fernandes 2009, severity 1)
EYES = {
    "all cones": np.eye(3),
    "no long": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no middle": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "no short": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.072175],
        [0.0193339, 0.119192, 0.9503041],
    ]
)


def light(colours):
    """Linear red, green and blue of some colours."""
    raw = np.array([[int(colour[k : k + 2], 16) / 255 for k in (0, 2, 4)] for colour in colours])
    return np.where(raw <= 0.04045, raw / 12.92, ((raw + 0.055) / 1.055) ** 2.4)


def lab(linear):
    scaled = np.clip(linear, 0, 1) @ XYZ.T / [0.95047, 1, 1.08883]
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.stack([116 * f[:, 1], 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def test_lines_can_be_told_apart_by_everybody():
    style, script = asset("style.css"), asset("chart.js")
    bright, dark = style.split("@media screen and (prefers-color-scheme: dark)")[:2]
    for part, paper in ((bright, "ffffff"), (dark.split("} }")[0], "15171a")):
        colours = re.findall(r"--k[0-5]: #([0-9a-f]{6})", part)
        assert len(colours) == 6
        luminance = (light([paper, *colours]) @ XYZ[1]) + 0.05
        assert (
            np.maximum(luminance[1:], luminance[0]) / np.minimum(luminance[1:], luminance[0])
        ).min() > 3
        for eyes in EYES.values():
            seen = lab(light(colours) @ np.transpose(eyes))
            apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1)[np.triu_indices(6, 1)]
            assert apart.min() > 25  # 2.3 is just noticeable
    dashes = len(re.findall(r'"', re.search(r"DASHES = (\[.*?\])", script)[1])) // 2
    assert dashes == 5  # and a number at the end of each line


@pytest.mark.process
@pytest.mark.browser
@needs_node
def test_strangers_words_stay_words_in_exports():
    lines = [
        ["run", "key", "number"],
        *([words, words, -1.5] for words in HOSTILE),
        ["-3", None, 7],
    ]
    text, tex = scripted(
        "const lines = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify([Exports.csv(lines), Exports.latex(lines)]))",
        lines,
    )
    read = list(csv.reader(io.StringIO(text)))
    assert len(read) == len(lines)
    for cells, given in zip(read[1:], HOSTILE, strict=False):
        risky = given[0] in "=+-@"
        assert cells == [f"'{given}" if risky else given] * 2 + ["-1.5"]
    assert read[-1] == ["-3", "", "7"]
    body = tex.split("\\midrule\n")[1].split("\n\\bottomrule")[0].split("\n")
    assert len(body) == len(lines) - 1  # no line break of a stranger makes a row
    known = r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\$[<>|]\$|\\[&%$#_{}]"
    for line in body:
        assert re.fullmatch(
            r"[^\\&%$#_{}~^]*(?: & [^\\&%$#_{}~^]*){2} \\\\", re.sub(known, "", line)
        ), line


def typed(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, *capsys.readouterr()


def test_the_verb(monkeypatch, capsys, tmp_path, several):
    write(several, tmp_path / "a")
    rng = np.random.default_rng(1)
    write(study([curve(rng, "scaffold", 7, 0.1)], None), tmp_path / "b" / "c")
    code, out, _ = typed(
        monkeypatch, capsys, "report", tmp_path, "--out", tmp_path / "new" / "all.html", "--json"
    )
    assert (code, json.loads(out)) == (0, {"report": str(tmp_path / "new" / "all.html"), "runs": 9})
    assert typed(monkeypatch, capsys, "report", tmp_path / "a")[0] == 0
    assert 'id="target-value"' in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    code, _, said = typed(monkeypatch, capsys, "report", tmp_path / "a", "--out", "x.pdf")
    assert (code, "--out must be a page such as comparison.html, got x.pdf" in said) == (2, True)
    assert typed(monkeypatch, capsys, "report", tmp_path / "new")[0] == 2


@pytest.fixture(scope="module")
def browsed(tmp_path_factory, several):
    """A browser with the page of a comparison and of strangers' runs open, and where its downloads go."""
    folder = tmp_path_factory.mktemp("browser")
    rng = np.random.default_rng(2)
    strange = [
        study(
            [curve(rng, "scaffold", 0, 0.3)],
            None,
            f"weights = {json.dumps(words)}\n[local]\nlr = 0.3",
        )
        for words in HOSTILE
    ]
    given = [
        Source("runs/one", several),
        *(Source(words, one) for words, one in zip(HOSTILE, strange, strict=True)),
    ]
    page = folder / "page.html"
    page.write_text(page_of(given), encoding="utf-8")
    with Browser(folder) as browser:
        browser.tell("Emulation.setFocusEmulationEnabled", enabled=True)
        browser.tell("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        browser.go(page.as_uri())
        yield browser, folder


ROWS = "[...document.querySelectorAll('#table tbody tr')].map(tr => [...tr.children].map(cell => cell.textContent))"
LIT = "[...document.querySelectorAll('#charts figure:first-child .line.lit, #table tr.lit')].map(one => one.dataset.group)"


def press(browser, selector, key):
    browser.run(f"document.querySelector({selector!r}).focus()")
    browser.press(key, text="\r" if key == "Enter" else None)


@pytest.mark.browser
@needs_browser
def test_sorting_by_mouse_and_keyboard(browsed, several):
    browser, _ = browsed
    browser.look(1600)
    shown = browser.run(ROWS)
    assert len(shown) == 8
    by_row = {row["algorithm"]: row for row in tables.rows(several.runs, several.target, 40)}
    [own] = [line for line in shown if line[0].endswith("SCAFFOLDweights -")]
    row = by_row["scaffold"]
    assert own[1] == f"{row['rounds_to_target']:g} ({row['rounds_low']} to {row['rounds_high']})"
    assert own[2] == "3 of 3"
    assert browser.run("document.querySelector('th[aria-sort]').textContent").startswith(
        "Rounds to accuracy"
    )
    press(browser, "[data-sort=best_metric]", "Enter")
    up = [float(line[5].split()[0]) for line in browser.run(ROWS)]
    press(browser, "[data-sort=best_metric]", "Enter")
    assert (
        [float(line[5].split()[0]) for line in browser.run(ROWS)]
        == sorted(up, reverse=True)
        == up[::-1]
    )
    assert (
        browser.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')")
        == "descending"
    )
    assert browser.run("document.activeElement.dataset.sort") == "best_metric"
    browser.run("document.querySelector('[data-sort=name]').click()")
    names = [line[0].lstrip("0123456789") for line in browser.run(ROWS)]
    assert names[0].startswith("FedAvg")


@pytest.mark.browser
@needs_browser
def test_rows_and_curves_point_at_each_other(browsed):
    browser, _ = browsed
    browser.run("document.querySelector('#table tr[data-group=\"2\"] button').focus()")
    assert browser.run(LIT) == ["2", "2"]
    browser.run(
        "document.querySelector('#charts .line[data-group=\"3\"]').dispatchEvent(new PointerEvent('pointerenter'))"
    )
    assert browser.run(LIT) == ["3", "3"]
    press(browser, "#charts .line[data-group='4']", "Enter")
    browser.run("document.activeElement.blur()")
    assert browser.run(LIT) == ["4", "4"]  # kept
    browser.run("dispatchEvent(new Event('resize'))")
    assert browser.run(LIT) == ["4", "4"]  # however often it is drawn
    assert (
        browser.run(
            "document.querySelector('#table [aria-pressed=true]').closest('tr').dataset.group"
        )
        == "4"
    )
    press(browser, "#charts .line[data-group='4']", "Enter")
    browser.run("document.activeElement.blur()")
    assert browser.run(LIT) == []


@pytest.mark.browser
@needs_browser
def test_targets_axes_and_filters_change_what_is_shown(browsed, several):
    browser, _ = browsed
    change = "(name, value) => {{ const one = document.getElementById(name); one.value = value; one.dispatchEvent(new Event({!r})); }}"
    browser.run(f"({change.format('change')})('target-metric', 'loss')")
    browser.run(f"({change.format('input')})('target-value', '1.4')")
    expected = {row["algorithm"]: row for row in tables.rows(several.runs, ("loss", 1.4), 40)}
    [own] = [line for line in browser.run(ROWS) if "FedAvg" in line[0]]
    row = expected["fedavg"]
    assert own[1].split(" ")[0] == f"{row['rounds_to_target']:g}"
    assert "loss 1.4" in browser.run("document.getElementById('verdict').textContent")
    paths = (
        "[...document.querySelectorAll('#charts .curve')].map(one => one.getAttribute('d')).join()"
    )
    seen = {browser.run(paths)}
    for axis in ("up", "sent", "seconds", "rounds"):
        browser.run(f"({change.format('change')})('axis', {axis!r})")
        seen.add(browser.run(paths))
    assert len(seen) == 4
    browser.run("document.getElementById('log-x').click()")
    assert browser.run(paths) not in seen
    browser.run("document.getElementById('log-x').click()")
    boxes = "[...document.querySelectorAll('#choices fieldset')].find(one => one.textContent.startsWith('algorithm.name'))"
    browser.run(
        f"[...{boxes}.querySelectorAll('label')].find(one => one.textContent === 'scaffold').firstChild.click()"
    )
    left = browser.run(ROWS)
    assert sorted(re.sub(r"^\d+|weights.*", "", line[0]) for line in left) == ["FedAvg", "SGD"]
    assert browser.run("document.querySelectorAll('#charts figure:first-child .line').length") == 2
    assert browser.run(
        "[...document.querySelectorAll('#differences tbody th')].map(one => one.textContent)"
    ) == ["algorithm.name"]
    browser.run(
        f"[...{boxes}.querySelectorAll('label')].find(one => one.textContent === 'scaffold').firstChild.click()"
    )
    assert len(browser.run(ROWS)) == 8


@pytest.mark.browser
@needs_browser
def test_exports_are_what_is_shown(browsed):
    browser, folder = browsed
    for name, file in (
        ("csv", "comparison.csv"),
        ("latex", "comparison.tex"),
        ("svg", "curves.svg"),
    ):
        press(browser, f"#{name}", "Enter")
        path = folder / file
        for _ in range(100):
            if path.exists() and path.stat().st_size:
                break
            browser.run("new Promise(done => setTimeout(done, 50))")
    lines = list(
        csv.DictReader(io.StringIO((folder / "comparison.csv").read_text(encoding="utf-8")))
    )
    assert len(lines) == 8
    assert {line["weights"] for line in lines} == {
        "",
        *(f"'{w}" if w[0] in "=@" else w for w in HOSTILE),
    }
    assert {line["metric"] for line in lines} == {"loss"}
    assert (folder / "comparison.tex").read_text(encoding="utf-8").count(r"\\") == 9
    drawing = ET.parse(folder / "curves.svg").getroot()
    curves = [
        one
        for one in drawing.iter()
        if one.get("stroke-dasharray") and one.tag.endswith("path") and one.get("fill") == "none"
    ]
    assert len(curves) >= 8
    assert all(one.get("stroke") not in (None, "none", "transparent") for one in curves)
    assert not [
        one for one in drawing.iter() if one.get("class")
    ]  # it needs no style of the page's
    words = {one.text for one in drawing.iter() if one.tag.endswith("text")}
    assert {
        "FedAvg (weights -)",
        "Loss f(x)",
        f"SCAFFOLD (weights {HOSTILE[0]})",
    } <= words  # names and axes go along
    assert "FedAvg (weights -)" not in browser.run(
        "[...document.querySelectorAll('#charts text')].map(one => one.textContent)"
    )


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_can_be_read_at_any_width_and_by_keyboard(browsed, width):
    browser, _ = browsed
    browser.look(width)
    browser.run("new Promise(requestAnimationFrame)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('p, label, button, summary, legend, h1, h2')].filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline').map(one => one.textContent)"
    assert browser.run(cut) == []
    sizes = "Math.min(...[...document.querySelectorAll('body *')].filter(one => one.textContent.trim() && !['SCRIPT', 'STYLE', 'NOSCRIPT', 'title'].includes(one.tagName)).map(one => parseFloat(getComputedStyle(one).fontSize)))"
    assert browser.run(sizes) >= 12
    assert (
        browser.run("document.querySelector('#charts figure > svg').getBoundingClientRect().width")
        > 0.85 * min(width, 1240) - 60
    )
    unnamed = "[...document.querySelectorAll('button, input, select')].filter(one => !(one.textContent.trim() || one.labels?.length)).length"
    assert browser.run(unnamed) == 0
    assert (
        browser.run(
            "[...document.querySelectorAll('button, input, select, .line')].filter(one => one.getClientRects().length).filter(one => { one.focus(); return document.activeElement !== one; }).length"
        )
        == 0
    )
    browser.run("document.activeElement.blur(); document.getElementById('target-metric').focus()")
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "target-value"


@pytest.mark.process
@pytest.mark.browser
@needs_browser
def test_strangers_words_stay_words_in_the_page_and_nothing_is_asked_for(browsed):
    browser, folder = browsed
    assert browser.run("window.hacked") is None
    values = browser.run(
        "[...document.querySelectorAll('#differences td')].map(one => one.textContent)"
    )
    assert set(HOSTILE) <= set(values)
    assert set(HOSTILE) <= set(
        browser.run(
            "[...document.querySelectorAll('#origins summary')].map(one => one.textContent)"
        )
    )
    assert browser.faults == []
    asked = [address for address in browser.asked if not address.startswith(("data:", "blob:"))]
    assert asked == [(folder / "page.html").as_uri()]

"""The report: a study is kept whole, its table is right in every format, its page stands alone whatever comes."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from fedscaffold.checks import InputError
from fedscaffold.report import Curve, Study, figures, page, read, tables, versions, write
from fedscaffold.report.page import gauges, verdict

TARGET = ("accuracy", 0.9)
EVIL = "</script><img src=x onerror=alert(1)>&\"'"


def curve(algorithm: str, seed: int = 0, **columns: Any) -> Curve:
    """A run that sends 100 bytes a round, given its metrics by round."""
    rounds = max((len(values) for values in columns.values()), default=1)
    held = {"round": np.arange(1, rounds + 1), **{name: np.array(values) for name, values in columns.items()}}
    held |= {"bytes_up": np.full(rounds, 40), "bytes_down": np.full(rounds, 60)}
    return Curve(algorithm, seed, 0.1, held, None, None, None, 0.0, 0.0, f"digest{algorithm}{seed}")


def study(*curves: Curve, target: tuple[str, float] | None = TARGET, counts: Any = None, **changes: Any) -> Study:
    table = tables.rows(curves, target, 5)
    labels = None if counts is None else np.array(counts)
    made = Study("A title", "A problem.", target, list(curves), table, labels, "float64", "x = 1\n", "demo", {}, {})
    return made._replace(**changes)


def example() -> list[Curve]:
    return [
        curve("scaffold", 0, accuracy=[0.1, 0.9, 0.95, 0.94], loss=[2.0, 1.0, 0.5, 0.25]),
        curve("scaffold", 1, accuracy=[0.2, 0.5, math.nan, 0.92], loss=[2.0, 1.5, math.nan, 0.75]),
        curve("scaffold", 2, accuracy=[0.2, 0.3, 0.91, 0.93], loss=[2.0, 1.5, 1.0, 0.5]),
        curve("fedavg", 0, accuracy=[0.1, 0.2, 0.9, 0.8], loss=[2.0, 1.8, 1.5, 1.6]),
        curve("fedavg", 1, accuracy=[0.1, 0.2, 0.5], loss=[2.0, 9.0, math.inf])._replace(
            diverged_at=3, advice="diverged at round 3: try a tenth", residual=math.nan
        ),
    ]


def test_rows_by_hand():
    scaffold, fedavg = tables.rows(example(), TARGET, 5)
    keys = "algorithm lr rounds_to_target rounds_low rounds_high reached seeds bytes_to_target best_metric best_spread "
    keys += "final_loss residual diverged metric target rounds"
    best, spread = pytest.approx((0.95 + 0.92 + 0.93) / 3), pytest.approx(math.sqrt(21) / 300)
    values = ["scaffold", 0.1, 3.0, 2, 4, 3, 3, 300, best, spread, 0.5, 0.0, 0, "accuracy", 0.9, 5]
    assert scaffold == dict(zip(keys.split(), values, strict=True))
    # of two seeds one did not reach it: the median lies beyond all rounds
    told = ("rounds_to_target", "rounds_low", "rounds_high", "reached", "bytes_to_target", "final_loss", "diverged")
    assert [fedavg[key] for key in told] == [None, None, None, 1, None, 1.6, 1]


def test_rows_of_falling_metrics_and_without_a_target():
    runs = [curve("sgd", 0, gap=[4.0, 0.5, 0.25]), curve("sgd", 1, gap=[4.0, 1.0, 0.5])._replace(lr=0.2)]
    [row] = tables.rows(runs, ("gap", 0.5), 3)
    assert (row["rounds_to_target"], row["bytes_to_target"], row["best_metric"], row["lr"]) == (2.5, 250, 0.375, None)
    [row] = tables.rows(runs, None, 3)
    assert (row["metric"], row["best_metric"], row["reached"], row["rounds_to_target"]) == ("gap", 0.375, 0, None)
    assert "rounds to" not in tables.markdown([row])
    [row] = tables.rows(runs, ("accuracy", 0.9), 3)  # never measured
    assert (row["reached"], row["best_metric"], row["final_loss"]) == (0, None, None)


def test_report_and_simulator_agree_on_what_is_better():
    from fedscaffold.metrics import METRICS, rises

    for metric in METRICS:
        columns = {"round": np.arange(1, 3), metric: np.array([0.5, 2.0])}
        assert tables.reached(columns, (metric, 1.0)) == 1 + rises(metric)
        assert metric in figures.METRICS


def test_csv_parses_back_to_the_same_values():
    rows = tables.rows([*example(), curve('a,b"c')], TARGET, 5)
    parsed = list(csv.DictReader(tables.csv(rows).splitlines()))
    texts = [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]
    assert parsed == texts  # and str of a float reads back to the same float


def test_printed_tables_parse_back_to_the_same_cells():
    rows = tables.rows([*example(), curve("50 %_of|mine & <others> \\ {x}")], TARGET, 5)
    cells = tables.cells(rows)
    lines = [line for line in tables.markdown(rows).splitlines() if "---" not in line]
    split = [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]
    assert [[re.sub(r"\\(.)", r"\1", cell) for cell in line] for line in split] == cells
    back = {shown: char for char, shown in tables.LATEX.items()}
    pattern = "|".join(re.escape(shown) for shown in sorted(back, key=len, reverse=True))
    lines = [line.removesuffix(r" \\") for line in tables.latex(rows).splitlines() if line.endswith(r" \\")]
    assert [[re.sub(pattern, lambda m: back[m[0]], cell) for cell in line.split(" & ")] for line in lines] == cells
    lines = tables.terminal(rows).splitlines()
    assert [re.split(r"  +", line) for line in lines[-len(rows) :]] == cells[1:]
    assert max(map(len, lines)) < 120


def test_not_reached_is_said():
    rows = tables.rows(example(), TARGET, 5)
    assert [line[2] for line in tables.cells(rows)] == ["rounds to accuracy 0.9", "3 (2 to 4)", "> 5"]
    foreign = [{key: row[key] for key in row if key not in ("metric", "target", "rounds")} for row in rows]
    assert [line[2] for line in tables.cells(foreign)] == ["rounds to target", "3 (2 to 4)", "not reached"]
    assert page(study(*example(), rows=foreign)) == page(study(*example(), rows=[{**r, "rounds": 4} for r in rows]))


def test_verdict():
    slow = [curve(name, accuracy=[0.1, 0.2]) for name in ("fedavg", "mine")]
    fast = [curve("sgd", accuracy=[0.1, 0.92]), curve("scaffold", accuracy=[0.95])]
    gone = [curve("sgd", accuracy=[0.1, math.nan])._replace(diverged_at=2)]
    assert [verdict(tables.rows(runs, TARGET, 2)) for runs in (example(), [*slow, *fast], [*slow, *gone], [])] == [
        "SCAFFOLD reached accuracy 0.9 after 3 rounds (median of 3 seeds); FedAvg reached it in 1 of 2 seeds only.",
        "SCAFFOLD reached accuracy 0.9 after 1 round (one seed), SGD after 2; FedAvg and mine did not within 2 rounds.",
        "FedAvg did not reach accuracy 0.9 within 2 rounds; mine did not within 2 rounds; SGD diverged.",
        "This study holds no runs.",
    ]
    assert verdict(tables.rows(slow, None, 2)) == "Best accuracy: FedAvg 0.2, mine 0.2 (one seed)."


def test_what_is_written_is_read_back(tmp_path):
    runs = [*example(), curve("sgd")._replace(explained=math.inf)]
    runs[0].columns["accuracy"] = runs[0].columns["accuracy"].astype(np.float32)
    kept = study(*runs, counts=[[1, 2], [3, 0]], versions=versions(), seconds={"run": 0.5}, config="a = 'é'\r\n")
    write(kept, tmp_path)
    found = read(tmp_path)
    assert found._replace(curves=[], label_counts=None) == kept._replace(curves=[], label_counts=None)
    np.testing.assert_array_equal(found.label_counts, kept.label_counts)
    for one, other in zip(found.curves, runs, strict=True):
        assert one._replace(columns={}, residual=0, explained=0) == other._replace(columns={}, residual=0, explained=0)
        np.testing.assert_array_equal(one.residual, other.residual)
        assert list(one.columns) == list(other.columns)
        for name, column in other.columns.items():
            known = np.where(np.isfinite(column), column, np.nan) if column.dtype.kind == "f" else column
            np.testing.assert_array_equal(one.columns[name], known, strict=True)  # infinity is not kept: JSON has none
    assert tables.rows(found.curves, TARGET, 5) == tables.rows(runs, TARGET, 5)


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: study\.json is missing"):
        read(tmp_path)
    write(study(*example()), tmp_path)
    (tmp_path / "study.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="damaged"):
        read(tmp_path)


class Reader(HTMLParser):
    """What a browser sees: tags with their attributes, and text; scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.text, self.scripts = [], [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [tag] if tag not in ("meta", "br") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.tags[-1][1].get("id") or "code"] = data
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def seen(made: Study) -> tuple[Reader, str]:
    """Read the page as a browser does, and check what holds for every page."""
    text = page(made)
    reader = Reader(text)
    assert reader.open == []
    assert not {tag for tag, _ in reader.tags} & {"a", "link", "img", "iframe", "object", "embed", "form", "base"}
    for _, attributes in reader.tags:
        assert not {"src", "href", "action", "data", "onclick", "onload"} & set(attributes)
    assert not re.search(r"://|url\(|@import", text)
    assert "content=\"default-src 'none';" in text
    for figure in json.loads(reader.scripts.get("figures", "[]"), parse_constant=pytest.fail):
        go.Figure(figure)  # refuses what Plotly does not know
    words = " ".join(" ".join(reader.text).split())
    assert not re.search(r"\b(nan|NaN|inf|None|null|undefined)\b", words)
    return reader, words


def test_the_page_is_one_file_with_every_number_of_its_table():
    made = study(*example(), counts=[[5, 0, 2], [0, 7, 1]], seconds={"scaffold": 1.5}, versions={"numpy": "2.0"})
    reader, words = seen(made)
    told = [cell for line in tables.cells(made.rows) for cell in line]
    told += ["A title", "A problem.", verdict(made.rows), "FedAvg, seed 1: diverged at round 3: try a tenth"]
    told += ["demo", "x = 1", "numpy 2.0", "scaffold 1.5", "float64", "digestscaffold2"]
    assert [text for text in told if text not in words] == []
    assert gzip.decompress(base64.b64decode(reader.scripts["plotly"])).decode() == get_plotlyjs()


def test_all_text_is_escaped():
    evil = [run._replace(algorithm=EVIL, advice=EVIL, diverged_at=2, digest=EVIL) for run in example()]
    told = dict.fromkeys(("title", "problem", "config", "command"), EVIL) | {"versions": {EVIL: EVIL}}
    reader, words = seen(study(*evil, counts=[[1, 2]], seconds={EVIL: 1.0}, **told))
    assert words.count("onerror=alert(1)") >= 10
    assert {a.get("data-name") for tag, a in reader.tags if tag == "button"} == {EVIL}


ODD = {
    "no runs": study(),
    "no metrics": study(curve("sgd")),
    "one round": study(curve("scaffold", accuracy=[0.5], loss=[1.0])),
    "no rounds": study(curve("scaffold", accuracy=[], loss=[])),
    "one seed, one algorithm": study(curve("scaffold", accuracy=[0.5, 0.95], loss=[1.0, 0.1])),
    "rounds without evaluation": study(*(curve("sgd", s, loss=[math.nan, 1.0, math.nan, s]) for s in range(3))),
    "nothing but NaN": study(curve("sgd", loss=[math.nan] * 3, residual=[math.nan] * 3)._replace(residual=math.nan)),
    "no target": study(*example(), target=None),
    "other metrics": study(curve("sgd", distance=[1.0, 1e-9, 0.0], gap=[1.0, 1e-17, -1e-17]), target=("gap", 0.0)),
    "regression": study(curve("sgd", loss=[3.0, 2.0]), target=None, counts=[[4], [9], [0]]),
    "many clients and labels": study(*example(), counts=np.random.default_rng(0).integers(0, 3, (1000, 62))),
    "clients without records": study(*example(), counts=[[0, 0], [0, 0]]),
    "some diverged": study(*example()),
    "all diverged": study(curve("sgd", loss=[1.0, 1e200, math.inf])._replace(diverged_at=3, explained=math.nan)),
    "a constant": study(curve("sgd", loss=[0.0, 0.0])._replace(diverged_at=2)),
    "no bytes": study(example()[0]._replace(columns={"round": np.arange(1, 3), "loss": np.array([1.0, 2.0])})),
    "long": study(*(curve("sgd", s, loss=np.geomspace(1, 1e-6, 3000) + s) for s in range(2))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_studies_have_pages(name):
    reader, words = seen(ODD[name])
    drawn = json.loads(reader.scripts.get("figures", "[]"))
    assert all(figure["data"] for figure in drawn)
    assert len(drawn) == sum("data-figure" in attributes for _, attributes in reader.tags)
    assert ODD[name].title in words
    assert max((len(trace["x"]) for figure in drawn for trace in figure["data"] if "x" in trace), default=0) <= 800


def test_a_blown_up_run_does_not_flatten_the_others():
    runs = [curve("scaffold", loss=[1.0, 0.9, 0.8]), curve("fedavg", loss=[1.0, 1e10, 1e20])._replace(diverged_at=3)]
    [panel] = figures.curves(study(*runs, target=None), against="rounds")
    np.testing.assert_allclose(panel.figure["layout"]["yaxis"]["range"], [0.8, 1.0], atol=0.02)


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1.0, 0.5], "linear"), ([1.0, 0.01], "log"), ([1.0, 0.01, -0.1], "linear"), ([1.0, 1e-9, 0.0, -1e-16], "log")],
)
def test_logarithmic_where_it_helps(values, scale):
    [panel] = figures.curves(study(curve("sgd", gap=values), target=None), against="rounds")
    assert panel.figure["layout"]["yaxis"].get("type", "linear") == scale


def test_bands_and_colours():
    made = study(*example())
    panels = figures.curves(made, against="bytes")
    assert [panel.heading for panel in panels] == [figures.METRICS["accuracy"], figures.METRICS["loss"]]
    line = panels[0].figure["data"][1]
    assert line["x"] == [100, 200, 300, 400]
    np.testing.assert_allclose(line["y"], [0.2, 0.5, 0.93, 0.93])
    assert [low_high[1:] for low_high in line["customdata"]] == [(0.1, 0.2), (0.3, 0.9), (0.91, 0.95), (0.92, 0.94)]
    assert panels[0].figure["layout"]["shapes"][0]["y0"] == 0.9
    drawn = [trace for one in [*panels, *figures.curves(made, against="rounds")] for trace in one.figure["data"]]
    pairs = {(trace["legendgroup"], trace["marker"]["color"]) for trace in drawn if "marker" in trace}
    assert len(pairs) == len(dict(pairs)) == len(set(dict(pairs).values())) == 2  # one colour each, the same everywhere


@pytest.mark.parametrize(
    ("residual", "explained", "state"),
    [
        (1e-14, 1e-13, "healthy"),
        (1e-6, 1e-13, "broken"),
        (0.0, 0.0, "none"),
        (1e-9, 0.0, "broken"),
        (math.nan, math.nan, "unknown"),
    ],
)
def test_gauge(residual, explained, state):
    run = curve("scaffold", loss=[1.0] * 4, residual=[residual] * 4)._replace(residual=residual, explained=explained)
    made = study(run)
    [gauge] = gauges(made)
    assert gauge.state == state
    if state in ("healthy", "broken") and explained:
        assert gauge.relative == residual / explained
    words = {"none": "nothing to gauge", "unknown": "not judged"}.get(state, f"SCAFFOLD: {state}.")
    assert words in seen(made)[1]


def test_a_split_has_a_page_of_its_own():
    text = figures.split_page(np.array([[5, 0], [1, 2]]), "Split <1>")
    assert "Split &lt;1&gt;" in text
    assert "2 clients hold 8 records of 2 labels" in text
    assert "no runs" not in text

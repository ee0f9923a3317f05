"""The run folder is kept whole, the table is right in every format, the page stands alone whatever comes."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from fedscaffold.checks import InputError
from fedscaffold.runs import RunRecord, Source, Study, page, read, tables, versions, write
from fedscaffold.runs.page import split_page
from fedscaffold.runs.round_log import FORMAT, NAME, RoundLog
from fedscaffold.runs.run_folder import find_studies, replace_study
from fedscaffold.runs.view_model import COLOURS, MEANINGS, health, thin, view

TARGET = ("accuracy", 0.9)
EVIL = "</script><img src=x onerror=alert(1)>&\"'"


def curve(algorithm: str, seed: int = 0, **columns: Any) -> RunRecord:
    """A run that sends 100 bytes a round, given its metrics by round."""
    rounds = max((len(values) for values in columns.values()), default=1)
    held = {
        "round": np.arange(1, rounds + 1),
        **{name: np.array(values) for name, values in columns.items()},
    }
    held |= {"bytes_up": np.full(rounds, 40), "bytes_down": np.full(rounds, 60)}
    known = {
        "residual": 0.0,
        "explained": 0.0,
        "digest": f"digest{algorithm}{seed}",
        "config": "x = 1\n",
    }
    return RunRecord(algorithm=algorithm, seed=seed, lr=0.1, columns=held, **known)


def study(
    *runs: RunRecord, target: tuple[str, float] | None = TARGET, counts: Any = None, **changes: Any
) -> Study:
    table = tables.rows(runs, target, 5)
    labels = None if counts is None else np.array(counts)
    known = {
        "problem": "A problem.",
        "target": target,
        "rows": table,
        "precision": "float64",
        "command": "demo",
    }
    return Study(**(known | {"runs": list(runs), "label_counts": labels} | changes))


def example() -> list[RunRecord]:
    return [
        curve("scaffold", 0, accuracy=[0.1, 0.9, 0.95, 0.94], loss=[2.0, 1.0, 0.5, 0.25]),
        curve("scaffold", 1, accuracy=[0.2, 0.5, math.nan, 0.92], loss=[2.0, 1.5, math.nan, 0.75]),
        curve("scaffold", 2, accuracy=[0.2, 0.3, 0.91, 0.93], loss=[2.0, 1.5, 1.0, 0.5]),
        curve("fedavg", 0, accuracy=[0.1, 0.2, 0.9, 0.8], loss=[2.0, 1.8, 1.5, 1.6]),
        replace(
            curve("fedavg", 1, accuracy=[0.1, 0.2, 0.5], loss=[2.0, 9.0, math.inf]),
            diverged_at=3,
            advice="diverged at round 3: try a tenth",
            residual=math.nan,
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
    told = (
        "rounds_to_target",
        "rounds_low",
        "rounds_high",
        "reached",
        "bytes_to_target",
        "final_loss",
        "diverged",
    )
    assert [fedavg[key] for key in told] == [None, None, None, 1, None, 1.6, 1]


def test_rows_of_falling_metrics_and_without_a_target():
    runs = [
        curve("sgd", 0, gap=[4.0, 0.5, 0.25]),
        replace(curve("sgd", 1, gap=[4.0, 1.0, 0.5]), lr=0.2),
    ]
    [row] = tables.rows(runs, ("gap", 0.5), 3)
    assert (row["rounds_to_target"], row["bytes_to_target"], row["best_metric"], row["lr"]) == (
        2.5,
        250,
        0.375,
        None,
    )
    [row] = tables.rows(runs, None, 3)
    assert (row["metric"], row["best_metric"], row["reached"], row["rounds_to_target"]) == (
        "gap",
        0.375,
        0,
        None,
    )
    assert "rounds to" not in tables.terminal([row])
    [row] = tables.rows(runs, ("accuracy", 0.9), 3)  # never measured
    assert (row["reached"], row["best_metric"], row["final_loss"]) == (0, None, None)


def test_report_and_simulator_agree_on_what_is_better():
    from fedscaffold.metrics import METRICS, rises

    for metric in METRICS:
        columns = {"round": np.arange(1, 3), metric: np.array([0.5, 2.0])}
        assert tables.first_reached(columns, (metric, 1.0)) == 1 + rises(metric)
        assert metric in MEANINGS


def test_csv_parses_back_to_the_same_values():
    rows = tables.rows([*example(), curve('a,b"c')], TARGET, 5)
    parsed = list(csv.DictReader(tables.csv(rows).splitlines()))
    texts = [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in rows
    ]
    assert parsed == texts  # and str of a float reads back to the same float


def test_printed_tables_parse_back_to_the_same_cells():
    rows = tables.rows([*example(), curve("50 %_of|mine & <others> \\ {x}")], TARGET, 5)
    cells = tables.cells(rows)
    back = {shown: char for char, shown in tables.LATEX.items()}
    pattern = "|".join(re.escape(shown) for shown in sorted(back, key=len, reverse=True))
    lines = [
        line.removesuffix(r" \\")
        for line in tables.latex(rows).splitlines()
        if line.endswith(r" \\")
    ]
    assert [
        [re.sub(pattern, lambda m: back[m[0]], cell) for cell in line.split(" & ")]
        for line in lines
    ] == cells
    lines = tables.terminal(rows).splitlines()
    assert [re.split(r"  +", line) for line in lines[-len(rows) :]] == cells[1:]
    assert max(map(len, lines)) < 120


def test_not_reached_is_said():
    rows = tables.rows(example(), TARGET, 5)
    assert [line[2] for line in tables.cells(rows)] == [
        "rounds to accuracy 0.9",
        "3 (2 to 4)",
        "> 5",
    ]
    foreign = [
        {key: row[key] for key in row if key not in ("metric", "target", "rounds")} for row in rows
    ]
    assert [line[2] for line in tables.cells(foreign)] == [
        "rounds to target",
        "3 (2 to 4)",
        "not reached",
    ]


@pytest.mark.parametrize("number", [1, 6])
def test_what_is_written_is_read_back(tmp_path, number):
    runs = [*example(), replace(curve("sgd"), explained=math.inf)][:number]
    runs[0].columns["accuracy"] = runs[0].columns["accuracy"].astype(np.float32)
    runs = [replace(run, config=f"seed = {k}\r\na = 'é'\r\n") for k, run in enumerate(runs)]
    kept = study(*runs, counts=[[1, 2], [3, 0]], versions=versions(), seconds={"run": 0.5})
    write(kept, tmp_path)
    found = read(tmp_path)
    for name in ("problem", "target", "precision", "command", "versions", "seconds"):
        assert getattr(found, name) == getattr(kept, name)
    assert found.rows == (kept.rows if number > 1 else [])
    np.testing.assert_array_equal(found.label_counts, kept.label_counts)
    for one, other in zip(found.runs, runs, strict=True):
        for name in (
            "algorithm",
            "seed",
            "lr",
            "diverged_at",
            "reached_at",
            "advice",
            "digest",
            "config",
        ):
            assert getattr(one, name) == getattr(other, name), name
        np.testing.assert_array_equal(one.residual, other.residual)
        assert list(one.columns) == list(other.columns)
        for name, column in other.columns.items():
            known = (
                np.where(np.isfinite(column), column, np.nan)
                if column.dtype.kind == "f"
                else column
            )
            np.testing.assert_array_equal(
                one.columns[name], known, strict=True
            )  # infinity is not kept: JSON has none
    assert tables.rows(found.runs, TARGET, 5) == tables.rows(runs, TARGET, 5)


def test_a_comparison_is_a_folder_of_run_folders(tmp_path):
    replace_study(study(*example()), tmp_path / "both")
    replace_study(study(example()[0]), tmp_path / "one")
    members = sorted(path.name for path in (tmp_path / "both" / "runs").iterdir())
    assert members == [
        "fedavg-seed-0",
        "fedavg-seed-1",
        "scaffold-seed-0",
        "scaffold-seed-1",
        "scaffold-seed-2",
    ]
    alone = read(
        tmp_path / "both" / "runs" / "fedavg-seed-1"
    )  # each is a run's folder in its own right
    assert (alone.runs[0].diverged_at, alone.problem, alone.target) == (3, "A problem.", TARGET)
    assert find_studies([tmp_path]) == [tmp_path / "both", tmp_path / "one"]
    replace_study(
        study(*example()[:2]), tmp_path / "both"
    )  # in its place: nothing of the other is left
    assert (
        len(list((tmp_path / "both" / "runs").iterdir())) == len(read(tmp_path / "both").runs) == 2
    )
    replace_study(study(example()[3]), tmp_path / "both")
    assert [run.algorithm for run in read(tmp_path / "both").runs] == ["fedavg"]
    assert not (tmp_path / "both" / "runs").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: run\.json is missing"):
        read(tmp_path)
    write(study(example()[0]), tmp_path)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="damaged"):
        read(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match="has not ended: `fedscaffold watch"):
        read(tmp_path)


def test_folders_of_other_versions_are_refused_in_one_line(tmp_path):
    write(study(example()[0]), tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    for number in (1, 3):
        (tmp_path / "run.json").write_text(json.dumps(about | {"format": number}))
        with pytest.raises(
            InputError, match=f"has format {number}, and this fedscaffold reads format 2"
        ):
            read(tmp_path)
    (tmp_path / "run.json").rename(tmp_path / "study.json")
    for ask in (read, lambda folder: find_studies([folder])):
        with pytest.raises(
            InputError, match=r"was written by fedscaffold 0\.1\.0.* run its config\.toml again"
        ):
            ask(tmp_path)


def test_a_newer_index_member_or_log_is_refused_by_its_number(tmp_path):
    write(study(*example()), tmp_path)
    member = sorted((tmp_path / "runs").iterdir())[0]
    for path in (tmp_path / "index.json", member / "run.json"):
        text = path.read_text()
        about = json.loads(text)
        assert about["format"] == FORMAT
        path.write_text(json.dumps(about | {"format": FORMAT + 1, "runs": {"of": "another kind"}}))
        with pytest.raises(
            InputError, match=rf"{path.name} has format {FORMAT + 1}, and .* reads format {FORMAT}"
        ):
            read(tmp_path)
        path.write_text(text)
    read(tmp_path)
    log = member / NAME
    begin = json.loads(log.read_text().splitlines()[0])
    assert begin["format"] == FORMAT
    log.write_text(
        json.dumps(begin | {"format": FORMAT + 1, "after": {"of": "another kind"}}) + "\n"
    )
    reader = RoundLog(member)
    with pytest.raises(
        InputError, match=rf"^{re.escape(str(log))} has format {FORMAT + 1}"
    ):  # and is not called damaged
        read(tmp_path)
    for _ in range(2):  # a live page asks again
        with pytest.raises(
            InputError, match=rf"{NAME} has format {FORMAT + 1}, and .* up to {FORMAT}"
        ):
            reader.update()


def test_a_log_with_other_rounds_than_the_run_is_damage_and_is_written_anew(tmp_path):
    run = study(example()[0])
    replace_study(run, tmp_path)
    log = tmp_path / "rounds.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace("0.95", "0.96"))
    replace_study(run, tmp_path)  # what the run itself says counts
    assert log.read_text() == whole
    log.write_text("\n".join(whole.splitlines()[:3]) + "\n")
    with pytest.raises(InputError, match=r"rounds\.jsonl has 2 of its 4 rounds"):
        read(tmp_path)
    more = whole.replace(
        '{"event": "begin"', '{"event": "begin", "pid": 4711'
    )  # the run's own log stays
    log.write_text(more)
    replace_study(run, tmp_path)
    assert log.read_text() == more


class Reader(HTMLParser):
    """What a browser sees: tags with their attributes, and text; scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.text, self.scripts = [], [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [tag] if tag not in ("meta", "br", "link", "input") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.tags[-1][1].get("id") or "code"] = data
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def seen(made: Study) -> tuple[dict[str, Any], str]:
    """Read the page as a browser does, check what holds for every page, and return what it is given and says."""
    text = page([Source("here", made)])
    reader = Reader(text)
    assert reader.open == []
    assert not {tag for tag, _ in reader.tags} & {
        "a",
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
    }
    for tag, attributes in reader.tags:
        assert not {"src", "action", "data", "onclick", "onload"} & set(attributes)
        assert attributes.get("href", "data:,") == "data:,", tag
    assert not re.search(r"://|url\(|@import|fetch\(", text)
    assert "content=\"default-src 'none';" in text
    assert len(text.encode()) < 300_000
    words = " ".join(" ".join(reader.text).split())
    assert not re.search(r"\b(nan|NaN|inf|None|null|undefined)\b", words)
    return json.loads(reader.scripts["data"], parse_constant=pytest.fail), words


def test_the_page_is_one_file_with_everything_inside():
    made = study(
        *example(),
        counts=[[5, 0, 2], [0, 7, 1]],
        seconds={"scaffold": 1.5},
        versions={"numpy": "2.0"},
    )
    told, words = seen(made)
    assert "2 configurations compared" in words
    assert told["problems"] == ["A problem."]
    assert told["target"] == {"metric": "accuracy", "value": 0.9}
    assert told["origins"] == [
        {
            "folder": "here",
            "command": "demo",
            "precision": "float64",
            "versions": "numpy 2.0",
            "seconds": "scaffold 1.5",
        }
    ]
    assert [[run["digest"] for run in group["runs"]] for group in told["groups"]] == [
        ["digestscaffold0", "digestscaffold1", "digestscaffold2"],
        ["digestfedavg0", "digestfedavg1"],
    ]
    assert told["groups"][1]["runs"][1]["advice"] == "diverged at round 3: try a tenth"
    assert told["maps"][0]["counts"] == [[5, 0, 2], [0, 7, 1]]


def test_titles():
    one, other = example()[0], example()[3]
    for runs, title in (
        ([one], "SCAFFOLD, 1 run"),
        (example()[:3], "SCAFFOLD, 3 runs"),
        ([], "No runs"),
    ):
        assert view([Source("here", study(*runs))])["title"] == title
    assert (
        view([Source("a", study(one)), Source("b", study(other))])["title"]
        == "2 configurations compared"
    )


def test_no_text_ends_the_script():
    evil = [
        replace(run, algorithm=EVIL, advice=EVIL, diverged_at=2, digest=EVIL, config=EVIL)
        for run in example()
    ]
    told = dict.fromkeys(("problem", "command"), EVIL) | {"versions": {EVIL: EVIL}}
    given, words = seen(study(*evil, counts=[[1, 2]], seconds={EVIL: 1.0}, **told))
    assert given["groups"][0]["algorithm"] == given["origins"][0]["command"] == EVIL
    assert "configuration" in words or EVIL in words


ODD = {
    "no runs": study(),
    "no metrics": study(curve("sgd")),
    "one round": study(curve("scaffold", accuracy=[0.5], loss=[1.0])),
    "no rounds": study(curve("scaffold", accuracy=[], loss=[])),
    "one seed, one algorithm": study(curve("scaffold", accuracy=[0.5, 0.95], loss=[1.0, 0.1])),
    "rounds without evaluation": study(
        *(curve("sgd", s, loss=[math.nan, 1.0, math.nan, s]) for s in range(3))
    ),
    "nothing but NaN": study(
        replace(curve("sgd", loss=[math.nan] * 3, residual=[math.nan] * 3), residual=math.nan)
    ),
    "no target": study(*example(), target=None),
    "other metrics": study(
        curve("sgd", distance=[1.0, 1e-9, 0.0], gap=[1.0, 1e-17, -1e-17]), target=("gap", 0.0)
    ),
    "regression": study(curve("sgd", loss=[3.0, 2.0]), target=None, counts=[[4], [9], [0]]),
    "many clients and labels": study(
        *example(), counts=np.random.default_rng(0).integers(0, 3, (1000, 62))
    ),
    "clients without records": study(*example(), counts=[[0, 0], [0, 0]]),
    "some diverged": study(*example()),
    "all diverged": study(
        replace(curve("sgd", loss=[1.0, 1e200, math.inf]), diverged_at=3, explained=math.nan)
    ),
    "a constant": study(replace(curve("sgd", loss=[0.0, 0.0]), diverged_at=2)),
    "no bytes": study(
        replace(example()[0], columns={"round": np.arange(1, 3), "loss": np.array([1.0, 2.0])})
    ),
    "long": study(*(curve("sgd", s, loss=np.geomspace(1, 1e-6, 3000) + s) for s in range(2))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_studies_have_pages(name):
    told, _ = seen(ODD[name])
    assert sum(len(group["runs"]) for group in told["groups"]) == len(ODD[name].runs)


def noisy(seed: int, rounds: int = 20_000, **spikes: float) -> RunRecord:
    rng = np.random.default_rng(seed)
    names = ("loss", "accuracy", "grad_norm", "drift", "residual")
    columns = {name: rng.random(rounds) for name in names}
    columns["loss"][[7777, 13]] = 1e6, -5.0
    return replace(curve("scaffold", seed, **columns), explained=1.0)


def test_long_curves_are_thinned_and_no_spike_is_lost():
    """An oracle that knows nothing of stretches: each value that is left out lies between kept values close to it."""
    run = noisy(0)
    told, _ = seen(study(run, target=("accuracy", 0.9995)))
    [held] = told["groups"][0]["runs"]
    for name in ("loss", "accuracy", "grad_norm", "drift", "residual"):
        column, whole = held["columns"][name], run.columns[name]
        kept = np.array(column["round"])
        assert len(kept) < 2100
        np.testing.assert_allclose(column["values"], whole[kept - 1], rtol=1e-5)
        assert {1, 20_000, 1 + whole.argmin(), 1 + whole.argmax()} <= set(kept.tolist())
        for at in np.random.default_rng(1).integers(0, 20_000, 200):
            near = whole[kept[np.abs(kept - 1 - at) <= told["stretch"]] - 1]
            assert near.min() <= whole[at] <= near.max()
    first = tables.first_reached(run.columns, ("accuracy", 0.9995))
    assert (
        first in held["columns"]["accuracy"]["round"]
    )  # the study's own target is met in the right round
    assert first in held["along"]["round"]
    at = held["along"]["round"].index(first)
    assert (held["along"]["up"][at], held["along"]["sent"][at]) == (40 * first, 100 * first)


def test_thinning_keeps_the_ends_and_extremes_of_every_stretch():
    rng = np.random.default_rng(3)
    for number in (1, 2, 79, 80, 81, 1000, 12_345):
        low = rng.normal(size=number)
        high = low + rng.random(number)
        low[rng.random(number) < 0.1] = np.nan
        kept = thin(low, high, 40)
        assert {0, number - 1} <= set(kept.tolist())
        if number <= 80:
            assert len(kept) == number
            continue
        length = math.ceil(number / 40)
        for start in range(0, number, length):
            part = kept[(kept >= start) & (kept < start + length)]
            assert np.nanmin(low[part]) == np.nanmin(low[start : start + length])
            assert np.max(high[part]) == np.max(high[start : start + length])


def test_pages_stay_small():
    runs = [
        replace(noisy(10 * k + seed), algorithm=name)
        for k, name in enumerate(("sgd", "fedavg"))
        for seed in range(3)
    ]
    assert (
        len(page([Source("here", study(noisy(0), counts=np.ones((100, 62), int)))]).encode())
        < 300_000
    )
    assert len(page([Source("here", study(*runs))]).encode()) < 300_000


def test_colour_is_the_algorithm():
    names = ["sgd", "mine", "scaffold", "fedavg", "fedprox", "other"]
    runs = [
        replace(curve(name, seed, loss=[1.0]), lr=lr)
        for name in names
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    groups = view([Source("here", study(*runs))])["groups"]
    assert len(groups) == 12
    pairs = {(group["algorithm"], group["colour"]) for group in groups}
    assert (
        len(pairs) == len({colour for _, colour in pairs}) == 6 <= COLOURS
    )  # two step sizes share their algorithm's
    alone = view([Source("here", study(curve("fedavg", loss=[1.0])))])["groups"]
    assert (alone[0]["algorithm"], alone[0]["colour"]) in pairs  # the same on every page
    many = view([Source("here", study(*(curve(f"a{k}", loss=[1.0]) for k in range(20))))])["groups"]
    assert {group["colour"] for group in many} == set(range(COLOURS))


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
def test_health(residual, explained, state):
    run = replace(
        curve("scaffold", loss=[1.0] * 4, residual=[residual] * 4),
        residual=residual,
        explained=explained,
    )
    found = health(run)
    assert found.state == state == seen(study(run))[0]["groups"][0]["runs"][0]["health"]
    if state in ("healthy", "broken") and explained:
        assert found.relative == residual / explained


def test_a_split_has_a_page_of_its_own():
    text = split_page(np.array([[5, 0], [1, 2]]), "Split <1>")
    assert "Split &lt;1&gt;" in text
    assert json.loads(Reader(text).scripts["data"])["maps"][0] == {
        "of": "",
        "clients": 2,
        "records": 8,
        "who": [0, 1],
        "counts": [[5, 0], [1, 2]],
    }

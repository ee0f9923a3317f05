"""Damaged folders: whatever stands in a run's files, readers say so in one line or pass over it; never a traceback."""

import json
import random

import numpy as np
import pytest

from fedscaffold import InputError
from fedscaffold.deploy.store import seen as server_state
from fedscaffold.experiments.record import agreed
from fedscaffold.report import study
from fedscaffold.report.comparison import Source, comparison, sources
from fedscaffold.report.deployed import Deployed
from fedscaffold.report.live import Simulated, source_of
from fedscaffold.report.page import page
from fedscaffold.report.picture import state
from fedscaffold.report.record import NAME, Record
from fedscaffold.simulation.checkpoint import last_round
from fedscaffold.simulation.identity import differences
from fedscaffold.state import StateError, commit, latest
from fedscaffold.state.commit import generations

ODD = [
    None, True, False, 0, -1, 3, 2.5, 1e400, float("nan"), 10**30, 10**400, "", "x", "3", [], [1], ["x"], [[1]], {}, {"a": 1},
    {"round": 1}, [None], [True], [1.5], [-1], [10**30], "é" * 500,
]  # fmt: skip
BEGIN = {
    "event": "begin", "format": 1, "run": "5f0c", "at": 1763260000.0, "host": "here", "pid": 4711, "after": 0, "rounds": 9,
    "clients": 3, "cohort": 2, "algorithm": "scaffold", "seed": 0, "precision": "float32", "target": ["loss", 0.5],
    "problem": "p", "config": "8a", "stoppable": True,
}  # fmt: skip
ROUNDS = [{"round": r, "loss": 1.0 / r, "residual": 0.0, "bytes_up": 8, "heard": [0, 2]} for r in range(1, 6)]
CLOCK = {"at": 1763260001.5, "explained": 0.8, "seconds": {"rounds": 0.4}}
END = {"event": "end", "at": 1763260009.0, "after": 5, "how": "finished"}
LINES = [BEGIN, *ROUNDS[:4], ROUNDS[4] | CLOCK, END]


def seen(folder):
    """Everything that reads a record."""
    told = json.dumps(state(Simulated(folder).picture()), allow_nan=False)
    record = Record(folder)
    record.update()
    agreed(record.columns, {"round": np.arange(1, 6), "loss": 1.0 / np.arange(1, 6)})
    return json.loads(told)


def written(folder, lines):
    (folder / NAME).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def test_every_value_of_every_line_of_a_record_may_be_anything(tmp_path):
    written(tmp_path, LINES)
    assert seen(tmp_path)["columns"]["round"] == [1, 2, 3, 4, 5]
    for k, line in enumerate(LINES):
        for key in line:
            for value in ODD:
                written(tmp_path, [*LINES[:k], line | {key: value}, *LINES[k + 1 :]])
                told = seen(tmp_path)
                assert told["columns"]["round"] == list(range(1, len(told["columns"]["round"]) + 1))


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"round": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"round": ' + "9" * 5000 + "}",
        "\0" * 50,
        "\x1b[2J",
        '"',
        "5",
        "null",
    ],
)
def test_lines_that_are_no_json_are_passed_over(line, tmp_path):
    written(tmp_path, [*LINES[:3], line, *LINES[3:]])
    assert seen(tmp_path)["columns"]["round"] == [1, 2, 3, 4, 5]


def test_lines_twice_out_of_order_and_cut_anywhere(tmp_path):
    rng = random.Random(0)
    for _ in range(50):
        written(tmp_path, rng.choices(LINES, k=12))
        seen(tmp_path)
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    for _ in range(200):
        cut = bytearray(data[: rng.randrange(len(data))])
        for _ in range(rng.randrange(4)):
            cut[rng.randrange(len(cut) or 1) : rng.randrange(len(cut) + 1)] = rng.randbytes(rng.randrange(9))
        (tmp_path / NAME).write_bytes(cut)
        seen(tmp_path)


def test_a_record_that_says_otherwise_is_written_anew_from_where_it_does():
    columns = {"round": np.arange(1, 5), "loss": np.array([4.0, 3.0, np.nan, 1.0], np.float32)}
    right = {"round": [1, 2, 3, 4], "loss": [4.0, 3.0, None, 1.0]}
    assert agreed(right, columns) == 4
    assert agreed(right | {"loss": [4.0, 9.0, None, 1.0]}, columns) == 1
    assert agreed({"round": [1, 2], "loss": [4.0, 3.0]}, columns) == 2
    assert agreed({"round": [1, 2, 3, 4]}, columns) == 0
    assert agreed(right, {name: column[:3] for name, column in columns.items()}) == 3


@pytest.fixture
def kept(tmp_path):
    columns = {"round": np.arange(1, 4), "loss": np.array([3.0, 2.0, 1.0], np.float32), "residual": np.zeros(3)}
    columns |= {"bytes_up": np.full(3, 8), "bytes_down": np.full(3, 8)}
    curve = study.Curve("scaffold", 0, 0.1, columns, None, None, None, 0.0, 1.0, "ab")
    whole = study.Study(
        "t",
        "p",
        ("loss", 0.5),
        [curve],
        [],
        np.array([[1, 2]]),
        "float32",
        "rounds = 3\n",
        "c",
        {"numpy": "2"},
        {"wall": 1.0},
    )
    study.write(whole, tmp_path)
    return tmp_path


def places(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def refusal(ask):
    """Whether it is refused, in one line."""
    try:
        ask()
    except InputError as error:
        return len(str(error).splitlines()) == 1
    return False


def looked_at(folder):
    (given,) = sources([folder])
    return page(given.study), comparison([Source("a", given.study)]), state(source_of(folder).picture())


def test_every_value_of_a_study_may_be_anything(kept):
    """Refused in one line, or shown; page by page this would take minutes, so each place gets some of the odd values."""
    about = json.loads((kept / "study.json").read_text())
    looked_at(kept)
    rng = random.Random(1)
    refused = 0
    for path in places(about):
        for value in rng.sample(ODD, 4):
            (kept / "study.json").write_text(json.dumps(replaced(about, path, value)))
            refused += refusal(lambda: study.read(kept)) or refusal(lambda: looked_at(kept))
    assert refused > 50


@pytest.mark.parametrize("name", ["study.json", "metrics.jsonl", "config.toml"])
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"null",
        b"5",
        b'{"run": 0}',
        b'{"run": -1}',
        b'{"run": true}',
        b"a = " + b"[" * 5000,
    ],
)
def test_files_of_a_study_that_are_something_else(kept, name, text):
    (kept / name).write_bytes(text)
    assert refusal(lambda: looked_at(kept)) or name == "config.toml"


def test_a_linked_folder_of_state_is_neither_read_nor_written_through(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    commit(elsewhere, {"x": np.zeros(2)}, {"round": 1})
    before = sorted(elsewhere.iterdir())
    link = tmp_path / "checkpoint"
    link.symlink_to(elsewhere, target_is_directory=True)
    for ask in (lambda: latest(link), lambda: commit(link, {"x": np.ones(2)}, {"round": 2}), lambda: generations(link)):
        with pytest.raises(StateError, match="symbolic link"):
            ask()
    assert sorted(elsewhere.iterdir()) == before


AUDIT = [
    {"event": "started", "at": "2026-01-01T00:00:00+00:00", "run": "a", "algorithm": "scaffold", "round": 0},
    {"event": "joined", "at": "2026-01-01T00:00:01+00:00", "site": "north", "records": 3},
    {"event": "opened", "at": "2026-01-01T00:00:02+00:00", "round": 1, "attempt": 0},
    {"event": "refused", "at": "2026-01-01T00:00:03+00:00", "site": "north", "reason": "r"},
    {
        "event": "committed",
        "at": "2026-01-01T00:00:04+00:00",
        "kind": "train",
        "round": 1,
        "heard": ["north"],
        "missing": [],
        "failed": {"south": "late"},
    },
    {"event": "left", "at": "2026-01-01T00:00:05+00:00", "site": "south"},
]
STATUS = {
    "phase": "waiting", "round": 1, "rounds": 5, "waiting_for": ["north"], "absent": ["south"], "attempt": 0, "residual": 0.0, "explained": 1.0,
    "precision": "float32", "at": 1763260000.0, "pid": 4711, "sites": {"north": {"records": 3, "counted_in_round": 1, "last_seen": None}},
    "missed": {"south": {"sentence": "south never counted", "cause": "late"}}, "unmeasured": {"auc": ["north"]},
}  # fmt: skip


def served(
    folder, audit=AUDIT, status=STATUS, metrics=({"round": 0, "loss": 0.5, "heard": ["north"], "residual": 0.0},)
):
    for name, lines in (("audit.jsonl", audit), ("metrics.jsonl", metrics), ("status.json", [status])):
        (folder / name).write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        )
    return json.loads(json.dumps(state(Deployed(folder).picture()), allow_nan=False))


def test_every_value_of_a_servers_files_may_be_anything(tmp_path):
    whole = served(tmp_path)
    assert (whole["round"], whole["columns"]["loss"], "south never counted." in whole["notes"]) == (1, [0.5], True)
    for k, event in enumerate(AUDIT):
        for key in event:
            for value in ODD:
                served(tmp_path, audit=[*AUDIT[:k], event | {key: value}, *AUDIT[k + 1 :], AUDIT[0]])
    for path in places(STATUS):
        for value in ODD:
            served(tmp_path, status=replaced(STATUS, path, value))
    for key in ("round", "loss", "heard", "residual"):
        for value in ODD:
            served(tmp_path, metrics=[{"round": 0, "loss": 0.5, key: value}])
    for text in ("[" * 100_000, "9" * 5000, "\0"):
        served(tmp_path, audit=[text], status=text, metrics=[text])


def test_checkpoints_whose_facts_are_something_else(tmp_path):
    """Their checksum is right: somebody made them so."""
    for k, value in enumerate([None, "x", -1, 2.5, [], {}, True]):
        folder = tmp_path / str(k)
        commit(folder, {"x": np.zeros(2)}, {"round": value, "roster": value, "run": value, "resync": False})
        with pytest.raises(InputError):
            last_round(folder)
        with pytest.raises(StateError):
            server_state(folder)
        assert differences(value, {"lr": 0.1}) is not None

"""Damaged folders: whatever stands in a run's files, readers say so in one line or pass over it; never a traceback."""

import json
import random

import numpy as np
import pytest

from fedscaffold import InputError
from fedscaffold.deploy.server_state import peek_state as server_state
from fedscaffold.runs import RunRecord, Source, Study, page, read, source_of, sources, write
from fedscaffold.runs.deployed import Deployed
from fedscaffold.runs.live import Simulated
from fedscaffold.runs.round_log import NAME, RoundLog, count_agreeing_rounds
from fedscaffold.runs.view_model import view
from fedscaffold.simulation.checkpoint import last_round
from fedscaffold.simulation.fingerprint import differences
from fedscaffold.state import StateError, commit, latest
from fedscaffold.state.commit import generations

ODD = [
    None,
    True,
    False,
    0,
    -1,
    3,
    2.5,
    1e400,
    float("nan"),
    10**30,
    10**400,
    "",
    "x",
    "3",
    [],
    [1],
    ["x"],
    [[1]],
    {},
    {"a": 1},
    {"round": 1},
    [None],
    [True],
    [1.5],
    [-1],
    [10**30],
    "é" * 500,
]
BEGIN = {
    "event": "begin",
    "format": 1,
    "run": "5f0c",
    "at": 1763260000.0,
    "host": "here",
    "pid": 4711,
    "after": 0,
    "rounds": 9,
    "clients": 3,
    "cohort": 2,
    "algorithm": "scaffold",
    "seed": 0,
    "precision": "float32",
    "target": ["loss", 0.5],
    "problem": "p",
    "config": "8a",
    "stoppable": True,
}
ROUNDS = [
    {"round": r, "loss": 1.0 / r, "residual": 0.0, "bytes_up": 8, "heard": [0, 2]}
    for r in range(1, 6)
]
CLOCK = {"at": 1763260001.5, "explained": 0.8, "seconds": {"rounds": 0.4}}
END = {"event": "end", "at": 1763260009.0, "after": 5, "how": "finished"}
LINES = [BEGIN, *ROUNDS[:4], ROUNDS[4] | CLOCK, END]


def seen(folder):
    """Everything that reads a record."""
    told = json.dumps(view([Simulated(folder).poll()]), allow_nan=False)
    log = RoundLog(folder)
    log.update()
    count_agreeing_rounds(log.columns, {"round": np.arange(1, 6), "loss": 1.0 / np.arange(1, 6)})
    return json.loads(told)["groups"][0]["runs"][0]["along"]["round"]


def written(folder, lines):
    (folder / NAME).write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


@pytest.mark.slow
def test_every_value_of_every_line_of_a_record_may_be_anything(tmp_path):
    written(tmp_path, LINES)
    assert seen(tmp_path) == [1, 2, 3, 4, 5]
    for k, line in enumerate(LINES):
        for key in line:
            for value in ODD:
                written(tmp_path, [*LINES[:k], line | {key: value}, *LINES[k + 1 :]])
                if (
                    key == "format" and value in (0, 3) and not isinstance(value, bool)
                ):  # of another version
                    assert refusal(lambda: seen(tmp_path))
                    continue
                told = seen(tmp_path)
                assert told == list(range(1, len(told) + 1))


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
    assert seen(tmp_path) == [1, 2, 3, 4, 5]


def test_lines_twice_out_of_order_and_cut_anywhere(tmp_path):
    rng = random.Random(0)
    for _ in range(50):
        written(tmp_path, rng.choices(LINES, k=12))
        seen(tmp_path)
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    for _ in range(200):
        cut = bytearray(data[: rng.randrange(len(data))])
        for _ in range(rng.randrange(4)):
            cut[rng.randrange(len(cut) or 1) : rng.randrange(len(cut) + 1)] = rng.randbytes(
                rng.randrange(9)
            )
        (tmp_path / NAME).write_bytes(cut)
        seen(tmp_path)


def test_a_record_that_says_otherwise_is_written_anew_from_where_it_does():
    columns = {"round": np.arange(1, 5), "loss": np.array([4.0, 3.0, np.nan, 1.0], np.float32)}
    right = {"round": [1, 2, 3, 4], "loss": [4.0, 3.0, np.nan, 1.0]}
    assert count_agreeing_rounds(right, columns) == 4
    assert count_agreeing_rounds(right | {"loss": [4.0, 9.0, np.nan, 1.0]}, columns) == 1
    assert count_agreeing_rounds({"round": [1, 2], "loss": [4.0, 3.0]}, columns) == 2
    assert count_agreeing_rounds({"round": [1, 2, 3, 4]}, columns) == 0
    assert count_agreeing_rounds(right, {name: column[:3] for name, column in columns.items()}) == 3


@pytest.fixture
def kept(tmp_path):
    columns = {
        "round": np.arange(1, 4),
        "loss": np.array([3.0, 2.0, 1.0], np.float32),
        "residual": np.zeros(3),
    }
    columns |= {"bytes_up": np.full(3, 8), "bytes_down": np.full(3, 8)}
    known = {"residual": 0.0, "explained": 1.0, "digest": "ab", "config": "rounds = 3\n"}
    run = RunRecord(algorithm="scaffold", seed=0, lr=0.1, columns=columns, **known)
    shared = {
        "problem": "p",
        "target": ("loss", 0.5),
        "label_counts": np.array([[1, 2]]),
        "command": "c",
    }
    shared |= {
        "versions": {"numpy": "2"},
        "seconds": {"wall": 1.0},
        "rows": [{"algorithm": "scaffold", "ends": "here"}],
    }
    write(Study(runs=[run], **shared), tmp_path)
    write(Study(runs=[run, run], **shared), tmp_path / "both")
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
    return page([given]), view([Source("a", given.study)]), view([source_of(folder).poll()])


@pytest.mark.parametrize("name", ["run.json", "both/index.json"])
def test_every_value_of_a_study_may_be_anything(kept, name):
    """Refused in one line, or shown; page by page this would take minutes, so each place gets some of the odd values."""
    path = kept / name
    about = json.loads(path.read_text())
    looked_at(path.parent)
    rng = random.Random(1)
    refused = 0
    for place in places(about):
        for value in rng.sample(ODD, 4):
            path.write_text(json.dumps(replaced(about, place, value)))
            refused += refusal(lambda: read(path.parent)) or refusal(lambda: looked_at(path.parent))
    assert refused > 50


@pytest.mark.parametrize("name", ["run.json", "rounds.jsonl", "config.toml", "both/index.json"])
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
        b'{"format": 2}',
        b'{"format": -1}',
        b'{"format": true}',
        b"a = " + b"[" * 5000,
    ],
)
def test_files_of_a_study_that_are_something_else(kept, name, text):
    path = kept / name
    path.write_bytes(text)
    assert refusal(lambda: looked_at(path.parent)) or name == "config.toml"


def test_an_index_leads_nowhere_else(kept):
    """Whoever hands a comparison on cannot make it read folders beside it."""
    about = json.loads((kept / "both/index.json").read_text())
    for name in ("../..", "/etc", "a/b", ".", ""):
        (kept / "both/index.json").write_text(json.dumps(about | {"runs": [name]}))
        assert refusal(lambda: read(kept / "both"))
    (kept / "both/index.json").write_text(json.dumps(about | {"runs": ["gone-seed-0"]}))
    with pytest.raises(InputError, match=r"damaged run: runs/gone-seed-0/run\.json is missing"):
        read(kept / "both")


def test_a_linked_folder_of_state_is_neither_read_nor_written_through(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    commit(elsewhere, {"x": np.zeros(2)}, {"round": 1})
    before = sorted(elsewhere.iterdir())
    link = tmp_path / "checkpoint"
    link.symlink_to(elsewhere, target_is_directory=True)
    for ask in (
        lambda: latest(link),
        lambda: commit(link, {"x": np.ones(2)}, {"round": 2}),
        lambda: generations(link),
    ):
        with pytest.raises(StateError, match="symbolic link"):
            ask()
    assert sorted(elsewhere.iterdir()) == before


AUDIT = [
    {
        "event": "started",
        "at": "2026-01-01T00:00:00+00:00",
        "run": "a",
        "algorithm": "scaffold",
        "round": 0,
    },
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
    "phase": "waiting",
    "round": 1,
    "rounds": 5,
    "waiting_for": ["north"],
    "absent": ["south"],
    "attempt": 0,
    "residual": 0.0,
    "explained": 1.0,
    "precision": "float32",
    "at": 1763260000.0,
    "pid": 4711,
    "sites": {"north": {"records": 3, "counted_in_round": 1, "last_seen": None}},
    "missed": {"south": {"sentence": "south never counted", "cause": "late"}},
    "unmeasured": {"auc": ["north"]},
    "opened_at": 1763259990.0,
    "failed": {"south": "killed"},
    "disk_free": 2.0**30,
    "certificate_days": 9.5,
    "warnings": ["something"],
}


def served(
    folder,
    audit=AUDIT,
    status=STATUS,
    metrics=({"round": 0, "loss": 0.5, "heard": ["north"], "residual": 0.0},),
):
    for name, lines in (
        ("audit.jsonl", audit),
        ("metrics.jsonl", metrics),
        ("status.json", [status]),
    ):
        (folder / name).write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        )
    return json.loads(json.dumps(view([Deployed(folder).poll()]), allow_nan=False))


@pytest.mark.slow
def test_every_value_of_a_servers_files_may_be_anything(tmp_path):
    whole = served(tmp_path)
    told, [held] = whole["progress"], whole["groups"][0]["runs"]
    assert (told["round"], held["columns"]["loss"]["values"]) == (1, [0.5])
    assert "south never counted." in told["notes"]
    for k, event in enumerate(AUDIT):
        for key in event:
            for value in ODD:
                served(
                    tmp_path, audit=[*AUDIT[:k], event | {key: value}, *AUDIT[k + 1 :], AUDIT[0]]
                )
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
        commit(
            folder,
            {"x": np.zeros(2)},
            {"round": value, "roster": value, "run": value, "resync": False},
        )
        with pytest.raises(InputError):
            last_round(folder)
        with pytest.raises(StateError):
            server_state(folder)
        assert differences(value, {"lr": 0.1}) is not None

"""The command line under input that nobody means: one line, exit code 2, nothing written; no traceback ever."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedscaffold import InputError, cli
from fedscaffold.deploy.settings import parse as parse_deployment
from fedscaffold.experiments.config_file import Config, parse, to_toml

CONFIG = """
rounds = 2
problem.dataset = "quadratic"
problem.clients = 4
problem.dim = 3
local.steps = 2
output.dir = "out"
"""
DEEP = "[" * 5000 + "]" * 5000
LONG = "x" * 5000
RUN = ["run", "config.toml", "--set"]
WORDS = {
    "steps beyond 32 bits": [*RUN, "local.steps=2147483648"],
    "rounds beyond 32 bits": [*RUN, "rounds=2147483648"],
    "a dimension beyond memory": [*RUN, "problem.dim=99999999999"],
    "clients beyond memory": [*RUN, "problem.clients=99999999999"],
    "measured never": [*RUN, f"evaluate_every={10**30}"],
    "a zero byte in a path": [*RUN, 'output.dir="a\\u0000b"'],
    "a zero byte in data": [*RUN, 'problem.data="a\\u0000b"'],
    "a zero byte in a trace": [*RUN, 'cohort.availability="a\\u0000b"'],
    "no path": [*RUN, 'output.dir=""'],
    "a long path": [*RUN, f"output.dir={LONG}"],
    "a long path to data": [*RUN, f"problem.data={LONG}", "--set", "problem.dataset=a9a"],
    "a long trace": [*RUN, f"cohort.availability={LONG}"],
    "a long config": ["run", LONG],
    "a long folder": ["resume", LONG],
    "a long report": ["report", LONG],
    "a long watch": ["watch", LONG, "--json"],
    "a long diagnosis": ["diagnose", LONG],
    "a long status": ["deploy", "status", LONG],
    "nested": [*RUN, f"rounds={DEEP}"],
    "nested, not closed": [*RUN, "rounds=" + "[" * 5000],
    "nested in a table": [*RUN, f"algorithm.mu={DEEP[4800:5200]}"],
    "dotted": [*RUN, ".".join(["problem"] * 3000) + "=1"],
    "digits": [*RUN, "seed=" + "9" * 5000],
    "digits of an option": ["data", "show", "--clients", "9" * 5000],
    "a negative one": ["data", "show", "--clients", "-1"],
    "a server's step": [*RUN, "server.lr=-1"],
    "true for a step": [*RUN, "local.lr=true"],
    "true for clients": [*RUN, "problem.clients=true"],
    "a float for a seed": [*RUN, "seed=1e9"],
    "bytes that are no text": [*RUN, "output.dir=\udcff"],
    "words that are no text": [*RUN, "algorithm.name=\udcff"],
    "a nested file": ["run", "deep.toml"],
    "a digit file": ["run", "digits.toml"],
    "a deep study": ["report", "deep"],
    "a deep study, watched": ["watch", "deep", "--json"],
    "a digit study": ["report", "digits"],
    "a deep config": ["resume", "broken"],
    "a deep config, diagnosed": ["diagnose", "broken"],
    "a deep deployment": ["deploy", "resume", "broken"],
    "a deep status": ["deploy", "status", "broken"],
    "a deep kit": ["deploy", "kit", "deep.toml"],
    "a deep site": ["deploy", "check", "broken"],
    "too many rounds": ["resume", "out", "--rounds", "9" * 5000],
    "a port": ["watch", "out", "--port", "99999999999"],
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "deep.toml").write_text(f"rounds = {DEEP}")
    (tmp_path / "digits.toml").write_text("rounds = " + "9" * 5000)
    for name, text in (("deep", DEEP), ("digits", '{"seed": ' + "9" * 5000 + "}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
        (tmp_path / name / "config.toml").write_text("")
        (tmp_path / name / "rounds.jsonl").write_text("")
    (tmp_path / "broken").mkdir()
    for name in ("config.toml", "deployment.json", "status.json", "site.json"):
        (tmp_path / "broken" / name).write_text(f"a = {DEEP}" if name.endswith("toml") else DEEP)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return sorted(
        (str(path), path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")
    )


@pytest.mark.parametrize("case", WORDS)
def test_it_is_refused_in_one_line(case, desk, monkeypatch, capsys):
    before = contents(desk)
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *WORDS[case]])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1
    assert len(err) < 1100
    assert contents(desk) == before


LINKS = ["checkpoint", "rounds.jsonl", "config.toml", ".new"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_writes_through_no_link_in_its_folder(name, desk, monkeypatch, capsys):
    elsewhere = desk / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    (desk / "out" / name).unlink(missing_ok=True)
    (desk / "out" / name).symlink_to(elsewhere / "precious" if "." in name[1:] else elsewhere)
    monkeypatch.setattr(sys, "argv", ["fedscaffold", "run", "config.toml", "--fresh"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    line = capsys.readouterr().err
    assert end.value.code == 2
    assert "symbolic link" in line
    assert len(line.splitlines()) == 1
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"precious": "kept"}


@pytest.mark.process
def test_bytes_that_are_no_text_are_shown(desk):
    """As the system gives them: an argument that is not UTF-8."""
    words = [
        sys.executable,
        "-c",
        "from fedscaffold.cli import main; main()",
        "report",
        b"\xff\xfe",
    ]
    done = subprocess.run(words, capture_output=True, cwd=desk, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


def is_refused_or_whole(ask):
    """Whether a configuration is refused in one line, or can be written and read again."""
    try:
        found = ask()
    except InputError as error:
        return len(str(error).splitlines()) == 1
    return not isinstance(found, Config) or parse(to_toml(found)) == found


KEYS = st.sampled_from(
    [
        "rounds",
        "seed",
        "local.steps",
        "local.lr",
        "cohort.size",
        "problem.dim",
        "output.dir",
        "metrics",
        "stop_at",
        "algorithm",
        "algorithm.name",
        "algorithm.mu",
        "local",
        "a.b",
        "",
        ".",
        "deploy.sites",
        "deploy.quorum",
        "deploy",
        "weights",
    ]
)
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(repr),
    st.booleans().map(lambda b: str(b).lower()),
    st.recursive(
        st.just("1"),
        lambda inner: inner.map(lambda s: f"[{s}]") | inner.map(lambda s: f"{{a={s}}}"),
        max_leaves=50,
    ),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_any_override_is_refused_in_one_line_or_taken(pairs):
    assert is_refused_or_whole(lambda: parse("", [f"{key}={value}" for key, value in pairs]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.tuples(KEYS, VALUES), max_size=3).map(
            lambda ps: "\n".join(f"{k} = {v}" for k, v in ps)
        ),
    )
)
def test_any_toml_is_refused_in_one_line_or_taken(text):
    assert is_refused_or_whole(lambda: parse(text))
    assert is_refused_or_whole(lambda: parse_deployment(text))

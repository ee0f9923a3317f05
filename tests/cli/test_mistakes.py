"""Mistakes that people make, seeded: each gets one line that names the cause and the fix, and nothing is lost."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import InputError, cli

CONFIG = """
rounds = 2
[problem]
dataset = "digits"
split = "similarity:0"
clients = 10
[local]
epochs = 1
batch_size = 0.2
lr = 0.1
[cohort]
size = 0.3
[output]
dir = "out"
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with what mistakes are made with."""
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "file").write_text("somebody's")
    (tmp_path / "trace.csv").write_text("1,0\n0,1\n")
    for name, text in (("cut", '{"title": "x", "curv'), ("bare", "{}"), ("odd", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
        (tmp_path / name / "config.toml").write_text("")
        (tmp_path / name / "rounds.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def told(words, monkeypatch, capsys):
    """Exit code and last words of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, *capsys.readouterr()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RUN = ["run", "config.toml", "--set"]
COMMANDS = {
    "a typo in a key": (
        [*RUN, "local.batchsize=3"],
        "unknown key 'local.batchsize'",
        "did you mean 'local.batch_size'",
    ),
    "a typo in a name": (
        [*RUN, "algorithm.name=scafold"],
        "unknown algorithm 'scafold'",
        "did you mean 'scaffold'",
    ),
    "a typo in a metric": (
        [*RUN, "metrics=['los']"],
        "unknown metric 'los'",
        "did you mean 'loss'",
    ),
    "a typo in a verb": (["rnu", "config.toml"], "No such command 'rnu'", "run"),
    "no such file": (["run", "confg.toml"], "confg.toml not found", "give the path of a TOML"),
    "a folder for a file": (["run", "folder.toml"], "Is a directory", "give the path of a TOML"),
    "a picture for a file": (["run", "binary.toml"], "can't decode", "give the path of a TOML"),
    "broken TOML": (["run", "broken.toml"], "not valid TOML", "line 1"),
    "a file for a folder": ([*RUN, "output.dir=file"], "file: ", "choose another folder"),
    "a file on the way": (
        ["compare", "--local-steps", "1", "--rounds", "1", "--out", "file/x"],
        "file: File exists",
        "choose",
    ),
    "too few clients": ([*RUN, "cohort.size=11"], "got 11", "at most 10"),
    "too many clients": ([*RUN, "problem.clients=5000"], "5000", "clients"),
    "a model for two classes": (
        [*RUN, "problem.model=logistic"],
        "needs two classes, and digits has 10",
        "use model 'softmax'",
    ),
    "the wrong algorithm": (
        [*RUN, "algorithm.name=scaffnew"],
        "only when all clients take part",
        "use scaffold with sampling",
    ),
    "a trace of others": (
        [*RUN, "cohort.availability=trace.csv"],
        "(2, 2)",
        "rows of 10 zeros and ones",
    ),
    "data that is elsewhere": (
        [*RUN, "problem.dataset=a9a", "--data", "nowhere"],
        "a9a not found in nowhere",
        "pass --data DIR",
    ),
    "a damaged run": (["report", "cut"], "cut holds a damaged run", "run it again"),
    "an emptied run": (
        ["report", "bare"],
        "bare holds a damaged run: 'format' of run.json is missing",
        "run it again",
    ),
    "another kind of file": (["report", "odd"], "odd holds a damaged run", "run it again"),
    "resume of nothing": (
        ["resume", "nowhere"],
        "nowhere holds no run",
        "`fedscaffold run CONFIG.toml` starts one",
    ),
    "a status of nothing": (
        ["deploy", "status", "nowhere"],
        "no status.json",
        "nothing was started there",
    ),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_on_the_command_line(mistake, desk, monkeypatch, capsys):
    words, cause, fix = COMMANDS[mistake]
    before = contents(desk)
    code, said, line = told(words, monkeypatch, capsys)
    assert code == 2
    assert said == ""
    assert cause in line
    assert fix in line
    assert line.count("\n") == 1
    assert contents(desk) == before


def test_a_folder_that_may_not_be_written(desk, monkeypatch, capsys):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    Path("kept").mkdir(mode=0o500)
    code, _, line = told([*RUN, "output.dir=kept/run"], monkeypatch, capsys)
    assert (code, line.count("\n")) == (2, 1)
    assert "Permission denied; mend its permissions or choose another place" in line


def test_a_port_in_use(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as first:
        monkeypatch.setattr(cli, "_run", lambda *words: socket.create_server(first.getsockname()))
        code, _, line = told(["watch"], monkeypatch, capsys)
    assert (code, line.count("\n")) == (2, 1)
    assert "Address already in use" in line
    assert "end it or give another port" in line


def test_other_failures_of_the_system_are_one_line_too_and_a_traceback_for_those_who_ask(
    monkeypatch, capsys
):
    for number, line in (
        (errno.ENOENT, "disk: No such file or directory; check the path"),
        (errno.EIO, "disk: Input/output error"),
    ):

        def refused(*words, number=number):
            raise OSError(number, os.strerror(number), "disk")

        monkeypatch.setattr(cli, "_run", refused)
        assert told(["run"], monkeypatch, capsys) == (2, "", f"fedscaffold: {line}\n")
    monkeypatch.setenv("FEDSCAFFOLD_DEBUG", "1")
    with pytest.raises(OSError, match="Input/output"):
        cli.main()


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        (
            "jax",
            "from fedscaffold.cli import main; main()",
            "this needs jax: pip install 'fedscaffold[sim]'",
        ),
        (
            "sklearn",
            "import fedscaffold as fs; fs.FederatedRegressor",
            "needs sklearn: pip install 'fedscaffold[sim]'",
        ),
    ],
)
def test_a_missing_extra(module, code, said, desk):
    script = f"import sys; sys.modules[{module!r}] = None; sys.argv = ['fedscaffold', 'run', 'config.toml']\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert said in done.stderr.splitlines()[-1]
    assert done.returncode != 0
    assert not Path("out").exists()


def loss(w, batch):
    x, y = batch
    return ((x @ w - y) ** 2).mean()


def made(*widths, rows=4, start=3):
    rng = np.random.default_rng(0)
    return fs.Problem(
        loss,
        np.zeros(start),
        [(rng.normal(size=(4, width)), rng.normal(size=rows)) for width in widths],
    )


def run(problem=None, **changes):
    usual = {"rounds": 2, "local_steps": 2, "lr": 0.1}
    return fs.simulate(
        fs.scaffold(), made(3, 3) if problem is None else problem, **{**usual, **changes}
    )


PYTHON = {
    "a start of another shape": (
        lambda: run(x0=np.zeros(4)),
        "x0 must be shaped like",
        "flat vector of 3 numbers",
    ),
    "a start that is not finite": (lambda: run(x0=np.full(3, np.nan)), "x0 must be finite", "NaN"),
    "rows that do not match": (lambda: made(3, rows=5), "one row per record", r"lengths \[4, 5\]"),
    "widths that do not match": (
        lambda: made(3, 2),
        "same structure and row shape",
        r"client 1 holds rows of shape \(2,\) in \[0\], client 0 of shape \(3,\)",
    ),
    "holes in the data": (
        lambda: fs.Problem(loss, np.zeros(1), [np.array([1.0, np.nan])]),
        "must be finite",
        "got 1 NaN",
    ),
    "nobody": (
        lambda: fs.Problem(loss, np.zeros(1), []),
        "at least one client",
        "got an empty list",
    ),
    "a client without rows": (
        lambda: fs.Problem(loss, np.zeros(1), [np.zeros((0, 1))]),
        "client 0 holds no records",
        "at least one",
    ),
    "a name for an algorithm": (
        lambda: fs.simulate("scaffold", made(3), rounds=1),
        "such as fs.scaffold",
        "got 'scaffold'",
    ),
    "no step size": (lambda: run(lr=None), "lr must be given", "number above 0"),
    "a share beyond all": (lambda: run(cohort=1.5), "share in", "got 1.5"),
    "two kinds of steps": (
        lambda: run(local_epochs=1),
        "either local_steps or local_epochs",
        "one of the two",
    ),
    "weights of others": (
        lambda: run(weights=[1, 2, 3]),
        "each of the 2 clients",
        r"got shape \(3,\)",
    ),
    "labels from one": (
        lambda: fs.problems.softmax([(np.zeros((2, 1)), np.array([1, 9]))], classes=9),
        "below classes = 9",
        "got 9",
    ),
    "a loss that is NaN": (
        lambda: fs.FederatedRegressor(lr=1e30, local_steps=5).fit(
            np.eye(4), np.arange(4.0), clients=[0, 0, 1, 1]
        ),
        "diverged at round 1: lr 1e.30 is above 2/L",
        "try ",
    ),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python(mistake):
    wrong, cause, fix = PYTHON[mistake]
    with pytest.raises(InputError, match=f"{cause}.*{fix}") as refusal:
        wrong()
    assert "\n" not in str(refusal.value)

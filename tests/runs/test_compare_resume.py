"""Comparisons and sweeps that are broken off: they go on run by run, with the bits of one without a break."""

from dataclasses import replace

import pytest
from forked import codes_of

from fedscaffold.cli import comparison_folder as folders
from fedscaffold.experiments import compare
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import parse
from fedscaffold.grids import execute
from fedscaffold.runs import page, read, sources

CONFIG = "rounds = 30\n[local]\nsteps = 2\nlr = 'tuned'\n[problem]\ndataset = 'quadratic'\nnoise = 0.01\ndim = 4"
NAMES = ["scaffold", "fedavg"]


@pytest.fixture(scope="module")
def asked():
    config = parse(CONFIG)
    return config, build(config.problem)


def compared(asked, kept=None):
    ask = "distance:0.5", "fedscaffold compare"
    return compare.compare(*asked, NAMES, 2, *ask, kept=kept, workers=1).study


def same(study, other):
    assert study.rows == other.rows
    for mine, theirs in zip(study.runs, other.runs, strict=True):
        own = {"columns": {"round": ()}, "seconds": None}
        assert replace(mine, **own) == replace(theirs, **own)
        assert mine.columns.keys() == theirs.columns.keys()
        for name, column in mine.columns.items():
            assert column.dtype == theirs.columns[name].dtype
            assert column.tobytes() == theirs.columns[name].tobytes(), name


@pytest.fixture(scope="module")
def quiet(asked):
    return compared(asked)


@pytest.mark.slow
def test_a_comparison_goes_on_with_the_runs_that_are_missing(asked, quiet, tmp_path, monkeypatch):
    usual, ran = execute.run_cell, []

    def run_cell(*given):
        if len(ran) == 7:
            raise KeyboardInterrupt
        ran.append(given)
        return usual(*given)

    monkeypatch.setattr(execute, "run_cell", run_cell)
    with pytest.raises(KeyboardInterrupt):
        compared(asked, tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == 7
    ran.clear()
    monkeypatch.setattr(execute, "run_cell", lambda *given: ran.append(given) or usual(*given))
    study = compared(asked, tmp_path)
    assert len(ran) == len(NAMES) * 2 * len(compare.GRID) - 7
    same(study, quiet)
    assert study.seconds.keys() == quiet.seconds.keys()


def test_a_damaged_run_is_run_again(asked, quiet, tmp_path, monkeypatch):
    compared(asked, tmp_path)
    paths = sorted(tmp_path.glob("cells/*/state-*"))
    damaged = bytearray(paths[5].read_bytes())
    damaged[len(damaged) // 2] ^= 4
    paths[5].write_bytes(damaged)
    paths[17].unlink()
    usual, ran = execute.run_cell, []
    monkeypatch.setattr(
        execute, "run_cell", lambda config, place: ran.append(place) or usual(config, place)
    )
    same(compared(asked, tmp_path), quiet)
    assert sorted(ran) == [paths[5].parent, paths[17].parent]


@pytest.mark.slow
def test_what_a_run_depends_on_is_in_its_key(asked, tmp_path):
    def keys(config):
        before = set(tmp_path.glob("cells/*"))
        ask = build(config.problem), ["fedavg"], 1, None, ""
        compare.compare(config, *ask, kept=tmp_path, workers=1)
        return sorted(set(tmp_path.glob("cells/*")) - before)

    base = parse(CONFIG, ["rounds=2", "local.lr=0.1"])
    assert len(keys(base)) == 1
    assert keys(base) == []
    for change in ("rounds=3", "local.steps=3", "problem.seed=1", "seed=1"):
        assert len(keys(parse(CONFIG, ["rounds=2", "local.lr=0.1", change]))) == 1, change


# The command line, in processes of its own that are killed for real

KILLS = """
import glob, json, os, random, signal, time
import jax, optax, pydantic, scipy.linalg
import fedscaffold as fs
from fedscaffold.cli import comparison_folder, deploy, main, resume, theory
from fedscaffold.experiments import compare, build_problem
from fedscaffold.runs import page
from forked import command as started, ended

ASK = ["compare", "--dataset", "quadratic", "--rounds", "600", "--local-steps", "2", "--lr", "tuned", "--seeds", "2",
       "--algorithms", "scaffold,fedavg", "--set", "problem.noise=0.01", "--set", "problem.dim=4"]

def command(verb, *words):
    # one worker: several are killed by `tests/grids`
    one = () if verb == "run" or words == ("tuned",) else ("--workers", "1")
    return started(verb, *words, *one)

def cells(folder):
    return len(glob.glob(folder + "/cells/*/state-*"))

def killed(pid, number, folder, more, seconds=0.0):
    '''Send a signal once there are some more runs than now.'''
    last = cells(folder) + more
    while cells(folder) < last and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(pid, number)
    return ended(pid)

codes = [ended(command(*ASK, "--out", "quiet"))]
broken = [*ASK, "--out", "broken"]
codes.append(killed(command(*broken), signal.SIGINT, "broken", 1))
codes.append(cells("broken"))
codes.append(killed(command(*broken), signal.SIGKILL, "broken", 1))
codes.append(ended(command(*broken, "--set", "problem.dim=5")))
codes.append(ended(command("run", "tuned.toml", "--set", "output.dir=broken")))
codes.append(ended(command("resume", "broken", "--rounds", "700")))
codes.append(killed(command("resume", "broken"), signal.SIGTERM, "broken", 1))
codes.append(ended(command("resume", "broken")))
codes.append(ended(command("resume", "broken")))
codes.append([os.path.exists("broken/cells"), os.path.exists("quiet/cells")])

codes.append(ended(command("run", "tuned.toml", "--set", "output.dir=whole")))
pid = command("run", "tuned.toml")
codes.append(killed(pid, signal.SIGKILL, "tuned", 1))
codes.append(ended(command("resume", "tuned")))
"""
TUNED = """
rounds = 600
[problem]
dataset = "quadratic"
noise = 0.01
[local]
steps = 2
lr = "tuned"
[output]
dir = "tuned"
"""


@pytest.fixture(scope="module")
def command_line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparisons")
    (folder / "tuned.toml").write_text(TUNED)
    return *codes_of(KILLS, folder), folder


def results(folder):
    """Everything of a study that is the same however often it was broken off: all but the time it took."""
    study = read(folder)
    runs = [
        replace(run, seconds=None, clock=None, config="", columns={"round": ()})
        for run in study.runs
    ]
    columns = [
        {name: column.tobytes() for name, column in run.columns.items()} for run in study.runs
    ]
    return columns, (folder / "table.csv").read_bytes(), runs, study.rows


@pytest.mark.slow
@pytest.mark.process
def test_a_comparison_that_was_killed_goes_on_with_the_same_bits(command_line):
    codes, said, folder = command_line
    assert codes[0] == 0, said
    assert codes[1] == 130, said
    assert 1 <= codes[2] < 24, said
    assert (
        f"stopped; {codes[2]} of 24 runs are kept; the same command goes on, or: fedscaffold resume broken"
        in said
    )
    assert codes[3] == -9, said
    assert codes[7:9] == [143, 0], said
    assert results(folder / "broken") == results(folder / "quiet")
    assert codes[10] == [False, False]


@pytest.mark.process
def test_another_comparison_or_a_run_is_refused_in_its_folder(command_line):
    codes, said, _ = command_line
    assert codes[4:7] == [2, 2, 2], said
    assert (
        "broken holds a comparison that was broken off, and it is another one (config.problem.dim: was 4, is 5)"
        in said
    )
    assert (
        "broken holds runs of a sweep that was broken off: `fedscaffold resume broken` goes on"
        in said
    )
    assert (
        "resume of a comparison takes --json and --workers and --share only, got --rounds" in said
    )
    assert codes[9] == 2
    assert "the comparison in broken is finished" in said


@pytest.mark.process
def test_a_run_with_a_tuned_step_size_goes_on_too(command_line):
    codes, said, folder = command_line
    assert codes[11:] == [0, -9, 0], said
    assert results(folder / "tuned") == results(folder / "whole")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"ended": 1, "config": {}}', "[" * 99_999, "\0"]
)
def test_a_damaged_question_is_named(text, tmp_path):
    (tmp_path / folders.ASKED).write_text(text)
    with pytest.raises(
        folders.InputError, match=r"comparison.json is damaged: give --fresh to start anew"
    ):
        folders.resume_comparison(tmp_path, folders.How(False))


def test_the_page_of_a_comparison_is_the_one_that_its_folder_gives(asked, tmp_path):
    study = compared(asked)
    report = compare.write_results(study, tmp_path)
    assert report.read_text(encoding="utf-8") == page(sources([tmp_path]))

"""Comparisons as grids: other keys beside the algorithm, cells that fail, shares, and job arrays."""

import csv
import json
import os
import subprocess
import sys

import pytest

import fedscaffold as fs
from fedscaffold import cli
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import parse, run_arguments
from fedscaffold.grids import execute
from fedscaffold.grids.worker import Answer
from fedscaffold.runs import read

ASK = ["compare", "--dataset", "quadratic", "--rounds", "6", "--seeds", "2", "--workers", "1"]
ASK += ["--set", "problem.dim=3", "--set", "problem.noise=0.01", "--lr", "0.1"]
OVER = ["--over", "local.steps=1,3", "--over", "problem.mu=0.1,0.2"]


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """The command line in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return run


def table(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_any_key_is_compared_and_each_run_is_one_alone(typed, tmp_path):
    code, out, err = typed(*ASK, *OVER, "--out", "all", "--json")
    assert code == 0, err
    answer = json.loads(out)
    labels = [
        f"{name}, local.steps {steps}, problem.mu {mu}"
        for name in ("scaffold", "fedavg")
        for steps in (1, 3)
        for mu in (0.1, 0.2)
    ]
    assert [row["algorithm"] for row in answer["rows"]] == labels
    assert [row["seeds"] for row in answer["rows"]] == [2] * 8
    rows = table(tmp_path / "all" / "runs.csv")
    assert len(rows) == len(answer["runs"]) == 16
    assert list(rows[0])[:5] == ["algorithm", "local.steps", "problem.mu", "lr", "seed"]
    study = read(tmp_path / "all")
    assert [run.digest for run in study.runs] == [row["digest"] for row in rows]
    for run in study.runs[::5]:  # the configuration in its folder gives the same bits
        config = parse(run.config)
        given = run_arguments(config, without=("every",))
        algorithm = fs.ALGORITHMS[config.algorithm.name]()
        assert fs.simulate(algorithm, build(config.problem).problem, **given).digest == run.digest
    assert not (tmp_path / "all" / "cells").exists()


def fail_once(monkeypatch, fails):
    """Let the runs fail for which `fails(config)` is true."""
    usual = execute.run_cell

    def run_cell(config, place):
        return Answer("not today", "") if fails(config) else usual(config, place)

    monkeypatch.setattr(execute, "run_cell", run_cell)


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_and_a_line_and_is_run_again(typed, tmp_path, monkeypatch):
    ask = [*ASK, "--local-steps", "2", "--out", "some"]
    with monkeypatch.context() as patch:
        fail_once(patch, lambda config: config.algorithm.name == "fedavg" and config.seed == 1)
        code, out, err = typed(*ask)
    assert code == 1
    assert "failed: algorithm fedavg, lr 0.1, seed 1: not today" in err
    assert "1 of 4 runs failed; to run these again: fedscaffold resume some" in err
    assert "FedAvg" in out
    rows = table(tmp_path / "some" / "runs.csv")
    assert [row["error"] for row in rows] == ["", "", "", "not today"]
    assert [row["seeds"] for row in table(tmp_path / "some" / "table.csv")] == ["2", "1"]
    ran, usual = [], execute.run_cell
    monkeypatch.setattr(execute, "run_cell", lambda *given: ran.append(given) or usual(*given))
    code, _, err = typed("resume", "some", "--workers", "1")
    assert (code, len(ran)) == (0, 1), err
    assert [row["seeds"] for row in table(tmp_path / "some" / "table.csv")] == ["2", "2"]


def test_a_comparison_of_which_every_run_fails_has_no_table(typed, tmp_path, monkeypatch):
    fail_once(monkeypatch, lambda config: True)
    code, out, err = typed(*ASK, "--local-steps", "2", "--out", "none")
    assert (code, out) == (1, "")
    assert err.count("not today") == 4
    assert not (tmp_path / "none" / "table.csv").exists()


def test_a_tuned_step_size_whose_runs_fail_is_not_chosen(typed, tmp_path, monkeypatch):
    ask = [*ASK[:-1], "tuned", "--local-steps", "2", "--algorithms", "scaffold"]
    assert typed(*ask, "--out", "well")[0] == 0
    [best] = {row["lr"] for row in table(tmp_path / "well" / "table.csv")}
    fail_once(monkeypatch, lambda config: config.lr == float(best) and config.seed == 1)
    assert typed(*ask, "--out", "ill")[0] == 1
    assert best not in {row["lr"] for row in table(tmp_path / "ill" / "table.csv")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--over", "local.steps"], "--over takes key=value,value such as local.steps=1,5"),
        (["--over", "local.steps=1,1"], "--over local.steps names 1 twice"),
        (["--over", "seed=1,2"], "--over does not take seed: give --seeds"),
        (
            ["--over", "algorithm.name=sgd"],
            "--over does not take algorithm.name: give --algorithms",
        ),
        (["--over", "output.dir=a,b"], "--over does not take output.dir: all runs share a folder"),
        (["--over", "algorithm.mu=1,2"], "--over algorithm.mu is for one algorithm"),
        (["--over", "local.stepz=1,2"], "unknown key 'local.stepz' (did you mean 'local.steps'?)"),
        (["--over", "cohort.size=0.5,7.0"], "cohort.size must be a share"),
        (["--over", "local.momentum=0.5,0.7"], "makes no use of local.momentum"),
        (["--workers", "0"], "workers must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, said, typed, tmp_path):
    steps = [] if any("local.steps=" in word for word in words) else ["--local-steps", "2"]
    code, _, err = typed(*ASK, *steps, *words)
    assert code == 2
    assert said in err
    assert not list(tmp_path.glob("runs/compare/cells/*"))


@pytest.mark.slow
def test_the_parameters_of_one_algorithm_are_compared(typed, tmp_path):
    ask = [*ASK, "--local-steps", "2", "--algorithms", "fedprox", "--over", "algorithm.mu=0.1,5.0"]
    assert typed(*ask, "--out", "mu")[0] == 0
    runs = read(tmp_path / "mu").runs
    assert len({run.digest for run in runs}) == 4
    for run in runs:
        config = parse(run.config)
        mu = 0.1 if "0.1" in run.algorithm else 5.0
        assert config.algorithm.parameters == {"mu": mu}


@pytest.mark.parametrize("share", ["4", "4/4", "a/2", "-1/2", "0/0"])
def test_a_share_that_is_none_is_refused(share, typed):
    assert typed(*ASK, "--local-steps", "2", "--slurm", "job.sh")[0] == 0
    code, _, err = typed("resume", "runs/compare", f"--share={share}")
    assert code == 2
    assert "--share must be I/N" in err


# A scheduler for the script: it runs the tasks of an array one after the other
SBATCH = """#!/bin/bash
echo "sbatch $*" >> asked
last=""; wrap=""
while [ $# -gt 0 ]; do
  case "$1" in --wrap) wrap="$2"; shift;; esac
  last="$1"; shift
done
if [ -n "$wrap" ]; then SLURM_JOB_ID=8 exec bash -c "$wrap"; fi
array=$(sed -n 's/^#SBATCH --array=//p' "$last")
for task in $(seq "${array%-*}" "${array#*-}"); do
  SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task bash "$last" >> said 2>&1 || exit
  ls -d out/cells/*/ | wc -l >> counts
done
echo "7;cluster"
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_job_array_runs_shares_into_one_folder_and_its_last_job_makes_the_table(typed, tmp_path):
    ask = [*ASK, "--algorithms", "fedavg", "--local-steps", "2", "--over", "problem.mu=0.1,0.2"]
    code, out, err = typed(*ask, "--out", "out", "--slurm", "job.sh", "--tasks", "2", "--json")
    assert code == 0, err
    assert json.loads(out) == {"script": "job.sh", "tasks": 2, "runs": 4, "folder": "out"}
    places = tmp_path / "bin"
    places.mkdir()
    main = "from fedscaffold.cli import main; main()"
    program = f'#!/bin/sh\nexec {sys.executable} -c "{main}" "$@"\n'
    for name, text in (("sbatch", SBATCH), ("ours", program)):
        (places / name).write_text(text)
        (places / name).chmod(0o755)
    env = {"PATH": f"{places}:{os.environ['PATH']}", "FEDSCAFFOLD": str(places / "ours")}
    done = subprocess.run(
        ["bash", "job.sh", "--partition=short"],
        env=os.environ | env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "said").read_text()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "sbatch --parsable --partition=short job.sh"
    assert asked[1].startswith("sbatch --dependency=afterany:7 ")
    assert (tmp_path / "counts").read_text().split() == ["2", "4"]
    assert "report: " in done.stdout
    assert typed(*ask, "--out", "quiet")[0] == 0
    own = ("seconds",)
    assert [
        {key: value for key, value in row.items() if key not in own}
        for row in table(tmp_path / "out" / "runs.csv")
    ] == [
        {key: value for key, value in row.items() if key not in own}
        for row in table(tmp_path / "quiet" / "runs.csv")
    ]
    assert (tmp_path / "out" / "table.csv").read_text() == (
        tmp_path / "quiet" / "table.csv"
    ).read_text()

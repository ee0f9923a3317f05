"""A run's folder is one process's own for as long as the run lasts: tried with real processes beside a live run."""

import json
import os
import platform
from pathlib import Path

import pytest
from forked import codes_of
from forkserver import fedscaffold

import fedscaffold as fs
from fedscaffold.state import StateError
from fedscaffold.state.files import owned

CONFIG = """
rounds = 10_000_000
[problem]
dataset = "quadratic"
clients = 6
dim = 4
[local]
steps = 200
lr = 0.1
[output]
dir = "runs/live"
checkpoint_every = 1000
"""

# one process imports everything and forks a child for each command
BESIDE = """
import glob, hashlib, json, os, signal, time
import jax, optax, pydantic, scipy.linalg
import fedscaffold as fs
from fedscaffold.cli import deploy, main, resume, theory
from fedscaffold.experiments import compare, build_problem
from forked import command, ended

def still():
    '''What is in the folder and does not change while a run goes on.'''
    names = sorted(name for name in os.listdir("runs/live") if name != "rounds.jsonl")
    return names, {name: open(f"runs/live/{name}").read() for name in ("config.toml", ".owner")}

def begun(folder):
    while not os.path.exists(f"{folder}/rounds.jsonl"):
        time.sleep(0.02)

live = command("run", "live.toml")
try:
    begun("runs/live")
    before = still()
    into = ("--dataset", "quadratic", "--rounds", "2", "--local-steps", "1", "--seeds", "1", "--out", "runs/live")
    codes = [live]
    codes += [ended(command(*words)) for words in (
        ("resume", "runs/live"),
        ("run", "live.toml"),
        ("run", "live.toml", "--fresh"),
        ("run", "live.toml", "--fresh", "--set", "rounds=3", "--set", "local.lr=tuned"),
        ("compare", *into),
    )]
    codes.append(still() == before and len(glob.glob("runs/live/checkpoint/state-*")) > 0)
    codes += [ended(command("watch", "runs/live", "--json")), ended(command("diagnose", "runs/live"))]
    codes.append(os.waitpid(live, os.WNOHANG) == (0, 0))
    codes.append('"end"' not in open("runs/live/rounds.jsonl").read())
finally:
    os.kill(live, signal.SIGKILL)
codes.append(ended(live))
second = command("resume", "runs/live")
while open("runs/live/.owner").read().split()[:1] != [str(second)]:
    time.sleep(0.02)
time.sleep(0.3)
os.kill(second, signal.SIGTERM)
codes.append(ended(second))

# two at the same instant, again and again: one gets the folder, and is stopped when the other has ended
for _ in range(3):
    pair = [command("run", "live.toml", "--set", "output.dir=runs/race", "--fresh") for _ in range(2)]
    loser, status = os.wait()
    [winner] = set(pair) - {loser}
    os.kill(winner, signal.SIGTERM)
    codes.append([os.waitstatus_to_exitcode(status), ended(winner)])
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owner")
    (folder / "live.toml").write_text(CONFIG)
    return codes_of(BESIDE, folder)


@pytest.mark.slow
@pytest.mark.process
def test_nobody_writes_into_the_folder_of_a_live_run(beside):
    (live, *codes), said = beside
    assert codes[:5] == [2] * 5, said
    assert (
        said.count(
            f"runs/live is in use by process {live}: wait until it ends, or take another folder"
        )
        == 5
    ), said
    assert codes[5], said


@pytest.mark.process
def test_readers_look_at_a_live_run_and_it_goes_on(beside):
    (_, *codes), said = beside
    assert codes[6] == 0, said
    assert codes[7] in (0, 1), said  # it may have something to say about the run
    assert codes[8:10] == [True, True], said


@pytest.mark.process
def test_what_a_killed_owner_leaves_is_in_nobodys_way(beside):
    (_, *codes), said = beside
    assert codes[10:12] == [-9, 143], said


@pytest.mark.process
def test_of_two_that_start_at_the_same_instant_one_gets_the_folder(beside):
    (_, *codes), said = beside
    assert codes[12:] == [[2, 143]] * 3, said


def test_a_checkpoint_folder_is_owned_in_python_too(tmp_path):
    problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1)
    ask = {"rounds": 3, "local_steps": 1, "lr": 0.1, "checkpoint": tmp_path}
    with owned(tmp_path), pytest.raises(StateError, match=f"is in use by process {os.getpid()}:"):
        fs.simulate(fs.scaffold(), problem, **ask)
    assert not list(tmp_path.glob("state-*"))
    assert fs.simulate(fs.scaffold(), problem, **ask).rounds == 3


def test_whatever_the_file_of_the_owner_holds_does_no_harm(tmp_path):
    for text in ("", "not a number", "1 " + platform.node(), "9" * 5000, "12 elsewhere"):
        (tmp_path / ".owner").write_text(text)
        with owned(tmp_path):
            assert (tmp_path / ".owner").read_text().split()[0] == str(os.getpid())
            (tmp_path / ".owner").write_text(text)
            with (
                pytest.raises(StateError, match=r"is in use by (another process|process \d+)"),
                owned(tmp_path),
            ):
                pass
    (tmp_path / ".owner").unlink()
    (tmp_path / ".owner").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(StateError, match=r"making .* the folder of one run failed"),
        owned(tmp_path),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.process
def test_a_deployment_is_owned_while_it_lasts(tmp_path):
    fedscaffold("deploy", "new", "app", "--jax", cwd=tmp_path, check=True)
    facts = {"app": str(tmp_path / "app"), "engine": "in-process"}
    for words in (
        ["simulate", "app", "--out", "out"],
        ["local", "app", "--out", "out"],
        ["resume", "out"],
    ):
        with owned(tmp_path / "out"):
            (tmp_path / "out/deployment.json").write_text(json.dumps(facts))
            done = fedscaffold("deploy", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"out is in use by process {os.getpid()}" in done.stderr
    assert sorted(path.name for path in Path(tmp_path / "out").iterdir()) == [
        ".owner",
        "deployment.json",
    ]

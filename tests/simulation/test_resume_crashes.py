"""Runs killed at random moments, in processes of their own: the command line, and a soak of tiny rounds.

One process imports everything once and forks a child for every attempt, so that ten kills cost ten runs and not ten
imports; a child starts JAX by itself, runs the real command line, and dies by a real signal.
"""

import json
from pathlib import Path

import pytest
from forked import codes_of

from fedscaffold.runs import read

CONFIG = """
rounds = 2500
metrics = ["loss"]
precision = "float64"
[problem]
dataset = "quadratic"
clients = 6
dim = 4
noise = 0.01
[local]
steps = 2
lr = 0.1
[cohort]
size = 0.5
[output]
dir = "runs/killed"
checkpoint_every = 25
"""

FORKS = """
import contextlib, io, json, os, random, resource, signal, sys, time
import jax, optax, pydantic, scipy.linalg
import fedscaffold as fs
from fedscaffold.cli import deploy, main, resume
from fedscaffold.experiments import compare, build_problem
from fedscaffold.runs import page
from forked import child, command, ended

def newest(folder):
    names = os.listdir(folder) if os.path.exists(folder) else []
    return max((int(name.split("-")[1]) for name in names if name.startswith("state-")), default=0)

def killed(pid, number, folder, commits, seconds):
    '''Send a signal some commits and seconds from now, wherever the child may then be.'''
    wait_for(pid, folder, commits)
    time.sleep(seconds)
    os.kill(pid, number)
    return ended(pid)

def killed_early(pid, folder, seconds):
    '''Kill in the middle of the start: after some seconds, and at the first commit at the latest.'''
    wait_for(pid, folder, 1, time.monotonic() + seconds)
    os.kill(pid, signal.SIGKILL)
    return ended(pid)

def wait_for(pid, folder, commits, until=float("inf")):
    last = newest(folder) + commits
    while newest(folder) < last and time.monotonic() < until:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.002)
"""

KILLS = """
codes = [ended(command("run", "first.toml", "--set", "output.dir=runs/quiet"))]
random.seed(1)
kept, kills = "runs/killed/checkpoint", []
for attempt in range(attempts):
    words = ("resume", "runs/killed") if os.path.exists("runs/killed/config.toml") else ("run", "first.toml")
    pid = command(*words)
    if attempt % 3 == 0:  # in the middle of its start; others between or inside commits
        kills.append(killed_early(pid, kept, random.uniform(0, 1)))
    else:
        kills.append(killed(pid, signal.SIGKILL, kept, random.randrange(1, 6), random.uniform(0, 0.02)))
codes += [kills, ended(command("resume", "runs/killed"))]

def stopped(pid, number):
    return killed(pid, number, "runs/stopped/checkpoint", 3, 0)

more = ("--set", "output.dir=runs/stopped", "--set", "output.checkpoint_every=20")
codes.append(stopped(command("run", "first.toml", *more), signal.SIGINT))
codes.append(ended(command("run", "first.toml", *more)))
codes.append(stopped(command("resume", "runs/stopped"), signal.SIGTERM))
codes.append(ended(command("resume", "runs/stopped")))

text = open("runs/stopped/config.toml").read()
open("runs/stopped/config.toml", "w").write(text.replace("lr = 0.1", "lr = 0.2"))
codes += [ended(command("resume", "runs/stopped")), ended(command("resume", "nowhere"))]
"""

SOAK = """
problem = fs.problems.quadratic(num_clients=6, dim=4, mu=0.05, noise=0.01, seed=0)

def run(rounds, **more):
    return fs.simulate(fs.scaffold(), problem, rounds=rounds, local_steps=1, lr=0.1, cohort=2, precision="float64",
                       metrics=(), **more)

def soak(rounds):
    return run(rounds, checkpoint="soak", every=100)

def quiet():
    json.dump(run(4000).digest, open("quiet.json", "w"))

def last():
    soak(3000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = soak(4000)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    json.dump([done.digest, grown, done.residual / done.scale], open("soak.json", "w"))

codes = [ended(child(quiet))]
random.seed(2)
for attempt in range(attempts):
    pid = child(lambda: soak(4000))
    codes.append(killed(pid, signal.SIGKILL, "soak", random.randrange(1, 6), random.uniform(0, 0.02)))
codes.append(ended(child(last)))
"""


def forked(script, folder, attempts):
    (folder / "first.toml").write_text(CONFIG)
    return codes_of(f"attempts = {attempts}\n" + FORKS + script, folder)


@pytest.fixture(scope="module", params=[3, pytest.param(25, marks=pytest.mark.soak)])
def command_line(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("command-line")
    return *forked(KILLS, folder, request.param), folder / "runs"


@pytest.mark.process
def test_killed_again_and_again_the_command_line_ends_with_the_same_bits(command_line):
    (quiet, kills, resumed, *_), said, runs = command_line
    assert quiet == resumed == 0, said
    # the run may be over before the last kills, and resuming it is then nothing to kill
    assert set(kills) <= {-9, 0}, said
    assert kills[0] == -9, kills
    assert kills.count(-9) >= 2, kills
    assert bits(runs / "quiet") == bits(runs / "killed")
    assert digest(runs / "quiet") == digest(runs / "killed")
    assert not (runs / "killed/.new").exists()


@pytest.mark.process
def test_interrupted_runs_say_how_to_go_on(command_line):
    codes, said, runs = command_line
    assert codes[3:7] == [130, 2, 143, 0], said
    assert "go on with: fedscaffold resume runs/stopped" in said
    assert "runs/stopped holds a run that stopped after round" in said
    assert bits(runs / "quiet") == bits(runs / "stopped")
    assert digest(runs / "quiet") == digest(runs / "stopped")


@pytest.mark.process
def test_a_config_that_does_not_fit_is_refused_with_the_difference(command_line):
    codes, said, _ = command_line
    assert codes[7:] == [2, 2], said
    assert "lr: was 0.1, is 0.2" in said
    assert "nowhere holds no run: config.toml is missing" in said


def digest(folder: Path):
    return read(folder).runs[0].digest


def bits(folder: Path):
    """All metrics, as bytes."""
    return {name: column.tobytes() for name, column in read(folder).runs[0].columns.items()}


@pytest.mark.process
@pytest.mark.soak  # in short: the command line, killed above, commits and dies by the same signals
@pytest.mark.parametrize("attempts", [3, 25])
def test_a_soak_of_tiny_rounds_under_random_kills(attempts, tmp_path):
    codes, said = forked(SOAK, tmp_path, attempts)
    quiet, *kills, last = codes
    assert (quiet, last) == (0, 0), said
    assert set(kills) <= {-9, 0}, said
    assert kills[0] == -9, kills
    found, grown, relative = json.loads((tmp_path / "soak.json").read_text())
    assert found == json.loads((tmp_path / "quiet.json").read_text())
    assert grown < 20_000  # kilobytes
    assert relative < 1000 * 2.3e-16 * 4000**0.5

"""`fedscaffold deploy ...` as a user meets it: examples that work, one line for a mistake, --json everywhere."""

import hashlib
import json
import sys
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedscaffold.cli import main

pytest.importorskip("torch")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def fedscaffold(monkeypatch, capsys, tmp_path):
    """The command line, in this process: importing torch anew for every verb would take most of the time."""
    monkeypatch.delenv("FEDSCAFFOLD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return Done(left.value.code, *capsys.readouterr())

    return call


@pytest.mark.slow
def test_a_new_torch_app_learns_resumes_and_shows_its_status(fedscaffold):
    made = fedscaffold("deploy", "new", "app", "--torch", "--json")
    assert made.returncode == 0, made.stderr
    assert len(json.loads(made.stdout)["files"]) == 3
    first = fedscaffold("deploy", "simulate", "app", "--out", "run", "--rounds", 3, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["rounds"] == 3
    again = fedscaffold("deploy", "simulate", "app", "--out", "run")
    assert again.returncode == 2
    assert "deploy resume run" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    more = fedscaffold("deploy", "resume", "run", "--json")
    answer = json.loads(more.stdout)
    assert (answer["rounds"], answer["metrics"]["accuracy"] > 0.6) == (5, True)
    assert answer["residual"] < 1e-5
    shown = json.loads(fedscaffold("deploy", "status", "run", "--json").stdout)
    assert (shown["phase"], shown["round"], shown["refused"]) == ("finished", 5, [])
    assert "chain whole" in fedscaffold("deploy", "status", "run").stdout


def test_a_federation_that_is_being_started_says_so(fedscaffold, tmp_path):
    """The processes of a real one take half a minute to come up."""
    (tmp_path / "run").mkdir()
    none = fedscaffold("deploy", "status", "run")
    assert (none.returncode, "nothing was started there" in none.stderr) == (2, True)
    (tmp_path / "run" / "deployment.json").write_text('{"app": "app", "engine": "local"}')
    shown = fedscaffold("deploy", "status", "run", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["phase"]) == (0, "starting")
    assert "deploy resume run" in fedscaffold("deploy", "status", "run").stdout


@pytest.mark.slow
def test_ctrl_c_within_a_round_keeps_what_was_committed_and_says_how_to_go_on(
    fedscaffold, tmp_path
):
    fedscaffold("deploy", "new", "app", "--torch")
    quiet = json.loads(
        fedscaffold("deploy", "simulate", "app", "--out", "quiet", "--rounds", 3, "--json").stdout
    )
    app = tmp_path / "app" / "app.py"
    usual, pressed = (
        app.read_text(encoding="utf-8"),
        "\n_loss, _calls = loss, []\n\n\ndef loss(module, batch):\n",
    )
    pressed += "    _calls.append(1)\n    if len(_calls) == 7:\n        raise KeyboardInterrupt\n    return _loss(module, batch)\n"
    head, mark, tail = usual.partition("\n\ndef learner(")
    app.write_text(head + pressed + mark + tail, encoding="utf-8")
    stopped = fedscaffold("deploy", "simulate", "app", "--out", "run", "--rounds", 3)
    assert (stopped.returncode, "deploy resume run" in stopped.stderr) == (130, True), stopped
    app.write_text(usual, encoding="utf-8")
    done = json.loads(fedscaffold("deploy", "resume", "run", "--rounds", 3, "--json").stdout)
    assert done["metrics"] == quiet["metrics"]


@pytest.mark.slow
def test_a_new_jax_app_runs_in_the_simulator_too_and_leaves_its_model(fedscaffold, tmp_path):
    fedscaffold("deploy", "new", "app", "--jax")
    mine = fedscaffold("deploy", "simulate", "app", "--rounds", 2, "--json")
    ask = (
        "deploy",
        "simulate",
        "app",
        "--engine",
        "simulator",
        "--out",
        "o2",
        "--rounds",
        2,
        "--json",
    )
    theirs = fedscaffold(*ask)
    assert json.loads(mine.stdout)["metrics"]["accuracy"] > 0.3, mine.stderr
    answer = json.loads(theirs.stdout)
    assert answer["rounds"] == 2, theirs.stderr
    deployed, simulated = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "runs/deploy", tmp_path / "o2")
    )
    assert deployed.keys() == simulated.keys()
    assert all(simulated[name].shape == array.shape for name, array in deployed.items())
    flat = np.concatenate(
        [simulated[name].ravel() for name in sorted(simulated)]
    )  # as JAX orders a dict
    assert hashlib.sha256(flat.tobytes()).hexdigest().startswith(answer["digest"])
    lines = [
        json.loads(line) for line in (tmp_path / "o2" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["round"] for line in lines] == [1, 2]
    assert lines[-1]["loss"] == answer["last"]["loss"]
    for words in (ask, ("deploy", "resume", "o2")):
        refused = fedscaffold(*words)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


TORCH = """
import torch
from layers import Normed

from fedscaffold.deploy import TorchLearner


def data(site):
    made = torch.Generator().manual_seed(len(site))
    return {"x": torch.randn(len(site), 3, generator=made), "y": torch.ones(len(site), 1)}


def loss(module, batch):
    return ((module(batch["x"]) - batch["y"]) ** 2).mean()


def learner(settings):
    return TorchLearner(Normed, loss, data, precision=settings.precision)
"""
LAYERS = """
from torch import nn


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_torch_app_with_a_module_beside_it_is_the_same_in_the_simulator(
    buffers, fedscaffold, tmp_path
):
    app = tmp_path / "app"
    app.mkdir()
    (app / "app.py").write_text(TORCH)
    (app / "layers.py").write_text(LAYERS)
    (app / "federation.toml").write_text(
        "rounds = 4\nprecision = 'float64'\n"
        "[local]\nsteps = 3\nlr = { 1 = 0.1, 3 = 0.02 }\nclip_norm = 0.3\n"
        f"buffers = '{buffers}'\n"
        "[deploy]\nsites = ['northern', 'southwest', 'east']\n"
    )
    for engine in ("in-process", "simulator"):
        done = fedscaffold("deploy", "simulate", "app", "--out", engine, "--engine", engine)
        assert done.returncode == 0, done.stderr
    deployed, simulated = (
        load_file(tmp_path / engine / "model.safetensors") for engine in ("in-process", "simulator")
    )
    assert deployed.keys() == simulated.keys()
    trained = [name for name in deployed if "running" not in name and "num" not in name]
    for name in deployed if buffers == "average" else trained:
        np.testing.assert_allclose(simulated[name], deployed[name], rtol=0, atol=1e-12)
    text = (app / "federation.toml").read_text()
    (app / "federation.toml").write_text(text.replace("steps = 3", "steps = 3\noptimizer = 'adam'"))
    refused = fedscaffold("deploy", "simulate", "app", "--out", "other", "--engine", "simulator")
    assert (refused.returncode, "no local.optimizer" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new", "here"], "is not empty"),
        (["new", "there", "--torch", "--jax"], "either --torch or --jax"),
        (["simulate", "nowhere"], "deploy new DIR"),
        (["resume", "nowhere"], "no deployment.json"),
        (["status", "nowhere"], "nothing was started there"),
        (["check", "nowhere"], "no site.json"),
        (["kit", "nowhere.toml"], "nowhere.toml"),
        (["local", "here", "--out", "run"], "federation.toml not found"),
        (
            ["local", "here", "--out", "run", "--timeout", "nan"],
            "timeout must be a number above 0, got nan",
        ),
        (["resume", "nowhere", "--timeout", "-1"], "timeout must be a number above 0, got -1.0"),
    ],
)
def test_a_mistake_is_one_line(words, said, fedscaffold, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    done = fedscaffold("deploy", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_shows_examples(fedscaffold):
    for verb in (
        "new",
        "simulate",
        "local",
        "resume",
        "kit",
        "check",
        "bundle",
        "export",
        "metrics",
        "status",
    ):
        assert "Example: fedscaffold deploy" in fedscaffold(
            "deploy", verb, "--help"
        ).stdout.replace("\n", " ")

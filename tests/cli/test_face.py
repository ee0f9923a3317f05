"""The first things that are typed: dir, repr, --help in a pipe."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
from forkserver import fedscaffold

import fedscaffold as fs
from fedscaffold import deploy


def test_dir_lists_what_is_there_to_be_used_and_nothing_else():
    listed = [name for name in dir(fs) if not name.startswith("_")]
    assert set(fs.__all__) <= set(listed)
    assert not {"Any", "importlib", "annotations", "TYPE_CHECKING"} & set(listed)
    for name in listed:
        assert getattr(fs, name) is not None
    assert {"TorchLearner", "JaxLearner", "Server"} <= set(dir(deploy))
    assert not {"Any", "TYPE_CHECKING"} & set(dir(deploy))


@pytest.mark.process
def test_dir_is_known_before_jax_is_loaded():
    code = "import fedscaffold as fs, sys; assert 'simulate' in dir(fs); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


PROBLEM = fs.problems.quadratic(num_clients=6, dim=20, mu=0.1, noise=0.01)
SMALL = fs.problems.quadratic(num_clients=3, dim=2, mu=0.1, noise=0.01)
ASK = {"rounds": 3, "local_steps": 2}
RESULTS = {
    "run": lambda: fs.simulate(fs.scaffold(), PROBLEM, lr=0.1, **ASK),
    "sweep": lambda: fs.sweep(
        fs.scaffold(), PROBLEM, lr=np.geomspace(0.01, 0.1, 10), seeds=3, **ASK
    ),
    "richardson": lambda: fs.richardson(fs.fedavg(), PROBLEM, lr=0.1, **ASK),
    "plan": lambda: fs.plan(SMALL, target=0.5),
    "heterogeneity": lambda: fs.heterogeneity(PROBLEM),
    "spectra": lambda: fs.theory.spectra(PROBLEM),
    "stationary": lambda: fs.theory.stationary(PROBLEM, lr=0.1, local_steps=2, noise=0.01),
    "round map": lambda: fs.theory.round_map(PROBLEM, lr=0.1, local_steps=2),
    "problem": lambda: PROBLEM,
    "world": fs.problems.garnet,
    "algorithm": fs.scaffold,
    "data": lambda: fs.data.load("digits"),
    "clients' data": lambda: fs.data.federate(fs.data.load("digits"), "iid", 20, seed=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_every_result_is_shown_in_one_line(name):
    line = repr(RESULTS[name]())
    assert "\n" not in line
    assert 5 < len(line) < 1000
    assert "array(" not in line


def test_a_run_says_how_it_went():
    run = RESULTS["run"]()
    assert repr(run).startswith("Run(3 rounds, d = 20, ")
    assert f"loss {run.history['loss'][-1]:.4g}" in repr(run)
    assert (
        repr(run.clients)
        == "Clients(memory=Memory(c_i=float32 (6, 20)), age=None, who=None, own=None, models=None, state=None)"
    )
    bad = fs.simulate(fs.scaffold(), PROBLEM, lr=1e6, rounds=50, local_steps=2)
    assert f"diverged in round {bad.diverged_at}" in repr(bad)


def test_public_results_show_themselves():
    """Whoever adds a result with arrays gives it a short repr."""
    for room in ("simulation", "theory", "data", "problems"):
        module = importlib.import_module(f"fedscaffold.{room}")
        for name in module.__all__:
            kind = getattr(module, name)
            if isinstance(kind, type) and issubclass(kind, tuple):
                held = " ".join(map(str, kind.__annotations__.values()))
                if "NDArray" in held or "Floats" in held:
                    assert kind.__repr__.__module__.startswith("fedscaffold"), name


@pytest.mark.process
@pytest.mark.parametrize("words", [["compare"], ["plan"], ["deploy", "local"], ["data", "show"]])
def test_help_in_a_pipe_has_no_backslashes(words):
    done = fedscaffold(*words, "--help", check=True)
    assert "[default: " in done.stdout
    assert "\\" not in done.stdout

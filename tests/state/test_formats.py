"""Files of version 0.1.0, which say no format, are read or refused in a line; files of a newer version are refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.cli.comparison_folder import ASKED, _read_request
from fedscaffold.deploy import server_state
from fedscaffold.deploy.settings import parse as parse_settings
from fedscaffold.experiments.config_file import Config, load, parse, to_toml
from fedscaffold.parsing import toml
from fedscaffold.state import commit, latest

NEWER = "this version reads formats up to"
# config.toml of a run's folder, as 0.1.0 resolved it
CONFIG = """
seed = 3
rounds = 7
weights = "equal"
precision = "float64"
evaluate_every = 1
stale = "keep"
compression = "none"
client_state = "array"

[problem]
dataset = "quadratic"
split = "similarity:0"
model = "softmax"
l2 = 0.0
dim = 20
mu = 0.01
smoothness = 1.0
noise = 0.0
seed = 0

[algorithm]
name = "scaffold"

[local]
steps = 5
lr = 0.1
draw = "auto"
optimizer = "sgd"
momentum = 0.9

[cohort]
size = 1.0

[server]
optimizer = "none"
lr = 1.0
momentum = 0.9

[output]
dir = "runs/old"
"""


def test_a_configuration_of_0_1_0_is_read_and_resolves_to_one_with_a_format(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    config = load(tmp_path / "config.toml")
    assert (config.seed, config.rounds, config.local.steps) == (3, 7, 5)
    new = toml(to_toml(config), "config.toml")
    assert new.pop("format") == 1
    # later keys, as it was before there were any
    assert new["local"].pop("drop_last") is False
    assert new["cohort"].pop("staleness") == "none"
    assert new == toml(CONFIG, "config.toml")


@pytest.mark.parametrize("read", [parse, parse_settings])
def test_a_newer_text_is_refused(read):
    with pytest.raises(InputError, match=f"has format 99, and {NEWER} 1: update"):
        read("format = 99\nnever_heard_of = 1")
    with pytest.raises(InputError, match=r"format of .* must be a whole number"):
        read("format = 'new'")
    assert read("format = 1\nrounds = 4").rounds == read("rounds = 4").rounds == 4


def test_the_note_of_a_comparison(tmp_path):
    config = Config().model_dump(exclude_none=True)
    old = {
        "config": config,
        "algorithms": ["scaffold"],
        "left_out": {},
        "seeds": 2,
        "target": None,
        "ended": False,
    }
    (tmp_path / ASKED).write_text(json.dumps(old))
    asked, ended = _read_request(tmp_path)
    assert (asked.seeds, ended) == (2, False)
    (tmp_path / ASKED).write_text(json.dumps(old | {"format": 99, "never_heard_of": 1}))
    with pytest.raises(InputError, match=NEWER):
        _read_request(tmp_path)


ASK = {"rounds": 4, "local_steps": 2, "lr": 0.1, "precision": "float64"}


def rewritten(folder, into, change):
    """The newest commit of a folder, with other facts, in a folder of its own."""
    snapshot = latest(folder)
    commit(into, snapshot.arrays, change(dict(snapshot.facts)))


def test_a_checkpoint_of_0_1_0_is_refused_with_what_to_do(tmp_path):
    """Its arrays were those of a state of fixed fields; it said no format."""
    problem = fs.problems.quadratic(num_clients=3, dim=2, mu=0.1)
    fs.simulate(fs.scaffold(), problem, checkpoint=tmp_path / "new", **ASK)
    facts = latest(tmp_path / "new").facts
    assert facts["format"] == 2
    old = {name: value for name, value in facts.items() if name != "format"}
    arrays = {
        "state.x": np.zeros(2),
        "state.c": np.zeros(2),
        "state.c_i": np.zeros((3, 2)),
        "state.mean": np.zeros(2),
    }
    commit(tmp_path / "old", arrays, old)
    with pytest.raises(
        InputError,
        match=r"is of fedscaffold 0\.1\.0, .*: finish the run with 0\.1\.0, or start anew",
    ):
        fs.simulate(fs.scaffold(), problem, checkpoint=tmp_path / "old", **ASK)
    rewritten(tmp_path / "new", tmp_path / "newer", lambda facts: facts | {"format": 99})
    with pytest.raises(InputError, match=f"{NEWER} 2: update fedscaffold"):
        fs.simulate(fs.scaffold(), problem, checkpoint=tmp_path / "newer", **ASK)


def test_the_state_of_a_server_of_0_1_0_is_read(tmp_path):
    """As it was committed: x, c and the c_i by site, without a format and without the names of its means."""
    settings, schema = parse_settings("[local]\nsteps = 2"), SimpleNamespace(digest="schema")
    member = {
        "records": 4,
        "mass": 1.0,
        "applied": 5,
        "digest": "",
        "told": "",
        "lost": 0,
        "rests": 0,
    }
    arrays = {
        "x": np.array([1.0, 2.0]),
        "c": np.array([3.0, 4.0]),
        "c_i.north": np.array([3.0, 4.0]),
    }
    facts = {
        "run": "r",
        "round": 5,
        "scale": 0.0,
        "resync": False,
        "settings": settings.digest,
        "schema": "schema",
        "roster": {"north": member},
        "audit": None,
    }
    commit(tmp_path / "old", arrays, facts)
    kept = server_state.load_state(tmp_path / "old", settings, schema)
    assert kept.state.round == 5
    np.testing.assert_array_equal(kept.state.server.c, arrays["c"])
    np.testing.assert_array_equal(kept.state.memory["north"].c_i, arrays["c_i.north"])
    assert kept.means == (("c", "c_i"),)
    server_state.save_state(tmp_path / "new", kept._replace(generation=0), settings, schema)
    assert latest(tmp_path / "new").facts["format"] == 2
    rewritten(tmp_path / "new", tmp_path / "newer", lambda facts: facts | {"format": 99})
    with pytest.raises(InputError, match=f"{NEWER} 2: update fedscaffold"):
        server_state.load_state(tmp_path / "newer", settings, schema)

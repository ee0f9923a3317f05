"""Every key of the configuration is taken into account by `plan` and `diagnose`, or refused by its name."""

import json
import sys

import pytest
from pydantic import BaseModel

from fedscaffold.cli import main
from fedscaffold.cli.theory import USES
from fedscaffold.experiments.config_file import Config

SMALL = [
    "--clients",
    "4",
    "--set",
    "problem.dim=2",
    "--set",
    "problem.mu=0.2",
    "--set",
    "problem.noise=0.01",
]
VERBS = {
    "plan": ["--dataset", "quadratic", "--target", "0.3", *SMALL],
    "diagnose": ["--dataset", "quadratic", *SMALL],
}

# a value other than the default for every key; a new key of the configuration has to be entered here
VALUES = {
    "seed": 3,
    "rounds": 7,
    "weights": "records",
    "precision": "float64",
    "stop_at": "loss:0.1",
    "metrics": "['loss']",
    "evaluate_every": 2,
    "block": 1,
    "stale": "decay:0.9",
    "compression": "top:0.1",
    "client_state": "file",
    "robust": "krum:0.2",
    "problem.dataset": "synthetic-linear",
    "problem.split": "iid",
    "problem.clients": 3,
    "problem.model": "mlp",
    "problem.l2": 0.1,
    "problem.dim": 3,
    "problem.mu": 0.1,
    "problem.smoothness": 2.0,
    "problem.noise": 0.2,
    "problem.seed": 5,
    "problem.data": "'.'",
    "algorithm.name": "fedprox",
    "local.steps": 2,
    "local.epochs": 2,
    "local.batch_size": 2,
    "local.lr": 0.05,
    "local.draw": "shuffle",
    "local.drop_last": "true",
    "local.clip_norm": 1.0,
    "local.optimizer": "adam",
    "local.momentum": 0.5,
    "cohort.size": 2,
    "cohort.availability": "trace.csv",
    "cohort.delays": "constant:1",
    "cohort.buffer": 2,
    "cohort.staleness": "polynomial:0.5",
    "server.optimizer": "adam",
    "server.lr": 0.5,
    "server.momentum": 0.5,
    "privacy.unit": "clients",
    "privacy.clip": 1.0,
    "privacy.noise": 1.0,
    "privacy.delta": 1e-5,
    "privacy.sampling": "poisson",
    "privacy.stop_at_epsilon": 3.0,
    "output.dir": "elsewhere",
    "output.checkpoint_every": 3,
}
UNUSED = {"problem.split", "problem.model", "problem.l2"}  # by quadratics
SAME = {
    "problem.data",
    "weights",
    "local.batch_size",
}  # used, but no difference for clients of one record and no files


def keys():
    for key, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from (f"{key}.{one}" for one in section.model_fields)
        else:
            yield key


def answer(monkeypatch, capsys, verb, *more):
    monkeypatch.setattr(sys, "argv", ["fedscaffold", verb, *VERBS[verb], *more, "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    code, (out, said) = left.value.code, capsys.readouterr()
    return code, json.loads(out) if code == 0 else said


def test_every_key_has_a_value_to_be_tried_with():
    assert set(keys()) == set(VALUES)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_key_makes_a_difference_or_is_refused_by_name(verb, monkeypatch, capsys):
    monkeypatch.setattr("fedscaffold.theory.advice.HALVINGS", 3)
    monkeypatch.setattr("fedscaffold.theory.advice.LOCAL_STEPS", (1, 2))
    code, plain = answer(monkeypatch, capsys, verb)
    assert code == 0
    for key in keys():
        code, said = answer(monkeypatch, capsys, verb, "--set", f"{key}={VALUES[key]}")
        section = key.partition(".")[0]
        used = section in ("problem", *USES[verb]) or key in USES[verb]
        if used and key == "problem.dataset":
            assert "problem.mu" in said  # which the other data set makes no use of
        elif used and key not in UNUSED:
            assert code == 0, key
            assert (said != plain) or key in SAME, key
        else:
            assert (code, said.count("\n")) == (2, 1), key
            assert key in said


def test_what_is_kept_is_kept(monkeypatch, capsys):
    sets = [
        "--cohort",
        "2",
        "--set",
        "local.steps=3",
        "--set",
        "local.lr=0.1",
        "--set",
        "algorithm.name=scaffold",
    ]
    code, said = answer(monkeypatch, capsys, "plan", *sets, "--set", "algorithm.option=1")
    [one] = said["proposals"]
    assert (code, said["cohort"], one["algorithm"]) == (0, 2, "scaffold")
    assert (one["lr"], one["local_steps"], one["promised"]) == (0.1, 3, True)
    code, said = answer(
        monkeypatch,
        capsys,
        "diagnose",
        "--cohort",
        "0.5",
        "--rounds",
        "9",
        "--set",
        "local.steps=3",
    )
    assert (code, said["advice"]["local_steps"]) == (0, 3)
    assert "After 9 rounds of 2 of the 4 clients" in " ".join(said["advice"]["why"])


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("local.steps=[1,2,3,4]", "local.steps"),
        ("local.lr=tuned", "local.lr"),
        ("algorithm.name=scaffnew", "scaffnew"),
    ],
)
def test_values_that_cannot_be_planned_for_are_refused(key, word, monkeypatch, capsys):
    code, said = answer(monkeypatch, capsys, "plan", "--set", key)
    assert (code, said.count("\n")) == (2, 1)
    assert word in said

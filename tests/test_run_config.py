"""Every argument of a run stands once: whoever takes arguments takes them from the table, or refuses them by name."""

import dataclasses
import inspect

import pytest

import fedscaffold as fs
from fedscaffold.deploy import parse as parse_deployment
from fedscaffold.experiments.config_file import Config, parse, run_arguments
from fedscaffold.run_config import ARGUMENTS, FILE_DEFAULTS, KEYS

PROBLEM = fs.problems.quadratic(num_clients=3, dim=2, seed=0)


def test_every_field_is_stated_with_a_sentence():
    fields = {one.name for one in dataclasses.fields(fs.RunConfig)} - {"algorithm", "problem"}
    assert fields == ARGUMENTS.keys()
    for name, stated in ARGUMENTS.items():
        assert len(stated.sentence) > 10, name
        assert not stated.sentence.endswith("."), name


def test_simulate_has_the_signature_of_the_table():
    signature = inspect.signature(fs.simulate)
    assert list(signature.parameters) == ["algorithm", "problem", *ARGUMENTS]
    for name, stated in ARGUMENTS.items():
        assert signature.parameters[name].default == stated.default
        assert f"{name}: {stated.sentence}." in fs.simulate.__doc__


def test_a_configuration_file_has_the_keys_and_defaults_of_the_table():
    config = Config()
    for key, stated in KEYS.items():
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == stated.default, key
    given = run_arguments(config)
    for name, stated in ARGUMENTS.items():
        if stated.key is not None and stated.key not in FILE_DEFAULTS:
            assert given[name] == stated.default, name


def test_estimators_take_arguments_of_the_table_and_their_own():
    own = {"algorithm", "algorithm_params", "class_weight", "model", "l2", "random_state"}
    for estimator in (fs.FederatedClassifier, fs.FederatedRegressor):
        assert set(inspect.signature(estimator).parameters) - own <= ARGUMENTS.keys()
        with pytest.raises(
            fs.InputError, match=r"unknown parameter of \w+ 'lrr' \(did you mean 'lr'\?\)"
        ):
            estimator(lrr=0.1)


@pytest.mark.parametrize(
    "take", [fs.simulate, fs.Simulator, fs.sweep], ids=["simulate", "Simulator", "sweep"]
)
def test_an_argument_that_there_is_not_is_answered_with_the_nearest(take):
    more = {"seeds": 1, "lr": 0.1} if take is fs.sweep else {}
    with pytest.raises(
        fs.InputError,
        match=r"unknown argument of \w+ 'loacl_steps' \(did you mean 'local_steps'\?\)",
    ):
        take(fs.scaffold(), PROBLEM, loacl_steps=3, **more)


@pytest.mark.parametrize(
    "text",
    [
        "stale = 'keep'",
        "compression = 'none'",
        "stop_at = 'loss:1'",
        "client_state = 'array'",
        "block = 3",
    ],
)
def test_a_deployment_refuses_what_is_for_simulations_by_name(text):
    with pytest.raises(fs.InputError, match=f"a deployment does not take {text.split()[0]}"):
        parse_deployment(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rounds", "0"),
        ("local.lr", "-1"),
        ("local.epochs", "0"),
        ("seed", "-1"),
        ("weights", "'some'"),
        ("precision", "'float16'"),
        ("cohort.size", "2.0"),
        ("local.batch_size", "0"),
        ("local.draw", "'lots'"),
        ("local.momentum", "-1"),
        ("local.clip_norm", "0"),
        ("local.drop_last", "1"),
        ("evaluate_every", "0"),
        ("robust", "'crum:0.2'"),
    ],
)
def test_files_of_runs_and_of_deployments_refuse_in_the_same_words(key, value):
    section, _, name = key.rpartition(".")
    text = f"[{section}]\n{name} = {value}" if section else f"{name} = {value}"
    said = []
    for read in (parse, parse_deployment):
        with pytest.raises(fs.InputError) as error:
            read(text)
        said.append(str(error.value).partition(": ")[2])
    assert said[0] == said[1]
    assert key in said[0]


def test_a_description_is_a_value():
    config = fs.RunConfig(fs.scaffold(), PROBLEM, rounds=3, local_steps=2, lr=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rounds = 4
    assert dataclasses.replace(config, rounds=4).rounds == 4
    assert repr(config) == f"RunConfig(scaffold, {PROBLEM!r}, rounds=3, local_steps=2, lr=0.1)"
    assert fs.Simulator.of(config).run().rounds == 3
    with pytest.raises(fs.InputError, match="give its folder"):
        dataclasses.replace(config, every=3)


def test_rounds_follow_from_cohorts_where_they_are_not_given():
    run = fs.simulate(fs.scaffold(), PROBLEM, local_steps=2, lr=0.1, cohorts=[[0, 1], [2], [0]])
    assert run.rounds == 3

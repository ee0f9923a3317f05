"""Several private runs on the same records: what they spend together is said, and no budget covers them."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.experiments import compare
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import parse
from fedscaffold.privacy.accounting import Charge, compose
from fedscaffold.runs.privacy_statement import statement

PRIVATE = fs.privacy.clients(clip=0.4, noise=8.0, delta=1e-3)
PROBLEM = fs.problems.quadratic(num_clients=4, dim=3, mu=0.2, smoothness=1.0, seed=0)
GIVEN = {"rounds": 2, "local_steps": 3, "metrics": (), "privacy": PRIVATE}


def test_runs_of_different_seeds_spend_their_composition():
    swept = fs.sweep(fs.scaffold(), PROBLEM, lr=0.1, seeds=3, **GIVEN)
    assert swept.privacy.each == swept.runs[0][0].privacy.epsilon
    alone = compose([Charge(8.0, 1.0, 6)], 1e-3)  # three runs of two rounds
    assert alone <= swept.privacy.epsilon <= 1.001 * alone  # a little of delta is set aside
    assert swept.privacy.epsilon > swept.privacy.each


def test_runs_of_one_seed_have_no_epsilon_together():
    """Their noise is the same: the difference of the first sums of two step sizes has none."""
    swept = fs.sweep(fs.scaffold(), PROBLEM, lr=[0.1, 0.2], seeds=1, **GIVEN | {"rounds": 1})
    one, two = (row[0] for row in swept.runs)
    noise = np.linalg.norm(one.server.c - one.clients.c_i.mean(axis=0))
    same = (one.server.c - one.clients.c_i.mean(axis=0)) - (
        two.server.c - two.clients.c_i.mean(axis=0)
    )
    assert np.linalg.norm(same) < 1e-5 * noise
    assert swept.privacy.epsilon == np.inf
    assert "draw the same noise" in str(swept.privacy)


def test_what_is_not_private_spends_nothing():
    assert (
        fs.sweep(fs.scaffold(), PROBLEM, lr=0.1, seeds=2, **GIVEN | {"privacy": None}).privacy
        is None
    )


def test_no_budget_covers_several_runs():
    limited = fs.privacy.clients(clip=0.4, noise=8.0, delta=1e-3, stop_at_epsilon=3.0)
    given = GIVEN | {"privacy": limited}
    with pytest.raises(fs.InputError, match="each of several runs spends anew"):
        fs.sweep(fs.scaffold(), PROBLEM, lr=0.1, seeds=2, **given)
    with pytest.raises(fs.InputError, match="each of several runs spends anew"):
        fs.grid(fs.scaffold(), PROBLEM, over={"lr": [0.1, 0.2]}, **given)


TEXT = """
rounds = 2
problem = {dataset = "quadratic", clients = 4, dim = 3, mu = 0.2}
local = {steps = 3, lr = 0.1}
privacy = {unit = "clients", clip = 0.4, noise = 8.0, delta = 1e-3}
"""


def test_a_grid_and_a_comparison_say_what_their_runs_spend():
    config = parse(TEXT)
    found = compare.compare(
        config, build(config.problem), ["scaffold", "fedavg"], 2, None, "", workers=1
    )
    spent = found.grid.privacy
    assert (spent.runs, spent.seeds, spent.epsilon) == (4, 2, np.inf)
    one = fs.privacy.epsilon(noise=8.0, rate=1.0, steps=2, delta=1e-3)
    assert spent.each == one
    assert [run.privacy["epsilon"] for run in found.study.runs] == [one] * 4
    with pytest.raises(fs.InputError, match="kept no ledger, as those of comparisons do not"):
        statement(found.study.runs[0])


def test_a_comparison_with_a_budget_is_refused():
    config = parse(TEXT, ["privacy.stop_at_epsilon=3"])
    built = build(config.problem)
    with pytest.raises(fs.InputError, match="each of several runs spends anew"):
        compare.validate_comparison(config, built, ["scaffold"], 2, None)


def test_a_private_run_is_not_tuned():
    config = parse(TEXT, ["local.lr='tuned'"])
    built = build(config.problem)
    with pytest.raises(fs.InputError, match="nothing accounts for choosing"):
        compare.validate_run(config, built)

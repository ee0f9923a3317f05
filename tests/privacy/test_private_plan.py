"""The plan of a private run: the accountant's noise, and an error that simulation confirms."""

import json
import sys

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.cli import main
from fedscaffold.theory import mean_squared_error, verify_privacy

DELTA, ROUNDS, L2 = 1e-5, 12, 0.2


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(2)
    return [
        (rng.normal(size=(n, 2)) + i, rng.normal(size=n) + 2 * i) for i, n in enumerate((30, 50))
    ]


@pytest.fixture(scope="module")
def problem(records):
    return fs.problems.linear(records, l2=L2)


@pytest.fixture(scope="module")
def made(problem):
    return fs.plan_privacy(
        problem, epsilons=[3.0], delta=DELTA, rounds=ROUNDS, rate=1.0, local_steps=3
    )


def test_the_noise_is_the_least_for_the_budget(made):
    at = {"rate": 1.0, "steps": 3 * ROUNDS, "delta": DELTA}
    for one in made.proposals:
        assert fs.privacy.epsilon(noise=one.noise, **at) <= one.epsilon
        assert fs.privacy.epsilon(noise=0.995 * one.noise, **at) > one.epsilon


def test_the_clip_leaves_all_records_at_the_start_and_the_optimum(made, records, problem):
    longest = max(
        np.linalg.norm((x @ w - y)[:, None] * x + L2 * w, axis=1).max()
        for x, y in records
        for w in (np.zeros(2), problem.optimum())
    )
    assert made.clip == pytest.approx(longest, rel=1e-9)
    assert made.clipped == 0


def test_the_error_is_that_of_the_law_at_the_best_step_size(made, problem):
    """Covariance (noise C / n_i)^2 I, in the clients' own numbers of records."""
    halves = [2.0**-k / problem.smoothness for k in range(10)]
    for one in made.proposals:
        noise = np.array([(one.noise * made.clip / n) ** 2 * np.eye(2) for n in (30, 50)])
        given = {"local_steps": 3, "noise": noise, "rounds": ROUNDS}
        given |= {"algorithm": fs.ALGORITHMS[one.algorithm]()}
        ends = [np.sqrt(mean_squared_error(problem, lr=lr, **given)[-1]) for lr in halves]
        assert one.lr == pytest.approx(halves[int(np.nanargmin(ends))])
        assert one.error == pytest.approx(np.nanmin(ends), rel=1e-9)
        assert one.promised
        assert one.without < one.error


@pytest.mark.slow
def test_simulated_runs_end_where_the_plan_says(made, problem):
    for one in verify_privacy(problem, made, seeds=200):
        assert abs(one.measured - one.predicted) < 4.5 * one.standard_error
        assert one.standard_error < 0.06 * one.predicted


def test_who_comes_in_fewer_rounds_needs_less_noise(problem, made):
    half = fs.plan_privacy(
        problem,
        epsilons=[3.0],
        delta=DELTA,
        rounds=ROUNDS,
        rate=1.0,
        local_steps=3,
        lr=0.05,
        cohort=1,
        algorithms=["scaffold"],
    )
    [one] = half.proposals
    assert one.noise < made.proposals[0].noise
    run = fs.simulate(fs.scaffold(), problem, metrics=(), **half.settings(one))
    assert run.privacy.epsilon <= 3.0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"algorithms": ["dane"]}, "dane takes gradients over all records at x"),
        ({"epsilons": [-1.0]}, "epsilon must be a number above 0"),
        ({"epsilons": [1e-4], "local_steps": 1000}, "no noise multiplier"),
    ],
)
def test_what_cannot_be_planned_is_refused(problem, more, said):
    given = {"epsilons": [3.0], "delta": DELTA, "rounds": 100, "rate": 1.0} | more
    with pytest.raises(fs.InputError, match=said):
        fs.plan_privacy(problem, **given)


def said(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr()
    return end.value.code, out.out, out.err


TEXT = """
rounds = 10
[problem]
dataset = "synthetic-linear"
clients = 2
dim = 3
[local]
steps = 2
lr = 0.05
[privacy]
clip = 20.0
noise = 2.0
delta = 1e-5
"""


@pytest.mark.slow
def test_the_command_line_plans_and_draws(tmp_path, capsys, monkeypatch):
    path, picture = tmp_path / "config.toml", tmp_path / "picture.svg"
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr("fedscaffold.theory.private_plan.LOCAL_STEPS", (1, 2))
    monkeypatch.setattr("fedscaffold.theory.private_plan.HALVINGS", 5)
    words = ("privacy", "plan", path, "--epsilon", 8, "--epsilon", 2, "--out", picture, "--json")
    code, text, _ = said(capsys, monkeypatch, *words)
    assert code == 0
    told = json.loads(text)
    assert [cost["epsilon"] for cost in told["plan"]] == [2.0, 8.0]
    assert [cost["noise"] for cost in told["plan"]] == [
        one["noise"] for one in told["configured"] if one["algorithm"] == "scaffold"
    ]
    for best, configured in zip(told["best"], told["configured"], strict=True):
        assert best["error"] <= 1.01 * configured["error"]  # of other step sizes, in halves
        assert configured["local_steps"] == 2
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count("<path") > 10
    code, _, error = said(capsys, monkeypatch, "privacy", "plan", path, "--out", "page.html")
    assert code == 2
    assert "--out takes a .png, .svg or .pdf file" in error


def test_the_verb_plan_takes_an_epsilon_or_a_target(capsys, monkeypatch):
    words = ("plan", "--dataset", "synthetic-linear", "--clients", 2, "--set", "problem.dim=3")
    code, _, error = said(capsys, monkeypatch, *words)
    assert code == 2
    assert "give --target, or one or more --epsilon" in error
    fixed = ("--set", "local.steps=2", "--batch-size", 1.0)
    words = (*words, "--epsilon", 3, "--max-rounds", 10, *fixed)
    code, text, _ = said(capsys, monkeypatch, *words)
    assert code == 0
    assert "epsilon 3: scaffold" in text
    assert "all records, 2 local steps" in text

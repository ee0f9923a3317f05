"""What privacy costs: noise for a budget, the error that noise leaves against the stationary law, and the statement."""

import json
import sys

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.cli import main
from fedscaffold.experiments.config_file import parse
from fedscaffold.theory import stationary
from fedscaffold.theory.privacy import privacy_cost, private_covariance, share_clipped

DELTA = 1e-5


@pytest.mark.parametrize(("wanted", "rate", "steps"), [(1.0, 0.1, 40), (8.0, 1.0, 20)])
def test_noise_for_a_budget_is_the_least(wanted, rate, steps):
    noise = fs.privacy.noise_for(epsilon=wanted, rate=rate, steps=steps, delta=DELTA)
    at = {"rate": rate, "steps": steps, "delta": DELTA}
    assert fs.privacy.epsilon(noise=noise, **at) <= wanted
    assert fs.privacy.epsilon(noise=0.995 * noise, **at) > wanted


@pytest.mark.slow
def test_no_noise_for_a_budget_out_of_reach():
    with pytest.raises(fs.InputError, match="no noise multiplier up to 1000 keeps 1000000 steps"):
        fs.privacy.noise_for(epsilon=0.01, rate=1.0, steps=10**6, delta=DELTA)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(2)
    clients = [
        (rng.normal(size=(n, 2)) + i, rng.normal(size=n) + 2 * i) for i, n in enumerate((30, 50))
    ]
    return fs.problems.linear(clients, l2=0.2)


def config(problem, algorithm, **more):
    private = fs.privacy.records(clip=60.0, noise=0.5, delta=DELTA)
    given = {"rounds": 3500, "local_steps": 3, "lr": 0.05, "precision": "float64"} | more
    return fs.RunConfig(algorithm, problem, privacy=private, metrics=("distance",), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [(fs.scaffold(), None), (fs.fedavg(), None), (fs.scaffold(), 0.5)],
    ids=["scaffold", "fedavg", "batches"],
)
def test_the_error_in_the_long_run_is_that_of_the_law(problem, algorithm, batch):
    """Exact with all records in each step; with a sample of them to first order in the step size."""
    asked = config(problem, algorithm, batch_size=batch)
    covariance = private_covariance(asked)
    assert share_clipped(asked) == 0
    law = stationary(problem, lr=0.05, local_steps=3, noise=covariance, algorithm=algorithm)
    off = law.x_mean - problem.optimum()
    wanted = off @ off + np.trace(law.x_covariance)
    simulator = fs.Simulator.of(asked)
    simulator.ready = simulator.ready._replace(budget=None)  # 3500 epsilons are not looked at
    squares = simulator.run().history["distance"][500:] ** 2
    blocks = squares.reshape(-1, 250).mean(axis=1)
    error = blocks.std(ddof=1) / np.sqrt(len(blocks))
    slack = 0 if batch is None else 0.05 * wanted
    assert abs(squares.mean() - wanted) < 4.5 * error + slack
    assert error < 0.1 * wanted


@pytest.mark.slow
def test_more_privacy_costs_more_and_the_table_says_how_much(problem):
    costs = privacy_cost(config(problem, fs.scaffold(), rounds=20, batch_size=0.5), [1.0, 8.0])
    assert costs[0].noise > costs[1].noise
    for name in ("scaffold", "fedavg"):
        assert costs[0].errors[name] > costs[1].errors[name]
    with pytest.raises(fs.InputError, match="privacy_cost is of a private run"):
        privacy_cost(fs.RunConfig(fs.scaffold(), problem, local_steps=1, lr=0.1), [1.0])


TEXT = """
rounds = 3
[problem]
dataset = "digits"
clients = 4
[local]
steps = 2
batch_size = 30
lr = 0.1
[privacy]
clip = 1.0
noise = 2.0
delta = 1e-5
stop_at_epsilon = 5.0
[output]
dir = "{}"
"""


def said(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr()
    return end.value.code, out.out, out.err


@pytest.mark.slow
def test_the_command_line_runs_states_plans_and_audits(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "config.toml", tmp_path / "out"
    path.write_text(TEXT.format(out), encoding="utf-8")
    assert parse(path.read_text(encoding="utf-8")).privacy.noise == 2.0
    assert said(capsys, monkeypatch, "run", path)[0] == 0
    held = json.loads((out / "run.json").read_text(encoding="utf-8"))["privacy"]
    page = tmp_path / "page.html"
    code, text, _ = said(capsys, monkeypatch, "privacy", "statement", out, "--html", page)
    assert code == 0
    stated = float(text.partition("Guarantee: (")[2].partition(",")[0])
    assert held["epsilon"] <= stated <= 1.001 * held["epsilon"]  # rounded up, never down
    assert "Recorded without noise: accuracy, loss" in text
    for words in (
        ", 1e-05)-differential privacy",
        "SIMULATED",
        "Poisson",
        "dp-accounting 0.6",
        "Not covered",
        "Adversary",
    ):
        assert words in text
        assert words in page.read_text(encoding="utf-8")
    code, text, _ = said(capsys, monkeypatch, "privacy", "statement", out, "--json")
    assert json.loads(text)["statement"]["Budget"] == "epsilon 5"
    words = ("privacy", "plan", path, "--epsilon", 2, "--json")
    code, text, _ = said(capsys, monkeypatch, *words)
    [cost] = json.loads(text)["plan"]
    assert cost["noise"] > 0.3
    assert cost["errors"] is None
    assert said(capsys, monkeypatch, "privacy", "audit", out, "--canaries", 200)[0] == 0
    text = said(capsys, monkeypatch, "privacy", "statement", out)[1]
    assert "Audit: claimed: epsilon" in text
    assert "with confidence 0.95: not refuted" in text
    words = ("privacy", "audit", path, "--canaries", 200, "--json")
    code, text, _ = said(capsys, monkeypatch, *words)
    assert code == 0
    assert json.loads(text)["claimed"] == pytest.approx(held["epsilon"], rel=1e-6)
    code, _, error = said(capsys, monkeypatch, "privacy", "plan", path, "--set", "privacy={}")
    assert code == 2
    assert "has no table [privacy]" in error


def test_a_run_that_is_not_private_has_no_statement(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "config.toml", tmp_path / "out"
    text = TEXT.format(out).partition("[privacy]")[0] + f'[output]\ndir = "{out}"\n'
    path.write_text(text, encoding="utf-8")
    assert said(capsys, monkeypatch, "run", path)[0] == 0
    code, _, error = said(capsys, monkeypatch, "privacy", "statement", out)
    assert code == 2
    assert "holds no privacy" in error

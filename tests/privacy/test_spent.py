"""What a private run has spent is told by client and round: by the run, its log, its pages and `diagnose`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from browser import CHROMIUM, WHY, Browser

import fedscaffold as fs
from fedscaffold.diagnose.control_checks import check_privacy, check_recorded_residual
from fedscaffold.diagnose.diagnose_run import diagnose
from fedscaffold.experiments import compare
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import load, parse, to_toml
from fedscaffold.privacy.accounting import round_up
from fedscaffold.privacy.budget import MOST_KINDS, Budget
from fedscaffold.runs import read
from fedscaffold.runs.live import Simulated
from fedscaffold.runs.log_writer import LogWriter
from fedscaffold.runs.privacy_statement import statement
from fedscaffold.runs.round_log import RoundLog, is_valid_line
from fedscaffold.runs.view_model import view
from fedscaffold.state import commit, latest

DELTA = 1e-5


def fixed_budget(privacy, rates, rounds_of):
    """A budget of clients that take 3 steps in each round they attend."""
    rates = np.asarray(rates, float)

    def attended(round):
        clients = np.array(rounds_of(round))
        return clients, np.full(len(clients), 3)

    return Budget(privacy, rates, np.zeros(len(rates)), attended)


def test_epsilon_by_client_and_round_is_that_of_the_steps_taken():
    private = fs.privacy.records(clip=1.0, noise=1.5, delta=DELTA)
    cohorts, rates = [[0, 1], [1], [0, 1], [1]], (0.05, 0.1)
    spent = fixed_budget(private, rates, lambda r: cohorts[r]).spent(4)
    table = spent.by_round()
    for r in range(4):
        for i in range(2):
            steps = 3 * sum(i in cohort for cohort in cohorts[: r + 1])
            wanted = fs.privacy.epsilon(noise=1.5, rate=rates[i], steps=steps, delta=DELTA)
            assert table[r, i] == wanted
    assert (table[-1] == spent.by_client()).all()
    assert table[-1].max() == spent.epsilon
    frame = spent.to_pandas()
    assert frame.index.tolist() == [1, 2, 3, 4]
    assert (frame.to_numpy() == table).all()


def test_a_record_lists_clients_only_where_the_accountant_has_few_to_do():
    private = fs.privacy.clients(clip=1.0, noise=5.0, delta=DELTA)
    few = fixed_budget(private, np.ones(4), lambda r: [0, 1, 2][: r + 1]).spent(3).facts()
    assert few["by_client"][3] == 0.0
    assert few["quantiles"][0] == 0.0
    assert few["quantiles"][-1] == few["epsilon"] == max(few["by_client"])
    many = fixed_budget(private, np.linspace(0.01, 0.02, MOST_KINDS + 1), lambda r: [0])
    facts = many.spent(1).facts()
    assert facts["by_client"] is None
    assert facts["quantiles"] is None


TEXT = """
rounds = 6
precision = "float64"
metrics = ["loss"]
problem = {{dataset = "quadratic", clients = 4, dim = 3, mu = 0.2}}
local = {{steps = 3, lr = 0.1}}
cohort = {{size = 0.5}}
[privacy]
unit = "clients"
clip = 0.4
noise = 8.0
delta = 1e-3
stop_at_epsilon = {}
"""


def ran(folder, budget, text=TEXT):
    """The folder of a private run, as `fedscaffold run` leaves it."""
    config = parse(text.format(budget))
    built = build(config.problem)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    with LogWriter(folder, compare.log_facts(config, built)) as log:
        study = compare.run(
            config, built, "fedscaffold run", checkpoint=folder / "checkpoint", callbacks=[log]
        )
    compare.write_results(study, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("runs") / "clients", 3.0)


def findings(folder):
    config = load(folder / "config.toml")
    return {one.about: one for one in diagnose(folder, config, build(config.problem)).findings}


def test_the_log_the_record_and_the_page_hold_epsilon_by_client(folder):
    log = RoundLog(folder)
    assert log.update()
    held = read(folder).runs[0].privacy
    assert log.spent["by_client"] == held["by_client"]
    assert log.spent["after"] == 6 == held["rounds"]
    rounds = np.array([len(one) for one in log.heard]).sum()
    assert rounds == 12  # two clients in each of six rounds
    for i, spent in enumerate(held["by_client"]):
        came = sum(i in heard for heard in log.heard)
        assert spent == fs.privacy.epsilon(noise=8.0, rate=1.0, steps=came, delta=1e-3)
    [run] = view([Simulated(folder).poll()])["groups"][0]["runs"]
    assert run["privacy"]["clients"] == held["by_client"]
    assert run["privacy"]["budget"] == 3.0
    assert run["privacy"]["simulated"]
    assert run["columns"]["epsilon"]["values"][-1] == held["epsilon"] == max(held["by_client"])
    assert run["health"] == "noised"


def test_the_statement_tells_the_clients_apart_and_claims_nothing_without_a_bound(folder):
    run = read(folder).runs[0]
    low, _, middle, _, high = (round_up(one) for one in run.privacy["quantiles"])
    facts = statement(run)
    assert facts["By client"] == f"epsilon {low} to {high}, {middle} in the middle of 4 clients"
    none = statement(replace(run, privacy=run.privacy | {"epsilon": None, "quantiles": [None] * 5}))
    assert none["Guarantee"].startswith("NONE")
    assert "By client" not in none


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WHY)
def test_the_page_shows_the_budget_the_clients_and_whom_it_protects(folder, tmp_path):
    held = read(folder).runs[0].privacy
    with Browser(tmp_path) as browser:
        browser.go((folder / "report.html").as_uri())
        browser.until("document.querySelectorAll('#spending .goal').length === 1")
        assert browser.run("document.querySelectorAll('#spent .bars i').length") == 4
        told = browser.run("document.getElementById('privacy').innerText")
        assert "budget 3" in told
        assert f"After round 6: epsilon {np.ceil(1000 * held['epsilon']) / 1000:g}" in told
        assert "for a whole client" in told
        assert "A simulated epsilon protects nobody" in told
        gauge = browser.run("document.getElementById('gauge').innerText")
        assert "holds the noise" in gauge
        assert "rounding explains" not in gauge
        assert browser.faults == []


def test_a_run_under_way_tells_what_it_has_spent(folder, tmp_path):
    """Its log alone: the lines up to the first block of rounds, before the end."""
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    told = [k for k, line in enumerate(lines) if '"event": "spent"' in line]
    assert json.loads(lines[told[0]])["after"] == 0
    for k in told:
        (tmp_path / "rounds.jsonl").write_text("\n".join(lines[: k + 1]) + "\n", encoding="utf-8")
        [run] = view([Simulated(tmp_path).poll()])["groups"][0]["runs"]
        line = json.loads(lines[k])
        assert run["privacy"]["after"] == line["after"]
        assert run["privacy"]["clients"] == line["by_client"]


@pytest.mark.parametrize(
    "change", [{"unit": "site"}, {"delta": "small"}, {"by_client": [True]}, {"quantiles": 3}]
)
def test_a_line_that_does_not_say_what_was_spent_is_skipped(folder, change):
    log = RoundLog(folder)
    log.update()
    assert is_valid_line(log.spent)
    assert not is_valid_line(log.spent | change)


def test_a_run_that_ends_by_its_budget_says_so(tmp_path):
    limit = fs.privacy.epsilon(noise=8.0, rate=1.0, steps=2, delta=1e-3)
    source = Simulated(ran(tmp_path / "short", limit)).poll()
    assert source.progress.phase == "budget"
    assert source.study.runs[0].privacy["epsilon"] <= limit
    assert findings(tmp_path / "short")["privacy"].severity == "ok"


def test_under_privacy_of_clients_rounding_does_not_judge_the_gauge(folder, tmp_path):
    found = findings(folder)
    state = latest(folder / "checkpoint").arrays
    c, c_i = state["state.server.c"], state["state.memory.c_i"]
    off = np.linalg.norm(c - c_i.mean(axis=0))
    assert off > 1e6 * 1e-15  # far above rounding
    assert found["residual"].severity == "watch"
    assert "holds the noise" in found["residual"].sentence
    assert "larger than the c_i themselves" in found["residual"].sentence
    size = np.sqrt(np.mean(np.sum(c_i**2, axis=1)))
    assert off > size
    assert check_recorded_residual(off, 1e-15, noised=True).severity == "ok"
    assert found["residual"].number == pytest.approx(off, rel=1e-12)
    assert found["privacy"].number == read(folder).runs[0].privacy["epsilon"]
    assert "for whole clients" in found["privacy"].sentence


def test_a_changed_row_is_still_found_under_privacy_of_clients(tmp_path):
    folder = ran(tmp_path / "run", 3.0)
    snapshot = latest(folder / "checkpoint")
    arrays = {name: array.copy() for name, array in snapshot.arrays.items()}
    arrays["state.memory.c_i"][1] += 0.01
    commit(folder / "checkpoint", arrays, snapshot.facts, after=snapshot.generation)
    found = findings(folder)["residual"]
    assert found.severity == "wrong"
    assert found.number == pytest.approx(0.01 * np.sqrt(3) / 4, rel=1e-6)


RECORDS = """
rounds = 3
precision = "float64"
metrics = ["loss"]
problem = {{dataset = "synthetic-linear", clients = 2, dim = 3}}
local = {{steps = 3, lr = 0.05}}
privacy = {{clip = 20.0, noise = 4.0, delta = 1e-5, stop_at_epsilon = {}}}
"""


def test_diagnose_says_what_the_noise_leaves_in_the_long_run(tmp_path):
    """On quadratics, by the law with covariance (noise C / n)^2 I; the gauge is at rounding."""
    found = findings(ran(tmp_path / "run", 20.0, RECORDS))
    problem = build(parse(RECORDS.format(20.0)).problem).problem
    noise = np.array([(4.0 * 20.0 / n) ** 2 * np.eye(3) for n in problem.counts])
    law = fs.theory.stationary(problem, lr=0.05, local_steps=3, noise=noise)
    assert found["noise"].number == pytest.approx(np.sqrt(np.trace(law.x_covariance)), rel=1e-6)
    assert "fedavg" in found["noise"].sentence
    assert found["residual"].severity == "ok"
    assert found["privacy"].severity == "ok"


@pytest.mark.parametrize(
    ("more", "severity", "said"),
    [
        ({}, "ok", "Epsilon 2.5 of a budget of 3 is spent"),
        ({"epsilon": 3.5}, "wrong", "Epsilon 3.5 of a budget of 3"),
        ({"epsilon": None}, "watch", "has no bound"),
        ({"before": 1.25}, "ok", "1.25 of it was spent by other runs before"),
    ],
)
def test_the_finding_says_what_is_spent_of_the_budget(more, severity, said):
    held = {"unit": "record", "epsilon": 2.5, "delta": DELTA, "stop_at_epsilon": 3.0} | more
    found = check_privacy(held)
    assert found.severity == severity
    assert said in found.sentence

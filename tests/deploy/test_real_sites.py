"""Private sites and JAX sites as real processes, each with a worker that stays warm."""

import json
import os
import shutil
import signal
import time

import numpy as np
import private_case as case
import pytest

from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.templates import write_example
from fedscaffold.deploy.worker import read_status, workers_of

pytest.importorskip("flwr")
from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.state import latest

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.process]
APP = """\
import time

import private_case as case


def record_gradients(params, batch):
    time.sleep(0.5)
    return case.record_gradients(params, batch)


def learner(settings):
    return case.learner(record_gradients=record_gradients)
"""


def run(app, home, disturb=lambda federation, now: None):
    """The outcome of a federation, and the state that it has committed."""
    with Federation(app, home) as federation:
        federation.up()
        federation.submit()
        outcome = federation.outcome(900, lambda now: disturb(federation, now))
    return outcome, latest(home / "server" / "state").arrays


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def test_private_sites_are_the_definition_and_a_worker_that_dies_is_charged_once(tmp_path):
    """By hand with the sites' own draws; `test_a_private_jax_site_whose_worker_dies...` has no Flower."""
    app, home, rounds, killed = tmp_path / "app", tmp_path / "home", 3, []
    app.mkdir()
    (app / "app.py").write_text(APP)
    shutil.copy(case.__file__, app)
    records = "\n".join(f"{site} = {number}" for site, number in case.COUNTS.items())
    (app / "federation.toml").write_text(
        f'precision = "float64"\nrounds = {rounds}\n'
        f"[local]\nsteps = {case.STEPS}\nlr = {case.LR}\nbatch_size = {case.BATCH}\n"
        f"[deploy]\nsites = {list(case.SITES)}\nquorum = 1.0\n[deploy.records]\n{records}\n"
        f"[privacy]\nclip = {case.CLIP}\nnoise = {case.NOISE}\ndelta = 1e-3\n"
    )
    place = home / "sites" / "bee"

    def disturb(federation, now):
        if now["phase"] == "waiting" and now["round"] == 1 and not killed:
            until(lambda: json.loads((place / "worker" / "status.json").read_text())["busy_until"])
            killed.append(federation.processes["worker-bee"].pid)
            os.kill(killed[0], signal.SIGKILL)

    outcome, kept = run(app, home, disturb)
    assert killed
    assert read_status(place)["starts"] == 2
    assert outcome["rounds"] == rounds
    (tmp_path / "view" / "sites" / "privacy").mkdir(parents=True)
    for site in case.SITES:
        own = home / "sites" / site / "privacy" / site
        (tmp_path / "view" / "sites" / "privacy" / site).symlink_to(own)
        assert len(case.ledger_of(tmp_path / "view", site).charges) == rounds
    p = dict.fromkeys(case.SITES, 1 / 3)
    x, c, c_i = case.by_hand(tmp_path / "view", [case.SITES] * rounds, p)
    np.testing.assert_allclose(kept["x"], x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(kept["c"], c, rtol=0, atol=1e-12)
    for site in case.SITES:
        np.testing.assert_allclose(kept[f"c_i.{site}"], c_i[site], rtol=0, atol=1e-12)
    assert outcome["metrics"] == {}
    assert outcome["epsilon"].keys() == set(case.SITES)


def test_jax_sites_with_warm_workers_are_the_run_in_one_process(tmp_path):
    app, home = tmp_path / "app", tmp_path / "home"
    write_example(app, "jax")
    text = (app / "federation.toml").read_text()
    (app / "federation.toml").write_text(text.replace("rounds = 5", "rounds = 2"))
    outcome, kept = run(app, home)
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "quiet")
    twin = drive(server, InProcess(learner, settings, tmp_path / "quiet"), settings.rounds)
    np.testing.assert_allclose(kept["x"], server.state.x, rtol=0, atol=1e-6)
    assert outcome["missed"] == {}
    assert outcome["metrics"]["accuracy"] == pytest.approx(twin.metrics["accuracy"], abs=0.02)
    for status in workers_of(home).values():  # a greeting, the rounds, the last evaluation
        assert status["starts"] == 1
        assert status["requests"] == 1 + settings.rounds + 1

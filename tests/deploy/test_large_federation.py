"""A real federation with a model whose vectors are in files, killed at every level: the same bits, and nobody helps."""

import json
import os
import random
import signal
import threading

import numpy as np
import pytest

from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.blocks import is_large

pytest.importorskip("flwr")
from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.state import latest

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.process]
SITES = ("ant", "bee", "cow")
PARTS = ["worker-ant", "link", "server", "site-bee", "executor"]
SIZE = 3_000_000  # three of the pieces that Flower cuts an array into
APP = f"""
import numpy as np
from fedscaffold.deploy import ArraysLearner

def data(site):
    return (np.full((1, 1), {SITES}.index(site), np.float32),)

def gradient(params, batch):
    return {{"w": params["w"] - batch[0].mean()}}

def learner(settings):
    start = np.random.default_rng(0).random({SIZE}, np.float32)
    return ArraysLearner(gradient, {{"w": start}}, data)
"""
TOML = f"""
rounds = {len(PARTS)}
[local]
steps = 2
lr = 0.1
[deploy]
sites = {list(SITES)}
state = "KEEPER"
quorum = 1.0
retries = 40
deadline = 90.0
"""


@pytest.mark.parametrize("keeper", ["server", "client"])
def test_killed_at_every_level_a_large_model_is_the_undisturbed_one(keeper, tmp_path):
    """`test_killed_at_every_level_it_is_the_undisturbed_run` has a small one, and c_i at the server."""
    app, home, killed = tmp_path / "app", tmp_path / "home", []
    app.mkdir()
    (app / "app.py").write_text(APP)
    (app / "federation.toml").write_text(TOML.replace("KEEPER", keeper))
    settings, learner = open_app(app)
    assert is_large(learner.schema.size)
    quiet = Server(settings, learner.schema, learner.start, tmp_path / "quiet")
    drive(quiet, InProcess(learner, settings, tmp_path / "quiet"), settings.rounds)
    draw = random.Random(3)

    def kill(part):
        if part == "server":
            pid = json.loads((home / "server" / "serving.json").read_text())["pid"]
        else:
            pid = federation.processes[part].pid
        os.kill(pid, signal.SIGKILL)

    def disturb(now):
        if now["phase"] == "waiting" and now["round"] == len(killed) < len(PARTS):
            killed.append(PARTS[len(killed)])
            threading.Timer(draw.uniform(0.0, 8.0), kill, (killed[-1],)).start()

    with Federation(app, home) as federation:
        federation.up()
        federation.submit()
        outcome = federation.outcome(2400, disturb)
    assert killed == PARTS
    assert outcome["rounds"] == len(PARTS)
    kept = latest(home / "server" / "state").arrays
    assert kept["x"].tobytes() == quiet.state.x.tobytes()
    assert kept["c"].tobytes() == np.asarray(quiet.state.server.c).tobytes()
    if keeper == "server":
        assert outcome["residual"] == quiet.residual < 1e-6

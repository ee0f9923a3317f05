"""Secure sums in a real federation of processes, with TLS and keys: one site is killed between masking and unmasking."""

import json

import numpy as np
import pytest
from secure_case import Case

from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.audit import read_verified

pytest.importorskip("flwr")
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedscaffold.deploy.flower_records import from_record, to_record
from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.state import latest

APP = """
import numpy as np
from fedscaffold.deploy import ArraysLearner

CENTRE = {"ant": np.array([1.0, -2.0]), "bee": np.array([-3.0, 0.5]), "cow": np.array([2.0, 2.5])}

def gradient(params, batch):
    return {"w": (params["w"] - batch[0]).mean(axis=0) * np.array([1.0, 2.0])}

def learner(settings):
    data = lambda site: (CENTRE[site] + np.linspace(-1, 1, 4)[:, None],)
    loss = lambda params, batch: float(((params["w"] - batch[0]) ** 2).mean())
    return ArraysLearner(gradient, {"w": np.array([0.3, 0.7])}, data, loss=loss, precision=settings.precision)
"""
TOML = """
rounds = 1
precision = "float64"
[local]
steps = 3
lr = 0.2
[deploy]
sites = ["ant", "bee", "cow"]
state = "client"
secure = true
deadline = 60.0
quorum = 1.0
wait = 120.0
"""


def test_flower_messages_carry_the_packets_of_all_exchanges(tmp_path):
    case = Case(tmp_path)
    assert case.play().committed
    for _, _, request, reply in case.seen:
        for packet in (request, reply):
            record = to_record(packet)
            contents = {key: item.deflate() for key, item in get_all_nested_objects(record).items()}
            assert from_record(inflate_object_from_contents(record.object_id, contents)) == packet


# `test_two_of_five_die_between_masking_and_unmasking` of test_secure_sums.py, without processes
@pytest.mark.soak
@pytest.mark.process
def test_a_site_is_killed_between_masking_and_unmasking(tmp_path):
    """The round commits the bits of the quiet run in this process, of all three."""
    app, home = tmp_path / "app", tmp_path / "home"
    app.mkdir()
    (app / "app.py").write_text(APP)
    (app / "federation.toml").write_text(TOML)
    settings, learner = open_app(app)
    quiet = Server(settings, learner.schema, learner.start, tmp_path / "quiet")
    drive(quiet, InProcess(learner, settings, tmp_path / "quiet"), 1)
    seen = []
    with Federation(app, home) as federation:

        def tell(status):
            seen.append(status["exchange"])
            if (
                status["exchange"] == "survivors"
                and "site-cow" in federation.processes
                and not killed
            ):
                federation.kill("site-cow")
                killed.append(status["round"])

        killed = []
        federation.up()
        federation.submit()
        summary = federation.outcome(timeout=400, tell=tell)
    assert killed == [0]
    assert summary["rounds"] == 1
    found = latest(home / "server" / "state")
    assert found.arrays["x"].tobytes() == quiet.state.x.tobytes()
    assert found.arrays["c"].tobytes() == quiet.state.server.c.tobytes()
    events = read_verified(home / "server" / "audit.jsonl")
    assert [e["heard"] for e in events if e["event"] == "committed"] == [["ant", "bee", "cow"]]
    assert np.isfinite(summary["metrics"]["loss"])
    assert json.loads((home / "server" / "status.json").read_text())["exchange"] == ""

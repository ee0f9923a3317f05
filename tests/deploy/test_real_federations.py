"""Real federations of processes at length: one site ten times slower, one that lies, ten kills at random moments."""

import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.audit import read_verified

pytest.importorskip("flwr")
from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.state import latest

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.process]
SITES = ("ant", "bee", "cow", "dog", "elk")
CURVATURE = np.array([[1.0, 2.0], [2.0, 0.5], [1.5, 1.0], [0.8, 1.6], [1.2, 1.2]])
CENTRE = np.array([[1.0, -2.0], [-3.0, 0.5], [2.0, 2.0], [4.0, -1.0], [0.0, 3.0]])
START = np.array([9.0, -7.0])
APP = f"""
import time
import numpy as np
from fedscaffold.deploy import ArraysLearner

SITES, here = {SITES}, []  # each site has a process of its own

def data(site):
    here[:] = [site]
    i = SITES.index(site)
    return np.array({CURVATURE.tolist()})[i:i + 1], np.array({CENTRE.tolist()})[i:i + 1]

def gradient(params, batch):
    time.sleep(SECONDS.get(here[0], SECONDS[""]))
    a, b = batch
    return {{"w": LIES.get(here[0], 1.0) * (a * (params["w"] - b)).mean(axis=0)}}

def learner(settings):
    return ArraysLearner(gradient, {{"w": np.array({START.tolist()})}}, data, precision="float64")
"""


def write_app(folder, sites, deploy="", top="", seconds=0.0, slow=None, lies=None):
    """An app of quadratics; `seconds` of a local step, by name for `slow` sites, and factors of `lies`."""
    folder.mkdir(parents=True)
    given = {"SECONDS": {"": seconds} | (slow or {}), "LIES": lies or {}}
    head = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    (folder / "app.py").write_text(head + APP)
    (folder / "federation.toml").write_text(
        f'precision = "float64"\n{top}\n[local]\nsteps = 3\nlr = 0.1\n'
        f"[deploy]\nsites = {list(SITES[:sites])}\nwait = 240.0\n{deploy}\n"
    )
    return folder


def optimum(sites):
    a, b = CURVATURE[:sites], CENTRE[:sites]
    return (a * b).sum(axis=0) / a.sum(axis=0)


def run(app, home, disturb=lambda federation, now: None, timeout=1800):
    """The outcome of a federation, and at which second each round was seen with which model."""
    seen = []

    def tell(now):
        disturb(federation, now)
        state = latest(home / "server" / "state")
        if state is not None and (not seen or seen[-1][1] < state.facts["round"]):
            seen.append((time.monotonic(), state.facts["round"], state.arrays["x"]))

    with Federation(app, home) as federation:
        federation.up()
        federation.submit()
        return federation.outcome(timeout, tell), seen


def seconds_to(target, seen, best):
    """Seconds from the first commit, which is of the sites that joined, to a model so near to the best one."""
    near = target * np.linalg.norm(START - best)
    return next(at for at, _, x in seen if np.linalg.norm(x - best) < near) - seen[0][0]


def test_who_waits_for_nobody_is_there_sooner(tmp_path):
    """Three sites take 2 s of a task and one takes 20; to a hundredth of the first distance."""
    asked = {
        "sync": ("quorum = 1.0", "rounds = 12"),
        "async": (
            'mode = "async"\nbuffer = 3',
            "rounds = 30\nalgorithm = {name = 'scaffold', server_lr = 0.75}",
        ),
    }
    seconds = {}
    for mode, (deploy, top) in asked.items():
        app = write_app(tmp_path / mode, 4, deploy, top, 2.0 / 3, {"dog": 20.0 / 3})
        outcome, seen = run(app, tmp_path / f"{mode}-home")
        seconds[mode] = seconds_to(0.01, seen, optimum(4))
        assert outcome["residual"] < 1e-14
        assert outcome["missed"] == {}
    told = (tmp_path / "async-home/server/metrics.jsonl").read_text()
    rows = [json.loads(row) for row in told.splitlines()]
    assert max(row["stale"]["dog"] for row in rows if "dog" in row.get("stale", {})) >= 1
    assert seconds["async"] < seconds["sync"]


def test_a_liar_is_refused_and_the_others_go_on(tmp_path):
    """One of five sends its gradients with the sign flipped and five times as long; the model is the simulator's."""
    app = write_app(tmp_path / "app", 5, "", 'rounds = 6\nrobust = "krum:0.2"', lies={"elk": -5.0})
    outcome, _ = run(app, tmp_path / "home")
    assert outcome["rounds"] == 6
    assert outcome["residual"] < 1e-14
    events = read_verified(tmp_path / "home" / "server" / "audit.jsonl")
    failed = [set(event["failed"]) for event in events if event["event"] == "committed"]
    assert failed == [{"elk"}] * 6
    arrays = latest(tmp_path / "home" / "server" / "state").arrays
    assert "c_i.elk" not in arrays  # it never counted
    hessians = np.stack([np.diag(row) for row in CURVATURE])
    problem = fs.problems.quadratic(hessians=hessians, linear=CURVATURE * CENTRE, x0=START)
    given = {"rounds": 6, "local_steps": 3, "lr": 0.1, "precision": "float64", "metrics": ()}
    flip = fs.attacks.sign_flip([4], scale=5)
    twin = fs.simulate(fs.scaffold(), problem, robust="krum:0.2", attack=flip, **given)
    np.testing.assert_allclose(arrays["x"], twin.vector, rtol=0, atol=1e-12)


def test_ten_kills_and_no_human(tmp_path):
    """In each round something is killed, some seconds after it began; the run has the bits of an undisturbed one."""
    draw = random.Random(7)
    parts = ["worker-ant", "link", "server", "site-bee", "executor"] * 2
    draw.shuffle(parts)
    rounds = f"rounds = {len(parts)}"
    deploy = "quorum = 1.0\nretries = 40\ndeadline = 60.0"
    app = write_app(tmp_path / "app", 3, deploy, rounds, 0.2)
    settings, learner = open_app(write_app(tmp_path / "quick", 3, deploy, rounds))
    quiet = Server(settings, learner.schema, learner.start, tmp_path / "quiet")
    drive(quiet, InProcess(learner, settings, tmp_path / "quiet"), settings.rounds)
    killed = []

    def kill(federation, part):
        if part == "server":
            pid = json.loads((tmp_path / "home/server/serving.json").read_text())["pid"]
        else:
            while part not in federation.processes:  # killed before, and not back yet
                time.sleep(0.1)
            pid = federation.processes[part].pid
        os.kill(pid, signal.SIGKILL)

    def disturb(federation, now):
        if now["phase"] == "waiting" and now["round"] == len(killed) < len(parts):
            part, moment = parts[len(killed)], draw.uniform(0.0, 6.0)
            killed.append((part, round(moment, 1)))
            threading.Timer(moment, kill, (federation, part)).start()

    outcome, _ = run(app, tmp_path / "home", disturb, 3600)
    assert len(killed) == len(parts) == outcome["rounds"]
    assert outcome["residual"] < 1e-14
    arrays = latest(tmp_path / "home" / "server" / "state").arrays
    assert arrays["x"].tobytes() == quiet.state.x.tobytes()
    assert arrays["c"].tobytes() == quiet.state.server.c.tobytes()

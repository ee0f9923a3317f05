"""A deployment whose rounds wait for nobody: the simulator's numbers, on a clock that replies move on."""

import json
from itertools import pairwise

import numpy as np
import pytest
from deploy_case import (
    CENTRE,
    CURVATURE,
    RECORDS,
    SITES,
    START,
    answer,
    everybody,
    learner,
    server_of,
    settings,
)

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, drive
from fedscaffold.deploy.aggregation import residual

TRACE = np.random.default_rng(2).pareto(1.2, size=(4, len(SITES))) + 0.5
TRACE[:, 4] *= 10  # one site ten times slower


class Delayed(InProcess):
    """Sites that take their time: a reply comes when the clock has reached it, the first one first."""

    def __init__(self, config, folder):
        super().__init__(learner(), config, folder)
        self.now, self.tasks, self.ends = 0.0, dict.fromkeys(SITES, 0), {}

    def send(self, requests):
        super().send(requests)
        for site, request in requests.items():
            takes = 0.0
            if request.facts["kind"] == "train":
                takes = TRACE[self.tasks[site] % len(TRACE), SITES.index(site)]
                self.tasks[site] += 1
            self.ends[site] = self.now + takes

    def collect(self):
        requests = {site: asked[site] for site, asked in self.queue.items()}
        site = min(requests, key=lambda site: (self.ends[site], requests[site].facts["round"]))
        self.now = max(self.now, self.ends[site])
        request = self.queue.pop(site)[site]
        return [(site, answer(request, self.learner, self.settings, site, self.folder / "sites"))]


def deployed(folder, deploy, rounds, **more):
    config = settings(deploy=deploy, top="weights = 'records'", **more)
    transport = Delayed(config, folder)
    server = server_of(config, folder, clock=lambda: transport.now)
    path, outcomes, times = [], [], []

    def tell(outcome):
        outcomes.append(outcome)
        path.append(server.state.x.copy())
        times.append(transport.now)

    drive(server, transport, rounds, tell, sleep=lambda seconds: None)
    return server, np.array(path), outcomes, np.array(times)


def simulated(rounds, algorithm=None, **more):
    problem = fs.problems.quadratic(
        hessians=np.array([np.diag(CURVATURE[site]) for site in SITES]),
        linear=np.array([CURVATURE[site] * CENTRE[site] for site in SITES]),
        x0=START,
    )
    weights = np.array([RECORDS[site] for site in SITES], float)
    simulator = fs.Simulator(
        algorithm or fs.scaffold(),
        problem,
        local_steps=3,
        lr=0.2,
        precision="float64",
        weights=weights / weights.sum(),
        delays=TRACE,
        **more,
    )
    state, path, times = simulator.init(), [], []
    for _ in range(rounds):
        state, rows = simulator.step(state)
        path.append(np.array(state.x))
        times.append(rows["time"][0])
    return state, np.array(path), np.array(times)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["server", "client"])
def test_a_deployment_is_the_simulation(tmp_path, state):
    deploy = f"mode = 'async'\nbuffer = 2\nstate = '{state}'\ndeadline = 1e6"
    server, path, outcomes, times = deployed(tmp_path, deploy, 25)
    there, expected, clock = simulated(25, buffer=2)
    np.testing.assert_allclose(path, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(times, clock, rtol=1e-12)
    np.testing.assert_allclose(server.state.server.c, there.server.c, rtol=0, atol=1e-12)
    assert all(outcome.committed and len(outcome.heard) == 2 for outcome in outcomes)
    assert max(max(outcome.stale.values(), default=0) for outcome in outcomes) > 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[5]["stale"] == outcomes[5].stale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm", "staleness"),
    [
        ("scaffold", fs.scaffold, "polynomial:0.5"),
        ("ca2fl", fs.ca2fl, "none"),
        ("fedavg", fs.fedavg, "polynomial:1"),
    ],
)
def test_other_methods_and_damping_are_the_simulators_too(tmp_path, name, algorithm, staleness):
    deploy = f"mode = 'async'\nbuffer = 2\ndeadline = 1e6\nstaleness = '{staleness}'"
    written = f"name = '{name}'\nserver_lr = 0.5"
    server, path, _, _ = deployed(tmp_path, deploy, 15, algorithm=written)
    _, expected, _ = simulated(15, algorithm(server_lr=0.5), buffer=2, staleness=staleness)
    np.testing.assert_allclose(path, expected, rtol=0, atol=1e-12)
    assert server.residual < 1e-13


def test_no_site_waits_for_a_slow_one(tmp_path):
    """Four sites of five go on while the last works; in synchronous rounds its time is everybody's."""
    deploy = "mode = 'async'\nbuffer = 2\ndeadline = 1e6"
    _, _, outcomes, times = deployed(tmp_path / "async", deploy, 60)
    slow = TRACE[0, 4]
    before = [outcome for outcome, at in zip(outcomes, times, strict=True) if at < slow]
    assert len(before) >= 5
    assert not any("elk" in outcome.heard for outcome in before)
    assert any("elk" in outcome.heard for outcome in outcomes)
    _, _, _, waited = deployed(tmp_path / "sync", "deadline = 1e6", 3)
    assert (np.diff([0, *waited]) >= TRACE[:3].max(axis=1) - 1e-9).all()
    assert all(b >= a for a, b in pairwise(times))


def test_a_task_older_than_the_deadline_is_given_up_and_its_reply_is_stale(tmp_path):
    config = settings(deploy="mode = 'async'\nbuffer = 2\ndeadline = 10.0")
    now = [0.0]
    server = server_of(config, tmp_path, clock=lambda: now[0])
    everybody(server, config)
    requests = server.open(SITES)
    replies = {
        site: answer(request, learner(), config, site, tmp_path / "sites")
        for site, request in requests.items()
    }
    for site in SITES[:2]:
        assert server.receive(site, replies[site]).counted
    assert server.due()
    first = server.close()
    assert (first.heard, first.missing) == (SITES[:2], ())
    assert set(server.at_work) == set(SITES[2:])
    assert set(server.open(SITES)) == set(SITES[:2])
    assert not server.due()
    now[0] = 11.0
    assert server.due()
    assert set(server.close().missing) == set(SITES)
    assert set(server.open(SITES)) == set(SITES)
    verdict = server.receive("cow", replies["cow"])
    assert not verdict.counted
    assert verdict.reason.startswith("stale")
    assert residual(server.algorithm, server.state) < 1e-14


def test_a_server_that_restarts_asks_all_sites_anew(tmp_path):
    config = settings(deploy="mode = 'async'\nbuffer = 1")
    server = server_of(config, tmp_path)
    everybody(server, config)
    requests = server.open(SITES)
    replies = {
        site: answer(request, learner(), config, site, tmp_path / "sites")
        for site, request in requests.items()
    }
    server.receive("ant", replies["ant"])
    server.close()
    again = server_of(config, tmp_path)
    assert set(again.open(SITES)) == set(SITES)
    assert not again.receive("bee", replies["bee"]).counted
    assert again.roster["ant"].applied == 1


def test_sites_at_work_go_on_while_too_few_are_present(tmp_path):
    config = settings(deploy="mode = 'async'\nbuffer = 2\nquorum = 2")
    server = server_of(config, tmp_path)
    everybody(server, config, ["ant", "bee"])
    requests = server.open(["ant", "bee"])
    for site in ("ant", "bee"):
        reply = answer(requests[site], learner(), config, site, tmp_path / "sites")
        if site == "ant":
            server.receive(site, reply)
    server.close()  # one of two: not enough, and bee works on
    assert server.state.round == 0
    assert server.open([]) == {}
    assert server.open_round is None
    assert set(server.open(["ant"])) == {"ant"}
    assert server.receive("bee", reply).counted


def test_a_site_that_leaves_takes_its_task_along(tmp_path):
    config = settings(deploy="mode = 'async'\nbuffer = 1")
    server = server_of(config, tmp_path)
    everybody(server, config)
    requests = server.open(SITES)
    for site in ("ant", "bee"):
        reply = answer(requests[site], learner(), config, site, tmp_path / "sites")
        server.receive(site, reply)
    late = answer(requests["cow"], learner(), config, "cow", tmp_path / "sites")
    server.close()
    server.leave("cow")
    everybody(server, config, ["cow"])
    assert "cow" in server.open(SITES)
    assert not server.receive("cow", late).counted
    assert residual(server.algorithm, server.state) < 1e-14


@pytest.mark.parametrize(
    ("deploy", "more", "words"),
    [
        ("mode = 'async'", {}, "needs deploy.buffer"),
        ("buffer = 2", {}, "deploy.buffer is for deploy.mode"),
        ("staleness = 'polynomial:1'", {}, "deploy.staleness is for deploy.mode"),
        ("mode = 'async'\nbuffer = 6", {}, "at most the number of sites at work, 5"),
        ("mode = 'async'\nbuffer = 0", {}, "deploy.buffer must be a whole number"),
        ("mode = 'async'\nbuffer = 2", {"extra": "[cohort]\nsize = 1"}, "sites at work, 1"),
        (
            "mode = 'async'\nbuffer = 2\nstaleness = 'polynomial:1'\nstate = 'client'",
            {},
            "needs deploy.state",
        ),
        (
            "mode = 'async'\nbuffer = 2\nstate = 'client'\nsecure = true",
            {},
            'deploy.secure needs deploy.mode = "sync"',
        ),
        (
            "mode = 'async'\nbuffer = 2",
            {"top": "robust = 'krum:0.2'"},
            'robust needs deploy.mode = "sync"',
        ),
        (
            "mode = 'async'\nbuffer = 2",
            {"algorithm": "name = 'amplified-scaffold'"},
            "amplified-scaffold counts rounds in windows",
        ),
        (
            "mode = 'async'\nbuffer = 2",
            {
                "extra": "[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-5\n"
                "[deploy.records]\n" + "\n".join(f"{site} = 2" for site in SITES)
            },
            r"does not go together with \[privacy\]",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(deploy, more, words):
    with pytest.raises(InputError, match=words):
        settings(deploy=deploy, **more)

"""The deployed protocol, in one process: equal to the simulator, closed to nonsense, whole after any crash."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from deploy_case import (
    CENTRE,
    CURVATURE,
    RECORDS,
    SITES,
    START,
    answer,
    crash_after,
    data,
    everybody,
    learner,
    memory_folder,
    optimum,
    play,
    run_quietly,
    server_of,
    settings,
)
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as some

import fedscaffold as fs
from fedscaffold.algorithms import make
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, Stopped, drive, parse
from fedscaffold.deploy.aggregation import residual, shares
from fedscaffold.deploy.audit import Audit, read_verified
from fedscaffold.deploy.client import greeting
from fedscaffold.deploy.cohort import sample_sites
from fedscaffold.deploy.gate import Asked, Refused, admit
from fedscaffold.deploy.schema import Blob, Packet, blob
from fedscaffold.state import StateError


@pytest.fixture
def tmp_path():
    folder = memory_folder()
    yield folder
    shutil.rmtree(folder)


def simulated(config):
    """The same settings and data through the simulator."""

    def loss(params, batch):
        a, b = batch
        return (a * (params["w"] - b) ** 2).sum(axis=1).mean() / 2

    problem = fs.Problem(loss, {"w": START}, [data(site) for site in SITES])
    return fs.simulate(
        make(**config.algorithm),
        problem,
        rounds=config.rounds,
        local_steps=config.local.steps,
        lr=config.local.lr,
        cohort=config.cohort,
        weights=config.weights,
        seed=config.seed,
        precision=config.precision,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "cohort", "weights"),
    [
        ("name = 'scaffold'", 0.6, "records"),
        ("name = 'scaffold'\nserver_lr = 0.7", 1.0, "equal"),
        ("name = 'scaffold'\noption = 1", 3, "equal"),
        ("name = 'fedavg'", 0.4, "records"),
        ("name = 'fedprox'\nmu = 0.5", 1.0, "equal"),
        ("name = 'sgd'", 0.6, "equal"),
        ("name = 'feddyn'\nalpha = 0.8", 0.6, "records"),
    ],
)
def test_deployment_is_the_simulation(algorithm, cohort, weights, tmp_path):
    top = f"seed = 3\nweights = '{weights}'"
    run = None
    for state in ("server", "client"):
        config = settings(
            f"[cohort]\nsize = {cohort}", f"state = '{state}'", algorithm=algorithm, top=top
        )
        run = run or simulated(config)
        server, summary = run_quietly(config, tmp_path / state)
        np.testing.assert_allclose(server.state.x, run.vector, rtol=0, atol=1e-12)
        for field, _ in server.algorithm.means:
            mine = getattr(server.state.server, field)
            np.testing.assert_allclose(mine, getattr(run.server, field), rtol=0, atol=1e-12)
        assert summary.rounds == config.rounds
        assert state == "client" or summary.residual < 1e-13


@pytest.mark.parametrize("name", ["fednova", "scaffold", "fedavg"])
def test_unequal_steps_are_the_simulators(name, tmp_path):
    """All records of a site alike, so that their order does not matter; K_i = 2 n_i."""

    def alike(site):
        return tuple(np.repeat(a[:1], RECORDS[site], axis=0) for a in data(site))

    config = settings(local="epochs = 2\nbatch_size = 1\nlr = 0.05", algorithm=f"name = '{name}'")
    one = learner(data=alike)
    server = Server(config, one.schema, one.start, tmp_path)
    drive(server, InProcess(one, config, tmp_path), 6)

    def loss(params, batch):
        a, b = batch
        return (a * (params["w"] - b) ** 2).sum(axis=1).mean() / 2

    problem = fs.Problem(loss, {"w": START}, [alike(site) for site in SITES])
    more = {"lr": 0.05, "batch_size": 1, "precision": "float64"}
    run = fs.simulate(
        make(**config.algorithm), problem, rounds=6, local_epochs=2, **more, metrics=()
    )
    np.testing.assert_allclose(server.state.x, run.vector, rtol=0, atol=1e-12)


def test_cohorts_are_the_simulators():
    from fedscaffold.simulation.sampling import Drawer, Streams

    ones = np.ones(7, np.int64)
    drawer = Drawer(7, 3, 3, None, ones, ones, ones, None, False, lambda round: np.ones(()))
    for round in range(50):
        mine = sample_sites([str(i) for i in range(7)], 3, seed=11, round=round)
        assert mine == [str(i) for i in drawer.cohort(Streams(11), round)]
    assert (
        len({tuple(sample_sites(list("abcdefg"), 3, 11, 0, attempt)) for attempt in range(20)}) > 5
    )


@pytest.mark.slow
def test_momentum_reaches_the_optimum_and_c_i_the_gradients(tmp_path):
    config = settings(local="steps = 4\nlr = 0.1\noptimizer = 'momentum'")
    server, _ = run_quietly(config, tmp_path, rounds=80)
    goal = optimum(shares(server.roster))
    np.testing.assert_allclose(server.state.x, goal, atol=1e-7)
    for site, memory in server.state.memory.items():
        np.testing.assert_allclose(memory.c_i, CURVATURE[site] * (goal - CENTRE[site]), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_who_keeps_the_c_i_changes_nothing(optimizer, tmp_path):
    local = f"steps = 4\nlr = 0.05\noptimizer = '{optimizer}'"
    ends = [
        run_quietly(settings(deploy=f"state = '{state}'", local=local), tmp_path / state, rounds=6)[
            0
        ].state
        for state in ("server", "client")
    ]
    np.testing.assert_allclose(ends[0].x, ends[1].x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ends[0].server.c, ends[1].server.c, rtol=0, atol=1e-12)


def test_bytes_up_are_fedavgs(tmp_path):
    sizes = {}
    for name in ("scaffold", "fedavg"):
        config = settings(algorithm=f"name = '{name}'")
        server = server_of(config, tmp_path / name)
        everybody(server, config)
        requests = server.open(SITES)
        reply = answer(requests["ant"], learner(), config, "ant", tmp_path / "sites")
        sizes[name] = sum(len(item.data) for item in reply.blobs.values())
    assert sizes["scaffold"] == sizes["fedavg"] == 2 * 8


def test_unequal_steps_still_take_one_vector(tmp_path):
    config = settings(
        local="epochs = 2\nbatch_size = 1\nlr = 0.05\ndraw = 'shuffle'", top="weights = 'records'"
    )
    server, _ = run_quietly(config, tmp_path, rounds=5)
    assert residual(server.algorithm, server.state) < 1e-13
    assert {event["event"] for event in read_verified(tmp_path / "audit.jsonl")} == {
        "started",
        "joined",
        "opened",
        "committed",
        "evaluated",
    }


@pytest.mark.parametrize("state", ["server", "client"])
def test_resumed_is_undisturbed(state, tmp_path):
    config = settings("[cohort]\nsize = 0.6", f"state = '{state}'")
    quiet, _ = run_quietly(config, tmp_path / "quiet", rounds=12)
    for rounds in (3, 4, 9, 12):
        again, _ = run_quietly(config, tmp_path / "stopped", rounds=rounds)
    assert again.state.x.tobytes() == quiet.state.x.tobytes()
    assert again.state.server.c.tobytes() == quiet.state.server.c.tobytes()


@pytest.mark.parametrize("state", ["server", "client"])
def test_a_name_taken_out_of_the_settings_leaves_exactly(state, tmp_path):
    config = settings(
        deploy=f"state = '{state}'", local="steps = 3\nlr = 0.3", top="weights = 'records'"
    )
    run_quietly(config, tmp_path, rounds=3)
    fewer = config._replace(deploy=config.deploy._replace(sites=("bee", "dog", "elk")))
    server, summary = run_quietly(fewer, tmp_path, rounds=40)
    assert set(server.roster) == {"bee", "dog", "elk"}
    np.testing.assert_allclose(server.state.x, optimum(shares(server.roster)), atol=1e-9)
    assert state == "client" or summary.residual < 1e-13


def test_a_crash_between_any_two_writes_changes_nothing(tmp_path):
    config = settings("[cohort]\nsize = 0.6")
    quiet, _ = run_quietly(config, tmp_path / "quiet", rounds=4)
    folder, points = tmp_path / "crashed", 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            crash = crash_after(patch, 20 * points + points % 20)
            try:
                run_quietly(config, folder, rounds=4)
                break
            except crash:
                points += 1
        again, _ = run_quietly(config, folder, rounds=4)
        assert again.state.x.tobytes() == quiet.state.x.tobytes()
        assert residual(again.algorithm, again.state) < 1e-13
    assert points > 3


def test_the_order_of_replies_changes_no_bit(tmp_path):
    config = settings()
    results = []
    for order in (1, -1):
        folder = tmp_path / str(order)
        server = server_of(config, folder)
        everybody(server, config)
        for _ in range(3):
            requests = server.open(SITES)
            for site in list(requests)[::order]:
                server.receive(
                    site, answer(requests[site], learner(), config, site, folder / "sites")
                )
            assert server.close().committed
        results.append(server.state.x.tobytes())
    assert results[0] == results[1]


def asked():
    return Asked(
        "ant", 2, "n", {"d": ((2,), "float64")}, learner().schema, records=2, most_steps=3, lr=0.5
    )


def honest(**facts):
    told = {
        "site": "ant",
        "round": 2,
        "nonce": "n",
        "schema": learner().schema.digest,
        "records": 2,
        "steps": 3,
    }
    return Packet({**told, **facts}, {"d": blob(np.ones(2))})


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (honest(site="bee"), "stranger"),
        (honest()._replace(blobs={"d": blob(np.ones(3))}), "size"),
        (honest()._replace(blobs={"d": Blob("float64", (1 << 38,), b"")}), "size"),
        (honest()._replace(blobs={"d": Blob("float64", (2,), bytes(17))}), "size"),
        (honest()._replace(blobs={"d": Blob("float64", (2,), bytes(15))}), "size"),
        (honest()._replace(blobs={"d": Blob("float64", (1,), bytes(8))}), "schema"),
        (honest()._replace(blobs={"d": Blob("object", (2,), bytes(16))}), "schema"),
        (honest()._replace(blobs={"d": blob(np.ones(2, np.float32))}), "schema"),
        (honest()._replace(blobs={"d": blob(np.ones(1)), "e": blob(np.ones(1))}), "schema"),
        (honest()._replace(blobs={}), "schema"),
        (honest(schema="another"), "schema"),
        (honest()._replace(blobs={"d": blob(np.array([1.0, np.inf]))}), "not finite"),
        (honest(round=1), "stale"),
        (honest(nonce="old"), "stale"),
        (honest(records=10**12), "implausible"),
        (honest(records=-1), "implausible"),
        (honest(steps=0), "implausible"),
        (honest(steps=4), "implausible"),
        (honest(steps=float("nan")), "schema"),
        (honest(records=True), "schema"),
        (honest(**{f"x{i}": 0 for i in range(100)}), "size"),
    ],
)
def test_the_gate_names_the_reason(packet, code):
    with pytest.raises(Refused) as refused:
        admit(packet, asked())
    assert refused.value.code == code
    assert admit(honest(), asked()).travel == 1.5


facts = some.dictionaries(
    some.sampled_from(
        [
            "site",
            "round",
            "nonce",
            "schema",
            "records",
            "steps",
            "memory",
            "kind",
            "metric.loss",
            "junk",
        ]
    ),
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(max_size=30)
    | some.just("ant"),
)
blobs = some.dictionaries(
    some.sampled_from(["d", "move", "c_i", "buffer.x", ""]),
    some.none()
    | some.binary(max_size=40)
    | some.builds(
        Blob,
        some.sampled_from(["float64", "float32", "object", "U9", ""]),
        some.lists(some.integers(-2, 1 << 70), max_size=3).map(tuple) | some.just((2,)),
        some.binary(max_size=40) | some.binary(min_size=16, max_size=16) | some.none(),
    ),
    max_size=3,
)


@pytest.mark.slow
@limits(max_examples=400, deadline=None)
@given(facts=facts, keep=some.booleans(), blobs=blobs)
def test_fuzzed_payloads_give_typed_refusals_only(facts, keep, blobs):
    base = honest()
    packet = Packet({**base.facts, **facts} if keep else facts, blobs or base.blobs)
    try:
        update = admit(packet, asked())
    except Refused:
        return
    assert np.isfinite(update.vectors["d"]).all()
    assert update.vectors["d"].shape == (2,)


@limits(max_examples=60, deadline=None)
@given(facts=facts, blobs=blobs, site=some.sampled_from([*SITES, "nobody"]))
def test_a_fuzzed_reply_never_stops_the_server(fuzzed_server, facts, blobs, site):
    server, config, folder = fuzzed_server
    requests = server.open(SITES)
    verdict = server.receive(site, Packet(facts, blobs))
    assert not verdict.counted
    for name in SITES:
        server.receive(name, answer(requests[name], learner(), config, name, folder))
    assert server.close().heard == SITES


@pytest.fixture(scope="module")
def fuzzed_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    config = settings()
    server = server_of(config, folder)
    everybody(server, config)
    return server, config, folder


def test_a_bad_client_is_named_and_told_and_the_round_goes_on(tmp_path):
    config = settings(deploy="quorum = 2")
    server = server_of(config, tmp_path)
    everybody(server, config)
    requests = server.open(SITES)
    for site in SITES[1:]:
        server.receive(site, answer(requests[site], learner(), config, site, tmp_path))
    reply = answer(requests["ant"], learner(), config, "ant", tmp_path)
    poisoned = reply._replace(blobs={"d": blob(np.array([np.nan, 0]))})
    assert server.receive("ant", poisoned).reason.startswith("not finite")
    outcome = server.close()
    assert outcome.committed
    assert outcome.heard == SITES[1:]
    assert "not finite" in server.open(SITES)["ant"].facts["told"]
    (refusal,) = [
        event for event in read_verified(tmp_path / "audit.jsonl") if event["event"] == "refused"
    ]
    assert (refusal["site"], refusal["code"]) == ("ant", "not finite")


def test_below_quorum_nothing_changes_and_the_run_ends(tmp_path):
    class Deaf(InProcess):
        def collect(self):
            out = [(site, "gone") for site in self.queue if site != "ant"]
            out += [
                (s, answer(self.queue[s], learner(), config, s, tmp_path))
                for s in self.queue
                if s == "ant"
            ]
            self.queue = {}
            return out

    config = settings(deploy="quorum = 0.5\nretries = 3")
    server = server_of(config, tmp_path)
    pauses = []
    with pytest.raises(Stopped, match="round 1 failed its quorum 4 times"):
        drive(server, Deaf(learner(), config, tmp_path), 5, sleep=pauses.append)
    assert server.state.round == 0
    np.testing.assert_array_equal(server.state.x, START)
    assert pauses == [1.0, 2.0, 4.0]  # it backs off


def test_deadlines_run_on_the_monotonic_clock(tmp_path):
    now = [5000.0]
    config = settings(deploy="deadline = 10.0\nquorum = 1")
    server = server_of(config, tmp_path, clock=lambda: now[0])
    everybody(server, config)
    requests = server.open(SITES)
    server.receive("ant", answer(requests["ant"], learner(), config, "ant", tmp_path))
    assert not server.due()
    now[0] += 10
    assert server.due()
    outcome = server.close()
    assert outcome.committed
    assert outcome.missing == SITES[1:]
    late = answer(requests["bee"], learner(), config, "bee", tmp_path)
    assert server.receive("bee", late).reason.startswith("late")


def test_clipping_is_joint_and_keeps_c_the_mean(tmp_path):
    config = settings(deploy="clip = 0.5")
    server = server_of(config, tmp_path)
    everybody(server, config)
    before = server.state.x
    for _ in range(5):
        play(server, config, tmp_path)
        assert residual(server.algorithm, server.state) < 1e-13
        assert np.linalg.norm(server.state.x - before) <= 0.5 + 1e-12
        before = server.state.x
    assert any(event["event"] == "clipped" for event in read_verified(tmp_path / "audit.jsonl"))


def test_a_disk_that_is_full_stops_the_run_and_keeps_the_state(tmp_path, monkeypatch):
    config = settings()
    server, _ = run_quietly(config, tmp_path, rounds=2)
    real = os.write

    def full(fd, data):
        if len(data) > 100:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StateError, match="the disk or the quota is full"):
        play(server, config, tmp_path)
    monkeypatch.undo()
    again, _ = run_quietly(config, tmp_path, rounds=2)
    assert again.state.round == 2


def test_the_audit_log_tells_when_it_was_touched(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = Audit(path)
    for i in range(4):
        log.write("event", number=i)
    lines = path.read_text().splitlines()
    for changed in (lines[1:], lines[:1] + lines[2:], [lines[0].replace("0", "1", 1), *lines[1:]]):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(InputError, match="line"):
            read_verified(path)
    path.write_text("\n".join(lines) + '\n{"torn')
    Audit(path).write("after")
    assert [event["event"] for event in read_verified(path)] == ["event"] * 4 + ["torn", "after"]


def test_a_site_with_other_settings_or_another_model_is_refused(tmp_path):
    config, other = settings(), settings(local="steps = 4\nlr = 0.2")
    server = server_of(config, tmp_path)
    with pytest.raises(Refused, match="config: its settings differ"):
        everybody(server, other)
    everybody(server, config)
    request = server.open(SITES)["ant"]
    reply = answer(request, learner(), other, "ant", tmp_path)
    assert reply.facts["kind"] == "refusal"
    assert not server.receive("ant", reply).counted


def test_a_state_of_other_settings_is_not_continued(tmp_path):
    run_quietly(settings(), tmp_path, rounds=1)
    with pytest.raises(InputError, match="belongs to another algorithm or local settings"):
        server_of(settings(local="steps = 4\nlr = 0.2"), tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[deploy]\nsites = ['a b']", "deploy.sites must be a list of names"),
        ("[deploy]\nsites = ['a', 'a']", "each site once"),
        ("[local]\nsteps = 1\nepochs = 1", "either local.steps or local.epochs"),
        ("[deploy]\nquorum = 1.5", "deploy.quorum must be a share"),
        ("[deploy]\nstate = 'both'", "unknown deploy.state 'both'"),
        ("[deploy]\nstate = 'client'\nclip = 1.0", "deploy.clip needs"),
        ("rounds = 0", "rounds must be a whole number"),
        ("[algorithm]\nname = 'scafold'", "did you mean 'scaffold'"),
        ("rounds", "is not valid TOML"),
    ],
)
def test_settings_are_checked_in_one_line(text, said):
    with pytest.raises(InputError) as error:
        parse(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "code", ["import fedscaffold.deploy", "import fedscaffold.deploy.torch_client"]
)
def test_the_client_loads_no_jax(code):
    script = f"{code}\nimport sys\nassert 'jax' not in sys.modules and 'flwr' not in sys.modules"
    script += "" if "torch" in code else "\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_metrics_and_status_are_written(tmp_path):
    config = settings()
    _, summary = run_quietly(config, tmp_path, rounds=3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["loss"] == summary.metrics["loss"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["phase"], status["round"], status["waiting_for"]) == ("finished", 3, [])
    assert set(status["sites"]) == set(SITES)


def test_sites_that_greet_together_join_by_one_commit(tmp_path, monkeypatch):
    """Each with its line in the audit log; one that is refused keeps no other out, whatever the order."""
    config = settings()
    together, alone = (server_of(config, tmp_path / name) for name in ("together", "alone"))
    commits, commit = [], together._commit
    monkeypatch.setattr(together, "_commit", lambda *state: (commits.append(1), commit(*state)))
    greetings = {site: greeting(learner(), config, site) for site in reversed(SITES)}
    greetings["bee"] = greetings["bee"]._replace(facts=greetings["bee"].facts | {"schema": "other"})
    assert set(together.welcome(greetings)) == {"bee"}
    assert len(commits) == 1
    for site in sorted(SITES):
        if site != "bee":
            alone.hello(site, greetings[site])
    assert together.state.roster == alone.state.roster
    assert together.welcome(greetings).keys() == {"bee"}
    assert len(commits) == 1  # nothing new
    joined = [e["site"] for e in read_verified(together.audit.path) if e["event"] == "joined"]
    assert joined == sorted(set(SITES) - {"bee"})
    assert server_of(config, tmp_path / "together").state.roster == alone.state.roster

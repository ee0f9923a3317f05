"""A real federation of processes, with TLS and keys, disturbed as badly as can be: the same model, bit for bit."""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from deploy_case import open_to_others

import fedscaffold as fs
from fedscaffold.algorithms import make
from fedscaffold.deploy import InProcess, Server, answer, drive
from fedscaffold.deploy.app_files import pack_app
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.audit import read_verified

pytest.importorskip("flwr")
from fedscaffold.deploy import flower_app, keys
from fedscaffold.deploy.flower_records import from_record, to_record
from fedscaffold.deploy.local_cluster import THREADS, Federation
from fedscaffold.deploy.processes import descendants, is_alive
from fedscaffold.deploy.schema import Packet, blob
from fedscaffold.state import latest

APP = """
import time
from pathlib import Path
import numpy as np
from fedscaffold.deploy import ArraysLearner
from beside import CENTRE

CURVATURE = {"north": np.array([1.0, 2.0]), "south": np.array([2.0, 0.5])}

def data(site):
    return CURVATURE[site][None].repeat(4, 0), CENTRE[site] + np.linspace(-1, 1, 4)[:, None]

def gradient(params, batch):
    time.sleep(SLOW)
    a, b = batch
    return {"w": (a * (params["w"] - b)).mean(axis=0)}

def learner(settings):
    start = np.load(Path(__file__).parent / "start.npy")
    return ArraysLearner(gradient, {"w": start}, data, precision=settings.precision)
"""
BESIDE = """
import numpy as np

CENTRE = {"north": np.array([1.0, -2.0]), "south": np.array([-3.0, 0.5])}
"""
TOML = """
seed = 5
rounds = 3
precision = "float64"
[local]
steps = 3
lr = 0.2
[deploy]
sites = ["north", "south"]
deadline = 40.0
quorum = 1.0
retries = 10
wait = 120.0
"""


def write_app(folder, slow=0.0, toml=TOML):
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(APP.replace("SLOW", str(slow)))
    (folder / "beside.py").write_text(BESIDE)
    np.save(folder / "start.npy", np.array([0.3, 0.7]))
    (folder / "federation.toml").write_text(toml)
    return folder


def in_process(app, folder):
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, folder)
    drive(server, InProcess(learner, settings, folder), settings.rounds)
    return server.state


def simulated(app):
    settings, learner = open_app(app)

    def loss(params, batch):
        a, b = batch
        return (a * (params["w"] - b) ** 2).sum(axis=1).mean() / 2

    problem = fs.Problem(
        loss, {"w": learner.start}, [learner.data(site) for site in settings.deploy.sites]
    )
    local = settings.local
    more = {"seed": settings.seed, "precision": settings.precision, "cohort": settings.cohort}
    run = fs.simulate(
        make(**settings.algorithm),
        problem,
        rounds=settings.rounds,
        local_steps=local.steps,
        lr=local.lr,
        **more,
    )
    return run.vector


class Wire:
    """A grid in this process: real Flower messages, through real serialisation, to the real client."""

    def __init__(self, app, folder):
        self.settings, self.learner = open_app(app)
        self.folder, self.replies, self.numbers = folder, {}, count()

    def get_nodes(self):
        class Node:
            def __init__(self, node_id, name):
                self.node_id, self.name = node_id, name

        return [Node(i + 1, site) for i, site in enumerate(self.settings.deploy.sites)]

    def push_messages(self, messages):
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        ids = []
        for message in messages:
            site = self.settings.deploy.sites[message.metadata.dst_node_id - 1]
            message.metadata.__dict__["_message_id"] = f"m{next(self.numbers)}"
            contents = {
                key: obj.deflate() for key, obj in get_all_nested_objects(message.content).items()
            }
            request = from_record(inflated(message.content, contents))
            reply = answer(request, self.learner, self.settings, site, self.folder)
            self.replies[message.metadata.message_id] = Message(to_record(reply), reply_to=message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, ids):
        return [self.replies.pop(i) for i in ids if i in self.replies]


class Unreadable(Wire):
    """A site's replies to rounds make the engine fail, after it has taken all that came with them off the link."""

    def pull_messages(self, ids):
        replies = super().pull_messages(ids)
        if any(
            reply.metadata.src_node_id == 2 and reply.content["facts"]["kind"] != "hello"
            for reply in replies
        ):
            raise ValueError("an object that cannot be inflated")
        return replies


def inflated(record, contents):
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    return inflate_object_from_contents(record.object_id, contents)


def engine_identity(monkeypatch):
    """What the engine sets in a server app's process."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.slow
def test_a_reply_that_the_engine_cannot_read_takes_no_other_along(tmp_path, monkeypatch):
    engine_identity(monkeypatch)
    toml = TOML.replace("quorum = 1.0", "quorum = 1").replace("deadline = 40.0", "deadline = 1.0")
    app = write_app(tmp_path / "app", toml=toml.replace("rounds = 3", "rounds = 2"))
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "run")
    drive(
        server,
        flower_app.FlowerTransport(Unreadable(app, tmp_path / "sites"), settings.deploy.deadline),
        2,
    )
    closed = [
        event
        for event in read_verified(tmp_path / "run" / "audit.jsonl")
        if event["event"] == "committed"
    ]
    assert [(event["heard"], event["missing"]) for event in closed] == [(["north"], ["south"])] * 2


class Failing(Wire):
    """A link that dies at its first calls, as within a handshake; or at every call."""

    failures = 3

    def fail(self):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("EOF occurred in violation of protocol (_ssl.c:1006)")

    def get_nodes(self):
        self.fail()
        return super().get_nodes()

    def push_messages(self, messages):
        self.fail()
        return super().push_messages(messages)


@pytest.mark.parametrize("failures", [3, -1])
def test_the_end_of_a_link_is_no_outcome(failures, tmp_path, monkeypatch):
    """The server app waits for the link; where it must end, it says why in its log and leaves the run to another."""
    from flwr.app import Context, RecordDict

    engine_identity(monkeypatch)
    monkeypatch.setattr(flower_app.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(flower_app, "OUTAGE", 60.0 if failures > 0 else 0.0)
    app, home = write_app(tmp_path / "app"), tmp_path / "home"
    pack_app(app, tmp_path / "package")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "package"), *sys.path])
    grid = Failing(app, tmp_path / "sites")
    grid.failures = failures
    context = Context(1, 1, {}, RecordDict(), {"home": str(home), "files": ""})
    if failures > 0:
        flower_app.serve(grid, context)
        outcome = json.loads((home / "outcome.json").read_text())
        assert outcome["rounds"] == 3
        quiet = in_process(app, tmp_path / "quiet")
        assert latest(home / "state").arrays["x"].tobytes() == quiet.x.tobytes()
        assert (home / "server.log").read_text().count("round committed") == 3
        return
    with pytest.raises(flower_app.LinkLost):
        flower_app.serve(grid, context)
    assert not (home / "outcome.json").exists()
    said = (home / "server.log").read_text()
    assert "LinkLost: the link failed" in said
    assert "EOF occurred in violation of protocol" in said


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_flower_messages_carry_the_same_bits(precision, tmp_path, monkeypatch):
    engine_identity(monkeypatch)
    app = write_app(tmp_path / "app", toml=TOML.replace("float64", precision))
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "wired")
    transport = flower_app.FlowerTransport(Wire(app, tmp_path / "sites"), settings.deploy.deadline)
    drive(server, transport, settings.rounds)
    quiet = in_process(app, tmp_path / "quiet")
    assert server.state.x.tobytes() == quiet.x.tobytes()
    tolerance = 1e-12 if precision == "float64" else 1e-6
    np.testing.assert_allclose(server.state.x, simulated(app), rtol=0, atol=tolerance)


class Slow(Wire):
    """South's replies are there at the third time that they are asked for."""

    def __init__(self, app, folder):
        super().__init__(app, folder)
        self.asked = Counter()

    def pull_messages(self, ids):
        self.asked.update(ids)
        there = [
            one
            for one in ids
            if one in self.replies
            and (self.replies[one].metadata.src_node_id != 2 or self.asked[one] > 2)
        ]
        return super().pull_messages(there)


@pytest.mark.slow
def test_in_asynchronous_rounds_replies_to_earlier_requests_count(tmp_path, monkeypatch):
    """The link holds one site's replies back: the other goes on, and they count in later rounds."""
    engine_identity(monkeypatch)
    toml = TOML.replace("quorum = 1.0", 'quorum = 1\nmode = "async"\nbuffer = 1')
    app = write_app(tmp_path / "app", toml=toml)
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "run")
    wire, outcomes = Slow(app, tmp_path / "sites"), []
    drive(server, flower_app.FlowerTransport(wire, 40.0, asynchronous=True), 9, outcomes.append)
    assert ("north",) in [outcome.heard for outcome in outcomes]
    late = [outcome.stale["south"] for outcome in outcomes if "south" in outcome.stale]
    assert late
    assert server.residual < 1e-14


class Reading(Wire):
    """South greets for the first time while the first round is under way, and is slow to read its data."""

    def __init__(self, app, folder):
        super().__init__(app, folder)
        self.began, self.hellos, self.read = False, [], False

    def get_nodes(self):
        return super().get_nodes()[: 2 if self.began else 1]

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message, one in zip(messages, ids, strict=True):
            if message.metadata.dst_node_id == 2 and message.content["facts"]["kind"] == "hello":
                self.hellos.append(one)
            elif self.hellos:
                self.read = True  # a round later
            self.began = self.began or message.content["facts"]["kind"] == "train"
        return ids

    def pull_messages(self, ids):
        return super().pull_messages([one for one in ids if one not in self.hellos or self.read])


@pytest.mark.slow
def test_a_site_that_greets_for_longer_than_a_round_joins(tmp_path, monkeypatch):
    """Its greeting used to be void with the next request to the others, and so with every round."""
    engine_identity(monkeypatch)
    toml = TOML.replace("quorum = 1.0", "quorum = 1").replace("wait = 120.0", "wait = 0.0")
    app = write_app(tmp_path / "app", toml=toml)
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "run")
    wire, outcomes = Reading(app, tmp_path / "sites"), []
    drive(server, flower_app.FlowerTransport(wire, 40.0), 3, outcomes.append)
    assert [outcome.heard for outcome in outcomes] == [("north",), ("north",), ("north", "south")]
    assert len(wire.hellos) == 1


def test_a_greeting_that_comes_between_two_looks_is_not_asked_for_again(tmp_path, monkeypatch):
    """The thread that pulls replies takes longer than it is waited for; each greeting opens the site's data anew."""
    engine_identity(monkeypatch)
    monkeypatch.setattr(flower_app, "GLANCE", 0.0)
    wire, sent = Wire(write_app(tmp_path / "app"), tmp_path / "sites"), []
    push = wire.push_messages
    wire.push_messages = lambda messages: sent.extend(messages) or push(messages)
    transport, said = flower_app.FlowerTransport(wire, 40.0), {}
    while len(said) < 2:
        said |= transport.greetings()
        if transport.looking is not None:
            transport.looking.join()
    assert len(sent) == 2


class Rotating(Wire):
    """After two requests to north its node is gone, and one with a new key has its name."""

    number, registered = 1, True

    def get_nodes(self):
        north, south = super().get_nodes()
        north.node_id = self.number
        if not self.registered:
            north.name = south.name = ""
        return [north, south]

    def push_messages(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id
            assert node in (self.number, 2), "sent to a node that is gone"
            message.metadata.__dict__["_dst_node_id"] = 2 if node == 2 else 1
        ids = super().push_messages(messages)
        for message in messages:
            if message.metadata.dst_node_id == 1:
                message.metadata.__dict__["_dst_node_id"] = self.number
        if len(self.replies) >= 2 and any("round" in m.content["facts"] for m in messages):
            self.number = 3
        return ids


@pytest.mark.slow
@pytest.mark.parametrize("registered", [True, False])
def test_a_site_with_a_new_key_goes_on_and_a_stranger_does_not_take_its_name(
    registered, tmp_path, monkeypatch
):
    """Its new node has the registered name; a node that only claims the name of one that is away is none."""
    engine_identity(monkeypatch)
    monkeypatch.setattr(Rotating, "registered", registered)
    toml = TOML.replace("quorum = 1.0", "quorum = 1").replace("deadline = 40.0", "deadline = 1.0")
    app = write_app(tmp_path / "app", toml=toml)
    settings, learner = open_app(app)
    server = Server(settings, learner.schema, learner.start, tmp_path / "run")
    wire = Rotating(app, tmp_path / "sites")
    drive(server, flower_app.FlowerTransport(wire, settings.deploy.deadline), 3)
    heard = [
        event["heard"]
        for event in read_verified(tmp_path / "run" / "audit.jsonl")
        if event["event"] == "committed"
    ]
    assert heard[0] == ["north", "south"]
    assert heard[-1] == (["north", "south"] if registered else ["south"])


def test_packets_survive_flower_and_strangers_do_not():
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    packet = Packet(
        {"round": 3, "site": "north", "evaluate": True, "loss": 0.5}, {"x": blob(np.arange(3.0))}
    )
    assert from_record(to_record(packet)) == packet
    theirs = RecordDict(
        {"arrays": ArrayRecord({"x": Array(np.ones(2))}), "facts": ConfigRecord({"a": [1, 2]})}
    )
    assert from_record(theirs).blobs == {"x": None}  # a file of theirs is not opened
    assert from_record(RecordDict({"more": MetricRecord({"a": 1})})) == Packet({}, {})


def until(condition, seconds=600.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.1)


def running(session, word):
    """Processes of a session whose name or command line has the word in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    word in (entry / "comm").read_text() + (entry / "cmdline").read_text()
                    and os.getsid(int(entry.name)) == session
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def threads_of(pid):
    """How many threads a process may use, by its environment."""
    found = dict(
        word.partition("=")[::2] for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
    )
    return [int(found[name]) for name in THREADS]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_at_every_level_it_is_the_undisturbed_run(tmp_path):
    two = TOML.replace("rounds = 3", "rounds = 2")  # the server is killed between them
    # sites look for requests every 3 s, and both are to be at work when the first is killed
    app = write_app(tmp_path / "app", slow=1.5, toml=two)
    quiet = in_process(write_app(tmp_path / "quick", toml=two), tmp_path / "quiet")
    np.testing.assert_allclose(quiet.x, simulated(tmp_path / "quick"), rtol=0, atol=1e-12)
    home, killed = tmp_path / "home", []

    def disturb(now):
        """In the first round a client, its worker and the link; in the second the server. Nobody starts them again."""
        if now["phase"] != "waiting" or now["round"] in killed or now["round"] > 1:
            return
        killed.append(now["round"])
        sites = [federation.processes[f"site-{name}"].pid for name in ("north", "south")]
        # a server that dies while it sends would leave the sites waiting for the rest, until Flower ends its run
        until(lambda: all(running(site, "flwr-clientapp") for site in sites))
        if now["round"] == 1:
            os.kill(now["pid"], signal.SIGKILL)
            return
        victims = running(sites[0], "flwr-clientapp")
        worker = federation.processes["worker-north"].pid
        assert threads_of(victims[0]) == threads_of(worker)  # whoever trains, the same bits
        # a fork of the process beside the executor, which has loaded what a message needs
        command = home / "engine" / "bin" / "flower-superexec"
        assert str(command) in Path(f"/proc/{victims[0]}/cmdline").read_text()
        victims += [worker, federation.processes["link"].pid]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    with Federation(app, home) as federation:
        begun = []
        federation.up(begun.append)
        assert begun == ["starting the link", "registering 2 sites", "starting north, south"]
        keys.make_site_key(tmp_path / "stranger.key", tmp_path / "stranger.pub")
        shutil.copy(tmp_path / "stranger.key", home / "secrets" / "stranger.key")
        federation.start_site("stranger")  # a key that nobody registered
        federation.submit()
        outcome = federation.outcome(600, disturb)
        deaths = {name: backoff.deaths for name, backoff in federation.backoffs.items()}
        assert {"worker-north", "link", "site-stranger"} <= set(deaths)
        assert federation.run.backoff.deaths >= 1
        kin = [one for process in federation.processes.values() for one in descendants(process.pid)]
        assert len(kin) > 3
    assert killed == [0, 1]
    assert outcome["rounds"] == 2
    assert outcome["residual"] < 1e-15
    arrays = latest(home / "server" / "state").arrays
    assert arrays["x"].tobytes() == quiet.x.tobytes()
    assert arrays["c"].tobytes() == quiet.server.c.tobytes()
    events = read_verified(home / "server" / "audit.jsonl")
    assert sum(event["event"] == "started" for event in events) >= 2
    assert (home / "logs" / "keeper.log").read_text().count(" died") >= 3
    assert "round committed, round 2" in (home / "server" / "server.log").read_text()
    assert {event["site"] for event in events if event["event"] == "joined"} == {"north", "south"}
    assert not any(is_alive(one.pid) for one in kin)  # nothing is left behind
    assert (home / "link.db").is_file()
    assert open_to_others(home) == {}

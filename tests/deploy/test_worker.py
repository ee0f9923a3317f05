"""Warm sites: a worker that is killed, hung, stale, of another version or app gives the bits of a new process."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive, messenger, worker
from fedscaffold.deploy.app_files import pack_app
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.messenger import ask_worker
from fedscaffold.deploy.packets import Blob, Packet
from fedscaffold.deploy.processes import is_alive
from fedscaffold.deploy.worker_wire import (
    AVAILABLE,
    MAGIC,
    BrokenFrame,
    Connection,
    Frame,
    connect,
    listen,
    open_place,
)
from fedscaffold.privacy.site_ledger import SiteLedger

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="no peers of sockets here")
HELLO = Packet({"kind": "hello"}, {})
APP = """
import os, sys, time
from pathlib import Path
import numpy as np
from fedscaffold.deploy import ArraysLearner

here = Path(os.environ["WORKER_TEST"])

def data(site):
    with open(here / "opened", "a") as file:
        file.write("x")
    return np.array([[1.0, 2.0], [2.0, 0.5]]), np.array([[1.0, -2.0], [-3.0, 0.5]])

def gradient(params, batch):
    if (here / "kill").exists():
        (here / "kill").unlink()
        os.kill(os.getpid(), 9)
    while (here / "hang").exists():
        time.sleep(0.01)
    a, b = batch
    return {"w": (a * (params["w"] - b)).mean(axis=0)}

def learner(settings):
    return ArraysLearner(gradient, {"w": np.array([0.3, 0.7])}, data, precision="float64")
"""
TOML = """
precision = "float64"
rounds = 3
[local]
steps = 2
batch_size = 1
lr = 0.2
[deploy]
sites = ["north"]
wait = 5
"""


class SiteOf:
    """A site with an app, whose messengers run in this process."""

    def __init__(self, root):
        self.root, self.folder, self.package = root, root / "site", root / "package"

    def write(self, app=APP, toml=TOML):
        (self.root / "app").mkdir(exist_ok=True)
        (self.root / "app" / "app.py").write_text(app)
        (self.root / "app" / "federation.toml").write_text(toml)
        pack_app(self.root / "app", self.package)
        return self.root / "app"

    def ask(self, request=HELLO, patience=60.0, kept=False):
        return ask_worker(
            self.folder,
            "north",
            request,
            package=self.package,
            beside="",
            patience=patience,
            kept=kept,
        )

    @property
    def status(self):
        return worker.read_status(self.folder)

    def end(self):
        with contextlib.suppress(OSError), open_place(self.folder) as place:
            connection = connect(place)
            os.kill(connection.peer, signal.SIGKILL)
            connection.close()
            until(lambda: not is_alive(connection.peer))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKER_TEST", str(tmp_path))
    made = SiteOf(tmp_path)
    made.write()
    yield made
    made.end()


class Messengers(InProcess):
    """The transport without a network, through a site's worker."""

    def __init__(self, site):
        self.site, self.queue, self.known, self.replies = site, {}, set(), []

    def greetings(self):
        new = {} if self.known else {"north": self.site.ask()}
        self.known |= set(new)
        return new

    def collect(self):
        came = [(name, self.site.ask(sent[name])) for name, sent in self.queue.items()]
        self.queue = {}
        self.replies += [reply for _, reply in came]
        return came


def run(site, transport=None, name="run", token=None):
    """The state after all rounds; without a transport, through the site's worker."""
    settings, learner = open_app(site.root / "app")
    given = {"buffers": learner.buffers, "token": token}
    server = Server(settings, learner.schema, learner.start, site.root / name, **given)
    drive(server, transport or Messengers(site), settings.rounds)
    return server.state


class Cold(Messengers):
    """Everything anew for each message."""

    def __init__(self, site):
        super().__init__(site)
        self.site = type(
            "ColdSite", (), {"ask": staticmethod(lambda r=HELLO: self.answer(site, r))}
        )

    def answer(self, site, request):
        call = worker.Call("north", str(site.package), "", 60.0)
        return worker.answer_call(call, request, site.root / "cold")[0]


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def same(mine, theirs):
    return (
        mine.x.tobytes() == theirs.x.tobytes()
        and mine.server.c.tobytes() == theirs.server.c.tobytes()
    )


@pytest.mark.process
def test_a_messenger_imports_neither_torch_nor_jax_nor_what_they_work_for():
    pytest.importorskip("flwr")
    ours = ("torch", "jax", "scipy", "fedscaffold.state", "fedscaffold.deploy.client")
    heavy = (*ours, "sqlalchemy", "alembic")  # which a SuperNode has for itself
    script = (
        "import sys\n"
        "from fedscaffold.deploy.flower_process import main\n"
        "sys.argv = ['flwr-clientapp', '--help']\n"
        "try: main()\n"
        "except SystemExit: import fedscaffold.deploy.flower_client\n"
        f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--runtime-api-address" in done.stdout  # flwr's own


def test_frames_carry_packets_and_refuse_anything_else():
    left, right = map(Connection, socket.socketpair())
    facts = {"round": 3, "lr": 0.1, "nan": float("inf"), "evaluate": True, "site": "n\u00f6rth"}
    packet = Packet(
        facts, {"x": Blob("float64", (2, 1), bytes(range(16))), "e": Blob("u1", (), b"")}
    )
    big = Packet({}, {"x": Blob("uint8", (5 << 20,), os.urandom(5 << 20))})
    for sent in (Frame({"word": "a"}, packet), Frame({"word": "b"}, big)):
        thread = threading.Thread(target=left.send, args=(sent, 10.0))
        thread.start()
        assert right.receive(10.0) == sent
        thread.join()
    for wrong in (Packet({"a": b"bytes"}, {}), Packet({}, {"x": None})):
        with pytest.raises(ValueError, match="of other types than ours"):
            left.send(Frame({}, wrong))
    left.close()
    right.close()
    head = b'{"note": {}, "facts": {}, "blobs": [["x", "f4", [1], %d]]}'
    frames = {
        "another language": b"GET / HTTP/1.1\r\n",
        "cannot be read": MAGIC + struct.pack(">I", 9) + b"{'no': 1}",
        "too large": MAGIC + struct.pack(">I", len(head % (1 << 50))) + head % (1 << 50),
        "was closed": MAGIC + struct.pack(">I", 99) + b"{",
        "language": MAGIC + struct.pack(">I", 1 << 31),
    }
    for said, text in frames.items():
        out, back = socket.socketpair()
        with out, Connection(back) as connection:
            out.sendall(text)
            out.shutdown(socket.SHUT_WR)
            with pytest.raises(BrokenFrame, match=said):
                connection.receive(10.0)


def test_the_socket_is_for_its_owner_alone(tmp_path):
    deep = tmp_path / ("d" * 120) / "site"  # addresses of sockets end at 107 bytes
    with open_place(deep) as place, contextlib.closing(listen(place)) as listener:
        assert stat.S_IMODE((deep / "worker").stat().st_mode) == 0o700
        assert stat.S_IMODE((deep / "worker" / "socket").stat().st_mode) == 0o600
        with connect(place) as connection:
            assert connection.peer == os.getpid()
            listener.accept()[0].close()
    (deep / "worker").chmod(0o750)
    said = "must belong to this user, with mode 700; it has 750"
    with pytest.raises(InputError, match=said), open_place(deep):
        pass


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_is_told_nothing():
    address = f"\0fedscaffold-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    script = f"""
import os, socket, time
os.setuid(65534)
listener = socket.socket(fileno={listener.fileno()})
listener.listen(1)  # the peer of who connects is who listens
other = socket.socket(socket.AF_UNIX)
other.connect({address!r})
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], pass_fds=[listener.fileno()])
    try:
        link = socket.socket(socket.AF_UNIX)
        until(lambda: link.connect_ex(address) == 0)
        with pytest.raises(InputError, match="is of user 65534: nothing was said"):
            Connection(link)
    finally:
        child.kill()
        child.wait()
        listener.close()


@pytest.mark.process
@pytest.mark.parametrize("state", ["server", "client"])
def test_a_warm_run_has_the_bits_of_a_cold_one_though_its_worker_is_killed(site, state):
    site.write(toml=f'{TOML}state = "{state}"\n')
    (site.root / "opened").write_text("")
    transport = Messengers(site)
    (site.root / "kill").touch()  # in the first round
    state = run(site, transport)
    assert site.status["starts"] == 2
    assert [reply.facts["kind"] for reply in transport.replies] == ["train"] * 3 + ["evaluate"]
    assert len((site.root / "opened").read_text()) == 2  # once by each worker
    assert same(state, run(site, Cold(site), "quiet"))


@pytest.mark.process
def test_data_are_opened_again_when_the_site_greets_and_memory_stays(site):
    (site.root / "opened").write_text("")
    first = site.ask()
    assert (first.facts["kind"], first.facts["records"]) == ("hello", 2)
    site.ask()
    assert len((site.root / "opened").read_text()) == 2
    pid = site.status["pid"]
    pages = lambda: int(Path(f"/proc/{pid}/statm").read_text().split()[1])  # noqa: E731
    for _ in range(20):
        site.ask()
    before = pages()
    for _ in range(100):
        site.ask()
    assert pages() - before < (1 << 20) // os.sysconf("SC_PAGESIZE")
    assert (site.status["pid"], site.status["starts"], site.status["requests"]) == (pid, 1, 122)


@pytest.mark.process
def test_another_app_is_loaded_anew_and_nothing_is_left_of_the_old_one(site):
    big = "WEIGHT = np.ones(1 << 25)\nimport sys\nsys.modules['left_behind'] = WEIGHT\n"
    site.write(f"{APP}\n{big}")
    assert site.ask().facts["kind"] == "hello"
    pid = site.status["pid"]
    resident = lambda: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096  # noqa: E731
    assert resident() > 1 << 28
    site.write(f"{APP}\nassert 'left_behind' not in sys.modules\n")
    second = site.ask()
    assert second.facts["kind"] == "hello", second
    assert (site.status["pid"], resident() < 1 << 28) == (pid, True)

    site.write("raise KeyError('patient 7')")
    assert "loading the app failed: KeyError (reference" in site.ask().facts["reason"]
    (site.root / "mend").touch()
    site.write(APP)
    assert site.ask().facts["app"] != second.facts["app"]


@pytest.mark.process
def test_a_hung_worker_is_ended_and_the_server_told_in_one_line(site):
    site.ask()
    pid = site.status["pid"]
    settings, learner = open_app(site.root / "app")
    server = Server(settings, learner.schema, learner.start, site.root / "run")
    server.welcome({"north": site.ask()})
    request = server.open({"north"}, False)["north"]
    (site.root / "hang").touch()
    told = site.ask(request, patience=1.5)
    assert told.facts["kind"] == "refusal"
    assert told.facts["reason"] == (
        "nothing was trained: its worker gave no answer within 2 s and was ended"
    )
    until(lambda: not is_alive(pid))

    # and where the messenger has died, the worker ends itself
    with open_place(site.folder) as place:
        site.ask()
        pid = site.status["pid"]
        call = {"site": "north", "package": str(site.package), "beside": "", "patience": 0.5}
        connection = connect(place)
        connection.send(Frame({**call, "version": messenger.code_version()}, request))
        assert connection.receive(10.0).note == {"word": "begun"}
        # others wait while it is at work in time
        busy = site.ask(patience=0.1).facts["reason"]
        assert busy == "nothing was trained: its worker was busy for 0 s with another request"
        connection.close()
        until(lambda: not is_alive(pid))
    (site.root / "hang").unlink()
    assert site.ask(request).facts["kind"] == "train"  # by a new one, at a dead one's socket


@pytest.mark.process
def test_messengers_of_two_runs_at_once_are_answered_one_after_the_other(site):
    """Their workers are started once, and every run has its own app."""
    other = SiteOf(site.root / "other")
    other.root.mkdir()
    other.write(f"{APP}\nOTHER = 1\n")
    other.folder = site.folder
    said = []
    threads = [
        threading.Thread(target=lambda one=one: said.append((one, one.ask().facts["app"])))
        for one in (site, other) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    apps = {one: {app for other, app in said if other is one} for one in (site, other)}
    assert len(said) == 6
    assert [len(prints) for prints in apps.values()] == [1, 1]
    assert apps[site] != apps[other]


@pytest.mark.process
def test_a_worker_of_another_version_starts_anew_or_is_named(site, monkeypatch):
    site.ask()
    pid = site.status["pid"]
    with open_place(site.folder) as place:
        with connect(place) as connection:  # a later version, of another language
            connection.link.sendall(b"fsworkr2 and so on")
            with pytest.raises(BrokenFrame):
                connection.receive(10.0)
        assert site.ask().facts["kind"] == "hello"
        assert (site.status["pid"], site.status["starts"]) == (pid, 2)
    monkeypatch.setattr(messenger, "code_version", lambda: "9.9 elsewhere")
    reason = site.ask().facts["reason"]
    assert "its worker is of another installation" in reason


@pytest.mark.process
def test_a_kept_worker_waits_for_its_turn_and_ends_with_its_keeper(site, monkeypatch):
    monkeypatch.setattr(messenger, "STARTING", 0.2)
    assert site.ask(kept=True).facts["reason"] == "nothing was trained: its worker is not running"
    keeper = subprocess.Popen(["sleep", "600"])
    words = [*worker.WORKER, str(site.folder), "--kept", "--until", str(keeper.pid)]
    monkeypatch.undo()
    os.environ["WORKER_TEST"] = str(site.root)
    workers = [subprocess.Popen([sys.executable, *words]) for _ in range(2)]
    try:
        assert site.ask(kept=True).facts["kind"] == "hello"
        first = next(one for one in workers if one.pid == site.status["pid"])
        first.kill()
        assert site.ask(kept=True).facts["kind"] == "hello"
        workers.remove(first)
        assert site.status["pid"] == workers[0].pid
        keeper.kill()
        keeper.wait()
        assert workers[0].wait(60) == 0
        first.wait()
    finally:
        for process in (keeper, *workers):
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.process
def test_a_torch_model_with_a_state_of_its_own_is_trained_to_the_same_bits(site):
    """Buffers that no state_dict has, batches changed in place, random numbers, evaluation on records of its own."""
    pytest.importorskip("torch")
    app = site.write(TORCH, TOML.replace("batch_size = 1", "batch_size = 3").replace("64", "32"))
    warm = run(site)
    starts = site.status["starts"]
    _, learner = open_app(app)
    assert learner.site("north").reusable
    assert starts == 1
    cold = run(site, Cold(site), "quiet")
    assert same(warm, cold)
    for name, values in warm.buffers.items():
        assert values.tobytes() == cold.buffers[name].tobytes(), name


TORCH = """
import torch
from torch import nn
from fedscaffold.deploy import TorchLearner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.layers(x) * (1 + 0.1 * self.calls)

def loss(module, batch):
    x, y = batch
    x.mul_(1.5)
    return ((module(x)[:, 0] - y) ** 2).mean()

def data(site):
    source = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, generator=source), torch.randn(6, generator=source)

def learner(settings):
    return TorchLearner(Net, loss, data, test=data, precision=settings.precision)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_private_jax_site_whose_worker_dies_is_charged_once_and_has_the_bits_of_a_cold_one(site):
    """The worker dies after its first training; the next one draws the noise of the same charge."""
    pytest.importorskip("jax")
    toml = TOML.replace("batch_size = 1", "batch_size = 4").replace("rounds = 3", "rounds = 2")
    site.write(PRIVATE, toml + PRIVACY)
    (site.root / "kill").touch()
    warm = run(site, token="one")
    assert site.status["starts"] == 2
    place = site.folder / "privacy" / "north"
    assert len(SiteLedger(place / "privacy.ledger", "north").charges) == 2
    cold = site.root / "cold" / "privacy" / "north"
    cold.mkdir(parents=True, mode=0o700)
    shutil.copy(place / "secret", cold)
    assert same(warm, run(site, Cold(site), "quiet", token="one"))


PRIVATE = """
import os
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from fedscaffold.deploy import JaxLearner

kill = Path(os.environ["WORKER_TEST"]) / "kill"

class Mortal(JaxLearner):
    def site(self, name):
        opened = super().site(name)

        def train(work):
            done = opened.train(work)
            if kill.exists():
                kill.unlink()
                os.kill(os.getpid(), 9)
            return done

        return opened._replace(train=train)

def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2) / 2

def data(site):
    source = np.random.default_rng(3)
    return source.normal(size=(12, 2)), source.normal(size=12)

def learner(settings):
    return Mortal(loss, {"w": np.array([0.3, -0.7])}, data, precision="float64")
"""
PRIVACY = """
[deploy.records]
north = 12
[privacy]
clip = 0.7
noise = 0.15
delta = 1e-3
"""

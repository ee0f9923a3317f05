"""Clients spread over devices and processes: what one device gives, to rounding; and what is left when one dies.

JAX's devices and processes are fixed when it starts, so everything here runs in processes of its own. One imports all
there is once and forks a child for every part, which starts JAX by itself; processes meet on loopback.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cases import sharp
from forked import codes_of

from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.runs import read

CASES = """
import contextlib, io, json, os, signal, socket, sys, time
import jax, numpy as np, optax, pydantic, scipy.linalg
import fedscaffold as fs
from fedscaffold.cli import main, resume
from fedscaffold.conformance import federation, run
from fedscaffold.experiments import compare, build_problem
from fedscaffold.runs import page
from fedscaffold.simulation import engine, distributed
from fedscaffold.simulation.sharding import Shards
from forked import child, command, ended

rng = np.random.default_rng(0)
CLIENTS = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (4, 7, 2, 9, 5, 6, 3)]

def squares(w, batch):
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()

def ranked(w, batch):
    score = batch["x"] @ w
    return jax.nn.logsumexp(score) - score.mean() + ((score - batch["y"]) ** 2).mean()

COUPLED = fs.Problem(ranked, np.zeros(3), CLIENTS, evaluation_batch=3)
UNEQUAL = fs.Problem(squares, np.zeros(3), CLIENTS)
NOISES = np.stack([np.eye(5) * (i + 1) * 1e-3 for i in range(13)])
NOISY = fs.problems.quadratic(num_clients=13, dim=5, mu=0.05, noise=NOISES, seed=0)
COHORTS = [[], [0, 12], [3], [], list(range(13))] * 3

CASES = {
    "sampling, weights, unequal clients, steps and batches": (fs.scaffold(), UNEQUAL, {
        "cohort": 3, "batch_size": 0.5, "local_steps": [1, 2, 3, 2, 1, 4, 2], "weights": [1, 2, 3, 4, 5, 6, 7],
        "x0": np.ones(3), "metrics": ("drift",)}),
    "all clients, noise of each one's own, fading": (fs.scaffold(option=1), NOISY, {
        "x0": np.ones(5), "stale": "decay:0.9", "metrics": ("gap", "control_error", "age"), "stop_at": ("distance", 1.9)}),
    "forgetting, compression, momentum of the server": (fs.scaffold(), NOISY, {
        "cohort": 4, "stale": "drop:2", "compression": "quantise:6", "server_optimizer": optax.sgd(0.5, momentum=0.5), "metrics": ()}),
    "an exchange before the steps, rounds of silence": (fs.mime(), NOISY, {
        "cohorts": COHORTS, "metrics": ("loss", "grad_norm")}),
    "a loss that couples the records of a batch": (fs.scaffold(), COUPLED, {
        "cohort": 3, "x0": np.ones(3), "metrics": ("loss", "grad_norm")}),
}

def ask(name, **more):
    algorithm, problem, own = CASES[name]
    base = {"rounds": 12, "local_steps": 2, "lr": 0.1, "precision": "float64", "seed": 3}
    return fs.simulate(algorithm, problem, **(base | own | more))

def kept(run):
    arrays = {"x": run.vector, **run.server._asdict(), "c_i": run.clients.c_i, "age": run.clients.age} | run.history
    arrays |= {"who": run.clients.who}
    return {name: a for name, a in arrays.items() if a is not None}

def all_ended(*pids):
    return [ended(pid) for pid in pids]

def address():
    # A free port below those that the system gives to outgoing connections: one of them might take it meanwhile.
    for port in np.random.default_rng(os.getpid() + time.time_ns()).permutation(np.arange(10_000, 30_000)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", int(port)))
            return f"127.0.0.1:{port}"

def team(number, *words, each=lambda i: ()):
    at = address()
    flags = ("--coordinator", at, "--processes", str(number), "--deadline", "40", "--process-id")
    return [command(*words, *each(i), *flags, str(i)) for i in range(number)]
"""

DEVICES = """
jax.config.update("jax_num_cpu_devices", 4)
seen = []
laid = Shards.state

def looked(self, host):
    state = laid(self, host)
    if state.memory is not None:
        seen.append([shard.data.shape for shard in state.memory.c_i.addressable_shards])
    return state

Shards.state = looked
made = []
usual = engine._compile
engine._compile = lambda *given: made.append(usual(*given)) or made[-1]
for number, name in enumerate(CASES):
    np.savez(f"one-{number}.npz", **kept(ask(name)))
    devices = 2 if number % 2 else 4
    np.savez(f"many-{number}.npz", **kept(ask(name, devices=devices)))
apart = {}
hessians, linear = fs.problems.quadratic(num_clients=13, dim=5, mu=0.05, seed=0).records
known = federation(hessians, linear, np.ones(5), rounds=3, steps=2, lr=0.1)
QUIET = fs.problems.quadratic(hessians=hessians, linear=linear, x0=np.ones(5))
for name in NAMES:
    base = {"rounds": 3, "local_steps": 2, "lr": 0.1, "precision": "float64", "metrics": ()}
    algorithm = fs.algorithms.make(name)
    two = fs.simulate(algorithm, QUIET, devices=2, **base).vector
    coin = name == "scaffnew"  # the engine draws its number of steps
    one = fs.simulate(algorithm, QUIET, **base).vector if coin else run(algorithm, known).x[-1]
    apart[name] = np.abs(two - one).max() / np.abs(one).max()
np.savez("apart.npz", **apart)
first, *_ = CASES
ask(first, rounds=5, devices=4, checkpoint="kept", every=2)
ask(first, rounds=8, checkpoint="kept", every=2)
np.savez("resumed.npz", **kept(ask(first, devices=4, checkpoint="kept")))
text = made[1].as_text()
said = []
for more in ({"devices": 8}, {"devices": 5}, {"devices": 2, "client_state": "sparse", "metrics": ()}):
    try:
        ask(first, **more)
    except fs.InputError as error:
        said.append(str(error))
codes = [seen[0], sum(" all-reduce(" in line for line in text.splitlines()), said]
"""

PROCESSES = """
def member(at, number, i, devices):
    def work():
        distributed.join(at, number, i, devices=devices, deadline=40)
        np.savez(f"{number}-{i}.npz", **kept(ask(next(iter(CASES)), devices=number * devices)))
        distributed.leave()
    return child(work)

at = address()
codes = all_ended(*[member(at, NUMBER, i, DEVICES) for i in range(NUMBER)])
"""

CONFIG = """
rounds = 300
metrics = ["loss"]
precision = "float64"
[problem]
dataset = "quadratic"
clients = 7
dim = 4
noise = 0.01
[local]
steps = 2
lr = 0.1
[cohort]
size = 0.5
[output]
dir = "runs/quiet"
checkpoint_every = 10
"""

KILLS = """
import shutil

def task(i, host, port):
    def work():
        os.environ |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": host, "SLURM_NTASKS": "2",
                       "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "JAX_COORDINATOR_PORT": port}
        sys.argv = ["fedscaffold", "run", "first.toml", "--deadline", "40"]
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    return child(work)

def newest(folder):
    names = os.listdir(folder) if os.path.exists(folder) else []
    return max((int(name.split("-")[1]) for name in names if name.startswith("state-")), default=0)

def struck(pids, victim):
    '''Kill one of a team some commits from now; how they end.'''
    until = newest("runs/killed/checkpoint") + 3
    while newest("runs/killed/checkpoint") < until and not os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.004)
    os.kill(pids[victim], signal.SIGKILL)
    return all_ended(*pids)

codes = [all_ended(*[task(i, *at) for at in [address().split(":")] for i in range(2)])]
codes.append(struck(team(2, "run", "first.toml", "--set", "output.dir=runs/killed"), 1))
codes.append(struck(team(2, "resume", "runs/killed"), 0))
shutil.copytree("runs/killed", "runs/copy")
codes.append(all_ended(*team(2, "resume", "runs/killed")))
codes.append(all_ended(command("resume", "runs/copy", "--rounds", "200")))
codes[-1].append(sum(name.startswith("part-") for name in os.listdir("runs/copy/checkpoint")))
codes.append(all_ended(*team(2, "resume", "runs/copy", "--rounds", "300")))
codes.append(all_ended(*team(2, "run", "first.toml", "--fresh", each=lambda i: ("--set", f"local.lr=0.{i + 1}"))))
codes.append(all_ended(command("run", "first.toml", "--coordinator", address(), "--processes", "2", "--process-id", "1",
                               "--deadline", "2")))
"""


def forked(script, folder):
    quick = "--xla_backend_optimization_level=0"  # half the time of these tests is LLVM's
    return codes_of(CASES + script, folder, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {quick}")


def agree(many, one):
    """All arrays to 1e-12 of their size, but the residual, which is rounding itself."""
    assert many.keys() == one.keys()
    for name in one.keys() - {"residual"}:
        size = max(1.0, float(np.nanmax(np.abs(one[name]), initial=0)))
        np.testing.assert_allclose(many[name], one[name], rtol=0, atol=1e-12 * size, err_msg=name)
    assert many["residual"].max() < 1e-13


def loaded(path):
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


# one of each kind of round that `CASES` lacks: no memory, a coin, personal models; the others differ by formulas, which
# `tests/simulation/test_conforms.py` compares on one device
KINDS = ["fedavg", "scaffnew", "ditto"]


@pytest.fixture(
    scope="module",
    params=[KINDS, pytest.param(sorted(ALGORITHMS), marks=pytest.mark.soak)],
    ids=["kinds", "all"],
)
def devices(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    return folder, forked(f"NAMES = {request.param}\n{DEVICES}", folder)[0]


@pytest.mark.process
def test_two_and_four_devices_give_what_one_gives(devices):
    folder, _ = devices
    for number in range(5):
        agree(loaded(folder / f"many-{number}.npz"), loaded(folder / f"one-{number}.npz"))
    assert loaded(folder / "one-1.npz")["distance"][-1] <= 1.9  # it did end at its target
    apart = loaded(folder / "apart.npz")  # of every algorithm: two devices, and NumPy
    assert {name: off for name, off in apart.items() if not off < 1e-12} == {}
    agree(loaded(folder / "resumed.npz"), loaded(folder / "one-0.npz"))


@pytest.mark.process
def test_a_device_has_the_rows_of_its_own_clients_and_a_round_one_sum(devices):
    shapes, sums, said = devices[1]
    assert shapes == [[2, 3]] * 4  # 7 clients, d = 3
    assert sums == 1
    assert "devices must be at most as many as clients, 7, got 8" in said[0]
    assert "devices=5, but JAX has 4" in said[1]
    assert "with devices keep 'array'" in said[2]


@pytest.mark.process
@pytest.mark.parametrize(("number", "of_each"), sharp([(2, 2), (4, 1)], [(2, 2)]))
def test_processes_on_loopback_give_what_one_gives_and_hold_their_own_rows_only(
    number, of_each, devices, tmp_path
):
    """Two processes of two devices each; `make soak`: four of one too."""
    codes, said = forked(f"NUMBER, DEVICES = {number}, {of_each}\n{PROCESSES}", tmp_path)
    assert codes == [0] * number, said
    one = loaded(devices[0] / "one-0.npz")
    clients = len(one["c_i"])
    parts = [loaded(tmp_path / f"{number}-{i}.npz") for i in range(number)]
    assert np.concatenate([part.pop("who") for part in parts]).tolist() == list(range(clients))
    assert max(len(part["c_i"]) for part in parts) == -(-clients // number)
    rows = np.concatenate([part.pop("c_i") for part in parts])
    for part in parts:
        agree(part | {"c_i": rows}, one)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    (folder / "first.toml").write_text(CONFIG)
    return *forked(KILLS, folder), folder / "runs"


@pytest.mark.process
def test_when_a_process_is_killed_the_other_says_so_and_ends(killed):
    (quiet, first, second, *_), said, _ = killed
    assert quiet == [0, 0], said  # processes of a Slurm job, which find one another without flags
    assert first == [3, -9], said
    assert second == [-9, 3], said
    for survivor, victim in ((0, 1), (1, 0)):
        found = [
            line
            for line in said.splitlines()
            if f"process {survivor} of 2 has lost process {victim};" in line
        ]
        assert len(found) == 1, said
        assert "the last common checkpoint is after round" in found[0]
        assert "fedscaffold resume runs/killed --coordinator" in found[0]
    assert "Check failure stack trace" not in said


def metrics(folder):
    return dict(read(folder).runs[0].columns)


def digest(folder: Path):
    return read(folder).runs[0].digest


def bits(folder: Path):
    """All metrics, as bytes."""
    return {name: column.tobytes() for name, column in read(folder).runs[0].columns.items()}


@pytest.mark.process
def test_any_number_of_processes_goes_on_from_the_last_common_checkpoint(killed):
    (_, _, _, two, one, again, *_), said, runs = killed
    assert two == [0, 0], said
    assert one == [0, 0], said  # and no part is left once two commits are its own
    assert again == [0, 0], said
    assert digest(runs / "killed") == digest(runs / "quiet")  # on as many processes, the same bits
    assert bits(runs / "killed") == bits(runs / "quiet")
    agree(metrics(runs / "copy"), metrics(runs / "quiet"))  # two processes, one, two again
    assert (
        len(list((runs / "killed/checkpoint").glob("part-*/state-*"))) == 4
    )  # two generations of two parts


@pytest.mark.process
def test_mistakes_at_the_start_are_one_line(killed):
    (*_, differ, alone), said, _ = killed
    assert differ == [2, 2], said
    assert (
        said.count("process 1 was asked for another run than process 0 (local.lr: was 0.1, is 0.2)")
        == 2
    )
    assert alone == [2], said
    assert "within 2 s (Connection refused): start process 0 there" in said


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {
                "SLURM_JOB_ID": "4097",
                "SLURM_STEP_NODELIST": "node[003-010]",
                "SLURM_NTASKS": "8",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "0",
            },
            ("node003:61441", 8, 5),
        ),
        (
            {
                "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            ("10.96.0.1:61442", 2, 1),
        ),
    ],
)
def test_a_cluster_is_read_from_the_environment(given, found, monkeypatch):
    from fedscaffold.cli.multi_process import team_of

    for name, value in given.items():
        monkeypatch.setenv(name, value)
    team = team_of()
    assert (team.coordinator, team.processes, team.process_id) == found
    alone = team_of(processes=1)
    assert (alone.coordinator, alone.processes) == (None, 1)
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert team_of().processes == 1


def test_a_checkpoint_names_its_parts_and_cannot_lead_elsewhere(tmp_path):
    from fedscaffold.simulation import sharded_checkpoint
    from fedscaffold.state import StateError

    rows = {"state.c_i": np.arange(12.0).reshape(6, 2)}
    names = [
        sharded_checkpoint.write(tmp_path, own, {key: a[own] for key, a in rows.items()}, 3)
        for own in (slice(0, 4), slice(4, 6))
    ]
    for own in (
        slice(0, 6),
        slice(1, 5),
        slice(4, 6),
        slice(0, 4),
    ):  # any split of the clients can be read
        np.testing.assert_array_equal(
            sharded_checkpoint.read(tmp_path, names, own)["state.c_i"], rows["state.c_i"][own]
        )
    with pytest.raises(StateError, match="have no rows of client 6"):
        sharded_checkpoint.read(tmp_path, names, slice(0, 7))
    with pytest.raises(StateError, match="have no rows of client 0"):
        sharded_checkpoint.read(tmp_path, names[1:], slice(0, 6))
    with pytest.raises(StateError, match="is not the name of a part"):
        sharded_checkpoint.read(tmp_path, [names[0], "../../secret.safetensors"], slice(0, 6))
    moved = tmp_path / names[0]
    data = bytearray(moved.read_bytes())
    data[-1] ^= 1
    moved.write_bytes(data)
    with pytest.raises(StateError, match="damaged"):
        sharded_checkpoint.read(tmp_path, names, slice(0, 6))
    sharded_checkpoint.sweep(tmp_path, names[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["part-4-6"]
    shutil.rmtree(tmp_path / "part-4-6")
    with pytest.raises(StateError, match="parts must be in the one folder"):
        sharded_checkpoint.read(tmp_path, names[1:], slice(4, 6))

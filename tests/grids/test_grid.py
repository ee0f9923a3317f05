"""Grids of runs: the bits of runs alone, on any number of processes, resumable, and whole when a cell fails."""

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.grids import execute, worker, workers
from fedscaffold.grids.cells import labelled

QUADRATIC = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, noise=0.01, seed=0)
ASK = {"rounds": 7, "local_steps": 3}
OVER = {"lr": [0.1, 0.2], "seed": [3, 4]}


def own_problem(scale=1.0):
    """A problem whose loss is a closure, from a start that is not zero."""
    rng = np.random.default_rng(1)
    clients = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (5, 9, 7)]
    return fs.Problem(
        lambda w, batch: scale * jnp.mean((batch[0] @ w - batch[1]) ** 2), np.ones(3), clients
    )


own = functools.cache(own_problem)  # inspected, and its programs compiled, once


@pytest.fixture
def threaded(monkeypatch):
    """A process that seems to compute with several threads: it runs no cells itself."""
    monkeypatch.setattr(execute, "_has_one_thread", lambda: False)


def assert_same(run, alone):
    assert run.error is None
    assert run.digest == alone.digest
    assert run.vector.tobytes() == alone.vector.tobytes()
    assert run.x.tobytes() == alone.x.tobytes()
    assert run.history.keys() == alone.history.keys()
    for name, column in alone.history.items():
        assert run.history[name].dtype == column.dtype
        assert run.history[name].tobytes() == column.tobytes(), name
    for name in ("rounds", "outcome", "reached_at", "diverged_at", "advice", "fault"):
        assert getattr(run, name) == getattr(alone, name)
    assert (run.residual, run.explained) == (alone.residual, alone.explained)


@pytest.mark.process
def test_runs_have_the_bits_of_runs_alone_in_workers_and_here(threaded, monkeypatch):
    algorithms = [fs.scaffold(), fs.fedavg()]
    ask = ASK | {"batch_size": 2, "cohort": 2, "precision": "float64"}
    found = fs.grid(algorithms, own_problem(), over=OVER, workers=2, **ask)
    assert found.keys == ("algorithm", "lr", "seed")
    cells = [
        {"algorithm": one.name, "lr": lr, "seed": seed}
        for one in algorithms
        for lr in OVER["lr"]
        for seed in OVER["seed"]
    ]
    assert [run.cell for run in found.runs] == cells
    problem = own()
    for run, one in zip(found.runs, [a for a in algorithms for _ in range(4)], strict=True):
        more = {name: run.cell[name] for name in ("lr", "seed")}
        assert_same(run, fs.simulate(one, problem, **ask, **more))
    monkeypatch.setattr(execute, "_has_one_thread", lambda: True)
    monkeypatch.setattr(workers.Crew, "grow", None)  # no process is started
    here = fs.grid(algorithms, problem, over=OVER, workers=1, **ask)
    assert [run.digest for run in here.runs] == [run.digest for run in found.runs]


@pytest.mark.process
def test_this_process_begins_and_workers_take_over(monkeypatch):
    """With the smallest patience, and runs that this process gives up as soon as a worker is ready."""
    monkeypatch.setattr(execute, "PATIENCE", 0.0)
    monkeypatch.setattr(execute, "SHORT", -1.0)
    here, ready = [], threading.Event()
    usual = execute.run_cell

    def run_cell(config, place):
        answer = usual(config, place)
        here.append(place)
        assert ready.wait(120)
        return answer

    def grow(crew, number):
        crew.size += number
        for _ in range(number):
            threading.Thread(target=crew._serve, daemon=True).start()
        threading.Thread(target=lambda: (crew.ready.wait(), ready.set()), daemon=True).start()

    monkeypatch.setattr(execute, "run_cell", run_cell)
    monkeypatch.setattr(workers.Crew, "grow", grow)
    found = fs.grid(fs.scaffold(), QUADRATIC, over={"seed": range(6)}, workers=2, lr=0.1, **ASK)
    assert len(here) == 1
    for run in found.runs:
        assert_same(
            run, fs.simulate(fs.scaffold(), QUADRATIC, lr=0.1, seed=run.cell["seed"], **ASK)
        )


@pytest.mark.process
@pytest.mark.parametrize("one_thread", [True, False])
def test_a_cell_that_fails_is_a_row(one_thread, monkeypatch, tmp_path):
    monkeypatch.setattr(execute, "_has_one_thread", lambda: one_thread)

    def sampling(round, rng):
        raise ValueError("no such\nclients")

    over = {"sampling": {"bad": sampling, "uniform": "uniform"}, "seed": [0, 1]}
    ask = ASK | {"lr": 0.1, "cohort": 2, "out": tmp_path, "workers": 1}
    found = fs.grid(fs.scaffold(), QUADRATIC, over=over, **ask)
    assert [run.error for run in found.runs] == ["ValueError: no such clients"] * 2 + [None] * 2
    assert found.failed == found.runs[:2]
    assert "in sampling" in found.failed[0].traceback
    assert repr(found) == "Grid(sampling x seed: 4 runs, 2 failed)"
    table = found.to_pandas()
    assert table["error"].tolist()[:2] == ["ValueError: no such clients"] * 2
    assert table["outcome"].tolist() == ["failed", "failed", "finished", "finished"]
    assert len(list((tmp_path / "cells").iterdir())) == 2


def test_a_cell_that_the_simulator_refuses_is_a_row_with_its_sentence():
    found = fs.grid(["scaffold", "scaffnew"], QUADRATIC, lr=0.1, cohort=2, workers=1, **ASK)
    assert found.select(algorithm="scaffold")[0].error is None
    with pytest.raises(fs.InputError) as refused:
        fs.simulate(fs.scaffnew(), QUADRATIC, lr=0.1, cohort=2, **ASK)
    assert found.select(algorithm="scaffnew")[0].error == " ".join(str(refused.value).split())


@pytest.mark.slow
def test_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    ran = []
    usual = execute.run_cell

    def run_cell(config, place):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((config.lr, config.seed))
        return usual(config, place)

    ask = ASK | {"over": OVER, "out": tmp_path, "workers": 1}
    monkeypatch.setattr(execute, "run_cell", run_cell)
    with pytest.raises(KeyboardInterrupt):
        fs.grid(fs.scaffold(), own_problem(), **ask)
    monkeypatch.setattr(execute, "run_cell", lambda *given: ran.append(given) or usual(*given))
    found = fs.grid(fs.scaffold(), own(), **ask)  # the same problem, made anew
    assert len(ran) == 4
    whole = fs.grid(fs.scaffold(), own(), **ask | {"out": None})
    for mine, theirs in zip(found.runs, whole.runs, strict=True):
        assert_same(mine, theirs)
    # another problem, argument or value is another run
    ran.clear()
    fs.grid(fs.scaffold(), own_problem(scale=2.0), **ask)
    assert len(ran) == 4
    fs.grid(fs.scaffold(), own(), **ask | {"rounds": 8})
    assert len(ran) == 8
    fs.grid(fs.scaffold(), own(), **ask | {"over": {"lr": [0.2, 0.3], "seed": [4]}})
    assert len(ran) == 9


def test_a_damaged_cell_is_run_again(tmp_path):
    ask = ASK | {"over": OVER, "out": tmp_path, "workers": 1}
    found = fs.grid(fs.scaffold(), QUADRATIC, **ask)
    for path in sorted((tmp_path / "cells").glob("*/state-*"))[:2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    again = fs.grid(fs.scaffold(), QUADRATIC, **ask)
    assert [run.digest for run in again.runs] == [run.digest for run in found.runs]
    assert not again.failed


class Fatal:
    """A schedule that kills the process it is evaluated in, unless that is the grid's own."""

    def __init__(self, how):
        self.how, self.grid = how, os.getpid()

    def __call__(self, step):
        if os.getpid() != self.grid:
            os.kill(os.getpid(), self.how)
        return 0.1


@pytest.mark.process
def test_a_worker_that_dies_takes_only_its_cell_with_it(threaded):
    killed, crashed = Fatal(signal.SIGKILL), Fatal(signal.SIGSEGV)
    over = {"lr": {"killed": killed, "crashed": crashed, "good": 0.1, "better": 0.2}}
    found = fs.grid(fs.scaffold(), QUADRATIC, over=over, workers=2, **ASK)
    assert [run.error for run in found.runs] == [
        "its worker process was killed by SIGKILL, most likely for want of memory",
        "its worker process was killed by SIGSEGV",
        None,
        None,
    ]


@pytest.mark.process
@pytest.mark.parametrize("one_thread", [True, False])
def test_what_cannot_be_sent_runs_here_with_a_line_that_says_so(one_thread, monkeypatch):
    monkeypatch.setattr(execute, "_has_one_thread", lambda: one_thread)
    monkeypatch.setattr(execute, "PATIENCE", 0.0)
    usual, tried, dump = execute.run_cell, threading.Event(), execute.payload.dump

    def failing_dump(*given):
        try:
            dump(*given)
        finally:
            tried.set()

    monkeypatch.setattr(execute.payload, "dump", failing_dump)
    monkeypatch.setattr(execute, "run_cell", lambda *given: tried.wait(60) and usual(*given))
    lock = threading.Lock()

    def lr(step):
        with lock:
            return 0.1

    with pytest.warns(RuntimeWarning, match=r"go on in this process.*cannot pickle.*lock"):
        found = fs.grid(fs.scaffold(), QUADRATIC, over={"seed": [0, 1]}, lr=lr, workers=2, **ASK)
    alone = fs.simulate(fs.scaffold(), QUADRATIC, lr=lr, seed=1, **ASK)
    assert_same(found.runs[1], alone)


@pytest.mark.process
def test_workers_that_cannot_start_are_done_without(threaded, monkeypatch):
    monkeypatch.setattr(workers, "MAIN", "raise SystemExit(3)")
    with pytest.warns(RuntimeWarning, match="its worker process ended with exit code 3"):
        found = fs.grid(fs.scaffold(), QUADRATIC, over=OVER, workers=2, **ASK)
    assert not found.failed


def test_a_worker_has_one_thread_and_the_settings_of_the_grid(monkeypatch):
    given = worker.environment({"OMP_NUM_THREADS": "8", "XDG_CACHE_HOME": "/caches", "KEPT": "1"})
    assert given["PJRT_NPROC"] == given["OMP_NUM_THREADS"] == given["KEPT"] == "1"
    assert given["JAX_COMPILATION_CACHE_DIR"] == "/caches/fedscaffold/jax"
    assert worker.environment({"JAX_COMPILATION_CACHE_DIR": "/own"})[worker.CACHE] == "/own"
    assert "jax_enable_x64" in workers._jax_settings()


# Executors of others


@pytest.mark.parametrize("kept", [True, False])
def test_any_executor_runs_the_cells(kept, tmp_path):
    out = tmp_path if kept else None
    with ThreadPoolExecutor(1) as executor:
        found = fs.grid(fs.scaffold(), own(), over=OVER, executor=executor, out=out, **ASK)
    here = fs.grid(fs.scaffold(), own(), over=OVER, workers=1, **ASK)
    for mine, theirs in zip(found.runs, here.runs, strict=True):
        assert_same(mine, theirs)
    assert [path.name for path in tmp_path.glob(".cells*")] == []  # no code stays behind
    with ThreadPoolExecutor(1) as executor:
        pass
    failed = fs.grid(fs.scaffold(), QUADRATIC, over=OVER, executor=executor, **ASK).failed
    assert len(failed) == 4
    assert failed[0].error == "RuntimeError: cannot schedule new futures after shutdown"


def test_dask_runs_the_cells(tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        kept, sent = (
            fs.grid(fs.scaffold(), own_problem(), over=OVER, executor=executor, out=out, **ASK)
            for out in (tmp_path, None)
        )
    here = fs.grid(fs.scaffold(), own_problem(), over=OVER, workers=1, **ASK)
    for mine, other, theirs in zip(kept.runs, sent.runs, here.runs, strict=True):
        assert_same(mine, theirs)
        assert_same(other, theirs)


# What is asked


@pytest.mark.slow
def test_values_have_distinct_labels():
    assert labelled("algorithm", [fs.scaffold(), "fedavg"]).keys() == {"scaffold", "fedavg"}
    assert list(labelled("seed", np.arange(2))) == [0, 1]
    mine = {"small": fs.fedprox(mu=0.1), "large": fs.fedprox(mu=1.0)}
    found = fs.grid(mine, {"one": QUADRATIC, "two": own()}, lr=0.1, workers=1, **ASK)
    assert [tuple(run.cell.values()) for run in found.runs] == [
        (algorithm, problem) for algorithm in mine for problem in ("one", "two")
    ]
    assert len({run.digest for run in found.runs}) == 4
    with pytest.raises(fs.InputError, match="algorithm has two values with the label fedprox"):
        fs.grid(list(mine.values()), QUADRATIC, lr=0.1, **ASK)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"over": {"lrr": [1]}}, "unknown argument of grid 'lrr' .did you mean 'lr'"),
        ({"over": {"lr": [0.1]}, "lr": 0.1}, "lr is given twice"),
        ({"over": {"lr": 0.1}}, "lr in over must be a list of values"),
        ({"over": {"lr": []}}, "lr in over needs at least one value"),
        ({"over": {"lr": [0.1, -1.0]}}, "lr must be a number above 0, got -1.0"),
        ({"lr": 0.1, "workers": 0}, "workers must be a whole number of at least 1"),
        ({"lr": 0.1, "checkpoint": "a"}, "grid does not take checkpoint"),
        ({"lr": 0.1, "over": {"progress": [True]}}, "grid does not take progress"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_run(given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.grid(fs.scaffold(), QUADRATIC, **ASK | given)


def test_two_grids_do_not_share_a_folder(tmp_path):
    from fedscaffold.state.files import owned

    with owned(tmp_path), pytest.raises(fs.InputError, match="is in use by process"):
        fs.grid(fs.scaffold(), QUADRATIC, lr=0.1, out=tmp_path, **ASK)


def test_one_row_for_each_run():
    found = fs.grid(
        fs.scaffold(), QUADRATIC, over={"lr": [0.1, 1e6], "seed": [0]}, workers=1, **ASK
    )
    good, bad = found.rows
    assert (good["outcome"], bad["outcome"]) == ("finished", "diverged")
    assert bad["diverged_at"] == found.runs[1].rounds
    assert good["bytes_up"] == found.runs[0].history["bytes_up"].sum()
    assert good["loss"] == found.runs[0].history["loss"][-1]
    assert list(good) == list(bad)
    assert found.to_pandas().shape == (2, len(good))
    assert "<table" in found._repr_html_()
    with pytest.raises(fs.InputError, match="no run of the grid has lr 3"):
        found.select(lr=3)


# Killed for real

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
import fedscaffold as fs
from gated import ask
fs.grid(fs.scaffold(), out=sys.argv[1], workers=2, **ask(sys.argv[2]))
"""
GATED = """
import os, time
from pathlib import Path
import fedscaffold as fs

def sampling(number, gate):
    def clients(round, rng):
        if number >= 3 and not os.path.exists(gate):
            Path(f"{gate}-{number}").write_text(str(os.getpid()))
            while not os.path.exists(gate):
                time.sleep(0.01)
        return [round % 4, (round + 1 + number % 3) % 4]
    return clients

def ask(gate):
    problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, noise=0.01, seed=0)
    over = {"sampling": {str(i): sampling(i, gate) for i in range(1, 7)}}
    return {"problem": problem, "over": over, "rounds": 5, "local_steps": 2, "lr": 0.1, "cohort": 2}
"""


def wait_until(holds):
    while not holds():
        time.sleep(0.02)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc which processes there are")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_grid_that_was_killed_goes_on_with_the_same_table(number, tmp_path, monkeypatch):
    """Two runs are done and two are under way when it is killed; nothing outlives it."""
    (tmp_path / "gated.py").write_text(GATED)
    monkeypatch.syspath_prepend(tmp_path)
    gate, out = tmp_path / "gate", tmp_path / "out"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    grid = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), str(gate)],
        env=os.environ | {"PYTHONPATH": path, "PJRT_NPROC": "2"},
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("gate-*"))) == 2 or grid.poll() is not None)
        assert grid.poll() is None, grid.stderr.read()
    finally:
        grid.send_signal(number)
    said = grid.communicate()[1].decode()
    assert grid.returncode in (-number, 1), said
    assert number == signal.SIGKILL or said.strip().endswith("KeyboardInterrupt")
    workers_of = [int(path.read_text()) for path in tmp_path.glob("gate-*")]
    wait_until(lambda: all(map(is_gone, workers_of)))
    assert len(list((out / "cells").glob("*/state-*"))) == 2

    gate.touch()
    ran, usual = [], execute.run_cell
    monkeypatch.setattr(execute, "run_cell", lambda *given: ran.append(given) or usual(*given))
    gated = importlib.import_module("gated")
    ask = gated.ask(str(gate)) | {"workers": 1}
    found = fs.grid(fs.scaffold(), out=out, **ask)
    assert len(ran) == 4
    whole = fs.grid(fs.scaffold(), **ask)
    for mine, theirs in zip(found.runs, whole.runs, strict=True):
        assert_same(mine, theirs)
    columns = [name for name in found.rows[0] if name != "seconds"]
    assert found.to_pandas()[columns].equals(whole.to_pandas()[columns])
    sys.modules.pop("gated")

"""The forecast of memory: near what a process really takes, and a refusal before it is taken."""

import json
from pathlib import Path

import forkserver
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import checks
from fedscaffold.simulation import forecast, program

MEASURE = """
import json
from pathlib import Path
import numpy as np
import fedscaffold as fs
from fedscaffold.simulation import engine

engine.STRETCH_SECONDS = 0  # rounds one by one: what a round has freed serves the next one

def loss(w, batch):
    x, y = batch
    return ((x @ w[:10] - y) ** 2).mean() + 1e-3 * (w**2).sum()

def made(dim):
    clients = [(np.ones((4, 10), np.float32), np.ones(4, np.float32)) for _ in range(40)]
    return fs.Problem(loss, np.ones(dim, np.float32), clients)

def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return 1024 * int(line.split()[1])

ask = {"rounds": 4, "local_steps": %s, "lr": 0.01, "metrics": (), "cohort": %s}
fs.simulate(fs.scaffold(), made(20), **ask)
before = peak()
simulator = fs.Simulator(fs.scaffold(), made(400_000), **ask)
simulator.run()
print(json.dumps([simulator.size.total, peak() - before]))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak in /proc")
@pytest.mark.parametrize(
    ("steps", "cohort"),
    [  # "half" is between "few" and "all"
        pytest.param("2", "4", id="few"),
        pytest.param("2", "20", id="half", marks=pytest.mark.soak),
        pytest.param("2", "1.0", id="all"),
        pytest.param("12", "20", id="half on several cores"),
    ],
)
def test_the_forecast_is_near_what_a_process_takes(steps, cohort):
    done = forkserver.run(MEASURE % (steps, cohort), check=True)
    expected, measured = json.loads(done.stdout)
    assert 0.6 < measured / expected < 1.5


def loss(w, batch):
    return ((batch[0] @ w[:2] - batch[1]) ** 2).mean() + (w**2).sum()


def problem(dim=100, records=50, clients=6):
    each = [(np.ones((records, 2)), np.ones(records)) for _ in range(clients)]
    return fs.Problem(loss, np.ones(dim), each)


ASK = {"rounds": 1, "local_steps": 2, "lr": 0.1, "metrics": ()}


@pytest.mark.parametrize(
    ("given", "more", "advice"),
    [
        ({"dim": 2000, "clients": 200}, {"cohort": 2}, "client_state='file'"),
        ({"dim": 2000, "clients": 4}, {"cohort": 3}, "smaller cohorts"),
        ({"records": 100_000}, {"batch_size": 2, "cohort": 1}, "fewer records"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_what_to_change(monkeypatch, given, more, advice):
    size = fs.Simulator(fs.scaffold(), problem(**given), **ASK, **more).size
    monkeypatch.setattr(checks, "memory", lambda: size.total)
    fs.simulate(fs.scaffold(), problem(**given), **ASK, **more)  # what fits runs
    monkeypatch.setattr(checks, "memory", lambda: size.total - 1)
    with pytest.raises(fs.InputError, match=advice) as error:
        fs.simulate(fs.scaffold(), problem(**given), **ASK, **more)
    assert "\n" not in str(error.value)


def test_state_counts_what_clients_keep():
    def state(algorithm, **more):
        return fs.Simulator(algorithm, problem(), **ASK, **more).size.state

    vector = 6 * 100 * 4
    assert state(fs.fedavg()) == 0
    assert state(fs.scaffold()) == vector
    assert state(fs.scaffold(), precision="float64") == 2 * vector
    assert state(fs.ditto()) == vector
    assert state(fs.fedavg(), compression="top_k:0.1") == vector


def test_data_counts_what_is_in_memory(monkeypatch):
    """Clients that are out of core have the records of a cohort in memory, whatever all have."""
    made, more = problem(records=1000, clients=40), {"batch_size": 2, "cohort": 2}
    whole = fs.Simulator(fs.scaffold(), made, **ASK, **more).size
    away = fs.Simulator(fs.scaffold(), made, **ASK, **more, client_state="sparse").size
    assert whole.data == 40 * 1000 * 3 * 4
    assert away.data == 2 * 1000 * 3 * 4
    monkeypatch.setattr(checks, "memory", lambda: whole.total - whole.data // 2)
    with pytest.raises(fs.InputError, match="fewer records"):
        fs.simulate(fs.scaffold(), made, **ASK, **more)
    fs.simulate(fs.scaffold(), made, **ASK, **more, client_state="sparse")


def test_the_runs_of_a_sweep_have_a_state_each(monkeypatch):
    made, more = problem(dim=2000, clients=200), {"cohort": 2}
    alone = fs.Simulator(fs.scaffold(), made, **ASK, **more).size
    monkeypatch.setattr(checks, "memory", lambda: alone.total + alone.state)
    ask = {name: value for name, value in ASK.items() if name != "lr"} | more
    fs.sweep(fs.scaffold(), made, lr=[0.1], seeds=2, **ask)
    with pytest.raises(fs.InputError, match="the run would take"):
        fs.sweep(fs.scaffold(), made, lr=[0.1], seeds=3, **ask)


def test_work_does_not_grow_with_the_cohort_but_with_the_cores(monkeypatch):
    """Rows are written block by block; cores have a block and sums each, and rows wait."""
    made, more = problem(dim=2000, clients=40), {"batch_size": 2, "block": 1}

    def work(cohort):
        size = fs.Simulator(fs.scaffold(), made, **ASK, **more, cohort=cohort)
        return size.size.work - size.ready.drawer.bytes

    assert work(4) == work(20)
    alone = work(4)
    monkeypatch.setattr(program, "HEAVY", 0)
    vector = 2000 * 4
    monkeypatch.setattr(forecast, "threads", lambda: 1)
    one = work(4)
    assert work(20) - one == 2 * 16 * vector
    monkeypatch.setattr(forecast, "threads", lambda: 3)
    assert work(4) - one == 2 * (alone - 2 * vector)


def test_the_size_is_said_before_the_first_round(capsys):
    fs.simulate(fs.scaffold(), problem(), **ASK, progress=True)
    first = capsys.readouterr().err.splitlines()[0]
    assert first == str(fs.Simulator(fs.scaffold(), problem(), **ASK).size)
    assert first.startswith("100 parameters; memory ")

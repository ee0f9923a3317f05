"""Clients whose state and records are not in memory: the same bits as the array, at a cost that does not know N."""

import tracemalloc
from pathlib import Path

import numpy as np
import optax
import pytest

import fedscaffold as fs
from fedscaffold.simulation import out_of_core, problem_on_disk
from fedscaffold.state import StateError, latest, write_records

rng = np.random.default_rng(0)
CLIENTS = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (4, 7, 2, 9, 5, 6, 3)]


def squares(w, batch):
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


UNEQUAL = fs.Problem(squares, np.ones(3), CLIENTS)
COVARIANCES = np.stack([np.eye(5) * (i + 1) * 1e-3 for i in range(13)])
NOISY = fs.problems.quadratic(num_clients=13, dim=5, mu=0.05, noise=COVARIANCES, seed=0)
CASES = {
    "noise of each client's own, ghosts in the last block": (
        NOISY,
        {"cohort": 5, "block": 2, "metrics": ("distance",)},
    ),
    "batches, records and steps that differ": (
        UNEQUAL,
        {
            "cohort": 3,
            "batch_size": 0.5,
            "local_steps": [1, 2, 3, 2, 1, 4, 2],
            "weights": "records",
        },
    ),
    "full batches that fade": (UNEQUAL, {"cohort": 3, "stale": "decay:0.9", "weights": "records"}),
}


def ask(problem, own, **more):
    given = {"rounds": 12, "local_steps": 3, "lr": 0.05, "metrics": ("drift",), "seed": 3}
    return fs.simulate(fs.scaffold(), problem, **(given | own | more))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_stores_give_the_same_bits_and_files_resume(name, tmp_path):
    problem, own = CASES[name]
    array = ask(problem, own)
    ask(problem, own, client_state="file", checkpoint=tmp_path, every=2, rounds=7)
    for run in (
        ask(problem, own, client_state="sparse"),
        ask(problem, own, client_state="file", checkpoint=tmp_path, every=2),
    ):
        assert run.digest == array.digest
        assert run.server.c.tobytes() == array.server.c.tobytes()
        for column, values in array.history.items():
            assert run.history[column].tobytes() == values.tobytes(), column
        # both sums of the same rows in double precision, in another order; fading rounds the array's rows once more
        assert abs(run.residual - array.residual) < 1e-6 * array.scale
        assert run.fault is None
    assert array.fault is None


def test_records_may_lie_in_files(tmp_path):
    records = write_records(tmp_path, iter(CLIENTS))
    problem = problem_on_disk(squares, np.ones(3), records)
    own = CASES["batches, records and steps that differ"][1]
    assert problem.counts.tolist() == UNEQUAL.counts.tolist()
    assert (
        ask(problem, own, client_state="sparse").digest
        == ask(UNEQUAL, own, client_state="sparse").digest
    )
    records.close()
    with pytest.raises(fs.InputError, match="offsets must rise from 0"):
        problem_on_disk(squares, np.ones(3), CLIENTS[0], [0, 2, 3])


def test_a_damaged_row_is_refused_by_name(tmp_path):
    problem, own = CASES["full batches that fade"]
    ask(problem, own, client_state="file", checkpoint=tmp_path, every=2, rounds=8)
    base = next(path for path in tmp_path.glob("rows-*") if path.name.count("-") == 1)
    data = np.fromfile(base, np.uint8)
    data[data != 0] ^= 1
    data.tofile(base)
    with pytest.raises(StateError, match="client"):
        ask(problem, own, client_state="file", checkpoint=tmp_path, every=2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"client_state": "disk"}, "unknown client_state 'disk'"),
        ({"client_state": "file"}, "give checkpoint=DIR"),
        (
            {"client_state": "sparse", "metrics": ("loss", "drift")},
            "loss would look at all clients",
        ),
        ({"client_state": "sparse", "stale": "drop:3"}, "stale='drop' looks at all clients"),
        (
            {
                "client_state": "sparse",
                "compression": "top_k:0.5",
                "lr": None,
                "local_optimizer": optax.sgd(0.1, 0.9),
            },
            "use 'array'",
        ),
    ],
)
def test_what_needs_all_clients_is_refused(more, said):
    with pytest.raises(fs.InputError, match=said):
        ask(UNEQUAL, {"cohort": 3}, **more)


def test_auto_goes_by_size():
    small = out_of_core.resolve_client_state(asked(UNEQUAL, 3))
    assert small.client_state == "array"
    assert small.metrics is None
    many = out_of_core.resolve_client_state(asked(far(200_000, 2_000), 10))
    assert many.client_state == "sparse"
    assert (
        out_of_core.resolve_client_state(asked(far(200_000, 2_000), 2_000)).client_state == "file"
    )


def asked(problem, cohort):
    given = {"rounds": 1000, "local_steps": 1, "lr": 0.1, "cohort": cohort, "client_state": "auto"}
    return fs.RunConfig(fs.scaffold(), problem, **given)


def loss(w, batch):
    return 0.5 * ((w[None] - batch[:, None]) ** 2).mean()


def far(num_clients, dim):
    return problem_on_disk(
        loss, np.zeros(dim), np.arange(num_clients) / num_clients, np.arange(num_clients + 1)
    )


def io_counts():
    return {
        key: int(value)
        for key, value in (
            line.split(": ") for line in Path("/proc/self/io").read_text().split("\n")[:4]
        )
    }


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_round_does_not_know_how_many_clients_there_are(tmp_path, monkeypatch):
    """Bytes and calls to the system, memory taken in a round, memory in all: for 2,000 and 200,000 clients."""
    most = []
    usual = out_of_core.OutOfCoreClients.advance

    def counted(self, *given):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = usual(self, *given)
        most.append(tracemalloc.get_traced_memory()[1] - before)
        return result

    def run(num_clients):
        begun = io_counts()
        done = fs.simulate(
            fs.scaffold(),
            far(num_clients, 100),
            rounds=40,
            local_steps=2,
            lr=1.0,
            cohort=10,
            metrics=(),
            batch_size=1,
            precision="float64",
            client_state="file",
            checkpoint=tmp_path / str(num_clients),
            every=10,
        )
        assert done.fault is None
        return {key: value - begun[key] for key, value in io_counts().items()}

    run(2_000)  # compiles
    monkeypatch.setattr(out_of_core.OutOfCoreClients, "advance", counted)
    few = run(1_000)
    before, (many, taken) = resident(), (run(200_000), resident())
    assert taken - before < 80e6  # all rows would be 160 MB
    bitmap = 200_000 / 8
    for key in ("rchar", "wchar"):
        assert many[key] < few[key] + 8 * bitmap + 40 * 10 * 1000, key
    for key in ("syscr", "syscw"):
        assert many[key] < few[key] + 500, key
    tracemalloc.start()
    most.clear()
    run(400_000)
    tracemalloc.stop()
    assert max(most[2:]) < 300_000  # bytes; one temporary array of N would be more
    assert latest(tmp_path / "400000").facts["round"] == 40

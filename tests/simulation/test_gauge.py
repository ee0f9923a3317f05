"""The health gauge, |c - sum p_i c_i|: rounding in double precision in every run, and one lost c_i among a million."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from cases import sharp

import fedscaffold as fs
from fedscaffold.simulation import engine, invariants, out_of_core, problem_on_disk
from fedscaffold.state import StateError, commit, latest

TEN = fs.problems.quadratic(num_clients=10, dim=4, mu=0.05, noise=0.01, seed=0)
EPS = np.finfo(np.float64).eps


def ask(problem=TEN, algorithm=None, **own):
    given = {"rounds": 60, "local_steps": 3, "lr": 0.1, "cohort": 4, "metrics": ()}
    return fs.simulate(algorithm or fs.scaffold(), problem, **(given | own))


RIGHT = {
    "sampling": {},
    "everyone": {"cohort": 10},
    "weights": {"weights": np.arange(1.0, 11.0)},
    "unequal steps": {"local_steps": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]},
    "decay": {"stale": "decay:0.9"},
    "drop": {"stale": "drop:3"},
    "refresh": {"stale": "refresh:3"},
    "compression": {"compression": "top_k:0.5"},
    "option 1": {"algorithm": fs.scaffold(option=1)},
    "feddyn": {"algorithm": fs.feddyn(alpha=0.3)},
    "xi": {"algorithm": fs.scaffold_xi(), "cohort": 10, "weights": np.arange(1.0, 11.0)},
    "coin": {"algorithm": fs.scaffnew(), "cohort": 10},
    "rows away": {"client_state": "sparse", "stale": "decay:0.9"},
}


# c is kept in double precision whatever the model is: that is harder where the model is not, so one does for double: tests/algorithms/test_additions.py has more
DOUBLE = ("sampling",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "float32") for name in RIGHT),
        *(
            pytest.param(name, "float64", marks=() if name in DOUBLE else pytest.mark.soak)
            for name in RIGHT
        ),
    ],
)
def test_a_right_run_shows_rounding_of_double_precision(name, precision):
    run = ask(precision=precision, **RIGHT[name])
    assert run.fault is None
    shown = max(run.residual, run.history["residual"].max())
    assert (
        shown < 10 * EPS * np.sqrt(60) * run.scale
    )  # a few roundings of c a round, which add up like a random walk
    assert shown < run.explained < 100 * EPS * np.sqrt(60) * run.scale
    assert run.x.dtype == precision


@pytest.mark.parametrize(
    ("what", "precision"),
    sharp(
        product(("state.memory.c_i", "state.server.c", "state.mean[0]"), ("float32", "float64")),
        lambda case: case[1] == "float32" or case[0] == "state.server.c",
    ),
)
def test_a_checkpoint_that_was_altered_is_refused_at_once(what, precision, tmp_path):
    """By as little as a few thousand roundings of a number in single precision: nobody else would see it."""
    given = {"checkpoint": tmp_path, "precision": precision}
    run = ask(**given)
    found = latest(tmp_path)
    altered = found.arrays[what]
    altered[(3, 0) if altered.ndim == 2 else 0] += 1e-3 * run.scale
    commit(tmp_path, found.arrays, found.facts)
    with pytest.raises(StateError, match="after round 60 c differs from the mean of the c_i by"):
        ask(**given, rounds=2000)


def test_one_of_ten_moved_after_a_long_run_is_seen(tmp_path):
    """In single precision, after many rounds: what rounding explains does not grow to the size of a fault."""
    ask(rounds=5000, checkpoint=tmp_path)
    found = latest(tmp_path)
    found.arrays["state.memory.c_i"][7] += np.float32(1.5) / 2
    commit(tmp_path, found.arrays, found.facts)
    with pytest.raises(StateError, match="after round 5000 c differs"):
        ask(rounds=7000, checkpoint=tmp_path)


@pytest.mark.slow
def test_one_of_ten_moved_after_a_hundred_thousand_rounds_is_seen(tmp_path):
    """What rounding explains after so many rounds is still far below one c_i moved by 1.5; the rounds count as run."""
    given = {"checkpoint": tmp_path, "local_steps": 1}
    ask(rounds=10, **given)
    found = latest(tmp_path)
    rounds = 100_000
    aged = {
        "state.round": np.array(rounds, np.int32),
        "metrics": np.resize(found.arrays["metrics"], (rounds, 1)),
    }
    commit(tmp_path, found.arrays | aged, found.facts | {"round": rounds})
    run = ask(rounds=rounds + 10, **given)
    assert run.rounds == rounds + 10
    assert run.fault is None
    found = latest(tmp_path)
    found.arrays["state.memory.c_i"][7] += np.float32(1.5)
    commit(tmp_path, found.arrays, found.facts)
    with pytest.raises(StateError, match="after round 100010 c differs"):
        ask(rounds=rounds + 2010, **given)


@pytest.mark.slow
def test_a_row_of_the_files_that_was_altered_is_refused_at_once(tmp_path):
    """Not by its checksum, which is right, but by the mean."""
    given = {"client_state": "file", "checkpoint": tmp_path, "every": 10}
    ask(**given)
    usual, seen = out_of_core.OutOfCoreClients.restore, []

    def restore(self, arrays):
        usual(self, arrays)
        row = self.store.read(np.array([2]))
        self.store.write(np.array([2]), row + np.float32(1e-3))
        seen.append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_core.OutOfCoreClients, "restore", restore)
        with pytest.raises(StateError, match="after round 60 c differs"):
            ask(**given, rounds=90)
    assert seen


MANY = 1_000_000


@cache
def many():
    records = np.random.default_rng(0).normal(size=MANY).astype(np.float32)
    return problem_on_disk(
        lambda w, r: 0.5 * ((w - r[..., None]) ** 2).sum(-1).mean(),
        np.ones(2, np.float32),
        records,
        np.arange(MANY + 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [50, MANY])
def test_one_update_lost_among_a_million_is_seen(cohort, monkeypatch):
    """A client whose new c_i was never stored, in the middle of a run in single precision."""
    usual, clients = engine.Engine.advance, many()
    given = {"rounds": 4, "cohort": cohort, "local_steps": 1, "lr": 0.1}
    assert ask(clients, **given).fault is None
    spoilt = []

    def advance(self, state, done, number, rounds):
        before = np.array(state.memory.c_i)
        state, rows = usual(self, state, done, number, rounds)
        if not spoilt and done:
            after = np.array(state.memory.c_i)
            changed = np.flatnonzero((after != before).any(axis=1))
            spoilt.append(changed[0])
            after[changed[0]] = before[changed[0]]
            memory = state.memory._replace(c_i=engine.jax.device_put(after))
            state = state._replace(memory=memory)
        return state, rows

    monkeypatch.setattr(engine.Engine, "advance", advance)
    assert "c differs from the mean of the c_i" in ask(clients, **given).fault
    assert spoilt


@pytest.mark.slow
def test_the_rows_are_looked_at_every_so_often(monkeypatch):
    """A fault that fades away again is told all the same: it was seen while it was there."""
    usual = engine.Engine.advance

    def advance(self, state, done, number, rounds):
        state, rows = usual(self, state, done, number, rounds)
        if done < 20 <= done + number:
            memory = state.memory._replace(c_i=state.memory.c_i.at[0].add(1.0))
            state = state._replace(memory=memory)
        return state, rows

    monkeypatch.setattr(engine.Engine, "advance", advance)
    assert ask(stale="decay:0.5", rounds=200).fault is None
    monkeypatch.setattr(invariants, "SECONDS", 0.0)
    monkeypatch.setattr(invariants, "SHARE", 0.0)
    assert "c differs from the mean of the c_i" in ask(stale="decay:0.5", rounds=200).fault


def test_looking_takes_a_hundredth_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(invariants.time, "perf_counter", lambda: now[0])

    def look(state):
        now[0] += 3.0

    watch = invariants.InvariantMonitor(look)
    assert not watch.due()
    now[0] = invariants.SECONDS
    assert watch.due()
    watch(None)
    now[0] += 3.0 * invariants.SHARE - 1
    assert not watch.due()
    now[0] += 2
    assert watch.due()


@pytest.mark.slow
def test_runs_of_a_sweep_side_by_side_keep_c_in_double_precision():
    problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, noise=0.01, seed=0)
    ask = {"rounds": 20, "local_steps": 3, "cohort": 2, "weights": [1, 2, 3, 4, 5]}
    found = fs.sweep(fs.scaffold(), problem, lr=[0.1, 0.3], seeds=8, **ask)
    one = fs.simulate(fs.scaffold(), problem, lr=0.3, seed=5, **ask)
    run = found.runs[1][5]
    assert run.server.c.dtype == np.float64
    assert run.fault is None
    assert run.residual <= run.explained
    np.testing.assert_allclose(run.vector, one.vector, rtol=1e-4, atol=1e-6)

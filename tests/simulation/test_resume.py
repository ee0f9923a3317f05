"""Checkpoint and resume, in one process: same bits as the run without a break, and refusals that say why."""

import os
import resource
import signal

import jax
import numpy as np
import optax
import pytest

import fedscaffold as fs
from fedscaffold.simulation import Interrupted, checkpoint, engine, problem_on_disk
from fedscaffold.state import StateError, commit, latest

RECORDS = fs.problems.two_datasets("logistic", 8, records=20)
NOISY = fs.problems.quadratic(num_clients=10, dim=6, mu=0.05, noise=0.01, seed=0)
ROUNDS = 24
ADAM = optax.adam(0.1, b1=0.9)

CASES = {
    "sampling and local momentum": (
        fs.scaffold(),
        RECORDS,
        {"local_optimizer": optax.sgd(0.1, momentum=0.9), "batch_size": 5, "cohort": 3},
    ),
    "server adam": (fs.fedavg(), NOISY, {"lr": 0.1, "cohort": 0.5, "server_optimizer": ADAM}),
    "feddyn": (fs.feddyn(), NOISY, {"lr": 0.1, "cohort": 4}),
    "coin": (fs.scaffnew(), NOISY, {"lr": 0.1}),
    "errors of compression": (
        fs.fedavg(),
        NOISY,
        {"lr": 0.1, "cohort": 4, "compression": "top_k:0.4"},
    ),
    "decay": (
        fs.scaffold(),
        NOISY,
        {"lr": 0.1, "cohort": 3, "stale": "decay:0.9", "evaluate_every": 5},
    ),
    "a target": (fs.scaffold(), NOISY, {"lr": 0.3, "local_steps": 1, "stop_at": ("distance", 1.0)}),
}


def ask(name, **more):
    algorithm, problem, own = CASES[name]
    given = {"rounds": ROUNDS, "local_steps": 2, "seed": 7, "metrics": ("loss",)}
    return fs.simulate(algorithm, problem, **(given | own | more))


def same(run, other):
    assert run.digest == other.digest
    assert run.rounds == other.rounds
    assert run.history.keys() == other.history.keys()
    for name, column in run.history.items():
        assert column.tobytes() == other.history[name].tobytes(), name
    mine, theirs = (jax.tree_util.tree_leaves((one.server, one.clients)) for one in (run, other))
    assert [a.tobytes() for a in mine] == [a.tobytes() for a in theirs]


@pytest.fixture
def signalled(monkeypatch):
    """A function that makes a signal come when a round is over."""
    usual = checkpoint.Checkpoint.after
    inherited = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # whoever started the tests may ignore it

    def at(round, number):
        def after(self, now, stopped):
            if now.done == round:
                os.kill(os.getpid(), number)
            usual(self, now, stopped)

        monkeypatch.setattr(checkpoint.Checkpoint, "after", after)

    yield at
    monkeypatch.setattr(checkpoint.Checkpoint, "after", usual)
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_a_signal_broke_goes_on_with_the_same_bits(name, tmp_path, signalled):
    quiet = ask(name)
    at = 10 if quiet.rounds > 10 else quiet.rounds - 1
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signalled(at, signal.SIGTERM if name == "coin" else signal.SIGINT)
    with pytest.raises(Interrupted) as stopped:
        ask(name, checkpoint=tmp_path, every=1 if name == "a target" else 5)
    assert stopped.value.round == at
    assert stopped.value.signal == (signal.SIGTERM if name == "coin" else signal.SIGINT)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    signalled(-1, 0)
    same(ask(name, checkpoint=tmp_path), quiet)
    same(ask(name, checkpoint=tmp_path), quiet)  # finished: nothing left to do


def test_a_run_can_be_prolonged_and_not_cut_short(tmp_path):
    ask("feddyn", rounds=9, checkpoint=tmp_path)
    same(ask("feddyn", checkpoint=tmp_path, every=7), ask("feddyn"))
    with pytest.raises(
        fs.InputError, match=r"is after round 24; rounds must be at least as many, got 20"
    ):
        ask("feddyn", rounds=20, checkpoint=tmp_path)


def test_a_checkpoint_is_written_when_it_is_due_and_at_the_start_and_the_end(tmp_path, monkeypatch):
    rounds = []
    usual = checkpoint.commit

    def noted(folder, arrays, facts, **more):
        rounds.append(facts["round"])
        return usual(folder, arrays, facts, **more)

    monkeypatch.setattr(checkpoint, "commit", noted)
    ask("feddyn", checkpoint=tmp_path, every=7)
    assert rounds == [0, 7, 14, 21, 24]
    assert len(list(tmp_path.glob("state-*"))) == 2
    rounds.clear()
    ask("feddyn", checkpoint=tmp_path / "clock")
    assert rounds == [0, 24]
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0.0)
    ask("feddyn", checkpoint=tmp_path / "often")
    assert len(rounds) > 4


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_of_a_damaged_checkpoint_the_one_before_is_used_and_the_user_told(tmp_path):
    quiet = ask("decay")
    ask("decay", checkpoint=tmp_path, rounds=12, every=6)
    older, newest = sorted(tmp_path.glob("state-*"))
    damage(newest)
    with pytest.warns(checkpoint.StateWarning, match="is damaged: .* is used instead"):
        same(ask("decay", checkpoint=tmp_path, every=6), quiet)
    for path in tmp_path.glob("state-*"):
        damage(path)
    with pytest.raises(StateError, match="no whole state"):
        ask("decay", checkpoint=tmp_path)
    assert not older.exists()


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    quiet = ask("feddyn")
    ask("feddyn", checkpoint=tmp_path, rounds=12, every=6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            StateError, match=r"full .*committed before is intact; free some space and resume"
        ):
            ask("feddyn", checkpoint=tmp_path, every=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest(tmp_path).facts["round"] == 12
    same(ask("feddyn", checkpoint=tmp_path, every=6), quiet)


def test_another_run_is_refused_with_the_difference(tmp_path):
    base = {
        "lr": 0.1,
        "cohort": 0.5,
        "server_optimizer": ADAM,
        "rounds": 4,
        "local_steps": 2,
        "checkpoint": tmp_path,
        "metrics": ("loss",),
    }
    fs.simulate(fs.fedavg(), NOISY, **base)
    other = fs.problems.quadratic(num_clients=10, dim=6, mu=0.05, noise=0.01, seed=1)
    for algorithm, problem, change, said in [
        (fs.fedavg(), NOISY, {"lr": 0.2}, r"\(lr: was 0.1, is 0.2\)"),
        (fs.fedavg(), NOISY, {"seed": 1}, r"\(seed: was 0, is 1\)"),
        (
            fs.fedavg(),
            NOISY,
            {"local_steps": [2] * 9 + [3]},
            r"local_steps: was 2, is not there; local_steps.0: was",
        ),
        (fs.fedavg(), NOISY, {"evaluate_every": 2}, r"\(evaluate_every: was 1, is 2\)"),
        (fs.fedavg(), NOISY, {"x0": np.ones(6)}, r"\(x0: was None, is float64 \(6,\)"),
        (fs.fedavg(), NOISY, {"precision": "float64"}, r"precision: was float32, is float64"),
        (fs.fedavg(server_lr=0.5), NOISY, {}, r"algorithm.update.server_lr: was 1.0, is 0.5\)"),
        (fs.fedavg(), NOISY, {"server_optimizer": optax.adam(0.1, b1=0.8)}, r"b1: was 0.9, is 0.8"),
        (fs.fedavg(), other, {}, r"problem.records.0: was .* is "),
    ]:
        with pytest.raises(fs.InputError, match=said):
            fs.simulate(algorithm, problem, **(base | change))
    # a problem or an optimiser built anew is the same
    again = fs.problems.quadratic(num_clients=10, dim=6, mu=0.05, noise=0.01, seed=0)
    fs.simulate(fs.fedavg(), again, **(base | {"server_optimizer": optax.adam(0.1, b1=0.9)}))


def test_a_loss_with_other_code_is_another_run(tmp_path):
    clients = [np.arange(4.0), np.arange(3.0)]
    ask = {"rounds": 2, "local_steps": 1, "lr": 0.1, "checkpoint": tmp_path, "metrics": ()}
    fs.simulate(
        fs.fedavg(),
        fs.Problem(lambda w, batch: ((batch - w) ** 2).mean(), np.zeros(()), clients),
        **ask,
    )
    with pytest.raises(fs.InputError, match=r"problem.functions.loss.function: was "):
        fs.simulate(
            fs.fedavg(),
            fs.Problem(lambda w, batch: ((batch - w) ** 4).mean(), np.zeros(()), clients),
            **ask,
        )


SCALE = 0.5


def scaled_by_global(w, batch):
    return SCALE * ((batch - w) ** 2).mean()


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, w, batch):
        return self.scale * ((batch - w) ** 2).mean()

    def method(self, w, batch):
        return self.scale * ((batch - w) ** 2).mean()


@pytest.mark.parametrize("way", ["object", "method", "global", "ours"])
def test_a_loss_with_another_parameter_is_another_run(way, tmp_path, monkeypatch):
    """The parameter stands in a field of an object, or in a global, not in a closure."""

    def problem(scale):
        if way == "ours":
            rng = np.random.default_rng(0)
            clients = [(rng.normal(size=(4, 2)), np.array([0, 1, 0, 1])) for _ in range(2)]
            return fs.problems.softmax(clients, l2=scale)
        monkeypatch.setitem(globals(), "SCALE", scale)
        made = Scaled(scale)
        loss = {"object": made, "method": made.method, "global": scaled_by_global}[way]
        return fs.Problem(loss, np.zeros(()), [np.arange(4.0), np.arange(3.0)])

    ask = {"rounds": 2, "local_steps": 1, "lr": 0.1, "checkpoint": tmp_path, "metrics": ()}
    first = fs.simulate(fs.fedavg(), problem(0.5), **ask)
    assert fs.simulate(fs.fedavg(), problem(0.5), **ask).digest == first.digest
    with pytest.raises(
        fs.InputError, match=r"problem.functions.loss.*(scale|SCALE|l2): was 0.5, is 0.25"
    ):
        fs.simulate(fs.fedavg(), problem(0.25), **ask)


def test_what_cannot_be_checkpointed_says_so(tmp_path):
    with pytest.raises(
        fs.InputError, match="sweep does not take checkpoint: it is not checkpointed"
    ):
        fs.sweep(
            fs.scaffold(), NOISY, rounds=2, local_steps=1, lr=[0.1], seeds=2, checkpoint=tmp_path
        )
    with pytest.raises(fs.InputError, match="give its folder"):
        ask("feddyn", every=3)
    with pytest.raises(
        fs.InputError, match=r"sweep does not take client_state: .* keeps its clients in memory"
    ):
        fs.sweep(
            fs.scaffold(), NOISY, rounds=2, local_steps=1, lr=[0.1], seeds=2, client_state="sparse"
        )
    with pytest.raises(fs.InputError, match="every must be a whole number"):
        ask("feddyn", checkpoint=tmp_path, every=0)


# The residual guards every run


def spoilt(monkeypatch, field, at, by):
    """Let one entry of the state change by itself after a round."""
    usual = engine.Engine.advance

    def advance(self, state, done, number, rounds):
        state, rows = usual(self, state, done, number, rounds)
        if done < at <= done + number:
            leaves, structure = jax.tree_util.tree_flatten(getattr(state, field))
            part = np.array(leaves[-1])
            part[..., 0] += by
            with jax.enable_x64(True):  # or a mean would be rounded, if more rounds follow
                leaves[-1] = engine.jax.device_put(part)
            state = state._replace(**{field: jax.tree_util.tree_unflatten(structure, leaves)})
        return state, rows

    monkeypatch.setattr(engine.Engine, "advance", advance)


@pytest.mark.parametrize("field", ["server", "memory", "mean"])
def test_a_state_that_was_damaged_stops_the_run(field, tmp_path, monkeypatch):
    name = "decay" if field == "server" else "sampling and local momentum"
    healthy = ask(name)
    assert healthy.fault is None
    # small enough to be seen by nobody else; a c_i in single precision cannot hold less
    size = 1e-5 * healthy.scale if field == "memory" else 100 * healthy.explained
    spoilt(monkeypatch, field, 10, size)
    with pytest.raises(
        StateError, match=r"after round 10 c differs .* never heals. Likely causes: .* is of before"
    ):
        ask(name, checkpoint=tmp_path, every=5)
    assert latest(tmp_path).facts["round"] == 5
    if field != "server":  # a fault in c fades with `decay`, others never heal
        run = ask(name)
        assert f"after round {ROUNDS}" in run.fault
        assert run.residual > size / 4 or field == "mean"


def test_a_checkpoint_that_was_tampered_with_is_refused(tmp_path):
    ask("feddyn", checkpoint=tmp_path, rounds=12)
    found = latest(tmp_path)
    found.arrays["state.memory.c_i"][3] += 0.1
    commit(tmp_path, found.arrays, found.facts)
    with pytest.raises(StateError, match="after round 12 c differs from the mean of the c_i"):
        ask("feddyn", checkpoint=tmp_path)


@pytest.mark.slow
def test_a_wrong_algorithm_is_found_out():
    good = fs.scaffold()

    def update(server, sent, mean, heard):
        return good.update(server, sent, mean, 1.0)  # the factor S/N forgotten

    wrong = good._replace(update=update)
    run = fs.simulate(wrong, NOISY, rounds=10, local_steps=1, lr=0.1, cohort=3, metrics=())
    assert "factor S/N" in run.fault


@pytest.mark.parametrize("name", ["feddyn", "decay", "sampling and local momentum"])
def test_rounding_alone_is_never_a_fault(name):
    run = ask(name, rounds=2000)
    assert run.fault is None
    assert 0 < run.residual < run.explained / 10


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1_000, 1_000_000])
def test_rounding_of_sums_over_many_clients_is_no_fault(clients):
    """In single precision, all clients in every round, gradients that do not cancel: the worst case there is."""
    records = np.random.default_rng(0).normal(size=clients).astype(np.float32)
    problem = problem_on_disk(
        lambda w, r: 0.5 * ((w - r[..., None]) ** 2).sum(-1).mean(),
        np.ones(3, np.float32),
        records,
        np.arange(clients + 1),
    )
    run = fs.simulate(fs.scaffold(), problem, rounds=4, local_steps=2, lr=0.1, metrics=())
    assert run.fault is None
    assert 0 < run.residual < run.explained / 4
    assert (
        run.explained < 1e-5 * run.scale / clients
    )  # one lost c_i would be seen, were it a hundred thousandth as large

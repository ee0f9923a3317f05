"""Arguments and algorithms in combination, each of which was once wrong in silence."""

from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedscaffold as fs
from fedscaffold.checks import InputError

EXACT = {"precision": "float64", "local_steps": 3, "lr": 0.1, "metrics": ()}


def quadratic(**more):
    return fs.problems.quadratic(**{"num_clients": 4, "dim": 3, "mu": 0.1, "seed": 0} | more)


@cache
def regression(records=12):
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(records, 3)), rng.normal(size=records) + i) for i in range(4)]

    def loss(params, batch):
        return ((batch[0] @ params - batch[1]) ** 2).mean()

    return fs.Problem(loss, np.full(3, 0.5), data)


# Draws


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["replacement", "shuffle"])
def test_scaffnews_batches_depend_neither_on_the_length_nor_on_the_company(draw):
    """Its number of steps is drawn; the largest of all rounds is no part of any round's batches."""
    ask = {"precision": "float64", "local_steps": 4, "lr": 0.02, "batch_size": 5, "draw": draw}
    ask["metrics"] = ("loss",)
    short = fs.simulate(fs.scaffnew(), regression(), rounds=5, seed=3, **ask)
    long = fs.simulate(fs.scaffnew(), regression(), rounds=60, seed=3, **ask)
    np.testing.assert_array_equal(long.history["loss"][:5], short.history["loss"])
    swept = fs.sweep(
        fs.scaffnew(), regression(), rounds=5, seeds=[0, 1, 2, 3], **{**ask, "lr": [0.02]}
    )
    np.testing.assert_allclose(swept.runs[0][3].vector, short.vector, rtol=0, atol=1e-12)


# Rounds that nobody of weight above 0 answers


@pytest.mark.parametrize(
    "algorithm",
    [fs.fedavg_m(beta=0.5), fs.mime(), fs.amplified_scaffold(window=2)],
    ids=lambda a: a.name,
)
@pytest.mark.parametrize(
    "who",
    [
        {"weights": [1, 1, 1, 0], "cohorts": [[0, 1], [3], [2]]},
        {
            "sampling": [1, 1, 1, 0],
            "cohort": 2,
            "availability": [[1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
        },
    ],
    ids=["weights", "sampling"],
)
def test_a_round_without_weight_changes_nothing(algorithm, who):
    simulator = fs.Simulator(algorithm, quadratic(), rounds=3, **who, **EXACT)
    one, _ = simulator.step(simulator.init())
    two, _ = simulator.step(one)
    for field, before, after in zip(one.server._fields, one.server, two.server, strict=True):
        np.testing.assert_array_equal(after, before, err_msg=field)


# Server optimisers, local layers, personal models


def test_amplification_refuses_a_server_optimizer():
    with pytest.raises(InputError, match="amplifies the server's own steps"):
        fs.simulate(fs.amplified_scaffold(), quadratic(), server_optimizer=optax.sgd(0.5), **EXACT)


def test_local_layers_are_not_renewed_from_a_model_without_them():
    problem = fs.Problem(
        lambda params, batch: ((batch[0] @ params["w"] + params["head"] - batch[1]) ** 2).mean(),
        {"w": np.ones(2), "head": np.zeros(1)},
        [(np.ones((3, 2)) * i, np.arange(3.0)) for i in range(3)],
    )
    local = fs.local_layers(fs.scaffold(), local=["head"])
    with pytest.raises(InputError, match="cannot renew its memory"):
        fs.simulate(local, problem, rounds=3, cohort=1, stale="refresh:1", **EXACT)


@pytest.mark.slow
def test_dittos_common_model_is_fedavgs_whatever_the_optimizer():
    ask = {"precision": "float64", "local_steps": 3, "rounds": 4}
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    runs = [
        fs.simulate(a, quadratic(), local_optimizer=optimizer, **ask, metrics=())
        for a in (fs.ditto(), fs.fedavg())
    ]
    np.testing.assert_allclose(runs[0].vector, runs[1].vector, rtol=0, atol=1e-14)


# Vectorised sweeps


@pytest.mark.slow
def test_runs_of_a_sweep_that_diverge_end_as_they_do_alone():
    lrs, rounds = [0.1, 0.5, 30.0, 1e3], 400
    ask = {
        "rounds": rounds,
        "local_steps": 2,
        "cohort": 2,
        "stale": "decay:0.9",
        "precision": "float64",
        "metrics": ("loss",),
    }
    swept = fs.sweep(fs.scaffold(), quadratic(), lr=lrs, seeds=2, **ask)
    assert [runs[0].diverged_at is None for runs in swept.runs] == [True, True, False, False]
    for lr, runs in zip(lrs, swept.runs, strict=True):
        for seed, run in enumerate(runs):
            alone = fs.simulate(fs.scaffold(), quadratic(), lr=lr, seed=seed, **ask)
            assert (run.diverged_at, run.advice) == (alone.diverged_at, alone.advice)
            for a, b in ((run.vector, alone.vector), (run.clients.c_i, alone.clients.c_i)):
                np.testing.assert_allclose(a, b, rtol=1e-9)
            np.testing.assert_array_equal(run.clients.age, alone.clients.age)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        (fs.mime(), {}),
        pytest.param(fs.scaffold(), {"stale": "decay:0.5"}, marks=pytest.mark.soak),
        (fs.scaffold(), {"stale": "drop:1"}),
    ],
    ids=["mime", "decay", "drop"],
)
def test_a_run_of_a_sweep_that_has_diverged_begins_no_round(algorithm, policy):
    """The loss of the last run overflows in round 4 of 9, at a finite model."""
    ask = policy | {"rounds": 9, "local_steps": 1, "cohort": 2, "precision": "float64"}
    ask |= {"metrics": ["loss"]}
    lrs = [*np.linspace(0.1, 0.7, 7).tolist(), 1e50]
    run = fs.sweep(algorithm, quadratic(), lr=lrs, seeds=1, **ask).runs[-1][0]
    alone = fs.simulate(algorithm, quadratic(), lr=lrs[-1], **ask)
    assert run.diverged_at == alone.diverged_at == 4
    assert run.fault == alone.fault
    for a, b in zip(run.server, alone.server, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    for a, b in zip(run.clients.memory or (), alone.clients.memory or (), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


# States and results


def test_a_target_in_single_precision_is_reached_by_steps_too():
    problem = regression()
    first = fs.simulate(fs.fedavg(), problem, rounds=1, local_steps=3, lr=0.01).history["loss"][0]
    ask = {"rounds": 5, "local_steps": 3, "lr": 0.01, "stop_at": ("loss", float(first))}
    run = fs.simulate(fs.fedavg(), problem, **ask)
    simulator = fs.Simulator(fs.fedavg(), problem, **ask)
    state, rows = simulator.step(simulator.init(), rounds=5)
    result = simulator.result(state, rows)
    assert rows["loss"].dtype == run.history["loss"].dtype
    assert (result.outcome, result.reached_at) == (run.outcome, run.reached_at) == ("target", 1)


def test_a_state_of_other_types_is_taken_and_of_other_shapes_refused():
    ask = {"local_steps": 2, "lr": 0.1, "metrics": ()}
    simulator = fs.Simulator(fs.scaffold(), quadratic(), **ask)
    state = simulator.init()
    moved = state._replace(
        server=state.server._replace(x=np.zeros(3))
    )  # float64 in a run of float32
    assert int(simulator.step(moved)[0].round) == 1
    other = fs.Simulator(fs.scaffold(), quadratic(dim=5), **ask).init()
    with pytest.raises(InputError, match="must be one of this simulator"):
        simulator.step(other)


def test_a_flat_start_may_be_a_jax_array():
    runs = [
        fs.simulate(fs.fedavg(), quadratic(), rounds=2, x0=x0, **EXACT)
        for x0 in (np.ones(3), jnp.ones(3))
    ]
    np.testing.assert_array_equal(runs[0].vector, runs[1].vector)


# Resuming


def resumed(folder, first, then, rounds=8):
    fs.simulate(fs.fedavg(), quadratic(), **EXACT | first, rounds=4, checkpoint=folder)
    return fs.simulate(fs.fedavg(), quadratic(), **EXACT | then, rounds=rounds, checkpoint=folder)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"local_steps": range(1, 5)}, {"local_steps": range(20, 24)}),
        ({"cohorts": [range(2)] * 8}, {"cohorts": [range(2, 4)] * 8}),
        ({"metrics": {"loss"}}, {"metrics": {"grad_norm"}}),
    ],
    ids=["steps", "cohorts", "metrics"],
)
def test_another_range_or_set_is_another_run(first, then, tmp_path):
    with pytest.raises(InputError, match="was"):
        resumed(tmp_path, first, then)


def test_the_same_ranges_and_sets_go_on(tmp_path):
    given = {"local_steps": range(1, 5), "metrics": {"loss", "distance"}}
    assert resumed(tmp_path, given, given).rounds == 8


SCALE = {"factor": 1.0}


def scaled(residual):
    return SCALE["factor"] * residual**2


def doubled(residual):
    return 2 * residual**2


HELPER = scaled


def helped(params, batch):
    return HELPER(batch[0] @ params - batch[1]).mean()


@pytest.mark.parametrize("name", ["HELPER", "SCALE"])
def test_another_helper_of_a_loss_is_another_run(name, tmp_path, monkeypatch):
    clients = [(np.eye(2), np.arange(2.0)), (2 * np.eye(2), np.ones(2))]
    fs.simulate(
        fs.fedavg(),
        fs.Problem(helped, np.zeros(2), clients),
        rounds=2,
        checkpoint=tmp_path,
        **EXACT,
    )
    monkeypatch.setitem(globals(), name, doubled if name == "HELPER" else {"factor": 3.0})
    with pytest.raises(InputError, match=name):
        fs.simulate(
            fs.fedavg(),
            fs.Problem(helped, np.zeros(2), clients),
            rounds=4,
            checkpoint=tmp_path,
            **EXACT,
        )


def test_the_round_of_a_reached_target_is_the_one_that_is_named(tmp_path):
    ask = {**EXACT, "stop_at": ("distance", 1e-3), "metrics": ("distance",)}
    ask["checkpoint"] = tmp_path
    run = fs.simulate(fs.scaffold(), quadratic(), rounds=5000, **ask)
    assert run.outcome == "target"
    assert (
        fs.simulate(fs.scaffold(), quadratic(), rounds=run.rounds, **ask).reached_at == run.rounds
    )
    with pytest.raises(InputError, match=f"is after round {run.rounds};"):
        fs.simulate(fs.scaffold(), quadratic(), rounds=run.rounds - 1, **ask)


# Callbacks


class Seen(fs.Callback):
    def __init__(self, every=None, stop_at=None):
        self.every, self.stop_at, self.rounds, self.calls = every, stop_at, [], []

    def begin(self, look):
        self.calls.append("begin")

    def after(self, look):
        self.rounds += look.columns["round"].tolist()
        return look.round == self.stop_at

    def end(self, run):
        self.calls.append("end")


def test_every_callback_sees_every_round_of_a_run_that_another_one_stops():
    stops, looks = Seen(every=1, stop_at=17), Seen(every=10)
    run = fs.simulate(fs.fedavg(), quadratic(), rounds=50, callbacks=[looks, stops], **EXACT)
    assert run.rounds == 17
    assert looks.rounds == stops.rounds == list(range(1, 18))


def test_a_finished_run_begins_and_ends(tmp_path):
    fs.simulate(fs.fedavg(), quadratic(), rounds=3, checkpoint=tmp_path, **EXACT)
    again = Seen()
    fs.simulate(fs.fedavg(), quadratic(), rounds=3, checkpoint=tmp_path, callbacks=[again], **EXACT)
    assert (again.calls, again.rounds) == (["begin", "end"], [])


# Algorithms of one's own


class Counted(NamedTuple):
    move: object
    number: object


def counting():
    """FedAvg with a number in its message."""
    return fs.fedavg()._replace(
        name="counting",
        message=lambda walk, shift: Counted(walk.move, 2.0),
        update=lambda server, sent, mean, heard: server._replace(
            x=server.x - mean.move * (mean.number / 2)
        ),
    )


@pytest.mark.slow
def test_a_number_in_a_message_is_a_number():
    plain = fs.simulate(fs.fedavg(), quadratic(), rounds=3, **EXACT)
    run = fs.simulate(counting(), quadratic(), rounds=3, **EXACT)
    np.testing.assert_allclose(run.vector, plain.vector, rtol=0, atol=1e-15)
    assert (run.history["bytes_up"] - plain.history["bytes_up"]).tolist() == [4 * 8] * 3
    squeezed = fs.simulate(counting(), quadratic(), rounds=3, compression="top_k:0.5", **EXACT)
    np.testing.assert_array_equal(
        squeezed.vector,
        fs.simulate(fs.fedavg(), quadratic(), rounds=3, compression="top_k:0.5", **EXACT).vector,
    )


def test_work_is_a_function_of_what_is_asked_for():
    twice = fs.fedavg()._replace(
        name="twice", work=lambda work: work._replace(steps=2 * work.steps)
    )
    ask = {"precision": "float64", "lr": 0.1, "rounds": 3, "metrics": ()}
    runs = [
        fs.simulate(a, quadratic(), local_steps=k, **ask) for a, k in ((twice, 3), (fs.fedavg(), 6))
    ]
    np.testing.assert_array_equal(runs[0].vector, runs[1].vector)
    with pytest.raises(InputError, match="either local_steps or local_epochs"):
        fs.simulate(twice, quadratic(), **ask)


def test_a_model_of_one_number_and_a_shift_with_numbers():
    run = fs.simulate(fs.amplified_scaffold(window=2), quadratic(dim=1), rounds=5, **EXACT)
    assert run.residual <= run.explained


def test_memory_may_begin_anywhere_in_memory():
    """c = c_i = 1 to begin with: the shift is 0 as it is from zeros, and the gauge knows the start."""
    scaffold = fs.scaffold()
    ones = scaffold._replace(
        name="ones",
        init=lambda x: scaffold.init(x)._replace(c=0 * x + 1),
        memory=lambda x: scaffold.memory(x)._replace(c_i=0 * x + 1),
    )
    run = fs.simulate(ones, quadratic(), rounds=4, cohort=2, **EXACT)
    assert run.fault is None
    assert run.residual <= run.explained
    with pytest.raises(InputError, match="does not begin at 0"):
        fs.simulate(ones, quadratic(), rounds=4, cohort=2, client_state="sparse", **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"server_optimizer": optax.adam(0.1)}, {"lr": lambda step: 0.1 / (1 + step)}]
)
def test_what_clients_cannot_find_is_sent(more):
    """The xi form finds c from two models only after plain steps; else c is sent as SCAFFOLD sends it."""
    runs = [
        fs.simulate(a, quadratic(), rounds=2, **EXACT | more)
        for a in (fs.scaffold_xi(), fs.scaffold())
    ]
    assert runs[0].history["bytes_down"].tolist() == runs[1].history["bytes_down"].tolist()

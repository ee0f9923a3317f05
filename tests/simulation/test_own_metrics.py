"""Metrics of the user's own, against NumPy on the data sets that they must see."""

from functools import partial
from pathlib import Path

import forkserver
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs

RNG = np.random.default_rng(1)
COUNTS = (5, 9, 9, 4, 12)
N = len(COUNTS)


def records(n):
    x = RNG.normal(size=(n, 3))
    return {"x": x, "y": (x @ [1.0, -2.0, 0.5] + RNG.normal(size=n) > 0) * 1.0}


CLIENTS, TEST, OTHERS = (
    [records(n) for n in COUNTS],
    records(30),
    [records(n) for n in (3, 2, 3, 6, 2)],
)
X0 = {"w": RNG.normal(size=3), "b": np.array(0.3)}
ASK = {"local_steps": 2, "lr": 0.1, "precision": "float64", "cohort": 3}
P = np.array([1.0, 2.0, 1.0, 3.0, 1.0]) / 8


def loss(params, batch):
    score = batch["x"] @ params["w"] + params["b"]
    return jnp.mean(jax.nn.softplus(score) - batch["y"] * score)


PROBLEM = fs.Problem(loss, X0, CLIENTS, test=TEST)


def spread(params, data):
    """Not a mean over records: padding, or records counted twice, would change it."""
    score = data["x"] @ params["w"] + params["b"]
    return jnp.median(score) + jnp.std(score) + 0.01 * len(score)


def error(params, data):
    """The same in NumPy, which JAX cannot trace."""
    score = np.asarray(data["x"] @ params["w"] + params["b"])
    return np.median(score) + np.std(score) + 0.01 * len(score)


def expected(params, data):
    return float(error(jax.tree.map(np.asarray, params), data))


def pooled(clients):
    return {name: np.concatenate([client[name] for client in clients]) for name in ("x", "y")}


def kinds(function):
    """A metric of each kind, and what it must be at a run's last model."""

    def over(data, **more):
        return partial(fs.metric, function, on=data, **more)

    each = {"by_client": True, "maximize": False, "summary": ("mean", "min", "max", "worst", 0.9)}
    return {
        "pooled": (over("train"), lambda x: [expected(x, pooled(CLIENTS))]),
        "test": (over("test"), lambda x: [expected(x, TEST)]),
        "own": (over(OTHERS[3]), lambda x: [expected(x, OTHERS[3])]),
        "clients": (
            over("train", **each),
            lambda x: summaries([expected(x, data) for data in CLIENTS]),
        ),
        "others": (
            over(OTHERS, **each),
            lambda x: summaries([expected(x, data) for data in OTHERS]),
        ),
    }


def summaries(values):
    return [P @ values, min(values), max(values), max(values), np.quantile(values, 0.9)]


@pytest.mark.slow
@pytest.mark.parametrize("function", [spread, error], ids=["compiled", "host"])
def test_a_metric_is_the_function_of_the_real_data_sets(function):
    made = {name: (make(name=name), known) for name, (make, known) in kinds(function).items()}
    metrics = ["loss", *(one for one, _ in made.values())]
    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=5, metrics=metrics, weights=P, **ASK)
    for one, known in made.values():
        found = [run.history[column][-1] for column in one.columns]
        np.testing.assert_allclose(found, known(run.x), rtol=1e-12)
        assert np.isfinite([run.history[column] for column in one.columns]).all()
        assert ("on the host" in run.measured[one.columns[0]]) == (function is error)
    bare = fs.simulate(fs.scaffold(), PROBLEM, rounds=5, metrics=["loss"], weights=P, **ASK)
    np.testing.assert_allclose(run.vector, bare.vector, rtol=0, atol=1e-14)
    np.testing.assert_allclose(run.history["loss"], bare.history["loss"], rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("function", [spread, error], ids=["compiled", "host"])
def test_each_round_has_its_own_value_in_runs_steps_and_sweeps(function, tmp_path):
    metrics = [
        fs.metric(function, by_client=True, name="m"),
        fs.metric(function, on="test", name="t"),
    ]
    ask = ASK | {"metrics": metrics, "evaluate_every": 2}
    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=7, **ask)
    assert np.isnan(run.history["t"]).tolist() == [True, False, True, False, True, False, True]
    simulator = fs.Simulator(fs.scaffold(), PROBLEM, **ask)
    state, rows = simulator.init(), []
    for rounds in (1, 3, 3):
        state, some = simulator.step(state, rounds)
        rows.append(some)
    for column in ("m_mean", "m_max", "t"):
        np.testing.assert_array_equal(
            np.concatenate([some[column] for some in rows]), run.history[column]
        )
    at, _ = simulator.step(simulator.init(), 4)
    assert run.history["t"][3] == pytest.approx(expected(simulator.params(at), TEST), rel=1e-12)
    for seeds in ([0, 1], list(range(8))):  # one after the other, and side by side
        swept = fs.sweep(fs.scaffold(), PROBLEM, rounds=7, seeds=seeds, **ask)
        np.testing.assert_allclose(
            swept.runs[0][0].history["m_max"], run.history["m_max"], rtol=1e-12
        )
        assert swept.runs[0][1].history["t"][5] == pytest.approx(
            fs.simulate(fs.scaffold(), PROBLEM, rounds=7, seed=1, **ask).history["t"][5], rel=1e-12
        )
    fs.simulate(fs.scaffold(), PROBLEM, rounds=3, checkpoint=tmp_path, **ask)
    resumed = fs.simulate(fs.scaffold(), PROBLEM, rounds=7, checkpoint=tmp_path, **ask)
    np.testing.assert_array_equal(resumed.history["m_max"], run.history["m_max"])
    assert resumed.digest == run.digest


@pytest.mark.slow
def test_rounds_that_are_not_measured_cost_nothing():
    """Neither on the host nor in the program, nor where many runs are side by side."""
    calls, traced = [], []

    def counted(params, data):
        calls.append(1)
        return float(np.asarray(params["b"]))

    def inside(params, data):
        jax.debug.callback(lambda: traced.append(1))
        return params["b"]

    ask = ASK | {"rounds": 20, "evaluate_every": 10}
    fs.simulate(fs.scaffold(), PROBLEM, metrics=[fs.metric(counted, compiled=False)], **ask)
    assert len(calls) == 1 + 2  # once at the start, to see that it can be called
    for run in (fs.simulate, partial(fs.sweep, seeds=8)):
        traced.clear()
        run(fs.scaffold(), PROBLEM, metrics=[inside], **ask)
        jax.effects_barrier()
        assert len(traced) == 2


@pytest.mark.slow
@pytest.mark.parametrize("function", [spread, error], ids=["compiled", "host"])
def test_a_clients_own_model_is_measured(function):
    metrics = [
        fs.metric(function, model="own", name="own"),
        fs.metric(function, model="own", on="test", name="there"),
        fs.metric(function, model="own", on=OTHERS, name="others"),
        fs.metric(function, by_client=True, name="common"),
    ]
    run = fs.simulate(fs.ditto(lam=0.1), PROBLEM, rounds=4, metrics=metrics, **ASK)
    models = [run.model(client=i) for i in range(N)]
    wanted = {
        "own": [expected(model, data) for model, data in zip(models, CLIENTS, strict=True)],
        "there": [expected(model, TEST) for model in models],
        "others": [expected(model, data) for model, data in zip(models, OTHERS, strict=True)],
        "common": [expected(run.x, data) for data in CLIENTS],
    }
    for name, values in wanted.items():
        found = [run.history[f"{name}_{what}"][-1] for what in ("mean", "min", "max")]
        np.testing.assert_allclose(found, [np.mean(values), min(values), max(values)], rtol=1e-12)
    with pytest.raises(fs.InputError, match="scaffold gives clients no models of their own"):
        fs.simulate(fs.scaffold(), PROBLEM, rounds=1, metrics=metrics[:1], **ASK)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [None, False], ids=["compiled", "host"])
def test_a_run_ends_at_a_target_of_the_users_metric(compiled):
    def bias(params, data):
        return params["b"]

    ask = ASK | {"rounds": 60, "metrics": [fs.metric(bias, compiled=compiled, on="test")]}
    never = ("bias", "<=", -1e9)  # the program is that of runs that end, if it falls
    whole = fs.simulate(fs.scaffold(), PROBLEM, stop_at=never, **ask).history["bias"]
    falls = whole[-1] < whole[0]
    target = float(whole[20])
    sign = "<=" if falls else ">="
    first = int(np.argmax(whole <= target if falls else whole >= target)) + 1
    run = fs.simulate(fs.scaffold(), PROBLEM, stop_at=("bias", sign, target), **ask)
    assert (run.reached_at, run.rounds, run.diverged_at) == (first, first, None)
    np.testing.assert_array_equal(run.history["bias"], whole[:first])
    said = ask | {"metrics": [fs.metric(bias, compiled=compiled, on="test", maximize=not falls)]}
    assert fs.simulate(fs.scaffold(), PROBLEM, stop_at=("bias", target), **said).reached_at == first
    swept = fs.sweep(fs.scaffold(), PROBLEM, seeds=[0, 1], stop_at=("bias", sign, target), **ask)
    assert swept.runs[0][0].reached_at == first
    with pytest.raises(fs.InputError, match="stop_at must say which way bias goes"):
        fs.simulate(fs.scaffold(), PROBLEM, stop_at=("bias", target), **ask)


def test_a_value_that_is_not_a_number_is_no_divergence():
    def undefined(params, data):
        return jnp.nan * params["b"]

    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=3, metrics=[undefined, "loss"], **ASK)
    assert run.diverged_at is None
    assert np.isnan(run.history["undefined"]).all()
    assert np.isfinite(run.history["loss"]).all()


def test_scikit_learns_scores_are_called_on_the_host():
    scores = pytest.importorskip("sklearn.metrics")

    def f1(params, data):
        return scores.f1_score(data["y"], data["x"] @ params["w"] + params["b"] > 0)

    run = fs.simulate(
        fs.scaffold(), PROBLEM, rounds=3, metrics=[fs.metric(f1, on="test", maximize=True)], **ASK
    )
    assert run.history["f1"][-1] == f1(run.x, TEST)


def test_out_of_core_clients_are_measured_on_data_of_ones_own_only():
    ask = ASK | {"rounds": 4, "client_state": "sparse"}
    metrics = [fs.metric(spread, on="test"), fs.metric(error, on=OTHERS, by_client=True)]
    run = fs.simulate(fs.scaffold(), PROBLEM, metrics=metrics, **ask)
    assert run.history["spread"][-1] == pytest.approx(expected(run.x, TEST), rel=1e-12)
    values = [expected(run.x, data) for data in OTHERS]
    assert run.history["error_mean"][-1] == pytest.approx(np.mean(values), rel=1e-12)
    with pytest.raises(fs.InputError, match="spread would look at all clients in a round"):
        fs.simulate(fs.scaffold(), PROBLEM, metrics=[spread], **ask)


ON_DEVICES = """
import sys; sys.path.insert(0, sys.argv[1])
import jax; jax.config.update("jax_num_cpu_devices", 3)
import numpy as np, pytest, fedscaffold as fs
from test_own_metrics import *
metrics = [fs.metric(f, by_client=True, name=f.__name__) for f in (spread, error)]
metrics += [fs.metric(spread, on=OTHERS, by_client=True, name="others"), fs.metric(spread, on="test", name="test")]
metrics += [fs.metric(f, model="own", name=f"own_{f.__name__}") for f in (spread, error)]
one, many = (fs.simulate(fs.ditto(), PROBLEM, rounds=3, metrics=metrics, weights=P, **ASK, **how)
             for how in ({}, {"devices": 3}))
for column in one.history:
    np.testing.assert_allclose(many.history[column], one.history[column], rtol=1e-11, atol=1e-13, err_msg=column)
goal = {"rounds": 30, "metrics": [fs.metric(error, on="test")], "stop_at": ("error", "<=", float("inf")), "devices": 3}
with pytest.raises(fs.InputError): fs.simulate(fs.scaffold(), PROBLEM, **goal, **ASK)
goal["stop_at"] = ("error", "<=", 1e9)
assert fs.simulate(fs.scaffold(), PROBLEM, **goal, **ASK).reached_at == 1
with pytest.raises(fs.InputError, match="spread over devices"):
    fs.simulate(fs.scaffold(), PROBLEM, rounds=1, metrics=[spread], devices=3, **ASK)
def dropout(params, batch, key=None):
    x = batch["x"] if key is None else batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss(params, batch | {"x": x})
ask = ASK | {"rounds": 3, "metrics": ["loss"], "sampling": lambda round, rng: rng.choice(N, 2, replace=False),
             "lr": lambda round: 0.1 / round, "batch_size": 3}
one, many = (fs.simulate(fs.scaffold(), fs.Problem(dropout, X0, CLIENTS), **ask, **how) for how in ({}, {"devices": 3}))
np.testing.assert_allclose(many.vector, one.vector, rtol=0, atol=1e-13)
np.testing.assert_allclose(many.history["loss"], one.history["loss"], rtol=1e-11)
"""


@pytest.mark.slow
def test_many_devices_agree_with_one():
    """Metrics, schedules, sampling and keys, in a process of its own with three devices."""
    done = forkserver.run(ON_DEVICES, Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]


def both(params, data):
    return params["b"], params["w"]


def vector(params, data):
    return params["w"]


def broken(params, data):
    return data["no such column"]


def words(params, data):
    return "good"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([spread, spread], "two metrics are called 'spread'"),
        ([fs.metric(spread, name="loss")], "two metrics are called 'loss'"),
        ([fs.metric(spread, name="residual")], "two metrics are called 'residual'"),
        ([vector], r"vector\(params, data\) must be one number, got shape \(3,\)"),
        ([both], r"both\(params, data\) must be one number, got a tuple"),
        ([words], r"words\(params, data\) must be one number, got 'good'"),
        ([broken], "broken fails on the starting model: KeyError"),
        ([fs.metric(error, compiled=True)], "JAX cannot trace error"),
        ([lambda params, data: 0.0], "needs one: fs.metric"),
        ([3], r"must be a function \(params, data\) -> number, got 3"),
        (["f1"], "unknown metric 'f1'"),
        (
            [fs.metric(spread, on=OTHERS[:2], by_client=True)],
            "one data set for each of the 5 clients, got 2",
        ),
    ],
)
def test_what_is_no_metric_is_refused(metrics, said):
    with pytest.raises(fs.InputError, match=said):
        fs.simulate(fs.scaffold(), PROBLEM, rounds=2, metrics=metrics, **ASK)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"on": "tests"}, "unknown data of a metric 'tests'"),
        ({"on": "test", "by_client": True}, "spread by client needs data of each"),
        ({"by_client": True, "summary": ("worst",)}, "say maximize=False or True"),
        ({"by_client": True, "summary": ("median",)}, "unknown summary 'median'"),
        ({"by_client": True, "summary": (1.5,)}, "between 0 and 1, got 1.5"),
        ({"model": "mine"}, "unknown model of a metric 'mine'"),
        ({"maximize": "yes"}, "maximize of spread must be True, False or None"),
    ],
)
def test_metrics_that_make_no_sense_are_refused_when_they_are_made(ask, said):
    with pytest.raises(fs.InputError, match=said):
        fs.metric(spread, **ask)


def test_the_test_data_must_be_there():
    with pytest.raises(
        fs.InputError, match="spread is measured on test data, and problem has none"
    ):
        fs.simulate(
            fs.scaffold(),
            fs.Problem(loss, X0, CLIENTS),
            rounds=1,
            metrics=[fs.metric(spread, on="test")],
            **ASK,
        )

"""The compiled engine against a NumPy reference written apart, and the promises it makes."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from cases import sharp
from hypothesis import given, settings
from hypothesis import strategies as st

import fedscaffold as fs
from fedscaffold.simulation.engine import DRAW_BYTES, _compile, compile_rounds
from fedscaffold.simulation.local import _repeat
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.sampling import Drawer

N, D, R = 6, 4, 12


def quadratic(seed=0, n=N, d=D):
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(n, d, d))
    hessians = roots @ roots.transpose(0, 2, 1) / d + 0.2 * np.eye(d)
    return hessians, rng.normal(size=(n, d)), rng.normal(size=d)


def agree(run, expected, tolerance=1e-11):
    x, c, c_i = expected
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=tolerance * max(1, np.abs(x).max()))
    np.testing.assert_allclose(run.server.c, c, rtol=0, atol=tolerance * max(1, np.abs(c_i).max()))
    np.testing.assert_allclose(
        run.clients.c_i, c_i, rtol=0, atol=tolerance * max(1, np.abs(c_i).max())
    )


@st.composite
def federations(draw):
    sizes = draw(st.lists(st.integers(0, N), min_size=R, max_size=R))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    same_size = draw(st.booleans())
    cohorts = [
        rng.permutation(N)[: (max(1, sizes[0]) if same_size else size)].tolist() for size in sizes
    ]
    return {
        "seed": draw(st.integers(0, 2**16)),
        "cohorts": cohorts,
        "steps": rng.integers(1, 6, N).tolist()
        if draw(st.booleans())
        else [draw(st.integers(1, 5))] * N,
        "weights": rng.uniform(0.1, 1, N) if draw(st.booleans()) else None,
        "momentum": draw(st.sampled_from([0.0, 0.0, 0.5, 0.9])),
        "schedule": draw(st.booleans()),
        "option": draw(st.sampled_from([1, 2])),
        "server_lr": draw(st.sampled_from([1.0, 0.7])),
        "block": draw(st.sampled_from([None, 1, 2])),
    }


@pytest.mark.slow
@settings(max_examples=10, deadline=None)  # a program for nearly every one
@given(federations())
def test_engine_is_the_paper_under_sampling_weights_momentum_unequal_steps_and_schedules(case):
    a, b, x0 = quadratic(case["seed"])
    k_max = max(case["steps"])
    lrs = [0.05 / (1 + k) if case["schedule"] else 0.05 for k in range(k_max)]
    expected = reference.scaffold(
        lambda i, y, r, k: a[i] @ y - b[i],
        N,
        x0,
        case["cohorts"],
        case["steps"],
        lrs,
        case["server_lr"],
        case["weights"],
        case["momentum"],
        case["option"],
    )
    step = (lambda k: jnp.asarray(lrs)[k]) if case["schedule"] else 0.05
    local = {"lr": (lambda k: lrs[k]) if case["schedule"] else 0.05}
    if case["momentum"]:
        local = {"local_optimizer": optax.sgd(step, momentum=case["momentum"])}
    largest = max(1, *(len(c) for c in case["cohorts"]))
    run = fs.simulate(
        fs.scaffold(option=case["option"], server_lr=case["server_lr"]),
        fs.problems.quadratic(hessians=a, linear=b),
        rounds=R,
        local_steps=case["steps"],
        cohorts=case["cohorts"],
        weights="equal" if case["weights"] is None else case["weights"],
        x0=x0,
        precision="float64",
        block=None if case["block"] is None else min(case["block"], largest),
        **local,
        metrics=(),
    )
    agree(run, expected)
    assert run.residual < 1e-12 * max(1, np.abs(expected[2]).max())


@pytest.mark.parametrize(
    ("algorithm", "mu"), [(fs.fedavg(server_lr=0.5), 0.0), (fs.fedprox(mu=0.8, server_lr=0.5), 0.8)]
)
def test_fedavg_and_fedprox_are_the_reference(algorithm, mu):
    a, b, x0 = quadratic(3)
    cohorts = [[0, 2], [1, 2, 3], [5], [0, 1, 2, 3, 4, 5]]
    expected = reference.fedavg(lambda i, y, r, k: a[i] @ y - b[i], N, x0, cohorts, 4, 0.1, mu, 0.5)
    problem = fs.problems.quadratic(hessians=a, linear=b)
    run = fs.simulate(
        algorithm,
        problem,
        rounds=4,
        local_steps=4,
        lr=0.1,
        cohorts=cohorts,
        x0=x0,
        precision="float64",
        metrics=(),
    )
    np.testing.assert_allclose(run.vector, expected, rtol=0, atol=1e-13)


def test_sgd_takes_one_step_on_all_data_whatever_is_asked():
    a, b, x0 = quadratic(4)
    problem = fs.problems.quadratic(hessians=a, linear=b)
    run = fs.simulate(
        fs.sgd(), problem, rounds=3, local_steps=7, lr=0.1, x0=x0, precision="float64", metrics=()
    )
    x = x0
    for _ in range(3):
        x = x - 0.1 * (np.mean(a, 0) @ x - np.mean(b, 0))
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-14)


def records(seed=0, sizes=(5, 9, 3, 12), d=3):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, d)), rng.normal(size=n)) for n in sizes]


def least_squares(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "given"), sharp(product((1, 2), (False, True)), [(1, False), (2, True)])
)
def test_full_batches_of_unequal_clients_are_their_means(option, given):
    clients = records()
    gradient = (
        (lambda w, batch: batch[0].T @ (batch[0] @ w - batch[1]) / len(batch[1])) if given else None
    )
    problem = fs.Problem(least_squares, np.ones(3), clients, gradient=gradient)
    run = fs.simulate(
        fs.scaffold(option=option),
        problem,
        rounds=8,
        local_steps=3,
        lr=0.1,
        weights="records",
        precision="float64",
        metrics=(),
    )
    expected = reference.scaffold(
        lambda i, w, r, k: (
            clients[i][0].T @ (clients[i][0] @ w - clients[i][1]) / len(clients[i][1])
        ),
        4,
        np.ones(3),
        [range(4)] * 8,
        [3] * 4,
        [0.1] * 3,
        weights=[5, 9, 3, 12],
        option=option,
    )
    agree(run, expected)


@pytest.mark.parametrize(
    "local",
    sharp(
        [
            {"local_steps": 4, "batch_size": 2},
            {"local_steps": 4, "batch_size": 0.4},
            {"local_epochs": 2, "batch_size": 4},
            {"local_epochs": 1, "batch_size": 0.5},
            {"local_steps": 5, "batch_size": 4, "draw": "shuffle"},
            {"local_epochs": 3},
        ],
        lambda local: local.get("batch_size") not in (2, 0.5),
    ),
)
def test_batches_are_what_the_draws_say(local):
    """The reference is fed the drawer's own rows: this checks gathering, ragged batches and per-client steps."""
    clients = records(1)
    problem = fs.Problem(least_squares, np.ones(3), clients)
    ask = {"rounds": 6, "lr": 0.1, "cohort": 0.5, "precision": "float64", "metrics": ()} | local
    run = fs.simulate(fs.scaffold(), problem, seed=7, **ask)
    drawer = prepare(fs.RunConfig(fs.scaffold(), problem, **ask)).drawer
    x, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    draws = drawer.draw(7, 0, 6, 6)

    def gradient(i, w, r, k):
        if draws.rows is None:
            rows, share = np.arange(drawer.first[i], drawer.first[i] + drawer.counts[i]), None
        else:
            slot = draws.cohort[r].tolist().index(i)
            rows = draws.rows[r, slot, k]
            share = None if draws.row_weights is None else draws.row_weights[r, slot, k]
            used = rows if share is None else rows[share > 0]
            assert ((used >= drawer.first[i]) & (used < drawer.first[i] + drawer.counts[i])).all()
        share = np.full(len(rows), 1 / len(rows)) if share is None else share
        return x[rows].T @ (share * (x[rows] @ w - y[rows]))

    cohorts = [[int(i) for i in row if i < 4] for row in draws.cohort]
    expected = reference.scaffold(
        gradient, 4, np.ones(3), cohorts, drawer.steps, [0.1] * int(drawer.steps.max())
    )
    agree(run, expected)


def constant(round):
    return np.ones(())


def drawer(**changes):
    count = np.array([5, 9, 4])
    first = np.array([0, 5, 14])
    usual = Drawer(
        3, 3, 3, None, first, count, np.array([4, 4, 4]), np.array([2, 2, 2]), True, constant
    )
    return replace(usual, **changes)


def test_an_epoch_goes_through_every_record_once():
    draws = drawer(steps=np.array([3, 5, 2])).draw(0, 0, 1, 1)
    for slot, (first, count) in enumerate([(0, 5), (5, 9), (14, 4)]):
        used = draws.rows[0, slot][draws.row_weights[0, slot] > 0]
        assert sorted(used) == list(range(first, first + count))
        weights = draws.row_weights[0, slot].sum(axis=1)
        np.testing.assert_allclose(weights[: [3, 5, 2][slot]], 1, rtol=1e-6)


def test_draws_do_not_depend_on_the_room_for_them():
    one, more = drawer(shuffle=False), replace(drawer(shuffle=False), room=1 << 16)
    assert more.steps_room > one.steps_room >= one.shape[0]
    rows = more.draw(3, 5, 2, 4).rows
    np.testing.assert_array_equal(one.draw(3, 5, 2, 4).rows, rows[:, :, : one.steps_room])


def test_draws_with_replacement_are_uniform():
    count = np.array([5, 9, 4])
    draws = drawer(shuffle=False, steps=np.full(3, 2000), batch=np.full(3, 10)).draw(1, 0, 1, 1)
    for slot, (first, n) in enumerate(zip([0, 5, 14], count, strict=True)):
        seen = np.bincount(draws.rows[0, slot, :2000].ravel() - first, minlength=n)
        spread = np.sqrt(20000 / n * (1 - 1 / n))
        assert np.abs(seen - 20000 / n).max() < 5 * spread


def test_cohorts_are_uniform_without_replacement_and_do_not_depend_on_the_grouping_of_rounds():
    many = Drawer(
        10, 3, 3, None, np.arange(10), np.ones(10, int), np.ones(10, int), None, False, constant
    )
    draws = many.draw(5, 0, 3000, 3000)
    assert (np.diff(draws.cohort, axis=1) > 0).all()
    seen = np.bincount(draws.cohort.ravel(), minlength=10)
    assert np.abs(seen - 900).max() < 5 * np.sqrt(900 * 0.7)
    np.testing.assert_array_equal(many.draw(5, 1234, 10, 16).cohort[:10], draws.cohort[1234:1244])
    assert (many.draw(6, 0, 50, 50).cohort != draws.cohort[:50]).any()


@pytest.mark.slow
def test_noise_has_the_covariance_asked_for():
    covariance = np.array([[2.0, 0.6], [0.6, 0.5]])
    problem = fs.problems.quadratic(
        hessians=np.eye(2)[None], linear=np.zeros((1, 2)), noise=covariance
    )
    found = fs.sweep(
        fs.sgd(),
        problem,
        rounds=1,
        local_steps=1,
        lr=1.0,
        seeds=1000,
        precision="float64",
        metrics=(),
    )
    steps = np.stack([run.vector for run in found.runs[0]])
    error = np.abs(np.cov(steps.T) - covariance)
    assert error.max() < 5 * 2.0 * np.sqrt(2 / 1000)
    assert np.abs(steps.mean(axis=0)).max() < 5 * np.sqrt(2.0 / 1000)


def test_one_trace_for_any_number_of_calls():
    traces = []

    def loss(w, batch):
        traces.append(1)
        return least_squares(w, batch)

    problem = fs.Problem(loss, np.ones(3), records(), coupled=False)  # no comparison beforehand
    ask = {"local_steps": 3, "batch_size": 2, "metrics": ("loss",)}
    fs.simulate(fs.scaffold(), problem, rounds=3, lr=0.1, **ask)
    once = len(traces)
    fs.simulate(fs.scaffold(), problem, rounds=150, lr=0.03, seed=9, **ask)
    fs.simulate(fs.scaffold(), problem, rounds=1, lr=0.2, evaluate_every=2, **ask)
    assert len(traces) == once <= 5  # one of them forecasts the memory of convolutions


def test_problems_built_twice_share_a_program():
    before = _compile.cache_info().misses
    clients = [(np.eye(3), np.array([0, 1, 2]))] * 2
    for _ in range(2):
        fs.simulate(
            fs.fedavg(server_lr=0.9),
            fs.problems.softmax(clients, l2=0.1),
            rounds=2,
            local_steps=2,
            lr=0.1,
            metrics=(),
        )
    assert _compile.cache_info().misses == before + 1


@pytest.mark.parametrize("batch_size", [None, 2])
def test_runs_with_other_numbers_of_local_steps_share_a_program(batch_size):
    clients = [(np.eye(3) + n, np.array([0, 1, 2])) for n in range(3)]
    problem, used = fs.problems.softmax(clients, l2=0.1), set()
    ask = {"lr": 0.1, "cohort": 2, "batch_size": batch_size, "metrics": ()}
    for steps in (4, 7, 30):
        config = fs.RunConfig(fs.scaffold(), problem, local_steps=steps, **ask)
        used.add(compile_rounds(prepare(config), [0], 1).program)
    assert len(used) == 1


def test_the_room_of_draws_is_small_beside_the_models_and_shared_by_the_runs_of_a_sweep(
    monkeypatch,
):
    """Room for 64 KiB of indices a round and run made those of small models half as long again, and a sweep of 32 runs ten times."""
    config = fs.RunConfig(
        fs.scaffold(), fs.problems.linear(records()), local_steps=3, lr=0.1, batch_size=2
    )
    ready = prepare(config)
    assert ready.drawer.bytes <= 2 << 10
    monkeypatch.setattr("fedscaffold.simulation.engine._compile", lambda *given: None)
    for runs in (1, 300, 3000):
        found = compile_rounds(ready, [0] * runs, 1, lrs=[0.1] * runs, group=1)
        assert found.room == 1 or runs * found.room * ready.drawer.bytes <= DRAW_BYTES


@pytest.mark.parametrize("number", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("unroll", [False, True])
def test_unrolled_steps_are_those_of_a_loop(number, unroll):
    last = jax.jit(partial(_repeat, lambda k, y: 3 * y + k, carry=1, unroll=unroll))(number=number)
    y = 1
    for k in range(number):
        y = 3 * y + k
    assert last == y


@pytest.mark.slow
def test_same_seed_same_bits_and_stretches_change_none(monkeypatch):
    from fedscaffold.simulation import engine

    problem = fs.problems.logistic([(x, (y > 0).astype(int)) for x, y in records()], l2=0.1)
    ask = {"rounds": 40, "local_steps": 3, "lr": 0.3, "batch_size": 2, "cohort": 2}
    ask["metrics"] = ("loss",)
    first = fs.simulate(fs.scaffold(), problem, seed=3, **ask)
    assert fs.simulate(fs.scaffold(), problem, seed=3, **ask).digest == first.digest
    assert fs.simulate(fs.scaffold(), problem, seed=4, **ask).digest != first.digest
    monkeypatch.setattr(engine, "STRETCH_SECONDS", 0.0)
    again = fs.simulate(fs.scaffold(), problem, seed=3, **ask)
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.history["loss"], first.history["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("cohort", sharp([1.0, 2], [2]))
def test_a_sweep_is_its_runs(cohort):
    problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, noise=0.1, seed=2)
    ask = {
        "rounds": 15,
        "local_steps": 4,
        "cohort": cohort,
        "precision": "float64",
        "stop_at": ("distance", 0.3),
        "metrics": ("distance",),
    }
    found = fs.sweep(fs.scaffold(), problem, lr=[0.05, 0.2, 0.9], seeds=[1, 5], **ask)
    for lr, runs in zip(found.lr, found.runs, strict=True):
        for seed, swept in zip(found.seeds, runs, strict=True):
            alone = fs.simulate(fs.scaffold(), problem, lr=lr, seed=seed, **ask)
            assert (swept.rounds, swept.reached_at) == (alone.rounds, alone.reached_at)
            np.testing.assert_allclose(swept.vector, alone.vector, rtol=0, atol=1e-13)
            np.testing.assert_allclose(swept.clients.c_i, alone.clients.c_i, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_the_optimum_reached_is_the_weighted_one():
    clients = [(x, (y > 0).astype(int)) for x, y in records(2)]
    problem = fs.problems.logistic(clients, l2=0.1)
    ask = {"rounds": 400, "local_steps": 5, "lr": 0.5, "cohort": 2, "precision": "float64"}
    ask["metrics"] = ()
    for weights in ("equal", "records", [1, 2, 0.5, 4]):
        run = fs.simulate(fs.scaffold(), problem, weights=weights, **ask)
        np.testing.assert_allclose(run.vector, problem.optimum(weights), rtol=0, atol=1e-10)
    assert np.abs(problem.optimum("records") - problem.optimum("equal")).max() > 1e-3


@pytest.mark.slow
def test_with_adam_the_c_i_are_the_mean_raw_gradients():
    """One round from zero control variates, each client's Adam steps taken apart by hand."""
    a, b, x0 = quadratic(5)
    problem = fs.problems.quadratic(hessians=a, linear=b)
    optimizer = optax.adam(1e-2)
    ask = {
        "local_steps": 4,
        "local_optimizer": optimizer,
        "x0": x0,
        "precision": "float64",
        "metrics": (),
    }
    run = fs.simulate(fs.scaffold(), problem, rounds=1, cohorts=[[0, 2, 5]], **ask)
    update = jax.jit(optimizer.update)
    with jax.enable_x64(True):
        for i in (0, 2, 5):
            y, memory, seen = x0, optimizer.init(x0), []
            for _ in range(4):
                seen.append(a[i] @ y - b[i])
                step, memory = update(seen[-1], memory, y)
                y = y + np.asarray(step)
            np.testing.assert_allclose(
                run.clients.c_i[i], np.mean(seen, axis=0), rtol=0, atol=1e-12
            )
    later = fs.simulate(fs.scaffold(), problem, rounds=30, cohort=3, **ask)
    assert later.residual < 1e-13 * np.abs(later.clients.c_i).max()
    assert (later.history["bytes_up"] == 2 * 3 * D * 8).all()


@pytest.mark.slow
def test_metrics_are_what_they_say():
    a, b, x0 = quadratic(6)
    problem = fs.problems.quadratic(hessians=a, linear=b)
    p = np.arange(1.0, N + 1) / np.arange(1.0, N + 1).sum()
    run = fs.simulate(
        fs.scaffold(),
        problem,
        rounds=3,
        local_steps=4,
        lr=0.1,
        weights=p,
        x0=x0,
        precision="float64",
        metrics=["loss", "grad_norm", "gap", "distance", "drift", "control_error"],
    )
    x, best = run.vector, np.linalg.solve(np.tensordot(p, a, 1), p @ b)
    value = lambda z: p @ (0.5 * (a @ z) @ z - b @ z)  # noqa: E731
    last = {name: column[-1] for name, column in run.history.items()}
    assert last["loss"] == pytest.approx(value(x), abs=1e-13)
    assert last["gap"] == pytest.approx(value(x) - value(best), abs=1e-13)
    assert last["distance"] == pytest.approx(np.linalg.norm(x - best), abs=1e-13)
    assert last["grad_norm"] == pytest.approx(np.linalg.norm(p @ (a @ x - b)), abs=1e-13)
    ideal = a @ best - b
    assert last["control_error"] == pytest.approx(
        np.sqrt(p @ ((run.clients.c_i - ideal) ** 2).sum(1)), abs=1e-13
    )
    first = fs.simulate(
        fs.fedavg(),
        problem,
        rounds=1,
        local_steps=4,
        lr=0.1,
        weights=p,
        x0=x0,
        precision="float64",
        metrics=["drift"],
    )
    y = np.tile(x0, (N, 1))
    for _ in range(4):
        y -= 0.1 * (np.einsum("nij,nj->ni", a, y) - b)
    assert first.history["drift"][0] == pytest.approx(
        np.sqrt(p @ ((y - p @ y) ** 2).sum(1)), rel=1e-9
    )


def test_evaluation_covers_all_records_once_in_many_stretches(monkeypatch):
    from fedscaffold.simulation import evaluation

    monkeypatch.setattr(evaluation, "EVALUATION_BYTES", 100)
    clients = records(3, sizes=(5, 9, 3, 12, 1))
    test = (np.concatenate([x for x, _ in clients])[:7], np.arange(7) % 2)
    problem = fs.Problem(
        least_squares,
        np.ones(3),
        clients,
        test=test,
        accuracy=lambda w, b: jnp.mean((b[0] @ w > 0) == b[1]),
    )
    run = fs.simulate(
        fs.fedavg(),
        problem,
        rounds=1,
        local_steps=1,
        lr=0.1,
        metrics=("loss", "grad_norm", "accuracy"),
        precision="float64",
    )
    w = run.vector
    losses = [0.5 * np.mean((x @ w - y) ** 2) for x, y in clients]
    slopes = [x.T @ (x @ w - y) / len(y) for x, y in clients]
    assert run.history["loss"][0] == pytest.approx(np.mean(losses), abs=1e-12)
    assert run.history["grad_norm"][0] == pytest.approx(
        np.linalg.norm(np.mean(slopes, 0)), abs=1e-12
    )
    assert run.history["accuracy"][0] == pytest.approx(np.mean((test[0] @ w > 0) == test[1]))


@pytest.mark.slow
def test_bytes_count_one_vector_up_for_plain_sgd_and_two_otherwise():
    problem = fs.problems.quadratic(num_clients=4, dim=5, seed=0)
    ask = {"rounds": 2, "precision": "float32", "cohort": 3, "metrics": ()}
    vector = 5 * 4 * 3
    up = lambda algorithm, **local: fs.simulate(algorithm, problem, **ask, **local).history  # noqa: E731
    assert up(fs.scaffold(), local_steps=3, lr=0.1)["bytes_up"].tolist() == [vector, vector]
    assert up(fs.scaffold(), local_steps=3, lr=0.1)["bytes_down"].tolist() == [
        2 * vector,
        2 * vector,
    ]
    assert up(fs.scaffold(), local_steps=[1, 2, 3, 4], lr=0.1)["bytes_up"].tolist() == [
        vector,
        vector,
    ]
    assert up(fs.scaffold(option=1), local_steps=3, lr=0.1)["bytes_up"].tolist() == [
        2 * vector,
        2 * vector,
    ]
    assert up(fs.fedavg(), local_steps=3, lr=0.1)["bytes_up"].tolist() == [vector, vector]
    assert up(fs.fedavg(), local_steps=3, lr=0.1)["bytes_down"].tolist() == [vector, vector]


@pytest.mark.slow
def test_a_run_stops_at_its_target_and_keeps_the_model_of_that_round():
    problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.1, seed=1)
    ask = {"local_steps": 4, "lr": 0.3, "precision": "float64", "metrics": ("distance",)}
    run = fs.simulate(fs.scaffold(), problem, rounds=500, stop_at=("distance", 1e-3), **ask)
    assert run.reached_at == run.rounds == len(run.history["round"]) < 500
    assert run.history["distance"][-1] <= 1e-3 < run.history["distance"][-2]
    exact = fs.simulate(fs.scaffold(), problem, rounds=run.rounds, **ask)
    np.testing.assert_array_equal(run.vector, exact.vector)


@pytest.mark.slow
def test_divergence_is_a_result_with_advice():
    problem = fs.problems.quadratic(num_clients=4, dim=3, smoothness=2.0, seed=1)
    run = fs.simulate(fs.fedavg(), problem, rounds=5000, local_steps=4, lr=1.7, metrics=("loss",))
    assert run.diverged_at == run.rounds < 5000
    assert "2/L = 1" in run.advice
    assert np.isfinite(run.history["loss"][:-1]).all()


def test_unmeasured_rounds_hold_nan_and_the_residual_is_always_on():
    problem = fs.problems.quadratic(num_clients=4, dim=3, seed=1)
    ask = {"rounds": 7, "local_steps": 2, "lr": 0.3, "evaluate_every": 3, "metrics": ("loss",)}
    history = fs.simulate(fs.scaffold(), problem, **ask).history
    assert np.isfinite(history["loss"]).tolist() == [False, False, True, False, False, True, False]
    assert np.isfinite(history["residual"]).all()


def test_pytrees_come_back_in_their_own_structure():
    clients = [{"x": np.ones((n, 2), np.float32), "y": np.zeros(n, np.float32)} for n in (2, 3)]
    params = {"layer": (np.ones((1, 2)), np.zeros(1)), "scale": np.float64(2.0)}

    def loss(p, batch):
        out = p["scale"] * (batch["x"] @ p["layer"][0].T + p["layer"][1])
        return jnp.mean((out[:, 0] - batch["y"]) ** 2)

    run = fs.simulate(
        fs.scaffold(),
        fs.Problem(loss, params, clients),
        rounds=2,
        local_steps=2,
        lr=0.01,
        metrics=(),
    )
    assert jax.tree.structure(run.x) == jax.tree.structure(params)
    assert run.x["layer"][0].shape == (1, 2)
    assert run.vector.shape == (4,)


def test_large_populations_keep_the_residual_small():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(1, 3)), rng.normal(size=1)) for _ in range(5000)]
    run = fs.simulate(
        fs.scaffold(),
        fs.Problem(least_squares, np.ones(3), clients),
        rounds=5,
        local_steps=2,
        lr=0.1,
        metrics=(),
    )
    assert run.residual < 3e-7 * np.sqrt((run.clients.c_i**2).sum(1).mean())


def test_a_round_costs_its_cohort_not_the_population():
    """Nothing in the compiled loop may be as large as the table of c_i, except the table itself."""
    problem = fs.problems.quadratic(num_clients=997, dim=7, seed=0)
    simulator = fs.Simulator(
        fs.scaffold(), problem, rounds=3, local_steps=2, lr=0.1, cohort=5, metrics=()
    )
    made = [
        line for line in simulator._engine.program.as_text().splitlines() if "= f32[997,7]" in line
    ]
    allowed = ("parameter(", "get-tuple-element(", "dynamic-update-slice", "while(", "call(")
    assert [line for line in made if not any(word in line for word in allowed)] == []


@pytest.mark.parametrize("block", [1, 2])
def test_rows_of_clients_are_written_in_place(block):
    problem = fs.problems.quadratic(num_clients=7, dim=11, mu=0.1, seed=0)
    ask = {"local_steps": 2, "lr": 0.1, "cohort": 4, "precision": "float32", "metrics": ()}
    simulator = fs.Simulator(fs.scaffold(), problem, block=block, **ask)
    program = simulator._engine.program.as_text()
    assert "f32[7,11]" in program
    assert not re.search(r"= f32\[7,11\]\S* copy\(", program)


def test_a_local_step_updates_a_large_model_in_place():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(4, 9)), rng.normal(size=(4, 301))) for _ in range(3)]

    def loss(params, batch):
        hidden = jnp.tanh(batch[0] @ params["first"])
        return jnp.mean((hidden @ params["second"] - batch[1]) ** 2)

    start = {"first": rng.normal(size=(9, 257)), "second": rng.normal(size=(257, 301))}
    problem = fs.Problem(loss, start, clients)
    simulator = fs.Simulator(
        fs.scaffold(), problem, local_steps=3, batch_size=2, lr=0.1, metrics=()
    )
    assert simulator.ready.spec.heavy
    program = simulator._engine.program.as_text()
    assert "f32[257,301]" in program
    assert not re.search(r"= f32\[257,301\]\S* copy\(", program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "sizes"),
    [({"local_epochs": 1, "batch_size": 4}, (2, 4)), ({"local_steps": 2}, (4, 7))],
)
def test_heavy_steps_leave_padding_out(work, sizes):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 9)), rng.normal(size=(n, 1))) for n in (3, 5, 7, 4)]

    def loss(w, batch):
        return jnp.mean((jnp.tanh(batch[0] @ w).mean(1) - batch[1][:, 0]) ** 2)

    problem = fs.Problem(loss, rng.normal(size=(9, 9000)), clients)
    runs = []
    for block in (1, 2):
        ask = {"rounds": 3, "lr": 0.5, "precision": "float64", "metrics": ()} | work
        simulator = fs.Simulator(fs.scaffold(), problem, block=block, **ask)
        spec = simulator.ready.spec
        assert spec.heavy
        assert (spec.batch_sizes or spec.client_sizes) == (sizes if block == 1 else ())
        runs.append(simulator.run())
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-12)
    np.testing.assert_allclose(runs[0].server.c, runs[1].server.c, rtol=1e-9, atol=1e-15)

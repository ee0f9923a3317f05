"""Losses and scores that are no mean over records: trained and measured exactly as their author wrote them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.simulation.sampling import Drawer

SIZES = (12, 20, 20)


def cox(params, batch):
    """Negative partial likelihood: every record is compared with those still at risk."""
    x, time, event = batch
    score = x @ params["w"]
    at_risk = time[None, :] >= time[:, None]
    log_risk = jax.nn.logsumexp(jnp.where(at_risk, score[None, :], -jnp.inf), axis=1)
    return jnp.sum(event * (log_risk - score)) / jnp.maximum(event.sum(), 1)


def contrastive(params, batch):
    x = batch[0] * params["w"]
    z = x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-3)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1) - jnp.sum(z * z, axis=1))


def batch_normalised(params, batch):
    x = batch[0] * params["w"]
    x = (x - x.mean(axis=0)) / jnp.sqrt(x.var(axis=0) + 1e-3)
    return jnp.mean(jnp.square(x.sum(axis=1) - batch[1]))


def summed(params, batch):
    return 0.05 * jnp.sum(jnp.square(batch[0] @ params["w"] - batch[1]))


def by_events(params, batch):
    """A mean over events, not over records: a ratio of two sums."""
    return jnp.sum(batch[2] * jnp.square(batch[0] @ params["w"] - batch[1])) / (batch[2].sum() + 1)


def pairs(params, batch):
    """Takes records two by two, so it cannot be called with one."""
    score = (batch[0] @ params["w"]).reshape(-1, 2)
    return jnp.mean(jax.nn.softplus(score[:, 0] - score[:, 1]))


def weakly(params, batch):
    """A mean over records but for a part in a million."""
    score = batch[0] @ params["w"]
    return jnp.mean(jnp.square(score - batch[1])) + 1e-6 * jnp.var(score)


def triplets(params, batch):
    """Anchors, records of their own kind and others, all against all."""
    z, kind = batch[0] * params["w"], batch[2]
    distance = jnp.sum(jnp.square(z[:, None] - z[None]), axis=-1)
    alike = kind[:, None] == kind[None]
    counts = alike[:, :, None] & ~alike[:, None, :]
    return (
        jnp.sum(jax.nn.relu(distance[:, :, None] - distance[:, None, :] + 0.5) * counts)
        / counts.sum()
    )


def median(params, batch):
    return jnp.median(jnp.square(batch[0] @ params["w"] - batch[1]))


def softmax_over_the_batch(params, batch):
    return -jnp.mean(jax.nn.log_softmax(batch[0] @ params["w"], axis=0) * batch[2])


def by_the_number_of_records(params, batch):
    return jnp.mean(jnp.square(batch[0] @ params["w"] - batch[1])) / len(batch[0])


def clipped_by_the_batch(params, batch):
    error = jnp.square(batch[0] @ params["w"] - batch[1])
    return jnp.mean(jnp.minimum(error, 0.9 * jax.lax.stop_gradient(error.max())))


COUPLED = [cox, contrastive, summed, by_events, pairs, weakly, triplets, median]
COUPLED += [softmax_over_the_batch, by_the_number_of_records, clipped_by_the_batch]


def far_from_the_start(params, batch):
    """A plain mean, until the model has grown."""
    score = batch[0] @ params["w"]
    return jnp.where(params["w"] @ params["w"] > 3, jnp.var(score), -jnp.mean(score))


def where_a_record_is_rare(params, batch):
    """A plain mean in batches without a record of that kind, as nearly all are."""
    return jnp.mean(jnp.square(batch[0] @ params["w"] - batch[1])) / (1 + jnp.sum(batch[2] == 2))


def plain(params, batch):
    return jnp.mean(jnp.square(batch[0] @ params["w"] - batch[1])) + 0.1 * params["w"] @ params["w"]


def auc(params, batch):
    score, event = batch[0] @ params["w"], batch[2]
    above = (score[:, None] > score[None, :]) * event[:, None] * (1 - event[None, :])
    return above.sum() / (event.sum() * (1 - event).sum())


def f1(params, batch):
    found, wanted = batch[0] @ params["w"] > 0, batch[2] == 1
    return 2 * (found & wanted).sum() / (found.sum() + wanted.sum())


def balanced(params, batch):
    found, wanted = batch[0] @ params["w"] > 0, batch[2] == 1
    return ((found & wanted).sum() / wanted.sum() + (~found & ~wanted).sum() / (~wanted).sum()) / 2


def explained(params, batch):
    y = batch[1]
    return 1 - jnp.sum(jnp.square(batch[0] @ params["w"] - y)) / jnp.sum(jnp.square(y - y.mean()))


def correlation(params, batch):
    return jnp.corrcoef(batch[0] @ params["w"], batch[1])[0, 1]


def records(seed, sizes=SIZES):
    rng = np.random.default_rng(seed)

    def client(n):
        event = rng.integers(0, 2, n).astype(float)
        event[:2] = 0, 1
        return rng.normal(size=(n, 3)) + rng.normal(size=3), rng.exponential(size=n), event

    return [client(n) for n in sizes]


START = {"w": np.array([0.3, -0.2, 0.5])}


def problem(loss, sizes=SIZES, **more):
    return fs.Problem(loss, START, records(1, sizes), **more)


def batches_of(made, *, batch_size=None, steps, rounds, seed, draw):
    """The rows that every client is given at every step, found by an engine that is not ours to test here."""
    whole = [np.arange(a, b) for a, b in itertools.pairwise(made.offsets)]
    if batch_size is None:
        return lambda i, r, k: whole[i]
    counts = made.counts
    size = np.minimum(batch_size, counts) if draw == "shuffle" else np.full_like(counts, batch_size)
    local = np.full_like(counts, steps)
    drawer = Drawer(
        len(counts),
        len(counts),
        len(counts),
        None,
        made.offsets[:-1],
        counts,
        local,
        size,
        draw == "shuffle",
        lambda round: np.ones(()),
    )
    drawn = drawer.draw(seed, 0, rounds, rounds)

    def rows(i, r, k):
        if k == -1:
            return whole[i]
        real = slice(None) if drawn.row_weights is None else drawn.row_weights[r, i, k] > 0
        return drawn.rows[r, i, k][real]

    return rows


@functools.cache
def value_and_slope(loss):
    return jax.jit(jax.value_and_grad(loss))


def expected(made, *, steps, rounds=3, lr=0.1, option=2, batch_size=None, seed=5, draw="shuffle"):
    """SCAFFOLD by the paper, the user's function called with real batches, one at a time."""
    rows = batches_of(made, batch_size=batch_size, steps=steps, rounds=rounds, seed=seed, draw=draw)
    slope = value_and_slope(made.functions.loss)

    def gradient(i, y, r, k):
        chosen = rows(i, r, k)
        with jax.enable_x64(True):
            batch = jax.tree.map(lambda a: a[chosen], made.records)
            return np.asarray(slope({"w": y}, batch)[1]["w"])

    n = made.num_clients
    return reference.scaffold(
        gradient, n, START["w"], [list(range(n))] * rounds, [steps] * n, [lr] * steps, option=option
    )[0]


def ran(
    made, *, steps, rounds=3, lr=0.1, option=2, batch_size=None, seed=5, draw="shuffle", **more
):
    settings = {
        "rounds": rounds,
        "local_steps": steps,
        "lr": lr,
        "batch_size": batch_size,
        "seed": seed,
    }
    return fs.simulate(
        fs.scaffold(option=option), made, **settings, draw=draw, precision="float64", **more
    )


@pytest.mark.slow
def test_batches_that_leave_a_rest():
    made = problem(cox)
    more = {"steps": 5, "batch_size": 8, "option": 1}
    np.testing.assert_allclose(ran(made, **more).vector, expected(made, **more), rtol=1e-11)


@pytest.mark.slow
def test_a_client_takes_its_own_steps_and_waits_for_no_other():
    calls = []

    def counted(params, batch):
        jax.debug.callback(lambda: calls.append(None))
        return summed(params, batch)

    fs.simulate(
        fs.scaffold(),
        fs.Problem(counted, START, records(3, (5, 41)), coupled=True),
        rounds=3,
        local_epochs=1,
        batch_size=4,
        lr=0.01,
        metrics=(),
    )
    jax.effects_barrier()
    assert len(calls) == 3 * (2 + 11)  # batches of four and one of the rest


def means(made, loss, run, clients):
    """Loss and gradient norm of the problem, from the user's own function on each client's data."""
    with jax.enable_x64(True):
        pairs = [value_and_slope(loss)(run.x, client) for client in clients]
    return np.mean([value for value, _ in pairs]), np.linalg.norm(
        np.mean([slope["w"] for _, slope in pairs], axis=0)
    )


@pytest.mark.parametrize("loss", COUPLED, ids=lambda f: f.__name__)
def test_a_coupling_is_recognised(loss):
    assert problem(loss).kinds.loss == "coupled"


# What is recognised is trained by one program: here a loss that cannot be called with one record, one that is nearly a mean,
# one without a gradient of its coupling, and the classic; `make soak` has all.
TRAINED = [cox, pairs, weakly, clipped_by_the_batch]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(one, id=one.__name__, marks=() if one in TRAINED else pytest.mark.soak)
        for one in COUPLED
    ],
)
def test_unequal_clients_are_trained_and_measured_as_written(loss):
    made = problem(loss)
    run = ran(made, steps=3, rounds=2, lr=0.05, metrics=["loss", "grad_norm"])
    np.testing.assert_allclose(run.vector, expected(made, steps=3, rounds=2, lr=0.05), rtol=1e-11)
    wanted = means(made, loss, run, records(1))
    assert (run.history["loss"][-1], run.history["grad_norm"][-1]) == pytest.approx(
        wanted, rel=1e-12
    )
    assert run.measured["loss"] == "all records of each client at once"


@pytest.mark.slow
def test_a_coupling_that_sleeps_at_the_start():
    made = problem(far_from_the_start)
    run = ran(made, steps=3, rounds=12)
    asleep = ran(
        problem(lambda params, batch: -jnp.mean(batch[0] @ params["w"])), steps=3, rounds=12
    )
    assert not np.allclose(run.vector, asleep.vector, rtol=1e-3)
    np.testing.assert_allclose(run.vector, expected(made, steps=3, rounds=12), rtol=1e-9)
    assert run.history["loss"][-1] == pytest.approx(
        means(made, far_from_the_start, run, records(1))[0], rel=1e-9
    )


@pytest.mark.slow
def test_a_coupling_by_one_record_among_many():
    clients = records(1, (900, 30))
    clients[0][2][450] = 2
    made = fs.Problem(where_a_record_is_rare, START, clients)
    run = ran(made, steps=3)
    np.testing.assert_allclose(run.vector, expected(made, steps=3), rtol=1e-9)
    assert run.history["loss"][-1] == pytest.approx(
        means(made, where_a_record_is_rare, run, clients)[0], rel=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", [by_the_number_of_records, softmax_over_the_batch])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_clients_with_a_single_record(loss, batch_size):
    clients = [
        tuple(a[:n] for a in client) for n, client in zip((1, 4, 5), records(1), strict=True)
    ]
    made = fs.Problem(loss, START, clients)
    run = ran(made, steps=3, batch_size=batch_size)
    np.testing.assert_allclose(
        run.vector, expected(made, steps=3, batch_size=batch_size), rtol=1e-9
    )
    assert run.history["loss"][-1] == pytest.approx(means(made, loss, run, clients)[0], rel=1e-9)


def convolution(params, batch):
    x = batch[0].reshape(-1, 1, 3, 1)
    filters = params["w"].reshape(1, 3, 1, 1)
    made = jax.lax.conv_general_dilated(
        x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.gelu(made).reshape(len(x), -1).max(axis=1))


def recurrence(params, batch):
    ends, _ = jax.lax.scan(
        lambda h, x: (jnp.tanh(h * params["w"][0] + x), None), jnp.zeros_like(batch[1]), batch[0].T
    )
    return jnp.mean(jnp.square(ends - batch[1]))


def chosen_class(params, batch):
    scores = jax.nn.log_softmax(batch[0] * params["w"])
    return -jnp.mean(scores[jnp.arange(len(scores)), batch[2].astype(int)]) + 0.1 * jnp.sum(
        params["w"] ** 2
    )


def attention(params, batch):
    x = batch[0][:, :, None] * params["w"]
    heeded = jax.nn.softmax(jnp.einsum("nij,nkj->nik", x, x), axis=-1)
    return jnp.sum(
        jnp.square(jnp.einsum("nik,nkj->nij", heeded, x).sum(axis=(1, 2)) - batch[1])
    ) / len(x)


@pytest.mark.parametrize(
    "loss", [convolution, recurrence, chosen_class, attention], ids=lambda f: f.__name__
)
def test_networks_that_see_records_one_by_one_keep_the_fast_path(loss):
    assert problem(loss).kinds.loss == "mean"


@pytest.mark.slow
def test_equal_clients_are_measured_as_written():
    sizes = (10, 10, 10)
    made = problem(contrastive, sizes, accuracy=auc)
    run = ran(made, steps=2)
    wanted, _ = means(made, contrastive, run, records(1, sizes))
    assert run.history["loss"][-1] == pytest.approx(wanted, rel=1e-12)
    with jax.enable_x64(True):
        areas = [float(jax.jit(auc)(run.x, client)) for client in records(1, sizes)]
    assert run.history["accuracy"][-1] == pytest.approx(np.mean(areas), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("score", [f1, balanced, explained, correlation], ids=lambda f: f.__name__)
def test_scores_of_whole_data_sets(score):
    run = ran(problem(plain, accuracy=score), steps=2, rounds=2)
    with jax.enable_x64(True):
        wanted = np.mean([float(jax.jit(score)(run.x, client)) for client in records(1)])
    assert run.history["accuracy"][-1] == pytest.approx(wanted, rel=1e-9)
    assert run.measured["accuracy"] == "all records of each client at once"


@pytest.mark.slow
def test_stated_batches_are_what_is_measured():
    test = jax.tree.map(lambda *a: np.concatenate(a), *records(2))
    made = problem(cox, evaluation_batch=8, accuracy=auc, test=test)
    run = ran(made, steps=2, weights="records")
    total = 0.0
    with jax.enable_x64(True):
        for client in records(1):
            n = len(client[0])
            cuts = [slice(a, min(a + 8, n)) for a in range(0, n, 8)]
            total += sum(
                len(client[0][cut])
                * float(value_and_slope(cox)(run.x, tuple(a[cut] for a in client))[0])
                for cut in cuts
            )
    assert run.history["loss"][-1] == pytest.approx(total / sum(SIZES), rel=1e-12)
    assert run.measured == {
        "loss": "the records of each client in batches of 8",
        "accuracy": "the test data in batches of 8",
    }


def test_a_score_over_all_test_data():
    rng = np.random.default_rng(3)
    test = (
        rng.normal(size=(400, 3)),
        rng.exponential(size=400),
        rng.integers(0, 2, 400).astype(float),
    )
    run = ran(problem(plain, accuracy=auc, test=test), steps=2, metrics=["loss", "accuracy"])
    with jax.enable_x64(True):
        wanted = float(jax.jit(auc)(run.x, test))
    assert run.history["accuracy"][-1] == pytest.approx(wanted, rel=1e-12)
    assert run.measured == {"loss": "all records, one by one", "accuracy": "all test data at once"}


@pytest.mark.slow
def test_a_network_with_batch_statistics_scores_what_it_says():
    """Ten equal clients: trained right before, but measured record by record, where a batch of one is all zero."""
    digits = fs.data.federate(fs.data.load("digits"), "similarity:0", 10)

    def scores(params, x):
        h = x @ params["in"]
        h = (h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-5) * params["scale"] + params[
            "shift"
        ]
        return jax.nn.relu(h) @ params["out"]

    def loss(params, batch):
        chosen = jax.nn.log_softmax(scores(params, batch[0]))
        return -jnp.mean(jnp.take_along_axis(chosen, batch[1][:, None], axis=1))

    def accuracy(params, batch):
        return jnp.mean(jnp.argmax(scores(params, batch[0]), axis=1) == batch[1])

    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(64, 16)) / 8,
        "scale": np.ones(16),
        "shift": np.zeros(16),
        "out": rng.normal(size=(16, 10)) / 4,
    }
    made = fs.Problem(loss, params, digits.clients, test=digits.test, accuracy=accuracy)
    run = fs.simulate(fs.scaffold(), made, rounds=5, local_steps=5, batch_size=32, lr=0.3)
    x, y = digits.test
    wanted = float(jax.jit(accuracy)(run.x, (x, y)))
    assert run.history["accuracy"][-1] == pytest.approx(wanted, abs=1e-6)
    losses = [float(jax.jit(loss)(run.x, client)) for client in digits.clients]
    assert run.history["loss"][-1] == pytest.approx(np.mean(losses), rel=1e-5)


def weighted_cox(params, batch, weights):
    """The same as `cox` where weights are even, and blind to records of weight zero."""
    x, time, event = batch
    score, real = x @ params["w"], weights > 0
    at_risk = (time[None, :] >= time[:, None]) & real[None, :]
    log_risk = jax.nn.logsumexp(jnp.where(at_risk, score[None, :], -1e30), axis=1)
    return jnp.sum(jnp.where(real, event * (log_risk - score), 0)) / jnp.maximum(
        jnp.sum(event * real), 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"batch_size": 8}])
def test_a_loss_that_takes_weights_sees_padding(more):
    mine, exact = problem(weighted_cox, accuracy=auc), problem(cox, accuracy=auc)
    assert mine.kinds.loss == "weighted"
    a, b = ran(mine, steps=5, **more), ran(exact, steps=5, **more)
    np.testing.assert_allclose(a.vector, b.vector, rtol=1e-11)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=1e-11)


@pytest.mark.parametrize(
    "weights_first",
    [lambda weights, batch: plain(weights, batch), lambda p, b, other=3: plain(p, b)],
)
def test_weights_are_bound_by_name_behind_the_batch(weights_first):
    assert problem(weights_first).kinds.loss == "mean"


def test_plain_losses_are_recognised():
    assert problem(plain).kinds == ("mean", "mean", "mean")
    starts_at_zero = fs.Problem(batch_normalised, {"w": np.zeros(3)}, records(1))
    assert starts_at_zero.kinds.loss == "coupled"
    in_single = problem(
        lambda p, b: jnp.mean(jnp.square(b[0].astype(jnp.float32) @ p["w"].astype(jnp.float32)))
    )
    assert in_single.kinds.loss == "mean"


def test_the_last_layer_may_begin_at_zero():
    def loss(params, batch):
        h = batch[0] * params["first"]
        h = (h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-3)
        return jnp.mean(jnp.square(h @ params["last"] - batch[1]))

    made = fs.Problem(loss, {"first": np.ones(3), "last": np.zeros(3)}, records(1))
    assert made.kinds.loss == "coupled"


def test_a_ratio_that_single_records_do_not_have():
    """A mean over events is nothing on a record without one: one such record among many is enough."""

    def loss(params, batch):
        return jnp.sum(batch[2] * jnp.square(batch[0] @ params["w"])) / batch[2].sum()

    clients = records(1)
    for client in clients:
        client[2][:] = 1
    clients[2][2][5] = 0
    assert fs.Problem(loss, START, clients).kinds.loss == "coupled"


@pytest.mark.slow
def test_the_users_word_is_taken():
    never = problem(plain, coupled=True)
    np.testing.assert_allclose(
        ran(never, steps=3).vector, ran(problem(plain), steps=3).vector, rtol=1e-12
    )
    assert never.kinds.loss == "coupled"
    assert problem(cox, coupled=False).kinds.loss == "mean"


@pytest.mark.slow
def test_an_oracle_that_couples():
    def oracle(params, batch):
        return jax.grad(cox)(params, batch)

    made = fs.Problem(None, START, records(1), gradient=oracle)
    np.testing.assert_allclose(
        ran(made, steps=3, metrics=["grad_norm"]).vector,
        expected(problem(cox), steps=3),
        rtol=1e-11,
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [fs.dane, fs.scaffnew, fs.fednova])
def test_padding_changes_nothing_for_any_method(algorithm):
    """A client with the records of another twice over has the same BatchNorm loss, and another size."""
    one = records(1, (6, 9))
    doubled = [one[0], jax.tree.map(lambda a: np.concatenate([a, a]), one[1])]
    equal = [jax.tree.map(lambda a: np.tile(a, (3, *[1] * (a.ndim - 1))), one[0]), doubled[1]]
    ends = [
        fs.simulate(
            algorithm(),
            fs.Problem(batch_normalised, START, clients),
            rounds=3,
            local_steps=3,
            lr=0.05,
            precision="float64",
            metrics=(),
        )
        for clients in (doubled, equal)
    ]
    np.testing.assert_allclose(ends[0].vector, ends[1].vector, rtol=1e-11)


@pytest.mark.slow
def test_a_sweep_is_its_runs():
    made = problem(cox)
    found = fs.sweep(
        fs.scaffold(),
        made,
        rounds=3,
        local_epochs=1,
        batch_size=8,
        lr=[0.05, 0.1],
        seeds=5,
        precision="float64",
        metrics=(),
    )
    one = fs.simulate(
        fs.scaffold(),
        made,
        rounds=3,
        local_epochs=1,
        batch_size=8,
        lr=0.1,
        seed=3,
        precision="float64",
        metrics=(),
    )
    np.testing.assert_array_equal(found.runs[1][3].vector, one.vector)


@pytest.mark.slow
def test_clients_out_of_memory():
    test = jax.tree.map(lambda *a: np.concatenate(a), *records(2))
    made = problem(cox, accuracy=auc, test=test)
    settings = {"steps": 4, "batch_size": 8, "metrics": ["accuracy"]}
    here, there = ran(made, **settings), ran(made, **settings, client_state="sparse")
    np.testing.assert_array_equal(here.vector, there.vector)
    np.testing.assert_array_equal(here.history["accuracy"], there.history["accuracy"])


def three(params, x, y):
    return 0.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: problem(three),
            "loss must take (params, batch), and may take weights, key, state and train by name, got (params, x, y)",
        ),
        (lambda: problem(lambda params: 0.0), "loss must take (params, batch)"),
        (lambda: problem(plain, accuracy=three), "accuracy must take (params, batch)"),
        (
            lambda: problem(plain, gradient=lambda params, batch, keys: params),
            "gradient must take (params, batch)",
        ),
        (lambda: problem(plain, coupled="no"), "coupled must be True, False or None, got 'no'"),
        (
            lambda: problem(plain, evaluation_batch=0),
            "evaluation_batch must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(make, said):
    with pytest.raises(InputError, match="must") as caught:
        make()
    assert said in str(caught.value)

"""The private gradient and runs with it, against NumPy with the same noise; mistakes of others as mutants."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedscaffold as fs
from fedscaffold.privacy.gradients import Mechanism, clipped_sum, private_gradient
from fedscaffold.problems.batches import Functions, record_gradients

CLIP, NOISE, SEED, LR, STEPS = 0.7, 0.9, 5, 0.2, 3
COUNTS = (40, 25, 60, 31)
PRIVATE = fs.privacy.records(clip=CLIP, noise=NOISE, delta=1e-5)


def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def data():
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(n, 3)) + i, rng.normal(size=n) * 2 - i) for i, n in enumerate(COUNTS)]


DATA = data()
START = {"b": np.array(0.3), "w": np.array([1.0, -2.0, 0.5])}  # flat: b, then w


@pytest.fixture(scope="module")
def problem():
    return fs.Problem(loss, START, DATA, coupled=False)


def gradients_by_hand(z, x, y):
    """(n, 4) gradients by hand."""
    off = x @ z[1:] + z[0] - y
    return off[:, None] * np.column_stack([np.ones(len(x)), x])


def private(z, rows, client, noise, mistake=None):
    """The private gradient of some records of a client, or one with a mistake that others made."""
    x, y = DATA[client]
    g = gradients_by_hand(z, x[rows], y[rows])
    norms = np.linalg.norm(g, axis=1)
    expected, clip = (8 if len(x) > 8 else len(x)), CLIP
    if mistake == "the clip is the median of the batch's norms":
        clip = np.median(norms)
    if mistake == "each tensor is clipped by itself":
        parts = [g[:, :1], g[:, 1:]]
        g = np.hstack(
            [p / np.maximum(np.linalg.norm(p, axis=1, keepdims=True) / clip, 1) for p in parts]
        )
    elif mistake == "the mean is clipped, not each record":
        g = g / np.maximum(np.linalg.norm(g.mean(axis=0)) / clip, 1)
    else:
        g = g / np.maximum(norms[:, None] / clip, 1)
    if mistake == "the sum is divided by the actual batch":
        expected = len(rows)
    scale = NOISE * CLIP
    if mistake == "noise of a mean on the sum":
        scale /= expected
    return (g.sum(axis=0) + scale * noise) / expected


def noise_of(round, client, step, mistake):
    who = 0 if mistake == "every client draws the same noise" else client
    at = 0 if mistake == "every step draws the same noise" else step
    return drawn_noise(round, who, at)


@cache
def drawn_noise(*at):
    key = jax.random.wrap_key_data(np.array([0, SEED], np.uint32), impl="threefry2x32")
    round, client, step = at
    for word in (round, client, 4, step):
        key = jax.random.fold_in(key, word)
    high, low, turn = np.asarray(jax.random.bits(key, (3, 2), np.uint32)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((high + (low + 0.5) / 2**32) / 2**32))
    angle = 2 * np.pi * turn / 2**32
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def by_hand(draws, rounds, p, mistake=None, corrected=True):
    """SCAFFOLD (FedAvg if not corrected) with private gradients: x, c and all c_i."""
    x, c, c_i = np.array([0.3, 1.0, -2.0, 0.5]), np.zeros(4), np.zeros((len(COUNTS), 4))
    offsets = np.concatenate([[0], np.cumsum(COUNTS)])
    for r in range(rounds):
        cohort = [i for i in draws.cohort[r] if i < len(COUNTS)]
        heard, moves, changes = p[cohort].sum(), np.zeros(4), np.zeros(4)
        for slot, i in enumerate(cohort):
            y, total = x.copy(), np.zeros(4)
            for k in range(STEPS):
                there = draws.row_weights[r, slot, k] > 0
                rows = draws.rows[r, slot, k][there] - offsets[i]
                g = private(y, rows, i, noise_of(r, i, k, mistake), mistake)
                lost = mistake == "the optimiser overwrites the corrected gradient"
                y = y - LR * (g if lost or not corrected else g - c_i[i] + c)
                total += g
            new = total / STEPS
            moves += p[i] * (x - y)
            if corrected:
                changes += p[i] * (new - c_i[i])
                c_i[i] = new
        x, c = x - moves / heard, c + changes
    return SimpleNamespace(x=x, c=c, c_i=c_i)


MISTAKES = [
    "the optimiser overwrites the corrected gradient",
    "every client draws the same noise",
    "every step draws the same noise",
    "each tensor is clipped by itself",
    "the clip is the median of the batch's norms",
    "the mean is clipped, not each record",
    "the sum is divided by the actual batch",
    "noise of a mean on the sum",
]


@pytest.fixture(scope="module")
def ran(problem):
    given = {
        "local_steps": STEPS,
        "lr": LR,
        "batch_size": 8,
        "cohort": 3,
        "weights": "records",
        "seed": SEED,
        "metrics": (),
    }
    simulator = fs.Simulator(
        fs.scaffold(), problem, rounds=4, privacy=PRIVATE, precision="float64", **given
    )
    draws = simulator.ready.drawer.draw(SEED, 0, 4, 4)
    return SimpleNamespace(run=simulator.run(), draws=draws, p=problem.counts / sum(COUNTS))


@pytest.mark.slow
def test_a_run_is_the_one_by_hand_and_the_gauge_is_at_rounding(ran):
    hand = by_hand(ran.draws, 4, ran.p)
    np.testing.assert_allclose(ran.run.vector, hand.x, atol=1e-10)
    np.testing.assert_allclose(ran.run.clients.c_i, hand.c_i, atol=1e-10)
    np.testing.assert_allclose(ran.run.server.c, ran.p @ ran.run.clients.c_i, atol=1e-14)
    assert ran.run.fault is None
    assert ran.run.residual <= ran.run.explained


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_of_others_would_be_seen(ran, mistake):
    wrong = by_hand(ran.draws, 4, ran.p, mistake)
    assert np.abs(wrong.x - ran.run.vector).max() > 1e-3


@pytest.mark.slow
def test_fedavg_by_hand(problem, ran):
    run = fs.simulate(
        fs.fedavg(),
        problem,
        rounds=4,
        local_steps=STEPS,
        lr=LR,
        batch_size=8,
        cohort=3,
        weights="records",
        seed=SEED,
        privacy=PRIVATE,
        precision="float64",
        metrics=(),
    )
    hand = by_hand(ran.draws, 4, ran.p, corrected=False)
    np.testing.assert_allclose(run.vector, hand.x, atol=1e-10)


@pytest.mark.slow
def test_many_parts_add_up_to_one_batch():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        batch, weights = rng.normal(size=(23, 4)), np.r_[np.ones(17), np.zeros(6)]
        noise = {"a": rng.normal(size=4)}

        def gradients(records, places):
            return {"a": 3 * records}

        def of(at_once):
            mechanism = Mechanism(clip=1.0, noise=2.0, batch=10, at_once=at_once)
            asked = mechanism, gradients, batch, weights, 100, noise
            return jax.jit(lambda: private_gradient(*asked)["a"])()

        whole = of(23)
        rows = 3 * batch[:17]
        clipped = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
        np.testing.assert_allclose(whole, (clipped.sum(axis=0) + 2 * noise["a"]) / 10, rtol=1e-13)
        for at_once in (1, 5, 17, 22):
            np.testing.assert_allclose(of(at_once), whole, rtol=1e-12)


def test_one_record_moves_the_sum_by_at_most_the_clip():
    """Whatever its gradient, not finite ones included, which add nothing."""
    rng = np.random.default_rng(1)
    rest = rng.normal(size=(6, 5)) * 100
    summed = jax.jit(lambda rows, there: clipped_sum(rows, there, 0.5))
    for bad in (rest[0] * 1e12, np.full(5, np.inf), np.array([np.nan, 0, 0, 0, 0]), np.zeros(5)):
        rows = {
            "a": jnp.asarray(np.vstack([rest, bad])[:, :2]),
            "b": jnp.asarray(np.vstack([rest, bad])[:, 2:]),
        }
        sums = [np.concatenate(list(summed(rows, np.arange(7) < n).values())) for n in (6, 7)]
        assert np.isfinite(sums[1]).all()
        assert np.linalg.norm(sums[1] - sums[0]) <= 0.5 * (1 + 1e-5)
        if not np.isfinite(bad).all():
            np.testing.assert_array_equal(*sums)


def test_batches_are_poisson(problem):
    """Each record with its client's probability, independently: sizes scatter as binomial, not at all if shuffled."""
    simulator = fs.Simulator(
        fs.fedavg(), problem, rounds=1, local_steps=500, lr=0.1, batch_size=8, privacy=PRIVATE
    )
    drawer = simulator.ready.drawer
    draws = drawer.draw(0, 0, 4, 4)
    for client, n in enumerate(COUNTS):
        q, there = 8 / n, draws.row_weights[:, client] > 0
        rows = draws.rows[:, client] - drawer.first[client]
        held = np.zeros((4, 500, n))
        r, k, _ = np.nonzero(there)
        np.add.at(held, (r, k, rows[there]), 1)
        held = held.reshape(-1, n)
        assert held.max() == 1
        trials = len(held)
        share = held.mean(axis=0)
        assert np.abs(share - q).max() < 4.5 * np.sqrt(q * (1 - q) / trials)
        sizes = held.sum(axis=1)
        variance = n * q * (1 - q)
        assert abs(sizes.var() / variance - 1) < 4.5 * np.sqrt(2 / trials) * 1.2
        pairs = np.cov(held[:, :10].T) / (q * (1 - q)) - np.eye(10)
        assert np.abs(pairs).max() < 5 * np.sqrt((1 + (1 - 2 * q) ** 2 / (q * (1 - q))) / trials)


def test_draws_do_not_depend_on_how_rounds_are_grouped(problem):
    drawer = fs.Simulator(
        fs.fedavg(), problem, rounds=4, local_steps=3, lr=0.1, batch_size=0.3, privacy=PRIVATE
    ).ready.drawer
    whole, last = drawer.draw(7, 0, 4, 4), drawer.draw(7, 3, 1, 1)
    np.testing.assert_array_equal(whole.rows[3], last.rows[0])
    assert drawer.rates.tolist() == [0.3] * 4


# Gradients are made private below the algorithm, which only sees them: here without memory, with control variates, a
# coin, travel, a pull towards x, compressed messages. The formulas of the others are compared without privacy
# (tests/simulation/test_conforms.py), and `make soak` has all.
KINDS = ("fedavg", "scaffold", "scaffnew", "fednova", "fedprox", "scafcom")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(make(), id=name, marks=() if name in KINDS else pytest.mark.soak)
        for name, make in fs.ALGORITHMS.items()
        if name not in ("dane", "mime", "ditto", "fedbn")
    ],
)
def test_every_algorithm_that_can_be_private_is(algorithm, problem):
    """At a vanishing noise and a vast clip it is the algorithm itself."""
    given = {
        "rounds": 2,
        "local_steps": 2,
        "lr": 0.05,
        "precision": "float64",
        "metrics": (),
        "seed": 1,
    }
    plain = fs.simulate(algorithm, problem, **given)
    simulator = fs.Simulator(
        algorithm, problem, privacy=dataclasses.replace(PRIVATE, clip=1e6), **given
    )
    ready = simulator.ready
    quiet = ready.spec.privacy._replace(noise=1e-20)  # less than fs.privacy.records takes
    simulator.ready = ready._replace(spec=ready.spec._replace(privacy=quiet), budget=None)
    np.testing.assert_allclose(simulator.run().vector, plain.vector, atol=1e-10)


@pytest.mark.parametrize(
    ("algorithm", "given", "said"),
    [
        (fs.dane(), {}, "dane takes gradients over all records at x"),
        (fs.mime(), {}, "mime takes gradients over all records at x"),
        (fs.ditto(), {}, "ditto asks for gradients at elsewhere"),
        (fs.scaffold(option=1), {}, "scaffold takes gradients over all records at x"),
        (fs.scaffold(), {"stale": "refresh:3", "cohort": 2}, "stale='refresh' takes gradients"),
        (fs.scaffold(), {"local_steps": None, "local_epochs": 1, "batch_size": 5}, "local_epochs"),
        (fs.scaffold(), {"draw": "shuffle", "batch_size": 5}, "draw passes over records"),
        (fs.scaffold(), {"stop_at": "loss:0.1"}, "stop_at ends a run by a metric"),
        (
            fs.scaffold(),
            {"privacy": dataclasses.replace(PRIVATE, delta=0.1)},
            "delta must be below",
        ),
        (fs.scaffold(), {"privacy": 3.0}, "privacy must be fs.privacy.records"),
    ],
)
def test_what_cannot_be_private_is_refused_by_name(problem, algorithm, given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Simulator(
            algorithm, problem, **{"local_steps": 2, "lr": 0.1, "privacy": PRIVATE} | given
        )


def test_losses_that_mix_records_or_keep_a_state_are_refused():
    def mixing(params, batch):
        x, y = batch
        return jnp.var(x @ params["w"] - y)

    def stateful(params, batch, state):
        return loss(params, batch), state + 1

    given = {"local_steps": 2, "lr": 0.1, "privacy": PRIVATE}
    with pytest.raises(fs.InputError, match="not the mean of its records' losses"):
        fs.Simulator(fs.scaffold(), fs.Problem(mixing, START, DATA), **given)
    kept = fs.Problem(stateful, START, DATA, state=np.zeros(()))
    with pytest.raises(fs.InputError, match="updates a state from whole batches"):
        fs.Simulator(fs.scaffold(), kept, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clip": 0.0}, "clip must be a number of at least 1e-12"),
        ({"noise": 0.0}, "noise must be a number of at least 0.05"),
        ({"noise": float("nan")}, "noise must be a number"),
        ({"delta": 1.0}, "delta must be a number above 0 and below 1"),
        ({"sampling": "shuffle"}, "has another epsilon than Poisson batches"),
        ({"sampling": "fixed"}, "unknown sampling 'fixed'"),
        ({"stop_at_epsilon": -1.0}, "stop_at_epsilon must be a number above 0"),
    ],
)
def test_settings_out_of_range_are_refused(given, said):
    with pytest.raises(fs.InputError, match=said):
        fs.privacy.records(**{"clip": 1.0, "noise": 1.1, "delta": 1e-5} | given)


@pytest.mark.slow
def test_random_losses_draw_for_each_record():
    """A loss with a key sees another one for each record, so that clipping by record is what it says."""

    def dropped(params, batch, key=None):
        x, y = batch
        kept = 1.0 if key is None else 2.0 * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean(((x * kept) @ params["w"] + params["b"] - y) ** 2) / 2

    problem = fs.Problem(dropped, START, DATA)
    given = {"rounds": 2, "local_steps": 2, "lr": 0.05, "privacy": PRIVATE, "precision": "float64"}
    run = fs.simulate(fs.scaffold(), problem, batch_size=8, metrics=(), **given)
    assert np.isfinite(run.vector).all()
    assert run.residual <= run.explained


@pytest.mark.slow
def test_layers_that_stay_at_the_client_are_noised_like_the_rest(problem):
    given = {"rounds": 2, "local_steps": 2, "lr": 0.05, "batch_size": 8, "precision": "float64"}
    kept = fs.local_layers(fs.scaffold(), ["b"])
    run = fs.simulate(kept, problem, privacy=PRIVATE, metrics=(), **given)
    assert run.fault is None
    assert len(np.unique(run.clients.models[:, 0])) == len(COUNTS)


@pytest.mark.slow
def test_convolutions_have_gradients_by_record():
    """Batches of one under a map, rewritten as matrix products, against one gradient at a time."""
    rng = np.random.default_rng(0)
    params = {"k": rng.normal(size=(3, 1, 3, 3)), "w": rng.normal(size=(3 * 16,))}
    images, targets = rng.normal(size=(5, 1, 6, 6)), rng.normal(size=5)

    def convolved(params, batch):
        x, y = batch
        seen = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "VALID")
        return jnp.mean((jnp.tanh(seen).reshape(len(x), -1) @ params["w"] - y) ** 2)

    with jax.enable_x64(True):
        by_record = jax.jit(partial(record_gradients, Functions(convolved)))
        rows, slope = (
            by_record(params, (images, targets), np.arange(5)),
            jax.jit(jax.grad(convolved)),
        )
        for i in range(5):
            alone = slope(params, (images[i : i + 1], targets[i : i + 1]))
            for name in params:
                np.testing.assert_allclose(rows[name][i], alone[name], rtol=1e-11, atol=1e-12)


def test_two_runs_on_one_seed_are_refused(problem):
    with pytest.raises(fs.InputError, match="richardson does not take privacy"):
        fs.richardson(fs.fedavg(), problem, lr=0.1, local_steps=1, privacy=PRIVATE)


@pytest.mark.slow
def test_local_optimisers_act_on_the_private_gradient(problem):
    """One step of momentum is one of SGD: both follow the same noised vector."""
    given = {
        "rounds": 1,
        "local_steps": 1,
        "batch_size": 8,
        "privacy": PRIVATE,
        "precision": "float64",
        "metrics": (),
    }
    sgd = fs.simulate(fs.scaffold(), problem, lr=LR, **given)
    momentum = fs.simulate(
        fs.scaffold(), problem, local_optimizer=optax.sgd(LR, momentum=0.9), **given
    )
    np.testing.assert_allclose(momentum.vector, sgd.vector, rtol=1e-12)


@pytest.mark.slow
def test_steps_by_hand_draw_the_noise_of_a_round_for_one_state_only(problem, tmp_path):
    """Rolled back, a round gives the same again; from another state its noise would cancel."""
    given = {"rounds": 3, "local_steps": 2, "lr": LR, "batch_size": 8, "privacy": PRIVATE}
    given["metrics"] = ()
    simulator = fs.Simulator(fs.scaffold(), problem, **given)
    start = simulator.init()
    first, _ = simulator.step(start)
    second, _ = simulator.step(first)
    again, rows = simulator.step(first)
    np.testing.assert_array_equal(again.x, second.x)
    assert rows["epsilon"].shape == (1,)
    moved = first._replace(server=first.server._replace(x=np.asarray(first.x) + 1))
    with pytest.raises(fs.InputError, match="a round would draw the same noise"):
        simulator.step(moved)
    kept = fs.Simulator(fs.scaffold(), problem, checkpoint=tmp_path, **given)
    with pytest.raises(fs.InputError, match="a ledger is charged by run"):
        kept.step(kept.init())


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["sampling", "availability"])
def test_who_is_charged_is_who_came(problem, asks):
    """A function that names others each time it is asked, but for the first round, is asked once a round."""
    calls = iter(range(1000))

    def named(round, rng=None):
        return [0] if round == 1 else [1 + next(calls) % 2]

    def mask(round):
        return np.isin(np.arange(4), named(round))

    given = {asks: named if asks == "sampling" else mask, "cohort": 1, "rounds": 2, "metrics": ()}
    run = fs.simulate(
        fs.scaffold(), problem, local_steps=1, lr=LR, batch_size=8, privacy=PRIVATE, **given
    )
    came = (np.asarray(run.clients.c_i) != 0).any(axis=1)
    np.testing.assert_array_equal(run.privacy.steps > 0, came)


@pytest.mark.slow
@pytest.mark.parametrize("protected", ["records", "clients"])
def test_a_record_with_an_infinite_loss_does_not_end_the_run(protected):
    """That a run ends, and when, is seen by all: it follows from the noised model alone."""

    def explosive(params, batch):
        x, y = batch
        return jnp.mean(jnp.where(x[:, 0] > 90, jnp.exp(x[:, 0]) * params["w"].sum(), y * y))

    data = [(x.copy(), y) for x, y in DATA]
    data[0][0][3] = 100.0
    private = getattr(fs.privacy, protected)(clip=1.0, noise=1.0, delta=1e-3)
    run = fs.simulate(
        fs.scaffold(),
        fs.Problem(explosive, {"w": np.ones(3)}, data),
        rounds=3,
        local_steps=1,
        lr=0.1,
        privacy=private,
    )
    assert np.isinf(run.history["loss"]).all()
    assert (run.outcome, run.rounds, run.diverged_at) == ("finished", 3, None)
    assert np.isfinite(run.vector).all()

"""Losses that take a random key: dropout by hand, with keys derived by the documented rule."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.deploy.client import Work
from fedscaffold.deploy.jax_client import JaxLearner, step_key
from fedscaffold.deploy.settings import Local
from fedscaffold.simulation.program import prepare
from fedscaffold.theory.derivatives import noise_level

RNG = np.random.default_rng(7)
K, LR, SEED = 3, 0.05, 11
X0 = {"w": RNG.normal(size=3), "b": RNG.normal(size=())}
ASK = {"local_steps": K, "lr": LR, "seed": SEED, "precision": "float64"}


def federation(*counts):
    return [(RNG.normal(size=(n, 3)), RNG.normal(size=n)) for n in counts]


EVEN, RAGGED = federation(6, 6, 6, 6), federation(4, 7, 7, 4)


def dropout(params, batch, key=None):
    x, y = batch
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.5, x.shape) / 0.5
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


PROBLEM, UNEQUAL = fs.Problem(dropout, X0, EVEN), fs.Problem(dropout, X0, RAGGED)
slopes = jax.jit(jax.grad(dropout))


@jax.jit
def folded(seed, numbers):
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def one_key(seed, round, client, *stream):
    """The documented rule; rounds from 1."""
    return folded(seed, (round - 1, client, *stream))


def by_hand(clients, rounds, cohorts, option=2, slope=slopes):
    """SCAFFOLD on full batches with jax.grad, one client and step after the other, in NumPy but for gradients."""
    with jax.enable_x64(True):
        x = jax.tree.map(np.asarray, X0)
        zero = jax.tree.map(np.zeros_like, x)
        c, c_i = zero, [zero] * len(clients)

        def gradient(*given):
            return jax.tree.map(np.asarray, slope(*given))

        for r in range(1, rounds + 1):
            new, moves = list(c_i), []
            for i in cohorts[r - 1]:
                y, total = x, zero
                for k in range(K):
                    g = gradient(y, clients[i], one_key(SEED, r, i, 2, k))
                    total = jax.tree.map(np.add, total, g)
                    y = jax.tree.map(lambda y, g, c, own: y - LR * (g - own + c), y, g, c, c_i[i])
                moves.append(jax.tree.map(np.subtract, x, y))
                mean = jax.tree.map(lambda a: a / K, total)
                new[i] = mean if option == 2 else gradient(x, clients[i], one_key(SEED, r, i, 3))
            x = jax.tree.map(lambda x, *all: x - sum(all) / len(all), x, *moves)
            c_i = new
            c = jax.tree.map(lambda *all: sum(all) / len(all), *c_i)
        return x, c_i


COHORTS = [[0, 2], [1, 3], [0, 1], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "clients", "option"),
    [
        pytest.param(PROBLEM, EVEN, 2, id="even-2"),
        pytest.param(UNEQUAL, RAGGED, 1, id="ragged-1"),
        pytest.param(PROBLEM, EVEN, 1, id="even-1", marks=pytest.mark.soak),
        # `test_kinds_are_found_with_the_key_held_fixed` has two such runs
        pytest.param(UNEQUAL, RAGGED, 2, id="ragged-2", marks=pytest.mark.soak),
    ],
)
def test_scaffold_agrees_with_a_loop_that_derives_the_keys(problem, clients, option):
    run = fs.simulate(
        fs.scaffold(option=option), problem, rounds=4, cohorts=COHORTS, **ASK, metrics=()
    )
    x, c_i = by_hand(clients, 4, COHORTS, option)
    np.testing.assert_allclose(run.vector, problem.layout.flatten(x), rtol=0, atol=1e-12)
    for own, wanted in zip(run.clients.c_i, c_i, strict=True):
        np.testing.assert_allclose(own, problem.layout.flatten(wanted), rtol=0, atol=1e-12)
    assert run.residual < 1e-13


@pytest.mark.slow
def test_dane_has_one_key_for_a_step_and_another_for_the_exchange():
    """With one local step from y = x the two gradients of the step cancel: what is left is the exchange's."""
    problem = PROBLEM
    run = fs.simulate(fs.dane(), problem, rounds=1, **(ASK | {"local_steps": 1}), metrics=())
    with jax.enable_x64(True):
        grads = [slopes(X0, client, one_key(SEED, 1, i, 3)) for i, client in enumerate(EVEN)]
    mean = np.mean([problem.layout.flatten(g) for g in grads], axis=0)
    np.testing.assert_allclose(
        run.vector, problem.layout.flatten(X0) - LR * mean, rtol=0, atol=1e-13
    )


@pytest.mark.slow
def test_keys_do_not_depend_on_blocks_stretches_stores_devices_or_company():
    problem = PROBLEM
    ask = ASK | {"cohort": 2, "batch_size": 3, "rounds": 5, "metrics": ()}
    run = fs.simulate(fs.scaffold(), problem, **ask)
    for other in ({"block": 1}, {"client_state": "sparse"}):
        np.testing.assert_allclose(
            fs.simulate(fs.scaffold(), problem, **ask, **other).vector,
            run.vector,
            rtol=0,
            atol=1e-14,
        )
    simulator = fs.Simulator(
        fs.scaffold(), problem, **{k: v for k, v in ask.items() if k != "rounds"}
    )
    state = simulator.init()
    for rounds in (2, 1, 2):
        state, _ = simulator.step(state, rounds)
    np.testing.assert_array_equal(np.asarray(state.x), run.vector)
    swept = fs.sweep(
        fs.scaffold(), problem, seeds=[1, SEED], **{k: v for k, v in ask.items() if k != "seed"}
    )
    np.testing.assert_allclose(swept.runs[0][1].vector, run.vector, rtol=0, atol=1e-14)
    given = ASK | {"rounds": 1, "weights": [0, 1, 0, 0], "metrics": ()}
    alone, together = (  # the second cohorts are not reached: there is room for three in both
        fs.simulate(fs.fedavg(), problem, cohorts=cohorts, **given)
        for cohorts in ([[1], [0, 1, 3]], [[0, 1, 3], [1]])
    )
    np.testing.assert_allclose(alone.vector, together.vector, rtol=0, atol=1e-15)


@pytest.mark.slow
def test_clients_steps_rounds_and_seeds_have_keys_of_their_own():
    """Clients with the same records part ways, and so do rounds that begin at the same model."""

    def noise(params, batch, key=None):
        draw = 0.0 if key is None else jax.random.normal(key, params.shape)
        return jnp.sum(params * (draw + 0 * batch.mean()))

    problem = fs.Problem(noise, np.zeros(40), [np.ones(3)] * 3)
    ask = {"lr": 1.0, "precision": "float64"}
    run = fs.simulate(fs.scaffold(option=1), problem, rounds=2, local_steps=2, **ask, metrics=())
    at_x = run.clients.c_i
    steps = [
        jax.random.normal(one_key(0, r, i, 2, k), (40,))
        for r in (1, 2)
        for i in range(3)
        for k in range(2)
    ] + list(at_x)
    correlation = np.corrcoef(np.array(steps))
    assert np.abs(correlation - np.eye(len(steps))).max() < 5 / np.sqrt(40)
    with jax.enable_x64(True):
        drawn = jax.random.normal(one_key(0, 2, 1, 3), (40,))
    np.testing.assert_allclose(at_x[1], drawn, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_it_is_measured_without_randomness():
    run = fs.simulate(fs.scaffold(), UNEQUAL, rounds=2, metrics=["loss", "grad_norm"], **ASK)
    w, b = (np.asarray(run.x[name], float) for name in ("w", "b"))
    errors = [x @ w + b - y for x, y in RAGGED]
    grads = [
        np.append(2 * x.T @ e / len(e), 2 * e.mean())
        for (x, _), e in zip(RAGGED, errors, strict=True)
    ]
    np.testing.assert_allclose(
        run.history["loss"][-1], np.mean([np.mean(e**2) for e in errors]), rtol=1e-13
    )
    np.testing.assert_allclose(
        run.history["grad_norm"][-1], np.linalg.norm(np.mean(grads, axis=0)), rtol=1e-12
    )


@pytest.mark.slow
def test_kinds_are_found_with_the_key_held_fixed():
    def shaken(
        params, batch, key=None
    ):  # the same perturbation for all records: a mean over records, given the key
        w = params["w"] if key is None else params["w"] + jax.random.normal(key, (3,))
        return jnp.mean((batch[0] @ w + params["b"] - batch[1]) ** 2)

    def weighed(params, batch, weights, key=None):
        x, y = batch
        x = x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape[1:]) / 0.5
        return weights @ (x @ params["w"] + params["b"] - y) ** 2

    made = {loss: fs.Problem(loss, X0, RAGGED) for loss in (shaken, weighed)}
    assert UNEQUAL.kinds[::2] == ("mean", "coupled")
    assert fs.Problem(dropout, X0, RAGGED, coupled=False).kinds[::2] == ("mean", "coupled")
    assert made[shaken].kinds[::2] == ("mean", "mean")
    assert made[weighed].kinds[::2] == ("weighted", "weighted")
    for loss, plain in (
        (shaken, shaken),
        (weighed, lambda p, b, key: weighed(p, b, np.full(len(b[1]), 1 / len(b[1])), key)),
    ):
        run = fs.simulate(
            fs.scaffold(),
            made[loss],
            rounds=3,
            cohorts=COHORTS[:3],
            **ASK,
            metrics=(),
        )
        x, _ = by_hand(RAGGED, 3, COHORTS, slope=jax.jit(jax.grad(plain)))
        np.testing.assert_allclose(run.x["w"], x["w"], rtol=0, atol=1e-12)


def test_equal_batches_of_unequal_clients_need_no_branches():
    """Clients of a block are run side by side unless a batch of all their records is asked for."""
    drawn = fs.RunConfig(fs.scaffold(), UNEQUAL, rounds=2, local_steps=2, lr=0.1, batch_size=4)
    assert not prepare(drawn).spec.one_by_one
    assert prepare(replace(drawn, algorithm=fs.scaffold(option=1))).spec.one_by_one
    assert prepare(replace(drawn, batch_size=None)).spec.one_by_one


@pytest.mark.slow
def test_a_gradient_may_take_a_key_too():
    def gradient(params, batch, key=None):
        return jax.grad(dropout)(params, batch, key)

    ask = ASK | {"rounds": 3, "cohorts": COHORTS[:3], "batch_size": 3}
    given = fs.simulate(
        fs.scaffold(), fs.Problem(dropout, X0, EVEN, gradient=gradient), **ask, metrics=()
    )
    own = fs.simulate(fs.scaffold(), PROBLEM, **ask, metrics=())
    np.testing.assert_allclose(given.vector, own.vector, rtol=0, atol=1e-14)


def test_a_loss_that_cannot_do_without_a_key_is_refused_at_the_start():
    def needy(params, batch, key):
        x = batch[0] * jax.random.bernoulli(key, 0.5, batch[0].shape)
        return jnp.mean((x @ params["w"] - batch[1]) ** 2)

    with pytest.raises(
        fs.InputError, match=r"loss must run with key=None.* only where key is not None"
    ) as refused:
        fs.simulate(fs.scaffold(), fs.Problem(needy, X0, EVEN), rounds=1, **ASK)
    assert "\n" not in str(refused.value)


def test_theory_does_not_know_the_noise_of_a_key():
    with pytest.raises(fs.InputError, match="random key"):
        noise_level(PROBLEM, np.zeros(4))


def test_a_deployed_client_has_a_key_for_each_step():
    learner = JaxLearner(dropout, X0, lambda site: EVEN[0], precision="float64")
    local = Local(steps=K, batch_size=None, lr=LR)
    trained = learner.site("north").train(
        Work(learner.start, None, fs.fedavg(), local, 2**40 + 5, {})
    )
    with jax.enable_x64(True):
        y = X0
        for k in range(K):
            g = slopes(y, EVEN[0], step_key(2**40 + 5, k))
            y = jax.tree.map(lambda y, g: y - LR * g, y, g)
    np.testing.assert_allclose(trained.walk.y, learner.schema.flatten(named(y)), rtol=0, atol=1e-13)
    measured = learner.site("north").evaluate(learner.start, {})
    assert measured["loss"] == pytest.approx(float(dropout(X0, EVEN[0])), rel=1e-6)


def named(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

"""What every registered algorithm must satisfy; a new row of the registry is tested by itself."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedscaffold as fs
from fedscaffold.algorithms import ALGORITHMS, travelled
from fedscaffold.conformance import plain
from fedscaffold.conformance.federations import CONDITIONS, brief

EVERY = pytest.mark.parametrize("name", sorted(ALGORITHMS))
SAMPLED = pytest.mark.parametrize("name", sorted(name for name in ALGORITHMS if not ALGORITHMS[name]().everyone))
# A coin is the engine's own, and has an oracle in test_family.py.
PLAIN = pytest.mark.parametrize("name", sorted(name for name in ALGORITHMS if not ALGORITHMS[name]().coin))
# Mime's momentum and FedDyn's second pull along its memory are no gradient descent, and are not meant to be.
DESCENDS = pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"feddyn", "mime"}))
RNG = np.random.default_rng(0)
G, Y, X, C, C_I, MOVE, DIR = RNG.normal(size=(7, 5))
WORLDS = {
    "numpy": np.asarray,
    "jax": lambda a: jnp.asarray(a),
    "torch": lambda a: torch.as_tensor(np.asarray(a)),
}


def one_round(algorithm, g, y, x, c, c_i, move, d):
    """Every function of an algorithm, in the order of a round; the outputs in one list."""
    shift = None if algorithm.shift is None else algorithm.shift(c, c_i)
    along = algorithm.direction(g, y, x, shift)
    kept = None if algorithm.remember is None else algorithm.remember(c, c_i, travelled(x, y, 3, 0.1))
    anchored = None if algorithm.anchor is None else algorithm.anchor(c, g)
    new_x, new_c = algorithm.server(x, c, move, d, 0.4)
    return [a for a in (along, kept, anchored, new_x, new_c) if a is not None]


@EVERY
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_worlds_agree(name, world):
    algorithm = ALGORITHMS[name]()
    expected = one_round(algorithm, G, Y, X, C, C_I, MOVE, DIR)
    with jax.enable_x64(True):
        found = one_round(algorithm, *(WORLDS[world](a) for a in (G, Y, X, C, C_I, MOVE, DIR)))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-12)


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_dtype_and_shape_are_kept_and_inputs_unchanged(name, dtype, world):
    with jax.enable_x64(True):
        given_arrays = [WORLDS[world](a.astype(dtype)) for a in (G, Y, X, C, C_I, MOVE, DIR)]
        before = [np.asarray(a).copy() for a in given_arrays]
        for out in one_round(ALGORITHMS[name](), *given_arrays):
            assert out.shape == (5,)
            assert str(out.dtype).removeprefix("torch.") == dtype
        for a, b in zip(given_arrays, before, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


@EVERY
def test_python_is_jit_is_vmap(name):
    algorithm = ALGORITHMS[name]()
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in (G, Y, X, C, C_I, MOVE, DIR)]
        plain = one_round(algorithm, *arrays)
        jitted = jax.jit(lambda *a: one_round(algorithm, *a))(*arrays)
        mapped = jax.vmap(lambda *a: one_round(algorithm, *a))(*(a[None] for a in arrays))
        for a, b, c in zip(plain, jitted, mapped, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)
            np.testing.assert_allclose(a, c[0], rtol=0, atol=1e-14)


@EVERY
def test_leaf_by_leaf_is_flat(name):
    algorithm = ALGORITHMS[name]()
    flat = one_round(algorithm, G, Y, X, C, C_I, MOVE, DIR)
    parts = [
        one_round(algorithm, *(a[cut] for a in (G, Y, X, C, C_I, MOVE, DIR))) for cut in (slice(0, 2), slice(2, 5))
    ]
    for whole, *pieces in zip(flat, *parts, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(pieces))


@DESCENDS
def test_homogeneous_clients_reduce_to_gradient_descent(name):
    """Equal clients, one local step: every method is x <- x - lr grad f(x)."""
    hessian, linear = np.diag([1.0, 0.3]), np.array([1.0, -2.0])
    problem = fs.problems.quadratic(hessians=[hessian] * 3, linear=[linear] * 3, x0=[2.0, 1.0])
    run = fs.simulate(ALGORITHMS[name](), problem, rounds=9, local_steps=1, lr=0.4, precision="float64")
    x = np.array([2.0, 1.0])
    for _ in range(9):
        x = x - 0.4 * (hessian @ x - linear)
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-13)


@SAMPLED
def test_a_silent_round_changes_nothing(name):
    problem = fs.problems.quadratic(num_clients=3, dim=2, seed=1)
    ask = {"local_steps": 2, "lr": 0.4, "precision": "float64"}
    loud = fs.simulate(ALGORITHMS[name](), problem, rounds=2, cohorts=[[0, 1], [2]], **ask)
    silent = fs.simulate(ALGORITHMS[name](), problem, rounds=4, cohorts=[[0, 1], [], [2], []], **ask)
    np.testing.assert_array_equal(loud.vector, silent.vector)


@EVERY
def test_every_algorithm_learns(name):
    problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.3, seed=3)
    run = fs.simulate(ALGORITHMS[name](), problem, rounds=100, local_steps=3, lr=0.2, metrics=["loss"])
    assert run.history["loss"][-1] < run.history["loss"][0]


@given(st.floats(0.1, 3), st.integers(1, 9), st.floats(0.01, 1))
def test_plain_sgd_travels_its_mean_direction(scale, steps, lr):
    directions = scale * np.random.default_rng(1).normal(size=(steps, 4))
    y = np.ones(4) - lr * directions.sum(axis=0)
    found = travelled(np.ones(4), y, steps, lr)
    # cancellation in x - y costs eps |x| / (steps lr), nothing more
    np.testing.assert_allclose(
        found, directions.mean(axis=0), rtol=1e-12, atol=4e-16 * (1 + np.abs(y).max()) / (steps * lr)
    )


@EVERY
def test_factories_refuse_bad_parameters(name):
    for parameter, default in inspect.signature(ALGORITHMS[name]).parameters.items():
        with pytest.raises(fs.InputError, match=rf"{parameter} must be a .* got -1"):
            ALGORITHMS[name](**{parameter: type(default.default)(-1)})
    assert ALGORITHMS[name]() is ALGORITHMS[name]()


@EVERY
def test_names_are_those_of_the_registry(name):
    assert ALGORITHMS[name]().name == name


@PLAIN
def test_the_compiled_engine_is_the_plain_one(name):
    """JAX = NumPy on a whole run: sampling, weights, unequal steps, a round without replies."""
    algorithm = ALGORITHMS[name]()
    case = brief(CONDITIONS["all" if algorithm.everyone else "sampling"].case, rounds=12)
    if not algorithm.everyone:
        steps = tuple(1 + i % 3 for i in range(case.num_clients))
        weights = np.arange(1.0, 1 + case.num_clients)
        case = case._replace(
            local_steps=steps,
            lr=case.lr[:1] * 3,
            weights=weights / weights.sum(),
            cohorts=(*case.cohorts[:5], (), *case.cohorts[6:]),
        )
    problem = fs.problems.quadratic(hessians=case.hessians, linear=case.linear, x0=case.x0)
    run = fs.simulate(
        algorithm,
        problem,
        rounds=case.rounds,
        local_steps=list(case.local_steps),
        lr=case.lr[0],
        cohorts=case.cohorts,
        weights=case.weights,
        precision="float64",
    )
    trace = plain.run(algorithm, case)
    np.testing.assert_allclose(run.vector, trace.x[-1], rtol=0, atol=1e-12 * (1 + np.abs(trace.x).max()))
    if run.clients.c_i is not None:
        np.testing.assert_allclose(run.clients.c_i, trace.c_i[-1], rtol=0, atol=1e-11 * (1 + np.abs(trace.c_i).max()))

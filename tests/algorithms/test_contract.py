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
from fedscaffold.algorithms.reference import Federation, begin, descend, play
from fedscaffold.algorithms.round import exchange, needs, reply_of, work_of
from fedscaffold.conformance import reference_target
from fedscaffold.conformance.federations import CONDITIONS, brief

EVERY = pytest.mark.parametrize("name", sorted(ALGORITHMS))
# A coin is the engine's own, and has an oracle in algorithms/test_family.py.
PLAIN = pytest.mark.parametrize(
    "name", sorted(n for n in ALGORITHMS if not work_of(ALGORITHMS[n](), 1).geometric)
)
# Momentum, amplified moves and FedDyn's second pull along its memory are no gradient descent, and not meant to be.
DESCENDS = pytest.mark.parametrize(
    "name",
    sorted(
        set(ALGORITHMS)
        - {"amplified-scaffold", "feddyn", "fedavg-m", "mime", "scafcom", "scaffold-m"}
    ),
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=5)
SLOPES, PULLS = RNG.uniform(0.2, 1.0, size=(2, 5)), RNG.normal(size=(2, 5))
GIVEN = (X, *SLOPES, *PULLS)
WORLDS = {
    "numpy": np.asarray,
    "jax": lambda a: jnp.asarray(a),
    "torch": lambda a: torch.as_tensor(np.asarray(a)),
}


def leaves(*records):
    """All vectors and numbers of records; a vector by itself is one."""
    records = [
        record if isinstance(record, tuple) else (record,)
        for record in records
        if record is not None
    ]
    return [value for record in records for value in record]


def federation(algorithm, slopes, pulls):
    """Two clients whose gradients are elementwise, so that layers can be run apart."""

    def gradient(i, y):
        return slopes[i] * y - pulls[i]

    def steps(i, start, x, shift):
        return descend(algorithm, lambda y: gradient(i, y), start, x, shift, lrs=[0.1, 0.1, 0.1])

    return Federation([0.4, 0.6], steps, gradient)


def begun(algorithm, x, *given):
    """The state after a round of both clients."""
    return play(
        algorithm, begin(algorithm, x, 2), federation(algorithm, given[:2], given[2:]), [0, 1]
    )


def one_round(algorithm, x, *given, state=None):
    """Every function of an algorithm, in a second round of the first client; what comes out, in one list."""
    clients = federation(algorithm, given[:2], given[2:])
    state = begun(algorithm, x, *given) if state is None else state
    server, memory, own = state.server, state.memory[0], state.own[0]
    server = (
        server
        if algorithm.prepare is None
        else algorithm.prepare(server, clients.gradient(1, server.x))
    )
    shift = algorithm.shift(server, memory)
    walk = clients.descend(0, algorithm.start(server.x, own), server.x, shift)
    message, kept = reply_of(algorithm, walk, shift, own)
    after = play(algorithm, state, clients, [0])
    out = leaves(server, message, kept, after.server, *after.memory, *after.own)
    out += leaves(shift)
    out += leaves(
        None if algorithm.renew is None else algorithm.renew(memory, clients.gradient(0, x))
    )
    return out


def numbers(out):
    return [np.asarray(value) for value in out]


@pytest.mark.process
@EVERY
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_worlds_agree(name, world):
    algorithm = ALGORITHMS[name]()
    expected = one_round(algorithm, *GIVEN)
    with jax.enable_x64(True):
        found = one_round(algorithm, *(WORLDS[world](a) for a in GIVEN))
        for a, b in zip(numbers(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.process
@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_dtype_and_shape_are_kept_and_inputs_unchanged(name, dtype, world):
    with jax.enable_x64(True):
        given_arrays = [WORLDS[world](a.astype(dtype)) for a in GIVEN]
        state = begun(ALGORITHMS[name](), *given_arrays)
        given_arrays += leaves(state.server, *state.memory, *state.own)
        before = [np.asarray(a).copy() for a in given_arrays]
        found = one_round(ALGORITHMS[name](), *given_arrays[: len(GIVEN)], state=state)
        vectors = [out for out in found if np.ndim(out)]
        assert len(vectors) > 2
        for out in vectors:
            assert out.shape == (5,)
            assert str(out.dtype).removeprefix("torch.") == dtype
        for a, b in zip(given_arrays, before, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.process
@EVERY
def test_python_is_jit_is_vmap(name):
    algorithm = ALGORITHMS[name]()
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in GIVEN]
        plain = one_round(algorithm, *arrays)
        jitted = jax.jit(lambda *a: one_round(algorithm, *a))(*arrays)
        mapped = jax.vmap(lambda *a: one_round(algorithm, *a))(*(a[None] for a in arrays))
        for a, b, c in zip(plain, jitted, mapped, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
            np.testing.assert_allclose(a, c[0] if np.ndim(c) else c, rtol=0, atol=1e-13)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", sorted(name for name, make in ALGORITHMS.items() if not exchange(make()).sums)
)
def test_leaf_by_leaf_is_flat(name):
    algorithm = ALGORITHMS[name]()
    flat = one_round(algorithm, *GIVEN)
    parts = [one_round(algorithm, *(a[cut] for a in GIVEN)) for cut in (slice(0, 2), slice(2, 5))]
    for whole, *pieces in zip(flat, *parts, strict=True):
        np.testing.assert_array_equal(
            whole, np.concatenate(pieces) if np.ndim(whole) else pieces[0]
        )


@EVERY
def test_what_is_exchanged_is_found_without_arrays(name):
    algorithm = ALGORITHMS[name]()
    known = exchange(algorithm)
    assert {*known.vectors, *known.travel, *known.numbers} == set(known.record._fields)
    assert set(known.sent(plain=True)) <= set(known.sent(plain=False)) == set(known.vectors)
    assert known.reads <= {"x", "y", "move", "travel", "d", "gradient", "own"}
    assert set(known.down) < set(algorithm.init(0.0)._fields)
    for field, of in algorithm.means:
        assert field in algorithm.init(0.0)._fields
        assert of in algorithm.memory(0.0)._fields
    for field, reference in algorithm.references:
        assert field in known.vectors
        assert np.isfinite(reference(algorithm.init(0.5)))


@pytest.mark.process
@EVERY
def test_every_mean_is_kept_in_the_reference_driver(name):
    """server.<field> = sum p_i memory.<field> under sampling, weights, unequal steps and lost replies."""
    algorithm, rng = ALGORITHMS[name](), np.random.default_rng(5)
    n, dim = 5, 3
    p = rng.uniform(0.5, 2.0, n)
    p = (p / p.sum()).tolist()
    roots, pulls = rng.normal(size=(n, dim, dim)) / 2, rng.normal(size=(n, dim))
    hessians = roots @ roots.transpose(0, 2, 1) + 0.2 * np.eye(dim)
    counts = [
        work_of(algorithm, 4 if needs(algorithm, "equal steps") else 1 + i).steps for i in range(n)
    ]

    def gradient(i, y):
        return hessians[i] @ y - pulls[i]

    def steps(i, start, x, shift):
        return descend(algorithm, lambda y: gradient(i, y), start, x, shift, lrs=[0.1] * counts[i])

    state = begin(algorithm, rng.normal(size=dim), n)
    for r in range(30):
        cohort = (
            list(range(n))
            if needs(algorithm, "everyone")
            else rng.permutation(n)[: 1 + r % n].tolist()
        )
        heard = (
            cohort if needs(algorithm, "everyone") else cohort[: len(cohort) - r % 2]
        )  # none at all, now and then
        state = play(algorithm, state, Federation(p, steps, gradient), cohort, heard)
        for field, of in algorithm.means:
            held = [getattr(one, of) for one in state.memory]
            mean = sum(share * one for share, one in zip(p, held, strict=True))
            bound = 1e-13 * (1 + np.abs(held).max())
            np.testing.assert_allclose(getattr(state.server, field), mean, rtol=0, atol=bound)
    assert state.round == 30
    assert bool(algorithm.means) == algorithm.has_memory


@DESCENDS
def test_homogeneous_clients_reduce_to_gradient_descent(name):
    """Equal clients, one local step: every method is x <- x - lr grad f(x)."""
    hessian, linear = np.diag([1.0, 0.3]), np.array([1.0, -2.0])
    problem = fs.problems.quadratic(hessians=[hessian] * 3, linear=[linear] * 3, x0=[2.0, 1.0])
    run = fs.simulate(
        ALGORITHMS[name](),
        problem,
        rounds=9,
        local_steps=1,
        lr=0.4,
        precision="float64",
        metrics=(),
    )
    x = np.array([2.0, 1.0])
    for _ in range(9):
        x = x - 0.4 * (hessian @ x - linear)
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-13)


# compiled, each is the plain loop (above) and ends where theory says (tests/algorithms/test_family.py)
@pytest.mark.soak
@EVERY
def test_every_algorithm_learns(name):
    problem = fs.problems.quadratic(num_clients=4, dim=3, mu=0.3, seed=3)
    run = fs.simulate(
        ALGORITHMS[name](), problem, rounds=100, local_steps=3, lr=0.2, metrics=["loss"]
    )
    assert run.history["loss"][-1] < run.history["loss"][0]


@given(st.floats(0.1, 3), st.integers(1, 9), st.floats(0.01, 1))
def test_plain_sgd_travels_its_mean_direction(scale, steps, lr):
    directions = scale * np.random.default_rng(1).normal(size=(steps, 4))
    y = np.ones(4) - lr * directions.sum(axis=0)
    found = travelled(np.ones(4), y, steps, lr)
    # cancellation in x - y costs eps |x| / (steps lr), nothing more
    np.testing.assert_allclose(
        found,
        directions.mean(axis=0),
        rtol=1e-12,
        atol=4e-16 * (1 + np.abs(y).max()) / (steps * lr),
    )


@EVERY
def test_factories_refuse_bad_parameters(name):
    for parameter, default in inspect.signature(ALGORITHMS[name]).parameters.items():
        wrong = (-1,) if default.default == () else type(default.default)(-1)
        with pytest.raises(fs.InputError, match=rf"{parameter} must be a .* got -1"):
            ALGORITHMS[name](**{parameter: wrong})
    assert ALGORITHMS[name]() is ALGORITHMS[name]()


@EVERY
def test_names_are_those_of_the_registry(name):
    assert ALGORITHMS[name]().name == name


@PLAIN
def test_the_compiled_engine_is_the_plain_one_and_a_silent_round_changes_nothing(name):
    """JAX = NumPy on a whole run: sampling, weights, unequal steps; a round without replies leaves all bits."""
    algorithm = ALGORITHMS[name]()
    case = brief(CONDITIONS["all" if needs(algorithm, "everyone") else "sampling"].case, rounds=12)
    if not needs(algorithm, "everyone"):
        steps = tuple(1 + i % 3 for i in range(case.num_clients))
        weights = np.arange(1.0, 1 + case.num_clients)
        case = case._replace(
            local_steps=steps,
            lr=case.lr[:1] * 3,
            weights=weights / weights.sum(),
            cohorts=(*case.cohorts[:5], (), *case.cohorts[6:]),
        )
    problem = fs.problems.quadratic(hessians=case.hessians, linear=case.linear, x0=case.x0)

    def simulated(cohorts):
        return fs.simulate(
            algorithm,
            problem,
            rounds=len(cohorts),
            local_steps=list(case.local_steps),
            lr=case.lr[0],
            cohorts=cohorts,
            weights=case.weights,
            precision="float64",
            metrics=(),
        )

    run = simulated(case.cohorts)
    if not needs(algorithm, "everyone"):
        loud = simulated([cohort for cohort in case.cohorts if cohort])
        np.testing.assert_array_equal(loud.vector, run.vector)
    trace = reference_target.run(algorithm, case)
    np.testing.assert_allclose(
        run.vector, trace.x[-1], rtol=0, atol=1e-12 * (1 + np.abs(trace.x).max())
    )
    if run.clients.c_i is not None:
        for found, held in ((run.clients.c_i, trace.c_i), (run.server.c, trace.c)):
            np.testing.assert_allclose(
                found, held[-1], rtol=0, atol=1e-11 * (1 + np.abs(held).max())
            )


@EVERY
def test_who_reads_the_travel_says_that_it_needs_sgd(name):
    """The sum of step sizes says how far SGD goes, and nothing of an optimiser."""
    algorithm = ALGORITHMS[name]()
    if "travel" in exchange(algorithm).reads:
        assert needs(algorithm, "sgd") or needs(algorithm, "plain sgd")

"""What may be added to a method, each against an oracle, and the gauge: policies, compression, optimisers, availability."""

import family_oracles as oracles
import jax
import numpy as np
import optax
import pytest
from family_case import HESSIANS, LINEAR, OPTIMUM, PROBLEM, RNG, X0, D, N, close, grad, run

import fedscaffold as fs
from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.simulation import compression

# What may be added: stale policies


def replayed(cohorts, *, policy, value, rounds_gone=0):
    """SCAFFOLD on NumPy with a policy applied to every c_i and to c alike, one client after the other."""
    x, c, c_i, heard_at = X0.copy(), np.zeros(D), np.zeros((N, D)), np.zeros(N, int)
    for r, cohort in enumerate(cohorts):
        if policy == "decay":
            c, c_i = value * c, value * c_i
        if policy == "drop":
            for i in range(N):
                if heard_at[i] and r - heard_at[i] >= value and np.any(c_i[i]):
                    c, c_i[i] = c - c_i[i] / N, 0
        new_c, moves = c.copy(), []
        for i in cohort:
            held = c_i[i]
            if policy == "refresh" and r - heard_at[i] >= value:
                held = grad(i, x)
            y, seen = x.copy(), []
            for _ in range(4):
                seen.append(grad(i, y))
                y = y - 0.15 * (seen[-1] - held + c)
            fresh = np.mean(seen, axis=0)
            new_c = new_c + (fresh - c_i[i]) / N
            c_i[i] = fresh
            moves.append(y - x)
            heard_at[i] = r + 1
        x, c = x + np.mean(moves, axis=0), new_c
    return x, c, c_i, len(cohorts) - heard_at


@pytest.mark.parametrize(
    ("policy", "value"), [("decay", 0.8), ("drop", 3), ("refresh", 2), ("keep", 0)]
)
def test_policies_do_to_c_what_they_do_to_the_c_i(policy, value):
    cohorts = [sorted(RNG.choice(N, 2, replace=False).tolist()) for _ in range(40)]
    x, c, c_i, age = replayed(cohorts, policy=policy, value=value)
    stale = policy if policy == "keep" else f"{policy}:{value}"
    found = run(
        fs.scaffold(),
        rounds=40,
        local_steps=4,
        lr=0.15,
        cohorts=cohorts,
        stale=stale,
        metrics=["age", "distance"],
    )
    close(found.vector, x)
    close(found.server.c, c)
    close(found.clients.c_i, c_i)
    np.testing.assert_array_equal(found.clients.age, age)
    assert found.history["age"][-1] == pytest.approx(age.mean())
    assert (policy == "refresh") == bool((found.history["bytes_up"] > 2 * D * 8).any())


def test_the_mean_age_is_n_over_s_minus_one():
    found = run(fs.scaffold(), rounds=4000, cohort=2, local_steps=1, metrics=["age"])
    ages = found.history["age"][200:]
    # rounds are correlated over about N/S of them
    error = ages.std() * np.sqrt(2 * (N / 2) / len(ages))
    assert abs(ages.mean() - (N / 2 - 1)) < 4 * error


# What may be added: compression


def decodes(compressor):
    """What a vector becomes under each of many keys, compiled as one program."""
    return jax.jit(jax.vmap(compressor.decoded, in_axes=(None, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["top_k:0.25", "random_k:0.3", "quantise:1", "quantise:4"])
def test_compressors_contract(text):
    many = decodes(compression.of(text))
    for seed in range(3):
        v = np.random.default_rng(seed).standard_cauchy(200)
        keys = jax.random.split(jax.random.key(seed), 400)
        with jax.enable_x64(True):
            seen = many(v, keys)
        assert np.mean(np.sum((np.asarray(seen) - v) ** 2, axis=1)) < np.sum(v**2)


@pytest.mark.slow
def test_quantisation_is_unbiased_but_for_its_factor():
    v = RNG.normal(size=100)
    keys = jax.random.split(jax.random.key(0), 4000)
    with jax.enable_x64(True):
        seen = np.asarray(decodes(compression.quantise(3))(v, keys))
    factor = 1 / (1 + 64 / 49)
    error = seen.std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(seen.mean(axis=0) - factor * v) < 5 * error + 1e-12).all()


def largest(v, count):
    kept = np.zeros_like(v)
    chosen = np.argsort(-np.abs(v))[:count]
    kept[chosen] = v[chosen]
    return kept


def test_a_compressed_direction_is_what_both_sides_see():
    """EF21 (Richtarik et al. 2021): the client sends C(mean gradient - c_i), and both sides add it to c_i."""
    cohorts = [sorted(RNG.choice(N, 4, replace=False).tolist()) for _ in range(30)]
    x, c, c_i = X0.copy(), np.zeros(D), np.zeros((N, D))
    for cohort in cohorts:
        sent = {}
        for i in cohort:
            y, seen = x.copy(), []
            for _ in range(5):
                seen.append(grad(i, y))
                y = y - 0.05 * (seen[-1] - c_i[i] + c)
            sent[i] = largest(np.mean(seen, axis=0) - c_i[i], 2)
        x = x - 5 * 0.05 * (c + np.mean(list(sent.values()), axis=0))
        c = c + sum(sent.values()) / N
        for i in cohort:
            c_i[i] += sent[i]
    found = run(fs.scaffold(), rounds=30, lr=0.05, cohorts=cohorts, compression="top_k:0.6")
    close(found.vector, x)
    close(found.server.c, c)
    close(found.clients.c_i, c_i)
    assert (found.history["bytes_up"] == 4 * 2 * (8 + 4)).all()


def test_a_compressed_move_is_sent_in_full_in_the_end():
    """Error feedback: what is left out of x - y is added to the next one."""
    x, left = X0.copy(), np.zeros((N, D))
    for _ in range(30):
        sent = []
        for i in range(N):
            y = x.copy()
            for _ in range(5):
                y = y - 0.05 * grad(i, y)
            message = x - y + left[i]
            sent.append(largest(message, 2))
            left[i] = message - sent[-1]
        x = x - np.mean(sent, axis=0)
    close(run(fs.fedavg(), rounds=30, lr=0.05, compression="top_k:0.6").vector, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scaffold", "top_k:0.5"),
        ("scaffold", "quantise:4"),
        ("scaffold-xi", "random_k:0.5"),
        ("fedavg", "top_k:0.5"),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in [
                ("scaffold", "random_k:0.5"),
                ("scaffold-xi", "top_k:0.5"),
                ("scaffold-xi", "quantise:4"),
                ("fedavg", "random_k:0.5"),
                ("fedavg", "quantise:4"),
            ]
        ),
    ],
)
def test_compression_with_error_feedback_ends_where_the_method_ends(name, text):
    algorithm = ALGORITHMS[name]()
    found = run(algorithm, rounds=6000, lr=0.02, compression=text)
    off = fs.theory.bias(PROBLEM, lr=0.02, local_steps=5, algorithm=algorithm)
    if name == "fedavg" and not text.startswith("top"):
        # its messages do not vanish at its limit, so neither does the noise of a random compressor: its mean is right
        assert np.linalg.norm(found.vector - OPTIMUM - off) < 0.2
        return
    np.testing.assert_allclose(
        found.vector - OPTIMUM, off, rtol=0, atol=1e-6 if name != "fedavg" else 0.2
    )


# What may be added: server optimisers


SERVERS = {
    "momentum": (optax.sgd(0.7, momentum=0.6), oracles.momentum(0.6), 0.7),
    "nesterov": (
        optax.sgd(0.7, momentum=0.6, nesterov=True),
        oracles.momentum(0.6, nesterov=True),
        0.7,
    ),
    "adam": (optax.adam(0.1, b2=0.99, eps=1e-3), oracles.adam(b2=0.99, eps=1e-3), 0.1),
    "yogi": (optax.yogi(0.1, b2=0.99), oracles.yogi(b2=0.99), 0.1),
    "adagrad": (optax.adagrad(0.3), oracles.adagrad(), 0.3),
}


@pytest.mark.parametrize("name", SERVERS)
def test_server_optimisers_take_the_move_for_a_gradient(name):
    ours, by_hand, server_lr = SERVERS[name]
    cohorts = [sorted(RNG.choice(N, 3, replace=False).tolist()) for _ in range(12)]
    expected = oracles.fedopt(HESSIANS, LINEAR, X0, 0.2, 5, cohorts, by_hand, server_lr)[-1]
    found = run(fs.fedavg(), rounds=12, cohorts=cohorts, server_optimizer=ours).vector
    # optax raises its decay rates to a power in single precision
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_server_optimiser_that_does_nothing_changes_nothing():
    plain, wrapped = (
        run(fs.scaffold(), cohort=3),
        run(fs.scaffold(), cohort=3, server_optimizer=optax.sgd(1.0)),
    )
    close(wrapped.vector, plain.vector)
    close(wrapped.clients.c_i, plain.clients.c_i)


# The gauge, whatever is added

ADDED = {
    "decay": {"stale": "decay:0.9"},
    "drop": {"stale": "drop:4"},
    "refresh": {"stale": "refresh:3"},
    "top_k": {"compression": "top_k:0.3"},
    "random_k": {"compression": "random_k:0.3"},
    "quantise": {"compression": "quantise:2"},
    "server momentum": {"server_optimizer": optax.sgd(0.5, momentum=0.8)},
    "nesterov": {"server_optimizer": optax.sgd(0.5, momentum=0.8, nesterov=True)},
    "server adam": {"server_optimizer": optax.adam(0.01)},
    "server yogi": {"server_optimizer": optax.yogi(0.01)},
    "server adagrad": {"server_optimizer": optax.adagrad(0.01)},
    "local momentum": {"lr": None, "local_optimizer": optax.sgd(0.02, momentum=0.9)},
    "local adam": {"lr": None, "local_optimizer": optax.adam(0.003)},
    "all at once": {
        "lr": None,
        "local_optimizer": optax.sgd(0.01, momentum=0.9),
        "server_optimizer": optax.sgd(0.3, momentum=0.8),
        "compression": "top_k:0.5",
        "stale": "drop:5",
    },
}


# fewer rounds of the first are in tests/simulation/test_gauge.py, and "all at once" has them together; the others are
# optimisers of x, which c does not see: one of them, "server adam", does
SHORTER = {"decay", "drop", "refresh", "top_k", "server momentum"}
SHORTER |= {"nesterov", "server yogi", "server adagrad", "local adam"}
GAUGED = [("scaffold", what) for what in ADDED]
GAUGED += [("option I", what) for what in ("refresh", "top_k", "server momentum", "all at once")]
GAUGED += [("feddyn", what) for what in ("decay", "drop", "server adam", "local momentum")]
GAUGED = [
    pytest.param(name, what, marks=pytest.mark.soak if what in SHORTER else ())
    for name, what in GAUGED
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), GAUGED)
def test_the_residual_stays_at_rounding_for_a_thousand_rounds(name, what):
    algorithm = fs.scaffold(option=1) if name == "option I" else ALGORITHMS[name]()
    found = run(algorithm, **{"rounds": 1000, "lr": 0.02, "cohort": 3, **ADDED[what]})
    assert found.rounds == 1000
    # each round adds the rounding of numbers of the size of the c_i, at worst all in one direction
    assert found.residual <= 1000 * 2.3e-16 * max(found.scale, 1.0) * np.sqrt(D)
    assert np.abs(found.history["residual"]).max() <= 1000 * 2.3e-16 * max(
        found.scale, 1.0
    ) * np.sqrt(D)


# Availability


def test_cohorts_are_drawn_among_those_who_can_be_reached():
    trace = np.zeros((3, N), int)
    trace[0, :3], trace[1, 2:5] = 1, 1
    found = run(fs.scaffold(), rounds=30, cohort=2, availability=trace, metrics=["age", "distance"])
    assert found.history["bytes_up"].tolist()[:3] == [2 * D * 8, 2 * D * 8, 0]
    assert found.clients.age[5] == 30
    assert not found.clients.c_i[5].any()
    assert (found.clients.age[:5] < 30).all()


@pytest.mark.slow
def test_scaffold_ends_at_the_optimum_however_unequal_the_availability():
    trace = np.ones((12, N), int)
    trace[1:, 0] = 0
    trace[::2, 1:4] = 0
    found = run(fs.scaffold(), rounds=4000, lr=0.1, cohort=4, availability=trace)
    np.testing.assert_allclose(found.vector, OPTIMUM, rtol=0, atol=1e-9)


# What is refused, with the reason


REFUSED = [
    (
        {"algorithm": fs.scaffnew(), "cohort": 0.5},
        "scaffnew is right only when all clients take part",
    ),
    (
        {"algorithm": fs.scaffold_xi(), "cohorts": [[0, 1]] * 30},
        "scaffold-xi is right only when all clients",
    ),
    (
        {"algorithm": fs.scaffold_xi(), "availability": np.ones((1, N))},
        "scaffold-xi is right only when all",
    ),
    (
        {"algorithm": fs.scaffnew(), "lr": None, "local_optimizer": optax.adam(0.1)},
        "displacement form",
    ),
    ({"algorithm": fs.scaffnew(), "lr": lambda k: 0.1}, "displacement form"),
    ({"algorithm": fs.scaffnew(), "local_steps": [1, 2] * 3}, "one number of local steps"),
    (
        {"algorithm": fs.fednova(), "lr": None, "local_optimizer": optax.adam(0.1)},
        "how far an optimizer does",
    ),
    ({"algorithm": fs.dane(), "compression": "top_k:0.1"}, "no error feedback"),
    ({"algorithm": fs.feddyn(), "compression": "top_k:0.1"}, "would count twice"),
    (
        {"algorithm": fs.scaffold()._replace(references=()), "compression": "top_k:0.1"},
        "scaffold's clients remember d, .* count twice, .* references=",
    ),
    ({"algorithm": fs.fedavg(), "stale": "decay:0.9"}, "keeps no control variates"),
    ({"algorithm": fs.scaffold_xi(), "stale": "drop:3"}, "hears all clients"),
    ({"algorithm": fs.feddyn(), "stale": "refresh:3", "cohort": 3}, "does not remember gradients"),
    ({"stale": "forget"}, "unknown stale policy 'forget'"),
    ({"stale": "drop"}, "drop needs a number, such as drop:10"),
    ({"stale": "decay:2"}, "rate must be a number between 0 and 1"),
    ({"compression": "top_k:3"}, "share must be a number above 0 and at most 1"),
    ({"compression": "quantise:0"}, "bits must be a whole number"),
    ({"compression": "zip"}, "unknown compression 'zip'"),
    ({"server_optimizer": "adam"}, "server_optimizer must be an optax transformation"),
    ({"availability": np.ones((2, 3))}, f"availability must be rows of {N} zeros and ones"),
    ({"availability": np.zeros((2, N))}, "somebody"),
    ({"availability": np.ones((2, N)), "cohorts": [[0]] * 30}, "either availability or cohorts"),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_wrong_combinations_are_refused_with_the_reason(ask, words):
    ask = {"algorithm": fs.scaffold(), **ask}
    with pytest.raises(fs.InputError, match=words) as refusal:
        run(**ask)
    assert "\n" not in str(refusal.value)


def test_batch_statistics_are_refused():
    params = {"dense": np.ones(2), "norm": {"running_mean": np.zeros(2)}}
    problem = fs.Problem(
        lambda p, b: (p["dense"] @ p["dense"]) * b.mean(), params, [np.ones(3)] * 2
    )
    with pytest.raises(fs.InputError, match="batch statistics"):
        fs.simulate(fs.scaffold(), problem, rounds=1, local_steps=1, lr=0.1)

"""Cohorts by a function or by weights, availability by a function."""

from itertools import count, permutations

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.simulation.participation import sample_by_weight

N = 6
PROBLEM = fs.problems.quadratic(num_clients=N, dim=3, mu=0.1, seed=0)
ASK = {"local_steps": 3, "lr": 0.3, "precision": "float64", "x0": np.array([1.0, -2.0, 0.5])}
ASK["metrics"] = ("distance",)
TURNS = count()
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def cohorts_of(rounds, **ask):
    """The cohorts as a callback sees them."""
    seen = {}

    def note(look):
        seen.update({int(r): look.cohort(int(r)).tolist() for r in look.columns["round"]})

    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=rounds, callbacks=[note], **ASK, **ask)
    return run, [seen[r] for r in range(1, rounds + 1)]


def some(round, rng):
    """One to three clients, drawn from the round's own stream."""
    return rng.choice(N, 1 + round % 3, replace=False)


@pytest.mark.slow
def test_a_function_names_the_cohorts_and_a_list_of_them_is_the_same_run():
    run, cohorts = cohorts_of(8, sampling=some, cohort=3, seed=4)
    assert [len(cohort) for cohort in cohorts] == [1 + round % 3 for round in range(1, 9)]
    listed = fs.simulate(fs.scaffold(), PROBLEM, rounds=8, cohorts=cohorts, seed=4, **ASK)
    np.testing.assert_allclose(run.vector, listed.vector, rtol=0, atol=1e-14)
    assert run.history["bytes_up"].tolist() == listed.history["bytes_up"].tolist()


@pytest.mark.slow
def test_the_stream_of_a_round_depends_on_seed_and_round_only(tmp_path):
    ask = {"sampling": some, "cohort": 3, **ASK}
    whole = fs.simulate(fs.scaffold(), PROBLEM, rounds=9, **ask)
    simulator = fs.Simulator(fs.scaffold(), PROBLEM, **ask)
    state = simulator.init()
    for rounds in (1, 1, 5, 2):
        state, _ = simulator.step(state, rounds)
    np.testing.assert_array_equal(np.asarray(state.x), whole.vector)
    fs.simulate(fs.scaffold(), PROBLEM, rounds=4, checkpoint=tmp_path, **ask)
    assert (
        fs.simulate(fs.scaffold(), PROBLEM, rounds=9, checkpoint=tmp_path, **ask).digest
        == whole.digest
    )
    swept = fs.sweep(fs.scaffold(), PROBLEM, rounds=9, seeds=[1, 0], **ask)
    np.testing.assert_array_equal(swept.runs[0][1].vector, whole.vector)
    assert swept.runs[0][0].digest != whole.digest
    _, first = cohorts_of(3, sampling=some, cohort=3, seed=0)
    _, other = cohorts_of(3, sampling=some, cohort=3, seed=1)
    assert first != other


@pytest.mark.slow
def test_out_of_core_cohorts_are_the_same():
    ask = {"sampling": some, "cohort": 3, **ASK}
    here = fs.simulate(fs.scaffold(), PROBLEM, rounds=6, **ask)
    away = fs.simulate(fs.scaffold(), PROBLEM, rounds=6, client_state="sparse", **ask)
    np.testing.assert_allclose(away.vector, here.vector, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "draw",
    [
        {"sampling": WEIGHTS},
        {"sampling": some},
        {"availability": lambda round: np.arange(N) % 2 == round % 2},
    ],
)
@pytest.mark.parametrize("weights", ["equal", [3, 1, 1, 2, 1, 1]])
def test_c_stays_the_mean_of_the_c_i_and_scaffold_ends_at_the_optimum(draw, weights):
    """However cohorts are drawn, as long as everybody comes at times; FedAvg ends elsewhere."""
    ask = {"rounds": 600, "cohort": 3, "weights": weights, **draw, **ASK}
    run = fs.simulate(fs.scaffold(), PROBLEM, **ask)
    assert run.residual < 1e-13
    p = np.ones(N) / N if weights == "equal" else np.array(weights) / np.sum(weights)
    np.testing.assert_allclose(run.server.c, p @ run.clients.c_i, rtol=0, atol=1e-13)
    assert run.history["distance"][-1] < 1e-9
    assert fs.simulate(fs.fedavg(), PROBLEM, **ask).history["distance"][-1] > 1e-2


def test_weights_are_those_of_successive_draws():
    """Cohorts' frequencies against the exact probabilities of drawing one after the other."""
    weights, size, draws = np.array([1.0, 2.0, 4.0, 0.0]), 2, 20_000
    rng = np.random.default_rng(0)
    seen = {}
    for _ in range(draws):
        pair = tuple(sample_by_weight(weights, np.arange(4), size, rng).tolist())
        seen[pair] = seen.get(pair, 0) + 1
    exact = {}
    for a, b in permutations(range(3), 2):
        pair = tuple(sorted((a, b)))
        chance = weights[a] / weights.sum() * weights[b] / (weights.sum() - weights[a])
        exact[pair] = exact.get(pair, 0) + chance
    assert set(seen) == set(exact)
    for pair, chance in exact.items():
        assert abs(seen[pair] / draws - chance) < 5 * np.sqrt(chance * (1 - chance) / draws)


def test_availability_by_a_function_is_availability_by_rows():
    rows = np.array([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    ask = {"rounds": 7, "cohort": 2, **ASK}
    listed = fs.simulate(fs.scaffold(), PROBLEM, availability=rows, **ask)
    called = fs.simulate(
        fs.scaffold(), PROBLEM, availability=lambda round: rows[(round - 1) % 3], **ask
    )
    assert called.digest == listed.digest
    assert called.history["bytes_up"].tolist() == listed.history["bytes_up"].tolist()
    _, cohorts = cohorts_of(
        6, availability=lambda round: rows[(round - 1) % 3], sampling=WEIGHTS, cohort=2
    )
    for r, cohort in enumerate(cohorts):
        assert rows[r % 3][cohort].all()
        assert len(cohort) == min(2, rows[r % 3].sum())


def test_weights_of_everybody_are_everybody():
    one, other = (
        fs.simulate(fs.scaffold_xi(), PROBLEM, rounds=3, **ASK, **how)
        for how in ({}, {"sampling": WEIGHTS})
    )
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            {"sampling": lambda round, rng: [0, 0]},
            r"clients 0 to 5, each once, got \[0, 0\] in round 1",
        ),
        ({"sampling": lambda round, rng: [round + 3]}, r"each once, got \[6\] in round 3"),
        ({"sampling": lambda round, rng: [0.5]}, r"each once, got \[0.5\] in round 1"),
        ({"sampling": lambda round, rng: None}, "each once, got None in round 1"),
        (
            {"sampling": lambda round, rng: range(3)},
            "at most as many clients as cohort says, 2, got 3 in round 1",
        ),
        ({"sampling": lambda round, rng: [next(TURNS) % N]}, "depend on round and rng only"),
        ({"sampling": "weighted"}, "must be 'uniform', one weight for each client, or a function"),
        ({"sampling": [1.0, 2.0]}, "one weight for each of the 6 clients"),
        ({"sampling": [1.0, -1, 1, 1, 1, 1]}, "finite and not negative"),
        ({"sampling": [1.0, 0, 0, 0, 0, 0]}, "cohorts of 2 among clients of weight above 0, got 1"),
        (
            {"sampling": some, "cohort": 1.0, "cohorts": [[0]] * 9},
            "either sampling or cohorts",
        ),
        ({"cohort": 2, "cohorts": [[0]] * 9}, "either cohort or cohorts"),
        ({"cohort": 0.5, "cohorts": [[0]] * 9}, "either cohort or cohorts"),
        ({"sampling": some, "availability": np.ones((1, N))}, "either availability or a function"),
        (
            {"availability": lambda round: [1, 0]},
            r"return 6 zeros and ones, got \[1, 0\] for round 1",
        ),
        ({"availability": lambda round: [2 if round == 4 else 1] * N}, "for round 4"),
    ],
)
def test_what_is_no_cohort_is_refused_in_a_line_that_names_the_round(ask, said):
    with pytest.raises(fs.InputError, match=said):
        fs.simulate(fs.scaffold(), PROBLEM, **ASK | {"rounds": 9, "cohort": 2} | ask)


def test_algorithms_that_need_everybody_refuse_a_function():
    with pytest.raises(fs.InputError, match="scaffold-xi"):
        fs.simulate(
            fs.scaffold_xi(), PROBLEM, rounds=2, sampling=lambda round, rng: range(N), **ASK
        )

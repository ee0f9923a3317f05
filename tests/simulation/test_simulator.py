"""Round by round: `Simulator` gives the bits of `simulate`, and its states are values."""

import jax
import numpy as np
import pytest

import fedscaffold as fs

NOISY = fs.problems.quadratic(num_clients=10, dim=6, mu=0.05, noise=0.01, seed=0)
RECORDS = fs.problems.two_datasets("logistic", 8, records=20)
CASES = {
    "sampling": (fs.scaffold(), NOISY, {"lr": 0.1, "cohort": 4}),
    "batches in double precision": (
        fs.scaffold_m(),
        RECORDS,
        {"lr": 0.1, "batch_size": 5, "precision": "float64"},
    ),
    "renewed control variates": (
        fs.scaffold(),
        NOISY,
        {"lr": 0.1, "cohort": 2, "stale": "refresh:3"},
    ),
    "personal models": (fs.ditto(), NOISY, {"lr": 0.1, "cohort": 3, "evaluate_every": 4}),
    "a schedule of cohorts": (
        fs.fedavg(),
        NOISY,
        {"lr": 0.1, "cohorts": [[0, 1], [], [2, 5, 7]] * 8},
    ),
    "a coin": (fs.scaffnew(), NOISY, {"lr": 0.1}),
}
EVERY = pytest.mark.parametrize("name", CASES)
ROUNDS = 24


def both(name, **more):
    algorithm, problem, own = CASES[name]
    given = {"rounds": ROUNDS, "local_steps": 2, "seed": 5} | own | more
    return fs.simulate(algorithm, problem, **given), fs.Simulator(algorithm, problem, **given)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(tree)]


@pytest.mark.slow
@EVERY
def test_steps_are_the_rounds_of_simulate_bit_for_bit(name):
    run, simulator = both(name)
    state, columns = simulator.init(), []
    for number in (1, 1, 5, 2, 15):
        state, rows = simulator.step(state, number)
        assert len(rows["round"]) == number
        columns.append(rows)
    assert int(state.round) == ROUNDS
    assert bits((state.server, state.own)) == bits((run.server, run.clients.own))
    assert columns[0].keys() == run.history.keys()
    for key, column in run.history.items():
        np.testing.assert_array_equal(
            np.concatenate([rows[key] for rows in columns]), column, err_msg=key
        )
    np.testing.assert_array_equal(
        jax.tree_util.tree_leaves(simulator.params(state))[0].ravel()[:2], run.vector[:2]
    )


def test_a_state_stays_valid_and_can_be_gone_on_from_again():
    _, simulator = both("sampling")
    at, _ = simulator.step(simulator.init(), 3)
    before = bits(at)
    once, rows = simulator.step(at, 4)
    again, same = simulator.step(at, 4)
    assert bits(at) == before
    assert bits(once) == bits(again)
    assert rows["loss"].tobytes() == same["loss"].tobytes()


def test_a_state_can_be_changed_between_steps():
    """From another x, with the control variates kept: the run is another one, and the gauge stays at rounding."""
    _, simulator = both("sampling")
    state, _ = simulator.step(simulator.init(), 5)
    moved = state._replace(server=state.server._replace(x=state.server.x + 1))
    _, rows = simulator.step(state)
    _, other = simulator.step(moved)
    assert other["loss"][0] > rows["loss"][0]
    assert other["residual"][0] < 1e-12


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_says_when():
    simulator = fs.Simulator(fs.fedavg(), NOISY, local_steps=5, lr=1e6)
    state, rows = simulator.step(simulator.init(), 50)
    assert bool(state.done)
    assert len(rows["round"]) == int(state.round) < 50
    after, none = simulator.step(state, 5)
    assert int(after.round) == int(state.round)
    assert all(len(column) == 0 for column in none.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loccal_steps": 3}, "unknown argument of Simulator 'loccal_steps'"),
        ({"every": 3}, "give its folder, checkpoint="),
        ({"callbacks": [3]}, "callbacks must be"),
        ({"cohorts": lambda r: [0]}, "cohorts must be"),
        ({"cohorts": 3}, "cohorts must be"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_one_line(given, said):
    with pytest.raises(fs.InputError, match=said) as error:
        fs.Simulator(fs.scaffold(), NOISY, **({"local_steps": 2, "lr": 0.1} | given))
    assert "\n" not in str(error.value)


def test_what_only_run_can_is_refused_by_name_when_stepping():
    simulator = fs.Simulator(fs.scaffold(), NOISY, local_steps=2, lr=0.1, client_state="sparse")
    with pytest.raises(fs.InputError, match="client_state is for run"):
        simulator.init()


@pytest.mark.slow
def test_more_rounds_than_cohorts_are_refused():
    simulator = fs.Simulator(fs.scaffold(), NOISY, local_steps=2, lr=0.1, cohorts=[[0, 1]] * ROUNDS)
    state, _ = simulator.step(simulator.init(), ROUNDS - 1)
    with pytest.raises(
        fs.InputError, match=r"made for 24 rounds and 23 are done: at most 1 more, got 2"
    ):
        simulator.step(state, 2)


@pytest.mark.slow
def test_the_state_of_another_simulator_is_refused():
    simulators = [
        fs.Simulator(make(), NOISY, local_steps=2, lr=0.1) for make in (fs.scaffold, fs.fedavg)
    ]
    for state in (simulators[1].init(), None):
        with pytest.raises(fs.InputError, match="state must be one of this simulator"):
            simulators[0].step(state)

"""Step sizes by round and by local step, against SCAFFOLD written by hand."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.simulation.engine import _compile

N, D, K = 4, 3, 3
RNG = np.random.default_rng(3)
ROOTS = RNG.normal(size=(N, D, D))
HESSIANS = ROOTS @ ROOTS.transpose(0, 2, 1) / D + 0.1 * np.eye(D)
LINEAR = RNG.normal(size=(N, D))
X0 = RNG.normal(size=D)
PROBLEM = fs.problems.quadratic(hessians=HESSIANS, linear=LINEAR)
ASK = {"local_steps": K, "precision": "float64", "x0": X0, "metrics": ["loss"]}


def by_hand(lr, rounds, cohorts=None):
    """SCAFFOLD with c_i the mean raw gradient; lr(round, step), rounds from 1, steps from 0."""
    x, c, c_i = X0.copy(), np.zeros(D), np.zeros((N, D))
    for r in range(1, rounds + 1):
        cohort = range(N) if cohorts is None else cohorts[r - 1]
        moves, new = [], c_i.copy()
        for i in cohort:
            y, seen = x.copy(), []
            for k in range(K):
                seen.append(HESSIANS[i] @ y - LINEAR[i])
                y = y - lr(r, k) * (seen[-1] - c_i[i] + c)
            moves.append(x - y)
            new[i] = np.mean(seen, axis=0)
        x, c_i = x - np.mean(moves, axis=0), new
        c = c_i.mean(axis=0)
    return x, c_i


def schedules():
    table = 0.02 + 0.2 * np.random.default_rng(5).random((20, K))
    return {
        "round": (lambda round: table[round - 1, 0], lambda r, k: table[r - 1, 0]),
        "step": (lambda step: table[0, step], lambda r, k: table[0, k]),
        "both": (lambda round, step: table[round - 1, step], lambda r, k: table[r - 1, k]),
        "both in the other order": (
            lambda step, round: table[round - 1, step],
            lambda r, k: table[r - 1, k],
        ),
        "another name": (lambda epoch: table[0, epoch], lambda r, k: table[0, k]),
        "a default": (
            lambda round, scale=0.5: scale * table[round - 1, 0],
            lambda r, k: 0.5 * table[r - 1, 0],
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules())
def test_schedules_agree_with_scaffold_by_hand(name):
    lr, plain = schedules()[name]
    cohorts = [[0, 2], [1, 2, 3], [0], [3, 1], [0, 1, 2, 3], [2, 3], [0, 3]]
    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=7, lr=lr, cohorts=cohorts, **ASK)
    x, c_i = by_hand(plain, 7, cohorts)
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.clients.c_i, c_i, rtol=0, atol=1e-12)
    assert run.residual < 1e-13


@pytest.mark.slow
def test_a_schedule_over_rounds_costs_no_vector_and_no_compilation():
    plain = fs.simulate(fs.scaffold(), PROBLEM, rounds=3, lr=0.1, **ASK)
    by_round = fs.simulate(fs.scaffold(), PROBLEM, rounds=3, lr=lambda round: 0.1, **ASK)
    by_step = fs.simulate(fs.scaffold(), PROBLEM, rounds=3, lr=lambda step: 0.1, **ASK)
    assert by_round.digest == plain.digest
    assert by_round.history["bytes_up"].tolist() == plain.history["bytes_up"].tolist()
    assert (by_step.history["bytes_up"] == 2 * plain.history["bytes_up"]).all()
    before = _compile.cache_info().misses
    fs.simulate(fs.scaffold(), PROBLEM, rounds=9, lr=lambda round: 0.3 / round, **ASK)
    assert _compile.cache_info().misses == before


def test_a_schedule_resumes_with_the_same_bits_and_another_one_is_refused(tmp_path):
    def lr(round, step):
        return 0.2 / (round + step)

    whole = fs.simulate(fs.scaffold(), PROBLEM, rounds=9, lr=lr, cohort=2, **ASK)
    fs.simulate(fs.scaffold(), PROBLEM, rounds=4, lr=lr, cohort=2, checkpoint=tmp_path, **ASK)
    rest = fs.simulate(
        fs.scaffold(), PROBLEM, rounds=9, lr=lr, cohort=2, checkpoint=tmp_path, **ASK
    )
    assert rest.digest == whole.digest
    with pytest.raises(fs.InputError, match=r"another run \(lr"):
        fs.simulate(
            fs.scaffold(),
            PROBLEM,
            rounds=9,
            lr=lambda round: 0.2 / round,
            cohort=2,
            checkpoint=tmp_path,
            **ASK,
        )


@pytest.mark.slow
def test_steps_of_the_simulator_and_runs_of_a_sweep_have_the_same_schedule():
    ask = ASK | {"cohort": 2, "batch_size": None}
    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=6, lr=lambda round: 0.3 / round, **ask)
    simulator = fs.Simulator(fs.scaffold(), PROBLEM, lr=lambda round: 0.3 / round, **ask)
    state = simulator.init()
    for rounds in (1, 3, 2):
        state, _ = simulator.step(state, rounds)
    np.testing.assert_array_equal(np.asarray(state.x), run.vector)
    swept = fs.sweep(
        fs.scaffold(), PROBLEM, rounds=6, lr=lambda round: 0.3 / round, seeds=[5, 0], **ask
    )
    np.testing.assert_array_equal(swept.runs[0][1].vector, run.vector)
    assert "schedule" in repr(swept)


@pytest.mark.slow
def test_fednova_divides_by_the_travel_of_its_round():
    """With equal steps FedNova's update is FedAvg's, whatever the step sizes."""
    ask = ASK | {"rounds": 5, "lr": lambda round, step: 0.2 / (round + step)}
    nova, average = (
        fs.simulate(algorithm, PROBLEM, **ask) for algorithm in (fs.fednova(), fs.fedavg())
    )
    np.testing.assert_allclose(nova.vector, average.vector, rtol=0, atol=1e-13)


def test_scaffnew_takes_schedules_over_rounds_only():
    run = fs.simulate(fs.scaffnew(), PROBLEM, rounds=5, lr=lambda round: 0.1 / round, **ASK)
    assert run.residual < 1e-13
    with pytest.raises(fs.InputError, match="one size"):
        fs.simulate(fs.scaffnew(), PROBLEM, rounds=5, lr=lambda step: 0.1, **ASK)


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        (lambda round: 1 - round, r"lr\(round=1\) must be a number above 0, got 0"),
        (lambda round: "fast", r"lr\(round=1\) must be a number above 0, got 'fast'"),
        (
            lambda round, step: -1.0,
            r"lr\(round=1, step=0\) must be a number of at least 0, got -1.0",
        ),
        (lambda round, step: 0.0, "lr must be above 0 at some of the 3 local steps of round 1"),
        (
            lambda round, other: 0.1,
            r"lr must be a number above 0, or a function of `round`.* got one of \(round, other\)",
        ),
        (lambda: 0.1, "or a function of `round`"),
        (lambda a, b: 0.1, r"got one of \(a, b\)"),
    ],
)
def test_schedules_that_are_none_are_refused(lr, said):
    with pytest.raises(fs.InputError, match=said):
        fs.simulate(fs.scaffold(), PROBLEM, rounds=2, lr=lr, **ASK)


def test_a_bad_value_of_a_later_round_names_the_round():
    with pytest.raises(fs.InputError, match=r"lr\(round=3\) must be a number above 0, got -1"):
        fs.simulate(
            fs.scaffold(), PROBLEM, rounds=5, lr=lambda round: 0.1 if round < 3 else -1, **ASK
        )
    with pytest.raises(fs.InputError, match="one schedule"):
        fs.sweep(
            fs.scaffold(), PROBLEM, rounds=2, lr=[0.1, lambda round: 0.1], seeds=2, local_steps=K
        )


@pytest.mark.slow
def test_a_client_whose_step_sizes_are_all_zero_is_refused():
    """Its mean direction would be 0 / 0; one that takes more steps goes on to a positive one."""
    ask = ASK | {"local_steps": [1, 3, 3, 3], "rounds": 2}
    for algorithm in (fs.fednova(), fs.scaffold()):
        with pytest.raises(fs.InputError, match="of the client that takes 1, got zeros only"):
            fs.simulate(algorithm, PROBLEM, lr=lambda step: 0.1 * step, **ask)
        run = fs.simulate(
            algorithm, PROBLEM, lr=lambda step: 0.1 * step, **ask | {"local_steps": [2, 3, 3, 3]}
        )
        assert run.outcome == "finished"


def test_a_target_that_is_never_looked_at_is_refused():
    ask = ASK | {"rounds": 4, "lr": 0.1, "evaluate_every": 5, "stop_at": ("loss", 0)}
    with pytest.raises(fs.InputError, match="stop_at is looked at every 5 rounds"):
        fs.simulate(fs.scaffold(), PROBLEM, **ask)
    with pytest.raises(fs.InputError, match="stop_at is looked at every 5 rounds"):
        fs.sweep(fs.scaffold(), PROBLEM, seeds=1, **{n: v for n, v in ask.items() if n != "x0"})


@pytest.mark.parametrize("wrong", [1e-50, 1e50])
def test_every_step_size_of_a_sweep_must_fit_the_precision(wrong):
    ask = {"local_steps": K, "rounds": 2, "seeds": 1}
    with pytest.raises(fs.InputError, match=r"lr must be from .* in float32"):
        fs.sweep(fs.scaffold(), PROBLEM, lr=[0.1, wrong], **ask)
    fs.sweep(fs.scaffold(), PROBLEM, lr=[0.1, wrong], precision="float64", **ask)

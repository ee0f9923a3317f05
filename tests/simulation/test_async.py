"""Asynchronous rounds: replies count when they come, on a virtual clock."""

from itertools import product

import numpy as np
import pytest
from cases import sharp
from family_case import LINEAR, OPTIMUM, PROBLEM, X0, N, close, grad

import fedscaffold as fs
from fedscaffold.algorithms.round import refuse_asynchronous
from fedscaffold.checks import InputError

WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) / 21
TRACE = np.random.default_rng(3).pareto(1.2, size=(5, N)) + 0.5
LR, STEPS = 0.1, 3
ASK = {"local_steps": STEPS, "lr": LR, "precision": "float64", "metrics": ()}
MAKE = {"scaffold": fs.scaffold, "fedbuff": fs.fedavg, "ca2fl": fs.ca2fl}


def event_loop(method, rounds, buffer, power=0.0, weights=WEIGHTS, trace=TRACE, server_lr=1.0):
    """Asynchronous SCAFFOLD, FedBuff or CA2FL, all clients at work, as one loop over replies.

    A client's reply is computed when its task begins, and held until it ends.
    """
    x, c, c_i, v = X0.copy(), np.zeros_like(X0), np.zeros_like(LINEAR), 0
    tasks, waiting, path, times = [0] * N, [], [], []

    def begin(i, now):
        y, shift = x.copy(), c - c_i[i]
        for _ in range(STEPS):
            y = y - LR * (grad(i, y) + (shift if method == "scaffold" else 0))
        waiting.append((now + trace[tasks[i] % len(trace)][i], v, i, x - y, shift))
        tasks[i] += 1

    for i in range(N):
        begin(i, 0.0)
    for _ in range(rounds):
        replies = sorted(waiting, key=lambda reply: reply[:3])[:buffer]
        waiting = [reply for reply in waiting if reply not in replies]
        total = sum(weights[i] for _, _, i, _, _ in replies)
        step, change = np.zeros_like(x), np.zeros_like(c)
        for _, begun, i, move, shift in replies:
            known = move / (STEPS * LR) - shift if method == "scaffold" else move
            if method != "fedbuff":
                change += weights[i] * (known - c_i[i])
            used = (1 + v - begun) ** -power * move
            step += weights[i] / total * (used - c_i[i] if method == "ca2fl" else used)
            c_i[i] = known
        x = x - server_lr * (step + c if method == "ca2fl" else step)
        c, v = c + change, v + 1
        for _, _, i, _, _ in replies:
            begin(i, replies[-1][0])
        path.append(x)
        times.append(replies[-1][0])
    return np.array(path), c_i, np.array(times)


def asynchronous(algorithm, rounds, buffer, **more):
    """The run, and x after each round."""
    seen = []
    simulator = fs.Simulator(
        algorithm, PROBLEM, delays=TRACE, buffer=buffer, weights=WEIGHTS, **ASK | more
    )
    state = simulator.init()
    for _ in range(rounds):
        state, rows = simulator.step(state)
        seen.append((np.array(state.x), rows["time"][0], rows["residual"][0]))
    path, times, residuals = (np.array(column) for column in zip(*seen, strict=True))
    return state, path, times, residuals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "buffer"),
    sharp(
        product(MAKE, (1, 2, 4)), [("scaffold", 1), ("scaffold", 4), ("fedbuff", 2), ("ca2fl", 4)]
    ),
)
def test_runs_are_those_of_a_plain_event_loop(method, buffer):
    expected, c_i, times = event_loop(method, 40, buffer, server_lr=0.5)
    state, path, found_times, residuals = asynchronous(MAKE[method](server_lr=0.5), 40, buffer)
    np.testing.assert_array_equal(found_times, times)
    close(path, expected)
    if method != "fedbuff":
        close(np.asarray(state.memory[0]), c_i)
    assert residuals.max() < 1e-14 * (1 + np.abs(c_i).max())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "make"), [("scaffold", fs.scaffold), ("fedbuff", fs.fedavg)])
def test_staleness_damps_moves_and_leaves_control_variates_alone(method, make):
    expected, c_i, _ = event_loop(method, 30, 2, power=0.5)
    state, path, _, residuals = asynchronous(make(), 30, 2, staleness="polynomial:0.5")
    close(path, expected)
    if method == "scaffold":
        close(np.asarray(state.memory.c_i), c_i)
    assert residuals.max() < 1e-14 * (1 + np.abs(c_i).max())
    undamped, _, _ = event_loop(method, 30, 2)
    assert np.abs(undamped - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohort", "precision"),
    sharp(product((N, 4), ("float32", "float64")), [(N, "float32"), (4, "float64")]),
)
def test_without_delays_and_with_the_cohort_as_buffer_it_is_the_synchronous_run(cohort, precision):
    ask = {**ASK, "rounds": 12, "cohort": cohort, "seed": 5, "precision": precision}
    ask |= {"metrics": ["loss"], "delays": "constant:0"}
    plain = fs.simulate(fs.scaffold(), PROBLEM, **ask)
    waiting = fs.simulate(fs.scaffold(), PROBLEM, buffer=cohort, **ask)
    assert waiting.digest == plain.digest
    np.testing.assert_array_equal(waiting.server.c, plain.server.c)
    np.testing.assert_array_equal(waiting.clients.c_i, plain.clients.c_i)
    assert waiting.history["bytes_up"].tolist() == plain.history["bytes_up"].tolist()


@pytest.mark.slow
def test_a_synchronous_round_lasts_as_long_as_its_slowest_client():
    cohorts = [[0, 3], [1], [2, 4, 5], [0, 3]]
    run = fs.simulate(fs.scaffold(), PROBLEM, cohorts=cohorts, delays=TRACE, **ASK)
    tasks, now, expected = [0] * N, 0.0, []
    for cohort in cohorts:
        now += max(TRACE[tasks[i], i] for i in cohort)
        expected.append(now)
        for i in cohort:
            tasks[i] += 1
    np.testing.assert_array_equal(run.history["time"], expected)


@pytest.mark.slow
def test_nobody_waits_for_a_slow_client():
    """Five clients reply each second, the sixth every ten: 50 steps of one second, not of ten."""
    delays = fs.delays.slow(1 / N, 10.0)
    ask = {**ASK, "rounds": 50, "delays": delays}
    assert fs.simulate(fs.scaffold(), PROBLEM, **ask).history["time"][-1] == 500
    run = fs.simulate(fs.scaffold(), PROBLEM, buffer=5, **ask)
    assert run.history["time"][-1] == 50
    far = np.linalg.norm(run.vector - OPTIMUM)
    assert far < np.linalg.norm(X0 - OPTIMUM) / 3


@pytest.mark.slow
def test_sampled_clients_have_one_task_each_and_converge_to_the_optimum():
    ask = {**ASK, "cohort": 3, "buffer": 2, "delays": "pareto:1:1.1", "seed": 2}
    seen = []

    def look(at):
        seen.extend(at.cohort(int(r)).tolist() for r in at.columns["round"])

    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=2500, callbacks=[look], **ask)
    assert run.fault is None
    assert run.residual < run.explained
    close(run.vector, OPTIMUM)
    assert all(len(set(cohort)) == 2 for cohort in seen)
    assert {i for cohort in seen for i in cohort} == set(range(N))
    assert (np.diff(run.history["time"]) >= 0).all()


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_and_in_a_sweep_with_the_same_bits(tmp_path):
    ask = {**ASK, "cohort": 3, "buffer": 2, "delays": "lognormal:1:1", "metrics": ["loss"]}
    whole = fs.simulate(fs.scaffold(), PROBLEM, rounds=12, **ask)
    fs.simulate(fs.scaffold(), PROBLEM, rounds=5, checkpoint=tmp_path, **ask)
    resumed = fs.simulate(fs.scaffold(), PROBLEM, rounds=12, checkpoint=tmp_path, **ask)
    assert resumed.digest == whole.digest
    np.testing.assert_array_equal(resumed.history["time"], whole.history["time"])
    with pytest.raises(InputError, match=r"buffer: was 2, is 3"):
        fs.simulate(fs.scaffold(), PROBLEM, checkpoint=tmp_path, **ask | {"buffer": 3})
    swept = fs.sweep(fs.scaffold(), PROBLEM, rounds=12, seeds=[1, 0], **ask)
    assert swept.runs[0][1].digest == whole.digest
    assert swept.runs[0][0].history["time"][-1] != whole.history["time"][-1]


REFUSED = {"amplified-scaffold", "dane", "mime", "scaffnew", "scaffold-xi"}


@pytest.mark.parametrize("name", sorted(fs.ALGORITHMS))
def test_algorithms_that_need_one_model_are_refused_by_name(name):
    algorithm = fs.ALGORITHMS[name]()
    if name not in REFUSED:
        refuse_asynchronous(algorithm)
        return
    with pytest.raises(InputError, match=f"^{name} .*synchronous rounds only"):
        refuse_asynchronous(algorithm)


MEANS = [name for name in sorted(fs.ALGORITHMS) if name not in REFUSED]
MEANS = [name for name in MEANS if fs.ALGORITHMS[name]().means]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_every_mean_that_an_algorithm_declares_is_kept_under_any_delay(name):
    algorithm = fs.ALGORITHMS[name]()
    run = fs.simulate(
        algorithm,
        PROBLEM,
        rounds=30,
        buffer=2,
        delays="pareto:1:0.7",
        weights=WEIGHTS,
        **ASK,
    )
    rows = getattr(run.clients.memory, algorithm.means[0][1])
    kept = getattr(run.server, algorithm.means[0][0])
    assert np.abs(rows).max() > 1e-3
    np.testing.assert_allclose(kept, WEIGHTS @ rows, rtol=0, atol=1e-14 * (1 + np.abs(rows).max()))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"buffer": 2}, "give delays"),
        ({"buffer": 7, "delays": "constant:1"}, "at most the number of clients at work"),
        ({"staleness": "polynomial:0.5"}, "give buffer"),
        ({"delays": "uniform:1"}, "unknown law of delays 'uniform'"),
        ({"delays": "pareto:1"}, "pareto is written pareto:LEAST:SHAPE"),
        ({"delays": [[1.0, 2.0]]}, "one column for each of the 6 clients"),
        ({"delays": [[-1.0] * N]}, "seconds from 0"),
        ({"buffer": 2, "delays": "constant:1", "cohorts": [[0, 1]] * 9}, "cohorts names"),
        ({"buffer": 2, "delays": "constant:1", "availability": [[1] * N]}, "availability says"),
        ({"buffer": 2, "delays": "constant:1", "sampling": [1.0] * N}, "sampling draws"),
        ({"buffer": 2, "delays": "constant:1", "lr": lambda round: 0.1}, "lr changes"),
        ({"buffer": 2, "delays": "constant:1", "stale": "drop:2"}, "stale changes"),
        ({"buffer": 2, "delays": "constant:1", "client_state": "sparse"}, "client_state loads"),
    ],
)
def test_what_asynchronous_rounds_do_not_do_is_refused_by_name(more, words):
    with pytest.raises(InputError, match=words):
        fs.simulate(fs.scaffold(), PROBLEM, rounds=9, **ASK | more)


def test_methods_without_a_move_of_their_own_cannot_be_damped():
    with pytest.raises(InputError, match="ca2fl sends no move"):
        refuse_asynchronous(fs.ca2fl(), damped=True)


def test_laws_of_delays_have_their_quantiles():
    """Medians by the laws' formulas, to five standard errors of a sample median."""
    from fedscaffold.simulation.delays import Tasks, of

    n = 4000
    tasks, rng = Tasks(np.arange(n), np.zeros(n, np.int64), n), np.random.default_rng(0)
    for law, median, density in (
        ("lognormal:2:0.5", 2.0, 1 / (2 * 0.5 * np.sqrt(2 * np.pi))),
        ("pareto:1:1.5", 2 ** (1 / 1.5), 1.5 * 0.5 / 2 ** (1 / 1.5)),
    ):
        drawn = of(law, n).draw(tasks, rng)
        error = 1 / (2 * density * np.sqrt(n))
        assert abs(np.median(drawn) - median) < 5 * error
    assert of("constant:3", n).draw(tasks, rng).tolist() == [3.0] * n

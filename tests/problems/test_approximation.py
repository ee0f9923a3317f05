"""Linear stochastic approximation and TD learning: FedAvg is FedLSA, SCAFFOLD is SCAFFLSA, on oracles that are no gradients.

The loops and fixed points here are written anew in NumPy, from the papers' pseudo-code.
"""

import jax
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.problems import (
    DecisionProcess,
    expected_system,
    garnet,
    linear_system,
    markov,
    perturbed,
)

WATCHED = ["distance", "grad_norm", "control_error"]


def system(n=4, d=3, seed=0):
    """Matrices with eigenvalues right of the imaginary axis whose skew part is as large as the symmetric one."""
    rng = np.random.default_rng(seed)
    skew = rng.normal(size=(n, d, d))
    skew = (skew - np.swapaxes(skew, 1, 2)) / 2
    tilt = rng.normal(size=(n, d, d))
    return np.eye(d) + 0.15 * (tilt + np.swapaxes(tilt, 1, 2)) + skew, rng.normal(size=(n, d))


def fed_lsa(a, b, x, lr, steps, cohorts):
    for cohort in cohorts:
        ends = []
        for i in cohort:
            y = x.copy()
            for _ in range(steps):
                y = y - lr * (a[i] @ y - b[i])
            ends.append(y)
        x = np.mean(ends, axis=0)
    return x


def scaff_lsa(a, b, x, lr, steps, cohorts):
    """The c form, option II, of the original paper; with everyone in the cohort it is SCAFFLSA."""
    c, own = np.zeros_like(x), np.zeros_like(b)
    for cohort in cohorts:
        ends, changes = [], []
        for i in cohort:
            y = x.copy()
            for _ in range(steps):
                y = y - lr * (a[i] @ y - b[i] - own[i] + c)
            new = own[i] - c + (x - y) / (steps * lr)
            ends.append(y)
            changes.append(new - own[i])
            own[i] = new
        x = np.mean(ends, axis=0)
        c = c + np.sum(changes, axis=0) / len(b)
    return x


def resting_place(a, b, lr, steps):
    """Where FedLSA rests, which is where its clients' ends average to the start.

    From x, K steps end at G^K x + M b with G = I - lr A, M = lr (I + G + ... + G^(K-1)), and I - G^K = M A, symmetric or
    not. So mean(M A) x = mean(M b), that is, x = x* + mean(M A)^-1 mean(M (b - A x*)): F7.
    """
    eye = np.eye(b.shape[1])
    push = [lr * sum(np.linalg.matrix_power(eye - lr * m, h) for h in range(steps)) for m in a]
    solution = np.linalg.solve(a.mean(axis=0), b.mean(axis=0))
    bias = np.linalg.solve(
        np.mean([p @ m for p, m in zip(push, a, strict=True)], axis=0),
        np.mean([p @ (v - m @ solution) for p, m, v in zip(push, a, b, strict=True)], axis=0),
    )
    return solution, solution + bias


ALGORITHMS = {"fedavg": (fs.fedavg, fed_lsa), "scaffold": (fs.scaffold, scaff_lsa)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_are_those_of_the_papers(name):
    a, b = system()
    start = np.array([1.0, -2.0, 0.5])
    cohorts = [[0, 2], [1, 3], [2, 3], [0, 1]] * 3
    algorithm, by_hand = ALGORITHMS[name]
    run = fs.simulate(
        algorithm(),
        linear_system(a, b, x0=start),
        rounds=12,
        local_steps=4,
        lr=0.1,
        cohorts=cohorts,
        metrics=WATCHED,
        precision="float64",
    )
    np.testing.assert_allclose(
        run.vector, by_hand(a, b, start, 0.1, 4, cohorts), rtol=0, atol=1e-12
    )
    solution, _ = resting_place(a, b, 0.1, 4)
    assert run.history["distance"][-1] == pytest.approx(
        np.linalg.norm(run.vector - solution), rel=1e-12
    )
    assert run.history["grad_norm"][-1] == pytest.approx(
        np.linalg.norm((a @ run.vector - b).mean(0)), rel=1e-11
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 25])
def test_fed_lsa_rests_at_its_bias_and_scaff_lsa_at_the_solution(steps):
    a, b = system(seed=1)
    solution, biased = resting_place(a, b, 0.2, steps)
    problem = linear_system(a, b)
    np.testing.assert_allclose(problem.optimum(), solution, rtol=0, atol=1e-14)
    weighted = np.linalg.solve(
        np.einsum("c,cij->ij", [0.1, 0.2, 0.3, 0.4], a), np.array([0.1, 0.2, 0.3, 0.4]) @ b
    )
    np.testing.assert_allclose(problem.optimum([1, 2, 3, 4]), weighted, rtol=0, atol=1e-14)
    same = {
        "rounds": 1000,
        "local_steps": steps,
        "lr": 0.2,
        "precision": "float64",
        "metrics": WATCHED,
    }
    plain, corrected = (
        fs.simulate(fs.fedavg(), problem, **same),
        fs.simulate(fs.scaffold(), problem, **same),
    )
    assert np.linalg.norm(biased - solution) > 0.02
    np.testing.assert_allclose(plain.vector, biased, rtol=0, atol=1e-13)
    np.testing.assert_allclose(corrected.vector, solution, rtol=0, atol=1e-13)
    assert corrected.history["control_error"][-1] < 1e-12


def test_the_bias_is_nothing_at_one_local_step_and_ends_at_the_mean_of_local_solutions():
    a, b = system(seed=1)
    solution, once = resting_place(a, b, 0.2, 1)
    np.testing.assert_allclose(once, solution, atol=1e-14)
    _, often = resting_place(a, b, 0.2, 500)
    np.testing.assert_allclose(
        often, np.mean([np.linalg.solve(*pair) for pair in zip(a, b, strict=True)], axis=0)
    )


def ends(algorithm, problem, **same):
    """Last iterates of independent runs, which share one compiled program: (runs, d)."""
    same |= {"precision": "float64", "metrics": ["distance"], "evaluate_every": 40, "rounds": 40}
    return np.array(
        [fs.simulate(algorithm, problem, seed=seed, **same).vector for seed in range(64)]
    )


def in_errors(samples, point):
    """Distance of the mean from a point, coordinate by coordinate, in standard errors."""
    return np.abs(samples.mean(axis=0) - point) / (
        samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    )


@pytest.mark.slow
def test_with_noise_scaff_lsa_is_right_in_the_mean_and_fed_lsa_is_not():
    a, b = system(seed=1)
    solution, biased = resting_place(a, b, 0.2, 5)
    # 64 federations in one, on the blocks of a diagonal: their noise is independent
    many = linear_system(np.kron(np.eye(64), a), np.tile(b, 64), noise=0.05)
    same = {
        "rounds": 60,
        "local_steps": 5,
        "lr": 0.2,
        "precision": "float64",
        "metrics": ["distance"],
    }
    corrected, plain = (
        fs.simulate(f(), many, **same).vector.reshape(64, 3) for f in (fs.scaffold, fs.fedavg)
    )
    assert in_errors(corrected, solution).max() < 4
    assert in_errors(plain, biased).max() < 4
    assert in_errors(plain, solution).max() > 10


@pytest.mark.slow
def test_learning_from_records_is_linear_too():
    problem = fs.problems.temporal_difference(
        4, num_states=6, num_features=3, discount=0.6, heterogeneity=1.0, records=60, seed=1
    )
    now, later, reward = (part.reshape(4, 60, *part.shape[1:]) for part in problem.records)
    a = np.einsum("cni,cnj->cij", now, now - 0.6 * later) / 60
    b = np.einsum("cni,cn->ci", now, reward) / 60
    solution, biased = resting_place(a, b, 0.5, 10)
    np.testing.assert_allclose(problem.optimum(), solution, atol=1e-13)
    x = np.array([0.3, -1.0, 0.7])
    np.testing.assert_allclose(problem.facts.client_gradients(x), a @ x - b, atol=1e-14)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            problem.functions.gradient(x, (now[1], later[1], reward[1])),
            a[1] @ x - b[1],
            atol=1e-14,
        )
    same = {"local_steps": 10, "lr": 0.5, "batch_size": 30, "x0": solution}
    corrected, plain = ends(fs.scaffold(), problem, **same), ends(fs.fedavg(), problem, **same)
    assert in_errors(corrected, solution).max() < 4
    assert in_errors(plain, biased).max() < 4
    assert in_errors(plain, solution).max() > 10


def test_records_come_from_the_population():
    count = 40_000
    problem = fs.problems.temporal_difference(
        2, num_states=10, num_features=3, discount=0.9, records=count, seed=5
    )
    a, b = problem.facts.population
    for i, rows in enumerate((slice(count), slice(count, None))):
        now, later, reward = (part[rows] for part in problem.records)
        for drawn, expected in (
            (now[:, :, None] * (now - 0.9 * later)[:, None, :], a[i]),
            (now * reward[:, None], b[i]),
        ):
            assert in_errors(drawn.reshape(count, -1), expected.ravel()).max() < 4.5
    assert np.abs(a[0] - a[0].T).max() > 0.01, "TD is no gradient"
    alike = fs.problems.temporal_difference(
        3, num_states=10, num_features=3, heterogeneity=0.0, records=5, seed=5
    )
    a, b = alike.facts.population
    assert (a == a[0]).all()
    assert (b == b[0]).all()
    fewer = fs.problems.temporal_difference(2, num_states=10, num_features=3, records=5, seed=5)
    more = fs.problems.temporal_difference(3, num_states=10, num_features=3, records=5, seed=5)
    assert all((m[:10] == f).all() for m, f in zip(more.records, fewer.records, strict=True))


@pytest.mark.parametrize(
    ("states", "actions", "branching"), [(30, 2, 2), (7, 3, 7), (5, 1, 1), (1, 1, 1)]
)
def test_garnets_are_processes_with_the_branching_asked_for(states, actions, branching):
    world = garnet(states, actions, branching, seed=2)
    other = perturbed(world, 0.3, seed=9)
    for kernel in (world.kernel, other.kernel):
        assert kernel.shape == (states, actions, states)
        assert (kernel >= 0).all()
        np.testing.assert_allclose(kernel.sum(axis=2), 1)
        assert ((kernel > 0).sum(axis=2) == branching).all()
    assert ((world.kernel > 0) == (other.kernel > 0)).all()
    np.testing.assert_allclose(world.policy.sum(axis=1), 1)
    assert all(
        (part == same).all() for part, same in zip(world, perturbed(world, 0.0), strict=True)
    )
    # the stationary distribution by walking: the mean over time of where the chain is
    where, total = np.full(states, 1 / states), np.zeros(states)
    for _ in range(20_000):
        total, where = total + where, where @ world.chain
    np.testing.assert_allclose(world.stationary, total / total.sum(), atol=1e-3)
    np.testing.assert_allclose(world.stationary @ world.chain, world.stationary, atol=1e-14)


def test_garnets_that_fall_apart_are_drawn_again(monkeypatch):
    def reached(chain):
        return (
            np.linalg.matrix_power(np.eye(40) + (chain > 0), 40) > 0
        )  # row s, column t: t is reached from s

    assert all(reached(garnet(40, 1, 1, seed=seed).chain).all(axis=0).any() for seed in range(10))
    monkeypatch.setattr(markov, "TRIES", 1)  # of 40 states with one way out each, most fall apart
    with pytest.raises(fs.InputError, match="all fell apart: take more branching or num_actions"):
        [garnet(40, 1, 1, seed=seed) for seed in range(10)]


def test_the_solution_solves_the_projected_bellman_equation():
    world = garnet(12, 2, 3, seed=4)
    phi = np.random.default_rng(0).normal(size=(12, 4))
    a, b = expected_system(world, phi, 0.9)
    values = phi @ linear_system(a[None], b[None]).optimum()
    target = world.mean_rewards + 0.9 * world.chain @ values
    root = np.sqrt(world.stationary)[:, None]
    projected = phi @ np.linalg.lstsq(root * phi, root[:, 0] * target, rcond=None)[0]
    np.testing.assert_allclose(values, projected, atol=1e-11)
    # with one feature for each state nothing is projected: the values themselves
    a, b = expected_system(world, np.eye(12), 0.9)
    exact = np.linalg.solve(np.eye(12) - 0.9 * world.chain, world.mean_rewards)
    np.testing.assert_allclose(linear_system(a[None], b[None]).optimum(), exact, rtol=1e-9)


def test_there_is_no_loss_to_watch():
    problem = linear_system(*system())
    same = {"rounds": 2, "local_steps": 2, "lr": 0.1}
    for metric in ("loss", "gap"):
        with pytest.raises(
            fs.InputError,
            match=r"no loss: watch 'distance' or 'grad_norm' instead of 'loss' and 'gap'",
        ):
            fs.simulate(fs.fedavg(), problem, metrics=[metric], **same)
    with pytest.raises(fs.InputError, match="quadratics"):
        fs.theory.contraction_rate(problem, lr=0.1, local_steps=2)
    with pytest.raises(fs.InputError, match="got neither"):
        fs.Problem(None, np.zeros(2), [np.zeros((1, 2))])


A, B = system(2, 2)
HALVES = DecisionProcess(np.eye(2)[:, None], np.zeros((2, 1)), np.ones((2, 1)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: linear_system(A, B[:1]),
            r"matrices must have shape \(N, d, d\) and right \(N, d\)",
        ),
        (lambda: linear_system(A[0], B[0]), r"matrices must have shape"),
        (lambda: linear_system(A * np.nan, B), "must be finite"),
        (lambda: linear_system(A, B, x0=[0.0]), r"x0 must have shape \(2,\)"),
        (lambda: linear_system(A, B, noise=-1.0), "noise is a variance"),
        (lambda: linear_system(-A, B).optimum(), "real part above 0, got -"),
        (
            lambda: linear_system([[[0.0, 1.0], [-1.0, 0.0]]], B[:1]).optimum(),
            "real part above 0, got 0",
        ),
        (
            lambda: linear_system([A[0], -3 * A[0]], B).optimum([1, 1]),
            "weighted mean of the clients' matrices",
        ),
        (
            lambda: garnet(3, 1, 4),
            "branching must be a whole number of at least 1 and at most 3, got 4",
        ),
        (lambda: garnet(0), "num_states must be a whole number"),
        (lambda: garnet(3, num_actions=1.5), "num_actions must be a whole number"),
        (lambda: garnet(3, seed=-1), "seed must be a whole number of at least 0"),
        (lambda: perturbed(garnet(3), 1.5), "heterogeneity must be a number from 0 to 1, got 1.5"),
        (lambda: perturbed(garnet(3), float("nan")), "heterogeneity must be a number"),
        (
            lambda: fs.problems.temporal_difference(2, num_states=5, num_features=6),
            "num_features .* at most 5, got 6",
        ),
        (
            lambda: fs.problems.temporal_difference(2, discount=1.0),
            "discount must be a number from 0 to below 1",
        ),
        (lambda: fs.problems.temporal_difference(2, records=0), "records must be a whole number"),
        (lambda: fs.problems.temporal_difference(0), "num_clients must be a whole number"),
        (
            lambda: fs.problems.policy_evaluation([], np.eye(2)),
            "worlds must hold one process for each client",
        ),
        (lambda: fs.problems.policy_evaluation([HALVES], np.eye(2)), "world 0 falls into parts"),
        (
            lambda: fs.problems.policy_evaluation([garnet(3)], np.eye(2)),
            "features' S = 2 states, got",
        ),
        (
            lambda: fs.problems.policy_evaluation([garnet(2)], np.zeros(2)),
            "features must be a finite matrix",
        ),
        (
            lambda: fs.problems.policy_evaluation(
                [garnet(2)._replace(policy=np.ones((2, 2)))], np.eye(2)
            ),
            "the policy of world 0 must hold probabilities",
        ),
        (
            lambda: fs.problems.policy_evaluation(
                [garnet(2)._replace(rewards=np.full((2, 2), np.inf))], np.eye(2)
            ),
            "the rewards of world 0 must be finite",
        ),
        (
            lambda: fs.problems.policy_evaluation([garnet(3)], np.ones((3, 2))).optimum(),
            "real part above 0",
        ),
    ],
)
def test_bad_input_gets_one_line(call, said):
    with pytest.raises(fs.InputError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)

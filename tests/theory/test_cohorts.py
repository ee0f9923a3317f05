"""The exact law under random cohorts, weights, noise and unequal steps, against enumeration and simulation."""

import itertools

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import theory
from fedscaffold.theory.cohorts import cohort_moments

UNEQUAL = np.array([0.5, 0.3, 0.15, 0.05])


def federation(noise=None, seed=2):
    return fs.problems.quadratic(
        num_clients=4, dim=3, mu=0.05, noise=noise, x0=[1.0, -2.0, 0.5], seed=seed
    )


@pytest.mark.parametrize(
    "p",
    [np.ones(6), [9, 1, 1, 3, 5, 2], [1e6, 1e-6, 1, 1, 2, 0], [0, 0, 0, 1, 1, 5]],
    ids=["equal", "a", "b", "c"],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_moments_of_the_shares_are_those_of_all_cohorts(p, size):
    p = np.array(p, float) / np.sum(p)
    n = len(p)
    share, shares, share_with = np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    cohorts = list(itertools.combinations(range(n), size))
    for cohort in cohorts:
        inside = np.isin(np.arange(n), cohort).astype(float)
        q = inside * p / (inside @ p or 1.0)
        share, shares, share_with = (
            share + q,
            shares + np.outer(q, q),
            share_with + np.outer(q, inside),
        )
    found = cohort_moments(p, size)
    for ours, all_of_them in (
        (found.share, share),
        (found.shares, shares),
        (found.share_with, share_with),
    ):
        np.testing.assert_allclose(ours, all_of_them / len(cohorts), rtol=1e-10, atol=1e-13)


def enumerated(problem, algorithm, p, steps, lr, rounds, size):
    """Mean of |x - x*|^2 over all sequences of cohorts, by a plain NumPy SCAFFOLD or FedAvg without noise."""
    hessians, linear = (np.asarray(a) for a in problem.records)
    n, start = len(p), np.asarray(problem.params)
    best = np.linalg.solve(np.tensordot(p, hessians, 1), p @ linear)
    corrected, server_lr = algorithm != "fedavg", 0.7
    squares = []
    for sequence in itertools.product(itertools.combinations(range(n), size), repeat=rounds):
        x, c, c_i = start.copy(), np.zeros_like(start), np.zeros((n, len(start)))
        for cohort in sequence:
            heard, move, change = p[list(cohort)].sum(), np.zeros_like(x), np.zeros_like(c)
            for i in cohort:
                y, shift = x.copy(), (c - c_i[i]) * corrected
                for _ in range(steps[i]):
                    y = y - lr * (hessians[i] @ y - linear[i] + shift)
                move += p[i] / heard * (x - y)
                new = (
                    hessians[i] @ x - linear[i]
                    if algorithm == "option I"
                    else (x - y) / (steps[i] * lr) - shift
                )
                change += p[i] * (new - c_i[i])
                c_i[i] = new
            x, c = x - server_lr * move, c + change
        squares.append(np.sum((x - best) ** 2))
    return np.mean(squares)


@pytest.mark.parametrize("name", ["fedavg", "option I", "option II"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [np.full(4, 0.25), UNEQUAL], ids=["equal", "unequal"])
def test_noiseless_errors_are_the_mean_over_all_sequences_of_cohorts(name, size, p):
    problem, steps = federation(), np.array([3, 1, 4, 2])
    made = {"fedavg": fs.fedavg, "option I": fs.scaffold, "option II": fs.scaffold}[name]
    algorithm = made(server_lr=0.7, **({"option": 1} if name == "option I" else {}))
    exact = theory.mean_squared_error(
        problem,
        lr=0.4,
        local_steps=steps,
        noise=0.0,
        rounds=3,
        algorithm=algorithm,
        cohort=size,
        weights=p,
    )
    assert exact[0] == pytest.approx(np.sum((problem.params - problem.optimum(p)) ** 2), rel=1e-12)
    assert exact[3] == pytest.approx(enumerated(problem, name, p, steps, 0.4, 3, size), rel=1e-10)


@pytest.mark.parametrize(
    "algorithm", [fs.scaffold(), fs.scaffold(1, 0.7), fs.fedavg(), fs.fedprox(0.3), fs.sgd(1.2)]
)
def test_one_formula_continues_the_other(algorithm):
    """With all clients and weights that are equal but for rounding, cohorts' second moments are the chain's."""
    problem, options = (
        federation(noise=0.3),
        {"lr": 0.3, "local_steps": 4, "noise": 0.3, "rounds": 25},
    )
    p = 0.25 + np.array([1e-16, -1e-16, 0, 0])
    assert len(set(p)) > 1
    for gap in (False, True):
        chained = theory.mean_squared_error(problem, algorithm=algorithm, gap=gap, **options)
        again = theory.mean_squared_error(
            problem, algorithm=algorithm, weights=p, gap=gap, **options
        )
        np.testing.assert_allclose(again, chained, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "steps", "size", "weights"),
    [
        (fs.scaffold(), 4, 2, UNEQUAL),
        (fs.scaffold(option=1, server_lr=0.5), 4, 3, "equal"),
        (fs.scaffold(), [1, 4, 2, 3], 1, "equal"),
        (fs.fedavg(), 4, 2, UNEQUAL),
        (fs.fedprox(mu=0.3), 3, 3, UNEQUAL),
    ],
    ids=["scaffold", "option I", "unequal steps", "fedavg", "fedprox"],
)
def test_simulated_runs_have_the_expected_gap_and_distance(algorithm, steps, size, weights):
    noise = np.stack([np.diag([0.1, 0.5, 0.2]) * k for k in (1, 2, 3, 4)])
    problem, runs = federation(noise=noise), 200
    options = {"rounds": 8, "local_steps": steps, "lr": 0.3, "cohort": size, "weights": weights}
    found = fs.sweep(
        algorithm, problem, seeds=runs, metrics=(), precision="float64", progress=False, **options
    )
    away = np.array([run.vector for run in found.runs[0]]) - problem.optimum(weights)
    p = np.full(4, 0.25) if isinstance(weights, str) else weights
    hessian = np.tensordot(p, np.asarray(problem.records[0]), 1)
    gaps, squares = np.einsum("ra,ab,rb->r", away, hessian / 2, away), np.square(away).sum(axis=1)
    for gap, drawn in ((True, gaps), (False, squares)):
        exact = theory.mean_squared_error(
            problem, algorithm=algorithm, noise=noise, gap=gap, **options
        )[-1]
        assert abs(drawn.mean() - exact) < 4 * drawn.std(ddof=1) / np.sqrt(runs)


def test_what_has_no_law_is_refused():
    options = {"lr": 0.1, "noise": 0.0, "rounds": 2}
    with pytest.raises(fs.InputError, match="all clients take part in every round"):
        theory.mean_squared_error(
            federation(), algorithm=fs.scaffold_xi(), local_steps=2, cohort=2, **options
        )
    with pytest.raises(fs.InputError, match="fednova with unequal local steps has no closed form"):
        theory.mean_squared_error(
            federation(), algorithm=fs.fednova(), local_steps=[1, 2, 3, 4], **options
        )
    with pytest.raises(fs.InputError, match="cohort must be"):
        theory.mean_squared_error(federation(), local_steps=2, cohort=5.5, gap=True, **options)

"""Advice against the exact error of every setting on a grid, against simulation, and in words."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.algorithms import make
from fedscaffold.theory import advise, heterogeneity, mean_squared_error
from fedscaffold.theory.quadratic_model import LOCAL_STEPS


def gaps(problem, noise, rounds, cohort=1.0, weights="equal"):
    """(method, lr, local steps) -> E f(x) - f(x*) at the end."""

    def end(name, lr, steps):
        options = {"lr": lr, "local_steps": steps, "noise": noise, "rounds": rounds}
        return mean_squared_error(
            problem, algorithm=make(name), cohort=cohort, weights=weights, gap=True, **options
        )[-1]

    return end


@pytest.mark.slow
def test_strong_noise_asks_for_small_steps():
    """A small-step formula at lr = 1/L promised 3.3 here for what leaves 11.8, from a start at 0.68."""
    problem = fs.problems.quadratic(num_clients=3, dim=4, mu=0.004, noise=10.0, seed=1)
    end = gaps(problem, 10.0, 100)
    assert end("fedavg", 1.0, 5) > 10
    assert end("fedavg", 1.0, 1) > 4
    advice = advise(heterogeneity(problem), problem, rounds=100)
    assert advice.promised
    assert advice.gap == pytest.approx(
        end(advice.algorithm, advice.lr, advice.local_steps), rel=1e-12
    )
    assert advice.gap < 0.01 < 0.6 < advice.start_gap < 0.7
    assert f"{advice.gap:.2g} above its minimum" in str(advice)
    one_step = advise(heterogeneity(problem), problem, rounds=100, local_steps=1)
    assert (one_step.local_steps, one_step.lr < 0.1) == (1, True)
    assert advice.gap < one_step.gap < one_step.start_gap


def random_federation(seed):
    """Quadratics from round to very stiff, from alike to unlike, with noise from none to far beyond the signal."""
    rng = np.random.default_rng(seed)
    n, d, mu = int(rng.integers(2, 5)), int(rng.integers(1, 4)), float(10 ** rng.uniform(-3, 0))
    noise = [0.0, 1e-4, 0.1, 10.0, 1e4][seed % 5]
    made = {"noise": noise or None, "x0": rng.normal(size=d) * 10 ** rng.uniform(-2, 1)}
    if seed % 3 == 0:
        problem = fs.problems.quadratic(n, d, mu=mu, seed=seed, **made)
    elif seed % 3 == 1:
        apart = {
            "gradient_dissimilarity": 10 ** rng.uniform(-2, 2),
            "hessian_dissimilarity": mu * rng.uniform(),
        }
        problem = fs.problems.dialled(n, d, mu=mu, seed=seed, **apart, **made)
    else:
        one = fs.problems.quadratic(1, d, mu=mu, seed=seed).records
        hessians, linear = (np.repeat(np.asarray(a), n, axis=0) for a in one)
        problem = fs.problems.quadratic(hessians=hessians, linear=linear, **made)
    weights = "equal" if seed % 2 else rng.dirichlet(np.ones(n))
    return problem, noise, int(rng.choice([1, 4, 15, 40])), int(rng.integers(1, n + 1)), weights


@pytest.mark.slow
@pytest.mark.parametrize(  # three have every kind of problem and of weights, and noise of none, 10 and 10^4
    "seed",
    [3, 4, 5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, 1, 2, *range(6, 10)))],
)
def test_advice_is_within_half_of_the_best_on_a_grid(seed):
    problem, noise, rounds, cohort, weights = random_federation(seed)
    advice = advise(heterogeneity(problem, weights=weights), problem, rounds=rounds, cohort=cohort)
    end = gaps(problem, noise, rounds, cohort, weights)
    mine = end(advice.algorithm, advice.lr, advice.local_steps)
    assert advice.promised
    assert advice.gap == pytest.approx(mine, rel=1e-9)
    assert advice.gap <= 1.5 * max(min(one.gap for one in advice.tried), 1e-25 * advice.start_gap)
    lrs = [2.0**-k / problem.smoothness for k in range(0, 21, 4)]
    others = [end("sgd", lr, 1) for lr in lrs]
    others += [
        end(name, lr, k) for name in ("fedavg", "scaffold") for lr in lrs for k in LOCAL_STEPS[::4]
    ]
    assert mine <= 1.5 * max(min(others), 1e-25 * advice.start_gap)


@pytest.mark.slow
def test_simulated_runs_end_where_the_advice_says():
    problem = fs.problems.quadratic(
        num_clients=5, dim=3, mu=0.02, noise=1.0, x0=[3.0, -2.0, 1.0], seed=4
    )
    weights, runs = [3.0, 1.0, 1.0, 2.0, 1.0], 100
    advice = advise(
        heterogeneity(problem, weights=weights), problem, rounds=15, cohort=3, local_steps=4
    )
    found = fs.sweep(
        make(advice.algorithm),
        problem,
        rounds=15,
        local_steps=advice.local_steps,
        lr=advice.lr,
        cohort=3,
        weights=weights,
        seeds=runs,
        metrics=["gap"],
        precision="float64",
        progress=False,
    )
    ends = np.array([run.history["gap"][-1] for run in found.runs[0]])
    assert abs(ends.mean() - advice.gap) < 4 * ends.std(ddof=1) / np.sqrt(runs)


def test_where_nothing_beats_the_start_it_is_said():
    problem = fs.problems.quadratic(num_clients=3, dim=2, mu=0.5, noise=1e3, seed=0)
    at_rest = fs.problems.quadratic(
        hessians=problem.records[0],
        linear=problem.records[1],
        noise=1e3,
        x0=problem.optimum() + 1e-6,
    )
    advice = advise(heterogeneity(at_rest), at_rest, rounds=20)
    assert advice.gap >= advice.start_gap
    assert "Nothing that was tried ends below the start" in str(advice)
    kept = advise(heterogeneity(problem), problem, rounds=20, lr=1.0)
    assert kept.lr == 1.0
    assert "Nothing that was tried ends below the start" in str(kept)


@pytest.mark.slow
def test_cohorts_and_weights_change_the_advice():
    problem = fs.problems.quadratic(num_clients=6, dim=3, mu=0.05, seed=0)
    found = heterogeneity(problem)
    everyone, few = (advise(found, problem, rounds=30, cohort=cohort) for cohort in (1.0, 2))
    assert "2 of the 6 clients" in str(few)
    assert few.gap > everyone.gap
    weighted = advise(heterogeneity(problem, weights=[9, 1, 1, 1, 1, 1]), problem, rounds=30)
    assert weighted.start_gap != pytest.approx(everyone.start_gap, rel=1e-3)
    with pytest.raises(fs.InputError, match="cohort must be"):
        advise(found, problem, cohort=7)


def test_moments_too_large_to_be_exact_are_estimated_and_not_promised(monkeypatch):
    problem = random_federation(3)[0]
    options = {"rounds": 10, "cohort": 1, "lr": 0.1, "local_steps": 3}
    exact = advise(heterogeneity(problem), problem, **options)
    monkeypatch.setattr("fedscaffold.theory.quadratic_model.EXACT_MEMORY", 0)
    monkeypatch.setattr("fedscaffold.theory.quadratic_model.EXACT_FORGETFUL", 0)
    drawn = advise(heterogeneity(problem), problem, **options)
    assert (exact.promised, drawn.promised) == (True, False)
    assert "no promise" in str(drawn)
    by_name = {one.algorithm: one for one in exact.tried}
    for one in drawn.tried:
        assert abs(one.gap - by_name[one.algorithm].gap) < 5 * one.standard_error


@pytest.mark.slow
def test_what_is_no_quadratic_is_not_promised():
    problem = fs.problems.two_datasets("logistic", 4, records=20, dim=4, l2=0.1)
    advice = advise(heterogeneity(problem, batch_size=5), problem, rounds=20, cohort=0.5)
    assert not advice.promised
    assert "no promise" in str(advice)
    assert advice.gap < advice.start_gap

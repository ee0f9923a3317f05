"""Refused clients are as absent as those not drawn, and c stays the mean of the c_i."""

from itertools import product

import numpy as np
import optax
import pytest
from cases import sharp

import fedscaffold as fs

TEN = fs.problems.dialled(10, 4, gradient_dissimilarity=0.3, mu=0.3, x0=np.full(4, 2.0), seed=0)
LIARS = (2, 7)
HONEST = [i for i in range(10) if i not in LIARS]
LOUD = fs.attacks.scaling(LIARS, factor=1e4)
WEIGHTS = np.linspace(1.0, 2.0, 10)
FLIP_LATE = fs.attacks.sign_flip(LIARS, scale=50, begin=6)


def ask(algorithm=None, **own):
    given = {"rounds": 40, "local_steps": 3, "lr": 0.3, "precision": "float64", "metrics": ()}
    return fs.simulate(algorithm or fs.scaffold(), TEN, **(given | own))


def honest_optimum(weights=None):
    p = np.ones(10) if weights is None else np.array(weights, float)
    p[list(LIARS)] = 0
    return TEN.facts.optimum(p / p.sum())


@pytest.mark.parametrize(
    ("precision", "cohort"),
    sharp(product(("float32", "float64"), (1.0, 4)), [("float32", 1.0), ("float64", 4)]),
)
def test_where_nobody_is_refused_the_bits_are_those_without_a_filter(precision, cohort):
    given = {"cohort": cohort, "precision": precision, "rounds": 10, "robust": "norm_bound:1e6"}
    on, off = ask(**given), ask(**(given | {"robust": None}))
    assert on.digest == off.digest
    assert on.refused.tolist() == [0] * 10
    np.testing.assert_array_equal(on.server.c, off.server.c)
    np.testing.assert_array_equal(on.clients.c_i, off.clients.c_i)


@pytest.mark.slow
@pytest.mark.parametrize("filter", ["krum:0.3", "geometric_median:5", "norm_bound:5"])
def test_refused_is_absent_and_a_lie_never_enters_c(filter):
    """The same run with cohorts of the honest alone: a client that was refused leaves no trace."""
    run = ask(robust=filter, attack=LOUD, weights=WEIGHTS)
    assert [run.refused[i] for i in LIARS] == [40, 40]
    assert not run.clients.c_i[list(LIARS)].any()
    assert run.fault is None
    assert run.residual <= run.explained
    if filter == "krum:0.3":
        return  # it refuses others beside the liars
    assert not run.refused[HONEST].any()
    alone = ask(cohorts=[HONEST] * 40, weights=WEIGHTS)
    np.testing.assert_allclose(run.vector, alone.vector, rtol=1e-12)
    np.testing.assert_allclose(run.server.c, alone.server.c, atol=1e-14)
    np.testing.assert_allclose(run.vector, honest_optimum(WEIGHTS), atol=1e-3)  # 40 rounds are few


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {"cohort": 6, "precision": "float32"},
        {"algorithm": fs.fedavg()},
        {"algorithm": fs.feddyn(alpha=0.3)},
        {"algorithm": fs.scaffold(option=1)},
        {"local_steps": [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]},
        {"local_optimizer": optax.sgd(0.3, momentum=0.5), "lr": None},
    ],
    ids=["sampled", "fedavg", "feddyn", "option 1", "unequal steps", "optimiser"],
)
def test_the_gauge_is_at_rounding_whoever_is_refused(own):
    run = ask(robust="krum:0.2", attack=fs.attacks.alie(LIARS, z=3), rounds=20, **own)
    assert run.refused.sum() >= 20
    assert run.fault is None
    assert run.residual <= run.explained
    assert np.isfinite(run.vector).all()


@pytest.mark.slow
def test_what_was_accepted_before_stays_until_it_is_forgotten():
    """Honest for five rounds, then refused: c_i of round 5 speaks on, until a policy drops it."""
    kept, dropped = (
        ask(robust="norm_bound:5", attack=FLIP_LATE, rounds=150, stale=stale)
        for stale in ("keep", "drop:10")
    )
    assert [kept.refused[i] for i in LIARS] == [145, 145]
    assert kept.clients.c_i[list(LIARS)].all()
    assert not dropped.clients.c_i[list(LIARS)].any()
    np.testing.assert_allclose(dropped.vector, honest_optimum(), rtol=1e-8)
    # stationary where sum p_i grad f_i of the honest = - sum p_j c_j of the refused
    p, share = np.full(10, 0.1), TEN.facts.client_gradients(kept.vector)
    balance = p[HONEST] @ share[HONEST] + p[list(LIARS)] @ kept.clients.c_i[list(LIARS)]
    np.testing.assert_allclose(balance, 0, atol=1e-8)
    assert dropped.fault is kept.fault is None


@pytest.mark.slow
def test_lies_about_the_control_variate_alone_are_seen():
    lie = fs.attacks.poison_controls(LIARS, scale=30.0)
    open_, guarded = (
        ask(fs.scaffold(option=1), attack=lie, robust=robust)
        for robust in (None, "geometric_median:5")
    )
    best = honest_optimum()
    assert np.linalg.norm(open_.vector - best) > 100 * np.linalg.norm(guarded.vector - best)
    assert [guarded.refused[i] for i in LIARS] == [40, 40]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    given = {"robust": "krum:0.2", "attack": FLIP_LATE, "cohort": 6}
    whole = ask(**given)
    ask(**given, rounds=15, checkpoint=tmp_path)
    resumed = ask(**given, checkpoint=tmp_path)
    assert resumed.digest == whole.digest
    np.testing.assert_array_equal(resumed.refused, whole.refused)
    with pytest.raises(fs.InputError, match=r"robust\.name: was krum:0\.2, is krum:0\.3"):
        ask(**(given | {"robust": "krum:0.3"}), checkpoint=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cohort", sharp([1.0, 6], [6]))
def test_the_runs_of_a_sweep_refuse_as_they_do_alone(cohort):
    given = {"robust": "geometric_median:3", "attack": FLIP_LATE, "cohort": cohort, "rounds": 20}
    given |= {"local_steps": 3, "precision": "float64", "metrics": ()}
    swept = fs.sweep(fs.scaffold(), TEN, lr=[0.2, 0.3], seeds=2, **given)
    for lr, runs in zip(swept.lr, swept.runs, strict=True):
        for seed, run in enumerate(runs):
            alone = ask(**given, lr=lr, seed=seed)
            np.testing.assert_array_equal(run.refused, alone.refused)
            np.testing.assert_allclose(run.vector, alone.vector, rtol=1e-12)
            assert run.refused[list(LIARS)].all()


def test_a_run_that_diverges_at_all_clients_is_seen_to():
    run = ask(lr=1e3, rounds=200, robust="geometric_median:3")
    assert run.outcome == "diverged"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"compression": "top_k:0.5"}, "compression, which makes honest messages unlike"),
        ({"client_state": "sparse"}, "client_state='sparse': it keeps norms of all clients"),
        ({"stale": "refresh:3"}, "stale='refresh', whose gradients it does not see"),
        ({"algorithm": fs.dane()}, "dane, w"),
        ({"algorithm": fs.scaffnew()}, "scaffnew, which needs every client in every round"),
        (
            {"privacy": fs.privacy.clients(clip=1.0, noise=1.0, delta=0.01)},
            "privacy of clients, whose noise is for a sum",
        ),
        ({"robust": "krum:0.7"}, "most must be below 0.5"),
        ({"attack": 3}, "attack must be one such as"),
        ({"attack": fs.attacks.alie([10])}, "attack names client 10, and there are 10"),
        ({"attack": fs.attacks.poison_controls([1])}, "here they send one vector"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(own, said):
    with pytest.raises(fs.InputError, match=said):
        ask(**({"robust": "krum:0.2"} | own))

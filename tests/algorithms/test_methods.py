"""Methods with records of their own, each against a loop that knows no engine: SCAFFOLD-M, FedAvg-M, Ditto and others."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import sharp

import fedscaffold as fs

RNG = np.random.default_rng(11)
N, D, LR, ROUNDS = 6, 4, 0.1, 40
ROOTS = RNG.normal(size=(N, D, D))
HESSIANS = ROOTS @ ROOTS.transpose(0, 2, 1) / D + 0.3 * np.eye(D)
LINEAR, X0 = RNG.normal(size=(N, D)), RNG.normal(size=D)
P = np.arange(1.0, N + 1) / np.arange(1.0, N + 1).sum()
STEPS = [1, 2, 3, 4, 5, 3]
COHORTS = [sorted(RNG.choice(N, 3, replace=False).tolist()) for _ in range(ROUNDS)]
PROBLEM = fs.problems.quadratic(hessians=HESSIANS, linear=LINEAR, x0=X0)
OPTIMUM = np.linalg.solve(np.einsum("n,nij->ij", P, HESSIANS), P @ LINEAR)


def grad(i, y):
    return HESSIANS[i] @ y - LINEAR[i]


def simulate(algorithm, **given):
    asked = {
        "rounds": ROUNDS,
        "cohorts": COHORTS,
        "local_steps": STEPS,
        "lr": LR,
        "weights": P,
        "precision": "float64",
        "metrics": (),
    }
    return fs.simulate(algorithm, PROBLEM, **(asked | given))


def momentum(beta, server_lr, controlled):
    """The papers' lines, client by client: gradients are kept and averaged, nothing is made from displacements."""
    x, m, c_i = X0, np.zeros(D), np.zeros((N, D))
    for cohort in COHORTS:
        c, share, new = P @ c_i, P[cohort] / P[cohort].sum(), c_i.copy()
        ends, directions = [], []
        for i in cohort:
            y, gradients, used = x, [], []
            for _ in range(STEPS[i]):
                gradients.append(grad(i, y))
                corrected = gradients[-1] - c_i[i] + c if controlled else gradients[-1]
                used.append(beta * corrected + (1 - beta) * m)
                y = y - LR * used[-1]
            ends.append(y)
            directions.append(np.mean(used, axis=0))
            new[i] = np.mean(gradients, axis=0)
        x = x - server_lr * (x - share @ np.stack(ends))
        m, c_i = share @ np.stack(directions), new
    return x, m, c_i


# beta = 1: `test_with_beta_of_one_they_are_scaffold_and_fedavg`
@pytest.mark.parametrize(
    ("beta", "server_lr"), sharp([(0.3, 1.0), (0.7, 0.5), (1.0, 1.0)], [(0.7, 0.5)])
)
def test_scaffold_m_follows_the_papers_lines(beta, server_lr):
    x, m, c_i = momentum(beta, server_lr, controlled=True)
    run = simulate(fs.scaffold_m(beta=beta, server_lr=server_lr))
    for found, expected in (
        (run.vector, x),
        (run.server.m, m),
        (run.clients.c_i, c_i),
        (run.server.c, P @ c_i),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert run.residual < 1e-13


@pytest.mark.parametrize("beta", sharp([0.3, 1.0], [0.3]))
def test_fedavg_m_follows_the_papers_lines(beta):
    x, m, _ = momentum(beta, 1.0, controlled=False)
    run = simulate(fs.fedavg_m(beta=beta))
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.server.m, m, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_with_beta_of_one_they_are_scaffold_and_fedavg():
    for with_it, without in (
        (fs.scaffold_m(beta=1.0), fs.scaffold()),
        (fs.fedavg_m(beta=1.0), fs.fedavg()),
    ):
        np.testing.assert_allclose(
            simulate(with_it).vector, simulate(without).vector, rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(
    "given",
    sharp(
        [{}, {"compression": "top_k:0.5"}, {"stale": "refresh:3"}], lambda one: "stale" not in one
    ),
    ids=str,
)
def test_scaffold_m_ends_at_the_optimum_and_keeps_the_mean(given):
    """Its limit is exact under sampling, weights and unequal steps; FedAvg-M's is not."""
    asked = {"rounds": 1500, "cohorts": None, "cohort": 0.5} | given
    run = simulate(fs.scaffold_m(beta=0.3), **asked)
    np.testing.assert_allclose(run.vector, OPTIMUM, rtol=0, atol=1e-12)
    assert run.residual < 1e-13
    assert run.fault is None
    if not given:
        assert np.abs(simulate(fs.fedavg_m(beta=0.3), **asked).vector - OPTIMUM).max() > 1e-3


def test_ditto_is_fedavg_with_models_of_the_clients_own():
    lam, x, v = 0.4, X0, np.tile(X0, (N, 1))
    for cohort in COHORTS:
        share, ends = P[cohort] / P[cohort].sum(), []
        for i in cohort:
            y = x
            for _ in range(STEPS[i]):
                y, v[i] = y - LR * grad(i, y), v[i] - LR * (grad(i, v[i]) + lam * (v[i] - x))
            ends.append(y)
        x = share @ np.stack(ends)
    run = simulate(fs.ditto(lam=lam))
    np.testing.assert_allclose(run.vector, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.clients.own.v, v, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(run.vector, simulate(fs.fedavg()).vector)
    for i in range(N):
        np.testing.assert_allclose(run.model(client=i), v[i], rtol=0, atol=1e-12)


def test_a_client_without_a_model_of_its_own_uses_the_common_one():
    run = simulate(fs.scaffold(), rounds=2)
    assert run.clients.models is None
    assert run.model(client=N - 1) is run.x
    with pytest.raises(fs.InputError, match=f"one of the {N} clients here"):
        run.model(client=N)


def test_dittos_personal_models_end_between_the_clients_own_optimum_and_the_common_model():
    """At the end (H_i + lam) v_i = b_i + lam x."""
    lam = 0.4
    run = simulate(fs.ditto(lam=lam), rounds=1500, cohorts=None, cohort=1.0)
    ends = [
        np.linalg.solve(h + lam * np.eye(D), b + lam * run.vector)
        for h, b in zip(HESSIANS, LINEAR, strict=True)
    ]
    np.testing.assert_allclose(run.clients.own.v, ends, rtol=0, atol=1e-9)


def test_personal_models_survive_a_restart_bit_for_bit(tmp_path):
    whole = simulate(fs.ditto(lam=0.4))
    simulate(fs.ditto(lam=0.4), rounds=17, checkpoint=tmp_path)
    resumed = simulate(fs.ditto(lam=0.4), checkpoint=tmp_path)
    assert resumed.clients.own.v.tobytes() == whole.clients.own.v.tobytes()
    assert resumed.vector.tobytes() == whole.vector.tobytes()


def test_personal_models_are_not_kept_in_files():
    with pytest.raises(fs.InputError, match="keep models of their own"):
        simulate(fs.ditto(), client_state="sparse", metrics=("distance",))


def amplified(cohorts, window, gamma, server_lr=1.0):
    """Amplified SCAFFOLD as its authors run it: sums of raw gradients, and all clients looked at when a window ends."""
    x = anchor = X0
    control, mean_control = np.zeros((N, D)), np.zeros(D)
    sums, counts = np.zeros((N, D)), np.zeros(N)
    for r, cohort in enumerate(cohorts, 1):
        share, ends = P[cohort] / P[cohort].sum(), []
        for i in cohort:
            y = x
            for _ in range(STEPS[i]):
                g = grad(i, y)
                sums[i] += g
                counts[i] += 1
                y = y - LR * (g - control[i] + mean_control)
            ends.append(y)
        x = x + server_lr * (share @ np.stack(ends) - x)
        if r % window == 0:
            x = anchor = anchor + gamma * (x - anchor)
            came = counts > 0
            control[came] = sums[came] / counts[came, None]
            mean_control = P @ control
            sums[:], counts[:] = 0, 0
    return x, control, mean_control


PERIODIC = [[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]][r % 6] for r in range(48)]
"""Groups that are there in turns, all of them within 6 rounds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohorts", "window", "gamma", "server_lr"),
    sharp(  # a window of one: `test_a_window_of_one_round_without_amplification_is_scaffold`
        [
            (PERIODIC, 6, 1.5, 1.0),
            (PERIODIC, 4, 1.2, 0.7),
            (COHORTS, 5, 1.3, 1.0),
            (COHORTS, 1, 1.0, 0.5),
        ],
        lambda case: case[1] in (4, 5),
    ),
    ids=["periodic", "longer than a window", "sampled", "window of one"],
)
def test_amplified_scaffold_follows_its_authors_lines(cohorts, window, gamma, server_lr):
    """With weights and unequal steps; a window of 4 is too short for all groups, so some are away when it ends."""
    algorithm = fs.amplified_scaffold(window=window, gamma=gamma, server_lr=server_lr)
    run = simulate(algorithm, cohorts=cohorts, rounds=len(cohorts))
    x, control, mean_control = amplified(cohorts, window, gamma, server_lr)
    found = (
        (run.vector, x),
        (run.server.h, mean_control),
        (run.server.c, P @ control),
        (run.clients.c_i, control),
    )
    for value, expected in found if len(cohorts) % window == 0 else found[:2]:
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    assert run.residual < 1e-13
    assert run.fault is None


@pytest.mark.slow
def test_a_window_of_one_round_without_amplification_is_scaffold():
    one = simulate(fs.amplified_scaffold(window=1, gamma=1.0))
    plain = simulate(fs.scaffold())
    np.testing.assert_allclose(one.vector, plain.vector, rtol=0, atol=1e-13)
    np.testing.assert_allclose(one.clients.c_i, plain.clients.c_i, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    sharp(
        [{}, {"compression": "top_k:0.5"}, {"precision": "float32"}],
        lambda one: "precision" not in one,
    ),
    ids=str,
)
def test_amplified_scaffold_ends_at_the_optimum_where_clients_come_in_turns(given):
    """Groups of unlike weight, so each round's mean is of its own group: only frozen corrections make them agree."""
    asked = {
        "rounds": 6 * 400,
        "cohorts": PERIODIC * 50,
        "local_steps": 3,
        "lr": 0.03,
        "weights": "equal",
    } | given
    run = simulate(fs.amplified_scaffold(window=6, gamma=1.5), **asked)
    optimum = np.linalg.solve(HESSIANS.mean(axis=0), LINEAR.mean(axis=0))
    np.testing.assert_allclose(
        run.vector, optimum, rtol=0, atol=1e-10 if "precision" not in given else 1e-4
    )
    assert run.fault is None


@pytest.mark.slow
def test_amplified_scaffold_keeps_clients_in_a_sparse_store(tmp_path):
    asked = {"metrics": ("distance",), "local_steps": 3, "cohorts": None, "cohort": 0.5}
    algorithm = fs.amplified_scaffold(window=4, gamma=1.2)
    whole, sparse = (
        simulate(algorithm, client_state=kind, **asked) for kind in ("array", "sparse")
    )
    assert whole.vector.tobytes() == sparse.vector.tobytes()
    simulate(algorithm, checkpoint=tmp_path, **asked, rounds=17)
    assert (
        simulate(algorithm, checkpoint=tmp_path, **asked).vector.tobytes() == whole.vector.tobytes()
    )


def test_counters_are_no_control_variates_to_fade():
    with pytest.raises(
        fs.InputError, match=r"remember came, h_i, window beside control variates, and decay"
    ):
        simulate(fs.amplified_scaffold(), stale="decay:0.9")


@pytest.mark.slow
@pytest.mark.parametrize("server_lr", sharp([1.0, 0.5], [0.5]))
def test_scafcom_follows_its_lines_with_a_compressor(server_lr):
    """Top half of v - c_i; steps are equal, as in the paper."""
    beta, steps, kept = 0.3, 3, 2
    x, c, c_i, v = X0, np.zeros(D), np.zeros((N, D)), np.zeros((N, D))
    for cohort in COHORTS:
        seen = {}
        for i in cohort:
            y, gradients = x, []
            for _ in range(steps):
                gradients.append(grad(i, y))
                y = y - LR * (gradients[-1] - c_i[i] + c)
            v[i] = (1 - beta) * v[i] + beta * np.mean(gradients, axis=0)
            delta = v[i] - c_i[i]
            seen[i] = np.where(np.abs(delta) >= np.sort(np.abs(delta))[-kept], delta, 0)
        heard = P[cohort].sum()
        change = sum(P[i] * delta for i, delta in seen.items())
        x = x - server_lr * steps * LR * (change / heard + c)
        c = c + change
        for i, delta in seen.items():
            c_i[i] += delta
    asked = {"local_steps": steps, "compression": "top_k:0.5"}
    run = simulate(fs.scafcom(beta=beta, server_lr=server_lr), **asked)
    for found, expected in (
        (run.vector, x),
        (run.server.c, c),
        (run.clients.c_i, c_i),
        (run.clients.own.v, v),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
    assert run.residual < 1e-13
    assert run.history["bytes_up"][0] == 3 * kept * (8 + 4)


@pytest.mark.slow
def test_scafcom_ends_at_the_optimum_whatever_is_left_out():
    asked = {
        "rounds": 3000,
        "cohorts": None,
        "cohort": 0.5,
        "local_steps": 3,
        "compression": "top_k:0.25",
    }
    run = simulate(fs.scafcom(beta=0.3), **asked)
    np.testing.assert_allclose(run.vector, OPTIMUM, rtol=0, atol=1e-10)
    assert run.fault is None


@pytest.mark.slow
def test_scafcom_with_beta_of_one_is_scaffold():
    same = {"local_steps": 3, "compression": "top_k:0.5"}
    plain, with_it = (
        simulate(algorithm, **same).vector for algorithm in (fs.scaffold(), fs.scafcom(beta=1.0))
    )
    np.testing.assert_allclose(with_it, plain, rtol=0, atol=1e-12)


def test_travel_is_not_asked_of_an_optimizer():
    problem = fs.problems.quadratic(num_clients=3, dim=2, seed=1)
    given = {"rounds": 2, "local_steps": 2, "local_optimizer": optax.sgd(0.1, momentum=0.9)}
    with pytest.raises(
        fs.InputError, match="scafcom makes the server's step from the sum of step sizes"
    ):
        fs.simulate(fs.scafcom(), problem, **given)
    undeclared = fs.scafcom()._replace(needs=())
    with pytest.raises(
        fs.InputError, match="reads the sum of step sizes, which an optimizer does not have"
    ):
        fs.simulate(undeclared, problem, **given)


@pytest.mark.slow
@pytest.mark.parametrize("beta", sharp([0.2, 0.7], [0.2]))
def test_fedavg_m_ends_where_fedavg_with_a_smaller_step_does(beta):
    options = {"local_steps": 5}
    found = fs.theory.fixed_point(PROBLEM, lr=0.2, algorithm=fs.fedavg_m(beta=beta), **options)
    expected = fs.theory.fixed_point(PROBLEM, lr=beta * 0.2, algorithm=fs.fedavg(), **options)
    np.testing.assert_allclose(found[:D], expected[:D], rtol=0, atol=1e-12)


class Two(NamedTuple):
    one: object
    other: object


class Memory(NamedTuple):
    c_i: object


@pytest.mark.slow
def test_two_vectors_with_error_feedback_are_compressed_apart():
    """Were they compressed with one random key, the same coordinates of both would come."""

    def message(walk, shift):
        return Two(2 * walk.move, 2 * walk.move)

    def update(server, sent, mean, heard):
        return server._replace(x=server.x - (mean.one - mean.other))

    twins = fs.fedavg()._replace(name="twins", message=message, update=update, form=None)
    run = simulate(twins, rounds=1, cohorts=[[0]], compression="random_k:0.5")
    assert np.abs(run.vector - X0).max() > 1e-6


AVERAGE = fs.fedavg()
BAD = {
    "a function of arrays": AVERAGE._replace(
        direction=lambda g, y, x, shift: jnp.clip(g(y), -1, 1)
    ),
    "a power": AVERAGE._replace(direction=lambda g, y, x, shift: g(y) ** 2),
    "a message that is no record": AVERAGE._replace(message=lambda walk, shift: walk.move),
    "a field that no walk has": AVERAGE._replace(
        message=lambda walk, shift: Two(walk.mvoe, walk.d)
    ),
    "a mean of nothing": fs.scaffold()._replace(means=(("q", "c_i"),)),
    "a memory that nobody renews": fs.scaffold()._replace(remember=AVERAGE.remember),
    "a function that is none": fs.scaffold()._replace(remember=None),
    "an update that is no record": AVERAGE._replace(
        update=lambda server, sent, mean, heard: server.x - mean.move
    ),
    "an update without a field": fs.scaffold()._replace(
        update=lambda server, sent, mean, heard: AVERAGE.init(server.x)
    ),
    "a memory that is no record": fs.scaffold()._replace(
        remember=lambda memory, shift, message: message.d
    ),
    "a memory of another length": fs.scaffold()._replace(memory=lambda x: Memory(np.zeros(7))),
    "an update of another length": AVERAGE._replace(
        update=lambda server, sent, mean, heard: server._replace(x=np.zeros(7))
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_functions_that_cannot_be_run_are_one_line(what):
    with pytest.raises(
        fs.InputError,
        match=r"a function of .* cannot be run|must have both memory and remember|must return a record",
    ) as error:
        simulate(BAD[what])
    assert "\n" not in str(error.value)

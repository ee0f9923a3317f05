"""Privacy of whole clients, against NumPy with the same noise; the gauge reads the noise, which is no fault."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from scipy.stats import norm

import fedscaffold as fs
from fedscaffold.privacy.accounting import round_up
from fedscaffold.privacy.messages import MessageMechanism, noise_sum
from fedscaffold.privacy.noise import gaussian_noise
from fedscaffold.runs.privacy_statement import statement, to_text
from fedscaffold.runs.run_folder import RunRecord
from fedscaffold.simulation.rounds import SERVER

DIM, N, K, LR, SEED = 3, 4, 3, 0.1, 2
PRIVATE = fs.privacy.clients(clip=0.4, noise=0.8, delta=1e-3)
PROBLEM = fs.problems.quadratic(num_clients=N, dim=DIM, mu=0.2, smoothness=1.0, seed=0)
START = np.array([2.0, -1.0, 0.5])
GIVEN = {"rounds": 4, "local_steps": K, "cohort": 2, "x0": START, "seed": SEED} | {
    "precision": "float64",
    "metrics": (),
}


class Message(NamedTuple):
    move: Any


def noise_of(round, fields):
    """Noise of a round for each field that is sent, in the order of the message."""
    key = jax.random.fold_in(np.array([0, SEED], np.uint32), SERVER)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.fold_in(key, round), fields)
        return [np.asarray(gaussian_noise(one, DIM, np.float64)) for one in keys]


def clipped(*vectors):
    """Vectors clipped jointly."""
    norm = np.sqrt(sum(v @ v for v in vectors))
    return [v * min(1, PRIVATE.clip / norm) for v in vectors]


def by_hand(cohorts, separate):
    """SCAFFOLD by hand; `separate`: the move is sent beside d, as after steps of an optimiser."""
    quadratics = fs.theory.client_quadratics(PROBLEM)
    hessians, linear = np.asarray(quadratics[0]), np.asarray(quadratics[1])
    x, c, c_i = START.copy(), np.zeros(DIM), np.zeros((N, DIM))
    for r, cohort in enumerate(cohorts):
        sums, scale = [np.zeros(DIM), np.zeros(DIM)], PRIVATE.noise * PRIVATE.clip
        for i in cohort:
            y, total = x.copy(), np.zeros(DIM)
            for _ in range(K):
                d = hessians[i] @ y - linear[i] - c_i[i] + c
                y, total = y - LR * d, total + d
            change, move = total / K - c, x - y
            if separate:
                change, move = clipped(change, move)
            else:
                [change] = clipped(change)
                move = K * LR * (c + change)
            c_i[i] += change
            sums = [sums[0] + change, sums[1] + move]
        z = noise_of(r, 2 if separate else 1)
        heard = len(cohort)
        change = (sums[0] + scale * z[0]) / heard
        move = (sums[1] + scale * z[1]) / heard if separate else K * LR * (c + change)
        x, c = x - move, c + heard / N * change
    return x, c, c_i


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True], ids=["one vector", "the pair"])
def test_a_run_is_the_one_by_hand(separate):
    steps = {"local_optimizer": optax.sgd(LR)} if separate else {"lr": LR}
    simulator = fs.Simulator(fs.scaffold(), PROBLEM, privacy=PRIVATE, **GIVEN | steps)
    cohorts = simulator.ready.drawer.heard(SEED, 4)
    run = simulator.run()
    x, c, c_i = by_hand(cohorts, separate)
    np.testing.assert_allclose(run.clients.c_i, c_i, atol=1e-10)
    np.testing.assert_allclose(run.server.c, c, atol=1e-10)
    np.testing.assert_allclose(run.vector, x, atol=1e-10)
    assert run.fault is None
    assert run.residual > 1e3 * run.explained
    np.testing.assert_allclose(run.residual, np.linalg.norm(c - c_i.mean(axis=0)), rtol=1e-8)


def test_noise_of_single_precision_has_the_tails_that_small_deltas_ask_for(monkeypatch):
    """`jax.random.normal` ends at 5.3 in float32: a client could be told there, with P = 1e-5 a round."""
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: np.zeros(shape, dtype))
    mechanism, total = MessageMechanism(1.0, 1.0), Message(np.zeros(2, np.float32))
    noised = noise_sum(mechanism, total, 1.0, ("move",), jax.random.key(0))
    assert noised.move.dtype == np.float32
    assert norm.sf(float(np.max(noised.move)) - 1 / 0.7) < 1e-15


def test_a_client_is_charged_for_the_rounds_that_it_attends(tmp_path):
    cohorts = [[0, 1], [0, 2], [0, 1], [2, 3]]
    given = {name: value for name, value in GIVEN.items() if name != "cohort"}
    run = fs.simulate(
        fs.fedavg(), PROBLEM, lr=LR, cohorts=cohorts, privacy=PRIVATE, checkpoint=tmp_path, **given
    )
    assert run.privacy.steps.tolist() == [3, 2, 2, 1]
    worst = fs.privacy.epsilon(noise=0.8, rate=1.0, steps=3, delta=1e-3)
    assert run.history["epsilon"][-1] == worst == run.history["epsilon"][2]
    held = RunRecord(algorithm="fedavg", seed=0, columns=run.history, privacy=run.privacy.facts())
    text = to_text(statement(held), "a run")
    assert "a whole client, with all its records" in text
    assert f"({round_up(worst)}, 0.001)-differential privacy" in text


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        (fs.dane(), {"cohort": 1.0}, "dane exchanges more than one message a round"),
        (fs.scaffold(), {"weights": [1, 2, 3, 4]}, "weights that differ tell of clients"),
        (fs.scaffold(), {"local_steps": [1, 2, 3, 4]}, "local_steps that differ"),
        (fs.scaffold(), {"stale": "decay:0.9"}, "stale control variates"),
        (fs.scaffold(), {"compression": "top_k:0.5"}, "compression changes what was clipped"),
    ],
)
def test_what_is_not_covered_is_refused(algorithm, more, said):
    with pytest.raises(fs.InputError, match=said):
        fs.Simulator(algorithm, PROBLEM, **GIVEN | {"lr": LR, "privacy": PRIVATE} | more)

"""Methods written by following docs/extend.md alone, against NumPy; its own examples are doctests."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fedscaffold as fs

RNG = np.random.default_rng(1)
CLIENTS = [
    (RNG.normal(size=(n, 3)), RNG.normal(size=n) + offset)
    for n, offset in ((20, -2), (30, 0), (40, 1), (50, 3))
]
ASK = {"local_steps": 5, "lr": 0.1, "precision": "float64"}
EXACT = {"rtol": 0, "atol": 1e-13}


class Counted(NamedTuple):
    x: Any
    round: Any


class Memory(NamedTuple):
    m: Any


class Visits(NamedTuple):
    count: Any


class Own(NamedTuple):
    z: Any


class Move(NamedTuple):
    move: Any


class Reply(NamedTuple):
    d: Any
    move: Any


@pytest.fixture(scope="module")
def problem():
    def loss(w, batch):
        a, b = batch
        return 0.5 * jnp.mean((a @ w - b) ** 2)

    return fs.Problem(loss, np.ones(3), CLIENTS)


def gradient(w, client):
    a, b = client
    return a.T @ (a @ w - b) / len(b)


def walk(start, direction):
    """Where five local steps end, and their mean direction."""
    y, used = start, []
    for _ in range(5):
        used.append(direction(y))
        y = y - 0.1 * used[-1]
    return y, np.mean(used, axis=0)


def move(walk, shift):
    return Move(walk.move)


def step(server, sent, mean, heard):
    return server._replace(x=server.x - mean.move)


def test_a_direction_asks_for_two_gradients_and_the_server_counts(problem):
    """Sharpness-aware steps without normalisation, and a server step of 1 / round."""
    method = fs.Algorithm(
        "sharpness",
        direction=lambda gradient, y, x, shift: gradient(y + 0.05 * gradient(y)),
        message=move,
        update=lambda server, sent, mean, heard: Counted(
            server.x - mean.move / server.round, server.round + 1
        ),
        init=lambda x: Counted(x, 1),
    )
    run = fs.simulate(method, problem, rounds=10, **ASK)
    x = np.ones(3)
    for count in range(1, 11):
        ends = [
            walk(x, lambda y, c=client: gradient(y + 0.05 * gradient(y, c), c))[0]
            for client in CLIENTS
        ]
        x = x - (x - np.mean(ends, axis=0)) / count
    np.testing.assert_allclose(run.x, x, **EXACT)
    assert run.server.round == 11


def test_clients_remember_a_momentum_between_their_rounds(problem):
    method = fs.Algorithm(
        "client-momentum",
        direction=lambda gradient, y, x, shift: 0.3 * gradient(y) + 0.7 * shift,
        message=lambda walk, shift: Reply(walk.d, walk.move),
        update=step,
        memory=lambda x: Memory(0 * x),
        shift=lambda server, memory: memory.m,
        remember=lambda memory, shift, message: Memory(message.d),
    )
    turns = [[0, 1], [2, 3], [0, 3, 1], [2]] * 3
    run = fs.simulate(method, problem, cohorts=turns, weights="records", **ASK)
    p = np.array([len(b) for _, b in CLIENTS]) / 140
    x, m = np.ones(3), np.zeros((4, 3))
    for cohort in turns:
        moves = {}
        for i in cohort:
            y, m[i] = walk(x, lambda y, i=i: 0.3 * gradient(y, CLIENTS[i]) + 0.7 * m[i])
            moves[i] = p[i] * (x - y)
        x = x - sum(moves.values()) / p[cohort].sum()
    np.testing.assert_allclose(run.x, x, **EXACT)
    np.testing.assert_allclose(run.clients.memory.m, m, **EXACT)


def test_a_memory_and_a_shift_may_be_numbers(problem):
    """FedProx whose pull fades with the number of rounds in which the client took part."""
    method = fs.Algorithm(
        "fading-pull",
        direction=lambda gradient, y, x, shift: gradient(y) + shift * (y - x),
        message=move,
        update=step,
        memory=lambda x: Visits(0.0),
        shift=lambda server, memory: 0.3 / (1 + memory.count),
        remember=lambda memory, shift, message: Visits(memory.count + 1),
    )
    turns = [[0, 1], [2, 3], [0, 3, 1], [2]] * 3
    run = fs.simulate(method, problem, cohorts=turns, weights="records", **ASK)
    p = np.array([len(b) for _, b in CLIENTS]) / 140
    x, count = np.ones(3), np.zeros(4)
    for cohort in turns:
        ends = [
            walk(x, lambda y, i=i, x=x: gradient(y, CLIENTS[i]) + 0.3 / (1 + count[i]) * (y - x))[0]
            for i in cohort
        ]
        x = p[cohort] @ np.array(ends) / p[cohort].sum()
        count[cohort] += 1
    np.testing.assert_allclose(run.x, x, **EXACT)
    np.testing.assert_array_equal(run.clients.memory.count, count)


def test_clients_keep_models_for_themselves(problem):
    method = fs.Algorithm(
        "personal-mean",
        direction=lambda gradient, y, x, shift: gradient(y),
        message=move,
        update=step,
        own=Own,
        keep=lambda own, walk, shift: Own(0.5 * own.z + 0.5 * walk.y),
        personal=lambda x, own: own.z,
    )

    def error(w, data):
        a, b = data
        return jnp.mean((a @ w - b) ** 2)

    own_error = fs.metric(error, model="own", summary="mean")
    run = fs.simulate(method, problem, rounds=6, metrics=[own_error], **ASK)
    x, z = np.ones(3), np.ones((4, 3))
    for _ in range(6):
        ends = np.array([walk(x, lambda y, c=client: gradient(y, c))[0] for client in CLIENTS])
        x, z = ends.mean(axis=0), 0.5 * z + 0.5 * ends
    np.testing.assert_allclose(run.x, x, **EXACT)
    np.testing.assert_allclose([run.model(client=i) for i in range(4)], z, **EXACT)
    expected = np.mean([np.mean((a @ z[i] - b) ** 2) for i, (a, b) in enumerate(CLIENTS)])
    np.testing.assert_allclose(run.history["error_mean"][-1], expected, rtol=1e-12)

"""The family beside SCAFFOLD: each method against an oracle that is not our own code path."""

from functools import partial

import family_oracles as oracles
import jax
import numpy as np
import pytest
from family_case import EXACT, HESSIANS, LINEAR, OPTIMUM, PROBLEM, RNG, X0, D, N, close, grad, run
from hypothesis import given, settings
from hypothesis import strategies as st

import fedscaffold as fs
from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.algorithms.scaffold import Memory, Message, Server
from fedscaffold.simulation.sampling import Streams, draw_local_steps

# Where everybody ends


NO_MATRIX = {"amplified-scaffold", "fedexp"}
"""Methods whose rounds are not all one affine map, so that theory knows no fixed point: each has an oracle of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - NO_MATRIX))
def test_the_limit_is_the_fixed_point_that_theory_finds(name):
    algorithm = ALGORITHMS[name]()
    found = run(algorithm, rounds=3000)
    off = fs.theory.bias(PROBLEM, lr=0.2, local_steps=5, algorithm=algorithm)
    np.testing.assert_allclose(found.vector - OPTIMUM, off, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_the_biased_are_those_known_to_be():
    biased = {
        name
        for name, factory in ALGORITHMS.items()
        if name not in NO_MATRIX
        and np.abs(fs.theory.bias(PROBLEM, lr=0.2, local_steps=5, algorithm=factory())).max() > 1e-9
    }
    assert biased == {"ca2fl", "ditto", "fedavg", "fedavg-m", "fedbn", "fednova", "fedprox"}


# The xi form, VRL-SGD


@pytest.mark.slow
def test_the_xi_form_is_the_c_form_with_half_the_messages_down():
    for server_lr in (1.0, 0.7):
        c_form, xi_form = (
            run(fs.scaffold(server_lr=server_lr)),
            run(fs.scaffold_xi(server_lr=server_lr)),
        )
        close(xi_form.vector, c_form.vector, ulps=200)
        close(xi_form.clients.c_i, c_form.clients.c_i, ulps=4000)
    vector = PROBLEM.dim * 8 * N
    assert (c_form.history["bytes_up"] == vector).all()
    assert (c_form.history["bytes_down"] == 2 * vector).all()
    assert (xi_form.history["bytes_up"] == vector).all()
    assert (xi_form.history["bytes_down"] == vector).all()


def test_clients_of_the_xi_form_can_find_c_from_two_models():
    before, after = (run(fs.scaffold_xi(server_lr=0.7), rounds=r) for r in (6, 7))
    close(after.server.c, (before.vector - after.vector) / (0.7 * 5 * 0.2))


def test_vrl_sgd_is_the_xi_form():
    close(run(fs.scaffold_xi()).vector, oracles.vrl_sgd(HESSIANS, LINEAR, X0, 0.2, 5, 30)[-1])


@pytest.mark.slow
def test_saga_is_one_client_and_one_step():
    clients = RNG.integers(0, N, 40).tolist()
    expected = oracles.saga(HESSIANS, LINEAR, X0, 0.1, clients)[-1]
    for option in (1, 2):
        found = run(
            fs.scaffold(option=option),
            rounds=40,
            local_steps=1,
            lr=0.1,
            cohorts=[[i] for i in clients],
        )
        close(found.vector, expected)


# Scaffnew


def test_scaffnew_is_proxskip_with_the_same_coin():
    mean, seed, rounds, lr = 4, 3, 25, 0.3
    streams = Streams(seed)
    lengths = [draw_local_steps(streams, r, mean) for r in range(rounds)]
    coins = [t == length - 1 for length in lengths for t in range(length)]
    found = run(fs.scaffnew(), rounds=rounds, local_steps=mean, lr=lr, seed=seed)
    assert len(set(lengths)) > 3
    close(found.vector, oracles.scaffnew(HESSIANS, LINEAR, X0, lr, 1 / mean, coins)[-1])


def test_the_coin_is_geometric_with_the_mean_asked_for():
    streams = Streams(11)
    drawn = np.array([draw_local_steps(streams, r, 6) for r in range(4000)])
    p = 1 / 6
    assert drawn.min() == 1
    assert abs(drawn.mean() - 6) < 4 * np.sqrt((1 - p) / p**2 / len(drawn))
    assert abs(np.mean(drawn == 1) - p) < 4 * np.sqrt(p * (1 - p) / len(drawn))


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_scaffnew_decreases_its_lyapunov_function(seed, p, share):
    """E Psi+ <= (1 - min(lr mu, p^2)) Psi, Psi = sum |x_i - x*|^2 + (lr/p)^2 sum |h_i - grad f_i(x*)|^2, for any state."""
    rng = np.random.default_rng(seed)
    algorithm = fs.scaffnew()
    mu, smoothness = np.linalg.eigvalsh(HESSIANS).min(), np.linalg.eigvalsh(HESSIANS).max()
    lr = share / smoothness
    x, y = rng.normal(size=D), rng.normal(size=(N, D))
    c_i = rng.normal(size=(N, D))
    c = c_i.mean(axis=0)

    def psi(y, h):
        star = np.stack([grad(i, OPTIMUM) for i in range(N)])
        return np.sum((y - OPTIMUM) ** 2) + (lr / p) ** 2 * np.sum((h - star) ** 2)

    server, memory = Server(x, c), [Memory(one) for one in c_i]
    shifts = [algorithm.shift(server, one) for one in memory]
    ahead = np.stack(
        [y[i] - lr * algorithm.direction(partial(grad, i), y[i], x, shifts[i]) for i in range(N)]
    )
    messages = [Message(p * (x - one) / lr, x - one) for one in ahead]
    new = np.stack(
        [algorithm.remember(*one).c_i for one in zip(memory, shifts, messages, strict=True)]
    )
    mean = Message(*(np.mean(field, axis=0) for field in zip(*messages, strict=True)))
    new_c = algorithm.update(server, server, mean, 1.0).c
    quiet = psi(ahead, c_i - c)
    spoken = psi(np.tile(ahead.mean(axis=0), (N, 1)), new - new_c)
    assert p * spoken + (1 - p) * quiet <= (1 - min(lr * mu, p**2)) * psi(y, c_i - c) * (1 + 1e-12)


@pytest.mark.slow
def test_scaffnew_needs_fewer_rounds_where_the_problem_is_ill_conditioned():
    """With p = sqrt(mu / L) about sqrt(L / mu) log(1/eps) rounds; gradient descent takes L / mu log(1/eps)."""
    spread = np.random.default_rng(4).uniform(0.8, 1.0, size=(6, 8))
    hessians = np.einsum("nd,de->nde", spread * np.geomspace(0.002, 1, 8), np.eye(8))
    problem = fs.problems.quadratic(
        hessians=hessians, linear=np.random.default_rng(5).normal(size=(6, 8))
    )
    mean = round(1 / np.sqrt(0.002))
    ask = {"lr": 1.0, "stop_at": ("distance", 1e-6), "metrics": ["distance"], **EXACT}
    scaffnew = fs.simulate(fs.scaffnew(), problem, rounds=2000, local_steps=mean, **ask)
    descent = fs.simulate(fs.sgd(), problem, rounds=20000, **ask)
    assert scaffnew.reached_at < descent.reached_at / 5


# DANE, Mime, FedNova, FedDyn


def cohorts_of(size, rounds):
    return [sorted(RNG.choice(N, size, replace=False).tolist()) for _ in range(rounds)]


@pytest.mark.slow
def test_dane_with_many_steps_solves_its_local_problems():
    expected = oracles.dane(HESSIANS, LINEAR, X0, 0.3, 12)[-1]
    close(run(fs.dane(mu=0.3), rounds=12, local_steps=400, lr=0.7).vector, expected, ulps=20000)


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_dane_by_steps_with_sampling(mu):
    cohorts = cohorts_of(3, 10)
    expected = oracles.dane_by_steps(HESSIANS, LINEAR, X0, 0.2, 5, mu, cohorts)[-1]
    close(run(fs.dane(mu=mu), rounds=10, cohorts=cohorts).vector, expected)
    if mu == 0:
        close(run(fs.mime(beta=0.0), rounds=10, cohorts=cohorts).vector, expected)


def test_mime_applies_the_servers_momentum_in_the_local_steps():
    cohorts = cohorts_of(4, 15)
    expected = oracles.mime(HESSIANS, LINEAR, X0, 0.2, 5, 0.8, cohorts)[-1]
    close(run(fs.mime(beta=0.8), rounds=15, cohorts=cohorts).vector, expected)


@pytest.mark.slow
def test_the_correction_of_mime_and_dane_uses_the_same_batch():
    """Equal clients of two unlike records each: a batch of one record, corrected by itself, leaves no noise."""
    records = np.stack([np.eye(2), np.diag([0.2, 0.2])]), np.array([[1.0, 0.0], [1.0, 0.0]])

    def loss(y, batch):
        a, b = batch
        return jax.numpy.mean(jax.vmap(lambda a, b: y @ a @ y / 2 - b @ y)(a, b))

    problem = fs.Problem(loss, np.array([3.0, 3.0]), [records] * 3)
    runs = [
        fs.simulate(
            fs.dane(), problem, rounds=1, local_steps=1, lr=0.5, batch_size=1, seed=seed, **EXACT
        )
        for seed in range(3)
    ]
    close(
        runs[0].vector,
        X := np.array([3.0, 3.0]) - 0.5 * (np.diag([0.6, 0.6]) @ [3.0, 3.0] - [1.0, 0.0]),
    )
    close(runs[1].vector, X)
    close(runs[2].vector, X)


def test_fednova_divides_by_what_each_client_travelled():
    steps, cohorts, weights = (
        [1 + i % 4 for i in range(N)],
        cohorts_of(4, 20),
        np.arange(1.0, N + 1),
    )
    weights /= weights.sum()
    expected = oracles.fednova(
        HESSIANS, LINEAR, X0, 0.2, steps, cohorts, weights=weights, server_lr=0.9
    )[-1]
    ask = {"rounds": 20, "local_steps": steps, "weights": weights, "cohorts": cohorts}
    close(run(fs.fednova(server_lr=0.9), **ask).vector, expected)
    close(run(fs.fednova(server_lr=0.9), lr=lambda k: 0.2, **ask).vector, expected)


def test_fedexp_steps_as_far_as_its_rule_says():
    cohorts, weights = cohorts_of(4, 20), np.arange(1.0, N + 1)
    path, steps = oracles.fedexp(HESSIANS, LINEAR, X0, 0.2, 5, cohorts, weights, eps=0.01)
    assert (steps == 1).any(), "the maximum is never 1"
    assert (steps > 1).any(), "the maximum is always 1"
    found = run(fs.fedexp(eps=0.01), rounds=20, weights=weights / weights.sum(), cohorts=cohorts)
    close(found.vector, path[-1])


def test_fedexp_of_clients_that_agree_is_fedavg():
    alike = fs.problems.quadratic(
        hessians=HESSIANS[:1].repeat(3, 0), linear=LINEAR[:1].repeat(3, 0)
    )
    ask = {"rounds": 10, "local_steps": 5, "lr": 0.2, "metrics": (), "x0": X0, **EXACT}
    fedexp, fedavg = (fs.simulate(make(), alike, **ask).vector for make in (fs.fedexp, fs.fedavg))
    close(fedexp, fedavg)


def test_fedexp_has_no_matrix():
    with pytest.raises(fs.InputError, match="fedexp sums over coordinates"):
        fs.theory.bias(PROBLEM, lr=0.2, local_steps=5, algorithm=fs.fedexp())


def test_fednova_keeps_the_objective_where_fedavg_follows_the_busy():
    """As lr -> 0 with unequal steps FedAvg ends at the optimum weighted by steps, FedNova at the right one."""
    steps = [1 + 5 * (i % 2) for i in range(N)]
    p = np.array(steps) / np.sum(steps)
    busy = np.linalg.solve(np.einsum("n,nij->ij", p, HESSIANS), p @ LINEAR)
    ask = {"rounds": 6000, "local_steps": steps, "lr": 0.004}
    fedavg, fednova = run(fs.fedavg(), **ask).vector, run(fs.fednova(), **ask).vector
    assert np.abs(fednova - OPTIMUM).max() < 0.1 * np.abs(busy - OPTIMUM).max()
    assert np.abs(fedavg - busy).max() < 0.1 * np.abs(busy - OPTIMUM).max()


def test_feddyn_with_sampling_follows_its_own_lines():
    cohorts = cohorts_of(3, 25)
    expected = oracles.feddyn(HESSIANS, LINEAR, X0, 0.2, 5, 0.5, cohorts)[-1]
    close(run(fs.feddyn(alpha=0.5), rounds=25, cohorts=cohorts).vector, expected)


def test_feddyn_remembers_the_local_gradient_where_it_solves_exactly():
    found = run(fs.feddyn(alpha=0.5), rounds=1, local_steps=500, lr=0.6)
    for i in range(N):
        y = X0 - found.clients.c_i[i] / 0.5
        close(found.clients.c_i[i], grad(i, y), ulps=20000)


# Richardson-Romberg


def test_richardson_raises_the_order_of_fedavgs_bias():
    def off(lr):
        return fs.theory.bias(PROBLEM, lr=lr, local_steps=5, algorithm=fs.fedavg())

    sizes = [
        (np.linalg.norm(off(lr)), np.linalg.norm(2 * off(lr) - off(2 * lr)))
        for lr in (0.002, 0.001)
    ]
    plain, combined = np.log2(np.divide(*sizes))
    assert plain == pytest.approx(1, abs=0.02)
    assert combined == pytest.approx(2, abs=0.05)
    both = fs.richardson(fs.fedavg(), PROBLEM, lr=0.02, rounds=4000, local_steps=5, **EXACT)
    np.testing.assert_allclose(both.vector - OPTIMUM, 2 * off(0.02) - off(0.04), rtol=0, atol=1e-10)
    close(both.x, both.vector)

"""The signature of an algorithm, proved on the cases that it was made for: each against a loop that knows no algorithm."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from fedscaffold.algorithms import fedavg, fednova, scaffnew, scaffold
from fedscaffold.algorithms.reference import Federation, begin, descend, mean_of, play
from fedscaffold.algorithms.round import exchange, rebuild, reply_of
from fedscaffold.checks import InputError

RNG = np.random.default_rng(7)
N, D, K, LR, ROUNDS = 5, 3, 4, 0.1, 60
ROOTS = RNG.normal(size=(N, D, D))
HESSIANS = ROOTS @ ROOTS.transpose(0, 2, 1) / D + 0.3 * np.eye(D)
LINEAR, X0 = RNG.normal(size=(N, D)), RNG.normal(size=D)
P = np.arange(1.0, N + 1) / np.arange(1.0, N + 1).sum()
OPTIMUM = np.linalg.solve(np.einsum("n,nij->ij", P, HESSIANS), P @ LINEAR)
COHORTS = [sorted(RNG.choice(N, 3, replace=False).tolist()) for _ in range(ROUNDS)]
CLOSE = {"rtol": 0, "atol": 1e-12}


def grad(i, y):
    return HESSIANS[i] @ y - LINEAR[i]


def gauge(server, memory):
    """|c - sum p_i c_i|."""
    return np.abs(server.c - sum(p * one.c_i for p, one in zip(P, memory, strict=True))).max()


def work(algorithm, i, x, shift, steps=K):
    """A client's part of a round, from what it was sent: the message and the sum of its step sizes."""
    walk = descend(algorithm, partial(grad, i), x, x, shift, lrs=[LR] * steps)
    return reply_of(algorithm, walk, shift, None)[0], LR * steps


def by_hand(option, rounds=ROUNDS, server_lr=1.0):
    """SCAFFOLD as the paper writes it, with sampling and weights; x and the c_i after every round."""
    x, c_i, seen = X0, np.zeros((N, D)), []
    for cohort in COHORTS[:rounds]:
        c, ends, new = P @ c_i, {}, c_i.copy()
        for i in cohort:
            y, gradients = x, []
            for _ in range(K):
                gradients.append(grad(i, y))
                y = y - LR * (gradients[-1] - c_i[i] + c)
            ends[i] = y
            new[i] = grad(i, x) if option == 1 else np.mean(gradients, axis=0)
        share = P[cohort] / P[cohort].sum()
        x, c_i = x + server_lr * (share @ np.stack([ends[i] for i in cohort]) - x), new
        seen.append((x, c_i))
    return seen


# Where the memory lives


@pytest.mark.parametrize("option", [1, 2])
def test_a_stateless_client_sees_x_and_its_shift_and_the_server_remembers(option):
    algorithm = scaffold(option=option, server_lr=0.8)
    server, memory = algorithm.init(X0), [algorithm.memory(X0) for _ in range(N)]
    for cohort, (x, c_i) in zip(COHORTS, by_hand(option, server_lr=0.8), strict=True):
        messages = {}
        for i in cohort:
            shift = algorithm.shift(server, memory[i])
            message, travel = work(algorithm, i, server.x, shift)
            over = {name: getattr(message, name) for name in exchange(algorithm).sent(plain=True)}
            messages[i] = rebuild(algorithm, over, travel, plain=True)
            memory[i] = algorithm.remember(memory[i], shift, messages[i])
        mean, heard = mean_of(P, messages)
        server = algorithm.update(server, server, mean, heard)
        np.testing.assert_allclose(server.x, x, **CLOSE)
        np.testing.assert_allclose([one.c_i for one in memory], c_i, **CLOSE)
    assert gauge(server, memory) < 1e-13
    assert len(over) == (2 if option == 1 else 1)


class Client:
    """A client that keeps its own memory. It learns x and what goes down, and once that it was heard."""

    def __init__(self, algorithm, i):
        self.algorithm, self.i, self.memory, self.pending = algorithm, i, algorithm.memory(X0), None

    def reply(self, x, down):
        known = self.algorithm.init(x)._replace(**down)
        shift = self.algorithm.shift(known, self.memory)
        message, travel = work(self.algorithm, self.i, x, shift)
        over = {name: getattr(message, name) for name in exchange(self.algorithm).sent(plain=True)}
        # It remembers what the server will make of the vectors, not what it made them from.
        message = rebuild(self.algorithm, over, travel, plain=True)
        self.pending = self.algorithm.remember(self.memory, shift, message)
        return over, travel

    def heard(self):
        self.memory = self.pending


@pytest.mark.parametrize("option", [1, 2])
def test_a_client_with_its_memory_sees_x_and_the_fields_that_go_down(option):
    algorithm = scaffold(option=option)
    server, clients = algorithm.init(X0), [Client(algorithm, i) for i in range(N)]
    for cohort, (x, c_i) in zip(COHORTS, by_hand(option), strict=True):
        down = {name: getattr(server, name) for name in exchange(algorithm).down}
        assert list(down) == ["c"]
        messages = {}
        for i in range(N):  # all train; only the cohort is heard
            over, travel = clients[i].reply(server.x, down)
            if i in cohort:
                messages[i] = rebuild(algorithm, over, travel, plain=True)
                clients[i].heard()
        mean, heard = mean_of(P, messages)
        server = algorithm.update(server, server, mean, heard)
        np.testing.assert_allclose(server.x, x, **CLOSE)
        np.testing.assert_allclose([client.memory.c_i for client in clients], c_i, **CLOSE)


# Scaffnew: the travel that was planned


@pytest.mark.process
def test_scaffnew_divides_by_the_planned_steps():
    algorithm, mean_steps = scaffnew(), 3
    lengths = RNG.geometric(1 / mean_steps, ROUNDS).tolist()
    assert len(set(lengths)) > 3
    # ProxSkip: every client steps along g - h_i; when the coin falls they average, and h_i takes up the difference
    x, h = X0, np.zeros((N, D))
    state = begin(algorithm, X0, N)
    for length in lengths:
        ys = np.tile(x, (N, 1))
        for _ in range(length):
            ys = ys - LR * (np.stack([grad(i, y) for i, y in enumerate(ys)]) - h)
        x = ys.mean(axis=0)
        h = h + (x - ys) / (mean_steps * LR)

        def steps(i, start, x, shift, length=length):
            at, own = [LR] * length, partial(grad, i)
            return descend(algorithm, own, start, x, shift, lrs=at, planned=mean_steps)

        state = play(algorithm, state, Federation([1 / N] * N, steps, grad), range(N))
        np.testing.assert_allclose(state.server.x, x, **CLOSE)
        np.testing.assert_allclose([one.c_i - state.server.c for one in state.memory], h, **CLOSE)


# Compression: what was decoded counts


def top(vector):
    """The largest entry alone."""
    return np.where(np.abs(vector) == np.abs(vector).max(), vector, 0.0)


def test_what_compression_left_out_is_not_remembered():
    algorithm = scaffold()
    ((field, reference),) = algorithm.references
    server, memory = algorithm.init(X0), [algorithm.memory(X0) for _ in range(N)]
    x, c_i = X0, np.zeros((N, D))
    for r in range(1500):
        cohort = COHORTS[r % ROUNDS]
        messages = {}
        for i in cohort:
            shift = algorithm.shift(server, memory[i])
            message, travel = work(algorithm, i, server.x, shift)
            at = reference(server)
            decoded = {field: at + top(getattr(message, field) - at)}
            messages[i] = rebuild(algorithm, decoded, travel, plain=True)
            memory[i] = algorithm.remember(memory[i], shift, messages[i])
        server = algorithm.update(server, server, *mean_of(P, messages))
        # each c_i follows the mean gradient by its largest entry; x moves along the mean of c and those changes
        c, change = P @ c_i, np.zeros((N, D))
        for i in cohort:
            y, total = x, 0
            for _ in range(K):
                total = total + grad(i, y)
                y = y - LR * (grad(i, y) - c_i[i] + c)
            change[i] = top(total / K - c_i[i])
        share = P[cohort] / P[cohort].sum()
        x, c_i = x - K * LR * (c + share @ change[cohort]), c_i + change
        if r < 20:  # as long as rounding cannot choose another entry
            np.testing.assert_allclose(server.x, x, **CLOSE)
    assert gauge(server, memory) < 1e-13
    np.testing.assert_allclose(server.x, OPTIMUM, **CLOSE)


# Late replies


@pytest.mark.slow
@pytest.mark.parametrize("option", [1, 2])
def test_late_replies_keep_the_mean_and_reach_the_optimum(option):
    """Asynchronous: a client works from an old record, at most one task each; replies come in any order."""
    server_lr, rng = 0.3, np.random.default_rng(option)
    algorithm = scaffold(option=option, server_lr=server_lr)
    server, memory = algorithm.init(X0), [algorithm.memory(X0) for _ in range(N)]
    x, c_i = X0, np.zeros((N, D))
    tasks, copies, ages = {}, {}, []
    for arrival in range(4000):
        idle = [i for i in range(N) if i not in tasks]
        for i in (
            idle if not tasks else rng.permutation(idle)[: rng.integers(0, len(idle) + 1)].tolist()
        ):
            shift = algorithm.shift(server, memory[i])
            tasks[i] = (arrival, server, shift, work(algorithm, i, server.x, shift)[0])
            copies[i] = (x, P @ c_i)
        i = int(rng.choice(sorted(tasks)))
        begun, sent, shift, message = tasks.pop(i)
        ages.append(arrival - begun)
        memory[i] = algorithm.remember(memory[i], shift, message)
        server = algorithm.update(server, sent, message, P[i])
        x_sent, c_sent = copies[i]
        y, total = x_sent, 0
        for _ in range(K):
            total = total + grad(i, y)
            y = y - LR * (grad(i, y) - c_i[i] + c_sent)
        x, c_i[i] = x - server_lr * (x_sent - y), grad(i, x_sent) if option == 1 else total / K
        if arrival < 200:
            assert gauge(server, memory) < 1e-14 * (
                1 + max(np.abs(one.c_i).max() for one in memory)
            )
            np.testing.assert_allclose(server.x, x, **CLOSE)
    assert max(ages[:200]) >= N
    np.testing.assert_allclose(server.x, OPTIMUM, **CLOSE)


def test_a_late_reply_against_todays_c_loses_the_mean():
    """What `sent` is for."""
    algorithm = scaffold()
    server, memory = algorithm.init(X0), [algorithm.memory(X0) for _ in range(N)]
    late = work(algorithm, 0, server.x, shift := algorithm.shift(server, memory[0]))[0]
    other = work(algorithm, 1, server.x, algorithm.shift(server, memory[1]))[0]
    memory[1] = algorithm.remember(memory[1], algorithm.shift(server, memory[1]), other)
    now = algorithm.update(server, server, other, P[1])
    memory[0] = algorithm.remember(memory[0], shift, late)
    assert gauge(algorithm.update(now, server, late, P[0]), memory) < 1e-14
    assert gauge(algorithm.update(now, now, late, P[0]), memory) > 1e-3


# FedNova: the travel is the server's own knowledge


def test_fednova_with_unequal_steps():
    algorithm, counts = fednova(server_lr=0.9), [1 + i % 4 for i in range(N)]
    assert exchange(algorithm).vectors == ("pace",)
    server, x = algorithm.init(X0), X0
    for cohort in COHORTS:
        messages = {}
        for i in cohort:
            message, travel = work(algorithm, i, server.x, None, steps=counts[i])
            messages[i] = rebuild(algorithm, {"pace": message.pace}, travel, plain=True)
        server = algorithm.update(server, server, *mean_of(P, messages))
        ys = []
        for i in cohort:
            y = x
            for _ in range(counts[i]):
                y = y - LR * grad(i, y)
            ys.append(y)
        share = P[cohort] / P[cohort].sum()
        steps = np.array(counts)[cohort]
        x = x - 0.9 * (share @ steps) * (share @ ((x - np.stack(ys)) / steps[:, None]))
        np.testing.assert_allclose(server.x, x, **CLOSE)


class Pair(NamedTuple):
    """A server's record with a second field, which mistakes are made about."""

    x: object
    v: object


def mistaken(update, init=lambda x: Pair(x, 0 * x)):
    """FedAvg with a second field at the server."""
    return fedavg()._replace(name="mistaken", init=init, update=update, form=None)


MISTAKES = {
    "v begins as a number and becomes a vector; write 0 \\* x": mistaken(
        lambda server, sent, mean, heard: Pair(server.x - mean.move, server.v + mean.move),
        init=lambda x: Pair(x, 0.0),
    ),
    "v begins as a vector and becomes a number": mistaken(
        lambda server, sent, mean, heard: Pair(server.x - mean.move, heard)
    ),
    "cannot be run: .* ufunc.*; use \\+ - \\* / on vectors": mistaken(
        lambda server, sent, mean, heard: Pair(server.x - np.sqrt(mean.move), server.v)
    ),
    "cannot be run: a vector is not true or false": mistaken(
        lambda server, sent, mean, heard: Pair(server.x if mean.move > 0 else sent.x, server.v)
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_a_compiled_round_cannot_do_is_refused_in_a_line(words):
    with pytest.raises(InputError, match=words) as refusal:
        exchange(MISTAKES[words])
    assert "\n" not in str(refusal.value)


def test_a_parameter_of_numpy_and_comparisons_leave_vectors_vectors():
    half = np.float64(0.5)
    algorithm = mistaken(
        lambda server, sent, mean, heard: Pair(
            server.x - half * mean.move, abs(half * (mean.move > 0) * mean.move**2)
        )
    )
    assert exchange(algorithm).vectors == ("move",)

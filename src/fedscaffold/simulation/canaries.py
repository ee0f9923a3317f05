"""The audit of the private gradient: many canaries in one run of the simulator itself.

What no attack finds, such as a clip of each tensor by itself, is found by identities: with the same
noise, one loud record moves the sum by the clip along its gradient, and noise has the stated size
and is independent for each client, round and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import scaffold
from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import epsilon
from fedscaffold.privacy.auditing import guess
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.records import Records
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.client_canaries import attack_clients, find_client_faults
from fedscaffold.simulation.simulator import Simulator

__all__ = ["Audit", "audit_privacy"]

LOUD = 1e3  # norm of a canary's gradient before it is clipped, in units of the clip
ROUNDS, STEPS, RECORDS, WIDTH = 2, 2, 4, 2000  # of the runs that check identities


class Audit(NamedTuple):
    """What an audit found."""

    def __repr__(self) -> str:
        said = "; ".join(self.faults) or ("REFUTED" if self.refuted else "not refuted")
        return f"Audit(epsilon at least {self.found:.3g}, claimed {self.claimed:.3g}: {said})"

    claimed: float
    """The epsilon of the run, from the accountant."""
    found: float
    """The lower bound on epsilon that the attack proves."""
    confidence: float
    guesses: int
    correct: int
    """Correct guesses of whether a canary was among the records."""
    canaries: int
    faults: tuple[str, ...] = ()
    """Identities of the mechanism that do not hold, in words."""

    @property
    def refuted(self) -> bool:
        """Whether the attack proves that epsilon is larger than claimed, or an identity fails."""
        return self.found > self.claimed or bool(self.faults)


def audit_privacy(
    privacy: Records | Clients,
    *,
    rate: float = 1.0,
    local_steps: int,
    rounds: int,
    canaries: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """Attack a run of private SCAFFOLD on canaries, and bound epsilon from below.

    A client holds canaries, each of which is in with probability 1/2; its gradient points along an
    axis of its own and is a thousand times as long as the clip. A second client holds records
    without a gradient. The attacker sees all that both clients send, in every round: the means of
    their private gradients. It scores a canary by the sum along its axis, and by the difference of
    the two clients' sums, in which noise that both share would cancel.

    Where whole clients are protected, canaries are clients, and the attacker sees the models and
    the control variates of the server.

    Args:
        privacy: The settings.
        rate: Probability with which a step draws a record; 1 where clients are protected.
        local_steps: Steps of a round.
        rounds: Number of rounds.
        canaries: Number of canaries; more prove more.
        confidence: Probability that the lower bound holds, at least.
        seed: Seed of the canaries and of the run.

    Returns:
        The lower bound beside the epsilon that is claimed.

    >>> import fedscaffold as fs
    >>> private = fs.privacy.records(clip=1.0, noise=1.0, delta=1e-5)
    >>> fs.audit_privacy(private, rate=0.2, local_steps=5, rounds=2, canaries=300)
    Audit(epsilon at least ..., claimed 4...: not refuted)
    """
    if not isinstance(privacy, (Records, Clients)):
        raise InputError("give fs.privacy.records(...) or fs.privacy.clients(...) to audit")
    if isinstance(privacy, Clients) and rate != 1:
        raise InputError(f"nothing is gained from sampling clients: rate must be 1, got {rate}")
    canaries = checks.whole("canaries", canaries, at_least=100, at_most=20_000)
    if not 0 < checks.number("confidence", confidence, above=0) < 1:
        raise InputError(f"confidence must be below 1, got {confidence}")
    inside = np.random.default_rng([seed, 1]).random(canaries) < 0.5
    privacy = replace(privacy, stop_at_epsilon=None)
    run = {"local_steps": local_steps, "rounds": rounds, "seed": seed}
    if isinstance(privacy, Clients):
        scores = attack_clients(privacy, inside, **run)
        steps, faults = rounds, tuple(find_client_faults(privacy, seed))
    else:
        scores = _attack_records(privacy, inside, rate, **run)
        steps, faults = rounds * local_steps, tuple(_faults(privacy, seed))
    found = guess(scores, inside, delta=privacy.delta, confidence=confidence)
    claimed = epsilon(noise=privacy.noise, rate=rate, steps=steps, delta=privacy.delta)
    return Audit(claimed, found.epsilon, confidence, found.guesses, found.correct, canaries, faults)


def _attack_records(
    privacy: Records,
    inside: NDArray[np.bool_],
    rate: float,
    *,
    local_steps: int,
    rounds: int,
    seed: int,
) -> list[NDArray[np.float64]]:
    """Run SCAFFOLD with canaries among the first client's records, and return two scores."""
    axis = np.arange(len(inside))
    clients = [
        {"axis": axis, "size": LOUD * privacy.clip * held}
        for held in (inside.astype(float), np.zeros(len(inside)))
    ]
    problem = Problem(_along_axes, {"a": np.zeros(len(inside))}, clients, coupled=False)
    simulator = Simulator(
        scaffold(),
        problem,
        rounds=rounds,
        local_steps=local_steps,
        lr=1e-3,
        batch_size=None if rate == 1 else float(rate),
        privacy=privacy,
        metrics=(),
        seed=seed,
    )
    sent = _sums_sent(simulator, rounds)
    return [sent[0], sent[0] - sent[1]]


def _faults(privacy: Records, seed: int) -> Iterator[str]:
    """Yield the identities that a mechanism violates, for full batches of records in two tensors.

    Numbers that scatter are allowed six standard errors: less than one false alarm in 10^7 audits.
    """
    clip = privacy.clip
    loud = _private_means(privacy, seed, LOUD * clip)
    quiet = _private_means(privacy, seed, 0.0)
    moved = (RECORDS * (loud - quiet))[:, 0].reshape(ROUNDS, 2, WIDTH)
    along = np.zeros((2, WIDTH))
    along[:, 0] = clip / math.sqrt(2)
    if not np.abs(moved - along).max() <= 1e-6 * clip:
        norm = float(np.linalg.norm(moved[0]))
        yield f"a loud record moves the sum by {norm:.4g}, not by the clip {clip:g} along itself"
    # the other client's records have no gradient: it sends noise alone, as does the first but for
    # what its loud records add
    rest = quiet.copy()
    rest[:, 0] -= _rest(clip)
    noise = (rest * RECORDS * math.sqrt(STEPS) / (privacy.noise * clip)).reshape(-1, 2 * WIDTH)
    products = noise @ noise.T / (2 * WIDTH)
    error = 6 / math.sqrt(2 * WIDTH)
    if not np.abs(np.diag(products) - 1).max() <= math.sqrt(2) * error:
        size = math.sqrt(float(np.diag(products).max()))
        yield f"noise has {size:.4g} times the size that is stated"
    if not np.abs(products - np.diag(np.diag(products))).max() <= error * np.diag(products).max():
        yield "noise of two clients or rounds is not independent"


def _rest(clip: float) -> NDArray[np.float64]:
    """Return what the loud records beside the first add to the first client's mean."""
    added = np.zeros((2, WIDTH))
    added[:, 1:RECORDS] = clip / math.sqrt(2) / RECORDS
    return added.ravel()


def _private_means(privacy: Records, seed: int, size: float) -> NDArray[np.float64]:
    """Return (rounds, 2, d) means of private gradients, with a gradient of the first record."""
    sizes = np.full(RECORDS, LOUD * privacy.clip)
    sizes[0] = size
    clients = [{"axis": np.arange(RECORDS), "size": held} for held in (sizes, 0 * sizes)]
    start = {"a": np.zeros(WIDTH), "b": np.zeros(WIDTH)}
    simulator = Simulator(
        scaffold(),
        Problem(_along_axes, start, clients, coupled=False),
        rounds=ROUNDS,
        local_steps=STEPS,
        lr=1e-3,
        privacy=privacy,
        metrics=(),
        seed=seed,
        precision="float64",
    )
    return np.array(_messages(simulator, ROUNDS))


def _along_axes(params: Any, batch: Any) -> Any:
    """A loss whose gradient on a record has the record's size in each tensor, along its axis."""
    return sum(jnp.mean(batch["size"] * tensor[batch["axis"]]) for tensor in params.values())


def _sums_sent(simulator: Simulator, rounds: int) -> NDArray[np.float64]:
    """Return the (2, d) sums over rounds of what the clients sent: their c_i."""
    total: NDArray[np.float64] = np.sum(_messages(simulator, rounds), axis=0)
    return total


def _messages(simulator: Simulator, rounds: int) -> list[NDArray[np.float64]]:
    """Return the (2, d) means of private gradients that the clients sent in each round."""
    state, sent = simulator.init(), []
    for _ in range(rounds):
        state, _ = simulator.step(state)
        sent.append(np.asarray(state.memory.c_i, np.float64))
    return sent

"""The audit of the private gradient: many canaries in one run of the simulator itself."""

from __future__ import annotations

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
from fedscaffold.privacy.records import Records
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.simulator import Simulator

__all__ = ["Audit", "audit_privacy"]

LOUD = 1e3  # norm of a canary's gradient before it is clipped, in units of the clip


class Audit(NamedTuple):
    """What an audit found."""

    def __repr__(self) -> str:
        said = "REFUTED" if self.refuted else "not refuted"
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

    @property
    def refuted(self) -> bool:
        """Whether the attack proves that epsilon is larger than claimed."""
        return self.found > self.claimed


def audit_privacy(
    privacy: Records,
    *,
    rate: float,
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

    Args:
        privacy: The settings.
        rate: Probability with which a step draws a record.
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
    if not isinstance(privacy, Records):
        raise InputError("the audit is of the privacy of records: give fs.privacy.records(...)")
    canaries = checks.whole("canaries", canaries, at_least=100, at_most=20_000)
    if not 0 < checks.number("confidence", confidence, above=0) < 1:
        raise InputError(f"confidence must be below 1, got {confidence}")
    inside = np.random.default_rng([seed, 1]).random(canaries) < 0.5
    axis = np.arange(canaries)
    clients = [
        {"axis": axis, "size": LOUD * privacy.clip * held}
        for held in (inside.astype(float), np.zeros(canaries))
    ]
    problem = Problem(_along_axes, np.zeros(canaries), clients, coupled=False)
    privacy = replace(privacy, stop_at_epsilon=None)
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
    found = guess([sent[0], sent[0] - sent[1]], inside, delta=privacy.delta, confidence=confidence)
    claimed = epsilon(
        noise=privacy.noise, rate=rate, steps=rounds * local_steps, delta=privacy.delta
    )
    return Audit(claimed, found.epsilon, confidence, found.guesses, found.correct, canaries)


def _along_axes(params: Any, batch: Any) -> Any:
    """A loss whose gradient on a record has the record's size, along the record's axis."""
    return jnp.mean(batch["size"] * params[batch["axis"]])


def _sums_sent(simulator: Simulator, rounds: int) -> NDArray[np.float64]:
    """Return the (2, d) sums over rounds of what the clients sent: their c_i."""
    state = simulator.init()
    total = np.zeros(np.shape(state.memory.c_i))
    for _ in range(rounds):
        state, _ = simulator.step(state)
        total += np.asarray(state.memory.c_i, np.float64)
    return total

"""Markov decision processes with a policy, and random ones (Garnets), for TD learning.

A Garnet is given by its numbers of states, actions and branches: every action leads from every
state to a few states drawn at random, with random probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Floats

__all__ = ["DecisionProcess", "checked", "garnet", "perturbed", "transitions"]

TRIES = 100  # Garnets drawn before giving up on one whose states all lead to the same place


class DecisionProcess(NamedTuple):
    """A Markov decision process and the policy to be evaluated on it."""

    def __repr__(self) -> str:
        return brief(self)

    kernel: Floats
    """(S, A, S) probability of the next state, for every state and action."""
    rewards: Floats
    """(S, A) reward of every action in every state."""
    policy: Floats
    """(S, A) probability of every action in every state."""

    @property
    def chain(self) -> Floats:
        """(S, S) P: the next state's probability under the policy."""
        chain: Floats = np.einsum("sa,sat->st", self.policy, self.kernel)
        return chain

    @property
    def mean_rewards(self) -> Floats:
        """(S,) r: the mean reward of every state under the policy."""
        mean: Floats = (self.policy * self.rewards).sum(axis=1)
        return mean

    @property
    def stationary(self) -> Floats:
        """(S,) D: the share of time spent in every state under the policy, in the long run."""
        chain = self.chain
        # D = P'D and 1'D = 1 in one system, regular where D is unique
        shares = np.maximum(
            np.linalg.solve(np.eye(len(chain)) - chain.T + 1, np.ones(len(chain))), 0
        )
        normalised: Floats = shares / shares.sum()
        return normalised


def garnet(
    num_states: int = 30, num_actions: int = 2, branching: int = 2, *, seed: int = 0
) -> DecisionProcess:
    """Draw a Garnet: every action leads from every state to `branching` random states.

    Probabilities, those of the policy too, are uniform on the simplex, rewards uniform on [0, 1].
    Garnets that fall into parts which do not lead to one another have no single stationary
    distribution; they are drawn again.

    >>> world = garnet(5, 2, 3, seed=1)
    >>> stays = np.allclose(world.chain.T @ world.stationary, world.stationary)
    >>> np.unique((world.kernel > 0).sum(axis=2)), bool(stays)
    (array([3]), True)
    """
    states = checks.whole("num_states", num_states)
    actions = checks.whole("num_actions", num_actions)
    links = checks.whole("branching", branching, at_most=states)
    checks.fits(f"a Garnet of {states} states and {actions} actions", 5 * 8 * states**2 * actions)
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    for _ in range(TRIES):
        ranks = rng.random((states, actions, states)).argsort(axis=2).argsort(axis=2)
        kernel = _simplex(rng, ranks < links)
        policy = _simplex(rng, np.ones((states, actions), bool))
        world = DecisionProcess(kernel, rng.random((states, actions)), policy)
        if _one_destination(world.chain):
            return world
    raise InputError(
        f"{TRIES} Garnets of {states} states all fell apart: take more branching or num_actions"
    )


def perturbed(world: DecisionProcess, heterogeneity: float, *, seed: int = 0) -> DecisionProcess:
    """Perturb a process: (1 - h) times its probabilities and rewards plus h times new random ones.

    h is `heterogeneity`; 0 returns the process itself. The transition graph and the policy do not
    change.

    >>> world = garnet(5, 2, 3, seed=1)
    >>> other = perturbed(world, 1.0, seed=2)
    >>> same_support = (other.kernel > 0) == (world.kernel > 0)
    >>> bool(same_support.all()), bool(np.allclose(other.chain, world.chain))
    (True, False)
    """
    share = checks.number("heterogeneity", heterogeneity, at_least=0)
    if share > 1:
        raise InputError(f"heterogeneity must be a number from 0 to 1, got {heterogeneity!r}")
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0, at_most=2**64 - 1))
    kernel = (1 - share) * world.kernel + share * _simplex(rng, world.kernel > 0)
    rewards = (1 - share) * world.rewards + share * rng.random(world.rewards.shape)
    return world._replace(kernel=kernel, rewards=rewards)


def _simplex(rng: np.random.Generator, where: NDArray[np.bool_]) -> Floats:
    """Rows drawn uniformly from the simplex of the places marked in `where`.

    Exponentials, normalised.
    """
    lengths = rng.exponential(size=where.shape) * where
    rows: Floats = lengths / lengths.sum(axis=-1, keepdims=True)
    return rows


def _one_destination(chain: Floats) -> bool:
    """Whether some state is reached from everywhere.

    Then, and only then, the stationary distribution is unique.
    """
    reached = (chain > 0) | np.eye(len(chain), dtype=bool)
    for _ in range(len(chain).bit_length()):
        reached = reached.astype(np.float32) @ reached.astype(np.float32) > 0
    return bool(reached.all(axis=0).any())


def transitions(
    world: DecisionProcess, phi: Floats, count: int, rng: np.random.Generator
) -> tuple[Floats, ...]:
    """Draw transitions from the stationary distribution: features before and after, and rewards."""
    state = _drawn(rng, np.broadcast_to(world.stationary, (count, len(phi))))
    action = _drawn(rng, world.policy[state])
    later = _drawn(rng, world.kernel[state, action])
    return phi[state], phi[later], world.rewards[state, action]


def _drawn(rng: np.random.Generator, rows: Floats) -> NDArray[np.int64]:
    """One place from each row of probabilities."""
    totals = rows.cumsum(axis=1)
    drawn: NDArray[np.int64] = (totals > rng.random((len(rows), 1)) * totals[:, -1:]).argmax(axis=1)
    return drawn


def checked(name: str, world: DecisionProcess, states: int) -> DecisionProcess:
    """Return a process as float64 arrays, after checking it and its number of states."""
    kernel, rewards, policy = (np.asarray(part, np.float64) for part in world)
    pairs = (states, policy.shape[-1] if policy.ndim else 0)
    if (policy.shape, rewards.shape, kernel.shape) != (pairs, pairs, (*pairs, states)):
        raise InputError(
            f"{name} must have a kernel (S, A, S), rewards (S, A) and a policy (S, A) for the "
            f"features' S = {states} "
            f"states, got {kernel.shape}, {rewards.shape} and {policy.shape}"
        )
    for what, rows in (("kernel", kernel), ("policy", policy)):
        if not ((rows >= 0).all() and np.allclose(rows.sum(axis=-1), 1, rtol=0, atol=1e-9)):
            raise InputError(
                f"the {what} of {name} must hold probabilities: none below 0, rows that sum to 1"
            )
    if not np.isfinite(rewards).all():
        raise InputError(f"the rewards of {name} must be finite, got NaN or infinite values")
    world = DecisionProcess(kernel, rewards, policy)
    if not _one_destination(world.chain):
        raise InputError(
            f"{name} falls into parts that do not lead to one another: it has no stationary "
            "distribution"
        )
    return world

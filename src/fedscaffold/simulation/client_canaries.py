"""The audit of privacy for whole clients: canaries that are clients, and identities of noised sums.

The loss of a client is linear along an axis of its own, so that each round it sends the clip along
that axis, or nothing if it is out. The attacker sees what the server publishes: x and c after each
round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from fedscaffold.algorithms import scaffold
from fedscaffold.checks import InputError
from fedscaffold.privacy.clients import Clients
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.simulator import Simulator

__all__ = ["attack_clients", "find_client_faults"]

LOUD = 1e3  # length of a canary's message before it is clipped, in units of the clip
MOST = 4000  # canaries: as many clients, each with a vector of that length
ROUNDS, STEPS, CLIENTS, WIDTH, LR = 2, 2, 4, 2000, 0.5  # of the runs that check identities


def attack_clients(
    privacy: Clients, inside: NDArray[np.bool_], *, local_steps: int, rounds: int, seed: int
) -> list[NDArray[np.float64]]:
    """Run SCAFFOLD on clients that are canaries, and return the scores of an attack.

    Args:
        privacy: The settings, without a budget.
        inside: Which canaries are in.
        local_steps: Steps of a round.
        rounds: Number of rounds.
        seed: Seed of the run.

    Returns:
        Two scores of each canary: along its axis, the sum of what all rounds added to c, and that
        of what they took from x.
    """
    many = len(inside)
    if many > MOST or privacy.delta * many >= 1:
        most = min(MOST, math.ceil(1 / privacy.delta) - 1)
        raise InputError(
            f"canaries are whole clients here, fewer than 1 / delta and at most {MOST}: give up to "
            f"{most}, got {many}"
        )
    clients = [_client(i, LOUD * privacy.clip * held) for i, held in enumerate(inside)]
    problem = Problem(_along_axis, np.zeros(many), clients, coupled=False)
    simulator = Simulator(
        scaffold(),
        problem,
        rounds=rounds,
        local_steps=local_steps,
        lr=LR,
        privacy=privacy,
        metrics=(),
        seed=seed,
    )
    sums = _published(simulator, rounds)
    return [sums["c"].sum(axis=0), -sums["x"].sum(axis=0)]


def find_client_faults(privacy: Clients, seed: int) -> Iterator[str]:
    """Yield the identities that a mechanism violates, with one vector a message and with a pair.

    Numbers that scatter are allowed six standard errors: less than one false alarm in 10^7 audits.
    """
    clip, scale = privacy.clip, privacy.noise * privacy.clip
    for pair in (False, True):
        loud, quiet = (_sums(privacy, seed, size, pair) for size in (LOUD * clip, 0.0))
        sent = ("c", "x") if pair else ("c",)
        moved = np.stack([loud[name][0] - quiet[name][0] for name in sent])
        norm = float(np.linalg.norm(moved))
        if not abs(norm - clip) <= 1e-6 * clip or np.abs(moved[:, 1:]).max() > 1e-6 * clip:
            yield f"a loud client moves the sum by {norm:.4g}, not by the clip {clip:g}"
        # in the second round of a pair clients send the public K lr c as their move, clipped
        noise = np.concatenate([quiet["c"], quiet["x"][:1]] if pair else [quiet["c"]]) / scale
        products = noise @ noise.T / WIDTH
        sizes, error = np.diag(products), 6 / math.sqrt(WIDTH)
        if not np.abs(sizes - 1).max() <= math.sqrt(2) * error:
            worst = math.sqrt(float(sizes[np.abs(sizes - 1).argmax()]))
            yield f"noise has {worst:.4g} times the size that is stated"
        if not np.abs(products - np.diag(sizes)).max() <= error * sizes.max():
            yield "noise of two rounds or vectors is not independent"
        if not pair and np.abs(quiet["x"] - _steps_along(quiet["c"])).max() > 1e-6 * scale:
            yield "the model does not follow from the noised sums: it tells of the sums themselves"


def _steps_along(added: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what rounds take from x, given what they add to c: K lr times the new c."""
    taken: NDArray[np.float64] = STEPS * LR * np.cumsum(added, axis=0)
    return taken


def _sums(privacy: Clients, seed: int, size: float, pair: bool) -> dict[str, NDArray[np.float64]]:
    """Return the noised sums of each round, where the first client's gradient has a size.

    All other clients send nothing.
    """
    clients = [_client(0, size if i == 0 else 0.0) for i in range(CLIENTS)]
    steps: dict[str, Any] = {"local_optimizer": optax.sgd(LR)} if pair else {"lr": LR}
    simulator = Simulator(
        scaffold(),
        Problem(_along_axis, np.zeros(WIDTH), clients, coupled=False),
        rounds=ROUNDS,
        local_steps=STEPS,
        privacy=privacy,
        metrics=(),
        seed=seed,
        precision="float64",
        **steps,
    )
    found = _published(simulator, ROUNDS)
    return {"c": found["c"], "x": -found["x"]}


def _published(simulator: Simulator, rounds: int) -> dict[str, NDArray[np.float64]]:
    """Return (rounds, d) what each round added to c and to x, times the number of clients."""
    state = simulator.init()
    seen = [state.server]
    for _ in range(rounds):
        state, _ = simulator.step(state)
        seen.append(state.server)
    many = simulator.config.problem.num_clients
    return {
        name: many * np.diff([np.asarray(getattr(one, name), np.float64) for one in seen], axis=0)
        for name in ("c", "x")
    }


def _client(axis: int, size: float) -> dict[str, NDArray[Any]]:
    return {"axis": np.array([axis]), "size": np.array([size])}


def _along_axis(x: Any, batch: Any) -> Any:
    """A loss whose gradient has the record's size, along its axis."""
    return jnp.mean(batch["size"] * x[batch["axis"]])

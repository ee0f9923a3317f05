"""Attacks and filters inside the compiled program, between the cohort's messages and their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold import attacks, robust
from fedscaffold.simulation.spec import (
    Array,
    ClientState,
    Draws,
    Federation,
    Guard,
    Spec,
    State,
    Work,
)

__all__ = ["filter_cohort", "initial_guard"]


def initial_guard(spec: Spec, rows: int, dtype: Any) -> Guard:
    """Return what a filter knows of clients before the first round."""
    norms = np.full((rows, len(spec.exchange.vectors)), np.nan, dtype)
    return Guard(norms, np.zeros(rows, np.int32))


def filter_cohort(
    spec: Spec,
    federation: Federation,
    state: State,
    draw: Draws,
    work: Work,
    message: Any,
    old: ClientState,
) -> tuple[Any, Array, Guard | None]:
    """Replace the attackers' messages, and decide who is counted.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        state: The state that the clients were sent.
        draw: Step size of the round.
        work: The cohort.
        message: Its messages, one row per client.
        old: The cohort's rows at the start of the round.

    Returns:
        The messages as the server receives them, whom it accepts, and what it then knows of the
        cohort's clients.
    """
    with jax.enable_x64(True):
        if spec.attack is not None:
            message = _attacked(spec, spec.attack, state, work, message)
        if spec.filter is None:
            return message, work.p > 0, None
        parts = _parts(spec, state, draw, work, message)
        norms = jnp.sqrt(jnp.stack([jnp.sum(part * part, axis=1) for part in parts], axis=1))
        p, held, latest = work.p.astype(jnp.float64), old.guard, norms
        if not spec.everyone:
            # padding has the number of no client
            place = jnp.where(p > 0, work.client, len(state.guard.norms))
            latest = state.guard.norms.astype(jnp.float64).at[place].set(norms, mode="drop")
        weights = federation.weights if federation.shares is None else federation.shares

        def distances(k: int, centre: Array) -> Array:
            return robust.squared_distances(parts[k], parts[k][centre], jnp)

        cohort = robust.compare(p, norms, held.norms, latest, weights, distances, jnp)
        accepted = robust.judge(spec.filter, cohort, jnp, _repeat).accepted
        counted = jnp.where(accepted[:, None], norms, held.norms).astype(held.norms.dtype)
        refused = held.refused + (~accepted & (p > 0)).astype(held.refused.dtype)
        return message, accepted, Guard(counted, refused)


def _parts(spec: Spec, state: State, draw: Draws, work: Work, message: Any) -> list[Array]:
    """Return what filters compare: the messages' vectors, less what the server expects, float64."""
    known, references = spec.exchange, dict(spec.algorithm.references)
    told = jax.tree.map(lambda a: a.astype(jnp.float64), state.told)
    steps = jnp.broadcast_to(spec.travel_steps(work.steps), work.steps.shape)
    parts = []
    for name in known.vectors:
        rows = getattr(message, name)
        if name == spec.rebuilt:
            rows = (steps * draw.lr)[:, None] * getattr(message, str(known.d))
        expected = references[name](told) if name in references else 0.0
        parts.append(rows.astype(jnp.float64) - expected)
    return parts


def _attacked(spec: Spec, attack: attacks.Attack, state: State, work: Work, message: Any) -> Any:
    """Return the messages of a cohort with those of the attackers replaced."""
    bad = jnp.isin(work.client, jnp.asarray(attack.clients)) & (state.round + 1 >= attack.begin)
    sent = {name: getattr(message, name) for name in spec.sent}
    return message._replace(
        **attacks.apply(attack, sent, spec.exchange.move, bad & (work.p > 0), work.p, jnp)
    )


def _repeat(times: int, step: Callable[[Array], Array], start: Array) -> Array:
    return jax.lax.fori_loop(0, times, partial(_ignoring_count, step), start)


def _ignoring_count(step: Callable[[Array], Array], k: Array, value: Array) -> Array:
    return step(value)

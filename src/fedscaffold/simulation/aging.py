"""The ages of control variates inside the compiled program, and what the policy of the run does about them.

Rounds count from 1. A client last heard in round h has age r - h after round r, and 0 stands for never heard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.simulation.double import double, doubles
from fedscaffold.simulation.mesh import joined
from fedscaffold.simulation.spec import Array, Federation, Spec, State

__all__ = ["ages", "begun", "faded", "fading", "heard_now", "returning", "stored"]


def begun(spec: Spec, federation: Federation, state: State, slots: int) -> State:
    """The state as a round begins: faded control variates, or those of clients long not heard dropped.

    At most `slots` clients were last heard in any one round, so no more than that are dropped in one.

    Of a table that fades only c and the mean are touched; a row is multiplied when it is read.
    """
    if spec.policy.rate is not None:
        with doubles():
            return state._replace(c=spec.policy.rate * state.c, mean=spec.policy.rate * state.mean)
    if spec.policy.drop_after is None:
        return state
    last = state.round - spec.policy.drop_after
    gone = jnp.nonzero((state.heard_at == last) & (last > 0), size=slots, fill_value=len(state.heard_at))[0]
    there = gone < len(state.heard_at)
    rows = state.c_i.at[gone].get(mode="fill", fill_value=0)
    zeroed = stored(spec, gone, state.c_i, jnp.zeros_like(rows), some=True)
    with doubles():
        p = jnp.where(there, federation.shares.at[gone].get(mode="fill", fill_value=0), 0)
        share = joined(spec, p @ double(rows))
        return state._replace(c=state.c - share, mean=state.mean - share, c_i=zeroed)


def faded(spec: Spec, state: State, rows: Array, client: Array | slice = slice(None), ahead: int = 0) -> Array:
    """Rows of c_i as they stand after the state's round, or `ahead` = 1 round later, before its steps.

    They are faded in double precision, and what comes out of it is not rounded.
    """
    if spec.policy.rate is None:
        return rows
    with doubles():
        return rows * fading(spec, state, client, ahead)[:, None]


def fading(spec: Spec, state: State, client: Array | slice = slice(None), ahead: int = 0) -> Array:
    """The factor by which each row has faded since it was stored, in double precision."""
    return np.float64(spec.policy.rate) ** (state.round + ahead - state.heard_at[client])


def returning(spec: Spec, state: State, client: Array) -> Array:
    """Which clients of the cohort have missed so many rounds that they renew their c_i; None where none ever does."""
    if spec.policy.refresh_after is None:
        return None
    return state.round - state.heard_at[client] >= spec.policy.refresh_after


def heard_now(spec: Spec, state: State, cohort: Array) -> Array:
    """When each client was last heard, after this round."""
    if not spec.ages:
        return None
    now = state.round + 1
    if spec.everyone:
        return jnp.full_like(state.heard_at, now)
    return state.heard_at.at[cohort].set(now, mode="drop")


def ages(state: State) -> Array:
    """(N,) rounds since each client was last heard."""
    return state.round - state.heard_at


def stored(spec: Spec, cohort: Array, table: Array, new: Array, some: bool = False) -> Array:
    """Write the cohort's rows, ghosts (at the end) left out; `some` where the cohort is not everyone.

    Row by row, because XLA does that in place while a scatter copies the table; but under vmap the rows would become
    scatters themselves, so there one scatter for all of them is best.
    """
    if spec.everyone and not some:
        return new
    if spec.side_by_side:
        return table.at[cohort].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def put(s: Array, table: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(table, new[s], cohort[s], axis=0)

    return jax.lax.fori_loop(0, jnp.sum(cohort < len(table)), put, table)

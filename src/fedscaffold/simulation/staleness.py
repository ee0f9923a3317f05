"""Staleness policies inside the compiled program.

Ages of control variates, decay, drop and refresh.

Rounds count from 1. A client last heard in round h has age r - h after round r; h = 0 means never
heard.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold.algorithms.round import absorb
from fedscaffold.simulation.sharding import sum_over_devices
from fedscaffold.simulation.spec import Array, Federation, Spec, State

__all__ = [
    "ages",
    "apply_policy",
    "decay_factor",
    "decay_memory",
    "needs_refresh",
]


def apply_policy(spec: Spec, federation: Federation, state: State, slots: int) -> State:
    """Apply the policy at the start of a round: decay control variates, or drop old ones.

    At most `slots` clients were last heard in any one round, so at most that many are dropped.
    Decay multiplies only c and the mean; rows are multiplied when they are read.
    """
    if spec.policy.rate is not None:
        with jax.enable_x64(True):
            scaled = {
                field: spec.policy.rate * getattr(state.server, field)
                for field, _ in spec.algorithm.means
            }
            mean = tuple(spec.policy.rate * mean for mean in state.mean)
            return state._replace(server=state.server._replace(**scaled), mean=mean)
    if spec.policy.drop_after is None:
        return state
    last = state.round - spec.policy.drop_after
    old = (state.heard_at == last) & (last > 0) & ~state.done
    gone = jnp.nonzero(old, size=slots, fill_value=len(state.heard_at))[0]
    there = gone < len(state.heard_at)
    rows = jax.tree.map(lambda table: table.at[gone].get(mode="fill", fill_value=0), state.memory)

    def forget(s: Array, memory: Any) -> Any:  # row by row, which XLA does in place
        def zero(table: Array) -> Array:
            row = jnp.zeros(table.shape[1:], table.dtype)
            return jax.lax.dynamic_update_index_in_dim(table, row, gone[s], axis=0)

        return jax.tree.map(zero, memory)

    zeroed = jax.lax.fori_loop(0, jnp.sum(there), forget, state.memory)
    with jax.enable_x64(True):
        p = jnp.where(there, federation.shares.at[gone].get(mode="fill", fill_value=0), 0)
        share = sum_over_devices(spec, jax.tree.map(lambda a: -(p @ a.astype(jnp.float64)), rows))
        server = absorb(spec.algorithm, state.server, share)
        pairs = zip(state.mean, spec.algorithm.means, strict=True)
        mean = tuple(mean + getattr(share, of) for mean, (_, of) in pairs)
        return state._replace(server=server, mean=mean, memory=zeroed)


def decay_memory(
    spec: Spec, state: State, memory: Any, client: Array | slice = slice(None), ahead: int = 0
) -> Any:
    """Return decayed memory rows in float64, after the state's round or `ahead` rounds later."""
    if spec.policy.rate is None:
        return memory
    with jax.enable_x64(True):
        factor = decay_factor(spec, state, client, ahead)[:, None]
        return jax.tree.map(lambda rows: rows * factor, memory)


def decay_factor(
    spec: Spec, state: State, client: Array | slice = slice(None), ahead: int = 0
) -> Array:
    """Return the factor by which each row has decayed since it was stored, in float64."""
    return np.float64(spec.policy.rate) ** (state.round + ahead - state.heard_at[client])


def needs_refresh(spec: Spec, state: State, client: Array) -> Array:
    """Return which clients renew their memory under the `refresh` policy."""
    return state.round - state.heard_at[client] >= spec.policy.refresh_after


def ages(state: State) -> Array:
    """Return the (N,) number of rounds since each client was last heard."""
    return state.round - state.heard_at

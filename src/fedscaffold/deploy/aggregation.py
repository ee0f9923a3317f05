"""State transitions of the server, as pure functions on the formulas of `fedscaffold.algorithms`.

The state is the algorithm's server record, the clients' memories (where the server keeps them), the roster and the
buffers. A member's mass is 1 or its number of records; p_i = mass_i / M with M the sum of all masses. The fields of
the server record listed in the algorithm's `means` are always means of the memories; in SCAFFOLD's notation

    c = sum p_i c_i

over the roster. A member of mass m that joins has c_i = 0:     c <- c M / (M + m)
When a member of mass m leaves:                                 c <- (M c - m c_i) / (M - m)

Sums are computed in double precision in the order of site names, so the result does not depend on the order of replies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import absorb
from fedscaffold.deploy.gate import Update, norm
from fedscaffold.deploy.record_arithmetic import Record, add_scaled, blank_memory, cast, message_of, update_memory
from fedscaffold.deploy.schema import Array
from fedscaffold.metrics import explained

__all__ = [
    "Member",
    "State",
    "add_member",
    "aggregate",
    "find_nonfinite",
    "initial_state",
    "memory_means",
    "memory_of",
    "memory_scale",
    "remove_member",
    "residual",
    "resync_means",
    "rounding_bound",
    "shares",
    "weighted_sum",
]


class Member(NamedTuple):
    """A registered site."""

    records: int
    mass: float
    applied: int = 0
    """The last round that its reply was applied in; 0 for none."""
    digest: str = ""
    """Digest of the c_i it must hold, where clients keep them; "" for zeros."""
    told: str = ""
    """What became of its last reply, sent with the next request."""
    lost: int = 0
    """How often it has reported that its c_i is lost, where clients keep them."""
    rests: int = 0
    """The last round that it is excluded from, after too many losses."""
    own: str = ""
    """Digest of its private state (`Algorithm.own`); "" for the initial one."""


class State(NamedTuple):
    """The committed state after a round."""

    round: int
    server: Record
    """The algorithm's server record: x in the model's precision; the other fields in double precision, so that they do
    not drift from the means of the memories by rounding."""
    memory: dict[str, Record]
    """Client memories by site, where the server keeps them; sites without an entry have the initial one."""
    roster: dict[str, Member]
    buffers: dict[str, Array]
    scale: float = 0.0
    """Largest `memory_scale` of any round, where the server keeps the memories; rounding is relative to it."""

    @property
    def x(self) -> Array:
        """The model."""
        x: Array = self.server.x
        return x

    @property
    def told(self) -> Record:
        """The server record as sent to clients, in the model's precision."""
        return cast(self.server, self.x.dtype)


def shares(roster: Mapping[str, Member]) -> dict[str, float]:
    """Return the weights p_i of the roster.

    >>> shares({"a": Member(10, 1.0), "b": Member(30, 3.0)})
    {'a': 0.25, 'b': 0.75}
    """
    total = sum(member.mass for member in roster.values())
    return {site: member.mass / total for site, member in roster.items()}


def weighted_sum(p: Mapping[str, float], vectors: Mapping[str, Array], size: int) -> Array:
    """Return sum p_i v_i in double precision, summed in the order of names."""
    total = np.zeros(size)
    for site in sorted(vectors):
        total += p[site] * vectors[site].astype(np.float64)
    return total


def initial_state(algorithm: Algorithm, x: Array, buffers: dict[str, Array]) -> State:
    """Return the state before the first round."""
    wide = algorithm.init(x.astype(np.float64))
    record = type(wide)(*(np.asarray(value, np.float64) + 0.0 for value in wide))  # no -0.0
    return State(0, record._replace(x=x), {}, {}, buffers)


def memory_of(algorithm: Algorithm, state: State, site: str) -> Record:
    """Return the memory of a site, where the server keeps it."""
    return state.memory[site] if site in state.memory else blank_memory(algorithm, state.x)


def aggregate(
    algorithm: Algorithm, state: State, updates: Mapping[str, Update], travel: Mapping[str, float], server_keeps: bool
) -> State:
    """Return the state after a training round.

    Args:
        algorithm: The algorithm.
        state: The state before the round.
        updates: The validated replies by site.
        travel: K_i lr by site, with the validated numbers of steps.
        server_keeps: Whether the server keeps the clients' memories.
    """
    p = shares(state.roster)
    heard = sum(p[site] for site in sorted(updates))
    share = {site: p[site] / heard for site in updates}
    dtype, told, memory = state.x.dtype, state.told, dict(state.memory)
    sent, mean, rounded = cast(told, np.float64), None, None
    for site in sorted(updates):
        message = message_of(algorithm, updates[site].vectors, travel[site])
        mean = add_scaled(mean, share[site], message)
        if server_keeps and algorithm.remember is not None:
            exact = update_memory(algorithm, told, memory_of(algorithm, state, site), message)
            memory[site] = cast(exact, dtype)
            lost = type(exact)(*(kept - value for kept, value in zip(memory[site], exact, strict=True)))
            rounded = add_scaled(rounded, p[site], lost)
    server = algorithm.update(cast(state.server, np.float64), sent, mean, heard)
    if rounded is not None:
        server = absorb(algorithm, server, rounded)  # apply the memories' storage rounding to the means
    done = state.round + 1
    roster = dict(state.roster)
    for site, update in updates.items():
        said = f"round {done} applied"
        roster[site] = roster[site]._replace(applied=done, digest=update.memory, own=update.own, told=said)
    server = cast(server, np.float64)._replace(x=server.x.astype(dtype))
    new = State(done, server, memory, roster, _average_buffers(state, share, updates), state.scale)
    return new._replace(scale=max(state.scale, memory_scale(algorithm, new))) if server_keeps else new


def add_member(algorithm: Algorithm, state: State, site: str, member: Member) -> State:
    """Add a member, or change the mass of one whose memory is known to the server or zero."""
    roster = {**state.roster, site: member}
    before = sum(m.mass for m in state.roster.values())
    after = sum(m.mass for m in roster.values())
    moved = member.mass - state.roster[site].mass if site in state.roster else 0.0
    server = _reweight(algorithm, state, memory_of(algorithm, state, site), before, moved, after)
    return state._replace(roster=roster, server=server)


def remove_member(algorithm: Algorithm, state: State, site: str, memory: Record = None) -> State:
    """Remove a member; `memory` is its memory where the server does not keep it (None: zeros)."""
    gone = memory_of(algorithm, state, site) if memory is None else memory
    roster = {name: m for name, m in state.roster.items() if name != site}
    kept = {name: value for name, value in state.memory.items() if name != site}
    before = sum(m.mass for m in state.roster.values())
    after = sum(m.mass for m in roster.values())
    if not roster:
        zeros = {field: np.zeros_like(getattr(state.server, field)) for field, _ in algorithm.means}
        return state._replace(roster=roster, memory=kept, server=state.server._replace(**zeros))
    server = _reweight(algorithm, state, gone, before, -state.roster[site].mass, after)
    # rounding errors grow by the same factor as the weights of the remaining members
    return state._replace(roster=roster, memory=kept, server=server, scale=state.scale * before / after)


def _reweight(algorithm: Algorithm, state: State, memory: Record, before: float, moved: float, after: float) -> Record:
    """Return the server record after one memory's mass grows by `moved`, and the total from `before` to `after`."""
    fields = {}
    for field, of in algorithm.means:
        total = before * getattr(state.server, field)
        if moved:
            total = total + moved * getattr(memory, of).astype(np.float64)
        fields[field] = total / after
    return state.server._replace(**fields)


def resync_means(algorithm: Algorithm, state: State, reports: Mapping[str, Record]) -> State:
    """Recompute the means from reported memories; members that did not report restart from zeros."""
    roster = {site: member if site in reports else member._replace(digest="") for site, member in state.roster.items()}
    server = state.server._replace(**_weighted_means(algorithm, shares(state.roster), reports, state.x.size))
    return state._replace(server=server, roster=roster)


def memory_means(algorithm: Algorithm, state: State) -> dict[str, Array]:
    """Return sum p_i memory_i over the roster by server field, where the server keeps the memories."""
    return _weighted_means(algorithm, shares(state.roster), state.memory, state.x.size)


def _weighted_means(
    algorithm: Algorithm, p: Mapping[str, float], memory: Mapping[str, Record], size: int
) -> dict[str, Array]:
    return {
        field: weighted_sum(p, {site: getattr(record, of) for site, record in memory.items()}, size)
        for field, of in algorithm.means
    }


def residual(algorithm: Algorithm, state: State) -> float:
    """Return |c - sum p_i c_i| where the server keeps the c_i; above rounding level, the model is biased."""
    if not state.roster:
        return 0.0
    means = memory_means(algorithm, state)
    return math.hypot(*(norm(getattr(state.server, field) - mean) for field, mean in means.items()))


def rounding_bound(state: State) -> float:
    """Return the largest residual that rounding explains."""
    return explained(state.round, len(state.roster), state.scale)


def memory_scale(algorithm: Algorithm, state: State) -> float:
    """Return the weighted root mean square of |c_i| over the roster."""
    p = shares(state.roster)
    fields = [of for _, of in algorithm.means]
    parts = [(math.sqrt(p[site]), record) for site, record in sorted(state.memory.items())]
    return math.hypot(*(root * norm(getattr(record, of)) for root, record in parts for of in fields))


def find_nonfinite(state: State) -> str | None:
    """Return the first non-finite part of a state: a site (its memory), a field, or "buffer NAME"; None if finite.

    >>> from fedscaffold.algorithms.scaffold import Memory, Server
    >>> state = State(1, Server(np.zeros(2), np.zeros(2)), {"ant": Memory(np.array([1.0, np.inf]))}, {}, {})
    >>> find_nonfinite(state), find_nonfinite(state._replace(memory={}))
    ('ant', None)
    """
    parts = [(site, value) for site, record in state.memory.items() for value in record]
    parts += state.told._asdict().items()
    parts += [(f"buffer {name}", value) for name, value in state.buffers.items() if value.dtype.kind == "f"]
    return next((name for name, value in parts if not np.isfinite(value).all()), None)


def _average_buffers(state: State, share: Mapping[str, float], updates: Mapping[str, Update]) -> dict[str, Array]:
    """Aggregate buffers: weighted means of floats, lower medians of integers, which never decrease.

    Integers are counters or indices. The median keeps one site from setting them: with the maximum, it could overflow
    a counter or push an index out of range at all the others.
    """
    out = dict(state.buffers)
    for name, old in state.buffers.items():
        came = {site: update.buffers[name] for site, update in updates.items() if name in update.buffers}
        if len(came) < len(updates):
            continue
        if np.issubdtype(old.dtype, np.floating):
            flat = {site: value.ravel() for site, value in came.items()}
            out[name] = weighted_sum(share, flat, old.size).reshape(old.shape).astype(old.dtype)
        else:
            ordered = np.sort(np.stack([came[site] for site in sorted(came)]), axis=0)
            out[name] = np.asarray(np.maximum(old, ordered[(len(ordered) - 1) // 2]))
    return out

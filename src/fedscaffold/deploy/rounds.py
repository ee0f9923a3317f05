"""What a round does to the server's state: pure functions, all formulas from `fedscaffold.algorithms`.

The state is what is committed: x, c, the c_i (where the server keeps them), the roster, the buffers. A member's mass
is 1 or its number of records, and p_i = mass_i / M with M the sum of all masses. At all times

    c = sum p_i c_i

over the roster. Who joins brings c_i = 0, so M c is unchanged:       c <- c M / (M + m)
Who leaves takes its share along:                                      c <- (M c - m c_i) / (M - m)

Sums run in double precision over the sites in the order of their names: replies may come in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.deploy.gate import Update, length_of
from fedscaffold.deploy.schema import Array
from fedscaffold.metrics import explained

__all__ = [
    "Member", "State", "aggregated", "joined", "left", "mean_of", "overflowed", "residual", "resynced", "rounding",
    "scale_of", "shares", "weighted",
]  # fmt: skip


class Member(NamedTuple):
    """A site of the roster."""

    records: int
    mass: float
    applied: int = 0
    """The last round that counted it; 0 for none."""
    digest: str = ""
    """Of the c_i it must hold, where clients keep them; "" for zeros."""
    told: str = ""
    """What became of its last reply: it is told with the next request."""
    lost: int = 0
    """How often it has said that its c_i is lost, where clients keep them."""
    rests: int = 0
    """The last round it is not asked to train in, as it has said so too often."""


class State(NamedTuple):
    """What is committed after a round, and all that the next one needs."""

    round: int
    x: Array
    c: Array | None
    """In double precision, whatever the model's: so it does not drift from the mean of the c_i by rounding."""
    c_i: dict[str, Array]
    """By site, where the server keeps them; a site not in it holds zeros."""
    roster: dict[str, Member]
    buffers: dict[str, Array]
    scale: float = 0.0
    """The largest size of the c_i in any round, where the server keeps them: what rounding is relative to."""

    @property
    def told(self) -> Array | None:
        """The c that clients receive."""
        return None if self.c is None else self.c.astype(self.x.dtype)


def shares(roster: Mapping[str, Member]) -> dict[str, float]:
    """The p_i of the roster.

    >>> shares({"a": Member(10, 1.0), "b": Member(30, 3.0)})
    {'a': 0.25, 'b': 0.75}
    """
    total = sum(member.mass for member in roster.values())
    return {site: member.mass / total for site, member in roster.items()}


def weighted(p: Mapping[str, float], vectors: Mapping[str, Array], size: int) -> Array:
    """Sum of p_i times vector i, in double precision and in the order of names."""
    total = np.zeros(size)
    for site in sorted(vectors):
        total += p[site] * vectors[site].astype(np.float64)
    return total


def aggregated(
    algorithm: Algorithm, state: State, updates: Mapping[str, Update], travel: Mapping[str, float], server_keeps: bool
) -> State:
    """The state after a round that heard `updates`; `travel` is K_i lr, which turns d_i into x - y_i."""
    p = shares(state.roster)
    heard = sum(p[site] for site in sorted(updates))
    size, dtype = state.x.size, state.x.dtype
    share = {site: p[site] / heard for site in updates}
    d = None
    if algorithm.remember is not None and not algorithm.by_move:
        d = weighted(share, {site: update.vectors["d"] for site, update in updates.items()}, size)
    move = _mean_move(algorithm, share, updates, travel, size)
    c_i, told = dict(state.c_i), None if state.told is None else state.told.astype(np.float64)
    x, c = algorithm.server(state.x.astype(np.float64), told, move, d, heard)
    if state.c is not None:
        c = state.c + (c - told)
    if server_keeps and algorithm.remember is not None:
        rounded = {}
        for site, update in updates.items():
            seen = update.vectors["move" if algorithm.by_move else "d"].astype(np.float64)
            exact = algorithm.remember(told, _held(state, site).astype(np.float64), seen)
            c_i[site] = exact.astype(dtype)
            rounded[site] = c_i[site] - exact
        c = c + weighted(p, rounded, size)  # what storing rounds off the c_i is rounded off c as well
    done = state.round + 1
    roster = {
        site: member._replace(applied=done, digest=updates[site].memory, told=f"round {done} applied")
        if site in updates
        else member
        for site, member in state.roster.items()
    }
    buffers = _averaged(state, share, updates)
    new = State(done, x.astype(dtype), c, c_i, roster, buffers, state.scale)
    return new._replace(scale=max(state.scale, scale_of(new))) if server_keeps else new


def _mean_move(
    algorithm: Algorithm,
    share: Mapping[str, float],
    updates: Mapping[str, Update],
    travel: Mapping[str, float],
    size: int,
) -> Array:
    """The mean of x - y_i, per unit of travel where the algorithm says so; who sent only d_i moved K_i lr d_i."""
    if algorithm.normalised:
        mean = sum(share[site] * travel[site] for site in sorted(updates))
        share = {site: share[site] * mean / travel[site] for site in updates}
    moves = {site: update.vectors["move"] for site, update in updates.items() if "move" in update.vectors}
    rest = {site: update.vectors["d"] for site, update in updates.items() if site not in moves}
    return weighted(share, moves, size) + weighted({s: share[s] * travel[s] for s in rest}, rest, size)


def joined(state: State, site: str, member: Member) -> State:
    """The state with one more member, or with another mass for one whose c_i the server has or is zero."""
    roster = {**state.roster, site: member}
    if state.c is None:
        return state._replace(roster=roster)
    before = sum(m.mass for m in state.roster.values())
    after = sum(m.mass for m in roster.values())
    total = before * state.c
    if site in state.roster:
        total += (member.mass - state.roster[site].mass) * _held(state, site).astype(np.float64)
    return state._replace(roster=roster, c=total / after)


def left(state: State, site: str, c_i: Array | None = None) -> State:
    """The state without a member; `c_i` is what it held where the server does not keep it (None: zeros)."""
    member = state.roster[site]
    roster = {name: m for name, m in state.roster.items() if name != site}
    kept = {name: value for name, value in state.c_i.items() if name != site}
    if state.c is None or not roster:
        return state._replace(roster=roster, c_i=kept, c=None if state.c is None else np.zeros_like(state.c))
    held = _held(state, site) if c_i is None else c_i
    before = sum(m.mass for m in state.roster.values())
    total = before * state.c - member.mass * held.astype(np.float64)
    after = sum(m.mass for m in roster.values())
    # what was rounding in the mean of all is more in that of the rest
    return state._replace(roster=roster, c_i=kept, c=total / after, scale=state.scale * before / after)


def resynced(state: State, reports: Mapping[str, Array]) -> State:
    """Make c anew from the c_i that the clients hold; who did not report starts again from zeros."""
    assert state.c is not None
    c = weighted(shares(state.roster), reports, state.x.size)
    roster = {site: member if site in reports else member._replace(digest="") for site, member in state.roster.items()}
    return state._replace(c=c, roster=roster)


def mean_of(state: State) -> Array:
    """Sum of p_i c_i over the roster, where the server keeps the c_i."""
    return weighted(shares(state.roster), state.c_i, state.x.size)


def residual(state: State) -> float:
    """|c - sum p_i c_i|, the health gauge, where the server keeps the c_i; anything above rounding is a bias."""
    if state.c is None or not state.roster:
        return 0.0
    return length_of(state.c - mean_of(state))


def rounding(state: State) -> float:
    """What rounding explains of the residual."""
    return explained(state.round, len(state.roster), state.scale)


def scale_of(state: State) -> float:
    """Root mean square of |c_i| over the roster."""
    p = shares(state.roster)
    return math.hypot(*(math.sqrt(p[site]) * length_of(c_i) for site, c_i in sorted(state.c_i.items())))


def overflowed(state: State) -> str | None:
    """What of a state is not finite: "x", "c", "buffer NAME", or the site whose c_i it is; None where all is.

    >>> state = State(1, np.zeros(2), np.zeros(2), {"ant": np.array([1.0, np.inf])}, {}, {})
    >>> overflowed(state), overflowed(state._replace(c_i={}))
    ('ant', None)
    """
    floats = {f"buffer {name}": value for name, value in state.buffers.items() if value.dtype.kind == "f"}
    parts = {**state.c_i, "x": state.x, **({} if state.told is None else {"c": state.told}), **floats}
    return next((name for name, value in parts.items() if not np.isfinite(value).all()), None)


def _held(state: State, site: str) -> Array:
    return state.c_i[site] if site in state.c_i else np.zeros_like(state.x)


def _averaged(state: State, share: Mapping[str, float], updates: Mapping[str, Update]) -> dict[str, Array]:
    """Buffers: floats are averaged like the model, counters take the largest value."""
    out = dict(state.buffers)
    for name, old in state.buffers.items():
        came = {site: update.buffers[name] for site, update in updates.items() if name in update.buffers}
        if len(came) < len(updates):
            continue
        if np.issubdtype(old.dtype, np.floating):
            flat = {site: value.ravel() for site, value in came.items()}
            out[name] = weighted(share, flat, old.size).reshape(old.shape).astype(old.dtype)
        else:
            out[name] = np.asarray(np.maximum.reduce([came[site] for site in sorted(came)]))
    return out

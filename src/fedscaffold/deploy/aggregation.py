"""State transitions of the server, as pure functions on the formulas of `fedscaffold.algorithms`.

The state is the algorithm's server record, the clients' memories (where the server keeps them), the
roster and the buffers. A member's mass is 1 or its number of records; p_i = mass_i / M with M the
sum of all masses. The fields of the server record listed in the algorithm's `means` are always
means of the memories; in SCAFFOLD's notation

    c = sum p_i c_i

over the roster. A member of mass m that joins has c_i = 0:     c <- c M / (M + m)
When a member of mass m leaves:                                 c <- (M c - m c_i) / (M - m)

Sums are computed in double precision in the order of site names, so the result does not depend on
the order of replies, and block by block (`blocks.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import absorb, each, exchange, rebuild
from fedscaffold.deploy.blocks import (
    Builder,
    Vector,
    assemble,
    is_large,
    join_norms,
    norm,
    slices,
    take,
)
from fedscaffold.deploy.gate import Refused, Update
from fedscaffold.deploy.schema import Array, Record, cast
from fedscaffold.metrics import explained
from fedscaffold.state.vectors import FileVector

__all__ = [
    "Member",
    "State",
    "add_member",
    "aggregate",
    "blank_memory",
    "find_nonfinite",
    "find_outsized",
    "initial_state",
    "mean_metrics",
    "measure",
    "memory_means",
    "memory_scale",
    "message_of",
    "norm",
    "remove_member",
    "residual",
    "resync_means",
    "rounding_bound",
    "shares",
    "update_memory",
]

HEADROOM = 8.0  # factor below the largest float, so that sums and differences stay finite


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
    epsilon: float | None = None
    """What its records have spent by its own word, at its delta; None without privacy."""
    delta: float | None = None
    charged: int = 0
    """Number of requests that its records were charged with in this run, by its own word."""
    norms: list[float] = []  # noqa: RUF012 (never changed)
    """Norms of the parts of its message that counted last, where a filter compares them."""


class State(NamedTuple):
    """The committed state after a round."""

    round: int
    server: Record
    """The algorithm's server record: x in the model's precision, and the other fields in double
    precision, so that they do not drift from the means of the memories by rounding."""
    memory: dict[str, Record]
    """Client memories by site, where the server keeps them; sites without an entry have the initial
    one. The vectors of large models are in files (`FileVector`)."""
    roster: dict[str, Member]
    buffers: dict[str, Array]
    scale: float = 0.0
    """Largest `memory_scale` of any round, where the server keeps the memories; rounding is
    relative to it."""

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


class Weights(NamedTuple):
    """Weights of a round."""

    p: dict[str, float]
    """p_i of every member."""
    heard: float
    """Sum of the p_i of those that were heard."""
    share: dict[str, float]
    """p_i / heard of those that were heard."""


def weigh(roster: Mapping[str, Member], heard: Iterable[str]) -> Weights:
    """Return the weights of a round in which some members were heard."""
    p, sites = shares(roster), sorted(heard)
    total = sum(p[site] for site in sites)
    return Weights(p, total, {site: p[site] / total for site in sites})


def initial_state(algorithm: Algorithm, x: Array, buffers: dict[str, Array]) -> State:
    """Return the state before the first round."""

    def block(place: slice) -> Record:
        wide = algorithm.init(x[place].astype(np.float64))
        record = type(wide)(*(np.asarray(value, np.float64) + 0.0 for value in wide))  # no -0.0
        return record._replace(x=x[place])

    return State(0, assemble(x.size, block), {}, {}, buffers)


def blank_memory(algorithm: Algorithm, like: Array) -> Record:
    """Return a client's initial memory: zeros, or None where the algorithm has no memory."""
    memory = algorithm.memory(np.zeros_like(like))
    return None if memory is None else cast(memory, like.dtype)


def message_of(algorithm: Algorithm, vectors: Mapping[str, Vector], travel: float) -> Record:
    """Return the message in double precision from received vectors.

    A missing move is `travel` times the direction.

    >>> from fedscaffold.algorithms import scaffold
    >>> message_of(scaffold(), {"d": np.array([3.0])}, travel=0.5)
    Message(d=array([3.]), move=array([1.5]))
    """
    wide = {name: np.asarray(value, np.float64) for name, value in vectors.items()}
    return rebuild(algorithm, wide, travel, plain=exchange(algorithm).move not in vectors)


def update_memory(algorithm: Algorithm, sent: Record, memory: Record, message: Record) -> Record:
    """Return a client's memory after an applied message, in double precision.

    The shift is recomputed from the sent record and the stored memory, since the shift that was
    sent is rounded and the server record would drift from the mean of the memories by that
    rounding.
    """
    wide = cast(memory, np.float64)
    return algorithm.remember(wide, algorithm.shift(cast(sent, np.float64), wide), message)


def aggregate(
    algorithm: Algorithm,
    state: State,
    updates: Mapping[str, Update],
    server_keeps: bool,
    folder: Path | None = None,
) -> State:
    """Return the state after a training round, but for its `scale`.

    Args:
        algorithm: The algorithm.
        state: The state before the round.
        updates: The validated replies by site.
        server_keeps: Whether the server keeps the clients' memories.
        folder: Where the new memories of a large model are written, to be committed there; they are
            held in memory if None.
    """
    weights = weigh(state.roster, updates)
    keeps, size = server_keeps and algorithm.has_memory, state.x.size
    server, place_of_rows = Builder(size), folder if is_large(size) else None
    rows = {site: Builder(size, place_of_rows) for site in updates if keeps}
    for place in slices(size):
        server.append(_train_block(algorithm, state, updates, weights, place, rows))
    done, roster = state.round + 1, dict(state.roster)
    for site, update in updates.items():
        word = f"round {done} applied"
        roster[site] = roster[site]._replace(
            applied=done, digest=update.memory, own=update.own, told=word
        )
    memory = {**state.memory, **{site: row.finish() for site, row in rows.items()}}
    buffers = _average_buffers(state, weights.share, updates)
    return State(done, server.finish(), memory, roster, buffers, state.scale)


def take_vectors(update: Update, place: slice) -> dict[str, Array]:
    """Return a block of each vector of a reply; numbers stay."""
    return {
        name: value[place] if value.ndim else np.asarray(value)
        for name, value in update.vectors.items()
    }


def _train_block(
    algorithm: Algorithm,
    state: State,
    updates: Mapping[str, Update],
    weights: Weights,
    place: slice,
    rows: Mapping[str, Builder],
) -> Record:
    """Return a block of the server's record after a round.

    Args:
        algorithm: The algorithm.
        state: The state before the round.
        updates: The validated replies by site.
        weights: The weights of the sites.
        place: The block.
        rows: By site, where its new memory goes; empty if the server does not keep it.
    """
    p, heard, share = weights
    server, dtype = take(state.server, place), state.x.dtype
    told, mean, rounding, late = cast(cast(server, dtype), np.float64), None, None, None
    blank = blank_memory(algorithm, server.x)
    for site in sorted(updates):
        update, sent = updates[site], told
        message = message_of(algorithm, take_vectors(update, place), update.travel)
        if update.sent is not None:
            sent = cast(cast(take(update.sent, place), dtype), np.float64)
            message = _damp(algorithm, message, update.damping)
            late = _add(late, share[site], each(np.subtract, sent, told))
        mean = _add(mean, share[site], message)
        if site in rows:
            before = take(state.memory.get(site), place)
            exact = update_memory(algorithm, sent, blank if before is None else before, message)
            stored = cast(exact, dtype)
            rows[site].append(stored)
            off = each(lambda kept, value: kept - value, stored, exact)
            rounding = _add(rounding, p[site], off)
    sent = told if late is None else each(np.add, told, late)  # the mean of what was sent
    server = algorithm.update(cast(server, np.float64), sent, mean, heard)
    if rounding is not None:
        # apply the memories' storage rounding to the means
        server = absorb(algorithm, server, rounding)
    return cast(server, np.float64)._replace(x=server.x.astype(dtype))


def _damp(algorithm: Algorithm, message: Record, factor: float) -> Record:
    """Return a message whose move counts by a factor."""
    move = exchange(algorithm).move
    if factor == 1 or move is None:
        return message
    return message._replace(**{move: factor * getattr(message, move)})


def _add(total: Record, weight: float, record: Record) -> Record:
    """Return `total` plus weight times record, in double precision; a `total` of None is zero."""
    part = each(lambda value: weight * np.asarray(value, np.float64), record)
    return part if total is None else each(lambda sum_, value: sum_ + value, total, part)


def add_member(algorithm: Algorithm, state: State, site: str, member: Member) -> State:
    """Add a member, or change the mass of one whose memory is known to the server or zero."""
    roster = {**state.roster, site: member}
    before = sum(m.mass for m in state.roster.values())
    after = sum(m.mass for m in roster.values())
    moved = member.mass - state.roster[site].mass if site in state.roster else 0.0
    server = _reweight(algorithm, state, state.memory.get(site), before, moved, after)
    return state._replace(roster=roster, server=server)


def remove_member(algorithm: Algorithm, state: State, site: str) -> State:
    """Remove a member whose memory is known to the server or zero; others need a resync."""
    gone = state.memory.get(site)
    roster = {name: m for name, m in state.roster.items() if name != site}
    kept = {name: value for name, value in state.memory.items() if name != site}
    before = sum(m.mass for m in state.roster.values())
    after = sum(m.mass for m in roster.values())
    if not roster:
        zeros = [np.zeros_like(getattr(state.server, field)) for field, _ in algorithm.means]
        server = _replace_means(algorithm, state, zeros)
        return state._replace(roster=roster, memory=kept, server=server)
    server = _reweight(algorithm, state, gone, before, -state.roster[site].mass, after)
    # rounding errors grow by the same factor as the weights of the remaining members
    return state._replace(
        roster=roster, memory=kept, server=server, scale=state.scale * before / after
    )


def _reweight(
    algorithm: Algorithm, state: State, memory: Record, before: float, moved: float, after: float
) -> Record:
    """Return the server record after the mass of one memory, None for zeros, grows by `moved`.

    The total mass goes from `before` to `after`.
    """

    def block(place: slice) -> tuple[Array, ...]:
        server, part, fields = take(state.server, place), take(memory, place), []
        for field, of in algorithm.means:
            total = before * getattr(server, field)
            if moved:
                held = blank_memory(algorithm, server.x) if part is None else part
                total = total + moved * getattr(held, of).astype(np.float64)
            fields.append(total / after)
        return tuple(fields)

    return _replace_means(algorithm, state, assemble(state.x.size, block))


def _replace_means(algorithm: Algorithm, state: State, values: Iterable[Array]) -> Record:
    """Return the server record with new values of its means, in their order."""
    fields = (field for field, _ in algorithm.means)
    return state.server._replace(**dict(zip(fields, values, strict=True)))


def resync_means(algorithm: Algorithm, state: State, reports: Mapping[str, Record]) -> State:
    """Recompute the means from reported memories.

    Members that did not report restart from zeros.
    """
    roster = {
        site: member if site in reports else member._replace(digest="")
        for site, member in state.roster.items()
    }
    return state._replace(server=memory_means(algorithm, state, reports), roster=roster)


def memory_means(algorithm: Algorithm, state: State, memory: Mapping[str, Record]) -> Record:
    """Return the server's record with its means recomputed: sum p_i memory_i.

    Sites without an entry count as zeros.
    """
    found = assemble(state.x.size, lambda place: _means_block(algorithm, state, memory, place))
    return _replace_means(algorithm, state, found)


def _means_block(
    algorithm: Algorithm, state: State, memory: Mapping[str, Record], place: slice
) -> tuple[Array, ...]:
    """Return a block of sum p_i memory_i, in the order of the algorithm's means."""
    p, total = shares(state.roster), None
    for site in sorted(memory):
        total = _add(total, p[site], take(memory[site], place))
    size = state.x[place].size
    return tuple(
        np.zeros(size) if total is None else getattr(total, of) for _, of in algorithm.means
    )


def residual(algorithm: Algorithm, state: State) -> float:
    """Return |c - sum p_i c_i|, where the server keeps the c_i.

    A residual above rounding level means that the model is biased.
    """
    if not state.roster:
        return 0.0
    gaps = []
    for place in slices(state.x.size):
        means = _means_block(algorithm, state, state.memory, place)
        server = take(state.server, place)
        for (field, _), mean in zip(algorithm.means, means, strict=True):
            gaps.append(norm(getattr(server, field) - mean))
    return join_norms(gaps)


def rounding_bound(state: State) -> float:
    """Return the largest residual that rounding explains."""
    return explained(state.round, len(state.roster), state.scale)


def memory_scale(algorithm: Algorithm, state: State) -> float:
    """Return the weighted root mean square of |c_i| over the roster."""
    p = shares(state.roster)
    fields = [of for _, of in algorithm.means]
    parts = [(math.sqrt(p[site]), record) for site, record in sorted(state.memory.items())]
    return math.hypot(
        *(root * norm(getattr(record, of)) for root, record in parts for of in fields)
    )


def find_nonfinite(state: State) -> str | None:
    """Return the first non-finite part of a state, or None if all are finite.

    A part is a site (its memory), a field of the server's record, or "buffer NAME".

    >>> from fedscaffold.algorithms.scaffold import Memory, Server
    >>> memory = {"ant": Memory(np.array([1.0, np.inf]))}
    >>> state = State(1, Server(np.zeros(2), np.zeros(2)), memory, {}, {})
    >>> find_nonfinite(state), find_nonfinite(state._replace(memory={}))
    ('ant', None)
    """
    parts = [(site, value) for site, record in state.memory.items() for value in record]
    parts += state.server._asdict().items()
    parts += [
        (f"buffer {name}", value)
        for name, value in state.buffers.items()
        if value.dtype.kind == "f"
    ]
    sent = dict.fromkeys(state.server._fields, state.x.dtype)  # rounded when they are sent
    return next(
        (name for name, value in parts if not _is_finite(value, sent.get(name, value.dtype))), None
    )


def _is_finite(value: Vector, dtype: np.dtype[Any]) -> bool:
    """Return whether all numbers are finite, rounded to a dtype."""
    flat = value if isinstance(value, FileVector) else np.ravel(value)
    return all(
        np.isfinite(flat[place].astype(dtype, copy=False)).all() for place in slices(value.size)
    )


def measure(
    update: Update, algorithm: Algorithm, told: Record, most: float, clip: float | None = None
) -> Update:
    """Return an update with its norm: that of (move, change of c_i), in the model's units.

    The change of a client's memory is the deviation of its direction from the reference that the
    algorithm declares. Where the norm exceeds `clip`, all deviations are scaled by one factor, so
    that c stays the mean of the c_i.

    Args:
        update: A validated reply.
        algorithm: The algorithm.
        told: The server's record that was sent to the client, before its rounding.
        most: Largest factor by which the server may multiply a vector other than the move.
        clip: Largest norm, if any.

    Raises:
        Refused: If sums with the update would overflow the model's dtype.

    >>> from fedscaffold.algorithms import fedavg, scaffold
    >>> update = Update({"move": np.array([3.0, 4.0])}, 2.0, {})
    >>> measure(update, fedavg(), None, 2.0).length
    5.0
    >>> measure(update._replace(vectors={"move": np.array([1e308, 1e308])}), fedavg(), None, 2.0)
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: overflow: numbers up to 1e+308 do not fit float64 when they are
        added up
    >>> server = scaffold().init(np.zeros(2))
    >>> update = Update({"d": np.array([3.0, 4.0])}, 2.0, {})
    >>> measure(update, scaffold(), server, 2.0, clip=200**0.5 / 2).vectors
    {'d': array([1.5, 2. ]), 'move': array([3., 4.])}
    """
    known = exchange(algorithm)
    (dtype,) = {vector.dtype for vector in update.vectors.values()}
    size = max(vector.size for vector in update.vectors.values())
    norms: dict[str, list[float]] = {name: [] for name in known.vectors}
    # values too large for double precision are infinite
    with np.errstate(over="ignore", invalid="ignore"):
        for place in slices(size):
            for name, (_, value) in _deviations(update, algorithm, told, place).items():
                norms[name].append(norm(value))
    length = math.hypot(
        *((1.0 if name == known.move else most) * join_norms(one) for name, one in norms.items())
    )
    longest = max(length, *(norm(vector) for vector in update.vectors.values()))
    if not longest < float(np.finfo(dtype).max) / HEADROOM:
        largest = max(
            float(np.abs(vector[place]).max(initial=0.0))
            for vector in update.vectors.values()
            for place in slices(size)
        )
        raise Refused(
            "overflow", f"numbers up to {largest:.3g} do not fit {dtype} when they are added up"
        )
    if clip is None or length <= clip:
        return update._replace(length=length)

    def block(place: slice) -> tuple[Array, ...]:
        off = _deviations(update, algorithm, told, place)
        return tuple((usual + clip / length * value).astype(dtype) for usual, value in off.values())

    clipped = dict(zip(known.vectors, assemble(size, block), strict=True))
    return update._replace(vectors=clipped, length=clip, clipped=length)


def _deviations(
    update: Update, algorithm: Algorithm, told: Record, place: slice
) -> dict[str, tuple[Any, Array]]:
    """Return a block of the reference of each vector of a message, and of the deviation from it."""
    vectors, references = take_vectors(update, place), dict(algorithm.references)
    (dtype,) = {vector.dtype for vector in vectors.values()}
    sent = cast(cast(take(told, place), dtype), np.float64)
    message = message_of(algorithm, vectors, update.travel)
    usual = {
        name: references[name](sent) if name in references else 0.0
        for name in exchange(algorithm).vectors
    }
    return {name: (value, getattr(message, name) - value) for name, value in usual.items()}


def find_outsized(lengths: Mapping[str, float], usual: Array) -> dict[str, Refused]:
    """Return refusals of replies so long that in a sum the others' numbers are lost to rounding.

    A reply is compared with the lower median of all norms, which fewer than half of the sites
    cannot raise; a single reply is compared with the norm of `usual`. Norms below 1 / eps are never
    refused, as small models may take large steps.

    >>> list(find_outsized({"ant": 1e-3, "bee": 2e-3, "cow": 1e200}, np.ones(1)))
    ['cow']
    """
    ordered = sorted(lengths.values())
    middle = norm(usual) if len(ordered) < 2 else ordered[(len(ordered) - 1) // 2]
    most = max(1.0, middle) / float(np.finfo(usual.dtype).eps)
    why = f"where the median is {middle:.3g}: in a sum with it the others' numbers vanish"
    return {
        site: Refused("norm", f"its update is {length:.3g} long {why}")
        for site, length in sorted(lengths.items())
        if length > most
    }


def mean_metrics(
    roster: Mapping[str, Member], updates: Mapping[str, Update]
) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Average the metrics that most clients report.

    Returns:
        The means, and by metric the sites where it is not finite.
    """
    means: dict[str, float] = {}
    unmeasured: dict[str, list[str]] = {}
    p = shares(roster)
    named = Counter(name for update in updates.values() for name in update.metrics)
    for name in sorted(name for name, sites in named.items() if 2 * sites > len(updates)):
        values = {site: updates[site].metrics.get(name, math.nan) for site in sorted(updates)}
        finite = {site: value for site, value in values.items() if math.isfinite(value)}
        if finite:
            heard = sum(p[site] for site in finite)
            means[name] = sum(p[site] * value for site, value in finite.items()) / heard
        if len(finite) < len(values):
            unmeasured[name] = [site for site in values if site not in finite]
    return means, unmeasured


def _average_buffers(
    state: State, share: Mapping[str, float], updates: Mapping[str, Update]
) -> dict[str, Array]:
    """Aggregate buffers: weighted means of floats, lower medians of integers, which never decrease.

    Integers are counters or indices. The median keeps one site from setting them: with the maximum,
    it could overflow a counter or push an index out of range at all the others.
    """
    out = dict(state.buffers)
    for name, old in state.buffers.items():
        came = {
            site: update.buffers[name] for site, update in updates.items() if name in update.buffers
        }
        if len(came) < len(updates):
            continue
        if np.issubdtype(old.dtype, np.floating):
            mean = sum(share[site] * came[site].astype(np.float64) for site in sorted(came))
            out[name] = np.asarray(mean, old.dtype)
        else:
            ordered = np.sort(np.stack([came[site] for site in sorted(came)]), axis=0)
            out[name] = np.asarray(np.maximum(old, ordered[(len(ordered) - 1) // 2]))
    return out

"""The gate: what a reply must pass before it may touch the model. The first test that fails names the reason.

    stranger      the sender is a member of the roster, and says so
    size          no more bytes, names and text than an honest reply has; looked at before anything is allocated
    schema        exactly the vectors asked for, of the model's shape and dtype, by the model's digest
    not finite    every number is one
    stale         it answers this round and this request (round and nonce), and none before
    implausible   as many records as registered, at least one step and no more than asked for
    norm          optionally, the pair (move, change of c_i) is not longer than the cap (clipped where the server can)

Replies come from machines of others. Nothing here trusts a type, a length or a number; whatever is wrong raises
`Refused` with the reason, and never anything else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.deploy.schema import Array, Blob, Packet, Schema

__all__ = ["Asked", "Refused", "Update", "admit", "clipped", "norm_of", "text", "vector", "whole"]

MOST_FACTS = 64
MOST_TEXT = 500


class Refused(ValueError):
    """A message that was not let in: `code` is the test it failed, the text says what was wrong."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code


class Asked(NamedTuple):
    """What the server asked a client for."""

    site: str
    round: int
    nonce: str
    vectors: tuple[str, ...]
    """Names of the vectors that must come back: d, move or c_i."""
    schema: Schema
    records: int
    most_steps: int
    buffers: bool = False
    """Whether the model's buffers come back too."""


class Update(NamedTuple):
    """A reply that was let in."""

    vectors: dict[str, Array]
    steps: int
    buffers: dict[str, Array]
    memory: str
    """Digest of the c_i that the client now holds in waiting; "" where the server keeps them."""
    metrics: dict[str, float]


def admit(packet: Packet, asked: Asked) -> Update:
    """Let a reply in, or raise `Refused` with the reason; tests in the order of the table above.

    >>> from fedscaffold.deploy.schema import blob
    >>> schema = Schema(("w",), ((2,),), "float64")
    >>> asked = Asked("north", 1, "n1", ("d",), schema, records=10, most_steps=5)
    >>> facts = {"site": "north", "round": 1, "nonce": "n1", "schema": schema.digest, "records": 10, "steps": 5}
    >>> admit(Packet(facts, {"d": blob(np.ones(2))}), asked).steps
    5
    >>> admit(Packet(facts, {"d": blob(np.array([1.0, np.nan]))}), asked)
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: not finite: 1 of the 2 numbers of d are NaN or infinite
    """
    facts = packet.facts
    if text(facts, "site") != asked.site:
        raise Refused("stranger", f"a reply of {text(facts, 'site')!r} in the place of {asked.site!r}")
    wanted = _wanted(asked)
    _small(packet, wanted)
    if text(facts, "schema") != asked.schema.digest:
        raise Refused("schema", f"model {text(facts, 'schema')!r} where {asked.schema.digest!r} is trained")
    arrays = _arrays(packet, wanted)
    for name, array in arrays.items():
        finite(name, array)
    fresh(packet, asked)
    if whole(facts, "records") != asked.records:
        raise Refused("implausible", f"{whole(facts, 'records')} records where {asked.records} are registered")
    steps = whole(facts, "steps")
    if not 1 <= steps <= asked.most_steps:
        raise Refused("implausible", f"{steps} local steps where 1 to {asked.most_steps} were asked for")
    vectors = {name: arrays[name] for name in asked.vectors}
    buffers = {name.removeprefix("buffer."): array for name, array in arrays.items() if name not in vectors}
    return Update(vectors, steps, buffers, text(facts, "memory", ""), _metrics(facts))


def fresh(packet: Packet, asked: Asked) -> None:
    """Refuse what answers another round or another request."""
    round_, nonce = whole(packet.facts, "round"), text(packet.facts, "nonce")
    if round_ != asked.round:
        raise Refused("stale", f"a reply to round {round_} in round {asked.round}")
    if nonce != asked.nonce:
        raise Refused("stale", f"a reply to another request of round {round_}")


def clipped(update: Update, c: Array | None, travel: float, cap: float) -> tuple[Update, float]:
    """Shorten the pair (move, change of c_i) to `cap` where it is longer: both by one factor, so that c stays the mean.

    Returns the update and the length that the pair had.
    """
    d = update.vectors.get("d")
    change = None if d is None or c is None else d - c
    move = update.vectors["move"] if "move" in update.vectors else travel * update.vectors["d"]
    length = norm_of(move, change, travel)
    if length <= cap:
        return update, length
    vectors = {"move": (cap / length * move).astype(move.dtype)}
    if c is not None and change is not None:
        vectors["d"] = (c + cap / length * change).astype(move.dtype)
    return update._replace(vectors=vectors), length


def norm_of(move: Array, change: Array | None, travel: float) -> float:
    """Length of the pair (move, travel * change of c_i), both in units of the model.

    >>> norm_of(np.array([3.0]), np.array([2.0]), 2.0)
    5.0
    """
    square = float(np.vdot(move, move).real)
    square += 0.0 if change is None else travel**2 * float(np.vdot(change, change).real)
    return math.sqrt(square)


def vector(packet: Packet, name: str, schema: Schema) -> Array:
    """One vector of the model out of a packet: schema and finiteness checked."""
    array = _array(name, packet.blobs.get(name), (schema.size,), schema.dtype)
    finite(name, array)
    return array


def finite(name: str, array: Array) -> None:
    """Refuse numbers that are none."""
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise Refused("not finite", f"{bad} of the {array.size} numbers of {name} are NaN or infinite")


def text(facts: Any, name: str, default: str | None = None) -> str:
    """A fact that must be a short text."""
    value = facts.get(name, default) if isinstance(facts, dict) else None
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Refused("schema", f"{name} must be a short text, got {_shown(value)}")
    return value


def whole(facts: Any, name: str) -> int:
    """A fact that must be a whole number."""
    value = facts.get(name) if isinstance(facts, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused("schema", f"{name} must be a whole number, got {_shown(value)}")
    return value


def _wanted(asked: Asked) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of everything that must come back, by name."""
    shape: tuple[int, ...] = (asked.schema.size,)
    wanted = dict.fromkeys(asked.vectors, (shape, asked.schema.dtype))
    if asked.buffers:
        wanted |= {f"buffer.{name}": (shape, dtype) for name, shape, dtype in asked.schema.buffers}
    return wanted


def _small(packet: Packet, wanted: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Refuse more bytes, claimed or sent, than an honest reply has."""
    if not isinstance(packet.facts, dict) or not isinstance(packet.blobs, dict) or len(packet.facts) > MOST_FACTS:
        raise Refused("size", f"more than {MOST_FACTS} scalars")
    room = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in wanted.values())
    sent = claimed = 0
    for name, item in packet.blobs.items():
        if not isinstance(item, Blob) or not isinstance(item.data, bytes) or not _is_shape(item.shape):
            raise Refused("schema", f"{_shown(name)} is not an array")
        sent += len(item.data)
        claimed += math.prod(item.shape)  # at least one byte each
    if max(sent, claimed) > room:
        raise Refused("size", f"{max(sent, claimed)} bytes sent or claimed where {room} are expected")


def _arrays(packet: Packet, wanted: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
    if packet.blobs.keys() != wanted.keys():
        raise Refused("schema", f"arrays {_shown(sorted(map(str, packet.blobs)))} where {sorted(wanted)} are expected")
    return {name: _array(name, packet.blobs[name], shape, dtype) for name, (shape, dtype) in wanted.items()}


def _array(name: str, item: Blob | None, shape: tuple[int, ...], dtype: str) -> Array:
    if item is None or not isinstance(item.data, bytes):
        raise Refused("schema", f"no array {name}")
    if item.dtype != dtype or item.shape != shape:
        raise Refused(
            "schema", f"{name} is {_shown(item.dtype)} {_shown(item.shape)} where {dtype} {shape} is expected"
        )
    kind = np.dtype(dtype).newbyteorder("<")
    if len(item.data) != math.prod(shape) * kind.itemsize:
        raise Refused(
            "size", f"{name} has {len(item.data)} bytes where {math.prod(shape) * kind.itemsize} are expected"
        )
    return np.frombuffer(item.data, kind).reshape(shape).astype(dtype, copy=False)


def _metrics(facts: dict[str, Any]) -> dict[str, float]:
    """Metrics that are finite numbers; a diverged loss is no reason to refuse a client."""
    named = ((name.removeprefix("metric."), v) for name, v in facts.items() if str(name).startswith("metric."))
    return {name: float(v) for name, v in named if type(v) in (int, float) and abs(v) < 1e300}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) < 33 and all(type(n) is int and n >= 0 for n in shape)


def _shown(value: Any) -> str:
    """A stranger's value, cut short for a log line."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."

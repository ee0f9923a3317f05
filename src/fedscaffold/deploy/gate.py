"""The gate: what a reply must pass before it may touch the model. The first test that fails names the reason.

    stranger      the sender is a member of the roster, and says so
    size          no more bytes, names and text than an honest reply has; looked at before anything is allocated
    schema        exactly the vectors asked for, of the model's shape and dtype, by the model's digest
    not finite    every number is one
    stale         it answers this round and this request (round and nonce), and none before
    implausible   as many records as registered, at least one step and no more than asked for
    overflow      what the server makes of it, scaled and added up, is finite as well
    norm          the pair (move, change of c_i) does not drown the others' replies, and with `deploy.clip` is clipped

Replies come from machines of others. Nothing here trusts a type, a length or a number; whatever is wrong raises
`Refused` with the reason, and never anything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.deploy.schema import Array, Blob, Packet, Schema

__all__ = [
    "Asked", "Refused", "Update", "admit", "array_of", "clipped", "finite", "fresh", "frozen_apart", "length_of",
    "measured", "outsized", "said", "shown", "text", "vector", "whole",
]  # fmt: skip

MOST_FACTS = 64
MOST_TEXT = 500
HEADROOM = 8.0  # how often the largest length that is let in still fits the model's type: a sum and a difference do


class Refused(ValueError):
    """A message that was not let in: `code` is the test it failed, the text says what was wrong."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}"[:MOST_TEXT])
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
    length: float = 0.0
    """Of the pair (move, change of c_i), in units of the model; of c_i where that is reported."""


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


def measured(update: Update, c: Array | None, travel: float) -> Update:
    """The update with the length of its pair; refused where the model's type could not hold what is made of it.

    >>> update = Update({"d": np.array([3.0, 4.0])}, 2, {}, "", {})
    >>> measured(update, None, 2.0).length
    10.0
    >>> measured(update._replace(vectors={"d": np.array([1e308, 1e308])}), None, 2.0)
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: overflow: numbers up to 1e+308 do not fit float64 when they are added up
    """
    move, change = _pair(update, c, travel)
    length = math.hypot(length_of(move), 0.0 if change is None else travel * length_of(change))
    longest = max(length, *(length_of(vector) for vector in update.vectors.values()))
    (dtype,) = {vector.dtype for vector in update.vectors.values()}
    if not longest < float(np.finfo(dtype).max) / HEADROOM:
        most = max(float(np.abs(vector).max(initial=0.0)) for vector in update.vectors.values())
        raise Refused("overflow", f"numbers up to {most:.3g} do not fit {dtype} when they are added up")
    return update._replace(length=length)


def clipped(update: Update, c: Array | None, travel: float, cap: float) -> Update:
    """Shorten the pair (move, change of c_i) to `cap` where it is longer: both by one factor, so that c stays the mean.

    >>> update = measured(Update({"d": np.array([3.0, 4.0])}, 1, {}, "", {}), None, 2.0)
    >>> clipped(update, None, 2.0, cap=5.0).vectors["move"]
    array([3., 4.])
    """
    if update.length <= cap:
        return update
    factor = cap / update.length
    move, change = _pair(update, c, travel)
    dtype = update.vectors["move" if "move" in update.vectors else "d"].dtype
    vectors = {"move": (factor * move).astype(dtype)}
    if c is not None and change is not None:
        vectors["d"] = (c + factor * change).astype(dtype)
    return update._replace(vectors=vectors, length=cap)


def outsized(lengths: Mapping[str, float], usual: float, dtype: Any) -> dict[str, Refused]:
    """Replies so long that the others' numbers vanish in the rounding of a sum with them, and why they are refused.

    A reply is compared with the lower median of all, which less than half of the sites cannot raise; the only one of
    a round is compared with `usual`. Lengths below 1 / eps are never refused: small models may take large steps.

    >>> list(outsized({"ant": 1e-3, "bee": 2e-3, "cow": 1e200}, 1.0, np.float64))
    ['cow']
    """
    ordered = sorted(lengths.values())
    middle = usual if len(ordered) < 2 else ordered[(len(ordered) - 1) // 2]
    most = max(1.0, middle) / float(np.finfo(dtype).eps)
    why = f"where the median is {middle:.3g}: in a sum with it the others' numbers vanish"
    return {
        site: Refused("norm", f"its update is {length:.3g} long {why}")
        for site, length in sorted(lengths.items())
        if length > most
    }


def length_of(vector: Array) -> float:
    """Euclidean norm in double precision, without overflow or underflow on its way.

    >>> [f"{length_of(np.array(values)):.6g}" for values in ([3e200, 4e200], np.float32([3e30, 4e30]))]
    ['5e+200', '5e+30']
    """
    most = float(np.abs(vector).max(initial=0.0))
    if most == 0.0 or not math.isfinite(most):
        return most
    return most * float(np.linalg.norm(vector.astype(np.float64) / most))


def _pair(update: Update, c: Array | None, travel: float) -> tuple[Array, Array | None]:
    """(move, change of c_i) in double precision; infinite where even that is too small."""
    d, move = update.vectors.get("d"), update.vectors.get("move")
    with np.errstate(over="ignore", invalid="ignore"):
        change = None if d is None or c is None else d.astype(np.float64) - c
        if move is None:
            assert d is not None
            return travel * d.astype(np.float64), change
        return move.astype(np.float64), change


def vector(packet: Packet, name: str, schema: Schema) -> Array:
    """One vector of the model out of a packet: schema and finiteness checked."""
    array = array_of(packet, name, (schema.size,), schema.dtype)
    finite(name, array)
    return array


def array_of(packet: Packet, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """One array of a known shape and dtype out of a packet."""
    return _array(name, packet.blobs.get(name) if isinstance(packet.blobs, dict) else None, shape, dtype)


def finite(name: str, array: Array) -> None:
    """Refuse numbers that are none."""
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise Refused("not finite", f"{bad} of the {array.size} numbers of {name} are NaN or infinite")


def frozen_apart(packet: Packet, schema: Schema) -> list[str]:
    """Names of the frozen parameters whose fingerprints in a greeting differ from the schema's."""
    item = packet.blobs.get("frozen") if isinstance(packet.blobs, dict) else None
    mine = [(name, bytes.fromhex(print_)) for name, *_, print_ in schema.frozen]
    if not isinstance(item, Blob) or not isinstance(item.data, bytes) or len(item.data) != 16 * len(mine):
        return []
    return [name for i, (name, print_) in enumerate(mine) if item.data[16 * i : 16 * (i + 1)] != print_]


def text(facts: Any, name: str, default: str | None = None) -> str:
    """A fact that must be a short text."""
    value = facts.get(name, default) if isinstance(facts, dict) else None
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Refused("schema", f"{name} must be a short text, got {shown(value)}")
    return value


def said(facts: Any, name: str) -> str:
    """A fact that must be a short text, to be shown to people: what would steer a terminal is escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text(facts, name))


def whole(facts: Any, name: str) -> int:
    """A fact that must be a whole number of 64 bits."""
    value = facts.get(name) if isinstance(facts, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise Refused("schema", f"{name} must be a whole number of 64 bits, got {shown(value)}")
    return int(value)


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
            raise Refused("schema", f"{shown(name)} is not an array")
        sent += len(item.data)
        claimed += math.prod(item.shape)  # at least one byte each
    if max(sent, claimed) > room:
        raise Refused("size", f"{max(sent, claimed)} bytes sent or claimed where {room} are expected")


def _arrays(packet: Packet, wanted: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
    if packet.blobs.keys() != wanted.keys():
        names = ", ".join(shown(name) for name in list(packet.blobs)[:3]) or "none"
        more = ", ..." if len(packet.blobs) > 3 else ""
        raise Refused("schema", f"arrays {names}{more} where {', '.join(sorted(wanted)) or 'none'} are expected")
    return {name: _array(name, packet.blobs[name], shape, dtype) for name, (shape, dtype) in wanted.items()}


def _array(name: str, item: Blob | None, shape: tuple[int, ...], dtype: str) -> Array:
    if not isinstance(item, Blob) or not isinstance(item.data, bytes) or not _is_shape(item.shape):
        raise Refused("schema", f"no array {name}")
    if not isinstance(item.dtype, str) or item.dtype != dtype or item.shape != shape:
        found = f"{shown(item.dtype)} {'x'.join(map(str, item.shape))[:80] or 'scalar'}"
        raise Refused("schema", f"{name} is {found} where {dtype} {'x'.join(map(str, shape)) or 'scalar'} is expected")
    kind = np.dtype(dtype).newbyteorder("<")
    if len(item.data) != math.prod(shape) * kind.itemsize:
        raise Refused(
            "size", f"{name} has {len(item.data)} bytes where {math.prod(shape) * kind.itemsize} are expected"
        )
    return np.frombuffer(item.data, kind).reshape(shape).astype(dtype, copy=False)


def _metrics(facts: dict[str, Any]) -> dict[str, float]:
    """Metrics by name, NaN where they are no finite numbers; a diverged loss is no reason to refuse a client."""
    named = ((name, value) for name, value in facts.items() if isinstance(name, str) and name.startswith("metric."))
    return {
        name.removeprefix("metric."): float(value) if abs(value) < 1e300 else math.nan
        for name, value in named
        if name.isprintable() and len(name) <= 80 and type(value) in (int, float)
    }


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) < 33 and all(type(n) is int and 0 <= n < 2**63 for n in shape)


def shown(value: Any) -> str:
    """A stranger's value, cut short for a log line; of what may be long or deep, only what it is.

    >>> shown("north"), shown(10**5000), shown([[]])
    ("'north'", 'a whole number of 16610 bits', 'a list')
    """
    if isinstance(value, str):
        return repr(value[:60] + "..." if len(value) > 60 else value)[:80]
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value) if value is None or type(value) in (bool, int, float) else f"a {type(value).__name__}"

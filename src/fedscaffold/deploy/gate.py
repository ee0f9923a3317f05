"""Validation of untrusted messages. The first check that fails is the `code` of the refusal.

    stranger      the sender is a member and names itself
    size          bytes, names and texts are within those of a valid reply; checked before anything is allocated
    schema        exactly the requested vectors, with the model's shape, dtype and digest
    not finite    all numbers are finite
    stale         the reply is to this round and this request (round and nonce)
    implausible   the registered number of records; at least one local step and no more than requested
    overflow      the server's scaled sums of it are finite too
    norm          the pair (move, change of c_i) is not so long that the others' replies vanish in rounding;
                  with `deploy.clip` it is clipped

No type, length or number of a message is trusted. Every invalid message raises `Refused`, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange
from fedscaffold.deploy.record_arithmetic import Ranges, cast, message_of, pack, unpack
from fedscaffold.deploy.schema import Array, Blob, Packet, Schema

__all__ = [
    "Asked",
    "Reach",
    "Refused",
    "Update",
    "abbreviate",
    "admit",
    "check_finite",
    "check_fresh",
    "clip_update",
    "find_outsized",
    "frozen_mismatches",
    "measure",
    "norm",
    "read_array",
    "read_int",
    "read_printable",
    "read_text",
    "read_vector",
]

MOST_FACTS = 64
MOST_TEXT = 500
HEADROOM = 8.0  # factor below the largest float, so that sums and differences stay finite


class Refused(ValueError):
    """A message failed validation; `code` names the failed check."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}"[:MOST_TEXT])
        self.code = code


class Asked(NamedTuple):
    """The reply that the server expects from a client."""

    site: str
    round: int
    nonce: str
    arrays: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of every expected array: fields of the algorithm's message, or of its memory in a resync, and
    `buffer.NAME`."""
    schema: Schema
    records: int
    most_steps: int
    private: Ranges = ()
    """Coordinates that never leave a client and are left out of the vectors."""


class Update(NamedTuple):
    """A validated reply."""

    vectors: dict[str, Array]
    steps: int
    buffers: dict[str, Array]
    memory: str
    """Digest of the client's new memory, pending confirmation; "" where the server keeps it."""
    metrics: dict[str, float]
    length: float = 0.0
    """Norm of the pair (move, change of c_i) in units of the model; norm of c_i in a resync."""
    own: str = ""
    """Digest of the client's new private state, pending confirmation; "" for none."""


def admit(packet: Packet, asked: Asked) -> Update:
    """Validate a reply, in the order of the checks above.

    Args:
        packet: The reply.
        asked: What was requested of the client.

    Raises:
        Refused: With the first check that fails.

    >>> from fedscaffold.deploy.schema import blob
    >>> schema = Schema(("w",), ((2,),), "float64")
    >>> asked = Asked("north", 1, "n1", {"d": ((2,), "float64")}, schema, records=10, most_steps=5)
    >>> facts = {"site": "north", "round": 1, "nonce": "n1", "schema": schema.digest, "records": 10, "steps": 5}
    >>> admit(Packet(facts, {"d": blob(np.ones(2))}), asked).steps
    5
    >>> admit(Packet(facts, {"d": blob(np.array([1.0, np.nan]))}), asked)
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: not finite: 1 of the 2 numbers of d are NaN or infinite
    """
    facts = packet.facts
    if read_text(facts, "site") != asked.site:
        raise Refused("stranger", f"a reply of {read_text(facts, 'site')!r} in the place of {asked.site!r}")
    _check_size(packet, asked.arrays)
    if read_text(facts, "schema") != asked.schema.digest:
        raise Refused("schema", f"model {read_text(facts, 'schema')!r} where {asked.schema.digest!r} is trained")
    arrays = _read_arrays(packet, asked.arrays)
    for name, array in arrays.items():
        check_finite(name, array)
    check_fresh(packet, asked)
    if read_int(facts, "records") != asked.records:
        raise Refused("implausible", f"{read_int(facts, 'records')} records where {asked.records} are registered")
    steps = read_int(facts, "steps")
    if not 1 <= steps <= asked.most_steps:
        raise Refused("implausible", f"{steps} local steps where 1 to {asked.most_steps} were asked for")
    buffers = {name.removeprefix("buffer."): a for name, a in arrays.items() if name.startswith("buffer.")}
    sent = {name: a for name, a in arrays.items() if not name.startswith("buffer.")}
    vectors = {name: unpack(a, asked.private, asked.schema.size) for name, a in sent.items()}
    return Update(
        vectors, steps, buffers, read_text(facts, "memory", ""), _read_metrics(facts), own=read_text(facts, "own", "")
    )


def check_fresh(packet: Packet, asked: Asked) -> None:
    """Raise `Refused` if a reply answers another round or another request."""
    round_, nonce = read_int(packet.facts, "round"), read_text(packet.facts, "nonce")
    if round_ != asked.round:
        raise Refused("stale", f"a reply to round {round_} in round {asked.round}")
    if nonce != asked.nonce:
        raise Refused("stale", f"a reply to another request of round {round_}")


class Reach(NamedTuple):
    """What is needed to measure the effect of a reply on the server's state."""

    algorithm: Algorithm
    told: Any
    """The server's record, as sent to the client."""
    travel: float
    """K_i lr with the validated number of steps; converts a mean direction to a move."""
    most: float
    """Largest factor by which the server may multiply a vector other than the move."""


def measure(update: Update, reach: Reach) -> Update:
    """Return the update with its norm; raise `Refused` if sums with it would overflow the model's dtype.

    >>> from fedscaffold.algorithms import fedavg
    >>> update = Update({"move": np.array([3.0, 4.0])}, 2, {}, "", {})
    >>> measure(update, Reach(fedavg(), None, 2.0, 2.0)).length
    5.0
    >>> measure(update._replace(vectors={"move": np.array([1e308, 1e308])}), Reach(fedavg(), None, 2.0, 2.0))
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: overflow: numbers up to 1e+308 do not fit float64 when they are added up
    """
    length = math.hypot(*(weight * norm(off) for _, off, weight in _deviations(update, reach).values()))
    longest = max(length, *(norm(vector) for vector in update.vectors.values()))
    (dtype,) = {vector.dtype for vector in update.vectors.values()}
    if not longest < float(np.finfo(dtype).max) / HEADROOM:
        most = max(float(np.abs(vector).max(initial=0.0)) for vector in update.vectors.values())
        raise Refused("overflow", f"numbers up to {most:.3g} do not fit {dtype} when they are added up")
    return update._replace(length=length)


def clip_update(update: Update, reach: Reach, cap: float) -> Update:
    """Clip the norm of the pair (move, change of c_i) to `cap`, both by one factor, so that c stays the mean.

    >>> from fedscaffold.algorithms import scaffold
    >>> reach = Reach(scaffold(), scaffold().init(np.zeros(2)), 2.0, 2.0)
    >>> update = measure(Update({"d": np.array([3.0, 4.0])}, 1, {}, "", {}), reach)
    >>> clip_update(update, reach, cap=update.length / 2).vectors["move"]
    array([3., 4.])
    """
    if update.length <= cap:
        return update
    factor = cap / update.length
    (dtype,) = {vector.dtype for vector in update.vectors.values()}
    apart = _deviations(update, reach)
    vectors = {name: (usual + factor * off).astype(dtype) for name, (usual, off, _) in apart.items()}
    return update._replace(vectors=vectors, length=cap)


def find_outsized(lengths: Mapping[str, float], usual: float, dtype: Any) -> dict[str, Refused]:
    """Return refusals of replies so long that in a sum the others' numbers are lost to rounding.

    A reply is compared with the lower median of all norms, which fewer than half of the sites cannot raise; a single
    reply is compared with `usual`. Norms below 1 / eps are never refused, as small models may take large steps.

    >>> list(find_outsized({"ant": 1e-3, "bee": 2e-3, "cow": 1e200}, 1.0, np.float64))
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


def norm(vector: Array) -> float:
    """Return the Euclidean norm in double precision, without intermediate overflow or underflow.

    >>> [f"{norm(np.array(values)):.6g}" for values in ([3e200, 4e200], np.float32([3e30, 4e30]))]
    ['5e+200', '5e+30']
    """
    most = float(np.abs(vector).max(initial=0.0))
    if most == 0.0 or not math.isfinite(most):
        return most
    return most * float(np.linalg.norm(vector.astype(np.float64) / most))


def _deviations(update: Update, reach: Reach) -> dict[str, tuple[Any, Array, float]]:
    """Return (reference, deviation, weight) of each vector of the message, in double precision.

    The reference of a direction is the server's field that the algorithm declares for it, so that the deviation is the
    change of the client's memory. Values too large for double precision are infinite.
    """
    known, references = exchange(reach.algorithm), dict(reach.algorithm.references)
    sent = cast(reach.told, np.float64)
    apart: dict[str, tuple[Any, Array, float]] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        message = message_of(reach.algorithm, update.vectors, reach.travel)
        for name in known.vectors:
            usual = references[name](sent) if name in references else 0.0
            apart[name] = usual, getattr(message, name) - usual, 1.0 if name == known.move else reach.most
    return apart


def read_vector(packet: Packet, name: str, like: Array, private: Ranges = ()) -> Array:
    """Read and validate one vector or number with the shape and dtype of `like`; private coordinates are zero."""
    array = read_array(packet, name, pack(like, private).shape, like.dtype.name)
    check_finite(name, array)
    return unpack(array, private, like.size)


def read_array(packet: Packet, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Read one array of a known shape and dtype."""
    return _decode(name, packet.blobs.get(name) if isinstance(packet.blobs, dict) else None, shape, dtype)


def check_finite(name: str, array: Array) -> None:
    """Raise `Refused` if an array holds NaN or infinity."""
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise Refused("not finite", f"{bad} of the {array.size} numbers of {name} are NaN or infinite")


def frozen_mismatches(packet: Packet, schema: Schema) -> list[str]:
    """Return the names of frozen parameters whose fingerprints in a greeting differ from the schema's."""
    item = packet.blobs.get("frozen") if isinstance(packet.blobs, dict) else None
    mine = [(name, bytes.fromhex(print_)) for name, *_, print_ in schema.frozen]
    if not isinstance(item, Blob) or not isinstance(item.data, bytes) or len(item.data) != 16 * len(mine):
        return []
    return [name for i, (name, print_) in enumerate(mine) if item.data[16 * i : 16 * (i + 1)] != print_]


def read_text(facts: Any, name: str, default: str | None = None) -> str:
    """Read a fact that must be a short string."""
    value = facts.get(name, default) if isinstance(facts, dict) else None
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Refused("schema", f"{name} must be a short text, got {abbreviate(value)}")
    return value


def read_printable(facts: Any, name: str) -> str:
    """Read a short string for display, with non-printable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in read_text(facts, name))


def read_int(facts: Any, name: str) -> int:
    """Read a fact that must be a 64-bit integer."""
    value = facts.get(name) if isinstance(facts, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise Refused("schema", f"{name} must be a whole number of 64 bits, got {abbreviate(value)}")
    return int(value)


def _check_size(packet: Packet, wanted: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Raise `Refused` if a message has, or claims, more bytes than a valid reply."""
    if not isinstance(packet.facts, dict) or not isinstance(packet.blobs, dict) or len(packet.facts) > MOST_FACTS:
        raise Refused("size", f"more than {MOST_FACTS} scalars")
    room = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in wanted.values())
    sent = claimed = 0
    for name, item in packet.blobs.items():
        if not isinstance(item, Blob) or not isinstance(item.data, bytes) or not _is_shape(item.shape):
            raise Refused("schema", f"{abbreviate(name)} is not an array")
        sent += len(item.data)
        claimed += math.prod(item.shape)  # every element has at least one byte
    if max(sent, claimed) > room:
        raise Refused("size", f"{max(sent, claimed)} bytes sent or claimed where {room} are expected")


def _read_arrays(packet: Packet, wanted: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, Array]:
    if packet.blobs.keys() != wanted.keys():
        names = ", ".join(abbreviate(name) for name in list(packet.blobs)[:3]) or "none"
        more = ", ..." if len(packet.blobs) > 3 else ""
        raise Refused("schema", f"arrays {names}{more} where {', '.join(sorted(wanted)) or 'none'} are expected")
    return {name: _decode(name, packet.blobs[name], shape, dtype) for name, (shape, dtype) in wanted.items()}


def _decode(name: str, item: Blob | None, shape: tuple[int, ...], dtype: str) -> Array:
    if not isinstance(item, Blob) or not isinstance(item.data, bytes) or not _is_shape(item.shape):
        raise Refused("schema", f"no array {name}")
    if not isinstance(item.dtype, str) or item.dtype != dtype or item.shape != shape:
        found = f"{abbreviate(item.dtype)} {'x'.join(map(str, item.shape))[:80] or 'scalar'}"
        raise Refused("schema", f"{name} is {found} where {dtype} {'x'.join(map(str, shape)) or 'scalar'} is expected")
    kind = np.dtype(dtype).newbyteorder("<")
    if len(item.data) != math.prod(shape) * kind.itemsize:
        raise Refused(
            "size", f"{name} has {len(item.data)} bytes where {math.prod(shape) * kind.itemsize} are expected"
        )
    return np.frombuffer(item.data, kind).reshape(shape).astype(dtype, copy=False)


def _read_metrics(facts: dict[str, Any]) -> dict[str, float]:
    """Read the metrics, with NaN for non-finite ones: a diverged loss is no reason to refuse a reply."""
    named = ((name, value) for name, value in facts.items() if isinstance(name, str) and name.startswith("metric."))
    return {
        name.removeprefix("metric."): float(value) if abs(value) < 1e300 else math.nan
        for name, value in named
        if name.isprintable() and len(name) <= 80 and type(value) in (int, float)
    }


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) < 33 and all(type(n) is int and 0 <= n < 2**63 for n in shape)


def abbreviate(value: Any) -> str:
    """Format an untrusted value for a log line, abbreviated; of large or nested values only the type.

    >>> abbreviate("north"), abbreviate(10**5000), abbreviate([[]])
    ("'north'", 'a whole number of 16610 bits', 'a list')
    """
    if isinstance(value, str):
        return repr(value[:60] + "..." if len(value) > 60 else value)[:80]
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value) if value is None or type(value) in (bool, int, float) else f"a {type(value).__name__}"

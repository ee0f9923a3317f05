"""Validation of untrusted messages. The first check that fails is the `code` of the refusal.

    stranger      the sender is a member and names itself
    size          bytes, names and texts are within those of a valid reply; checked before anything
                  is allocated
    schema        exactly the requested vectors, with the model's shape, dtype and digest
    not finite    all numbers are finite
    stale         the reply is to this round and this request (round and nonce)
    implausible   the registered number of records; at least one local step and no more than
                  requested
    overflow      the server's scaled sums of it are finite too (`aggregation.measure`)
    norm          the pair (move, change of c_i) is not so long that the others' replies vanish in
                  rounding (`aggregation.find_outsized`); with `deploy.clip` it is clipped

No type, length or number of a message is trusted. Every invalid message raises `Refused`, and
nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedscaffold.deploy.blocks import Vector, slices
from fedscaffold.deploy.schema import Array, Blob, Packet, Ranges, Schema, digest_of, pack, unpack
from fedscaffold.deploy.settings import Settings

__all__ = [
    "MOST_METRICS",
    "Asked",
    "Refused",
    "Spent",
    "Update",
    "abbreviate",
    "admit",
    "check_digests",
    "check_finite",
    "check_fresh",
    "check_greeting",
    "read_array",
    "read_int",
    "read_printable",
    "read_text",
    "read_vector",
]

MOST_FACTS = 64
DIGEST = re.compile(r"[0-9a-f]{32}")
MOST_METRICS = 32
MOST_TEXT = 500


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
    """Shape and dtype of every expected array: fields of the algorithm's message, or of its memory
    in a resync, and `buffer.NAME`."""
    schema: Schema
    records: int
    most_steps: int
    lr: float
    """Size of a local step."""
    private: Ranges = ()
    """Coordinates that never leave a client and are left out of the vectors."""
    began: float | None = None
    """When it was asked, by the server's clock, in asynchronous rounds; None for the round's begin.
    """
    sent: Any = None
    """The server's record that it was sent, before its rounding, in asynchronous rounds; None for
    that of the round."""


class Update(NamedTuple):
    """A validated reply."""

    vectors: Mapping[str, Vector]
    """Fields of the message; those of large models are in files until the round is closed."""
    travel: float
    """K_i lr with the validated number of steps; converts a mean direction to a move."""
    buffers: dict[str, Array]
    memory: str = ""
    """Digest of the client's new memory, pending confirmation; "" where the server keeps it."""
    metrics: dict[str, float] = {}  # noqa: RUF012 (never changed)
    length: float = 0.0
    """Norm of the pair (move, change of c_i) in units of the model; norm of c_i in a resync."""
    clipped: float = 0.0
    """Norm before clipping; 0 where nothing was clipped."""
    own: str = ""
    """Digest of the client's new private state, pending confirmation; "" for none."""
    spent: Spent | None = None
    """What the client says of its privacy budget; None where it says nothing."""
    sent: Any = None
    """The server's record that it answers, in asynchronous rounds; None for that of the round."""
    damping: float = 1.0
    """By how much its move counts: less than 1 for a stale one, if so chosen."""


class Spent(NamedTuple):
    """A site's word on its privacy budget."""

    epsilon: float
    delta: float
    charged: int
    """Number of requests of this run that its records were charged with."""


def admit(packet: Packet, asked: Asked) -> Update:
    """Validate a reply, in the order of the checks above.

    Args:
        packet: The reply.
        asked: What was requested of the client.

    Raises:
        Refused: With the first check that fails.

    >>> from fedscaffold.deploy.schema import blob
    >>> schema = Schema(("w",), ((2,),), "float64")
    >>> asked = Asked("north", 1, "n1", {"d": ((2,), "float64")}, schema, 10, most_steps=5, lr=0.1)
    >>> facts = {"site": "north", "round": 1, "nonce": "n1", "records": 10, "steps": 5}
    >>> facts["schema"] = schema.digest
    >>> admit(Packet(facts, {"d": blob(np.ones(2))}), asked).travel
    0.5
    >>> admit(Packet(facts, {"d": blob(np.array([1.0, np.nan]))}), asked)
    Traceback (most recent call last):
    fedscaffold.deploy.gate.Refused: not finite: 1 of the 2 numbers of d are NaN or infinite
    """
    facts = packet.facts
    if read_text(facts, "site") != asked.site:
        raise Refused(
            "stranger", f"a reply of {read_text(facts, 'site')!r} in the place of {asked.site!r}"
        )
    if not isinstance(facts, dict) or not isinstance(packet.blobs, dict) or len(facts) > MOST_FACTS:
        raise Refused("size", f"more than {MOST_FACTS} scalars")
    _check_arrays(packet, asked)
    arrays = {
        name: read_array(packet, name, shape, dtype)
        for name, (shape, dtype) in asked.arrays.items()
    }
    check_fresh(packet, asked)
    if read_int(facts, "records") != asked.records:
        raise Refused(
            "implausible",
            f"{read_int(facts, 'records')} records where {asked.records} are registered",
        )
    steps = read_int(facts, "steps")
    if not 1 <= steps <= asked.most_steps:
        raise Refused(
            "implausible", f"{steps} local steps where 1 to {asked.most_steps} were asked for"
        )
    buffers = {
        name.removeprefix("buffer."): a for name, a in arrays.items() if name.startswith("buffer.")
    }
    sent = {name: a for name, a in arrays.items() if not name.startswith("buffer.")}
    vectors = {name: unpack(a, asked.private, asked.schema.size) for name, a in sent.items()}
    memory, own = read_text(facts, "memory", ""), read_text(facts, "own", "")
    metrics, spent = _read_metrics(facts), _read_spent(facts)
    return Update(vectors, steps * asked.lr, buffers, memory, metrics, own=own, spent=spent)


def _check_arrays(packet: Packet, asked: Asked) -> None:
    """Raise `Refused` if a reply has other arrays than were asked for, or is too large."""
    for name, item in packet.blobs.items():
        if not _is_array(item):
            raise Refused("schema", f"{abbreviate(name)} is not an array")
    room = sum(
        math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in asked.arrays.values()
    )
    # every element has at least one byte
    claimed = sum(math.prod(item.shape) for item in packet.blobs.values())
    most = max(claimed, sum(len(item.data) for item in packet.blobs.values()))
    if most > room:
        raise Refused("size", f"{most} bytes sent or claimed where {room} are expected")
    if read_text(packet.facts, "schema") != asked.schema.digest:
        raise Refused(
            "schema",
            f"model {read_text(packet.facts, 'schema')!r} where {asked.schema.digest!r} is trained",
        )
    if packet.blobs.keys() != asked.arrays.keys():
        names = ", ".join(abbreviate(name) for name in list(packet.blobs)[:3]) or "none"
        more = ", ..." if len(packet.blobs) > 3 else ""
        raise Refused(
            "schema",
            f"arrays {names}{more} where {', '.join(sorted(asked.arrays)) or 'none'} are expected",
        )


def check_fresh(packet: Packet, asked: Asked) -> None:
    """Raise `Refused` if a reply answers another round or another request."""
    round_, nonce = read_int(packet.facts, "round"), read_text(packet.facts, "nonce")
    if round_ != asked.round:
        raise Refused("stale", f"a reply to round {round_} in round {asked.round}")
    if nonce != asked.nonce:
        raise Refused("stale", f"a reply to another request of round {round_}")


def check_digests(update: Update, memory: bool, own: bool) -> None:
    """Raise `Refused` if a reply to training does not name what its site keeps, or names more.

    Args:
        update: The reply.
        memory: Whether sites keep their c_i.
        own: Whether they keep a private state.
    """
    if memory and not DIGEST.fullmatch(update.memory):
        raise Refused("schema", "it does not say which c_i it holds now")
    if update.memory and not memory:  # a later "lost" would trigger a needless resync
        raise Refused("schema", "it names a c_i of its own where sites keep none")
    if bool(DIGEST.fullmatch(update.own)) != own:
        raise Refused(
            "schema",
            "it does not say what it keeps for itself now, or says so where nothing is kept",
        )


def check_greeting(
    packet: Packet, site: str, schema: Schema, settings: Settings, before: int | None
) -> int:
    """Return the number of records that a greeting registers.

    Args:
        packet: The greeting.
        site: The sender.
        schema: The model.
        settings: The deployment's settings.
        before: The number of records that the site registered earlier, if any.

    Raises:
        Refused: If the site may not take part.
    """
    if site not in settings.deploy.sites or read_text(packet.facts, "site") != site:
        raise Refused("stranger", f"{site!r} is not one of the sites of this federation")
    if read_text(packet.facts, "kind", "") == "refusal":
        raise Refused("failed", read_printable(packet.facts, "reason"))
    for what, mine in (("schema", schema.digest), ("settings", settings.digest)):
        if read_text(packet.facts, what) != mine:
            other = _frozen_mismatches(packet, schema) if what == "schema" else []
            if other:
                more = f" and {len(other) - 3} more" if len(other) > 3 else ""
                said = (
                    f"frozen parameters of {site} are not the server's: "
                    f"{', '.join(other[:3])}{more}"
                )
                raise Refused("config", f"{said}; load them from the same file everywhere")
            raise Refused(
                "config", f"its {what} differ from the server's; give it the same app and TOML"
            )
    if read_text(packet.facts, "app") != digest_of(settings.app):
        raise Refused("config", f"{_other_files(packet, settings)}; give it the same files")
    records, agreed = read_int(packet.facts, "records"), settings.deploy.records.get(site)
    if not 1 <= records <= settings.deploy.max_records:
        raise Refused(
            "implausible", f"{records} records; 1 to {settings.deploy.max_records} are allowed"
        )
    if agreed is not None and records != agreed:
        raise Refused(
            "implausible", f"{records} records where {agreed} stand under [deploy.records]"
        )
    if agreed is None and before is not None and records != before:
        do = (
            f"if that is right, the operator writes {site} = {records} under [deploy.records] and "
            "resumes"
        )
        raise Refused("implausible", f"{records} records where {before} were registered; {do}")
    return records


def read_vector(packet: Packet, name: str, like: Array, private: Ranges = ()) -> Array:
    """Read one vector or number with the shape and dtype of `like`.

    Private coordinates are zero.
    """
    array = read_array(packet, name, pack(like, private).shape, like.dtype.name)
    return unpack(array, private, like.size)


def read_array(packet: Packet, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Read one array of a known shape and dtype, with finite numbers."""
    item = packet.blobs.get(name) if isinstance(packet.blobs, dict) else None
    if item is None or not _is_array(item):
        raise Refused("schema", f"no array {name}")
    if item.dtype != dtype or item.shape != shape:
        found = f"{abbreviate(item.dtype)} {'x'.join(map(str, item.shape))[:80] or 'scalar'}"
        raise Refused(
            "schema",
            f"{name} is {found} where {dtype} {'x'.join(map(str, shape)) or 'scalar'} is expected",
        )
    kind = np.dtype(dtype).newbyteorder("<")
    room = math.prod(shape) * kind.itemsize
    if len(item.data) != room:
        raise Refused("size", f"{name} has {len(item.data)} bytes where {room} are expected")
    array = np.frombuffer(item.data, kind).reshape(shape).astype(dtype, copy=False)
    check_finite(name, array)
    return array


def check_finite(name: str, array: Array) -> None:
    """Raise `Refused` if an array holds NaN or infinity."""
    flat = array.reshape(-1)
    bad = sum(int(np.count_nonzero(~np.isfinite(flat[place]))) for place in slices(array.size))
    if bad:
        raise Refused(
            "not finite", f"{bad} of the {array.size} numbers of {name} are NaN or infinite"
        )


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
        raise Refused(
            "schema", f"{name} must be a whole number of 64 bits, got {abbreviate(value)}"
        )
    return int(value)


def _frozen_mismatches(packet: Packet, schema: Schema) -> list[str]:
    """Return the frozen parameters whose fingerprints in a greeting are not the schema's."""
    item = packet.blobs.get("frozen") if isinstance(packet.blobs, dict) else None
    mine = [(name, bytes.fromhex(print_)) for name, *_, print_ in schema.frozen]
    if (
        not isinstance(item, Blob)
        or not isinstance(item.data, bytes)
        or len(item.data) != 16 * len(mine)
    ):
        return []
    return [
        name for i, (name, print_) in enumerate(mine) if item.data[16 * i : 16 * (i + 1)] != print_
    ]


def _other_files(packet: Packet, settings: Settings) -> str:
    """Say which files of the server's app are others at the sender, by its greeting."""
    item = packet.blobs.get("app") if isinstance(packet.blobs, dict) else None
    data = item.data if isinstance(item, Blob) and isinstance(item.data, bytes) else b""
    theirs = {data[i : i + 16] for i in range(0, len(data), 16)}
    other = [path for path, print_ in settings.app.items() if bytes.fromhex(print_) not in theirs]
    if not other:
        return "its app has files that the server's has not"
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    return f"files of its app are missing or not the server's: {', '.join(other[:3])}{more}"


def _read_metrics(facts: dict[str, Any]) -> dict[str, float]:
    """Read the metrics, with NaN for non-finite ones.

    A diverged loss is no reason to refuse a reply.
    """
    named = (
        (name, value)
        for name, value in facts.items()
        if isinstance(name, str) and name.startswith("metric.")
    )
    return {
        name.removeprefix("metric."): float(value) if abs(value) < 1e300 else math.nan
        for name, value in named
        if name.isprintable() and len(name) <= 80 and type(value) in (int, float)
    }


def _read_spent(facts: dict[str, Any]) -> Spent | None:
    """Read what a client says of its privacy budget; None if it says nothing."""
    if "epsilon" not in facts:
        return None
    spent = Spent(facts["epsilon"], facts.get("delta", math.nan), read_int(facts, "charged"))
    for name, value in (("epsilon", spent.epsilon), ("delta", spent.delta)):
        if type(value) is not float or not 0 <= value < math.inf:
            raise Refused("schema", f"{name} must be a finite number, got {abbreviate(value)}")
    return spent


def _is_array(item: Any) -> bool:
    """Return whether an item of a message is an array with a possible shape."""
    if (
        not isinstance(item, Blob)
        or not isinstance(item.data, bytes)
        or not isinstance(item.dtype, str)
    ):
        return False
    shape = item.shape
    return (
        isinstance(shape, tuple)
        and len(shape) < 33
        and all(type(n) is int and 0 <= n < 2**63 for n in shape)
    )


def abbreviate(value: Any) -> str:
    """Format an untrusted value for a log line; large or nested values by their type only.

    >>> abbreviate("north"), abbreviate(10**5000), abbreviate([[]])
    ("'north'", 'a whole number of 16610 bits', 'a list')
    """
    if isinstance(value, str):
        return repr(value[:60] + "..." if len(value) > 60 else value)[:80]
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    return f"a {type(value).__name__}"

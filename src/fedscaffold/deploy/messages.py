"""Requests of the server, and the replies expected to them."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, shift_of, work_of
from fedscaffold.deploy.aggregation import State, memory_of
from fedscaffold.deploy.gate import Asked
from fedscaffold.deploy.record_arithmetic import blank_memory, pack
from fedscaffold.deploy.schema import Array, Fact, Packet, Schema, blob
from fedscaffold.deploy.settings import Local, Settings

__all__ = ["make_asked", "make_request", "server_fields", "shift_parts"]


def server_fields(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the fields of the server's record from which a client that keeps its memory computes the shift."""
    known = exchange(algorithm)
    return known.down + known.told


def shift_parts(shift: Any) -> dict[str, Array]:
    """Return the arrays of a shift by the names under which they are sent.

    >>> from fedscaffold.algorithms.scaffold import Memory
    >>> list(shift_parts(np.zeros(2))), list(shift_parts(Memory(np.zeros(2))))
    (['shift'], ['shift.c_i'])
    """
    fields = {"": shift} if not hasattr(shift, "_asdict") else shift._asdict()
    return {f"shift.{name}".rstrip("."): np.asarray(value) for name, value in fields.items()}


def make_asked(
    site: str, kind: str, state: State, schema: Schema, settings: Settings, algorithm: Algorithm, life: str
) -> Asked:
    """Return the reply expected of a site; `life` makes the nonce unique to this attempt and server process."""
    words = f"{life} {state.round + 1} {kind} {site}"
    nonce = hashlib.sha256(words.encode()).hexdigest()[:16]
    records, local = state.roster[site].records, settings.local
    most = work_of(algorithm, _max_steps(local, records)).steps
    up: dict[str, Array] = {}
    if kind == "train":
        up = dict.fromkeys(exchange(algorithm).sent(settings.plain), state.x)
    elif kind == "resync":
        up = blank_memory(algorithm, state.x)._asdict()
    arrays = {name: (pack(like, algorithm.private).shape, schema.dtype) for name, like in up.items()}
    if kind == "train" and local.buffers == "average":
        arrays |= {f"buffer.{name}": (shape, dtype) for name, shape, dtype in schema.buffers}
    return Asked(site, state.round + 1, nonce, arrays, schema, records, most, algorithm.private)


def make_request(asked: Asked, kind: str, run: str, state: State, settings: Settings, algorithm: Algorithm) -> Packet:
    """Return the request: x, and the shift or (where clients keep memories) the fields to compute it from."""
    member = state.roster[asked.site]
    facts: dict[str, Fact] = {
        "kind": kind,
        "run": run,
        "site": asked.site,
        "round": asked.round,
        "nonce": asked.nonce,
        "schema": asked.schema.digest,
        "settings": settings.digest,
        "expect": member.digest,
        "own": member.own,
        "told": member.told,
        "evaluate": kind == "train" and (asked.round - 1) % settings.evaluate_every == 0,
    }
    if kind == "resync":
        return Packet(facts, {})
    vectors = {"x": state.x}
    if algorithm.shift is not None and kind == "train":
        if settings.deploy.state == "client":
            vectors |= {name: getattr(state.told, name) for name in server_fields(algorithm)}
        else:
            vectors |= shift_parts(shift_of(algorithm, state.told, memory_of(algorithm, state, asked.site)))
    blobs = {name: blob(pack(vector, algorithm.private)) for name, vector in vectors.items()}
    return Packet(facts, blobs | {f"buffer.{name}": blob(value) for name, value in state.buffers.items()})


def _max_steps(local: Local, records: int) -> int:
    """Return the largest number of local steps that the settings allow.

    Without a batch size the app makes its own batches, of at least one record each.
    """
    if local.steps is not None:
        return local.steps
    size = local.batch_size
    if size is None:
        batch = 1
    elif isinstance(size, float):
        batch = max(1, math.ceil(size * records - 1e-9))
    else:
        batch = size
    return (local.epochs or 1) * -(-records // batch)

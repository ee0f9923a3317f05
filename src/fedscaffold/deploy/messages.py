"""Requests of the server, and the replies expected to them."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, shift_of, work_of
from fedscaffold.deploy.aggregation import State, memory_of
from fedscaffold.deploy.gate import Asked
from fedscaffold.deploy.record_arithmetic import blank_memory, pack
from fedscaffold.deploy.schema import Fact, Packet, Schema, blob
from fedscaffold.deploy.settings import Local, Settings

__all__ = ["make_asked", "make_request", "vectors_up"]


def vectors_up(algorithm: Algorithm, plain: bool, kind: str = "train") -> tuple[str, ...]:
    """Return the names of the vectors that a client sends: its message, or its memory in a resync.

    With plain SGD one vector carries both move and direction.

    >>> from fedscaffold.algorithms import fedavg, scaffold
    >>> vectors_up(fedavg(), True), vectors_up(scaffold(), True), vectors_up(scaffold(option=1), True)
    (('move',), ('d',), ('d', 'move'))
    """
    if kind == "resync":
        memory = blank_memory(algorithm, np.zeros(1))
        return () if memory is None else tuple(memory._fields)
    return exchange(algorithm).sent(plain) if kind == "train" else ()


def make_asked(
    site: str, kind: str, state: State, schema: Schema, settings: Settings, algorithm: Algorithm, life: str
) -> Asked:
    """Return the reply expected of a site; `life` makes the nonce unique to this attempt and server process."""
    words = f"{life} {state.round + 1} {kind} {site}"
    nonce = hashlib.sha256(words.encode()).hexdigest()[:16]
    records, local = state.roster[site].records, settings.local
    most = work_of(algorithm, _max_steps(local, records)).steps
    buffers = kind == "train" and local.buffers == "average"
    up = vectors_up(algorithm, settings.plain, kind)
    return Asked(site, state.round + 1, nonce, up, schema, records, most, buffers, algorithm.private)


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
            vectors |= {name: getattr(state.told, name) for name in exchange(algorithm).down}
        else:
            vectors["shift"] = shift_of(algorithm, state.told, memory_of(algorithm, state, asked.site))
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

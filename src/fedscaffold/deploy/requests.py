"""What the server asks of a client: the request it sends, and what must come back."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.deploy.gate import Asked
from fedscaffold.deploy.rounds import State
from fedscaffold.deploy.schema import Fact, Packet, Schema, blob
from fedscaffold.deploy.settings import Local, Settings

__all__ = ["asked_of", "request_for", "vectors_up"]


def vectors_up(algorithm: Algorithm, plain: bool, kind: str = "train") -> tuple[str, ...]:
    """What a client sends up: with plain SGD one vector, whatever the algorithm.

    >>> from fedscaffold.algorithms import fedavg, scaffold
    >>> vectors_up(fedavg(), True), vectors_up(scaffold(), True), vectors_up(scaffold(option=1), True)
    (('move',), ('d',), ('d', 'move'))
    """
    if kind != "train":
        return ("c_i",) if kind == "resync" else ()
    if algorithm.remember is None or algorithm.by_move:
        return ("move",)
    return ("d",) if plain and not algorithm.at_x else ("d", "move")


def asked_of(
    site: str, kind: str, state: State, schema: Schema, settings: Settings, algorithm: Algorithm, life: str
) -> Asked:
    """What must come back from a site; `life` makes the nonce of this attempt, in this life of the server, its own."""
    words = f"{life} {state.round + 1} {kind} {site}"
    nonce = hashlib.sha256(words.encode()).hexdigest()[:16]
    records, local = state.roster[site].records, settings.local
    most = 1 if algorithm.one_step else _most_steps(local, records)
    buffers = kind == "train" and local.buffers == "average"
    up = vectors_up(algorithm, settings.plain, kind)
    return Asked(site, state.round + 1, nonce, up, schema, records, most, buffers)


def request_for(asked: Asked, kind: str, run: str, state: State, settings: Settings, algorithm: Algorithm) -> Packet:
    """The request itself: x, and the correction (or c, where the client keeps its own c_i)."""
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
        "told": member.told,
        "evaluate": kind == "train" and (asked.round - 1) % settings.evaluate_every == 0,
    }
    if kind == "resync":
        return Packet(facts, {})
    blobs = {"x": blob(state.x)}
    if algorithm.shift is not None and kind == "train":
        assert state.told is not None
        if settings.deploy.state == "client":
            blobs |= {} if algorithm.by_move else {"c": blob(state.told)}  # what is made from moves alone needs no c
        else:
            held = state.c_i.get(asked.site)
            blobs["shift"] = blob(algorithm.shift(state.told, np.zeros_like(state.x) if held is None else held))
    return Packet(facts, blobs | {f"buffer.{name}": blob(value) for name, value in state.buffers.items()})


def _most_steps(local: Local, records: int) -> int:
    """The most steps that the settings allow; where the app makes its own batches, a batch has one record at least."""
    if local.steps is not None:
        return local.steps
    size = local.batch_size
    batch = 1 if size is None else max(1, math.ceil(size * records - 1e-9)) if isinstance(size, float) else size
    return (local.epochs or 1) * -(-records // batch)

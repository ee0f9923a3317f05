"""The deployment client: answers the server's requests with the result of local training.

A `Learner` supplies the site's data and the gradients in one framework (torch, JAX, NumPy); this module implements the
protocol. With `state = "server"` a request contains the shift and the client is stateless. With `state = "client"` it
contains the server's fields from which the client computes the shift (c, for SCAFFOLD), and the client stores its c_i
in a durable file (`client_state.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedscaffold.algorithms import Algorithm, Walk, travelled
from fedscaffold.algorithms.round import exchange, fitted, personal_model, reply_of, shift_of, start_of
from fedscaffold.checks import InputError
from fedscaffold.deploy import gate
from fedscaffold.deploy.client_state import Lost, load_vector, save_pending
from fedscaffold.deploy.errors import Failed, guarded
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.messages import server_fields, shift_parts
from fedscaffold.deploy.record_arithmetic import (
    Record,
    blank_memory,
    cast,
    flatten,
    message_of,
    pack,
    unflatten,
    unpack,
    update_memory,
)
from fedscaffold.deploy.schema import Array, Fact, Packet, Schema, blob, fingerprint
from fedscaffold.deploy.settings import Local, Settings, algorithm_of
from fedscaffold.state import commit, latest

__all__ = ["Learner", "Site", "Trained", "Work", "answer", "decline", "greeting", "make_walk"]

MOST_METRICS = 32
METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/ -]{0,39}")


class LostOwn(Lost):
    """The private state that the server expects (`Algorithm.own`) was not found."""


class Work(NamedTuple):
    """Input of local training."""

    x: Array
    shift: Any
    """The algorithm's shift, constant during the round: a vector or a record; None where the algorithm has none."""
    algorithm: Algorithm
    local: Local
    seed: int
    """Random seed of this site in this round; a retried round uses the same seed."""
    buffers: dict[str, Array]
    own: Record = None
    """The site's private state, which is never sent; None where the algorithm has none."""

    @property
    def start(self) -> Any:
        """Initial point of the local steps: a vector, or a record of vectors that are stepped together."""
        return start_of(self.algorithm, self.x, self.own)

    @property
    def collect(self) -> bool:
        """Whether the learner must accumulate the directions, as their mean does not follow from x - y."""
        return "d" in exchange(self.algorithm).reads and self.local.optimizer != "sgd"

    @property
    def at_x(self) -> bool:
        """Whether the gradient at x over all local data is needed."""
        return "gradient" in exchange(self.algorithm).reads


class Trained(NamedTuple):
    """Result of local training."""

    walk: Walk
    steps: int
    """Steps performed, not counting those that the optimiser skipped."""
    buffers: dict[str, Array] = {}  # noqa: RUF012 (never changed)


class Site(NamedTuple):
    """A site's opened data: number of records, training and evaluation."""

    records: int
    train: Callable[[Work], Trained]
    evaluate: Callable[[Array, dict[str, Array]], dict[str, float]]
    """(x, buffers) -> metrics on the site's data."""


class Learner(Protocol):
    """A model and its local training in one framework; identical on the server and at every site."""

    @property
    def schema(self) -> Schema:
        """The model's arrays."""

    @property
    def start(self) -> Array:
        """The initial model."""

    @property
    def buffers(self) -> dict[str, Array]:
        """Initial values of the arrays that are not trained: buffers and frozen parameters."""

    def site(self, name: str) -> Site:
        """Open a site's data."""


def make_walk(work: Work, y: Array, steps: int, d: Array | None = None, gradient: Array | None = None) -> Walk:
    """Return the `Walk` of local training on NumPy vectors.

    Args:
        work: The input of local training.
        y: Final point of the local steps.
        steps: Number of steps performed.
        d: Mean direction; required if `work.collect`.
        gradient: Gradient at x over all local data; required if `work.at_x`.
    """
    x, start, lr = work.x, work.start, work.local.lr
    made: dict[str, Callable[[], Any]] = {"gradient": lambda: gradient} if work.at_x else {}
    if work.collect:
        made["d"] = lambda: d
    elif work.local.optimizer == "sgd":
        made["d"] = lambda: travelled(start, y, steps, lr)
    return Walk(x=lambda: x, y=lambda: y, move=lambda: start - y, travel=lambda: steps * lr, **made)


def greeting(learner: Learner, settings: Settings, name: str) -> Packet:
    """Return the message by which a site registers: records, digests, fingerprints of frozen parameters."""
    records = learner.site(name).records
    facts: dict[str, Fact] = {
        "site": name,
        "records": records,
        "schema": learner.schema.digest,
        "settings": settings.digest,
    }
    prints = np.frombuffer(bytes.fromhex("".join(print_ for *_, print_ in learner.schema.frozen)), np.uint8)
    return Packet({"kind": "hello", **facts}, {"frozen": blob(prints)} if prints.size else {})


def answer(request: Packet, learner: Learner, settings: Settings, name: str, folder: Path) -> Packet:
    """Answer one request of the server.

    Errors do not propagate: they become a reply that declines the request. Errors of the app are reported by type and
    reference only; their texts stay in `folder` (`errors.py`).

    Args:
        request: The server's request.
        learner: The app's learner.
        settings: The deployment's settings.
        name: This site's name.
        folder: Folder of the site's state.

    Returns:
        The reply.
    """
    try:
        with guarded("answering", Path(folder), name, passing=(Lost, Refused, Failed)):
            return _answer(request, _Guarded(learner, Path(folder)), settings, name, Path(folder))
    except (Lost, Refused, Failed) as error:
        kind = "refusal"
        if isinstance(error, Lost):
            kind = "lost own" if isinstance(error, LostOwn) else "lost"
        return decline(request, name, str(error), kind)


def decline(request: Packet, name: str, reason: str, kind: str = "refusal") -> Packet:
    """Return a reply that declines a request, with the reason."""
    return Packet({**_echo_facts(request), "site": name, "kind": kind, "reason": reason[:400]}, {})


def _echo_facts(request: Packet) -> dict[str, Any]:
    return {key: request.facts.get(key, "") for key in ("site", "round", "nonce", "schema")}


def _answer(request: Packet, learner: Learner, settings: Settings, name: str, folder: Path) -> Packet:
    facts = _echo_facts(request)
    kind = gate.read_text(request.facts, "kind")
    if kind == "hello":
        return greeting(learner, settings, name)
    _check_request(request, learner, settings, name)
    own = folder / gate.read_text(request.facts, "run") / name
    algorithm = fitted(algorithm_of(settings), learner.schema)
    if kind == "resync":
        memory = _load_memory(request, algorithm, learner.start, own)
        records = learner.site(name).records
        told: dict[str, Fact] = {"kind": "resync", "records": records, "steps": 1}
        vectors = memory._asdict().items()
        return Packet({**facts, **told}, {key: blob(pack(value, algorithm.private)) for key, value in vectors})
    if kind == "evaluate":
        x = gate.read_vector(request, "x", learner.start, algorithm.private)
        x = personal_model(algorithm, x, _load_own(request, algorithm, learner.start, own))
        buffers, site = _load_buffers(request, learner, settings, own), learner.site(name)
        said: dict[str, Fact] = {"kind": "evaluate", "records": site.records, "steps": 1}
        return Packet({**facts, **said, **_evaluate(site, x, buffers)}, {})
    return _train(request, learner, settings, name, own, facts)


class _Guarded(NamedTuple):
    """A learner wrapped so that error texts of the app do not leave the site (`errors.py`)."""

    learner: Learner
    folder: Path

    @property
    def schema(self) -> Schema:
        return self.learner.schema

    @property
    def start(self) -> Array:
        return self.learner.start

    @property
    def buffers(self) -> dict[str, Array]:
        return self.learner.buffers

    def site(self, name: str) -> Site:
        with guarded("reading its data", self.folder, name):
            site = self.learner.site(name)
            records = int(site.records)

        def train(work: Work) -> Trained:
            with guarded("training", self.folder, name):
                return site.train(work)

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            with guarded("measuring", self.folder, name):
                return _check_metrics(site.evaluate(x, buffers))

        return Site(records, train, evaluate)


def _check_request(request: Packet, learner: Learner, settings: Settings, name: str) -> None:
    """Refuse a request for another site, another model or other settings."""
    if gate.read_text(request.facts, "site") != name:
        raise Refused("stranger", f"a request for {request.facts['site']!r} came to {name!r}")
    for what, mine in (("schema", learner.schema.digest), ("settings", settings.digest)):
        if gate.read_text(request.facts, what) != mine:
            raise Refused("config", f"the {what} here differ from the server's; nothing was trained")


def _train(
    request: Packet, learner: Learner, settings: Settings, name: str, own: Path, facts: dict[str, Any]
) -> Packet:
    algorithm, schema = fitted(algorithm_of(settings), learner.schema), learner.schema
    private = algorithm.private
    private_state = _load_own(request, algorithm, learner.start, own)
    x = gate.read_vector(request, "x", learner.start, private)
    site = learner.site(name)
    buffers = _load_buffers(request, learner, settings, own)
    sent = memory = shift = None
    if settings.deploy.state == "client":
        like = cast(algorithm.init(x), schema.dtype)
        names = server_fields(algorithm)
        sent = like._replace(**{key: gate.read_vector(request, key, getattr(like, key), private) for key in names})
        memory = _load_memory(request, algorithm, x, own)
        shift = shift_of(algorithm, sent, memory)
    elif algorithm.shift is not None:
        shift = _read_shift(request, algorithm, x)
    metrics: dict[str, float] = {}
    if request.facts.get("evaluate") is True:
        metrics = _evaluate(site, personal_model(algorithm, x, private_state), buffers)
    seed = _round_seed(settings.seed, gate.read_int(request.facts, "round"), name)
    done = site.train(Work(x, shift, algorithm, settings.local, seed, buffers, private_state))
    if done.steps < 1:
        raise Refused("implausible", "no local step was performed")
    message, new_private_state = reply_of(algorithm, done.walk, shift, private_state)
    names = exchange(algorithm).sent(settings.plain)
    travelling = {key: pack(np.asarray(getattr(message, key), schema.dtype), private) for key in names}
    vectors = {key: unpack(value, private, schema.size) for key, value in travelling.items()}
    own_digest = _save_own(request, algorithm, own, private_state, cast(new_private_state, schema.dtype))
    memory_digest = ""
    if memory is not None:
        counted = message_of(algorithm, vectors, done.steps * settings.local.lr)  # as the server decodes it
        with np.errstate(over="ignore", invalid="ignore"):
            new = cast(update_memory(algorithm, sent, memory, counted), schema.dtype)
        memory_digest = _save_memory(request, own, memory, new)
    blobs = {key: blob(value) for key, value in travelling.items()}
    if settings.local.buffers == "average":
        blobs |= {f"buffer.{key}": blob(value) for key, value in done.buffers.items()}
    elif done.buffers:
        commit(own / "buffers", done.buffers, {"kind": "buffers"}, private=True)
    told: dict[str, Fact] = {"records": site.records, "steps": done.steps, "memory": memory_digest, "own": own_digest}
    return Packet({**facts, "kind": "train", **told, **metrics}, blobs)


def _read_shift(request: Packet, algorithm: Algorithm, x: Array) -> Any:
    """Read the shift: a vector, or a record of vectors and numbers, with the shapes of a first round's."""
    like = shift_of(algorithm, algorithm.init(x), blank_memory(algorithm, x))
    parts = [
        gate.read_vector(request, name, value.astype(x.dtype), algorithm.private)
        for name, value in shift_parts(like).items()
    ]
    return type(like)(*parts) if isinstance(like, tuple) else parts[0]


def _load_memory(request: Packet, algorithm: Algorithm, x: Array, own: Path) -> Record:
    """Load the memory whose digest the server expects; None where the algorithm has no memory."""
    zeros = blank_memory(algorithm, x)
    return (
        None
        if zeros is None
        else unflatten(zeros, load_vector(own, gate.read_text(request.facts, "expect"), flatten(zeros)))
    )


def _save_memory(request: Packet, own: Path, before: Record, new: Record) -> str:
    """Store the new memory until the server confirms the round; return its digest."""
    vector = flatten(new)
    if not np.isfinite(vector).all():
        raise Refused("not finite", "local training diverged; take a smaller local.lr")
    save_pending(own, None if request.facts["expect"] == "" else flatten(before), vector)
    return fingerprint(vector)


def _load_own(request: Packet, algorithm: Algorithm, start: Array, own: Path) -> Record:
    """Load the private state after the last applied round; None where the algorithm has none."""
    if algorithm.own is None:
        return None
    begun = cast(algorithm.own(start), start.dtype)
    try:
        return unflatten(
            begun,
            load_vector(own / "own", gate.read_text(request.facts, "own"), flatten(begun), "what it keeps for itself,"),
        )
    except Lost as error:
        raise LostOwn(str(error)) from None


def _save_own(request: Packet, algorithm: Algorithm, own: Path, before: Record, new: Record) -> str:
    """Store the new private state until the server confirms the round; return its digest, "" for none."""
    if algorithm.own is None:
        return ""
    vector = flatten(new)
    if not np.isfinite(vector).all():
        raise Refused("not finite", "local training diverged; take a smaller local.lr")
    save_pending(own / "own", None if request.facts["own"] == "" else flatten(before), vector)
    return fingerprint(vector)


def _load_buffers(request: Packet, learner: Learner, settings: Settings, own: Path) -> dict[str, Array]:
    """Return the buffers to train with: the server's averages, or this site's own."""
    if settings.local.buffers == "local":
        kept = latest(own / "buffers")
        if kept is not None:
            return kept.arrays
        return {name: learner.buffers[name] for name, _, _ in learner.schema.buffers}
    kinds = learner.schema.buffers
    return {name: gate.read_array(request, f"buffer.{name}", shape, dtype).copy() for name, shape, dtype in kinds}


def _evaluate(site: Site, x: Array, buffers: dict[str, Array]) -> dict[str, float]:
    return {f"metric.{name}": value for name, value in site.evaluate(x, buffers).items()}


def _check_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Check that metrics are few and have short names; return them as floats."""
    if len(metrics) > MOST_METRICS:
        raise InputError(f"at most {MOST_METRICS} metrics are sent, got {len(metrics)}")
    for name in metrics:
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise InputError(f"the name of a metric must be at most 40 letters, digits and _.@/- , got {name!r}")
    return {name: float(value) for name, value in metrics.items()}


def _round_seed(seed: int, round: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {round} {name}".encode()).digest()[:7], "little")

"""The client: answers requests of the server with what its site has learnt. It keeps nothing that cannot be lost.

A learner brings the mathematics of one framework (torch, JAX, plain arrays) and the site's data; this file brings the
protocol. With `state = "server"` a request carries the correction and the client is stateless; with `state = "client"`
it carries c, and the c_i lies in a durable file here (`memory.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedscaffold.algorithms import Algorithm, travelled
from fedscaffold.checks import InputError
from fedscaffold.deploy import gate
from fedscaffold.deploy.errors import Failed, guarded
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.memory import Lost, held, wait_for_word
from fedscaffold.deploy.schema import Array, Fact, Packet, Schema, blob, fingerprint
from fedscaffold.deploy.settings import Local, Settings, algorithm_of
from fedscaffold.state import commit as keep
from fedscaffold.state import latest

__all__ = ["Learner", "Site", "Trained", "Work", "answer", "declined", "greeting"]

MOST_METRICS = 32
METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/ -]{0,39}")


class Work(NamedTuple):
    """What a site is asked to do in a round."""

    x: Array
    shift: Array | None
    """What is added to every gradient, all round long; None where the algorithm has none."""
    algorithm: Algorithm
    local: Local
    seed: int
    """Of this site's random choices in this round: a round done again is the same round."""
    buffers: dict[str, Array]
    collect: bool
    """Whether the mean direction is wanted: it cannot be had from x - y."""


class Trained(NamedTuple):
    """What came of it."""

    y: Array
    steps: int
    """Steps performed: those that an optimiser skipped do not count."""
    d: Array | None = None
    """The mean direction where it was wanted; the direction at x for option I."""
    buffers: dict[str, Array] = {}  # noqa: RUF012 (never changed)


class Site(NamedTuple):
    """One site's data, ready for work."""

    records: int
    train: Callable[[Work], Trained]
    evaluate: Callable[[Array, dict[str, Array]], dict[str, float]]
    """(x, buffers) -> metrics on the site's own data."""


class Learner(Protocol):
    """A model and how it learns, in one framework; the same on the server and at every site."""

    @property
    def schema(self) -> Schema:
        """The model's arrays."""

    @property
    def start(self) -> Array:
        """The model to begin with."""

    @property
    def buffers(self) -> dict[str, Array]:
        """What the model keeps but does not train, to begin with: buffers, and frozen parameters."""

    def site(self, name: str) -> Site:
        """Open a site's data."""


def greeting(learner: Learner, settings: Settings, name: str) -> Packet:
    """What a site says of itself when it joins."""
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
    """Answer one request of the server; what cannot be done is said, never raised.

    Errors of the app itself are told by type and reference; their texts stay in `folder` (`errors.py`).
    """
    try:
        with guarded("answering", Path(folder), name, passing=(Lost, Refused, Failed)):
            return _answered(request, _Guarded(learner, Path(folder)), settings, name, Path(folder))
    except (Lost, Refused, Failed) as error:
        return declined(request, name, str(error), "lost" if isinstance(error, Lost) else "refusal")


def declined(request: Packet, name: str, reason: str, kind: str = "refusal") -> Packet:
    """Say why a request cannot be done."""
    return Packet({**_repeated(request), "site": name, "kind": kind, "reason": reason[:400]}, {})


def _repeated(request: Packet) -> dict[str, Any]:
    return {key: request.facts.get(key, "") for key in ("site", "round", "nonce", "schema")}


def _answered(request: Packet, learner: Learner, settings: Settings, name: str, folder: Path) -> Packet:
    facts = _repeated(request)
    kind = gate.text(request.facts, "kind")
    if kind == "hello":
        return greeting(learner, settings, name)
    _same(request, learner, settings, name)
    own = folder / gate.text(request.facts, "run") / name
    if kind == "resync":
        c_i = held(own, gate.text(request.facts, "expect"), learner.start)
        records = learner.site(name).records
        return Packet({**facts, "kind": "resync", "records": records, "steps": 1}, {"c_i": blob(c_i)})
    if kind == "evaluate":
        x, buffers = gate.vector(request, "x", learner.schema), _buffers(request, learner, settings, own)
        site = learner.site(name)
        said: dict[str, Fact] = {"kind": "evaluate", "records": site.records, "steps": 1}
        return Packet({**facts, **said, **_metrics(site, x, buffers)}, {})
    return _trained(request, learner, settings, name, own, facts)


class _Guarded(NamedTuple):
    """A learner whose site's code lets no error text out, whatever type it raises."""

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
                return _named(site.evaluate(x, buffers))

        return Site(records, train, evaluate)


def _same(request: Packet, learner: Learner, settings: Settings, name: str) -> None:
    """Refuse to train another model, with other settings, or in another's name."""
    if gate.text(request.facts, "site") != name:
        raise Refused("stranger", f"a request for {request.facts['site']!r} came to {name!r}")
    for what, mine in (("schema", learner.schema.digest), ("settings", settings.digest)):
        if gate.text(request.facts, what) != mine:
            raise Refused("config", f"the {what} here differ from the server's; nothing was trained")


def _trained(
    request: Packet, learner: Learner, settings: Settings, name: str, own: Path, facts: dict[str, Any]
) -> Packet:
    algorithm, schema = algorithm_of(settings), learner.schema
    x = gate.vector(request, "x", schema)
    site, buffers = learner.site(name), _buffers(request, learner, settings, own)
    c = c_i = shift = None
    if algorithm.shift is not None and settings.deploy.state == "client":
        c = None if algorithm.by_move else gate.vector(request, "c", schema)
        c_i = held(own, gate.text(request.facts, "expect"), x)
        shift = algorithm.shift(c, c_i)
    elif algorithm.shift is not None:
        shift = gate.vector(request, "shift", schema)
    plain = settings.plain and not algorithm.at_x
    sends_d = algorithm.remember is not None and not algorithm.by_move
    metrics = _metrics(site, x, buffers) if request.facts.get("evaluate") is True else {}
    seed = _seed(settings.seed, gate.whole(request.facts, "round"), name)
    done = site.train(Work(x, shift, algorithm, settings.local, seed, buffers, sends_d and not plain))
    if done.steps < 1:
        raise Refused("implausible", "no local step was performed")
    vectors = {} if plain and sends_d else {"move": np.asarray(x - done.y, schema.dtype)}
    if sends_d:
        d = travelled(x, done.y, done.steps, settings.local.lr) if plain else done.d
        vectors["d"] = np.asarray(d, schema.dtype)
    memory = ""
    if algorithm.remember is not None and c_i is not None:
        new = np.asarray(algorithm.remember(c, c_i, vectors["d" if sends_d else "move"]), schema.dtype)
        if not np.isfinite(new).all():
            raise Refused("not finite", "local training diverged; take a smaller local.lr")
        wait_for_word(own, None if request.facts["expect"] == "" else c_i, new)
        memory = fingerprint(new)
    blobs = {key: blob(np.asarray(value, schema.dtype)) for key, value in vectors.items()}
    if settings.local.buffers == "average":
        blobs |= {f"buffer.{key}": blob(value) for key, value in done.buffers.items()}
    elif done.buffers:
        keep(own / "buffers", done.buffers, {"kind": "buffers"}, private=True)
    told: dict[str, Fact] = {"records": site.records, "steps": done.steps, "memory": memory}
    return Packet({**facts, "kind": "train", **told, **metrics}, blobs)


def _buffers(request: Packet, learner: Learner, settings: Settings, own: Path) -> dict[str, Array]:
    """The buffers to work with: the server's averages, or those this site keeps to itself."""
    if settings.local.buffers == "local":
        kept = latest(own / "buffers")
        if kept is not None:
            return kept.arrays
        return {name: learner.buffers[name] for name, _, _ in learner.schema.buffers}
    kinds = learner.schema.buffers
    return {name: gate.array_of(request, f"buffer.{name}", shape, dtype).copy() for name, shape, dtype in kinds}


def _metrics(site: Site, x: Array, buffers: dict[str, Array]) -> dict[str, float]:
    return {f"metric.{name}": value for name, value in site.evaluate(x, buffers).items()}


def _named(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics fit to leave the site: few numbers under short names."""
    if len(metrics) > MOST_METRICS:
        raise InputError(f"at most {MOST_METRICS} metrics are sent, got {len(metrics)}")
    for name in metrics:
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise InputError(f"the name of a metric must be at most 40 letters, digits and _.@/- , got {name!r}")
    return {name: float(value) for name, value in metrics.items()}


def _seed(seed: int, round: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {round} {name}".encode()).digest()[:7], "little")

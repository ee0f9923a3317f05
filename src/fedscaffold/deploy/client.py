"""The deployment client: answers the server's requests with the result of local training.

A `Learner` supplies the site's data and the gradients in one framework (torch, JAX, NumPy); this
module implements the protocol. With `state = "server"` a request contains the shift and the client
is stateless. With `state = "client"` it contains the server's fields from which the client computes
the shift (c, for SCAFFOLD), and the client stores its c_i in a durable file (`client_state.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedscaffold.algorithms import Algorithm, Walk, make, travelled
from fedscaffold.algorithms.round import (
    exchange,
    fitted,
    reply_of,
)
from fedscaffold.checks import InputError
from fedscaffold.deploy import gate
from fedscaffold.deploy.aggregation import blank_memory, message_of, update_memory
from fedscaffold.deploy.blocks import assemble, take
from fedscaffold.deploy.client_state import (
    Lost,
    LostOwn,
    load_buffers,
    load_record,
    save_buffers,
    save_record,
)
from fedscaffold.deploy.errors import Failed, guarded
from fedscaffold.deploy.gate import MOST_METRICS, Refused
from fedscaffold.deploy.packets import ECHOED, Fact, Packet, decline
from fedscaffold.deploy.schema import (
    Array,
    Record,
    Schema,
    blob,
    cast,
    digest_inputs,
    digest_of,
    pack,
    unpack,
)
from fedscaffold.deploy.secure_rules import open_identity
from fedscaffold.deploy.secure_vector import fit_to_sum, sent_fields
from fedscaffold.deploy.settings import NAME, Local, Settings
from fedscaffold.deploy.site_privacy import PrivateSite, open_private
from fedscaffold.privacy.site_steps import PrivateSteps

__all__ = ["Learner", "Site", "Trained", "Work", "answer", "greeting", "make_walk"]

METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/ -]{0,39}")


class Work(NamedTuple):
    """Input of local training."""

    x: Array
    shift: Any
    """The algorithm's shift, constant during the round: a vector or a record; None where the
    algorithm has none."""
    algorithm: Algorithm
    local: Local
    seed: int
    """Random seed of this site in this round; a retried round uses the same seed."""
    buffers: dict[str, Array]
    own: Record = None
    """The site's private state, which is never sent; None where the algorithm has none."""
    round: int = 1
    """The round, counted from 1; `local` has its step size."""
    private: PrivateSteps | None = None
    """Where not None, the learner takes these steps, each by their private gradient."""

    @property
    def start(self) -> Any:
        """Initial point of the local steps: a vector, or a record of vectors."""
        return self.algorithm.start(self.x, self.own)

    @property
    def collect(self) -> bool:
        """Whether the learner must sum the directions, as x - y does not give their mean."""
        return "d" in exchange(self.algorithm).reads and not self.local.plain

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
    not_private: Callable[[], str | None] = lambda: "its learner has no gradients of single records"
    """() -> why this learner cannot train by `Work.private`; None if it can."""
    reusable: bool = True
    """Whether it may serve several requests, with the same results as if opened for each: not where
    the data have a state of their own, as a DataLoader's random generator."""


class Learner(Protocol):
    """A model and its local training in one framework, the same at the server and all sites."""

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


def make_walk(
    work: Work, y: Array, steps: int, d: Array | None = None, gradient: Array | None = None
) -> Walk:
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
    elif work.local.plain:
        made["d"] = lambda: travelled(start, y, steps, lr)
    return Walk(x=lambda: x, y=lambda: y, move=lambda: start - y, travel=lambda: steps * lr, **made)


def greeting(learner: Learner, settings: Settings, name: str) -> Packet:
    """Return the message by which a site registers: its records, and digests of its app."""
    facts: dict[str, Fact] = {
        "site": name,
        "records": settings.deploy.records[name]
        if settings.privacy is not None
        else int(learner.site(name).records),
        "schema": learner.schema.digest,
        "settings": settings.digest,
        "app": digest_of(settings.app),
    }
    prints = {
        "frozen": [print_ for *_, print_ in learner.schema.frozen],
        "app": list(settings.app.values()),
    }
    blobs = {
        name: blob(np.frombuffer(bytes.fromhex("".join(held)), np.uint8))
        for name, held in prints.items()
        if held
    }
    return Packet({"kind": "hello", **facts}, blobs)


def answer(
    request: Packet, learner: Learner, settings: Settings, name: str, folder: Path
) -> Packet:
    """Answer one request of the server.

    Errors do not propagate: they become a reply that declines the request. Errors of the app are
    reported by type and reference only; their texts stay in `folder` (`errors.py`).

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
        passing, typed = (Lost, Refused, Failed), settings.privacy is None
        with guarded("answering", Path(folder), name, passing, typed):
            return _reply(request, learner, settings, name, Path(folder))
    except Lost as lost:
        return decline(request, name, str(lost), lost.kind)
    except (Refused, Failed) as error:
        return decline(request, name, str(error))


def _reply(
    request: Packet, learner: Learner, settings: Settings, name: str, folder: Path
) -> Packet:
    """Return the reply to a valid request; raise otherwise."""
    kind = gate.read_text(request.facts, "kind")
    with guarded("reading its own privacy.toml", folder, name, (Refused,)):
        private = open_private(settings, name, folder)
    with guarded("reading its own secure.toml", folder, name, (Refused,)):
        identity = open_identity(settings, name, folder)
    if kind == "hello":
        if private is not None:
            _open_site(learner, settings, name, folder)
        with guarded("reading its data", folder, name):
            return greeting(learner, settings, name)
    _check_request(request, learner, settings, name)
    measures = kind == "evaluate" or request.facts.get("evaluate") is True
    if measures and private is not None:
        raise Refused("privacy", f"metrics on the records of {name} are not noised: none are sent")
    site, records = _open_site(learner, settings, name, folder)
    algorithm = fitted(make(**settings.algorithm), learner.schema)
    kept = folder / _read_run(request) / name
    echo = {key: request.facts.get(key, "") for key in ECHOED}
    facts: dict[str, Fact] = {**echo, "kind": kind, "records": records, "steps": 1}

    def compute() -> Packet:
        return _compute(request, learner, settings, name, folder, private, site, dict(facts))

    if identity is None:
        return compute()
    from fedscaffold.deploy.secure_site import SecureSite

    secure = SecureSite(identity, settings, learner.schema, algorithm, name, kept)
    made = secure.answer(request, records, compute)
    return Packet({**facts, **made.facts}, made.blobs)


def _compute(
    request: Packet,
    learner: Learner,
    settings: Settings,
    name: str,
    folder: Path,
    private: PrivateSite | None,
    site: Site,
    facts: dict[str, Fact],
) -> Packet:
    """Return the reply to a checked request, in the clear."""
    algorithm = fitted(make(**settings.algorithm), learner.schema)
    kept, kind = folder / _read_run(request) / name, facts["kind"]
    own: Record = None
    memory: Record = None
    if algorithm.has_own and kind != "resync":
        initial = cast(algorithm.own(learner.start), learner.schema.dtype)
        own = load_record(kept / "own", gate.read_text(request.facts, "own"), initial, LostOwn)
    if settings.deploy.state == "client" and algorithm.has_memory and kind != "evaluate":
        initial = blank_memory(algorithm, learner.start)
        expect = gate.read_text(request.facts, "expect")
        try:
            memory = load_record(kept, expect, initial)
        except Lost:
            if not settings.deploy.secure or kind != "resync":
                raise
            memory, expect = initial, ""  # its part of the sum: it begins again from zeros
    if kind == "resync":
        facts["memory"] = expect
        fields = memory._asdict().items()
        return Packet(facts, {key: blob(pack(value, algorithm.private)) for key, value in fields})
    x = gate.read_vector(request, "x", learner.start, algorithm.private)
    buffers = _load_buffers(request, learner, settings, kept)
    if kind == "evaluate" or request.facts.get("evaluate") is True:
        with guarded("measuring", folder, name):
            facts |= _metric_facts(site.evaluate(algorithm.personal(x, own), buffers))
    if kind == "evaluate":
        return Packet(facts, {})
    sent, shift = _read_shift(request, settings, algorithm, x, memory)
    number = gate.read_int(request.facts, "round")
    words = f"{settings.seed} {number} {name}"
    seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "little")
    work = Work(x, shift, algorithm, settings.local.at(number), seed, buffers, own, number)

    def reply(work: Work) -> Packet:
        with guarded("training", folder, name, typed=settings.privacy is None):
            done = site.train(work)
        return _store_and_pack(request, settings, work, done, sent, memory, kept, facts)

    if private is None:
        return reply(work)
    return _reply_privately(request, settings, private, work, memory, kept, facts, reply)


def _check_request(request: Packet, learner: Learner, settings: Settings, name: str) -> None:
    """Raise `Refused` if a request is for another site, or of another model, settings or app."""
    if gate.read_text(request.facts, "site") != name:
        raise Refused("stranger", f"a request for {request.facts['site']!r} came to {name!r}")
    mine = {"schema": learner.schema.digest, "settings": settings.digest}
    for what, here in (mine | {"app": digest_of(settings.app)}).items():
        if gate.read_text(request.facts, what) != here:
            raise Refused(
                "config", f"the {what} here differ from the server's; nothing was trained"
            )


def _read_shift(
    request: Packet, settings: Settings, algorithm: Algorithm, x: Array, memory: Record
) -> tuple[Record, Any]:
    """Return the server's record, where clients keep their memories, and the shift.

    Vectors and numbers of a request have the shapes that they have before the first round.
    """
    server = cast(algorithm.init(x), x.dtype)
    if settings.deploy.state == "client":
        names = exchange(algorithm).down + exchange(algorithm).told
        read = {
            name: gate.read_vector(request, name, getattr(server, name), algorithm.private)
            for name in names
        }
        server = server._replace(**read)
        return server, algorithm.shift(server, memory)
    like = algorithm.shift(server, algorithm.memory(x))
    if like is None:
        return None, None
    if not isinstance(like, tuple):
        return None, gate.read_vector(
            request, "shift", np.asarray(like, x.dtype), algorithm.private
        )
    like = cast(like, x.dtype)
    fields = like._asdict().items()
    return None, type(like)(
        *(
            gate.read_vector(request, f"shift.{name}", value, algorithm.private)
            for name, value in fields
        )
    )


def _reply_privately(
    request: Packet,
    settings: Settings,
    private: PrivateSite,
    work: Work,
    memory: Record,
    kept: Path,
    facts: dict[str, Fact],
    reply: Callable[[Work], Packet],
) -> Packet:
    """Return the reply to a training request of a private site.

    It is charged before training, or found if it was given before; then it has the same bytes.
    """
    arrays = {"x": work.x} | {f"buffer.{name}": value for name, value in work.buffers.items()}
    for what, held in (("shift", work.shift), ("own", work.own), ("memory", memory)):
        parts = held if isinstance(held, tuple) else () if held is None else (held,)
        arrays |= {f"{what}.{i}": np.asarray(part) for i, part in enumerate(parts)}
    words = [settings.digest, digest_of(settings.app), work.local.lr, request.facts["schema"]]
    words += [request.facts["expect"], request.facts["own"], private.expected]
    inputs = digest_inputs(words, arrays)
    run, told = _read_run(request), gate.read_int(request.facts, "charged")
    with guarded("charging its privacy ledger", private.folder, private.site, (Refused,)):
        begun = private.begin(run, work.round, inputs, told)
        found = private.stored_reply(kept, begun)
    if found is None:
        found = reply(work._replace(private=begun.steps))
        if begun.steps.taken != begun.steps.steps or found.facts["steps"] != begun.steps.steps:
            raise Refused("privacy", "the learner did not take the steps that were charged")
        with guarded("storing its reply", private.folder, private.site):
            private.store_reply(kept, begun, found)
    echo = {key: facts[key] for key in ECHOED}
    return Packet({**found.facts, **echo, **begun.facts}, found.blobs)


def _open_site(learner: Learner, settings: Settings, name: str, folder: Path) -> tuple[Site, int]:
    """Open a site's data; return the number of records too that the server is told.

    That of a private site is the settings' own.

    Raises:
        Refused: The site cannot train privately, and has to.
    """
    private = settings.privacy is not None
    with guarded("reading its data", folder, name, typed=not private):
        site = learner.site(name)
        records = int(site.records)
        why = site.not_private() if private else None
    if why is not None:
        raise Refused("privacy", f"{name} cannot train privately: {why}")
    return site, settings.deploy.records[name] if private else records


def _read_run(request: Packet) -> str:
    """Read the run's name, which is also that of a folder."""
    run = gate.read_text(request.facts, "run")
    if not NAME.fullmatch(run) or run in ("apps", "errors", "privacy", "secure", "worker"):
        raise Refused("schema", f"run must be a name, got {gate.abbreviate(run)}")
    return run


def _store_and_pack(
    request: Packet,
    settings: Settings,
    work: Work,
    done: Trained,
    sent: Record,
    memory: Record,
    kept: Path,
    facts: dict[str, Fact],
) -> Packet:
    """Return the reply to a training request.

    The client's new state is stored until the server confirms the round.
    """
    if done.steps < 1:
        raise Refused("implausible", "no local step was performed")
    algorithm, dtype, private = work.algorithm, work.x.dtype, work.algorithm.private
    message, new_own = reply_of(algorithm, done.walk, work.shift, work.own)
    names = sent_fields(settings, algorithm)
    arrays = {name: pack(np.asarray(getattr(message, name), dtype), private) for name in names}
    # as the server decodes it
    decoded = {name: unpack(array, private, work.x.size) for name, array in arrays.items()}
    if settings.deploy.secure:
        decoded = fit_to_sum(decoded, settings, algorithm, sent, done.steps, work.local.lr)
        arrays = {name: pack(vector, private) for name, vector in decoded.items()}
    facts |= {"steps": done.steps, "memory": "", "own": ""}
    if algorithm.has_own:
        before = work.own if request.facts["own"] else None
        new = cast(new_own, dtype)
        facts["own"] = save_record(kept / "own", before, new, salted=settings.deploy.secure)
    if memory is not None:
        travel = done.steps * work.local.lr
        with np.errstate(over="ignore", invalid="ignore"):
            new = _remember(algorithm, sent, memory, decoded, travel, work.x)
        before = memory if request.facts["expect"] else None
        facts["memory"] = save_record(kept, before, new, salted=settings.deploy.secure)
    if settings.local.buffers == "average":
        arrays |= {f"buffer.{name}": value for name, value in done.buffers.items()}
    elif done.buffers:
        save_buffers(kept / "buffers", work.round, work.buffers, done.buffers)
    return Packet(facts, {name: blob(array) for name, array in arrays.items()})


def _remember(
    algorithm: Algorithm,
    sent: Record,
    memory: Record,
    decoded: dict[str, Array],
    travel: float,
    x: Array,
) -> Record:
    """Return a client's memory after a message as the server decodes it, made block by block."""

    def block(place: slice) -> Record:
        parts = {name: value[place] if value.ndim else value for name, value in decoded.items()}
        counted = message_of(algorithm, parts, travel)
        made = update_memory(algorithm, take(sent, place), take(memory, place), counted)
        return cast(made, x.dtype)

    return assemble(x.size, block)


def _load_buffers(
    request: Packet, learner: Learner, settings: Settings, kept: Path
) -> dict[str, Array]:
    """Return the buffers to train with: the server's averages, or this site's own."""
    rows = learner.schema.buffers
    if settings.local.buffers == "average":
        return {
            name: gate.read_array(request, f"buffer.{name}", shape, dtype).copy()
            for name, shape, dtype in rows
        }
    round = None if request.facts["kind"] == "evaluate" else gate.read_int(request.facts, "round")
    return load_buffers(kept / "buffers", {name: learner.buffers[name] for name, *_ in rows}, round)


def _metric_facts(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics as facts of a reply; raise if they are too many or have unusual names."""
    if len(metrics) > MOST_METRICS:
        raise InputError(f"at most {MOST_METRICS} metrics are sent, got {len(metrics)}")
    for name in metrics:
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise InputError(
                f"the name of a metric must be at most 40 letters, digits and _.@/- , got {name!r}"
            )
    return {f"metric.{name}": float(value) for name, value in metrics.items()}

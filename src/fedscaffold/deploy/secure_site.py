"""A site's answers to the exchanges of a secure sum (`fedscaffold.secure`).

Nothing is held in memory between exchanges: the record of the attempt is committed to the site's
folder of the run, mode 0600, before an answer leaves. A new attempt replaces the record of the one
before, whose secrets are then gone. A record that is damaged, or lost, ends the attempt for the
site: it refuses, and the others go on without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.deploy import gate
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.packets import Blob, Packet
from fedscaffold.deploy.schema import Array, Schema, blob
from fedscaffold.deploy.secure_rules import SiteIdentity
from fedscaffold.deploy.secure_vector import join_metrics, layout_of
from fedscaffold.deploy.settings import NAME, Settings
from fedscaffold.secure import site_session
from fedscaffold.secure.masking import canonical
from fedscaffold.secure.secret_sharing import SHARE
from fedscaffold.secure.signatures import SIGNATURE
from fedscaffold.secure.site_session import SEALED, Session
from fedscaffold.secure.transcript import ADVERT, EXCHANGES, Breach
from fedscaffold.state import commit, latest, locked
from fedscaffold.state.files import make_folder

__all__ = ["SecureSite", "context_of", "names_blob", "read_rows", "rows_blob"]

ATTEMPT = re.compile(r"[0-9a-f]{32}")
MOST_NAMES = 1 << 20  # bytes


class SecureSite:
    """A site that takes part in secure sums.

    Args:
        identity: Its key, and what it insists on.
        settings: The deployment's settings.
        schema: The model.
        algorithm: The algorithm, fitted to the model.
        site: The site's name.
        kept: The site's folder of the run.
    """

    def __init__(
        self,
        identity: SiteIdentity,
        settings: Settings,
        schema: Schema,
        algorithm: Algorithm,
        site: str,
        kept: Path,
    ) -> None:
        self.identity, self.settings, self.schema = identity, settings, schema
        self.algorithm, self.site, self.kept = algorithm, site, kept / "secure"

    def answer(self, request: Packet, records: int, plain: Callable[[], Packet]) -> Packet:
        """Answer one exchange.

        Args:
            request: The server's request.
            records: The site's number of records.
            plain: Computes the reply that would be sent in the clear.

        Returns:
            Facts and arrays of the reply.

        Raises:
            Refused: The request breaks the protocol, or is of an attempt that is not under way.
        """
        name, context = gate.read_text(request.facts, "exchange"), context_of(request)
        if name not in EXCHANGES:
            raise Refused("secure", f"{gate.abbreviate(name)} is no exchange of a secure sum")
        if gate.read_int(request.facts, "fraction") != self.settings.ring.fraction:
            raise Refused("config", "the numbers of secure sums here differ from the server's")
        make_folder(self.kept, private=True)
        try:
            with locked(self.kept / ".site"):
                session = self._load(context, name == "keys")
                if name == "masked":
                    return self._mask(session, request, records, plain)
                return Packet({}, getattr(self, f"_{name}")(session, request))
        except Breach as breach:
            raise Refused("secure", str(breach)) from None

    def _keys(self, session: Session, request: Packet) -> dict[str, Blob]:
        self._store(session)
        advert = site_session.advertise(session, self.identity.key)
        return {"keys": blob(np.frombuffer(advert, np.uint8))}

    def _shares(self, session: Session, request: Packet) -> dict[str, Blob]:
        roster = read_rows(request, "keys", ADVERT)
        threshold = gate.read_int(request.facts, "threshold")
        new, sealed = site_session.deal(session, roster, threshold, self.identity.rules)
        self._store(new)
        return {"shares": rows_blob(sealed, sorted(roster), SEALED)}

    def _mask(
        self, session: Session, request: Packet, records: int, plain: Callable[[], Packet]
    ) -> Packet:
        received = read_rows(request, "shares", SEALED)
        received.pop(self.site, None)
        site_session.mask(session, received, np.zeros(0, np.uint64))  # refuses before training
        reply = plain()
        vector = self._encode(request, reply, records)
        new, masked = site_session.mask(session, received, vector)
        self._store(new)
        said = {name: 0.0 for name in reply.facts if name.startswith("metric.")}  # names only
        kept = ("memory", "own", "epsilon", "delta", "charged")
        facts = {name: reply.facts[name] for name in kept if name in reply.facts}
        return Packet({**facts, **said}, {"masked": blob(masked)})

    def _survivors(self, session: Session, request: Packet) -> dict[str, Blob]:
        new, signature = site_session.confirm(session, _read_names(request), self.identity.key)
        self._store(new)
        return {"signature": blob(np.frombuffer(signature, np.uint8))}

    def _reveal(self, session: Session, request: Packet) -> dict[str, Blob]:
        signatures = read_rows(request, "signatures", SIGNATURE)
        shares = site_session.reveal(session, signatures, self.identity.rules)
        parties = sorted({*session.received, self.site})
        return {"shares": rows_blob(shares, parties, SHARE)}

    def _encode(self, request: Packet, reply: Packet, records: int) -> Array:
        """Return the vector of the reply that would be sent in the clear."""
        kind = gate.read_text(request.facts, "kind")
        measures = kind == "evaluate" or request.facts.get("evaluate") is True
        layout = layout_of(self.settings, self.schema, self.algorithm, kind, measures)
        arrays = {
            name: np.frombuffer(b.data, np.dtype(b.dtype).newbyteorder("<"))
            for name, b in reply.blobs.items()
        }
        for name, shape, dtype in self.schema.buffers:
            if (full := f"buffer.{name}") in arrays:
                before = gate.read_array(request, full, shape, dtype).ravel()
                arrays[full] = arrays[full].astype(np.float64) - before.astype(np.float64)
        lr = self.settings.local.at(gate.read_int(request.facts, "round")).lr
        arrays["travel"] = np.array([gate.read_int(reply.facts, "steps") * lr])
        arrays |= join_metrics(
            {
                name: float(value)
                for name, value in reply.facts.items()
                if name.startswith("metric.")
            },
            self.settings.deploy.limit,
        )
        mass = records if self.settings.weights == "records" else 1
        return layout.encode(self.settings.ring, arrays, mass)

    def _load(self, context: str, may_begin: bool) -> Session:
        """Return the record of an attempt; a new one if it may begin."""
        stored = latest(self.kept)
        if stored is not None and not stored.warnings and stored.facts["context"] == context:
            return Session.from_json(stored.facts)
        if not may_begin:
            raise Refused("secure", "no such attempt is under way here")
        return site_session.open_session(context, self.site)

    def _store(self, session: Session) -> None:
        commit(self.kept, {}, session.to_json(), private=True)


def context_of(request: Packet) -> str:
    """Return the text that names the attempt of a request."""
    attempt = gate.read_text(request.facts, "attempt")
    if not ATTEMPT.fullmatch(attempt):
        raise Refused("schema", "attempt must be 32 hexadecimal digits")
    words = [gate.read_text(request.facts, name) for name in ("run", "kind")]
    return canonical(*words, gate.read_int(request.facts, "round"), attempt).decode()


def names_blob(names: Iterable[str]) -> Blob:
    """Serialise a list of sites."""
    return blob(np.frombuffer(json.dumps(sorted(names)).encode("ascii"), np.uint8))


def rows_blob(rows: Mapping[str, bytes], names: Iterable[str], width: int) -> Blob:
    """Serialise a row of bytes for each name, in this order; zeros for those without one."""
    data = b"".join(rows.get(name, bytes(width)) for name in names)
    return blob(np.frombuffer(data, np.uint8).reshape(-1, width))


def read_rows(packet: Packet, name: str, width: int) -> dict[str, bytes]:
    """Read a row of bytes for each of the sites that a request names."""
    names = _read_names(packet)
    rows = gate.read_array(packet, name, (len(names), width), "uint8")
    return {site: row.tobytes() for site, row in zip(names, rows, strict=True)}


def _read_names(packet: Packet) -> list[str]:
    """Read the list of sites of a request."""
    item = packet.blobs.get("sites")
    data = getattr(item, "data", None)
    try:
        if not isinstance(data, bytes) or len(data) > MOST_NAMES:
            raise ValueError
        names = json.loads(data)
        if names != sorted(set(names)) or not all(NAME.fullmatch(name) for name in names):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise Refused("schema", "sites must be a list of names in their order") from None
    return list(names)

"""A round of secure sums at the server: five exchanges, of which the last gives the sum.

Nothing of it is stored: a server that dies has learned nothing that it may use, and a new attempt
begins with new keys. The sites whose masked vectors arrived are those that the round hears, also
where they die before they reveal.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, rebuild, work_of
from fedscaffold.deploy.aggregation import State, shares
from fedscaffold.deploy.gate import Refused, Update
from fedscaffold.deploy.packets import Blob, Fact, Packet
from fedscaffold.deploy.schema import Array, Schema, cast, unpack
from fedscaffold.deploy.secure_site import context_of, names_blob, rows_blob
from fedscaffold.deploy.secure_vector import layout_of, split_metrics
from fedscaffold.deploy.settings import Settings
from fedscaffold.secure.ring import OutOfRange
from fedscaffold.secure.secret_sharing import SHARE
from fedscaffold.secure.signatures import SIGNATURE
from fedscaffold.secure.site_session import SEALED
from fedscaffold.secure.sum_session import Garbage, SumSession
from fedscaffold.secure.transcript import ADVERT, EXCHANGES, Breach

__all__ = ["SecureRound", "apply_means", "apply_resync"]


class SecureRound:
    """One attempt at the sum of a round.

    Args:
        settings: The deployment's settings.
        schema: The model.
        algorithm: The algorithm, fitted to the model.
        identities: Public keys of the sites.
        facts: What all requests of the round have in common: run, round, kind, evaluate.
        threshold: Number of sites that must stay to the end.
        need: Number of sites that must be heard, at least `threshold`.

    Attributes:
        updates: By site whose masked vector arrived, its reply without the vector.
        means: Weighted means over these sites by part of the vector, once there are any.
        trouble: Why there are none, though enough sites replied; "" if they did not.
    """

    def __init__(
        self,
        settings: Settings,
        schema: Schema,
        algorithm: Algorithm,
        identities: Mapping[str, ec.EllipticCurvePublicKey],
        facts: Mapping[str, Fact],
        threshold: int,
        need: int,
    ) -> None:
        self.need, self.ring = need, settings.ring
        measures = facts["kind"] == "evaluate" or facts["evaluate"] is True
        self.layout = layout_of(settings, schema, algorithm, str(facts["kind"]), measures)
        self.attempt = secrets.token_hex(16)
        context = context_of(Packet({**facts, "attempt": self.attempt}, {}))
        self.sum = SumSession(context, threshold, identities)
        self.exchange = EXCHANGES[0]
        self.updates: dict[str, Update] = {}
        self.means: dict[str, Array] | None = None
        self.trouble = ""

    @property
    def facts(self) -> dict[str, Fact]:
        """What a request of the present exchange says beside the round's."""
        return {
            "exchange": self.exchange,
            "attempt": self.attempt,
            "fraction": self.ring.fraction,
            "threshold": self.sum.threshold,
        }

    def blobs(self, site: str) -> dict[str, Blob]:
        """Return the arrays of a request of the present exchange, but for the model."""
        held = self.sum
        if self.exchange == "shares":
            adverts = {name: advert.to_bytes() for name, advert in held.adverts.items()}
            rows = {"keys": rows_blob(adverts, sorted(adverts), ADVERT)}
            return {"sites": names_blob(adverts), **rows}
        if self.exchange == "masked":
            sealed = {name: dealt[site] for name, dealt in held.sealed.items() if name != site}
            rows = {"shares": rows_blob(sealed, sorted(held.sealed), SEALED)}
            return {"sites": names_blob(held.sealed), **rows}
        if self.exchange == "survivors":
            return {"sites": names_blob(held.masked)}
        if self.exchange == "reveal":
            signed = sorted(held.signatures)
            rows = {"signatures": rows_blob(held.signatures, signed, SIGNATURE)}
            return {"sites": names_blob(signed), **rows}
        return {}

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arrays of a reply to the present exchange."""
        name, shape, dtype = {
            "keys": ("keys", (ADVERT,), "uint8"),
            "shares": ("shares", (len(self.sum.adverts), SEALED), "uint8"),
            "masked": ("masked", (self.layout.size,), "uint64"),
            "survivors": ("signature", (SIGNATURE,), "uint8"),
            "reveal": ("shares", (len(self.sum.sealed), SHARE), "uint8"),
        }[self.exchange]
        return {name: (shape, dtype)}

    def add(self, site: str, update: Update) -> Update:
        """Add a site's reply to the present exchange; return it without its arrays.

        Raises:
            Refused: It breaks the protocol.
        """
        held, (array,) = self.sum, map(np.asarray, update.vectors.values())
        try:
            if self.exchange == "keys":
                held.add_advert(site, array.tobytes())
            elif self.exchange == "shares":
                held.add_shares(site, _rows(array, sorted(held.adverts)))
            elif self.exchange == "masked":
                held.add_masked(site, array)
                self.updates[site] = update._replace(vectors={})
            elif self.exchange == "survivors":
                held.add_signature(site, array.tobytes())
            else:
                rows = _rows(array, sorted(held.sealed))
                held.add_revealed(site, {name: row for name, row in rows.items() if any(row)})
        except Breach as breach:
            raise Refused("secure", str(breach)) from None
        return update._replace(vectors={})

    def advance(self, heard: Collection[str]) -> list[str]:
        """Go on to the next exchange.

        Args:
            heard: Sites whose replies to the present one were good.

        Returns:
            The sites to ask; none if they are too few, or this was the last exchange.
        """
        enough = self.need if self.exchange in ("shares", "masked") else self.sum.threshold
        if len(heard) < enough or self.exchange == EXCHANGES[-1]:
            return []
        self.exchange = EXCHANGES[EXCHANGES.index(self.exchange) + 1]
        return sorted(heard)

    def finish(self, masses: Mapping[str, float]) -> dict[str, Refused]:
        """Unmask the sum, if enough was revealed.

        Args:
            masses: By site, its weight.

        Returns:
            By site that sent garbage, what it was; the sum may be there all the same.
        """
        if self.exchange != EXCHANGES[-1] or len(self.sum.revealed) < self.sum.threshold:
            return {}
        try:
            total, wrong = self.sum.unmask()
            mass = int(sum(masses[site] for site in self.updates))
            self.means = self.layout.decode(self.ring, total, mass, len(self.updates))
        except Garbage as garbage:
            self.trouble = str(garbage)
            return {garbage.site: Refused("garbage", str(garbage))}
        except OutOfRange as error:
            self.trouble = f"{error}: a site, which one cannot be known, sent garbage"
            return {}
        return {site: Refused("garbage", "it revealed wrong shares") for site in wrong}

    @property
    def metrics(self) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Means of the metrics, and by metric without a mean how many sites lack it."""
        named = {tuple(sorted(update.metrics)) for update in self.updates.values()}
        if self.means is None or len(named) != 1:  # sites with other apps
            return {}, {}
        means, missing = split_metrics(self.means, named.pop())
        return means, {name: [f"{count} of them"] for name, count in missing.items()}


def apply_means(
    settings: Settings, schema: Schema, algorithm: Algorithm, state: State, done: SecureRound
) -> State:
    """Return the state after a training round of which the means are known, and no single reply."""
    assert done.means is not None
    known, local, dtype = exchange(algorithm), settings.local, state.x.dtype
    p = shares(state.roster)
    heard = sum(p[site] for site in sorted(done.updates))
    number, roster = state.round + 1, dict(state.roster)
    travel = float(done.means["travel"][0]) if known.travel else 0.0
    if not known.travel and local.steps is not None:
        travel = local.at(number).lr * work_of(algorithm, local.steps).steps
    vectors = {
        name: unpack(done.means[name], algorithm.private, schema.size)
        for name in known.vectors
        if name in done.means
    }
    mean = rebuild(algorithm, vectors, travel, plain=known.move not in vectors)
    sent = cast(state.told, np.float64)
    server = algorithm.update(cast(state.server, np.float64), sent, mean, heard)
    for site, update in done.updates.items():
        told = f"round {number} applied"
        roster[site] = roster[site]._replace(
            applied=number, digest=update.memory, own=update.own, told=told
        )
    server = cast(server, np.float64)._replace(x=server.x.astype(dtype))
    buffers = {name: _add_change(old, name, done.means) for name, old in state.buffers.items()}
    return state._replace(round=number, server=server, roster=roster, buffers=buffers)


def apply_resync(schema: Schema, algorithm: Algorithm, state: State, done: SecureRound) -> State:
    """Return the state with its means recomputed; members that did not report begin from zeros."""
    assert done.means is not None
    p = shares(state.roster)
    heard = sum(p[site] for site in sorted(done.updates))
    fields = {
        field: heard * unpack(done.means[of], algorithm.private, schema.size)
        for field, of in algorithm.means
    }
    roster = {
        site: member._replace(digest=done.updates[site].memory if site in done.updates else "")
        for site, member in state.roster.items()
    }
    return state._replace(server=state.server._replace(**fields), roster=roster)


def _add_change(old: Array, name: str, means: Mapping[str, Array]) -> Array:
    """Return a buffer plus the mean of its changes; whole numbers are rounded down and only grow.

    Sums have no medians, which plain rounds take of whole numbers.
    """
    if (full := f"buffer.{name}") not in means:
        return old
    change = means[full].reshape(old.shape)
    if np.issubdtype(old.dtype, np.floating):
        return np.asarray(old + change, old.dtype)
    # 1e-9: a mean of equal whole numbers may be a rounding below them
    return np.asarray(old + np.maximum(np.floor(change + 1e-9), 0.0).astype(old.dtype))


def _rows(array: Array, names: Collection[str]) -> dict[str, bytes]:
    return {name: row.tobytes() for name, row in zip(names, array, strict=True)}

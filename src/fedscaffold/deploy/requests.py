"""The requests of an open round, each made when it is asked for, and the replies expected to them.

A request carries vectors of the model's size. The transport takes them one by one, so that a server
never holds more than one site's; what all sites are sent is serialised once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, work_of
from fedscaffold.deploy.aggregation import State, blank_memory
from fedscaffold.deploy.blocks import assemble, take
from fedscaffold.deploy.gate import Asked
from fedscaffold.deploy.schema import Blob, Fact, Packet, Schema, blob, cast, digest_of, pack
from fedscaffold.deploy.settings import Settings

if TYPE_CHECKING:
    from fedscaffold.deploy.secure_round import SecureRound

__all__ = ["Asker", "Requests"]


class Asker(NamedTuple):
    """Makes the requests of a run's rounds."""

    settings: Settings
    schema: Schema
    algorithm: Algorithm
    run: str

    def common_facts(self, kind: str, round: int) -> dict[str, Fact]:
        """Return the facts that all requests of a round have in common."""
        measures = self.settings.privacy is None  # private sites send no metrics
        measures &= (round - 1) % self.settings.evaluate_every == 0
        return {
            "kind": kind,
            "run": self.run,
            "round": round,
            "schema": self.schema.digest,
            "settings": self.settings.digest,
            "app": digest_of(self.settings.app),
            "evaluate": kind == "train" and measures,
        }

    def ask(
        self, kind: str, state: State, nonces: Mapping[str, str], secure: SecureRound | None
    ) -> tuple[Requests, dict[str, Asked]]:
        """Return the requests of a round, and by site the reply expected.

        Args:
            kind: Kind of the round.
            state: The state that it begins with.
            nonces: By site that is asked, what its reply must repeat.
            secure: The sum whose present exchange is asked for; None in other rounds.
        """
        number = state.round + 1
        common = self.common_facts(kind, number) | ({} if secure is None else secure.facts)
        arrays = self._arrays_up(kind, state) if secure is None else secure.arrays
        facts, asked = {}, {}
        for site, nonce in nonces.items():
            member = state.roster[site]
            facts[site] = common | {
                "site": site,
                "nonce": nonce,
                "expect": member.digest,
                "own": member.own,
                "told": member.told,
                "charged": member.charged,
            }
            asked[site] = Asked(
                site=site,
                round=number,
                nonce=nonce,
                arrays=arrays,
                schema=self.schema,
                records=member.records,
                most_steps=1 if secure is not None else self._most_steps(member.records),
                lr=0.0 if secure is not None else self.settings.local.at(number).lr,
                private=self.algorithm.private if secure is None else (),
            )
        sends, more = kind, None
        if secure is not None:
            sends = kind if secure.exchange == "masked" else ""
            more = {site: secure.blobs(site) for site in nonces}
        server_keeps = self.settings.deploy.state == "server"
        return Requests(sends, facts, state, self.algorithm, server_keeps, more), asked

    def _arrays_up(self, kind: str, state: State) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the arrays that a reply must have."""
        fields: dict[str, bool] = {}  # and whether they are vectors
        if kind == "resync":
            memory = blank_memory(self.algorithm, state.x[:1])
            fields = {name: value.ndim > 0 for name, value in memory._asdict().items()}
        elif kind == "train":
            fields = dict.fromkeys(exchange(self.algorithm).sent(self.settings.local.plain), True)
        size = self.schema.size - sum(end - begin for begin, end in self.algorithm.private)
        arrays: dict[str, tuple[tuple[int, ...], str]] = {
            name: ((size,) if is_vector else (), self.schema.dtype)
            for name, is_vector in fields.items()
        }
        if kind == "train" and self.settings.local.buffers == "average":
            arrays |= {f"buffer.{name}": (shape, of) for name, shape, of in self.schema.buffers}
        return arrays

    def _most_steps(self, records: int) -> int:
        """Return the number of local steps that a client with so many records may report."""
        local = self.settings.local
        steps = local.steps
        if steps is None:
            # without a batch size the app makes its own batches, of at least one record each
            steps = (local.epochs or 1) * -(-records // (local.rows(records) or 1))
        return int(work_of(self.algorithm, steps).steps)


class Requests(Mapping[str, Packet]):
    """Requests by site.

    Args:
        kind: Kind of the round; "" for requests without the model.
        facts: By site, the scalars of its request.
        state: The state that the round begins with.
        algorithm: The algorithm.
        server_keeps: Whether the server keeps the clients' memories, and so sends the shift.
        more: By site, further arrays of its request.
    """

    def __init__(
        self,
        kind: str,
        facts: Mapping[str, dict[str, Fact]],
        state: State,
        algorithm: Algorithm,
        server_keeps: bool,
        more: Mapping[str, Mapping[str, Blob]] | None = None,
    ) -> None:
        self.kind, self.facts, self.state, self.more = kind, facts, state, more or {}
        self.algorithm, self.server_keeps = algorithm, server_keeps

    def __len__(self) -> int:
        return len(self.facts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __getitem__(self, site: str) -> Packet:
        facts, shift = self.facts[site], {}
        if self.kind == "train" and self.server_keeps:
            shift = self._shift(site)
        return Packet(dict(facts), {**self.more.get(site, {}), **self._shared, **shift})

    @cached_property
    def _shared(self) -> dict[str, Blob]:
        """What all sites are sent: x, buffers, and for training what clients make the shift of."""
        if self.kind in ("", "resync"):
            return {}
        state, names = self.state, ["x"]
        if self.kind == "train" and not self.server_keeps:
            names += exchange(self.algorithm).down + exchange(self.algorithm).told
        down = {name: self._blob(getattr(state.server, name)) for name in names}
        return down | {f"buffer.{name}": blob(value) for name, value in state.buffers.items()}

    def _shift(self, site: str) -> dict[str, Blob]:
        """Return the shift of a site, from its memory."""
        state, algorithm = self.state, self.algorithm

        def block(place: slice) -> tuple[Any, ...]:
            told = cast(take(state.server, place), state.x.dtype)
            memory = take(state.memory.get(site), place)
            shift = algorithm.shift(told, memory or blank_memory(algorithm, told.x))
            return shift if isinstance(shift, tuple) else (shift,)

        like = algorithm.shift(algorithm.init(0.0), algorithm.memory(0.0))
        if like is None:
            return {}
        fields = getattr(like, "_fields", None)
        names = ["shift"] if fields is None else [f"shift.{name}" for name in fields]
        values = assemble(state.x.size, block)
        return {name: self._blob(value) for name, value in zip(names, values, strict=True)}

    def _blob(self, value: Any) -> Blob:
        """Serialise a vector or number in the model's precision, without private coordinates."""
        return blob(pack(np.asarray(value, self.state.x.dtype), self.algorithm.private))

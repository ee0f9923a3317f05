"""The requests of an open round, each made when it is asked for.

A request carries vectors of the model's size. The transport takes them one by one, so that a server
never holds more than one site's; what all sites are sent is serialised once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange
from fedscaffold.deploy.aggregation import State, blank_memory
from fedscaffold.deploy.blocks import assemble, take
from fedscaffold.deploy.schema import Blob, Fact, Packet, blob, cast, pack

__all__ = ["Requests"]


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

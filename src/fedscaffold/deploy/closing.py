"""The state after a round: which replies count, and what they make of the server's state.

A reply that was valid on its own may still be refused here: it drowns all others, a filter finds it
unlike them, or the state would not be finite with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedscaffold import robust
from fedscaffold.algorithms import Algorithm
from fedscaffold.deploy import aggregation
from fedscaffold.deploy.aggregation import State, blank_memory
from fedscaffold.deploy.blocks import norm
from fedscaffold.deploy.gate import Refused, Update
from fedscaffold.deploy.outliers import find_outliers
from fedscaffold.deploy.schema import Array

__all__ = ["Closed", "close_round", "recompute_means"]


class Closed(NamedTuple):
    """What a round makes of the state."""

    state: State | None
    """The state after it; None below the quorum."""
    refused: dict[str, Refused]
    """By site whose reply does not count, why."""


def close_round(
    algorithm: Algorithm,
    state: State,
    kind: str,
    updates: Mapping[str, Update],
    need: int,
    filter: robust.Filter | None,
    server_keeps: bool,
    folder: Path,
) -> Closed:
    """Return the state after a round of training, or a resync.

    Args:
        algorithm: The algorithm.
        state: The state before the round.
        kind: Kind of the round: "train" or "resync".
        updates: The validated replies by site.
        need: Replies without which the round does not count.
        filter: Which replies of a training round to refuse; None for none.
        server_keeps: Whether the server keeps the clients' memories.
        folder: Folder of the committed state, where large vectors are written.
    """
    left = dict(updates)
    refused: dict[str, Refused] = {}

    def refuse(found: Mapping[str, Refused]) -> None:
        for site, refusal in found.items():
            refused[site] = refusal
            left.pop(site, None)

    for sizes, usual in _sizes(state, left):
        refuse(aggregation.find_outsized(sizes, usual))
    if filter is not None and kind == "train" and len(left) >= need:
        found = find_outliers(filter, algorithm, state, left)
        refuse(found.refused)
        # the quorum is of replies: whoever replied and is refused does not abandon the round
        need = max(1, need - len(found.refused))
        roster = {site: state.roster[site]._replace(norms=found.norms[site]) for site in left}
        state = state._replace(roster=state.roster | roster)
    while len(left) >= need:
        with np.errstate(over="ignore", invalid="ignore"):
            if kind == "resync":
                after = _resync(algorithm, state, left)
            else:
                after = aggregation.aggregate(algorithm, state, left, server_keeps, folder)
        what = aggregation.find_nonfinite(after)
        if what is None:
            return Closed(after, refused)
        # retry without the site whose c_i overflowed, or without the longest update
        site = what if what in left else max(sorted(left), key=lambda one: left[one].length)
        refuse({site: Refused("overflow", f"with it {what} would not be finite")})
    return Closed(None, refused)


def _sizes(state: State, updates: Mapping[str, Update]) -> Iterator[tuple[dict[str, float], Array]]:
    """Yield the sizes of the updates by site, then those of each buffer, and what is usual."""
    yield {site: update.length for site, update in updates.items()}, state.x
    for name, usual in state.buffers.items():
        if usual.dtype.kind == "f":
            came = {site: update.buffers for site, update in updates.items()}
            yield {site: norm(held[name]) for site, held in came.items() if name in held}, usual


def _resync(algorithm: Algorithm, state: State, updates: Mapping[str, Update]) -> State:
    """Return the state with its means recomputed from the memories that sites report."""
    kind = type(blank_memory(algorithm, state.x[:1]))
    reports = {site: kind(**update.vectors) for site, update in updates.items() if update.vectors}
    return aggregation.resync_means(algorithm, state, reports)


def recompute_means(algorithm: Algorithm, state: State) -> tuple[State, float, float | None]:
    """Recompute c from the c_i where it carries rounding errors of larger, earlier c_i.

    Otherwise a site that once sent numbers of 1e15 would leave c off by 0.1 permanently. A residual
    that rounding does not explain is a fault and is left for `residual` to show.

    Args:
        algorithm: The algorithm.
        state: The state after a round, with the c_i.

    Returns:
        The state, its residual, and that before c was recomputed; None where it was not.
    """
    gap = aggregation.residual(algorithm, state)
    scale = aggregation.memory_scale(algorithm, state)
    now = state._replace(scale=scale)
    state = state._replace(scale=max(state.scale, scale))
    if not aggregation.rounding_bound(now) < gap <= aggregation.rounding_bound(state):
        return state, gap, None
    now = now._replace(server=aggregation.memory_means(algorithm, state, state.memory))
    return now, aggregation.residual(algorithm, now), gap

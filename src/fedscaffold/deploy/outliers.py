"""The filter of a deployment: which replies of a round stand out too far to be counted.

The formulas are those of `fedscaffold.robust`. Vectors are read in pieces, so that the filter needs
no copies of whole messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedscaffold import robust
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange
from fedscaffold.deploy.aggregation import State, message_of, shares
from fedscaffold.deploy.gate import Refused, Update
from fedscaffold.deploy.schema import Array, cast

__all__ = ["Findings", "find_outliers"]

PIECE = 1 << 18  # coordinates that are compared at a time


class Findings(NamedTuple):
    """The result of comparing the replies of a round."""

    refused: dict[str, Refused]
    """By site that is not counted, why."""
    norms: dict[str, list[float]]
    """By site the norms of the parts of its message."""


def find_outliers(
    filter: robust.Filter, algorithm: Algorithm, state: State, updates: Mapping[str, Update]
) -> Findings:
    """Compare the validated replies of a training round.

    Args:
        filter: The filter.
        algorithm: The algorithm.
        state: The state before the round; its roster has the norms that counted last.
        updates: The replies by site.
    """
    sites, fields = sorted(updates), exchange(algorithm).vectors
    told = cast(state.told, np.float64)
    expected = {name: known(told) for name, known in algorithm.references}
    pieces = [slice(at, at + PIECE) for at in range(0, state.x.size, PIECE)]

    def rows(name: str, piece: slice) -> Array:
        """Return one part of all messages, less what the server expects."""
        messages = (
            message_of(
                algorithm,
                {of: vector[piece] for of, vector in updates[site].vectors.items()},
                updates[site].travel,
            )
            for site in sites
        )
        table = np.stack([getattr(message, name) for message in messages])
        return table - expected[name][piece] if name in expected else table

    def distances(k: int, centre: int) -> Array:
        found = np.zeros((len(sites), len(sites)))
        for piece in pieces:
            table = rows(fields[k], piece)
            found += robust.squared_distances(table, table[centre], np)
        return found

    with np.errstate(over="ignore", invalid="ignore"):
        squares = [
            sum(np.square(rows(name, piece)).sum(axis=1) for piece in pieces) for name in fields
        ]
        norms = np.sqrt(np.stack(squares, axis=1))
        p, last = shares(state.roster), {site: norms[i] for i, site in enumerate(sites)}
        never = np.full(len(fields), np.nan)
        held = {site: np.array(m.norms) if m.norms else never for site, m in state.roster.items()}
        cohort = robust.compare(
            np.array([p[site] for site in sites]),
            norms,
            np.stack([held[site] for site in sites]),
            np.stack([(held | last)[site] for site in p]),
            np.array(list(p.values())),
            distances,
            np,
        )
        verdict = robust.judge(filter, cohort, np)
    refused = {
        site: Refused("unlike", f"{filter.sentence.format(float(excess))} ({filter.name})")
        for site, good, excess in zip(sites, verdict.accepted, verdict.excess, strict=True)
        if not good
    }
    return Findings(refused, {site: last[site].tolist() for site in sites})

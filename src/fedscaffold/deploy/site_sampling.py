"""Sampling of cohorts, with the simulator's generator: a seed gives the same cohorts as in simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["cohort_size", "quorum_size", "sample_sites"]

WARM_UP = 18  # steps after which the three seed words are mixed, however similar
AGAIN = 1 << 32  # stream of repeated draws of a round, which the simulator does not have


def cohort_size(share: float | int, number: int) -> int:
    """Return the number of clients in a cohort, given a share (float) or a number (int).

    >>> cohort_size(0.5, 5), cohort_size(3, 5), cohort_size(9, 5)
    (2, 3, 5)
    """
    return min(number, share) if isinstance(share, int) else max(1, round(share * number))


def quorum_size(quorum: float | int, cohort: int) -> int:
    """Return the number of replies that a round needs to count.

    >>> quorum_size(0.5, 3), quorum_size(2, 3)
    (2, 2)
    """
    return quorum if isinstance(quorum, int) else max(1, math.ceil(quorum * cohort - 1e-9))


def sample_sites(members: Sequence[str], size: int, seed: int, round: int, attempt: int = 0) -> list[str]:
    """Sample `size` members, keeping their order; each `attempt` of a round (from 0) draws anew.

    >>> sample_sites(["a", "b", "c"], 3, seed=0, round=0)
    ['a', 'b', 'c']
    """
    if size >= len(members):
        return list(members)
    bits = np.random.SFC64(0)
    words = np.array([seed, round, AGAIN + attempt if attempt else 0, 1], np.uint64)
    bits.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
    bits.random_raw(WARM_UP, output=False)
    picked = np.random.Generator(bits).choice(len(members), size, replace=False, shuffle=False)
    return [members[i] for i in np.sort(picked)]

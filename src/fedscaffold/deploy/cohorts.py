"""Who takes part in a round: drawn as the simulator draws, so that one seed gives one sequence of cohorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["chosen", "needed", "size_of"]

WARM_UP = 18  # steps after which three words, however alike, are mixed
AGAIN = 1 << 32  # purpose of the stream of a round's second draw; the simulator has none


def size_of(share: float | int, number: int) -> int:
    """Clients in a cohort: a share of all (float) or a number (int).

    >>> size_of(0.5, 5), size_of(3, 5), size_of(9, 5)
    (2, 3, 5)
    """
    return min(number, share) if isinstance(share, int) else max(1, round(share * number))


def needed(quorum: float | int, cohort: int) -> int:
    """Replies without which a round does not count.

    >>> needed(0.5, 3), needed(2, 3)
    (2, 2)
    """
    return quorum if isinstance(quorum, int) else max(1, math.ceil(quorum * cohort - 1e-9))


def chosen(members: Sequence[str], size: int, seed: int, round: int, attempt: int = 0) -> list[str]:
    """`size` of the members, in their order; `round` counts from 0, and a failed round is drawn anew.

    >>> chosen(["a", "b", "c"], 3, seed=0, round=0)
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

"""The cohort of a round: which sites are asked, and how many of them must reply."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedscaffold.deploy.secure_vector import threshold_of
from fedscaffold.deploy.settings import Settings
from fedscaffold.random_streams import start_stream

__all__ = ["quorum_of", "sample_sites"]

AGAIN = 1 << 32  # stream of repeated draws of a round, which the simulator does not have


def quorum_of(settings: Settings, kind: str, size: int, present: int) -> int:
    """Return how many sites must reply for a round to count.

    Args:
        settings: The deployment's settings.
        kind: Kind of the round.
        size: Size of its cohort.
        present: Number of sites that can be reached.
    """
    deploy = settings.deploy
    if kind == "evaluate":
        need = 1
    elif isinstance(deploy.quorum, int):
        need = deploy.quorum
    else:
        need = max(1, math.ceil(deploy.quorum * size - 1e-9))
    if deploy.secure:
        need = max(need, threshold_of(settings, min(size, present)))
    if kind == "train" and deploy.buffer is not None:
        need = min(need, deploy.buffer)
    return need


def sample_sites(
    members: Sequence[str], size: int, seed: int, round: int, attempt: int = 0
) -> list[str]:
    """Sample `size` members, keeping their order; each `attempt` of a round (from 0) draws anew.

    The generator is the simulator's: a seed gives the same cohorts as in simulation.

    >>> sample_sites(["a", "b", "c"], 3, seed=0, round=0)
    ['a', 'b', 'c']
    """
    if size >= len(members):
        return list(members)
    bits = np.random.SFC64(0)
    start_stream(bits, seed, round, AGAIN + attempt if attempt else 0)
    picked = np.random.Generator(bits).choice(len(members), size, replace=False, shuffle=False)
    return [members[i] for i in np.sort(picked)]

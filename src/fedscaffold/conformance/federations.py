"""Federations of the suite: four heterogeneous quadratics in R^3, under various conditions.

Each condition changes one thing from `all`, so that a failing row names its cause; `together`
changes everything at once. Coefficients come from sines rather than a random generator, so that
they are reproducible everywhere.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedscaffold.conformance.case import Array, Case, federation

__all__ = [
    "CONDITIONS",
    "GOLDEN_CENTRED",
    "GOLDEN_SAMPLING",
    "NOISED",
    "Condition",
    "brief",
    "prolonged",
]

N = 4
ROUNDS = 75  # a right SCAFFOLD is at 1e-12 by then; with sampling it takes half as many again
LR = 0.15
X0 = (3.0, -2.0, 1.0)
UNEQUAL = (1, 4, 5, 6)
PAIRS = tuple(combinations(range(N), 2))
SUBSETS = tuple(cohort for size in range(1, N + 1) for cohort in combinations(range(N), size))


class Condition(NamedTuple):
    """A case, and its description for a sentence that begins with "With"."""

    words: str
    case: Case


def clients() -> tuple[Array, Array]:
    """Return Hessians, each steep in its own direction, and conflicting linear terms.

    The eigenvalues are 0.5 to 2.6.
    """
    i = np.arange(N)
    steep = np.stack([np.cos(1 + 2 * i), np.sin(2 + 3 * i), np.cos(3 + 5 * i)], axis=1)
    pull = np.stack([np.sin(1 + 3 * i), np.cos(2 + 5 * i), np.sin(3 + 7 * i)], axis=1)
    return 0.5 * np.eye(3) + steep[:, :, None] * steep[:, None, :], 2.0 * pull


def meeting(case: Case, *cohorts: tuple[int, ...]) -> Case:
    """Return the case with these cohorts repeated, and no reply lost."""
    return case._replace(
        cohorts=tuple(cohorts[r % len(cohorts)] for r in range(case.rounds)),
        lost=((),) * case.rounds,
    )


def losing(case: Case, period: int) -> Case:
    """Return the case with a reply lost every `period` rounds, but never the only one."""

    def missing(r: int, cohort: tuple[int, ...]) -> tuple[int, ...]:
        return (cohort[r // period % len(cohort)],) if r % period == 0 and len(cohort) > 1 else ()

    return case._replace(lost=tuple(missing(r, cohort) for r, cohort in enumerate(case.cohorts)))


def brief(case: Case, rounds: int = 20) -> Case:
    """Return the case cut to its first rounds; mistakes differ most in the transient.

    >>> brief(CONDITIONS["all"].case, rounds=2).rounds
    2
    """
    return case._replace(cohorts=case.cohorts[:rounds], lost=case.lost[:rounds])


def prolonged(case: Case, times: int) -> Case:
    """Return the case with its schedule of cohorts and lost replies repeated."""
    return case._replace(cohorts=case.cohorts * times, lost=case.lost * times)


def conditions() -> dict[str, Condition]:
    """Return all conditions by name."""
    base, longer, longest = (
        federation(*clients(), X0, rounds, steps=4, lr=LR)
        for rounds in (ROUNDS, 3 * ROUNDS // 2, 2 * ROUNDS)
    )
    sampling = meeting(longer, *PAIRS)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    unequal = base._replace(local_steps=UNEQUAL, lr=(LR,) * 6)
    # Enough momentum to make c_i by displacement diverge: there, a client's move is 2.3 times K lr
    # d.
    heavy = base._replace(momentum=0.9, lr=(0.05,) * 4)
    # Subsets in steps of 7, which shares no factor with 15: small and large cohorts come mixed.
    changing = tuple(SUBSETS[7 * r % len(SUBSETS)] for r in range(len(SUBSETS)))
    together = losing(meeting(longest, *changing), period=4)._replace(
        local_steps=UNEQUAL,
        lr=(0.2, 0.17, 0.15, 0.12, 0.1, 0.06),
        weights=weights,
        momentum=0.3,
        server_lr=0.8,
        restart=9,
    )
    return {
        "all": Condition("all clients in every round", base),
        "sampling": Condition("two of four clients in a round", sampling),
        "changing cohorts": Condition("cohorts of one to four clients", meeting(longer, *changing)),
        "weights": Condition("clients of unequal weight", base._replace(weights=weights)),
        "weights and sampling": Condition(
            "sampled clients of unequal weight", sampling._replace(weights=weights)
        ),
        "server step": Condition("a server step other than 1", base._replace(server_lr=1.3)),
        "option I": Condition("option I", base._replace(option=1)),
        "momentum": Condition("momentum in the local steps", heavy),
        "unequal steps": Condition("unequal numbers of local steps", unequal),
        "schedule": Condition(
            "steps that shrink within a round", base._replace(lr=(0.3, 0.2, 0.1, 0.05))
        ),
        "lost replies": Condition("replies that never reach the server", losing(base, period=2)),
        "restart": Condition("a restart after three rounds", base._replace(restart=3)),
        "together": Condition("all of these at once (option II)", together),
    }


CONDITIONS = conditions()

# Gradients that vanish beside the noise, in enough dimensions to tell one draw from another.
WIDE = 200
NOISED = meeting(
    federation(
        [1e-9 * np.eye(WIDE)] * N, np.zeros((N, WIDE)), np.ones(WIDE), rounds=6, steps=4, lr=LR
    ),
    *PAIRS,
)._replace(private=True, noise=0.5)

# The golden values G1 and G3 of the derivation: computed by hand, in one dimension, from x = 0.
GOLDEN_CENTRED = federation([[[1.0]], [[0.25]]], [[1.0], [-0.5]], [0.0], rounds=3, steps=4, lr=0.2)
GOLDEN_SAMPLING = meeting(
    federation(
        [[[1.0]], [[2.0]], [[0.5]]], [[1.0], [0.0], [-1.0]], [0.0], rounds=4, steps=2, lr=0.1
    ),
    (0, 1),
    (1, 2),
    (0, 2),
    (0, 1),
)

"""What several private runs on the same records spend together.

Each run spends anew, whether its result is published or only chosen from. Runs with the same seed
draw the same noise, which cancels in the difference of what they release: together they have no
epsilon at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.privacy.accounting import OVERFLOW, Charge, compose, round_up
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.records import Records

__all__ = ["Together", "refuse_budget", "spend_together"]


class Together(NamedTuple):
    """What several runs spend."""

    runs: int
    each: float
    """The largest epsilon of a single run."""
    epsilon: float
    """The epsilon of all of them, for the same records; infinity if there is none."""
    delta: float
    seeds: int
    """Number of different seeds."""

    def __str__(self) -> str:
        one = f"each of the {self.runs} private runs spends epsilon up to {round_up(self.each)}"
        if math.isfinite(self.epsilon):
            return f"{one}, all of them {round_up(self.epsilon)} at delta {self.delta:g}"
        if self.seeds < self.runs:
            return (
                f"{one}; together they have none, as runs with the same seed draw the same noise: "
                "publish one of them at most, and choose it by records that train nothing"
            )
        return f"{one}; the accountant has no bound for all of them"


def spend_together(runs: Iterable[tuple[int, Mapping[str, Any]]]) -> Together | None:
    """Return what several runs on the same records spend; None if none of them is private.

    A client is taken to have the largest rate and the most steps of any in each run.

    Args:
        runs: Seed and `Spent.facts` of each private run.

    >>> held = {"unit": "record", "noise": 2.0, "rates": [0.1, 0.1], "steps": [50, 50]}
    >>> held |= {"epsilon": 1.67, "delta": 1e-5, "before": 0.0}
    >>> print(spend_together([(0, held), (1, held)]))
    each of the 2 private runs spends epsilon up to 1.670, all of them 2.338 at delta 1e-05
    >>> spend_together([(0, held), (0, held)]).epsilon
    inf
    """
    listed = list(runs)
    if not listed:
        return None
    every = [facts for _, facts in listed]
    seeds, delta = len({seed for seed, _ in listed}), min(facts["delta"] for facts in every)
    each = max(math.inf if facts["epsilon"] is None else facts["epsilon"] for facts in every)
    together = math.inf
    if seeds == len(listed) and len({facts["unit"] for facts in every}) == 1:
        charges = [Charge(facts["noise"], facts["rates"][1], facts["steps"][1]) for facts in every]
        together = compose(charges, delta, OVERFLOW)
    return Together(len(listed), each, together, delta, seeds)


def refuse_budget(asked: Iterable[Records | Clients | None]) -> None:
    """Raise an InputError if runs of several are asked to keep a budget, which each spends alone.

    >>> refuse_budget([Records(clip=1.0, noise=1.0, delta=1e-5, stop_at_epsilon=3.0)])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: stop_at_epsilon is a budget for all that is released of the
        records, and each of several runs spends anew: leave it out, and read what each and all of
        them spend; or simulate one after the other with a checkpoint folder, whose ledger adds up
    """
    if any(one is not None and one.stop_at_epsilon is not None for one in asked):
        raise InputError(
            "stop_at_epsilon is a budget for all that is released of the records, and each of "
            "several runs spends anew: leave it out, and read what each and all of them spend; or "
            "simulate one after the other with a checkpoint folder, whose ledger adds up"
        )

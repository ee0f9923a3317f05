"""A fifth of the sites lies, and agrees on it: scenarios 37 to 39."""

from __future__ import annotations

from collections.abc import Callable

from fedscaffold import attacks
from fedscaffold.deploy.audit import read_verified
from tests.faults.crowd import LIARS, SITES, Crowd

__all__ = ["SCENARIOS"]

Verdict = bool
FILTERS = ("krum:0.2", "geometric_median:3", "norm_bound:3")
CLOSE = 0.01  # of the way from the start to the optimum of the honest, after 15 rounds
MARGIN = 0.15  # of that way: how far liars that no filter tells from the honest may keep the model


def _withstood(crowd: Crowd, played: list[attacks.Attack]) -> Verdict:
    """Check that liars are refused in every round, told and logged, and leave no trace."""
    for attack in played:
        for _ in range(15 // len(played)):
            outcome = crowd.round(attack)
            if not outcome.committed or not {SITES[i] for i in LIARS} <= set(outcome.refused):
                return False
        crowd.reborn()
    told = [crowd.server.roster[SITES[i]].told for i in LIARS]
    logged = [
        event["site"]
        for event in read_verified(crowd.folder / "audit.jsonl")
        if event["event"] == "refused" and event["code"] == "unlike"
    ]
    return (
        all(one.startswith("refused, unlike: its update is ") for one in told)
        and all(logged.count(SITES[i]) == 15 for i in LIARS)
        and not crowd.lies.any()
        and crowd.sound
        and crowd.error < CLOSE
    )


def loud() -> Verdict:
    """Two of ten flip the sign, send ten times too much, or garbage: each filter refuses them, restarts between."""
    played = [
        attacks.sign_flip(LIARS, scale=5),
        attacks.scaling(LIARS, factor=10),
        attacks.constant(LIARS, value=100),
    ]
    return all(_withstood(Crowd(filter), played) for filter in FILTERS)


def hidden() -> Verdict:
    """Two of ten collude to look honest (ALIE, min-max, inner product): the model stays within a stated margin."""
    for attack in (
        attacks.alie(LIARS),
        attacks.min_max(LIARS),
        attacks.inner_product(LIARS, scale=5),
    ):
        crowd = Crowd("geometric_median:3").rounds(20, attack)
        if not (crowd.sound and crowd.error < MARGIN):
            return False
    return True


def about_controls() -> Verdict:
    """Honest moves with lies about c_i (BadSFL's lever): the pair is compared, so each filter refuses them."""
    lie = [attacks.poison_controls(LIARS, scale=10)]
    return all(_withstood(Crowd(filter, option=1), lie) for filter in FILTERS)


SCENARIOS: dict[int, tuple[str, Callable[[], Verdict]]] = {
    37: ("a fifth of the sites lies loudly", loud),
    38: ("a fifth of the sites colludes to look honest", hidden),
    39: ("lies about the control variates alone", about_controls),
}

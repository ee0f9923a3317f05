"""Exercise 2, stale control variates.

Keep, decay, drop and refresh where each helps and where it hurts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import scaffold
from fedscaffold.problems import Problem, linear, quadratic
from fedscaffold.simulation import Run
from papers.exercises.record import (
    Exercise,
    Row,
    best,
    bytes_until,
    ends_at,
    grid,
    mean_and_error,
    middle,
    reached,
    residual,
)

__all__ = ["stale"]

QUESTION = "When does it pay to fade, drop or renew control variates that have grown old?"
GOAL = 1e-6
CLIENTS, COHORT, STAY, LEFT_AFTER = 20, 2, 15, 20
GRID = (0.03, 0.1)
POLICIES = ("keep", "decay:0.99", "drop:60", "refresh:30")


def stale(*, seeds: int = 3, rounds: int = 900) -> Exercise:
    """Run SCAFFOLD with two of 20 clients a round under each policy, at the better of two lrs.

    Settings: cohorts drawn from all; two halves that come in turn, 40 rounds each; five clients
    that leave for good after 20 rounds; and noisy batches at clients that are alike, or unlike
    (keep and decay only).

    >>> POLICIES  # the first three settings try them all
    ('keep', 'decay:0.99', 'drop:60', 'refresh:30')
    """
    problem = quadratic(CLIENTS, 10, mu=0.1, seed=0)
    turns, leavers = np.zeros((80, CLIENTS), np.int64), np.ones((rounds, CLIENTS), np.int64)
    turns[:40, : CLIENTS // 2] = turns[40:, CLIENTS // 2 :] = 1
    leavers[LEFT_AFTER:, STAY:] = 0
    rows: list[Row] = []
    traces = (("all come", None), ("in turns of 40", turns), (f"{CLIENTS - STAY} leave", leavers))
    for setting, trace in traces:
        rows += [_quiet(problem, setting, trace, policy, seeds, rounds) for policy in POLICIES]
    for setting, alike in (("noisy, alike", True), ("noisy, unlike", False)):
        rows += [
            _noisy(_regression(alike), setting, policy, 4 * seeds)
            for policy in ("keep", "decay:0.9")
        ]
    settings = {
        "problem": repr(problem),
        "cohort": COHORT,
        "local_steps": 5,
        "lr": list(GRID),
        "goal": GOAL,
        "seeds": seeds,
        "rounds": rounds,
        "age_expected": CLIENTS / COHORT - 1,
    }
    return Exercise("stale", QUESTION, rows, _finding(rows), settings)


def _quiet(
    problem: Problem,
    setting: str,
    trace: NDArray[np.int64] | None,
    policy: str,
    seeds: int,
    rounds: int,
) -> Row:
    """Without noise: rounds and vectors to the optimum, and where the runs end."""
    found = grid(
        scaffold(),
        problem,
        GRID,
        seeds,
        rounds=rounds,
        local_steps=5,
        cohort=COHORT,
        availability=trace,
        stale=policy,
        precision="float64",
        metrics=["distance", "age"],
    )
    times = [[reached(run, GOAL) for run in runs] for runs in found]
    ends = [ends_at(runs) for runs in found]
    done = [middle(one) for one in times]
    chosen = best(done) if any(one is not None for one in done) else best(ends)
    runs = found[chosen]
    vectors = [bytes_until(run, at) for run, at in zip(runs, times[chosen], strict=True)]
    sent = middle(vectors)
    stay = np.arange(problem.num_clients) < STAY
    theirs = problem.optimum(stay.astype(float)) if setting.endswith("leave") else None
    return _row(setting, policy, GRID[chosen], runs) | {
        "rounds": done[chosen],
        "vectors_up": None if sent is None else sent / (8 * problem.dim),
        "ends": ends[chosen],
        "ends_of_those_who_stay": None if theirs is None else _apart(runs, theirs),
    }


def _noisy(problem: Problem, setting: str, policy: str, seeds: int) -> Row:
    """From the optimum on, with ten records a step: how far the runs are shaken off it."""
    (runs,) = grid(
        scaffold(),
        problem,
        GRID[:1],
        seeds,
        rounds=300,
        local_steps=5,
        cohort=COHORT,
        batch_size=10,
        stale=policy,
        precision="float64",
        metrics=["distance", "age"],
        x0=problem.optimum(),
    )
    return _row(setting, policy, GRID[0], runs) | {"ends": ends_at(runs)}


def _regression(alike: bool) -> Problem:
    """Linear regression with noisy answers.

    All clients hold the same records, or each has a truth of its own.
    """
    rng = np.random.default_rng(0)
    truths = 2 * rng.normal(size=(CLIENTS, 5))
    features = rng.normal(size=(CLIENTS, 30, 5)) * np.linspace(0.4, 1.2, CLIENTS)[:, None, None]
    answers = np.einsum("nrd,nd->nr", features, truths) + rng.normal(size=(CLIENTS, 30))
    clients = list(zip(features, answers, strict=True))
    return linear(CLIENTS * clients[-1:] if alike else clients, l2=0.1)


def _row(setting: str, policy: str, lr: float, runs: list[Run]) -> Row:
    ages = np.array([run.history["age"][run.rounds // 2 :].mean() for run in runs])
    age, error = mean_and_error(ages)
    nothing: dict[str, Any] = dict.fromkeys(
        ("rounds", "vectors_up", "ends", "ends_of_those_who_stay")
    )
    head = {"setting": setting, "policy": policy, "lr": lr} | nothing
    return head | {"age": age, "age_error": error, "residual": residual(runs)}


def _apart(runs: list[Run], x: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean([np.sum((run.vector - x) ** 2) for run in runs])))


def _finding(rows: list[Row]) -> str:
    def of(setting: str) -> dict[str, Row]:
        return {row["policy"].partition(":")[0]: row for row in rows if row["setting"] == setting}

    def count(row: Row) -> str:
        return (
            "never"
            if row["rounds"] is None
            else f"{row['rounds']:.0f} rounds ({row['vectors_up']:.0f} vectors up)"
        )

    usual, turns, left = of("all come"), of("in turns of 40"), of(f"{CLIENTS - STAY} leave")
    alike, unlike = of("noisy, alike"), of("noisy, unlike")
    calm = {name: alike[name]["ends"] for name in ("keep", "decay")}
    rough = {name: unlike[name]["ends"] for name in ("keep", "decay")}
    return (
        f"Age {usual['keep']['age']:.2f} +- {usual['keep']['age_error']:.2f}, N/S - 1 = "
        f"{CLIENTS / COHORT - 1:g}. "
        f"Cohorts "
        f"from all, to {GOAL:g}: keep {count(usual['keep'])}, refresh {count(usual['refresh'])}, "
        "decay "
        f"{count(usual['decay'])} (ends at {usual['decay']['ends']:.2g}), drop "
        f"{count(usual['drop'])} (ends at "
        f"{usual['drop']['ends']:.2g}): what is forgotten comes back as FedAvg's drift. Clients "
        "that come in turns: "
        f"keep "
        f"{count(turns['keep'])}, refresh {count(turns['refresh'])}. {CLIENTS - STAY} clients "
        "leave for good: keep "
        f"ends "
        f"{left['keep']['ends_of_those_who_stay']:.2g} from the optimum of those who stay and "
        f"{left['keep']['ends']:.2g} "
        f"from that of all, because the leavers' last c_i go on pulling; drop ends "
        f"{left['drop']['ends_of_those_who_stay']:.2g} from the optimum of those who stay. Noise "
        "at clients alike: "
        f"decay "
        f"shakes {calm['decay'] / calm['keep']:.2g} times as far as keep, at unlike clients "
        f"{rough['decay'] / rough['keep']:.2g} times."
    )

"""Exercise 1, partial participation.

Rounds to a target against S/N, and clients that come rarely or never.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.problems import Problem, quadratic
from fedscaffold.simulation import Run
from papers.exercises.record import Exercise, Row, ends_at, grid, middle, reached, residual

__all__ = ["participation"]

QUESTION = (
    "How much slower is a round with S of N clients, and what if some clients come rarely or never?"
)
GOAL = 1e-6


def participation(
    clients: int = 20,
    cohorts: tuple[int, ...] = (20, 5, 2, 1),
    *,
    seeds: int = 4,
    rounds: int = 800,
    lr: float = 0.1,
    local_steps: int = 5,
) -> Exercise:
    """Rounds of SCAFFOLD and FedAvg to |x - x*| <= 1e-6 by size of cohort, on noiseless quadratics.

    Then the same cohorts drawn from a trace in which two clients come once in ten rounds and one
    never comes: how far from the optimum of all clients, and from that of the clients that come,
    does the run end?

    >>> trace_of(5)[:2].tolist()
    [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    """
    problem = quadratic(clients, 10, mu=0.1, seed=0)
    same: Row = {
        "rounds": rounds,
        "local_steps": local_steps,
        "precision": "float64",
        "metrics": ["distance"],
    }
    rows = []
    for algorithm in (scaffold(), fedavg()):
        for size in cohorts:
            (runs,) = grid(algorithm, problem, [lr], seeds, cohort=size, **same)
            rows.append(_row(algorithm, "all come", size, clients, runs))
    full = {row["method"]: row["rounds"] for row in rows if row["cohort"] == clients}
    for row in rows:
        base = full.get(row["method"])
        row["slow_down"] = row["rounds"] / base if row["rounds"] is not None and base else None
    size = max((size for size in cohorts if size < clients), default=clients)
    uneven = [
        _uneven(algorithm, problem, size, seeds, lr, same) for algorithm in (scaffold(), fedavg())
    ]
    trace = "two clients in 1 of 10 rounds, one never"
    settings = {
        "problem": repr(problem),
        "goal": GOAL,
        "seeds": seeds,
        "lr": lr,
        "trace": trace,
    } | same
    return Exercise("participation", QUESTION, rows + uneven, _finding(rows, uneven), settings)


def trace_of(clients: int) -> NDArray[np.int64]:
    """Ten rounds: the last client never comes, two only in the first round, the others always."""
    trace = np.ones((10, clients), np.int64)
    trace[:, -1] = 0
    trace[1:, -3:-1] = 0
    return trace


def _row(algorithm: Algorithm, who: str, size: int, clients: int, runs: list[Run]) -> Row:
    return {
        "method": algorithm.name,
        "who": who,
        "cohort": size,
        "N/S": clients / size,
        "rounds": middle([reached(run, GOAL) for run in runs]),
        "slow_down": None,
        "ends": ends_at(runs),
        "ends_of_those_who_come": None,
        "residual": residual(runs),
    }


def _uneven(
    algorithm: Algorithm, problem: Problem, size: int, seeds: int, lr: float, same: Row
) -> Row:
    """Where a run ends that draws its cohorts from the trace."""
    trace = trace_of(problem.num_clients)
    (runs,) = grid(algorithm, problem, [lr], seeds, cohort=size, availability=trace, **same)
    theirs = problem.optimum(trace.any(axis=0).astype(float))
    row = _row(algorithm, "3 rarely or never", size, problem.num_clients, runs)
    row["ends_of_those_who_come"] = float(
        np.sqrt(np.mean([np.sum((run.vector - theirs) ** 2) for run in runs]))
    )
    return row


def _finding(rows: list[Row], uneven: list[Row]) -> str:
    ours = [row for row in rows if row["method"] == "scaffold"]
    steps = "; ".join(
        f"S = {row['cohort']}: {row['rounds']:.0f} rounds, {row['slow_down']:.2g} times as many "
        "(N/S = "
        f"{row['N/S']:.2g})"
        if row["slow_down"] is not None
        else f"S = {row['cohort']}: not within the rounds given"
        for row in ours
    )
    cheaper = all(row["slow_down"] <= row["N/S"] for row in ours if row["slow_down"] is not None)
    stalls = [row["ends"] for row in rows if row["method"] == "fedavg"]
    mine, theirs = uneven
    exact = mine["ends_of_those_who_come"] <= GOAL
    return (
        f"SCAFFOLD reaches {GOAL:g} with every cohort: {steps}. The slow-down is "
        f"{'never above' if cheaper else 'not always below'} N/S. FedAvg stalls at "
        f"{min(stalls):.2g} to "
        f"{max(stalls):.2g}, the further away the smaller the cohort. With clients that come "
        "rarely or never "
        f"SCAFFOLD ends "
        f"{mine['ends_of_those_who_come']:.2g} away from the optimum of the clients that come, "
        "with the weights "
        f"they have, "
        f"and {mine['ends']:.2g} from that of all: {'exactly' if exact else 'not'} the first, "
        "however rarely some "
        f"of them "
        f"come. A client that never comes keeps c_i = 0 and is as good as not there. FedAvg ends "
        f"{theirs['ends_of_those_who_come']:.2g} and {theirs['ends']:.2g} away: at neither."
    )

"""Exercise 3, momentum: at the server and at the clients, on an ill-conditioned problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.problems import Problem, dialled
from fedscaffold.simulation import Run, simulate
from papers.exercises.record import Exercise, Row, best, ends_at, grid, middle, reached, residual

__all__ = ["momentum"]

QUESTION = (
    "What does momentum gain on an ill-conditioned problem, and do the control variates stay right?"
)
COARSE, FINE = 2e-2, 1e-6
GRID, LOCAL_GRID = (0.1, 0.3, 1.0), (0.3, 1.0)


def momentum(
    *, condition: float = 300.0, beta: float = 0.9, rounds: int = 600, local_steps: int = 5
) -> Exercise:
    """Rounds of SCAFFOLD and FedAvg to two targets with each kind of momentum, at its best lr.

    The quadratics have L/mu = `condition` and Hessians that differ by mu/2; all clients take part,
    there is no noise, and distances are relative to that of the start.

    >>> GRID, LOCAL_GRID  # an optimizer brings its own step size, and each is a program of its own
    ((0.1, 0.3, 1.0), (0.3, 1.0))
    """
    problem = dialled(
        10,
        20,
        mu=1 / condition,
        hessian_dissimilarity=0.5 / condition,
        gradient_dissimilarity=0.1,
        seed=0,
    )
    same: Row = {
        "rounds": rounds,
        "local_steps": local_steps,
        "precision": "float64",
        "metrics": ["distance"],
    }
    kinds = {
        "none": None,
        "heavy ball": optax.sgd(1.0, momentum=beta),
        "Nesterov": optax.sgd(1.0, momentum=beta, nesterov=True),
    }
    rows = []
    for algorithm in (scaffold(), fedavg()):
        for name, optimizer in kinds.items():
            found = grid(algorithm, problem, GRID, 1, server_optimizer=optimizer, **same)
            rows.append(_row(algorithm, name, GRID, [runs[0] for runs in found], problem))
        local = [_local(algorithm, problem, lr, beta, same) for lr in LOCAL_GRID]
        rows.append(_row(algorithm, "local", LOCAL_GRID, local, problem))
    settings = {
        "problem": repr(problem),
        "condition": condition,
        "beta": beta,
        "lr": list(GRID),
        "local_lr": list(LOCAL_GRID),
    }
    return Exercise(
        "momentum",
        QUESTION,
        rows,
        _finding(rows, beta),
        settings | {"coarse": COARSE, "fine": FINE} | same,
    )


def _local(
    algorithm: Algorithm, problem: Problem, lr: float, beta: float, same: dict[str, Any]
) -> Run:
    return simulate(algorithm, problem, local_optimizer=optax.sgd(lr, momentum=beta), **same)


def _row(
    algorithm: Algorithm, kind: str, lrs: tuple[float, ...], runs: list[Run], problem: Problem
) -> Row:
    """The best step size by rounds to the fine target, else to the coarse one, else by the end."""
    start = float(np.linalg.norm(problem.optimum()))  # from x = 0
    rounds = {
        goal: [middle([reached(run, goal * start)]) for run in runs] for goal in (FINE, COARSE)
    }
    scores = next(
        (hits for hits in rounds.values() if any(hit is not None for hit in hits)),
        [ends_at([r]) for r in runs],
    )
    chosen = best(scores)
    sound = [
        run for run in runs if ends_at([run]) < start
    ]  # the gauge of a run that diverges says nothing
    return {
        "method": algorithm.name,
        "momentum": kind,
        "lr": lrs[chosen],
        "rounds_to_2%": rounds[COARSE][chosen],
        "rounds_to_1e-6": rounds[FINE][chosen],
        "ends": ends_at([runs[chosen]]) / start,
        "ends_at_largest_lr": ends_at(runs[-1:]) / start,
        "residual": residual(sound),
    }


def _finding(rows: list[Row], beta: float) -> str:
    def of(method: str) -> dict[str, Row]:
        return {row["momentum"]: row for row in rows if row["method"] == method}

    def listed(found: dict[str, Row], key: str) -> str:
        return ", ".join(
            f"{kind} {'not reached' if row[key] is None else f'{row[key]:.0f}'}"
            for kind, row in found.items()
        )

    ours, theirs = of("scaffold"), of("fedavg")
    plain, fastest = (ours[kind]["rounds_to_2%"] for kind in ("none", "Nesterov"))
    gain = (
        f"{plain / fastest:.2g} times fewer rounds"
        if plain and fastest
        else "no gain within the rounds given"
    )
    return (
        f"SCAFFOLD, rounds to 2 % of the starting distance: {listed(ours, 'rounds_to_2%')}; to "
        "1e-6: "
        f"{listed(ours, 'rounds_to_1e-6')}. Nesterov's momentum at the server ({beta:g}) means "
        f"{gain} to 2 %. Local "
        f"momentum begins anew every round and has only its few steps to build up; at lr "
        f"{LOCAL_GRID[-1]:g}, where FedAvg still "
        f"settles ({theirs['local']['ends_at_largest_lr']:.2g} of the start), SCAFFOLD with it "
        f"{'diverges' if ours['local']['ends_at_largest_lr'] > 1 else 'settles too'}. FedAvg to 2 "
        "%: "
        f"{listed(theirs, 'rounds_to_2%')}; to 1e-6: {listed(theirs, 'rounds_to_1e-6')}: momentum "
        "brings it to its "
        f"bias "
        f"sooner and does not move the bias. The control variates stay right: the largest residual "
        "is "
        f"{max(row['residual'] for row in rows):.1e} of the size of the c_i."
    )

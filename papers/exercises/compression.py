"""Exercise 4, compression: accuracy and distance against the bytes that clients send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedscaffold import data
from fedscaffold.algorithms import scaffold
from fedscaffold.problems import Problem, quadratic, softmax
from fedscaffold.simulation import Run
from papers.exercises.record import (
    Exercise,
    Row,
    best,
    bytes_until,
    ends_at,
    grid,
    middle,
    residual,
)

__all__ = ["compression"]

QUESTION = "How many bytes must clients send for the same result?"
ACCURACY, DISTANCE = 0.9, 1e-6
ON_DIGITS = ("none", "top_k:0.02", "quantise:4")
ON_QUADRATIC = ("none", "top_k:0.1", "random_k:0.2", "quantise:4")
GRID = (0.03, 0.1, 0.3)


def compression(
    on_digits: Sequence[str] = ON_DIGITS,
    on_quadratic: Sequence[str] = ON_QUADRATIC,
    *,
    rounds: int = 120,
    quadratic_rounds: int = 1000,
) -> Exercise:
    """Bytes up that SCAFFOLD needs, uncompressed ("none", which comes first) and compressed.

    On digits (softmax, 0 % similarity, 4 of 20 clients a round, lr 0.1) to 90 % test accuracy; on
    quadratics (5 of 20 clients a round) to 1e-6 from the optimum, each at its best step size of
    three. "two vectors" is the textbook's
    message, x and c apart: the same models for twice the bytes.

    >>> ON_DIGITS, ON_QUADRATIC  # what is tried unless asked for
    (('none', 'top_k:0.02', 'quantise:4'), ('none', 'top_k:0.1', 'random_k:0.2', 'quantise:4'))
    """
    federated = data.federate(data.load("digits"), "similarity:0", 20, seed=0)
    digits = softmax(federated.clients, classes=federated.classes, test=federated.test)
    square = quadratic(20, 64, mu=0.1, seed=0)
    rows = [_digits(digits, name, rounds) for name in on_digits]
    rows = [_doubled(rows[0]), *rows]
    others = [_square(square, name, quadratic_rounds) for name in on_quadratic]
    rows += [_doubled(others[0]), *others]
    settings = {
        "problems": [repr(digits), repr(square)],
        "rounds": [rounds, quadratic_rounds],
        "cohorts": [4, 5],
        "lr": [0.1, list(GRID)],
        "goals": {"accuracy": ACCURACY, "distance": DISTANCE},
    }
    return Exercise("compression", QUESTION, rows, _finding(rows), settings)


def _digits(problem: Problem, name: str, rounds: int) -> Row:
    (runs,) = grid(
        scaffold(),
        problem,
        [0.1],
        3,
        rounds=rounds,
        local_epochs=5,
        batch_size=0.2,
        cohort=4,
        compression=name,
        metrics=["accuracy"],
    )
    last = np.mean([run.history["accuracy"][-rounds // 6 :] for run in runs])
    return _row("digits", name, 0.1, runs, [_first(run, "accuracy") for run in runs]) | {
        "accuracy": float(last)
    }


def _square(problem: Problem, name: str, rounds: int) -> Row:
    found = grid(
        scaffold(),
        problem,
        GRID,
        2,
        rounds=rounds,
        local_steps=5,
        cohort=5,
        compression=name,
        precision="float64",
        metrics=["distance"],
    )
    times = [[_first(run, "distance") for run in runs] for runs in found]
    chosen = best([middle(one) for one in times])
    runs = found[chosen]
    return _row("quadratic", name, GRID[chosen], runs, times[chosen]) | {"distance": ends_at(runs)}


def _row(problem: str, name: str, lr: float, runs: list[Run], hits: list[int | None]) -> Row:
    nothing: dict[str, Any] = {"accuracy": None, "distance": None}
    per_round = float(np.mean([run.history["bytes_up"].mean() for run in runs]))
    return {
        "problem": problem,
        "sent": "one vector" if name == "none" else name,
        "lr": lr,
        "bytes_a_round": per_round,
        "rounds": middle(hits),
        "bytes_to_goal": middle([bytes_until(run, at) for run, at in zip(runs, hits, strict=True)]),
        "residual": residual(runs),
    } | nothing


def _doubled(row: Row) -> Row:
    """The textbook's SCAFFOLD, which sends x and c apart: the same run, twice the bytes."""
    goal = row["bytes_to_goal"]
    return row | {
        "sent": "two vectors",
        "bytes_a_round": 2 * row["bytes_a_round"],
        "bytes_to_goal": None if goal is None else 2 * goal,
    }


def _first(run: Run, metric: str) -> int | None:
    """The first round measured at which the goal is met."""
    values = run.history[metric]
    hits = np.flatnonzero(values >= ACCURACY if metric == "accuracy" else values <= DISTANCE)
    return int(hits[0]) + 1 if len(hits) else None


def _finding(rows: list[Row]) -> str:
    def told(problem: str) -> str:
        base = next(
            row for row in rows if row["problem"] == problem and row["sent"] == "two vectors"
        )
        parts = []
        for row in rows:
            if row["problem"] == problem:
                goal = row["bytes_to_goal"]
                share = base["bytes_to_goal"] / goal if goal and base["bytes_to_goal"] else None
                words = (
                    "goal not reached"
                    if goal is None
                    else f"{goal:,.0f} bytes in {row['rounds']:.0f} rounds"
                )
                parts.append(
                    f"{row['sent']} {words}"
                    + (f" ({share:.2g} times fewer)" if share and share != 1 else "")
                )
        return "; ".join(parts)

    return (
        f"Digits, to {ACCURACY:.0%} accuracy: {told('digits')}. Quadratic, to {DISTANCE:g} from "
        "the optimum: "
        f"{told('quadratic')}. One vector instead of two costs nothing: the models are the same. "
        "What a "
        f"compressor leaves out comes later, so the limit is the optimum, and c stays the mean of "
        "the c_i: the "
        f"largest residual is "
        f"{max(row['residual'] for row in rows):.1e} of the size of the c_i, rounding."
    )

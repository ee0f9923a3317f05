"""The talk's open question: does Richardson-Romberg remove the bias that noise leaves in SCAFFOLD?

To the order that matters E x - x* = lr b_1 + lr^2 b_2, with b_1 of order 1/N (`expand(...).bias`)
and in b_2 a part that more clients do not reduce (`residual_bias`, of order K; the formula is for
many of them). 2 x_lr - x_2lr keeps -2 lr^2 b_2: the first is gone, the second is doubled and
changes its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.problems import Problem, logistic
from fedscaffold.problems.regression import LogisticLoss
from fedscaffold.simulation import sweep
from fedscaffold.simulation.richardson_romberg import extrapolate
from papers.bounds.expansion import expand
from papers.exercises.record import Exercise, Row, mean_and_error

__all__ = ["richardson"]

QUESTION = (
    "Does Richardson-Romberg, 2 x_lr - x_2lr, remove FedAvg's bias, and what noise leaves in "
    "SCAFFOLD?"
)
L2, RECORDS, SCALE = 0.1, 20, 2.0
FEDAVG_GRID = (0.0125, 0.025, 0.05, 0.1)
CASES = (
    (2, 1, 0.1, 128, 1600),
    (2, 5, 0.1, 96, 400),
    (100, 10, 0.05, 32, 160),
)  # clients, steps, lr, seeds, rounds


def richardson(cases: tuple[tuple[int, int, float, int, int], ...] = CASES) -> Exercise:
    """The bias along its predicted direction, at lr, at 2 lr and combined, on logistic regression.

    FedAvg with full batches, where everything is exact and the slopes in lr are 1 and 2; SCAFFOLD
    with batches of one record, as a mean over seeds and rounds with its standard error. A case is
    (clients, local steps, lr, seeds, rounds).

    >>> CASES[0]  # tried unless asked for others
    (2, 1, 0.1, 128, 1600)
    """
    rows = _fedavg() + [_scaffold(*case) for case in cases]
    settings = {
        "problem": repr(_problem(2)),
        "fedavg_lr": list(FEDAVG_GRID),
        "batch_size": 1,
        "cases": [list(c) for c in cases],
    }
    return Exercise("richardson", QUESTION, rows, _finding(rows), settings)


def _clients(number: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Records of two features, labelled by a truth of each client's own."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(number):
        truth = rng.normal(size=2) + np.array([2.0, 1.0])
        x = SCALE * rng.normal(size=(RECORDS, 2))
        made.append((x, (rng.random(RECORDS) < 1 / (1 + np.exp(-x @ truth))).astype(np.int32)))
    return made


def _problem(clients: int, direction: NDArray[Any] | None = None) -> Problem:
    """Logistic regression; with a direction, `accuracy` is the model's coordinate along it."""
    plain = logistic(_clients(clients), l2=L2)
    if direction is None:
        return plain
    return Problem(
        LogisticLoss(L2),
        np.zeros(2),
        _clients(clients),
        test=(direction[None],),
        accuracy=along,
        facts=plain.facts,
        coupled=False,
    )


def along(w: Any, batch: Any) -> Any:
    """Mean coordinate of the model along the rows of the batch."""
    return (batch[0] @ w).mean()


def _fedavg(local_steps: int = 5) -> list[Row]:
    """The bias of FedAvg without noise, measured and by theory, and what is left of it.

    Slopes between neighbours.
    """
    problem = _problem(2)
    found = sweep(
        fedavg(),
        problem,
        rounds=1500,
        lr=FEDAVG_GRID,
        seeds=1,
        local_steps=local_steps,
        precision="float64",
        metrics=[],
    )
    ends = [runs[0].vector - problem.optimum() for runs in found.runs]
    rows: list[Row] = []
    for lr, fine, coarse in zip(FEDAVG_GRID, ends, ends[1:], strict=False):
        theory = expand(problem, lr=lr, local_steps=local_steps)
        left = float(np.linalg.norm(extrapolate(fine, coarse)))
        row = _row("fedavg", 2, local_steps, lr) | {
            "bias": float(np.linalg.norm(fine)),
            "predicted": float(np.linalg.norm(theory.fedavg_bias)),
            "bias_at_2lr": float(np.linalg.norm(coarse)),
            "combined": left,
            "combined_predicted": float(np.linalg.norm(theory.richardson_bias)),
        }
        if rows:
            before = rows[-1]
            row["slope"] = float(np.log2(row["bias"] / before["bias"]))
            row["slope_combined"] = float(np.log2(left / before["combined"]))
        rows.append(row)
    return rows


def _scaffold(clients: int, local_steps: int, lr: float, seeds: int, rounds: int) -> Row:
    """SCAFFOLD's mean deviation along the predicted bias, after a quarter of the rounds."""
    law = expand(_problem(clients), lr=lr, local_steps=local_steps, batch_size=1)
    direction = law.bias / np.linalg.norm(law.bias)
    found = sweep(
        scaffold(),
        _problem(clients, direction),
        rounds=rounds,
        lr=(lr, 2 * lr),
        seeds=seeds,
        local_steps=local_steps,
        batch_size=1,
        x0=law.optimum,
        metrics=["accuracy"],
    )
    means = np.array(
        [
            [run.history["accuracy"][rounds // 4 :].mean(dtype=float) for run in runs]
            for runs in found.runs
        ]
    )
    fine, coarse = means - direction @ law.optimum
    row = _row("scaffold", clients, local_steps, lr)
    for name, samples in (
        ("bias", fine),
        ("bias_at_2lr", coarse),
        ("combined", extrapolate(fine, coarse)),
    ):
        row[name], row[name + "_error"] = mean_and_error(samples)
    row["predicted"] = float(direction @ (law.bias + law.residual_bias))
    row["combined_predicted"] = float(-2 * direction @ law.residual_bias)
    row["residual"] = max(run.residual / run.scale for runs in found.runs for run in runs)
    return row


def _row(method: str, clients: int, local_steps: int, lr: float) -> Row:
    names = (
        "bias",
        "bias_error",
        "predicted",
        "bias_at_2lr",
        "bias_at_2lr_error",
        "combined",
        "combined_error",
    )
    nothing: Row = dict.fromkeys(
        (*names, "combined_predicted", "slope", "slope_combined", "residual")
    )
    return {"method": method, "clients": clients, "local_steps": local_steps, "lr": lr} | nothing


def _finding(rows: list[Row]) -> str:
    exact = [row for row in rows if row["method"] == "fedavg"]
    first, last = exact[0], exact[-1]
    parts = [
        f"N = {row['clients']}, K = {row['local_steps']}, lr {row['lr']:g}: {row['bias']:.4f} +- "
        f"{row['bias_error']:.4f} "
        f"becomes {row['combined']:.4f} +- {row['combined_error']:.4f}, {_verdict(row)}"
        for row in rows
        if row["method"] == "scaffold"
    ]
    return (
        f"FedAvg without noise: the bias goes as lr^{last['slope']:.2f}, what Richardson-Romberg "
        "leaves of it as "
        f"lr^{last['slope_combined']:.2f} (at lr {first['lr']:g}: {first['bias']:.2g} becomes "
        f"{first['combined']:.2g}). SCAFFOLD with batches of one record: {'; '.join(parts)}. By "
        "theory the part of "
        "order lr / N goes; what is left is of order lr^2, doubled and with the other sign, and "
        "with several local "
        "steps it has a part of order lr^2 K that more clients do not reduce."
    )


def _verdict(row: Row) -> str:
    """What became of a bias, given the standard errors."""
    before, left = (
        abs(row["bias"]) / row["bias_error"],
        abs(row["combined"]) / row["combined_error"],
    )
    if before < 3:
        return "too small to be seen before"
    if left < 3:
        return "removed as far as can be seen"
    share = abs(row["combined"] / row["bias"])
    return f"{share:.2g} times as large" + (
        ", with the other sign" if row["combined"] * row["bias"] < 0 else ""
    )

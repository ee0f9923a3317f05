"""001 exercise 1: partial participation.

Rounds to the optimum against the share S/N, SCAFFOLD and FedAvg.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm, fedavg, scaffold
from fedscaffold.problems import Problem, quadratic
from fedscaffold.simulation import simulate
from papers import plotting
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_least, at_most, holds

__all__ = ["CLAIM"]

Floats = NDArray[Any]

GOAL = 1e-10  # of |x - x*| relative to the start
SAME = {"clients": 20, "dim": 5, "steps": 5, "lr": 0.06, "cohorts": [1, 2, 5, 10, 20]}
SIZES: dict[str, Settings] = {
    "quick": SAME | {"rounds": 2500, "seeds": [0, 1, 2], "stall": 300},
    "full": SAME | {"rounds": 6000, "seeds": list(range(10)), "stall": 2000},
}


def measure(settings: Settings, memo: Memo) -> Data:
    """Every cohort size with its own schedules, all of one shape.

    One compiled program for each algorithm.
    """
    problem = quadratic(settings["clients"], settings["dim"], mu=0.1, smoothness=1.0, seed=4)
    curves = {}
    for s in settings["cohorts"]:
        runs = [
            _distances(scaffold(), problem, s, seed, settings["rounds"], settings)
            for seed in settings["seeds"]
        ]
        stalls = [
            _distances(fedavg(), problem, s, seed, settings["stall"], settings)
            for seed in settings["seeds"]
        ]
        curves[str(s)] = {
            "rounds": [_hit(run) for run in runs],
            "curve": runs[0][:800],
            "factor": [_factor(run) for run in runs],
            "fedavg": stalls[0],
            "residual": [float(np.sqrt(np.mean(run[len(run) // 2 :] ** 2))) for run in stalls],
        }
    return {"curves": curves, "clients": settings["clients"]}


def _distances(
    algorithm: Algorithm, problem: Problem, size: int, seed: int, rounds: int, settings: Settings
) -> Floats:
    """|x - x*| of every round over that of the start, with cohorts of `size`."""
    rng = np.random.default_rng([seed, size])
    n = problem.num_clients
    cohorts = [sorted(rng.choice(n, size, replace=False).tolist()) for _ in range(rounds - 1)]
    cohorts.append(
        list(range(n))
    )  # the last round hears everyone, so that all sizes share one program
    start = float(np.linalg.norm(problem.optimum()))
    run = simulate(
        algorithm,
        problem,
        rounds=rounds,
        local_steps=settings["steps"],
        lr=settings["lr"],
        cohorts=cohorts,
        precision="float64",
        metrics=["distance"],
        stop_at=("distance", 0.1 * GOAL * start),
    )
    return np.concatenate([[1.0], run.history["distance"] / start])


def _hit(distances: Floats) -> int | None:
    there = np.flatnonzero(distances <= GOAL)
    return int(there[0]) if len(there) else None


def _factor(distances: Floats) -> float:
    """The factor a round, by a line through the logarithm between 1e-3 and the goal."""
    kept = np.flatnonzero((distances < 1e-3) & (distances > GOAL))
    return (
        float(np.exp(np.polyfit(kept, np.log(distances[kept]), 1)[0]))
        if len(kept) > 5
        else math.nan
    )


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    reached = [r for c in data["curves"].values() for r in c["rounds"]]
    worst = max(f for c in data["curves"].values() for f in c["factor"])
    residuals = {int(s): float(np.median(c["residual"])) for s, c in data["curves"].items()}
    sizes = sorted(residuals)
    medians = {
        int(s): float(np.median([r or math.inf for r in c["rounds"]]))
        for s, c in data["curves"].items()
    }
    falls = all(residuals[a] > residuals[b] for a, b in pairwise(sizes))
    return [
        holds(
            "SCAFFOLD reaches a relative error of 1e-10 for every S >= 1",
            "all",
            f"{sum(r is not None for r in reached)} of {len(reached)} runs",
            "every cohort size, every seed",
            all(r is not None for r in reached),
        ),
        holds(
            "SCAFFOLD's convergence is linear: largest factor a round",
            "below 1",
            worst,
            "below 1",
            worst < 1,
        ),
        at_least(
            "FedAvg stalls: smallest relative error it stays at",
            "stalls",
            min(residuals.values()),
            1e4 * GOAL,
        ),
        holds(
            "FedAvg's error falls with the share that takes part",
            "falls",
            ", ".join(f"{residuals[s]:.2g}" for s in sizes),
            "decreasing in S",
            falls,
        ),
        at_most(
            "slow-down of one client a round against all of them, SCAFFOLD, over N/S",
            1.0,
            medians[1] / medians[sizes[-1]] / settings["clients"],
            1.0,
            kind="report",
            note="1 would be in proportion to N/S",
        ),
    ]


def tables(data: Data) -> list[Table]:
    """Rounds and residuals by S."""
    rows = []
    for s, c in data["curves"].items():
        found = [r for r in c["rounds"] if r is not None]
        median = float(np.median([r or math.inf for r in c["rounds"]]))
        spread = f"{min(found)} to {max(found)}" if found else "-"
        rows.append(
            [int(s), int(s) / data["clients"], median, spread, float(np.median(c["residual"]))]
        )
    head = ["S", "S/N", "rounds, median", "over seeds", "FedAvg stays at"]
    return [
        Table(
            "SCAFFOLD: rounds to 1e-10 of the start; FedAvg: relative error it stays at", head, rows
        )
    ]


def draw(data: Data) -> list[Drawing]:
    """Curves, and rounds against S/N."""
    figure, (one, two) = plotting.canvas(2)
    colours = plotting.shades(len(data["curves"]))
    for (s, c), colour in zip(data["curves"].items(), colours, strict=True):
        one.semilogy(c["curve"], color=colour, label=f"$S={s}$")
        one.semilogy(
            c["fedavg"],
            color="#d55e00",
            linestyle="--",
            linewidth=0.8,
            alpha=0.35 + 0.1 * colours.index(colour),
        )
    one.plot([], [], color="#d55e00", linestyle="--", linewidth=0.9, label="FedAvg")
    one.set(
        xlabel="rounds", ylabel=r"$\|x-x^\star\|/\|x^0-x^\star\|$", ylim=(1e-11, 10), xlim=(0, 800)
    )
    one.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    shares = [int(s) / data["clients"] for s in data["curves"]]
    rounds = [
        float(np.median([r or math.nan for r in c["rounds"]])) for c in data["curves"].values()
    ]
    two.loglog(shares, rounds, **plotting.METHODS["scaffold"].points(label="SCAFFOLD"))
    two.loglog(
        shares,
        [rounds[-1] / s for s in shares],
        color=plotting.GREY,
        linestyle=":",
        linewidth=1,
        label="in proportion to $N/S$",
    )
    two.set(xlabel="share of clients $S/N$", ylabel=r"rounds to $10^{-10}$")
    two.set_yticks([200, 500, 1000, 2000, 4000], ["200", "500", "1000", "2000", "4000"])
    two.set_xticks(shares, [f"{s:g}" for s in shares])
    two.minorticks_off()
    two.legend(loc="upper right")
    caption = (
        "Exact gradients, 20 clients, cohorts drawn without replacement. SCAFFOLD reaches the "
        "optimum whatever the "
        "share that takes part (one seed shown); FedAvg stays away from it."
    )
    return [Drawing("participation", caption, figure)]


CLAIM = Claim(
    "participation",
    "Partial participation",
    "001 exercise 1",
    "How does the share of clients in a round affect convergence? (An open exercise: no numbers "
    "are given.)",
    SIZES,
    measure,
    judge,
    tables,
    draw,
)

"""000 Figure 1: trajectories of FedAvg and SCAFFOLD on two clients in the plane, for growing H."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.problems import Problem, quadratic
from fedscaffold.simulation import simulate
from fedscaffold.theory import bias, contraction_curve
from papers import plotting
from papers.bounds.sample_rounds import sample_rounds
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_most, between, holds

__all__ = ["CLAIM"]

LR = 0.5
SIZES = {
    "quick": {"local_steps": [1, 2, 5, 10, 50, 100, 1000], "engine": [10], "engine_rounds": 100},
    "full": {
        "local_steps": [1, 2, 5, 10, 50, 100, 1000, 10_000],
        "engine": [1, 2, 5, 10, 50, 100],
        "engine_rounds": 400,
    },
}


def two_clients() -> Problem:
    """A_1 = diag(1, .1), A_2 the same turned: the paper does not give its own."""
    turn = np.array([[math.cos(0.5), -math.sin(0.5)], [math.sin(0.5), math.cos(0.5)]])
    second = turn @ np.diag([0.1, 1.0]) @ turn.T
    return quadratic(
        hessians=[np.diag([1.0, 0.1]), second], linear=[[1.0, 0.0], [0.0, -0.5]], x0=[-1.5, 1.5]
    )


def measure(settings: Settings, memo: Memo) -> Data:
    """Paths by the closed form of a round; some of them again by the engine."""
    problem = two_clients()
    optimum, steps = problem.optimum(), list(settings["local_steps"])
    rates = [rate.spectral_radius for rate in contraction_curve(problem, lr=LR, local_steps=steps)]
    paths, rows = {}, []
    for h, rate in zip(steps, rates, strict=True):
        rounds = math.ceil(28 / -math.log(rate))
        long = {
            one.name: sample_rounds(
                problem, lr=LR, local_steps=h, noise=0.0, rounds=rounds, seed=0, algorithm=one
            )[0]
            for one in (fedavg(), scaffold())
        }
        errors = np.linalg.norm(long["scaffold"] - optimum, axis=1)
        exact = float(np.linalg.norm(bias(problem, lr=LR, local_steps=h, algorithm=fedavg())))
        measured = float(np.linalg.norm(long["fedavg"][-1] - optimum))
        rows.append([h, measured, exact, fitted_rate(errors), rate, float(errors[-1]), rounds])
        paths[str(h)] = {name: path[:61] for name, path in long.items()} | {
            "errors": errors[:: max(1, rounds // 400)]
        }
        paths[str(h)]["every"] = max(1, rounds // 400)
    hessians, linear = problem.records
    minima = np.linalg.solve(hessians, linear[..., None])[..., 0]
    return {
        "rows": rows,
        "paths": paths,
        "optimum": optimum,
        "limit": float(np.linalg.norm(np.mean(minima, axis=0) - optimum)),
        "minima": minima,
        "engine": _engine(problem, settings),
    }


def _engine(problem: Problem, settings: Settings) -> float:
    """Largest difference between the engine and the closed form, in |x - x*| of every round."""
    worst, rounds = 0.0, settings["engine_rounds"]
    for h in settings["engine"]:
        for one in (fedavg(), scaffold()):
            run = simulate(
                one,
                problem,
                rounds=rounds,
                local_steps=h,
                lr=LR,
                precision="float64",
                metrics=["distance"],
            )
            path = sample_rounds(
                problem, lr=LR, local_steps=h, noise=0.0, rounds=rounds, seed=0, algorithm=one
            )[0]
            apart = run.history["distance"] - np.linalg.norm(path[1:] - problem.optimum(), axis=1)
            worst = max(worst, float(np.abs(apart).max()))
    return worst


def fitted_rate(errors: np.ndarray) -> float:
    """The factor a round, by a line through log error after the first tenth and above rounding."""
    kept = np.flatnonzero(errors > 1e-12 * errors[0])
    kept = kept[len(kept) // 10 :]
    return float(np.exp(np.polyfit(kept, np.log(errors[kept]), 1)[0]))


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    rows = data["rows"]
    biases = [row[1] for row in rows]
    off = max(abs(row[1] / row[2] - 1) for row in rows if row[0] > 1)
    far = max(abs(math.log(row[3]) / math.log(row[4]) - 1) for row in rows)
    slow = max(abs(row[3] / row[4] - 1) for row in rows)
    return [
        at_most("FedAvg has no bias with one local step", 0.0, biases[0], 1e-12),
        holds(
            "FedAvg's bias grows with H",
            "grows",
            ", ".join(f"{b:.3g}" for b in biases),
            "non-decreasing in H",
            all(b >= a - 1e-12 for a, b in pairwise(biases)),
        ),
        at_most("FedAvg ends where F7 says: largest relative error", 0.0, off, 0.01),
        between(
            "FedAvg's bias at the largest H over its limit, the mean of the clients' minimisers",
            1.0,
            biases[-1] / data["limit"],
            0.99,
            1.01,
        ),
        at_most(
            "SCAFFOLD shrinks at the spectral radius: largest relative error of the fitted factor",
            0.0,
            slow,
            0.02,
        ),
        at_most(
            "the same, of the fitted log-factor (asks more when the factor is near 1)",
            0.0,
            far,
            0.02,
        ),
        at_most(
            "SCAFFOLD's error at the end, largest over H", 0.0, max(row[5] for row in rows), 1e-8
        ),
        at_most("engine against closed form, largest difference", 0.0, data["engine"], 1e-11),
    ]


def tables(data: Data) -> list[Table]:
    """One row for each H."""
    head = [
        "H",
        "FedAvg bias, exact",
        "measured",
        "ratio",
        "SCAFFOLD factor, exact",
        "fitted",
        "ratio",
    ]
    rows = []
    for h, measured, exact, fitted, rate, *_ in data["rows"]:
        rows.append(
            [h, exact, measured, measured / exact if exact else None, rate, fitted, fitted / rate]
        )
    note = "The paper prints no numbers; exact ones are F7's, for matrices chosen here."
    return [
        Table("Bias of FedAvg and rate of SCAFFOLD by the number of local steps", head, rows, note)
    ]


def draw(data: Data) -> list[Drawing]:
    """Paths in the plane, and SCAFFOLD's error by round."""
    figure, panels = plotting.canvas(3, wide=0.95, high=1.1)
    shown = [h for h in (1, 5, 10, 100, 1000) if str(h) in data["paths"]]
    colours = plotting.shades(len(shown))
    for panel, name, title in (
        (panels[0], "fedavg", "FedAvg"),
        (panels[1], "scaffold", "SCAFFOLD"),
    ):
        for h, colour in zip(shown, colours, strict=True):
            path = data["paths"][str(h)][name]
            panel.plot(
                path[:, 0],
                path[:, 1],
                color=colour,
                marker=".",
                markersize=3,
                linewidth=1,
                label=f"$H={h}$",
            )
            panel.plot(*path[-1], marker="s", markersize=4, color=colour)
        panel.plot(
            *data["optimum"],
            marker="*",
            markersize=11,
            color="#d55e00",
            linestyle="none",
            label=r"$\theta^\star$",
        )
        panel.plot(
            data["minima"][:, 0],
            data["minima"][:, 1],
            "k+",
            markersize=7,
            label=r"$\theta_c^\star$",
            linestyle="none",
        )
        panel.set(title=title, xlabel=r"$\theta_1$", ylabel=r"$\theta_2$")
    for h, colour in zip(shown, colours, strict=True):
        held = data["paths"][str(h)]
        panels[2].semilogy(
            held["every"] * np.arange(len(held["errors"])),
            held["errors"],
            color=colour,
            label=f"$H={h}$",
        )
    panels[2].set(
        title="SCAFFOLD",
        xlabel="communications $t$",
        ylabel=r"$\|\theta^t-\theta^\star\|$",
        xlim=(0, 600),
    )
    panels[2].set_ylim(1e-12, 10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown) + 2
    )
    caption = (
        "60 rounds of two clients in the plane. FedAvg ends (squares) the farther from the optimum "
        "(star) the more "
        "local steps; SCAFFOLD reaches it for every H."
    )
    return [Drawing("quadratics-fig1", caption, figure)]


CLAIM = Claim(
    "quadratics-fig1",
    "Trajectories for growing numbers of local steps",
    "000 Figure 1",
    "FedAvg's bias grows with H; SCAFFOLD converges for all H, very large ones included.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
)

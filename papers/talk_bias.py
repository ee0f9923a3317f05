"""003: FedAvg's bias by step size and local steps, its cloud, and SCAFFOLD's beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.problems import Problem, logistic
from fedscaffold.simulation import sweep
from fedscaffold.theory import bias, stationary
from papers import plotting
from papers.bounds.expansion import expand
from papers.bounds.sample_rounds import sample_rounds
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_least, at_most, between
from papers.quadratics_fig1 import two_clients

__all__ = ["CLAIM", "converged", "slope", "two_hospitals"]

Floats = NDArray[Any]
SMALL = (0.1, 0.03, 0.01, 0.003, 0.001)  # towards 0: the ratio of variances is a limit
SIZES: dict[str, Settings] = {
    "quick": {
        "lrs": [0.08, 0.04, 0.02, 0.01],
        "steps": 5,
        "rounds": 6000,
        "small_lr": 1e-4,
        "all_steps": [2, 3, 5, 9, 17],
        "cloud": {"lr": 0.1, "steps": 10, "noise": 0.05, "runs": 200, "rounds": 150},
    },
    "full": {
        "lrs": [0.08, 0.04, 0.02, 0.01, 0.005],
        "steps": 5,
        "rounds": 14000,
        "small_lr": 1e-4,
        "all_steps": [2, 3, 5, 9, 17, 33],
        "cloud": {"lr": 0.1, "steps": 10, "noise": 0.05, "runs": 2000, "rounds": 150},
    },
}


def two_hospitals() -> Problem:
    """Logistic regression in the plane on two unlike clients: smooth, and not quadratic."""
    rng = np.random.default_rng(5)
    clients = []
    for weights, centre in (([2.0, -1.0], [0.5, 0.0]), ([-0.5, 1.5], [-0.5, 1.0])):
        x = rng.normal(size=(60, 2)) * [1.0, 1.6] + centre
        y = (x @ np.array(weights) + rng.logistic(size=60) > 0).astype(int)
        clients.append((x, y))
    return logistic(clients, l2=0.1)


def converged(problem: Problem, lrs: list[float], steps: int, rounds: int) -> list[Floats]:
    """Where FedAvg ends without noise, for every step size, less the optimum.

    One sweep of the engine.
    """
    found = sweep(
        fedavg(),
        problem,
        lr=lrs,
        seeds=[0],
        rounds=rounds,
        local_steps=steps,
        precision="float64",
        metrics=["grad_norm"],
        evaluate_every=rounds,
    )
    return [runs[0].vector - problem.optimum() for runs in found.runs]


def slope(x: list[float], y: list[float]) -> float:
    """Slope of log y against log x.

    >>> round(slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 12)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def measure(settings: Settings, memo: Memo) -> Data:
    """Bias on the logistic problem by the engine; on quadratics in closed form.

    Clouds exact in law.
    """
    smooth, plane = two_hospitals(), two_clients()
    lrs, steps = list(settings["lrs"]), settings["steps"]
    measured = [float(np.linalg.norm(v)) for v in converged(smooth, lrs, steps, settings["rounds"])]
    formula = [
        float(np.linalg.norm(expand(smooth, lr=lr, local_steps=steps).fedavg_bias)) for lr in lrs
    ]
    tiny = settings["small_lr"]
    by_steps = [
        float(np.linalg.norm(bias(plane, lr=tiny, local_steps=h, algorithm=fedavg())))
        for h in settings["all_steps"]
    ]
    cloud = settings["cloud"]
    made = {one.name: _cloud(plane, one, cloud) for one in (fedavg(), scaffold())}
    ratios = []
    for lr in SMALL:
        traces = [
            float(
                np.trace(
                    stationary(plane, lr=lr, local_steps=10, noise=0.05, algorithm=one).x_covariance
                )
            )
            for one in (scaffold(), fedavg())
        ]
        ratios.append([lr, traces[0] / traces[1]])
    return {
        "lrs": lrs,
        "measured": measured,
        "formula": formula,
        "all_steps": list(settings["all_steps"]),
        "by_steps": by_steps,
        "clouds": made,
        "optimum": plane.optimum(),
        "ratios": ratios,
    }


def _cloud(problem: Problem, algorithm: Any, cloud: dict[str, Any]) -> Data:
    """Ends of many runs, their mean, and its distance from the optimum in standard errors."""
    ends = sample_rounds(
        problem,
        lr=cloud["lr"],
        local_steps=cloud["steps"],
        noise=cloud["noise"],
        rounds=cloud["rounds"],
        seed=11,
        runs=cloud["runs"],
        algorithm=algorithm,
    )[:, -1]
    off = ends.mean(axis=0) - problem.optimum()
    error = np.cov(ends.T) / len(ends)
    expected = bias(problem, lr=cloud["lr"], local_steps=cloud["steps"], algorithm=algorithm)
    return {
        "ends": ends,
        "off": off,
        "score": float(np.max(np.abs(off) / np.sqrt(np.diag(error)))),
        "from_theory": float(np.max(np.abs(off - expected) / np.sqrt(np.diag(error)))),
    }


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    order = slope(data["lrs"][-3:], data["measured"][-3:])
    per_step = np.array(data["by_steps"]) / (np.array(data["all_steps"]) - 1)
    ratio = data["ratios"][-1][1]
    away = [abs(r - 1) for _, r in data["ratios"]]
    return [
        between(
            "order of FedAvg's bias in gamma (logistic regression, engine)", 1.0, order, 0.95, 1.05
        ),
        between(
            "bias over F19's formula at the smallest gamma",
            1.0,
            data["measured"][-1] / data["formula"][-1],
            0.95,
            1.05,
        ),
        at_most(
            "bias over (H - 1): largest relative difference over H, small gamma",
            0.0,
            float(np.ptp(per_step) / per_step.mean()),
            0.05,
        ),
        at_most(
            "SCAFFOLD's mean against the optimum, in standard errors",
            0.0,
            data["clouds"]["scaffold"]["score"],
            3.0,
        ),
        at_least(
            "FedAvg's mean is away from the optimum, in standard errors",
            "biased",
            data["clouds"]["fedavg"]["score"],
            10.0,
        ),
        at_most(
            "FedAvg's mean against the biased fixed point, in standard errors",
            0.0,
            data["clouds"]["fedavg"]["from_theory"],
            3.0,
        ),
        between(
            "variance of SCAFFOLD over that of FedAvg, H = 10, gamma = 0.001",
            1.0,
            ratio,
            0.99,
            1.01,
        ),
        between(
            "order in gamma in which that ratio tends to 1",
            1.0,
            slope(list(SMALL[-3:]), away[-3:]),
            0.9,
            1.1,
        ),
    ]


def tables(data: Data) -> list[Table]:
    """Bias by gamma and by H; the ratio of variances."""
    by_lr = [
        [lr, known, found, found / known]
        for lr, known, found in zip(data["lrs"], data["formula"], data["measured"], strict=True)
    ]
    by_h = [[h, b, b / (h - 1)] for h, b in zip(data["all_steps"], data["by_steps"], strict=True)]
    return [
        Table(
            "FedAvg's bias on logistic regression, H = 5",
            ["gamma", "formula F19", "measured", "ratio"],
            by_lr,
        ),
        Table("FedAvg's bias on quadratics, gamma = 1e-4", ["H", "bias", "bias / (H - 1)"], by_h),
        Table(
            "Variance of SCAFFOLD over that of FedAvg, H = 10", ["gamma", "ratio"], data["ratios"]
        ),
    ]


def draw(data: Data) -> list[Drawing]:
    """Bias against gamma, against H, and the clouds."""
    figure, panels = plotting.canvas(3, wide=0.95, high=1.05)
    pen = plotting.METHODS
    panels[0].loglog(
        data["lrs"], data["measured"], **pen["fedavg"].points(linestyle="none", label="measured")
    )
    panels[0].loglog(
        data["lrs"], data["formula"], color="black", linewidth=1, label="first order, F19"
    )
    panels[0].set(
        xlabel=r"step size $\gamma$", ylabel="FedAvg's bias", title="logistic regression, $H=5$"
    )
    panels[1].plot(
        data["all_steps"], np.array(data["by_steps"]) * 1e3, **pen["fedavg"].points(label="FedAvg")
    )
    panels[1].set(
        xlabel="local steps $H$",
        ylabel=r"bias $\times 10^{3}$",
        title=r"quadratics, $\gamma=10^{-4}$",
    )
    panels[1].set_xlim(0)
    panels[1].set_ylim(0)
    for name in ("fedavg", "scaffold"):
        ends = data["clouds"][name]["ends"]
        panels[2].plot(
            ends[:, 0],
            ends[:, 1],
            linestyle="none",
            marker=pen[name].marker,
            markersize=2.2,
            alpha=0.45,
            color=pen[name].color,
            label=pen[name].label,
            markeredgewidth=0,
            rasterized=True,
        )
    panels[2].plot(
        *data["optimum"],
        marker="*",
        markersize=11,
        color="black",
        linestyle="none",
        label=r"$\theta^\star$",
    )
    panels[2].set(
        xlabel=r"$\theta_1$", ylabel=r"$\theta_2$", title=r"stationary clouds, $\gamma=0.1$, $H=10$"
    )
    panels[0].set_xticks(data["lrs"], [f"{lr:g}" for lr in data["lrs"]])
    panels[0].set_yticks([0.005, 0.01, 0.02], ["0.005", "0.01", "0.02"])
    panels[0].minorticks_off()
    panels[0].legend(loc="upper left")
    panels[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.2)
    caption = (
        "FedAvg's bias is of first order in gamma (left, measured against the formula) and "
        "proportional to H - 1 "
        "(middle); under noise FedAvg's cloud lies beside the optimum, SCAFFOLD's around it "
        "(right)."
    )
    return [Drawing("talk-bias", caption, figure)]


CLAIM = Claim(
    "talk-bias",
    "FedAvg's bias, and the clouds",
    "003, slides on FedAvg's bias",
    "FedAvg converges to a biased point; the bias is of order gamma (H - 1). SCAFFOLD has no such "
    "bias and the same "
    "variance.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
)

"""003: Federated Richardson-Romberg, 2 x_gamma - x_2gamma, cancels FedAvg's first-order bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.theory import bias, stationary
from papers import plotting
from papers.bounds.expansion import expand
from papers.bounds.sample_rounds import sample_rounds
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_least, at_most, between
from papers.quadratics_fig1 import two_clients
from papers.talk_bias import converged, slope, two_hospitals

__all__ = ["CLAIM"]

Floats = NDArray[Any]
SIZES: dict[str, Settings] = {
    "quick": {
        "lrs": [0.04, 0.02, 0.01],
        "steps": 5,
        "rounds": 6000,
        "cloud_lr": 0.02,
        "cloud_steps": 10,
        "runs": 200,
    },
    "full": {
        "lrs": [0.04, 0.02, 0.01, 0.005],
        "steps": 5,
        "rounds": 14000,
        "cloud_lr": 0.02,
        "cloud_steps": 10,
        "runs": 2000,
    },
}
NOISE = 0.05
SMALL = (0.008, 0.004, 0.002)  # of the closed form


def combined(at_lr: Floats, at_twice: Floats) -> Floats:
    """2 x_gamma - x_2gamma."""
    return 2 * at_lr - at_twice


def measure(settings: Settings, memo: Memo) -> Data:
    """What is left of the bias, by simulation on logistic regression and exactly on quadratics."""
    smooth, plane = two_hospitals(), two_clients()
    lrs, steps = list(settings["lrs"]), settings["steps"]
    every = sorted({*lrs, *(2 * lr for lr in lrs)}, reverse=True)
    ends = dict(zip(every, converged(smooth, every, steps, settings["rounds"]), strict=True))
    left = [float(np.linalg.norm(combined(ends[lr], ends[2 * lr]))) for lr in lrs]
    formula = [
        float(np.linalg.norm(expand(smooth, lr=lr, local_steps=steps).richardson_bias))
        for lr in lrs
    ]
    exact = {h: [_exact(plane, lr, h) for lr in SMALL] for h in (2, 5, 10)}
    return {
        "lrs": lrs,
        "plain": [float(np.linalg.norm(ends[lr])) for lr in lrs],
        "left": left,
        "formula": formula,
        "quadratic": {str(h): values for h, values in exact.items()},
        "cloud": _cloud(plane, settings),
        "optimum": plane.optimum(),
    }


def _exact(problem: Any, lr: float, h: int) -> float:
    at = [bias(problem, lr=step, local_steps=h, algorithm=fedavg()) for step in (lr, 2 * lr)]
    return float(np.linalg.norm(combined(*at)))


def _cloud(problem: Any, settings: Settings) -> Data:
    """Ends of many runs of FedAvg, Richardson-Romberg and SCAFFOLD, and their variances."""
    lr, h, runs = settings["cloud_lr"], settings["cloud_steps"], settings["runs"]

    def ends(algorithm: Any, step: float, seed: int) -> Floats:
        return sample_rounds(
            problem,
            lr=step,
            local_steps=h,
            noise=NOISE,
            rounds=600,
            seed=seed,
            runs=runs,
            algorithm=algorithm,
        )[:, -1]

    plain = ends(fedavg(), lr, 1)
    made = {
        "fedavg": plain,
        "richardson": combined(plain, ends(fedavg(), 2 * lr, 2)),
        "scaffold": ends(scaffold(), lr, 3),
    }
    traces = [
        float(
            np.trace(
                stationary(problem, lr=step, local_steps=h, noise=NOISE, algorithm=one).x_covariance
            )
        )
        for one, step in ((fedavg(), lr), (fedavg(), 2 * lr), (scaffold(), lr))
    ]
    return {
        "ends": made,
        "off": {
            name: float(np.linalg.norm(v.mean(axis=0) - problem.optimum()))
            for name, v in made.items()
        },
        "variance": {name: float(np.trace(np.cov(v.T))) for name, v in made.items()},
        "exact_variance": {
            "fedavg": traces[0],
            "richardson": 4 * traces[0] + traces[1],
            "scaffold": traces[2],
        },
    }


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    cloud = data["cloud"]
    orders = [slope(list(SMALL), values) for values in data["quadratic"].values()]
    runs = settings["runs"]
    off = max(
        abs(cloud["variance"][name] / cloud["exact_variance"][name] - 1)
        for name in cloud["variance"]
    )
    ratio = cloud["exact_variance"]["scaffold"] / cloud["exact_variance"]["fedavg"]
    return [
        at_least(
            "order of what is left in gamma (logistic regression, engine)",
            2.0,
            slope(data["lrs"], data["left"]),
            1.9,
        ),
        at_least(
            "the same on quadratics, closed form, smallest over H = 2, 5, 10", 2.0, min(orders), 1.9
        ),
        between(
            "what is left over its second-order formula, smallest gamma",
            1.0,
            data["left"][-1] / data["formula"][-1],
            0.9,
            1.1,
        ),
        at_most(
            "what is left over FedAvg's bias, smallest gamma",
            "small",
            data["left"][-1] / data["plain"][-1],
            0.1,
        ),
        at_most(
            "variances of the clouds against the exact ones, largest relative error",
            0.0,
            off,
            4 * float(np.sqrt(2 / runs)),
            note="four standard errors of a variance from so many runs, in the worst case of one "
            "dominant direction",
        ),
        between("variance of SCAFFOLD over FedAvg at the cloud's gamma", 1.0, ratio, 0.95, 1.05),
    ]


def tables(data: Data) -> list[Table]:
    """Bias before and after; variances."""
    rows = [
        [lr, plain, known, left, left / known]
        for lr, plain, known, left in zip(
            data["lrs"], data["plain"], data["formula"], data["left"], strict=True
        )
    ]
    cloud = data["cloud"]
    spread = [
        [
            plotting.METHODS[name].label,
            cloud["off"][name],
            cloud["exact_variance"][name],
            cloud["variance"][name],
            cloud["variance"][name] / cloud["exact_variance"][name],
        ]
        for name in ("fedavg", "richardson", "scaffold")
    ]
    head = ["gamma", "FedAvg's bias", "left by Richardson-Romberg, formula", "measured", "ratio"]
    return [
        Table("What is left of the bias on logistic regression, H = 5", head, rows),
        Table(
            "The clouds",
            ["method", "mean - optimum", "variance, exact", "measured", "ratio"],
            spread,
        ),
    ]


def draw(data: Data) -> list[Drawing]:
    """Order of the bias, and the three clouds."""
    figure, (one, two) = plotting.canvas(2, high=1.1)
    pen = plotting.METHODS
    one.loglog(data["lrs"], data["plain"], **pen["fedavg"].points())
    one.loglog(data["lrs"], data["left"], **pen["richardson"].points(label="Richardson-Romberg"))
    one.loglog(
        data["lrs"], data["formula"], color="black", linewidth=0.9, label="second-order formula"
    )
    one.set(xlabel=r"step size $\gamma$", ylabel="bias", title="logistic regression, $H=5$")
    one.set_xticks(data["lrs"], [f"{lr:g}" for lr in data["lrs"]])
    one.minorticks_off()
    one.legend(loc="lower right")
    for name in ("richardson", "fedavg", "scaffold"):
        ends = data["cloud"]["ends"][name]
        two.plot(
            ends[:, 0],
            ends[:, 1],
            linestyle="none",
            marker=pen[name].marker,
            markersize=2.5,
            alpha=0.5,
            color=pen[name].color,
            label=pen[name].label.replace("FedAvg, ", ""),
            markeredgewidth=0,
            rasterized=True,
        )
    two.plot(
        *data["optimum"],
        marker="*",
        markersize=11,
        color="black",
        linestyle="none",
        label=r"$\theta^\star$",
    )
    two.set(xlabel=r"$\theta_1$", ylabel=r"$\theta_2$", title="stationary clouds, $H=10$")
    two.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.2)
    caption = (
        "Left: Richardson-Romberg leaves a bias of second order. Right: its cloud is centred where "
        "SCAFFOLD's is, at "
        "the price of six times FedAvg's variance when the two runs are independent."
    )
    return [Drawing("talk-richardson", caption, figure)]


CLAIM = Claim(
    "talk-richardson",
    "Richardson-Romberg's order",
    "003, slides on Federated Richardson-Romberg",
    "Running FedAvg with gamma and 2 gamma and extrapolating cancels the bias of order gamma; "
    "SCAFFOLD has FedAvg's "
    "variance.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
)

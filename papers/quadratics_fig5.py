"""000 Figure 5: linear speed-up with replicated clients and with independent ones.

For independent clients N tr Sigma depends on N where gamma H is small. With noise of covariance I
the exact covariance is, by F16,

    N tr Sigma = (gamma / 2) tr mean(A_c)^-1 (1 + O(gamma L) + O((gamma H L)^2))

and the mean of more clients is better conditioned: the inverse is convex, so that E tr mean(A_c)^-1
falls with N, to tr (E A)^-1. With H without bound it is a mean over clients instead (F13),

    N tr Sigma = gamma^2 mean_c tr sum_h (I - gamma A_c)^2h

whose expectation is the same for every N.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from fedscaffold.problems import Problem, quadratic
from fedscaffold.theory import contraction_curve, stationary
from papers import plotting
from papers.bounds.sample_rounds import sample_rounds
from papers.claim import Check, Claim, Data, Drawing, Memo, Part, Settings, Table
from papers.criteria import at_most, between

__all__ = ["CLAIM"]

SIZES = {
    "quick": {
        "base": 5,
        "dim": 20,
        "copies": [1, 2, 4, 10],
        "cells": [[1.0, 10], [0.01, 100]],
        "noise": 0.1,
        "runs": 16,
        "window": 250,
        "iid_cells": [[1.0, 10], [1.0, 200], [0.05, 200], [0.05, 4000], [0.01, 100]],
        "iid_clients": [4, 8, 16, 32],
        "iid_dim": 10,
        "draws": 12,
    },
    "full": {
        "base": 5,
        "dim": 20,
        "copies": [1, 2, 4, 10],
        "cells": [[1.0, 10], [0.01, 100]],
        "noise": 0.1,
        "runs": 64,
        "window": 1000,
        "iid_cells": [[1.0, 10], [1.0, 200], [0.05, 200], [0.05, 4000], [0.01, 100]],
        "iid_clients": [4, 8, 16, 32],
        "iid_dim": 20,
        "draws": 20,
    },
}
SMALL = 1.0  # gamma H L up to which the covariance is compared with that of the mean Hessian
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a7a7a")


def replicated(base: Problem, copies: int) -> Problem:
    """Every client so many times."""
    hessians, linear = base.records
    return quadratic(
        hessians=np.repeat(hessians, copies, axis=0), linear=np.repeat(linear, copies, axis=0)
    )


def measure(settings: Settings, memo: Memo) -> Data:
    """N MSE by simulation and exactly, replicated; exactly for independent clients."""
    base = quadratic(settings["base"], settings["dim"], mu=0.01, smoothness=1.0, seed=3)
    copied = {f"{lr:g}-{h}": partial(_replicated, base, lr, h) for lr, h in settings["cells"]}
    drawn = {f"{lr:g}-{h}": partial(_independent, lr, h) for lr, h in settings["iid_cells"]}
    parts = [Part(f"replicated-{key}", partial(make, settings)) for key, make in copied.items()]
    parts += [Part(f"iid-{key}", partial(make, settings)) for key, make in drawn.items()]
    found = iter(memo.all(parts))
    cells = {key: next(found) for key in copied}
    independent = {key: next(found) for key in drawn}
    return {"cells": cells, "independent": independent, "about": [_fall(independent)]}


def _replicated(base: Problem, lr: float, h: int, settings: Settings) -> Data:
    rate = contraction_curve(base, lr=lr, local_steps=[h])[0].spectral_radius
    forget = math.ceil(math.log(1e-7) / math.log(rate))
    rows = []
    for copies in settings["copies"]:
        problem = replicated(base, copies)
        n, noise = problem.num_clients, settings["noise"]
        paths = sample_rounds(
            problem,
            lr=lr,
            local_steps=h,
            noise=noise,
            rounds=forget + settings["window"],
            seed=copies,
            runs=settings["runs"],
        )
        means = np.sum((paths[:, forget:] - problem.optimum()) ** 2, axis=2).mean(axis=1)
        exact = float(np.trace(stationary(problem, lr=lr, local_steps=h, noise=noise).x_covariance))
        rows.append(
            [n, float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means))), exact]
        )
    return {"rows": rows}


def _independent(lr: float, h: int, settings: Settings) -> Data:
    rows, expansion, limit = [], [], []
    for n in settings["iid_clients"]:
        values, leading, last = [], [], []
        for seed in range(settings["draws"]):
            problem = quadratic(n, settings["iid_dim"], mu=0.01, smoothness=1.0, seed=100 + seed)
            values.append(
                n
                * float(np.trace(stationary(problem, lr=lr, local_steps=h, noise=1.0).x_covariance))
            )
            leading.append(of_mean_hessian(problem, lr))
            last.append(of_unbounded_steps(problem, lr))
        rows.append(
            [n, float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))]
        )
        expansion.append(float(np.mean(leading)))
        limit.append(float(np.mean(last)))
    return {"rows": rows, "expansion": expansion, "limit": limit}


def of_mean_hessian(problem: Problem, lr: float) -> float:
    """(gamma / 2) tr mean(A_c)^-1, which N tr Sigma tends to as gamma H does to 0 (F16).

    >>> of_mean_hessian(quadratic(hessians=[[[0.75]], [[0.25]]], linear=[[1.0], [0.0]]), 0.5)
    0.5
    """
    hessian = np.mean(problem.records[0], axis=0)
    return float(lr / 2 * np.trace(np.linalg.inv(hessian)))


def of_unbounded_steps(problem: Problem, lr: float) -> float:
    """gamma^2 mean_c tr sum_h (I - gamma A_c)^2h, which N tr Sigma tends to as H does to infinity.

    >>> of_unbounded_steps(quadratic(hessians=[[[1.0]]], linear=[[0.0]]), 0.5)
    0.3333333333333333
    """
    curvatures = np.linalg.eigvalsh(problem.records[0])
    return float(np.mean(np.sum(lr**2 / (1 - (1 - lr * curvatures) ** 2), axis=1)))


def _fall(cells: dict[str, Data]) -> str:
    """The sentence about the cell whose N tr Sigma falls with N."""
    travel = {one: math.prod(map(float, one.split("-"))) for one in cells}
    name = min(cells, key=lambda one: travel[one])
    (lr, h), cell = name.split("-"), cells[name]
    exact, expansion = np.array(cell["rows"])[:, 1], cell["expansion"]
    shares = ", ".join(
        f"{np.mean(np.array(one['rows'])[:, 1] / one['limit']):.2f} of it at gamma H = "
        f"{travel[key]:g} (gamma = {key.split('-')[0]})"
        for key, one in cells.items()
        if key != name
    )
    return (
        f"At gamma = {lr}, H = {h} the speed-up of independent clients is better than linear: the "
        "exact covariance is N tr Sigma = (gamma / 2) tr mean(A_c)^-1 up to O(gamma L) and "
        "O((gamma H L)^2), and by convexity of the inverse E tr mean(A_c)^-1 falls with N towards "
        f"tr (E A)^-1: {expansion[0]:.3g} to {expansion[-1]:.3g} by the formula, {exact[0]:.3g} to "
        f"{exact[-1]:.3g} exactly. For H without bound it is gamma^2 mean_c tr sum_h "
        "(I - gamma A_c)^2h, whose expectation does not depend on N. In the mean over N the exact "
        f"one is {shares}."
    )


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    made = []
    for name, cell in data["cells"].items():
        lr, h = name.split("-")
        where = f", gamma = {lr}, H = {h}"
        n, mse, error, exact = np.array(cell["rows"]).T
        slope = float(np.polyfit(np.log(n), np.log(mse), 1)[0])
        made += [
            between(
                "slope of log MSE against log N, replicated" + where, -1.0, slope, -1.05, -0.95
            ),
            at_most(
                "N MSE simulated against exact, largest deviation in standard errors" + where,
                0.0,
                float(np.max(np.abs(mse - exact) / error)),
                3.0,
            ),
            at_most(
                "exact N MSE is the same for every N: largest relative difference" + where,
                0.0,
                float(np.ptp(n * exact) / (n * exact).mean()),
                1e-6,
                note="F12: replication divides the covariance by the number of copies, whatever H",
            ),
        ]
    made += [_flat(name, cell["rows"], settings) for name, cell in data["independent"].items()]
    return made + [
        _explained(name, cell)
        for name, cell in data["independent"].items()
        if math.prod(map(float, name.split("-"))) <= SMALL
    ]


def _explained(name: str, cell: Data) -> Check:
    lr, h = name.split("-")
    exact, expansion = np.array(cell["rows"])[:, 1], np.array(cell["expansion"])
    fall = "N tr Sigma falls by {:.0%} from N = {:.0f} to {:.0f}, and the formula by {:.0%}"
    ends = cell["rows"][0][0], cell["rows"][-1][0]
    return at_most(
        "N tr Sigma for independent clients is (gamma / 2) tr of the inverse of the mean Hessian: "
        f"largest relative deviation, gamma = {lr}, H = {h}",
        0.0,
        float(np.abs(exact / expansion - 1).max()),
        0.1,
        note=fall.format(1 - exact[-1] / exact[0], *ends, 1 - expansion[-1] / expansion[0]),
    )


def _flat(name: str, rows: list[list[float]], settings: Settings) -> Check:
    lr, h = name.split("-")
    scaled = np.array(rows)[:, 1]
    words = "N tr Sigma for independent clients, largest relative deviation from its mean over N"
    note = f"mean over {settings['draws']} draws of the clients"
    if float(lr) * float(h) <= SMALL:
        note += (
            "; with gamma H this small N tr Sigma is (gamma / 2) tr mean(A_c)^-1, and the mean of "
            "more Hessians is better conditioned, so it falls faster than 1/N"
        )
    off = float(np.abs(scaled / scaled.mean() - 1).max())
    return at_most(f"{words}, gamma = {lr}, H = {h}", 0.0, off, 0.15, note=note)


def tables(data: Data) -> list[Table]:
    """N MSE by N."""
    made = []
    for name, cell in data["cells"].items():
        rows = [
            [int(n), n * mse, n * error, n * exact, mse / exact]
            for n, mse, error, exact in cell["rows"]
        ]
        lr, h = name.split("-")
        head = ["N", "N MSE, simulated", "standard error", "exact", "simulated / exact"]
        made.append(Table(f"Replicated clients, gamma = {lr}, H = {h}", head, rows))
    rows = [
        [float(lr), int(h), *(f"{value:.3g} ± {error:.2g}" for _, value, error in cell["rows"])]
        for name, cell in data["independent"].items()
        for lr, h in [name.split("-")]
    ]
    rows += [
        [float(lr), f"{h}, formula", *(f"{value:.3g}" for value in cell["expansion"])]
        for name, cell in data["independent"].items()
        for lr, h in [name.split("-")]
        if float(lr) * float(h) <= SMALL
    ]
    clients = [f"N = {int(row[0])}" for row in next(iter(data["independent"].values()))["rows"]]
    made.append(
        Table(
            "Independent clients: N tr Sigma per unit of noise",
            ["gamma", "H", *clients],
            rows,
            "Formula: (gamma / 2) tr mean(A_c)^-1, up to O(gamma L) and O((gamma H L)^2).",
        )
    )
    return made


def draw(data: Data) -> list[Drawing]:
    """MSE against N: replicated, independent."""
    figure, (one, two) = plotting.canvas(2)
    for (name, cell), colour, marker in zip(
        data["cells"].items(), ("#0072b2", "#d55e00"), "os", strict=False
    ):
        lr, h = name.split("-")
        n, mse, error, exact = np.array(cell["rows"]).T
        one.errorbar(
            n,
            mse,
            3 * error,
            color=colour,
            marker=marker,
            linestyle="none",
            markersize=4,
            capsize=2,
        )
        one.loglog(n, exact, color=colour, linewidth=1, label=rf"$\gamma={lr}$, $H={h}$")
    for i, (name, cell) in enumerate(data["independent"].items()):
        lr, h = name.split("-")
        n, scaled, error = np.array(cell["rows"]).T
        look: dict[str, Any] = {
            "color": COLOURS[i % 5],
            "marker": "os^vD"[i % 5],
            "capsize": 2,
            "markersize": 4,
            "linewidth": 1,
        }
        two.errorbar(
            n * 1.03**i,
            scaled / scaled.mean(),
            2 * error / scaled.mean(),
            label=rf"$\gamma={lr}$, $H={h}$",
            **look,
        )
    two.axhspan(0.85, 1.15, color=plotting.GREY, alpha=0.12, linewidth=0)
    two.set_xscale("log")
    two.set(
        ylim=(0.6, 1.75),
        xlabel="clients $N$",
        ylabel=r"$N\,\mathrm{tr}\,\Sigma^\theta$ over its mean",
    )
    one.set(
        xlabel="clients $N$", ylabel=r"$E\|\theta-\theta^\star\|^2$", title="replicated clients"
    )
    two.set_title("independent clients")
    for panel, ticks in (
        (one, n_ticks(data)),
        (two, np.array(next(iter(data["independent"].values()))["rows"])[:, 0]),
    ):
        panel.set_xticks(ticks, [f"{int(t)}" for t in ticks])
        panel.minorticks_off()
    one.legend(loc="lower left")
    two.legend(loc="upper right")
    caption = (
        "Left: stationary error of five clients copied (points: simulated, three standard errors; "
        "lines: exact). "
        "Right: clients drawn independently, N times the variance over its mean, with the band "
        "asked for."
    )
    return [Drawing("quadratics-fig5", caption, figure)]


def n_ticks(data: Data) -> np.ndarray:
    """The numbers of clients of the replicated runs."""
    return np.array(next(iter(data["cells"].values()))["rows"])[:, 0]


CLAIM = Claim(
    "quadratics-fig5",
    "Linear speed-up",
    "000 Figure 5",
    "The stationary error falls as 1/N, shown with five clients replicated 1 to 10 times.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    lambda data: [
        "000.11: replicated clients give an exact 1/N for any correct implementation, at any H and "
        "any heterogeneity "
        "(F12, to 1e-6 above), so the figure supports no conjecture. Independent clients are run "
        "beside them."
    ],
)

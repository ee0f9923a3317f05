"""004 Figures 1 and 2: client drift, and the corrected update; moving on the page."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import fedavg, scaffold, sgd
from fedscaffold.problems import quadratic
from fedscaffold.theory import bias
from papers import plotting
from papers.by_hand import play, quadratic_gradients
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_least, at_most, holds
from papers.film import film

__all__ = ["CLAIM"]

Floats = NDArray[Any]
SETTINGS: Settings = {"lr": 0.2, "steps": 8, "rounds": 8, "start": [0.6, -1.4]}
HESSIANS = np.array([[[1.6, 0.0], [0.0, 0.25]], [[0.3, 0.1], [0.1, 1.2]]])
MINIMA = np.array([[-1.1, 1.3], [1.5, 0.2]])


def measure(settings: Settings, memo: Memo) -> Data:
    """Every local step of some rounds, also once the control variates have settled."""
    linear = np.einsum("cij,cj->ci", HESSIANS, MINIMA)
    gradients = quadratic_gradients(HESSIANS, linear)
    problem = quadratic(hessians=HESSIANS, linear=linear)
    optimum, lr, steps = problem.optimum(), settings["lr"], settings["steps"]
    start = np.array(settings["start"])
    films, ends = {}, {}
    for one in (fedavg(), scaffold()):
        rounds = list(play(one, gradients, start, lr=lr, local_steps=steps, rounds=400))
        films[one.name] = {
            "paths": np.array([r.paths for r in rounds[: settings["rounds"]]]),
            "x": np.array([start, *(r.x for r in rounds[: settings["rounds"]])]),
        }
        ends[one.name] = rounds[-1].x
    ideal = [gradient(optimum) for gradient in gradients]
    mean = np.mean([gradient(start) for gradient in gradients], axis=0)
    known = [gradient(start) - mean for gradient in gradients]
    (drifted,) = play(fedavg(), gradients, start, lr=lr, local_steps=steps, rounds=1)
    (corrected,) = play(scaffold(), gradients, start, lr=lr, local_steps=steps, rounds=1, c_i=known)
    (resting,) = play(scaffold(), gradients, optimum, lr=lr, local_steps=steps, rounds=1, c_i=ideal)
    (leaving,) = play(fedavg(), gradients, optimum, lr=lr, local_steps=steps, rounds=1)
    straight = list(play(sgd(), gradients, start, lr=lr, local_steps=1, rounds=steps))
    return {
        "films": films,
        "ends": ends,
        "optimum": optimum,
        "minima": MINIMA,
        "start": start,
        "drifted": np.array(drifted.paths),
        "drifted_x": drifted.x,
        "corrected": np.array(corrected.paths),
        "corrected_x": corrected.x,
        "ideal": np.array([start, *(r.x for r in straight)]),
        "resting": float(np.linalg.norm(resting.x - optimum)),
        "leaving": float(np.linalg.norm(leaving.x - optimum)),
        "bias": float(np.linalg.norm(bias(problem, lr=lr, local_steps=steps, algorithm=fedavg()))),
    }


def judge(data: Data, settings: Settings) -> list[Check]:
    """The figure's statements, as numbers."""
    ideal = data["ideal"][-1]
    apart = {
        name: float(np.linalg.norm(data[f"{name}_x"] - ideal)) for name in ("drifted", "corrected")
    }
    spread = {name: float(np.linalg.norm(data[name][0, -1] - data[name][1, -1])) for name in apart}
    off = {name: float(np.linalg.norm(x - data["optimum"])) for name, x in data["ends"].items()}
    middle = data["minima"].mean(axis=0)
    nearer = np.linalg.norm(data["ends"]["fedavg"] - middle) < np.linalg.norm(
        data["optimum"] - middle
    )
    return [
        holds(
            "client drift: FedAvg's limit is pulled from the optimum towards the mean of the "
            "clients' optima",
            "pulled away",
            off["fedavg"],
            "above 0.01, and nearer to that mean than the optimum is",
            off["fedavg"] > 0.01 and bool(nearer),
        ),
        at_most(
            "FedAvg's limit, driven by hand, against the closed form",
            0.0,
            abs(off["fedavg"] - data["bias"]),
            1e-9,
        ),
        at_most("SCAFFOLD's limit against the optimum", 0.0, off["scaffold"], 1e-9),
        at_least(
            "FedAvg leaves the optimum when started there: distance after one round",
            "leaves",
            data["leaving"],
            1e-2,
        ),
        at_most("SCAFFOLD with settled control variates stays there", 0.0, data["resting"], 1e-12),
        at_most(
            "a round's distance from the ideal one (steps along the mean gradient), corrected over "
            "drifted",
            "smaller",
            apart["corrected"] / apart["drifted"],
            0.5,
        ),
        at_most(
            "how far apart the two clients end, corrected over drifted",
            "closer",
            spread["corrected"] / spread["drifted"],
            0.75,
        ),
    ]


def tables(data: Data) -> list[Table]:
    """Where the methods end."""
    rows = [
        [plotting.METHODS[name].label, *map(float, x), float(np.linalg.norm(x - data["optimum"]))]
        for name, x in data["ends"].items()
    ]
    return [Table("After 400 rounds", ["method", "x_1", "x_2", "distance from the optimum"], rows)]


def _contours(panel: Any) -> None:
    grid = np.meshgrid(np.linspace(-2, 2, 120), np.linspace(-1.8, 2.2, 120))
    points = np.stack(grid, axis=-1)
    for hessian, minimum, colour in zip(HESSIANS, MINIMA, ("#009e73", "#b07d00"), strict=True):
        away = points - minimum
        values = 0.5 * np.einsum("xyi,ij,xyj->xy", away, hessian, away)
        panel.contour(
            *grid, values, levels=[0.05, 0.25, 0.7, 1.4], colors=colour, linewidths=0.5, alpha=0.6
        )


def draw(data: Data) -> list[Drawing]:
    """One round of each, from the same point."""
    figure, panels = plotting.canvas(2, wide=0.95, high=1.4)
    titles = ("FedAvg: the clients drift", "SCAFFOLD: the corrected update")
    for panel, name, title in zip(panels, ("drifted", "corrected"), titles, strict=True):
        _contours(panel)
        for path, colour, label in zip(
            data[name], ("#009e73", "#b07d00"), ("client 1", "client 2"), strict=True
        ):
            panel.plot(
                path[:, 0],
                path[:, 1],
                color=colour,
                marker=".",
                markersize=4,
                linewidth=1.2,
                label=label,
            )
        ideal = data["ideal"]
        panel.plot(
            ideal[:, 0],
            ideal[:, 1],
            color="black",
            linestyle=":",
            linewidth=1.2,
            label="ideal, along the mean gradient",
        )
        panel.annotate(
            "",
            xy=data[f"{name}_x"],
            xytext=data["start"],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#d55e00",
                "linewidth": 1.6,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        panel.plot([], [], color="#d55e00", linewidth=1.6, label="the server's step")
        panel.plot(
            *data["optimum"],
            marker="*",
            color="black",
            markersize=10,
            linestyle="none",
            label=r"$x^\star$",
        )
        panel.plot(
            data["minima"][:, 0],
            data["minima"][:, 1],
            "k+",
            markersize=7,
            linestyle="none",
            label=r"$x_1^\star,x_2^\star$",
        )
        panel.set(title=title, xlabel="$x_1$", ylabel="$x_2$", xlim=(-2, 2), ylim=(-1.8, 2.2))
        panel.set_aspect("equal")
        panel.grid(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    caption = (
        "One round of eight local steps from the same point. Left: each client runs to its own "
        "optimum, and their mean "
        "misses where steps along the mean gradient lead (dotted). Right: with c_i = grad f_i(x) "
        "the clients stay "
        "together."
    )
    return [Drawing("drift-fig1", caption, figure)]


CLAIM = Claim(
    "drift-fig1",
    "Client drift, and the corrected update",
    "004 Figures 1 and 2",
    "FedAvg's clients drift to their own optima, so the server moves off the true optimum; "
    "SCAFFOLD's correction "
    "cancels that.",
    {"quick": SETTINGS, "full": SETTINGS},
    measure,
    judge,
    tables,
    draw,
    film=film,
)

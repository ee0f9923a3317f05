"""Where SCAFFOLD loses to FedAvg: a search, with both methods tuned alike.

Quadratics are drawn at random, from nearly equal clients to very unlike ones and from hardly any
noise to much, with cohorts of 1 of 10 clients to all of them. Both methods have the same rounds,
local steps and grid of step sizes, and the step size of each is that with the least expected loss
after the rounds it is judged on, which is exact here (`theory.mean_squared_error`). On digits it is
the least mean over the seeds. A ratio is

    E f(x) - f(x*) of SCAFFOLD over that of FedAvg, each at its best step size

With sampled clients and gradients g_i of variance sigma^2, G^2 = sum |g_i - g|^2 / (N - 1), one
round at the optimum moves x by a random vector of variance

    (K lr)^2 / S [sigma^2 / K + (1 - S/N) G^2]             FedAvg
    (K lr)^2 / S [sigma^2 / K + (1 - S/N) sigma^2 / K]     SCAFFOLD, c_i one round's mean each

so control variates add variance where sigma^2 / K > G^2 and S < N, and none where S = N: then the
corrections sum to zero. Steps of Adam are not linear in the gradient, and no longer cancel.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import optax

from fedscaffold import algorithms, data, problems
from fedscaffold.problems import Problem
from fedscaffold.simulation import simulate, sweep
from fedscaffold.theory import heterogeneity, mean_squared_error
from papers import plotting, real_federations
from papers.cache import digest
from papers.claim import Check, Claim, Data, Drawing, Memo, Part, Settings, Table
from papers.criteria import at_least, at_most, holds

__all__ = ["CLAIM", "noise_share"]

METHODS = ("fedavg", "scaffold")
LOST = 1.05  # ratio from which SCAFFOLD has lost
VECTORS = 1.5  # sent by SCAFFOLD for each of FedAvg's: x and c down, one move up
SAME = {"clients": 10, "dim": 2, "mu": 0.1, "halvings": 10, "cohorts": [1, 3, 10]}
PICTURES = {
    "similarities": [0, 100],
    "clients": 20,
    "cohort": 2,
    "rounds": 30,
    "steps": 5,
    "batch": 2,
    "l2": 1e-3,
    "lrs": [0.03, 0.1, 0.3, 1.0],
    "seeds": [0, 1, 2, 3],
}
ADAM = {
    "similarities": [0, 100],
    "lrs": [0.003, 0.01],
    "rounds": 40,
    "hidden": 20,
    "steps": 20,
    "batch": 10,
    "clients": 20,
}
# (cohort, local work): few small batches, more and larger ones, a pass over the records
WORK = [
    {"local_steps": 2, "batch_size": 2},
    {"local_steps": 10, "batch_size": 10},
    {"local_epochs": 1, "batch_size": 10},
]
REAL = {
    "federations": {
        name: {"clients": n, "ways": [*([some, way] for way in WORK), [n, WORK[0]]]}
        for name, n, some in (("heart", 4, 1), ("emnist", 20, 2), ("femnist", 80, 4))
    },
    "lrs": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
    "rounds": [5, 20, 60],
    "every": 5,
    "seeds": list(range(8)),
}
SIZES: dict[str, Settings] = {
    "quick": SAME | {
        "draws": 36,
        "rounds": [3, 10, 30, 100],
        "pictures": PICTURES,
        "adam": ADAM | {"seeds": [0, 1, 2, 3]},
        "real": REAL,
    },
    "full": SAME | {"draws": 400, "rounds": [3, 10, 30, 100, 300], "pictures": PICTURES | {
        "similarities": [0, 3, 10, 30, 100],
        "seeds": list(range(16)),
    }, "adam": ADAM | {
        "similarities": [0, 10, 100],
        "lrs": [0.001, 0.003, 0.01, 0.03],
        "seeds": [0, 1, 2],
    }, "real": REAL | {"rounds": [5, 20, 60, 200], "seeds": list(range(16))}},
}  # fmt: skip


def measure(settings: Settings, memo: Memo) -> Data:
    """All quadratics, digits, networks with Adam, then the real federations that are there."""
    parts = [
        Part(f"quadratic-{i}", partial(_quadratic, i, settings)) for i in range(settings["draws"])
    ]
    pictures, adam = settings["pictures"], settings["adam"]
    parts += [
        Part(f"digits-{similarity}", partial(_pictures, "digits", similarity, pictures), size=20.0)
        for similarity in pictures["similarities"]
    ]
    parts += [
        Part(f"adam-{similarity}", partial(_adam, similarity, adam), size=20.0)
        for similarity in adam["similarities"]
    ]
    parts += real_federations.list_parts(settings["real"])
    found = iter(memo.all(parts))
    quadratics = [next(found) for _ in range(settings["draws"])]
    return {
        "cells": [cell for one in quadratics for cell in one["cells"]],
        "pictures": [next(found) for _ in pictures["similarities"]],
        "adam": [next(found) for _ in adam["similarities"]],
        "clients": settings["clients"],
        "real": [cell for part in found for cell in part["cells"]],
    }


def adapted(settings: Settings) -> Settings:
    """The settings with those of the real federations whose data are there."""
    real = settings["real"]
    there = {
        name: one
        for name, one in real["federations"].items()
        if real_federations.fingerprint(name, one["clients"])
    }
    return dict(settings) | {"real": real | {"federations": there}}


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    real = settings["real"]["federations"].items()
    return digest([real_federations.fingerprint(name, one["clients"]) for name, one in real])


def _quadratic(number: int, settings: Settings) -> Data:
    """One random problem: a cell for every number of rounds."""
    rng = np.random.default_rng([7, number])
    n, d, mu = settings["clients"], settings["dim"], settings["mu"]
    cohort, steps = int(rng.choice(settings["cohorts"])), int(rng.choice([2, 5, 10, 30]))
    apart, noise = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in ((0.01, 10), (1e-3, 10)))
    tilt = float(rng.choice([0.0, 0.3, 1.0])) * mu
    problem = problems.dialled(
        n, d, gradient_dissimilarity=apart, hessian_dissimilarity=tilt, mu=mu, seed=number
    )
    about = {
        "cohort": cohort,
        "steps": steps,
        "apart": apart,
        "tilt": tilt,
        "noise": noise,
        "noise_share": noise_share(noise, steps, apart, n),
    }
    longest = math.ceil(VECTORS * max(settings["rounds"]))
    grid = (2.0 ** -np.arange(settings["halvings"])).tolist()
    curves = {
        name: np.array(
            [
                mean_squared_error(
                    problem,
                    lr=lr,
                    local_steps=steps,
                    noise=noise / d,
                    rounds=longest,
                    algorithm=algorithms.make(name),
                    cohort=cohort,
                    gap=True,
                )
                for lr in grid
            ]
        ).min(axis=0)
        for name in METHODS
    }
    cells = []
    for rounds in settings["rounds"]:
        own, other = (float(curves[name][rounds]) for name in ("scaffold", "fedavg"))
        as_many_bytes = float(curves["fedavg"][int(VECTORS * rounds)])
        cells.append(
            about
            | {
                "rounds": rounds,
                "visits": rounds * cohort / n,
                "scaffold": own,
                "fedavg": other,
                "ratio": own / other,
                "ratio_bytes": own / as_many_bytes,
            }
        )
    return {"cells": cells}


def noise_share(noise: float, steps: int, apart: float, clients: int) -> float:
    """sigma^2 / (K G^2), above 1 where control variates are noisier than clients are unlike.

    `apart` is the root mean square over clients of |g_i - g|.

    >>> noise_share(4.0, 2, 1.0, 4)
    1.5
    """
    return noise / (steps * apart**2) * (clients - 1) / clients


def _pictures(name: str, similarity: int, settings: Settings) -> Data:
    """Softmax regression, few clients a round: the gap of either method at its best step size."""
    federated = data.federate(
        data.load(name), f"similarity:{similarity}", settings["clients"], seed=0
    )
    problem = problems.softmax(federated.clients, classes=federated.classes, l2=settings["l2"])
    found = heterogeneity(problem, batch_size=settings["batch"])
    best = problem.layout.unflatten(found.x)
    least = float(problem.functions.loss(best, problem.records))  # clients have as many records
    gaps = {}
    for method in METHODS:
        runs = sweep(
            algorithms.make(method),
            problem,
            lr=settings["lrs"],
            seeds=settings["seeds"],
            rounds=settings["rounds"],
            local_steps=settings["steps"],
            batch_size=settings["batch"],
            cohort=settings["cohort"],
            metrics=["loss"],
            progress=False,
        ).runs
        ends = [[float(run.history["loss"][-1]) for run in row] for row in runs]
        gaps[method] = float(np.nanmin(np.mean(ends, axis=1))) - least
    share = noise_share(found.noise, settings["steps"], found.zeta_1, settings["clients"])
    visits = settings["rounds"] * settings["cohort"] / settings["clients"]
    return {"name": name, "similarity": similarity, "noise_share": share, "visits": visits, **gaps}


def _adam(similarity: int, settings: Settings) -> Data:
    """A network on digits with Adam, all clients in every round: the least final loss of either."""
    federated = data.federate(
        data.load("digits"), f"similarity:{similarity}", settings["clients"], seed=0
    )
    network = problems.mlp(federated.clients, classes=10, hidden=settings["hidden"])
    losses = {
        name: [_final_loss(network, name, lr, settings) for lr in settings["lrs"]]
        for name in METHODS
    }
    return {"similarity": similarity, "lrs": settings["lrs"], **losses}


def _final_loss(network: Problem, name: str, lr: float, settings: Settings) -> float:
    """The loss over the training records after the last round, mean over seeds."""
    runs = [
        simulate(
            algorithms.make(name),
            network,
            rounds=settings["rounds"],
            local_steps=settings["steps"],
            batch_size=settings["batch"],
            local_optimizer=optax.adam(lr),
            metrics=["loss"],
            evaluate_every=settings["rounds"],
            seed=seed,
            progress=False,
        )
        for seed in settings["seeds"]
    ]
    return float(np.mean([run.history["loss"][-1] for run in runs]))


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    cells = data["cells"]
    some = [c for c in cells if c["cohort"] < data["clients"]]
    noisy = [c for c in some if c["noise_share"] > 1]
    clear = [c for c in some if c["noise_share"] < 0.2 and c["visits"] >= 3]
    rare = [c for c in some if c["visits"] < 1]
    everyone = [c for c in cells if c["cohort"] == data["clients"]]
    worst = max(c["ratio"] for c in noisy)
    adam = {one["similarity"]: _adam_ratio(one) for one in data["adam"]}
    digits = {one["similarity"]: one for one in data["pictures"]}
    return [
        at_least(
            "sampled clients, sigma^2 / K above G^2: share of cells in which SCAFFOLD is behind",
            1.0,
            float(np.mean([c["ratio"] > 1 for c in noisy])),
            0.95,
            note=f"{len(noisy)} cells; SCAFFOLD's error over FedAvg's is at most {worst:.2f}",
        ),
        at_most(
            "sampled clients, sigma^2 / K below G^2 / 5, three visits and more: the same share",
            0.0,
            float(np.mean([c["ratio"] > 1 for c in clear])),
            0.05,
            note=f"{len(clear)} cells",
        ),
        at_least(
            "clients heard less than once on average: least ratio, so the most SCAFFOLD gains",
            1.0,
            min(c["ratio"] for c in rare),
            0.7,
            note=f"{len(rare)} cells, of which it loses {sum(c['ratio'] > 1 for c in rare)}",
        ),
        at_most(
            f"all clients in every round: share of cells with a ratio above {LOST}",
            0.0,
            float(np.mean([c["ratio"] > LOST for c in everyone])),
            0.1,
            note=f"{len(everyone)} cells, whatever the noise",
        ),
        at_least(
            "a network with Adam, clients alike, all in every round: ratio of the final losses",
            "above 1",
            adam[100],
            1.0,
        ),
        at_most("the same, clients unlike", "below 1", adam[0], 1.0),
        holds(
            "digits, 2 of 20 clients a round: alike clients lose, unlike ones gain",
            "above 1, below 1",
            f"{_digits_ratio(digits[100]):.3g}, {_digits_ratio(digits[0]):.3g}",
            "on either side of 1, as sigma^2 / (K G^2) is",
            all((_digits_ratio(digits[s]) > 1) == (digits[s]["noise_share"] > 1) for s in (0, 100)),
            note=", ".join(
                f"{s} %: sigma^2 / (K G^2) = {digits[s]['noise_share']:.2g}" for s in (0, 100)
            ),
        ),
        *real_federations.judge(data["real"]),
    ]


def _adam_ratio(one: Data) -> float:
    return float(np.min(one["scaffold"]) / np.min(one["fedavg"]))


def _digits_ratio(one: Data) -> float:
    return float(one["scaffold"] / one["fedavg"])


EDGES = (0.0, 0.2, 1.0, 5.0, math.inf)  # of sigma^2 / (K G^2)


def tables(data: Data) -> list[Table]:
    """Ratios by noise and visits, then digits and Adam."""
    cells = [c for c in data["cells"] if c["cohort"] < data["clients"]]
    head = ["sigma^2 / (K G^2)", *(f"R S/N {words}" for words in ("below 1", "1 to 5", "above 5"))]
    rows: list[list[Any]] = []
    for low, high in pairwise(EDGES):
        band = [c for c in cells if low <= c["noise_share"] < high]
        parts = [
            [c for c in band if lo <= c["visits"] < hi]
            for lo, hi in ((0.0, 1.0), (1.0, 5.0), (5.0, math.inf))
        ]
        name = f"{low:g} to {high:g}" if math.isfinite(high) else f"above {low:g}"
        rows.append([name, *(_summary(part) for part in parts)])
    note = (
        "Median ratio of the errors, SCAFFOLD over FedAvg, both at their best step size; in "
        "brackets cells that SCAFFOLD loses, of all, and the median ratio at equal bytes."
    )
    made = [Table("Quadratics, 1 or 3 of 10 clients a round", head, rows, note)]
    made.append(
        Table(
            "Digits, softmax regression, 2 of 20 clients a round",
            ["similarity %", "sigma^2 / (K G^2)", "FedAvg", "SCAFFOLD", "ratio"],
            [
                [c["similarity"], c["noise_share"], c["fedavg"], c["scaffold"], _digits_ratio(c)]
                for c in data["pictures"]
            ],
            "Gap to the minimum at the best step size, mean over seeds.",
        )
    )
    made.append(
        Table(
            "Digits, a network with Adam at all 20 clients",
            [
                "similarity %",
                *(f"{m}, lr {lr:g}" for m in METHODS for lr in data["adam"][0]["lrs"]),
            ],
            [[c["similarity"], *c["fedavg"], *c["scaffold"]] for c in data["adam"]],
            "Final loss over the training records.",
        )
    )
    return made + real_federations.tables(data["real"])


def _summary(part: list[Data]) -> str:
    if not part:
        return "-"
    middle, equal = (float(np.median([c[key] for c in part])) for key in ("ratio", "ratio_bytes"))
    return f"{middle:.2f} ({sum(c['ratio'] > 1 for c in part)} of {len(part)}; {equal:.2f})"


def draw(data: Data) -> list[Drawing]:
    """The ratio against the noise of control variates."""
    figure, (panel,) = plotting.canvas(1)
    for cohort, marker in zip(sorted({c["cohort"] for c in data["cells"]}), "o^s", strict=False):
        own = [c for c in data["cells"] if c["cohort"] == cohort]
        panel.loglog(
            [c["noise_share"] for c in own],
            [c["ratio"] for c in own],
            marker,
            markersize=3,
            alpha=0.6,
            label=f"$S = {cohort}$ of {data['clients']}",
        )
    for line in (panel.axhline, panel.axvline):
        line(1.0, color=plotting.GREY, linewidth=0.8)
    panel.set(xlabel=r"$\sigma^2 / (K G^2)$", ylabel="error, SCAFFOLD over FedAvg")
    panel.legend(loc="lower right")
    caption = (
        "Expected error of SCAFFOLD over FedAvg's, both at their best step size, on random "
        "quadratics. Right of the line control variates are noisier than clients are unlike."
    )
    return [Drawing("where-it-loses", caption, figure)]


CLAIM = Claim(
    "where-it-loses",
    "Where SCAFFOLD should not be used",
    "a search of ours",
    "With sampled clients SCAFFOLD is behind FedAvg where the noise of a client's mean gradient, "
    "sigma^2 / K, exceeds the clients' difference, G^2, and gains little while clients are heard "
    "less than once.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
    adapt=adapted,
)

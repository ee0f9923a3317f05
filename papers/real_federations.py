"""SCAFFOLD beside FedAvg on real federations, and whether what `diagnose` says of them is right.

Heart disease (four hospitals), EMNIST (2,350 pictures, 20 clients with few labels each) and FEMNIST
(80 writers), each with its own clients and with the same records dealt at random among clients of
the same sizes; softmax or logistic regression, pictures averaged over squares to 7 x 7 inputs.
Cohorts, local steps and batches are varied. Both methods have the same grid of step sizes, and each
the one with the least mean training loss over the seeds after the rounds that are judged. A ratio
is

    f(x) - f(x*) of SCAFFOLD over that of FedAvg, means over the seeds

with a standard error by leaving out one seed at a time. `diagnose` is asked about SCAFFOLD's run of
so many rounds, at its last model: these are its functions, but over all clients, where it takes
those that have been heard.

What it says is judged by rules that were set before any result was seen:

    regime      "FedAvg is ahead": right if the ratio is above 1
    visits      "SCAFFOLD gains little": right if the ratio is at least 0.7
    (silent)    right if the ratio is at most 1.05

A ratio within two standard errors of the limit decides nothing. The criterion is that nine tenths
of the decided cells are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import algorithms, data, problems
from fedscaffold.diagnose.regime import (
    check_noise_of_controls,
    check_visits,
    noise_of_means,
    noise_over_difference,
)
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import simulate, sweep
from fedscaffold.theory.derivatives import client_gradients, find_optimum
from papers import femnist_writers, flamby_heart
from papers.cache import digest
from papers.claim import Check, Data, Part, Settings, Table
from papers.criteria import at_least

__all__ = ["federation", "fingerprint", "judge", "list_parts", "tables", "verdict"]

Array = NDArray[Any]
METHODS = ("fedavg", "scaffold")
L2 = 1e-3
LIMITS = {"regime": 1.0, "visits": 0.7, "": 1.05}  # of the ratio, by what is said


def federation(name: str, kind: str, clients: int) -> Problem:
    """Return a federation; `kind` "dealt" deals the records at random."""
    held = READ[name](clients)
    if kind == "dealt":
        x, y = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
        order = np.random.default_rng(0).permutation(len(y))
        ends = np.cumsum([len(own) for _, own in held])[:-1]
        held = [(x[some], y[some]) for some in np.split(order, ends)]
    if name == "heart":
        return problems.logistic(held, l2=L2)
    classes = 1 + max(int(y.max()) for _, y in held)
    return problems.softmax(held, classes=classes, l2=L2)


def _heart(clients: int) -> list[tuple[Array, Array]]:
    whole = flamby_heart.federation(flamby_heart.hospitals())
    x, y = whole.records
    ends = whole.offsets[1:-1]
    return list(zip(np.split(np.asarray(x), ends), np.split(np.asarray(y), ends), strict=True))


def _emnist(clients: int) -> list[tuple[Array, Array]]:
    found = data.load("emnist47-tiny")
    some = np.random.default_rng(0).permutation(len(found.y))[: len(found.y) // 2]
    x, x_test = _squares(found.x[some], 28), _squares(found.x_test, 28)
    found = found._replace(x=x, y=found.y[some], x_test=x_test)
    held = data.federate(found, "similarity:0", clients, seed=0).clients
    return [(np.asarray(x), np.asarray(y)) for x, y in held]


def _writers(clients: int) -> list[tuple[Array, Array]]:
    held, _ = femnist_writers.pictures(clients)
    return [(_squares(x, 14), y) for x, y in held]


def _squares(x: Array, side: int) -> Array:
    """Average flat pictures over squares, to 7 x 7."""
    wide = side // 7
    small: Array = x.reshape(-1, 7, wide, 7, wide).mean(axis=(2, 4)).reshape(-1, 49)
    return small


READ: dict[str, Callable[[int], list[tuple[Array, Array]]]] = {
    "heart": _heart,
    "emnist": _emnist,
    "femnist": _writers,
}


@cache
def fingerprint(name: str, clients: int) -> str:
    """Return a fingerprint of a federation's records; "" where they are not there."""
    try:
        held = READ[name](clients)
    except FileNotFoundError:
        return ""
    return digest(*(array for client in held[:: max(1, len(held) // 10)] for array in client))


def list_parts(settings: Settings) -> list[Part]:
    """Every federation in every way: each part has a cell for each number of rounds."""
    parts = []
    for name, one in settings["federations"].items():
        for kind in ("own", "dealt"):
            problem = cache(partial(_with_least_loss, name, kind, one["clients"]))
            for cohort, way in one["ways"]:
                about = {"name": name, "kind": kind, "cohort": cohort} | way
                key = "-".join(f"{value}" for value in about.values())
                label = "epochs" if "local_epochs" in way else "steps"
                make = partial(_cells, problem, about, way, settings)
                parts.append(Part(f"{key}-{label}", make, size=5.0))
    return parts


def _cells(problem: Any, about: Data, way: Data, settings: Settings) -> Data:
    (made, least), lrs = problem(), settings["lrs"]
    run = {"cohort": about["cohort"], "metrics": ["loss"], "progress": False, **way}
    run["evaluate_every"] = settings["every"]
    most, seeds = max(settings["rounds"]), settings["seeds"]
    gaps = {}
    for name in METHODS:
        algorithm = algorithms.make(name)
        runs = sweep(algorithm, made, lr=lrs, seeds=seeds, rounds=most, **run).runs
        losses = [[_losses(one.history["loss"], most) for one in row] for row in runs]
        gaps[name] = np.array(losses) - least
    cells = []
    for rounds in settings["rounds"]:
        best = {name: int(np.argmin(gaps[name][:, :, rounds - 1].mean(axis=1))) for name in METHODS}
        ends = {name: gaps[name][best[name], :, rounds - 1] for name in METHODS}
        ratio, error = _ratio(ends["scaffold"], ends["fedavg"])
        chosen = {f"{name}_lr": lrs[best[name]] for name in METHODS}
        said = _said(made, lrs[best["scaffold"]], rounds, run, seeds[0])
        more = {"rounds": rounds, "clients": made.num_clients, "ratio": ratio, "error": error}
        means = {name: float(one.mean()) for name, one in ends.items()}
        cells.append(about | more | chosen | said | means)
    return {"cells": cells}


def _with_least_loss(name: str, kind: str, clients: int) -> tuple[Problem, float]:
    made = federation(name, kind, clients)
    return made, least_loss(made)


def least_loss(problem: Problem) -> float:
    """Return f(x*), the mean over clients of their mean losses."""
    best = problem.layout.unflatten(find_optimum(problem))
    of_record: Any = jax.vmap(
        lambda one: problem.functions.loss(best, jax.tree.map(lambda a: a[None], one))
    )
    found: Array = np.asarray(of_record(problem.records), np.float64)
    return float(np.mean(np.add.reduceat(found, problem.offsets[:-1]) / problem.counts))


def _losses(history: Array, rounds: int) -> Array:
    """Losses by round; infinite after a run has diverged."""
    found = np.full(rounds, np.inf)
    found[: len(history)] = np.where(np.isnan(history.astype(float)), np.inf, history)
    return found


def _ratio(own: Array, other: Array) -> tuple[float, float]:
    """Return the ratio of two means over seeds, and its standard error by the jackknife.

    >>> _ratio(np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    (2.0, 0.0)
    """
    n = len(own)
    without = (own.sum() - own) / (other.sum() - other)
    error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return float(own.mean() / other.mean()), float(error)


def _said(problem: Problem, lr: float, rounds: int, run: Data, seed: int) -> Data:
    """What `diagnose` says of SCAFFOLD's run, and sigma^2 / (K G^2) at its last model."""
    algorithm = algorithms.make("scaffold")
    config = RunConfig(algorithm, problem, lr=lr, rounds=rounds, seed=seed, **run)
    x = simulate(algorithm, problem, lr=lr, rounds=rounds, seed=seed, **run).vector
    everyone = np.arange(problem.num_clients)
    noise, gradients = noise_of_means(config, problem, everyone, x), client_gradients(problem, x)
    share = noise_over_difference(np.full(len(noise), 1 / len(noise)), noise, gradients)
    heard = run["cohort"] / problem.num_clients
    regime = check_noise_of_controls(share, heard, linear=True)
    visits = check_visits(rounds, heard)
    said = next((one.about for one in (regime, visits) if one is not None), "")
    return {"said": said, "noise_share": share, "visits": rounds * heard}


def verdict(cell: Data) -> str:
    """Whether what was said is right, wrong, or not decided by the seeds.

    >>> [verdict({"said": "regime", "ratio": r, "error": 0.1}) for r in (1.5, 1.1, 0.7)]
    ['right', 'open', 'wrong']
    >>> [verdict({"said": "", "ratio": r, "error": 0.1}) for r in (0.5, 1.1, 1.5)]
    ['right', 'open', 'wrong']
    """
    off = cell["ratio"] - LIMITS[cell["said"]]
    if abs(off) <= 2 * cell["error"]:
        return "open"
    return "right" if (off > 0) == bool(cell["said"]) else "wrong"


def judge(cells: Sequence[Data]) -> list[Check]:
    """The checks of these cells."""
    if not cells:
        return []
    made = []
    for some, words in (
        (cells, "real federations: share of the decided cells in which diagnose is right"),
        ([c for c in cells if c["said"] == "regime"], "the same, where it says that FedAvg leads"),
    ):
        found = [verdict(cell) for cell in some]
        decided = [one for one in found if one != "open"]
        if decided:
            right = decided.count("right")
            note = f"{right} of {len(decided)}; {found.count('open')} more are not decided"
            made.append(at_least(words, 1.0, right / len(decided), 0.9, note=note))
    return made


def tables(cells: Sequence[Data]) -> list[Table]:
    """What was said and what came out, by federation, clients and cohort."""
    if not cells:
        return []
    rows: list[list[Any]] = []
    for cell in cells:
        unit = "local_epochs" if "local_epochs" in cell else "local_steps"
        work = f"{cell[unit]} {unit.removeprefix('local_')} of {cell['batch_size']}"
        rows.append(
            [
                f"{cell['name']}, {cell['kind']}",
                f"{cell['cohort']} of {cell['clients']}",
                work,
                cell["rounds"],
                cell["noise_share"],
                cell["said"] or "-",
                f"{cell['ratio']:.2f} ± {cell['error']:.2f}",
                verdict(cell),
            ]
        )
    head = ["federation", "clients a round", "local work", "rounds", "sigma^2 / (K G^2)"]
    note = "Ratio: gap of SCAFFOLD over FedAvg's, each at its best step size; standard errors."
    more = ["diagnose says", "ratio", "and is"]
    return [Table("Real federations: what diagnose says, what came out", head + more, rows, note)]

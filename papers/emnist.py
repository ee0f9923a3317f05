"""How the cells of 004's Tables 3 to 5 are measured.

Pictures divided by similarity, tuned step sizes, seeds.

A cell is a method, a number of epochs, a similarity and a cohort. Its step size is tuned on records
held out of the
training set, never on the test set: of a grid, the one that reaches the target first within a
budget of rounds, or else has the highest accuracy over the second half of them; without a target,
the one with the best accuracy of any round, which is what such a cell is judged by. Then every seed
is run on the test set until it reaches the target. All step sizes of a cell are one part, as it is
enough that one of them arrives, and so are its seeds; without a target every run is a part.

EMNIST is read from the folder that FEDSCAFFOLD_DATA names; where it is not there, scikit-learn's
digits stand in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from fedscaffold import algorithms, data, problems
from fedscaffold.data import Dataset
from fedscaffold.data.splits import holdout
from fedscaffold.problems import Problem
from fedscaffold.simulation import Run, sweep
from papers.cache import digest
from papers.claim import Data, Memo, Part, Settings

__all__ = ["Pictures", "adapted", "fingerprint", "measure", "median", "pictures"]

PREFERRED = ("emnist", "emnist47", "emnist47-tiny")
TUNING_SEED = 1000  # not one of the seeds that count


class Pictures(NamedTuple):
    """A data set with some training records held out for tuning."""

    train: Dataset
    validation: tuple[Any, Any]
    key: str
    about: str


@cache
def pictures(wanted: str, validation: int, records: int | None, test: int | None) -> Pictures:
    """The data: `wanted` "emnist" takes the best copy there is, or digits.

    `records` and `test` cut them down.
    """
    found = _load(wanted)
    rng = np.random.default_rng(0)
    if records is not None and records < len(found.y):
        some = np.sort(rng.permutation(len(found.y))[:records])
        found = found._replace(x=found.x[some], y=found.y[some])
    if test is not None and test < len(found.y_test):
        some = np.sort(rng.permutation(len(found.y_test))[:test])
        found = found._replace(x_test=found.x_test[some], y_test=found.y_test[some])
    kept, held = holdout(found.y, min(validation, len(found.y) // 4), seed=0)
    about = (
        f"{found.name}: {len(kept):,} records for training, {len(held):,} held out of them to tune "
        "the step sizes, "
        f"{len(found.y_test):,} for the test, {found.classes} classes."
    )
    if wanted == "emnist" and found.name not in PREFERRED:
        about += (
            " EMNIST was not found (set FEDSCAFFOLD_DATA to its folder): digits stand in for it."
        )
    if wanted == "digits":
        about += (
            " EMNIST was not found (set FEDSCAFFOLD_DATA to its folder): the quick size runs on "
            "digits instead."
        )
    key = digest(
        found.name,
        found.y,
        found.y_test,
        found.x[:: max(1, len(found.x) // 500)],
        found.x_test[::50],
    )
    held_out = found.x[held], found.y[held]
    return Pictures(
        found._replace(x=found.x[kept], y=found.y[kept], groups=None), held_out, key, about
    )


def _load(wanted: str) -> Dataset:
    if wanted != "emnist":
        return data.load(wanted)
    for name in PREFERRED:
        try:
            return data.load(name)
        except FileNotFoundError:
            continue
    return data.load("digits")


def adapted(settings: Settings) -> Settings:
    """The settings for digits, or with what `with_emnist` changes where EMNIST is there."""
    small = {key: value for key, value in settings.items() if key != "with_emnist"}
    real = small | settings.get("with_emnist", {})
    return (
        real if real["dataset"] == "emnist" and _pictures(real).train.name in PREFERRED else small
    )


def fingerprint(settings: Settings) -> str:
    """Of the data that the settings lead to."""
    return _pictures(settings).key


def _pictures(settings: Settings) -> Pictures:
    return pictures(
        settings["dataset"], settings["validation"], settings.get("records"), settings.get("test")
    )


class Cell(NamedTuple):
    """A method, its epochs, the similarity of the clients, and the cohort."""

    similarity: int
    method: str
    epochs: int
    cohort: float | int
    lr: float | None
    """The step size; None if it is tuned."""

    def key(self, data: str, part: str) -> str:
        """Name of a part of it."""
        method = self.method if self.lr is None else f"{self.method}-{self.lr}"
        return f"{data[:8]}-{self.similarity}-{method}-{self.epochs}-{self.cohort}-{part}"

    def grid(self, settings: Settings) -> list[float]:
        """Step sizes to try."""
        grid = settings["sgd_grid"] if self.method == "sgd" else settings["grid"]
        return list(grid) if self.lr is None else []


def measure(settings: Settings, memo: Memo) -> Data:
    """All cells, in the order of the table's rows.

    Then those of `fixed`, whose step size is given and not tuned.
    """
    held = _pictures(settings)
    cells: list[Cell] = []
    for similarity in settings["similarities"]:
        cohorts = settings["cohorts"]
        rows = [(row[0], row[1], k) for row in settings["rows"] for k in cohorts]
        cells += [Cell(similarity, name, epochs, k, None) for name, epochs, k in rows]
        given = settings.get("fixed", ())
        cells += [Cell(similarity, row[0], row[1], cohorts[0], row[2]) for row in given]
    # only made where a part is not kept yet
    both = {s: cache(partial(_problems, held, s, settings)) for s in settings["similarities"]}
    parts = {cell: _parts(cell, both[cell.similarity], held.key, settings, memo) for cell in cells}
    listed = [part for some in parts.values() for part in some]
    found = dict(zip((part.key for part in listed), memo.all(listed), strict=True))
    made = [_gathered(cell, [found[p.key] for p in parts[cell]], settings) for cell in cells]
    facts = {"dataset": held.train.name, "target": settings["target"], "rounds": settings["rounds"]}
    return {
        "cells": [told for cell, told in zip(cells, made, strict=True) if cell.lr is None],
        "fixed": [told for cell, told in zip(cells, made, strict=True) if cell.lr is not None],
        "about": [held.about],
        **facts,
    }


def _parts(cell: Cell, both: Any, data_key: str, settings: Settings, memo: Memo) -> list[Part]:
    """The parts of a cell: its step sizes, then its seeds, each told the scores of the former."""
    grid, seeds, once = cell.grid(settings), list(settings["seeds"]), settings["at_once"]
    groups = [seeds[i : i + once] for i in range(0, len(seeds), once)]
    tried, rounds = [[lr] for lr in grid], settings["rounds"]
    work, name = cell.cohort * cell.epochs, partial(cell.key, data_key)
    if settings["target"] is not None:
        tried = [grid] if grid else []
    first = [
        Part(
            name("tuned" if some == grid else f"tuned-{some[0]:g}"),
            partial(_tried, both, cell, some, settings),
            work * len(some) * _tuning_rounds(cell.epochs, settings),
        )
        for some in tried
    ]
    keys = [part.key for part in first]
    kept = partial(_kept, memo, name)
    if settings["target"] is not None:
        make = partial(_to_target, both, cell, groups, settings, kept)
        return [*first, Part(name("seeds"), make, work * rounds * len(seeds), keys)]
    return first + [
        Part(
            name(f"seeds-{some[0]}-{some[-1]}"),
            partial(_seeds, both, cell, some, settings),
            work * rounds * len(some),
            keys,
        )
        for some in groups
    ]


def _kept(memo: Memo, name: Any, part: str, make: Any) -> Data:
    return memo(name(part), make)


def _gathered(cell: Cell, found: list[Data], settings: Settings) -> Data:
    """What is told of a cell, from the results of its parts."""
    tuned = [one for one in found if "scores" in one]
    lr, edge, scores = _chosen(cell, tuned)
    about = {"method": cell.method, "epochs": cell.epochs, "similarity": cell.similarity}
    runs = [run for one in found[len(tuned) :] for run in one["runs"]]
    told = {"lr": lr, "edge": edge, "tuning": scores, "runs": runs}
    return about | {"cohort": cell.cohort, "seeds": len(settings["seeds"])} | told


def _chosen(cell: Cell, tuned: Sequence[Data]) -> tuple[float, bool, list[list[float]]]:
    """The step size, whether it is the first or last that was tried, and the scores of all."""
    if cell.lr is not None:
        return cell.lr, False, []
    scores = [score for one in tuned for score in one["scores"]]
    best = min(range(len(scores)), key=lambda j: scores[j][1:])
    return scores[best][0], best in (0, len(scores) - 1), scores


def _tuning_rounds(epochs: int, settings: Settings) -> int:
    return int(
        np.clip(settings["tune_work"] / epochs, settings["tune_least"], settings["tune_most"])
    )


def _problems(held: Pictures, similarity: int, settings: Settings) -> tuple[Problem, Problem]:
    """The federation with the held-out records as its test set, and with the real one."""
    split = data.federate(held.train, f"similarity:{similarity}", settings["clients"], seed=0)
    model = (
        partial(problems.mlp, hidden=settings["hidden"])
        if settings.get("hidden")
        else problems.softmax
    )
    made = [
        model(split.clients, classes=split.classes, test=test)
        for test in (held.validation, split.test)
    ]
    return made[0], made[1]


def _to_target(
    both: Any, cell: Cell, groups: list[list[int]], settings: Settings, kept: Any, *tuned: Data
) -> Data:
    """Run the seeds, until one more could not change the median of the rounds to the target."""
    runs: list[Data] = []
    for some in groups:
        make = partial(_seeds, both, cell, some, settings, *tuned)
        runs += kept(f"seeds-{some[0]}-{some[-1]}", make)["runs"]
        missed = sum(run["reached"] is None for run in runs)
        if 2 * missed > len(settings["seeds"]):
            break
    return {"runs": runs}


def _swept(problem: Problem, cell: Cell, settings: Settings, **more: Any) -> list[list[Run]]:
    return sweep(
        algorithms.make(cell.method),
        problem,
        local_epochs=cell.epochs,
        batch_size=settings["batch"],
        cohort=cell.cohort,
        stop_at=None if settings["target"] is None else ("accuracy", settings["target"]),
        metrics=["accuracy"],
        evaluate_every=settings.get("evaluate_every", 1),
        progress=False,
        **more,
    ).runs


def _tried(both: Any, cell: Cell, lrs: list[float], settings: Settings) -> Data:
    """The scores of step sizes, by held-out records only."""
    to_target = settings["target"] is not None
    # with a target, the first to arrive is the best: no need to go on
    for part in (8, 3, 1) if to_target else (1,):
        rounds = max(1, _tuning_rounds(cell.epochs, settings) // part)
        found = _swept(both()[0], cell, settings, lr=lrs, seeds=[TUNING_SEED], rounds=rounds)
        if any(runs[0].reached_at for runs in found):
            break
    scores = [_score(runs[0], to_target) for runs in found]
    return {"scores": [[lr, *score] for lr, score in zip(lrs, scores, strict=True)]}


def _score(run: Run, to_target: bool) -> tuple[float, float]:
    """Rounds to the target, or 1e9, then the accuracy missing: in the second half, or at best."""
    accuracy = run.history["accuracy"].astype(float)
    accuracy = accuracy[np.isfinite(accuracy)]
    if run.diverged_at is not None or not len(accuracy):
        return 1e9, 1.0
    kept = accuracy[len(accuracy) // 2 :].mean() if to_target else accuracy.max()
    return float(run.reached_at or 1e9), 1 - float(kept)


def _seeds(both: Any, cell: Cell, seeds: list[int], settings: Settings, *tuned: Data) -> Data:
    lr, rounds = _chosen(cell, tuned)[0], settings["rounds"]
    (runs,) = _swept(both()[1], cell, settings, lr=[lr], seeds=seeds, rounds=rounds)
    return {"runs": [_told(run) for run in runs]}


def _told(run: Run) -> Data:
    accuracy = run.history["accuracy"].astype(float)
    measured = np.flatnonzero(np.isfinite(accuracy))
    thin = measured[:: max(1, len(measured) // 200)]
    best = float(accuracy[measured].max()) if len(measured) else math.nan
    return {
        "reached": run.reached_at,
        "best": best,
        "rounds": run.rounds,
        "at": thin + 1,
        "accuracy": accuracy[thin],
    }


def median(cell: Data) -> float:
    """Median over seeds of the rounds to the target; infinite if most seeds did not reach it."""
    found = [math.inf if run["reached"] is None else float(run["reached"]) for run in cell["runs"]]
    found += [math.inf] * (
        cell["seeds"] - len(found)
    )  # seeds that could not have changed the median were not run
    return float(np.median(found))

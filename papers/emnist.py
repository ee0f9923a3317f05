"""How the cells of 004's Tables 3 to 5 are measured.

Pictures divided by similarity, tuned step sizes, seeds.

A cell is a method, a number of epochs, a similarity and a cohort. Its step size is tuned on records
held out of the
training set, never on the test set: of a grid, the one that reaches the target first within a
budget of rounds, or else has the highest accuracy over the second half of them; without a target,
the one with the best accuracy of any round, which is what such a cell is judged by. All step sizes
are one compiled program. Then every seed is run on the test set until it reaches the target. A cell
is kept as soon as it is done.

EMNIST is read from the folder that FEDSCAFFOLD_DATA names; where it is not there, scikit-learn's
digits stand in.
"""

from __future__ import annotations

import math
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


def measure(settings: Settings, memo: Memo) -> Data:
    """All cells, in the order of the table's rows.

    Then those of `fixed`, whose step size is given and not tuned.
    """
    held = _pictures(settings)
    asked: list[tuple[Data, float | None]] = []
    parts: list[Part] = []
    for similarity in settings["similarities"]:
        # only made where a cell is not kept yet
        both = cache(partial(_problems, held, similarity, settings))
        tuned = [(*row, cohort, None) for row in settings["rows"] for cohort in settings["cohorts"]]
        given = [(*row[:2], settings["cohorts"][0], row[2]) for row in settings.get("fixed", ())]
        for name, epochs, cohort, lr in [*tuned, *given]:
            about = {"method": name, "epochs": epochs, "similarity": similarity, "cohort": cohort}
            asked.append((about, lr))
            kept = partial(_within, memo, held.key, similarity, name, epochs, lr)
            make = partial(_cell, both, name, epochs, cohort, settings, kept, lr)
            size = cohort * epochs * _rounds(name, epochs, lr is None, settings)
            parts.append(
                Part(_key(held.key, similarity, name, epochs, lr, str(cohort)), make, size)
            )
    made = [(about | cell, lr) for (about, lr), cell in zip(asked, memo.all(parts), strict=True)]
    cells = [cell for cell, lr in made if lr is None]
    fixed = [cell for cell, lr in made if lr is not None]
    facts = {"dataset": held.train.name, "target": settings["target"], "rounds": settings["rounds"]}
    return {"cells": cells, "fixed": fixed, "about": [held.about], **facts}


def _within(
    memo: Memo,
    data_key: str,
    similarity: int,
    name: str,
    epochs: int,
    lr: float | None,
    part: str,
    make: Any,
) -> Data:
    return memo(_key(data_key, similarity, name, epochs, lr, part), make)


def _key(
    data_key: str, similarity: int, name: str, epochs: int, lr: float | None, part: str
) -> str:
    method = name if lr is None else f"{name}-{lr}"
    return f"{data_key[:8]}-{similarity}-{method}-{epochs}-{part}"


def _rounds(name: str, epochs: int, tuned: bool, settings: Settings) -> int:
    """The most rounds of a cell, over step sizes and seeds."""
    grid = settings["sgd_grid"] if name == "sgd" else settings["grid"]
    tuning = len(grid) * _tuning_rounds(epochs, settings) if tuned else 0
    return tuning + len(settings["seeds"]) * int(settings["rounds"])


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


def _cell(
    both: Any,
    name: str,
    epochs: int,
    cohort: float | int,
    settings: Settings,
    memo: Any,
    lr: float | None = None,
) -> Data:
    """Tune, then run every seed.

    A seed more changes no median once most of them have not reached the target.
    """
    tuned: Data = {"lr": lr, "edge": False, "scores": []}
    if lr is None:
        tuned = memo(f"{cohort}-tuned", lambda: tune(both()[0], name, epochs, cohort, settings))
    seeds, at_once, runs = list(settings["seeds"]), settings["at_once"], []
    for i in range(0, len(seeds), at_once):
        some = seeds[i : i + at_once]
        make = partial(_seeds, both, name, epochs, cohort, tuned["lr"], some, settings)
        part = memo(f"{cohort}-seeds-{some[0]}-{some[-1]}", make)
        runs += part["runs"]
        missed = sum(run["reached"] is None for run in runs)
        if settings["target"] is not None and 2 * missed > len(seeds):
            break
    return {
        "lr": tuned["lr"],
        "edge": tuned["edge"],
        "tuning": tuned["scores"],
        "runs": runs,
        "seeds": len(seeds),
    }


def _swept(
    problem: Problem, name: str, epochs: int, cohort: Any, settings: Settings, **more: Any
) -> list[list[Run]]:
    algorithm = algorithms.make(name)
    every = settings.get("evaluate_every", 1)
    return sweep(
        algorithm,
        problem,
        local_epochs=epochs,
        batch_size=settings["batch"],
        cohort=cohort,
        stop_at=None if settings["target"] is None else ("accuracy", settings["target"]),
        metrics=["accuracy"],
        evaluate_every=every,
        progress=False,
        **more,
    ).runs


def tune(problem: Problem, name: str, epochs: int, cohort: Any, settings: Settings) -> Data:
    """The step size of a cell, by held-out records only."""
    grid = list(settings["sgd_grid"] if name == "sgd" else settings["grid"])
    # with a target, the first to arrive is the best: no need to go on
    for part in (8, 3, 1) if settings["target"] is not None else (1,):
        budget = max(1, _tuning_rounds(epochs, settings) // part)
        found = _swept(
            problem, name, epochs, cohort, settings, lr=grid, seeds=[TUNING_SEED], rounds=budget
        )
        if any(runs[0].reached_at for runs in found):
            break
    to_target = settings["target"] is not None
    scores = [_score(runs[0], to_target) for runs in found]
    best = min(range(len(grid)), key=lambda j: scores[j])
    listed = [[lr, *score] for lr, score in zip(grid, scores, strict=True)]
    return {"lr": grid[best], "edge": best in (0, len(grid) - 1), "scores": listed}


def _score(run: Run, to_target: bool) -> tuple[float, float]:
    """Rounds to the target, or 1e9, then the accuracy missing: in the second half, or at best."""
    accuracy = run.history["accuracy"].astype(float)
    accuracy = accuracy[np.isfinite(accuracy)]
    if run.diverged_at is not None or not len(accuracy):
        return 1e9, 1.0
    kept = accuracy[len(accuracy) // 2 :].mean() if to_target else accuracy.max()
    return float(run.reached_at or 1e9), 1 - float(kept)


def _seeds(
    both: Any, name: str, epochs: int, cohort: Any, lr: float, seeds: list[int], settings: Settings
) -> Data:
    (runs,) = _swept(
        both()[1], name, epochs, cohort, settings, lr=[lr], seeds=seeds, rounds=settings["rounds"]
    )
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

"""The kinds of runs in a comparison, their cells, and the best step size of each.

A kind is an algorithm with its configuration. A comparison is a grid: kinds, which are the rows of
its table, times seeds, times step sizes if these are tuned. Tuning uses the training loss only:
from `GRID`, it selects the step size with the lowest loss averaged over rounds and seeds; a run
that diverged or failed counts as infinite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedscaffold import algorithms
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments.build_problem import Built, build, refuse_unused_keys
from fedscaffold.experiments.config_file import Config, run_arguments, with_keys
from fedscaffold.grids import Cell, GridRun
from fedscaffold.run_config import RunConfig

__all__ = ["GRID", "Kind", "best_runs", "cells_of", "kinds_of", "make_algorithm", "step_sizes"]

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
ELSEWHERE = {"seed": "--seeds", "algorithm.name": "--algorithms"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs that differ in their seeds and, where tuned, in their step sizes.

    Attributes:
        name: The algorithm's name.
        varied: The other keys that distinguish it, with their values.
        config: Its configuration.
        built: Its problem.
    """

    name: str
    varied: dict[str, Any]
    config: Config
    built: Built

    @property
    def label(self) -> str:
        """Its name in tables and pages."""
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.varied.items())])

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return make_algorithm(self.config, self.name)


def make_algorithm(config: Config, name: str) -> Algorithm:
    """Make an algorithm; configured parameters apply only to the algorithm named with them."""
    return algorithms.make(
        name, **(config.algorithm.parameters if name == config.algorithm.name else {})
    )


def step_sizes(config: Config) -> Sequence[float]:
    """Return the step sizes to try."""
    return GRID if config.local.lr == "tuned" else (config.local.lr,)


def kinds_of(
    config: Config, built: Built, names: Sequence[str], over: Mapping[str, Sequence[Any]]
) -> list[Kind]:
    """Return all combinations of algorithms and values of other keys.

    Args:
        config: The configuration that all share.
        built: The problem built for it.
        names: The algorithms.
        over: Values of other keys, by dotted key.

    >>> config = Config(problem={"dataset": "quadratic"})
    >>> kinds = kinds_of(config, build(config.problem), ["sgd"], {"local.steps": [1, 5]})
    >>> [kind.label for kind in kinds]
    ['sgd, local.steps 1', 'sgd, local.steps 5']
    """
    _refuse_keys(names, over)
    problems = {config.problem: built}
    kinds = []
    for name, values in itertools.product(names, itertools.product(*over.values())):
        varied = dict(zip(over, values, strict=True))
        of_algorithm = any(key.startswith("algorithm.") for key in varied)
        own = with_keys(config, varied | ({"algorithm.name": name} if of_algorithm else {}))
        if varied:
            refuse_unused_keys(own, [f"{key}=" for key in varied])
        if own.problem not in problems:
            problems[own.problem] = build(own.problem)
        kinds.append(Kind(name=name, varied=varied, config=own, built=problems[own.problem]))
    return kinds


def _refuse_keys(names: Sequence[str], over: Mapping[str, Sequence[Any]]) -> None:
    for key in over:
        if key in ELSEWHERE or key.startswith("output."):
            told = f"give {ELSEWHERE[key]}" if key in ELSEWHERE else "all runs share a folder"
            raise InputError(f"--over does not take {key}: {told}")
        if key.startswith("algorithm.") and len(names) != 1:
            raise InputError(
                f"--over {key} is for one algorithm, got {', '.join(names)}: compare them apart"
            )


def cells_of(kind: Kind, seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of a kind: seeds and, the fastest, step sizes."""
    config, cells = kind.config, []
    program = kind.label
    for seed, lr in itertools.product(seeds, step_sizes(config)):
        local = config.local.model_copy(update={"lr": lr})
        alone = config.model_copy(update={"seed": seed, "local": local})
        given = run_arguments(alone, without=("every", "client_state"))
        if config.metrics is not None and config.local.lr == "tuned":
            given["metrics"] = sorted({*config.metrics, "loss"})
        run = RunConfig(kind.algorithm, kind.built.problem, progress=False, **given)
        labels = {"algorithm": kind.name} | kind.varied | {"lr": lr, "seed": seed}
        cells.append(Cell(labels=labels, config=run, program=program))
    return cells


def best_runs(runs: Sequence[GridRun], number: int) -> tuple[int, list[GridRun]]:
    """Return the place of the best step size, and its runs.

    Args:
        runs: The runs of `cells_of`.
        number: Number of step sizes.
    """
    columns = [list(runs[j::number]) for j in range(number)]
    best = 0 if number == 1 else int(np.argmin([_score(column) for column in columns]))
    return best, columns[best]


def _score(runs: Sequence[GridRun]) -> float:
    if any(run.error is not None or run.diverged_at is not None for run in runs):
        return math.inf
    return float(np.mean([np.nanmean(run.history["loss"]) for run in runs]))

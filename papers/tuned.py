"""Methods tuned alike: the same number of trials each, chosen without the test set.

A method has twelve trials. With one parameter, its local step, it tries twelve step sizes; with a
second one it tries every third of these with each of three values. A trial is run once per fold:
trained without the fold's records, and scored on these in the last round. The best mean score over
the folds is chosen, the first trial of equal ones. Then the method is run from several seeds on all
training records and scored on the test set, which nothing before has read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import optax
from numpy.typing import NDArray

from fedscaffold import algorithms
from fedscaffold.problems import Problem
from fedscaffold.simulation import Run, simulate
from papers import plotting
from papers.claim import Data, Memo, Part

__all__ = [
    "METHODS",
    "Method",
    "Task",
    "arguments",
    "bars",
    "mean_error",
    "parts",
    "quarters",
    "rows",
    "run_orders",
    "run_seeds",
    "trials",
]

TUNING_SEED = 1000  # not one of the seeds that count
TRIALS = 12
SMALL = 1000  # parameters up to which models are kept


class Method(NamedTuple):
    """A method and its second parameter."""

    label: str
    algorithm: str
    second: str = ""
    """Name of the parameter beside the local step; "" for none."""
    values: tuple[float, ...] = ()
    server: str = ""
    """The server's optimiser, whose step size is the second parameter; "" for none."""


METHODS = {
    "fedavg": Method("FedAvg", "fedavg"),
    "fedprox": Method("FedProx", "fedprox", "mu", (0.01, 0.1, 1.0)),
    "fedavgm": Method("FedAvgM", "fedavg", "server_lr", (0.1, 0.3, 1.0), "momentum"),
    "fedadam": Method("FedAdam", "fedavg", "server_lr", (0.01, 0.1, 1.0), "adam"),
    "feddyn": Method("FedDyn", "feddyn", "alpha", (0.01, 0.1, 1.0)),
    "fedexp": Method("FedExP", "fedexp", "eps", (0.001, 0.01, 0.1)),
    "scaffold": Method("SCAFFOLD", "scaffold"),
    "scaffold-m": Method("SCAFFOLD-M", "scaffold-m", "beta", (0.1, 0.3, 0.6)),
    "scaffold-adam": Method("SCAFFOLD, Adam", "scaffold", "server_lr", (0.01, 0.1, 1.0), "adam"),
    "scaffnew": Method("Scaffnew", "scaffnew"),
}


class Task(NamedTuple):
    """What is learned: the federation without each fold, and whole."""

    folds: Callable[[], Sequence[Problem]]
    """Federations without a fold's records, which are their test sets; all of one shape, so that
    they share compiled programs."""
    whole: Callable[[], Problem]
    run: Mapping[str, Any]
    """Arguments of all runs."""
    start: Callable[[int], Any]
    """(seed) -> initial model."""


def trials(name: str, lrs: Sequence[float]) -> list[dict[str, float]]:
    """Return the trials of a method.

    >>> grid = [0.001 * 2**k for k in range(12)]
    >>> len(trials("scaffold", grid)), len(trials("fedadam", grid))
    (12, 12)
    >>> trials("fedprox", grid)[-1]
    {'lr': 1.024, 'mu': 1.0}
    """
    method = METHODS[name]
    if not method.second:
        return [{"lr": lr} for lr in lrs]
    return [{"lr": lr, method.second: value} for lr in lrs[1::3] for value in method.values]


def arguments(name: str, trial: Mapping[str, float]) -> dict[str, Any]:
    """Return the arguments of `simulate` of a trial."""
    method, given = METHODS[name], dict(trial)
    found: dict[str, Any] = {"lr": given.pop("lr")}
    if method.server:
        found["server_optimizer"] = _server(method.server, given.pop("server_lr"))
    return found | {"algorithm": algorithms.make(method.algorithm, **given)}


@cache  # the same object for the same settings: runs with it share a compiled program
def _server(kind: str, lr: float) -> optax.GradientTransformation:
    return optax.adam(lr) if kind == "adam" else optax.sgd(lr, momentum=0.9)


def parts(
    tasks: Mapping[str, Task],
    lrs: Sequence[float],
    seeds: Sequence[int],
    memo: Memo,
    label: str = "tuned",
) -> list[Part]:
    """Return the parts of a measurement that tunes every method and runs it from all seeds.

    `tasks` are by method, and so are the parts; `label` tells apart those of several calls. A
    method is kept as soon as it is done.
    """
    if len(lrs) != TRIALS:
        raise ValueError(f"the grid must have {TRIALS} step sizes, got {len(lrs)}")
    return [
        Part(f"{label}-{name}", partial(_method, name, task, lrs, seeds, memo, label))
        for name, task in tasks.items()
    ]


def _method(
    name: str, task: Task, lrs: Sequence[float], seeds: Sequence[int], memo: Memo, label: str
) -> Data:
    tuned = memo(f"{label}-{name}-trials", lambda: _tune(name, task, lrs))
    return tuned | run_seeds(name, tuned["trial"], task, seeds)


def run_seeds(name: str, trial: Mapping[str, float], task: Task, seeds: Sequence[int]) -> Data:
    """Run a trial on all training records from every seed, and score it on the test set."""
    whole = task.whole()
    runs = [_run(name, trial, task, whole, seed, 1, seed) for seed in seeds]
    made: Data = {
        "scores": [_last(run) for run in runs],
        "curves": np.stack([run.history["accuracy"] for run in runs]),
        "bytes": runs[0].history["bytes_up"] + runs[0].history["bytes_down"],
    }
    if whole.dim <= SMALL:
        made["models"] = np.stack([run.vector for run in runs])
    return made


def run_orders(
    name: str, trial: Mapping[str, float], task: Task, seeds: Sequence[int], orders: int
) -> Data:
    """Run a trial from every seed's start with several orders of the batches.

    Returns:
        `scores`: a row per start and a column per order. The first is the order that `run_seeds`
        has for that start, and the others are those of seeds that count nowhere else.
    """
    whole = task.whole()
    others = range(TUNING_SEED, TUNING_SEED + orders - 1)
    scores = [
        [_last(_run(name, trial, task, whole, start, 1, order)) for order in (start, *others)]
        for start in seeds
    ]
    return {"scores": np.array(scores)}


def quarters(strata: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Return four disjoint sets of a quarter of the records each, rounded down.

    Each has an equal share of every stratum, but for rounding; up to three records are in none.

    >>> [len(part) for part in quarters(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1]))]
    [2, 2, 2, 2]
    """
    mixed = np.random.default_rng(0).permutation(len(strata))
    # records of a stratum are neighbours, and neighbours go to different parts
    order = mixed[np.argsort(strata[mixed], kind="stable")]
    return [np.sort(order[k::4][: len(strata) // 4]) for k in range(4)]


def _tune(name: str, task: Task, lrs: Sequence[float]) -> Data:
    tried = trials(name, lrs)
    folds = task.folds()
    scores = [
        float(
            np.mean(
                [
                    _last(_run(name, trial, task, fold, seed, task.run["rounds"], seed))
                    for seed, fold in enumerate(folds, TUNING_SEED)
                ]
            )
        )
        for trial in tried
    ]
    best = max(range(len(tried)), key=lambda j: scores[j])
    ends = {min(t["lr"] for t in tried), max(t["lr"] for t in tried)}
    return {"trial": tried[best], "tuning": scores, "edge": tried[best]["lr"] in ends}


def _run(
    name: str,
    trial: Mapping[str, float],
    task: Task,
    problem: Problem,
    start: int,
    every: int,
    order: int,
) -> Run:
    """Run a trial from the start of a seed, with the order of batches of another."""
    return simulate(
        problem=problem,
        seed=order,
        x0=task.start(start),
        metrics=["accuracy"],
        evaluate_every=every,
        progress=False,
        **arguments(name, trial),
        **task.run,
    )


def _last(run: Run) -> float:
    """The score of the last round; 0 of a run that diverged."""
    score = float(run.history["accuracy"][-1])
    return score if run.diverged_at is None and math.isfinite(score) else 0.0


def mean_error(scores: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error.

    >>> mean_error([0.0, 2.0])
    (1.0, 1.0)
    """
    return float(np.mean(scores)), float(np.std(scores, ddof=1) / math.sqrt(len(scores)))


def rows(found: Mapping[str, Data]) -> list[list[Any]]:
    """Return a row per method: score, its standard error, and the trial that was chosen."""
    made: list[list[Any]] = []
    for name, one in found.items():
        mean, error = mean_error(one["scores"])
        chosen = ", ".join(f"{key} {value:g}" for key, value in one["trial"].items())
        edge = " (end of the grid)" if one["edge"] else ""
        made.append([METHODS[name].label, mean, error, max(one["tuning"]), chosen + edge])
    return made


def bars(found: Mapping[str, Data], score: str, lines: Mapping[str, float]) -> Any:
    """Draw the methods' scores with standard errors, and `lines` across."""
    figure, (panel,) = plotting.canvas(wide=2.0)
    names = list(found)
    both = [mean_error(found[name]["scores"]) for name in names]
    panel.errorbar(
        range(len(names)), [m for m, _ in both], yerr=[e for _, e in both], fmt="o", color="#0072b2"
    )
    for label, height in lines.items():
        panel.axhline(height, color=plotting.GREY, linestyle=":", linewidth=1)
        panel.annotate(label, (len(names) - 0.5, height), fontsize=7, va="bottom", ha="right")
    panel.set_xticks(range(len(names)), [METHODS[name].label for name in names], rotation=20)
    panel.set_xlim(-0.5, len(names) - 0.5)
    panel.set_ylabel(score)
    return figure

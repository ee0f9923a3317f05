"""Run a configuration, or compare algorithms on it over seeds, with given or tuned step sizes.

Tuning looks at the training loss only: of a grid of step sizes, the one with the lowest loss averaged over rounds and
seeds (a run that diverges counts as infinite). The step sizes of an algorithm and a seed are one compiled program.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments import arguments
from fedscaffold.experiments.cells import Data, Memo, afresh, digest
from fedscaffold.experiments.config import Config, to_toml
from fedscaffold.experiments.federation import Built
from fedscaffold.experiments.limits import limit
from fedscaffold.metrics import target_of
from fedscaffold.report import Curve, Study, tables, versions, write
from fedscaffold.report.comparison import EACH, Source, comparison
from fedscaffold.simulation import Run, simulate, sweep
from fedscaffold.simulation.away import settled
from fedscaffold.simulation.engine import Seconds
from fedscaffold.simulation.evaluation import usual
from fedscaffold.simulation.follow import Follow
from fedscaffold.simulation.identity import problem_facts
from fedscaffold.simulation.setup import Request, prepare

__all__ = ["GRID", "compare", "fitting", "keep", "number_of_runs", "placed", "refuse", "refuse_comparison", "run"]

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def run(
    config: Config,
    built: Built,
    command: str,
    progress: bool | None = None,
    checkpoint: Path | None = None,
    devices: int | None = None,
    follow: Follow | None = None,
    memo: Memo = afresh,
) -> Study:
    r"""Run one configuration on the problem built for it, from its checkpoint where there is one.

    With a tuned step size it is a sweep, whose runs `memo` keeps as they end.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("rounds = 3\n[local]\nsteps = 2\n[problem]\ndataset = 'quadratic'")
    >>> run(config, build(config.problem), "fedscaffold run").curves[0].columns["round"]
    array([1, 2, 3])
    """
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    target = None if config.stop_at is None else target_of(config.stop_at)
    if config.local.lr == "tuned":
        found = _swept(config, built, algorithm, [config.seed], target, progress, memo)
        curve, seconds = _best(found)[0], found.seconds
    else:
        given = arguments.local(config.local) | arguments.shared(config)
        if checkpoint is not None:
            given |= {"checkpoint": checkpoint, "every": config.output.checkpoint_every}
        given |= {"client_state": config.client_state, "devices": devices}
        done = simulate(algorithm, built.problem, seed=config.seed, progress=progress, follow=follow, **given)
        curve, seconds = _curve(algorithm.name, config.seed, config.local.lr, _cell(done), target), done.seconds
    return _study(config, built, "Run of " + algorithm.name, [curve], command, seconds._asdict(), target)


def compare(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    command: str,
    tell: Callable[[str], None] = lambda line: None,
    memo: Memo = afresh,
) -> Study:
    r"""Run several algorithms on one problem over several seeds; rounds and bytes to the target, with spread.

    Each run is handed to `memo` as it ends, and `tell` hears how many there are and about how long the rest takes.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("rounds = 20\n[local]\nsteps = 5\n[problem]\ndataset = 'quadratic'\nmu = 0.1")
    >>> study = compare(config, build(config.problem), ["scaffold", "fedavg"], 2, "distance:0.5", "fedscaffold compare")
    >>> [row["algorithm"] for row in study.rows]
    ['scaffold', 'fedavg']
    """
    aim = None if target is None else target_of(target)
    config = _measured(config, built, aim)
    curves: list[Curve] = []
    seconds: dict[str, float] = {}
    each: dict[str, float] = {}
    limits: dict[str, dict[str, Any]] = {}
    done = Done(number_of_runs(config, names, seeds), tell)
    for name in names:
        algorithm = _named(config, name)
        found = _swept(config, built, algorithm, range(config.seed, config.seed + seeds), aim, None, memo, done)
        best = _best(found)
        curves += best
        limits[name] = limit(config, built.problem, algorithm, best[0].lr or 0.0, best)
        seconds[name] = found.seconds.compile + found.seconds.wall
        each[f"{name}{EACH}"] = found.seconds.wall / (len(found.curves) * seeds)
    title = "Comparison of " + ", ".join(names)
    study = _study(config, built, title, curves, command, seconds | each, aim)
    return study._replace(rows=[row | limits[row["algorithm"]] for row in study.rows])


def refuse(config: Config, built: Built, devices: int | None = None) -> None:
    r"""Raise what is wrong with a configuration, before anything is run or any earlier run makes way.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("cohort.size = 30\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> refuse(config, build(config.problem))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: cohort must be a whole number of at least 1 and at most 10, got 30
    """
    checks.whole("seed", config.seed, at_least=0)
    checks.whole("evaluate_every", config.evaluate_every)
    if config.local.lr == "tuned":
        _refuse_away(config)
    _tried(config, built, algorithms.make(config.algorithm.name, **config.algorithm.parameters), devices)


def refuse_comparison(config: Config, built: Built, names: Sequence[str], seeds: int, target: str | None) -> None:
    r"""Raise what is wrong with a comparison, before anything is run or an earlier one makes way.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("local.steps = 2\nproblem.dataset = 'quadratic'")
    >>> refuse_comparison(config, build(config.problem), ["fedavg"], 1, "accuracy:0.9")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: ...
    """
    checks.whole("seeds", seeds)
    checks.whole("seed", config.seed, at_least=0, at_most=2**63 - seeds)
    checks.whole("evaluate_every", config.evaluate_every)
    config = _measured(config, built, None if target is None else target_of(target))
    for name in names:
        _tried(config, built, _named(config, name))


def _measured(config: Config, built: Built, target: tuple[str, float] | None) -> Config:
    """The configuration with all metrics that a comparison looks at."""
    _refuse_away(config)
    wanted = {*(usual(built.problem) if config.metrics is None else config.metrics), *([target[0]] if target else [])}
    return config.model_copy(update={"metrics": sorted(wanted)})


def _named(config: Config, name: str) -> Algorithm:
    """An algorithm of a comparison; the parameters in the configuration are those of the algorithm named there."""
    return algorithms.make(name, **(config.algorithm.parameters if name == config.algorithm.name else {}))


def _tried(config: Config, built: Built, algorithm: Algorithm, devices: int | None = None) -> None:
    shared = {key: value for key, value in arguments.shared(config).items() if key != "evaluate_every"}
    local = {"lr": GRID[0]} if config.local.lr == "tuned" else arguments.local(config.local)
    with jax.enable_x64(config.precision == "float64"):
        request = Request(algorithm, built.problem, devices=devices, **shared, **local)
        prepare(settled(request, config.client_state))


def _refuse_away(config: Config) -> None:
    """A sweep runs all its step sizes and seeds at once, with all clients in memory."""
    if config.client_state != "array":
        raise InputError(
            f"client_state = {config.client_state!r} is for one run at a time: `fedscaffold run` with a number for "
            "local.lr; comparisons and lr = 'tuned' keep all clients in memory, client_state = 'array'"
        )


def placed(config: Config, built: Built) -> Config:
    r"""The configuration with "auto" replaced by the store it stands for, so that a longer run keeps to it.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("client_state = 'auto'\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> placed(config, build(config.problem)).client_state
    'array'
    """
    if config.client_state != "auto":
        return config
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    shared = {key: value for key, value in arguments.shared(config).items() if key != "evaluate_every"}
    kind = settled(Request(algorithm, built.problem, **shared), "auto").client_state
    return config.model_copy(update={"client_state": kind})


def fitting(config: Config, built: Built) -> tuple[list[str], dict[str, str]]:
    r"""The algorithms that go with a configuration, and the others with the reason why not.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("cohort.size = 0.5\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> sorted(fitting(config, build(config.problem))[1])
    ['scaffnew', 'scaffold-xi']
    """
    good, refused = [], {}
    for name, factory in algorithms.ALGORITHMS.items():
        try:
            _tried(config, built, factory())
            good.append(name)
        except InputError as error:
            refused[name] = str(error)
    if not good:
        raise InputError(next(iter(refused.values())))
    return good, refused


def keep(study: Study, folder: Path) -> Path:
    """Write a study's folder: its data, its table as CSV and LaTeX, and its page; returns the page's path.

    Each file is written apart and moved to its place, so that whenever this is stopped none is half there.
    """
    from fedscaffold.report import page

    new = folder / ".new"
    if new.is_symlink():
        new.unlink()  # or its target would be written to
    shutil.rmtree(new, ignore_errors=True)
    write(study, new)
    (new / "table.csv").write_text(tables.csv(study.rows), encoding="utf-8")
    (new / "table.tex").write_text(tables.latex(study.rows), encoding="utf-8")
    text = page(study) if len(study.curves) == 1 else comparison([Source(str(folder), study)])
    (new / "report.html").write_text(text, encoding="utf-8")
    for path in sorted(new.iterdir()):
        path.replace(folder / path.name)
    new.rmdir()
    return folder / "report.html"


class Swept(NamedTuple):
    """The runs of one algorithm: a row for each step size, in it a curve for each seed."""

    curves: list[list[Curve]]
    seconds: Seconds


class Done:
    """How many runs of a comparison there are, and about how long the rest takes."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self.total, self.tell, self.runs, self.seconds = total, tell, 0, 0.0

    def more(self, name: str, runs: int, seconds: float) -> None:
        """Some more runs are there; they took so long, now or earlier."""
        self.runs, self.seconds = self.runs + runs, self.seconds + seconds
        left = self.seconds / self.runs * (self.total - self.runs)
        self.tell(f"{name}: {self.runs} of {self.total} runs, about {left:.0f} s left")


def number_of_runs(config: Config, names: Sequence[str], seeds: int) -> int:
    """How many runs a comparison takes, those for tuning included.

    >>> number_of_runs(Config(), ["scaffold", "fedavg"], 3)
    6
    """
    return len(names) * len(_grid(config)) * seeds


def _grid(config: Config) -> tuple[float, ...]:
    return GRID if config.local.lr == "tuned" else (config.local.lr,)


def _swept(
    config: Config,
    built: Built,
    algorithm: Algorithm,
    seeds: Sequence[int],
    target: tuple[str, float] | None,
    progress: bool | None,
    memo: Memo,
    done: Done | None = None,
) -> Swept:
    """All step sizes and seeds of one algorithm, measured by the training loss at least.

    The step sizes of a seed are run together, as they share its draws and one compiled program, which serves all seeds.
    """
    grid = _grid(config)
    shared = arguments.shared(config)
    if config.metrics is not None and config.local.lr == "tuned":
        shared["metrics"] = sorted({*config.metrics, "loss"})
    about = digest(to_toml(config), shared["availability"], problem_facts(built.problem), versions(), algorithm.name)

    def runs_of(seed: int) -> list[Run]:
        if config.local.optimizer == "sgd":
            found = sweep(algorithm, built.problem, lr=grid, seeds=[seed], progress=progress, **shared)
            return [runs[0] for runs in found.runs]
        return [one(lr, seed) for lr in grid]

    def one(lr: float, seed: int) -> Run:
        local = arguments.local(config.local.model_copy(update={"lr": lr}))
        return simulate(algorithm, built.problem, seed=seed, progress=progress, **local, **shared)

    def kept(seed: int) -> list[Data]:
        runs = cache(lambda: runs_of(seed))  # once, if any of them is not there yet
        name = f"{algorithm.name}-{about}-seed-{seed}"
        return [memo(f"{name}-lr-{lr:g}", lambda j=j: _cell(runs()[j], len(grid))) for j, lr in enumerate(grid)]  # type: ignore[misc]

    rows: list[list[Curve]] = [[] for _ in grid]
    spent = np.zeros(3)
    for seed in seeds:
        cells = kept(seed)
        for lr, row, cell in zip(grid, rows, cells, strict=True):
            row.append(_curve(algorithm.name, seed, lr, cell, target))
        took = np.sum([cell["spent"] for cell in cells], axis=0)
        spent += took
        if done is not None:
            done.more(algorithm.name, len(cells), took[0] + took[1])
    return Swept(rows, Seconds(*spent.tolist()))


def _best(found: Swept) -> list[Curve]:
    """The runs of the step size with the lowest training loss, averaged over rounds and seeds."""
    if len(found.curves) == 1:
        return found.curves[0]

    def score(runs: list[Curve]) -> float:
        if any(run.diverged_at is not None for run in runs):
            return math.inf
        return float(np.mean([np.nanmean(run.columns["loss"]) for run in runs]))

    return found.curves[int(np.argmin([score(runs) for runs in found.curves]))]


def _cell(done: Run, together: int = 1) -> Data:
    """What is kept of a run; its share of the time where it was run together with others."""
    return {
        "columns": done.history,
        "diverged_at": done.diverged_at,
        "advice": done.advice,
        "residual": done.residual,
        "explained": done.explained,
        "digest": done.digest,
        "spent": [part / together for part in done.seconds],
    }


def _curve(name: str, seed: int, lr: float, cell: Data, target: tuple[str, float] | None) -> Curve:
    return Curve(
        name,
        seed,
        lr,
        cell["columns"],
        cell["diverged_at"],
        tables.reached(cell["columns"], target),
        cell["advice"],
        cell["residual"],
        cell["explained"],
        cell["digest"],
    )


def _study(
    config: Config,
    built: Built,
    title: str,
    curves: list[Curve],
    command: str,
    seconds: dict[str, float],
    target: tuple[str, float] | None,
) -> Study:
    return Study(
        title,
        built.sentence,
        target,
        curves,
        tables.rows(curves, target, config.rounds),
        built.label_counts,
        config.precision,
        to_toml(config),
        command,
        versions(),
        seconds,
    )

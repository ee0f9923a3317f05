"""Run a configuration, or compare algorithms on it over seeds, with given or tuned step sizes.

Tuning looks at the training loss only: of a grid of step sizes, the one with the lowest loss averaged over rounds and
seeds (a run that diverges counts as infinite). All step sizes and seeds of an algorithm are one compiled program.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments import arguments
from fedscaffold.experiments.config import Config, to_toml
from fedscaffold.experiments.federation import Built
from fedscaffold.experiments.limits import limit
from fedscaffold.metrics import target_of
from fedscaffold.report import Curve, Study, tables, versions, write
from fedscaffold.report.comparison import EACH, Source, comparison
from fedscaffold.simulation import Run, Sweep, simulate, sweep
from fedscaffold.simulation.away import settled
from fedscaffold.simulation.evaluation import usual
from fedscaffold.simulation.follow import Follow
from fedscaffold.simulation.setup import Request, prepare

__all__ = ["GRID", "compare", "fitting", "keep", "placed", "refuse", "run"]

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def run(
    config: Config,
    built: Built,
    command: str,
    progress: bool | None = None,
    checkpoint: Path | None = None,
    devices: int | None = None,
    follow: Follow | None = None,
) -> Study:
    r"""Run one configuration on the problem built for it, from its checkpoint where there is one.

    With a tuned step size it is a sweep, which has no checkpoints.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("rounds = 3\n[local]\nsteps = 2\n[problem]\ndataset = 'quadratic'")
    >>> run(config, build(config.problem), "fedscaffold run").curves[0].columns["round"]
    array([1, 2, 3])
    """
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    if config.local.lr == "tuned":
        found = _swept(config, built, algorithm, [config.seed], progress)
        done, lr = _best(found)[0], found.lr[_best_index(found)]
        seconds = found.seconds
    else:
        given = arguments.local(config.local) | arguments.shared(config)
        if checkpoint is not None:
            given |= {"checkpoint": checkpoint, "every": config.output.checkpoint_every}
        given |= {"client_state": config.client_state, "devices": devices}
        done = simulate(algorithm, built.problem, seed=config.seed, progress=progress, follow=follow, **given)
        lr, seconds = config.local.lr, done.seconds
    target = None if config.stop_at is None else target_of(config.stop_at)
    curves = [_curve(algorithm.name, config.seed, lr, done, target)]
    return _study(config, built, "Run of " + algorithm.name, curves, command, seconds._asdict(), target)


def compare(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    command: str,
    tell: Callable[[str], None] = lambda line: None,
) -> Study:
    r"""Run several algorithms on one problem over several seeds; rounds and bytes to the target, with spread.

    >>> from fedscaffold.experiments.config import parse
    >>> from fedscaffold.experiments.federation import build
    >>> config = parse("rounds = 20\n[local]\nsteps = 5\n[problem]\ndataset = 'quadratic'\nmu = 0.1")
    >>> study = compare(config, build(config.problem), ["scaffold", "fedavg"], 2, "distance:0.5", "fedscaffold compare")
    >>> [row["algorithm"] for row in study.rows]
    ['scaffold', 'fedavg']
    """
    _refuse_away(config)
    aim = None if target is None else target_of(target)
    wanted = {*(usual(built.problem) if config.metrics is None else config.metrics), *([aim[0]] if aim else [])}
    config = config.model_copy(update={"metrics": sorted(wanted)})
    curves: list[Curve] = []
    seconds: dict[str, float] = {}
    each: dict[str, float] = {}
    limits: dict[str, dict[str, Any]] = {}
    for name in names:
        own = config.algorithm.parameters if name == config.algorithm.name else {}
        algorithm = algorithms.make(name, **own)
        found = _swept(config, built, algorithm, range(config.seed, config.seed + seeds), None)
        best = _best_index(found)
        curves += [
            _curve(name, seed, found.lr[best], done, aim)
            for seed, done in zip(found.seeds, found.runs[best], strict=True)
        ]
        limits[name] = limit(config, built.problem, algorithm, found.lr[best], found.runs[best])
        seconds[name] = found.seconds.compile + found.seconds.wall
        each[f"{name}{EACH}"] = found.seconds.wall / (len(found.lr) * seeds)
        tell(f"{name}: {len(found.lr)} step sizes x {seeds} seeds, {seconds[name]:.1f} s")
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


def _swept(config: Config, built: Built, algorithm: Any, seeds: Sequence[int], progress: bool | None) -> Sweep:
    """All step sizes and seeds of one algorithm, measured by the training loss at least."""
    grid: Sequence[float] = GRID if config.local.lr == "tuned" else (config.local.lr,)
    shared = arguments.shared(config)
    if config.metrics is not None and config.local.lr == "tuned":
        shared["metrics"] = sorted({*config.metrics, "loss"})
    if config.local.optimizer == "sgd":
        return sweep(algorithm, built.problem, lr=grid, seeds=list(seeds), progress=progress, **shared)

    def one(lr: float, seed: int) -> Run:
        local = arguments.local(config.local.model_copy(update={"lr": lr}))
        return simulate(algorithm, built.problem, seed=seed, progress=progress, **local, **shared)

    runs = [[one(lr, seed) for seed in seeds] for lr in grid]
    return Sweep(tuple(grid), tuple(seeds), runs, runs[0][0].seconds)


def _best_index(found: Sweep) -> int:
    """Which step size has the lowest training loss, averaged over rounds and seeds."""
    if len(found.lr) == 1:
        return 0

    def score(runs: list[Run]) -> float:
        if any(run.diverged_at is not None for run in runs):
            return math.inf
        return float(np.mean([np.nanmean(run.history["loss"]) for run in runs]))

    return int(np.argmin([score(runs) for runs in found.runs]))


def _best(found: Sweep) -> list[Run]:
    return found.runs[_best_index(found)]


def _curve(name: str, seed: int, lr: float, done: Run, target: tuple[str, float] | None) -> Curve:
    return Curve(
        name,
        seed,
        lr,
        done.history,
        done.diverged_at,
        tables.reached(done.history, target),
        done.advice,
        done.residual,
        done.scale,
        done.digest,
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

"""Run a configuration, or compare algorithms on it over seeds, with given or tuned step sizes.

Tuning uses the training loss only: from a grid of step sizes, it selects the one with the lowest loss averaged over
rounds and seeds; a diverged run counts as infinite. The step sizes of an algorithm and a seed share one compiled
program.
"""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments.build_problem import Built
from fedscaffold.experiments.config_file import Config, to_toml
from fedscaffold.experiments.predicted_limits import compare_with_limit
from fedscaffold.experiments.run_arguments import OF_ONE_RUN, run_arguments
from fedscaffold.experiments.run_cache import Data, Memo, digest, no_cache
from fedscaffold.metrics import target_of
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import RunRecord, Study, page, sources, tables, versions
from fedscaffold.runs.run_folder import replace_study
from fedscaffold.simulation import Callback, Interrupted, Run, simulate, sweep
from fedscaffold.simulation.engine import Seconds
from fedscaffold.simulation.evaluation import default_metrics
from fedscaffold.simulation.fingerprint import problem_facts
from fedscaffold.simulation.out_of_core import resolve_client_state
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.resolve import cohort_size

__all__ = [
    "GRID",
    "compare",
    "compatible_algorithms",
    "log_facts",
    "number_of_runs",
    "resolve_store",
    "run",
    "validate_comparison",
    "validate_run",
    "write_results",
]

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def run(
    config: Config,
    built: Built,
    command: str,
    progress: bool | None = None,
    checkpoint: Path | None = None,
    devices: int | None = None,
    callbacks: Sequence[Callback] = (),
    memo: Memo = no_cache,
) -> Study:
    r"""Run one configuration, continuing from its checkpoint if there is one.

    With a tuned step size it is a sweep, whose runs are cached by `memo`.

    Args:
        config: The configuration.
        built: The problem built for it.
        command: The command line, for the record.
        progress: Whether to show a progress line; None to decide by the terminal.
        checkpoint: Folder of checkpoints, or None.
        devices: Number of devices that share the clients, or None.
        callbacks: Callbacks of the run.
        memo: Cache of the runs of a sweep.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("rounds = 3\n[local]\nsteps = 2\n[problem]\ndataset = 'quadratic'")
    >>> run(config, build(config.problem), "fedscaffold run").runs[0].columns["round"]
    array([1, 2, 3])
    """
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    target = None if config.stop_at is None else target_of(config.stop_at)
    if config.local.lr == "tuned":
        found = _sweep_algorithm(config, built, algorithm, [config.seed], target, progress, memo)
        record, seconds = _best_runs(found)[0], found.seconds
    else:
        given = run_arguments(config, without=() if checkpoint is not None else ("every",))
        given |= {"checkpoint": checkpoint, "devices": devices, "progress": progress, "callbacks": callbacks}
        done = simulate(algorithm, built.problem, **given)
        if done.outcome == "stopped" and checkpoint is not None:
            raise Interrupted(signal.SIGINT, done.rounds, checkpoint)
        record = _make_record(config, algorithm.name, config.seed, config.local.lr, _cached_fields(done), target)
        seconds = done.seconds
    record = replace(record, config=to_toml(config))  # with "tuned" as requested, not the step size found
    return _make_study(config, built, [record], command, seconds._asdict(), target)


def compare(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    command: str,
    tell: Callable[[str], None] = lambda line: None,
    memo: Memo = no_cache,
) -> Study:
    r"""Run several algorithms on one problem over several seeds; report rounds and bytes to the target, with spread.

    Args:
        config: The configuration shared by all runs.
        built: The problem built for it.
        names: The algorithms.
        seeds: Number of seeds.
        target: Metric and value to reach, such as "accuracy:0.9", or None.
        command: The command line, for the record.
        tell: Called with a progress line after each group of runs.
        memo: Cache of the runs.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("rounds = 20\n[local]\nsteps = 5\n[problem]\ndataset = 'quadratic'\nmu = 0.1")
    >>> study = compare(config, build(config.problem), ["scaffold", "fedavg"], 2, "distance:0.5", "fedscaffold compare")
    >>> [row["algorithm"] for row in study.rows]
    ['scaffold', 'fedavg']
    """
    aim = None if target is None else target_of(target)
    config = _with_metrics(config, built, aim)
    runs: list[RunRecord] = []
    seconds: dict[str, float] = {}
    limits: dict[str, dict[str, Any]] = {}
    done = ProgressTally(number_of_runs(config, names, seeds), tell)
    for name in names:
        algorithm = _make_algorithm(config, name)
        found = _sweep_algorithm(
            config, built, algorithm, range(config.seed, config.seed + seeds), aim, None, memo, done
        )
        best = _best_runs(found)
        runs += best
        limits[name] = compare_with_limit(config, built.problem, algorithm, best[0].lr or 0.0, best)
        seconds[name] = found.seconds.compile + found.seconds.wall
    study = _make_study(config, built, runs, command, seconds, aim)
    return replace(study, rows=[row | limits[row["algorithm"]] for row in study.rows])


def log_facts(config: Config, built: Built) -> dict[str, Any]:
    r"""Return the fields that describe a configuration in the log's `begin` line.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 0.2\nproblem.dataset = 'quadratic'\nproblem.clients = 15")
    >>> log_facts(config, build(config.problem))["cohort"]
    3
    """
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    size = cohort_size(RunConfig(algorithm, built.problem, cohort=config.cohort.size))
    return {
        "rounds": config.rounds,
        "clients": built.problem.num_clients,
        "cohort": size,
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "precision": config.precision,
        "target": None if config.stop_at is None else list(target_of(config.stop_at)),
        "problem": built.sentence,
        "config": hashlib.sha256(to_toml(config).encode()).hexdigest()[:16],
    }


def validate_run(config: Config, built: Built, devices: int | None = None) -> None:
    r"""Raise InputError if a configuration cannot be run, before anything is run or removed.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 30\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> validate_run(config, build(config.problem))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: cohort must be a whole number of at least 1 and at most 10, got 30
    """
    checks.whole("seed", config.seed, at_least=0)
    checks.whole("evaluate_every", config.evaluate_every)
    if config.local.lr == "tuned":
        _refuse_out_of_core(config)
    _validate(config, built, algorithms.make(config.algorithm.name, **config.algorithm.parameters), devices)


def validate_comparison(config: Config, built: Built, names: Sequence[str], seeds: int, target: str | None) -> None:
    r"""Raise InputError if a comparison cannot be run, before anything is run or removed.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("local.steps = 2\nproblem.dataset = 'quadratic'")
    >>> validate_comparison(config, build(config.problem), ["fedavg"], 1, "accuracy:0.9")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: ...
    """
    checks.whole("seeds", seeds)
    checks.whole("seed", config.seed, at_least=0, at_most=2**63 - seeds)
    checks.whole("evaluate_every", config.evaluate_every)
    config = _with_metrics(config, built, None if target is None else target_of(target))
    for name in names:
        _validate(config, built, _make_algorithm(config, name))


def _with_metrics(config: Config, built: Built, target: tuple[str, float] | None) -> Config:
    """Return the configuration with all metrics that a comparison needs."""
    _refuse_out_of_core(config)
    wanted = set(default_metrics(built.problem) if config.metrics is None else config.metrics)
    if target is not None:
        wanted.add(target[0])
    return config.model_copy(update={"metrics": sorted(wanted)})


def _make_algorithm(config: Config, name: str) -> Algorithm:
    """Make an algorithm of a comparison; configured parameters apply only to the algorithm named with them."""
    return algorithms.make(name, **(config.algorithm.parameters if name == config.algorithm.name else {}))


def _validate(config: Config, built: Built, algorithm: Algorithm, devices: int | None = None) -> None:
    given = run_arguments(config, without=("every",))
    if config.local.lr == "tuned":
        given["lr"] = GRID[0]
    with jax.enable_x64(config.precision == "float64"):
        prepare(resolve_client_state(RunConfig(algorithm, built.problem, devices=devices, **given)))


def _refuse_out_of_core(config: Config) -> None:
    """Refuse out-of-core clients: a sweep runs all step sizes together, with all clients in memory."""
    if config.client_state != "array":
        raise InputError(
            f"client_state = {config.client_state!r} is for one run at a time: `fedscaffold run` with a number for "
            "local.lr; comparisons and lr = 'tuned' keep all clients in memory, client_state = 'array'"
        )


def resolve_store(config: Config, built: Built) -> Config:
    r"""Return the configuration with client_state "auto" resolved, so that resumed runs keep the same store.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("client_state = 'auto'\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> resolve_store(config, build(config.problem)).client_state
    'array'
    """
    if config.client_state != "auto":
        return config
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    given = run_arguments(config, without=("every",))
    kind = resolve_client_state(RunConfig(algorithm, built.problem, **given)).client_state
    return config.model_copy(update={"client_state": kind})


def compatible_algorithms(config: Config, built: Built) -> tuple[list[str], dict[str, str]]:
    r"""Return the algorithms compatible with a configuration, and the reasons against the others.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 0.5\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> sorted(compatible_algorithms(config, build(config.problem))[1])
    ['scaffnew', 'scaffold-xi']
    """
    good, refused = [], {}
    for name, factory in algorithms.ALGORITHMS.items():
        try:
            _validate(config, built, factory())
            good.append(name)
        except InputError as error:
            refused[name] = str(error)
    if not good:
        raise InputError(next(iter(refused.values())))
    return good, refused


def write_results(study: Study, folder: Path) -> Path:
    """Write a study's folder with its table (CSV, LaTeX) and its page; return the page's path.

    Files are written to temporary names and moved, so that an interruption leaves no partial file.
    """
    texts = {"table.csv": tables.csv(study.rows), "table.tex": tables.latex(study.rows)}
    replace_study(study, folder, texts)
    new = folder / ".report.html.new"
    new.unlink(missing_ok=True)  # do not write through a symbolic link
    new.write_text(page(sources([folder])), encoding="utf-8")
    return new.replace(folder / "report.html")


class SweepResult(NamedTuple):
    """Runs of one algorithm: one row for each step size, with one run for each seed."""

    runs: list[list[RunRecord]]
    seconds: Seconds


class ProgressTally:
    """Count the finished runs of a comparison and estimate the remaining time."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self.total, self.tell, self.runs, self.seconds = total, tell, 0, 0.0

    def more(self, name: str, runs: int, seconds: float) -> None:
        """Add finished runs and the seconds they took, and report."""
        self.runs, self.seconds = self.runs + runs, self.seconds + seconds
        left = self.seconds / self.runs * (self.total - self.runs)
        self.tell(f"{name}: {self.runs} of {self.total} runs, about {left:.0f} s left")


def number_of_runs(config: Config, names: Sequence[str], seeds: int) -> int:
    """Return the number of runs of a comparison, including those for tuning.

    >>> number_of_runs(Config(), ["scaffold", "fedavg"], 3)
    6
    """
    return len(names) * len(_grid(config)) * seeds


def _grid(config: Config) -> tuple[float, ...]:
    return GRID if config.local.lr == "tuned" else (config.local.lr,)


def _sweep_algorithm(
    config: Config,
    built: Built,
    algorithm: Algorithm,
    seeds: Sequence[int],
    target: tuple[str, float] | None,
    progress: bool | None,
    memo: Memo,
    done: ProgressTally | None = None,
) -> SweepResult:
    """Run all step sizes and seeds of one algorithm.

    The step sizes of a seed run together: they share its draws and one compiled program, which serves all seeds.
    """
    grid = _grid(config)
    shared = run_arguments(config, without=OF_ONE_RUN)
    if config.metrics is not None and config.local.lr == "tuned":
        shared["metrics"] = sorted({*config.metrics, "loss"})
    about = digest(to_toml(config), shared["availability"], problem_facts(built.problem), versions(), algorithm.name)

    def runs_of(seed: int) -> list[Run]:
        if config.local.optimizer == "sgd":
            found = sweep(algorithm, built.problem, lr=grid, seeds=[seed], progress=progress, **shared)
            return [runs[0] for runs in found.runs]
        return [one(lr, seed) for lr in grid]

    def one(lr: float, seed: int) -> Run:
        tried = config.model_copy(update={"seed": seed, "local": config.local.model_copy(update={"lr": lr})})
        given = run_arguments(tried, without=("every", "client_state")) | {"metrics": shared["metrics"]}
        return simulate(algorithm, built.problem, progress=progress, **given)

    def load_or_run(seed: int) -> list[Data]:
        runs = cache(lambda: runs_of(seed))  # called only if a result is not cached, and then once

        def make(j: int) -> Data:
            return _cached_fields(runs()[j], len(grid))

        name = f"{algorithm.name}-{about}-seed-{seed}"
        return [memo(f"{name}-lr-{lr:g}", partial(make, j)) for j, lr in enumerate(grid)]

    rows: list[list[RunRecord]] = [[] for _ in grid]
    spent = np.zeros(3)
    for seed in seeds:
        cells = load_or_run(seed)
        for lr, row, cell in zip(grid, rows, cells, strict=True):
            row.append(_make_record(config, algorithm.name, seed, lr, cell, target))
        took = np.sum([cell["spent"] for cell in cells], axis=0)
        spent += took
        if done is not None:
            done.more(algorithm.name, len(cells), took[0] + took[1])
    return SweepResult(rows, Seconds(*spent.tolist()))


def _best_runs(found: SweepResult) -> list[RunRecord]:
    """Return the runs of the step size with the lowest training loss, averaged over rounds and seeds."""
    if len(found.runs) == 1:
        return found.runs[0]

    def score(runs: list[RunRecord]) -> float:
        if any(run.diverged_at is not None for run in runs):
            return math.inf
        return float(np.mean([np.nanmean(run.columns["loss"]) for run in runs]))

    return found.runs[int(np.argmin([score(runs) for runs in found.runs]))]


def _cached_fields(done: Run, together: int = 1) -> Data:
    """Return the fields of a run to cache, with its share of the time if it ran together with others."""
    return {
        "columns": done.history,
        "diverged_at": done.diverged_at,
        "advice": done.advice,
        "residual": done.residual,
        "explained": done.explained,
        "digest": done.digest,
        "spent": [part / together for part in done.seconds],
    }


def _make_record(
    config: Config, name: str, seed: int, lr: float, cell: Data, target: tuple[str, float] | None
) -> RunRecord:
    known = {key: cell[key] for key in ("columns", "diverged_at", "advice", "residual", "explained", "digest")}
    return RunRecord(
        algorithm=name,
        seed=seed,
        lr=lr,
        reached_at=tables.first_reached(cell["columns"], target),
        config=to_toml(_config_of_run(config, name, lr, seed)),
        seconds=Seconds(*cell["spent"]).wall,
        **known,
    )


def _config_of_run(config: Config, name: str, lr: float, seed: int) -> Config:
    """Return the configuration of one run of a comparison: running it alone gives the same bits."""
    algorithm = config.algorithm if name == config.algorithm.name else type(config.algorithm)(name=name)
    local = config.local.model_copy(update={"lr": lr})
    return config.model_copy(update={"seed": seed, "algorithm": algorithm, "local": local})


def _make_study(
    config: Config,
    built: Built,
    runs: list[RunRecord],
    command: str,
    seconds: dict[str, float],
    target: tuple[str, float] | None,
) -> Study:
    return Study(
        problem=built.sentence,
        target=target,
        runs=runs,
        rows=tables.rows(runs, target, config.rounds),
        label_counts=built.label_counts,
        precision=config.precision,
        command=command,
        versions=versions(),
        seconds=seconds,
    )

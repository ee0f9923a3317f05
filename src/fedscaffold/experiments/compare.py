"""Run a configuration, or compare algorithms and other keys over seeds.

All runs of a comparison are cells of one grid (`fedscaffold.grids`), which runs on all cores and
keeps finished runs in a folder, so that interrupted work continues.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments.build_problem import Built
from fedscaffold.experiments.config_file import Config, run_arguments, to_toml
from fedscaffold.experiments.kinds import (
    GRID,
    Kind,
    best_runs,
    cells_of,
    kinds_of,
    make_algorithm,
    step_sizes,
)
from fedscaffold.grids import Grid, GridRun, run_cells
from fedscaffold.grids.grid_run import table
from fedscaffold.metrics import target_of
from fedscaffold.privacy.budget import Spent
from fedscaffold.privacy.several import refuse_budget
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import RunRecord, Source, Study, page, sources, tables, versions
from fedscaffold.runs.run_folder import replace_study
from fedscaffold.simulation import Callback, Interrupted, Run, simulate
from fedscaffold.simulation.evaluation import default_metrics
from fedscaffold.simulation.out_of_core import resolve_client_state
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.resolve import cohort_size
from fedscaffold.theory import bias, is_quadratic

__all__ = [
    "GRID",
    "Comparison",
    "compare",
    "compatible_algorithms",
    "describe_limit",
    "log_facts",
    "run",
    "validate_comparison",
    "validate_run",
    "write_results",
]

SETTLED = 0.01  # relative distance to the predicted limit within which a run has arrived
EXACT = 1e-6  # share of the initial distance that counts as zero
Target = tuple[str, float]


class Comparison(NamedTuple):
    """The runs of a comparison."""

    grid: Grid
    """All runs, those of tuning included, and those that failed with their errors."""
    study: Study | None
    """Runs with the best step sizes, and the table; None if all failed, or not all were run."""


def run(
    config: Config,
    built: Built,
    command: str,
    progress: bool | None = None,
    checkpoint: Path | None = None,
    devices: int | None = None,
    callbacks: Sequence[Callback] = (),
    kept: Path | None = None,
) -> Study:
    r"""Run one configuration, continuing from its checkpoint if there is one.

    With a tuned step size it is a grid, whose runs are kept in the folder `kept`.

    Args:
        config: The configuration.
        built: The problem built for it.
        command: The command line, for the record.
        progress: Whether to show a progress line; None to decide by the terminal.
        checkpoint: Folder of checkpoints, or None.
        devices: Number of devices that share the clients, or None.
        callbacks: Callbacks of the run.
        kept: Folder of the finished runs of a grid, or None.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("rounds = 3\n[local]\nsteps = 2\n[problem]\ndataset = 'quadratic'")
    >>> run(config, build(config.problem), "fedscaffold run").runs[0].columns["round"]
    array([1, 2, 3])
    """
    name = config.algorithm.name
    target = None if config.stop_at is None else target_of(config.stop_at)
    [kind] = kinds_of(config, built, [name], {})
    if config.local.lr == "tuned":
        cells = cells_of(kind, [config.seed])
        found = run_cells(cells, out=kept, progress=progress)
        lr, [best] = best_runs(found, len(cells))
        if best.error is not None:
            raise InputError(best.error)
        record = _record(kind, GRID[lr], config.seed, _fields(best), target)
        seconds = _seconds(found)
    else:
        given = run_arguments(config, without=() if checkpoint is not None else ("every",))
        given |= {
            "checkpoint": checkpoint,
            "devices": devices,
            "progress": progress,
            "callbacks": callbacks,
        }
        done = simulate(kind.algorithm, built.problem, **given)
        if done.outcome == "stopped" and checkpoint is not None:
            raise Interrupted(signal.SIGINT, done.rounds, checkpoint)
        record = _record(kind, config.local.lr, config.seed, _fields(done), target)
        seconds = done.seconds._asdict()
    record = replace(
        record, config=to_toml(config)
    )  # with "tuned" as requested, not the step size found
    return _study(config, built, [record], command, seconds, target)


def compare(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    command: str,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    kept: Path | None = None,
    workers: int | None = None,
    progress: bool | None = False,
    share: slice | None = None,
) -> Comparison:
    r"""Run several algorithms, and values of other keys, over several seeds.

    Report rounds and bytes to the target, with spread.

    Args:
        config: The configuration shared by all runs.
        built: The problem built for it.
        names: The algorithms.
        seeds: Number of seeds.
        target: Metric and value to reach, such as "accuracy:0.9", or None.
        command: The command line, for the record.
        over: Values of other keys, by dotted key.
        kept: Folder of the finished runs, from which an interrupted comparison continues, or None.
        workers: Number of processes; by default one for each core.
        progress: Whether to show a progress line; None to decide by the terminal.
        share: Run only these cells, and make no study.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("rounds = 20\nlocal.steps = 5\nproblem.dataset = 'quadratic'")
    >>> built, names = build(config.problem), ["scaffold", "fedavg"]
    >>> found = compare(config, built, names, 2, "distance:0.5", "fedscaffold compare")
    >>> [row["algorithm"] for row in found.study.rows]
    ['scaffold', 'fedavg']
    """
    aim = None if target is None else target_of(target)
    draws = range(config.seed, config.seed + seeds)
    kinds = [_with_metrics(kind, aim) for kind in kinds_of(config, built, names, over or {})]
    cells = [cells_of(kind, draws) for kind in kinds]
    found = run_cells(
        [cell for own in cells for cell in own],
        out=kept,
        workers=workers,
        progress=progress,
        share=slice(None) if share is None else share,
    )
    grid = Grid(keys=("algorithm", *(over or {}), "lr", "seed"), runs=found)
    if share is not None:
        return Comparison(grid, None)
    left = iter(found)
    runs = [[next(left) for _ in own] for own in cells]
    return Comparison(grid, _study_of_kinds(config, built, kinds, runs, draws, aim, command))


def _study_of_kinds(
    config: Config,
    built: Built,
    kinds: Sequence[Kind],
    runs: Sequence[Sequence[GridRun]],
    seeds: Sequence[int],
    target: Target | None,
    command: str,
) -> Study | None:
    """Return the study of a comparison: each kind at its best step size; None if all failed."""
    records: list[RunRecord] = []
    seconds: dict[str, float] = {}
    limits: dict[str, dict[str, Any]] = {}
    for kind, own in zip(kinds, runs, strict=True):
        tried = step_sizes(kind.config)
        j, best = best_runs(own, len(tried))
        made = [
            _record(kind, tried[j], seed, _fields(run), target)
            for seed, run in zip(seeds, best, strict=True)
            if run.error is None
        ]
        if made:
            records += made
            limits[kind.label] = _limit(kind, made) | {"rounds": kind.config.rounds}
            took = _seconds(own)
            seconds[kind.label] = took["compile"] + took["wall"]
    if not records:
        return None
    one_problem = len({id(kind.built) for kind in kinds}) == 1
    described = built if one_problem else _varied(built)
    study = _study(config, described, records, command, seconds, target)
    return replace(study, rows=[row | limits[row["algorithm"]] for row in study.rows])


def log_facts(config: Config, built: Built) -> dict[str, Any]:
    r"""Return the fields that describe a configuration in the log's `begin` line.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 0.2\nproblem.dataset = 'quadratic'\nproblem.clients = 15")
    >>> log_facts(config, build(config.problem))["cohort"]
    3
    """
    algorithm = make_algorithm(config, config.algorithm.name)
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


def validate_run(config: Config, built: Built, devices: int | None = None) -> Config:
    r"""Raise InputError if a configuration cannot be run, before anything is run or removed.

    Returns:
        The configuration with client_state "auto" resolved, so that resumed runs keep the same
        store.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 30\nlocal.steps = 2\nproblem.dataset = 'quadratic'")
    >>> validate_run(config, build(config.problem))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: cohort must be a whole number of at least 1 and at most 10, got
        30
    """
    checks.whole("seed", config.seed, at_least=0)
    checks.whole("evaluate_every", config.evaluate_every)
    if config.local.lr == "tuned":
        _refuse_out_of_core(config)
        _refuse_private_tuning(config)
    kind = _validate(
        config, built, make_algorithm(config, config.algorithm.name), devices
    ).client_state
    return config.model_copy(update={"client_state": kind})


def validate_comparison(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    over: Mapping[str, Sequence[Any]] | None = None,
) -> int:
    r"""Raise InputError if a comparison cannot be run, before anything is run or removed.

    Returns:
        The number of its runs, including those for tuning.

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
    aim = None if target is None else target_of(target)
    kinds = [_with_metrics(kind, aim) for kind in kinds_of(config, built, names, over or {})]
    for kind in kinds:
        _validate(kind.config, kind.built, kind.algorithm)
    runs = sum(seeds * len(step_sizes(kind.config)) for kind in kinds)
    if runs > 1:
        refuse_budget(run_arguments(kind.config)["privacy"] for kind in kinds)
    return runs


def _with_metrics(kind: Kind, target: Target | None) -> Kind:
    """Return a kind with all metrics that a comparison needs."""
    config, problem = kind.config, kind.built.problem
    _refuse_out_of_core(config)
    wanted = set(default_metrics(problem) if config.metrics is None else config.metrics)
    if target is not None:
        wanted.add(target[0])
    return replace(kind, config=config.model_copy(update={"metrics": sorted(wanted)}))


def _validate(
    config: Config, built: Built, algorithm: Algorithm, devices: int | None = None
) -> RunConfig:
    given = run_arguments(config, without=("every",))
    if config.local.lr == "tuned":
        given["lr"] = GRID[0]
    resolved = resolve_client_state(RunConfig(algorithm, built.problem, devices=devices, **given))
    with jax.enable_x64(config.precision == "float64"):
        prepare(resolved)
    return resolved


def _refuse_private_tuning(config: Config) -> None:
    if run_arguments(config)["privacy"] is not None:
        raise InputError(
            "local.lr = 'tuned' with privacy runs every step size on the records, each of which "
            "spends, and nothing accounts for choosing: give a number, found on other records or "
            "by `fedscaffold privacy plan`"
        )


def _refuse_out_of_core(config: Config) -> None:
    """Refuse out-of-core clients.

    A sweep runs all step sizes together, with all clients in memory.
    """
    if config.client_state != "array":
        raise InputError(
            f"client_state = {config.client_state!r} is for one run at a time: `fedscaffold run` "
            "with a number for "
            "local.lr; comparisons and lr = 'tuned' keep all clients in memory, client_state = "
            "'array'"
        )


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


def write_results(study: Study, folder: Path, grid: Grid | None = None) -> Path:
    """Write a study's folder with its table (CSV, LaTeX) and its page; return the page's path.

    Files are written to temporary names and moved, so that an interruption leaves no partial file.

    Args:
        study: The study.
        folder: Its folder.
        grid: All runs of a comparison, for the table of runs.
    """
    texts = {"table.csv": tables.csv(study.rows), "table.tex": tables.latex(study.rows)}
    if grid is not None:
        texts["runs.csv"] = tables.csv(table([run.row for run in grid.runs]))
    replace_study(study, folder, texts)
    # the page of a single run shows its progress too, which is in its log
    given = sources([folder]) if len(study.runs) == 1 else [Source(str(folder), study)]
    new = folder / ".report.html.new"
    new.unlink(missing_ok=True)  # do not write through a symbolic link
    new.write_text(page(given), encoding="utf-8")
    return new.replace(folder / "report.html")


def _fields(done: Run | GridRun) -> dict[str, Any]:
    """Return the fields of a run that its record has."""
    names = ("diverged_at", "advice", "residual", "explained", "digest")
    known = {name: getattr(done, name) for name in names}
    spent = done.privacy
    known["privacy"] = spent.facts() if isinstance(spent, Spent) else spent
    return known | {"columns": done.history, "seconds": done.seconds.wall}


def _seconds(runs: Sequence[GridRun]) -> dict[str, float]:
    """Return the time of some runs by phase."""
    names = ("compile", "wall", "cpu")
    return {name: sum(getattr(run.seconds, name) for run in runs) for name in names}


def _varied(built: Built) -> Built:
    """Describe problems that differ from kind to kind by the first."""
    return Built(built.problem, f"{built.sentence}, and variants of it", None)


def _record(
    kind: Kind, lr: float, seed: int, fields: dict[str, Any], target: Target | None
) -> RunRecord:
    """Return the record of a run, with a configuration that gives the same bits if run alone."""
    config, name = kind.config, kind.name
    algorithm = (
        config.algorithm if name == config.algorithm.name else type(config.algorithm)(name=name)
    )
    alone = {
        "seed": seed,
        "algorithm": algorithm,
        "local": config.local.model_copy(update={"lr": lr}),
    }
    return RunRecord(
        algorithm=kind.label,
        seed=seed,
        lr=lr,
        reached_at=tables.first_reached(fields["columns"], target),
        config=to_toml(config.model_copy(update=alone)),
        **fields,
    )


def _study(
    config: Config,
    built: Built,
    runs: list[RunRecord],
    command: str,
    seconds: dict[str, float],
    target: Target | None,
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


def _limit(kind: Kind, runs: list[RunRecord]) -> dict[str, Any]:
    """Return where the runs end and where theory predicts it, as |x - x*| and in words.

    {} if x* is unknown.
    """
    config, problem = kind.config, kind.built.problem
    if not is_quadratic(problem) or any(
        "distance" not in run.columns or run.diverged_at for run in runs
    ):
        return {}
    ends = float(np.mean([run.columns["distance"][-1] for run in runs]))
    begun = float(
        np.linalg.norm(problem.layout.flatten(problem.params) - problem.optimum(config.weights))
    )
    known = _predicted_bias(config, problem, kind.algorithm, runs[0].lr or 0.0)
    return {"ends_at": ends, "bias": known, "ends": describe_limit(ends, known, begun)}


def describe_limit(ends: float, bias: float | None, begun: float) -> str:
    """Describe the two distances; `begun` is the distance at the start, their scale.

    >>> [describe_limit(ends, 0.25, 1.0) for ends in (1e-9, 0.2501, 0.3)]
    ['at the optimum', 'at its bias, 0.25', 'on the way (bias 0.25)']
    >>> describe_limit(0.1, None, 1.0), describe_limit(0.1, 0.0, 1.0)
    ('off by 0.1', 'on the way (no bias)')
    """
    if ends <= EXACT * begun:
        return "at the optimum"
    if bias is None:
        return f"off by {ends:.3g}"
    if bias <= EXACT * begun:
        return "on the way (no bias)"
    return (
        f"at its bias, {bias:.3g}"
        if abs(ends - bias) <= SETTLED * bias
        else f"on the way (bias {bias:.3g})"
    )


def _predicted_bias(
    config: Config, problem: Problem, algorithm: Algorithm, lr: float
) -> float | None:
    """Return the |bias| of the noiseless round map, or None if theory does not cover the run."""
    local = config.local
    covered = (
        config.cohort.availability is None
        and cohort_size(RunConfig(algorithm, problem, cohort=config.cohort.size))
        == problem.num_clients
        and config.weights == "equal"
        and config.compression == "none"
        and local.optimizer == "sgd"
        and local.batch_size is None
        and isinstance(local.steps, int)
        and problem.noise is None
    )
    if not covered:
        return None
    try:
        return float(
            np.linalg.norm(bias(problem, lr=lr, local_steps=local.steps, algorithm=algorithm))
        )
    except InputError:  # a round of it has no matrix: it counts its rounds, or is not affine
        return None

"""Run a configuration, or compare algorithms on it over seeds, with given or tuned step sizes.

Tuning uses the training loss only: from a grid of step sizes, it selects the one with the lowest
loss averaged over rounds and seeds; a diverged run counts as infinite. The step sizes of an
algorithm and a seed share one compiled program. Finished runs can be kept in a folder, each as an
atomic commit, so that interrupted work continues.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.experiments.build_problem import Built
from fedscaffold.experiments.config_file import OF_ONE_RUN, Config, run_arguments, to_toml
from fedscaffold.metrics import target_of
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import RunRecord, Source, Study, page, sources, tables, versions
from fedscaffold.runs.run_folder import replace_study
from fedscaffold.simulation import Callback, Interrupted, Run, simulate, sweep
from fedscaffold.simulation.engine import Seconds
from fedscaffold.simulation.evaluation import default_metrics
from fedscaffold.simulation.fingerprint import problem_facts, to_json
from fedscaffold.simulation.out_of_core import resolve_client_state
from fedscaffold.simulation.program import prepare
from fedscaffold.simulation.resolve import cohort_size
from fedscaffold.state import StateError, commit, latest
from fedscaffold.theory import bias, is_quadratic

__all__ = [
    "GRID",
    "compare",
    "compatible_algorithms",
    "describe_limit",
    "log_facts",
    "number_of_runs",
    "run",
    "validate_comparison",
    "validate_run",
    "write_results",
]

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SETTLED = 0.01  # relative distance to the predicted limit within which a run has arrived
EXACT = 1e-6  # share of the initial distance that counts as zero
Target = tuple[str, float]


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

    With a tuned step size it is a sweep, whose runs are kept in the folder `kept`.

    Args:
        config: The configuration.
        built: The problem built for it.
        command: The command line, for the record.
        progress: Whether to show a progress line; None to decide by the terminal.
        checkpoint: Folder of checkpoints, or None.
        devices: Number of devices that share the clients, or None.
        callbacks: Callbacks of the run.
        kept: Folder of the finished runs of a sweep, or None.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("rounds = 3\n[local]\nsteps = 2\n[problem]\ndataset = 'quadratic'")
    >>> run(config, build(config.problem), "fedscaffold run").runs[0].columns["round"]
    array([1, 2, 3])
    """
    algorithm = _algorithm(config, config.algorithm.name)
    target = None if config.stop_at is None else target_of(config.stop_at)
    if config.local.lr == "tuned":
        [record], seconds = _best_runs(
            config, built, algorithm, [config.seed], target, kept, progress
        )
    else:
        given = run_arguments(config, without=() if checkpoint is not None else ("every",))
        given |= {
            "checkpoint": checkpoint,
            "devices": devices,
            "progress": progress,
            "callbacks": callbacks,
        }
        done = simulate(algorithm, built.problem, **given)
        if done.outcome == "stopped" and checkpoint is not None:
            raise Interrupted(signal.SIGINT, done.rounds, checkpoint)
        record = _record(
            config, algorithm.name, config.local.lr, config.seed, _fields(done), target
        )
        seconds = done.seconds
    record = replace(
        record, config=to_toml(config)
    )  # with "tuned" as requested, not the step size found
    return _study(config, built, [record], command, seconds._asdict(), target)


def compare(
    config: Config,
    built: Built,
    names: Sequence[str],
    seeds: int,
    target: str | None,
    command: str,
    tell: Callable[[str], None] = lambda line: None,
    kept: Path | None = None,
) -> Study:
    r"""Run several algorithms on one problem over several seeds.

    Report rounds and bytes to the target, with spread.

    Args:
        config: The configuration shared by all runs.
        built: The problem built for it.
        names: The algorithms.
        seeds: Number of seeds.
        target: Metric and value to reach, such as "accuracy:0.9", or None.
        command: The command line, for the record.
        tell: Called with a progress line after each group of runs.
        kept: Folder of the finished runs, from which an interrupted comparison continues, or None.

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
    total, spent = number_of_runs(config, names, seeds), list[float]()

    def finished(name: str, each: list[float]) -> None:
        spent.extend(each)
        left = sum(spent) / len(spent) * (total - len(spent))
        tell(f"{name}: {len(spent)} of {total} runs, about {left:.0f} s left")

    for name in names:
        algorithm, draws = _algorithm(config, name), range(config.seed, config.seed + seeds)
        best, took = _best_runs(config, built, algorithm, draws, aim, kept, None, finished)
        runs += best
        limits[name] = _limit(config, built.problem, algorithm, best)
        seconds[name] = took.compile + took.wall
    study = _study(config, built, runs, command, seconds, aim)
    return replace(study, rows=[row | limits[row["algorithm"]] for row in study.rows])


def log_facts(config: Config, built: Built) -> dict[str, Any]:
    r"""Return the fields that describe a configuration in the log's `begin` line.

    >>> from fedscaffold.experiments.config_file import parse
    >>> from fedscaffold.experiments.build_problem import build
    >>> config = parse("cohort.size = 0.2\nproblem.dataset = 'quadratic'\nproblem.clients = 15")
    >>> log_facts(config, build(config.problem))["cohort"]
    3
    """
    algorithm = _algorithm(config, config.algorithm.name)
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
    kind = _validate(config, built, _algorithm(config, config.algorithm.name), devices).client_state
    return config.model_copy(update={"client_state": kind})


def validate_comparison(
    config: Config, built: Built, names: Sequence[str], seeds: int, target: str | None
) -> None:
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
        _validate(config, built, _algorithm(config, name))


def _algorithm(config: Config, name: str) -> Algorithm:
    """Make an algorithm; configured parameters apply only to the algorithm named with them."""
    return algorithms.make(
        name, **(config.algorithm.parameters if name == config.algorithm.name else {})
    )


def _with_metrics(config: Config, built: Built, target: Target | None) -> Config:
    """Return the configuration with all metrics that a comparison needs."""
    _refuse_out_of_core(config)
    wanted = set(default_metrics(built.problem) if config.metrics is None else config.metrics)
    if target is not None:
        wanted.add(target[0])
    return config.model_copy(update={"metrics": sorted(wanted)})


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


def write_results(study: Study, folder: Path) -> Path:
    """Write a study's folder with its table (CSV, LaTeX) and its page; return the page's path.

    Files are written to temporary names and moved, so that an interruption leaves no partial file.
    """
    texts = {"table.csv": tables.csv(study.rows), "table.tex": tables.latex(study.rows)}
    replace_study(study, folder, texts)
    # the page of a single run shows its progress too, which is in its log
    given = sources([folder]) if len(study.runs) == 1 else [Source(str(folder), study)]
    new = folder / ".report.html.new"
    new.unlink(missing_ok=True)  # do not write through a symbolic link
    new.write_text(page(given), encoding="utf-8")
    return new.replace(folder / "report.html")


def number_of_runs(config: Config, names: Sequence[str], seeds: int) -> int:
    """Return the number of runs of a comparison, including those for tuning.

    >>> number_of_runs(Config(), ["scaffold", "fedavg"], 3)
    6
    """
    return len(names) * seeds * (len(GRID) if config.local.lr == "tuned" else 1)


def _best_runs(
    config: Config,
    built: Built,
    algorithm: Algorithm,
    seeds: Sequence[int],
    target: Target | None,
    kept: Path | None,
    progress: bool | None,
    finished: Callable[[str, list[float]], None] = lambda name, seconds: None,
) -> tuple[list[RunRecord], Seconds]:
    """Run all step sizes and seeds of one algorithm.

    Return the runs of the best step size, and the time of all.

    The step sizes of a seed run together: they share its draws and one compiled program, which
        serves all seeds.
    """
    grid = GRID if config.local.lr == "tuned" else (config.local.lr,)
    shared = run_arguments(config, without=OF_ONE_RUN)
    if config.metrics is not None and config.local.lr == "tuned":
        shared["metrics"] = sorted({*config.metrics, "loss"})
    depends = [
        to_toml(config),
        shared["availability"],
        problem_facts(built.problem),
        versions(),
        algorithm.name,
    ]
    about = hashlib.sha256(json.dumps(to_json(depends)).encode()).hexdigest()[:20]

    def runs_of(seed: int) -> list[Run]:
        if config.local.optimizer == "sgd":
            found = sweep(
                algorithm, built.problem, lr=grid, seeds=[seed], progress=progress, **shared
            )
            return [runs[0] for runs in found.runs]
        return [
            simulate(algorithm, built.problem, progress=progress, **arguments_of(lr, seed))
            for lr in grid
        ]

    def arguments_of(lr: float, seed: int) -> dict[str, Any]:
        tried = config.model_copy(
            update={"seed": seed, "local": config.local.model_copy(update={"lr": lr})}
        )
        return run_arguments(tried, without=("every", "client_state")) | {
            "metrics": shared["metrics"]
        }

    rows: list[list[RunRecord]] = [[] for _ in grid]
    spent = np.zeros(3)
    for seed in seeds:
        runs = cache(
            lambda seed=seed: runs_of(seed)
        )  # called only if a result is not kept, and then once
        each = []
        for j, lr in enumerate(grid):
            place = (
                None if kept is None else kept / f"{algorithm.name}-{about}-seed-{seed}-lr-{lr:g}"
            )
            fields = _load(place) or _save(place, _fields(runs()[j], len(grid)))
            rows[j].append(_record(config, algorithm.name, lr, seed, fields, target))
            spent += fields["spent"]
            each.append(fields["spent"][0] + fields["spent"][1])
        finished(algorithm.name, each)

    def score(runs: list[RunRecord]) -> float:
        if any(run.diverged_at is not None for run in runs):
            return math.inf
        return float(np.mean([np.nanmean(run.columns["loss"]) for run in runs]))

    best = rows[0] if len(rows) == 1 else rows[int(np.argmin([score(runs) for runs in rows]))]
    return best, Seconds(*spent.tolist())


def _fields(done: Run, together: int = 1) -> dict[str, Any]:
    """Return the fields of a run to keep, with its share of the time if it ran together with others."""
    names = ("diverged_at", "advice", "residual", "explained", "digest")
    known = {name: getattr(done, name) for name in names}
    return known | {"columns": done.history, "spent": [part / together for part in done.seconds]}


def _save(place: Path | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Keep the fields of a run as one atomic commit, and return them."""
    if place is not None:
        arrays = {f"columns.{name}": column for name, column in fields["columns"].items()}
        arrays |= {
            name: np.array(fields[name], np.float64) for name in ("residual", "explained", "spent")
        }
        facts = {name: fields[name] for name in ("diverged_at", "advice", "digest")}
        commit(
            place, arrays, facts | {"columns": list(fields["columns"])}
        )  # their order is not that of the arrays
    return fields


def _load(place: Path | None) -> dict[str, Any] | None:
    """Return the fields of a run that was kept; None if it is absent or damaged."""
    try:
        found = None if place is None else latest(place)
    except StateError:
        return None
    if found is None:
        return None
    columns = {name: found.arrays[f"columns.{name}"] for name in found.facts["columns"]}
    numbers = {name: found.arrays[name].tolist() for name in ("residual", "explained", "spent")}
    return found.facts | numbers | {"columns": columns}


def _record(
    config: Config, name: str, lr: float, seed: int, fields: dict[str, Any], target: Target | None
) -> RunRecord:
    """Return the record of a run, with a configuration that gives the same bits if run alone."""
    algorithm = (
        config.algorithm if name == config.algorithm.name else type(config.algorithm)(name=name)
    )
    alone = {
        "seed": seed,
        "algorithm": algorithm,
        "local": config.local.model_copy(update={"lr": lr}),
    }
    return RunRecord(
        algorithm=name,
        seed=seed,
        lr=lr,
        reached_at=tables.first_reached(fields["columns"], target),
        config=to_toml(config.model_copy(update=alone)),
        seconds=Seconds(*fields["spent"]).wall,
        **{key: value for key, value in fields.items() if key != "spent"},
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


def _limit(
    config: Config, problem: Problem, algorithm: Algorithm, runs: list[RunRecord]
) -> dict[str, Any]:
    """Return where the runs end and where theory predicts it, as |x - x*| and in words.

    {} if x* is unknown.
    """
    if not is_quadratic(problem) or any(
        "distance" not in run.columns or run.diverged_at for run in runs
    ):
        return {}
    ends = float(np.mean([run.columns["distance"][-1] for run in runs]))
    begun = float(
        np.linalg.norm(problem.layout.flatten(problem.params) - problem.optimum(config.weights))
    )
    known = _predicted_bias(config, problem, algorithm, runs[0].lr or 0.0)
    return {"ends_at": ends, "bias": known, "ends": describe_limit(ends, known, begun)}


def describe_limit(ends: float, bias: float | None, begun: float) -> str:
    """Describe the two distances; `begun` is the distance at the start, their scale.

    >>> describe_limit(1e-9, 0.0, 1.0), describe_limit(0.2501, 0.25, 1.0), describe_limit(0.3, 0.25, 1.0)
    ('at the optimum', 'at its bias, 0.25', 'on the way (bias 0.25)')
    >>> describe_limit(1e-9, None, 1.0), describe_limit(0.1, None, 1.0), describe_limit(0.1, 0.0, 1.0)
    ('at the optimum', 'off by 0.1', 'on the way (no bias)')
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
    """Return the |bias| of the algorithm's noiseless round map, or None if theory does not cover the run."""
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
    except InputError:  # a round of it has no matrix, as it counts its rounds
        return None

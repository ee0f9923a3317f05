"""`diagnose RUN`: find what is wrong with a run, finished or in progress, from its folder.

The checkpoint is read as `resume` reads it, the problem is rebuilt from config.toml, and the state
is checked against it: whether c is the mean of the c_i, whether clients are no longer heard,
whether the c_i match the gradients at x, whether the next round would drift, whether the step size
is stable, and whether the run makes progress.
"""

from __future__ import annotations

from pathlib import Path

from fedscaffold import algorithms
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.diagnose import progress_checks
from fedscaffold.diagnose.control_checks import (
    Diagnosis,
    Finding,
    check_privacy,
    check_recorded_residual,
)
from fedscaffold.diagnose.read_checkpoint import StateError, is_current, open_checkpoint
from fedscaffold.diagnose.state_checks import examine_run
from fedscaffold.experiments.build_problem import Built
from fedscaffold.experiments.config_file import Config, load, parse, run_arguments
from fedscaffold.problems import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import RunRecord, read
from fedscaffold.runs.live import Simulated
from fedscaffold.simulation.out_of_core import resolve_client_state
from fedscaffold.theory.privacy import stationary_errors
from fedscaffold.theory.stable_step import stable_step

__all__ = ["diagnose", "load_config"]


def load_config(folder: Path) -> Config:
    """Return the resolved configuration of a run's folder, or of a comparison's first run."""
    if (folder / "config.toml").is_file():
        return load(folder / "config.toml")
    return parse(read(folder).runs[0].config)


def diagnose(folder: Path, config: Config, built: Built) -> Diagnosis:
    """Diagnose a run's folder.

    Args:
        folder: The run's folder.
        config: Its configuration.
        built: The problem that the configuration describes.
    """
    if config.local.lr == "tuned" or not any((folder / "checkpoint").glob("state-*")):
        return _diagnose_metrics(folder, config, built)
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    given = run_arguments(config, without=("every",))
    request = resolve_client_state(RunConfig(algorithm, built.problem, **given))
    try:
        return _diagnose_checkpoint(folder / "checkpoint", config, request, built.sentence)
    except StateError as error:
        do = "restore the folder from a copy, or run it again: fedscaffold run --fresh"
        return Diagnosis(built.sentence, 0, [Finding("checkpoint", "wrong", f"{error}.", do)])


def _diagnose_checkpoint(
    checkpoint: Path, config: Config, request: RunConfig, sentence: str, tries: int = 3
) -> Diagnosis:
    """Diagnose the last complete checkpoint; retry if a running run replaced it meanwhile."""
    with open_checkpoint(checkpoint, request) as run:
        found = examine_run(request, run)
        fresh = is_current(checkpoint, run)
    if not fresh and request.client_state == "file" and tries > 1:
        return _diagnose_checkpoint(checkpoint, config, request, sentence, tries - 1)
    spent = Simulated(checkpoint.parent).poll().study.runs[0].privacy
    found += [] if spent is None else [check_privacy(spent), *_noise_cost(request)]
    state = "ended" if run.ended else "under way or interrupted"
    title = f"{sentence}: {request.algorithm.name}, {run.round} of {config.rounds} rounds, {state}"
    return Diagnosis(title, run.round, found)


def _noise_cost(request: RunConfig) -> list[Finding]:
    """Say what the noise of a private run leaves in the long run, where theory knows it."""
    errors = stationary_errors(request)
    if errors is None:
        return []
    told = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    said = f"In the long run noise and bias leave this distance to the optimum: {told}."
    return [Finding("noise", "ok", said, number=errors.get(request.algorithm.name))]


def _diagnose_metrics(folder: Path, config: Config, built: Built) -> Diagnosis:
    """Diagnose from metrics alone.

    Comparisons and runs with a tuned step size keep no checkpoint.
    """
    try:
        study = read(folder)
    except FileNotFoundError:
        raise InputError(
            f"{folder} holds a run that has not begun: no checkpoint, no metrics; run it first"
        ) from None
    found = [
        one
        for run in study.runs
        for one in _examine_record(config, built.problem, run, len(study.runs) > 1)
    ]
    title = f"{built.sentence}: {len(study.runs)} runs without checkpoints, so metrics only"
    return Diagnosis(
        title, max((len(run.columns["round"]) for run in study.runs), default=0), found
    )


def _examine_record(
    config: Config, problem: Problem, run: RunRecord, several: bool
) -> list[Finding]:
    config = parse(run.config) if several else config
    dtype = config.precision
    whose = f"{run.algorithm}, seed {run.seed}: " if several else ""
    found = []
    noised = run.privacy is not None and run.privacy["unit"] == "client"
    if run.explained > 0:
        since = progress_checks.first_excess_round(run.columns, run.explained)
        found.append(check_recorded_residual(run.residual, run.explained, since, noised))
    found += [] if run.privacy is None else [check_privacy(run.privacy)]
    own = config.algorithm.parameters if run.algorithm == config.algorithm.name else {}
    algorithm = algorithms.make(run.algorithm, **own)
    gets_on = progress_checks.check_progress(
        run.columns, run.diverged_at, None, dtype, True, algorithm.has_memory
    )
    found += [] if gets_on is None else [gets_on]
    if run.lr is not None and isinstance(config.local.steps, int) and problem.functions.has_loss:
        steps = work_of(algorithm, config.local.steps).steps
        limit = stable_step(
            problem,
            lr=run.lr,
            local_steps=steps,
            algorithm=algorithm,
            exact=config.weights == "equal",
        )
        found.append(
            progress_checks.check_step_size(run.lr, steps, limit, run.diverged_at is not None)
        )
    return [one._replace(sentence=f"{whose}{one.sentence}") for one in found]

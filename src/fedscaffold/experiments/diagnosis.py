"""`diagnose RUN`: what is wrong with a run, finished or under way, from the folder that it leaves.

The checkpoint is read as `resume` reads it, the problem is built anew from config.toml, and the state is held against
it: is c the mean of the c_i, is anybody no longer heard, do the c_i still know the gradients at x, would the next round
drift, is the step size stable, does the run get on.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedscaffold import algorithms
from fedscaffold.checks import InputError
from fedscaffold.experiments import arguments, symptoms
from fedscaffold.experiments.config import Config, load
from fedscaffold.experiments.examination import examined
from fedscaffold.experiments.federation import Built
from fedscaffold.experiments.findings import Finding, recorded, worst
from fedscaffold.problems import Problem
from fedscaffold.report import Curve, read
from fedscaffold.simulation.away import settled
from fedscaffold.simulation.inspection import StateError, looking_at, still_there
from fedscaffold.simulation.setup import Request
from fedscaffold.theory.stable_step import stable_step

__all__ = ["Diagnosis", "configured", "diagnose"]


class Diagnosis(NamedTuple):
    """What was found in a folder."""

    title: str
    round: int
    findings: list[Finding]

    @property
    def severity(self) -> str:
        """The gravest of all."""
        return worst(self.findings)


def configured(folder: Path) -> Config:
    """The resolved configuration of a run's folder."""
    return load(folder / "config.toml")


def diagnose(folder: Path, config: Config, built: Built) -> Diagnosis:
    """Look at everything that a run's folder holds; `built` is the problem that its config asks for."""
    if config.local.lr == "tuned" or not any((folder / "checkpoint").glob("state-*")):
        return _from_metrics(folder, config, built)
    shared = {key: value for key, value in arguments.shared(config).items() if key != "evaluate_every"}
    algorithm = algorithms.make(config.algorithm.name, **config.algorithm.parameters)
    asked = Request(algorithm, built.problem, seeds=(config.seed,), **arguments.local(config.local), **shared)
    request = settled(asked, config.client_state)
    try:
        return _looked_at(folder / "checkpoint", config, request, built.sentence)
    except StateError as error:
        do = "restore the folder from a copy, or run it again: fedscaffold run --fresh"
        return Diagnosis(built.sentence, 0, [Finding("checkpoint", "wrong", f"{error}.", do)])


def _looked_at(checkpoint: Path, config: Config, request: Request, sentence: str, tries: int = 3) -> Diagnosis:
    """Diagnose the last whole checkpoint; again where the run at work there has replaced it meanwhile."""
    with looking_at(checkpoint, request, config.evaluate_every) as standing:
        found = examined(config, request, standing)
        fresh = still_there(checkpoint, standing)
    if not fresh and request.client_state == "file" and tries > 1:
        return _looked_at(checkpoint, config, request, sentence, tries - 1)
    state = "ended" if standing.ended else "under way or interrupted"
    title = f"{sentence}: {request.algorithm.name}, {standing.round} of {config.rounds} rounds, {state}"
    return Diagnosis(title, standing.round, found)


def _from_metrics(folder: Path, config: Config, built: Built) -> Diagnosis:
    """What metrics alone tell: of a comparison, or of a run with a tuned step size, which keep no state."""
    try:
        study = read(folder)
    except FileNotFoundError:
        raise InputError(f"{folder} holds a run that has not begun: no checkpoint, no metrics; run it first") from None
    found = [one for curve in study.curves for one in _of_curve(config, built.problem, curve, len(study.curves) > 1)]
    title = f"{built.sentence}: {len(study.curves)} runs without checkpoints, so metrics only"
    return Diagnosis(title, max((len(curve.columns["round"]) for curve in study.curves), default=0), found)


def _of_curve(config: Config, problem: Problem, curve: Curve, several: bool) -> list[Finding]:
    dtype = config.precision
    whose = f"{curve.algorithm}, seed {curve.seed}: " if several else ""
    found = []
    if curve.explained > 0:
        since = symptoms.left_rounding(curve.columns, curve.explained)
        found.append(recorded(curve.residual, curve.explained, since))
    own = config.algorithm.parameters if curve.algorithm == config.algorithm.name else {}
    algorithm = algorithms.make(curve.algorithm, **own)
    gets_on = symptoms.progress(curve.columns, curve.diverged_at, None, dtype, True, algorithm.remember is not None)
    found += [] if gets_on is None else [gets_on]
    if curve.lr is not None and isinstance(config.local.steps, int) and problem.functions.has_loss:
        steps = 1 if algorithm.one_step else config.local.steps
        limit = stable_step(
            problem, lr=curve.lr, local_steps=steps, algorithm=algorithm, exact=config.weights == "equal"
        )
        found.append(symptoms.step_size(curve.lr, steps, limit, curve.diverged_at is not None))
    return [one._replace(sentence=f"{whose}{one.sentence}") for one in found]

"""From a configuration's words to a problem: which data, how split, which model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks, data, problems
from fedscaffold.checks import InputError
from fedscaffold.experiments.config import ProblemConfig
from fedscaffold.problems import Problem

__all__ = ["MODELS", "SYNTHETIC", "Built", "build", "idle", "step_flops"]

MODELS = ("linear", "logistic", "mlp", "softmax")
SYNTHETIC = ("quadratic", "synthetic-linear", "synthetic-logistic")
MADE = {"dataset", "clients", "seed", "data", "dim"}  # keys of the configuration that make a synthetic problem


class Built(NamedTuple):
    """A problem and what to say about it."""

    problem: Problem
    sentence: str
    label_counts: NDArray[np.int64] | None


def build(config: ProblemConfig) -> Built:
    """Make the problem that a configuration asks for.

    >>> build(ProblemConfig(dataset="digits", split="iid", clients=10)).problem
    Problem(softmax regression, 10 clients, 1400 records, d = 650)
    """
    checks.choice("dataset", config.dataset, (*data.DATASETS, *SYNTHETIC))
    if config.dataset in SYNTHETIC:
        problem = _synthetic(config)
        return Built(problem, f"{config.dataset}: {problem.num_clients} clients, d = {problem.dim}", None)
    dataset = data.load(config.dataset, None if config.data is None else Path(config.data))
    clients = config.clients
    if clients is None and not config.split.startswith("natural"):
        clients = 20
    federated = data.federate(dataset, config.split, clients, seed=config.seed)
    problem = _model(config, federated)
    sentence = (
        f"{config.dataset}, {len(federated.clients)} clients, split {config.split}, {config.model} "
        f"(d = {problem.dim:,}, {problem.offsets[-1]:,} records)"
    )
    return Built(problem, sentence, federated.label_counts)


def idle(config: ProblemConfig) -> list[str]:
    """Keys that were given although this data set makes nothing of them.

    >>> idle(ProblemConfig(dataset="quadratic", dim=3, l2=0.1))
    ['l2']
    """
    used = {"dataset", "split", "clients", "model", "l2", "seed", "data"}
    if config.dataset in SYNTHETIC:
        used = MADE | ({"mu", "smoothness", "noise"} if config.dataset == "quadratic" else {"l2"})
    return sorted(config.model_fields_set - used)


def step_flops(problem: Problem, batch_size: int | float | None) -> float:
    """About how many operations one local step takes: two for each weight and record forward, four back.

    >>> step_flops(build(ProblemConfig(clients=10)).problem, 0.1)
    54600.0
    """
    largest = int(problem.counts.max())
    rows = largest if batch_size is None else batch_size * largest if isinstance(batch_size, float) else batch_size
    return 6.0 * problem.dim * rows


def _synthetic(config: ProblemConfig) -> Problem:
    clients = 10 if config.clients is None else config.clients
    if config.dataset == "quadratic":
        noise = None if config.noise == 0 else config.noise
        return problems.quadratic(
            clients, config.dim, mu=config.mu, smoothness=config.smoothness, noise=noise, seed=config.seed
        )
    kind = config.dataset.removeprefix("synthetic-")
    return problems.two_datasets(kind, clients, dim=config.dim, l2=config.l2 or 0.01, seed=config.seed)


def _model(config: ProblemConfig, federated: data.FederatedData) -> Problem:
    name, _, width = config.model.partition(":")
    checks.choice("model", name, MODELS)
    if name in ("softmax", "mlp"):
        if federated.classes == 0:
            raise InputError(f"{name} needs labels, and {federated.name} has none; use model 'linear'")
        if name == "softmax":
            return problems.softmax(federated.clients, classes=federated.classes, l2=config.l2, test=federated.test)
        hidden = checks.whole("the width in model 'mlp:WIDTH'", checks.written(width or "300"))
        return problems.mlp(
            federated.clients, hidden, classes=federated.classes, l2=config.l2, test=federated.test, seed=config.seed
        )
    if name == "logistic" and federated.classes != 2:
        raise InputError(
            f"logistic needs two classes, and {federated.name} has {federated.classes}; use model 'softmax'"
        )
    kind = problems.logistic if name == "logistic" else problems.linear
    return kind([_with_intercept(c) for c in federated.clients], l2=config.l2, test=_with_intercept(federated.test))


def _with_intercept(client: tuple[NDArray[Any], NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """A column of ones beside the features: the regressions have no intercept of their own."""
    x, y = client
    return np.hstack([x, np.ones((len(x), 1), x.dtype)]), y

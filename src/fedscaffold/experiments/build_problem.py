"""Build the problem that a configuration describes, and configure JAX for its size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks, data, problems
from fedscaffold.checks import InputError
from fedscaffold.experiments.config_file import Config, ProblemConfig, Section
from fedscaffold.problems import Problem

__all__ = [
    "MODELS",
    "SYNTHETIC",
    "Built",
    "build",
    "cache_programs",
    "refuse_unused_keys",
    "unused_keys",
]

MODELS = ("linear", "logistic", "mlp", "softmax")
SYNTHETIC = ("quadratic", "synthetic-linear", "synthetic-logistic")
MADE = {"dataset", "clients", "seed", "data", "dim"}  # keys used by all synthetic problems


class Built(NamedTuple):
    """A problem, its description, and (N, classes) label counts by client."""

    problem: Problem
    sentence: str
    label_counts: NDArray[np.int64] | None


def build(config: ProblemConfig) -> Built:
    """Build the problem that a configuration describes.

    >>> build(ProblemConfig(dataset="digits", split="iid", clients=10)).problem
    Problem(softmax regression, 10 clients, 1400 records, d = 650)
    """
    checks.choice("dataset", config.dataset, (*data.DATASETS, *SYNTHETIC))
    if config.dataset in SYNTHETIC:
        problem = _build_synthetic(config)
        return Built(
            problem, f"{config.dataset}: {problem.num_clients} clients, d = {problem.dim}", None
        )
    dataset = data.load(config.dataset, None if config.data is None else Path(config.data))
    clients = config.clients
    if clients is None and not config.split.startswith("natural"):
        clients = 20
    federated = data.federate(dataset, config.split, clients, seed=config.seed)
    problem = _build_model(config, federated)
    sentence = (
        f"{config.dataset}, {len(federated.clients)} clients, split {config.split}, {config.model} "
        f"(d = {problem.dim:,}, {problem.offsets[-1]:,} records)"
    )
    return Built(problem, sentence, federated.label_counts)


def unused_keys(config: ProblemConfig) -> list[str]:
    """Return the keys that were given although the data set does not use them.

    >>> unused_keys(ProblemConfig(dataset="quadratic", dim=3, l2=0.1))
    ['l2']
    """
    used = {"dataset", "split", "clients", "model", "l2", "seed", "data"}
    if config.dataset in SYNTHETIC:
        used = MADE | ({"mu", "smoothness", "noise"} if config.dataset == "quadratic" else {"l2"})
    return sorted(config.model_fields_set - used)


def refuse_unused_keys(config: Config, sets: Sequence[str] = ()) -> None:
    """Refuse keys that a run would not use, if typed or different from their default.

    A resolved configuration names all keys, so keys at their default pass unless they are among
    `sets`.

    >>> refuse_unused_keys(Config(problem={"dataset": "quadratic", "l2": 0.1}))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: dataset 'quadratic' makes no use of problem.l2; leave it out
    """
    checks.choice("dataset", config.problem.dataset, (*data.DATASETS, *SYNTHETIC))
    typed = {one.partition("=")[0].strip() for one in sets}
    local, server = config.local.optimizer, config.server.optimizer
    momentum = {"momentum"}
    unused: list[tuple[str, Section, Iterable[str], str]] = [
        (
            "problem",
            config.problem,
            unused_keys(config.problem),
            f"dataset {config.problem.dataset!r}",
        ),
        (
            "local",
            config.local,
            momentum if local != "momentum" else (),
            f"local.optimizer {local!r}",
        ),
        (
            "server",
            config.server,
            {"lr"} if server == "none" else (),
            f"server.optimizer {server!r}",
        ),
        (
            "server",
            config.server,
            momentum if server in ("none", "adagrad") else (),
            f"server.optimizer {server!r}",
        ),
    ]
    for name, section, keys, who in unused:
        for key in keys:
            usual = type(section).model_fields[key].default
            if f"{name}.{key}" in typed or getattr(section, key) != usual:
                raise InputError(f"{who} makes no use of {name}.{key}; leave it out")


def cache_programs() -> None:
    """Cache compiled programs in the user's cache folder, or in JAX_COMPILATION_CACHE_DIR."""
    import jax

    from fedscaffold.grids.worker import CACHE, cache_folder

    if not os.environ.get(CACHE):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder(os.environ)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _build_synthetic(config: ProblemConfig) -> Problem:
    clients = 10 if config.clients is None else config.clients
    if config.dataset == "quadratic":
        noise = None if config.noise == 0 else config.noise
        return problems.quadratic(
            clients,
            config.dim,
            mu=config.mu,
            smoothness=config.smoothness,
            noise=noise,
            seed=config.seed,
        )
    kind = config.dataset.removeprefix("synthetic-")
    return problems.two_datasets(
        kind, clients, dim=config.dim, l2=config.l2 or 0.01, seed=config.seed
    )


def _build_model(config: ProblemConfig, federated: data.FederatedData) -> Problem:
    name, _, width = config.model.partition(":")
    checks.choice("model", name, MODELS)
    if name in ("softmax", "mlp"):
        if federated.classes == 0:
            raise InputError(
                f"{name} needs labels, and {federated.name} has none; use model 'linear'"
            )
        if name == "softmax":
            return problems.softmax(
                federated.clients, classes=federated.classes, l2=config.l2, test=federated.test
            )
        hidden = checks.whole("the width in model 'mlp:WIDTH'", checks.written(width or "300"))
        return problems.mlp(
            federated.clients,
            hidden,
            classes=federated.classes,
            l2=config.l2,
            test=federated.test,
            seed=config.seed,
        )
    if name == "logistic" and federated.classes != 2:
        raise InputError(
            f"logistic needs two classes, and {federated.name} has {federated.classes}; use model "
            "'softmax'"
        )
    kind = problems.logistic if name == "logistic" else problems.linear
    return kind(
        [_with_intercept(c) for c in federated.clients],
        l2=config.l2,
        test=_with_intercept(federated.test),
    )


def _with_intercept(client: tuple[NDArray[Any], NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Append a column of ones to the features: the regressions have no intercept of their own."""
    x, y = client
    return np.hstack([x, np.ones((len(x), 1), x.dtype)]), y

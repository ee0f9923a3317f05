"""From a configuration to the arguments of `simulate`: optimisers by name, availability from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.experiments.config import Config, Local, Server

__all__ = ["local", "shared"]

ADAPTIVITY = 1e-3  # the tau of Reddi et al. 2021: what is added to the root of the second moment


def shared(config: Config) -> dict[str, Any]:
    """The arguments of `simulate` that a configuration gives, but for the local optimiser and the seed.

    >>> shared(Config())["cohort"]
    1.0
    """
    return {
        "rounds": config.rounds,
        "local_steps": config.local.steps,
        "local_epochs": config.local.epochs,
        "batch_size": config.local.batch_size,
        "draw": config.local.draw,
        "cohort": config.cohort.size,
        "availability": _availability(config.cohort.availability),
        "weights": config.weights,
        "stop_at": config.stop_at,
        "metrics": config.metrics,
        "evaluate_every": config.evaluate_every,
        "precision": config.precision,
        "block": config.block,
        "stale": config.stale,
        "compression": config.compression,
        "server_optimizer": _server(config.server),
    }


def local(section: Local) -> dict[str, Any]:
    """The step size, or the optimiser that brings it.

    >>> local(Local(lr=0.2))
    {'lr': 0.2}
    """
    if section.optimizer == "sgd":
        return {"lr": section.lr}
    import optax

    if section.optimizer == "adam":
        return {"local_optimizer": optax.adam(section.lr)}
    return {"local_optimizer": optax.sgd(section.lr, momentum=section.momentum)}


def _server(section: Server) -> Any:
    """The server's optimiser, with the second moment's decay and floor of Reddi et al. 2021."""
    if section.optimizer == "none":
        return None
    import optax

    lr = checks.number("server.lr", section.lr, above=0)
    momentum = checks.number("server.momentum", section.momentum, at_least=0)
    if section.optimizer in ("momentum", "nesterov"):
        return optax.sgd(lr, momentum=momentum, nesterov=section.optimizer == "nesterov")
    if section.optimizer == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=ADAPTIVITY**2, eps=ADAPTIVITY)
    adaptive = optax.adam if section.optimizer == "adam" else optax.yogi
    return adaptive(lr, b1=momentum, b2=0.99, eps=ADAPTIVITY)


def _availability(path: str | None) -> NDArray[Any] | None:
    if path is None:
        return None
    try:
        return np.loadtxt(Path(path), delimiter=",", ndmin=2)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; cohort.availability is a CSV file of zeros and ones") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a CSV file of zeros and ones: {error}") from None

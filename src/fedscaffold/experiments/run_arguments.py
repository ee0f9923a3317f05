"""Convert a configuration to arguments of `simulate`: optimizers by name, availability from a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.experiments.config_file import Config, Local, Server
from fedscaffold.run_config import ARGUMENTS

__all__ = ["OF_ONE_RUN", "run_arguments"]

ADAPTIVITY = 1e-3  # tau of Reddi et al. 2021, added to the root of the second moment
OF_ONE_RUN = ("lr", "local_optimizer", "seed", "every", "client_state")
"""Arguments that a comparison varies, or does not take."""


def run_arguments(config: Config, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the arguments of `simulate` that a configuration gives.

    Args:
        config: The configuration.
        without: Names of arguments to leave out.

    >>> run_arguments(Config(local={"lr": 0.2, "steps": 3}))["lr"]
    0.2
    """
    given: dict[str, Any] = {}
    for name, stated in ARGUMENTS.items():
        if stated.key is not None:
            section, _, field = stated.key.rpartition(".")
            given[name] = getattr(getattr(config, section) if section else config, field)
    given |= {
        "availability": _load_availability(config.cohort.availability),
        "local_optimizer": _local_optimizer(config.local),
        "server_optimizer": _server_optimizer(config.server),
    }
    if given["local_optimizer"] is not None or config.local.lr == "tuned":
        given["lr"] = None
    return {name: value for name, value in given.items() if name not in set(without)}


def _local_optimizer(section: Local) -> Any:
    """Return the local optimizer with its step size; None for SGD, or while the step size is being tuned."""
    if section.optimizer == "sgd" or section.lr == "tuned":
        return None
    import optax

    if section.optimizer == "adam":
        return optax.adam(section.lr)
    return optax.sgd(section.lr, momentum=section.momentum)


def _server_optimizer(section: Server) -> Any:
    """Return the server's optimizer, with the second-moment decay and floor of Reddi et al. 2021."""
    if section.optimizer == "none":
        return None
    import optax

    lr, momentum = section.lr, section.momentum
    if section.optimizer in ("momentum", "nesterov"):
        return optax.sgd(lr, momentum=momentum, nesterov=section.optimizer == "nesterov")
    if section.optimizer == "adagrad":
        return optax.adagrad(lr, initial_accumulator_value=ADAPTIVITY**2, eps=ADAPTIVITY)
    adaptive = optax.adam if section.optimizer == "adam" else optax.yogi
    return adaptive(lr, b1=momentum, b2=0.99, eps=ADAPTIVITY)


def _load_availability(path: str | None) -> NDArray[Any] | None:
    if path is None:
        return None
    try:
        return np.loadtxt(Path(path), delimiter=",", ndmin=2)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; cohort.availability is a CSV file of zeros and ones") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a CSV file of zeros and ones: {error}") from None

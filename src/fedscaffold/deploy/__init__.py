"""Deployment: server and client, validation of replies, durable state.

Torch, JAX or NumPy at the sites; Flower.

    settings.py       settings, read from TOML       server.py       rounds, each committed before the next
    schema.py         serialisation                  client.py       replies of a site
    gate.py           validation of replies          server_loop.py  the main loop, for any transport
    aggregation.py    state transitions              audit.py        the log, and who missed rounds

JAX, torch and Flower are imported only when used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedscaffold.deploy.arrays_client import ArraysLearner
from fedscaffold.deploy.client import Learner, Site, Trained, Work, answer
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.server import Server
from fedscaffold.deploy.server_loop import InProcess, Stopped, Summary, drive
from fedscaffold.deploy.settings import Settings, load, parse

if TYPE_CHECKING:
    from fedscaffold.deploy.jax_client import JaxLearner
    from fedscaffold.deploy.torch_client import TorchLearner

__all__ = [
    "ArraysLearner",
    "InProcess",
    "JaxLearner",
    "Learner",
    "Refused",
    "Server",
    "Settings",
    "Site",
    "Stopped",
    "Summary",
    "TorchLearner",
    "Trained",
    "Work",
    "answer",
    "drive",
    "load",
    "parse",
]

LAZY = {"JaxLearner": "jax_client", "TorchLearner": "torch_client"}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""HOW it is deployed: server, client, the gate for replies, durable state; torch, JAX or arrays at the sites; Flower.

    settings.py    the TOML                       server.py    one round at a time, committed before the next
    schema.py      a model on the wire            client.py    what a site answers
    gate.py        what a reply must pass         drive.py     the loop, for any transport
    rounds.py      what a round does to the state

Nothing here imports JAX, torch or Flower until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedscaffold.deploy.arrays_client import ArraysLearner
from fedscaffold.deploy.client import Learner, Site, Trained, Work, answer
from fedscaffold.deploy.drive import InProcess, Stopped, Summary, drive
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.server import Server
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


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name == "TorchLearner":
        from fedscaffold.deploy.torch_client import TorchLearner

        return TorchLearner
    if name == "JaxLearner":
        from fedscaffold.deploy.jax_client import JaxLearner

        return JaxLearner
    raise AttributeError(f"module 'fedscaffold.deploy' has no attribute {name!r}")

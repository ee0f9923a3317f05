"""Deployment on Flower: server, clients in torch, JAX or NumPy, and durable state.

    settings.py       settings, read from TOML
    schema.py         serialisation
    gate.py           validation of replies
    blocks.py         vectors, block by block, and in files if they are large
    aggregation.py    state transitions
    requests.py       the requests of a round, each made when it is asked for
    closing.py        which replies of a round count
    server.py         rounds, each committed before the next
    client.py         replies of a site
    site_privacy.py   a private site's own rules, charges and noise
    server_loop.py    the main loop, for any transport
    export_model.py   the trained model for use
    audit.py          the log, and who missed rounds
    worker.py         a site's process, which holds app, model and data
    messenger.py      passes Flower's messages on to it

Everything is imported when it is first used, as the messenger must start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedscaffold.deploy.arrays_client import ArraysLearner
    from fedscaffold.deploy.client import Learner, Site, Trained, Work, answer
    from fedscaffold.deploy.gate import Refused
    from fedscaffold.deploy.jax_client import JaxLearner
    from fedscaffold.deploy.server import Server
    from fedscaffold.deploy.server_loop import InProcess, Stopped, Summary, drive
    from fedscaffold.deploy.settings import Settings, load, parse
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

_HOMES = {
    "arrays_client": ("ArraysLearner",),
    "client": ("Learner", "Site", "Trained", "Work", "answer"),
    "gate": ("Refused",),
    "jax_client": ("JaxLearner",),
    "server": ("Server",),
    "server_loop": ("InProcess", "Stopped", "Summary", "drive"),
    "settings": ("Settings", "load", "parse"),
    "torch_client": ("TorchLearner",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

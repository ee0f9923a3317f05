"""Federated optimisation with SCAFFOLD and related methods.

>>> import fedscaffold as fs
>>> problem = fs.problems.quadratic(num_clients=10, dim=20, mu=0.01, smoothness=1.0, seed=0)
>>> run = fs.simulate(fs.scaffold(), problem, rounds=20, local_steps=10, lr=0.1, cohort=0.2, seed=0)
>>> run.vector.shape, run.rounds
((20,), 20)

Submodules are imported on first use; JAX is imported with the first problem.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from fedscaffold.algorithms import (
    ALGORITHMS,
    Algorithm,
    amplified_scaffold,
    ca2fl,
    dane,
    ditto,
    fedavg,
    fedavg_m,
    fedbn,
    feddyn,
    fedexp,
    fednova,
    fedprox,
    local_layers,
    mime,
    scafcom,
    scaffnew,
    scaffold,
    scaffold_m,
    scaffold_xi,
    sgd,
)
from fedscaffold.checks import InputError
from fedscaffold.metrics import metric
from fedscaffold.run_config import RunConfig

if TYPE_CHECKING:
    from fedscaffold import attacks, data, privacy, problems, robust, theory
    from fedscaffold.estimators import FederatedClassifier, FederatedRegressor
    from fedscaffold.grids import Grid, GridRun
    from fedscaffold.grids.grid import grid
    from fedscaffold.problems import Problem
    from fedscaffold.simulation import (
        Audit,
        Callback,
        Look,
        Run,
        Simulator,
        Sweep,
        audit_privacy,
        compression,
        delays,
        richardson,
        simulate,
        stale,
        sweep,
    )
    from fedscaffold.theory.heterogeneity import heterogeneity
    from fedscaffold.theory.planning import plan
    from fedscaffold.theory.private_plan import plan_privacy

__version__ = "0.2.0.dev0"
__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Audit",
    "Callback",
    "FederatedClassifier",
    "FederatedRegressor",
    "Grid",
    "GridRun",
    "InputError",
    "Look",
    "Problem",
    "Run",
    "RunConfig",
    "Simulator",
    "Sweep",
    "amplified_scaffold",
    "attacks",
    "audit_privacy",
    "ca2fl",
    "compression",
    "dane",
    "data",
    "delays",
    "ditto",
    "fedavg",
    "fedavg_m",
    "fedbn",
    "feddyn",
    "fedexp",
    "fednova",
    "fedprox",
    "grid",
    "heterogeneity",
    "local_layers",
    "metric",
    "mime",
    "plan",
    "plan_privacy",
    "privacy",
    "problems",
    "richardson",
    "robust",
    "scafcom",
    "scaffnew",
    "scaffold",
    "scaffold_m",
    "scaffold_xi",
    "sgd",
    "simulate",
    "stale",
    "sweep",
    "theory",
]

_LATER = {"Problem": "problems"} | dict.fromkeys(
    ("heterogeneity", "plan", "plan_privacy"), "theory"
)
_LATER |= dict.fromkeys(
    (
        "Audit",
        "Callback",
        "Look",
        "Run",
        "Simulator",
        "Sweep",
        "audit_privacy",
        "compression",
        "delays",
        "richardson",
        "simulate",
        "stale",
        "sweep",
    ),
    "simulation",
)
_LATER |= dict.fromkeys(("FederatedClassifier", "FederatedRegressor"), "estimators")
_LATER |= dict.fromkeys(("Grid", "GridRun", "grid"), "grids")


_ROOMS = {"conformance", "data", "deploy", "estimators", "grids"}
_ROOMS |= {"privacy", "problems", "runs", "simulation", "theory"}
_ROOMS |= {"attacks", "robust"}


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> _Any:
    room = _LATER.get(name, name)
    if room not in _ROOMS:
        raise AttributeError(f"module 'fedscaffold' has no attribute {name!r}")
    try:
        module = _importlib.import_module(f"fedscaffold.{room}")
    except ModuleNotFoundError as error:
        extra = {"conformance": "all", "data": "all", "deploy": "deploy", "runs": "report"}.get(
            room, "sim"
        )
        missing = str(error.name).partition(".")[0]
        raise ImportError(
            f"fs.{name} needs {missing}: pip install 'fedscaffold[{extra}]'"
        ) from error
    if name not in _LATER:
        return module
    globals()[name] = found = getattr(module, name)
    return found

"""Shared by the adapters: what begins a case, traces, and stand-ins for unused packages."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedscaffold.conformance import Case, Trace, Unsupported

__all__ = [
    "Criterion",
    "begin",
    "count_records",
    "half_square",
    "least_squares",
    "stand_in",
    "trace",
]

TENTHS = 10  # the weights of the suite's federations


def begin(case: Case, *refused: str) -> None:
    """Set torch's precision to the case's, and refuse what a project does not offer.

    Args:
        case: The case.
        refused: Keys of the table below.

    Raises:
        Unsupported: If the case needs something that is refused.
    """
    torch.set_default_dtype(getattr(torch, case.precision))
    asked = {
        "option I": case.option == 1,
        "frozen control variates": case.frozen,
        "restarts": case.restart is not None,
        "momentum": case.momentum != 0,
        "a schedule within a round": len(set(case.lr)) > 1,
        "unequal local steps": len(set(case.local_steps)) > 1,
        "weights": len(set(case.weights)) > 1,
        "a server step": case.server_lr != 1,
        "lost replies": any(case.lost),
        "sampling": any(len(cohort) < case.num_clients for cohort in case.cohorts),
        "changing cohorts": len({len(cohort) for cohort in case.cohorts}) > 1,
        "rounds without replies": any(not case.heard(r) for r in range(case.rounds)),
    }
    if missing := [feature for feature in refused if asked[feature]]:
        raise Unsupported(", ".join(missing))


def count_records(case: Case) -> list[int]:
    """Return numbers of records in proportion to the weights of the clients.

    >>> from fedscaffold.conformance import federation
    >>> case = federation([[[2.0]]] * 2, [[1.0]] * 2, [3.0], rounds=1, steps=1, lr=0.5)
    >>> count_records(case), count_records(case._replace(weights=(0.7, 0.3)))
    ([1, 1], [7, 3])
    """
    if len(set(case.weights)) == 1:
        return [1 for _ in case.weights]
    return [round(p * TENTHS) for p in case.weights]


def least_squares(case: Case, client: int) -> tuple[torch.nn.Module, DataLoader[Any]]:
    """Return a client's quadratic as a linear model and records, for `half_square`.

    Opacus differentiates by record, which it cannot do with a model that returns its own loss.
    """
    hessian, linear = case.hessians[client], case.linear[client]
    root, dim = np.linalg.cholesky(hessian), len(linear)
    rows, targets = root.T * dim**0.5, np.linalg.solve(root, linear) * dim**0.5
    net = torch.nn.Linear(dim, 1, bias=False)
    net.weight.data = torch.tensor(case.x0)[None]
    records = TensorDataset(torch.tensor(rows), torch.tensor(targets)[:, None])
    return net, DataLoader(records, batch_size=dim)


class Criterion(torch.nn.Module):
    """The model's output, which is the loss already."""

    def forward(self, output: Any, target: Any) -> Any:
        return output


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return half of the mean squared error."""
    return 0.5 * torch.nn.functional.mse_loss(output, target)


def trace(states: Iterable[tuple[Any, Any, Sequence[Any]]]) -> Trace:
    """Return the trace of states (x, c, c_i), one before the first round and one after each."""
    return Trace(*(np.array(column, np.float64) for column in zip(*states, strict=True)))


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below the given top-level names, as mocks."""

    def __init__(self, tops: Sequence[str]) -> None:
        self.tops = tops

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a specification for names that are stood in for."""
        if name.split(".")[0] in self.tops:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return a mock that can be imported from."""
        module: Any = mock.MagicMock(name=spec.name)
        module.__path__ = []
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def stand_in(*tops: str) -> None:
    """Replace top-level packages that cannot be imported by mocks.

    A project may import data sets, plots or trackers that this environment does not have and the
    run never uses.
    """
    missing = []
    for top in tops:
        try:
            importlib.import_module(top)
        except Exception:
            for old in [name for name in sys.modules if name.split(".")[0] == top]:
                del sys.modules[old]
            missing.append(top)
    sys.meta_path.insert(0, _StandIn(missing))

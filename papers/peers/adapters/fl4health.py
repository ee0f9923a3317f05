"""FL4Health, from a checkout: `ScaffoldClient` or `DPScaffoldClient`, and the `Scaffold` strategy.

Stood in for: trackers and data packages. The private client trains the same quadratics as least
squares, which Opacus can differentiate by record, without noise and with a bound never reached.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from papers.peers.adapters.harness import (
    Criterion,
    begin,
    half_square,
    least_squares,
    stand_in,
    trace,
)

stand_in(
    "wandb", "sklearn", "monai", "dp_accounting", "pandas", "nnunetv2", "matplotlib", "torchvision",
    "torchmetrics", "peft", "transformers", "picai_prep", "picai_eval",
)  # fmt: skip

import numpy as np
import torch
from fl4health.clients.scaffold_client import DPScaffoldClient, ScaffoldClient
from fl4health.strategies.scaffold import Scaffold
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from torch.utils.data import DataLoader, TensorDataset

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


class HalfSquare(torch.nn.Module):
    """Half of the mean squared error."""

    def forward(self, output: Any, target: Any) -> Any:
        return half_square(output, target)


class Methods:
    """What FL4Health asks its users to write."""

    case: Case
    number: int

    def get_model(self, config: Any) -> Any:
        return Quadratic(self.case)

    def get_data_loaders(self, config: Any) -> Any:
        steps = self.case.local_steps[self.number]
        records = TensorDataset(batch(self.number, steps), torch.zeros(steps))
        loader = DataLoader(records, batch_size=1)
        return loader, loader

    def get_optimizer(self, config: Any) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=self.case.lr[0])

    def get_criterion(self, config: Any) -> Any:
        return Criterion()


class Client(Methods, ScaffoldClient):
    """The plain client."""


class PrivateClient(Methods, DPScaffoldClient):
    """The client with Opacus."""

    def get_model(self, config: Any) -> Any:
        return least_squares(self.case, self.number)[0]

    def get_data_loaders(self, config: Any) -> Any:
        loader = least_squares(self.case, self.number)[1]
        return loader, loader

    def get_criterion(self, config: Any) -> Any:
        return HalfSquare()


def drive(case: Case, kind: type) -> Trace:
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "momentum",
        "a schedule within a round",
        "weights",
    )
    clients = []
    for i in range(case.num_clients):
        client = kind(data_path=Path(), metrics=[], device=torch.device("cpu"))
        client.case, client.number = case, i
        clients.append(client)
    model = clients[0].get_model(None)
    start = [p.detach().numpy() for p in model.parameters()]
    strategy = Scaffold(
        initial_parameters=ndarrays_to_parameters(start),
        model=model,
        learning_rate=case.server_lr,
        fraction_fit=float(np.mean([len(one) for one in case.cohorts])) / case.num_clients,
    )
    zero = np.zeros_like(case.x0)

    def look() -> tuple:
        held = [client.client_control_variates for client in clients]
        x, c = strategy.server_model_weights, strategy.server_control_variates
        return case.join(x), case.join(c), [zero if h is None else case.join(h) for h in held]

    both = [*strategy.server_model_weights, *strategy.server_control_variates]
    sent = ndarrays_to_parameters(both)
    states = [look()]
    for r, cohort in enumerate(case.cohorts):
        results = []
        for i in cohort:
            config = {
                "current_server_round": r + 1,
                "local_steps": case.local_steps[i],
                "batch_size": 1,
                "clipping_bound": 1e9,
                "noise_multiplier": 0.0,
            }
            arrays, records, metrics = clients[i].fit(parameters_to_ndarrays(sent), config)
            reply = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), records, metrics)
            if i in case.heard(r):
                results.append((SimpleNamespace(cid=str(i)), reply))
        update, _ = strategy.aggregate_fit(r + 1, results, [])
        sent = sent if update is None else update
        states.append(look())
    return trace(states)


@offers("tensors")
def adapter(case: Case) -> Trace:
    """The plain client."""
    return drive(case, Client)


def private(case: Case) -> Trace:
    """The private client, with neither noise nor clipping."""
    return drive(case, PrivateClient)

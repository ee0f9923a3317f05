"""fluke: `SCAFFOLDClient` and `SCAFFOLDServer` over fluke's own channel.

Stood in for: trackers, plots and data sets. A client's records are its weight, read as one batch;
an epoch is a local step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in(
    "torchvision", "wandb", "datasets", "clearml", "tensorboard", "seaborn", "matplotlib", "opacus",
    "hydra", "requests",
)  # fmt: skip

import numpy as np
import torch
from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector

RECORDS = 120  # of all clients together: the weights of the suite's federations are tenths


def federation(case: Case) -> tuple[SCAFFOLDServer, list[SCAFFOLDClient]]:
    clients = []
    for i, share in enumerate(case.weights):
        records, steps = round(share * RECORDS), case.local_steps[i]

        def factor(epoch: int, steps: int = steps) -> float:
            return case.lr[epoch % steps] / case.lr[0]

        configured = OptimizerConfigurator(
            {"name": "SGD", "lr": case.lr[0], "momentum": case.momentum},
            {"name": "LambdaLR", "lr_lambda": factor},
        )
        data = FastDataLoader(
            batch(i, records),
            torch.zeros(records, dtype=torch.long),
            num_labels=1,
            batch_size=0,
            skip_singleton=False,
        )
        # without persistency the optimizer, and with it the momentum buffer, is new in every round
        client = SCAFFOLDClient(
            i, data, None, configured, loss, local_epochs=steps, persistency=case.momentum == 0
        )
        clients.append(client)
    server = SCAFFOLDServer(
        Quadratic(case), None, clients, weighted=True, global_step=case.server_lr
    )
    for client in clients:
        client.set_channel(server.channel)
    return server, clients


def restart(case: Case, server: Any, clients: list) -> tuple[SCAFFOLDServer, list[SCAFFOLDClient]]:
    """Save by fluke's own methods and load into new objects."""
    with tempfile.TemporaryDirectory() as place:
        server.save(Path(place) / "server.pth")
        for client in clients:
            client.save(Path(place) / f"{client.index}.pth")
        server, clients = federation(case)
        server.load(Path(place) / "server.pth")
        for client in clients:
            client.load(Path(place) / f"{client.index}.pth", Quadratic(case))
    return server, clients


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive server and clients as the server's `fit` does."""
    begin(case, "option I", "frozen control variates", "lost replies", "rounds without replies")
    server, clients = federation(case)
    zero = np.zeros_like(case.x0)

    def look() -> tuple:
        held = [zero if c.control is None else vector(c.control.values()) for c in clients]
        return vector(server.model.parameters()), vector(server.control.values()), held

    states = [look()]
    for r, cohort in enumerate(case.cohorts):
        eligible = [clients[i] for i in cohort]
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(r + 1)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))
        if r + 1 == case.restart:
            server, clients = restart(case, server, clients)
        states.append(look())
    return trace(states)

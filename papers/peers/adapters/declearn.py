"""declearn: `TrainingManager` at the clients, `FederatedServer`'s update and its `Checkpointer`.

Replaced: sockets. `adapter` averages uniformly; `by_steps` is the aggregator's default.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from declearn import messaging
from declearn.aggregator import AveragingAggregator
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedServer
from declearn.main.utils import Checkpointer
from declearn.model.torch import TorchModel
from declearn.optimizer import Optimizer
from declearn.optimizer.modules import (
    MomentumModule,
    ScaffoldClientModule,
    ScaffoldServerModule,
)
from declearn.optimizer.schedulers import Scheduler
from declearn.training import TrainingManager

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, vector
from papers.peers.adapters.harness import begin, trace

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


class WithinRound(Scheduler):
    """The case's step sizes."""

    name = "within-round"
    rates: tuple[float, ...] = ()

    def compute_value(self, step: int, round_: int) -> float:
        return self.rates[step % len(self.rates)]


class Loss(torch.nn.Module):
    """The model's output, which is the loss already."""

    def forward(self, output: Any, _target: Any) -> Any:
        return output


def client_optimizer(case: Case) -> Optimizer:
    modules = [ScaffoldClientModule()]
    if case.momentum:
        modules.append(MomentumModule(beta=case.momentum))
    if len(set(case.lr)) == 1:
        return Optimizer(lrate=case.lr[0], modules=modules)
    WithinRound.rates = case.lr
    return Optimizer(lrate=WithinRound(case.lr[0]), modules=modules)


def server_optimizer(case: Case) -> Optimizer:
    return Optimizer(lrate=case.server_lr, modules=[ScaffoldServerModule()])


def reload(saved: Optimizer, blank: Optimizer) -> Optimizer:
    """Save an optimizer by declearn's own checkpointer and load it into a new one."""
    with tempfile.TemporaryDirectory() as folder:
        keeper = Checkpointer(folder, max_history=1)
        keeper.save_optimizer(saved, timestamp=False)
        keeper.load_optimizer(blank, load_state=True)
    return blank


def flat(value: Any, like: Any) -> Any:
    """Return a vector of declearn's as one array; a scalar stands for zeros."""
    if isinstance(value, (float, int)):
        return np.zeros_like(like)
    return vector(value.coefs.values())


def drive(case: Case, steps_weighted: bool) -> Trace:
    begin(
        case, "option I", "frozen control variates", "weights", "lost replies",
        "rounds without replies",
    )  # fmt: skip
    aggregator = AveragingAggregator(steps_weighted=steps_weighted)
    server = FederatedServer.__new__(FederatedServer)  # opens no sockets
    server.model, server.aggrg = TorchModel(Quadratic(case), Loss()), aggregator
    server.optim = server_optimizer(case)
    server._clients_holding_latest_model = set()
    clients = [
        TrainingManager(
            TorchModel(Quadratic(case), Loss()),
            client_optimizer(case),
            aggregator,
            InMemoryDataset(np.full((steps, 1), float(i)), np.zeros(steps)),
            logger="quiet",
            verbose=False,
        )
        for i, steps in enumerate(case.local_steps)
    ]

    def look() -> tuple:
        c = server.optim.modules[0].collect_aux_var().state  # what it would send next
        held = [flat(client.optim.modules[0].state, case.x0) for client in clients]
        return flat(server.model.get_weights(), case.x0), flat(c, case.x0), held

    states = [look()]
    for r, cohort in enumerate(case.cohorts):
        replies = {}
        for i in cohort:
            if case.momentum:  # declearn keeps the buffer between rounds; a case starts it at zero
                clients[i].optim.modules[1].velocity = 0.0
            request = messaging.TrainRequest(
                round_i=r,
                weights=server.model.get_weights(trainable=True),
                aux_var=copy.deepcopy(server.optim.collect_aux_var()),
                batches={"batch_size": 1},
                n_steps=case.local_steps[i],
            )
            reply = clients[i].training_round(request)
            if isinstance(reply, messaging.Error):
                raise RuntimeError(reply.message)
            replies[str(i)] = reply
        server._conduct_global_update(replies)
        if r + 1 == case.restart:
            server.optim = reload(server.optim, server_optimizer(case))
            for client in clients:
                client.optim = reload(client.optim, client_optimizer(case))
        states.append(look())
    return trace(states)


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Uniform averaging of the model, as of the control variates."""
    return drive(case, steps_weighted=False)


def by_steps(case: Case) -> Trace:
    """Averaging of the model by steps, the aggregator's default."""
    return drive(case, steps_weighted=True)

"""FLGo: the `Server` and `Client` of `flgo.algorithm.scaffold`.

Their constructors, which read a task from disk, are replaced by the attributes that they set. Stood
in for: plotting and data packages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in(
    "torchvision", "prettytable", "requests", "pynvml", "matplotlib", "ujson", "sklearn", "PIL",
    "torchtext", "torchaudio", "pandas",
)  # fmt: skip

import numpy as np
import torch
from flgo.algorithm.scaffold import Client, Server
from flgo.utils import fmodule

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector


def make_client(case: Case, i: int) -> Client:
    def get_optimizer(model: Any, lr: float, weight_decay: float, momentum: float) -> Any:
        return torch.optim.SGD(
            model.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum
        )

    client = Client.__new__(Client)
    client.c = None
    client.device = torch.device("cpu")
    client.num_steps = case.local_steps[i]
    client.learning_rate, client.momentum = case.lr[0], case.momentum
    client.weight_decay, client.clip_grad = 0.0, 0.0
    client.get_batch_data = lambda: batch(i)
    client.calculator = SimpleNamespace(
        get_optimizer=get_optimizer,
        compute_loss=lambda model, records: {"loss": model(records)},
    )
    return client


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive the packages that server and clients exchange."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a schedule within a round",
        "weights",
        "lost replies",
        "rounds without replies",
    )

    class Net(fmodule.FModule):
        """The case's model; FLGo makes copies of models by their class."""

        def __init__(self) -> None:
            super().__init__()
            self.quadratic = Quadratic(case)

        def forward(self, records: Any) -> Any:
            return self.quadratic(records)

    server = Server.__new__(Server)
    server.model, server.eta = Net(), case.server_lr
    server.cg = server.model.zeros_like()
    server.num_clients = case.num_clients
    clients = [make_client(case, i) for i in range(case.num_clients)]
    zero = np.zeros_like(case.x0)

    def look() -> tuple:
        held = [zero if client.c is None else vector(client.c.parameters()) for client in clients]
        return vector(server.model.parameters()), vector(server.cg.parameters()), held

    states = [look()]
    for cohort in case.cohorts:
        replies = [clients[i].reply(server.pack(i)) for i in cohort]
        moves, changes = [one["dy"] for one in replies], [one["dc"] for one in replies]
        server.model, server.cg = server.aggregate(moves, changes)
        states.append(look())
    return trace(states)

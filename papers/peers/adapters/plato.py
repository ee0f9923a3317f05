"""plato, from a checkout: server, client and callback of its example with SCAFFOLD.

Stood in for: data sets, models and other packages of its registries. Replaced: sockets, by a queue
of what is emitted; payloads go through files, as in its simulations. A client's number of records
is its weight, read as one batch; an epoch is a local step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import begin, count_records, stand_in, trace

stand_in(
    "boto3", "botocore", "datasets", "evaluate", "gym", "lightly", "opacus", "requests", "timm",
    "torch_optimizer", "torchvision", "transformers", "zstd", "scipy", "tqdm",
)  # fmt: skip

import numpy as np
import torch
import yaml
from plato.config import Config

RECORDS = 10  # of all clients together at most
HOME = tempfile.TemporaryDirectory()  # of configuration, models and payloads
SETTINGS: dict[str, dict] = {
    "clients": {"total_clients": 1, "per_round": 1},
    "server": {"address": "127.0.0.1", "port": 8000, "do_test": False},
    "data": {"sampler": "all_inclusive"},
    "trainer": {
        "rounds": 1,
        "epochs": 1,
        "batch_size": RECORDS,
        "optimizer": "SGD",
        "model_name": "quadratic",
    },
    "algorithm": {"type": "fedavg"},
    "parameters": {"optimizer": {"lr": 0.0, "momentum": 0.0}},
}


def first_configuration() -> Path:
    """Write a configuration, which plato reads when it is imported; return plato's folder."""
    path = Path(HOME.name) / "config.yml"
    path.write_text(yaml.safe_dump(SETTINGS))
    arguments = ["plato", "-c", str(path), "-b", HOME.name, "-i", "1", "--cpu", "-l", "critical"]
    os.environ.pop("config_file", None)
    with mock.patch.object(sys, "argv", arguments):
        Config()
    return Path(sys.modules[Config.__module__].__file__ or "").parents[1]


sys.path.append(str(first_configuration() / "examples/customized_client_training/scaffold"))

from scaffold_callback import ScaffoldCallback
from scaffold_client import Client
from scaffold_server import Server
from scaffold_trainer import Trainer

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector

logging.disable(logging.CRITICAL)


class Net(Quadratic):
    """The case's model; plato corrects what is named a weight or a bias."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._parameters = {f"weight_{name}": one for name, one in self._parameters.items()}


class Data:
    """The records of all clients; a client has those that contain its index."""

    def __init__(self, case: Case, i: int) -> None:
        records = count_records(case)[i]
        self.records = torch.utils.data.TensorDataset(batch(i, records), torch.zeros(records))

    def num_train_examples(self) -> int:
        return len(self.records)

    def get_train_set(self) -> Any:
        return self.records


class Wired:
    """What the server, the clients and the trainers of a case share."""

    def __init__(self, case: Case) -> None:
        self.case, self.zero = case, np.zeros_like(case.x0)
        self.queue: deque = deque()  # of what is emitted: the event, the data, to or from whom
        self.held = [self.zero for _ in case.weights]
        self.states: list[tuple] = []

    def socket(self, name: int) -> Any:
        """Return what stands for the socket of a client, or of the server, 0."""

        async def emit(event: str, data: Any, room: int = 0) -> None:
            self.queue.append((event, data, room or name))

        return mock.Mock(emit=emit)

    def trainer(self, model: Any = None, callbacks: Any = None) -> Trainer:
        return QuadraticTrainer(self, model, callbacks)

    def client(self, name: int) -> QuadraticClient:
        client = QuadraticClient(
            model=lambda: Net(self.case), trainer=self.trainer, callbacks=[ScaffoldCallback]
        )
        client.wired, client.sio = self, self.socket(name)
        return client

    async def run(self) -> Trace:
        """Deliver what is emitted until no more is."""
        names = range(1, 1 + self.case.num_clients)
        clients = {name: self.client(name) for name in names}
        server = CaseServer(model=lambda: Net(self.case), trainer=self.trainer)
        server.wired, server.sio = self, self.socket(0)
        server.clients = {name: {"sid": name} for name in names}
        server.configure()
        server.look()
        await server._select_clients()
        while self.queue:
            event, data, name = self.queue.popleft()
            if event == "payload_to_arrive":
                await clients[name]._payload_to_arrive(data["response"])
            elif event == "client_report":
                await server._client_report_arrived(name, data["id"], data["report"])
        return trace(self.states)


class QuadraticTrainer(Trainer):
    """The example's trainer; the model's output is the loss already."""

    def __init__(self, wired: Wired, model: Any, callbacks: Any) -> None:
        super().__init__(model, callbacks)
        self.wired = wired

    def get_loss_criterion(self) -> Any:
        return loss

    def train_run_end(self, config: Any) -> None:
        super().train_run_end(config)
        self.wired.held[self.client_id - 1] = vector(self.client_control_variate.values())


class QuadraticClient(Client):
    """The example's client, whose data are those of the client that it is asked to be."""

    wired: Wired

    def _load_data(self) -> None:
        self.datasource = Data(self.wired.case, self.client_id - 1)


class CaseServer(Server):
    """The example's server, which chooses the case's clients and ends after its rounds."""

    wired: Wired

    def choose_clients(self, clients_pool: Any, clients_count: int) -> list:
        rounds = self.wired.case.cohorts[self.current_round - 1 : self.current_round]
        return [i + 1 for cohort in rounds for i in cohort]

    async def wrap_up(self) -> None:
        self.look()

    def look(self) -> None:
        c = self.server_control_variate
        self.wired.states.append(
            (
                vector(self.trainer.model.parameters()),
                vector(c.values()) if c else self.wired.zero,
                [*self.wired.held],
            )
        )


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive server and clients through the events that they emit."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a schedule within a round",
        "unequal local steps",
        "a server step",
        "changing cohorts",
        "lost replies",
        "rounds without replies",
    )
    Config.clients = Config.clients._replace(
        total_clients=case.num_clients, per_round=len(case.cohorts[0])
    )
    Config.trainer = Config.trainer._replace(rounds=case.rounds, epochs=case.local_steps[0])
    Config.parameters = Config.namedtuple_from_dict(
        {"optimizer": {"lr": case.lr[0], "momentum": case.momentum}}
    )
    with tempfile.TemporaryDirectory() as folder:
        Config.params.update(model_path=folder, checkpoint_path=folder)
        return asyncio.run(Wired(case).run())

"""FedML: `ScaffoldTrainer` of the single-process simulator, its clients and `FedMLAggOperator`.

The trainer's own loop of rounds is run. Replaced: the random choice of clients, the evaluation,
which runs at the end of a round and is where states are read, and the loss, which is fixed there.
Stood in for: the platform's packages.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import Criterion, begin, count_records, stand_in, trace

stand_in(
    "multiprocess", "dotenv", "docker", "GPUtil", "torchvision", "scipy", "requests", "chardet",
    "psutil", "yaml", "pkg_resources", "packaging", "certifi", "cachetools", "paho", "wandb",
    "dateutil", "redis", "sqlalchemy", "httpx", "fastapi", "pandas", "pydantic", "boto3",
    "botocore", "h5py", "PIL", "wget", "click", "prettytable", "tqdm", "dill", "tritonclient",
)  # fmt: skip

import torch
from fedml.simulation.sp.scaffold import scaffold_trainer

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector

logging.disable(logging.CRITICAL)


class Trainer(scaffold_trainer.ScaffoldTrainer):
    """FedML's trainer, whose clients are the case's and whose evaluation keeps the states."""

    case: Case
    states: list

    def _client_sampling(self, round_idx: int, *_: Any) -> list[int]:
        return list(self.case.cohorts[round_idx])

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        self.states.append(self.look())

    def look(self) -> tuple:
        held = [vector(client.c_model_local.parameters()) for client in self.client_list]
        x, c = self.model_trainer.model.parameters(), self.c_model_global.parameters()
        return vector(x), vector(c), held


def make_arguments(case: Case) -> SimpleNamespace:
    return SimpleNamespace(
        federated_optimizer="SCAFFOLD",
        client_num_in_total=case.num_clients,
        client_num_per_round=len(case.cohorts[0]),
        comm_round=case.rounds,
        epochs=1,
        client_optimizer="sgd",
        learning_rate=case.lr[0],
        server_lr=case.server_lr,
        initialize_all_clients=True,
        frequency_of_the_test=1,
        dataset="quadratics",
    )


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Run the trainer; a client's number of records is its weight."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "momentum",
        "a schedule within a round",
        "changing cohorts",
        "lost replies",
        "rounds without replies",
    )
    data = {i: [(batch(i), torch.zeros(1))] * k for i, k in enumerate(case.local_steps)}
    records = dict(enumerate(count_records(case)))
    dataset = [sum(records.values()), 0, None, None, records, data, data, 1]
    with (
        mock.patch.object(scaffold_trainer, "mlops"),
        mock.patch("torch.nn.CrossEntropyLoss", Criterion),
    ):
        trainer = Trainer(dataset, Quadratic(case), torch.device("cpu"), make_arguments(case))
        trainer.case, trainer.states = case, [trainer.look()]
        trainer.train()
    return trace(trainer.states)

"""FL-bench, from a checkout: `SCAFFOLDServer` and `SCAFFOLDClient`.

Replaced: the server's constructor, which reads a data set from disk. A local epoch of its SCAFFOLD
is one batch; batches of one record are skipped there, so clients have two.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in(
    "ray", "hydra", "omegaconf", "torchvision", "data", "faker", "pynvml", "sklearn", "pandas",
    "matplotlib", "umap", "rich", "tqdm",
)  # fmt: skip

import torch
from src.client.scaffold import SCAFFOLDClient
from src.server.fedavg import FedAvgServer
from src.server.scaffold import SCAFFOLDServer

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, loss, vector


class Data(torch.utils.data.Dataset):
    """Two records for each client."""

    def __init__(self, clients: int) -> None:
        self.x = torch.arange(clients, dtype=torch.get_default_dtype()).repeat_interleave(2)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> Any:
        return self.x[k : k + 1], 0

    def train(self) -> None:
        pass

    eval = train


def make_arguments(case: Case) -> SimpleNamespace:
    off = SimpleNamespace(train=False, val=False, test=False, finetune_epoch=0)
    common = SimpleNamespace(
        local_epoch=case.local_steps[0],
        batch_size=2,
        buffers="global",
        use_cuda=False,
        reset_optimizer_on_global_epoch=True,
        client_side_evaluation=False,
        test=SimpleNamespace(client=off),
    )
    return SimpleNamespace(
        case=case,
        scaffold=SimpleNamespace(global_lr=case.server_lr),
        optimizer=SimpleNamespace(lr=case.lr[0]),
        common=common,
    )


def construct(self: Any, args: Any) -> None:
    """Set the attributes that SCAFFOLD uses, in place of `FedAvgServer.__init__`."""
    clients = args.case.num_clients
    self.args, self.client_num, self.train_clients = args, clients, list(range(clients))
    named = Quadratic(args.case).named_parameters()
    self.public_model_params = OrderedDict((k, p.data.clone()) for k, p in named)
    self.client_local_epoches = [args.common.local_epoch] * clients
    self.clients_personal_model_params = {i: {} for i in range(clients)}
    self.client_optimizer_states = {i: {} for i in range(clients)}
    self.client_lr_scheduler_states = {i: {} for i in range(clients)}
    self.testing = False


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive the packages that server and client exchange."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a schedule within a round",
        "unequal local steps",
        "weights",
        "lost replies",
        "rounds without replies",
    )
    args, clients = make_arguments(case), range(case.num_clients)
    with mock.patch.object(FedAvgServer, "__init__", construct):
        server = SCAFFOLDServer(args)
    client = SCAFFOLDClient(
        model=Quadratic(case),
        optimizer_cls=partial(torch.optim.SGD, lr=case.lr[0], momentum=case.momentum),
        lr_scheduler_cls=None,
        args=args,
        dataset=Data(case.num_clients),
        data_indices=[{"train": [2 * i, 2 * i + 1], "val": [], "test": []} for i in clients],
        device=torch.device("cpu"),
        return_diff=True,
    )
    client.criterion = loss

    def look() -> tuple:
        x = vector(server.public_model_params.values())
        return x, vector(server.c_global), [vector(c) for c in server.c_local]

    states = [look()]
    for cohort in case.cohorts:
        replies = {i: client.train(server.package(i)) for i in cohort}
        server.aggregate_client_updates(replies)
        states.append(look())
    return trace(states)

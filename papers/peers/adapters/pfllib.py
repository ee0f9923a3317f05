"""PFLlib, from a checkout: its SCAFFOLD server and `clientSCAFFOLD`.

Replaced: the files of data sets, and the random choice of the replies that are lost.
"""

from __future__ import annotations

import random
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in("h5py", "sklearn", "torchvision", "calmsize")
sys.modules.setdefault("utils.dlg", types.SimpleNamespace(DLG=None))  # an attack, not used here

import numpy as np
import torch
from flcore.clients import clientbase, clientscaffold
from flcore.servers import serverbase, serverscaffold

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector

OFF = {
    "few_shot": 0,
    "algorithm": "SCAFFOLD",
    "time_select": False,
    "goal": "",
    "time_threthold": 1e9,
    "top_cnt": 100,
    "save_folder_name": "",
    "auto_break": False,
    "eval_gap": 1,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 1,
    "batch_num_per_client": 1,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99,
    "device": "cpu",
    "dataset": "quadratics",
    "num_classes": 1,
}


def make_arguments(case: Case, slow: bool) -> SimpleNamespace:
    fewest = min(len(cohort) for cohort in case.cohorts)
    return SimpleNamespace(
        **OFF,
        model=Quadratic(case),
        global_rounds=case.rounds,
        local_epochs=max(case.local_steps) if slow else 1,
        batch_size=1,
        local_learning_rate=case.lr[0],
        num_clients=case.num_clients,
        join_ratio=(fewest + 0.5) / case.num_clients,
        random_join_ratio=len({len(cohort) for cohort in case.cohorts}) > 1,
        server_learning_rate=case.server_lr,
    )


def drive(case: Case, slow: bool) -> Trace:
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "momentum",
        "a schedule within a round",
        "weights",
    )
    records = (1,) * case.num_clients if slow else case.local_steps

    def read_client_data(_: Any, i: int, is_train: bool = True, few_shot: int = 0) -> list:
        return [(one, torch.zeros(())) for one in batch(i, records[i])]

    clientbase.read_client_data = serverbase.read_client_data = read_client_data
    with mock.patch("builtins.print"):
        server = serverscaffold.SCAFFOLD(make_arguments(case, slow), 0)
    for client in server.clients:
        client.loss = loss
        client.train_slow = slow and case.local_steps[client.id] < max(case.local_steps)

    def look() -> tuple:
        held = [vector(client.client_c) for client in server.clients]
        return vector(server.global_model.parameters()), vector(server.global_c), held

    states = [look()]
    for r, cohort in enumerate(case.cohorts):
        server.selected_clients = [server.clients[i] for i in cohort]
        server.send_models()
        for client in server.selected_clients:
            steps = case.local_steps[client.id]
            with (
                mock.patch.object(np.random, "randint", return_value=steps),
                mock.patch.object(clientscaffold.time, "sleep"),
            ):
                client.train()
        heard = [server.clients[i] for i in case.heard(r)]
        with mock.patch.object(random, "sample", return_value=heard):
            server.receive_models()
        server.aggregate_parameters()
        states.append(look())
    return trace(states)


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Unequal local steps by unequal numbers of records."""
    return drive(case, slow=False)


def slow_clients(case: Case) -> Trace:
    """Unequal local steps by PFLlib's own slow clients."""
    return drive(case, slow=True)

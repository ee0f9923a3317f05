"""pfl: its `SCAFFOLD` algorithm with `PyTorchModel` and in-memory user states.

pfl casts model differences to float32; they are kept in float64 here.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import torch
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, vector
from papers.peers.adapters.harness import begin, trace


class Net(Quadratic):
    """The case's model with pfl's two methods."""

    def loss(self, records: Any) -> Any:
        return self(torch.as_tensor(records))

    def metrics(self, records: Any) -> dict:
        return {}


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive the algorithm's own context, local training and server update."""
    begin(
        case,
        "frozen control variates",
        "restarts",
        "momentum",
        "a schedule within a round",
        "weights",
        "lost replies",
        "rounds without replies",
    )
    with mock.patch.object(torch, "float32", torch.float64):
        return run(case)


def run(case: Case) -> Trace:
    net = Net(case)
    names = [name for name, _ in net.named_parameters()]
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=case.server_lr))
    storage, algorithm = InMemoryUserStateStorage(), SCAFFOLD()
    train = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=case.lr[0], local_batch_size=1
    )
    users = [
        Dataset([np.full((steps, 1), i)], user_id=str(i))
        for i, steps in enumerate(case.local_steps)
    ]
    zero = np.zeros_like(case.x0)

    def held(i: int) -> Any:
        try:
            kept = storage.load_state(str(i), "local_c")
        except UserNotFoundError:
            return zero
        return vector(kept[name] for name in names)

    states = [(case.x0, zero, np.zeros_like(case.linear))]
    for r, cohort in enumerate(case.cohorts):
        parameters = SCAFFOLDParams(
            central_num_iterations=case.rounds + 1,
            evaluation_frequency=10**9,
            val_cohort_size=0,
            train_cohort_size=len(cohort),
            population=case.num_clients,
            use_gradient_as_control_variate=case.option == 1,
            user_state_storage=storage,
        )
        (context, *_), model, _ = algorithm.get_next_central_contexts(model, r, parameters, train)
        context = dataclasses.replace(context, do_evaluation=False)
        total = None
        for i in cohort:
            sent, _ = algorithm.simulate_one_user(model, users[i], context)
            sent = type(sent)({k: v.clone() for k, v in sent.items()}, weight=1)
            total = sent if total is None else total + sent
        model, _ = algorithm.process_aggregated_statistics(context, Metrics(), model, total)
        c = vector(algorithm._server_c[name] for name in names)
        states.append((vector(net.parameters()), c, [held(i) for i in range(case.num_clients)]))
    return trace(states)

"""SubstraFL: `TorchScaffoldAlgo` and the `Scaffold` strategy, called without the platform.

A client's number of records is its weight, read as whole batches. The model stays with the clients
there, who add the averaged moves; x is their sum here. The momentum buffer, which outlives a round
there, is emptied before each, as the suite's cases ask.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import torch
from substrafl.algorithms.pytorch import TorchScaffoldAlgo
from substrafl.index_generator import NpIndexGenerator
from substrafl.strategies import Scaffold

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector
from papers.peers.adapters.harness import Criterion, begin, count_records, trace

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


class Data(torch.utils.data.Dataset):
    """Records that hold the client's number."""

    def __init__(self, data_from_opener: Any, is_inference: bool) -> None:
        self.records = data_from_opener

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, k: int) -> Any:
        return self.records[k], torch.zeros(())


def make_algorithm(case: Case, i: int) -> TorchScaffoldAlgo:
    model = Quadratic(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr[0], momentum=case.momentum)

    def factor(step: int) -> float:
        return case.lr[step % len(case.lr)] / case.lr[0]

    varies = len(set(case.lr)) > 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor) if varies else None

    class Algorithm(TorchScaffoldAlgo):
        """The algorithm of one client."""

        def __init__(self) -> None:
            super().__init__(
                model=model,
                criterion=Criterion(),
                optimizer=optimizer,
                index_generator=NpIndexGenerator(batch_size=1, num_updates=case.local_steps[i]),
                dataset=Data,
                scheduler=schedule,
                seed=0,
                disable_gpu=True,
            )

    return Algorithm()


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Call the decorated functions with `_skip=True`, as the platform's workers do."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "unequal local steps",
        "sampling",
        "lost replies",
        "rounds without replies",
    )
    algorithms = [make_algorithm(case, i) for i in range(case.num_clients)]
    strategy = Scaffold(algo=algorithms[0], aggregation_lr=case.server_lr)
    records = [batch(i, n) for i, n in enumerate(count_records(case))]
    x, averaged, zero = case.x0, None, np.zeros_like(case.x0)
    states = [(x, zero, np.zeros_like(case.linear))]
    for _ in range(case.rounds):
        replies = []
        for algorithm, data in zip(algorithms, records, strict=True):
            algorithm._optimizer.state.clear()
            reply = algorithm.train(data_from_opener=data, shared_state=averaged, _skip=True)
            replies.append(reply)
        averaged = strategy.avg_shared_states(shared_states=replies, _skip=True)
        x = x + case.join(averaged.avg_parameters_update)
        c = case.join(averaged.server_control_variate)
        states.append((x, c, [vector(one._client_control_variate) for one in algorithms]))
    return trace(states)

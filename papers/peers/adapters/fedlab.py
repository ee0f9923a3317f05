"""FedLab: `ScaffoldServerHandler` and `ScaffoldSerialClientTrainer`.

The release is `fedlab` on PyPI; a checkout is put on the path instead. Stood in for: torchvision
and plotting packages, of data sets and reports.
"""

from __future__ import annotations

import logging

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in("torchvision", "pynvml", "munch", "seaborn", "matplotlib", "PIL", "pandas", "sklearn")

import numpy as np
import torch
from fedlab.contrib.algorithm.scaffold import (
    ScaffoldSerialClientTrainer,
    ScaffoldServerHandler,
)

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss

logging.disable(logging.CRITICAL)


class Data:
    """Gives each client one record per local step."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def get_dataloader(self, i: int, batch_size: int) -> list:
        return [(batch(i), torch.zeros(1)) for _ in range(self.steps[i])]


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Drive trainer and handler through the packages that they exchange."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "momentum",
        "a schedule within a round",
        "weights",
        "lost replies",
        "rounds without replies",
    )
    server = ScaffoldServerHandler(Quadratic(case), case.rounds, sample_ratio=1.0)
    server.num_clients = case.num_clients
    server.setup_optim(lr=case.server_lr)
    trainer = ScaffoldSerialClientTrainer(Quadratic(case), case.num_clients)
    trainer.setup_dataset(Data(case.local_steps))
    trainer.setup_optim(epochs=1, batch_size=1, lr=case.lr[0])
    trainer.criterion = loss
    zero = np.zeros_like(case.x0)

    def look() -> tuple:
        held = [zero if c is None else c.numpy().copy() for c in trainer.cs]
        return server.model_parameters.numpy().copy(), server.global_c.numpy().copy(), held

    states = [look()]
    for cohort in case.cohorts:
        server.sample_ratio = min(1.0, (len(cohort) + 0.01) / case.num_clients)
        server.round_clients = len(cohort)  # set by sample_clients() in later versions
        trainer.local_process(server.downlink_package, list(cohort))
        for package in trainer.uplink_package:
            server.load(package)
        states.append(look())
    return trace(states)

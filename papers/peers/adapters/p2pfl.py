"""p2pfl: `SCAFFOLDCallback` in a Lightning trainer, and the `Scaffold` aggregator.

The trainer is set up as `LightningLearner.fit` does. Stood in for: Ray, data sets, gRPC. The
aggregator takes its first model from a client after training; it is given the initial one here,
which is what its comment says.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from papers.peers.adapters.harness import begin, stand_in, trace

stand_in("ray", "datasets", "torchvision", "psutil", "grpc", "opendp")

import lightning
import numpy as np
import torch
from p2pfl.learning.aggregators.scaffold import Scaffold
from p2pfl.learning.frameworks.pytorch.callbacks.scaffold_callback import SCAFFOLDCallback
from p2pfl.learning.frameworks.pytorch.lightning_model import LightningModel

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


class Net(lightning.LightningModule):
    """The case's model as a Lightning module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.quadratic, self.lr = Quadratic(case), case.lr[0]

    def training_step(self, records: Any, _: int) -> Any:
        return self.quadratic(records)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Train by Lightning, aggregate by p2pfl."""
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
    server = Scaffold(global_lr=case.server_lr)
    server.set_addr("server")
    x, zero = case.split(case.x0), np.zeros_like(case.x0)
    server.global_model_params = [one.copy() for one in x]
    callbacks = [SCAFFOLDCallback() for _ in case.local_steps]
    models = [LightningModel(Net(case)) for _ in case.local_steps]

    def look() -> tuple:
        c = case.join(server.c) if server.c else zero
        return case.join(x), c, [vector(one.c_i) if one.c_i else zero for one in callbacks]

    states = [look()]
    for cohort in case.cohorts:
        for i in cohort:
            models[i].set_parameters(x)
            if server.c:
                callbacks[i].additional_info["global_c"] = [c.copy() for c in server.c]
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                callbacks=[callbacks[i]],
            )
            records = torch.utils.data.DataLoader(batch(i, case.local_steps[i]), batch_size=1)
            trainer.fit(models[i].model, records)
            models[i].set_contribution([str(i)], 1)
            models[i].add_info("scaffold", dict(callbacks[i].additional_info))
        result = server.aggregate([models[i] for i in cohort])
        x = [np.array(one) for one in result.get_parameters()]
        states.append(look())
    return trace(states)

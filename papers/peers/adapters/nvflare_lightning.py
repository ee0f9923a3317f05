"""NVIDIA FLARE with Lightning: trainers that `flare.patch` has patched, and FLARE's `Scaffold`.

The server is that of `nvflare.py`. A site keeps one patched trainer, as FLARE's examples do.
Replaced: the client API's `receive` and `send`, which would cross the network. FLARE asks for the
trainer's precision "32-true"; the module's parameters have the case's precision.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_opt.lightning import api

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch
from papers.peers.adapters.harness import begin, trace
from papers.peers.adapters.nvflare import Controller

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

QUIET = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")


class Net(Quadratic, pl.LightningModule):
    """The case's model as a Lightning module, with its schedule of step sizes."""

    def __init__(self, case: Case, weight: float) -> None:
        super().__init__(case)
        self.case = case
        self.__fl_meta__ = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: weight}

    def training_step(self, records: Any, _: int) -> Any:
        return self(records)

    def configure_optimizers(self) -> Any:
        lr = self.case.lr
        sgd = torch.optim.SGD(self.parameters(), lr=lr[0], momentum=self.case.momentum)
        share = torch.optim.lr_scheduler.LambdaLR(sgd, lambda k: lr[min(k, len(lr) - 1)] / lr[0])
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": share, "interval": "step"}}


class Site:
    """A client: its module, its patched trainer and what it would send."""

    def __init__(self, case: Case, i: int) -> None:
        self.i, self.model = i, Net(case, float(case.weights[i]))
        self.records = torch.utils.data.DataLoader(batch(i, case.local_steps[i]), batch_size=1)
        with mock.patch.multiple(api, init=mock.DEFAULT, get_config=dict):
            self.trainer = pl.Trainer(
                max_epochs=1, accelerator="cpu", **dict.fromkeys(QUIET, False)
            )
            api.patch(self.trainer, restore_state=False)

    def train(self, received: FLModel) -> FLModel:
        sent: list[FLModel] = []
        network = {
            "receive": lambda: received,
            "send": lambda model, **_: sent.append(model),
            "is_train": lambda: True,
            "is_evaluate": lambda: False,
            "is_submit_model": lambda: False,
            "clear": lambda: None,
        }
        received.params = {k: torch.as_tensor(v) for k, v in received.params.items()}
        with mock.patch.multiple(api, **network):
            self.trainer.fit(self.model, self.records)
        (reply,) = sent
        reply.params = {k: v.numpy().copy() for k, v in reply.params.items()}
        reply.current_round, reply.meta["client_name"] = received.current_round, f"site-{self.i}"
        return reply

    @property
    def helper(self) -> Any:
        """FLARE's helper, with zeros before the first round."""
        (callback,) = (one for one in self.trainer.callbacks if isinstance(one, api.FLCallback))
        handlers = callback._algorithm_handler_manager._handlers
        if AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL in handlers:
            return handlers[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL]._helper
        zeros = {k: torch.zeros_like(v) for k, v in self.model.named_parameters()}
        return mock.Mock(c_local=mock.Mock(state_dict=lambda: zeros))


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Run the controller's own loop of rounds over Lightning sites."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a server step",
        "rounds without replies",
    )
    controller = Controller(case, Site)
    controller._run_rounds()
    return trace(controller.states)

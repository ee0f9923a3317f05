"""NVIDIA FLARE: `PTScaffoldHelper` at the clients, the round loop of the `Scaffold` controller.

The clients call the helper as FLARE's CIFAR-10 example does. Replaced: network, persistor, events.
A site sends its weight where the example sends its number of steps, which is the weight there.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper, get_lr_values

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector
from papers.peers.adapters.harness import begin, trace


class Site:
    """A client: its model and FLARE's helper."""

    def __init__(self, case: Case, i: int) -> None:
        self.case, self.i = case, i
        self.model, self.helper = Quadratic(case), PTScaffoldHelper()
        self.helper.init(self.model)

    def train(self, received: FLModel) -> FLModel:
        case, model, helper = self.case, self.model, self.helper
        model.load_state_dict({k: torch.as_tensor(v) for k, v in received.params.items()})
        received_model = copy.deepcopy(model)
        helper.load_global_controls(received.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
        c_global, c_local = helper.get_params()
        optimizer = torch.optim.SGD(model.parameters(), lr=case.lr[0], momentum=case.momentum)
        for k in range(case.local_steps[self.i]):
            optimizer.param_groups[0]["lr"] = case.lr[k]
            optimizer.zero_grad()
            model(batch(self.i)).backward()
            optimizer.step()
            lr = get_lr_values(optimizer)[0]
            helper.model_update(model, lr, c_global, c_local)
        helper.terms_update(model, lr, c_global, c_local, received_model)
        before = received_model.state_dict()
        move = {k: (v - before[k]).numpy() for k, v in model.state_dict().items()}
        meta = {
            FLMetaKey.NUM_STEPS_CURRENT_ROUND: float(case.weights[self.i]),
            "client_name": f"site-{self.i}",
            AlgorithmConstants.SCAFFOLD_CTRL_DIFF: helper.get_delta_controls(),
        }
        return FLModel(
            params_type=ParamsType.DIFF,
            params=move,
            current_round=received.current_round,
            meta=meta,
        )


class Controller(Scaffold):
    """FLARE's controller; only what needs a network is replaced."""

    def __init__(self, case: Case, site: Any = Site) -> None:
        super().__init__(num_clients=case.num_clients, num_rounds=case.rounds)
        self.case, self.sites = case, [site(case, i) for i in range(case.num_clients)]
        self.fl_ctx = FLContext()
        start = Quadratic(case).state_dict()
        self.model = FLModel(
            params={k: v.numpy().copy() for k, v in start.items()}, params_type=ParamsType.FULL
        )
        self._global_ctrl_weights = {k: np.zeros_like(v) for k, v in self.model.params.items()}
        self.states: list[tuple] = []
        self.save_model(self.model)

    def sample_clients(self, num_clients: Any = None) -> Any:
        return self.case.cohorts[self.current_round]

    def send_model_and_wait(self, targets: Any = None, data: Any = None, **_: Any) -> list:
        results = {i: self.sites[i].train(copy.deepcopy(data)) for i in targets}
        return [results[i] for i in targets if i in self.case.heard(self.current_round)]

    def save_model(self, model: FLModel) -> None:
        join = self.case.join
        held = [vector(site.helper.c_local.state_dict().values()) for site in self.sites]
        c = join(self._global_ctrl_weights.values())
        self.states.append((join(model.params.values()), c, held))

    def event(self, *_: Any, **__: Any) -> None:
        pass

    info = warning = debug = event


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Run the controller's own loop of rounds."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a server step",
        "rounds without replies",
    )
    controller = Controller(case)
    controller._run_rounds()
    return trace(controller.states)

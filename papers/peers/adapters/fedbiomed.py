"""Fed-BioMed: its `Experiment` at the researcher, its `Round` at the nodes.

`adapter` takes the aggregator `Scaffold`, `auxiliary` the optimizer modules that come from
declearn. Replaced: the network, whose messages are written and read by Fed-BioMed's own methods.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import begin, count_records, stand_in, trace

HOME = tempfile.TemporaryDirectory()  # of the researcher; Fed-BioMed makes it when it is imported
os.environ["FBM_RESEARCHER_COMPONENT_ROOT"] = str(Path(HOME.name) / "researcher")
os.environ["FBM_DEBUG"] = "true"  # otherwise an exception ends the process

stand_in("torchvision")

import numpy as np
import torch
from fedbiomed.common.datamanager import DataManager
from fedbiomed.common.dataset import CustomDataset
from fedbiomed.common.message import Message
from fedbiomed.common.optimizers.declearn import (
    MomentumModule,
    ScaffoldClientModule,
    ScaffoldServerModule,
)
from fedbiomed.common.optimizers.optimizer import Optimizer
from fedbiomed.common.serializer import Serializer
from fedbiomed.common.training_plans import TorchTrainingPlan
from fedbiomed.node.node_state_manager import NodeStateManager
from fedbiomed.node.round import Round
from fedbiomed.researcher.aggregators import Scaffold, functional
from fedbiomed.researcher.federated_workflows import Experiment, _federated_workflow

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, vector

logging.disable(logging.CRITICAL)

CASES: list[Case] = []  # the last is the one that runs; training plans are read from their source


class Records(CustomDataset):
    """A node's records, its number in each; its file holds the number and how many there are."""

    def read(self) -> None:
        self.number, self.records = map(int, Path(self.path).read_text().split())

    def get_item(self, index: int) -> tuple:
        return torch.tensor([float(self.number)]), torch.zeros(1)

    def __len__(self) -> int:
        return self.records


class Plan(TorchTrainingPlan):
    """Plain SGD, for the aggregator `Scaffold`."""

    def init_dependencies(self) -> list:
        return ["from papers.peers.adapters.fedbiomed import *"]

    def init_model(self, model_args: Any) -> Any:
        return Quadratic(CASES[-1])

    def init_optimizer(self, optimizer_args: Any) -> Any:
        return torch.optim.SGD(self.model().parameters(), **optimizer_args)

    def training_data(self) -> Any:
        return DataManager(dataset=Records())

    def training_step(self, data: Any, target: Any) -> Any:
        return self.model()(data)


class AuxiliaryPlan(TorchTrainingPlan):
    """The optimizer with `ScaffoldClientModule`."""

    def init_dependencies(self) -> list:
        return ["from papers.peers.adapters.fedbiomed import *"]

    def init_model(self, model_args: Any) -> Any:
        return Quadratic(CASES[-1])

    def init_optimizer(self, optimizer_args: Any) -> Any:
        modules = [ScaffoldClientModule()]
        if optimizer_args["momentum"]:
            modules.append(MomentumModule(beta=optimizer_args["momentum"]))
        return Optimizer(lr=optimizer_args["lr"], modules=modules)

    def training_data(self) -> Any:
        for module in self.optimizer().optimizer._optimizer.modules:
            if isinstance(module, MomentumModule):  # a case's buffer is empty in every round
                module.velocity = 0.0
        return DataManager(dataset=Records())

    def training_step(self, data: Any, target: Any) -> Any:
        return self.model()(data)


class Wire:
    """Stands for `Requests`: takes messages to the nodes and their replies back, one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.answers = folder, {}
        self.add_monitor_callback = self.remove_monitor_callback = mock.Mock()

    def send(self, messages: dict, nodes: list, policies: Any) -> Wire:
        self.answers = {node: self.ask(node, carried(messages[node])) for node in nodes}
        return self

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def errors(self) -> dict:
        return {}

    def replies(self) -> dict:
        return self.answers

    def ask(self, node: str, request: Any) -> Any:
        """Run a round as `Node.parser_task_train` and `Node.task_manager` do."""
        here = Round(
            root_dir=str(self.folder / node),
            db=str(self.folder / f"{node}.json"),
            node_id=node,
            node_name=node,
            training_plan=request.training_plan,
            training_plan_class=request.training_plan_class,
            model_kwargs=request.model_args,
            training_kwargs=request.training_args,
            training=request.training,
            dataset_entry={"dataset_id": node, "path": str(self.folder / f"{node}.txt")},
            params=request.params,
            experiment_id=request.experiment_id,
            researcher_id=request.researcher_id,
            history_monitor=mock.Mock(),
            aggregator_args=request.aggregator_args,
            node_args={},
            tp_security_manager=None,
            round_number=request.round,
            aux_vars=request.optim_aux_var,
        )
        here.initialize_arguments(request.state_id)
        reply = here.run_model_training(
            tp_approval=False,
            secagg_insecure_validation=False,
            secagg_active=False,
            force_secagg=False,
            secagg_arguments=request.secagg_arguments,
        )
        if not reply.success:
            raise RuntimeError(reply.msg)
        return carried(reply)

    def state(self, node: str, experiment: str, state_id: str) -> Any:
        """Return the state of the first optimizer module, as the node has saved it."""
        kept = NodeStateManager(str(self.folder), node, str(self.folder / f"{node}.json"))
        place = kept.get(experiment, state_id)["optimizer_state"]["state_path"]
        return Serializer.load(place)["states"]["modules"][0][1]["state"]


def carried(message: Any) -> Any:
    """Write a message to bytes and read it."""
    return Message.from_dict(Serializer.loads(Serializer.dumps(message.to_dict())))


def drive(case: Case, auxiliary: bool, wire: Wire) -> Trace:
    """Run an experiment round by round."""
    nodes = [f"node-{i}" for i in range(case.num_clients)]
    for i, (node, records) in enumerate(zip(nodes, count_records(case), strict=True)):
        (wire.folder / f"{node}.txt").write_text(f"{i} {records}")
    experiment = Experiment(
        training_data={node: {"dataset_id": node} for node in nodes},
        aggregator=None if auxiliary else Scaffold(server_lr=case.server_lr),
        agg_optimizer=Optimizer(lr=case.server_lr, modules=[ScaffoldServerModule()])
        if auxiliary
        else None,
        training_plan_class=AuxiliaryPlan if auxiliary else Plan,
        model_args={},
        training_args={
            "num_updates": case.local_steps[0],
            "loader_args": {"batch_size": 1},
            "optimizer_args": {"lr": case.lr[0], "momentum": case.momentum},
        },
    )
    zero = np.zeros_like(case.x0)

    def flat(tensors: Any) -> Any:
        return vector(tensors.values()) if tensors else zero

    def look() -> tuple:
        x = flat(experiment.training_plan().get_model_params())
        if not auxiliary:
            server = experiment.aggregator()
            held = [flat(server.nodes_states.get(node)) for node in nodes]
            return x, flat(server.global_state), held
        ids = experiment._node_state_agent.get_last_node_states()
        saved = [ids[node] and wire.state(node, experiment.id, ids[node]) for node in nodes]
        c = experiment.agg_optimizer()._optimizer.modules[0].collect_aux_var().state
        return x, flat(getattr(c, "coefs", None)), [flat(getattr(s, "coefs", None)) for s in saved]

    states = [look()]
    for r, cohort in enumerate(case.cohorts):
        experiment.set_nodes([nodes[i] for i in cohort])
        experiment.run_once()
        if r + 1 == case.restart:
            experiment.breakpoint()
            experiment = Experiment.load_breakpoint(
                str(Path(experiment.experimentation_path()) / f"breakpoint_{r:04d}")
            )
        states.append(look())
    return trace(states)


REFUSED = (
    "option I",
    "frozen control variates",
    "a schedule within a round",
    "unequal local steps",
    "lost replies",
    "rounds without replies",
)


def run(case: Case, auxiliary: bool) -> Trace:
    CASES[:] = [case]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(_federated_workflow, "Requests") as requests,
        mock.patch.object(functional, "initialize", lambda one: ("tensor", torch.zeros_like(one))),
    ):
        requests.return_value = Wire(Path(folder))
        return drive(case, auxiliary, requests.return_value)


@offers("tensors")
def adapter(case: Case) -> Trace:
    """The aggregator `Scaffold`."""
    begin(case, *REFUSED, "weights")
    return run(case, auxiliary=False)


@offers("tensors")
def auxiliary(case: Case) -> Trace:
    """The optimizer modules from declearn."""
    begin(case, *REFUSED)
    return run(case, auxiliary=True)

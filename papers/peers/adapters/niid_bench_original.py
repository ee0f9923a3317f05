"""NIID-Bench, from a checkout: its script `experiments.py` with `--alg scaffold`, run as it is.

Replaced: data, networks, the loss, the random choice of clients, and the evaluation, which runs at
the end of a round and is where states are read. A client's number of records is its weight; an
epoch has as many batches as it has local steps. The networks that stand for c and c_i there are
drawn as the layers of torch are.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import Criterion, begin, count_records, stand_in, trace

stand_in("torchvision", "sklearn", "PIL")

import numpy as np
import torch
import utils

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector

SCRIPT = Path(utils.__file__).with_name("experiments.py")


class Run:
    """What the script asks for in one case, and the states that it shows."""

    def __init__(self, case: Case) -> None:
        self.case, self.nets, self.states, self.round = case, [], [], 0

    def make_net(self) -> Quadratic:
        """Return the next network: the clients' and the server's model, the c_i, c."""
        net = Quadratic(self.case)
        if len(self.nets) > self.case.num_clients:
            bound = len(self.case.x0) ** -0.5
            drawn = torch.empty(len(self.case.x0)).uniform_(-bound, bound)
            for parameter, part in zip(net.parameters(), self.case.split(drawn), strict=True):
                parameter.data = part
        self.nets.append(net)
        return net

    def partition(self, *_: Any, **__: Any) -> tuple:
        records = count_records(self.case)
        self.clients = {i: range(i, i + n) for i, n in enumerate(records)}  # it begins with i
        return None, np.zeros(1), None, None, self.clients, None

    def get_dataloader(self, *given: Any) -> tuple:
        if len(given) < 5:  # those of all clients together, which are for evaluation
            return [], [], [], []
        i = given[4].start
        batches = [(batch(i), torch.zeros(1))] * self.case.local_steps[i]
        return [batches], [], [], []  # a list is taken for one of loaders

    def choose(self, clients: Any) -> None:
        """Put the clients of the round first, in the place of a random order."""
        if not self.round:
            self.states.append(self.look())
        cohort = self.case.cohorts[self.round]
        clients[:] = [*cohort, *(i for i in range(len(clients)) if i not in cohort)]
        self.round += 1

    def evaluate(self, net: Any, _: Any, get_confusion_matrix: bool = False, **__: Any) -> Any:
        if net is self.nets[self.case.num_clients] and not get_confusion_matrix:
            self.states.append(self.look())
        return (0.0, None) if get_confusion_matrix else 0.0

    def look(self) -> tuple:
        n = self.case.num_clients
        x, *c_i, c = (vector(one.parameters()) for one in self.nets[n:])
        return x, c, c_i


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Run the script with the case's options."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a schedule within a round",
        "a server step",
        "changing cohorts",
        "lost replies",
        "rounds without replies",
    )
    run, cohort = Run(case), len(case.cohorts[0])
    options = {
        "alg": "scaffold",
        "dataset": "generated",
        "lr": case.lr[0],
        "rho": case.momentum,
        "reg": 0.0,
        "epochs": 1,
        "n_parties": case.num_clients,
        "sample": (cohort + 0.5) / case.num_clients if cohort < case.num_clients else 1,
        "comm_round": case.rounds,
        "device": "cpu",
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(utils, "PerceptronModel", run.make_net),
        mock.patch.object(utils, "partition_data", run.partition),
        mock.patch.object(utils, "get_dataloader", run.get_dataloader),
        mock.patch.object(utils, "compute_accuracy", run.evaluate),
        mock.patch.object(np.random, "shuffle", run.choose),
        mock.patch("torch.nn.CrossEntropyLoss", Criterion),
        mock.patch("builtins.print"),
    ):
        options |= {"logdir": folder, "modeldir": folder}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with mock.patch.object(sys, "argv", [str(SCRIPT), *words]):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return trace(run.states)

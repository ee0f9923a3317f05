"""Flower's baseline `niid_bench`, from a checkout: its SCAFFOLD client, server and strategy.

Replaced: Hydra's configuration and the network. A client's number of records is its weight, as in
the baseline; they are read in as many batches as it has local steps.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from papers.peers.adapters.harness import Criterion, begin, stand_in, trace

stand_in("hydra", "omegaconf", "torchvision", "tqdm", "matplotlib", "pandas", "sklearn")

import numpy as np
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from niid_bench import server_scaffold
from niid_bench.client_scaffold import FlowerClientScaffold
from niid_bench.strategy import ScaffoldStrategy

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, vector

TENTHS = 10  # the weights of the suite's federations


class Proxy(SimpleNamespace):
    """The server's view of a client, without a network."""

    def fit(self, instructions: Any, timeout: Any) -> FitRes:
        given = parameters_to_ndarrays(instructions.parameters)
        arrays, records, metrics = self.client.fit(given, {})
        arrays = ndarrays_to_parameters([np.asarray(one) for one in arrays])
        return FitRes(Status(Code.OK, ""), arrays, records, metrics)


class Loader(list):
    """Batches, and the records that they are of."""

    dataset = range(0)


def make_client(case: Case, i: int, folder: Path) -> FlowerClientScaffold:
    data = Loader([(batch(i), torch.zeros(1))] * case.local_steps[i])
    data.dataset = range(round(case.weights[i] * TENTHS) * math.lcm(*case.local_steps))
    return FlowerClientScaffold(
        i, Quadratic(case), data, data, torch.device("cpu"), 1, case.lr[0], case.momentum, 0.0,
        save_dir=str(folder),
    )  # fmt: skip


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Run the server's own `fit_round`."""
    begin(
        case,
        "option I",
        "frozen control variates",
        "restarts",
        "a schedule within a round",
        "a server step",
        "lost replies",
        "rounds without replies",
    )
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(server_scaffold, "instantiate"),
        mock.patch("torch.nn.CrossEntropyLoss", Criterion),
    ):
        return run(case, Path(place))


def run(case: Case, folder: Path) -> Trace:
    clients = [Proxy(client=make_client(case, i, folder)) for i in range(case.num_clients)]
    strategy = ScaffoldStrategy()
    manager = SimpleNamespace(
        all=lambda: clients,
        num_available=lambda: len(clients),
        sample=lambda count: clients[:count],
    )
    server = server_scaffold.ScaffoldServer(strategy, None, manager)
    held: list[Any] = [None] * case.num_clients

    def get_parameters(ins: Any, timeout: Any) -> Any:
        arrays = clients[0].client.get_parameters({})
        return SimpleNamespace(parameters=ndarrays_to_parameters(arrays))

    clients[0].get_parameters = get_parameters
    server.parameters = server._get_initial_parameters(None)

    def look() -> tuple:
        x = case.join(parameters_to_ndarrays(server.parameters))
        # a client begins with the model that it is sent first
        return x, vector(server.server_cv), [x if c_i is None else c_i for c_i in held]

    states = [look()]
    for r, cohort in enumerate(case.cohorts):

        def configure_fit(
            server_round: int, parameters: Any, client_manager: Any, cohort: Any = cohort
        ) -> list:
            ins = SimpleNamespace(parameters=parameters)
            return [(clients[i], ins) for i in cohort]

        strategy.configure_fit = configure_fit
        server.parameters, _, (_, failures) = server.fit_round(r + 1, None)
        for failure in failures:
            raise failure
        for i in cohort:
            held[i] = vector(clients[i].client.client_cv)
        states.append(look())
    return trace(states)

"""FLamby, from a checkout: its `Scaffold` strategy, without differential privacy and with it.

It keeps a correction for each client, c_i - c, and neither c nor c_i. c is read from the move of
the model, which is -c times the step sizes and their number, and c_i as c plus the correction that
the next round uses: a round is added, whose gradients are not recorded. With privacy it trains
the same quadratics as least squares, which Opacus can differentiate by record, without noise (the
search for its size is stood in for) and with a bound never reached.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
from flamby.strategies import Scaffold
from torch.utils.data import DataLoader, TensorDataset

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector
from papers.peers.adapters.harness import (
    begin,
    count_records,
    half_square,
    least_squares,
    trace,
)

warnings.simplefilter("ignore")

REFUSED = (
    "option I",
    "frozen control variates",
    "restarts",
    "momentum",
    "a schedule within a round",
    "unequal local steps",
    "sampling",
    "lost replies",
    "rounds without replies",
)


def make_strategy(
    case: Case, loaders: list, model: Any, criterion: Any, **privacy: float
) -> Scaffold:
    return Scaffold(
        training_dataloaders=loaders,
        model=model,
        loss=criterion,
        optimizer_class=torch.optim.SGD,
        learning_rate=case.lr[0],
        num_updates=case.local_steps[0],
        nrounds=case.rounds,
        server_learning_rate=case.server_lr,
        **privacy,
    )


def drive(case: Case, strategy: Scaffold) -> Trace:
    """Perform the strategy's rounds, which have all clients."""
    first, *_ = (one.model for one in strategy.models_list)
    travel = case.server_lr * case.lr[0] * case.local_steps[0]
    x, corrections = [vector(first.parameters())], []
    for r in range(case.rounds + 1):
        if r == case.rounds and hasattr(first, "asked"):
            first.asked.case = case._replace(calls=None)
        strategy.perform_round()
        x.append(vector(first.parameters()))
        corrections.append([vector(one) for one in strategy.client_corrections_state_list])
    c = [np.zeros_like(case.x0), *(-np.diff(x[:-1], axis=0) / travel)]
    held = [one + correction for one, correction in zip(c, corrections, strict=True)]
    return trace(zip(x[:-1], c, held, strict=True))


@offers("tensors")
def adapter(case: Case) -> Trace:
    """A client's number of records is its weight, read as whole batches."""
    begin(case, *REFUSED)
    loaders = [
        DataLoader(TensorDataset(batch(i, n), torch.zeros(n)), batch_size=n)
        for i, n in enumerate(count_records(case))
    ]
    return drive(case, make_strategy(case, loaders, Quadratic(case), loss))


def private(case: Case) -> Trace:
    """With Opacus, but neither noise nor clipping."""
    begin(case, *REFUSED, "weights")
    (model, *_), loaders = zip(
        *(least_squares(case, i) for i in range(case.num_clients)), strict=True
    )
    bounds = {"dp_target_epsilon": 1.0, "dp_target_delta": 1e-5, "dp_max_grad_norm": 1e9}
    with mock.patch("opacus.privacy_engine.get_noise_multiplier", return_value=0.0):
        strategy = make_strategy(case, list(loaders), model, half_square, **bounds)
    return drive(case, strategy)

"""FLamby, from a checkout: its `Scaffold` strategy.

It keeps a correction for each client, c_i - c, and neither c nor c_i. c is read from the move of
the model, which is -c times the step sizes and their number, and c_i as c plus the correction that
the next round uses: a round is added, whose gradients are not recorded.
"""

from __future__ import annotations

import numpy as np
import torch
from flamby.strategies import Scaffold
from torch.utils.data import DataLoader, TensorDataset

from fedscaffold.conformance import Case, Trace, offers
from fedscaffold.conformance.torch_model import Quadratic, batch, loss, vector
from papers.peers.adapters.harness import begin, count_records, trace


def make_strategy(case: Case) -> Scaffold:
    """A client's number of records is its weight, read as whole batches."""
    loaders = [
        DataLoader(TensorDataset(batch(i, n), torch.zeros(n)), batch_size=n)
        for i, n in enumerate(count_records(case))
    ]
    return Scaffold(
        training_dataloaders=loaders,
        model=Quadratic(case),
        loss=loss,
        optimizer_class=torch.optim.SGD,
        learning_rate=case.lr[0],
        num_updates=case.local_steps[0],
        nrounds=case.rounds,
        server_learning_rate=case.server_lr,
    )


@offers("tensors")
def adapter(case: Case) -> Trace:
    """Perform the strategy's rounds, which have all clients."""
    begin(
        case,
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
    strategy = make_strategy(case)
    first, *_ = (one.model for one in strategy.models_list)
    travel = case.server_lr * case.lr[0] * case.local_steps[0]
    x, corrections = [vector(first.parameters())], []
    for r in range(case.rounds + 1):
        if r == case.rounds:
            first.asked.case = case._replace(calls=None)
        strategy.perform_round()
        x.append(vector(first.parameters()))
        corrections.append([vector(one) for one in strategy.client_corrections_state_list])
    c = [np.zeros_like(case.x0), *(-np.diff(x[:-1], axis=0) / travel)]
    held = [one + correction for one, correction in zip(c, corrections, strict=True)]
    return trace(zip(x[:-1], c, held, strict=True))

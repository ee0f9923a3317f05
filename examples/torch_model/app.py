"""A torch model of your own in a federation: BatchNorm, and AdamW at the sites.

    fedscaffold deploy simulate examples/torch_model --out runs/torch-model

Beside it lies federation.toml. The same two files run as processes (`deploy local`) and across
machines (`deploy kit`).
"""

from functools import cache

import torch
from torch import nn

from fedscaffold import data
from fedscaffold.deploy import TorchLearner

SITES = ["amber", "birch", "cedar", "dune"]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.hidden(x))))


def loss(network, batch):
    x, y = batch
    return nn.functional.cross_entropy(network(x), y)


def metrics(network, batch):
    x, y = batch
    return {"accuracy": (network(x).argmax(dim=1) == y).float().mean().item()}


@cache
def digits():
    return data.federate(data.load("digits"), "similarity:0.3", len(SITES))


def tensors(x, y):
    return torch.from_numpy(x).float(), torch.from_numpy(y).long()


def records(site):  # yours reads the site's own files
    return tensors(*digits().clients[SITES.index(site)])


def learner(settings):
    kept_apart = tensors(*digits().test)
    return TorchLearner(
        Network,
        loss,
        records,
        metrics=metrics,
        test=lambda site: kept_apart,
        optimizer=lambda network: torch.optim.AdamW(network.parameters(), lr=settings.local.lr),
        precision=settings.precision,
    )

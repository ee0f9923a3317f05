"""Fine-tune the adapters of a transformer with SCAFFOLD, and Adam at the sites.

    fedscaffold deploy simulate examples/lora --out runs/lora

The backbone is frozen: it never travels, and every site proves by a digest that it has the same.
Here it is made from a seed, where yours is loaded from a file beside app.py.
"""

import torch
from adapters import Transformer, adapt
from torch import nn

from fedscaffold.deploy import TorchLearner

SITES = ["amber", "birch", "cedar"]
WORDS, CLASSES, LENGTH = 24, 3, 12


def records(site):  # a text is of the class whose words it has most of; a site has mostly one class
    made = torch.Generator().manual_seed(SITES.index(site))
    mostly = torch.full((120,), SITES.index(site))
    drawn = torch.rand(120, LENGTH, generator=made)
    kind = torch.where(torch.rand(120, generator=made) < 0.7, mostly, (mostly + 1) % CLASSES)
    own = torch.randint(WORDS // CLASSES, (120, LENGTH), generator=made) * CLASSES + kind[:, None]
    texts = torch.where(drawn < 0.5, own, torch.randint(WORDS, (120, LENGTH), generator=made))
    return texts, kind


def loss(network, batch):
    return nn.functional.cross_entropy(network(batch[0]), batch[1])


def metrics(network, batch):
    return {"accuracy": (network(batch[0]).argmax(dim=1) == batch[1]).float().mean().item()}


def model():
    return adapt(Transformer(WORDS, CLASSES), rank=4)


def learner(settings):
    return TorchLearner(model, loss, records, metrics=metrics, precision=settings.precision)

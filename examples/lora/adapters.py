"""A small transformer with a frozen backbone and adapters of low rank, for examples/lora/app.py.

An adapter adds B A to a frozen weight W. With A frozen too, the average of W + B_i A over clients
is W + (average of B_i) A, exactly; with both trained, the average of products is not the product of
averages, and every average of clients is off by their covariance.
"""

import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, linear, rank, train_a):
        super().__init__()
        self.linear = linear
        a = torch.randn(rank, linear.in_features) / linear.in_features**0.5
        self.a = nn.Parameter(a, requires_grad=train_a)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        parts = [one(self.norm(x)) for one in (self.query, self.key, self.value)]
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        mixed = nn.functional.scaled_dot_product_attention(*split)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, words, classes, width=64, blocks=2, heads=4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.out = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.out(self.blocks(self.words(tokens)).mean(dim=1))


def adapt(network, rank, train_a=False):
    """Freeze a transformer but for its last layer, and adapt its queries and values."""
    network.requires_grad_(False).out.requires_grad_(True)
    for block in network.blocks:
        block.query = Adapted(block.query, rank, train_a)
        block.value = Adapted(block.value, rank, train_a)
    return network

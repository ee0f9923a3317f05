"""Train a Flax model with plain SGD at the clients.

The module is split into its graph and its parameters.

    python examples/flax_model.py

Handwritten digits on ten clients with about one digit each.
"""

import jax.numpy as jnp
import optax
from flax import nnx

import fedscaffold as fs

digits = fs.data.federate(fs.data.load("digits"), "similarity:0.1", 10)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


graph, params = nnx.split(
    Network(nnx.Rngs(0)), nnx.Param
)  # says so if there is more than parameters


def loss(params, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()


def accuracy(params, batch):
    x, y = batch
    return jnp.mean(nnx.merge(graph, params)(x).argmax(axis=1) == y)


problem = fs.Problem(
    loss, params, digits.clients, test=digits.test, accuracy=accuracy, name="Flax network"
)
run = fs.simulate(
    fs.scaffold(), problem, rounds=30, local_steps=10, batch_size=20, lr=0.1, metrics=["accuracy"]
)
network = nnx.merge(graph, run.x)  # the module again, trained

print(problem)
print(f"accuracy {run.history['accuracy'][-1]:.3f}, gauge {run.residual:.0e}")

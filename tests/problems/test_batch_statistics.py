"""Running statistics among the parameters are refused, whatever they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedscaffold as fs
from fedscaffold.checks import InputError

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 3)), RNG.integers(0, 2, n)) for n in (9, 9)]


def run(loss, params, **more):
    return fs.simulate(
        fs.scaffold(), fs.Problem(loss, params, CLIENTS, **more), rounds=1, local_steps=1, lr=0.1
    )


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.bn(self.hidden(x)).sum(axis=1)


def test_flax_nnx_marks_them_by_type():
    graph, state = nnx.split(Network(nnx.Rngs(0)))

    def loss(params, batch):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(batch[0]) - batch[1]))

    with pytest.raises(InputError, match=r"\['bn'\]\['mean'\].* looks like batch statistics"):
        run(loss, state)


def normalised(params, batch):
    h = batch[0] * params["scale"]
    return jnp.mean(
        jnp.square(((h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-3)).sum(axis=1) - batch[1])
    )


def by_running(mean, var):
    def accuracy(params, batch):
        h = (batch[0] * params["scale"] - params[mean]) / jnp.sqrt(params[var] + 1e-3)
        return jnp.mean((h.sum(axis=1) > 0.5) == batch[1])

    return accuracy


@pytest.mark.parametrize("coupled", [None, True])
def test_names_that_say_so(coupled):
    with pytest.raises(InputError, match="running_mean"):
        run(normalised, {"scale": np.ones(3), "running_mean": np.zeros(3)}, coupled=coupled)


def test_a_mean_and_a_variance_without_a_gradient():
    with pytest.raises(InputError, match=r"\['mean'\] looks like batch statistics"):
        run(
            lambda p, b: jnp.mean(jnp.square(b[0] @ p["w"])),
            {"w": np.ones(3), "mean": np.zeros(3), "var": np.ones(3)},
        )


@pytest.mark.parametrize(
    "loss", [normalised, lambda p, b: jnp.mean(jnp.square(b[0] @ p["scale"] - b[1]))]
)
def test_arrays_that_only_the_accuracy_uses(loss):
    params = {"scale": np.ones(3), "mu": np.zeros(3), "sigma2": np.ones(3)}
    with pytest.raises(InputError, match=r"\['mu'\] looks like batch statistics"):
        run(loss, params, accuracy=by_running("mu", "sigma2"))


@pytest.mark.slow
def test_parameters_are_not_taken_for_statistics():
    """A mean that is trained, and an array that nothing uses."""

    def loss(params, batch):
        return jnp.mean(jnp.square(batch[0] @ params["w"] - params["mean"]))

    params = {"w": np.ones(3), "mean": np.zeros(()), "unused": np.zeros(2)}
    done = run(loss, params, accuracy=lambda p, b: jnp.mean((b[0] @ p["w"] > 0) == b[1]))
    assert done.diverged_at is None
    assert jax.tree.structure(done.x) == jax.tree.structure(params)

"""Gradients on a few records at a time, where arrays are larger than a cache and the model is small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedscaffold.problems import batches
from fedscaffold.problems.batches import Functions, Kinds, gradient

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(3, 3, 2, 3))
PICTURES = RNG.normal(size=(12, 8, 7, 2)), RNG.normal(size=12)


def loss(kernel, batch):
    numbers = ("NHWC", "HWIO", "NHWC")
    found = lax.conv_general_dilated(batch[0], kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.mean((jnp.tanh(found).mean((1, 2, 3)) - batch[1]) ** 2)


def recurrent(kernel, batch):
    def step(h, x):
        return jnp.tanh(h + x), None

    return loss(kernel, batch) + lax.scan(step, kernel.mean(), jnp.ones(5))[0]


def noisy(kernel, batch, key=None):
    return loss(kernel, batch) * (1 if key is None else jax.random.normal(key))


def stateful(kernel, batch, state, train):
    return loss(kernel, batch), state + 1


def loops(traced):
    """Lengths of the scans of a program."""
    found = []
    for equation in traced.eqns:
        if equation.primitive.name == "scan":
            found.append(equation.params["length"])
        for value in jax.tree.leaves(list(equation.params.values())):
            found += loops(value.jaxpr) if hasattr(value, "jaxpr") else []
    return found


def of(function, kind="mean", cached=4 * 8 * 7 * 3 * 8, params=KERNEL, **how):
    """The gradient, and the lengths of the scans in its program; four pictures fit the cache."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(batches, "CACHED", cached)

        def slope(params, batch):
            kinds = Kinds(gradient=kind)
            return gradient(Functions(function), kinds, params, batch, None, **how)

        traced = jax.make_jaxpr(slope)(params, PICTURES)
        return slope(params, PICTURES), loops(traced.jaxpr)


def test_the_mean_over_parts_is_the_gradient():
    with jax.enable_x64(True):
        expected = jax.grad(loss)(jnp.asarray(KERNEL), PICTURES)
    found, scans = of(loss)
    assert 3 in scans
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    whole, scans = of(loss, cached=1 << 20)
    assert 3 not in scans
    np.testing.assert_allclose(whole, expected, rtol=1e-12, atol=1e-14)


def test_a_large_model_is_not_read_for_each_part():
    large = {"kernel": KERNEL, "bias": np.ones(10_000)}

    def with_bias(params, batch):
        return loss(params["kernel"], batch) + jnp.mean(params["bias"])

    assert 3 not in of(with_bias, params=large)[1]


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (loss, {"kind": "coupled"}),
        (recurrent, {}),
        (noisy, {"key": jax.random.key(0)}),
        (stateful, {"kind": "coupled", "state": jnp.zeros(())}),
    ],
    ids=["coupled", "loop", "random", "state"],
)
def test_what_is_taken_whole(function, how):
    assert 3 not in of(function, **how)[1]

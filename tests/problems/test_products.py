"""Products over several axes: as products of matrices they have the same values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedscaffold.problems.rewriting import as_products

RECORDS, PLACES, INPUTS, OUTPUTS = 3, 5, 4, 2


def dense(w, x, g):
    """A dense layer on sequences."""
    return jnp.sum((x @ w) * g)


def as_torch(w, x, g):
    """The same with weights (out, in)."""
    return jnp.sum((x @ w.reshape(OUTPUTS, INPUTS).T) * g)


def used_twice(w, x, g):
    """Both the gradient and its transpose are used."""
    slope = lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())))
    return jnp.sum(jnp.sin(slope.T) * w) + jnp.sum(jnp.cos(slope))


def crossed(w, x, g):
    """Contracted axes that come in another order in the two factors, and not first."""
    turned = jnp.transpose(g, (2, 1, 0))
    both = lax.dot_general(x, turned, (((1, 0), (1, 2)), ((), ())))
    return jnp.sum(jnp.sin(both) * w)


def four_axes(w, x, g):
    """Factors with two free axes each."""
    left, right = x[:, :, None] * jnp.arange(1.0, 4.0)[:, None], g[:, :, None] + w[:2, :1]
    return jnp.sum(jnp.sin(lax.dot_general(left, right, (((0, 1), (0, 1)), ((), ())))))


CASES = (dense, as_torch, used_twice, crossed, four_axes)


def drawn(*front):
    rng = np.random.default_rng(0)
    shapes = (INPUTS, OUTPUTS), (RECORDS, PLACES, INPUTS), (RECORDS, PLACES, OUTPUTS)
    return [rng.normal(size=(*front, *shape)) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    slope = jax.value_and_grad(case, argnums=(0, 1, 2))
    with jax.enable_x64(True):
        rewritten = as_products(slope)
        assert "dot_general_as_products" in str(jax.make_jaxpr(rewritten)(*drawn()))
        for change, given in ((lambda f: f, drawn()), (jax.vmap, drawn(2))):
            wanted, seen = (jax.jit(change(f))(*given) for f in (slope, rewritten))
            for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(seen), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-13, atol=1e-13)


def test_the_gradient_of_a_dense_layer_is_computed_in_the_layout_of_its_weights():
    """XLA removes two transposes, but not one: no copy of the gradient is left."""
    given = drawn()
    compiled = jax.jit(as_products(jax.grad(dense))).lower(*given).compile().as_text()
    products = [line for line in compiled.splitlines() if " dot(" in line]
    assert products
    assert all(f"[{INPUTS},{OUTPUTS}]{{1,0}} dot(" in line for line in products)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, g: x[0].T @ g[0],
        lambda x, g: jnp.einsum("rpi,rpi->", x, x),
        lambda x, g: jnp.einsum("rpi,rpo->rio", x, g),
    ],
    ids=["one axis", "no axis left", "a batch"],
)
def test_other_products_are_left_alone(product):
    _, x, g = drawn()
    assert "as_products" not in str(jax.make_jaxpr(as_products(product))(x, g))

"""Scans that add up products, or multiply with transposed constants: the same sums, faster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedscaffold.problems.rewriting import as_products, patch_bytes

STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 2


def recurrent(params, x, reverse=False):
    """An Elman network with all its products in the loop."""

    def step(h, at):
        h = jnp.tanh(at @ params["in"] + h @ params["hidden"] + params["bias"])
        return h, h @ params["out"]

    start = jnp.zeros((x.shape[1], HIDDEN), x.dtype)
    return jnp.sum(jnp.sin(lax.scan(step, start, x, reverse=reverse)[1]))


def as_torch(params, x):
    """The network with weights (out, in), of which two products in the loop share one."""
    w, out = params["hidden"], params["out"].T

    def step(h, at):
        h = jnp.tanh(at @ params["in"] + h @ w.T + params["bias"])
        return h, jnp.sin(h @ w.T) @ out.T + (h @ w) @ out.T

    start = jnp.ones((x.shape[1], HIDDEN), x.dtype)
    return jnp.sum(jnp.sin(lax.scan(step, start, jnp.tile(x, (2, 1, 1)))[1]))


def convolved(params, x):
    """A loop with a convolution in it beside the products."""

    def step(h, at):
        at = jnp.apply_along_axis(lambda row: jnp.convolve(row, params["bias"], "same"), 1, at)
        h = jnp.tanh(at @ params["in"] + h @ params["hidden"])
        return h, None

    start = jnp.zeros((x.shape[1], HIDDEN), x.dtype)
    return jnp.sum(jnp.sin(lax.scan(step, start, x)[0]))


def of_records(params, x):
    """The network on each record as a batch of one."""
    return jnp.mean(jax.vmap(lambda one: recurrent(params, one[:, None]), 1)(x))


LOSSES = {
    "recurrent": recurrent,
    "reversed": lambda params, x: recurrent(params, x, reverse=True),
    "with a convolution": convolved,
    "record by record": of_records,
    "checkpointed": jax.checkpoint(recurrent),
    "weights as torch has them": lambda params, x: as_torch(params, x),
}


def drawn(rng, *front):
    shapes = {
        "in": (INPUTS, HIDDEN),
        "hidden": (HIDDEN,) * 2,
        "bias": (HIDDEN,),
        "out": (HIDDEN, 3),
    }
    params = {name: rng.normal(size=(*front, *shape)) for name, shape in shapes.items()}
    return params, rng.normal(size=(*front, STEPS, BATCH, INPUTS))


def products_in_scans(jaxpr, inside=False):
    """Count the products in the bodies of all scans."""
    count = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        count += inside and name == "dot_general"
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    count += products_in_scans(inner, inside or name == "scan")
    return count


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_gradients_of_recurrent_networks(case):
    slope = jax.grad(LOSSES[case])
    with jax.enable_x64(True):
        for found in (slope, jax.vmap(slope)):
            given = drawn(np.random.default_rng(0), *([2] if found is not slope else []))
            both = jax.jit(lambda *a, f=found: (f(*a), as_products(f)(*a)))
            wanted, seen = both(*given)
            for name in wanted:
                np.testing.assert_allclose(seen[name], wanted[name], rtol=1e-13, atol=1e-13)


def test_gradients_of_weights_are_computed_after_the_loop():
    given = drawn(np.random.default_rng(0))
    slope = jax.grad(recurrent)
    # forward: three products a step; backward: two for cotangents, and three for weights
    assert products_in_scans(jax.make_jaxpr(slope)(*given).jaxpr) == 8
    rewritten = jax.make_jaxpr(as_products(slope))(*given).jaxpr
    (choice,) = [e for e in rewritten.eqns if "branches" in e.params]
    counts = sorted(products_in_scans(branch.jaxpr) for branch in choice.params["branches"])
    assert counts == [5, 8]  # on CPUs, and elsewhere


def read_elsewhere(total, x):
    total = total + x.T @ x
    return total, total[0, 0]


def of_constant(total, x):
    return total + np.ones((2, 3), np.float32) @ x, None


def subtracted(total, x):
    return total - x.T @ x, None


def of_number(total, x):
    """A product with a number that is written in the body."""
    return total + lax.dot_general(np.float32(2), x[:2], (((), ()), ((), ()))), None


@pytest.mark.parametrize("step", [read_elsewhere, of_constant, of_number, subtracted])
def test_other_carries_are_left_alone(step):
    def total(x):
        return lax.scan(step, jnp.zeros((2, 2)), x)[0]

    x = jnp.arange(24.0).reshape(4, 3, 2)
    assert "as_products" not in str(jax.make_jaxpr(as_products(total))(x))


def test_a_product_that_begins_at_a_value_and_is_used_by_two_carries():
    def total(x):
        def step(carry, at):
            first, second, h = carry
            return (first + at.T @ h, second + (h.T @ at).T, jnp.sin(h + at)), first.sum() * 0 + at

        begin = jnp.full((2, 2), 3.0), jnp.ones((2, 2)), jnp.ones((3, 2))
        return lax.scan(step, begin, x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 2)), jnp.float32)
    text = str(jax.make_jaxpr(as_products(total))(x))
    assert "scan_as_products" in text
    wanted, seen = jax.jit(total)(x), jax.jit(as_products(total))(x)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(seen), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5)


def test_what_products_after_the_loop_contract_is_forecast():
    """The gradient of every state is kept for one product: with twice as many steps, twice."""
    params, x = drawn(np.random.default_rng(0))
    short, long = (
        patch_bytes(jax.grad(recurrent), params, np.tile(x, (times, 1, 1))) for times in (1, 2)
    )
    assert long - short >= np.float32().itemsize * STEPS * BATCH * HIDDEN


def products_with_constants(jaxpr):
    """The products of the first scan with one of its constants, by the axis they contract."""
    (scan,) = [one for one in jaxpr.eqns if one.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    fixed = body.invars[: scan.params["num_consts"]]
    return [
        one.params["dimension_numbers"][0][1]
        for one in body.eqns
        if one.primitive.name == "dot_general" and one.invars[1] in fixed
    ]


@pytest.mark.parametrize(
    ("multiply", "copies"),
    [
        (lambda h, w: h @ w.T, 1),
        (lambda h, w: lax.dot_general(h, w, (((1,), (1,)), ((), ()))), 1),
        (lambda h, w: lax.dot_general(h, w.T, (((1,), (1,)), ((), ()))), 0),
    ],
    ids=["transposed", "along its rows", "transposed for nothing"],
)
def test_a_constant_matrix_is_transposed_once_before_a_long_loop(multiply, copies):
    def last(w, h, steps):
        return lax.scan(lambda h, _: (jnp.sin(multiply(h, w)), None), h, None, length=steps)[0]

    rng = np.random.default_rng(0)
    w, h = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 3), (2, 3)))
    long = as_products(lambda w, h: last(w, h, 8))
    traced = jax.make_jaxpr(long)(w, h).jaxpr
    (choice,) = [one for one in traced.eqns if "branches" in one.params]
    text = [str(branch) for branch in choice.params["branches"]]
    (at,) = [i for i, one in enumerate(text) if "scan_as_products" in one]
    (call,) = choice.params["branches"][at].jaxpr.eqns
    inner = call.params["jaxpr"].jaxpr
    assert products_with_constants(inner) == [(0,)]
    assert sum(one.primitive.name == "optimization_barrier" for one in inner.eqns) == copies
    with jax.enable_x64(True):
        given = np.float64(w), np.float64(h)
        for found in (long, jax.grad(lambda *a: jnp.sum(long(*a)))):
            plain = (
                (lambda *a: last(*a, 8))
                if found is long
                else (jax.grad(lambda *a: jnp.sum(last(*a, 8))))
            )
            np.testing.assert_allclose(jax.jit(found)(*given), plain(*given), rtol=1e-13)
    short = str(jax.make_jaxpr(as_products(lambda w, h: last(w, h, 7)))(w, h))
    assert "as_products" not in short

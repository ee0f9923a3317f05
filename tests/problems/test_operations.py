"""Operations of products: with ones everywhere, their number is twice the sum of what they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedscaffold as fs
from fedscaffold.problems.rewriting import product_operations

PICTURES = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel, **how):
    how = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": PICTURES} | how
    return lax.conv_general_dilated(x, kernel, **how)


def recur(x, matrix):
    def step(h, row):
        del h
        h = row @ matrix
        return jnp.ones_like(h), h

    return lax.scan(step, jnp.ones((2, 4)), x)[1]


CASES = {
    "product": (jnp.matmul, (3, 4, 5), (3, 5, 2)),
    "convolution": (convolve, (2, 7, 6, 3), (3, 2, 3, 4)),
    "strides": (
        lambda x, w: convolve(x, w, window_strides=(2, 3), rhs_dilation=(2, 1)),
        (2, 9, 8, 3),
        (3, 2, 3, 4),
    ),
    "groups": (lambda x, w: convolve(x, w, feature_group_count=3), (2, 7, 6, 6), (3, 2, 2, 9)),
    "channels first": (
        lambda x, w: convolve(x, w, dimension_numbers=("NCHW", "OIHW", "NCHW")),
        (2, 3, 7, 6),
        (4, 3, 3, 2),
    ),
    "jit": (jax.jit(jnp.dot), (3, 4), (4, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_of_ones(name):
    function, *shapes = CASES[name]
    a, b = map(jnp.ones, shapes)
    assert product_operations(function, a, b) == 2 * float(jnp.sum(function(a, b)))


def test_of_a_loop_one_iteration_counts():
    a, b = jnp.ones((6, 2, 3)), jnp.ones((3, 4))
    assert product_operations(recur, a, b) == 2 * float(jnp.sum(recur(a, b))) / 6


def test_of_the_branches_the_largest_counts():
    def either(flag, a):
        return lax.cond(flag, lambda: a @ a, lambda: a @ a @ a)

    assert product_operations(either, True, jnp.ones((3, 3))) == 2 * 54


def test_few_parameters_that_are_used_often_are_heavy():
    """A kernel goes over all of a picture: a client's work is not told by its number of parameters."""
    rng = np.random.default_rng(0)
    pictures = [(rng.normal(size=(8, 32, 32, 8)).astype(np.float32), np.zeros(8)) for _ in range(4)]

    def convolved(w, batch):
        return jnp.mean(jnp.square(convolve(batch[0], w)))

    def multiplied(w, batch):
        return jnp.mean(
            jnp.square(batch[0][:, 0, :9].reshape(len(batch[0]), -1) @ w.reshape(72, 8))
        )

    start = np.ones((3, 3, 8, 8), np.float32)
    runs = [
        fs.Simulator(
            fs.scaffold(),
            fs.Problem(loss, start, pictures, coupled=False),
            rounds=1,
            local_steps=25,
            lr=0.1,
            block=1,
            metrics=(),
        )
        for loss in (convolved, multiplied)
    ]
    assert [run.ready.spec.by_blocks for run in runs] == [True, False]

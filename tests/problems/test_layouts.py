"""Networks in any layout: as exact as they were, and not transposed around convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedscaffold.problems import batch_last
from fedscaffold.problems.layouts import lay_out
from fedscaffold.problems.rewriting import as_products

FIRST = ("NCHW", "OIHW", "NCHW")


def conv(x, kernel, layout=FIRST, **how):
    how = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME"} | how
    return lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **how)


def pool(x, kind=lax.max, start=-jnp.inf):
    return lax.reduce_window(x, start, kind, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def normalise(x):
    mean, square = x.mean((0, 2, 3)), (x * x).mean((0, 2, 3))
    spread = lax.rsqrt(square - mean**2 + 1e-3)
    return (x - mean[:, None, None]) * spread[:, None, None]


def lenet(x, a, b):
    x = pool(jax.nn.relu(conv(x, a) + a.sum((1, 2, 3))[:, None, None]))
    return pool(jax.nn.relu(conv(x, b))).reshape(len(x), -1)


def batch_norm(x, a, b):
    return jnp.tanh(normalise(conv(normalise(conv(x, a)), b)))


def residual(x, a, b):
    y = conv(x, a)
    return jnp.concatenate([y, jnp.tanh(conv(y, b)) + jnp.tile(x, (1, 2, 1, 1))], 1)


def padded_means(x, a, b):
    y = jnp.pad(conv(x, a), ((0, 0), (0, 0), (1, 2), (0, 1)))
    return conv(pool(y, lax.add, 0.0) / 4, b, window_strides=(2, 1))


def mixed_sums(x, a, b):
    y = conv(x, a)
    return y.sum((0, 3)) * y.max((0, 3)) + conv(y, b).transpose(2, 1, 0, 3).sum((2, 3)).T


def within_jit(x, a, b):
    unused = jax.jit(lambda y: (y, conv(y, b)))
    return jnp.where(x[:, :1] > 0, unused(jax.jit(conv)(x, a))[1], 0.5)


def in_a_loop(x, a, b):
    def step(y, _):
        return jnp.tanh(conv(conv(y, a), b)), y.mean()

    y, seen = lax.scan(step, x, None, length=2)
    return y * seen.sum()


def both_layouts(x, a, b):
    y = conv(x, a, ("NCHW", "OIHW", "CWHN"))
    return conv(y, b, ("CWHN", "OIHW", "NHWC"))[..., None, :]


def read_twice(x, a, b):
    y = conv(x, a)
    return jnp.cumsum(y, 3) * y + y.reshape(len(x), -1).sum() + y[:, ::-1] + conv(y, b).mean()


def numbers_and_integers(x, a, b):
    y = conv(x, a)
    kept = (y > 0).astype(jnp.int32)
    return jnp.clip(y, -1, 1) * kept + lax.stop_gradient(y) ** 2 + conv(y, b).sum()


pytestmark = pytest.mark.slow
NETWORKS = [
    lenet,
    batch_norm,
    residual,
    padded_means,
    mixed_sums,
    within_jit,
    in_a_loop,
    both_layouts,
    read_twice,
    numbers_and_integers,
]


def arrays(network):
    rng = np.random.default_rng(0)
    inputs, hidden = (3, 3) if network is in_a_loop else (3, 6)
    shapes = (4, inputs, 8, 8), (hidden, inputs, 3, 3), (6 if hidden == 6 else 3, hidden, 3, 3)
    return [rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for shape in shapes]


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13 * (1 + np.abs(b).max()))


def scalar(network):
    def loss(*arguments):
        found = network(*arguments)
        return jnp.sum(jnp.sin(found) * jnp.cos(jnp.arange(found.size)).reshape(found.shape))

    return loss


@pytest.fixture(params=["batch last", "features last"])
def layout(request, monkeypatch):
    if request.param == "features last":
        monkeypatch.setattr(batch_last, "FEW", 0)
    return request.param


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_are_the_same_functions(network, layout):
    with jax.enable_x64():
        given = arrays(network)
        several = [np.stack([one, 1.5 * one]) for one in given]

        def measured(network, wrap):
            slope = jax.grad(scalar(network), argnums=(0, 1, 2))
            return network(*given), wrap(slope)(*given), jax.vmap(wrap(slope))(*several)

        rewritten, plain, twice = jax.jit(
            lambda: (
                measured(as_products(network), lambda slope: slope),
                measured(network, lambda slope: slope),
                measured(network, as_products),
            )
        )()
        close(rewritten, plain)
        close(twice, plain)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_pass_alone_keeps_arguments_results_and_types(network, layout):
    with jax.enable_x64():
        given = arrays(network)
        closed = jax.make_jaxpr(jax.grad(scalar(network), argnums=(0, 1, 2)))(*given)
        moved = lay_out(closed.jaxpr)
        if network is not in_a_loop:  # whose body is passed by the rewriting
            assert moved is not closed.jaxpr
        for before, after in zip(closed.jaxpr.outvars, moved.outvars, strict=True):
            assert before.aval == after.aval
        functions = jaxpr_as_fun(ClosedJaxpr(moved, closed.consts)), jaxpr_as_fun(closed)
        close(*jax.jit(lambda: [function(*given) for function in functions])())


@pytest.mark.parametrize("rank", [1, 3])
def test_other_dimensions(rank, layout):
    space = "HWD"[:rank]
    layout = tuple(letters + space for letters in ("NC", "OI", "NC"))
    rng = np.random.default_rng(1)
    with jax.enable_x64():
        x, kernel = (
            rng.standard_normal(shape) for shape in ((2, 3) + (6,) * rank, (4, 3) + (3,) * rank)
        )
        slope = jax.grad(lambda *both: jnp.sum(jnp.tanh(conv(*both, layout)) ** 2), argnums=(0, 1))
        close(*jax.jit(lambda: (as_products(slope)(x, kernel), slope(x, kernel)))())


def transposed_sizes(jaxpr):
    """Sizes of the arrays whose order in memory a function's transpositions change."""
    found, constant = [], set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "broadcast_in_dim" and not equation.invars[0].aval.shape:
            constant.add(equation.outvars[0])
        if equation.primitive.name == "transpose" and equation.invars[0] not in constant:
            shape = equation.invars[0].aval.shape
            order = [axis for axis in equation.params["permutation"] if shape[axis] > 1]
            if order != sorted(order):
                found.append(int(np.prod(shape)))
    return found


def test_activations_are_transposed_where_the_network_flattens_them_and_nowhere_else(layout):
    x, a, b = arrays(lenet)
    closed = jax.make_jaxpr(jax.grad(scalar(lenet), argnums=(1, 2)))(x, a, b)
    flat = len(x) * 6 * 2 * 2
    moved = transposed_sizes(lay_out(closed.jaxpr))
    assert sorted(set(moved) - {a.size, b.size}) == [flat]
    assert f"f32[{'6,8,8,4' if layout == 'batch last' else '4,8,8,6'}]" in str(
        lay_out(closed.jaxpr)
    )
    assert moved.count(flat) == 2  # forward, and the gradient on its way back


def test_networks_with_channels_last_are_left_as_they_are():
    def last(x, kernel):
        return jnp.sum(conv(x, kernel, ("NHWC", "HWIO", "NHWC")) ** 2)

    given = jnp.ones((2, 8, 8, 32)), jnp.ones((3, 3, 32, 48))
    jaxpr = jax.make_jaxpr(jax.grad(last, argnums=(0, 1)))(*given).jaxpr
    assert lay_out(jaxpr) is jaxpr


@pytest.mark.parametrize(
    ("batch", "inputs", "last"),
    [(4, 16, True), (64, 16, False), (64, 1, True), (4, 32, False)],
)
def test_the_batch_is_last_with_few_features_and_copies_that_are_not_too_large(batch, inputs, last):
    shapes = (batch, inputs, 32, 32), (48, inputs, 3, 3)
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    jaxpr = jax.make_jaxpr(conv)(x, kernel).jaxpr
    assert (f"f32[48,32,32,{batch}]" in str(lay_out(jaxpr))) is last


def test_the_network_of_torchs_tutorial_has_the_batch_last():
    """Of whose convolutions the gradient for images would take the most copies, if it took any."""

    def loss(a, b, x):
        x = pool(jax.nn.relu(conv(x, a, padding="VALID")))
        return jnp.sum(pool(jax.nn.relu(conv(x, b, padding="VALID"))) ** 2)

    shapes = (6, 3, 5, 5), (16, 6, 5, 5), (32, 3, 32, 32)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = str(lay_out(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*given).jaxpr))
    assert "f32[16,10,10,32]" in text
    assert "f32[6,14,14,32]" in text

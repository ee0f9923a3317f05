"""Convolutions and pooling as matrix products equal `jax.lax`: values, gradients, under vmap, nested, in a run."""

from __future__ import annotations

import logging
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import sharp
from jax import lax

import fedscaffold as fs
from fedscaffold.problems import batch_last, convolutions, rewriting
from fedscaffold.problems.rewriting import as_products, patch_bytes

pytestmark = pytest.mark.slow

CONVOLUTIONS = {  # lhs shape, rhs shape, and arguments of lax.conv_general_dilated
    "2-D": ((2, 6, 7, 3), (3, 2, 3, 4), {}),
    "one entry": ((2, 4, 3, 3), (1, 1, 3, 4), {"window_strides": (2, 1)}),
    "wide enough for a product by row": ((2, 5, 4, 48), (2, 3, 48, 4), {"padding": "SAME"}),
    "strides, SAME": ((2, 6, 7, 3), (3, 3, 3, 4), {"window_strides": (2, 3), "padding": "SAME"}),
    "asymmetric and negative padding": (
        (1, 6, 7, 2),
        (3, 2, 2, 3),
        {"padding": [(2, -1), (-1, 3)]},
    ),
    "dilated kernel": ((2, 8, 7, 2), (3, 2, 2, 3), {"rhs_dilation": (2, 3)}),
    "transposed": (
        (2, 4, 3, 2),
        (3, 3, 2, 3),
        {"lhs_dilation": (2, 3), "padding": [(2, 1), (1, 2)]},
    ),
    "all at once": (
        (2, 6, 5, 4),
        (3, 2, 2, 6),
        {
            "window_strides": (2, 1),
            "padding": [(1, 2), (2, -1)],
            "lhs_dilation": (1, 2),
            "rhs_dilation": (2, 1),
            "feature_group_count": 2,
        },
    ),
    "feature groups": ((2, 5, 5, 6), (2, 2, 3, 4), {"feature_group_count": 2}),
    "depthwise": ((2, 5, 5, 3), (3, 3, 1, 6), {"feature_group_count": 3, "padding": "SAME"}),
    "batch groups": ((4, 5, 5, 3), (2, 2, 3, 4), {"batch_group_count": 2}),
    "kernel larger than its results": ((2, 9, 8, 3), (8, 6, 3, 2), {}),
    "1-D": (
        (2, 9, 3),
        (4, 3, 2),
        {"window_strides": (2,), "padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")},
    ),
    "3-D": ((1, 4, 5, 4, 2), (2, 3, 2, 2, 3), {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}),
    "channels first": ((2, 3, 6, 5), (4, 3, 3, 2), {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}),
    "mixed layouts": ((6, 2, 5, 3), (4, 3, 2, 3), {"dimension_numbers": ("HNWC", "OHWI", "CWNH")}),
    "no room": ((2, 2, 5, 3), (3, 2, 3, 4), {}),
}
ONES = {"padding": "VALID", "window_strides": (1, 1, 1, 1)}
WINDOWS = {  # of (2, 7, 6, 3): window, arguments of lax.reduce_window
    "no overlap": ((1, 2, 2, 1), {"window_strides": (1, 2, 2, 1)}),
    "no overlap, SAME": ((1, 2, 3, 1), {"window_strides": (1, 2, 3, 1), "padding": "SAME"}),
    "overlap": (
        (1, 3, 2, 1),
        {"window_strides": (1, 2, 1, 1), "padding": [(0, 0), (1, 1), (0, 1), (0, 0)]},
    ),
    "dilated": ((1, 2, 2, 2), {"base_dilation": (1, 1, 2, 1), "window_dilation": (1, 3, 1, 1)}),
    "everything": ((1, 7, 6, 1), {}),
}
POOLS = {"max": (lax.max, -np.inf), "min": (lax.min, np.inf), "sum": (lax.add, 0.0)}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def convolve(x, w, **how):
    settings = {
        "window_strides": (1,) * (x.ndim - 2),
        "padding": "VALID",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    return lax.conv_general_dilated(x, w, **settings | how)


def pool(x, kind="max", window=(1, 2, 2, 1), **how):
    fold, begin = POOLS[kind]
    return lax.reduce_window(x, begin, fold, window, **ONES | how)


def normal(*shapes, seed=0):
    """Arrays of NumPy: what is done to them outside of `jit` is not compiled."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def assert_same(function, *arguments, ours=None):
    """The function's value, gradient, and gradient under vmap, as it is and rewritten, inside a compiled loop."""
    ours = as_products(function) if ours is None else ours
    several = [jnp.asarray(np.stack([a, 0.7 * a, -a])) for a in arguments]
    arguments = [jnp.asarray(a) for a in arguments]
    places = tuple(range(len(arguments)))

    def measured(function):
        def summed(*arguments):
            out = function(*arguments)
            return jnp.sum(jnp.sin(out) * (1 + jnp.arange(out.size).reshape(out.shape)))

        slope = jax.grad(summed, places)
        return function(*arguments), slope(*arguments), jax.vmap(slope)(*several)

    text = str(jax.make_jaxpr(ours)(*arguments))
    assert "as_products" in text
    found, expected = jax.jit(lambda: (measured(ours), measured(function)))()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * (1 + np.abs(b).max(initial=0)))


@pytest.fixture
def features_last(monkeypatch):
    """No convolution has few features, so none is computed with the batch last."""
    monkeypatch.setattr(batch_last, "FEW", 0)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case, features_last):
    lhs, rhs, how = CONVOLUTIONS[case]
    assert_same(partial(convolve, **how), *normal(lhs, rhs))


@pytest.mark.parametrize(
    "case",
    [case for case, (_, _, how) in CONVOLUTIONS.items() if not any("group" in key for key in how)],
)
def test_convolutions_with_the_batch_last(case):
    lhs, rhs, how = CONVOLUTIONS[case]
    lhs, rhs = (tuple(size // 12 if size == 48 else size for size in one) for one in (lhs, rhs))
    given = normal(lhs, rhs)
    numbers = lax.conv_dimension_numbers(
        lhs, rhs, how.get("dimension_numbers", ("NHWC", "HWIO", "NHWC"))
    )
    traced = str(jax.make_jaxpr(as_products(partial(convolve, **how)))(*given))
    shape = jax.eval_shape(partial(convolve, **how), *given).shape
    batch, features, *space = numbers.out_spec
    laid = [shape[features], *(shape[axis] for axis in sorted(space)), shape[batch]]
    assert f"f64[{','.join(map(str, laid))}]" in traced
    assert_same(partial(convolve, **how), *given)


@pytest.mark.parametrize(
    ("kind", "case"),
    sharp(
        product(POOLS, WINDOWS),
        lambda one: one[0] == "max" or one in [("min", "overlap"), ("sum", "dilated")],
    ),
)
def test_pooling(kind, case):
    window, how = WINDOWS[case]
    of, (x,) = partial(pool, kind=kind, window=window, **how), normal((2, 7, 6, 3))
    if case == "dilated" and kind != "sum":  # which JAX does not differentiate
        np.testing.assert_array_equal(*jax.jit(lambda x: (as_products(of)(x), of(x)))(x))
    else:
        assert_same(of, x)


def test_ties_and_missing_values_of_a_window():
    x = np.random.default_rng(0).integers(0, 2, (2, 6, 6, 3)) * 1.0
    broken = x.copy()
    broken[0, 2, 3, 1] = np.nan
    for strides in ((1, 2, 2, 1), (1, 1, 1, 1)):
        of = partial(pool, window_strides=strides)

        def slope_and_value(f):
            slope = jax.grad(lambda x: jnp.sum(jnp.cos(f(x) + x[:, :1, :1]) * 3))
            return jax.jit(lambda x, broken: (slope(x), f(broken)))(x, broken)

        found, expected = map(slope_and_value, (as_products(of), of))
        np.testing.assert_allclose(found[0], expected[0], atol=1e-13)
        np.testing.assert_array_equal(found[1], expected[1])


def test_float32_and_half_precision_keep_their_types():
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)):
        x, w = (a.astype(dtype) for a in normal((2, 6, 6, 3), (3, 3, 3, 4)))
        for how in ({}, {"preferred_element_type": jnp.float32}):
            of = partial(convolve, **how)
            found, expected = (jax.jit(f)(x, w) for f in (as_products(of), of))
            assert found.dtype == expected.dtype
            wide = [np.asarray(a, np.float64) for a in (found, expected)]
            np.testing.assert_allclose(*wide, rtol=tolerance, atol=10 * tolerance)


DIRECT = {  # convolutions that XLA has a fast kernel for, as have the gradients of most
    "SAME": ((3, 8, 7, 16), (3, 3, 16, 8), {"padding": "SAME"}),
    "VALID": ((3, 12, 9, 8), (3, 2, 8, 16), {}),
    "strides": ((3, 9, 8, 8), (3, 3, 8, 16), {"padding": "SAME", "window_strides": (2, 2)}),
    "one entry, strides": ((3, 8, 8, 8), (1, 1, 8, 16), {"window_strides": (2, 2)}),
    "small results": ((3, 12, 12, 8), (5, 5, 8, 8), {}),
    "channels first": (
        (3, 16, 8, 7),
        (8, 16, 3, 3),
        {"padding": "SAME", "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "1-D": (
        (3, 20, 16),
        (3, 16, 8),
        {"padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")},
    ),
}


# The first convolution in the direct form ("alone"), as products ("both") and in the ways to map that choose between the
# two; the others, which `test_convolutions` has in both forms in double precision, in turn in one of the two. `make soak`
# has all pairs.
MAPPED = [
    pytest.param(
        case, way, marks=() if k == 0 or way == ("alone", "both")[k % 2] else pytest.mark.soak
    )
    for k, case in enumerate(DIRECT)
    for way in ("alone", "both", "one", "images")
]


@pytest.mark.parametrize(("case", "mapped"), MAPPED)
def test_gradients_in_single_precision(case, mapped):
    lhs, rhs, how = DIRECT[case]
    x, w = (a.astype(np.float32) for a in normal(lhs, rhs))
    results = jax.eval_shape(partial(convolve, **how), x, w).shape
    g = normal(results, seed=1)[0].astype(np.float32)

    def slopes(x, w):
        return jax.vjp(partial(convolve, **how), x, w)[1](g)

    axes = {"one": (0, 0), "images": (0, None), "both": (0, 0)}
    if mapped != "alone":
        times = np.array([1.0] if mapped == "one" else [1.0, -0.5], np.float32)
        x, w = (
            a if axis is None else np.multiply.outer(times, a)
            for a, axis in zip((x, w), axes[mapped], strict=True)
        )
    x, w, g = map(jnp.asarray, (x, w, g))

    def whole(f):
        f = f if mapped == "alone" else jax.vmap(f, axes[mapped])
        return jax.jit(lambda: (f(x, w), jax.jvp(f, (x, w), (x, -w))))

    found, expected = whole(as_products(slopes))(), whole(slopes)()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max())


def test_one_client_runs_in_the_direct_form_and_several_with_kernels_of_their_own_as_products(
    features_last,
):
    x, w = (a.astype(jnp.float32) for a in normal((3, 8, 8, 16), (3, 3, 16, 8)))
    ours = as_products(partial(convolve, padding="SAME"))
    for clients, direct in ((1, 1), (2, 0)):
        several = [np.stack([a] * clients) for a in (x, w)]
        text = jax.jit(jax.vmap(ours)).lower(*several).as_text()
        assert text.count("stablehlo.convolution") == direct
    shared = jax.jit(jax.vmap(ours, (0, None))).lower(np.stack([x] * 2), w).as_text()
    assert shared.count("stablehlo.convolution") == 1
    assert "tensor<6x8x8x16xf32>" in shared  # the clients' images are one batch


def test_gradients_of_kernels_take_one_product(features_last):
    x, w = normal((2, 16, 16, 16), (3, 3, 16, 8))

    def slope(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.sin(convolve(x, w, padding="SAME"))))(w)

    text = str(jax.make_jaxpr(as_products(slope))(x, w))
    # the shifts of both operands are three each: nothing is copied nine times
    assert "f64[2,18,16,48]" in text
    assert "f64[2,18,16,24]" in text


@pytest.mark.parametrize("together", [1, 2, 3])
def test_gradients_of_kernels_add_up_parts_that_fit_the_cache(together, features_last, monkeypatch):
    """Five images, one, two or three at a time; the last part may be smaller."""
    lhs, rhs = (5, 8, 6, 4), (3, 3, 4, 2)
    copies = 8 * (8 * 6 * 9 * 4 + 8 * 6 * 2)  # of one image: windows, and the results' gradient
    monkeypatch.setattr(convolutions, "CACHED", (together + 0.5) * copies)
    slope = jax.grad(lambda w, x: jnp.sum(jnp.sin(convolve(x, w, padding="SAME"))))
    x, w = normal(lhs, rhs)
    text = str(jax.make_jaxpr(as_products(slope))(w, x))
    assert f"f64[{together},8,6,36]" in text
    assert "f64[5,1,8,6" not in text  # for an axis of one XLA copies both operands before the loop
    assert_same(slope, w, x)


@pytest.mark.parametrize("axes", [(1, 2, 4), (0, 4), (1, 3, 4)])
def test_sums_over_separated_axes(axes):
    (x,) = normal((3, 4, 5, 2, 6))
    total = partial(jnp.sum, axis=axes)
    assert_same(total, x)
    assert "optimization_barrier" in str(jax.make_jaxpr(as_products(total))(x))


@pytest.mark.parametrize("axes", [(3, 4), (0, 1), (0, 1, 2, 3, 4), (4,), (1, 3)])
def test_other_sums_are_left_alone(axes):
    (x,) = normal((3, 4, 5, 2, 6))
    total = partial(jnp.sum, axis=axes)
    assert str(jax.make_jaxpr(as_products(total))(x)) == str(jax.make_jaxpr(total)(x))


@jax.custom_vjp
def scaled(x, w):
    return convolve(x, w, padding="SAME")


def scaled_forward(x, w):
    return 2 * convolve(x, w, padding="SAME"), (x, w)


def scaled_backward(saved, slope):
    x, w = saved
    return 3 * jax.vjp(partial(convolve, padding="SAME"), x, w)[1](slope)[0], None


scaled.defvjp(scaled_forward, scaled_backward)


@jax.custom_jvp
def halved(x, w):
    return convolve(x, w, padding="SAME")


@halved.defjvp
def halved_tangent(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return halved(x, w), convolve(dx, w, padding="SAME") / 2 + convolve(x, dw, padding="SAME")


def in_scan(x, w):
    def body(x, scale):
        return jnp.tanh(pool(convolve(x * scale, w, padding="SAME"), padding="SAME")), jnp.sum(x)

    return lax.scan(body, x, jnp.array([1.0, 2.0]))[0]


def in_while(x, w):
    return lax.fori_loop(0, 2, lambda k, x: jnp.tanh(convolve(x, w, padding="SAME")), x)


def in_cond(x, w):
    return lax.cond(
        x.sum() > 0,
        lambda: convolve(x, w, padding="SAME"),
        lambda: pool(x * w.sum(), padding="SAME"),
    )


NESTED = {
    "scan": in_scan,
    "fori_loop": in_while,
    "cond": in_cond,
    "jit": jax.jit(lambda x, w: convolve(x, w, padding="SAME")),
    "checkpoint": jax.checkpoint(
        lambda x, w: jnp.sin(convolve(jnp.cos(convolve(x, w, padding="SAME")), w))
    ),
    "custom_vjp": scaled,
    "custom_jvp": halved,
    "vmap over kernels": lambda x, w: jax.vmap(lambda a, b: convolve(a[None], b))(
        x, jnp.stack([w, 2 * w])
    ),
    "a derivative inside": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(pool(convolve(x, w)))))(
        x
    ),
    "a tangent inside": lambda x, w: jax.jvp(lambda x: pool(convolve(x, w)), (x,), (jnp.cos(x),))[
        1
    ],
}


@pytest.mark.parametrize("case", NESTED)
def test_nested(case):
    assert_same(NESTED[case], *normal((2, 5, 5, 2), (2, 3, 2, 2)))


@pytest.mark.parametrize("case", ["custom_vjp", "custom_jvp"])
def test_custom_rules_are_rewritten_too(case):
    x, w = normal((2, 5, 5, 2), (2, 3, 2, 2))
    program = jax.jit(jax.grad(lambda x: jnp.sum(as_products(NESTED[case])(x, w) ** 2)))
    assert "stablehlo.convolution" not in program.lower(x).as_text()


def loss(params, batch):
    x, y = batch
    x = jax.nn.relu(convolve(x[..., None], params["a"], padding="SAME") + params["b"])
    x = pool(x, window_strides=(1, 2, 2, 1))
    scores = x.reshape(len(x), -1) @ params["c"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1))


def network(classes=3):
    a, b, c = normal((3, 3, 1, 4), (4,), (64, classes))
    return {"a": np.asarray(a), "b": np.asarray(0.1 * b), "c": np.asarray(0.3 * c)}


def pictures(*sizes):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(n, 8, 8)), rng.integers(0, 3, n)) for n in sizes]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_accelerators_keep_their_convolutions(platform):
    given = jax.tree.map(jnp.asarray, (network(), pictures(6)[0]))
    program = jax.jit(jax.vmap(jax.grad(as_products(loss)), (None, 0)))
    (x, y), params = given[1], given[0]
    text = jax.export.export(program, platforms=[platform])(
        params, (x[:, None], y[:, None])
    ).mlir_module()
    original = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    plain = jax.export.export(original, platforms=[platform])(
        params, (x[:, None], y[:, None])
    ).mlir_module()
    counts = {
        word: text.count(word)
        for word in ("stablehlo.convolution", "stablehlo.dot_general", "dilated_as_products")
    }
    if platform == "cpu":
        assert counts["stablehlo.convolution"] == 0
        assert counts["dilated_as_products"] > 0
        assert "select_and_scatter" not in text
    else:
        assert counts["dilated_as_products"] == 0
        assert all(
            counts[word] == plain.count(word)
            for word in ("stablehlo.convolution", "stablehlo.dot_general")
        )
        assert counts["stablehlo.convolution"] > 0
        assert "select_and_scatter" in text


def test_functions_without_windows_are_left_alone():
    def plain(params, batch):
        return jnp.mean(jnp.tanh(batch @ params) ** 2)

    given = normal((3, 2), (5, 3))
    assert str(jax.make_jaxpr(as_products(plain))(*given)) == str(jax.make_jaxpr(plain)(*given))
    assert patch_bytes(plain, *given) == 0


def test_where_no_rule_fits_one_line_says_so(caplog, monkeypatch):
    monkeypatch.setattr(rewriting, "_told", set())
    x, w = normal((1, 300, 300, 1), (70, 70, 1, 1))
    with caplog.at_level(logging.WARNING, logger="fedscaffold"):
        for _ in range(2):
            text = str(jax.make_jaxpr(as_products(convolve))(x, w))
    assert "as_products" not in text
    assert [record.getMessage() for record in caplog.records] == [
        "conv_general_dilated of shapes (1, 300, 300, 1), (70, 70, 1, 1) is left to XLA, which is slow inside compiled "
        "loops on CPUs: no rule fits"
    ]


@pytest.mark.parametrize("layout", ["batch last", "features last"])
def test_patches_are_forecast(layout, monkeypatch):
    x, w = normal((2, 6, 7, 3), (3, 2, 3, 4))
    results = 2 * 4 * 6 * 4
    patches = 2 * 4 * 6 * (3 * 2 * 3)
    if layout == "features last":
        monkeypatch.setattr(batch_last, "FEW", 0)
        patches += 2 * 6 * 6 * (2 * 3)  # along the width, before along both
    assert patch_bytes(convolve, x, w) == 8 * (patches + results)
    assert patch_bytes(as_products(convolve), x, w) == 8 * (patches + results)


def test_large_patches_make_small_blocks():
    def block(width):
        clients = [(np.zeros((20, width, width, 4)), np.zeros(20)) for _ in range(8)]
        problem = fs.Problem(
            lambda w, batch: jnp.mean(convolve(batch[0], w) ** 2),
            np.ones((3, 3, 4, 4)),
            clients,
            coupled=False,
        )
        simulator = fs.Simulator(
            fs.scaffold(), problem, rounds=1, local_steps=1, lr=0.1, batch_size=10, metrics=()
        )
        return simulator.ready.spec.block

    assert block(4) == 8
    assert block(24) == 1


def flax_network():
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
            self.deep = nnx.Conv(4, 4, (3, 3), strides=2, feature_group_count=4, rngs=rngs)
            self.up = nnx.ConvTranspose(4, 3, (2, 2), strides=(2, 2), rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(
                nnx.relu(self.norm(self.conv(x[..., None]))), (3, 3), strides=(2, 2), padding="SAME"
            )
            return nnx.avg_pool(self.up(self.deep(x)), (2, 2), strides=(2, 2)).mean((1, 2))

    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def equinox_network():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        eqx.nn.Conv2d(1, 4, 3, padding=1, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.MaxPool2d(2, 2),
        eqx.nn.Conv2d(4, 4, 3, groups=2, dilation=1, key=keys[1]),
        eqx.nn.AvgPool2d(2),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(4, 3, key=keys[2]),
    ]
    params, static = eqx.partition(eqx.nn.Sequential(layers), eqx.is_inexact_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x[:, None])


@pytest.mark.parametrize("make", [flax_network, equinox_network])
def test_networks_of_libraries(make):
    params, scores = make()
    x, y = pictures(4)[0]

    def loss(params, x):
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], axis=1)
        )

    slopes = [jax.value_and_grad(function) for function in (as_products(loss), loss)]
    text = jax.jit(slopes[0]).lower(params, x).as_text()
    assert "stablehlo.convolution" not in text
    assert "stablehlo.reduce_window" not in text
    found, expected = jax.jit(lambda: [slope(params, x) for slope in slopes])()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 if a.dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("sizes", [(6, 6, 6), (5, 9, 7)], ids=["equal", "unequal"])
def test_a_run_equals_the_reference(sizes):
    clients, start = pictures(*sizes), network()
    problem = fs.Problem(loss, start, clients)
    run = fs.simulate(
        fs.scaffold(),
        problem,
        rounds=3,
        local_steps=2,
        lr=0.2,
        precision="float64",
        metrics=("loss",),
        progress=False,
    )
    leaves, tree = jax.tree.flatten(start)
    slope = jax.jit(jax.value_and_grad(loss))
    x, c, memory = (
        leaves,
        [np.zeros_like(a) for a in leaves],
        [[np.zeros_like(a) for a in leaves] for _ in clients],
    )
    for _ in range(3):
        ends, kept = [], []
        for held, batch in zip(memory, clients, strict=True):
            y = x
            for _ in range(2):
                g = jax.tree.leaves(slope(jax.tree.unflatten(tree, y), batch)[1])
                y = [
                    a - 0.2 * (np.asarray(b) - i + s)
                    for a, b, i, s in zip(y, g, held, c, strict=True)
                ]
            ends.append(y)
            kept.append([i - s + (a - b) / 0.4 for i, s, a, b in zip(held, c, x, y, strict=True)])
        memory = kept
        x = [np.mean(parts, axis=0) for parts in zip(*ends, strict=True)]
        c = [np.mean(parts, axis=0) for parts in zip(*memory, strict=True)]
    for found, expected in zip(jax.tree.leaves(run.x), x, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    losses = [float(slope(jax.tree.unflatten(tree, x), batch)[0]) for batch in clients]
    np.testing.assert_allclose(run.history["loss"][-1], np.mean(losses), rtol=1e-11)

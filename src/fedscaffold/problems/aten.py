"""Core ATen operators in JAX.

`OPERATORS` maps the name of an operator, without its overload, to a function with the operator's
arguments in the order of its schema, on JAX arrays and Python numbers. Derivatives where an
operator is not differentiable are those of torch: 0 for relu at 0, the first maximum of a window, 1
for clamp at its bounds.

Indices out of range, which torch refuses, give NaN in floating-point results, so that a run with a
wrong label diverges instead of learning from another one. Random operators take their key as the
keyword `key`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["OPERATORS", "RANDOM", "Unsupported"]

Array: TypeAlias = Any

OPERATORS: dict[str, Callable[..., Any]] = {}
RANDOM: set[str] = set()


class Unsupported(Exception):
    """A case of an operator that has no rule; the text says which."""


def operator(
    *names: str, random: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under the names of operators."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(names, function))
        if random:
            RANDOM.update(names)
        return function

    return register


# Elementwise.

SAME_NAME = """
abs exp exp2 expm1 log log10 log1p log2 sqrt square sign ceil floor trunc sin cos tan sinh cosh tanh
isnan isinf isfinite maximum minimum fmod remainder logical_and logical_or logical_xor logical_not
bitwise_and bitwise_or bitwise_xor where
"""
OTHER_NAME = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "atan2": jnp.arctan2,
    "bitwise_not": jnp.invert,
    "neg": jnp.negative,
    "mul": jnp.multiply,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "detach": lax.stop_gradient,
    "rsqrt": lambda x: lax.rsqrt(_floating(x)),
    "erf": lambda x: lax.erf(_floating(x)),
    "erfc": lambda x: lax.erfc(_floating(x)),
    "erfinv": lambda x: lax.erf_inv(_floating(x)),
    "lgamma": lambda x: lax.lgamma(_floating(x)),
    "digamma": lambda x: lax.digamma(_floating(x)),
    "hypot": jnp.hypot,
    "copysign": jnp.copysign,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "linalg_matrix_exp": lambda x: jax.scipy.linalg.expm(x),
    "reciprocal": lambda x: 1 / x,
    "round": lambda x, *, decimals=0: jnp.round(x, decimals),
}
OPERATORS.update({name: getattr(jnp, name) for name in SAME_NAME.split()} | OTHER_NAME)


def _floating(x: Array) -> Array:
    return x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else jnp.asarray(x, float)


@operator("elu")
def _elu(x: Array, alpha: float = 1, scale: float = 1, inner: float = 1) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0.0, x) * inner))


@operator(
    "alias",
    "clone",
    "contiguous",
    "lift_fresh_copy",
    "_to_copy",
    "_local_scalar_dense",
    "to",
    "item",
)
def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x  # the interpreter converts to the result's dtype


@operator("add")
def _add(a: Array, b: Array, alpha: Any = 1) -> Array:
    return jnp.add(a, b if _is_one(alpha) else alpha * b)


@operator("sub")
def _sub(a: Array, b: Array, alpha: Any = 1) -> Array:
    return jnp.subtract(a, b if _is_one(alpha) else alpha * b)


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


@operator("div")
def _div(a: Array, b: Array, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        whole = jnp.result_type(a, b).kind in "iu"
        return (
            jnp.sign(a) * jnp.sign(b) * (abs(a) // abs(b))
            if whole
            else jnp.trunc(jnp.true_divide(a, b))
        )
    return jnp.true_divide(a, b)


@operator("pow")
def _pow(a: Array, b: Any) -> Array:
    whole = isinstance(b, float) and b.is_integer() and abs(b) < 64
    return jnp.power(a, int(b) if whole and jnp.result_type(a).kind == "f" else b)


@operator("clamp", "hardtanh")
def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


@operator("hardsigmoid")
def _hardsigmoid(x: Array) -> Array:
    inner = jnp.where((x > -3) & (x < 3), x, lax.stop_gradient(jnp.clip(x, -3, 3)))
    sixth = jnp.asarray(np.float32(1) / np.float32(6), x.dtype)  # torch's slope in any precision
    return lax.stop_gradient((inner + 3) / 6 - inner * sixth) + inner * sixth


@operator("leaky_relu")
def _leaky_relu(x: Array, slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, slope * x)


@operator("gelu")
def _gelu(x: Array, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operator("log_sigmoid_forward")
def _log_sigmoid(x: Array) -> tuple[Array, None]:
    return jax.nn.log_sigmoid(x), None


@operator("masked_fill")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, value, x)


# Creation.


@operator("full")
def _full(size: Sequence[int], value: Any, *, dtype: Any = None) -> Array:
    return jnp.full(tuple(size), value, dtype)


@operator("full_like", "fill")
def _full_like(x: Array, value: Any, **_: Any) -> Array:
    return jnp.full(jnp.shape(x), value)


@operator("zeros", "empty", "new_zeros", "new_empty")
def _zeros(*given: Any, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(given[-1]), dtype)


@operator("empty_permuted", "empty_strided")
def _empty(size: Sequence[int], order: Sequence[int], *, dtype: Any = None) -> Array:
    return jnp.zeros(tuple(size), dtype)  # contents that are written over


@operator("empty_like", "zeros_like")
def _zeros_like(x: Array, **_: Any) -> Array:
    return jnp.zeros(jnp.shape(x))


@operator("ones")
def _ones(size: Sequence[int], *, dtype: Any = None) -> Array:
    return jnp.ones(tuple(size), dtype)


@operator("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: Any = None) -> Array:
    return jnp.asarray(value, dtype)


@operator("arange")
def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Array:
    return jnp.arange(start, end, step, dtype)


@operator("copy")
def _copy(x: Array, source: Array, *_: Any) -> Array:
    return jnp.broadcast_to(source, jnp.shape(x))


# Random numbers.


@operator("native_dropout", random=True)
def _dropout(
    x: Array, p: float, train: bool | None = True, *, key: Array = None
) -> tuple[Array, Array]:
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(keep, x, 0) * (1 / (1 - p) if p < 1 else 0.0), keep


@operator("bernoulli", random=True)
def _bernoulli(x: Array, p: float | None = None, *, key: Array) -> Array:
    return jax.random.bernoulli(key, x if p is None else p, jnp.shape(x))


@operator("rand", random=True)
def _rand(size: Sequence[int], *, key: Array, dtype: Any = None) -> Array:
    return jax.random.uniform(key, tuple(size), dtype)


@operator("randn", random=True)
def _randn(size: Sequence[int], *, key: Array, dtype: Any = None) -> Array:
    return jax.random.normal(key, tuple(size), dtype)


@operator("rand_like", random=True)
def _rand_like(x: Array, *, key: Array, **_: Any) -> Array:
    return jax.random.uniform(key, x.shape, x.dtype)


@operator("randn_like", random=True)
def _randn_like(x: Array, *, key: Array, **_: Any) -> Array:
    return jax.random.normal(key, x.shape, x.dtype)


@operator("normal_functional", random=True)
def _normal(x: Array, mean: float = 0.0, std: float = 1.0, *, key: Array) -> Array:
    return mean + std * jax.random.normal(key, x.shape, x.dtype)


@operator("uniform", random=True)
def _uniform(x: Array, low: float = 0.0, high: float = 1.0, *, key: Array) -> Array:
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@operator("exponential", random=True)
def _exponential(x: Array, rate: float = 1.0, *, key: Array) -> Array:
    return jax.random.exponential(key, x.shape, x.dtype) / rate


@operator("randperm", random=True)
def _randperm(size: int, *, key: Array, **_: Any) -> Array:
    return jax.random.permutation(key, size)


# Reductions.


def _axes(x: Array, dim: Any) -> tuple[int, ...]:
    """Return the axes of a reduction; all of them for None and []."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(jnp.ndim(x)))
    return tuple(
        one % max(jnp.ndim(x), 1) for one in ([dim] if isinstance(dim, int) else dim) if jnp.ndim(x)
    )


def _reduction(
    function: Callable[..., Array], x: Array, dim: Any = None, keepdim: bool = False, **_: Any
) -> Array:
    return function(x, axis=_axes(x, dim), keepdims=keepdim)


OPERATORS.update(
    {
        name: partial(_reduction, getattr(jnp, name))
        for name in ("sum", "mean", "prod", "any", "all")
    }
    | {"amax": partial(_reduction, jnp.max), "amin": partial(_reduction, jnp.min)}
)


def _variance(x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    axes = _axes(x, dim)
    centred = x - x.mean(axes, keepdims=True)
    number = math.prod(x.shape[axis] for axis in axes) - (1 if correction is None else correction)
    return jnp.square(centred).sum(axes, keepdims=keepdim) / number


@operator("var")
def _var(
    x: Array, dim: Any = None, *given: Any, correction: Any = None, keepdim: bool = False
) -> Array:
    if given:  # var.dim(self, dim, unbiased, keepdim)
        correction, keepdim = int(given[0]), bool(given[1:] and given[1])
    return _variance(x, dim, correction=correction, keepdim=keepdim)


@operator("var_mean")
def _var_mean(
    x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Array, Array]:
    return _variance(x, dim, correction=correction, keepdim=keepdim), x.mean(
        _axes(x, dim), keepdims=keepdim
    )


@operator("linalg_vector_norm")
def _norm(x: Array, order: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Array:
    axes, size = _axes(x, dim), jnp.abs(x)
    if order in (math.inf, -math.inf):
        return (jnp.max if order > 0 else jnp.min)(size, axis=axes, keepdims=keepdim)
    if order == 0:
        return (x != 0).sum(axes, keepdims=keepdim)
    if order == 1:
        return size.sum(axes, keepdims=keepdim)
    total = (
        jnp.square(x) if order == 2 else jnp.where(size > 0, size, 1) ** order * (size > 0)
    ).sum(axes, keepdims=keepdim)
    return jnp.where(
        total > 0, jnp.where(total > 0, total, 1) ** (1 / order), 0
    )  # derivative 0 at 0


def _extreme(
    arg: Callable[..., Array], x: Array, dim: int, keepdim: bool = False
) -> tuple[Array, Array]:
    if not jnp.ndim(x):
        return x, jnp.zeros((), int)
    place = arg(x, axis=dim, keepdims=True)
    value = jnp.take_along_axis(x, place, dim)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _arg(
    function: Callable[..., Array], x: Array, dim: int | None = None, keepdim: bool = False
) -> Array:
    return function(x, axis=dim, keepdims=keepdim) if jnp.ndim(x) else jnp.zeros((), int)


OPERATORS.update({"max": partial(_extreme, jnp.argmax), "min": partial(_extreme, jnp.argmin)})
OPERATORS.update({"argmax": partial(_arg, jnp.argmax), "argmin": partial(_arg, jnp.argmin)})


@operator("cumsum")
def _cumsum(x: Array, dim: int, **_: Any) -> Array:
    return jnp.cumsum(x, dim)


@operator("cumprod")
def _cumprod(x: Array, dim: int, **_: Any) -> Array:
    return jnp.cumprod(x, dim)


@operator("logcumsumexp")
def _logcumsumexp(x: Array, dim: int) -> Array:
    return lax.cumlogsumexp(x, dim % x.ndim) if jnp.ndim(x) else x


@operator("sort")
def _sort(
    x: Array, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> tuple[Array, Array]:
    order = jnp.argsort(x, axis=dim, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@operator("kthvalue")
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    found = [lax.slice_in_dim(one, k - 1, k, axis=dim % x.ndim) for one in _sort(x, dim)]
    value, place = found if keepdim else [one.squeeze(dim) for one in found]
    return value, place


@operator("median")
def _median(x: Array, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return _kthvalue(x.reshape(-1), (x.size + 1) // 2)[0]
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@operator("topk")
def _topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    last = jnp.moveaxis(x, dim, -1)
    order = jnp.moveaxis(lax.top_k(last if largest else -last, k)[1], -1, dim)
    return jnp.take_along_axis(x, order, dim), order


@operator("_softmax", "softmax")
def _softmax(x: Array, dim: int, *_: Any, **__: Any) -> Array:
    return jax.nn.softmax(x, dim)


@operator("_safe_softmax")
def _safe_softmax(x: Array, dim: int, *_: Any, **__: Any) -> Array:
    empty = (x == -jnp.inf).all(dim, keepdims=True)  # rows that are masked out
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), dim))


@operator("_log_softmax", "log_softmax")
def _log_softmax(x: Array, dim: int, *_: Any, **__: Any) -> Array:
    return jax.nn.log_softmax(x, dim)


# Shapes.


@operator("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy")
def _view(x: Array, size: Sequence[int]) -> Array:
    return jnp.reshape(x, tuple(size))


@operator("permute")
def _permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


@operator("transpose")
def _transpose(x: Array, first: int, second: int) -> Array:
    return jnp.swapaxes(x, first, second)


@operator("t")
def _t(x: Array) -> Array:
    return jnp.transpose(x)


@operator("expand")
def _expand(x: Array, size: Sequence[int], **_: Any) -> Array:
    own = (1,) * (len(size) - jnp.ndim(x)) + jnp.shape(x)
    return jnp.broadcast_to(
        x, tuple(have if want == -1 else want for have, want in zip(own, size, strict=True))
    )


@operator("squeeze")
def _squeeze(x: Array, dim: Any = None) -> Array:
    axes = _axes(x, dim) if dim != [] else ()
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@operator("unsqueeze")
def _unsqueeze(x: Array, dim: int) -> Array:
    return jnp.expand_dims(x, dim)


@operator("cat")
def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    real = [a for a in arrays if jnp.shape(a) != (0,)]  # torch leaves empty vectors out
    return jnp.concatenate(real or list(arrays), dim)


@operator("stack")
def _stack(arrays: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(arrays, dim)


@operator("split_with_sizes")
def _split(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


@operator("unbind")
def _unbind(x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


@operator("flip")
def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims))


@operator("roll")
def _roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims) or None)


@operator("repeat")
def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


@operator("diagonal")
def _diagonal(x: Array, offset: int = 0, first: int = 0, second: int = 1) -> Array:
    return jnp.diagonal(x, offset, first, second)


@operator("diagonal_scatter")
def _diagonal_scatter(
    x: Array, source: Array, offset: int = 0, first: int = 0, second: int = 1
) -> Array:
    moved = jnp.moveaxis(x, (first, second), (-2, -1))
    rows = np.arange(jnp.shape(source)[-1]) + max(0, -offset)
    moved = moved.at[..., rows, rows + offset].set(source)
    return jnp.moveaxis(moved, (-2, -1), (first, second))


@operator("tril")
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@operator("triu")
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


def _window(x: Array, dim: int, start: Any, end: Any, step: int) -> tuple[Any, ...]:
    index: list[Any] = [slice(None)] * jnp.ndim(x)
    index[dim] = slice(start, None if end is None or end >= x.shape[dim] else end, step)
    return tuple(index)


@operator("slice")
def _slice(x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x[_window(x, dim, start, end, step)]


@operator("unfold")
def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), dim), dim + 1, -1)


@operator("slice_scatter")
def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return x.at[_window(x, dim, start, end, step)].set(source)


@operator("select")
def _select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


@operator("select_scatter")
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = index
    return x.at[tuple(place)].set(source)


@operator("constant_pad_nd")
def _pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    widths = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    widths += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _pad_edges(mode: str, x: Array, pad: Sequence[int]) -> Array:
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + [
        (pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)
    ]
    return jnp.pad(x, widths, mode=mode)


OPERATORS.update({f"reflection_pad{n}d": partial(_pad_edges, "reflect") for n in (1, 2, 3)})
OPERATORS.update({f"replication_pad{n}d": partial(_pad_edges, "edge") for n in (1, 2, 3)})


# Indexing.


def _outside(index: Array, size: int) -> Array:
    """Map negative indices, which torch refuses here, out of range."""
    return jnp.where(index < 0, size, index)


@operator("gather")
def _gather(x: Array, dim: int, index: Array, **_: Any) -> Array:
    if not jnp.ndim(x):
        return x
    dim %= x.ndim
    part = x[
        tuple(slice(None) if axis == dim else slice(index.shape[axis]) for axis in range(x.ndim))
    ]
    return jnp.take_along_axis(part, _outside(index, x.shape[dim]), dim, mode="fill")


@operator("index_select")
def _index_select(x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, _outside(jnp.atleast_1d(index), x.shape[dim]), dim, mode="fill")


@operator("embedding")
def _embedding(
    weight: Array, index: Array, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Array:
    if by_frequency:
        raise Unsupported("with scale_grad_by_freq=True")
    rows = jnp.take(weight, _outside(index, weight.shape[0]), 0, mode="fill")
    return (
        rows
        if padding < 0
        else jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)
    )


@operator("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Array,
    index: Array,
    offsets: Array,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Array | None = None,
    last_offset: bool = False,
    padding: int = -1,
) -> tuple[Array, None, None, None]:
    """Embeddings summed (mode 0), averaged (1) or maximised (2) over bags that begin at offsets."""
    if by_frequency:
        raise Unsupported("with scale_grad_by_freq=True")
    bags = len(offsets) - bool(last_offset)
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(len(index)), side="right") - 1
    rows = jnp.take(weight, _outside(index, weight.shape[0]), 0, mode="fill")
    rows = rows if weights is None else rows * weights[:, None]
    real = (index != padding)[:, None] if padding >= 0 else jnp.ones((len(index), 1), bool)

    def total(values: Array) -> Array:
        return jax.ops.segment_sum(values, bag, bags)

    if mode == 2:
        fixed = lax.stop_gradient(jnp.where(real, rows, -jnp.inf))
        real = real & (fixed == jax.ops.segment_max(fixed, bag, bags)[bag])
    kept = total(jnp.where(real, rows, 0))
    counts = total(real.astype(rows.dtype))
    return (kept / jnp.maximum(counts, 1) if mode else kept), None, None, None


def _places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise Unsupported("with a mask, whose result has a size that depends on the data")
    return tuple(slice(None) if index is None else index for index in indices)


@operator("index")
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x.at[_places(indices)].get(mode="fill")


@operator("index_put", "_unsafe_index_put")
def _index_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    if (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype == bool
        and not jnp.ndim(values)
    ):
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    place = x.at[_places(indices)]
    return place.add(values) if accumulate else place.set(values)


def _scattered(x: Array, dim: int, index: Array) -> Any:
    grids = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij"))
    grids[dim] = index
    return x.at[tuple(grids)]


def _part(source: Array, index: Array) -> Array:
    return source[tuple(slice(n) for n in index.shape)] if jnp.ndim(source) else source


@operator("scatter")
def _scatter(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scattered(x, dim, index).set(_part(source, index))


@operator("scatter_add")
def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scattered(x, dim, index).add(_part(source, index))


# Products.


@operator("mm", "bmm", "mv", "dot", "matmul")
def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b)


@operator("addmm", "baddbmm", "addmv")
def _addmm(x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    product = jnp.matmul(a, b)
    return (x if _is_one(beta) else beta * x) + (product if _is_one(alpha) else alpha * product)


@operator("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


@operator("_scaled_dot_product_flash_attention_for_cpu", random=True)
def _attention(
    query: Array,
    keys: Array,
    value: Array,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
    key: Array = None,
) -> tuple[Array, None]:
    scores = (
        query @ jnp.swapaxes(keys, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if attn_mask is not None:
        scores = scores + (
            jnp.where(attn_mask, 0, -jnp.inf) if attn_mask.dtype == bool else attn_mask
        )
    weights, _ = _dropout(_safe_softmax(scores, -1), dropout, True, key=key)
    return weights @ value, None


@operator("_trilinear")
def _trilinear(
    a: Array, b: Array, c: Array, new_a: Any, new_b: Any, new_c: Any, summed: Any, *_: Any
) -> Array:
    """The product of three arrays that get new axes, summed over some of them."""
    product = jnp.expand_dims(a, new_a) * jnp.expand_dims(b, new_b) * jnp.expand_dims(c, new_c)
    return product.sum(tuple(summed))


@operator("_cdist_forward")
def _cdist(a: Array, b: Array, p: float, mode: Any = None) -> Array:
    return _norm(a[..., :, None, :] - b[..., None, :, :], p, -1)


@operator("_pdist_forward")
def _pdist(x: Array, p: float = 2.0) -> Array:
    first, second = np.triu_indices(len(x), 1)
    return _norm(x[first] - x[second], p, -1)

"""Convolution and pooling in the forms that are fast on CPUs.

Inside compiled loops XLA's CPU back end runs the gradients of convolutions and of pooling as
plain loops: ten to a hundred times slower than the same arithmetic in other forms. The functions
here compute what `jax.lax` does, equal up to the rounding of sums. A convolution takes one of four
forms:

direct      XLA's own, which calls a fast kernel if the operands are float32, images are laid out as
            (batch, space, features), and kernels as (space, inputs, outputs).
patched     Along the last axes the entries of every window are copied side by side, so that one
            matrix product contracts them with the kernel; the positions along the other axes have a
            product each, and the products are added. Patches along fewer axes take less memory,
            more of them make larger products.
scattered   The transpose of the above, where results outnumber the operand's entries (gradients of
            images): one product with the kernel, and its parts added up at shifted places.
correlated  Where windows are larger than the number of their places (gradients of kernels): one
            product contracts space and batch. Places along the first axis are shifts of the kernel,
            along the others shifts of the image, so that neither is copied many times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

__all__ = [
    "CACHED",
    "DIRECT_FEATURES",
    "MOST_PARTS",
    "MOST_ZEROS",
    "Sliding",
    "Windows",
    "convolution",
    "divisor_near",
    "max_pool",
    "min_pool",
    "pad_windows",
    "sum_pool",
]

Array: TypeAlias = Any

# entries of a window to contract in one product at least: below, products are far from peak speed
CONTRACTION = 128
# slices along one axis, and products in one convolution, at most: each is an operation to compile
MOST_PARTS = 64
DIRECT_FEATURES = 8  # input features from which XLA's kernel is faster than patches
CACHED = 1 << 19  # bytes of copies that are contracted at a time: about a second-level cache
CORRELATED_FEATURES = 32  # columns of a product that are worth shifting the other operand
# times the least number of operations up to which a form with zeros is the faster one
MOST_ZEROS = 1.5
MOST_SHIFTED_ZEROS = 1.3
CANONICAL = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC")}


class Windows(NamedTuple):
    """Windows that slide along one axis of a padded array."""

    size: int
    stride: int
    dilation: int
    number: int
    """Number of windows."""

    @property
    def parts(self) -> int:
        """Number of slices that copying all windows takes."""
        return min(self.size, self.number)

    def entries(self, x: Array, axis: int, k: int) -> Array:
        """Return entry k of every window."""
        first = k * self.dilation
        return lax.slice_in_dim(
            x, first, first + (self.number - 1) * self.stride + 1, self.stride, axis
        )

    def window(self, x: Array, axis: int, j: int) -> Array:
        """Return all entries of window j."""
        first = j * self.stride
        return lax.slice_in_dim(
            x, first, first + (self.size - 1) * self.dilation + 1, self.dilation, axis
        )


def pad_windows(
    x: Array,
    filling: Any,
    axes: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Array, list[Windows]]:
    """Dilate and pad an array along some axes, and describe the windows along each.

    Returns:
        The padded array, and the windows of each axis; a number of 0 says that there is no room for
        one.
    """
    config = [(0, 0, 0)] * x.ndim
    for axis, (low, high), spread in zip(axes, padding, base_dilation, strict=True):
        config[axis] = (low, high, spread - 1)
    if any(entry != (0, 0, 0) for entry in config):
        x = lax.pad(x, jnp.asarray(filling, x.dtype), config)
    windows = []
    for axis, size, stride, spread in zip(axes, sizes, strides, dilation, strict=True):
        room = x.shape[axis] - (size - 1) * spread - 1
        windows.append(Windows(size, stride, spread, max(0, room // stride + 1)))
    return x, windows


class Sliding(NamedTuple):
    """How the window of a convolution slides, and the arithmetic of its products."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    precision: Any
    dtype: Any

    @classmethod
    def of(cls, lhs: Array, rhs: Array, params: dict[str, Any]) -> Sliding:
        """Return what the parameters of the primitive say."""
        return cls(
            tuple(params["window_strides"]),
            tuple(params["padding"]),
            tuple(params["lhs_dilation"]),
            tuple(params["rhs_dilation"]),
            params["precision"],
            params.get("preferred_element_type") or jnp.result_type(lhs, rhs),
        )

    def inflated(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the size of an image along each axis after its dilation."""
        return tuple(
            max(0, (size - 1) * spread + 1)
            for size, spread in zip(space, self.lhs_dilation, strict=True)
        )

    def pad(self, lhs: Array, sizes: Sequence[int]) -> tuple[Array, list[Windows]]:
        """Pad images (batch, space, features), and describe the windows."""
        dilations = self.lhs_dilation, self.rhs_dilation
        axes = range(1, lhs.ndim - 1)
        return pad_windows(lhs, 0, axes, sizes, self.strides, self.padding, *dilations)

    def counts(self, space: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of windows along each axis."""
        return tuple(
            max(0, (whole + sum(around) - (size - 1) * spread - 1) // stride + 1)
            for whole, around, size, spread, stride in zip(
                self.inflated(space),
                self.padding,
                sizes,
                self.rhs_dilation,
                self.strides,
                strict=True,
            )
        )

    def transposed(self, space: Sequence[int], sizes: Sequence[int], counts: Sequence[int]) -> Any:
        """Return how the convolution slides whose transpose, with the reversed kernel, this one is.

        Args:
            space: Size of the image.
            sizes: Size of the window.
            counts: Number of windows, which is the size of the other one's image.
        """
        other = self._replace(strides=self.lhs_dilation, lhs_dilation=self.strides)
        padding = []
        for whole, part, size, spread, (low, _) in zip(
            self.inflated(space),
            other.inflated(counts),
            sizes,
            self.rhs_dilation,
            self.padding,
            strict=True,
        ):
            reach = (size - 1) * spread
            padding.append((reach - low, whole - part + low))
        return other._replace(padding=tuple(padding))


def convolution(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """Compute `lax.conv_general_dilated` in the form that suits its shapes.

    In the direct form it can be mapped and differentiated forward, in the others also in reverse.

    Args:
        lhs: The array, in the layout of `dimension_numbers`.
        rhs: The kernel.
        **params: The parameters of the primitive.

    Returns:
        The convolution, or None where there is no rule: windows too large to be copied by slices.
    """
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    outputs, inputs, *space = numbers.rhs_spec
    sliding = Sliding.of(lhs, rhs, params)
    lhs = lax.transpose(lhs, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    rhs = lax.transpose(rhs, (*space, inputs, outputs))
    if (
        params["batch_group_count"] > 1
    ):  # groups of the batch are groups of features of a smaller batch
        groups = params["batch_group_count"]
        lhs = jnp.moveaxis(lhs.reshape(groups, -1, *lhs.shape[1:]), 0, -2)
        lhs = lhs.reshape(*lhs.shape[:-2], -1)
    found = _convolve(lhs, rhs, sliding, groups)
    if found is None:
        return None
    batch, features, *places = numbers.out_spec
    axes = range(1, lhs.ndim - 1)
    order = {batch: 0, features: lhs.ndim - 1, **dict(zip(places, axes, strict=True))}
    return lax.transpose(found, tuple(order[axis] for axis in range(lhs.ndim)))


def _convolve(lhs: Array, rhs: Array, sliding: Sliding, groups: int) -> Array | None:
    """Convolve (batch, space, features) with (space, inputs, outputs)."""
    space, sizes = lhs.shape[1:-1], rhs.shape[:-2]
    counts = sliding.counts(space, sizes)
    shape = (lhs.shape[0], *counts, rhs.shape[-1])
    if 0 in shape or 0 in rhs.shape:
        return jnp.zeros(shape, sliding.dtype)
    if groups == 1:
        if prod(counts) < prod(sizes) and prod(counts) <= MOST_PARTS:
            return _correlated(lhs, rhs, sliding)
        padding = prod(counts) > MOST_ZEROS * prod(sliding.inflated(space))
        if not padding and _has_kernel(lhs, rhs, sliding):
            return _direct(lhs, rhs, sliding)
        if prod(counts) > MOST_ZEROS * prod(space):
            return _scattered(lhs, rhs, sliding, counts)
    return _patched(lhs, rhs, sliding, groups)


def _has_kernel(lhs: Array, rhs: Array, sliding: Sliding) -> bool:
    """Return whether XLA has a fast kernel for a convolution, and whether it is worth calling."""
    single = lhs.dtype == rhs.dtype == sliding.dtype == jnp.float32
    plain = lhs.ndim - 2 in CANONICAL and set(sliding.rhs_dilation) == {1}
    added = all(low >= 0 and high >= 0 for low, high in sliding.padding)
    return single and plain and added and rhs.shape[-2] >= DIRECT_FEATURES


def _direct(lhs: Array, rhs: Array, sliding: Sliding) -> Array:
    """Call XLA's convolution, which has no fast kernel for several clients with a kernel each."""

    @custom_vmap
    def convolve(lhs: Array, rhs: Array) -> Array:
        # without the barrier XLA takes transposed and reversed kernels as views, and then it has
        # no fast one
        return lax.conv_general_dilated(
            lhs,
            lax.optimization_barrier(rhs),
            sliding.strides,
            sliding.padding,
            sliding.lhs_dilation,
            dimension_numbers=CANONICAL[lhs.ndim - 2],
            precision=sliding.precision,
        )

    @convolve.def_vmap
    def mapped(size: int, batched: list[bool], lhs: Array, rhs: Array) -> tuple[Array, bool]:
        if size == 1:
            one = [a[0] if has else a for a, has in zip((lhs, rhs), batched, strict=True)]
            return convolve(*one)[None], True
        if not batched[1]:
            flat = convolve(lhs.reshape(-1, *lhs.shape[2:]), rhs)
            return flat.reshape(*lhs.shape[:2], *flat.shape[1:]), True

        def products(lhs: Array, rhs: Array) -> Array:
            return _patched(lhs, rhs, sliding)

        return jax.vmap(products, [0 if has else None for has in batched])(lhs, rhs), True

    return convolve(lhs, rhs)


def _scattered(lhs: Array, rhs: Array, sliding: Sliding, counts: tuple[int, ...]) -> Array | None:
    """Transpose the patched form of the convolution from the results' shape to the operand's."""
    other = sliding.transposed(lhs.shape[1:-1], rhs.shape[:-2], counts)
    kernel = jnp.swapaxes(lax.rev(rhs, range(rhs.ndim - 2)), -1, -2).astype(sliding.dtype)

    def patched(images: Array) -> Array | None:
        return _patched(images, kernel, other)

    images = jax.ShapeDtypeStruct((lhs.shape[0], *counts, rhs.shape[-1]), sliding.dtype)
    if jax.eval_shape(patched, images) is None:
        return None
    return jax.linear_transpose(patched, images)(lhs.astype(sliding.dtype))[0]


def _correlated(lhs: Array, rhs: Array, sliding: Sliding) -> Array:
    """Contract space and the features of the image, with the places of the window side by side.

    Entry (n, a, b, o) is the sum over (y, x, i) of lhs[n, a + y, b + x, i] rhs[y, x, i, o]. The sum
    over i is taken in parts whose copies stay in the cache.
    """
    # i, space, then n or o; the barrier keeps XLA from computing what is copied once for each copy
    lhs, rhs = lax.optimization_barrier((jnp.swapaxes(lhs, 0, -1), jnp.moveaxis(rhs, -2, 0)))

    def copies(lhs: Array, rhs: Array) -> tuple[Array, Array]:
        return _places(lhs, rhs, sliding)[:2]

    def correlate(lhs: Array, rhs: Array) -> Array:
        a, b, shape, order = _places(lhs, rhs, sliding)
        a, b = (one.reshape(-1, one.shape[-1]) for one in (a, b))
        wide = a.shape[-1] > b.shape[-1]  # products are faster with the wider operand second
        product = lax.dot_general(
            *((b, a) if wide else (a, b)),
            (((0,), (0,)), ((), ())),
            precision=sliding.precision,
            preferred_element_type=sliding.dtype,
        )
        return lax.transpose((product.T if wide else product).reshape(shape), order)

    number = len(lhs)
    made = sum(one.size * one.dtype.itemsize for one in jax.eval_shape(copies, lhs, rhs))
    size = divisor_near(number, max(1, int(CACHED * number / made)))
    if size == number:
        return correlate(lhs, rhs)
    whole = number // size * size
    # an axis of one would be laid out elsewhere than before the loop, and XLA would copy both
    group = (size,) if size > 1 else ()
    parts = [one[:whole].reshape(-1, *group, *one.shape[1:]) for one in (lhs, rhs)]
    shape = jax.eval_shape(correlate, lhs, rhs)

    def add(total: Array, part: list[Array]) -> tuple[Array, None]:
        lhs, rhs = (one.reshape(size, *one.shape[len(group) :]) for one in part)
        return total + correlate(lhs, rhs), None

    total, _ = lax.scan(add, jnp.zeros_like(shape), parts)
    return total if whole == number else total + correlate(lhs[whole:], rhs[whole:])


def divisor_near(number: int, most: int) -> int:
    """Return how many of `number` to take at a time: a divisor, if one is near `most`.

    >>> divisor_near(32, 5), divisor_near(31, 5), divisor_near(3, 5)
    (4, 5, 3)
    """
    most = min(most, number)
    return next((d for d in range(most, most // 2, -1) if number % d == 0), most)


def _places(
    lhs: Array, rhs: Array, sliding: Sliding
) -> tuple[Array, Array, tuple[int, ...], tuple[int, ...]]:
    """Copy images (i, space, n) or kernels (i, space, o) so that places of the window are columns.

    Returns:
        The two arrays; the shape of the product of their last axes; and the order of its axes.
    """
    lhs, (first, *others) = sliding.pad(lhs, rhs.shape[1:-1])
    n, o, m = lhs.shape[-1], rhs.shape[-1], len(others)
    for axis, w in reversed(list(enumerate(others, 2))):
        lhs = lax.concatenate([w.window(lhs, axis, j) for j in range(w.number)], lhs.ndim - 1)
    counts = [w.number for w in others]
    if lhs.shape[-1] >= CORRELATED_FEATURES and lhs.shape[1] <= MOST_SHIFTED_ZEROS * first.size:
        rhs = _shifts(rhs, first, lhs.shape[1])
        return lhs, rhs, (*counts, n, first.number, o), (m, m + 1, *range(m), m + 2)
    lhs = lax.concatenate([first.window(lhs, 1, j) for j in range(first.number)], lhs.ndim - 1)
    return lhs, rhs, (first.number, *counts, n, o), (m + 1, *range(m + 1), m + 2)


def _shifts(x: Array, windows: Windows, room: int) -> Array:
    """Place x along axis 1 of zeros where each window is, side by side along the last axis."""
    most = (windows.number - 1) * windows.stride
    config = [(0, 0, 0)] * x.ndim
    config[1] = (most, room - (windows.size - 1) * windows.dilation - 1, windows.dilation - 1)
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    first = [most - j * windows.stride for j in range(windows.number)]
    return lax.concatenate([lax.slice_in_dim(x, k, k + room, axis=1) for k in first], x.ndim - 1)


def _split(shape: tuple[int, ...], windows: Sequence[Windows]) -> int | None:
    """Return how many leading axes have a product for each entry of the window.

    None if there is no way.
    """
    split = len(windows)
    contracted = shape[-2]
    while split and (
        contracted < CONTRACTION or prod(w.size for w in windows[:split]) > MOST_PARTS
    ):
        split -= 1
        contracted *= windows[split].size
    return split if all(w.parts <= MOST_PARTS for w in windows[split:]) else None


def _depthwise(lhs: Array, rhs: Array, windows: Sequence[Windows]) -> Array:
    """One input feature in each group.

    Products would contract windows only, so multiply and add.
    """
    features = lhs.shape[-1]
    rhs = rhs.reshape(*rhs.shape[:-2], features, -1)
    total: Any = 0
    for place in itertools.product(*(range(w.size) for w in windows)):
        part = lhs
        for axis, (w, k) in enumerate(zip(windows, place, strict=True), 1):
            part = w.entries(part, axis, k)
        total = total + part[..., None] * rhs[place]
    return total.reshape(*total.shape[:-2], -1)


def _patched(lhs: Array, rhs: Array, sliding: Sliding, groups: int = 1) -> Array | None:
    """Sum a product per window entry along the first axes, with patches along the others.

    None if the window is too large.
    """
    lhs, windows = sliding.pad(lhs, rhs.shape[:-2])
    if groups > 1 and rhs.shape[-2] == 1 and prod(rhs.shape[:-2]) <= MOST_PARTS:
        return _depthwise(lhs.astype(sliding.dtype), rhs.astype(sliding.dtype), windows)
    split = _split(rhs.shape, windows)
    if split is None:
        return None
    for axis, w in reversed(list(enumerate(windows[split:], 1 + split))):
        lhs = _patches(lhs, axis, w)
    entries = prod(rhs.shape[split:-2])
    total: Any = None
    for place in itertools.product(*(range(w.size) for w in windows[:split])):
        part = lhs
        for axis, (w, k) in enumerate(zip(windows[:split], place, strict=True), 1):
            part = w.entries(part, axis, k)
        product = _contract(part, rhs[place], entries, groups, sliding)
        total = product if total is None else total + product
    return total


def _patches(x: Array, axis: int, windows: Windows) -> Array:
    """Copy the windows along an axis side by side: the last axis has them before what it had."""
    if windows.size == 1:
        return windows.entries(x, axis, 0)
    if windows.size <= windows.number:
        return lax.concatenate(
            [windows.entries(x, axis, k) for k in range(windows.size)], x.ndim - 1
        )
    each = [jnp.moveaxis(windows.window(x, axis, j), axis, -2) for j in range(windows.number)]
    return jnp.stack([one.reshape(*one.shape[:-2], -1) for one in each], axis)


def _contract(patches: Array, kernel: Array, entries: int, groups: int, sliding: Sliding) -> Array:
    """Contract patches (..., entries x groups x inputs) with a kernel (..., groups x outputs)."""
    inputs, outputs = kernel.shape[-2:]
    how = {"precision": sliding.precision, "preferred_element_type": sliding.dtype}
    last = patches.ndim - 1
    if groups == 1:
        return lax.dot_general(
            patches, kernel.reshape(-1, outputs), (((last,), (0,)), ((), ())), **how
        )
    patches = patches.reshape(*patches.shape[:-1], entries, groups, inputs)
    kernel = kernel.reshape(entries, inputs, groups, -1)
    numbers = (((last, last + 2), (0, 1)), ((last + 1,), (2,)))
    product = jnp.moveaxis(lax.dot_general(patches, kernel, numbers, **how), 0, -2)
    return product.reshape(*product.shape[:-2], outputs)


def sum_pool(x: Array, **params: Any) -> Array | None:
    """Compute the primitive `reduce_window_sum`; None where there is no rule."""
    return _pool(x, 0, jnp.add, params)


def max_pool(x: Array, **params: Any) -> Array | None:
    """Compute the primitive `reduce_window_max`.

    The gradient is that of a window's first largest entry.
    """
    return _pool(x, -jnp.inf, lambda a, b: jnp.where((a < b) | (b != b), b, a), params)


def min_pool(x: Array, **params: Any) -> Array | None:
    """Compute the primitive `reduce_window_min`.

    The gradient is that of a window's first smallest entry.
    """
    return _pool(x, jnp.inf, lambda a, b: jnp.where((a > b) | (b != b), b, a), params)


def _pool(
    x: Array, filling: Any, fold: Callable[[Array, Array], Array], params: dict[str, Any]
) -> Array | None:
    """Fold the entries of every window, one axis after the other.

    The last goes first, so ties keep their order.
    """
    if np.isinf(filling) and not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    axes = range(x.ndim)
    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    x, windows = pad_windows(x, filling, axes, *(params[name] for name in names))
    if any(w.number == 0 for w in windows):
        return jnp.full([w.number for w in windows], filling, x.dtype)
    if any(w.size > MOST_PARTS for w in windows):
        return None
    for axis in reversed(axes):
        x = _fold_axis(x, axis, windows[axis], fold)
    return x


def _fold_axis(x: Array, axis: int, w: Windows, fold: Callable[[Array, Array], Array]) -> Array:
    if w.size == 1:
        return x if w.number == x.shape[axis] else w.entries(x, axis, 0)
    if w.size == w.stride and w.dilation == 1:  # no overlap: a reshape and no strided slices
        x = lax.slice_in_dim(x, 0, w.number * w.size, axis=axis)
        x = x.reshape(*x.shape[:axis], w.number, w.size, *x.shape[axis + 1 :])
        parts = [lax.index_in_dim(x, k, axis + 1, keepdims=False) for k in range(w.size)]
    else:
        parts = [w.entries(x, axis, k) for k in range(w.size)]
    total = parts[0]
    for part in parts[1:]:
        total = fold(total, part)
    return total

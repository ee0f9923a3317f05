"""Convolution and pooling as slices and matrix products.

Inside compiled loops XLA's CPU back end runs convolutions, and the gradient of pooling windows, as
plain loops: about ten times slower than the same arithmetic as matrix products. The functions here
compute what `jax.lax` does, equal up to the rounding of sums, from operations that are fast there
and whose derivatives are.

A convolution slides a window over the spatial axes. Along the last axes the entries of every window
are copied side by side (patches), so that one matrix product contracts them with the kernel; the
positions along the other axes have a product each, and the products are added. Patches along fewer
axes take less memory, more of them make larger products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Windows", "convolution", "max_pool", "min_pool", "pad_windows", "sum_pool"]

Array: TypeAlias = Any

# entries of a window to contract in one product at least: below, products are far from peak speed
CONTRACTION = 128
# slices along one axis, and products in one convolution, at most: each is an operation to compile
MOST_PARTS = 64


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


def convolution(lhs: Array, rhs: Array, **params: Any) -> Array | None:
    """Compute `lax.conv_general_dilated` by matrix products.

    Args:
        lhs: The array, in the layout of `dimension_numbers`.
        rhs: The kernel.
        **params: The parameters of the primitive.

    Returns:
        The convolution, or None where there is no rule: windows too large to be copied by slices.
    """
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    dtype = params.get("preferred_element_type") or jnp.result_type(lhs, rhs)
    outputs, inputs, *space = numbers.rhs_spec
    lhs = lax.transpose(lhs, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    rhs = lax.transpose(rhs, (*space, inputs, outputs))
    if (
        params["batch_group_count"] > 1
    ):  # groups of the batch are groups of features of a smaller batch
        groups = params["batch_group_count"]
        lhs = jnp.moveaxis(lhs.reshape(groups, -1, *lhs.shape[1:]), 0, -2)
        lhs = lhs.reshape(*lhs.shape[:-2], -1)
    axes = range(1, lhs.ndim - 1)
    strides, padding = params["window_strides"], params["padding"]
    dilations = params["lhs_dilation"], params["rhs_dilation"]
    lhs, windows = pad_windows(lhs, 0, axes, rhs.shape[:-2], strides, padding, *dilations)
    counts = tuple(w.number for w in windows)
    shape = (lhs.shape[0], *counts, rhs.shape[-1])
    if 0 in shape or 0 in rhs.shape:
        found = jnp.zeros(shape, dtype)
    elif groups > 1 and rhs.shape[-2] == 1 and prod(rhs.shape[:-2]) <= MOST_PARTS:
        found = _depthwise(lhs.astype(dtype), rhs.astype(dtype), windows)
    elif (split := _split(rhs.shape, windows)) is not None:
        found = _products(lhs, rhs, windows, split, groups, params["precision"], dtype)
    else:
        return None
    batch, features, *places = numbers.out_spec
    order = {batch: 0, features: lhs.ndim - 1, **dict(zip(places, axes, strict=True))}
    return lax.transpose(found, tuple(order[axis] for axis in range(lhs.ndim)))


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


def _products(
    lhs: Array,
    rhs: Array,
    windows: Sequence[Windows],
    split: int,
    groups: int,
    precision: Any,
    dtype: Any,
) -> Array:
    """Sum a product for each entry of the window along the first `split` axes.

    Patches along the others.
    """
    for axis, w in reversed(list(enumerate(windows[split:], 1 + split))):
        lhs = _patches(lhs, axis, w)
    entries = rhs.shape[split:-2]
    total: Any = None
    for place in itertools.product(*(range(w.size) for w in windows[:split])):
        part = lhs
        for axis, (w, k) in enumerate(zip(windows[:split], place, strict=True), 1):
            part = w.entries(part, axis, k)
        product = _contract(part, rhs[place], prod(entries), groups, precision, dtype)
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


def _contract(
    patches: Array, kernel: Array, entries: int, groups: int, precision: Any, dtype: Any
) -> Array:
    """Contract patches (..., entries x groups x inputs) with a kernel (..., inputs, groups x outputs)."""
    inputs, outputs = kernel.shape[-2:]
    how = {"precision": precision, "preferred_element_type": dtype}
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

"""Convolution of arrays with features first and the batch last, for networks with few features.

With few features, arrays that have them last are copied a few numbers at a time, and products with
them fill a part of a vector register only. With the batch last, copies are long, and the columns of
every product are places and records. The forms are those of `convolutions`:

patched     The entries of every window are copied one below the other; one product contracts them
            with the kernel.
scattered   The transpose of the above, where results outnumber the operand's entries.
correlated  Where windows are larger than the number of their places (gradients of kernels): one
            product contracts space and the last axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from fedscaffold.problems.convolutions import (
    DIRECT_FEATURES,
    MOST_PARTS,
    MOST_ZEROS,
    Sliding,
    Windows,
)

__all__ = ["convolution_batch_last", "suits_batch_last"]

Array: TypeAlias = Any

FEW = 32  # features below which products with features last are slow
MOST_COPIES = 1 << 23  # bytes of patches above which XLA's own kernel, where it has one, is faster


def suits_batch_last(lhs: Any, rhs: Any, params: dict[str, Any]) -> bool:
    """Return whether a convolution is faster with the batch last, and has a form there.

    Args:
        lhs: The array, or its shape (`jax.ShapeDtypeStruct`).
        rhs: The kernel, or its shape.
        params: The parameters of the primitive.
    """
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return False
    numbers = params["dimension_numbers"]
    outputs, inputs, *sizes = (rhs.shape[axis] for axis in numbers.rhs_spec)
    space = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
    counts = Sliding.of(lhs, rhs, params).counts(space, sizes)
    if prod(counts) < prod(sizes):  # the gradient of a kernel, whose features others tell
        return prod(counts) <= MOST_PARTS
    few = bool(prod(sizes) <= MOST_PARTS and min(inputs, outputs) < FEW)
    if prod(counts) > MOST_ZEROS * prod(space) or inputs < DIRECT_FEATURES:
        return few
    copies = lhs.shape[numbers.lhs_spec[0]] * inputs * prod(counts) * prod(sizes)
    return few and copies * lhs.dtype.itemsize <= MOST_COPIES


def convolution_batch_last(lhs: Array, rhs: Array, **params: Any) -> Array:
    """Compute `lax.conv_general_dilated` with the result laid out as (features, space, batch).

    Args:
        lhs: The array, in the layout of `dimension_numbers`.
        rhs: The kernel.
        **params: The parameters of the primitive; `suits_batch_last` says which there may be.
    """
    (batch, inputs, *space), (outputs, features, *window), _ = params["dimension_numbers"]
    sliding = Sliding.of(lhs, rhs, params)
    lhs = lax.transpose(lhs, (inputs, *space, batch))
    rhs = lax.transpose(rhs, (outputs, *window, features))
    counts = sliding.counts(lhs.shape[1:-1], rhs.shape[1:-1])
    shape = (rhs.shape[0], *counts, lhs.shape[-1])
    if 0 in shape or 0 in rhs.shape:
        return jnp.zeros(shape, sliding.dtype)
    if prod(counts) < prod(rhs.shape[1:-1]):
        return _correlated(lhs, rhs, sliding)
    if prod(counts) > MOST_ZEROS * prod(lhs.shape[1:-1]):
        other = sliding.transposed(lhs.shape[1:-1], rhs.shape[1:-1], counts)
        kernel = jnp.swapaxes(lax.rev(rhs, range(1, rhs.ndim - 1)), 0, -1).astype(sliding.dtype)
        images = jax.ShapeDtypeStruct(shape, sliding.dtype)
        scatter = jax.linear_transpose(lambda images: _patched(images, kernel, other), images)
        return scatter(lhs.astype(sliding.dtype))[0]
    return _patched(lhs, rhs, sliding)


def _patched(lhs: Array, rhs: Array, sliding: Sliding) -> Array:
    """Contract the entries of every window with the kernel."""
    lhs, windows = sliding.pad(lhs, rhs.shape[1:-1])
    patches = _copy(lhs, windows, Windows.entries, [w.size for w in windows])
    product = _multiply(rhs, patches.reshape(len(patches), -1), 0, sliding)
    return product.reshape(len(rhs), *patches.shape[1:])


def _correlated(lhs: Array, rhs: Array, sliding: Sliding) -> Array:
    """Contract all of a window, and the inputs, at each of its few places."""
    images, windows = sliding.pad(jnp.swapaxes(lhs, 0, -1), rhs.shape[1:-1])
    counts = [w.number for w in windows]
    # the copies are those of the forward pass, which XLA then makes once
    patches = _copy(images, windows, Windows.window, counts)
    product = _multiply(rhs, patches.reshape(len(patches), -1), 1, sliding)
    return product.reshape(len(rhs), *counts, lhs.shape[-1])


def _copy(
    images: Array,
    windows: Sequence[Windows],
    cut: Callable[[Windows, Array, int, int], Array],
    numbers: Sequence[int],
) -> Array:
    """Join what `cut` takes of the images for each combination of `numbers`, along axis 0."""
    copies = []
    for place in itertools.product(*map(range, numbers)):
        part = images
        for axis, (w, k) in enumerate(zip(windows, place, strict=True), 1):
            part = cut(w, part, axis, k)
        copies.append(part)
    return lax.concatenate(copies, 0)


def _multiply(kernel: Array, patches: Array, contracted: int, sliding: Sliding) -> Array:
    """Contract a kernel, all but its first axis, with one axis of the patches."""
    return lax.dot_general(
        kernel.reshape(len(kernel), -1),
        patches,
        (((1,), (contracted,)), ((), ())),
        precision=sliding.precision,
        preferred_element_type=sliding.dtype,
    )

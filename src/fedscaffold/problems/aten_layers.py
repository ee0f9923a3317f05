"""ATen operators that are whole layers.

Convolution, pooling, normalisation, resizing and recurrent networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from fedscaffold.problems.aten import OPERATORS, operator

__all__: list[str] = []

Array: TypeAlias = Any


def _each(given: Any, number: int) -> list[int]:
    """Return one number for each axis."""
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    return listed * number if len(listed) == 1 else listed


@operator("convolution")
def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    n = x.ndim - 2
    stride, padding, dilation, more = (
        _each(one, n) for one in (stride, padding, dilation, output_padding)
    )
    spread = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    widths, moves, holes = [(p, p) for p in padding], stride, [1] * n
    if transposed:
        widths = [(s - p, s - p + o) for s, p, o in zip(spread, padding, more, strict=True)]
        moves, holes = [1] * n, stride
        inputs, outputs, *kernel = weight.shape
        grouped = weight.reshape(groups, inputs // groups, outputs, *kernel).swapaxes(1, 2)
        weight = jnp.flip(
            grouped.reshape(groups * outputs, inputs // groups, *kernel), tuple(range(2, n + 2))
        )
    axes = "XYZ"[:n]
    result = lax.conv_general_dilated(
        x,
        weight,
        moves,
        widths,
        lhs_dilation=holes,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        feature_group_count=groups,
    )
    return result if bias is None else result + bias.reshape(-1, *[1] * n)


def _pool_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return how many windows a pooling has along an axis."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    number = (-(-room // stride) if ceil else room // stride) + 1
    return number - 1 if ceil and (number - 1) * stride >= size + padding else number


class _Windows:
    """The windows of a pooling over the last axes of an array."""

    def __init__(
        self, x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, n: int
    ) -> None:
        self.kernel = _each(kernel, n)
        self.stride = _each(stride, n) if stride else self.kernel
        self.padding, self.dilation = _each(padding, n), _each(dilation, n)
        self.sizes = x.shape[-n:]
        steps = zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.numbers = [_pool_size(*one, ceil) for one in steps]
        self.lead = (1,) * (x.ndim - n)

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Padding before and after each axis, so that all windows fit."""
        found = []
        for i, size in enumerate(self.sizes):
            last = (
                (self.numbers[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
            )
            found.append((self.padding[i], max(self.padding[i], last - size - self.padding[i])))
        return found

    def reduce(self, x: Array, start: Any, function: Callable[..., Any]) -> Array:
        """Reduce every window."""
        padding = [(0, 0)] * len(self.lead) + self.widths
        return lax.reduce_window(
            x, start, function, (*self.lead, *self.kernel), (*self.lead, *self.stride), padding
        )

    def counts(self, with_padding: bool) -> NDArray[Any]:
        """Return how many entries each window has."""
        counts = np.ones(())
        for size, kernel, stride, padding, number in zip(
            self.sizes, self.kernel, self.stride, self.padding, self.numbers, strict=True
        ):
            start = np.arange(number) * stride - padding
            end = np.minimum(start + kernel, size + padding)
            inside = end - start if with_padding else np.minimum(end, size) - np.maximum(start, 0)
            counts = np.multiply.outer(counts, inside)
        return counts

    def entries(self, x: Array, fill: Any) -> Array:
        """Return the entries of every window along a new last axis."""
        x = lax.pad(
            x,
            jnp.asarray(fill, x.dtype),
            [(0, 0, 0)] * len(self.lead) + [(*w, 0) for w in self.widths],
        )
        found = []
        for place in np.ndindex(*self.kernel):
            index: list[Any] = [slice(None)] * len(self.lead)
            for i, k in enumerate(place):
                first = k * self.dilation[i]
                index.append(
                    slice(first, first + (self.numbers[i] - 1) * self.stride[i] + 1, self.stride[i])
                )
            found.append(x[tuple(index)])
        return jnp.stack(found, -1)


def _first_maximum(entries: Array) -> Array:
    return jnp.take_along_axis(entries, jnp.argmax(entries, -1)[..., None], -1)[..., 0]


def _max_pool(n: int) -> Callable[..., Any]:
    def pool(
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
    ) -> Any:
        windows = _Windows(x, kernel, stride, padding, dilation, ceil, n)
        if any(d != 1 for d in windows.dilation):  # XLA has no derivative of these
            return _first_maximum(windows.entries(x, -jnp.inf)), None
        return windows.reduce(x, -jnp.inf, lax.max), None

    return pool


def _avg_pool(n: int) -> Callable[..., Any]:
    def pool(
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Array:
        windows = _Windows(x, kernel, stride, padding, 1, ceil, n)
        counts = windows.counts(count_include_pad) if divisor is None else divisor
        return windows.reduce(x, 0.0, lax.add) / jnp.asarray(counts, x.dtype)

    return pool


OPERATORS.update({f"max_pool{n}d_with_indices": _max_pool(n) for n in (1, 2, 3)})
OPERATORS.update({f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)})


def _bins(size: int, number: int) -> list[tuple[int, int]]:
    """Return where the windows of an adaptive pooling begin and end."""
    return [(i * size // number, -(-(i + 1) * size // number)) for i in range(number)]


def _along_last_axes(x: Array, matrices: Sequence[NDArray[Any]]) -> Array:
    """Multiply each of the last axes by a matrix."""
    for back, matrix in enumerate(reversed(matrices), 1):
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ([-back], [1])), -1, -back)
    return x


@operator("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive_avg_pool(x: Array, sizes: Sequence[int]) -> Array:
    matrices = []
    for size, number in zip(x.shape[-len(sizes) :], sizes, strict=True):
        matrix = np.zeros((number, size))
        for row, (start, end) in zip(matrix, _bins(size, number), strict=True):
            row[start:end] = 1 / (end - start)
        matrices.append(matrix)
    return _along_last_axes(x, matrices)


@operator("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Array, sizes: Sequence[int]) -> tuple[Array, None]:
    n = len(sizes)
    bins = [_bins(size, number) for size, number in zip(x.shape[-n:], sizes, strict=True)]
    found = []
    for place in np.ndindex(*sizes):
        index = (..., *(slice(*bins[axis][i]) for axis, i in enumerate(place)))
        found.append(_first_maximum(x[index].reshape(*x.shape[:-n], -1)))
    return jnp.stack(found, -1).reshape(*x.shape[:-n], *sizes), None


# Normalisation.


def _normalise(x: Array, mean: Array, variance: Array, eps: float) -> tuple[Array, Array]:
    rstd = lax.rsqrt(variance + eps)
    return (x - mean) * rstd, rstd


def _affine(x: Array, weight: Array | None, bias: Array | None, shape: Sequence[int]) -> Array:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _moments(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    mean = x.mean(axes, keepdims=True)
    return mean, jnp.square(x - mean).mean(axes, keepdims=True)


@operator("native_layer_norm")
def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> Any:
    mean, variance = _moments(x, tuple(range(x.ndim - len(shape), x.ndim)))
    normal, rstd = _normalise(x, mean, variance, eps)
    return _affine(normal, weight, bias, tuple(shape)), mean, rstd


@operator("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    rows: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> Any:
    parted = x.reshape(x.shape[0], groups, -1)
    mean, variance = _moments(parted, (2,))
    normal, rstd = _normalise(parted, mean, variance, eps)
    shape = (1, channels, *[1] * (x.ndim - 2))
    return _affine(normal.reshape(x.shape), weight, bias, shape), mean[..., 0], rstd[..., 0]


def _batch_norm(
    x: Array, weight: Array | None, bias: Array | None, statistics: Any, eps: float
) -> Any:
    """Normalise by given statistics, or by the batch's own if they are None."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    if statistics is None:
        mean, variance = _moments(x, (0, *range(2, x.ndim)))
    else:
        mean, variance = (one.reshape(shape) for one in statistics)
    normal, rstd = _normalise(x, mean, variance, eps)
    return (
        _affine(normal, weight, bias, shape),
        mean.reshape(-1),
        rstd.reshape(-1),
        variance.reshape(-1),
    )


@operator("_native_batch_norm_legit_no_training")
def _batch_norm_eval(
    x: Array, weight: Array, bias: Array, mean: Array, variance: Array, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, (mean, variance), eps)[0], None, None


@operator("_native_batch_norm_legit")
def _batch_norm_alone(
    x: Array, weight: Array, bias: Array, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, None, eps)[:3]


@operator("_native_batch_norm_legit_functional")
def _batch_norm_train(
    x: Array,
    weight: Array,
    bias: Array,
    mean: Array,
    variance: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return *_batch_norm(x, weight, bias, (mean, variance), eps)[:3], mean, variance
    result, own_mean, rstd, own_variance = _batch_norm(x, weight, bias, None, eps)
    number = x.size // x.shape[1]
    fresh = (own_mean, own_variance * (number / max(number - 1, 1)))
    moved = [
        (1 - momentum) * old + momentum * lax.stop_gradient(new)
        for old, new in zip((mean, variance), fresh, strict=True)
    ]
    return result, own_mean, rstd, *moved


# Resizing.


def _scales(x: Array, size: Any, factors: Any) -> list[tuple[int, int, float]]:
    """Return (old size, new size, step) of each of the last axes."""
    n = len(size if size is not None else factors)
    old = x.shape[-n:]
    new = (
        list(size)
        if size is not None
        else [math.floor(a * f) for a, f in zip(old, factors, strict=True)]
    )
    steps = (
        [1 / f for f in factors]
        if factors is not None
        else [a / b for a, b in zip(old, new, strict=True)]
    )
    return list(zip(old, new, steps, strict=True))


@operator("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _nearest(x: Array, size: Any, factors: Any = None) -> Array:
    scales = _scales(x, size, factors)
    for axis, (old, new, step) in zip(range(-len(scales), 0), scales, strict=True):
        places = np.minimum((np.arange(new) * np.float32(step)).astype(int), old - 1)
        x = jnp.take(x, places, axis)
    return x


@operator("upsample_bilinear2d", "upsample_linear1d")
def _bilinear(x: Array, size: Any, align_corners: bool, factors: Any = None) -> Array:
    matrices = []
    for old, new, step in _scales(x, size, factors):
        if align_corners:
            at = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            at = np.maximum((np.arange(new) + 0.5) * step - 0.5, 0)
        low = np.minimum(at.astype(int), old - 1)
        matrix = np.zeros((new, old))
        np.add.at(matrix, (np.arange(new), low), 1 - (at - low))
        np.add.at(matrix, (np.arange(new), np.minimum(low + 1, old - 1)), at - low)
        matrices.append(matrix)
    return _along_last_axes(x, matrices)


# Recurrent networks, as scans over time.


def _lstm_cell(
    state: tuple[Array, Array], gates: Array, weights: Sequence[Array], bias: Any
) -> tuple[Any, Array]:
    h, c = state
    weight, *projection = weights
    i, f, g, o = jnp.split(gates + h @ weight.T + bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    for one in projection:
        h = h @ one.T
    return (h, c), h


def _gru_cell(
    state: tuple[Array], gates: Array, weights: Sequence[Array], bias: Any
) -> tuple[Any, Array]:
    (h,), (weight,) = state, weights
    reset, update, new = jnp.split(gates, 3, -1)
    own_reset, own_update, own_new = jnp.split(h @ weight.T + bias, 3, -1)
    z = jax.nn.sigmoid(update + own_update)
    h = (1 - z) * jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new) + z * h
    return (h,), h


def _plain_cell(activation: Callable[[Array], Array]) -> Callable[..., Any]:
    def cell(
        state: tuple[Array], gates: Array, weights: Sequence[Array], bias: Any
    ) -> tuple[Any, Array]:
        h = activation(gates + state[0] @ weights[0].T + bias)
        return (h,), h

    return cell


def _recurrent(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator of a stack of recurrent layers.

    The state is a tuple of (layers, batch, hidden).
    """

    def network(
        x: Array,
        states: Any,
        weights: Sequence[Array],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        *,
        key: Array = None,
    ) -> Any:
        states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
        ways = 2 if bidirectional else 1
        number = len(weights) // (layers * ways)  # and one more if an LSTM projects its state
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        ends: list[Any] = []
        for layer in range(layers):
            if layer and dropout and train:
                x, _ = OPERATORS["native_dropout"](
                    x, dropout, True, key=jax.random.fold_in(key, layer)
                )
            found = []
            for way in range(ways):
                place = layer * ways + way
                from_input, from_state, *more = weights[place * number : (place + 1) * number]
                first, second = more[:2] if has_biases else (0.0, 0.0)
                held = [from_state, *more[2 if has_biases else 0 :]]
                gates = x @ from_input.T + first

                def step(state: Any, now: Array, w: Any = held, b: Any = second) -> Any:
                    return cell(state, now, w, b)

                end, path = lax.scan(step, tuple(s[place] for s in states), gates, reverse=way == 1)
                found.append(path)
                ends.append(end)
            x = jnp.concatenate(found, -1)
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        return x, *(jnp.stack(one) for one in zip(*ends, strict=True))

    return network


operator("lstm", random=True)(_recurrent(_lstm_cell))
operator("gru", random=True)(_recurrent(_gru_cell))
operator("rnn_tanh", random=True)(_recurrent(_plain_cell(jnp.tanh)))
operator("rnn_relu", random=True)(_recurrent(_plain_cell(jax.nn.relu)))

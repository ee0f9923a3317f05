"""Networks of the benchmark, as users of JAX and users of torch write them.

    lenet     5x5x32, pool, 5x5x64, pool, 512, classes
    lenet5    5x5x6, pool, 5x5x16, pool, 120, classes: LeNet-5 without its layer of 84
    cnn       3x3x32, 3x3x64, pool, 128, classes
    resnet8   3x3x16, residual blocks of 16, 32 and 64 features with group normalisation, mean
              over space, classes
    lstm      characters embedded in 8 features, one layer of 128, classes at every place

Pictures are (n, height, width, channels) in JAX and (n, channels, height, width) in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUPS", "NETWORKS", "Network", "jax_loss", "start", "torch_module"]

Params: TypeAlias = dict[str, Any]
Array: TypeAlias = Any

GROUPS = 8  # of group normalisation
EMBEDDED, HIDDEN = 8, 128  # features of the LSTM


class Network(NamedTuple):
    """A network: shapes of its arrays, its scores in JAX, and its torch module."""

    shapes: Callable[[int], dict[str, tuple[int, ...]]]
    """(classes) -> shape of every array; kernels are (height, width, in, out), matrices (in, out).
    """
    scores: Callable[[Params, Array], Array]
    module: Callable[[int], Any]


def start(name: str, classes: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random parameters to start from: normal with variance 2 / inputs, biases 0, scales 1.

    >>> sum(array.size for array in start("lenet", 62, seed=0).values())
    608702
    """
    rng = np.random.default_rng(seed)

    def drawn(key: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            return np.full(shape, key.endswith("scale"), np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32((2 / np.prod(shape[:-1])) ** 0.5)

    return {key: drawn(key, shape) for key, shape in NETWORKS[name].shapes(classes).items()}


def jax_loss(name: str) -> Callable[[Params, tuple[Array, Array]], Array]:
    """The mean cross-entropy of a batch of pictures and labels."""
    import optax

    def loss(params: Params, batch: tuple[Array, Array]) -> Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(
            NETWORKS[name].scores(params, x), y
        ).mean()

    return loss


def torch_module(name: str, classes: int, seed: int) -> Any:
    """The network as a torch module, at the same parameters."""
    import torch

    module = NETWORKS[name].module(classes)
    with torch.no_grad():
        for parameter, array in zip(
            module.parameters(), start(name, classes, seed).values(), strict=True
        ):
            order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
            parameter.copy_(torch.from_numpy(array.transpose(order).copy()))
    return module


def _conv(x: Array, kernel: Array, stride: int = 1, padding: str = "VALID") -> Array:
    from jax import lax

    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax

    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _dense(params: Params, x: Array) -> Array:
    """Two dense layers on pictures, channels first as torch flattens them."""
    import jax

    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return jax.nn.relu(x @ params["dense1"] + params["bias3"]) @ params["dense2"] + params["bias4"]


def _two_layers(
    size: int,
    pools: tuple[bool, bool],
    pixels: int,
    width: int,
    features: tuple[int, int] = (32, 64),
) -> Network:
    """Two convolutions and two dense layers."""
    first, second = features

    def shapes(classes: int) -> dict[str, tuple[int, ...]]:
        return {
            "conv1": (size, size, 1, first),
            "bias1": (first,),
            "conv2": (size, size, first, second),
            "bias2": (second,),
            "dense1": (pixels * second, width),
            "bias3": (width,),
            "dense2": (width, classes),
            "bias4": (classes,),
        }

    def scores(params: Params, x: Array) -> Array:
        import jax

        for layer, pooled in zip("12", pools, strict=True):
            x = jax.nn.relu(_conv(x, params["conv" + layer]) + params["bias" + layer])
            x = _pool(x) if pooled else x
        return _dense(params, x)

    def module(classes: int) -> Any:
        from torch import nn

        layers: list[Any] = []
        for inputs, outputs, pooled in ((1, first, pools[0]), (first, second, pools[1])):
            layers += [
                nn.Conv2d(inputs, outputs, size),
                nn.ReLU(),
                *([nn.MaxPool2d(2)] if pooled else []),
            ]
        dense = [
            nn.Flatten(),
            nn.Linear(pixels * second, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        ]
        return nn.Sequential(*layers, *dense)

    return Network(shapes, scores, module)


STAGES = (
    (16, 16, 1),
    (16, 32, 2),
    (32, 64, 2),
)  # inputs, outputs and stride of the residual blocks


def _resnet_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "stem": (3, 3, 3, 16),
        "norm.scale": (16,),
        "norm.bias": (16,),
    }
    for j, (inputs, outputs, _) in enumerate(STAGES):
        shapes[f"{j}.conv1"] = (3, 3, inputs, outputs)
        shapes |= {f"{j}.norm1.scale": (outputs,), f"{j}.norm1.bias": (outputs,)}
        shapes[f"{j}.conv2"] = (3, 3, outputs, outputs)
        shapes |= {f"{j}.norm2.scale": (outputs,), f"{j}.norm2.bias": (outputs,)}
        if inputs != outputs:
            shapes[f"{j}.shortcut"] = (1, 1, inputs, outputs)
    return shapes | {"dense": (64, classes), "bias": (classes,)}


def _resnet_scores(params: Params, x: Array) -> Array:
    import jax

    def normed(x: Array, name: str) -> Array:
        groups = x.reshape(*x.shape[:3], GROUPS, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        var = groups.var((1, 2, 4), keepdims=True)
        groups = (groups - mean) * jax.lax.rsqrt(var + 1e-5)
        return groups.reshape(x.shape) * params[name + ".scale"] + params[name + ".bias"]

    def padded(x: Array, name: str, stride: int = 1) -> Array:
        around = [(1, 1), (1, 1)]
        return jax.lax.conv_general_dilated(
            x, params[name], (stride, stride), around, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = jax.nn.relu(normed(padded(x, "stem"), "norm"))
    for j, (inputs, outputs, stride) in enumerate(STAGES):
        inner = jax.nn.relu(normed(padded(x, f"{j}.conv1", stride), f"{j}.norm1"))
        inner = normed(padded(inner, f"{j}.conv2"), f"{j}.norm2")
        x = jax.nn.relu(
            inner + (x if inputs == outputs else _conv(x, params[f"{j}.shortcut"], stride))
        )
    return x.mean((1, 2)) @ params["dense"] + params["bias"]


def _resnet_module(classes: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.norm1 = nn.GroupNorm(GROUPS, outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.norm2 = nn.GroupNorm(GROUPS, outputs)
            same = inputs == outputs
            self.shortcut = (
                nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            )

        def forward(self, x: Any) -> Any:
            inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
            return torch.relu(inner + self.shortcut(x))

    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(GROUPS, 16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return nn.Sequential(*stem, *(Block(*stage) for stage in STAGES), *head)


def _lstm_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    return {
        "embedding": (EMBEDDED, classes),
        "inputs": (EMBEDDED, 4 * HIDDEN),
        "hidden": (HIDDEN, 4 * HIDDEN),
        "bias1": (4 * HIDDEN,),
        "bias2": (4 * HIDDEN,),
        "dense": (HIDDEN, classes),
        "bias": (classes,),
    }


def _lstm_scores(params: Params, x: Array) -> Array:
    import jax
    import jax.numpy as jnp

    gates = params["embedding"].T[x] @ params["inputs"] + params["bias1"] + params["bias2"]

    def step(carry: tuple[Array, Array], gates: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ params["hidden"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((len(x), HIDDEN), gates.dtype)
    _, out = jax.lax.scan(step, (zero, zero), gates.swapaxes(0, 1))
    return out.swapaxes(0, 1) @ params["dense"] + params["bias"]


def _lstm_module(classes: int) -> Any:
    from torch import nn

    class Characters(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(classes, EMBEDDED)
            self.lstm = nn.LSTM(EMBEDDED, HIDDEN, batch_first=True)
            self.dense = nn.Linear(HIDDEN, classes)

        def forward(self, x: Any) -> Any:
            return self.dense(self.lstm(self.embedding(x))[0]).movedim(-1, 1)

    return Characters()


NETWORKS = {
    "lenet": _two_layers(5, (True, True), 16, 512),
    "lenet5": _two_layers(5, (True, True), 16, 120, (6, 16)),
    "cnn": _two_layers(3, (False, True), 144, 128),
    "resnet8": Network(_resnet_shapes, _resnet_scores, _resnet_module),
    "lstm": Network(_lstm_shapes, _lstm_scores, _lstm_module),
}

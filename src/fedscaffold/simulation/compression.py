"""Compression of what clients send.

Client and server see the same value, and nothing is lost for good.

A move v = x - y is an increment, and what is left out of it is sent later: error feedback.

    sent = C(v + e),    e <- v + e - sent

A direction d_i makes the new c_i, and is sent as its difference from c, which both sides know:

    sent = c + C(d_i - c),    hence    c_i+ = c_i - c + sent = c_i + C(mean gradient - c_i)

Here c_i is the error feedback (Richtarik et al. 2021): what is left out now is in the next
difference again. Kept as an error e as well it would be counted twice, and c_i would swing ever
wider. What the client remembers is made from `sent`: compressing only what the server sees would
leave c and the c_i apart for ever. All C here are contractions, E|C(v) - v|^2 <= (1 - share) |v|^2,
so what is left out vanishes with what is sent, and the limit of a method with control variates is
exact. The moves of FedAvg do not vanish at its limit, and compressing them may add to its bias.

    top_k(share)      the largest coordinates                    k values and k indices
    random_k(share)   coordinates drawn anew every time          k values and a seed
    quantise(bits)    stochastic rounding to 2^bits levels between -m and m, m = the largest |v_j|
                      in 64 coordinates, divided by 1 + w, w = 64 / (2^bits - 1)^2 (its relative
                      variance, so that C is a contraction)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError, memoised
from fedscaffold.simulation.spec import Array

__all__ = ["Compressor", "of", "quantise", "random_k", "top_k"]

GROUP = 64  # coordinates that share a scale
INDEX = SEED = SCALE = 4  # bytes


class Compressor(NamedTuple):
    """A compressor of vectors."""

    name: str
    decoded: Callable[[Array, Array], Array]
    """(vector, random key) -> the decompressed vector that both sides see."""
    bytes: Callable[[int, int], int]
    """(d, itemsize) -> size in bytes of a compressed vector with d entries."""


@memoised
def top_k(share: float) -> Compressor:
    """Keep the `share` of coordinates with the largest absolute values.

    >>> import numpy as np
    >>> half = top_k(0.5)
    >>> half.decoded(np.array([3.0, -1.0, 0.5, -4.0]), None).tolist(), half.bytes(1000, 4)
    ([3.0, 0.0, 0.0, -4.0], 4000)
    """
    share = _share(share)

    def decoded(v: Array, key: Array) -> Array:
        return _only(v, jnp.abs(v), share)

    return Compressor(
        f"top_k:{share:g}", decoded, lambda d, itemsize: _count(share, d) * (itemsize + INDEX)
    )


@memoised
def random_k(share: float) -> Compressor:
    """Keep a random `share` of the coordinates, drawn anew for every message.

    >>> random_k(0.1).bytes(1000, 4)
    404
    """
    share = _share(share)

    def decoded(v: Array, key: Array) -> Array:
        return _only(v, jax.random.uniform(key, jnp.shape(v)), share)

    return Compressor(
        f"random_k:{share:g}", decoded, lambda d, itemsize: _count(share, d) * itemsize + SEED
    )


@memoised
def quantise(bits: int) -> Compressor:
    """Round every coordinate stochastically to one of 2^bits levels.

    >>> quantise(4).bytes(640, 4)
    360
    """
    bits = checks.whole("bits", bits, at_most=16)
    levels = 2**bits - 1
    shrunk = 1 / (1 + GROUP / levels**2)

    def decoded(v: Array, key: Array) -> Array:
        groups = jnp.pad(v, (0, -len(v) % GROUP)).reshape(-1, GROUP)
        most = jnp.abs(groups).max(axis=1, keepdims=True)
        most = jnp.where(
            most > levels * float(np.finfo(groups.dtype).tiny), most, 0
        )  # the step must not round to zero
        step = 2 * jnp.where(most > 0, most, 1) / levels
        level = jnp.floor(
            (groups + most) / step + jax.random.uniform(key, groups.shape, groups.dtype)
        )
        return shrunk * (jnp.clip(level, 0, levels) * step - most).reshape(-1)[: len(v)]

    def size(d: int, itemsize: int) -> int:
        return -(-d * bits // 8) + -(-d // GROUP) * SCALE

    return Compressor(f"quantise:{bits}", decoded, size)


def of(text: str | Compressor) -> Compressor | None:
    """Parse a compressor: top_k:0.1, random_k:0.1, quantise:4, or none.

    A `Compressor` is returned unchanged.

    >>> of("top_k:0.1").name
    'top_k:0.1'
    """
    if isinstance(text, Compressor):
        return text
    if not isinstance(text, str):
        raise InputError(
            "compression must be a compressor such as fs.compression.top_k(0.1) or 'top_k:0.1', "
            f"got {checks.shown(text)}"
        )
    name, _, value = text.partition(":")
    factory = {"none": None, "quantise": quantise, "random_k": random_k, "top_k": top_k}
    made = factory[checks.choice("compression", name, factory)]
    if made is None:
        return None
    number: Any = checks.written(value)
    if isinstance(number, str):
        raise InputError(
            f"{name} needs a number, such as {name}:{4 if name == 'quantise' else 0.1}"
        )
    return made(number)


def _share(share: float) -> float:
    share = checks.number("share", share, above=0)
    if share > 1:
        raise InputError(f"share must be a number above 0 and at most 1, got {share:g}")
    return share


def _count(share: float, d: int) -> int:
    return max(1, round(share * d))


def _only(v: Array, rank: Array, share: float) -> Array:
    """Keep the `share` of coordinates with the largest `rank`, zero the others."""
    _, chosen = jax.lax.top_k(rank, _count(share, len(v)))
    return jnp.zeros_like(v).at[chosen].set(jnp.asarray(v)[chosen])

"""The gradient noise is standard normal, and independent between numbers, clients and rounds."""

from functools import partial

import jax
import numpy as np
import pytest
from scipy import stats

from fedscaffold.simulation.normals import normals


@partial(jax.jit, static_argnums=(1, 2))
def drawn(keys, size, dtype=np.float32):
    return jax.vmap(lambda key: normals(key, (size,), dtype))(keys)


def key(number):
    return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)


def streams(numbers, size):
    return np.asarray(drawn(np.stack([key(number) for number in numbers]), size), np.float64)


KINDS = {
    "neighbours": range(256),  # keys that differ in the lowest bits
    "high words": [i << 32 for i in range(256)],
    "multiples of the increment": [(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(256)],
    "random": np.random.default_rng(0).integers(0, 2**63, 256).tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_normal_and_uncorrelated(kind):
    """The numbers have four moments and the distribution of a normal; streams and lags none in common."""
    size = 4096
    found = streams(KINDS[kind], size)
    total = found.size
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = np.mean(found**power) - moment
        assert abs(error) < 5 * (variance / total) ** 0.5, power
    assert stats.kstest(found.ravel(), "norm").pvalue > 1e-4
    # all pairs of streams: correlations have a standard error of 1 / sqrt(size)
    between = np.corrcoef(found)[np.triu_indices(len(found), 1)] * size**0.5
    assert abs(np.mean(between**2) - 1) < 5 * (2 / len(between)) ** 0.5
    assert np.abs(between).max() < 6
    # shifted streams: the first stage of two streams may overlap, their results may not
    for lag in (1, 2, size // 2, size // 2 + 1):
        together = np.mean(found[:-1, lag:] * found[1:, :-lag])
        alone = np.mean(found[:, lag:] * found[:, :-lag])
        error = (len(found) * (size - lag)) ** -0.5
        assert abs(together) < 5 * error
        assert abs(alone) < 5 * error


@pytest.mark.slow
def test_tails_are_those_of_a_normal():
    found = np.abs(streams(range(1000), 10_000)).ravel()
    for bound in (3, 4, 4.5):
        share = 2 * stats.norm.sf(bound)
        count = np.sum(found > bound)
        assert abs(count - share * found.size) < 5 * (share * found.size) ** 0.5, bound


def test_a_stream_does_not_depend_on_precision_or_vectorisation():
    keys = np.stack([key(3), key(1 << 40)])
    single = np.asarray(drawn(keys, 7))
    with jax.enable_x64(True):
        double = np.asarray(drawn(keys, 7, np.float64))
    alone = np.asarray(jax.jit(lambda own: normals(own, (7,), np.float32))(keys[1]))
    assert double.dtype == np.float64
    np.testing.assert_allclose(single, double, rtol=1e-5)
    np.testing.assert_array_equal(alone, single[1])


def test_every_number_is_finite_and_the_law_symmetric():
    """All 2^23 values that can be drawn, at the ends and in the middle."""
    bits = np.array([0, 1, 2**22 - 1, 2**22, 2**23 - 2, 2**23 - 1])
    uniform = bits.astype(np.float32) * np.float32(2**-22) + np.float32(2**-23 - 1)
    value = np.asarray(jax.lax.erf_inv(uniform)) * 2**0.5
    exact = stats.norm.ppf((bits + 0.5) / 2**23)
    np.testing.assert_allclose(value, exact, rtol=1e-4)

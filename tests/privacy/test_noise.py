"""The noise: normal numbers against NumPy's own transform, independent, with tails for small deltas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, norm

from fedscaffold.privacy.noise import box_muller, gaussian_noise


@pytest.mark.parametrize("xp", [np, jnp], ids=["sites", "simulator"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tails_reach_beyond_what_small_deltas_ask_for(dtype, xp):
    """A step's noise that ends at t lets a record show itself with probability P(Z > t - 1 / noise)."""
    with jax.enable_x64(dtype == "float64"):
        words = xp.zeros((3, 1), np.uint32)
        furthest = float(box_muller(words, dtype)[0])
        largest = xp.full((3, 1), 2**32 - 1, np.uint32)
        assert np.isfinite(box_muller(largest, dtype)).all()
    assert norm.sf(furthest - 1 / 0.7) < 1e-15


def test_numbers_are_those_of_numpy():
    with jax.enable_x64(True):
        words = np.asarray(jax.random.bits(jax.random.key(3), (3, 500), np.uint32))
        found = np.asarray(gaussian_noise(jax.random.key(3), 999, "float64"))
    high, low, turn = words.astype(np.float64)
    radius = np.sqrt(-2 * np.log((high + (low + 0.5) / 2**32) / 2**32))
    angle = 2 * np.pi * turn / 2**32
    own = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:999]
    np.testing.assert_allclose(found, own, rtol=1e-12, atol=1e-13)


def test_numbers_are_normal_and_pairs_independent():
    found = np.asarray(gaussian_noise(jax.random.key(0), 200_000, "float32"))
    assert kstest(found, "norm").pvalue > 1e-3
    first, second = found[:100_000], found[100_000:]
    for a, b in ((first, second), (first**2, second**2), (found[1:], found[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(len(a))

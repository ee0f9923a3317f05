"""Fixed-point sums: the stated error, no wrapping, nothing out of range in silence."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedscaffold.checks import InputError
from fedscaffold.secure.ring import OutOfRange, Ring


@pytest.mark.parametrize("masses", [(1, 1, 1), (3, 1, 10**6), (1,) * 97])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_is_that_of_exact_arithmetic_to_the_stated_error(masses, dtype):
    rng = np.random.default_rng(0)
    ring = Ring.fit(1e3, sum(masses))
    vectors = [rng.normal(size=40).astype(dtype) * 100 for _ in masses]
    total = sum(ring.encode(v, m) for v, m in zip(vectors, masses, strict=True))
    mean = ring.decode(total, sum(masses))
    for j in range(40):
        exact = sum(Fraction(float(v[j])) * m for v, m in zip(vectors, masses, strict=True))
        gap = abs(Fraction(float(mean[j])) - exact / sum(masses))
        # the bound, and three roundings of double precision: the sum as a float, the quotient
        assert gap <= Fraction(ring.error) + Fraction(3 * 2.0**-53) * abs(exact / sum(masses))


@pytest.mark.parametrize("limit", [1.0, 0.7, 1000.0, 3e9])
@pytest.mark.parametrize("mass", [1, 2, 5, 12345])
def test_sums_at_the_limit_do_not_wrap_and_the_format_is_the_finest(limit, mass):
    ring = Ring.fit(limit, mass)
    for sign in (1.0, -1.0):
        total = sum(ring.encode(np.array([sign * limit]), 1) for _ in range(mass))
        assert ring.decode(total, mass) == pytest.approx(sign * limit, abs=2 * ring.error)
    assert mass * (limit * 2.0**ring.fraction + 0.5) < 2**63
    assert limit * mass * 2.0 ** (ring.fraction + 1) > 2**62


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_stays_in_the_dtype_and_is_what_encoding_does(dtype):
    rng = np.random.default_rng(1)
    values = (rng.normal(size=500) * 10.0 ** rng.integers(-15, 4, 500)).astype(dtype)
    ring = Ring.fit(1e6, 5)
    rounded = ring.round(values)
    assert rounded.dtype == dtype
    assert np.abs(rounded - values.astype(np.float64)).max() <= ring.error
    np.testing.assert_array_equal(ring.round(rounded), rounded)
    np.testing.assert_array_equal(ring.encode(rounded, 3), ring.encode(values, 3))
    np.testing.assert_array_equal(ring.decode(ring.encode(values, 1), 1), rounded)


@pytest.mark.parametrize("bad", [1000.1, -1e30, math.nan, math.inf])
def test_what_is_out_of_range_is_refused_and_not_clipped(bad):
    with pytest.raises(OutOfRange, match="limit"):
        Ring.fit(1000.0, 3).encode(np.array([1.0, bad]), 1)


def test_a_sum_of_garbage_is_out_of_range():
    """A uniform word mod 2^64 exceeds a bound of 2^62 with probability one half or more: of 64, one will."""
    ring = Ring.fit(1000.0, 3)
    garbage = np.random.default_rng(2).integers(0, 2**64, 64, dtype=np.uint64)
    with pytest.raises(OutOfRange, match="sums exceed"):
        ring.decode(garbage, 3)


def test_a_format_too_coarse_is_refused():
    with pytest.raises(InputError, match="smaller limit"):
        Ring.fit(1e12, 10**6)

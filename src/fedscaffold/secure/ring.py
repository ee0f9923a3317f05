"""Fixed-point numbers in the ring of whole numbers mod 2^64, where masked sums are exact.

A number v of a site with a mass of m (its weight, a whole number) is encoded as m round(v 2^f). The
sum over sites is exact mod 2^64, so decoding gives the weighted mean of the rounded numbers: it
differs from that of the numbers themselves by at most `Ring.error` = 2^-(f + 1). Sums do not wrap:
f is the largest whole number with (sum of all masses) limit 2^f <= 2^62.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError

__all__ = ["OutOfRange", "Ring"]

BITS = 62  # of 63 and a sign: rounding adds at most half a unit for each unit of mass
COARSEST = 8  # bits after the point


class OutOfRange(ValueError):
    """A number exceeds the limit of a ring, or a sum the sum of the limits."""


class Ring(NamedTuple):
    """A fixed-point format.

    >>> ring = Ring.fit(limit=1000.0, mass=3)
    >>> total = ring.encode(np.array([0.5, -1.0]), 1) + ring.encode(np.array([2.0, 4.0]), 2)
    >>> ring.decode(total, 3)
    array([1.5       , 2.33333333])
    """

    limit: float
    """Largest absolute value of a number."""
    fraction: int
    """Bits after the point, f."""

    @classmethod
    def fit(cls, limit: float, mass: int) -> Ring:
        """Return the finest format in which sums do not wrap.

        Args:
            limit: Largest absolute value of a number.
            mass: Sum of the masses of all sites.

        Raises:
            InputError: Fewer than 8 bits would be left after the point.
        """
        mantissa, exponent = math.frexp(limit * mass)
        exponent -= mantissa == 0.5  # the smallest with limit * mass <= 2^exponent
        if BITS - exponent < COARSEST:
            raise InputError(
                f"sums of numbers up to {limit:g} with weights of {mass} in all do not fit 62 bits "
                f"with {COARSEST} after the point: take a smaller limit"
            )
        return cls(limit, BITS - exponent)

    @property
    def error(self) -> float:
        """Largest difference of a decoded mean from the exact one, but for double precision."""
        return 2.0 ** -(self.fraction + 1)

    def round(self, vector: NDArray[Any]) -> NDArray[Any]:
        """Round numbers to this format, in their own dtype, which holds the result exactly."""
        return np.ldexp(self._scale(vector), -self.fraction).astype(vector.dtype)

    def encode(self, vector: NDArray[Any], mass: int) -> NDArray[np.uint64]:
        """Encode the numbers of a site with a mass.

        Raises:
            OutOfRange: A number is not finite, or exceeds the limit.
        """
        largest = float(np.abs(vector).max(initial=0.0))
        if not largest <= self.limit:  # also if it is NaN
            raise OutOfRange(f"numbers up to {largest:.3g} where {self.limit:g} is the limit")
        whole: NDArray[np.int64] = self._scale(vector).astype(np.int64) * np.int64(mass)
        return whole.view(np.uint64)

    def decode(self, total: NDArray[np.uint64], mass: int) -> NDArray[np.float64]:
        """Decode a sum of encoded vectors to their weighted mean.

        Args:
            total: The sum, mod 2^64.
            mass: Sum of the masses of the sites that it is of.

        Raises:
            OutOfRange: The sum exceeds what numbers within the limit add up to.
        """
        sums = np.ldexp(total.view(np.int64).astype(np.float64), -self.fraction)
        beyond = np.count_nonzero(np.abs(sums) > mass * (self.limit + 2 * self.error))
        if beyond:
            raise OutOfRange(
                f"{beyond} of {sums.size} sums exceed what numbers up to {self.limit:g} add up to"
            )
        return sums / mass

    def _scale(self, vector: NDArray[Any]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = np.rint(np.ldexp(vector.astype(np.float64), self.fraction))
        return scaled

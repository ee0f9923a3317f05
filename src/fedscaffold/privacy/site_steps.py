"""Private gradients at a deployed site: the mechanism on rows of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedscaffold.privacy.mechanism import clip_factors, noised_mean, records_at_once
from fedscaffold.privacy.site_secret import SiteStream

__all__ = ["PrivateSteps", "RecordGradients"]

Array: TypeAlias = NDArray[Any]
ROOM = 1 << 26  # bytes of gradients of single records: each call of torch or JAX costs a moment
RecordGradients: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], Array]
"""(rows, their places in the batch) -> the gradients of these records, one row each."""


class PrivateSteps:
    """The local steps of one charge, each of which may be taken once.

    Args:
        stream: The draws of the charge.
        clip: The norm to which a record's gradient is clipped.
        noise: The noise multiplier.
        rate: Probability with which a step draws a record.
        expected: The expected batch, of the site's public number of records.
        steps: Number of steps that were charged.

    >>> steps = PrivateSteps(
    ...     SiteStream(bytes(32), "ab12"), clip=1.0, noise=1.1, rate=1.0, expected=4.0, steps=1
    ... )
    >>> steps.gradient(0, 4, np.zeros(3), lambda rows, places: np.ones((len(rows), 3))).shape
    (3,)
    """

    def __init__(
        self,
        stream: SiteStream,
        *,
        clip: float,
        noise: float,
        rate: float,
        expected: float,
        steps: int,
    ) -> None:
        self.stream, self.clip, self.noise = stream, clip, noise
        self.rate, self.expected, self.steps = rate, expected, steps
        self.taken = 0

    def at_once(self, like: Array, records: int) -> int:
        """Return how many records' gradients are asked for at the same time, at most."""
        return records_at_once(self.rate * records, like.size, like.itemsize, ROOM)

    def gradient(self, step: int, records: int, like: Array, gradients: RecordGradients) -> Array:
        """Return the private gradient of a step.

        Args:
            step: The step, counted from 0; steps follow each other.
            records: Number of records that the site holds.
            like: A vector of the model's size and type.
            gradients: The gradients of single records.

        Raises:
            RuntimeError: The step is not the next one, or was not charged.
        """
        if step != self.taken or step >= self.steps:
            raise RuntimeError(f"step {step} is not the next of the {self.steps} that are charged")
        self.taken += 1
        rows = self.stream.rows(step, records, self.rate)
        total = np.zeros_like(like)
        at_once = self.at_once(like, records)
        for at in range(0, len(rows), at_once):
            places = np.arange(at, min(at + at_once, len(rows)))
            total += _clipped_sum(
                np.asarray(gradients(rows[places], places), like.dtype), self.clip
            )
        noise = self.stream.noise(step, like.size).astype(like.dtype)
        private: Array = noised_mean(
            total, noise, clip=self.clip, scale=self.noise, expected=self.expected
        )
        return private


def _clipped_sum(rows: Array, clip: float) -> Array:
    """Return the sum of some records' gradients, each clipped."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("rd,rd->r", rows, rows))
        factors, counts = clip_factors(norms, np.ones(len(rows), bool), clip)
        real = rows if counts.all() else np.where(counts[:, None], rows, 0)  # most often no copy
        total: Array = factors @ real
    return total

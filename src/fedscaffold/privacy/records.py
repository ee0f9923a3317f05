"""Privacy of single records: the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = ["Records", "check_mechanism", "records"]

LEAST_CLIP = 1e-12  # below, squares of a gradient vanish in float32, and nothing is clipped
LEAST_NOISE = 0.05  # below, a single step has an epsilon of hundreds, and accountants overflow


def check_mechanism(clip: float, noise: float, delta: float, stop_at_epsilon: float | None) -> None:
    """Raise an InputError if a setting of a private mechanism is out of range."""
    checks.number("clip", clip, at_least=LEAST_CLIP)
    checks.number("noise", noise, at_least=LEAST_NOISE)
    if checks.number("delta", delta, above=0) >= 1:
        raise InputError(f"delta must be a number above 0 and below 1, got {delta}")
    if stop_at_epsilon is not None:
        checks.number("stop_at_epsilon", stop_at_epsilon, above=0)


@dataclass(frozen=True, kw_only=True)
class Records:
    """What `records` returns: the settings of record-level privacy."""

    unit: ClassVar[str] = "record"
    clip: float
    noise: float
    delta: float
    sampling: str = "poisson"
    stop_at_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_mechanism(self.clip, self.noise, self.delta, self.stop_at_epsilon)
        if self.sampling in ("shuffle", "replacement"):
            raise InputError(
                f"sampling {self.sampling!r} has another epsilon than Poisson batches, and no "
                "accountant here computes it: take sampling='poisson'"
            )
        checks.choice("sampling", self.sampling, ["poisson"])


def records(
    *,
    clip: float,
    noise: float,
    delta: float,
    sampling: str = "poisson",
    stop_at_epsilon: float | None = None,
) -> Records:
    """Protect single records, as DP-SCAFFOLD does (Noble, Bellet and Dieuleveut 2022).

    At each local step client i draws each of its n_i records with probability q, clips the
    gradient of each to norm C, over all parameters jointly, and uses

        (sum of the clipped gradients + N(0, noise^2 C^2 I)) / (q n_i)

    in place of its gradient. Corrections, momenta and optimisers act on this one vector.

    Args:
        clip: The norm C.
        noise: The noise multiplier: standard deviation of the noise divided by C.
        delta: The probability in (epsilon, delta); well below 1 / (records of the client).
        sampling: How batches are drawn: "poisson", the only one that is accounted for.
        stop_at_epsilon: End the run before a client's epsilon exceeds this.

    Raises:
        InputError: A value is out of range.

    >>> records(clip=1.0, noise=1.1, delta=1e-5, stop_at_epsilon=8.0).noise
    1.1
    >>> records(clip=1.0, noise=1.1, delta=1e-5, sampling="shuffle")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: sampling 'shuffle' has another epsilon than Poisson batches, and
        no accountant here computes it: take sampling='poisson'
    """
    return Records(
        clip=clip, noise=noise, delta=delta, sampling=sampling, stop_at_epsilon=stop_at_epsilon
    )

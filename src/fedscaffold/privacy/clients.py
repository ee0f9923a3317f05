"""Privacy of whole clients: the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedscaffold.privacy.records import check_mechanism

__all__ = ["Clients", "clients"]


@dataclass(frozen=True, kw_only=True)
class Clients:
    """What `clients` returns: the settings of client-level privacy."""

    unit: ClassVar[str] = "client"
    clip: float
    noise: float
    delta: float
    stop_at_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_mechanism(self.clip, self.noise, self.delta, self.stop_at_epsilon)


def clients(
    *, clip: float, noise: float, delta: float, stop_at_epsilon: float | None = None
) -> Clients:
    """Protect whole clients: what a client sends in a round is clipped, and the sum is noised.

    All vectors of a client's message are clipped jointly to norm C, as differences from what the
    server knows: of SCAFFOLD the move, and the change of c_i. To the sum over the cohort the server
    adds N(0, noise^2 C^2 I), and steps with the noised sum.

    A client is charged for each round that it attends. Nothing is gained from the sampling of
    clients, as that would need Poisson samples that stay secret.

    Args:
        clip: The norm C.
        noise: The noise multiplier: standard deviation of the noise divided by C.
        delta: The probability in (epsilon, delta); well below 1 / (number of clients).
        stop_at_epsilon: End the run before a client's epsilon exceeds this.

    Raises:
        InputError: A value is out of range.

    >>> clients(clip=1.0, noise=5.0, delta=1e-5).noise
    5.0
    """
    return Clients(clip=clip, noise=noise, delta=delta, stop_at_epsilon=stop_at_epsilon)

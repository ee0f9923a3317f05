"""Results of the server: of a reply, an open round and a closed round."""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold.deploy.gate import Asked, Update

__all__ = ["Open", "Outcome", "Verdict"]


class Verdict(NamedTuple):
    """Result of receiving a reply."""

    counted: bool
    reason: str


class Outcome(NamedTuple):
    """Result of a closed round."""

    committed: bool
    kind: str
    round: int
    heard: tuple[str, ...]
    refused: dict[str, str]
    missing: tuple[str, ...]
    metrics: dict[str, float]
    """Weighted means over the clients that replied, measured at the model they were sent."""
    unmeasured: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)
    """By metric: clients where it was not finite, which its mean leaves out."""
    absent: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Sites that could not be asked, and why."""


class Open(NamedTuple):
    """An open round."""

    kind: str
    asked: dict[str, Asked]
    updates: dict[str, Update]
    failed: dict[str, str]
    began: float
    need: int
    absent: dict[str, str]
    """Sites that could not be asked, and why."""

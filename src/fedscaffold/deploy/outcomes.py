"""What the server says: of a message, of a round under way, of a round that is over."""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold.deploy.gate import Asked, Update

__all__ = ["Open", "Outcome", "Verdict"]


class Verdict(NamedTuple):
    """What became of a message."""

    counted: bool
    reason: str


class Outcome(NamedTuple):
    """What became of a round."""

    committed: bool
    kind: str
    round: int
    heard: tuple[str, ...]
    refused: dict[str, str]
    missing: tuple[str, ...]
    metrics: dict[str, float]
    """Weighted means over the clients heard, measured at the model they were sent."""
    unmeasured: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)
    """By metric: clients where it was no finite number; they are not in its mean."""
    absent: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Sites that could not be asked, and why."""


class Open(NamedTuple):
    """A round under way."""

    kind: str
    asked: dict[str, Asked]
    updates: dict[str, Update]
    failed: dict[str, str]
    began: float
    need: int
    absent: dict[str, str]
    """Sites that could not be asked, and why."""

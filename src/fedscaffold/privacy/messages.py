"""Client-level privacy: messages clipped at the clients, and noise on their sum at the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedscaffold.privacy.noise import gaussian_noise

__all__ = ["MessageMechanism", "clip_message", "noise_sum"]

Array: TypeAlias = Any


class MessageMechanism(NamedTuple):
    """The mechanism of a program; static."""

    clip: float
    noise: float


def clip_message(
    mechanism: MessageMechanism, message: Any, known: Mapping[str, Array], sent: Sequence[str]
) -> Any:
    """Return a message whose vectors differ from what the server knows by at most the clip.

    A message without a finite norm is what the server knows.

    Args:
        mechanism: The mechanism.
        message: The message of one client.
        known: For some of its fields, the vector that the server knows; zero for the others.
        sent: The fields that are sent.
    """
    changes = {name: getattr(message, name) - known.get(name, 0) for name in sent}
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(change)) for change in changes.values()))
    factor = jnp.where(jnp.isfinite(norm), mechanism.clip / jnp.maximum(norm, mechanism.clip), 0)
    return message._replace(
        **{
            name: known.get(name, 0) + factor * jnp.where(jnp.isfinite(norm), change, 0)
            for name, change in changes.items()
        }
    )


def noise_sum(
    mechanism: MessageMechanism, total: Any, share: Array, sent: Sequence[str], key: Array
) -> Any:
    """Return the weighted sum of messages with noise on its vectors.

    Args:
        mechanism: The mechanism.
        total: Sum of p_i message_i.
        share: The weight p_i, the same for all clients.
        sent: The fields that are sent.
        key: Random key of the round.
    """
    keys = jax.random.split(key, len(sent))
    scale = mechanism.noise * mechanism.clip * share
    noised = {}
    for own, name in zip(keys, sent, strict=True):
        value = getattr(total, name)
        noised[name] = value + scale * gaussian_noise(own, value.size, value.dtype)
    return total._replace(**noised)

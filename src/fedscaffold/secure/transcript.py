"""What both sides of a secure sum compute alike: what is signed, and which mask belongs to whom.

The `context` is a text that names one attempt at one sum, such as run, round and a random word. It
enters everything that is signed, derived or committed to, so that nothing of one attempt is valid
in another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec

from fedscaffold.secure.masking import KEY, agree, canonical, derive
from fedscaffold.secure.signatures import SIGNATURE, verify

__all__ = [
    "ADVERT",
    "EXCHANGES",
    "Advert",
    "Breach",
    "advert_text",
    "commit_to",
    "pair_mask",
    "read_advert",
    "seed_mask",
    "survivors_text",
]

EXCHANGES = ("keys", "shares", "masked", "survivors", "reveal")
VERSION = "fedscaffold secure sum 1"
ADVERT = 3 * KEY + SIGNATURE
"""Bytes of an advert."""


class Breach(ValueError):
    """A message breaks the protocol; nothing was revealed."""


class Advert(NamedTuple):
    """The public part of what a site draws for one attempt."""

    cipher: bytes
    """Public key under which others seal its shares."""
    mask: bytes
    """Public key of its masks with others."""
    commitment: bytes
    """Hash of the seed of its own mask."""
    signature: bytes

    def to_bytes(self) -> bytes:
        """Serialise the advert; its length is fixed."""
        return b"".join(self)


def advert_text(context: str, site: str, *parts: bytes) -> bytes:
    """Return what a site signs to advertise its keys."""
    return canonical(VERSION, "keys", context, site, *(part.hex() for part in parts))


def read_advert(
    context: str, site: str, data: bytes, identities: Mapping[str, ec.EllipticCurvePublicKey]
) -> Advert:
    """Read an advert and check its signature.

    Raises:
        Breach: The site is unknown, or its identity has not signed this advert for this attempt.
    """
    if site not in identities:
        raise Breach(f"{site!r} is not on the list of identities here")
    parts = (data[:KEY], data[KEY : 2 * KEY], data[2 * KEY : 3 * KEY])
    if len(data) != ADVERT or not verify(
        identities[site], advert_text(context, site, *parts), data[3 * KEY :]
    ):
        raise Breach(f"the keys of {site!r} are not signed by its identity for this attempt")
    return Advert(*parts, data[3 * KEY :])


def survivors_text(
    context: str, threshold: int, adverts: Mapping[str, Advert], survivors: Collection[str]
) -> bytes:
    """Return what sites sign before they reveal: who survived, of whom, by which keys."""
    held = [[site, advert.to_bytes().hex()] for site, advert in sorted(adverts.items())]
    digest = hashlib.sha256(canonical(held)).hexdigest()
    return canonical(VERSION, "survivors", context, threshold, digest, sorted(survivors))


def commit_to(context: str, site: str, seed: bytes) -> bytes:
    """Return the hash of a seed, by which its recovery is checked."""
    return hashlib.sha256(canonical(VERSION, "seed", context, site) + seed).digest()


def seed_mask(context: str, site: str, seed: bytes) -> bytes:
    """Return the key of a site's own mask."""
    return derive(seed, VERSION, "own mask", context, site)


def pair_mask(
    context: str, site: str, private: bytes, other: str, public: bytes
) -> tuple[bytes, int]:
    """Return the key of the mask of two sites, and the sign with which `site` adds it."""
    pair = sorted((site, other))
    key = agree(private, public, VERSION, "pair mask", context, *pair)
    return key, 1 if site == pair[0] else -1

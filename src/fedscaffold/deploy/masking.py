"""Secure sums: the server learns the sum of the clients' vectors and, of each single one, nothing.

What SCAFFOLD's server needs of a round is linear: D = sum p_i d_i / heard (and with plain SGD and equal steps the move
is K lr D). So the vectors may be masked before they leave the clients. Numbers become whole numbers modulo 2^64, in
steps of 2^-BITS, and every pair of clients shares a secret stream that one adds and the other subtracts:

    sent_i = round(2^BITS p_i d_i) + sum over j > i of stream_ij - sum over j < i of stream_ij      (mod 2^64)

Each sent vector alone is uniformly random; in their sum all streams cancel. The streams come from a Diffie-Hellman key
exchange (X25519) through ChaCha20, fresh for every round.

This shows that the message fits; it is not a whole protocol. The streams of a client that drops out do not cancel: the
round must then be done again among the others (Bonawitz et al. 2017 share the secrets so that they can be recovered).
And clients must know each other's public keys to be each other's, or the server could play all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.deploy.schema import Array

__all__ = ["BITS", "masked", "unmasked"]

BITS = 40
Words = NDArray[np.uint64]


def masked(
    site: str, vector: Array, own: X25519PrivateKey, publics: Mapping[str, bytes], run: str, round: int
) -> Words:
    """A client's vector, times its weight, as it may be sent: random to all who do not hold the other clients' keys.

    >>> keys = {site: X25519PrivateKey.generate() for site in ("a", "b", "c")}
    >>> publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    >>> sent = [masked(site, np.array([0.25, -1.0]), key, publics, "run", 1) for site, key in keys.items()]
    >>> unmasked(sent)
    array([ 0.75, -3.  ])
    """
    if not np.isfinite(vector).all() or np.abs(vector).max(initial=0) * 2.0**BITS * len(publics) >= 2.0**62:
        raise InputError(f"secure sums take numbers below 2^{62 - BITS} / clients; take a smaller local.lr")
    total = np.rint(vector.astype(np.float64) * 2.0**BITS).astype(np.int64).view(np.uint64)
    for other, public in publics.items():
        if other != site:
            stream = _stream(own, public, f"{run} {round} {min(site, other)} {max(site, other)}", total.size)
            total = total + stream if site < other else total - stream
    return total


def unmasked(sent: list[Words]) -> Array:
    """The sum of the clients' vectors, from what all of them sent."""
    total = np.zeros_like(sent[0])
    for words in sent:
        total = total + words
    return total.view(np.int64).astype(np.float64) / 2.0**BITS


def _stream(own: X25519PrivateKey, public: bytes, label: str, size: int) -> Any:
    """The secret stream of a pair of clients in a round."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    key = HKDF(hashes.SHA256(), 32, None, b"fedscaffold mask " + label.encode()).derive(shared)
    return np.frombuffer(
        Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * size)), np.uint64
    )

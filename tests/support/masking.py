"""Secure aggregation by pairwise masks: the server learns the sum of the clients' vectors, but no single one.

SCAFFOLD's server needs only the linear D = sum p_i d_i / heard (with plain SGD and equal steps the move is K lr D), so
vectors can be masked before they leave the clients. Numbers are converted to integers modulo 2^64, in units of 2^-BITS,
and every pair of clients shares a secret stream that one adds and the other subtracts:

    sent_i = round(2^BITS p_i d_i) + sum over j > i of stream_ij - sum over j < i of stream_ij      (mod 2^64)

Each masked vector alone is uniformly random; in the sum all streams cancel. The streams are ChaCha20 keyed by a
Diffie-Hellman exchange (X25519), fresh for every round.

This demonstrates that SCAFFOLD's message can be masked; it is not a complete protocol. If a client drops out, its
streams do not cancel and the round must be repeated without it (Bonawitz et al. 2017 recover them by secret sharing).
Clients must also authenticate each other's public keys, or the server could impersonate them.
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

__all__ = ["BITS", "mask_vector", "sum_masked"]

BITS = 40
Words = NDArray[np.uint64]


def mask_vector(
    site: str,
    vector: Array,
    own: X25519PrivateKey,
    publics: Mapping[str, bytes],
    run: str,
    round: int,
) -> Words:
    """Mask a client's weighted vector.

    Args:
        site: This client.
        vector: Its vector, times its weight.
        own: Its private key.
        publics: Raw public keys of all clients, by site.
        run: Id of the run.
        round: Number of the round.

    >>> keys = {site: X25519PrivateKey.generate() for site in ("a", "b", "c")}
    >>> publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    >>> sent = [mask_vector(site, np.array([0.25, -1.0]), key, publics, "run", 1) for site, key in keys.items()]
    >>> sum_masked(sent)
    array([ 0.75, -3.  ])
    """
    if (
        not np.isfinite(vector).all()
        or np.abs(vector).max(initial=0) * 2.0**BITS * len(publics) >= 2.0**62
    ):
        raise InputError(
            f"secure sums take numbers below 2^{62 - BITS} / clients; take a smaller local.lr"
        )
    total = np.rint(vector.astype(np.float64) * 2.0**BITS).astype(np.int64).view(np.uint64)
    for other, public in publics.items():
        if other != site:
            stream = _stream(
                own, public, f"{run} {round} {min(site, other)} {max(site, other)}", total.size
            )
            total = total + stream if site < other else total - stream
    return total


def sum_masked(sent: list[Words]) -> Array:
    """Return the sum of the clients' vectors from the masked vectors of all of them."""
    total = np.zeros_like(sent[0])
    for words in sent:
        total = total + words
    return total.view(np.int64).astype(np.float64) / 2.0**BITS


def _stream(own: X25519PrivateKey, public: bytes, label: str, size: int) -> Any:
    """Return the secret stream of a pair of clients in a round."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    key = HKDF(hashes.SHA256(), 32, None, b"fedscaffold mask " + label.encode()).derive(shared)
    return np.frombuffer(
        Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * size)),
        np.uint64,
    )

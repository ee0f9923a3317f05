"""Keys that two sites agree on, and what they are used for: sealed shares, and masks of vectors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

__all__ = ["KEY", "TAG", "add_mask", "agree", "canonical", "derive", "public_of", "seal", "unseal"]

KEY, TAG = 32, 16
"""Bytes of a key and of what sealing adds."""
CHUNK = 1 << 17  # numbers that are masked at a time
ONCE = bytes(12)  # the nonce of a key that seals one text only


def canonical(*words: Any) -> bytes:
    """Return JSON values as bytes that no other values give.

    >>> canonical("keys", 3, ["ant"])
    b'["keys",3,["ant"]]'
    """
    return json.dumps(words, sort_keys=True, separators=(",", ":")).encode("ascii")


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one (X25519)."""
    raw, form = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(raw, form)


def agree(private: bytes, public: bytes, *words: Any) -> bytes:
    """Return the key of two sites for one purpose.

    Args:
        private: The private key of one of them.
        public: The public key of the other.
        words: What the key is for; other words give another key.

    Raises:
        ValueError: The public key is one with which no secret can be agreed on.

    >>> a, b = bytes(31) + b"a", bytes(31) + b"b"
    >>> agree(a, public_of(b), "mask") == agree(b, public_of(a), "mask")
    True
    """
    one, other = X25519PrivateKey.from_private_bytes(private), X25519PublicKey
    return derive(one.exchange(other.from_public_bytes(public)), *words)


def derive(secret: bytes, *words: Any) -> bytes:
    """Derive a key for one purpose from a secret (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), KEY, salt=None, info=canonical(*words)).derive(secret)


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate the one text that a key is for (ChaCha20-Poly1305)."""
    return ChaCha20Poly1305(key).encrypt(ONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Invert `seal`; raise `cryptography.exceptions.InvalidTag` if it was not sealed by the key."""
    return ChaCha20Poly1305(key).decrypt(ONCE, sealed, None)


def add_mask(vector: NDArray[np.uint64], key: bytes, sign: int) -> None:
    """Add the mask of a key to a vector, in place, or subtract it for a `sign` of -1.

    The mask is the key's stream (AES-256 in counter mode), taken as numbers mod 2^64.

    >>> vector = np.zeros(2, np.uint64)
    >>> add_mask(vector, bytes(32), 1)
    >>> add_mask(vector, bytes(32), -1)
    >>> vector
    array([0, 0], dtype=uint64)
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, change = bytes(8 * CHUNK), np.add if sign > 0 else np.subtract
    for begin in range(0, vector.size, CHUNK):
        part = vector[begin : begin + CHUNK]
        change(part, np.frombuffer(stream.update(zeros[: 8 * part.size]), "<u8"), out=part)

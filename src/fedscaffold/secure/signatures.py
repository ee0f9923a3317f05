"""Identities of sites: their registered keys (ECDSA on P-384), by which they sign."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from fedscaffold.checks import InputError

__all__ = ["SIGNATURE", "load_identity", "parse_public", "sign", "verify"]

HALF = 48
SIGNATURE = 2 * HALF
"""Bytes of a signature: two numbers of 48 bytes."""
SCHEME = ec.ECDSA(hashes.SHA384())


def load_identity(data: bytes, source: str) -> ec.EllipticCurvePrivateKey:
    """Load a site's private key, in OpenSSH's format.

    Raises:
        InputError: It is no such key, or not on P-384.
    """
    try:
        key = serialization.load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise InputError(f"{source} must be a private key on P-384 in OpenSSH's format")
    return key


def parse_public(text: str, source: str) -> ec.EllipticCurvePublicKey:
    """Read a site's public key, a line in OpenSSH's format.

    Raises:
        InputError: It is no such key, or not on P-384.
    """
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise InputError(f"{source} must be a public key on P-384 in OpenSSH's format")
    return key


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Sign a text; the signature has a fixed length."""
    r, s = decode_dss_signature(key.sign(text, SCHEME))
    return r.to_bytes(HALF, "big") + s.to_bytes(HALF, "big")


def verify(key: ec.EllipticCurvePublicKey, text: bytes, signature: bytes) -> bool:
    """Return whether a signature is by the key and of the text.

    >>> key = ec.generate_private_key(ec.SECP384R1())
    >>> verify(key.public_key(), b"one", sign(key, b"one"))
    True
    >>> verify(key.public_key(), b"two", sign(key, b"one"))
    False
    """
    if len(signature) != SIGNATURE:
        return False
    r, s = (int.from_bytes(half, "big") for half in (signature[:HALF], signature[HALF:]))
    try:
        key.verify(encode_dss_signature(r, s), text, SCHEME)
    except InvalidSignature:
        return False
    return True

"""A site's secret, and the random numbers that follow from it.

The secret is made once, by the operating system's generator, in a file that only its owner may
read, and is never sent. What is drawn for a charge is the keystream of ChaCha20 under a key that
depends on the secret and on the charge. Whoever lacks the secret, such as the server, cannot tell
it from random numbers, and no two charges share a part of it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.privacy.noise import box_muller
from fedscaffold.state.files import (
    StateError,
    make_folder,
    open_file,
    reported,
    sync_folder,
    write_private,
)

__all__ = ["SiteStream", "load_secret", "name_secret"]

BYTES = 32
ROWS, NOISE = 0, 1  # streams of a step


def load_secret(path: Path) -> bytes:
    """Read a site's secret; make it if there is none.

    Raises:
        StateError: It is damaged, or others than its owner may read it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "secret")
    >>> load_secret(path) == load_secret(path), oct(path.stat().st_mode & 0o777)
    (True, '0o600')
    """
    with reported(f"reading {path}", intact="nothing is trained"):
        if not os.path.lexists(path):
            make_folder(path.parent, private=True)
            write_private(path, _write_synced(secrets.token_bytes(BYTES)))
            sync_folder(path.parent)
        with os.fdopen(open_file(path), "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(BYTES + 1)
    if len(secret) != BYTES:
        raise StateError(f"{path} is damaged; remove it, and a new secret is made")
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise StateError(f"{path} can be read by others: chmod 600 it, or remove it for a new one")
    return secret


def _write_synced(data: bytes) -> Any:
    def write(fd: int) -> None:
        os.write(fd, data)
        os.fsync(fd)

    return write


def name_secret(secret: bytes) -> str:
    """Return a name by which a ledger recognises a secret, and which tells nothing of it.

    >>> name_secret(bytes(32)) != name_secret(bytes([1] * 32))
    True
    """
    return _derive(secret, "name").hex()[:32]


class SiteStream:
    """The draws of one charge: Poisson batches and noise, by step.

    Args:
        secret: The site's secret.
        charge: Hash of the charge's line in the site's ledger.

    >>> stream = SiteStream(bytes(32), "ab12")
    >>> stream.noise(step=0, size=5).shape
    (5,)
    >>> stream.rows(step=0, records=4, rate=1.0)
    array([0, 1, 2, 3])
    """

    def __init__(self, secret: bytes, charge: str) -> None:
        self._key = _derive(secret, f"charge {charge}")

    def rows(self, step: int, records: int, rate: float) -> NDArray[np.int64]:
        """Return the records of a step, each drawn with probability `rate`, independently."""
        if rate >= 1:
            return np.arange(records)
        words = np.frombuffer(self._bytes(ROWS, step, 8 * records), "<u8")
        return np.flatnonzero(words < np.uint64(int(rate * 2**64)))

    def noise(self, step: int, size: int) -> NDArray[np.float64]:
        """Return the independent standard normal numbers of a step."""
        pairs = -(-size // 2)
        words = np.frombuffer(self._bytes(NOISE, step, 12 * pairs), "<u4").reshape(3, pairs)
        noise: NDArray[np.float64] = box_muller(words, np.float64)[:size]
        return noise

    def _bytes(self, stream: int, step: int, count: int) -> bytes:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        nonce = struct.pack("<IIQ", 0, stream, step)  # the first word counts blocks of 64 bytes
        return Cipher(ChaCha20(self._key, nonce), mode=None).encryptor().update(bytes(count))


def _derive(secret: bytes, purpose: str) -> bytes:
    return hmac.new(secret, f"fedscaffold {purpose}".encode(), hashlib.sha256).digest()

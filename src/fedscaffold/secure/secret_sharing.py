"""Shamir's sharing of a secret of 32 bytes: any `threshold` shares give it, fewer tell nothing.

A share is the value of a random polynomial over a prime field at 1, 2, ..., and the secret its
value at 0. Shares may be wrong; who recovers a secret knows how to tell the right one, and finds
the shares that do not lie on its polynomial.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, islice

__all__ = ["SHARE", "Unrecoverable", "recover", "split"]

PRIME = 2**521 - 1  # a Mersenne prime above 2^256
SECRET, SHARE = 32, 66
"""Bytes of a secret and of a share."""
MOST_TRIES = 2000  # sets of shares tried where some are wrong


class Unrecoverable(ValueError):
    """No set of the shares gives the right secret."""


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Split a secret into shares, those of 1 to `number`.

    >>> shares = split(bytes(range(32)), 2, 3)
    >>> recover({1: shares[0], 3: shares[2]}, 2, lambda secret: True)[0] == bytes(range(32))
    True
    """
    if len(secret) != SECRET or not 1 <= threshold <= number:
        raise ValueError(f"a secret of {len(secret)} bytes, {threshold} of {number} shares")
    random = (secrets.randbelow(PRIME) for _ in range(threshold - 1))
    coefficients = [int.from_bytes(secret, "big"), *random]
    return [_evaluate(coefficients, x).to_bytes(SHARE, "big") for x in range(1, number + 1)]


def recover(
    shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]
) -> tuple[bytes, tuple[int, ...]]:
    """Recover a secret.

    Args:
        shares: Shares by number; some may be wrong.
        threshold: The number of right shares that give the secret.
        is_right: Tells the secret from others.

    Returns:
        The secret, and the numbers of the shares that are wrong.

    Raises:
        Unrecoverable: No set of `threshold` shares gives the secret; where there are many sets, of
            the first 2000.
    """
    points = {x: int.from_bytes(share, "big") for x, share in shares.items() if len(share) == SHARE}
    points = {x: y for x, y in points.items() if y < PRIME}
    for chosen in islice(combinations(sorted(points), threshold), MOST_TRIES):
        at = {x: points[x] for x in chosen}
        value = _interpolate(at, 0)
        if value >> (8 * SECRET) or not is_right(secret := value.to_bytes(SECRET, "big")):
            continue
        wrong = (x for x in shares if x not in points or _interpolate(at, x) != points[x])
        return secret, tuple(sorted(wrong))
    raise Unrecoverable(f"no {threshold} of {len(shares)} shares give the secret")


def _evaluate(coefficients: Iterable[int], x: int) -> int:
    value = 0
    for coefficient in reversed(list(coefficients)):
        value = (value * x + coefficient) % PRIME
    return value


def _interpolate(points: Mapping[int, int], at: int) -> int:
    """Return the value at a number of the polynomial through the points, by Lagrange's formula."""
    total = 0
    for x, y in points.items():
        over, under = 1, 1
        for other in points:
            if other != x:
                over, under = over * (at - other) % PRIME, under * (x - other) % PRIME
        total = (total + y * over * pow(under, -1, PRIME)) % PRIME
    return total

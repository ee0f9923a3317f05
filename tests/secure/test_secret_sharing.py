"""Shamir's shares: any threshold of them, no fewer, and wrong ones are found."""

import secrets
from itertools import combinations

import pytest

from fedscaffold.secure.secret_sharing import PRIME, SHARE, Unrecoverable, recover, split


def test_any_threshold_of_the_shares_gives_the_secret():
    secret = b"\xff" * 32
    shares = dict(enumerate(split(secret, 3, 5), 1))
    for chosen in combinations(shares, 3):
        got, wrong = recover({x: shares[x] for x in chosen}, 3, secret.__eq__)
        assert (got, wrong) == (secret, ())


def test_fewer_shares_are_consistent_with_every_secret():
    """Given two shares of three, for any secret there is a polynomial: the third share that goes with it."""
    shares = dict(enumerate(split(secrets.token_bytes(32), 3, 3), 1))
    for other in (0, 1, 2**255):
        # by Lagrange at 0 for the points 1, 2, 3: s = 3 y1 - 3 y2 + y3
        y1, y2 = (int.from_bytes(shares[x], "big") for x in (1, 2))
        y3 = (other - 3 * y1 + 3 * y2) % PRIME
        made = {1: shares[1], 2: shares[2], 3: y3.to_bytes(SHARE, "big")}
        assert recover(made, 3, lambda one: True)[0] == other.to_bytes(32, "big")
    with pytest.raises(Unrecoverable):
        recover({x: shares[x] for x in (1, 2)}, 3, lambda one: True)


def test_wrong_shares_are_found_and_do_no_harm_while_enough_are_right():
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(split(secret, 3, 5), 1))
    garbage = shares | {2: secrets.token_bytes(SHARE), 5: b"\xff" * SHARE}
    assert recover(garbage, 3, secret.__eq__) == (secret, (2, 5))
    assert recover(shares | {4: b""}, 3, secret.__eq__) == (secret, (4,))
    with pytest.raises(Unrecoverable):
        recover(garbage | {1: bytes(SHARE)}, 3, secret.__eq__)


@pytest.mark.parametrize(("secret", "threshold"), [(bytes(31), 2), (bytes(32), 4), (bytes(32), 0)])
def test_impossible_sharing_is_refused(secret, threshold):
    with pytest.raises(ValueError, match="shares"):
        split(secret, threshold, 3)

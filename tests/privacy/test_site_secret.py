"""A site's draws: ChaCha20 written by hand, normal, Poisson, independent of each other and of what the server knows."""

import hashlib
import hmac
import itertools
import struct

import numpy as np
import pytest
from scipy.stats import chi2, kstest

from fedscaffold.privacy import site_steps
from fedscaffold.privacy.accounting import epsilon
from fedscaffold.privacy.auditing import guess
from fedscaffold.privacy.site_secret import SiteStream, load_secret, name_secret
from fedscaffold.privacy.site_steps import PrivateSteps
from fedscaffold.state import StateError

SECRET = bytes(range(32))
MASK = 0xFFFFFFFF


def chacha20(key, nonce, count):
    """The keystream of RFC 8439."""
    out = b""
    while len(out) < count:
        first = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
        state = first = [*first, len(out) // 64, *struct.unpack("<3I", nonce)]
        state = list(first)
        for _ in range(10):
            for a, b, c, d in (
                *((i, 4 + i, 8 + i, 12 + i) for i in range(4)),
                *((i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)),
            ):
                for p, q, r, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    state[p] = (state[p] + state[q]) & MASK
                    mixed = state[r] ^ state[p]
                    state[r] = ((mixed << turn) | (mixed >> (32 - turn))) & MASK
        out += struct.pack("<16I", *((a + b) & MASK for a, b in zip(state, first, strict=True)))
    return out[:count]


def test_the_cipher_by_hand_is_that_of_the_standard():
    """The test vector of RFC 8439, section 2.3.2, is of block 1."""
    nonce = bytes.fromhex("000000090000004a00000000")
    block = chacha20(SECRET, nonce, 128)[64:]
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4")


def test_draws_are_those_by_hand():
    key = hmac.new(SECRET, b"fedscaffold charge ab12", hashlib.sha256).digest()
    stream = SiteStream(SECRET, "ab12")
    for step in (0, 3):
        words = chacha20(key, struct.pack("<IQ", 1, step), 12 * 4)
        high, low, turn = np.frombuffer(words, "<u4").reshape(3, 4).astype(float)
        radius = np.sqrt(-2 * np.log((high + (low + 0.5) / 2**32) / 2**32))
        angle = 2 * np.pi * turn / 2**32
        noise = np.r_[radius * np.cos(angle), radius * np.sin(angle)][:7]
        np.testing.assert_allclose(stream.noise(step, 7), noise, rtol=1e-13)
        coins = np.frombuffer(chacha20(key, struct.pack("<IQ", 0, step), 8 * 50), "<u8")
        drawn = [row for row, coin in enumerate(coins) if int(coin) / 2**64 < 0.3]
        assert stream.rows(step, 50, 0.3).tolist() == drawn


def test_noise_is_normal_and_batches_are_poisson():
    stream = SiteStream(SECRET, "ab12")
    noise = np.concatenate([stream.noise(step, 999) for step in range(100)])
    assert kstest(noise, "norm").pvalue > 1e-3
    held = np.zeros((2000, 40))
    for step in range(2000):
        held[step, stream.rows(step, 40, 0.2)] = 1
    q, spread = 0.2, 0.2 * 0.8
    assert np.abs(held.mean(axis=0) - q).max() < 4.5 * np.sqrt(spread / 2000)
    assert abs(held.sum(axis=1).var() / (40 * spread) - 1) < 4.5 * np.sqrt(2 / 2000) * 1.2
    assert SiteStream(SECRET, "ab12").rows(0, 5, 1.0).tolist() == [0, 1, 2, 3, 4]


def test_noise_is_independent_across_secrets_charges_and_steps():
    """Sums of squared correlations of all pairs, which are chi-squared."""
    size = 4000
    streams = [SiteStream(bytes([s] * 32), f"{c}") for s in (1, 2, 3) for c in (1, 2)]
    rows = [stream.noise(step, size) for stream in streams for step in (0, 1)]
    pairs = [size * np.corrcoef(a, b)[0, 1] ** 2 for a, b in itertools.combinations(rows, 2)]
    assert chi2.sf(sum(pairs), len(pairs)) > 1e-4
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_the_private_gradient_has_the_law_of_the_mechanism():
    """Mean and covariance over many charges: noise, and Poisson batches, as in simulation."""
    rng = np.random.default_rng(0)
    g, clip, noise, rate = rng.normal(size=(12, 3)), 1.0, 0.8, 0.4
    clipped = g / np.maximum(np.linalg.norm(g, axis=1, keepdims=True), 1)
    made = []
    for charge in range(1500):
        steps = PrivateSteps(
            SiteStream(SECRET, str(charge)),
            clip=clip,
            noise=noise,
            rate=rate,
            expected=rate * 12,
            steps=1,
        )
        made.append(steps.gradient(0, 12, np.zeros(3), lambda rows, places: g[rows]))
    mean = clipped.mean(axis=0)
    law = (noise * clip / 4.8) ** 2 * np.eye(3) + (1 - rate) / (rate * 144) * clipped.T @ clipped
    scale = np.sqrt(np.diag(law) / 1500)
    assert (np.abs(np.mean(made, axis=0) - mean) < 4.5 * scale).all()
    found = np.cov(np.array(made).T)
    errors = np.sqrt((np.outer(np.diag(law), np.diag(law)) + law**2) / 1500)
    assert (np.abs(found - law) < 5 * errors).all()


def test_steps_are_taken_once_and_no_more_than_were_charged():
    def gradients(rows, places):
        return np.ones((len(rows), 2))

    steps = PrivateSteps(
        SiteStream(SECRET, "ab12"), clip=1.0, noise=1.0, rate=0.5, expected=2.0, steps=2
    )
    for step in (1, 0, 0, 1, 2):
        if step == steps.taken and step < 2:
            steps.gradient(step, 4, np.zeros(2), gradients)
        else:
            with pytest.raises(RuntimeError, match="not the next of the 2 that are charged"):
                steps.gradient(step, 4, np.zeros(2), gradients)
    assert steps.taken == 2


def test_large_batches_are_taken_in_parts(monkeypatch):
    """The sum is the same."""
    monkeypatch.setattr(site_steps, "ROOM", 1 << 21)
    rng = np.random.default_rng(0)
    g = rng.normal(size=(30, 40_000))
    steps = PrivateSteps(
        SiteStream(SECRET, "ab12"), clip=5.0, noise=1.0, rate=0.9, expected=27.0, steps=1
    )
    asked = []

    def gradients(rows, places):
        asked.append(len(rows))
        return g[rows]

    found = steps.gradient(0, 30, np.zeros(40_000), gradients)
    rows = steps.stream.rows(0, 30, 0.9)
    clipped = g[rows] / np.maximum(np.linalg.norm(g[rows], axis=1, keepdims=True) / 5, 1)
    by_hand = (clipped.sum(axis=0) + 5 * steps.stream.noise(0, 40_000)) / 27
    np.testing.assert_allclose(found, by_hand, rtol=1e-12, atol=1e-13)
    assert len(asked) > 3


def test_a_secret_is_made_once_and_read_by_its_owner_alone(tmp_path):
    path = tmp_path / "site" / "secret"
    secret = load_secret(path)
    assert load_secret(path) == secret
    assert len(secret) == 32
    assert secret != load_secret(tmp_path / "other" / "secret")
    assert secret.hex()[:8] not in name_secret(secret)
    path.chmod(0o640)
    with pytest.raises(StateError, match="can be read by others"):
        load_secret(path)
    path.chmod(0o600)
    path.write_bytes(secret[:-1])
    with pytest.raises(StateError, match="is damaged"):
        load_secret(path)
    path.unlink()
    path.symlink_to(tmp_path / "other" / "secret")
    with pytest.raises(StateError, match="symbolic link"):
        load_secret(path)


def attack(claims, mutant=None, canaries=600, steps=6):
    """A lower bound on epsilon from what a site sends, where half of the canaries are its records."""
    rng = np.random.default_rng(1)
    inside = rng.random(canaries) < 0.5
    axes = np.flatnonzero(inside)
    rate, noise = 0.5, claims

    def gradients(rows, places):
        loud = np.zeros((len(rows), canaries))
        loud[np.arange(len(rows)), axes[rows]] = -9.0  # each along an axis of its own
        return loud

    given = {"clip": 1.0, "noise": noise, "rate": rate, "expected": rate * canaries}
    if mutant == "no clip":
        given["clip"], given["noise"] = 9.0, noise / 9.0
    if mutant == "noise of a mean on the sum":
        given["noise"] /= given["expected"]
    private = PrivateSteps(SiteStream(SECRET, "ab12"), steps=steps, **given)
    if mutant == "noise that the server knows":
        private.noise = 0.0
    sent = [private.gradient(k, len(axes), np.zeros(canaries), gradients) for k in range(steps)]
    score = -np.sum(sent, axis=0)
    claimed = epsilon(noise=claims, rate=rate, steps=steps, delta=1e-5)
    return guess([score], inside, delta=1e-5).epsilon, claimed


@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_an_attack_on_what_a_site_sends_stays_below_the_claim(noise):
    found, claimed = attack(noise)
    assert found <= claimed


@pytest.mark.parametrize(
    "mutant", ["no clip", "noise of a mean on the sum", "noise that the server knows"]
)
def test_an_attack_on_a_broken_site_refutes_the_claim(mutant):
    found, claimed = attack(2.0, mutant)
    assert found > claimed


def test_single_precision_is_kept_and_is_that_of_double():
    g = np.random.default_rng(0).normal(size=(20, 5))
    made = []
    for dtype in (np.float32, np.float64):
        steps = PrivateSteps(
            SiteStream(SECRET, "ab12"), clip=1.0, noise=1.0, rate=0.5, expected=10.0, steps=1
        )
        made.append(steps.gradient(0, 20, np.zeros(5, dtype), lambda rows, places: g[rows]))
    assert made[0].dtype == np.float32
    np.testing.assert_allclose(*made, rtol=0, atol=1e-6)

"""The audit: a sound mechanism is not refuted, broken ones are; its bound has the confidence that it states."""

import jax
import numpy as np
import pytest
from scipy.stats import binom

import fedscaffold as fs
from fedscaffold.privacy import gradients
from fedscaffold.privacy.auditing import guess, lower_bound
from fedscaffold.simulation import canaries, engine, local

PRIVATE = fs.privacy.records(clip=0.5, noise=4.0, delta=1e-5)
ATTACK = {"rate": 0.25, "local_steps": 4, "rounds": 3, "canaries": 1000}


@pytest.fixture
def fresh():
    """Programs are compiled anew: they are cached by their description, which a mutant does not change."""
    engine._compile.cache_clear()
    yield
    engine._compile.cache_clear()


@pytest.mark.slow
def test_a_sound_mechanism_is_not_refuted():
    found = fs.audit_privacy(PRIVATE, **ATTACK)
    assert not found.refuted
    assert found.claimed == fs.privacy.epsilon(noise=4.0, rate=0.25, steps=12, delta=1e-5)


@pytest.mark.slow
def test_with_little_noise_the_audit_finds_much_of_what_is_spent():
    loud = fs.privacy.records(clip=0.5, noise=0.6, delta=1e-5)
    found = fs.audit_privacy(loud, rate=1.0, local_steps=2, rounds=2, canaries=1000)
    assert 0.1 * found.claimed < found.found < found.claimed


@pytest.mark.slow
def test_the_bound_holds_with_its_confidence():
    """Randomised response with a known epsilon is refuted in at most 5 % of trials, and nearly found with many."""
    rng, eps, trials = np.random.default_rng(0), 1.0, 100
    right = 1 / (1 + np.exp(-eps))
    wrong = 0
    for _ in range(trials):
        inside = rng.random(200) < 0.5
        seen = np.where(rng.random(200) < right, inside, ~inside)
        wrong += guess([seen + 0.1 * rng.random(200)], inside, delta=0.0).epsilon > eps
    assert binom.sf(wrong - 1, trials, 0.05) > 1e-4
    many = 100_000
    found = lower_bound(canaries=many, guesses=many, correct=int(right * many), delta=0.0)
    assert 0.97 < found < 1.0
    assert lower_bound(canaries=many, guesses=many, correct=int(right * many), delta=1e-3) < found


def no_noise_of_its_own(monkeypatch):
    """Every client draws the noise of client 0, as with one seed for all."""
    genuine = local._private_gradient

    def same(spec, federation, y, work, k, batch, key):
        first = np.array([0, 7], np.uint32)
        return genuine(spec, federation, y, work._replace(key=first), k, batch, key)

    monkeypatch.setattr(local, "_private_gradient", same)


def no_clip(monkeypatch):
    def whole(rows, real, clip):
        return jax.tree.map(lambda leaf: (leaf * real[:, None]).sum(axis=0), rows)

    monkeypatch.setattr(gradients, "clipped_sum", whole)


def noise_of_a_mean(monkeypatch):
    """Noise of a mean on a sum: less by the size of the batch."""
    genuine = local.private_gradient

    def less(mechanism, gradients, batch, weights, records, noise):
        size = mechanism.expected_batch(records, np.float32)
        return genuine(
            mechanism, gradients, batch, weights, records, [leaf / size for leaf in noise]
        )

    monkeypatch.setattr(local, "private_gradient", less)


def clip_of_ten(monkeypatch):
    """The clip that was meant is not the one that was used."""
    genuine = gradients.clipped_sum
    monkeypatch.setattr(
        gradients, "clipped_sum", lambda rows, real, clip: genuine(rows, real, 10 * clip)
    )


def each_tensor_by_itself(monkeypatch):
    genuine = gradients.clipped_sum

    def alone(rows, real, clip):
        return jax.tree.map(lambda leaf: genuine(leaf, real, clip), rows)

    monkeypatch.setattr(gradients, "clipped_sum", alone)


def clip_at_the_median(monkeypatch):
    """The clip is the median of the batch's own norms."""
    genuine = gradients.clipped_sum

    def median(rows, real, clip):
        squares = sum((leaf.reshape(len(leaf), -1) ** 2).sum(axis=1) for leaf in rows)
        return genuine(rows, real, jax.numpy.median(jax.numpy.sqrt(squares)))

    monkeypatch.setattr(gradients, "clipped_sum", median)


def one_noise_for_all_steps(monkeypatch):
    genuine = local._private_gradient

    def same(spec, federation, y, work, k, batch, key):
        return genuine(spec, federation, y, work, 0 * k, batch, key)

    monkeypatch.setattr(local, "_private_gradient", same)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (each_tensor_by_itself, "moves the sum by 0.7071, not by the clip 0.5"),
        (clip_at_the_median, "moves the sum by"),
        (one_noise_for_all_steps, "noise has 1.4"),
        (no_noise_of_its_own, "noise of two clients or rounds is not independent"),
        (noise_of_a_mean, "noise has 0.25"),
    ],
)
def test_what_attacks_do_not_see_violates_an_identity(breaks, said, monkeypatch, fresh):
    breaks(monkeypatch)
    assert any(said in fault for fault in canaries._faults(PRIVATE, 0))


def test_a_sound_mechanism_violates_none():
    for seed in range(3):
        assert not list(canaries._faults(PRIVATE, seed))


# the attack sees that a clip is missing; a wrong clip and wrong noise violate identities, in the test above the last
@pytest.mark.slow
@pytest.mark.parametrize(
    "breaks",
    [
        no_clip,
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in (clip_of_ten, no_noise_of_its_own, noise_of_a_mean)
        ),
    ],
)
def test_a_broken_mechanism_is_refuted(breaks, monkeypatch, fresh):
    breaks(monkeypatch)
    assert fs.audit_privacy(PRIVATE, **ATTACK).refuted

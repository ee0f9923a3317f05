"""The audit of privacy for whole clients: a sound mechanism is not refuted, each known mistake is."""

import jax
import jax.numpy as jnp
import pytest

import fedscaffold as fs
from fedscaffold.privacy import messages
from fedscaffold.privacy.messages import clip_message, noise_sum
from fedscaffold.simulation import engine, local, rounds
from fedscaffold.simulation.client_canaries import find_client_faults

PRIVATE = fs.privacy.clients(clip=0.5, noise=4.0, delta=1e-4)
ATTACK = {"local_steps": 2, "rounds": 3, "canaries": 300}


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
    assert found.claimed == fs.privacy.epsilon(noise=4.0, rate=1.0, steps=3, delta=1e-4)


@pytest.mark.slow
def test_with_little_noise_the_audit_finds_much_of_what_is_spent():
    found = fs.audit_privacy(fs.privacy.clients(clip=0.5, noise=0.6, delta=1e-4), **ATTACK)
    assert 0.1 * found.claimed < found.found < found.claimed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rate": 0.5}, "rate must be 1, got 0.5"),
        ({"canaries": 10_000}, "give up to 4000, got 10000"),
    ],
)
def test_what_cannot_be_audited_is_refused(more, said):
    with pytest.raises(fs.InputError, match=said):
        fs.audit_privacy(PRIVATE, **ATTACK | more)


def without_clip(mechanism, message, known, sent):
    return message


def clip_of_ten(mechanism, message, known, sent):
    return clip_message(mechanism._replace(clip=10 * mechanism.clip), message, known, sent)


def each_vector_by_itself(mechanism, message, known, sent):
    for name in sent:
        message = clip_message(mechanism, message, known, (name,))
    return message


def clip_to_itself(mechanism, message, known, sent):
    """A clip that follows the data: half of the message's own norm, as a quantile of norms would."""
    changes = [getattr(message, name) - known.get(name, 0) for name in sent]
    norm = jnp.sqrt(sum(jnp.sum(change**2) for change in changes))
    return clip_message(mechanism._replace(clip=norm / 2), message, known, sent)


def small_sensitivity(mechanism, total, share, sent, key):
    """Noise for a sensitivity of 1e-4 where the clip is stated."""
    return noise_sum(mechanism._replace(noise=1e-4 * mechanism.noise), total, share, sent, key)


def noise_of_a_mean(mechanism, total, share, sent, key):
    return noise_sum(mechanism._replace(noise=mechanism.noise * share), total, share, sent, key)


def one_noise_for_all_rounds(mechanism, total, share, sent, key):
    return noise_sum(mechanism, total, share, sent, jax.random.key(0))


def one_noise_for_both_vectors(mechanism, total, share, sent, key):
    for name in sent:
        total = noise_sum(mechanism, total, share, (name,), key)
    return total


def noise_on_the_first_vector(mechanism, total, share, sent, key):
    return noise_sum(mechanism, total, share, sent[:1], key)


def broken(monkeypatch, mutant):
    name = "noise_sum" if "total" in mutant.__code__.co_varnames else "clip_message"
    for room in (rounds, local):
        if hasattr(room, name):
            monkeypatch.setattr(room, name, mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        # the clip is wrong in the next case too, and the size of the noise in the last
        pytest.param(
            clip_of_ten, "moves the sum by 5, not by the clip 0.5", marks=pytest.mark.soak
        ),
        (each_vector_by_itself, "moves the sum by 0.7071, not by the clip 0.5"),
        (clip_to_itself, "a loud client moves the sum by"),
        pytest.param(noise_of_a_mean, "noise has 0.2", marks=pytest.mark.soak),
        (one_noise_for_all_rounds, "noise of two rounds or vectors is not independent"),
        (one_noise_for_both_vectors, "noise of two rounds or vectors is not independent"),
        (noise_on_the_first_vector, "noise has 0 times"),
    ],
)
def test_a_mistake_violates_an_identity(mutant, said, monkeypatch, fresh):
    broken(monkeypatch, mutant)
    assert any(said in fault for fault in find_client_faults(PRIVATE, 0))


@pytest.mark.slow
def test_a_model_that_tells_of_the_sums_themselves_violates_one(monkeypatch, fresh):
    """c is noised, and the model steps by sums that are not."""
    noised, step, seen = rounds._noised, rounds._server_step, {}

    def keep(spec, federation, state, draw, sums):
        seen["sums"] = sums
        return noised(spec, federation, state, draw, sums)

    def leak(spec, old, state, steps, lr, sums):
        new, drift = step(spec, old, state, steps, lr, sums)
        plain, _ = step(spec, old, state, steps, lr, seen["sums"])
        return new._replace(server=new.server._replace(x=plain.x)), drift

    monkeypatch.setattr(rounds, "_noised", keep)
    monkeypatch.setattr(rounds, "_server_step", leak)
    assert any("does not follow from the noised" in one for one in find_client_faults(PRIVATE, 0))


@pytest.mark.slow
def test_a_sound_mechanism_violates_none():
    for seed in range(3):
        assert not list(find_client_faults(PRIVATE, seed))


@pytest.mark.slow
@pytest.mark.parametrize(  # one attack sees either; noise that is too small violates an identity above
    "mutant", [without_clip, pytest.param(small_sensitivity, marks=pytest.mark.soak)]
)
def test_the_attack_alone_refutes_gross_mistakes(mutant, monkeypatch, fresh):
    broken(monkeypatch, mutant)
    found = fs.audit_privacy(PRIVATE, **ATTACK)
    assert found.found > found.claimed


def test_the_mechanism_is_the_one_that_rounds_use():
    """Else no mutant above would be one."""
    assert rounds.noise_sum is messages.noise_sum
    assert local.clip_message is messages.clip_message

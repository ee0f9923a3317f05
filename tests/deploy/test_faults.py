"""The scorecard is full, and it can be lost; secure sums are the plain sums, and single vectors are noise."""

from functools import partial

import numpy as np
import pytest
from deploy_case import SITES, data, gradient, settings

from fedscaffold import robust
from fedscaffold.algorithms import scaffold
from fedscaffold.algorithms.reference import descend
from fedscaffold.algorithms.round import exchange
from fedscaffold.algorithms.scaffold import Message
from fedscaffold.deploy import (
    aggregation,
    audit,
    client,
    errors,
    gate,
    outliers,
    server,
    site_privacy,
)
from fedscaffold.deploy import settings as deploy_settings
from tests import faults

cryptography = pytest.importorskip("cryptography")
import masking  # noqa: E402
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # noqa: E402

MEASURE = aggregation.measure


def accept_all(filter, algorithm, state, updates):
    return outliers.Findings({}, {site: [1.0, 1.0] for site in updates})


def moves_alone(algorithm):
    """A filter that looks at the moves and not at what makes the c_i."""
    return exchange(algorithm)._replace(vectors=("move",))


def unclipped(update, algorithm, told, most, clip):
    return MEASURE(update, algorithm, told, most)


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(faults.SCENARIOS))
def test_every_fault_is_survived(number):
    (score,) = faults.scorecard([number])
    assert score.points == 2, score.said


@pytest.mark.parametrize(
    ("number", "where", "mutant"),
    [
        (5, (gate, "check_fresh"), lambda packet, asked: None),
        (6, (gate, "check_fresh"), lambda packet, asked: None),
        (12, (client, "load_record"), lambda folder, expect, initial: initial),
        (13, (client, "load_record"), lambda folder, expect, initial: initial),
        (16, (gate, "check_finite"), lambda name, array: None),
        (8, (server, "save_state"), lambda folder, kept, settings, schema: kept.generation + 1),
        (22, (aggregation, "measure"), unclipped),
        (23, (aggregation, "measure"), unclipped),
        (27, (site_privacy.PrivateSite, "_refuse_beyond"), lambda self, ledger, charge: None),
        (27, (site_privacy, "refuse_older"), lambda ledger, folder: None),
        (29, (aggregation, "find_outsized"), lambda lengths, usual: {}),
        (29, (aggregation, "measure"), lambda update, *_: update),
        (30, (gate, "check_greeting"), lambda packet, *_: packet.facts["records"]),
        (31, (server, "FREE"), 1000),
        (32, (gate, "abbreviate"), repr),
        (33, (audit, "_check_head"), lambda path, events, expected: None),
        (34, (deploy_settings, "RESERVED"), set()),
        (35, (errors, "public_type_of"), str),
        (37, (server, "find_outliers"), accept_all),
        (38, (robust, "NEAR"), 1e9),
        (39, (outliers, "exchange"), moves_alone),
        (36, (server.Server, "_check_update"), lambda self, site, update, current: update),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_scorecard_can_be_lost(number, where, mutant, monkeypatch):
    monkeypatch.setattr(*where, mutant)
    assert faults.scorecard([number])[0].points == 0


def slope(site, y):
    return gradient({"w": y}, data(site))["w"]


def test_scaffold_on_secure_sums_is_scaffold():
    config, algorithm = settings(), scaffold()
    K, lr = config.local.steps, config.local.lr
    keys = {site: X25519PrivateKey.generate() for site in SITES}
    publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    start = np.array([3.0, -2.0])
    servers = {kind: algorithm.init(start) for kind in ("plain", "secure")}
    memory = {kind: {site: algorithm.memory(start) for site in SITES} for kind in servers}
    for round in range(1, 8):
        heard = sorted(SITES if round % 2 else SITES[:3])
        p = len(heard) / len(SITES)
        for kind, now in servers.items():
            ds = {}
            for site in heard:
                shift = algorithm.shift(now, memory[kind][site])
                walk = descend(algorithm, partial(slope, site), now.x, now.x, shift, lrs=[lr] * K)
                message = algorithm.message(walk, shift)
                ds[site] = message.d
                memory[kind][site] = algorithm.remember(memory[kind][site], shift, message)
            if kind == "plain":
                total = sum(ds[site] / len(SITES) for site in heard)
            else:
                known = {site: publics[site] for site in heard}
                sent = [
                    masking.mask_vector(s, ds[s] / len(SITES), keys[s], known, "run", round)
                    for s in heard
                ]
                total = masking.sum_masked(sent)
            mean = total / p
            servers[kind] = algorithm.update(now, now, Message(mean, K * lr * mean), p)
    np.testing.assert_allclose(servers["secure"].x, servers["plain"].x, atol=1e-9)
    own = sum(one.c_i for one in memory["secure"].values()) / len(SITES)
    assert (
        np.linalg.norm(servers["secure"].c - own) < 40 * 2.0**-masking.BITS
    )  # half a step of 2^-40 for each rounding


def test_a_single_masked_vector_is_noise():
    keys = {site: X25519PrivateKey.generate() for site in SITES}
    publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    sent = masking.mask_vector("ant", np.zeros(20_000), keys["ant"], publics, "run", 1)
    counts = np.bincount(sent.view(np.uint8), minlength=256)
    expected = sent.nbytes / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)  # chi-square of 255 degrees of freedom
    again = masking.mask_vector("ant", np.zeros(20_000), keys["ant"], publics, "run", 2)
    assert (sent == again).mean() < 1e-3  # another round, another stream


def test_numbers_that_do_not_fit_are_refused():
    key = X25519PrivateKey.generate()
    publics = {"ant": key.public_key().public_bytes_raw()}
    for bad in (np.inf, 1e9):
        with pytest.raises(ValueError, match="secure sums take numbers below"):
            masking.mask_vector("ant", np.array([bad]), key, publics, "run", 1)

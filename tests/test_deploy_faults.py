"""The scorecard is full, and it can be lost; secure sums are the plain sums, and single vectors are noise."""

import numpy as np
import pytest
from deploy_case import SITES, data, gradient, settings

from fedscaffold.algorithms import scaffold, travelled
from fedscaffold.deploy import audit, client, errors, faults, gate, server
from fedscaffold.deploy import settings as deploy_settings

cryptography = pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # noqa: E402

from fedscaffold.deploy import masking  # noqa: E402


@pytest.mark.parametrize("number", sorted(faults.SCENARIOS))
def test_every_fault_is_survived(number):
    (score,) = faults.scorecard([number])
    assert score.points == 2, score.said


@pytest.mark.parametrize(
    ("number", "where", "mutant"),
    [
        (5, (gate, "fresh"), lambda packet, asked: None),
        (6, (gate, "fresh"), lambda packet, asked: None),
        (12, (client, "held"), lambda folder, expect, like: np.zeros_like(like)),
        (13, (client, "held"), lambda folder, expect, like: np.zeros_like(like)),
        (16, (gate, "finite"), lambda name, array: None),
        (8, (server, "keep"), lambda folder, kept, settings, schema: kept.generation + 1),
        (22, (gate, "clipped"), lambda update, c, travel, cap: update),
        (23, (gate, "clipped"), lambda update, c, travel, cap: update),
        (29, (gate, "outsized"), lambda lengths, usual, dtype: {}),
        (29, (gate, "measured"), lambda update, c, travel: update),
        (30, (server.Server, "_registered"), lambda self, site, packet: packet.facts["records"]),
        (31, (server, "FREE"), 1000),
        (32, (gate, "shown"), repr),
        (33, (audit, "_at"), lambda path, events, expected: None),
        (34, (deploy_settings, "RESERVED"), set()),
        (35, (errors, "type_of"), str),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_scorecard_can_be_lost(number, where, mutant, monkeypatch):
    monkeypatch.setattr(*where, mutant)
    assert faults.scorecard([number])[0].points == 0


def test_scaffold_on_secure_sums_is_scaffold():
    config, algorithm = settings(), scaffold()
    K, lr = config.local.steps, config.local.lr
    keys = {site: X25519PrivateKey.generate() for site in SITES}
    publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    x = {kind: np.array([3.0, -2.0]) for kind in ("plain", "secure")}
    c = {kind: np.zeros(2) for kind in x}
    c_i = {kind: {site: np.zeros(2) for site in SITES} for kind in x}
    for round in range(1, 8):
        heard = sorted(SITES if round % 2 else SITES[:3])
        p = len(heard) / len(SITES)
        for kind in x:
            ds = {}
            for site in heard:
                y, shift = x[kind], algorithm.shift(c[kind], c_i[kind][site])
                for _ in range(K):
                    y = y - lr * algorithm.direction(gradient({"w": y}, data(site))["w"], y, x[kind], shift)
                ds[site] = travelled(x[kind], y, K, lr)
                c_i[kind][site] = algorithm.remember(c[kind], c_i[kind][site], ds[site])
            if kind == "plain":
                total = sum(ds[site] / len(SITES) for site in heard)
            else:
                known = {site: publics[site] for site in heard}
                sent = [masking.masked(s, ds[s] / len(SITES), keys[s], known, "run", round) for s in heard]
                total = masking.unmasked(sent)
            mean = total / p
            x[kind], c[kind] = algorithm.server(x[kind], c[kind], K * lr * mean, mean, p)
    np.testing.assert_allclose(x["secure"], x["plain"], atol=1e-9)
    own = sum(c_i["secure"].values()) / len(SITES)
    assert np.linalg.norm(c["secure"] - own) < 40 * 2.0**-masking.BITS  # half a step of 2^-40 for each rounding


def test_a_single_masked_vector_is_noise():
    keys = {site: X25519PrivateKey.generate() for site in SITES}
    publics = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    sent = masking.masked("ant", np.zeros(20_000), keys["ant"], publics, "run", 1)
    counts = np.bincount(sent.view(np.uint8), minlength=256)
    expected = sent.nbytes / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)  # chi-square of 255 degrees of freedom
    again = masking.masked("ant", np.zeros(20_000), keys["ant"], publics, "run", 2)
    assert (sent == again).mean() < 1e-3  # another round, another stream


def test_numbers_that_do_not_fit_are_refused():
    key = X25519PrivateKey.generate()
    publics = {"ant": key.public_key().public_bytes_raw()}
    for bad in (np.inf, 1e9):
        with pytest.raises(ValueError, match="secure sums take numbers below"):
            masking.masked("ant", np.array([bad]), key, publics, "run", 1)

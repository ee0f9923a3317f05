"""The protocol of a secure sum, without network or disk: dropouts, a server that lies, sites that send garbage."""

import math
from functools import cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedscaffold.secure import site_session as at_site
from fedscaffold.secure.site_session import Rules, Session, open_session
from fedscaffold.secure.sum_session import Garbage, SumSession
from fedscaffold.secure.transcript import ADVERT, Breach

SITES = ("ant", "bee", "cow", "dog", "elk")
SIZE = 7


@cache
def identities():
    return {site: ec.generate_private_key(ec.SECP384R1()) for site in (*SITES, "fox")}


@cache
def rules(minimum=3):
    return Rules({site: identities()[site].public_key() for site in SITES}, minimum)


def vector_of(site):
    """Any words mod 2^64, the largest among them."""
    rng = np.random.default_rng(list(site.encode()))
    return rng.integers(0, 2**64, SIZE, dtype=np.uint64)


class Sum:
    """An attempt, run by an honest server as far as a test lets it; every record goes through JSON between exchanges."""

    def __init__(self, context="one", threshold=3, sites=SITES):
        self.server = SumSession(context, threshold, rules().identities)
        self.records = {}
        for site in sites:
            self.keep(site, open_session(context, site))

    def keep(self, site, session):
        self.records[site] = session.to_json()

    def record(self, site):
        return Session.from_json(self.records[site])

    def keys(self, sites=SITES):
        for site in sites:
            advert = at_site.advertise(self.record(site), identities()[site])
            self.server.add_advert(site, advert)

    @property
    def roster(self):
        return {site: advert.to_bytes() for site, advert in self.server.adverts.items()}

    def deal(self, site, roster=None, threshold=3, rule=None):
        session, sealed = at_site.deal(
            self.record(site), roster or self.roster, threshold, rule or rules()
        )
        self.keep(site, session)
        return sealed

    def shares(self, sites=SITES):
        for site in sites:
            self.server.add_shares(site, self.deal(site))

    def received(self, site):
        return {other: held[site] for other, held in self.server.sealed.items() if other != site}

    def mask(self, site, received=None, vector=None):
        session, masked = at_site.mask(
            self.record(site),
            self.received(site) if received is None else received,
            vector_of(site) if vector is None else vector,
        )
        self.keep(site, session)
        return masked

    def masked(self, sites=SITES):
        for site in sites:
            self.server.add_masked(site, self.mask(site))

    def confirm(self, site, survivors=None):
        session, signature = at_site.confirm(
            self.record(site), survivors or self.server.masked, identities()[site]
        )
        self.keep(site, session)
        return signature

    def survivors(self, sites=None):
        for site in self.server.masked if sites is None else sites:
            self.server.add_signature(site, self.confirm(site))

    def reveal(self, site, signatures=None):
        return at_site.reveal(self.record(site), signatures or self.server.signatures, rules())

    def revealed(self, sites=None):
        for site in self.server.signatures if sites is None else sites:
            self.server.add_revealed(site, self.reveal(site))


def sum_of(sites):
    return sum((vector_of(site) for site in sites), np.zeros(SIZE, np.uint64))


@pytest.mark.parametrize(
    ("keys", "shares", "masked", "signed", "revealed"),
    [
        (SITES, SITES, SITES, SITES, SITES),
        (SITES[:4], SITES[:4], SITES[:4], SITES[:4], SITES[:4]),
        (SITES, SITES[1:], SITES[1:], SITES[1:], SITES[1:]),
        (SITES, SITES, SITES[:3], SITES[:3], SITES[:3]),  # two die while they train
        (SITES, SITES, SITES, SITES[2:], SITES[2:]),  # two die between masking and unmasking
        (SITES, SITES, SITES, SITES, SITES[1:4]),
        (SITES, SITES[:4], SITES[:4], SITES[:3], SITES[:3]),
    ],
)
def test_the_sum_is_exact_whoever_drops_out_where(keys, shares, masked, signed, revealed):
    one = Sum()
    one.keys(keys)
    one.shares(shares)
    one.masked(masked)
    one.survivors(signed)
    one.revealed(revealed)
    total, wrong = one.server.unmask()
    np.testing.assert_array_equal(total, sum_of(masked))
    assert wrong == ()


def test_below_the_threshold_nothing_can_be_unmasked():
    one = Sum()
    one.keys()
    one.shares()
    one.masked()
    one.survivors()
    one.revealed(SITES[:2])
    with pytest.raises(Garbage):
        one.server.unmask()


def test_masked_vectors_look_uniform():
    """Of a constant vector: chi-square of the bytes over 256 cells, false alarm in one of 10^6 runs.

    With 255 degrees of freedom P(chi2 > 255 + z sqrt(510) + ...) by Wilson and Hilferty, z = 4.75 for 1e-6.
    """
    size = 1 << 15
    one = Sum()
    one.keys()
    one.shares()
    seen = {site: one.mask(site, vector=np.full(size, 5, np.uint64)) for site in SITES}
    limit = 255 * (1 - 2 / (9 * 255) + 4.75 * math.sqrt(2 / (9 * 255))) ** 3
    plain = np.bincount(np.full(size, 5, np.uint64).view(np.uint8), minlength=256)
    for masked in [*seen.values(), seen["ant"] + seen["bee"]]:
        counts = np.bincount(masked.view(np.uint8), minlength=256)
        assert ((counts - size / 32) ** 2 / (size / 32)).sum() < limit
    assert ((plain - size / 32) ** 2 / (size / 32)).sum() > 100 * limit  # the test can fail


# A server that lies


def test_another_list_of_survivors_is_not_signed_whatever_is_asked_first():
    """So of every site one kind of share is revealed: asking for both needs two lists."""
    one = Sum()
    one.keys()
    one.shares()
    one.masked()
    one.survivors()
    for lie in (SITES[:4], SITES[1:], ("ant", "cow", "elk")):
        with pytest.raises(Breach, match="another list"):
            one.confirm("ant", lie)
    shares = one.reveal("ant")
    assert shares == one.reveal("ant")
    assert all(len(share) == 66 for share in shares.values())


def test_two_lists_of_survivors_give_no_site_enough_signatures():
    """Some sign that elk survived, some that it dropped out: neither list has three signatures."""
    one = Sum()
    one.keys()
    one.shares()
    one.masked()
    signatures = {site: one.confirm(site) for site in ("ant", "bee")}
    signatures |= {site: one.confirm(site, SITES[:4]) for site in ("cow", "dog")}
    for site in SITES[:4]:
        with pytest.raises(Breach, match="has not signed the list"):
            one.reveal(site, signatures)
        pairs = ("ant", "bee") if site in ("ant", "bee") else ("cow", "dog")
        mine = {other: signatures[other] for other in pairs}
        with pytest.raises(Breach, match="2 signatures where 3"):
            one.reveal(site, mine)


def test_one_vector_is_masked_in_an_attempt():
    one = Sum()
    one.keys()
    one.shares()
    one.mask("ant")
    with pytest.raises(Breach, match="masked already"):
        one.mask("ant", vector=np.zeros(SIZE, np.uint64))
    with pytest.raises(Breach, match="dealt already"):
        one.deal("ant")


def test_keys_of_another_attempt_are_refused():
    old, one = Sum("old"), Sum("new")
    old.keys()
    one.keys()
    with pytest.raises(Breach, match=r"keys of 'bee' are not signed .* for this attempt"):
        one.deal("ant", {**one.roster, "bee": old.roster["bee"]})


def test_a_replaced_key_or_an_invented_site_is_refused():
    one, evil = Sum(), Sum(sites=("bee", "fox"))
    one.keys()
    forged = at_site.advertise(evil.record("bee"), identities()["fox"])
    with pytest.raises(Breach, match="keys of 'bee' are not signed"):
        one.deal("ant", {**one.roster, "bee": forged})
    with pytest.raises(Breach, match="'fox' is not on the list"):
        one.deal("ant", {**one.roster, "fox": forged}, threshold=4)
    others = {site: data for site, data in one.roster.items() if site != "ant"}
    with pytest.raises(Breach, match="lacks the keys that were drawn here"):
        one.deal("ant", others)
    with pytest.raises(Breach, match="keys of 'bee' are not signed"):  # those of another site
        one.deal("ant", {**one.roster, "bee": one.roster["cow"]})


@pytest.mark.parametrize(
    ("sites", "threshold", "said"),
    [
        (("ant",), 1, "a sum of 1 sites; this one takes part from 3 on"),
        (("ant", "bee"), 2, "a sum of 2 sites"),
        (SITES, 2, "more than half"),
        (SITES, 6, "more than half"),
    ],
)
def test_a_sum_of_few_or_a_low_threshold_is_refused_by_the_sites_own_rules(sites, threshold, said):
    one = Sum()
    one.keys(sites)
    with pytest.raises(Breach, match=said):
        one.deal("ant", one.roster, threshold)


def test_fewer_parties_or_survivors_than_the_threshold_are_refused():
    one = Sum()
    one.keys()
    one.shares()
    few = {"bee": one.received("ant")["bee"]}
    with pytest.raises(Breach, match="shares of 2 sites where 3"):
        one.mask("ant", few)
    with pytest.raises(Breach, match="no vector"):
        one.confirm("ant", SITES)
    one.masked()
    for survivors, said in (
        (("ant", "bee"), "2 survivors where 3"),
        (("ant", "ant", "ant", "bee"), "4 survivors"),
        (("bee", "cow", "dog"), "without this site"),
        ((*SITES, "fox"), "survivors that dealt no shares"),
    ):
        with pytest.raises(Breach, match=said):
            one.confirm("ant", survivors)
    with pytest.raises(Breach, match="no list"):
        one.reveal("ant", {"bee": b""})


def test_shares_are_dealt_once_and_not_before_the_keys_are_known():
    one = Sum()
    with pytest.raises(Breach, match="no shares dealt"):
        one.mask("ant", {"bee": b""})


# Sites that send garbage


def test_the_sender_of_bad_keys_signatures_or_shares_is_named():
    one = Sum()
    with pytest.raises(Breach, match="'ant'"):
        one.server.add_advert("ant", bytes(ADVERT))
    with pytest.raises(Breach, match="'ant'"):
        one.server.add_advert("ant", b"")
    one.keys()
    one.shares()
    one.masked()
    with pytest.raises(Breach, match="'bee'"):
        one.server.add_signature("bee", bytes(96))
    one.survivors()
    one.revealed(SITES[:4])
    one.server.add_revealed("elk", {site: bytes(66) for site in SITES})
    total, wrong = one.server.unmask()
    np.testing.assert_array_equal(total, sum_of(SITES))
    assert wrong == ("elk",)


@pytest.mark.parametrize("garbage", [lambda text: bytes(len(text)), lambda text: b""])
def test_who_deals_garbage_is_named_and_nothing_is_unmasked(garbage):
    one = Sum()
    one.keys()
    one.shares()
    one.server.sealed["cow"] = {to: garbage(text) for to, text in one.server.sealed["cow"].items()}
    one.masked()
    one.survivors()
    one.revealed()
    with pytest.raises(Garbage) as found:
        one.server.unmask()
    assert found.value.site == "cow"


def test_a_key_of_small_order_is_refused():
    """X25519 with the point 0 gives zeros to everybody: no secret."""
    one, evil = Sum(), Sum(sites=("bee",))
    one.keys()
    from fedscaffold.secure.signatures import sign
    from fedscaffold.secure.transcript import advert_text

    parts = (bytes(32), b"\x01" + bytes(31), bytes(32))
    text = advert_text(evil.record("bee").context, "bee", *parts)
    advert = b"".join(parts) + sign(identities()["bee"], text)
    with pytest.raises(Breach, match="agreed on"):
        one.deal("ant", {**one.roster, "bee": advert})

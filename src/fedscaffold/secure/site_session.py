"""A site's part in one secure sum, as functions on the record that it keeps between exchanges.

The record must be stored durably before the answer that a function returns beside it is sent: it
decides what later requests may have. A site masks one vector and signs one list of survivors in an
attempt, whatever it is asked afterwards, and what it reveals follows from that list: of every other
site one kind of share. Without its record it reveals nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray

from fedscaffold.secure.masking import KEY, TAG, add_mask, agree, public_of, seal, unseal
from fedscaffold.secure.secret_sharing import SHARE, split
from fedscaffold.secure.signatures import sign, verify
from fedscaffold.secure.transcript import (
    Advert,
    Breach,
    advert_text,
    commit_to,
    pair_mask,
    read_advert,
    seed_mask,
    survivors_text,
)

__all__ = [
    "SEALED",
    "Rules",
    "Session",
    "advertise",
    "confirm",
    "deal",
    "mask",
    "open_session",
    "reveal",
]

SEALED = 2 * SHARE + TAG
"""Bytes of the sealed shares of a site for another."""
Identity = ec.EllipticCurvePrivateKey


class Rules(NamedTuple):
    """What a site insists on, by its own word."""

    identities: Mapping[str, ec.EllipticCurvePublicKey]
    """The public keys of all sites that it knows."""
    minimum: int
    """Smallest number of sites whose sum it contributes to."""


class Session(NamedTuple):
    """What a site keeps between the exchanges of one attempt; all of it is secret."""

    context: str
    site: str
    cipher: bytes
    mask: bytes
    seed: bytes
    threshold: int = 0
    roster: dict[str, bytes] = {}  # noqa: RUF012 (never changed)
    """Adverts by site, once it has dealt its shares."""
    own: bytes = b""
    """Its shares for itself."""
    received: dict[str, bytes] = {}  # noqa: RUF012 (never changed)
    """Sealed shares by site that dealt them, once it has masked its vector."""
    survivors: tuple[str, ...] = ()
    """The list that it has signed."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {name: _to_text(value) for name, value in self._asdict().items()}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Session:
        """Invert `to_json`."""
        given = dict(table)
        for name in ("cipher", "mask", "seed", "own"):
            given[name] = bytes.fromhex(given[name])
        for name in ("roster", "received"):
            given[name] = {site: bytes.fromhex(text) for site, text in given[name].items()}
        return cls(**{**given, "survivors": tuple(given["survivors"])})


def open_session(context: str, site: str) -> Session:
    """Draw the keys and the seed of a new attempt."""
    cipher, mask, seed = (secrets.token_bytes(KEY) for _ in range(3))
    return Session(context, site, cipher, mask, seed)


def advertise(session: Session, identity: Identity) -> bytes:
    """Return the site's advert, signed by its identity."""
    parts = (
        public_of(session.cipher),
        public_of(session.mask),
        commit_to(session.context, session.site, session.seed),
    )
    text = advert_text(session.context, session.site, *parts)
    return Advert(*parts, sign(identity, text)).to_bytes()


def deal(
    session: Session, roster: Mapping[str, bytes], threshold: int, rules: Rules
) -> tuple[Session, dict[str, bytes]]:
    """Deal shares of the mask's key and the seed.

    Args:
        session: The record, of a site that has not dealt yet.
        roster: Adverts by site, this one's among them.
        threshold: Number of sites that can recover what another one has dealt.
        rules: The site's own.

    Returns:
        The record, and the sealed shares by site.

    Raises:
        Breach: The sites or their keys are not what the site insists on.
    """
    if session.roster:
        raise Breach("shares of this attempt were dealt already")
    _check_threshold(threshold, len(roster), rules.minimum)
    adverts = _read_roster(session, roster, rules)
    parts = {
        name: split(secret, threshold, len(roster))
        for name, secret in (("mask", session.mask), ("seed", session.seed))
    }
    pairs = [one + other for one, other in zip(parts["mask"], parts["seed"], strict=True)]
    dealt = dict(zip(sorted(roster), pairs, strict=True))
    try:
        sealed = {
            site: seal(_share_key(session, session.site, site, advert), dealt[site])
            for site, advert in adverts.items()
            if site != session.site
        }
        for site in sealed:  # its other key must be sound too
            pair_mask(session.context, session.site, session.mask, site, adverts[site].mask)
    except ValueError:
        raise Breach("a key on the list is none that secrets can be agreed on with") from None
    new = session._replace(threshold=threshold, roster=dict(roster), own=dealt[session.site])
    return new, sealed


def mask(
    session: Session, received: Mapping[str, bytes], vector: NDArray[np.uint64]
) -> tuple[Session, NDArray[np.uint64]]:
    """Mask the site's vector.

    Args:
        session: The record, of a site that has dealt its shares and not masked a vector yet.
        received: Sealed shares for this site by site that dealt them, but for its own.
        vector: The vector, encoded (`Ring.encode`).

    Raises:
        Breach: A vector was masked already, or the sites are too few, or not those of the keys.
    """
    if not session.roster or session.received:
        raise Breach(
            "a vector of this attempt was masked already" if session.received else "no shares dealt"
        )
    parties = {*received, session.site}
    if not parties <= set(session.roster) or session.site in received:
        raise Breach("shares of sites whose keys were not on the list")
    if len(parties) < session.threshold:
        raise Breach(f"shares of {len(parties)} sites where {session.threshold} are needed")
    context, site, masked = session.context, session.site, vector.copy()
    add_mask(masked, seed_mask(context, site, session.seed), 1)
    for other in sorted(received):
        public = _advert(session, other).mask
        add_mask(masked, *pair_mask(context, site, session.mask, other, public))
    return session._replace(received=dict(received)), masked


def confirm(
    session: Session, survivors: Collection[str], identity: Identity
) -> tuple[Session, bytes]:
    """Sign the list of the sites whose vectors arrived; one list in an attempt.

    Raises:
        Breach: Another list was signed, or the list is not of this attempt's sites, or too short.
    """
    named = tuple(sorted(survivors))
    if not session.received:
        raise Breach("no vector of this attempt was masked here")
    if session.survivors and session.survivors != named:
        raise Breach("another list of survivors was signed in this attempt")
    if session.site not in named or not set(named) <= {*session.received, session.site}:
        raise Breach("survivors that dealt no shares, or without this site")
    if len(set(named)) < len(named) or len(named) < session.threshold:
        raise Breach(f"{len(named)} survivors where {session.threshold} are needed")
    new = session._replace(survivors=named)
    return new, sign(identity, _survivors_text(new))


def reveal(session: Session, signatures: Mapping[str, bytes], rules: Rules) -> dict[str, bytes]:
    """Reveal the site's shares: of the survivors' seeds, and of the mask's keys of the others.

    Args:
        session: The record, of a site that has signed a list of survivors.
        signatures: Signatures under the same list by site.
        rules: The site's own.

    Returns:
        By site that dealt shares, one share; sites whose shares could not be unsealed are left out.

    Raises:
        Breach: Fewer than `threshold` survivors have signed the list that this site has signed.
    """
    if not session.survivors:
        raise Breach("no list of survivors was signed here")
    text = _survivors_text(session)
    for site, signature in signatures.items():
        known = site in session.survivors and site in rules.identities
        if not known or not verify(rules.identities[site], text, signature):
            raise Breach(f"{site!r} has not signed the list of survivors that was signed here")
    if len(signatures) < session.threshold:
        raise Breach(f"{len(signatures)} signatures where {session.threshold} are needed")
    pairs = {session.site: session.own}
    for site, sealed in session.received.items():
        key = _share_key(session, site, session.site, _advert(session, site))
        try:
            pairs[site] = unseal(key, sealed)
        except InvalidTag:
            continue
    return {
        site: pair[SHARE:] if site in session.survivors else pair[:SHARE]
        for site, pair in pairs.items()
        if len(pair) == 2 * SHARE
    }


def _check_threshold(threshold: int, number: int, minimum: int) -> None:
    if not number / 2 < threshold <= number:
        raise Breach(f"a threshold of {threshold} of {number} sites; more than half are needed")
    if threshold < minimum:
        raise Breach(f"a sum of {threshold} sites; this one takes part from {minimum} on")


def _read_roster(session: Session, roster: Mapping[str, bytes], rules: Rules) -> dict[str, Advert]:
    """Check the adverts of an attempt, and return them."""
    adverts = {
        site: read_advert(session.context, site, data, rules.identities)
        for site, data in sorted(roster.items())
    }
    mine = adverts.get(session.site)
    if mine is None or (mine.cipher, mine.mask) != (
        public_of(session.cipher),
        public_of(session.mask),
    ):
        raise Breach("the list of keys lacks the keys that were drawn here")
    keys = [key for advert in adverts.values() for key in (advert.cipher, advert.mask)]
    if len(set(keys)) < len(keys):
        raise Breach("a key is on the list twice")
    return adverts


def _advert(session: Session, site: str) -> Advert:
    data = session.roster[site]  # checked when it was dealt
    return Advert(data[:KEY], data[KEY : 2 * KEY], data[2 * KEY : 3 * KEY], data[3 * KEY :])


def _share_key(session: Session, sender: str, receiver: str, other: Advert) -> bytes:
    """Return the key of the one text that `sender` seals for `receiver`."""
    return agree(session.cipher, other.cipher, "shares", session.context, sender, receiver)


def _survivors_text(session: Session) -> bytes:
    adverts = {site: _advert(session, site) for site in session.roster}
    return survivors_text(session.context, session.threshold, adverts, session.survivors)


def _to_text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {site: data.hex() for site, data in value.items()}
    return list(value) if isinstance(value, tuple) else value

"""The server's part in one secure sum: who takes part, and the sum once enough is revealed.

The server is trusted with the sum alone. What it checks here names sites that send garbage; the
sites rely on none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray

from fedscaffold.secure.masking import add_mask, public_of
from fedscaffold.secure.secret_sharing import Unrecoverable, recover
from fedscaffold.secure.signatures import verify
from fedscaffold.secure.transcript import (
    Advert,
    Breach,
    commit_to,
    pair_mask,
    read_advert,
    seed_mask,
    survivors_text,
)

__all__ = ["Garbage", "SumSession", "Unmasked"]


class Garbage(ValueError):
    """The secret of a site cannot be recovered from the shares that it dealt.

    Attributes:
        site: The site.
    """

    def __init__(self, site: str) -> None:
        super().__init__(f"the shares that {site} dealt do not give what it has committed to")
        self.site = site


class Unmasked(NamedTuple):
    """The result of a sum."""

    total: NDArray[np.uint64]
    wrong: tuple[str, ...]
    """Sites that revealed wrong shares, which were not needed."""


class SumSession:
    """The server's record of one attempt; sites enter by `add_...` in the order of the exchanges.

    Args:
        context: Names the attempt.
        threshold: Number of sites that must stay to the end.
        identities: Public keys of the sites.
    """

    def __init__(
        self, context: str, threshold: int, identities: Mapping[str, ec.EllipticCurvePublicKey]
    ) -> None:
        self.context, self.threshold, self.identities = context, threshold, identities
        self.adverts: dict[str, Advert] = {}
        self.sealed: dict[str, dict[str, bytes]] = {}
        """By site that dealt shares: sealed shares by receiver."""
        self.total: NDArray[np.uint64] | None = None
        self.masked: list[str] = []
        """Sites whose masked vectors arrived: the survivors."""
        self.signatures: dict[str, bytes] = {}
        self.revealed: dict[str, dict[str, bytes]] = {}
        """By site that revealed: one share by site that dealt it."""

    def add_advert(self, site: str, data: bytes) -> None:
        """Add a site's advert; raise `Breach` if its identity has not signed it."""
        self.adverts[site] = read_advert(self.context, site, data, self.identities)

    def add_shares(self, site: str, sealed: Mapping[str, bytes]) -> None:
        """Add the sealed shares that a site has dealt."""
        self.sealed[site] = dict(sealed)

    def add_masked(self, site: str, vector: NDArray[np.uint64]) -> None:
        """Add a masked vector to the sum; the vector itself is not kept."""
        self.total = np.zeros_like(vector) if self.total is None else self.total
        self.total += vector
        self.masked.append(site)

    def add_signature(self, site: str, signature: bytes) -> None:
        """Add a signature under the list of survivors; raise `Breach` if it is none."""
        text = survivors_text(self.context, self.threshold, self.adverts, self.masked)
        if not verify(self.identities[site], text, signature):
            raise Breach(f"{site!r} has not signed the list of survivors")
        self.signatures[site] = signature

    def add_revealed(self, site: str, shares: Mapping[str, bytes]) -> None:
        """Add the shares that a site has revealed."""
        self.revealed[site] = dict(shares)

    def unmask(self) -> Unmasked:
        """Remove all masks from the sum of the masked vectors.

        Raises:
            Garbage: The shares of a site do not give its secret.
        """
        assert self.total is not None
        total, wrong = self.total.copy(), set[str]()
        for site in sorted(self.masked):
            seed = self._recover(site, partial(commit_to, self.context, site), wrong)
            add_mask(total, seed_mask(self.context, site, seed), -1)
        for gone in sorted(set(self.sealed) - set(self.masked)):
            private = self._recover(gone, public_of, wrong)
            for site in self.masked:
                # the mask that `gone` would have added, which cancels that of `site`
                other = self.adverts[site].mask
                add_mask(total, *pair_mask(self.context, gone, private, site, other))
        return Unmasked(total, tuple(sorted(wrong)))

    def _recover(self, site: str, publish: Callable[[bytes], bytes], wrong: set[str]) -> bytes:
        """Recover the secret of a site; add those who revealed wrong shares of it to `wrong`.

        Args:
            site: The site.
            publish: Gives what the site has advertised of the secret.
            wrong: Sites that revealed wrong shares.
        """
        public = {self.adverts[site].commitment, self.adverts[site].mask}
        number = {name: x for x, name in enumerate(sorted(self.adverts), 1)}
        shares = {
            number[holder]: held[site] for holder, held in self.revealed.items() if site in held
        }
        try:
            secret, bad = recover(shares, self.threshold, lambda one: publish(one) in public)
        except Unrecoverable:
            raise Garbage(site) from None
        wrong |= {name for name, x in number.items() if x in bad}
        return secret

"""The ledger of a deployed site: a line for each request that its records were used for.

    {"kind": "ledger", "format": 1, "site": "north"}
    {"kind": "charge", "run": ..., "round": 3, "inputs": ..., "secret": ..., "noise": 1.1,
     "rate": 0.1, "steps": 5}

A request is charged before it is trained on. `inputs` is a digest of all that training depends on
beside the records, so that a request with another model or shift is charged anew; `secret` says by
which secret its noise is drawn. All charges count, of whichever run: an epsilon is that of all that
has left the site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold.privacy.accounting import Charge, compose
from fedscaffold.privacy.budget import round_steps_up
from fedscaffold.privacy.chain import Chain

__all__ = ["SiteCharge", "SiteLedger"]

FORMAT = 1


class SiteCharge(NamedTuple):
    """One request that was charged."""

    run: str
    round: int
    inputs: str
    secret: str
    noise: float
    rate: float
    steps: int


class SiteLedger(Chain):
    """The ledger of a site.

    Args:
        path: The file; the first charge makes it, for its owner only.
        site: The site's name: a ledger of another is refused.

    Raises:
        StateError: The file is damaged, or of another site.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "privacy.ledger")
    >>> ledger = SiteLedger(path, "north")
    >>> charge = SiteCharge("run", 1, "ab12", "cd34", noise=1.1, rate=0.1, steps=5)
    >>> key = ledger.charge(charge)
    >>> SiteLedger(path, "north").last("run") == (charge, key)
    True
    >>> 0 < ledger.epsilon(1e-5) < ledger.epsilon(1e-5, charge)
    True
    """

    def __init__(self, path: Path, site: str) -> None:
        self.site = site
        self.charges: list[tuple[SiteCharge, str]] = []
        super().__init__(path, private=True)

    def charge(self, charge: SiteCharge) -> str:
        """Enter a charge, durably; return the hash of its line, which no other line has."""
        if not self._hashes:
            self._append({"kind": "ledger", "format": FORMAT, "site": self.site})
        return self._append({"kind": "charge", **charge._asdict()})

    def last(self, run: str) -> tuple[SiteCharge, str] | None:
        """Return the last charge of a run and its hash; None without one."""
        return next((pair for pair in reversed(self.charges) if pair[0].run == run), None)

    def count(self, run: str) -> int:
        """Return the number of charges of a run."""
        return sum(charge.run == run for charge, _ in self.charges)

    def epsilon(self, delta: float, next_one: SiteCharge | None = None) -> float:
        """Return the epsilon of all charges, and of another one that would follow."""
        steps: dict[tuple[float, float], int] = {}
        more = [] if next_one is None else [next_one]
        for charge in [*(charge for charge, _ in self.charges), *more]:
            kind = charge.noise, charge.rate
            steps[kind] = steps.get(kind, 0) + charge.steps
        return compose((Charge(*kind, round_steps_up(n)) for kind, n in steps.items()), delta)

    def _enter(self, fact: dict[str, Any], digest: str) -> None:
        if (fact["kind"] == "ledger") != (not self._hashes):
            raise ValueError
        if fact["kind"] == "ledger":
            if fact["format"] != FORMAT:
                self._fail(f"it has format {fact['format']}, and this version reads {FORMAT}")
            if fact["site"] != self.site:
                self._fail("it is of another site; put this site's own back")
            return
        charge = SiteCharge(**{name: fact[name] for name in SiteCharge._fields})
        if fact["kind"] != "charge" or not (charge.noise > 0 < charge.rate and charge.steps > 0):
            raise ValueError
        self.charges.append((charge, digest))

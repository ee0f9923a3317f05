"""Differential privacy at a site: its own rules, its secret, and the ledger that it refuses by.

Below the site's folder, in privacy/SITE:

    privacy.toml      the rules that the site has agreed to (`site_rules`)
    privacy.ledger    what its records have been charged with (`privacy.site_ledger`)
    secret            what its noise is drawn from (`privacy.site_secret`)

Nothing of this follows the server. Settings that ask for other work than the rules, and another app
(before it is imported), are refused, and so is every request that would exceed the site's budget. A
request is charged, durably, before it is trained on, and its noise belongs to that charge: the same
request again is answered with the bytes of the first reply and costs nothing; any other request, be
it of the same round, is charged and draws noise of its own.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import Blob, Fact, Packet
from fedscaffold.deploy.settings import Settings
from fedscaffold.deploy.site_rules import (
    RULES,
    Rules,
    read_rules,
    refuse_other_rules,
    rules_of,
    write_rules,
)
from fedscaffold.privacy.accounting import describe_accountant, round_up
from fedscaffold.privacy.site_ledger import SiteCharge, SiteLedger
from fedscaffold.privacy.site_secret import SiteStream, load_secret, name_secret
from fedscaffold.privacy.site_steps import PrivateSteps
from fedscaffold.state import commit, latest, locked
from fedscaffold.state.files import make_folder

__all__ = ["LEDGER", "Begun", "PrivateSite", "open_private", "place_of", "refuse_older"]

LEDGER, SECRET = "privacy.ledger", "secret"
# in a run's folder: the last reply, and apart from the ledger, the end that it must have
REPLY, WITNESS = "reply", "ledger"


class Begun(NamedTuple):
    """A request that was charged."""

    steps: PrivateSteps
    charge: str
    """Hash of its charge."""
    again: bool
    """Whether the same request had been charged before."""
    facts: dict[str, Fact]
    """What the site tells of its budget."""


def place_of(folder: Path, site: str) -> Path:
    """Return the folder of a site's rules, ledger and secret."""
    return folder / "privacy" / site


def open_private(settings: Settings, site: str, folder: Path) -> PrivateSite | None:
    """Return the privacy of a site; None where neither it nor the settings ask for any.

    Raises:
        Refused: The settings are not those that the site has agreed to, or no accountant is there.
    """
    place, asked = place_of(folder, site), rules_of(settings, site)
    own = read_rules(place / RULES) if os.path.lexists(place / RULES) else None
    if own is None and os.path.lexists(place / LEDGER):
        raise Refused("privacy", f"{RULES} of {site} is gone, and its ledger is there; put it back")
    if asked is None:
        if own is not None:
            raise Refused(
                "privacy", f"{site} trains privately only, and there is no [privacy] here"
            )
        return None
    try:
        describe_accountant()
    except InputError as error:
        raise Refused("privacy", str(error)) from None
    rules, expected = asked
    if own is None:
        write_rules(place / RULES, rules)
        own = rules
    refuse_other_rules(own, rules, site)
    return PrivateSite(own, expected, site, folder)


class PrivateSite:
    """A site that trains privately, by its own rules.

    Args:
        rules: The site's own.
        expected: The expected batch.
        site: The site's name.
        folder: Folder of the site's state.
    """

    def __init__(self, rules: Rules, expected: float, site: str, folder: Path) -> None:
        self.rules, self.expected, self.site, self.folder = rules, expected, site, folder
        self.place = place_of(folder, site)

    def begin(self, run: str, round: int, inputs: str, told: int) -> Begun:
        """Charge a request, or find the charge that it has had.

        Args:
            run: The run.
            round: The round.
            inputs: Digest of all that training depends on, but for the records.
            told: The number of charges of this run that the server knows of.

        Raises:
            Refused: The budget does not allow it, or the server knows of charges that are missing.
            StateError: The ledger is damaged, in use, or lacks charges.
        """
        rules = self.rules
        make_folder(self.place, private=True)
        with locked(self.place / ".lock"):
            ledger = SiteLedger(self.place / LEDGER, self.site)
            refuse_older(ledger, self.folder)
            if ledger.count(run) < told:
                raise Refused(
                    "privacy",
                    f"the ledger of {self.site} lacks charges of this run that the server knows "
                    "of: an older one was put back",
                )
            secret = load_secret(self.place / SECRET)
            work = rules.noise, rules.rate, rules.steps
            charge = SiteCharge(run, round, inputs, name_secret(secret), *work)
            last, key = ledger.last(run) or (None, "")
            if last != charge:
                self._refuse_beyond(ledger, charge)
                key = ledger.charge(charge)
                seen = {"kind": "ledger", "ledger": list(ledger.head)}
                commit(self.folder / run / self.site / WITNESS, {}, seen, private=True)
            facts: dict[str, Fact] = {
                "epsilon": ledger.epsilon(rules.delta),
                "delta": rules.delta,
                "charged": ledger.count(run),
            }
        steps = PrivateSteps(
            SiteStream(secret, key),
            clip=rules.clip,
            noise=rules.noise,
            rate=rules.rate,
            expected=self.expected,
            steps=rules.steps,
        )
        return Begun(steps, key, last == charge, facts)

    def _refuse_beyond(self, ledger: SiteLedger, charge: SiteCharge) -> None:
        """Raise `Refused` if a charge would exceed the budget, or has no finite epsilon."""
        rules = self.rules
        most = math.inf if rules.stop_at_epsilon is None else rules.stop_at_epsilon
        after = ledger.epsilon(rules.delta, charge)
        if math.isfinite(after) and after <= most:
            return
        raise Refused(
            "budget",
            f"another round would take {self.site} to epsilon {round_up(after)} at delta "
            f"{rules.delta:g}, and its own budget is {most:g}",
        )

    def stored_reply(self, kept: Path, begun: Begun) -> Packet | None:
        """Return the reply that a charge has had, with all its bytes; None without one."""
        stored = latest(kept / REPLY) if begun.again else None
        if stored is None or stored.facts["charge"] != begun.charge:
            return None
        blobs = {
            name: Blob(dtype, tuple(shape), stored.arrays[name].tobytes())
            for name, dtype, shape in stored.facts["blobs"]
        }
        return Packet(dict(stored.facts["reply"]), blobs)

    def store_reply(self, kept: Path, begun: Begun, reply: Packet) -> None:
        """Store a reply durably, before it is sent."""
        arrays = {name: np.frombuffer(b.data, np.uint8) for name, b in reply.blobs.items()}
        facts = {
            "kind": "reply",
            "charge": begun.charge,
            "reply": dict(reply.facts),
            "blobs": [[name, b.dtype, list(b.shape)] for name, b in reply.blobs.items()],
        }
        commit(kept / REPLY, arrays, facts, private=True)


def refuse_older(ledger: SiteLedger, folder: Path) -> None:
    """Raise StateError if a ledger lacks charges that the runs in a site's folder know of."""
    for witness in folder.glob(f"*/{ledger.site}/{WITNESS}"):
        seen = latest(witness)
        if seen is not None:
            ledger.refuse(seen.facts["ledger"])

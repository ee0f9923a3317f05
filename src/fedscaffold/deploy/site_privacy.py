"""Differential privacy at a site: its own rules, its secret, and the ledger that it refuses by.

Below the site's folder, in privacy/SITE:

    privacy.toml      the rules that the site has agreed to, written when it first takes part
    privacy.ledger    what its records have been charged with (`privacy.site_ledger`)
    secret            what its noise is drawn from (`privacy.site_secret`)

Nothing of this follows the server. Settings that ask for other work than the rules, and another app
(before it is imported), are refused, and so is every request that would exceed the site's budget. A
request is charged, durably, before it is trained on, and its noise belongs to that charge: the same
request again is answered with the bytes of the first reply and costs nothing; any other request, be
it of the same round, is charged and draws noise of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import make
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import Array, Blob, Fact, Packet
from fedscaffold.deploy.settings import Settings
from fedscaffold.parsing import format_of, text_of, toml
from fedscaffold.privacy.accounting import describe_accountant, round_up
from fedscaffold.privacy.mechanism import expected_batch, sampling_rate
from fedscaffold.privacy.records import Records
from fedscaffold.privacy.site_ledger import SiteCharge, SiteLedger
from fedscaffold.privacy.site_secret import SiteStream, load_secret, name_secret
from fedscaffold.privacy.site_steps import PrivateSteps
from fedscaffold.state import commit, latest, locked
from fedscaffold.state.files import make_folder, write_private

__all__ = [
    "LEDGER",
    "RULES",
    "Begun",
    "PrivateSite",
    "Rules",
    "digest_inputs",
    "open_private",
    "place_of",
    "read_rules",
    "refuse_older",
    "rules_of",
    "write_rules",
]

FORMAT = 1
RULES, LEDGER, SECRET = "privacy.toml", "privacy.ledger", "secret"
# in a run's folder: the last reply, and apart from the ledger, the end that it must have
REPLY, WITNESS = "reply", "ledger"
WRITTEN = """\
# The privacy of this site's records, by its own word: settings that ask for other work, and other
# apps, are refused, and nothing is trained beyond stop_at_epsilon. It was written before the first
# round, and only the site changes it. Without a line `app`, any app is taken.
"""


class Rules(NamedTuple):
    """What a site has agreed to."""

    clip: float
    noise: float
    sampling: str
    rate: float
    """Probability with which a local step draws a record."""
    steps: int
    """Local steps of a round."""
    delta: float
    stop_at_epsilon: float | None = None
    app: str | None = None
    """Digest of the app's files; None for any app."""


OWN = ("delta", "stop_at_epsilon")  # rules in which a site need not agree with the federation


class Begun(NamedTuple):
    """A request that was charged."""

    steps: PrivateSteps
    charge: str
    """Hash of its charge."""
    again: bool
    """Whether the same request had been charged before."""
    facts: dict[str, Fact]
    """What the site tells of its budget."""


def rules_of(settings: Settings, site: str) -> tuple[Rules, float] | None:
    """Return the rules that settings ask of a site, and its expected batch; None without privacy.

    Both follow from the settings alone, the number of records included.
    """
    asked = settings.privacy
    if asked is None:
        return None
    records = np.float64(settings.deploy.records[site])
    work = work_of(make(**settings.algorithm), settings.local.steps, settings.local.batch_size)
    rules = Rules(
        clip=asked.clip,
        noise=asked.noise,
        sampling=asked.sampling,
        rate=float(sampling_rate(work.batch_size, records)),
        steps=int(work.steps),
        delta=asked.delta,
        stop_at_epsilon=asked.stop_at_epsilon,
        app=digest_inputs(settings.app, {}),
    )
    return rules, float(expected_batch(work.batch_size, records))


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
    for name, agreed in own._asdict().items():
        there = getattr(rules, name)
        if name in OWN or agreed == there or (name == "app" and agreed is None):
            continue
        raise Refused(
            "privacy",
            f"{name} = {str(there)[:12]} is asked of {site}, which has agreed to "
            f"{str(agreed)[:12]}; if that is meant, change it in its own {RULES}",
        )
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


def digest_inputs(words: Any, arrays: dict[str, Array]) -> str:
    """Return a digest of arrays and of a JSON value, by which no two inputs are confused.

    >>> digest_inputs([1], {"x": np.zeros(2)}) == digest_inputs([1], {"x": np.zeros(3)})
    False
    """
    found = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def read_rules(path: Path) -> Rules:
    """Read a site's own rules.

    Raises:
        InputError: The file is damaged, or a value is out of range.
    """
    table = toml(text_of(path), str(path))
    format_of(table.pop("format", None), FORMAT, str(path))
    for key in table:
        checks.choice("key", key, Rules._fields)
    free = Rules._field_defaults
    if missing := [name for name in Rules._fields if name not in table and name not in free]:
        raise InputError(f"{path} lacks {missing[0]}")
    rate, steps, app = table.pop("rate"), table.pop("steps"), table.pop("app", None)
    if checks.number("rate", rate, above=0) > 1:
        raise InputError(f"{path}: rate must be at most 1, got {rate}")
    held = Records(**table)
    return Rules(
        clip=float(held.clip),
        noise=float(held.noise),
        sampling=held.sampling,
        rate=float(rate),
        steps=checks.whole("steps", steps),
        delta=float(held.delta),
        stop_at_epsilon=held.stop_at_epsilon,
        app=app,
    )


def write_rules(path: Path, rules: Rules) -> None:
    """Write the rules of a site that first takes part."""
    make_folder(path.parent, private=True)
    given = {name: value for name, value in rules._asdict().items() if value is not None}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
    write_private(path, f"{WRITTEN}format = {FORMAT}\n{''.join(lines)}")

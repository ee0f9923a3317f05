"""Privacy statements: of a site, by its own ledger, and of a deployed run, by its sites' word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.deploy.site_privacy import LEDGER, refuse_older
from fedscaffold.deploy.site_rules import RULES, read_rules
from fedscaffold.privacy.accounting import describe_accountant, round_up
from fedscaffold.privacy.site_ledger import SiteLedger

__all__ = ["DEPLOYED", "REHEARSED", "find_private_sites", "state_federation", "state_site"]

PLACES = (".", "privacy/*", "state/privacy/*", "sites/privacy/*", "sites/*/privacy/*")
RELEASED = (
    "the noised vectors of each answered request: the mean direction, the move, or what the "
    "algorithm makes of them, control variates included",
    "facts that follow from the settings and this ledger alone: the public number of records, "
    "local steps, epsilon, delta, the number of charges, digests of the model, settings and app",
    "whether a request was answered, refused or failed, with a random reference and no type or "
    "text of an error",
)
NOT_COVERED = (
    "the code of the app: who can replace it at the site can send anything",
    "how long an answer takes, and that training failed, which a record may cause",
    "other ledgers: the same records in another folder or federation spend anew",
    "the site's whole folder put back to an earlier copy, where the server does not tell",
    "an initial model that was trained on these records",
    "who can read the site's secret can subtract the noise",
    "floating-point arithmetic: clipped norms hold to rounding, and the noise has finitely many "
    "values",
)
DEPLOYED = (
    "This is of a DEPLOYED federation: each site drew its noise and batches by a secret that never "
    "left it."
)
REHEARSED = (
    "This federation was REHEARSED on one machine, which holds the records and secrets of all "
    "sites: it protects nobody."
)


def find_private_sites(folder: Path) -> list[Path]:
    """Return the privacy folders of sites at or below a folder of a site, a kit or a run."""
    found = {path.parent for place in PLACES for path in folder.glob(f"{place}/{RULES}")}
    return sorted(found)


def state_site(place: Path) -> dict[str, Any]:
    """Return the facts of a site's privacy statement, by heading.

    Args:
        place: The site's privacy folder.

    Raises:
        InputError: Nothing was charged there yet, a file is damaged, or the ledger is an older one.
    """
    rules, site = read_rules(place / RULES), place.resolve().name
    if not (place / LEDGER).exists():
        raise InputError(f"{place} has no {LEDGER}: nothing was trained on the records of {site}")
    ledger = SiteLedger(place / LEDGER, site)
    refuse_older(ledger, place.resolve().parents[1])
    charges = [charge for charge, _ in ledger.charges]
    kinds = {(charge.noise, charge.rate) for charge in charges} or {(rules.noise, rules.rate)}
    runs = len({charge.run for charge in charges})
    steps = sum(charge.steps for charge in charges)
    spent = ledger.epsilon(rules.delta)
    budget = rules.stop_at_epsilon
    return {
        "Protected unit": f"a single record of {site}",
        "Neighbouring data": "one record is replaced by one that adds nothing",
        "Adversary": "the server, and everybody who sees all that the site sends in all rounds and "
        "runs; it may choose the models and the shifts that the site is sent",
        "Guarantee": f"({round_up(spent)}, {rules.delta:g})-differential privacy",
        "Budget": "none was set"
        if budget is None
        else f"epsilon {budget:g}, by the site's {RULES}",
        "Mechanism": f"gradients of single records clipped to norm {rules.clip:g} over all "
        f"parameters jointly; Gaussian noise of {_listed(noise for noise, _ in kinds)} times that "
        "norm on their sum, independent for each request and step",
        "Sampling assumed": "Poisson: each record with the same probability, independently",
        "Sampling used": f"{rules.sampling}, with probability {_listed(rate for _, rate in kinds)}",
        "Composition": f"{steps:,} steps in {len(charges):,} requests of {runs} "
        f"run{'' if runs == 1 else 's'}; nothing is gained from the sampling of sites",
        "Randomness": "ChaCha20, keyed by a secret of the site (mode 0600) and by each charge",
        "Accountant": describe_accountant(),
        "Ledger": f"{ledger.head.lines} lines, the last with hash {ledger.head.hash}",
        "Released": list(RELEASED),
        "Not covered": list(NOT_COVERED),
    }


def state_federation(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a deployed run's privacy statement, by heading.

    Args:
        status: The server's status.json.

    Raises:
        InputError: The run is not private.
    """
    asked = status.get("privacy")
    if not asked:
        raise InputError("the settings of this deployment have no table [privacy]")
    guarantees = [
        f"{site}: ({round_up(one['epsilon'])}, {one['delta']:g})"
        if one.get("epsilon") is not None
        else f"{site}: has told nothing"
        for site, one in sorted(status["sites"].items())
    ]
    return {
        "Protected unit": "a single record of a site",
        "Neighbouring data": "one record of one site is replaced by one that adds nothing",
        "Adversary": "this server, and everybody who sees all that sites send in all rounds",
        "Guarantees": guarantees,
        "By whose word": "the sites': each keeps its own ledger, and states it by `fedscaffold "
        "privacy statement` there; all its runs count",
        "Mechanism": f"gradients of single records clipped to norm {asked['clip']:g} over all "
        f"parameters jointly; Gaussian noise of {asked['noise']:g} times that norm on their sum, "
        "independent for each site, request and step",
        "Sampling assumed": "Poisson: each record with its site's probability, independently",
        "Rounds": str(status["round"]),
        "Released": list(RELEASED),
        "Not covered": list(NOT_COVERED),
    }


def _listed(values: Iterable[float]) -> str:
    return " or ".join(f"{value:.4g}" for value in sorted(set(values)))

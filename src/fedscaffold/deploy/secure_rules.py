"""A site's own rules of secure sums, and the list of all sites' identities.

Below the site's folder, in secure/SITE, files that only the site's operator changes:

    secure.toml        where its private key is, the smallest number of sites whose sum it takes
                       part in, and the app that it has agreed to
    identities.toml    the public keys of all sites, by which it knows them

The server has identities.toml too, in its own folder, to name sites that send garbage. Nothing that
the server says adds to the list of a site.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import digest_inputs
from fedscaffold.deploy.secure_vector import smallest_sum
from fedscaffold.deploy.settings import Settings
from fedscaffold.parsing import format_of, text_of, toml
from fedscaffold.state.files import make_folder, write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from fedscaffold.secure.site_session import Rules

__all__ = [
    "IDENTITIES",
    "SiteIdentity",
    "digest_identities",
    "open_identity",
    "provision",
    "read_identities",
    "secure_place",
    "write_identities",
    "write_secure_rules",
]

FORMAT = 1
IDENTITIES, RULES = "identities.toml", "secure.toml"
LISTED = """\
# The public keys of the sites of this federation. A site takes part in sums with these alone;
# compare the list with the other sites by another way than the server (`deploy check` shows its
# digest).
"""
WRITTEN = """\
# How this site takes part in secure sums, by its own word: with at least `minimum` sites, never in
# the clear, and with no other app. Without a line `app`, any app is taken.
"""


class SiteIdentity(NamedTuple):
    """What a site knows of itself and of the others."""

    key: ec.EllipticCurvePrivateKey
    rules: Rules


def secure_place(folder: Path, site: str) -> Path:
    """Return the folder of a site's rules of secure sums."""
    return folder / "secure" / site


def open_identity(settings: Settings, site: str, folder: Path) -> SiteIdentity | None:
    """Return a site's identity and rules; None where neither it nor the settings ask for secure.

    Raises:
        Refused: The settings are not what the site has agreed to.
        InputError: A file is missing or damaged.
    """
    place = secure_place(folder, site)
    agreed = os.path.lexists(place / RULES)
    if not settings.deploy.secure:
        if agreed:
            raise Refused(
                "secure", f"{site} takes part in secure sums only, and deploy.secure is off here"
            )
        return None
    if not agreed:
        raise Refused("secure", f"{site} has no rules of secure sums: its kit has secure/{site}")
    table = toml(text_of(place / RULES), str(place / RULES))
    format_of(table.pop("format", None), FORMAT, str(place / RULES))
    for name in table:
        checks.choice("key", name, ("key", "minimum", "app"))
    app = table.get("app")
    if app is not None and app != digest_inputs(settings.app, {}):
        raise Refused(
            "secure",
            f"another app is asked of {site} than it has agreed to; if that is meant, change it in "
            f"its own {RULES}",
        )
    from fedscaffold.secure.signatures import load_identity
    from fedscaffold.secure.site_session import Rules

    minimum = checks.whole("minimum", table.get("minimum", 2), at_least=2)
    path = place / checks.text("key", table.get("key", ""))
    key = load_identity(path.read_bytes(), str(path))
    identities = read_identities(place / IDENTITIES)
    if site not in identities or _line(identities[site]) != _line(key.public_key()):
        raise InputError(f"{place / IDENTITIES} does not have the public key of {path} for {site}")
    return SiteIdentity(key, Rules(identities, minimum))


def read_identities(path: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Read a list of identities.

    Raises:
        InputError: It is missing, damaged, or has a key twice.
    """
    try:
        return dict(_parse_identities(text_of(path), path))
    except FileNotFoundError:
        raise InputError(
            f"{path} not found: secure sums need the public keys of all sites"
        ) from None


@functools.lru_cache(maxsize=16)  # a site reads its list for every message
def _parse_identities(text: str, path: Path) -> Mapping[str, ec.EllipticCurvePublicKey]:
    from fedscaffold.secure.signatures import parse_public

    table = toml(text, str(path))
    format_of(table.pop("format", None), FORMAT, str(path))
    sites = table.get("sites")
    if not isinstance(sites, dict) or set(table) != {"sites"}:
        raise InputError(f"{path} must have a table [sites] of public keys, and nothing else")
    found = {
        site: parse_public(checks.text(f"{path}: key of {site}", line), f"{path}: key of {site}")
        for site, line in sites.items()
    }
    if len({_line(key) for key in found.values()}) < len(found):
        raise InputError(f"{path} has the same key for two sites")
    return found


def digest_identities(identities: Mapping[str, ec.EllipticCurvePublicKey]) -> str:
    """Return a short digest of a list of identities, for people to compare."""
    lines = [f"{site} {_line(key)}\n" for site, key in sorted(identities.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def write_identities(path: Path, public: Mapping[str, Path]) -> None:
    """Write a list of identities from files of public keys by site."""
    from fedscaffold.secure.signatures import parse_public

    make_folder(path.parent, private=True)
    lines = [
        f"{site} = {json.dumps(_line(parse_public(text_of(file).strip(), str(file))))}\n"
        for site, file in sorted(public.items())
    ]
    write_private(path, f"{LISTED}format = {FORMAT}\n[sites]\n{''.join(lines)}")


def write_secure_rules(
    settings: Settings, site: str, folder: Path, key: str, public: Mapping[str, Path]
) -> None:
    """Write a site's rules, and its list of identities.

    Of rules that it has, only the app that it agrees to is changed, if they name one.

    Args:
        settings: The deployment's settings.
        site: The site.
        folder: Folder of its state.
        key: Path of its private key, from the folder of the rules.
        public: Files of public keys by site.
    """
    place = secure_place(folder, site)
    write_identities(place / IDENTITIES, public)
    facts = {"format": FORMAT, "key": key, "minimum": smallest_sum(settings)}
    if settings.app:
        facts["app"] = digest_inputs(settings.app, {})
    if (place / RULES).exists():
        before = toml(text_of(place / RULES), str(place / RULES))
        facts = {**before, **({"app": facts["app"]} if "app" in before and settings.app else {})}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in facts.items()]
    write_private(place / RULES, f"{WRITTEN}{''.join(lines)}")


def provision(settings: Settings, server: Path, sites: Path) -> None:
    """Make the identities of sites that run in one process, those that are missing.

    They take any app, which is that of the process.

    Args:
        settings: The deployment's settings.
        server: The server's folder.
        sites: The folder of all sites.
    """
    from fedscaffold.deploy import keys

    public = {}
    for site in settings.deploy.sites:
        place = secure_place(sites, site)
        public[site] = place / "site.pub"
        if not public[site].exists():
            keys.make_site_key(place / "site.key", public[site])
    write_identities(server / IDENTITIES, public)
    for site in settings.deploy.sites:
        write_secure_rules(settings._replace(app={}), site, sites, "site.key", public)


def _line(key: ec.EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

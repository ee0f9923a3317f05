"""`deploy kit`: a folder for the server and one per site; `deploy check` verifies them.

The kit is described by a file sites.toml:

    server = "fl.example.org"        # the name or address that sites call
    port = 8000
    app = "app"                      # the folder with app.py and federation.toml, beside this file
    days = 365                       # how long the server's certificate lasts
    environment = "/opt/fedscaffold/venv"    # the Python environment on every machine
    proxy = "nginx"                  # before the link, or "none"
    [data]                           # optional: where a site's data lies
    north = "/srv/records"           # given to its app as FEDSCAFFOLD_DATA

Sites only make outgoing connections, to the server's port over TLS, authenticated by their keys.
The authority's private key is written to a separate folder, to be kept offline.
"""

from __future__ import annotations

import email.utils
import json
import os
import platform
import ssl
import stat
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.deploy import keys
from fedscaffold.deploy.app_files import TOML, copy_app
from fedscaffold.deploy.apps import open_app, read_settings
from fedscaffold.deploy.client import Site
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.kit_files import HOME, write_server_files, write_site_files
from fedscaffold.deploy.processes import is_alive
from fedscaffold.deploy.secure_rules import (
    IDENTITIES,
    digest_identities,
    open_identity,
    write_identities,
    write_secure_rules,
)
from fedscaffold.deploy.settings import Settings, load
from fedscaffold.deploy.site_privacy import open_private, place_of
from fedscaffold.deploy.site_rules import RULES, rules_of, write_rules
from fedscaffold.deploy.worker import read_status
from fedscaffold.deploy.worker_wire import open_place
from fedscaffold.parsing import record, text_of, toml
from fedscaffold.state.files import make_folder, write_private

__all__ = [
    "ENGINE",
    "Finding",
    "Kit",
    "add_site",
    "check",
    "make_kit",
    "read_kit",
    "revoke",
    "rotate",
]

ENGINE = "1.41.0"  # the version of flwr that the kit was tested with
KEYS = ("server", "port", "app", "days", "data", "environment", "proxy")
MOST_SKEW = 120.0  # seconds; Flower's signatures are valid for 300


class Finding(NamedTuple):
    """Result of one check."""

    what: str
    good: bool
    said: str


class Kit(NamedTuple):
    """What a sites.toml says."""

    server: str
    """Name or address that sites call."""
    port: int
    app: Path
    settings: Settings
    days: int
    """How long the server's certificate lasts; that of the authority lasts ten times as long."""
    data: dict[str, str]
    """Folders of the sites' data."""
    environment: str
    """Folder of the Python environment on every machine."""
    proxied: bool
    """Whether sites call a proxy on the server, not the link itself."""


def read_kit(path: Path) -> Kit:
    """Read a sites.toml, and the settings of the app that it names."""
    table = toml(text_of(path), str(path))
    for key in table:
        checks.choice("key", key, KEYS)
    server = str(table.get("server", ""))
    if not server or any(c.isspace() or c in "\"'$" for c in server):
        raise InputError(
            f"{path}: server must be the name or address that sites call, got {server!r}"
        )
    proxied = checks.choice("proxy", table.get("proxy", "nginx"), ("nginx", "none")) == "nginx"
    environment = str(table.get("environment", f"{HOME}/venv"))
    if not environment.startswith("/") or any(c.isspace() or c in "\"'$%" for c in environment):
        raise InputError(
            f"{path}: environment must be the full path of a Python environment, got "
            f"{environment!r}"
        )
    app = path.parent / str(table.get("app", "app"))
    settings = load(app / TOML)
    data = table.get("data", {})
    if not isinstance(data, dict):
        raise InputError(f"{path}: data must be a table, written [data], got {checks.shown(data)}")
    for site in data:
        checks.choice("site in [data]", site, settings.deploy.sites)
    return Kit(
        server=server,
        port=checks.whole("port", table.get("port", 8000), at_most=65535 - proxied),
        app=app,
        settings=settings,
        days=checks.whole("days", table.get("days", 365), at_most=3_650),
        data={site: str(folder) for site, folder in data.items()},
        environment=environment,
        proxied=proxied,
    )


def make_kit(path: Path, out: Path) -> list[Path]:
    """Create the folders of a kit.

    Args:
        path: The sites.toml.
        out: A new or empty folder.

    Returns:
        The folders of the authority, the server and the sites.
    """
    kit = read_kit(path)
    if out.exists() and any(out.iterdir()):
        raise InputError(
            f"{out} is not empty: keys in use must not be replaced; give a new folder, or add, "
            "rotate or revoke one site of this kit"
        )
    authority, hub = out / "authority", out / "server"
    for folder in (out, authority, hub):
        make_folder(folder, private=True)
    keys.make_authority(authority, 10 * kit.days)
    _copy(authority / "ca.crt", hub / "ca.crt")
    _sign_server(kit, out)
    keys.make_secret(hub / "superexec.secret")
    copy_app(kit.app, hub / "app")
    write_server_files(hub, kit.port, kit.proxied, kit.environment)
    sites = [_make_site(kit, out, site) for site in kit.settings.deploy.sites]
    _list_identities(kit, out)
    return [authority, hub, *sites]


def add_site(path: Path, out: Path, site: str) -> list[Path]:
    """Add the folder of a new site to a kit; the others keep their keys.

    Args:
        path: The sites.toml, whose app names the site in its federation.toml.
        out: The kit.
        site: The new site.

    Returns:
        The folders that changed: the server's, which has the new key and settings, and the site's.

    Raises:
        InputError: It is no site of the app, or the kit has a folder for it.
    """
    kit = _open_kit(path, out)
    if site not in kit.settings.deploy.sites:
        raise InputError(
            f"{kit.app / TOML} does not name {site}: add it to sites first; it names "
            f"{', '.join(kit.settings.deploy.sites)}"
        )
    if (out / site).exists():
        raise InputError(f"{out / site} is there already; to give {site} a new key, rotate it")
    copy_app(kit.app, out / "server" / "app")
    made = [out / "server", _make_site(kit, out, site)]
    return [*made, *(folder for folder in _list_identities(kit, out) if folder not in made)]


def rotate(path: Path, out: Path, name: str) -> list[Path]:
    """Replace the key of a site, or with the name "server" the server's key and certificate.

    Args:
        path: The sites.toml.
        out: The kit; for the server, with the authority's folder.
        name: A site, or "server".

    Returns:
        The folders that changed.
    """
    kit, hub = _open_kit(path, out), out / "server"
    if name == "server":
        if not (out / "authority" / "ca.key").is_file():
            raise InputError(
                f"a certificate is signed by the authority: bring {out / 'authority'} back"
            )
        _sign_server(kit, out)
        return [hub]
    checks.choice("site", name, ("server", *kit.settings.deploy.sites))
    if not (out / name).is_dir():
        raise InputError(f"{out / name} does not exist: {name} was never added to this kit")
    if (hub / "keys" / f"{name}.pub").exists():  # else a rotation was interrupted
        _retire_key(hub, name)
    _make_key(hub, out / name, name)
    made = [hub, out / name]
    return [*made, *(folder for folder in _list_identities(kit, out) if folder not in made)]


def revoke(path: Path, out: Path, site: str) -> list[Path]:
    """Revoke the key of a site that has left, and set its folder apart in `revoked/`.

    Args:
        path: The sites.toml, whose app does not name the site any more.
        out: The kit.
        site: The site.

    Returns:
        The folder that changed: the server's, which has the key among the revoked ones.
    """
    kit, hub = _open_kit(path, out), out / "server"
    if site in kit.settings.deploy.sites:
        raise InputError(
            f"{kit.app / TOML} still names {site}: take it out of sites first, or the "
            "server would wait for it"
        )
    _retire_key(hub, site)
    copy_app(kit.app, hub / "app")
    if (out / site).exists():
        make_folder(out / "revoked", private=True)
        (out / site).rename(_next_free(out / "revoked", site, ""))
    return [hub, *_list_identities(kit, out)]


def _list_identities(kit: Kit, out: Path) -> list[Path]:
    """Give the server and all sites the list of the sites' keys, if there are secure sums.

    Returns:
        The folders of the sites that have a new list.
    """
    if not kit.settings.deploy.secure:
        return []
    hub, settings = out / "server", read_settings(kit.app)
    known = {site: hub / "keys" / f"{site}.pub" for site in settings.deploy.sites}
    public = {site: path for site, path in known.items() if path.is_file()}
    write_identities(hub / "run" / IDENTITIES, public)
    folders = [out / site for site in public if (out / site).is_dir()]
    for folder in folders:
        write_secure_rules(settings, folder.name, folder / "state", "../../../site.key", public)
    return folders


def _open_kit(path: Path, out: Path) -> Kit:
    if not (out / "server" / "keys").is_dir():
        raise InputError(f"{out} is not a kit: it has no server/keys; `deploy kit` makes one")
    return read_kit(path)


def _sign_server(kit: Kit, out: Path) -> None:
    hosts = [kit.server, *({"localhost", "127.0.0.1"} - {kit.server})]
    keys.make_server(out / "authority", out / "server", hosts, kit.days)


def _make_site(kit: Kit, out: Path, site: str) -> Path:
    """Write the folder of a site: certificate, key, app, scripts, unit, rules of privacy."""
    folder = out / site
    make_folder(folder, private=True)
    _copy(out / "server" / "ca.crt", folder / "ca.crt")
    _make_key(out / "server", folder, site)
    copy_app(kit.app, folder / "app")
    facts: dict[str, Any] = {"site": site, "server": kit.server, "port": kit.port}
    write_private(folder / "site.json", json.dumps(facts, indent=1) + "\n")
    data = kit.data.get(site, "")
    write_site_files(folder, site, kit.server, kit.port, kit.environment, data)
    if kit.settings.privacy is not None:  # rules of the app as it is, for the site to review
        asked = rules_of(read_settings(kit.app), site)
        assert asked is not None
        write_rules(place_of(folder / "state", site) / RULES, asked[0])
    return folder


def _make_key(hub: Path, folder: Path, site: str) -> None:
    keys.make_site_key(folder / "site.key", folder / "site.pub")
    _copy(folder / "site.pub", hub / "keys" / f"{site}.pub")


def _retire_key(hub: Path, site: str) -> None:
    """Move a site's key to the revoked ones."""
    key = hub / "keys" / f"{site}.pub"
    if not key.is_file():
        raise InputError(f"{key} does not exist: this kit has no valid key of {site}")
    make_folder(hub / "keys" / "revoked", private=True)
    key.rename(_next_free(hub / "keys" / "revoked", site, ".pub"))


def _next_free(folder: Path, name: str, suffix: str) -> Path:
    """Return the first of name-1, name-2 ... that is not in a folder."""
    number = next(n for n in count(1) if not (folder / f"{name}-{n}{suffix}").exists())
    return folder / f"{name}-{number}{suffix}"


def check(folder: Path) -> list[Finding]:
    """Check a site's folder: versions, certificate, server, clock, app, data and key.

    Root checks as the folder's user, as root could read what the site cannot.
    """
    with _as_owner(folder):
        return _check_site(folder)


@contextmanager
def _as_owner(folder: Path) -> Iterator[None]:
    """Be the user of a folder, as far as root can."""
    owner = folder.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([owner.st_gid])
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def _check_site(folder: Path) -> list[Finding]:
    facts = record(folder / "site.json", site=str, server=str, port=int)
    left = keys.days_left(folder / "ca.crt")
    findings = [
        _versions(),
        Finding("certificate", left > 7, f"ca.crt is good for {left:.0f} more days"),
    ]
    findings += _server(folder, facts["server"], facts["port"])
    try:
        settings, learner = open_app(folder / "app")
        findings.append(
            Finding("model", True, f"d = {learner.schema.size}, digest {learner.schema.digest}")
        )
        findings.append(
            Finding("settings", True, f"{settings.algorithm['name']}, digest {settings.digest}")
        )
        site = learner.site(facts["site"])
        findings.append(Finding("data", True, f"{site.records} records at {facts['site']}"))
        if settings.privacy is not None:
            findings.append(_privacy(settings, site, facts["site"], folder / "state"))
        if settings.deploy.secure:
            findings.append(_secure(settings, facts["site"], folder / "state"))
    except Exception as error:  # any error of the app is a finding
        findings.append(Finding("data", False, f"the app cannot read the data here: {error}"))
    findings.append(_worker(folder))
    secret = stat.S_IMODE((folder / "site.key").stat().st_mode)
    findings.append(
        Finding(
            "key", secret & 0o077 == 0, f"site.key has mode {secret:o}; only its owner may read it"
        )
    )
    return findings


def _privacy(settings: Settings, site: Site, name: str, folder: Path) -> Finding:
    """Check that a site can train privately, by its own rules."""
    try:
        private = open_private(settings, name, folder)
    except Refused as refusal:
        return Finding("privacy", False, str(refusal))
    assert private is not None
    if (why := site.not_private()) is not None:
        return Finding("privacy", False, f"{name} cannot train privately: {why}")
    most = private.rules.stop_at_epsilon
    budget = "no budget" if most is None else f"a budget of epsilon {most:g}"
    return Finding("privacy", True, f"noise {private.rules.noise:g}, {budget}, by {RULES}")


def _secure(settings: Settings, name: str, folder: Path) -> Finding:
    """Check a site's rules of secure sums and its list of identities."""
    try:
        identity = open_identity(settings, name, folder)
    except (Refused, InputError, OSError) as error:
        return Finding("secure sums", False, str(error))
    assert identity is not None
    known, minimum = identity.rules.identities, identity.rules.minimum
    if missing := [site for site in settings.deploy.sites if site not in known]:
        return Finding("secure sums", False, f"{IDENTITIES} lacks {', '.join(missing)}")
    said = f"{len(known)} identities, digest {digest_identities(known)} (compare it with the others"
    return Finding("secure sums", True, f"{said}); sums of {minimum} sites and more")


def _worker(folder: Path) -> Finding:
    """Check that the worker can use its folder, and say whether it runs."""
    try:
        with open_place(folder / "state"):
            told = read_status(folder / "state")
    except (InputError, OSError) as error:
        return Finding("worker", False, str(error))
    if told is None or not is_alive(told["pid"]):
        return Finding("worker", True, "not running; its unit or the first message starts it")
    last = f", the last in {told['seconds']:.2g} s" if "seconds" in told else ""
    return Finding(
        "worker", True, f"{told['requests']} requests{last}, started {told['starts']} times"
    )


def _versions() -> Finding:
    """Check the version of Flower."""
    try:
        engine = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        engine = "none"
    said = (
        f"fedscaffold {metadata.version('fedscaffold')}, flwr {engine}, Python "
        f"{platform.python_version()}"
    )
    return Finding(
        "versions",
        engine == ENGINE,
        said if engine == ENGINE else f"{said}; flwr {ENGINE} is needed",
    )


def _server(folder: Path, server: str, port: int) -> list[Finding]:
    """Check the TLS connection to the server and compare the clocks."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    try:
        with urllib.request.urlopen(
            f"https://{server}:{port}/health", context=context, timeout=10
        ) as answer:
            date = answer.headers.get("date")
    except OSError as error:
        return [Finding("server", False, f"{server}:{port} cannot be reached over TLS: {error}")]
    reached = Finding("server", True, f"{server}:{port} answers over TLS, certificate good")
    if date is None:
        return [reached]
    skew = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    return [reached, Finding("clock", abs(skew) < MOST_SKEW, f"{skew:+.0f} s against the server")]


def _copy(source: Path, target: Path) -> None:
    make_folder(target.parent, private=True)
    write_private(target, source.read_bytes())

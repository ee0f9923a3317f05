"""`deploy kit`: a folder for the server and one per site; `deploy check` verifies them.

The kit is described by a file sites.toml:

    server = "fl.example.org"        # the name or address that sites call
    port = 8000
    app = "app"                      # the folder with app.py and federation.toml, beside this file
    days = 365                       # how long certificates last
    [data]                           # optional: where a site's data lies
    north = "/srv/records"           # given to its app as FEDSCAFFOLD_DATA

Sites only make outgoing connections, to the server's port over TLS, authenticated by their keys.
The authority's private key is written to a separate folder, to be kept offline.
"""

from __future__ import annotations

import email.utils
import json
import platform
import shlex
import ssl
import stat
import time
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.deploy import keys
from fedscaffold.deploy.app_files import TOML, copy_app
from fedscaffold.deploy.apps import open_app, read_settings
from fedscaffold.deploy.client import Site
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.local_cluster import SWITCHES
from fedscaffold.deploy.settings import Settings, load
from fedscaffold.deploy.site_privacy import RULES, open_private, place_of, rules_of, write_rules
from fedscaffold.parsing import record, text_of, toml
from fedscaffold.state.files import make_folder, write_private

__all__ = ["ENGINE", "Finding", "check", "make_kit"]

ENGINE = "1.41.0"  # the version of flwr that the kit was tested with
MOST_SKEW = 120.0  # seconds; Flower's signatures are valid for 300
HEAD = """\
#!/bin/sh
set -eu
umask 077
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here"
export FLWR_HOME="$here/engine"
""" + "".join(f"export {name}={value}\n" for name, value in SWITCHES.items())
UNIT = """\
[Unit]
Description=fedscaffold {what}
After=network-online.target
Wants=network-online.target

[Service]
UMask=0077
ExecStart=/bin/sh {folder}/{script}
Restart=always
# a site that comes back within a minute of a crash is still taken for online, and refused
RestartSec={pause}
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


class Finding(NamedTuple):
    """Result of one check."""

    what: str
    good: bool
    said: str


def make_kit(path: Path, out: Path) -> list[Path]:
    """Create the folders of a kit.

    Args:
        path: The sites.toml.
        out: A new or empty folder.

    Returns:
        The folders of the authority, the server and the sites.
    """
    table = toml(text_of(path), str(path))
    for key in table:
        checks.choice("key", key, ("server", "port", "app", "days", "data"))
    server = str(table.get("server", ""))
    port = checks.whole("port", table.get("port", 8000), at_most=65535)
    if not server or any(c.isspace() or c in "\"'$" for c in server):
        raise InputError(
            f"{path}: server must be the name or address that sites call, got {server!r}"
        )
    days = checks.whole("days", table.get("days", 365), at_most=36_500)
    app = path.parent / str(table.get("app", "app"))
    settings = load(app / TOML)
    sites = settings.deploy.sites
    data = table.get("data", {})
    if not isinstance(data, dict):
        raise InputError(f"{path}: data must be a table, written [data], got {checks.shown(data)}")
    for site in data:
        checks.choice("site in [data]", site, sites)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: keys in use must not be replaced; give a new folder")
    authority, hub = out / "authority", out / "server"
    for folder in (out, authority, hub, *(out / site for site in sites)):
        make_folder(folder, private=True)
    keys.make_authority(authority, days)
    keys.make_server(authority, hub, [server, *({"localhost", "127.0.0.1"} - {server})], days)
    _copy(authority / "ca.crt", hub / "ca.crt")
    keys.make_secret(hub / "superexec.secret")
    copy_app(app, hub / "app")
    for site in sites:
        _site_folder(out / site, site, app, server, port, authority, hub, str(data.get(site, "")))
    if settings.privacy is not None:
        _write_rules(read_settings(app), out)
    _server_folder(hub, port, sites)
    return [authority, hub, *(out / site for site in sites)]


def check(folder: Path) -> list[Finding]:
    """Check a site's folder: versions, certificate, server, clock, app, data and key."""
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
    except Exception as error:  # any error of the app is a finding
        findings.append(Finding("data", False, f"the app cannot read the data here: {error}"))
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


def _site_folder(
    folder: Path,
    site: str,
    app: Path,
    server: str,
    port: int,
    authority: Path,
    hub: Path,
    data: str,
) -> None:
    """Write the folder of a site: certificate, key, app, start script, systemd unit."""
    _copy(authority / "ca.crt", folder / "ca.crt")
    keys.make_site_key(folder / "site.key", folder / "site.pub")
    _copy(folder / "site.pub", hub / "keys" / f"{site}.pub")
    copy_app(app, folder / "app")
    facts: dict[str, Any] = {"site": site, "server": server, "port": port}
    write_private(folder / "site.json", json.dumps(facts, indent=1) + "\n")
    given = f"export FEDSCAFFOLD_DATA={shlex.quote(data)}\n" if data else ""
    start = (
        f"{HEAD}{given}mkdir -p state\n"
        f'exec flower-supernode --superlink "{server}:{port}" --root-certificates ca.crt \\\n'
        f"  --auth-supernode-private-key site.key --host 127.0.0.1 --port "
        f"${{FEDSCAFFOLD_PORT:-9094}} \\\n"
        f'  --node-config "site=\\"{site}\\" folder=\\"$here/state\\" files=\\"$here/app\\""\n'
    )
    _script(folder / "start.sh", start)
    unit = UNIT.format(
        what=f"site {site}", folder=f"/opt/fedscaffold/{site}", script="start.sh", pause=70
    )
    write_private(folder / f"fedscaffold-{site}.service", unit)


def _write_rules(settings: Settings, out: Path) -> None:
    """Write the privacy rules of each site to its folder, for the site to review."""
    for site in settings.deploy.sites:
        asked = rules_of(settings, site)
        assert asked is not None
        write_rules(place_of(out / site / "state", site) / RULES, asked[0])


def _server_folder(hub: Path, port: int, sites: tuple[str, ...]) -> None:
    """Write the server's start scripts and systemd units."""
    link = (
        f"{HEAD}exec flower-superlink --host 0.0.0.0 --port {port} --database link.db \\\n"
        "  --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key "
        "--enable-supernode-auth \\\n"
        "  --isolation process --superexec-auth-secret-file superexec.secret\n"
    )
    executor = (
        f"{HEAD}exec flower-superexec --runtime-api-address localhost:{port} --root-certificates "
        "ca.crt \\\n"
        "  --superexec-auth-secret-file superexec.secret\n"
    )
    config = (
        "mkdir -p engine\n"
        'printf \'[superlink]\\ndefault = "hub"\\n\\n[superlink.hub]\\naddress = "localhost:%s"\\n'
        f'root-certificates = "%s"\\n\' {port} "$here/ca.crt" > engine/config.toml\n'
    )
    register = "".join(
        f"flwr supernode register keys/{site}.pub hub --name {site}\n" for site in sites
    )
    run = (
        "# starts the run, or goes on with the one in run/ after a crash\n"
        "python3 -m fedscaffold.deploy.app_files app package\n"
        'flwr run package hub --run-config "home=\\"$here/run\\" files=\\"$here/app\\"" '
        "--format json\n"
    )
    _script(hub / "start-link.sh", link)
    _script(hub / "start-executor.sh", executor)
    _script(hub / "register-sites.sh", f"{HEAD}{config}{register}")
    _script(hub / "run.sh", f"{HEAD}{config}{run}")
    for name in ("link", "executor"):
        unit = UNIT.format(
            what=name, folder="/opt/fedscaffold/server", script=f"start-{name}.sh", pause=5
        )
        write_private(hub / f"fedscaffold-{name}.service", unit)


def _script(path: Path, text: str) -> None:
    write_private(path, text)
    path.chmod(0o700)


def _copy(source: Path, target: Path) -> None:
    make_folder(target.parent, private=True)
    write_private(target, source.read_bytes())

"""The files of a kit that machines run: start scripts, systemd units, and the proxy's settings."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedscaffold.deploy.flower_process import write_command
from fedscaffold.deploy.kept_run import STOPPED
from fedscaffold.deploy.local_cluster import LINK, NODE, SWITCHES
from fedscaffold.deploy.worker_wire import WORKER
from fedscaffold.state.files import write_private

__all__ = ["HOME", "write_server_files", "write_site_files"]

HOME = "/opt/fedscaffold"
"""Where `install.sh` puts the folders of a kit."""
HEAD = """\
#!/bin/sh
set -eu
umask 077
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here"
if [ "$(id -u)" = 0 ] && [ "$(stat -c %U .)" != root ]; then  # installed: as the folder's user
  exec runuser -u "$(stat -c %U .)" -- env HOME="$here" sh "$here/$(basename "$0")" "$@"
fi
export PATH="{environment}/bin:$PATH" FLWR_HOME="$here/engine"
""" + "".join(f"export {name}={value}\n" for name, value in SWITCHES.items())
# Memory that is written and then executed stays allowed, as XLA and torch compile, and devices
# stay visible, as some sites have accelerators.
UNIT = """\
[Unit]
Description=fedscaffold {name}
After=network-online.target{after}
Wants=network-online.target{after}
StartLimitIntervalSec=0

[Service]
Type=simple
User=fedscaffold
Group=fedscaffold
UMask=0077
WorkingDirectory={folder}
Environment=PATH={environment}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin HOME={folder}{given}
ExecStart=/bin/sh {folder}/{script}
Restart={restart}
RestartSec={pause}
CapabilityBoundingSet={capability}
{ambient}LockPersonality=true
NoNewPrivileges=true
PrivateTmp=true
ProtectClock=true
ProtectControlGroups=true
ProtectHome=read-only
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectProc=invisible
ProtectSystem=strict
ReadWritePaths={folder}
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
"""
INSTALL = """\
#!/bin/sh
set -eu
umask 077
# Run as root: gives this folder to a user of its own, under {home}, and starts its units.
# It may be run again after the kit has changed; what was trained stays{running}.
here="$(cd "$(dirname "$0")" && pwd)"
id fedscaffold >/dev/null 2>&1 ||
  useradd --system --home-dir {home} --shell /usr/sbin/nologin fedscaffold
install -d -m 0755 {home}
install -d -m 0700 {folder}
{before}if [ "$here" != {folder} ]; then
  rm -rf {folder}/app
  # rules are the site's own: those that it has stay, and others are put beside them
  rules=$(cd {folder} && find . -name privacy.toml -o -name secure.toml)
  for name in $rules; do cp -p "{folder}/$name" "{folder}/$name.kept"; done
  cp -R "$here/." {folder}/
  for name in $rules; do
    if ! cmp -s "{folder}/$name" "{folder}/$name.kept"; then
      mv "{folder}/$name" "{folder}/$name.new"
      cp -p "{folder}/$name.kept" "{folder}/$name"
      echo "the rules of this site stay as they are; the kit's are in {folder}/$name.new" >&2
    fi
    rm "{folder}/$name.kept"
  done
fi
chown -R fedscaffold:fedscaffold {folder}
install -m 0644 {folder}/*.service /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now {units}
{restart}"""
CERTIFICATE = """\
certificate=new
if [ "$here" != {folder} ] && cmp -s "$here/server.crt" {folder}/server.crt; then
  certificate=kept
fi
"""
PRIVILEGED = 1024  # ports below are root's
PROXY = """\
# What sites may reach of the link: its fleet interface and its health, and nothing else. Whoever
# reaches the control interface can run code at every site.
daemon off;
pid proxy/nginx.pid;
error_log stderr;
worker_processes auto;
events {{ }}
http {{
  access_log off;
  server_tokens off;
  client_body_temp_path proxy/body;
  proxy_temp_path proxy/replies;
  fastcgi_temp_path proxy/fastcgi;
  uwsgi_temp_path proxy/uwsgi;
  scgi_temp_path proxy/scgi;
  server {{
    listen {port} ssl;
    ssl_certificate server.crt;
    ssl_certificate_key server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size 0;  # or a little more than the model's size, to bound what a site sends
    proxy_request_buffering off;
    proxy_buffering off;
    proxy_http_version 1.1;
    proxy_read_timeout 1h;
    proxy_set_header Host $http_host;
    proxy_ssl_trusted_certificate ca.crt;
    proxy_ssl_verify on;
    proxy_ssl_name localhost;
    # with a path of its own, proxy_pass sends the path as it was normalised: no way around by ..
    location /v1/fleet/ {{ proxy_pass https://127.0.0.1:{link}/v1/fleet/; }}
    location = /health {{ proxy_pass https://127.0.0.1:{link}/health; }}
    location / {{ return 403; }}
  }}
}}
"""


def write_site_files(
    folder: Path, site: str, server: str, port: int, environment: str, data: str
) -> None:
    """Write the start scripts of a site and its worker, their units and `install.sh`.

    By hand, `start.sh` alone is enough: the worker then starts with the first message.

    Args:
        folder: The site's folder of the kit.
        site: Its name.
        server: The name or address that it calls.
        port: The server's port.
        environment: Folder of the Python environment on its machine.
        data: Folder of its data there; "" if its app knows it.
    """
    given = f"export FEDSCAFFOLD_DATA={shlex.quote(data)}\n" if data else ""
    head = HEAD.format(environment=environment) + given
    start = (
        f'{head}mkdir -p state\nexport PATH="$here/bin:$PATH"\n'
        f'exec python3 {" ".join(NODE)} --superlink "{server}:{port}" \\\n'
        "  --root-certificates ca.crt \\\n"
        f"  --auth-supernode-private-key site.key --host 127.0.0.1 --port "
        f"${{FEDSCAFFOLD_PORT:-9094}} \\\n"
        f'  --node-config "site=\\"{site}\\" folder=\\"$here/state\\" files=\\"$here/app\\" '
        f'worker=\\"${{FEDSCAFFOLD_WORKER:-own}}\\""\n'
    )
    work = f'{head}mkdir -p state\nexec python3 {" ".join(WORKER)} "$here/state" --kept\n'
    write_command(folder / "bin")
    _write_script(folder / "start.sh", start)
    _write_script(folder / "start-worker.sh", work)
    worker = f"{site}.worker"  # no site has such a name
    # a site that comes back within a minute of a crash is still taken for online, and refused
    after, kept = f" fedscaffold-{worker}.service", " FEDSCAFFOLD_WORKER=kept"
    _write_unit(folder, site, "start.sh", environment, pause=70, after=after, given=kept)
    _write_unit(folder, worker, "start-worker.sh", environment, pause=1)
    names = " ".join(map(_unit, (worker, site)))
    _write_install(folder, [worker, site], f"systemctl restart {names}\n")  # with a new key


def write_server_files(folder: Path, port: int, proxied: bool, environment: str) -> None:
    """Write the server's start scripts, units, the proxy's settings and `install.sh`.

    Args:
        folder: The server's folder of the kit.
        port: The port that sites call.
        proxied: Whether they call a proxy, which passes them on to the link on the next port, where
            only this machine reaches it. Otherwise they call the link itself.
        environment: Folder of the Python environment on the server.
    """
    link_port, host = (port + 1, "127.0.0.1") if proxied else (port, "0.0.0.0")
    link = (
        f"exec python3 {' '.join(LINK)} --host {host} --port {link_port} --database link.db \\\n"
        "  --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key "
        "--enable-supernode-auth \\\n"
        "  --isolation process --superexec-auth-secret-file superexec.secret\n"
    )
    executor = (
        f"exec flower-superexec --runtime-api-address localhost:{link_port} --root-certificates "
        "ca.crt \\\n  --superexec-auth-secret-file superexec.secret\n"
    )
    config = (
        "mkdir -p engine\n"
        'printf \'[superlink]\\ndefault = "hub"\\n\\n[superlink.hub]\\naddress = "localhost:%s"\\n'
        f'root-certificates = "%s"\\n\' {link_port} "$here/ca.crt" > engine/config.toml\n'
    )
    register = (
        "# registers new keys and unregisters revoked ones; it may be run at any time\n"
        "python3 -m fedscaffold.deploy.registration keys hub\n"
    )
    run = (
        "# starts the run, or goes on with the one in run/, after a crash or with changed\n"
        "# settings, until it ends: with exit code "
        f"{STOPPED} if it stopped before its last round\n"
        "python3 -m fedscaffold.deploy.app_files app package\n"
        'exec python3 -m fedscaffold.deploy.kept_run "$here/run" package \\\n'
        '  flwr run package hub --run-config "home=\\"$here/run\\" files=\\"$here/app\\"" '
        "--format json\n"
    )
    scripts = {
        "start-link.sh": link,
        "start-executor.sh": executor,
        "register-sites.sh": config + register,
        "run.sh": config + run,
    }
    units = ["link", "executor"]
    if proxied:
        write_private(folder / "nginx.conf", PROXY.format(port=port, link=link_port))
        scripts["start-proxy.sh"] = 'mkdir -p proxy\nexec nginx -p "$here" -c nginx.conf\n'
        units.append("proxy")
    for name, text in scripts.items():
        _write_script(folder / name, HEAD.format(environment=environment) + text)
    for name in units:
        low = name != "executor" and min(port, link_port) < PRIVILEGED
        _write_unit(folder, name, f"start-{name}.sh", environment, pause=5, low=low)
    # started once the sites are registered, and again with the machine
    after = " fedscaffold-link.service fedscaffold-executor.service"
    until = f"on-failure\nRestartPreventExitStatus={STOPPED}"
    _write_unit(folder, "run", "run.sh", environment, pause=10, restart=until, after=after)
    # what carries a run is started, and started again only to take a new certificate
    serving = " ".join(_unit(name) for name in units if name != "executor")
    again = f'[ "$certificate" = kept ] || systemctl restart {serving}\n'
    _write_install(folder, units, again, CERTIFICATE, ", and a run under way goes on")


def _write_unit(
    folder: Path,
    name: str,
    script: str,
    environment: str,
    *,
    pause: int,
    restart: str = "always",
    after: str = "",
    given: str = "",
    low: bool = False,
) -> None:
    capability = "CAP_NET_BIND_SERVICE" if low else ""  # for a port that is root's otherwise
    unit = UNIT.format(
        name=name,
        folder=f"{HOME}/{folder.name}",
        script=script,
        environment=environment,
        pause=pause,
        restart=restart,
        after=after,
        given=given,
        capability=capability,
        ambient=f"AmbientCapabilities={capability}\n" if low else "",
    )
    write_private(folder / _unit(name), unit)


def _unit(name: str) -> str:
    return f"fedscaffold-{name}.service"


def _write_install(
    folder: Path, units: list[str], restart: str, before: str = "", running: str = ""
) -> None:
    text = INSTALL.format(
        home=HOME,
        folder=f"{HOME}/{folder.name}",
        units=" ".join(map(_unit, units)),
        before=before.format(folder=f"{HOME}/{folder.name}"),
        restart=restart,
        running=running,
    )
    _write_script(folder / "install.sh", text)


def _write_script(path: Path, text: str) -> None:
    write_private(path, text)
    path.chmod(0o700)

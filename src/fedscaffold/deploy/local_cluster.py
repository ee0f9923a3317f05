"""A Flower federation on this machine: SuperLink, SuperExec, a SuperNode and a worker per site.

Every process leads its own session, so that it can be stopped with everything it started, and
writes to its own log file (grandchildren would hold a pipe open). Flower's telemetry, update checks
and package installations are off. The link runs with `--isolation process` and a shared secret: a
run survives a crash of the link, and only our executor is given its tasks.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.deploy import keys
from fedscaffold.deploy.alerts import Alerts
from fedscaffold.deploy.app_files import TOML, pack_app
from fedscaffold.deploy.event_log import file_log
from fedscaffold.deploy.flower_process import write_command
from fedscaffold.deploy.kept_run import Backoff, Gone, KeptRun
from fedscaffold.deploy.processes import (
    descendants,
    end_processes,
    free_port,
    has_ended,
    signal_group,
)
from fedscaffold.deploy.secure_rules import IDENTITIES, write_identities, write_secure_rules
from fedscaffold.deploy.server_loop import Stopped
from fedscaffold.deploy.settings import load
from fedscaffold.deploy.worker_wire import AVAILABLE, WORKER
from fedscaffold.state.files import make_folder, write_private
from fedscaffold.state.platforms import cores

__all__ = ["SWITCHES", "Federation", "engine_environment"]

RETURN = 70.0  # seconds; Flower still considers a site online that restarts sooner, and refuses it
HEALTHY = 60.0  # seconds that the link may take to start
HUB = ("link", "executor")  # what the server app runs on; sites may be away when it starts
PRIVATE = 0o077  # umask: database, logs and output are readable by their owner only
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
}
"""Environment of Flower's processes: no telemetry, update checks or package installations.

Flower cuts arrays into pieces of 5 MB. What they take is given back by glibc only if it takes them
for large, which by default it no longer does once it has freed some.
"""
LINK = ("-P", "-m", "fedscaffold.deploy.flower_link")
"""Python's arguments that run the link."""
NODE = ("-P", "-m", "fedscaffold.deploy.flower_node")
"""Python's arguments that run a site's SuperNode."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC")
"""Environment that bounds the threads of NumPy, torch and XLA."""


def engine_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: this one without proxies, and `SWITCHES`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return kept | SWITCHES | {"FLWR_HOME": str(home), "PATH": path}


class Federation:
    """The processes of a federation on this machine; a context manager that stops them on exit."""

    def __init__(self, app: Path, home: Path, worker: str = "kept") -> None:
        """Prepare a federation.

        Args:
            app: Folder of the app.
            home: Folder of the deployment.
            worker: How sites answer (`flower_client.py`).
        """
        self.worker = worker if AVAILABLE else "none"
        self.app, self.home = Path(app).resolve(), Path(home).resolve()
        self.settings = load(self.app / TOML)
        if not self.settings.deploy.sites:
            raise InputError(
                f"{self.app / TOML}: deploy.sites must name the sites that may take part"
            )
        self.secrets, self.logs = self.home / "secrets", self.home / "logs"
        self.environment = engine_environment(self.home / "engine")
        share = str(max(1, cores() // len(self.settings.deploy.sites)))
        self.commands = self.home / "engine" / "bin"
        path = {"PATH": f"{self.commands}{os.pathsep}{self.environment['PATH']}"}
        self.at_sites = dict.fromkeys(THREADS, share) | self.environment | path
        """Environment of the sites' processes. All that may train have as many threads, as the
        order of sums and so the last bits depend on their number."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.log = file_log("keeper", self.logs / "keeper.log")
        self.run = KeptRun(self.home / "server", self._submit, self.log)
        self.backoffs: dict[str, Backoff] = {}
        self.due: dict[str, float] = {}  # when to restart a process that died
        self.usual: Any = None  # the previous handler of SIGTERM

    def __enter__(self) -> Federation:
        alone = threading.current_thread() is threading.main_thread()
        if alone and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # leave the `with` block on SIGTERM, so that all processes are stopped
            self.usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        for folder in (
            self.home,
            self.secrets,
            self.logs,
            self.home / "engine",
            self.home / "server",
        ):
            make_folder(folder, private=True)
        for stale in self.home.glob("link.db*"):
            stale.unlink()
        self._make_keys()
        write_command(self.commands)
        pack_app(self.app, self.home / "app")
        connection = (
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.secrets / "ca.crt"}"\n'
        )
        text = f'[superlink]\ndefault = "local"\n\n[superlink.local]\n{connection}'
        write_private(self.home / "engine" / "config.toml", text)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.usual is not None:
            signal.signal(signal.SIGTERM, self.usual)

    def up(self, tell: Callable[[str], None] = lambda what: None) -> None:
        """Start all processes, once the link is healthy and the sites are registered.

        Args:
            tell: Called with what is begun.
        """
        sites = self.settings.deploy.sites
        tell("starting the link")
        self.start_link()
        self.start_executor()
        tell(f"registering {len(sites)} sites")
        self._register()
        tell(f"starting {', '.join(sites)}")
        for site in sites:
            if self.worker == "kept":
                self.start_worker(site)
            self.start_site(site)

    def start_link(self) -> None:
        """Start the SuperLink and wait until it is healthy."""
        self._spawn_link()
        secrets = self.secrets
        context = ssl.create_default_context(cafile=str(secrets / "ca.crt"))
        until = time.monotonic() + HEALTHY
        while time.monotonic() < until:
            if has_ended(self.processes["link"]):
                raise Stopped(f"the link did not start; see {self.logs / 'link.log'}")
            try:
                with urllib.request.urlopen(
                    f"https://127.0.0.1:{self.port}/health", context=context, timeout=2
                ):
                    return
            except OSError:
                time.sleep(0.1)
        raise Stopped(
            f"the link was not healthy within {HEALTHY:.0f} s; see {self.logs / 'link.log'}"
        )

    def _spawn_link(self) -> None:
        """Start the SuperLink."""
        secrets = self.secrets
        tls = ["--ssl-ca-certfile", secrets / "ca.crt", "--ssl-certfile", secrets / "server.crt"]
        tls += ["--ssl-keyfile", secrets / "server.key", "--enable-supernode-auth"]
        alone = [
            "--isolation",
            "process",
            "--superexec-auth-secret-file",
            secrets / "superexec.secret",
        ]
        place = ["--host", "127.0.0.1", "--port", self.port, "--database", self.home / "link.db"]
        self._start("link", [sys.executable, *LINK, *place, *tls, *alone])

    def start_executor(self) -> None:
        """Start the process that runs the server app for the link."""
        secret = ["--superexec-auth-secret-file", self.secrets / "superexec.secret"]
        place = [
            "--runtime-api-address",
            f"127.0.0.1:{self.port}",
            "--root-certificates",
            self.secrets / "ca.crt",
        ]
        self._start("executor", ["flower-superexec", *place, *secret])

    def start_worker(self, site: str) -> None:
        """Start a site's worker."""
        folder = self.home / "sites" / site
        make_folder(folder, private=True)
        words = [sys.executable, *WORKER, folder, "--kept", "--until", os.getpid()]
        self._start(f"worker-{site}", words, self.at_sites)

    def start_site(self, site: str) -> None:
        """Start a site's SuperNode."""
        folder = self.home / "sites" / site
        make_folder(folder, private=True)
        place = [
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--host",
            "127.0.0.1",
            "--port",
            free_port(),
        ]
        trust = ["--root-certificates", self.secrets / "ca.crt"]
        trust += ["--auth-supernode-private-key", self.secrets / f"{site}.key"]
        config = f'site="{site}" folder="{folder}" files="{self.app}" worker="{self.worker}"'
        words = [sys.executable, *NODE, *place, *trust, "--node-config", config]
        self._start(f"site-{site}", words, self.at_sites)

    def submit(self) -> None:
        """Start or resume the run."""
        self.run.start()

    def _submit(self) -> None:
        """Start a server app."""
        words = ["flwr", "run", str(self.home / "app"), "local", "--format", "json"]
        words += ["--run-config", f'home="{self.home / "server"}" files="{self.app}"']
        limits: dict[str, Any] = {"timeout": 120, "umask": PRIVATE}
        try:
            done = subprocess.run(
                words, env=self.environment, capture_output=True, text=True, check=False, **limits
            )
        except subprocess.TimeoutExpired:
            raise Stopped("flwr run took more than 120 s") from None
        if done.returncode:
            raise Stopped(f"flwr run failed: {(done.stderr or done.stdout)[-300:].strip()}")

    def outcome(
        self, timeout: float, tell: Callable[[dict[str, Any]], None] = lambda status: None
    ) -> dict[str, Any]:
        """Wait for the end of the run.

        Args:
            timeout: Seconds to wait.
            tell: Called with every new status.

        Returns:
            The summary, from outcome.json.

        Raises:
            Stopped: If the run failed, a process died too often, or the timeout passed.
        """
        status = self.home / "server" / "status.json"
        until = time.monotonic() + timeout
        last: dict[str, Any] = {}
        try:
            while (result := self.run.look(ready=self.due.keys().isdisjoint(HUB))) is None:
                if time.monotonic() > until:
                    raise Gone(f"no outcome within {timeout:.0f} s; see {self.logs}")
                if status.exists():
                    now = json.loads(status.read_text(encoding="utf-8"))
                    if now != last:
                        last = now
                        tell(now)
                self._watch()
                time.sleep(0.2)
        except Gone as gone:
            self._give_up(str(gone))
            raise Stopped(str(gone)) from None
        if "error" in result:
            stopped = Stopped(result["error"])
            stopped.missed = result.get("missed", {})
            raise stopped
        return result

    def _give_up(self, why: str) -> None:
        """Tell the operator that the run ends here."""
        self.log("gave up", why=why)
        deploy = self.settings.deploy
        alerts = Alerts(deploy.alert, self.home / "server", self.log, deploy.alert_after)
        alerts.tell("run stopped", why)
        alerts.wait()

    def _watch(self) -> None:
        """Restart processes that died; sites only after Flower considers them offline.

        Raises:
            Gone: One died too often.
        """
        for name in [name for name, process in self.processes.items() if has_ended(process)]:
            self.kill(name)  # its descendants
            now, log = time.monotonic(), self.logs / f"{name}.log"
            pause = self.backoffs.setdefault(name, Backoff(name, log)).died(now)
            pause += RETURN if name.startswith("site-") else 0.0
            self.log(f"{name} died", again_in=pause)
            self.due[name] = now + pause
        for name in [name for name, at in self.due.items() if time.monotonic() >= at]:
            del self.due[name]
            if name.startswith("site-"):
                self.start_site(name.removeprefix("site-"))
            elif name.startswith("worker-"):
                self.start_worker(name.removeprefix("worker-"))
            elif name == "link":
                self._spawn_link()
            else:
                self.start_executor()

    def kill(self, name: str) -> None:
        """Kill (SIGKILL) a process and its descendants: "link", "executor" or "site-NAME"."""
        process = self.processes.pop(name)
        kin = descendants(process.pid)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        end_processes(kin, patience=0.0)

    def stop(self) -> None:
        """Stop all processes by SIGTERM, then SIGKILL after 10 seconds."""
        for name in [
            name for name, process in self.processes.items() if process.returncode is not None
        ]:
            del self.processes[name]  # already reaped
        kin = [one for process in self.processes.values() for one in descendants(process.pid)]
        order = sorted(self.processes, key=lambda name: (name == "link", name == "executor"))
        for name in order:
            signal_group(self.processes[name].pid, signal.SIGTERM)
        until = time.monotonic() + 10
        for name in order:
            process = self.processes[name]
            while not has_ended(process) and time.monotonic() < until:
                time.sleep(0.05)
            # and its group; not reaped yet, so the id is still valid
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()
        end_processes(kin)  # descendants that started sessions of their own

    def _make_keys(self) -> None:
        """Create the keys that do not exist yet, and a new server certificate."""
        secrets = self.secrets
        if not (secrets / "ca.crt").exists():
            keys.make_authority(secrets, days=365)
            keys.make_secret(secrets / "superexec.secret")
        keys.make_server(secrets, secrets, ["localhost", "127.0.0.1"], days=90)
        for site in self.settings.deploy.sites:
            if not (secrets / f"{site}.key").exists():
                keys.make_site_key(secrets / f"{site}.key", secrets / f"{site}.pub")
        if self.settings.deploy.secure:
            public = {site: secrets / f"{site}.pub" for site in self.settings.deploy.sites}
            write_identities(self.home / "server" / IDENTITIES, public)
            for site in public:
                key = str(secrets / f"{site}.key")
                write_secure_rules(self.settings, site, self.home / "sites" / site, key, public)

    def _register(self) -> None:
        """Register the sites' keys and names with the link."""
        sites = self.settings.deploy.sites
        started: list[subprocess.Popen[bytes]] = []
        try:
            for site in sites:
                words = [
                    "flwr",
                    "supernode",
                    "register",
                    str(self.secrets / f"{site}.pub"),
                    "local",
                    "--name",
                    site,
                ]
                quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
                started.append(
                    subprocess.Popen(
                        words, env=self.environment, stdout=quiet, stderr=pipe, umask=PRIVATE
                    )
                )
            for site, process in zip(sites, started, strict=True):
                _, said = process.communicate(timeout=120)
                if process.returncode:
                    raise Stopped(
                        f"{site} could not be registered: "
                        f"{said.decode(errors='replace')[-300:].strip()}"
                    )
        finally:  # on success they have ended already
            for process in started:
                process.kill()
                process.wait()

    def _start(
        self, name: str, command: list[Any], environment: dict[str, str] | None = None
    ) -> None:
        """Start a process in a session of its own, with its output in a log file."""
        log = os.open(
            self.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self.processes[name] = subprocess.Popen(
            [str(word) for word in command],
            env=environment or self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=PRIVATE,
        )
        os.close(log)

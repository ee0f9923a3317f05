"""`[deploy] alert`: a command that is told of what an operator should look at.

The command gets one JSON object on its standard input: `event`, `text`, `at`, the run's folder, and
the site where there is one. It runs without a shell, beside the run, for `LONGEST` seconds at most;
whatever it does, the run goes on. An event is told once, and again after it was over.

    run stopped             the run ended before its last round
    site missing            a site has not counted for `deploy.alert_after` rounds
    budget spent            a site has no privacy budget for another round
    residual                |c - sum p_i c_i| is more than rounding explains
    certificate ends        the server's certificate lasts less than `LEAST_DAYS` days
    disk nearly full        there is no room for a few more states
"""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedscaffold.deploy.event_log import EventLog
from fedscaffold.deploy.host import read_host

if TYPE_CHECKING:
    from fedscaffold.deploy.server import Outcome, Server

__all__ = ["Alerts"]

LONGEST = 30.0  # seconds that the command may take
LEAST_DAYS = 14.0
LEAST_FREE = 1 << 30  # bytes; or four times what the states take


class Alerts:
    """Tells a command of events.

    Args:
        command: The command and its arguments, split as a shell would; "" for none.
        home: Folder of the run.
        log: Log of the run, for commands that fail.
        after: Rounds after which a site counts as missing.

    >>> quiet = Alerts("", Path("run"), EventLog("server", print), after=3)
    >>> quiet.tell("run stopped", "training diverged")
    """

    def __init__(self, command: str, home: Path, log: EventLog, after: int) -> None:
        self.words, self.home, self.log, self.after = shlex.split(command), home, log, after
        self.missed: dict[str, int] = {}
        """Rounds in a row in which a site did not count."""
        self.standing: set[tuple[str, str]] = set()
        """Events and sites that were told and are not over."""
        self.running: list[threading.Thread] = []

    def tell(self, event: str, text: str, site: str = "") -> None:
        """Run the command for an event, unless it was told of it."""
        if not self.words or (event, site) in self.standing:
            return
        self.standing.add((event, site))
        facts: dict[str, Any] = {"event": event, "text": text, "at": time.time()}
        facts |= {"folder": str(self.home)} | ({"site": site} if site else {})
        thread = threading.Thread(target=self._run, args=(facts,), daemon=True)
        thread.start()
        self.running = [one for one in self.running if one.is_alive()] + [thread]

    def wait(self) -> None:
        """Wait for the commands that run, before the process ends."""
        for thread in self.running:
            thread.join(LONGEST + 1.0)

    def _run(self, facts: dict[str, Any]) -> None:
        said = json.dumps(facts).encode()
        try:
            done = subprocess.run(
                self.words, input=said, timeout=LONGEST, capture_output=True, check=False
            )
            why = f"exit code {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            self.log("alert failed", alert=facts["event"], why=why[:200])

    def look(self, server: Server, outcome: Outcome) -> None:
        """Look for events after a round."""
        if outcome.kind == "train":
            self._count(server, outcome)
        spent = {s: why for s, why in outcome.refused.items() if why.startswith("budget")}
        self._stand("budget spent", spent)
        self._stand("residual", {"": server.fault} if server.fault else {})
        self._stand("disk nearly full", _full_disk(self.home))
        self._stand("certificate ends", _old_certificate(self.home))

    def _count(self, server: Server, outcome: Outcome) -> None:
        """Count the rounds that sites have missed."""
        away = {*outcome.missing, *outcome.refused, *outcome.absent}
        away |= set(server.settings.deploy.sites) - set(server.roster)
        for site in outcome.heard:
            self.missed.pop(site, None)
        for site in away - set(outcome.heard):
            self.missed[site] = self.missed.get(site, 0) + 1
        self._stand(
            "site missing",
            {
                site: f"{site} has not counted for {number} rounds"
                for site, number in self.missed.items()
                if number >= self.after
            },
        )

    def _stand(self, event: str, now: Mapping[str, str]) -> None:
        """Tell what holds now, by site, and note what does not hold any more."""
        over = {one for one in self.standing if one[0] == event and one[1] not in now}
        self.standing -= over
        for site, text in now.items():
            self.tell(event, text, site)


def _full_disk(home: Path) -> dict[str, str]:
    free = read_host(home).disk_free
    kept = sum(path.stat().st_size for path in (home / "state").glob("*") if path.is_file())
    if free >= max(LEAST_FREE, 4 * kept):
        return {}
    return {"": f"{free >> 20} MiB are free for states of {kept >> 20} MiB in {home}"}


def _old_certificate(home: Path) -> dict[str, str]:
    left = read_host(home).certificate_days
    if left is None or left >= LEAST_DAYS:
        return {}
    return {"": f"the server's certificate lasts {left:.0f} more days"}

"""Memory and time of a real federation by the size of the model.

`python -m benchmarks.large_federation [--millions 25] [--sites 3] [--rounds 2] [--state server]`.

Starts what `fedscaffold deploy local` starts: link, executor, and a SuperNode and a worker for each
site, with TLS. Sites take one step on a quadratic, so that a round is what the model's way to the
sites and back takes. Peak resident memory of each kind of process, the largest of all its
processes, and of all processes together; seconds of every round from its opening to its commit,
with abandoned ones apart; and |c - sum p_i c_i|, where the server keeps the c_i.

It ends when less than `--spare` GB of memory are left on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from fedscaffold.deploy.audit import read_verified
from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.deploy.processes import descendants, end_processes

KINDS = {  # words of a command line, and what the process is
    "flwr-clientapp": "messenger",
    "deploy.worker": "worker",
    "flwr-serverapp": "server app",
    "deploy.flower_node": "node",
    "deploy.flower_link": "link",
}
PERIOD = 0.2  # seconds between looks at the processes
APP = """
import numpy as np
from fedscaffold.deploy import ArraysLearner

def data(site):
    return (np.full((1, 1), int(site.removeprefix("site")), np.float32),)

def gradient(params, batch):
    return {{"w": params["w"] - batch[0].mean()}}

def learner(settings):
    start = np.random.default_rng(0).random({size}, np.float32)
    return ArraysLearner(gradient, {{"w": start}}, data)
"""
TOML = """
rounds = {rounds}
[local]
steps = 1
lr = 0.1
[deploy]
sites = {sites}
state = "{state}"
quorum = 1.0
deadline = {deadline}
"""


class Gauge(threading.Thread):
    """Looks at the memory of all processes that this one has started, until `over` is set."""

    def __init__(self, spare: float) -> None:
        super().__init__(daemon=True)
        self.spare, self.over = spare, threading.Event()
        self.peak: dict[str, float] = {}

    def run(self) -> None:
        """Note peaks in GB."""
        while not self.over.wait(PERIOD):
            together = 0.0
            for pid, _ in descendants(os.getpid()):
                words, peak, now = read_process(pid)
                together += now
                for word, kind in KINDS.items():
                    if word in words:
                        self.peak[kind] = max(peak, self.peak.get(kind, 0.0))
            self.peak["all"] = max(together, self.peak.get("all", 0.0))
            if read_sizes("/proc/meminfo")["MemAvailable"] < self.spare:
                print(f"less than {self.spare} GB are left; peaks: {self.peak}", file=sys.stderr)
                end_processes(descendants(os.getpid()), patience=0.0)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def read_process(pid: int) -> tuple[str, float, float]:
    """Return name and command line of a process, and its largest and present memory in GB."""
    try:
        words = "".join(
            Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
            for name in ("comm", "cmdline")
        )
        sizes = read_sizes(f"/proc/{pid}/status")
    except OSError:
        return "", 0.0, 0.0
    return words, sizes.get("VmHWM", 0.0), sizes.get("VmRSS", 0.0)


def read_sizes(path: str) -> dict[str, float]:
    """Return the sizes in a file of /proc, by name, in GB."""
    rows = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {row[0].rstrip(":"): float(row[1]) / 1e6 for row in rows if row[-1] == "kB"}


def measure(
    millions: float,
    state: str,
    sites: int,
    rounds: int,
    deadline: float,
    spare: float,
    folder: Path,
) -> dict[str, Any]:
    """Run a federation and return what it took."""
    app, home = folder / "app", folder / "home"
    app.mkdir()
    (app / "app.py").write_text(APP.format(size=int(millions * 1e6)), encoding="utf-8")
    names = [f"site{i}" for i in range(sites)]
    text = TOML.format(rounds=rounds, sites=names, state=state, deadline=deadline)
    (app / "federation.toml").write_text(text, encoding="utf-8")
    gauge = Gauge(spare)
    with Federation(app, home) as federation:
        gauge.start()
        federation.up()
        federation.submit()
        outcome = federation.outcome(deadline * (rounds + 3))
        gauge.over.set()
    return {
        "millions": millions,
        "state": state,
        "sites": sites,
        "peak_gb": {kind: round(size, 2) for kind, size in sorted(gauge.peak.items())},
        **seconds_of_rounds(home / "server" / "audit.jsonl"),
        "residual": outcome["residual"],
        "missed": outcome["missed"],
    }


def seconds_of_rounds(path: Path) -> dict[str, list[float]]:
    """Return the seconds of training rounds and of abandoned ones, from the audit log."""
    found: dict[str, list[float]] = {"committed": [], "abandoned": []}
    began = 0.0
    for event in read_verified(path):
        at = datetime.fromisoformat(event["at"]).timestamp()
        if event["event"] == "opened":
            began = at
        if event["event"] in found:
            found[event["event"]].append(round(at - began, 1))
    return found


def main() -> None:
    """Measure each size and place of the c_i, and print a row of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[25])
    parser.add_argument("--state", nargs="+", default=["server"])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=600.0)
    parser.add_argument("--spare", type=float, default=2.0)
    parser.add_argument("--folder", help="where the deployment is written; temporary by default")
    args = parser.parse_args()
    for millions in args.millions:
        for state in args.state:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                more = (args.sites, args.rounds, args.deadline, args.spare)
                print(json.dumps(measure(millions, state, *more, Path(folder))), flush=True)


if __name__ == "__main__":
    main()

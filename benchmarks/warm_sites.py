"""What a round of a real federation costs with warm sites, and without.

`python benchmarks/warm_sites.py [--rounds 4]`.

The torch app of `deploy new`, four sites, SuperLink, SuperExec, four SuperNodes, TLS: first with a
worker at each site that holds app, model and data, then with everything loaded anew for each
message, by Flower's own commands. Seconds are the median over the rounds after the first, processor
seconds of all processes the mean, and what each kind of process takes of them.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedscaffold.deploy.local_cluster import Federation
from fedscaffold.deploy.templates import write_example

TICKS = os.sysconf("SC_CLK_TCK")
KINDS = {  # words of a command line, and what the process is
    "flwr-clientapp": "messages",
    "deploy.worker": "workers",
    "flwr-serverapp": "server",
    "flower-superexec": "executors",
    "deploy.flower_node": "nodes",
    "deploy.flower_link": "link",
}
PERIOD = 0.1  # seconds between looks at the processes; what one takes after the last is not counted


class Meter(threading.Thread):
    """Counts the processor seconds of all processes of a federation, also of those that end."""

    def __init__(self, federation):
        super().__init__(daemon=True)
        self.federation, self.spent, self.over = federation, {}, threading.Event()
        self.kinds = {}

    def run(self):
        """Look at the processes until `over` is set."""
        while not self.over.wait(PERIOD):
            self.look()

    def look(self):
        """Note what each process of the federation's sessions has taken so far."""
        leaders = {process.pid for process in list(self.federation.processes.values())}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in leaders:  # the session
                ticks = int(fields[11]) + int(fields[12])
                self.spent[entry.name, fields[19]] = ticks / TICKS
                if self.kinds.get((entry.name, fields[19]), "others") == "others":  # or just forked
                    self.kinds[entry.name, fields[19]] = kind_of(entry)

    @property
    def total(self):
        """Processor seconds so far, by kind of process."""
        total = dict.fromkeys([*KINDS.values(), "others"], 0.0)
        for process, seconds in self.spent.copy().items():
            total[self.kinds.get(process, "others")] += seconds
        return total


def kind_of(entry):
    """What a process is, by its name, which forks for messages have, and its command line."""
    try:
        words = "".join((entry / name).read_text(errors="replace") for name in ("comm", "cmdline"))
    except OSError:
        return "others"
    return next((kind for word, kind in KINDS.items() if word in words), "others")


def measure(app, home, worker):
    """Seconds and processor seconds a round, and the model."""
    with Federation(app, home, worker) as federation:
        if worker == "none":
            federation.at_sites["PATH"] = federation.environment["PATH"]  # Flower's own commands
        meter = Meter(federation)
        meter.start()
        began = time.monotonic()
        federation.up()
        federation.submit()
        stamps = {}
        federation.outcome(
            3600, lambda now: stamps.setdefault(now["round"], (time.monotonic(), meter.total))
        )
        meter.over.set()
        meter.join()
    at = [stamps[number] for number in sorted(stamps) if number >= 1]
    pairs = list(itertools.pairwise(at))
    spent = {
        kind: statistics.mean(b[1][kind] - a[1][kind] for a, b in pairs) for kind in pairs[0][0][1]
    }
    return {
        "seconds": statistics.median(b[0] - a[0] for a, b in pairs),
        "cpu_seconds": sum(spent.values()),
        "cpu_seconds_of": {kind: round(seconds, 2) for kind, seconds in spent.items()},
        "first_round_after": stamps[1][0] - began,
        "rounds": len(pairs),
    }, (home / "server" / "model.safetensors").read_bytes()


def main():
    """Measure both, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("kept", "own", "none"), help="measure one way alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        app = Path(place, "app")
        write_example(app, "torch")
        toml = app / "federation.toml"
        toml.write_text(toml.read_text().replace("rounds = 5", f"rounds = {asked.rounds}"))
        if asked.only:
            found, _ = measure(app, Path(place, "home"), asked.only)
            sys.stdout.write(json.dumps(found | {"load": os.getloadavg()[0]}) + "\n")
            return
        warm, mine = measure(app, Path(place, "warm"), "kept")
        cold, theirs = measure(app, Path(place, "cold"), "none")
    answer = {
        "warm": warm,
        "cold": cold,
        "cpu_ratio": warm["cpu_seconds"] / cold["cpu_seconds"],
        "seconds_ratio": warm["seconds"] / cold["seconds"],
        "load": os.getloadavg()[0],
    }
    sys.stdout.write(json.dumps(answer | {"same_bits": _arrays(mine) == _arrays(theirs)}) + "\n")


def _arrays(model):
    """The arrays of a model's file, without its head, which names the run."""
    return model[8 + int.from_bytes(model[:8], "little") :]


if __name__ == "__main__":
    main()

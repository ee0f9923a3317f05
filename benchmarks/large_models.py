"""Memory and time of the deployment's server by the size of the model.

`python -m benchmarks.large_models [--millions 1 25 100] [--sites 3] [--rounds 2]`.

Drives `Server` without a network, one process for each size and place of the c_i. The sites are
synthetic: a reply is made from the request when it is asked for, so that at any time the process
holds what a server holds. Peak resident memory, seconds and CPU seconds of every phase, each the
largest of all rounds:
`open` makes the requests, `receive` validates a reply, `close` aggregates and commits (`commit` is
the part of it that writes), `resume` starts a new server on the same folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedscaffold.deploy import Server, parse
from fedscaffold.deploy import server as server_module
from fedscaffold.deploy.schema import Packet, Schema, blob, digest_of

PHASES = ("start", "open", "receive", "close", "commit", "resume")


class Gauge:
    """Seconds and peak memory of phases, the largest of all their calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        self.under_way: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one call; phases may nest."""
        self._note_peak()
        self.under_way.append(name)
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = max(time.perf_counter() - began, self.seconds.get(name, 0.0))
        self.cpu[name] = max(time.process_time() - cpu, self.cpu.get(name, 0.0))
        self._note_peak()
        self.under_way.pop()

    def _note_peak(self) -> None:
        """Add the peak since the last call to all phases under way, and begin a new one."""
        peak = read_status("VmHWM")
        for name in self.under_way:
            self.peak[name] = max(peak, self.peak.get(name, 0.0))
        Path("/proc/self/clear_refs").write_text("5")


def read_status(field: str) -> float:
    """Return a size of /proc/self/status in GB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1e6


def reply_to(request: Packet, site: str, records: int, state: str) -> Packet:
    """Return the reply of a site that was asked to train: any direction of the right size."""
    echo = {name: request.facts[name] for name in ("site", "round", "nonce", "schema")}
    size = np.frombuffer(request.blobs["x"].data, np.float32).size
    source = np.random.default_rng([records, int(str(request.facts["round"]))])
    d = source.random(size, np.float32)
    memory = {} if state == "server" else {"memory": digest_of([site, echo["round"]]) * 2}
    facts = {**echo, "kind": "train", "records": records, "steps": 1, **memory}
    return Packet(facts, {"d": blob(d)})


def measure(millions: int, state: str, sites: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run a server in this process and return what it took."""
    names = [f"site{i}" for i in range(sites)]
    settings = parse(
        f"precision = 'float32'\nrounds = {rounds}\n[algorithm]\nname = 'scaffold'\n"
        f"[local]\nsteps = 1\nlr = 0.1\n[deploy]\nsites = {names}\nstate = '{state}'\n"
    )
    schema = Schema(("w",), ((millions * 1_000_000,),), "float32")
    gauge = Gauge()
    save = server_module.save_state

    def timed(*args: Any) -> int:
        with gauge.phase("commit"):
            return save(*args)

    server_module.save_state = timed
    with gauge.phase("start"):
        server = Server(settings, schema, np.zeros(schema.size, np.float32), folder)
    hello = {"kind": "hello", "schema": schema.digest, "settings": settings.digest}
    hello["app"] = digest_of(settings.app)
    facts = {name: {**hello, "site": name, "records": 10 + i} for i, name in enumerate(names)}
    assert not server.welcome({name: Packet(facts[name], {}) for name in names})
    for _ in range(rounds):
        with gauge.phase("open"):
            requests = server.open(names)
        for i, name in enumerate(names):
            reply = reply_to(requests[name], name, 10 + i, state)
            with gauge.phase("receive"):
                assert server.receive(name, reply).counted
            del reply
        del requests
        with gauge.phase("close"):
            assert server.close().committed
    x = server.state.x.copy()
    del server
    with gauge.phase("resume"):
        again = Server(settings, schema, np.zeros(schema.size, np.float32), folder)
    assert np.array_equal(again.state.x, x)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "millions": millions,
        "state": state,
        "sites": sites,
        "peak_gb": max(gauge.peak.values()),
        "peak_by_phase_gb": {name: round(gauge.peak[name], 3) for name in PHASES},
        "seconds": {name: round(gauge.seconds[name], 3) for name in PHASES},
        "cpu_seconds": {name: round(gauge.cpu[name], 3) for name in PHASES},
        "disk_gb": size / 1e9,
    }


def main() -> None:
    """Run every size and place of the c_i in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 25, 100])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--state", nargs="+", default=["server", "client"])
    parser.add_argument("--folder", help="where the state is written; temporary by default")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = measure(args.millions[0], args.state[0], args.sites, args.rounds, Path(folder))
        print(json.dumps(found))
        return
    more = ["--sites", str(args.sites), "--rounds", str(args.rounds)]
    more += ["--folder", args.folder] if args.folder else []
    for millions in args.millions:
        for state in args.state:
            call = [sys.executable, "-m", "benchmarks.large_models", "--one", *more]
            call += ["--millions", str(millions), "--state", state]
            done = subprocess.run(call, check=True, capture_output=True, text=True)
            print(done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()

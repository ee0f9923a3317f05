"""What SCAFFOLD costs beside FedAvg on the same engine.

`python benchmarks/deployment.py [--engine local]`.

Four sites, a torch network of about 100,000 weights on random pictures, the same seed and steps for
both. `in-process` runs the deployed code without a network, alternately, and prints processor
seconds a round by best of the repetitions; `local` starts one real federation after the other
(SuperLink, SuperExec, four SuperNodes, TLS) and prints seconds a round by the median over the
rounds after the first. Bytes are those of the packets, counted by the transport.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.local_cluster import Federation

APP = """
from functools import cache

import torch

from fedscaffold.deploy import TorchLearner

SITES = ("north", "east", "south", "west")


def model():
    return torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def loss(module, batch):
    return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])


@cache
def data(site):
    source = torch.Generator().manual_seed(SITES.index(site))
    return torch.randn(RECORDS, 784, generator=source), torch.randint(0, 10, (RECORDS,),
    generator=source)


def learner(settings):
    return TorchLearner(model, loss, data, precision=settings.precision)
"""

TOML = """
rounds = {rounds}
[algorithm]
name = "{name}"
[local]
steps = {steps}
batch_size = 32
lr = 0.01
[deploy]
sites = ["north", "east", "south", "west"]
"""


class Counted(InProcess):
    """The transport without a network, with its bytes counted."""

    down = up = 0

    def send(self, requests):
        """Count what goes to the sites."""
        self.down += sum(_size(packet) for packet in requests.values())
        super().send(requests)

    def collect(self):
        """Count what comes back."""
        came = super().collect()
        self.up += sum(_size(packet) for _, packet in came)
        return came


def _size(packet):
    return sum(len(blob.data) for blob in packet.blobs.values())


def write_app(folder, name, rounds, steps):
    """An app of four sites."""
    folder.mkdir()
    (folder / "app.py").write_text(APP.replace("RECORDS", "2000"), encoding="utf-8")
    (folder / "federation.toml").write_text(
        TOML.format(name=name, rounds=rounds, steps=steps), encoding="utf-8"
    )
    return folder


def in_process(folder, name, rounds, steps, tries):
    """Processor and wall seconds a round, and bytes up and down a round, without a network."""
    best = []
    for attempt in range(tries):
        app = write_app(folder / f"{name}{attempt}", name, rounds, steps)
        settings, learner = open_app(app)
        server = Server(
            settings, learner.schema, learner.start, app / "run", buffers=learner.buffers
        )
        transport = Counted(learner, settings, app / "run")
        drive(
            server, transport, 1
        )  # the first round warms up; its last evaluation is not counted either
        transport.down = transport.up = 0
        cpu, wall = time.process_time(), time.perf_counter()
        drive(server, transport, rounds)
        count = rounds - 1
        best.append(
            {
                "cpu_ms": 1e3 * (time.process_time() - cpu) / count,
                "wall_ms": 1e3 * (time.perf_counter() - wall) / count,
                "bytes_up": transport.up // count,
                "bytes_down": transport.down // count,
            }
        )
    return min(best, key=lambda row: row["cpu_ms"])


def local(folder, name, rounds, steps):
    """Seconds a round of a real federation of processes."""
    app = write_app(folder / f"local-{name}", name, rounds, steps)
    with Federation(app, folder / f"run-{name}") as federation:
        federation.up()
        federation.submit()
        stamps = {}
        federation.outcome(1800, lambda now: stamps.setdefault(now["round"], time.monotonic()))
    at = [stamps[number] for number in sorted(stamps) if number >= 1]
    spans = [later - earlier for earlier, later in itertools.pairwise(at)]
    return {
        "seconds": statistics.median(spans),
        "least": min(spans),
        "most": max(spans),
        "rounds": len(spans),
    }


def main():
    """Measure both, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("in-process", "local"), default="in-process")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tries", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        answer = {}
        for name in ("fedavg", "scaffold"):
            if asked.engine == "local":
                answer[name] = local(Path(place), name, asked.rounds, asked.steps)
            else:
                answer[name] = in_process(Path(place), name, asked.rounds, asked.steps, asked.tries)
    key = "seconds" if asked.engine == "local" else "cpu_ms"
    answer["ratio"] = answer["scaffold"][key] / answer["fedavg"][key]
    sys.stdout.write(json.dumps({"engine": asked.engine, "steps": asked.steps, **answer}) + "\n")


if __name__ == "__main__":
    main()

"""What a secure sum costs: processor seconds of a site and of the server, and bytes, a round.

`python benchmarks/secure_sums.py [--json]`.

In this process, without a network or training (gradients of zero): a round's work for one site, by
exchange, and for the server, as the median over the rounds after the first; bytes of the packets of
a site, up and down. Two sums stand beside the plain round: one that all sites finish, and one that
two sites leave after they have dealt their shares, whose masks the server then has to remove.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from fedscaffold.deploy import ArraysLearner, Server, parse
from fedscaffold.deploy.client import answer, greeting
from fedscaffold.deploy.secure_rules import provision

TOML = """
precision = "float32"
evaluate_every = 1000000
[local]
steps = 1
[deploy]
sites = {sites}
state = "client"
secure = {secure}
"""


def size(packet):
    return sum(len(item.data) for item in packet.blobs.values())


def measure(count, dimension, secure, dying, rounds):
    """Seconds and bytes of the median round."""
    sites = [f"site{i:02d}" for i in range(count)]
    config = parse(TOML.format(sites=json.dumps(sites), secure=str(secure).lower()))
    learner = ArraysLearner(
        lambda params, batch: {"w": np.zeros(dimension, np.float32)},
        {"w": np.zeros(dimension)},
        lambda site: (np.zeros((1, 1)),),
        precision="float32",
    )
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if secure:
            provision(config, folder, folder / "sites")
        server = Server(config, learner.schema, learner.start, folder)
        server.welcome({site: greeting(learner, config, site) for site in sites})
        for _ in range(rounds + 1):
            rows.append(play(server, learner, config, folder, set(sites[:dying])))
    median = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    return {"sites": count, "numbers": dimension, "secure": secure, "left": dying} | median


def play(server, learner, config, folder, dying):
    spent, sent = defaultdict(float), defaultdict(int)
    begun = time.process_time()
    requests = server.open(config.deploy.sites)
    spent["server"] += time.process_time() - begun
    while requests:
        for site, request in requests.items():
            exchange = request.facts.get("exchange", "plain")
            sent["down"] += size(request)
            if site in dying and exchange == "masked":
                server.failed(site, "left")
                continue
            begun = time.process_time()
            reply = answer(request, learner, config, site, folder / "sites")
            now = time.process_time()
            spent[exchange] += now - begun
            sent["up"] += size(reply)
            server.receive(site, reply)
            spent["server"] += time.process_time() - now
        begun = time.process_time()
        requests = server.advance()
        spent["server"] += time.process_time() - begun
    begun = time.process_time()
    assert server.close().committed
    spent["server"] += time.process_time() - begun
    number, own = len(config.deploy.sites), spent.pop("server")
    by_site = {f"site, {name}": seconds / number for name, seconds in spent.items()}
    total = {"site": sum(by_site.values()), "server": own}
    return total | by_site | {f"bytes {way}": sent[way] / number for way in ("down", "up")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sites", type=int, nargs="*", default=[5, 10, 20])
    parser.add_argument("--numbers", type=int, nargs="*", default=[1000, 1_000_000])
    asked = parser.parse_args()
    rows = [
        measure(count, dimension, secure, dying, asked.rounds)
        for dimension in asked.numbers
        for count in asked.sites
        for secure, dying in ((False, 0), (True, 0), (True, 2))
    ]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print("| numbers | sites | sum | CPU s, a site | CPU s, server | MB down | MB up |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        left = f", {row['left']} left" if row["left"] else ""
        kind = f"secure{left}" if row["secure"] else "plain"
        seconds = [f"{row[name]:.3f}" for name in ("site", "server")]
        traffic = [f"{row[f'bytes {way}'] / 1e6:.3f}" for way in ("down", "up")]
        cells = [row["numbers"], row["sites"], kind, *seconds, *traffic]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()

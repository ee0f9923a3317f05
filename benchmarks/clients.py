"""Time and memory of rounds whose clients' state lies in files.

`python benchmarks/clients.py 1000000`.

N clients with one record each, d = 10,000, cohorts of 100, float32: 4 MB of control variates a
round, 40 GB for a million clients if all were heard. Prints one JSON line; run it for 10,000 and
1,000,000 and compare.
"""

import json
import resource
import sys
import tempfile
import time

import numpy as np

import fedscaffold as fs
from fedscaffold.simulation import problem_on_disk

DIM, COHORT, ROUNDS = 10_000, 100, 60


def loss(w, batch):
    """Mean over records of |w - b|^2 / 2 d, b a number."""
    return 0.5 * ((w[None] - batch[:, None]) ** 2).mean()


def main(num_clients: int, kind: str) -> None:
    """Run, and print seconds a round, processor seconds a round, and the largest memory."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        column = np.memmap(f"{folder}/records", np.float32, "w+", shape=(num_clients,))
        column[:] = rng.normal(size=num_clients)
        problem = problem_on_disk(
            loss, np.zeros(DIM, np.float32), column, np.arange(num_clients + 1)
        )
        run = fs.simulate(
            fs.scaffold(),
            problem,
            rounds=ROUNDS,
            local_steps=5,
            lr=0.1 * DIM,
            cohort=COHORT,
            metrics=(),
            client_state=kind,
            checkpoint=f"{folder}/checkpoint" if kind == "file" else None,
            every=20 if kind == "file" else None,
        )
        answer = {
            "num_clients": num_clients,
            "client_state": kind,
            "ms_a_round": 1e3 * run.seconds.wall / ROUNDS,
            "processor_ms_a_round": 1e3 * run.seconds.cpu / ROUNDS,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "relative_residual": run.residual / run.scale,
            "at": time.strftime("%H:%M"),
        }
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "file")

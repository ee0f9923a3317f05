"""A grid of 12 runs of an MLP, on one core and on two: `python -m benchmarks.grid [ROUNDS]`.

Both begin with an empty cache of compiled programs and with nothing imported, so that starting
workers and compiling in each of them count. CPU time of all processes of the grid, over wall time
times cores, is printed beside the wall time: it tells what share the machine's other work takes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

CORES = 2


def measure(rounds: int, workers: int) -> None:
    import numpy as np

    import fedscaffold as fs

    rng = np.random.default_rng(0)
    counts = rng.integers(100, 300, 20)
    clients = [(rng.normal(size=(n, 784)), rng.integers(0, 10, n)) for n in counts]
    problem = fs.problems.mlp(clients, 128, classes=10, seed=0)
    began = time.perf_counter()
    found = fs.grid(
        fs.scaffold(),
        problem,
        over={"lr": [0.01, 0.02, 0.05], "seed": range(4)},
        workers=workers,
        rounds=rounds,
        local_steps=10,
        batch_size=32,
        cohort=5,
        metrics=["loss"],
        evaluate_every=10,
    )
    wall = time.perf_counter() - began
    assert not found.failed, found.failed[0].error
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    print(json.dumps({"wall": wall, "cpu": cpu, "digests": [run.digest for run in found.runs]}))


def alone(rounds: int, workers: int) -> dict[str, object]:
    """The measurement in a process of its own, on as many cores as workers."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.grid", str(rounds), str(workers)],
            env=os.environ | {"PJRT_NPROC": "1", "JAX_COMPILATION_CACHE_DIR": cache},
            preexec_fn=lambda: os.sched_setaffinity(0, range(workers)),
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    if len(sys.argv) > 2:
        measure(rounds, int(sys.argv[2]))
        return
    one, two = alone(rounds, 1), alone(rounds, CORES)
    for cores, took in ((1, one), (CORES, two)):
        share = took["cpu"] / took["wall"] / cores
        print(f"{cores} cores: {took['wall']:.1f} s wall, {took['cpu']:.1f} s CPU ({share:.0%})")
    print(f"wall ratio {two['wall'] / one['wall']:.2f}; load {os.getloadavg()[0]:.1f}")
    print("same bits" if one["digests"] == two["digests"] else "OTHER BITS")


if __name__ == "__main__":
    main()

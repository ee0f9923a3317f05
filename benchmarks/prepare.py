"""CPU seconds before the first round, by stages: `python -m benchmarks.prepare W9 [W5 ...]`.

Each work load has a process of its own, without a cache of compiled programs. JAX, torch and the
data are loaded before the clock starts; what torch imports on its first export counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from benchmarks.worker import network_problem, steps_of
from benchmarks.workloads import WORKLOADS

__all__ = ["main", "measure"]


def measure(name: str) -> dict[str, float]:
    """Measure the stages of a work load with a network, in this process."""
    import jax  # noqa: F401
    import torch  # noqa: F401

    import fedscaffold as fs
    from fedscaffold.simulation.engine import compile_rounds

    workload, clock = WORKLOADS[name.lower()](), time.process_time
    times = [clock()]
    problem = network_problem(workload)
    times.append(clock())
    _ = problem.kinds
    times.append(clock())
    simulator = fs.Simulator(
        fs.scaffold(),
        problem,
        rounds=workload.rounds,
        **steps_of(workload),
        lr=workload.lr,
        cohort=workload.cohort,
        batch_size=workload.batch_size,
        metrics=(),
        progress=False,
    )
    times.append(clock())
    compile_rounds(simulator.ready, [0], 1)
    times.append(clock())
    stages = "make the problem", "inspect its functions", "check the run", "trace and compile"
    took = {stage: b - a for stage, a, b in zip(stages, times, times[1:], strict=False)}
    return took | {"together": times[-1] - times[0]}


def main() -> None:
    """Measure the work loads that are named, or with a network, one after another."""
    names = sys.argv[1:] or ["W5", "W6", "W7", "W8", "W9"]
    if os.environ.get("JAX_ENABLE_COMPILATION_CACHE") == "0":
        print(json.dumps(measure(names[0])))
        return
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.prepare", name],
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
            stdout=subprocess.PIPE,
            check=True,
        )
        took = json.loads(done.stdout)
        said = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in took.items())
        print(f"{name.upper()}: {said}; load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()

"""One contestant on one work load, in a process of its own: `python -m benchmarks.worker '{...}'`.

A process of its own, because threads are chosen before JAX or torch starts, and so that no
contestant warms another's
caches. Prints one JSON line: CPU and wall seconds of every repetition, compile seconds apart.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks import networks
from benchmarks.networks import NETWORKS
from benchmarks.workloads import L2, WORKLOADS, Workload

__all__ = ["main", "network_problem", "steps_of"]


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Run a task: a work load by name, a contestant, repetitions, and changes to the work load."""
    if task["contestant"] == "sweep":
        return _sweep(task["precision"], task["noise"], task["cohort"])
    clients = task.get("clients")
    make = WORKLOADS[task["workload"].lower()]
    workload = make() if clients is None else make(clients)
    workload = workload._replace(**task.get("replace", {}))
    if task["contestant"] == "products":
        from benchmarks.products import product_seconds

        return product_seconds(workload)
    if task["contestant"] == "ours":
        return _ours(workload, task["repeat"])
    return _torch(workload, task["contestant"], task["repeat"], task["threads"])


def _ours(workload: Workload, repeat: int) -> dict[str, Any]:
    from fedscaffold import Callback, problems, simulate
    from fedscaffold.algorithms import scaffold
    from fedscaffold.experiments.build_problem import cache_programs

    class Clock(Callback):
        prepared = 0.0

        def begin(self, look: Any) -> None:
            self.prepared = self.prepared or time.process_time() - began

    began, clock = time.process_time(), Clock()
    if workload.model in NETWORKS:
        problem = network_problem(workload)
    elif workload.model == "mlp":
        problem = problems.mlp(workload.clients, workload.hidden, classes=workload.classes)
    elif workload.model == "softmax":
        problem = problems.softmax(workload.clients, classes=workload.classes)
    else:
        problem = problems.logistic(workload.clients, l2=L2)
    cache_programs()
    runs = [
        simulate(
            scaffold(),
            problem,
            rounds=workload.rounds,
            **steps_of(workload),
            lr=workload.lr,
            cohort=workload.cohort,
            batch_size=workload.batch_size,
            metrics=(),
            seed=seed,
            progress=False,
            callbacks=[clock] if seed == 0 else [],
        )
        for seed in range(repeat + 1)
    ]
    warm = runs[1:]  # the first run compiles and touches the data for the first time
    return {
        "cpu": [run.seconds.cpu for run in warm],
        "wall": [run.seconds.wall for run in warm],
        "compile": runs[0].seconds.compile,
        "prepare": clock.prepared,  # everything before the first round, in CPU time
        "residual": max(run.residual for run in runs),
    }


def steps_of(workload: Workload) -> dict[str, Any]:
    """The argument of `simulate` that says how many steps a client takes."""
    return {"local_steps": workload.local_steps} if workload.local_steps else {"local_epochs": 1}


def network_problem(workload: Workload) -> Any:
    """The network in JAX, or for w9 as a torch module."""
    from fedscaffold import problems

    if workload.name != "w9":
        start = networks.start(workload.model, workload.classes, seed=0)
        return problems.Problem(networks.jax_loss(workload.model), start, workload.clients)
    from torch.nn import functional

    module = networks.torch_module(workload.model, workload.classes, seed=0)
    clients = [(np.ascontiguousarray(np.moveaxis(x, -1, 1)), y) for x, y in workload.clients]
    return problems.torch(
        module, lambda module, batch: functional.cross_entropy(module(batch[0]), batch[1]), clients
    )


def _torch(workload: Workload, contestant: str, repeat: int, threads: int) -> dict[str, Any]:
    import torch

    from benchmarks import torch_func, torch_loops, torch_tight

    threads = threads or torch.get_num_threads()
    loop = {
        "tutorial": torch_loops.tutorial,
        "batched": torch_loops.batched,
        "tight": torch_tight.tight,
        "vectorised": torch_func.vectorised,
    }[contestant]
    try:
        runs = [loop(workload, workload.rounds, seed, threads) for seed in range(repeat + 1)]
    except RuntimeError as error:  # an operator without a rule for vmap
        return {"failed": f"torch says: {str(error).splitlines()[0][:90]}"}
    warm = runs[1:] if repeat > 1 else runs
    return {
        "cpu": [run.cpu_seconds for run in warm],
        "wall": [run.wall_seconds for run in warm],
        "compile": 0.0,
        "residual": max(run.residual for run in runs),
    }


def _sweep(precision: str, noise: float, cohort: float) -> dict[str, Any]:
    """Fifty runs of a quadratic (N = 10, d = 20) in one sweep, and one of them.

    Best of three, compiled.
    """
    from fedscaffold import problems, simulate, sweep
    from fedscaffold.algorithms import scaffold
    from fedscaffold.experiments.build_problem import cache_programs

    problem = problems.quadratic(
        num_clients=10, dim=20, mu=0.01, smoothness=1.0, noise=noise, seed=0
    )
    cache_programs()
    same: dict[str, Any] = {
        "rounds": 500,
        "local_steps": 10,
        "precision": precision,
        "metrics": (),
        "cohort": cohort,
    }
    steps = [0.05, 0.1, 0.2, 0.3, 0.4]
    one = [
        simulate(scaffold(), problem, lr=0.1, seed=k, progress=False, **same).seconds.cpu
        for k in range(4)
    ]
    all_ = [
        sweep(scaffold(), problem, lr=steps, seeds=10, progress=False, **same).seconds.cpu
        for _ in range(4)
    ]
    cost, costs = min(one[1:]), min(all_[1:])
    return {"one_cpu_seconds": cost, "all_cpu_seconds": costs, "ratio": costs / cost}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")

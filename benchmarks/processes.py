"""Time of a round on one, two and four processes of this machine: `python benchmarks/processes.py`.

Two work loads, one thread a process. "steps": a perceptron 64-256-10, 64 of 200 clients, 20 steps
    of batch 32, where
local steps are all the work. "sums": d = 1,000,000 and one cheap step of 8 clients, where joining
    them is. Prints one
JSON line for each work load and number of processes: the clock's time of a round (least and median
of five tries) and the processors' time of one, all processes together. Then what one psum of n
float32 numbers takes, least and median.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

ROUNDS = {"steps": 10, "sums": 30}


def problem(load):
    """The problem and the arguments of a work load."""
    import numpy as np

    import fedscaffold as fs

    rng = np.random.default_rng(0)
    if load == "steps":
        clients = [(rng.normal(size=(100, 64)), rng.integers(0, 10, 100)) for _ in range(200)]
        given = {"cohort": 64, "local_steps": 20, "batch_size": 32, "lr": 0.05}
        return fs.problems.mlp(clients, 256, classes=10), given

    def loss(w, batch):
        return 0.5 * ((w[None] - batch[:, None]) ** 2).mean()

    given = {"cohort": 8, "local_steps": 1, "lr": 1.0}
    return fs.Problem(loss, np.zeros(1_000_000), [np.full(1, i / 8) for i in range(8)]), given


def member(load, processes, number, at):
    """One process: five tries of some rounds; the first one prints."""
    import fedscaffold as fs
    from fedscaffold.simulation.distributed import allgather, join, leave

    join(at, processes, number)
    given, rounds = problem(load), ROUNDS[load]
    tries = []
    for _ in range(6):  # the first compiles
        run = fs.simulate(
            fs.scaffold(),
            given[0],
            rounds=rounds,
            metrics=(),
            devices=processes if processes > 1 else None,
            **given[1],
        )
        every = [json.loads(other) for other in allgather(json.dumps(run.seconds.cpu))]
        tries.append((1e3 * run.seconds.wall / rounds, 1e3 * sum(every) / rounds))
    if number == 0:
        clock, cpu = zip(*sorted(tries[1:]), strict=True)
        answer = {"load": load, "processes": processes, "d": given[0].dim, "ms_a_round": clock[0]}
        answer |= {
            "median_ms": clock[2],
            "processor_ms": sorted(cpu)[2],
            "at": time.strftime("%H:%M"),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
    if processes > 1:
        leave()


def psums(processes, number, at):
    """One process: psums of several sizes; the first one prints."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from fedscaffold.simulation.distributed import join, leave

    join(at, processes, number)
    mesh = Mesh(np.array(jax.devices()), ("processes",))
    own = PartitionSpec("processes")
    joined = jax.jit(
        jax.shard_map(
            lambda a: jax.lax.psum(a, "processes"),
            mesh=mesh,
            in_specs=own,
            out_specs=PartitionSpec(),
        )
    )
    for n in (20_000, 200_000, 2_000_000):
        row = jax.device_put(np.ones((1, n), np.float32), jax.local_devices()[0])
        every = jax.make_array_from_single_device_arrays(
            (processes, n), NamedSharding(mesh, own), [row]
        )
        took = []
        for _ in range(31):
            began = time.perf_counter()
            jax.block_until_ready(joined(every))
            took.append(1e3 * (time.perf_counter() - began))
        if number == 0:
            took = sorted(took[1:])
            answer = {
                "load": "psum",
                "processes": processes,
                "n": n,
                "least_ms": took[0],
                "median_ms": took[15],
            }
            sys.stdout.write(json.dumps(answer) + "\n")
    leave()


def address():
    """A free port below those that the system gives to outgoing connections."""
    for port in range(10_000 + os.getpid() % 10_000, 30_000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise OSError("no free port")


def main():
    """Start the processes of every case."""
    for load in (*ROUNDS, "psum"):
        for processes in (1, 2, 4) if load != "psum" else (2, 4):
            at = address()
            words = [
                [sys.executable, __file__, load, str(processes), str(i), at]
                for i in range(processes)
            ]
            team = [subprocess.Popen(own, env={**os.environ, "PJRT_NPROC": "1"}) for own in words]
            codes = [process.wait() for process in team]
            if any(codes):
                sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "psum":
        psums(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        member(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

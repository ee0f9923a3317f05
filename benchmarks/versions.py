"""Two versions of the library on W1 to W4, side by side.

`python -m benchmarks.versions OTHER_CHECKOUT`.

The two take turns, each time in a process of its own. A process runs the work load twice with the
same seed; the second run, which compiles nothing, counts. The table has the least CPU time of all
turns, which is what a busy machine disturbs least, and the largest difference between the models
that the two versions end with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.workloads import L2, WORKLOADS

__all__ = ["main"]

HERE = Path(__file__).resolve().parents[1]
JAX = {
    "PJRT_NPROC": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}  # one thread; programs are kept


def main() -> None:
    """Compare this checkout with another one, or (with --turn) take one turn."""
    parser = argparse.ArgumentParser("python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--only", default="W1,W2,W3,W4", help="work loads, with commas between")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each version")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.turn:
        return _turn(told.only, told.other)
    if not (told.other / "src" / "fedscaffold").is_dir():
        parser.error(f"{told.other} holds no src/fedscaffold")
    print(
        "| work load | this, CPU s | other, CPU s | ratio | largest difference of x | largest x |"
    )
    print("|---|---|---|---|---|---|")
    for name in told.only.split(","):
        print(_row(name, told.other.resolve(), told.repeat), flush=True)
    return None


def _row(name: str, other: Path, repeat: int) -> str:
    versions = {"this": HERE, "other": other}
    cpu: dict[str, list[float]] = {which: [] for which in versions}
    models = {}
    with TemporaryDirectory() as folder:
        for turn in range(repeat):
            for which in sorted(versions, reverse=turn % 2 == 0):
                out = Path(folder, f"{which}.npz")
                told = {
                    "PYTHONPATH": f"{versions[which] / 'src'}{os.pathsep}{HERE}",
                    "JAX_COMPILATION_CACHE_DIR": folder,
                }
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.versions",
                    str(out),
                    "--only",
                    name,
                    "--turn",
                ]
                subprocess.run(command, env=os.environ | JAX | told, cwd=folder, check=True)
                with np.load(out) as kept:
                    cpu[which].append(float(kept["cpu"]))
                    models[which] = kept["x"]
    this, before = min(cpu["this"]), min(cpu["other"])
    apart = np.abs(models["this"] - models["other"]).max()
    largest = np.abs(models["this"]).max()
    times = f"{this:.3f} | {before:.3f} | {this / before:.2f}"
    return f"| {name} | {times} | {apart:.1e} | {largest:.2g} |"


def _turn(name: str, out: Path) -> None:
    """Run one work load twice; keep the CPU time of the second run and its model."""
    import jax

    from fedscaffold import problems, scaffold, simulate

    workload = WORKLOADS[name.lower()]()
    clients, classes = workload.clients, workload.classes
    if workload.model == "mlp":
        problem = problems.mlp(clients, workload.hidden, classes=classes)
    elif workload.model == "softmax":
        problem = problems.softmax(clients, classes=classes)
    else:
        problem = problems.logistic(clients, l2=L2)
    shape = {
        "rounds": workload.rounds,
        "local_steps": workload.local_steps,
        "cohort": workload.cohort,
    }
    for _ in range(2):
        run = simulate(
            scaffold(),
            problem,
            lr=workload.lr,
            batch_size=workload.batch_size,
            metrics=(),
            seed=1,
            progress=False,
            **shape,
        )
    x = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.x)]).astype(np.float64)
    np.savez(out, cpu=run.seconds.cpu, x=x)


if __name__ == "__main__":
    main()

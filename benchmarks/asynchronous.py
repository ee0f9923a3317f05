"""Virtual time to a target with heavy-tailed delays: synchronous and asynchronous rounds.

`python -m benchmarks.asynchronous` prints a table; `--seeds 2 --rounds 10` for a quick look. Delays
are virtual, so the machine's speed does not matter. Every method has the same clients, local steps
and step size, and asynchronous ones a server step of buffer / cohort, so that a cohort's replies
move the model as far as a synchronous round.
"""

import argparse

import numpy as np

import fedscaffold as fs

CLIENTS, BUFFER, DELAYS = 20, 5, "pareto:1:1.1"
SHARE = BUFFER / CLIENTS
LONGER = 5  # asynchronous runs have so many times the replies
METHODS = {
    "SCAFFOLD, synchronous": (fs.scaffold(), {}),
    "SCAFFOLD, asynchronous": (fs.scaffold(server_lr=SHARE), {"buffer": BUFFER}),
    "FedBuff": (fs.fedavg(server_lr=SHARE), {"buffer": BUFFER, "staleness": "polynomial:0.5"}),
    "CA2FL": (fs.ca2fl(server_lr=SHARE), {"buffer": BUFFER}),
}


def spread(values):
    """Mean, standard error and median, or a dash where a value is missing."""
    if any(value is None for value in values):
        return f"- ({sum(value is not None for value in values)} of {len(values)})"
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.0f} ± {error:.0f}, median {np.median(values):.0f}"


def time_to(run, target):
    """Virtual seconds until the distance is first at or below a target."""
    there = np.flatnonzero(run.history["distance"] <= target)
    return float(run.history["time"][there[0]]) if len(there) else None


def measure(rounds, seeds):
    """Rows of the table: times to a tenth and a thousandth of the first distance, and the last."""
    problem = fs.problems.quadratic(num_clients=CLIENTS, dim=10, mu=0.1, smoothness=1.0, seed=1)
    start = float(np.linalg.norm(problem.optimum()))
    for name, (algorithm, more) in METHODS.items():
        steps = rounds if not more else round(LONGER * rounds / SHARE)
        found = fs.sweep(
            algorithm,
            problem,
            rounds=steps,
            seeds=seeds,
            lr=0.1,
            local_steps=5,
            delays=DELAYS,
            metrics=["distance"],
            precision="float64",
            **more,
        )
        runs = found.runs[0]
        assert all(run.fault is None for run in runs)
        last = np.median([run.history["distance"][-1] for run in runs]) / start
        times = [spread([time_to(run, start * target) for run in runs]) for target in (0.1, 1e-3)]
        yield name, *times, f"{last:.1g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="synchronous rounds")
    parser.add_argument("--seeds", type=int, default=8)
    asked = parser.parse_args()
    print("| method | seconds to 0.1 | seconds to 0.001 | distance at the end |\n|---|---|---|---|")
    for row in measure(asked.rounds, asked.seeds):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()

"""Utility against epsilon: private SCAFFOLD and FedAvg, tuned alike, over three seeds.

`python -m benchmarks.privacy_utility digits heart` prints one table for each data set. Step sizes
and clips are chosen by the mean accuracy of the three seeds, for each algorithm and epsilon alike;
each such run spends anew, so the epsilon of a table is that of a single run, not of choosing.
"""

import sys

import fedscaffold as fs
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import parse

SETS = {
    "digits": 'dataset = "digits"\nsplit = "similarity:0"\nclients = 10\nmodel = "softmax"',
    "heart": 'dataset = "heart"\nsplit = "natural"\nmodel = "logistic"',
    "emnist": 'dataset = "emnist47-tiny"\nsplit = "similarity:0"\nclients = 10\nmodel = "softmax"',
}
EPSILONS = (1.0, 3.0, 8.0)
DELTA, RATE, STEPS, ROUNDS, SEEDS = 1e-4, 0.2, 5, 40, 3
STEP_SIZES = (0.03, 0.1, 0.3, 1.0)
CLIPS = (0.3, 1.0)


def best(algorithm, problem, epsilon):
    """Return mean and range of the final accuracy, at the best step size and clip."""
    given = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": RATE, "metrics": ("accuracy",)}
    settings = [None]
    if epsilon is not None:
        noise = fs.privacy.noise_for(epsilon=epsilon, rate=RATE, steps=STEPS * ROUNDS, delta=DELTA)
        settings = [fs.privacy.records(clip=clip, noise=noise, delta=DELTA) for clip in CLIPS]
    found = []
    for private in settings:
        swept = fs.sweep(
            algorithm,
            problem,
            lr=STEP_SIZES,
            seeds=SEEDS,
            privacy=private,
            evaluate_every=ROUNDS,
            **given,
        )
        for lr, runs in zip(swept.lr, swept.runs, strict=True):
            ends = [float(run.history["accuracy"][-1]) for run in runs]
            ends = [end if end == end else 0.0 for end in ends]
            found.append((sum(ends) / len(ends), min(ends), max(ends), lr, private))
    return max(found, key=lambda one: one[0])


def main():
    """Print the tables."""
    for name in sys.argv[1:] or SETS:
        problem = build(parse(f"[problem]\n{SETS[name]}").problem).problem
        sys.stdout.write(
            f"\n{name}: {problem.num_clients} clients, {problem.counts.min()} to "
            f"{problem.counts.max()} records, d = {problem.dim}\n"
        )
        for epsilon in (*EPSILONS, None):
            for algorithm in (fs.scaffold(), fs.fedavg()):
                mean, low, high, lr, private = best(algorithm, problem, epsilon)
                how = (
                    "" if private is None else f", clip {private.clip:g}, noise {private.noise:.2f}"
                )
                sys.stdout.write(
                    f"epsilon {epsilon}: {algorithm.name} {mean:.3f} ({low:.3f} to {high:.3f}), "
                    f"lr {lr:g}{how}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()

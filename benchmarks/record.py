"""What the record of a run costs: `python benchmarks/record.py`.

Processor time of a round, and the time that writing its line took by the clock, each the best of
seven runs.
"""

import sys
import tempfile
from pathlib import Path

import fedscaffold as fs
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import parse
from fedscaffold.runs.log_writer import LogWriter

DIGITS = parse("problem.dataset = 'digits'\nproblem.clients = 20").problem
CASES = {
    "digits, softmax, 4 of 20 clients, 5 epochs": (
        build(DIGITS).problem,
        {"rounds": 400, "local_epochs": 5, "batch_size": 0.2, "lr": 0.1, "cohort": 4},
    ),
    "quadratics, d = 20, 100 of 1000 clients, 5 steps": (
        fs.problems.quadratic(num_clients=1000, dim=20, mu=0.05),
        {"rounds": 1000, "local_steps": 5, "lr": 0.1, "cohort": 100},
    ),
    "quadratics, d = 20, 3 of 10 clients, 5 steps": (
        fs.problems.quadratic(num_clients=10, dim=20, mu=0.05),
        {"rounds": 8000, "local_steps": 5, "lr": 0.1, "cohort": 3},
    ),
}


def main() -> None:
    """Print a line for each case."""
    for name, (problem, asked) in CASES.items():
        rounds, own = [], []
        for _ in range(8):  # the first one compiles
            rounds.append(fs.simulate(fs.scaffold(), problem, **asked).seconds.cpu)
            with LogWriter(Path(tempfile.mkdtemp()), {"clients": problem.num_clients}) as record:
                fs.simulate(fs.scaffold(), problem, callbacks=[record], **asked)
            own.append(record.spent)
        a, b = (min(seconds[1:]) / asked["rounds"] * 1e6 for seconds in (rounds, own))
        sys.stdout.write(
            f"{name}: a round takes {a:.0f} us of the processor, its line {b:.1f} us\n"
        )


if __name__ == "__main__":
    main()

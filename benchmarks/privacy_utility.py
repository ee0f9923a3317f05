"""Utility against epsilon: private SCAFFOLD and FedAvg, tuned alike, over three seeds.

`python -m benchmarks.privacy_utility digits heart emnist --out FOLDER` prints one table for each
data set, and writes them to `utility.json` and `utility.svg`.

A fifth of each client's records is set apart and trains nothing. For each algorithm and epsilon all
step sizes and clips are run with three seeds; those with the best mean accuracy on the records set
apart are kept, and the accuracy of these runs on the test data is printed. Each run spends anew, so
the epsilon of a table is that of a single run, not of choosing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fedscaffold as fs
from papers.plotting import METHODS, canvas, style, svg

Records = tuple[NDArray[Any], NDArray[Any]]

EPSILONS = (1.0, 3.0, 8.0)
DELTA, STEPS, ROUNDS, SEEDS = 1e-4, 5, 40, 3
CLIPS = (0.3, 1.0)
SET_APART = 5  # one record of so many


class Task(NamedTuple):
    """A data set, divided among clients."""

    problem: fs.Problem
    rate: float
    """Probability with which a step draws a record."""
    lrs: tuple[float, ...]
    """Step sizes to try."""
    validation: Records
    test: Records


class Row(NamedTuple):
    """One cell of a table: the settings that were chosen, and the test accuracy of their runs."""

    data: str
    algorithm: str
    epsilon: float | None
    noise: float | None
    lr: float
    clip: float | None
    validation: float
    """Mean accuracy on the records set apart, by which the settings were chosen."""
    accuracy: list[float]
    """Test accuracy, one for each seed."""


def make_task(name: str) -> Task:
    """Return a data set by its name: softmax regression on digits, heart disease or EMNIST."""
    dataset, split, clients, rate, lrs = {
        "digits": ("digits", "similarity:0", 10, 0.2, (0.1, 0.3, 1.0, 3.0)),
        "heart": ("heart", "natural", None, 0.2, (0.1, 0.3, 1.0, 3.0)),
        "emnist": ("emnist47", "similarity:0", 10, 0.05, (3.0, 10.0, 30.0)),
    }[name]
    loaded = fs.data.load(dataset)
    if name == "emnist":
        loaded = loaded._replace(
            x=average_pictures(loaded.x), x_test=average_pictures(loaded.x_test)
        )
    federated = fs.data.federate(loaded, split, clients)
    rng = np.random.default_rng(0)
    train, validation = [], []
    for x, y in federated.clients:
        order = rng.permutation(len(y))
        apart, rest = order[: len(y) // SET_APART], order[len(y) // SET_APART :]
        train.append((x[rest], y[rest]))
        validation.append((x[apart], y[apart]))
    together = tuple(np.concatenate(column) for column in zip(*validation, strict=True))
    problem = fs.problems.softmax(train, classes=federated.classes)
    return Task(problem, rate, lrs, (together[0], together[1]), federated.test)


def average_pictures(x: NDArray[Any]) -> NDArray[Any]:
    """Return pictures of 28 x 28 averaged to 7 x 7, which costs no privacy."""
    return x.reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4)).reshape(-1, 49)


def choose(task: Task, name: str, algorithm: fs.Algorithm, epsilon: float | None) -> Row:
    """Return the best settings by validation, and the test accuracy of their runs."""
    settings: list[Any] = [None]
    if epsilon is not None:
        noise = fs.privacy.noise_for(
            epsilon=epsilon, rate=task.rate, steps=STEPS * ROUNDS, delta=DELTA
        )
        settings = [fs.privacy.records(clip=clip, noise=noise, delta=DELTA) for clip in CLIPS]
    found = []
    for private in settings:
        swept = fs.sweep(
            algorithm,
            task.problem,
            lr=task.lrs,
            seeds=SEEDS,
            rounds=ROUNDS,
            local_steps=STEPS,
            batch_size=task.rate,
            privacy=private,
            metrics=(),
            progress=False,
        )
        for lr, runs in zip(swept.lr, swept.runs, strict=True):
            apart = float(np.mean([accuracy(task, run.x, task.validation) for run in runs]))
            tested = [accuracy(task, run.x, task.test) for run in runs]
            noise, clip = (None, None) if private is None else (private.noise, private.clip)
            found.append(Row(name, algorithm.name, epsilon, noise, lr, clip, apart, tested))
    return max(found, key=lambda row: row.validation)


def accuracy(task: Task, model: Any, records: Records) -> float:
    """Return the share of records that a model predicts right; 0 for one that is not finite."""
    assert task.problem.functions.accuracy is not None
    return float(np.nan_to_num(task.problem.functions.accuracy(model, records)))


def rows_of(names: list[str]) -> Iterator[Row]:
    """Yield all rows, and print each."""
    for name in names:
        task = make_task(name)
        counts = task.problem.counts
        sys.stdout.write(
            f"\n{name}: {len(counts)} clients, {counts.min()} to {counts.max()} records that "
            f"train, {len(task.validation[1])} set apart, {len(task.test[1])} for the test, "
            f"d = {task.problem.dim}\n"
        )
        for epsilon in (*EPSILONS, None):
            for algorithm in (fs.scaffold(), fs.fedavg()):
                row = choose(task, name, algorithm, epsilon)
                how = "" if row.clip is None else f", clip {row.clip:g}, noise {row.noise:.2f}"
                sys.stdout.write(
                    f"epsilon {epsilon}: {row.algorithm} {np.mean(row.accuracy):.3f} "
                    f"({min(row.accuracy):.3f} to {max(row.accuracy):.3f}), lr {row.lr:g}{how}\n"
                )
                sys.stdout.flush()
                yield row


def draw(rows: list[Row]) -> str:
    """Return the picture: test accuracy against epsilon, one panel for each data set."""
    names = list(dict.fromkeys(row.data for row in rows))
    with style():
        figure, panels = canvas(len(names))
        for panel, name in zip(panels, names, strict=True):
            for method in ("scaffold", "fedavg"):
                own = [row for row in rows if (row.data, row.algorithm) == (name, method)]
                private = [row for row in own if row.epsilon is not None]
                means = [float(np.mean(row.accuracy)) for row in private]
                ends = [
                    [mean - min(row.accuracy), max(row.accuracy) - mean]
                    for row, mean in zip(private, means, strict=True)
                ]
                pen = METHODS[method]
                panel.errorbar(
                    [row.epsilon for row in private],
                    means,
                    yerr=np.array(ends).T,
                    capsize=2,
                    **pen.points(),
                )
                for row in own:
                    if row.epsilon is None:
                        panel.axhline(float(np.mean(row.accuracy)), color=pen.color, lw=0.8, ls=":")
            panel.set_xscale("log")
            panel.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
            panel.minorticks_off()
            panel.set(title=name, xlabel="epsilon", ylabel="test accuracy")
        panels[0].legend(title="dotted: not private", title_fontsize=7.5)
        return svg(figure)


def main() -> None:
    """Print the tables, and write them with their picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="*", default=["digits", "heart", "emnist"])
    parser.add_argument("--out", type=Path, default=Path("runs/privacy-utility"))
    asked = parser.parse_args()
    rows = list(rows_of(asked.data))
    asked.out.mkdir(parents=True, exist_ok=True)
    table = json.dumps([row._asdict() for row in rows], indent=1)
    (asked.out / "utility.json").write_text(table, encoding="utf-8")
    (asked.out / "utility.svg").write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()

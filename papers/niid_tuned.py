"""Flower's niid_bench with the step size of every method tuned alike, without the test set.

Data, network, splits and methods are those of `papers.niid_federation`; only the local step
differs, which is 0.01 there for all methods. Every method has the same trials, one for each step
size, from a seed (a start, an order of batches) that counts nowhere else. A trial is scored as the
baseline scores, by the best accuracy of any round, but on pictures of the training set that no
client has. The best is chosen, the first of equal ones. Then the seeds that count are run with it
on the test set. Without momentum the baseline's SCAFFOLD is ours, as all clients are present.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import data
from fedscaffold.data.dataset import Dataset
from papers.cache import digest
from papers.claim import Check, Claim, Data, Drawing, Memo, Part, Settings, Table
from papers.niid_bench import plot_variants
from papers.niid_federation import SPLITS, VARIANTS, play
from papers.tuned import TUNING_SEED, mean_error

__all__ = ["CLAIM"]

Array = NDArray[Any]
SAME: dict[str, Any] = {
    "variants": list(VARIANTS),
    "lrs": [0.003, 0.01, 0.03, 0.1, 0.3],
    "seeds": [42, 43, 44],
}
# in ten rounds nothing learns with one label
SMALL = {"pictures": 1000, "validation": 1000, "test": 2000, "rounds": 10}
WHOLE = {"pictures": 60_000, "validation": 10_000, "test": 10_000, "rounds": 50}
SIZES: dict[str, Settings] = {
    "quick": SAME | SMALL | {"splits": ["2 labels", "Dirichlet 0.5"]},
    "full": SAME | WHOLE | {"splits": list(SPLITS)},
}


@cache
def pictures(number: int, validation: int, test: int) -> tuple[Dataset, Dataset]:
    """Return what is tuned on, with held-out training pictures for a test, and what counts."""
    found = data.load("fashion-mnist")
    rng = np.random.default_rng(0)
    order, few = rng.permutation(len(found.y)), rng.permutation(len(found.y_test))[:test]
    held = np.sort(order[len(order) - validation :])
    tuning, whole = (
        found._replace(x=found.x[some], y=found.y[some])
        for some in (
            np.sort(order[: min(number, len(order) - validation)]),
            np.sort(order[:number]),
        )
    )
    return (
        tuning._replace(x_test=found.x[held], y_test=found.y[held]),
        whole._replace(x_test=found.x_test[np.sort(few)], y_test=found.y_test[np.sort(few)]),
    )


def measure(settings: Settings, memo: Memo) -> Data:
    """All trials of every method on every split, then the seeds with the best of them."""
    both = pictures(settings["pictures"], settings["validation"], settings["test"])
    parts = [
        part
        for split in settings["splits"]
        for name in settings["variants"]
        for part in _parts(name, split, both, settings)
    ]
    found = dict(zip((part.key for part in parts), memo.all(parts), strict=True))
    cells: dict[str, dict[str, Data]] = {split: {} for split in settings["splits"]}
    for split, some in cells.items():
        for name in settings["variants"]:
            keys = [part.key for part in _parts(name, split, both, settings)]
            tried = [found[key] for key in keys[: len(settings["lrs"])]]
            runs = [found[key] for key in keys[len(settings["lrs"]) :]]
            some[name] = {
                "lr": _best(*tried),
                "tuning": [one["score"] for one in tried],
                "accuracy": np.stack([one["accuracy"] for one in runs]),
            }
    held, tests = settings["validation"], settings["test"]
    about = (
        f"Fashion-MNIST: {settings['pictures']:,} of 60,000 pictures for training, {held:,} held "
        f"out to tune, {tests:,} for the test, {settings['rounds']} rounds, seeds "
        f"{settings['seeds']}, step sizes {settings['lrs']}."
    )
    return {"cells": cells, "lrs": settings["lrs"], "tests": tests, "about": [about]}


def _parts(name: str, split: str, both: tuple[Dataset, Dataset], settings: Settings) -> list[Part]:
    """A part for each step size, and one for each seed, which is told the trials."""
    label = f"{SPLITS[split]}-{name}".replace(":", "")
    run, rounds = partial(_run, name, SPLITS[split]), settings["rounds"]
    tried = [
        Part(f"{label}-lr-{lr:g}", partial(run, both[0], TUNING_SEED, rounds, lr))
        for lr in settings["lrs"]
    ]
    keys = [part.key for part in tried]
    return tried + [
        Part(f"{label}-seed-{seed}", partial(_chosen, run, both[1], seed, rounds), after=keys)
        for seed in settings["seeds"]
    ]


def _run(name: str, split: str, given: Dataset, seed: int, rounds: int, lr: float) -> Data:
    """A run's accuracies, and its score: 0 if it diverges."""
    found = play(VARIANTS[name], given, split, seed, rounds, lr)
    sound = bool(np.isfinite(found["model"]).all())
    accuracy = np.asarray(found["accuracy"])
    return {"lr": lr, "accuracy": accuracy, "score": float(accuracy.max()) if sound else 0.0}


def _chosen(run: Any, given: Dataset, seed: int, rounds: int, *tried: Data) -> Data:
    made: Data = run(given, seed, rounds, _best(*tried))
    return made


def _best(*tried: Data) -> float:
    """The step size of the best trial.

    >>> _best({"lr": 0.1, "score": 0.5}, {"lr": 0.3, "score": 0.5}, {"lr": 1.0, "score": 0.0})
    0.1
    """
    return float(max(tried, key=lambda one: one["score"])["lr"])


def _scores(cell: Data) -> list[float]:
    """Best accuracy of any round in percent, of every seed."""
    found: list[float] = (100 * np.asarray(cell["accuracy"]).max(axis=1)).tolist()
    return found


def _gain(some: dict[str, Data], first: str, second: str) -> tuple[float, float]:
    """Mean over seeds of the difference of two methods, and its standard error."""
    return mean_error(np.subtract(_scores(some[first]), _scores(some[second])).tolist())


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    made = []
    for split, some in data["cells"].items():
        gain, error = _gain(some, "scaffold-momentum", "flower-momentum")
        made.append(
            Check(
                f"{split}: right control variates no worse than the baseline's, both tuned",
                "at least 0",
                f"{gain:+.2f} ± {error:.2f}",
                "mean difference of the best accuracies at least -2 standard errors",
                gain >= -2 * error,
            )
        )
        if split != "Dirichlet 0.5":
            gain, error = _gain(some, "scaffold-momentum", "fedavg-momentum")
            words = f"{split}: SCAFFOLD is behind FedAvg, as published, with both right and tuned"
            told, limit = f"{gain:+.2f} ± {error:.2f}", "mean difference below 0"
            made.append(Check(words, "below 0", told, limit, gain < 0, kind="paper"))
        for first, second in (("scaffold-momentum", "fedavg-momentum"), ("scaffold", "fedavg")):
            gain, error = _gain(some, first, second)
            words = f"{split}: {VARIANTS[first].label} minus {VARIANTS[second].label}"
            told = f"{gain:+.2f} ± {error:.2f}"
            made.append(Check(words, "no claim", told, "shown only", None, kind="report"))
    return made


def tables(data: Data) -> list[Table]:
    """Best and last accuracies, and the step size of every method."""
    rows: list[list[Any]] = []
    ends = data["lrs"][0], data["lrs"][-1]
    for split, some in data["cells"].items():
        for name, cell in some.items():
            mean, error = mean_error(_scores(cell))
            last, spread = mean_error((100 * np.asarray(cell["accuracy"])[:, -1]).tolist())
            edge = " (end of the grid)" if cell["lr"] in ends else ""
            told = [f"{mean:.1f} ± {error:.1f}", f"{last:.1f} ± {spread:.1f}"]
            held = 100 * max(cell["tuning"])
            rows.append([split, VARIANTS[name].label, *told, held, f"{cell['lr']:g}{edge}"])
    head = ["split", "method", "best accuracy %", "last round %", "held out %", "lr"]
    note = (
        "Means and standard errors over seeds; the test pictures alone leave an accuracy of 70 % "
        f"uncertain by {100 * math.sqrt(0.7 * 0.3 / data['tests']):.1f}."
    )
    return [Table("Fashion-MNIST, ten clients, every method tuned", head, rows, note)]


def draw(data: Data) -> list[Drawing]:
    """Held-out accuracy by step size."""
    figure = plot_variants(
        data["cells"],
        lambda cell: (data["lrs"], cell["tuning"]),
        xlabel="step size",
        ylabel="held-out accuracy",
        xscale="log",
    )
    caption = "Best held-out accuracy of any round by step size; dashed: without momentum."
    return [Drawing("niid-tuned", caption, figure)]


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    both = pictures(settings["pictures"], settings["validation"], settings["test"])
    return digest(*(a for one in both for a in (one.y, one.y_test, one.x[::50], one.x_test[::50])))


CLAIM = Claim(
    "niid-tuned",
    "Flower's niid_bench on Fashion-MNIST, every method tuned alike",
    "adap/flower, baselines/niid_bench",
    "With one and two labels a client SCAFFOLD is far behind FedAvg, at one step size for all.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
)

"""FLamby's Fed-Heart-Disease: its table at its own settings, and with every method tuned alike.

As in FLamby (owkin/FLamby, edacf54): the columns 10 to 12 and then the rows with a missing value
are left out, chest pain and resting ECG are one-hot without their first level, 13 inputs; 66 % of a
hospital's rows train, drawn with random_state 43 and stratified by label; the training rows are
standardised by those of their hospital, the pooled test rows by the training rows of all hospitals.
A round has 100 batches of 4 at each hospital, and hospitals weigh by their training rows. The start
is that of torch's `Linear(13, 1)` after `manual_seed(seed)`. One thing differs: FLamby's loaders go
on where the last round ended, ours begin a new shuffled pass with every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import problems
from fedscaffold.data.find_files import read
from fedscaffold.data.formats import csv_table
from fedscaffold.data.loaders import HEART_PAGE, HOSPITALS
from fedscaffold.problems import Problem
from papers import tuned
from papers.cache import digest
from papers.claim import Check, Claim, Data, Drawing, Memo, Part, Settings, Table
from papers.criteria import at_most, between

__all__ = ["CLAIM", "Hospital", "federation", "folds", "hospitals", "torch_start"]

Floats = NDArray[Any]
METHODS = ["fedavg", "fedprox", "fedavgm", "fedadam", "scaffold", "scaffold-adam"]
SAME: dict[str, Any] = {
    "methods": METHODS,
    "rounds": 15,
    "updates": 100,
    "batch": 4,
    "lr": 0.001,
    "seeds": [42, 43, 44, 45, 46],
    "orders": 3,
    "lrs": [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0],
}
SIZES: dict[str, Settings] = {
    "quick": SAME | {"tuned_seeds": SAME["seeds"]},
    "full": SAME | {"tuned_seeds": list(range(42, 62))},
}
# pooled test accuracy of the seeds 42 to 46 in flamby/results/results_benchmark_fed_heart_disease,
# the same for both methods
PUBLISHED = [0.7519685, 0.7637795, 0.7637795, 0.7007874, 0.7598425]
OTHERS = {"pooled training": 0.795, "Cyclic": 0.785, "FedAdam": 0.779}


class Hospital(NamedTuple):
    """The rows of a hospital: 13 inputs as they are written, and 0 or 1."""

    x: Floats
    y: Floats
    x_test: Floats
    y_test: Floats


@cache
def hospitals() -> tuple[Hospital, ...]:
    """Read the four hospitals and split them as FLamby does."""
    from sklearn.model_selection import train_test_split

    files = [read(f"processed.{name}.data", None, "heart", HEART_PAGE) for name in HOSPITALS]
    tables = [np.delete(csv_table(raw, 14, where), [10, 11, 12], axis=1) for raw, where in files]
    tables = [table[~np.isnan(table).any(axis=1)] for table in tables]
    levels = [np.unique(np.concatenate(tables)[:, column]) for column in (2, 6)]
    made = []
    for table in tables:
        hot = [table[:, [c]] == lv[1:] for c, lv in zip((2, 6), levels, strict=True)]
        x = np.hstack([np.delete(table[:, :-1], [2, 6], axis=1), *hot]).astype(np.float32)
        y = (table[:, -1] > 0).astype(np.int32)
        few = np.bincount(y, minlength=2).min() <= 2
        _, test = train_test_split(
            np.arange(len(y)),
            train_size=0.66,
            test_size=1 - 0.66,
            random_state=43,
            stratify=None if few else y,
        )
        train = np.setdiff1d(np.arange(len(y)), test)
        test = np.sort(test)
        made.append(Hospital(x[train], y[train], x[test], y[test]))
    return tuple(made)


def federation(sites: Sequence[Hospital], *, like_training: bool = False) -> Problem:
    """Logistic regression with a constant input, on the standardised rows.

    Test rows are standardised by all hospitals' training rows, as FLamby does it in its pooled
    test; `like_training` takes those of the row's own hospital, as in training.
    """
    everyone = _moments(np.concatenate([site.x for site in sites]))
    clients, x_test = [], []
    for site in sites:
        own = _moments(site.x)
        clients.append((_standardised(site.x, own), site.y))
        x_test.append(_standardised(site.x_test, own if like_training else everyone))
    y_test = np.concatenate([site.y_test for site in sites])
    return problems.logistic(clients, l2=0.0, test=(np.concatenate(x_test), y_test))


def _moments(x: Floats) -> tuple[Floats, Floats]:
    deviation = x.std(axis=0, ddof=1)
    return x.mean(axis=0), np.where(deviation == 0, 1, deviation + 1e-9).astype(x.dtype)


def _standardised(x: Floats, moments: tuple[Floats, Floats]) -> Floats:
    mean, deviation = moments
    return np.hstack([(x - mean) / deviation, np.ones((len(x), 1), x.dtype)])


def folds(sites: Sequence[Hospital]) -> list[list[Hospital]]:
    """Hold out a quarter of each hospital's training rows, four times."""
    held = [tuned.quarters(site.y) for site in sites]
    made: list[list[Hospital]] = []
    for parts in zip(*held, strict=True):
        fold = []
        for site, out in zip(sites, parts, strict=True):
            kept = np.setdiff1d(np.arange(len(site.y)), out)
            fold.append(Hospital(site.x[kept], site.y[kept], site.x[out], site.y[out]))
        made.append(fold)
    return made


def torch_start(inputs: int, seed: int, *, bias: bool = True) -> Floats:
    """Return the weights, and the constant, of torch's `Linear(inputs, 1)` for a seed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = torch.nn.Linear(inputs, 1)
    given = [layer.weight.detach().numpy().ravel(), layer.bias.detach().numpy()]
    return np.concatenate(given) if bias else given[0]


def measure(settings: Settings, memo: Memo) -> Data:
    """Both methods at FLamby's settings, then all of them tuned."""
    sites = hospitals()
    whole = cache(partial(federation, sites))
    run = {
        "rounds": settings["rounds"],
        "local_steps": settings["updates"],
        "batch_size": settings["batch"],
        "draw": "shuffle",
        "weights": "records",
    }
    start = partial(torch_start, sites[0].x.shape[1])
    task = tuned.Task(lambda: [federation(fold) for fold in folds(sites)], whole, run, start)

    names, trial = ["fedavg", "scaffold"], {"lr": settings["lr"]}
    parts = [
        Part(f"published-{name}", partial(tuned.run_seeds, name, trial, task, settings["seeds"]))
        for name in names
    ]
    asked = settings["seeds"], settings["orders"]
    parts.append(Part("orders", partial(tuned.run_orders, "scaffold", trial, task, *asked)))
    tasks = dict.fromkeys(settings["methods"], task)
    parts += tuned.parts(tasks, settings["lrs"], settings["tuned_seeds"], memo)
    made = iter(memo.all(parts))
    given = {name: next(made) for name in names}
    orders = next(made)["scores"]
    found = {name: next(made) for name in tasks}
    test = federation(sites, like_training=True).test
    for one in found.values():
        one["like_training"] = [_accuracy(model, test) for model in one["models"]]
    sizes = ", ".join(f"{len(site.y)} + {len(site.y_test)}" for site in sites)
    about = f"Rows for training + test of {', '.join(HOSPITALS)}: {sizes}."
    tests = sum(len(site.y_test) for site in sites)
    return {
        "published": given,
        "orders": orders,
        "tuned": found,
        "tests": tests,
        "about": [about],
    }


def _accuracy(model: Floats, test: Any) -> float:
    x, y = test
    return float(np.mean((x @ model > 0) == y))


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    made, mean, spread = [], float(np.mean(PUBLISHED)), float(np.std(PUBLISHED))
    for name in ("fedavg", "scaffold"):
        label, scores = tuned.METHODS[name].label, data["published"][name]["scores"]
        statement = f"{label} at FLamby's settings, mean pooled accuracy of its seeds"
        low, high = mean - 2 * spread, mean + 2 * spread
        found = float(np.mean(scores))
        made.append(between(statement, mean, found, low, high, source="published"))
        apart = float(np.abs(np.subtract(scores, PUBLISHED)).max())
        statement = f"{label}, largest difference from FLamby's own result of a seed"
        made.append(at_most(statement, 0.0, apart, 0.01))
    orders = data["orders"]
    words = f"SCAFFOLD, most that {orders.shape[1]} orders of the batches move a start's accuracy"
    made.append(_report(words, "no claim", f"{np.ptp(orders, axis=1).max():.4f}"))
    first = {name: one["scores"] for name, one in data["tuned"].items()}
    for name, statement in (
        ("fedavg", "tuned SCAFFOLD minus tuned FedAvg, mean over seeds"),
        ("fedadam", "tuned SCAFFOLD minus tuned FedAdam, mean over seeds"),
    ):
        if name in first:
            gain, error = tuned.mean_error(np.subtract(first["scaffold"], first[name]).tolist())
            made.append(_report(statement, "no claim", f"{gain:.4f} ± {error:.4f}"))
    gain, error = tuned.mean_error(first["scaffold"])
    words = "tuned SCAFFOLD, pooled accuracy ± standard error over seeds"
    made.append(_report(words, mean, f"{gain:.4f} ± {error:.4f}"))
    return made


def _report(statement: str, expected: float | str, measured: str) -> Check:
    return Check(statement, expected, measured, "shown only", None, kind="report")


def tables(data: Data) -> list[Table]:
    """At FLamby's settings, and tuned."""
    given = [
        [tuned.METHODS[name].label, *one["scores"], float(np.mean(one["scores"]))]
        for name, one in data["published"].items()
    ]
    given.insert(0, ["FLamby's csv (both)", *PUBLISHED, float(np.mean(PUBLISHED))])
    head = ["pooled test accuracy", *(f"seed {seed}" for seed in range(42, 47)), "mean"]
    made = tuned.rows(data["tuned"])
    for row, one in zip(made, data["tuned"].values(), strict=True):
        row.insert(3, float(np.mean(one["like_training"])))
    deviation = np.sqrt(0.78 * 0.22 / data["tests"])
    note = (
        "Standard errors are over seeds and say nothing about the test set, whose "
        f"{data['tests']} rows alone leave an accuracy of 0.78 uncertain by {deviation:.3f}."
    )
    head_tuned = ["method", "accuracy", "standard error", "rows standardised as in training"]
    return [
        Table("At FLamby's settings (lr 0.001, 15 rounds)", head, given),
        Table("Tuned alike", [*head_tuned, "in cross-validation", "chosen"], made, note),
    ]


def draw(data: Data) -> list[Drawing]:
    """Scores of the tuned methods, with FLamby's."""
    lines = {"FLamby: FedAvg, SCAFFOLD": float(np.mean(PUBLISHED))} | {
        f"FLamby: {name}": score for name, score in OTHERS.items()
    }
    figure = tuned.bars(data["tuned"], "pooled test accuracy", lines)
    caption = "Fed-Heart-Disease, every method tuned with twelve trials; bars: standard errors."
    return [Drawing("flamby-heart", caption, figure)]


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    return digest(*(array for site in hospitals() for array in site))


CLAIM = Claim(
    "flamby-heart",
    "Fed-Heart-Disease: FedAvg and SCAFFOLD on four hospitals",
    "FLamby, results of edacf54",
    "FedAvg and SCAFFOLD both reach a pooled test accuracy of 0.748 ± 0.024 over five seeds.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
)

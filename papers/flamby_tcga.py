"""FLamby's Fed-TCGA-BRCA: its table at its own settings, and with every method tuned alike.

As in FLamby (owkin/FLamby, edacf54): six regions, 39 inputs as they are written (the age in years,
the others 0 or 1), a linear Cox model, 5 rounds of 100 batches of 8, regions weighed by their
training rows; the score is the concordance index of the pooled test rows. The loss of a batch is
the mean over its records, sorted by falling time, of event * (logsumexp of the scores up to it -
its score). The start is that of torch's `Linear(39, 1)` after `manual_seed(seed)`, without the
constant, which cancels in the loss. One thing differs: FLamby's loaders go on where the last round
ended, ours begin a new shuffled pass with every round.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.data.find_files import read
from fedscaffold.problems import Problem
from papers import tuned
from papers.cache import digest
from papers.claim import Check, Claim, Data, Drawing, Memo, Part, Settings, Table
from papers.criteria import between
from papers.flamby_heart import torch_start

__all__ = ["CLAIM", "Region", "concordance", "cox", "federation", "folds", "regions"]

Floats = NDArray[Any]
PAGE = "github.com/owkin/FLamby, flamby/datasets/fed_tcga_brca"
REGIONS, INPUTS = 6, 39
METHODS = ["fedavg", "fedprox", "fedavgm", "fedadam", "scaffold", "scaffold-adam"]
SAME: dict[str, Any] = {
    "methods": METHODS,
    "ages": ["years", "standardised"],
    "rounds": 5,
    "updates": 100,
    "batch": 8,
    "lr": {"fedavg": 0.1, "scaffold": 0.01},
    "seeds": [42, 43, 44, 45, 46],
    "orders": 16,
    "common": [["standardised", 0.5], ["standardised", 1.0]],
    "lrs": [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0],
}
SIZES: dict[str, Settings] = {
    "quick": SAME | {"tuned_seeds": SAME["seeds"]},
    "full": SAME | {"tuned_seeds": list(range(42, 62))},
}
# pooled c-index of the seeds 42 to 46 in flamby/results/results_benchmark_fed_tcga_brca
PUBLISHED = {
    "fedavg": [0.8026, 0.4227, 0.8081, 0.8289, 0.8143],
    "scaffold": [0.6971, 0.6579, 0.7513, 0.7092, 0.6821],
}
BEST = {"FedAdam, FedYogi": 0.842}


class Region(NamedTuple):
    """The rows of a region: inputs, days, and 1 for an event."""

    train: tuple[Floats, Floats, Floats]
    test: tuple[Floats, Floats, Floats]


@cache
def regions() -> tuple[Region, ...]:
    """Read the six regions."""
    raw, where = read("brca.csv", None, "tcga_brca", PAGE)
    head, *rows = csv.reader(io.StringIO(raw.decode()))
    if head[0] != "pid" or head[INPUTS + 1 :] != ["E", "T"]:
        raise InputError(f"{where} must have the columns pid, {INPUTS} inputs, E and T")
    table = np.array([row[1:] for row in rows], np.float32)
    raw, _ = read("train_test_split.csv", None, "tcga_brca", PAGE)
    fold = {row["pid"]: row["fold2"] for row in csv.DictReader(io.StringIO(raw.decode()))}
    of = np.array([fold.get(row[0], "") for row in rows])  # a few patients are in no region

    def part(name: str) -> tuple[Floats, Floats, Floats]:
        chosen = table[of == name]
        return chosen[:, :INPUTS], chosen[:, INPUTS + 1], chosen[:, INPUTS]

    return tuple(Region(part(f"train_{k}"), part(f"test_{k}")) for k in range(REGIONS))


def cox(w: Any, batch: Any) -> Any:
    """FLamby's Cox loss of a batch."""
    x, time, event = batch
    order = jnp.argsort(-time, stable=True)
    score = (x @ w)[order]
    return jnp.mean(event[order] * (jax.lax.cumlogsumexp(score) - score))


def concordance(w: Any, batch: Any) -> Any:
    """Share of comparable pairs in which the earlier event has the higher score.

    A pair is comparable if the earlier time, or the event of two equal times, is an event and the
    other a longer time or not one; equal scores count one half.
    """
    x, time, event = batch
    score = x @ w
    first = event[:, None] > 0.5
    later = time[:, None] < time[None, :]
    still = (time[:, None] == time[None, :]) & (event[None, :] < 0.5)
    pair = first & (later | still)
    right = (score[:, None] > score[None, :]) + 0.5 * (score[:, None] == score[None, :])
    return jnp.sum(pair * right) / jnp.maximum(jnp.sum(pair), 1)


def federation(sites: Sequence[Region], age: str = "years") -> Problem:
    """The Cox model on the regions, the age in years or standardised by all training rows."""
    ages = np.concatenate([site.train[0][:, 0] for site in sites])
    mean, deviation = (0.0, 1.0) if age == "years" else (ages.mean(), ages.std())

    def scaled(part: tuple[Floats, ...]) -> tuple[Floats, ...]:
        x = part[0].copy()
        x[:, 0] = (x[:, 0] - mean) / deviation
        return x, *part[1:]

    test = [scaled(site.test) for site in sites]
    return Problem(
        cox,
        np.zeros(INPUTS, np.float32),
        [scaled(site.train) for site in sites],
        test=tuple(np.concatenate(arrays) for arrays in zip(*test, strict=True)),
        accuracy=concordance,
        name="Cox",
        coupled=True,
    )


def folds(sites: Sequence[Region]) -> list[list[Region]]:
    """Hold out a quarter of each region's training rows, four times."""
    held = [tuned.quarters(site.train[2]) for site in sites]
    made: list[list[Region]] = []
    for parts in zip(*held, strict=True):
        fold = []
        for site, out in zip(sites, parts, strict=True):
            kept = np.setdiff1d(np.arange(len(site.train[2])), out)
            x, time, event = site.train
            fold.append(Region((x[kept], time[kept], event[kept]), (x[out], time[out], event[out])))
        made.append(fold)
    return made


def measure(settings: Settings, memo: Memo) -> Data:
    """Both methods at FLamby's settings, then all of them tuned."""
    sites = regions()
    run = {
        "rounds": settings["rounds"],
        "local_steps": settings["updates"],
        "batch_size": settings["batch"],
        "draw": "shuffle",
        "weights": "records",
    }
    start = partial(torch_start, INPUTS, bias=False)
    tasks = {
        age: tuned.Task(
            lambda age=age: [federation(fold, age) for fold in folds(sites)],  # type: ignore[misc]
            cache(partial(federation, sites, age)),
            run,
            start,
        )
        for age in ("years", *settings["ages"])
    }
    parts = [
        Part(
            f"published-{name}",
            partial(tuned.run_seeds, name, {"lr": lr}, tasks["years"], settings["seeds"]),
        )
        for name, lr in settings["lr"].items()
    ]
    trial = {"lr": settings["lr"]["fedavg"]}
    asked = settings["seeds"], settings["orders"]
    parts.append(Part("orders", partial(tuned.run_orders, "fedavg", trial, tasks["years"], *asked)))
    common = [(age, lr, name) for age, lr in settings["common"] for name in PUBLISHED]
    parts += [
        Part(
            f"{age}-{name}-lr-{lr:g}",
            partial(tuned.run_seeds, name, {"lr": lr}, tasks[age], settings["tuned_seeds"]),
        )
        for age, lr, name in common
    ]
    for age in settings["ages"]:
        parts += tuned.parts(
            dict.fromkeys(settings["methods"], tasks[age]),
            settings["lrs"],
            settings["tuned_seeds"],
            memo,
            label=age,
        )
    made = iter(memo.all(parts))
    given = {name: next(made) for name in settings["lr"]}
    orders = next(made)["scores"]
    alike = [
        {"age": age, "lr": lr, "scores": {name: next(made)["scores"] for name in PUBLISHED}}
        for age, lr in settings["common"]
    ]
    found = {age: {name: next(made) for name in settings["methods"]} for age in settings["ages"]}
    sizes = ", ".join(f"{len(site.train[0])} + {len(site.test[0])}" for site in sites)
    events = int(sum(site.test[2].sum() for site in sites))
    about = (
        f"Rows for training + test of the regions: {sizes}; events among the test rows: {events}."
    )
    return {
        "published": given,
        "orders": orders,
        "common": alike,
        "tuned": found,
        "about": [about],
    }


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    made = []
    for name, published in PUBLISHED.items():
        mean, spread = float(np.mean(published)), float(np.std(published))
        words = f"{tuned.METHODS[name].label} at FLamby's settings, mean c-index of its seeds"
        found = float(np.mean(data["published"][name]["scores"]))
        low, high = mean - 2 * spread, mean + 2 * spread
        made.append(between(words, mean, found, low, high, source="published"))
    orders = data["orders"]
    words = "FedAvg at FLamby's settings, orders of the batches that end below a c-index of 0.5"
    told = f"{np.sum(orders < 0.5)} of {orders.size} ({len(orders)} starts)"
    made.append(Check(words, "no claim", told, "shown only", None, "report"))
    for one in data["common"]:
        words = f"age {one['age']}: SCAFFOLD minus FedAvg, c-index, both with lr {one['lr']:g}"
        made.append(_difference(words, one["scores"]["scaffold"], one["scores"]["fedavg"]))
    for age, one in data["tuned"].items():
        first = {name: found["scores"] for name, found in one.items()}
        for name in first:
            if name == "scaffold" or "scaffold" not in first:
                continue
            words = f"age {age}: tuned SCAFFOLD minus tuned {tuned.METHODS[name].label}, c-index"
            made.append(_difference(words, first["scaffold"], first[name]))
    return made


def _difference(words: str, first: Sequence[float], second: Sequence[float]) -> Check:
    """Show the mean difference over seeds, and its standard error."""
    gain, error = tuned.mean_error(np.subtract(first, second).tolist())
    return Check(words, "no claim", f"{gain:.4f} ± {error:.4f}", "shown only", None, "report")


def tables(data: Data) -> list[Table]:
    """At FLamby's settings, and tuned."""
    given: list[list[Any]] = []
    for name, one in data["published"].items():
        for who, scores in (("FLamby", PUBLISHED[name]), ("ours", one["scores"])):
            label = f"{tuned.METHODS[name].label}, {who}"
            given.append([label, *scores, float(np.mean(scores)), float(np.std(scores))])
    head = ["pooled c-index", *(f"seed {seed}" for seed in range(42, 47)), "mean", "deviation"]
    made = [Table("At FLamby's settings (5 rounds; lr 0.1 and 0.01)", head, given)]
    head = ["method", "c-index", "standard error", "in cross-validation", "chosen"]
    for age, one in data["tuned"].items():
        made.append(Table(f"Tuned alike, age {age}", head, tuned.rows(one)))
    return made


def draw(data: Data) -> list[Drawing]:
    """Scores of the tuned methods, with FLamby's."""
    lines = {
        f"FLamby: {tuned.METHODS[name].label}": float(np.mean(scores))
        for name, scores in PUBLISHED.items()
    } | {f"FLamby: {name}": score for name, score in BEST.items()}
    return [
        Drawing(
            f"flamby-tcga-{age}",
            f"Fed-TCGA-BRCA, age {age}: every method tuned with twelve trials; bars: standard "
            "errors over seeds.",
            tuned.bars(one, "pooled c-index", lines),
        )
        for age, one in data["tuned"].items()
    ]


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    return digest(*(array for site in regions() for part in site for array in part))


CLAIM = Claim(
    "flamby-tcga",
    "Fed-TCGA-BRCA: a Cox model on six regions",
    "FLamby, results of edacf54",
    "Over five seeds FedAvg reaches a c-index of 0.735 ± 0.157, SCAFFOLD 0.699 ± 0.031, FedAdam "
    "and FedYogi 0.842.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
)

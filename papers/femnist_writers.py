"""FEMNIST by its real writers: nine methods tuned alike, rounds and bytes to a target.

LEAF's FEMNIST: 62 classes, 520 writers with 1 to 44 pictures each. A fifth of the pictures of every
writer with at least five is the test set. Softmax regression on pictures whose 2 x 2 squares are
averaged (196 inputs), five local epochs of batches of 10, a tenth of the writers a round; writers
weigh by their pictures. Steps are chosen by the protocol of `papers.tuned`, with one quarter of the
training pictures held out, once. The target is a share of the test accuracy that softmax regression
on all training pictures together has.

Scaffnew needs all writers in every round, and pays for it in bytes. FedExP is scored by its last
model, as all methods are; its authors take the mean of two.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import problems
from fedscaffold.checks import InputError
from fedscaffold.data.find_files import read
from fedscaffold.data.formats import npz_arrays
from fedscaffold.problems import Problem
from papers import plotting, tuned
from papers.cache import digest
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table

__all__ = ["CLAIM", "federation", "pictures", "reference"]

Array = NDArray[Any]
FILE, CLASSES, LEAST = "femnist_writers.npz", 62, 5
PAGE = "LEAF (leaf.cmu.edu), FEMNIST by writer; docs/contested.md has the layout of the file"
METHODS = [
    "fedavg",
    "scaffold",
    "fedadam",
    "scaffold-m",
    "fedprox",
    "fedavgm",
    "feddyn",
    "fedexp",
    "scaffnew",
]
SAME: dict[str, Any] = {
    "methods": METHODS,
    "epochs": 5,
    "batch": 10,
    "cohort": 0.1,
    "share": 0.9,
    "lrs": [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0],
}
SIZES: dict[str, Settings] = {
    "quick": SAME | {"writers": 80, "rounds": 40, "seeds": list(range(10))},
    "full": SAME | {"writers": 520, "rounds": 300, "seeds": [0, 1, 2, 3, 4]},
}


@cache
def pictures(writers: int) -> tuple[tuple[tuple[Array, Array], ...], tuple[Array, Array]]:
    """Read the first writers that have pictures for both: their training pictures, and the test."""
    raw, where = read(FILE, None, "femnist", PAGE)
    x, y, writer = npz_arrays(raw, ["x", "y", "writer"], where)
    if x.ndim != 3 or x.shape[1:] != (28, 28) or x.dtype != np.uint8:
        raise InputError(f"{where} must have pictures of 28 x 28 bytes, got {x.dtype} {x.shape}")
    small = x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32).reshape(-1, 196) / 255
    clients, test = [], []
    for name in range(min(writers, int(writer.max()) + 1)):
        mine = np.random.default_rng(name).permutation(np.flatnonzero(writer == name))
        out = len(mine) // 5 if len(mine) >= LEAST else 0
        test.append(mine[:out])
        kept = np.sort(mine[out:])
        if len(kept):
            clients.append((small[kept], y[kept].astype(np.int32)))
    chosen = np.concatenate(test)
    return tuple(clients), (small[chosen], y[chosen].astype(np.int32))


def federation(writers: int, *, tuning: bool) -> Problem:
    """Softmax regression; while `tuning`, a quarter of the training pictures is the test set."""
    clients, test = pictures(writers)
    if not tuning:
        return problems.softmax(clients, classes=CLASSES, test=test)
    owner = np.repeat(np.arange(len(clients)), [len(y) for _, y in clients])
    x, y = (np.concatenate(arrays) for arrays in zip(*clients, strict=True))
    # the first quarter of every writer's pictures in a random order; who has few keeps all
    out = np.zeros(len(y), bool)
    for i, (_, labels) in enumerate(clients):
        mine = np.random.default_rng(i).permutation(np.flatnonzero(owner == i))
        out[mine[: len(labels) // 4]] = True
    kept = [(x[some], y[some]) for some in ((owner == i) & ~out for i in range(len(clients)))]
    return problems.softmax(kept, classes=CLASSES, test=(x[out], y[out]))


def reference(writers: int) -> float:
    """Test accuracy of softmax regression on all training pictures together."""
    from sklearn.linear_model import LogisticRegression

    clients, (x_test, y_test) = pictures(writers)
    x, y = (np.concatenate(arrays) for arrays in zip(*clients, strict=True))
    return float(LogisticRegression(C=1.0, max_iter=200).fit(x, y).score(x_test, y_test))


def measure(settings: Settings, memo: Memo) -> Data:
    """All methods tuned, then run from every seed."""
    writers = settings["writers"]
    whole = cache(partial(federation, writers, tuning=False))
    run = {
        "rounds": settings["rounds"],
        "batch_size": settings["batch"],
        "weights": "records",
    }
    epochs = {"local_epochs": settings["epochs"], "cohort": settings["cohort"]}
    # its clients share one random number of steps: the mean number of an epoch's, all present
    steps = settings["epochs"] * np.mean([math.ceil(n / settings["batch"]) for n in whole().counts])
    together = {"local_steps": round(float(steps)), "cohort": 1.0}
    tasks = {
        name: tuned.Task(
            lambda: [federation(writers, tuning=True)],
            whole,
            run | (together if name == "scaffnew" else epochs),
            lambda seed: None,
        )
        for name in settings["methods"]
    }
    parts = tuned.parts(tasks, settings["lrs"], settings["seeds"], memo)
    found = dict(zip(tasks, memo.all(parts), strict=True))
    best = memo("reference", lambda: {"accuracy": reference(writers)})["accuracy"]
    clients, test = pictures(writers)
    about = (
        f"{len(clients)} writers, {sum(len(y) for _, y in clients):,} pictures for training, "
        f"{len(test[1]):,} for the test. Softmax regression on all together: {best:.3f}; the "
        f"target is {settings['share'] * best:.3f}."
    )
    return {"tuned": found, "target": settings["share"] * best, "about": [about]}


def reached(one: Data, target: float) -> list[float]:
    """Rounds to the target, for every seed; infinite where it is not reached.

    >>> reached({"curves": np.array([[0.1, 0.5], [0.1, 0.2]])}, 0.5)
    [2.0, inf]
    """
    return [
        float(np.argmax(curve >= target) + 1) if (curve >= target).any() else math.inf
        for curve in one["curves"]
    ]


def megabytes(one: Data, target: float) -> float:
    """Bytes up and down until the median seed is at the target, in millions."""
    rounds = float(np.median(reached(one, target)))
    if not math.isfinite(rounds):
        return math.inf
    return float(np.asarray(one["bytes"])[: math.ceil(rounds)].sum() / 1e6)


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim: no table is published, so the numbers are shown."""
    made, target = [], data["target"]
    rounds = {name: float(np.median(reached(one, target))) for name, one in data["tuned"].items()}
    if "scaffold" in rounds and "fedavg" in rounds:
        words = "SCAFFOLD takes no more rounds to the target than FedAvg, medians over seeds"
        told = f"{rounds['scaffold']:.0f} against {rounds['fedavg']:.0f}"
        passed = rounds["scaffold"] <= rounds["fedavg"]
        made.append(Check(words, "at most", told, "at most as many", passed, kind="paper"))
    for name, one in data["tuned"].items():
        mean, error = tuned.mean_error(one["scores"])
        words = f"{tuned.METHODS[name].label}, test accuracy after {settings['rounds']} rounds"
        shown = f"{mean:.4f} ± {error:.4f}"
        made.append(Check(words, "no claim", shown, "shown only", None, kind="report"))
    return made


def tables(data: Data) -> list[Table]:
    """Rounds, bytes and accuracy."""
    rows = []
    for row, one in zip(tuned.rows(data["tuned"]), data["tuned"].values(), strict=True):
        at = reached(one, data["target"])
        rows.append([row[0], float(np.median(at)), megabytes(one, data["target"]), *row[1:]])
    head = ["method", "rounds", "MB", "accuracy", "standard error", "held out", "chosen"]
    title = f"Rounds and megabytes to {data['target']:.3f}, and accuracy after the last round"
    return [Table(title, head, rows, "Medians over seeds; bytes up and down of all writers.")]


def draw(data: Data) -> list[Drawing]:
    """Test accuracy by round."""
    figure, (panel,) = plotting.canvas(wide=2.0)
    for name, one in data["tuned"].items():
        mean = np.asarray(one["curves"]).mean(axis=0)
        panel.plot(np.arange(1, len(mean) + 1), mean, label=tuned.METHODS[name].label)
    panel.axhline(data["target"], color=plotting.GREY, linestyle=":", linewidth=1)
    panel.set_xlabel("round")
    panel.set_ylabel("test accuracy")
    panel.legend(ncols=2)
    return [Drawing("femnist-writers", "Test accuracy by round; dotted: the target.", figure)]


def depends(settings: Settings) -> str:
    """Fingerprint of the data."""
    clients, test = pictures(settings["writers"])
    return digest(*test, *(array for client in clients[::20] for array in client))


CLAIM = Claim(
    "femnist-writers",
    "FEMNIST by writer: rounds and bytes of methods tuned alike",
    "LEAF's data; no published table",
    "Control variates are meant to save rounds where clients differ; writers do.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
)

"""Flower's baseline niid_bench on Fashion-MNIST: SCAFFOLD as it is there, and as it should be.

`papers.niid_federation` says what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from papers import plotting
from papers.claim import Check, Claim, Data, Drawing, Settings, Table
from papers.criteria import holds
from papers.niid_federation import SPLITS, VARIANTS, depends, measure

__all__ = ["CLAIM", "plot_variants"]

Array = NDArray[Any]
# percent, mean and deviation over the baseline's seeds
PUBLISHED = {
    "fedavg-momentum": {
        "1 label": (28.39, 17.09),
        "2 labels": (78.10, 2.51),
        "Dirichlet 0.5": (88.09, 0.29),
    },
    "flower-momentum": {
        "1 label": (10.00, 0.00),
        "2 labels": (33.80, 41.22),
        "Dirichlet 0.5": (88.44, 0.25),
    },
}
COLOURS = dict(zip(VARIANTS, ("#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9"), strict=True))
SAME: dict[str, Any] = {"variants": list(VARIANTS), "splits": list(SPLITS)}
SIZES: dict[str, Settings] = {
    "quick": SAME | {"pictures": 1000, "test": 1000, "rounds": 10, "seeds": [42]},
    "full": SAME | {"pictures": 60_000, "test": 10_000, "rounds": 50, "seeds": [42, 43, 44]},
}


def _best(curves: Array) -> Array:
    """Best accuracy of any round in percent, for every seed."""
    return np.asarray(100 * curves.max(axis=1))


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    made, whole = [], settings == SIZES["full"]
    for name, published in PUBLISHED.items():
        for split, (mean, spread) in published.items():
            if name in data["cells"].get(split, {}):
                found = float(_best(data["cells"][split][name]).mean())
                words = f"{VARIANTS[name].label}, {split}: best accuracy in percent"
                made.append(_as_published(words, mean, spread, found, whole))
    if len(data["cells"]) == len(SPLITS):
        rising = [_best(data["cells"][split]["fedavg-momentum"]).mean() for split in SPLITS]
        made.append(
            holds(
                "FedAvg gains with the labels that a client has: 1, 2, Dirichlet",
                "28.39, 78.10, 88.09",
                ", ".join(f"{one:.2f}" for one in rising),
                "rising",
                bool(np.all(np.diff(rising) > 0)),
                source="published",
            )
        )
    for split, some in data["cells"].items():
        made += _comparisons(split, some)
    return made


def _as_published(words: str, mean: float, spread: float, found: float, whole: bool) -> Check:
    """Whether a number is within two deviations of the published ones; shown if any would be."""
    room = 2 * max(spread, 0.5)
    low, high = max(0.0, mean - room), min(100.0, mean + room)
    if (low, high) == (0.0, 100.0):
        note = f"published with a deviation of {spread}, so that any accuracy is within two"
        return Check(words, mean, found, "shown only", None, "report", note, source="published")
    note = "" if whole else "fewer pictures and rounds than published: needs --full"
    passed = bool(low <= found <= high) if whole else None
    criterion = f"in [{low:.4g}, {high:.4g}]"
    return Check(words, mean, found, criterion, passed, note=note, source="published")


def _comparisons(split: str, some: dict[str, Array]) -> list[Check]:
    """The right control variates beside the wrong ones, and each beside FedAvg."""
    made = []
    for first, second in (
        ("scaffold-momentum", "flower-momentum"),
        ("scaffold-momentum", "fedavg-momentum"),
        ("flower-momentum", "fedavg-momentum"),
        ("scaffold", "fedavg"),
    ):
        if first in some and second in some:
            gain = _best(some[first]) - _best(some[second])
            words = f"{split}: {VARIANTS[first].label} minus {VARIANTS[second].label}"
            told = f"{gain.mean():+.2f} (seeds {gain.min():+.2f} to {gain.max():+.2f})"
            made.append(Check(words, "no claim", told, "shown only", None, kind="report"))
    return made


def tables(data: Data) -> list[Table]:
    """Best accuracies, with the published ones."""
    rows: list[list[Any]] = []
    for split, some in data["cells"].items():
        for name, curves in some.items():
            known = PUBLISHED.get(name, {}).get(split)
            best = _best(curves)
            told = "-" if known is None else f"{known[0]} ± {known[1]}"
            last = float(100 * curves[:, -1].mean())
            rows.append([split, VARIANTS[name].label, told, float(best.mean()), last])
    head = ["split", "method", "published", "best accuracy %", "last round %"]
    return [Table("Fashion-MNIST, ten clients", head, rows)]


def plot_variants(
    cells: Mapping[str, Mapping[str, Any]], curve: Callable[[Any], tuple[Any, Any]], **axes: str
) -> Any:
    """Draw a panel for each split with a curve for each variant, dashed without momentum.

    Args:
        cells: By split and variant.
        curve: Abscissas and ordinates of a cell.
        **axes: Settings of all panels.
    """
    figure, panels = plotting.canvas(len(cells), wide=max(1.0, 2 / len(cells)))
    for panel, (split, some) in zip(panels, cells.items(), strict=True):
        for name, one in some.items():
            line = "-" if VARIANTS[name].momentum else "--"
            panel.plot(*curve(one), line, label=VARIANTS[name].label, color=COLOURS[name])
        panel.set(title=split, **axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw(data: Data) -> list[Drawing]:
    """Accuracy by round."""
    figure = plot_variants(
        data["cells"],
        lambda curves: (np.arange(1, curves.shape[1] + 1), curves.mean(axis=0)),
        xlabel="round",
        ylabel="test accuracy",
    )
    return [Drawing("niid-bench", "Test accuracy by round; dashed: without momentum.", figure)]


CLAIM = Claim(
    "niid-bench",
    "Flower's niid_bench on Fashion-MNIST, with its control variates and the right ones",
    "adap/flower, baselines/niid_bench",
    "SCAFFOLD reaches 10.00 % with one label a client and 33.80 ± 41.22 % with two, where FedAvg "
    "has 28.39 and 78.10 %.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=depends,
)

"""`data show`: label distribution of a split, as numbers, text strips and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks, data
from fedscaffold.checks import InputError

__all__ = ["show"]

SHADES = " .:-=+*#%@"
MOST_LINES = 50


def show(
    dataset: str, split: str, clients: int | None, seed: int, folder: Path | None, out: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the description of a split as a JSON object and as lines; draw it to `out` if given.

    >>> show("digits", "iid", 4, 0, None, None)[1][0]
    'digits, split iid: 1400 records at 4 clients (350 to 350), 10.0 labels a client, heterogeneity
    0.06'
    """
    checks.choice("dataset", dataset, data.DATASETS)
    if clients is None and not split.startswith("natural"):
        clients = 20
    clients = clients if clients is None else checks.whole("--clients", clients)
    federated = data.federate(data.load(dataset, folder), split, clients, seed=seed)
    facts = data.describe(federated)
    line = (
        f"{dataset}, split {split}: {facts['records']} records at {facts['clients']} clients "
        f"({facts['smallest']} to {facts['largest']})"
    )
    if federated.classes:
        line += f", {facts['labels_per_client']:.1f} labels a client"
        line += f", heterogeneity {facts['heterogeneity']:.2f}"
    lines = [line, *_strips(federated.label_counts)]
    answer = {**facts, "label_counts": federated.label_counts.tolist()}
    if out is not None:
        _draw(federated.label_counts, line, out)
        answer["picture"] = str(out)
        lines.append(f"picture: {out}")
    return answer, lines


def _strips(counts: NDArray[np.int64]) -> list[str]:
    """Return one line for each client.

    Its records, and one character per label, darker for more.
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    shades = np.minimum((shares * (len(SHADES) - 1)).astype(int) + (counts > 0), len(SHADES) - 1)
    lines = [
        f"client {i:>4}  {counts[i].sum():>6} records  |{''.join(SHADES[s] for s in shades[i])}|"
        for i in range(min(len(counts), MOST_LINES))
    ]
    more = len(counts) - MOST_LINES
    return lines + ([f"... and {more} more clients"] if more > 0 else [])


def _draw(counts: NDArray[np.int64], title: str, out: Path) -> None:
    """Draw the clients' labels as stacked bars, in the format of the file's suffix."""
    if out.suffix not in (".html", ".png", ".svg", ".pdf"):
        raise InputError(f"--out takes a .html, .png, .svg or .pdf file, got {str(out)!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        from fedscaffold.runs.page import split_page

        out.write_text(split_page(counts, title), encoding="utf-8")
        return
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    tall = min(40.0, 1.5 + 0.22 * len(counts))
    figure, axes = plt.subplots(figsize=(9, tall), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0, 1, counts.shape[1]))
    left = np.zeros(len(counts))
    for label in range(counts.shape[1]):
        name = f"label {label}" if counts.shape[1] <= 12 else None
        axes.barh(
            np.arange(len(counts)), counts[:, label], left=left, color=colours[label], label=name
        )
        left += counts[:, label]
    axes.set(xlabel="records", ylabel="client", title=title)
    axes.title.set_fontsize(9)
    axes.invert_yaxis()
    if 1 < counts.shape[1] <= 12:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)

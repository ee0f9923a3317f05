"""One style for figures in print.

Column widths, colour-blind safe colours, a marker and a dash for every method.

Colours are Okabe and Ito's; each method has the same colour, marker and dash in every figure, and
any of the three tells it apart.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["GREY", "METHODS", "SHADES", "Pen", "canvas", "save", "shades", "style", "svg"]

WIDTH, HEIGHT = 3.1, 2.35  # inches of one panel: two panels fill the width of a page
GREY = "#7a7a7a"


class Pen(NamedTuple):
    """How a method is drawn."""

    label: str
    color: str
    marker: str
    linestyle: str

    def line(self, **more: Any) -> dict[str, Any]:
        """Arguments of `plot`."""
        return {"label": self.label, "color": self.color, "linestyle": self.linestyle} | more

    def points(self, **more: Any) -> dict[str, Any]:
        """Arguments of `plot`, with markers."""
        return self.line(marker=self.marker, markersize=4.5) | more


METHODS = {
    "scaffold": Pen("SCAFFOLD", "#0072b2", "o", "-"),
    "fedavg": Pen("FedAvg", "#d55e00", "s", "--"),
    "fedprox": Pen("FedProx", "#009e73", "^", "-."),
    "sgd": Pen("SGD", "#5b5b5b", "D", ":"),
    "richardson": Pen("FedAvg, Richardson-Romberg", "#cc79a7", "v", (0, (5, 1, 1, 1))),  # type: ignore[arg-type]
}
SHADES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b")

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "mathtext.fontset": "cm",
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 2.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.direction": "out",
    "ytick.direction": "out",
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.hashsalt": "fedscaffold",
    "pdf.fonttype": 42,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save in the style of the papers."""
    import matplotlib as mpl

    with mpl.rc_context(cast(Any, STYLE)):
        yield


def canvas(
    columns: int = 1, rows: int = 1, *, wide: float = 1.0, high: float = 1.0
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a row, or rows, of panels, the panels as a flat list."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * wide * columns, HEIGHT * high * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    return figure, list(panels.flat)


def shades(number: int) -> list[str]:
    """So many blues from light to dark, for a parameter that grows.

    >>> shades(2)
    ['#9ecae1', '#08306b']
    """
    if number == 1:
        return [SHADES[-2]]
    return [SHADES[1 + round(i * (len(SHADES) - 2) / (number - 1))] for i in range(number)]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG, PDF and PNG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns about the fonts' dates
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not for every file
    made = []
    for kind, dated in (("svg", {"Date": None}), ("pdf", {"CreationDate": None}), ("png", {})):
        path = folder / f"{name}.{kind}"
        figure.savefig(path, metadata=dated)
        made.append(path)
    return made


def svg(figure: Figure) -> str:
    """The figure as SVG text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()

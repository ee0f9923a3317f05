"""The figure of the conjectures: random clients, the adversary, and the family whose constant grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedscaffold.report.paper import canvas, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b3478f", "#b07d00", "#5b5b5b")
MARKERS = ("o", "s", "^", "D", "v", "P")


def figure(found: Any) -> Figure:
    """Draw what `fedscaffold.theory.conjectures` found; save it with `fedscaffold.report.paper.save`."""
    with style():
        made, (flat, searched, stiff) = canvas(3, wide=1.15, high=1.25)
        _flat(flat, found.flat)
        _searched(searched, found.searched)
        _stiff(stiff, found.stiff)
        for axes in (flat, searched, stiff):
            axes.set_xlabel("clients $N$")
    return made


def _flat(axes: Axes, rows: Any) -> None:
    axes.set_title("Random clients: N tr Σ, mean = 1")
    for row, colour, marker in zip(rows, COLOURS, MARKERS, strict=False):
        level = np.mean(row.excess)
        label = f"d {row.dim}, κ {row.condition:g}, γ {row.lr:g}, H {row.local_steps}: slope {row.slope:+.3f} ± "
        axes.errorbar(
            row.num_clients, np.divide(row.excess, level), yerr=2 * np.divide(row.error, level), color=colour,
            marker=marker, markersize=4, capsize=2, label=f"{label}{row.slope_error:.3f}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_ylim(0.5, 1.7)
    axes.set_ylabel("N tr Σ / its mean (bars: 2 s.e.)")
    axes.legend(loc="upper center", fontsize=6.5)


def _searched(axes: Axes, rows: Any) -> None:
    axes.set_title("Adversary: N tr Σ / that of equal clients")
    for row, colour, marker in zip(rows, COLOURS, MARKERS, strict=False):
        label = f"{row.noise} noise, d {row.dim}, κ {row.condition:g}"
        axes.plot(row.num_clients, row.excess, color=colour, marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0.95, max(max(row.excess) for row in rows) + 0.12)
    axes.set_ylabel("largest found")
    axes.legend(loc="upper left", fontsize=6.5, ncols=2)


def _stiff(axes: Axes, rows: Any) -> None:
    axes.set_title("Stiff and noisy clients, d = N")
    for row, colour, marker in zip(rows, COLOURS, MARKERS, strict=False):
        axes.plot(
            row.num_clients, row.constant, color=colour, marker=marker, markersize=4, label=f"κ {row.condition:g}"
        )
        axes.axhline(row.condition**0.5 / 4, color=colour, linestyle=":", linewidth=1)
    axes.plot([], [], color="black", linestyle=":", linewidth=1, label="$\\sqrt{\\kappa}/4$")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("N μ tr Σ / (γ σ²)")
    axes.legend(loc="lower right")

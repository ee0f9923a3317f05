"""000 Conjectures 1 and 2: linear speed-up for any H and Hessians, by the exact covariance."""

from __future__ import annotations

from typing import Any

import numpy as np

from papers import plotting
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.conjecture_search import conjectures
from papers.criteria import at_most, holds

__all__ = ["CLAIM"]

SIZES: dict[str, Settings] = {
    "quick": {"quick": True, "seed": 0},
    "full": {"quick": False, "seed": 0},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#56b4e9")


def measure(settings: Settings, memo: Memo) -> Data:
    """The evidence of `papers.conjecture_search`."""
    found = conjectures(**settings)
    return {
        "flat": [_plain(one) for one in found.flat],
        "searched": [_plain(one) for one in found.searched],
        "stiff": [_plain(one) for one in found.stiff],
        "about": list(found.verdict),
    }


def _plain(one: Any) -> Data:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in one._asdict().items()
    }


def judge(data: Data, settings: Settings) -> list[Check]:
    """F13: does N tr Sigma rise with N anywhere?"""
    rises = max(one["slope"] / one["slope_error"] for one in data["flat"])
    level = max(
        abs(np.array(one["excess"]) / np.mean(one["excess"]) - 1).max() for one in data["flat"]
    )
    round_noise = max(max(one["excess"]) for one in data["searched"] if one["noise"] == "round")
    any_noise = max(max(one["excess"]) for one in data["searched"])
    proved = max(
        e / p for one in data["searched"] for e, p in zip(one["excess"], one["proved"], strict=True)
    )
    growth = max(one["excess"][-1] / one["excess"][-2] for one in data["searched"])
    stiff = ", ".join(
        f"{one['constant'][-1]:.2f} (L/mu = {one['condition']:g})" for one in data["stiff"]
    )
    return [
        at_most(
            "random clients: slope of log N tr Sigma over log N, largest in standard errors",
            0.0,
            rises,
            3.0,
        ),
        at_most(
            "random clients: N tr Sigma, largest relative deviation from its mean over N",
            0.0,
            float(level),
            0.15,
        ),
        at_most(
            "an adversary, equal noise in all directions: N tr Sigma over that of equal clients",
            1.0,
            round_noise,
            1.05,
            note="the conjecture bounds it by a constant; no instance beat equal clients by much",
        ),
        at_most(
            "an adversary, any noise: what the last doubling of N raised it by", 1.0, growth, 1.05
        ),
        at_most("an adversary: N tr Sigma over the bound that is proved", 1.0, proved, 1 + 1e-9),
        holds(
            "an adversary, any noise: N tr Sigma over that of equal clients",
            "a constant",
            any_noise,
            "shown",
            True,
            kind="report",
        ),
        holds(
            "clients each stiff and noisy in a direction of their own: N mu tr Sigma / (gamma "
            "sigma^2)",
            "a constant",
            stiff,
            "shown",
            True,
            kind="report",
            note="bounded in N, but the constant grows with the condition number",
        ),
    ]


def tables(data: Data) -> list[Table]:
    """Random clients and the adversary's best."""
    flat = [
        [
            one["dim"],
            one["condition"],
            one["lr"],
            one["local_steps"],
            one["noise"],
            one["num_clients"][0],
            one["num_clients"][-1],
            one["excess"][0],
            one["excess"][-1],
            one["slope"],
            one["slope_error"],
        ]
        for one in data["flat"]
    ]
    searched = [
        [
            one["noise"],
            one["dim"],
            one["condition"],
            one["num_clients"][-1],
            one["excess"][0],
            one["excess"][-1],
            one["proved"][-1],
            one["tried"],
        ]
        for one in data["searched"]
    ]
    return [
        Table(
            "Random clients, not copies: excess = N mu (2 - gamma mu) tr Sigma / (gamma sigma^2)",
            [
                "d",
                "L/mu",
                "gamma",
                "H",
                "noise",
                "first N",
                "last N",
                "excess",
                "excess",
                "slope",
                "s.e.",
            ],
            flat,
        ),
        Table(
            "An adversary: the largest excess found",
            [
                "noise",
                "d",
                "L/mu",
                "largest N",
                "with one client",
                "with the most",
                "proved bound",
                "instances",
            ],
            searched,
        ),
    ]


def draw(data: Data) -> list[Drawing]:
    """Excess against N."""
    figure, (one, two) = plotting.canvas(2, high=1.1)
    for flat, colour in zip(data["flat"], COLOURS, strict=False):
        label = rf"$d={flat['dim']}$, $\gamma={flat['lr']:g}$, $H={flat['local_steps']}$"
        one.errorbar(
            flat["num_clients"],
            flat["excess"],
            2 * np.array(flat["error"]),
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1,
            capsize=2,
            label=label,
        )
    for found, colour in zip(data["searched"], COLOURS, strict=False):
        label = rf"{found['noise']} noise, $d={found['dim']}$, $L/\mu={found['condition']:g}$"
        line = "-" if found["noise"] == "round" else "--"
        two.plot(
            found["num_clients"],
            found["excess"],
            color=colour,
            marker=".",
            linestyle=line,
            linewidth=1.1,
            label=label,
        )
    one.set_xscale("log", base=2)
    two.set_xscale("log", base=2)
    one.set(xlabel="clients $N$", ylabel="excess", title="random clients")
    one.set_ylim(0, 1.5 * max(max(flat["excess"]) for flat in data["flat"]))
    two.set(xlabel="clients $N$", ylabel="excess", title="an adversary's best", ylim=(0.8, 1.9))
    one.legend(loc="upper right")
    two.legend(loc="upper left", ncols=1, fontsize=6.5)
    caption = (
        "N tr Sigma in units of equal clients with noise in their flattest direction, computed "
        "exactly. Flat in N "
        "means linear speed-up; two standard errors over draws on the left."
    )
    return [Drawing("conjectures", caption, figure)]


CLAIM = Claim(
    "conjectures",
    "Linear speed-up for any H, non-diagonal Hessians",
    "000 Conjectures 1 and 2",
    "SCAFFOLD's stationary covariance is of order gamma sigma^2 / (N mu) for any number of local "
    "steps and any "
    "Hessians.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
)

"""004 Table 4: rounds to a test accuracy of 0.45 when fewer clients take part in a round."""

from __future__ import annotations

import math
from typing import Any

from papers import plotting
from papers.claim import Check, Claim, Data, Drawing, Settings, Table
from papers.criteria import holds
from papers.emnist import adapted, fingerprint, measure, median
from papers.rounds import EMNIST, FULL, QUICK, TIED, edges, no_slower, over, spread, told

__all__ = ["CLAIM"]

SIZES: dict[str, Settings] = {
    "quick": QUICK
    | {
        "similarities": [0, 10],
        "rows": [["scaffold", 5], ["fedavg", 5]],
        "cohorts": [20, 1],
        "target": 0.88,
        "rounds": 400,
        "tune_work": 600,
        "tune_most": 120,
        "ties": True,
        "with_emnist": EMNIST | {"target": 0.45, "rounds": 400},
    },
    "full": FULL
    | {
        "similarities": [0, 10],
        "rows": [["scaffold", 5], ["fedavg", 5]],
        "cohorts": [20, 5, 1],
        "target": 0.45,
        "rounds": 1000,
        "tune_work": 500,
    },
}
OVER = math.inf
PUBLISHED: dict[tuple[str, int], dict[int, float]] = {
    ("scaffold", 0): {20: 143, 5: 290, 1: 790},
    ("scaffold", 10): {20: 9, 5: 13, 1: 28},
    ("fedavg", 0): {20: 179, 5: 334, 1: OVER},
    ("fedavg", 10): {20: 12, 5: 17, 1: 35},
}


def cells_of(data: Data) -> dict[tuple[str, int, int], Data]:
    """By method, similarity and cohort."""
    return {(c["method"], c["similarity"], c["cohort"]): c for c in data["cells"]}


def slow_down(
    cells: dict[tuple[str, int, int], Data], name: str, similarity: int, cohort: int
) -> float:
    """Rounds against those with 20 clients; infinite where one of the two was not reached."""
    one, base = median(cells[name, similarity, cohort]), median(cells[name, similarity, 20])
    return one / base if math.isfinite(base) else math.inf


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    cells, most = cells_of(data), settings["rounds"]
    made = []
    for name in ("scaffold", "fedavg"):
        for s in settings["similarities"]:
            base = median(cells[name, s, 20])
            # a cell that never reached the target is slower than the number of rounds it was given
            slow = (
                slow_down(cells, name, s, 1)
                if math.isfinite(median(cells[name, s, 1]))
                else math.inf
            )
            known = PUBLISHED[name, s][1] / PUBLISHED[name, s][20]
            label = plotting.METHODS[name].label
            beyond = not math.isfinite(slow) and most < 20 * base
            made.append(
                Check(
                    f"{s} %: slow-down of {label} from 20 clients to 1",
                    known if math.isfinite(known) else "5.6+",
                    slow if math.isfinite(slow) else f"more than {most / base:.1f}",
                    "below 20",
                    None if beyond else slow < 20,
                    note="not reached within the rounds allowed, fewer than 20 times as many"
                    if beyond
                    else "",
                    source="published",
                )
            )
    pairs = [
        (cells["scaffold", s, k], cells["fedavg", s, k])
        for s in settings["similarities"]
        for k in settings["cohorts"]
    ]
    near = no_slower(pairs, 0.2, bool(settings.get("ties")))
    counted = f"{sum(no_slower([pair], 0.2, False) is True for pair in pairs)} of {len(pairs)}"
    made.append(
        Check(
            "SCAFFOLD no slower than FedAvg, but for 2 rounds or 20 %",
            "6 of 6",
            counted,
            "in every cell",
            near,
            note=TIED if near is None else "",
        )
    )
    both = [slow_down(cells, "scaffold", s, 1) for s in settings["similarities"]]
    made.append(
        holds(
            "SCAFFOLD slows down less at 10 % than at 0 %",
            "3.1 < 5.5",
            f"{both[1]:.2g}, {both[0]:.2g}",
            "shown",
            both[1] < both[0],
            kind="report",
            source="published",
        )
    )
    return made


def tables(data: Data) -> list[Table]:
    """The table of the paper, a similarity each, published and measured side by side."""
    cells = cells_of(data)
    similarities = list(dict.fromkeys(s for _, s, _ in cells))
    note = f"Data: {data['dataset']}, target {data['target']}, 5 epochs, 100 clients. "
    note += "Published: EMNIST, target 0.45."
    note += edges(data["cells"])
    return [_table(s, cells, note if s == similarities[-1] else "") for s in similarities]


def _table(similarity: int, cells: dict[tuple[str, int, int], Data], note: str) -> Table:
    rows: list[list[Any]] = []
    for (name, s, cohort), cell in cells.items():
        if s != similarity:
            continue
        known, mine = PUBLISHED[name, s][cohort], median(cell)
        ratio = over(mine, known)
        theirs = known / PUBLISHED[name, s][20] if math.isfinite(known) else "5.6+"
        most = max(run["rounds"] for run in cell["runs"])
        slow = slow_down(cells, name, s, cohort)
        rows.append(
            [
                plotting.METHODS[name].label,
                cohort,
                told(known, 1000),
                spread(cell, most),
                ratio,
                theirs,
                slow,
                cell["lr"],
            ]
        )
    head = [
        "method",
        "clients a round",
        "published",
        "median (seeds)",
        "ratio",
        "slow-down, published",
        "measured",
        "lr",
    ]
    return Table(f"Rounds to the target accuracy, similarity {similarity} %", head, rows, note)


def draw(data: Data) -> list[Drawing]:
    """Rounds against the cohort."""
    cells = cells_of(data)
    similarities = list(dict.fromkeys(s for _, s, _ in cells))
    cohorts = sorted({cohort for _, _, cohort in cells})
    figure, panels = plotting.canvas(len(similarities))
    for panel, s in zip(panels, similarities, strict=True):
        for name in ("scaffold", "fedavg"):
            panel.loglog(
                cohorts,
                [median(cells[name, s, k]) for k in cohorts],
                **plotting.METHODS[name].points(),
            )
        reference = median(cells["scaffold", s, 20])
        panel.loglog(
            cohorts,
            [reference * 20 / k for k in cohorts],
            color=plotting.GREY,
            linestyle=":",
            linewidth=1,
            label="in proportion",
        )
        panel.set(
            title=f"similarity {s} %",
            xlabel="clients a round",
            ylabel=f"rounds to {data['target']:g}",
        )
        panel.set_xticks(cohorts, [str(k) for k in cohorts])
        panel.minorticks_off()
        panel.legend(loc="upper right")
    caption = (
        f"Median rounds to a test accuracy of {data['target']:g} "
        f"({data['dataset']}, 5 epochs) against the cohort."
    )
    return [Drawing("scaffold-table4", caption, figure)]


CLAIM = Claim(
    "scaffold-table4",
    "Rounds to accuracy with fewer clients a round",
    "004 Table 4",
    "Sampling fewer clients slows SCAFFOLD down less than in proportion, and less with similar "
    "clients; FedAvg is "
    "slower throughout.",
    SIZES,
    measure,
    judge,
    tables,
    draw,
    depends=fingerprint,
    adapt=adapted,
)

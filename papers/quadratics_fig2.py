"""000 Figure 2: chi_a, the contraction factor of one eigenvalue, against H."""

from __future__ import annotations

import numpy as np

from fedscaffold.theory.quadratics import lag, power
from papers import plotting
from papers.claim import Check, Claim, Data, Drawing, Memo, Settings, Table
from papers.criteria import at_least, between, holds

__all__ = ["CLAIM"]

SETTINGS = {"rates": [0.1, 0.03, 0.01, 0.003, 0.001], "largest": 1_000_000}


def measure(settings: Settings, memo: Memo) -> Data:
    """u_a = (1 - gamma a)^H and v_a = 1 - (1 - u_a) / (gamma a H) on H up to 1,200 and a grid."""
    steps = np.unique(np.r_[1:1_201, np.geomspace(1_200, settings["largest"], 200).astype(int)])
    u = np.array(
        [[float(power(np.array(w), h)) for h in steps.tolist()] for w in settings["rates"]]
    )
    v = np.array([[float(lag(np.array(w), h)) for h in steps.tolist()] for w in settings["rates"]])
    return {"rates": list(settings["rates"]), "steps": steps, "u": u, "v": v}


def judge(data: Data, settings: Settings) -> list[Check]:
    """The checks of this claim."""
    chi, steps, rates = np.maximum(data["u"], data["v"]), data["steps"], np.array(data["rates"])
    best = chi.argmin(axis=1)
    products, values = rates * steps[best], chi.min(axis=1)
    travelled = rates[:, None] * steps
    left, right = travelled < 0.999, travelled > 1.001
    ordered = bool((data["u"] >= data["v"])[left].all() and (data["v"] >= data["u"])[right].all())
    return [
        between("smallest gamma a H at the minimum", 1.0, float(products.min()), 0.9, 1.1),
        between("largest gamma a H at the minimum", 1.0, float(products.max()), 0.9, 1.1),
        between("smallest minimum of chi", 0.366, float(values.min()), 0.34, 0.37),
        between("largest minimum of chi", 0.366, float(values.max()), 0.34, 0.37),
        holds(
            "u is the larger branch left of the minimum, v right of it",
            "yes",
            str(ordered),
            "for every H",
            ordered,
        ),
        at_least("chi at the largest H tends to 1: smallest", 1.0, float(chi[:, -1].min()), 0.99),
    ]


def tables(data: Data) -> list[Table]:
    """The minimum of every curve."""
    chi = np.maximum(data["u"], data["v"])
    best = chi.argmin(axis=1)
    rows = [
        [w, 1.0, w * int(data["steps"][k]), 0.366, float(chi[i, k]), float(chi[i, k]) / 0.366]
        for i, (w, k) in enumerate(zip(data["rates"], best, strict=True))
    ]
    head = [
        "gamma a",
        "gamma a H at the minimum, expected",
        "measured",
        "minimum, expected",
        "measured",
        "ratio",
    ]
    return [Table("The minimum of chi; 1/e = 0.368 in the limit of small gamma a", head, rows)]


def draw(data: Data) -> list[Drawing]:
    """Chi and its two branches against H."""
    figure, (one, two) = plotting.canvas(2)
    steps = data["steps"]
    for i, colour in enumerate(plotting.shades(len(data["rates"]))):
        w = data["rates"][i]
        one.semilogx(
            steps, np.maximum(data["u"][i], data["v"][i]), color=colour, label=rf"$\gamma a={w:g}$"
        )
    one.set(xlabel="local steps $H$", ylabel=r"$\chi_a^{\gamma,H}$", ylim=(0, 1.02))
    one.legend(loc="lower right")
    travelled = data["rates"][2] * steps
    two.semilogx(
        travelled, data["u"][2], color="#d55e00", linestyle="--", label=r"$u_a=(1-\gamma a)^H$"
    )
    two.semilogx(travelled, data["v"][2], color="#009e73", linestyle="-.", label=r"$v_a$")
    two.semilogx(
        travelled,
        np.maximum(data["u"][2], data["v"][2]),
        color="#0072b2",
        linewidth=2.4,
        alpha=0.45,
        label="max",
    )
    two.axvline(1, color=plotting.GREY, linewidth=0.8, linestyle=":")
    two.set(xlabel=r"$\gamma a H$", ylabel="branches", ylim=(0, 1.02), xlim=(1e-2, 1e3))
    two.legend(loc="center right")
    caption = (
        "The contraction factor of one eigenvalue a: least where gamma a H = 1, "
        "close to 1/e, and rising to 1 again."
    )
    return [Drawing("quadratics-fig2", caption, figure)]


CLAIM = Claim(
    "quadratics-fig2",
    "The contraction factor of one eigenvalue against H",
    "000 Figure 2",
    "chi falls with H until gamma a H = 1, then rises to 1: there is a best number of local steps.",
    {"quick": SETTINGS, "full": SETTINGS},
    measure,
    judge,
    tables,
    draw,
)

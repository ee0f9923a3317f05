"""What healthy runs show on the gauge |c - sum p_i c_i|, beside rounding and the size of faults.

    python benchmarks/gauge.py [--long]

One line for each cell: clients N, heard in a round S, rounds R, precision, algorithm; then the
residual at the end and the largest in any round, what rounding explains, their ratio, and what
losing one c_i of average size would show: all in units of the size of the c_i. `--long` adds the
cells of 10^6 rounds.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

import fedscaffold as fs
from fedscaffold.simulation import problem_on_disk

DIM = 3
WORK = 10**7  # clients' rounds in a cell at most, but for --long


def federation(clients: int, seed: int = 0) -> fs.Problem:
    """Quadratics whose gradients do not cancel; two records each, of which a step sees one.

    Rounding never settles.
    """
    rng = np.random.default_rng(seed)
    records = (rng.normal(size=(2 * clients, DIM)) + 1).astype(np.float32)
    return problem_on_disk(
        lambda w, batch: 0.5 * ((w - batch) ** 2 * np.arange(1, DIM + 1) / DIM).sum(-1).mean(),
        np.zeros(DIM, np.float32),
        records,
        np.arange(0, 2 * clients + 1, 2),
    )


def cell(
    clients: int, cohort: int, rounds: int, precision: str, name: str, **more: object
) -> dict[str, float | str]:
    """Measure one run."""
    run = fs.simulate(
        fs.algorithms.make(name),
        federation(clients),
        rounds=rounds,
        local_steps=2,
        lr=0.05,
        cohort=cohort,
        batch_size=1,
        precision=precision,
        metrics=(),
        **more,
    )
    largest = max(run.residual, float(np.max(run.history["residual"])))
    what = f"{name} {' '.join(map(str, more.values()))}".strip()
    return {
        "N": clients,
        "S": cohort,
        "R": rounds,
        "precision": precision,
        "what": what,
        "residual": run.residual / run.scale,
        "largest": largest / run.scale,
        "explained": run.explained / run.scale,
        "ratio": largest / run.explained,
        "one lost": 1 / clients,
        "fault": run.fault or "",
    }


def cells(long: bool) -> list[tuple[int, int, int, str, str, dict[str, object]]]:
    """The grid: all N, S, R that take a reasonable time.

    Policies and other algorithms at a few of them.
    """
    grid = []
    most = 10 * WORK if long else WORK
    for clients, rounds in itertools.product((10, 1000, 10**5, 10**6), (10, 1000, 10**5, 10**6)):
        for cohort in sorted({min(10, clients // 2), clients // 10, clients}):
            if cohort * rounds <= most and rounds <= (10**6 if long else 10**5) and cohort > 0:
                kinds = ("float32", "float64") if rounds <= 10**5 else ("float32",)
                grid += [(clients, cohort, rounds, kind, "scaffold", {}) for kind in kinds]
    for clients, cohort, rounds in ((10, 3, 10**4), (10**4, 100, 10**3), (10**6, 10**4, 50)):
        for kind in ("float32", "float64"):
            some = clients, cohort, rounds, kind
            grid.append((*some, "feddyn", {}))
            grid += [
                (*some, "scaffold", {"stale": one}) for one in ("decay:0.9", "drop:20", "refresh:5")
            ]
            grid.append((*some, "scaffold", {"compression": "random_k:0.5"}))
            grid.append(
                (*some, "scaffold", {"weights": np.random.default_rng(0).exponential(size=clients)})
            )
            grid += [
                (clients, clients, max(rounds // 10, 10), kind, one, {})
                for one in ("scaffold-xi", "scaffnew")
            ]
    return grid


def main() -> None:
    """Print the table."""
    print(
        f"{'N':>8}{'S':>8}{'R':>8} {'precision':9} "
        f"{'residual':>9}{'largest':>9}{'explained':>10}{'ratio':>7}"
        f"{'one lost':>9}  what"
    )
    for one in cells("--long" in sys.argv):
        *asked, more = one
        row = cell(*asked, **more)
        numbers = "".join(f"{row[name]:>9.1e}" for name in ("residual", "largest"))
        print(
            f"{row['N']:>8}{row['S']:>8}{row['R']:>8} {row['precision']:9} "
            f"{numbers}{row['explained']:>10.1e}"
            f"{row['ratio']:>7.2f}{row['one lost']:>9.0e}  {str(row['what'])[:40]} "
            f"{str(row['fault'])[:60]}",
            flush=True,
        )


if __name__ == "__main__":
    main()

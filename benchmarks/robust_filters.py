"""What filters of dishonest clients cost the honest, and what they withstand.

`python -m benchmarks.robust_filters` prints five tables, `--json FILE` writes the rows too:

    honest      nobody lies, clients are more and more unlike: who is refused, and what it costs
    attacks     a fifth of the clients lies, all attacks against all filters
    averaging   some of these attacks on FedAvg, for comparison
    adaptive    liars that know the filter: norms just within the bound, honest until accepted
    digits      handwritten digits, a fifth of the clients with flipped labels or signs

Errors are distances to the optimum of the honest clients, relative to that of the start. Programs
are compiled without most optimisations: nothing here is about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import numpy as np

import fedscaffold as fs
from fedscaffold.attacks import Attack, Honest

FILTERS = (None, "krum:0.2", "geometric_median:3", "norm_bound:3")
CLIENTS, DIM, ROUNDS = 20, 10, 100
LIARS = (1, 6, 11, 16)
HONEST = [i for i in range(CLIENTS) if i not in LIARS]
DISSIMILARITIES = (0.1, 1.0, 3.0)
MODERATE = 0.3


class Row(NamedTuple):
    """One run."""

    table: str
    case: str
    filter: str | None
    error: float
    """Relative distance to the optimum of the honest; or test accuracy, of digits."""
    wrongly: float
    """Share of the honest clients' rounds in which they were refused."""
    always: int
    """Honest clients that were refused in more than nine of ten rounds."""
    caught: float
    """Share of the liars' rounds in which they were refused."""


def quadratics(dissimilarity: float) -> fs.Problem:
    """Return clients whose gradients at the optimum differ by so much; the start is 1 away."""
    start = np.full(DIM, DIM**-0.5)
    return fs.problems.dialled(
        CLIENTS,
        DIM,
        gradient_dissimilarity=dissimilarity,
        hessian_dissimilarity=0.05,
        mu=0.2,
        x0=start,
        seed=1,
    )


def heavy_tails(dissimilarity: float) -> fs.Problem:
    """Return clients of which few are much more unlike than the others: Student's t of 2 degrees.

    Their optima are `dissimilarity` from a common point, times a draw of its own for each.
    """
    rng = np.random.default_rng(3)
    curvature = rng.uniform(0.2, 1.0, DIM) * rng.uniform(0.95, 1.05, (CLIENTS, DIM))
    along = rng.normal(size=(CLIENTS, DIM))
    along *= np.abs(rng.standard_t(2, CLIENTS) / np.linalg.norm(along, axis=1))[:, None]
    hessians = np.stack([np.diag(row) for row in curvature])
    start = np.full(DIM, DIM**-0.5)
    return fs.problems.quadratic(
        hessians=hessians, linear=dissimilarity * curvature * along, x0=start
    )


def measure(
    table: str,
    case: str,
    problem: fs.Problem,
    *,
    robust: str | None,
    attack: Attack | None = None,
    algorithm: fs.Algorithm | None = None,
    **more: Any,
) -> Row:
    """Run one case."""
    given = {"rounds": ROUNDS, "local_steps": 5, "lr": 0.2, "precision": "float64", "metrics": ()}
    run = fs.simulate(
        algorithm or fs.scaffold(), problem, robust=robust, attack=attack, **(given | more)
    )
    p = np.ones(CLIENTS)
    if attack is not None:
        p[list(LIARS)] = 0
    assert problem.facts.optimum is not None
    best, start = problem.facts.optimum(p / p.sum()), np.asarray(problem.params)
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm(run.vector - best) / np.linalg.norm(start - best))
    if not np.isfinite(error) or run.outcome == "diverged":
        error = np.inf
    return Row(table, case, robust, error, *shares(run, attack is not None))


def shares(run: fs.Run, attacked: bool) -> tuple[float, int, float]:
    """Return how often the honest were refused, how many of them nearly always, and the liars."""
    if run.refused is None:
        return 0.0, 0, 0.0
    refused = np.asarray(run.refused) / max(run.rounds, 1)
    good = refused[HONEST] if attacked else refused
    caught = float(refused[list(LIARS)].mean()) if attacked else 0.0
    return float(good.mean()), int((good > 0.9).sum()), caught


def honest() -> Iterator[Row]:
    """Yield runs in which nobody lies."""
    for algorithm in (fs.scaffold(), fs.fedavg()):
        for kind, make in (("even", quadratics), ("heavy tails", heavy_tails)):
            for dissimilarity in DISSIMILARITIES:
                problem, case = (
                    make(dissimilarity),
                    f"{algorithm.name}, {kind}, G = {dissimilarity:g}",
                )
                for robust in FILTERS:
                    yield measure("honest", case, problem, robust=robust, algorithm=algorithm)


ATTACKS: dict[str, Attack] = {
    "sign flip": fs.attacks.sign_flip(LIARS),
    "sign flip x 5": fs.attacks.sign_flip(LIARS, scale=5),
    "scaling x 10": fs.attacks.scaling(LIARS),
    "constant 100": fs.attacks.constant(LIARS, value=100),
    "ALIE z = 1.5": fs.attacks.alie(LIARS),
    "ALIE z = 3": fs.attacks.alie(LIARS, z=3),
    "inner product": fs.attacks.inner_product(LIARS),
    "inner product x 5": fs.attacks.inner_product(LIARS, scale=5),
    "min-max": fs.attacks.min_max(LIARS),
}


def attacks() -> Iterator[Row]:
    """Yield runs in which a fifth lies."""
    problem = quadratics(MODERATE)
    for name, attack in ATTACKS.items():
        for robust in FILTERS:
            yield measure("attacks", name, problem, robust=robust, attack=attack)
    poison = fs.attacks.poison_controls(LIARS, scale=5)
    for robust in FILTERS:
        yield measure(
            "attacks",
            "lies about c_i x 5 (option I)",
            problem,
            robust=robust,
            attack=poison,
            algorithm=fs.scaffold(option=1),
        )


def averaging() -> Iterator[Row]:
    """Yield attacks on FedAvg, whose messages stay as unlike as the clients are."""
    problem = quadratics(MODERATE)
    for name in ("sign flip", "ALIE z = 1.5", "ALIE z = 3", "min-max"):
        for robust in FILTERS:
            yield measure(
                "averaging",
                f"fedavg, {name}",
                problem,
                robust=robust,
                attack=ATTACKS[name],
                algorithm=fs.fedavg(),
            )


def just_within(share: float) -> Attack:
    """Return an attack against the honest mean, `share` times as long as the honest are usually."""

    def craft(known: Honest, xp: Any) -> Any:
        norms = xp.sqrt((known.rows**2).sum(axis=1))
        usual = xp.nanmedian(xp.where(known.honest, norms, xp.nan))
        size = xp.sqrt((known.mean**2).sum())
        return -known.mean * (share * usual / xp.where(size > 0, size, 1))

    return Attack(f"against the mean, {share:g} x", LIARS, craft)


def adaptive() -> Iterator[Row]:
    """Yield runs against liars that know the filter."""
    problem = quadratics(MODERATE)
    for share in (0.5, 1.0, 2.5):
        attack = just_within(share)
        for robust in FILTERS:
            yield measure("adaptive", attack.name, problem, robust=robust, attack=attack)
    # one lie within the bound, and then refused for good: the c_i of that round stays in c
    late = fs.attacks.sign_flip(LIARS, scale=2.5, begin=3)
    for stale in ("keep", "drop:10"):
        for robust in FILTERS:
            case = f"honest for 2 rounds, then sign flip x 2.5; stale = {stale}"
            yield measure("adaptive", case, problem, robust=robust, attack=late, stale=stale)


def digits() -> Iterator[Row]:
    """Yield runs on handwritten digits, with batches, and clients of few classes each."""
    for split in ("similarity:50", "similarity:0"):
        federated = fs.data.federate(fs.data.load("digits"), split, CLIENTS)
        wrong = fs.attacks.flip_labels(federated.clients, LIARS, federated.classes)
        for case, clients, attack in (
            ("nobody lies", federated.clients, None),
            ("labels flipped", wrong, None),
            ("sign flip x 5", federated.clients, fs.attacks.sign_flip(LIARS, scale=5)),
        ):
            problem = fs.problems.softmax(clients, classes=federated.classes)
            assert problem.functions.accuracy is not None
            for robust in FILTERS:
                run = fs.simulate(
                    fs.scaffold(),
                    problem,
                    rounds=60,
                    local_steps=5,
                    batch_size=16,
                    lr=0.3,
                    metrics=(),
                    robust=robust,
                    attack=attack,
                )
                found = float(np.nan_to_num(problem.functions.accuracy(run.x, federated.test)))
                lies = case != "nobody lies"
                yield Row("digits", f"{split}, {case}", robust, found, *shares(run, lies))


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "honest": honest,
    "attacks": attacks,
    "averaging": averaging,
    "adaptive": adaptive,
    "digits": digits,
}


def show(rows: list[Row]) -> Iterator[str]:
    """Yield a table in Markdown: one line for each case, one column for each filter."""
    yield "| " + " | ".join(["", *(str(robust or "no filter") for robust in FILTERS)]) + " |"
    yield "|---" * (1 + len(FILTERS)) + "|"
    for case in dict.fromkeys(row.case for row in rows):
        cells = [case]
        for row in (row for row in rows if row.case == case):
            cell = f"{row.error:.3f}" if row.table == "digits" else f"{row.error:.1e}"
            if row.filter is not None:
                caught = "" if row.caught == 0 else f", liars {row.caught:.0%}"
                cell += f" ({row.wrongly:.0%}, {row.always} always{caught})"
            cells.append("diverges" if row.error == np.inf else cell)
        yield "| " + " | ".join(cells) + " |"


def main() -> int:
    """Run the tables that are asked for, by default all."""
    parser = argparse.ArgumentParser("python -m benchmarks.robust_filters", description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], default=[])
    parser.add_argument("--json", type=Path, help="write all rows to a file")
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.tables or TABLES:
        found = list(TABLES[name]())
        rows += found
        sys.stdout.write(f"\n{name}\n\n" + "\n".join(show(found)) + "\n")
        sys.stdout.flush()
    if given.json is not None:
        given.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

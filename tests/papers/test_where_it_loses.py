"""The search for regimes in which SCAFFOLD loses: its cells are the exact law's, its rule is theory's, it can fail."""

import numpy as np
import pytest

from fedscaffold.problems import dialled
from papers import plotting, where_it_loses
from papers.claims import find, judged


def pictures(similarity, share, scaffold):
    return {"similarity": similarity, "noise_share": share, "fedavg": 1.0, "scaffold": scaffold}


def adam(similarity, scaffold):
    return {"similarity": similarity, "lrs": [0.01], "fedavg": [1.0], "scaffold": [scaffold]}


def test_the_search_is_judged_and_can_fail():
    claim = find("where-it-loses")
    settings = dict(claim.sizes["quick"]) | {"draws": 9, "rounds": [3, 10]}
    cells = [c for i in range(9) for c in where_it_loses._quadratic(i, settings)["cells"]]
    data = {
        "cells": cells,
        "pictures": [pictures(0, 0.3, 0.5), pictures(100, 7.0, 1.5)],
        "adam": [adam(0, 0.1), adam(100, 1.4)],
        "clients": settings["clients"],
    }
    outcome = judged(claim, "quick", data)
    assert all(len(row) == len(table.head) for table in outcome.tables for row in table.rows)
    assert {one.passed for one in outcome.checks if one.statement.startswith("sampled")} == {True}
    with plotting.style():
        assert all("<path" in plotting.svg(one.figure) for one in claim.draw(data))
    worse = data | {
        "cells": [c | {"ratio": 2 - c["ratio"]} for c in cells],
        "pictures": [pictures(0, 0.3, 1.5), pictures(100, 7.0, 0.5)],
        "adam": [adam(0, 1.4), adam(100, 0.1)],
    }
    failed = [one.passed for one in judged(claim, "quick", worse).checks]
    assert not any([failed[0], failed[1], *failed[-3:]])


@pytest.mark.parametrize("cohort", [3, 10])
def test_the_variance_of_a_round_is_the_formulas(cohort):
    """A round from the optimum, where each c_i is the noisy mean of one round: 4 standard errors."""
    n, steps, sigma, runs = 10, 4, 1.0, 4000
    problem = dialled(n, 2, gradient_dissimilarity=0.5, mu=0.1, noise=sigma**2 / 2, seed=1)
    g, rng = problem.ideal_controls(), np.random.default_rng(0)
    big_g, moves = np.mean(np.sum(g**2, axis=1)), {"fedavg": [], "scaffold": []}
    for _ in range(runs):
        some = rng.permutation(n)[:cohort]
        mean = g + rng.normal(size=g.shape) * sigma / np.sqrt(2 * steps)  # of K gradients
        c_i = g + rng.normal(size=g.shape) * sigma / np.sqrt(2 * steps)
        moves["fedavg"].append(mean[some].mean(0))
        moves["scaffold"].append((mean - c_i)[some].mean(0) + c_i.mean(0))
    left = 1 - cohort / n
    expected = {
        "fedavg": (sigma**2 / steps + left * big_g * n / (n - 1)) / cohort,
        "scaffold": (sigma**2 / steps * (1 + left)) / cohort,
    }
    for name, found in moves.items():
        squares = np.sum(np.array(found) ** 2, axis=1)
        mean_of = np.mean(squares) - np.sum(g.mean(0) ** 2)
        assert mean_of == pytest.approx(expected[name], abs=4 * squares.std() / np.sqrt(runs))

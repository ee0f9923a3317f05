"""The search for regimes in which SCAFFOLD loses: its cells are the exact law's, its rule is theory's, it can fail."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.diagnose.read_checkpoint import open_checkpoint
from fedscaffold.diagnose.state_checks import examine_run
from fedscaffold.problems import dialled, softmax
from fedscaffold.run_config import RunConfig
from papers import cache, plotting, real_federations, where_it_loses
from papers.claims import find, judged


def pictures(similarity, share, scaffold):
    return {"similarity": similarity, "noise_share": share, "fedavg": 1.0, "scaffold": scaffold}


def adam(similarity, scaffold):
    return {"similarity": similarity, "lrs": [0.01], "fedavg": [1.0], "scaffold": [scaffold]}


def real(said, ratio):
    about = {"name": "heart", "kind": "own", "cohort": 1, "clients": 4, "local_steps": 2}
    more = {"batch_size": 2, "rounds": 5, "noise_share": 1.0, "error": 0.01}
    return about | more | {"said": said, "ratio": ratio}


def test_the_search_is_judged_and_can_fail():
    claim = find("where-it-loses")
    settings = dict(claim.sizes["quick"]) | {"draws": 9, "rounds": [3, 10]}
    cells = [c for i in range(9) for c in where_it_loses._quadratic(i, settings)["cells"]]
    data = {
        "cells": cells,
        "pictures": [pictures(0, 0.3, 0.5), pictures(100, 7.0, 1.5)],
        "adam": [adam(0, 0.1), adam(100, 1.4)],
        "clients": settings["clients"],
        "real": [real("regime", 1.3), real("visits", 0.9), real("", 0.2), real("", 1.06)],
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
        "real": [real("regime", 0.9), real("visits", 0.5), real("", 1.2)],
    }
    failed = [one.passed for one in judged(claim, "quick", worse).checks]
    assert not any([failed[0], failed[1], *failed[-5:]])


def clients(number=6):
    """Clients of 2 to 7 records of two classes, some of which are unlike."""
    rng = np.random.default_rng(3)
    held = [rng.normal(i % 3, 1.0, (2 + i, 49)) for i in range(number)]
    return [(x, (x[:, 0] + rng.normal(size=len(x)) > 1).astype(np.int32)) for x in held]


def test_records_are_dealt_among_clients_of_the_same_sizes(monkeypatch):
    monkeypatch.setitem(real_federations.READ, "emnist", clients)
    own, dealt = (real_federations.federation("emnist", kind, 6) for kind in ("own", "dealt"))
    np.testing.assert_array_equal(own.counts, dealt.counts)
    rows = [{row.tobytes() for row in np.asarray(one.records[0])} for one in (own, dealt)]
    assert rows[0] == rows[1]
    assert not np.array_equal(own.records[0], dealt.records[0])


def test_the_least_loss_is_the_mean_over_clients():
    problem = softmax(clients(), classes=2, l2=real_federations.L2)
    run = fs.simulate(
        fs.fedavg(),
        problem,
        rounds=3000,
        local_steps=1,
        lr=0.02,
        metrics=("loss",),
        precision="float64",
    )
    least = real_federations.least_loss(problem)
    assert least <= run.history["loss"][-1] + 1e-6
    assert run.history["loss"][-1] == pytest.approx(least, abs=2e-2)


@pytest.mark.slow
def test_what_is_said_of_a_real_federation_is_what_diagnose_says(tmp_path, monkeypatch):
    """In a run in which all clients have been heard."""
    monkeypatch.setitem(real_federations.READ, "femnist", clients)
    way = {"local_steps": 2, "batch_size": 1}
    settings = {
        "federations": {"femnist": {"clients": 6, "ways": [[3, way]]}},
        "lrs": [0.01, 0.1],
        "rounds": [30],
        "every": 10,
        "seeds": [0, 1],
    }
    parts = real_federations.list_parts(settings)
    cells = [c for one in cache.Store(tmp_path / "kept").all(parts) for c in one["cells"]]
    assert [(c["kind"], c["visits"]) for c in cells] == [("own", 15), ("dealt", 15)]
    for cell in cells:
        problem = real_federations.federation("femnist", cell["kind"], 6)
        given = {"rounds": 30, "lr": cell["scaffold_lr"], "cohort": 3, "seed": 0, **way}
        given |= {"metrics": ("loss",), "evaluate_every": 10}
        folder = tmp_path / cell["kind"]
        fs.simulate(fs.scaffold(), problem, checkpoint=folder, **given)
        config = RunConfig(fs.scaffold(), problem, **given)
        with open_checkpoint(folder, config) as standing:
            found = {one.about: one for one in examine_run(config, standing)}
        assert ("regime" in found) == (cell["said"] == "regime")
        if "regime" in found:
            assert found["regime"].number == pytest.approx(cell["noise_share"], rel=1e-5)
    assert cells[1]["said"] == "regime"


@pytest.mark.parametrize("cohort", [3, 10])
def test_the_variance_of_a_round_is_the_formulas(cohort):
    """A round from the optimum, where each c_i is the noisy mean of one round: 4 standard errors."""
    n, steps, sigma, runs = 10, 4, 1.0, 4000
    problem = dialled(n, 2, gradient_dissimilarity=0.5, mu=0.1, noise=sigma**2 / 2, seed=1)
    g, rng = problem.ideal_controls(), np.random.default_rng(0)
    apart, moves = np.var(g, axis=0, ddof=1).sum(), {"fedavg": [], "scaffold": []}
    for _ in range(runs):
        some = rng.permutation(n)[:cohort]
        mean = g + rng.normal(size=g.shape) * sigma / np.sqrt(2 * steps)  # of K gradients
        c_i = g + rng.normal(size=g.shape) * sigma / np.sqrt(2 * steps)
        moves["fedavg"].append(mean[some].mean(0))
        moves["scaffold"].append((mean - c_i)[some].mean(0) + c_i.mean(0))
    left = 1 - cohort / n
    expected = {
        "fedavg": (sigma**2 / steps + left * apart) / cohort,
        "scaffold": (sigma**2 / steps * (1 + left)) / cohort,
    }
    for name, found in moves.items():
        squares = np.sum(np.array(found) ** 2, axis=1)
        mean_of = np.mean(squares) - np.sum(g.mean(0) ** 2)
        assert mean_of == pytest.approx(expected[name], abs=4 * squares.std() / np.sqrt(runs))

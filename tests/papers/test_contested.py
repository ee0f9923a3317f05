"""Contested tables: data as the benchmarks prepare them, one protocol of tuning, claims that can fail.

Files are generated where the real ones are not needed; a test that needs those skips without them.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from papers import cache, flamby_heart, plotting, tuned
from papers.claims import find, judged

REAL = os.environ.get("FEDSCAFFOLD_DATA", "")
LRS = [0.01 * 2**k for k in range(12)]


def needs(*files):
    """Skip where the real files are not there."""
    missing = [name for name in files if not (Path(REAL) / name).is_file()]
    return pytest.mark.skipif(
        not REAL or bool(missing), reason=f"FEDSCAFFOLD_DATA has no {', '.join(missing or files)}"
    )


def sound(claim, settings, data, spoil):
    """Judge a claim's data: tables and figures are whole, and a wrong result passes fewer checks."""
    claim = claim._replace(sizes={"quick": settings})
    outcome = judged(claim, "quick", data)
    for table in outcome.tables:
        assert table.rows
        assert all(len(row) == len(table.head) for row in table.rows)
    with plotting.style():
        assert all("<path" in plotting.svg(one.figure) for one in claim.draw(data))
    spoil(data)
    after = judged(claim, "quick", data)
    assert sum(one.passed is True for one in after.checks) < sum(
        one.passed is True for one in outcome.checks
    )
    return outcome


def test_every_method_has_the_same_budget_of_trials():
    for name, method in tuned.METHODS.items():
        tried = tuned.trials(name, LRS)
        assert len({tuple(one.items()) for one in tried}) == len(tried) == tuned.TRIALS
        asked = tuned.arguments(name, tried[0])
        assert (asked.get("server_optimizer") is not None) == bool(method.server)
    one, two = (tuned.arguments("fedadam", {"lr": lr, "server_lr": 0.1}) for lr in (0.1, 0.2))
    assert one["server_optimizer"] is two["server_optimizer"]  # or each would compile anew


def heart_files(folder):
    """Four hospitals of few rows: `?` in some, the diagnosis a noisy function of two columns."""
    rng = np.random.default_rng(0)
    (folder / "heart").mkdir(parents=True)
    for k, name in enumerate(flamby_heart.HOSPITALS):
        rows = rng.normal(50 + k, 9, (40 + 4 * k, 14)).round(1)
        rows[:, 2], rows[:, 6] = rng.integers(1, 5, len(rows)), rng.integers(0, 3, len(rows))
        rows[:, 13] = np.where(rows[:, 0] + rows[:, 4] + rng.normal(0, 5, len(rows)) > 100, 2, 0)
        text = [[f"{value:g}" for value in row] for row in rows]
        for row in text:
            row[11] = "?"  # a column that is left out
        text[3][5] = "?"  # a row that is left out
        lines = "\n".join(",".join(row) for row in text)
        (folder / "heart" / f"processed.{name}.data").write_text(lines + "\n")


@pytest.fixture
def heart(tmp_path, monkeypatch):
    heart_files(tmp_path / "data")
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(tmp_path / "data"))
    flamby_heart.hospitals.cache_clear()
    yield flamby_heart.hospitals()
    flamby_heart.hospitals.cache_clear()


def test_heart_rows_are_prepared_as_flamby_does(heart):
    assert [len(site.y) + len(site.y_test) for site in heart] == [39, 43, 47, 51]
    assert [len(site.y) for site in heart] == [int(0.66 * n) for n in (39, 43, 47, 51)]
    assert {site.x.shape[1] for site in heart} == {13}
    problem = flamby_heart.federation(heart)
    for i, (begin, end) in enumerate(zip(problem.offsets, problem.offsets[1:], strict=False)):
        x = problem.records[0][begin:end]
        np.testing.assert_allclose(x[:, :13].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(x[:, :13].std(axis=0, ddof=1), 1, atol=1e-5)
        assert (x[:, 13] == 1).all()
        own = flamby_heart.federation(heart, like_training=True).test[0]
        first = sum(len(site.y_test) for site in heart[:i])
        rows = heart[i].x_test - heart[i].x.mean(axis=0)
        at = slice(first, first + len(rows))
        np.testing.assert_allclose(own[at, :13], rows / heart[i].x.std(axis=0, ddof=1), rtol=1e-4)
    everyone = np.concatenate([site.x for site in heart])
    rows = np.concatenate([site.x_test for site in heart]) - everyone.mean(axis=0)
    np.testing.assert_allclose(
        problem.test[0][:, :13], rows / everyone.std(axis=0, ddof=1), rtol=1e-4
    )


def test_heart_folds_hold_training_rows_out_and_never_the_test(heart):
    parts = flamby_heart.folds(heart)
    assert len({tuple(len(site.y) for site in part) for part in parts}) == 1  # one shape
    for i, site in enumerate(heart):
        train = {tuple(row) for row in site.x}
        out = [tuple(row) for part in parts for row in part[i].x_test]
        assert len(set(out)) == len(out) == in_folds(len(site.y))
        assert set(out) <= train
        for part in parts:
            assert {tuple(row) for row in part[i].x} == train - {tuple(r) for r in part[i].x_test}


def in_folds(rows):
    return flamby_heart.FOLDS * (rows // flamby_heart.FOLDS)


@pytest.mark.slow
def test_heart_runs_and_can_fail(heart, tmp_path, monkeypatch):
    """With FLamby's numbers replaced by those of the generated rows."""
    claim = find("flamby-heart")
    few = {"methods": ["scaffold"], "rounds": 2, "updates": 8, "tuned_seeds": [42, 43]}
    settings = dict(claim.sizes["quick"]) | few
    data = claim.measure(settings, cache.Store(tmp_path))
    monkeypatch.setattr(flamby_heart, "PUBLISHED", data["published"]["fedavg"]["scores"])

    def spoil(data):
        data["published"]["scaffold"]["scores"] = [0.4] * 5

    outcome = sound(claim, settings, data, spoil)
    assert outcome.tables[1].rows[0][1] > 0.6  # tuned, it learns: a coin has 0.5
    tried = data["tuned"]["scaffold"]["tuning"]
    best = tuned.trials("scaffold", settings["lrs"])[int(np.argmax(tried))]
    assert data["tuned"]["scaffold"]["trial"] == best


@needs("heart/processed.cleveland.data", "heart/processed.va.data")
def test_heart_gives_flambys_number_of_a_seed():
    """The fourth of its five seeds, far from the others: the start decides, so the set-up is the same."""
    flamby_heart.hospitals.cache_clear()
    whole = flamby_heart.federation(flamby_heart.hospitals())
    settings = find("flamby-heart").sizes["full"]
    run = tuned.simulate(
        problem=whole,
        rounds=settings["rounds"],
        local_steps=settings["updates"],
        batch_size=settings["batch"],
        draw="shuffle",
        weights="records",
        x0=flamby_heart.torch_start(13, 45),
        seed=45,
        metrics=["accuracy"],
        **tuned.arguments("scaffold", {"lr": settings["lr"]}),
    )
    assert abs(run.history["accuracy"][-1] - flamby_heart.PUBLISHED[3]) <= 1 / 254

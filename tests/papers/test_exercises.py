"""The tutorial's exercises: what must hold in every row, and findings that follow from the rows."""

import json
import re

import forkserver
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.simulation import compression
from papers.exercises import compression as compression_exercise
from papers.exercises import participation as participation_exercise
from papers.exercises import record, richardson
from papers.exercises import stale as stale_exercise

ROUNDING = {"float32": 1e-5, "float64": 1e-12}


def rows_of(found, **wanted):
    return [row for row in found.rows if all(row[key] == value for key, value in wanted.items())]


def assert_sound(found, precision="float64"):
    """What holds for every exercise: gauges at rounding, finite numbers, a finding, and a table of all rows."""
    for row in found.rows:
        assert row["residual"] is None or row["residual"] <= ROUNDING[precision], row
        assert all(np.isfinite(v) for v in row.values() if isinstance(v, float)), row
    assert len(record.table(found.rows).splitlines()) == 1 + len(found.rows)
    json.dumps(found._asdict())


def numbers(text):
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text.replace(",", ""))]


@pytest.fixture(scope="module")
def participation():
    return participation_exercise.participation(10, (10, 2), seeds=2, rounds=400)


@pytest.mark.slow
def test_participation_ends_at_the_optimum_of_those_who_come(participation):
    assert_sound(participation)
    full, small = rows_of(participation, method="scaffold", who="all come")
    assert (
        0 < full["rounds"] <= small["rounds"] < 400
    )  # all clients are never slower than a few of them
    assert full["slow_down"] == 1
    assert small["slow_down"] == small["rounds"] / full["rounds"]
    assert small["N/S"] == 5
    uneven = rows_of(participation, who="3 rarely or never")
    assert uneven[0]["ends_of_those_who_come"] < 1e-6 < uneven[0]["ends"]
    assert all(
        row["rounds"] is None and row["ends"] > 1e-2
        for row in rows_of(participation, method="fedavg")
    )
    for row in (full, small):
        assert row["rounds"] in numbers(participation.finding)  # the words are made of the numbers


def test_one_who_never_comes_is_as_good_as_not_there():
    """By an oracle of its own: the optimum of the problem without the client."""
    problem = fs.problems.quadratic(4, 3, mu=0.2, seed=1)
    a, b = (np.asarray(part) for part in problem.records)
    fewer = fs.problems.quadratic(hessians=a[:3], linear=b[:3])
    ask = {"rounds": 300, "local_steps": 3, "lr": 0.2, "precision": "float64"}
    with_them = fs.simulate(
        fs.scaffold(), problem, cohort=3, availability=[[1, 1, 1, 0]], **ask, metrics=()
    )
    assert not with_them.clients.c_i[3].any()
    np.testing.assert_allclose(with_them.vector, fewer.optimum(), atol=1e-9)


def verb(*words):
    return forkserver.run("from papers.exercises.__main__ import main; main()", *words)


@pytest.fixture(scope="module")
def stale():
    return stale_exercise.stale(seeds=2)


@pytest.mark.slow
def test_stale_ages_and_ends(stale):
    assert_sound(stale)
    for row in rows_of(stale, setting="all come"):
        assert abs(row["age"] - stale.settings["age_expected"]) <= 4 * row["age_error"]
    keep, _, drop, _ = rows_of(stale, setting="5 leave")
    assert drop["ends_of_those_who_stay"] < 1e-6 < keep["ends_of_those_who_stay"]
    assert all(row["rounds"] is None for row in stale.rows if row["policy"].startswith("decay"))
    alike, unlike = (
        {r["policy"]: r["ends"] for r in rows_of(stale, setting=s)}
        for s in ("noisy, alike", "noisy, unlike")
    )
    assert alike["decay:0.9"] < alike["keep"]  # between like clients control variates are noise
    assert unlike["decay:0.9"] > unlike["keep"]
    turns = {row["policy"]: row for row in rows_of(stale, setting="in turns of 40")}
    assert turns["refresh:30"]["rounds"] < turns["keep"]["rounds"]
    # two clients a round send a vector each, and one more when they renew
    for row in (r for r in stale.rows if r["rounds"] is not None):
        extra = row["vectors_up"] - 2 * row["rounds"]
        assert (abs(extra) <= 1) if not row["policy"].startswith("refresh") else extra > 0


@pytest.mark.slow
def test_a_leaver_that_is_kept_pulls_by_its_last_control_variate():
    """Where keep ends: sum of the stayers' gradients + the leaver's last c_i = 0, solved here by hand."""
    problem = fs.problems.quadratic(4, 3, mu=0.2, seed=1)
    a, b = (np.asarray(part) for part in problem.records)
    trace = np.ones((400, 4), int)
    trace[5:, 3] = 0
    ask = {
        "rounds": 400,
        "local_steps": 3,
        "lr": 0.2,
        "precision": "float64",
        "cohort": 4,
        "availability": trace,
    }
    kept = fs.simulate(fs.scaffold(), problem, stale="keep", **ask, metrics=())
    expected = np.linalg.solve(a[:3].sum(axis=0), b[:3].sum(axis=0) - kept.clients.c_i[3])
    np.testing.assert_allclose(kept.vector, expected, atol=1e-9)
    dropped = fs.simulate(fs.scaffold(), problem, stale="drop:3", **ask, metrics=())
    np.testing.assert_allclose(dropped.vector, problem.optimum([1, 1, 1, 0]), atol=1e-9)


@pytest.fixture(scope="module")
def compressed():
    return compression_exercise.compression(
        ["none", "top_k:0.02"], ["none", "top_k:0.1"], rounds=40, quadratic_rounds=500
    )


@pytest.mark.slow
def test_compression_counts_bytes_as_sent(compressed):
    assert_sound(compressed, "float32")
    for problem, clients, dim, itemsize in (("digits", 4, 650, 4), ("quadratic", 5, 64, 8)):
        two, one, small = rows_of(compressed, problem=problem)
        assert one["bytes_a_round"] == clients * dim * itemsize
        assert two["bytes_a_round"] == 2 * one["bytes_a_round"]
        assert two["bytes_to_goal"] == 2 * one["bytes_to_goal"]
        message = compression.of(small["sent"]).bytes(dim, itemsize)
        assert small["bytes_a_round"] == clients * message
        assert small["bytes_to_goal"] < one["bytes_to_goal"]
        assert small["bytes_to_goal"] in numbers(compressed.finding)


def test_compressed_runs_reach_the_optimum(compressed):
    assert all(
        row["rounds"] is not None and row["distance"] < 1e-6
        for row in rows_of(compressed, problem="quadratic")
    )


@pytest.mark.parametrize("name", ["top_k:0.1", "random_k:0.2"])
def test_what_a_compressor_leaves_out_is_not_counted_twice(name):
    """SCAFFOLD stays at the optimum's side for as long as one likes; with errors added up it swings ever wider."""
    problem = fs.problems.quadratic(6, 20, mu=0.2, seed=3)
    ask = {
        "rounds": 1000,
        "local_steps": 3,
        "lr": 0.1,
        "cohort": 3,
        "precision": "float64",
        "metrics": ["distance"],
    }
    run = fs.simulate(fs.scaffold(), problem, compression=name, **ask)
    assert run.history["distance"][-1] < 1e-8
    assert run.residual <= 1e-12 * run.scale


@pytest.mark.slow
def test_richardson_is_measured_as_it_is_defined():
    found = richardson.richardson(((2, 1, 0.1, 16, 200),))
    first, *_, last = rows_of(found, method="fedavg")
    np.testing.assert_allclose(first["bias"], first["predicted"], rtol=0.02)
    np.testing.assert_allclose(first["combined"], first["combined_predicted"], rtol=0.1)
    assert abs(last["slope"] - 1) < 0.1
    assert abs(last["slope_combined"] - 2) < 0.25
    (ours,) = rows_of(found, method="scaffold")
    np.testing.assert_allclose(ours["combined"], 2 * ours["bias"] - ours["bias_at_2lr"], rtol=1e-9)
    assert ours["combined_predicted"] == 0  # with one local step there is no part of order lr^2 K
    assert abs(ours["bias"] - ours["predicted"]) < 5 * ours["bias_error"]


def test_verdicts_follow_from_the_standard_errors():
    row = {"bias": 1.0, "bias_error": 0.1, "combined": 0.1, "combined_error": 0.1}
    assert "removed" in richardson._verdict(row)
    assert (
        richardson._verdict(row | {"combined": -0.5}) == "0.5 times as large, with the other sign"
    )
    assert "too small" in richardson._verdict(row | {"bias_error": 0.5})


def test_missing_rounds_are_said_to_be_missing():
    assert record.middle([1, None, 3]) is None
    assert record.best([None, 5.0]) == 1


@pytest.mark.process
def test_momentum_by_the_command_line(tmp_path):
    done = verb("momentum", "--json", "--out", str(tmp_path / "m.csv"))
    assert done.returncode == 0, done.stderr
    found = record.Exercise(**json.loads(done.stdout))
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 1 + len(found.rows)
    assert_sound(found)
    ours = {row["momentum"]: row for row in rows_of(found, method="scaffold")}
    for kind in ("heavy ball", "Nesterov"):
        assert ours[kind]["rounds_to_2%"] < ours["none"]["rounds_to_2%"]
        assert ours[kind]["ends"] < 1e-6
        assert ours[kind]["rounds_to_2%"] in numbers(found.finding)
    assert all(
        row["rounds_to_1e-6"] is None for row in rows_of(found, method="fedavg")
    )  # its bias stays


@pytest.mark.process
def test_an_unknown_exercise_is_the_users_mistake():
    wrong = verb("momentun")
    assert wrong.returncode == 2
    assert "did you mean 'momentum'" in wrong.stderr

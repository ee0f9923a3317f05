"""Every claim runs, has both numbers and a verdict, and can fail; results are kept, and a broken-off run goes on."""

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import forkserver
import numpy as np
import pytest

from fedscaffold.algorithms import fedavg, scaffold
from fedscaffold.checks import InputError
from fedscaffold.problems import quadratic
from fedscaffold.simulation import simulate
from fedscaffold.theory import stationary
from papers import cache, claims, emnist, helper, plotting, quadratics_fig5, speedup_fig1
from papers import command as papers_command
from papers.__main__ import main
from papers.by_hand import play, quadratic_gradients
from papers.claim import Check, Claim, Table, verdict
from papers.claims import ALIASES, CLAIMS, find, judged, reproduce
from papers.criteria import at_least, at_most
from papers.helper import helping
from papers.page import page, terminal

NAMES = (
    *(f"quadratics-fig{i}" for i in range(1, 6)),
    "speedup-fig1",
    "talk-bias",
    "talk-richardson",
    "drift-fig1",
    "scaffold-fig3",
    "scaffold-table3",
    "scaffold-table4",
    "scaffold-table5",
    "tutorial-table",
    "theorem2-lower-bound",
    "participation",
    "conjectures",
)

# they read data that do not come with the package: test_contested.py
CONTESTED = ("flamby-heart", "flamby-tcga", "cyclic", "niid-bench", "niid-tuned", "femnist-writers")
SEARCHED = ("where-it-loses", "table3-settings")  # each in a file of its own


def test_every_name_of_the_list_is_a_claim():
    assert set(CLAIMS) == {*NAMES, *CONTESTED, *SEARCHED}
    assert all(find(name).name == name for name in CLAIMS)
    assert {find(short).name for short in ALIASES} == {
        "scaffold-table3",
        "scaffold-table4",
        "scaffold-table5",
    }
    with pytest.raises(InputError, match="did you mean 'talk-bias'"):
        find("talk-bais")


def rows(data):
    for row in data["rows"]:
        row[1] *= 1.5


def each(key, **values):
    def spoil(data):
        for one in data[key]:
            one.update(values)

    return spoil


def tables(method, **values):
    def spoil(data):
        for one in data["cells"]:
            for run in one["runs"] if one["method"] == method else []:
                run.update(values)

    return spoil


def replicated(data):
    for one in data["cells"].values():
        for row in one["rows"]:
            row[1] = 1.0


def worse(data):
    for run in data["runs"]["scaffold"]:
        run["global"] = run["global"] - 0.1


# a wrong result for every claim, such that its check must notice
SPOILS = {
    "quadratics-fig1": rows,
    "quadratics-fig2": lambda data: data.update(v=data["v"] * 0.5),
    "quadratics-fig3": each("cells", rounds=100),
    "quadratics-fig4": lambda data: [one.update(best=2 * one["best"]) for one in data["curves"]],
    "quadratics-fig5": replicated,
    "speedup-fig1": each("cells", mse=1.0),
    "talk-bias": lambda data: data.update(measured=[lr**2 for lr in data["lrs"]]),
    "talk-richardson": lambda data: data.update(left=data["lrs"]),
    "drift-fig1": lambda data: data.update(resting=1.0),
    "scaffold-fig3": lambda data: data["curves"].update(
        {"warm-10-100": data["curves"]["warm-10-100"] + 1}
    ),
    "scaffold-table3": tables("scaffold", reached=140),
    "scaffold-table4": tables("scaffold", reached=None),
    "scaffold-table5": tables("scaffold", best=0.1),
    "tutorial-table": worse,
    "theorem2-lower-bound": lambda data: [
        one.update(greedy=2 * one["greedy"]) for one in data["curves"].values()
    ],
    "participation": lambda data: data["curves"]["1"].update(rounds=[None, None, None]),
    "conjectures": each("flat", slope=1.0),
}

# criteria that fail in the quick size, and are reported as failures: on the digits, and where 1/N is outdone
FLAT = "N tr Sigma for independent clients, largest relative deviation from its mean over N, gamma = 0.01, H = 100"
FAILS = {
    "scaffold-table3": {"SGD's rounds, largest over smallest similarity's"},
    "quadratics-fig5": {FLAT},
}

# what is smaller than in the quick size, where that takes long: all of a claim is run, its criteria need not hold
METHODS = [
    ["sgd", 1],
    *([name, epochs] for name in ("scaffold", "fedavg") for epochs in (1, 5)),
    ["fedprox", 5],
]
# one step size and one seed have the shapes of a program in common, and so have tuning and running;
# a choice between step sizes: `test_tables_read_the_users_emnist`
FEW = {
    "seeds": [0],
    "grid": [1.0],
    "sgd_grid": [1.0],
    "clients": 30,
    "tune_least": 5,
    "tune_most": 10,
}
SMALLER = {
    "quadratics-fig3": {"clients": 4, "dim": 5, "mu": 0.1, "plateau": 100, "runs": 4},
    "quadratics-fig4": {"clients": 4, "dim": 5, "mu": 0.1, "points": 7, "states": 100},
    "quadratics-fig5": {
        "draws": 4,
        "iid_clients": [4, 8],
        "runs": 4,
        "window": 60,
        "copies": [1, 2],
    },
    "speedup-fig1": {
        "records": 50,
        "steps": 25,
        "rounds": {"linear": 40, "logistic": 8},
        "window": 8,
        "seeds": {"10": 3, "100": 1},
    },
    "talk-bias": {
        "lrs": [0.08, 0.04],
        "rounds": 2000,
        "all_steps": [2, 5],
        "cloud": {"lr": 0.1, "steps": 10, "noise": 0.05, "runs": 50, "rounds": 50},
    },
    "scaffold-table3": FEW | {"rows": METHODS, "rounds": 40, "similarities": [0, 100]},
    "scaffold-table4": FEW | {"rounds": 80, "target": 0.7, "tune_work": 50},
    "scaffold-table5": FEW | {"rounds": 15, "hidden": 10},
    "tutorial-table": {"seeds": [42, 43], "rounds": 20, "test": 1000},
    "participation": {"seeds": [0]},
    "conjectures": {"most": 64, "draws": 4, "tries": 20},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_claim_runs_has_a_verdict_and_can_fail(name, tmp_path, without_data):
    claim = find(name)
    smaller = {"quick": dict(claim.sizes["quick"]) | SMALLER.get(name, {})}
    outcome = sound(claim._replace(sizes=smaller), tmp_path)
    if name not in SMALLER:
        meets_its_criteria(outcome)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(SMALLER))
def test_a_claim_meets_its_criteria_in_the_quick_size(name, tmp_path, without_data):
    meets_its_criteria(sound(find(name), tmp_path))


def meets_its_criteria(outcome):
    failed = {
        check.statement
        for check in outcome.checks
        if check.passed is False and check.kind == "criterion"
    }
    assert failed <= FAILS.get(outcome.name, set())
    assert outcome.failed == len(failed)


def sound(claim, tmp_path):
    """Run a claim's quick size: checks, tables and figures are whole, and fewer checks pass on a wrong result."""
    outcome, drawings = reproduce(claim, "quick", tmp_path)
    assert outcome.verdict in ("reproduced", "partly", "not")
    assert outcome.checks
    assert outcome.tables
    for check in outcome.checks:
        assert check.expected not in ("", None)
        assert check.measured not in ("", None)
        assert check.criterion
        if check.passed is None:
            assert check.note
    for table in outcome.tables:
        assert all(len(row) == len(table.head) for row in table.rows)
    assert drawings
    with plotting.style():  # files of every kind: `test_the_command`
        for one in drawings:
            one.figure.draw_without_rendering()
            assert all(panel.has_data() for panel in one.figure.axes if panel.axison)
    spoilt = cache.read(tmp_path / claim.name / f"{cache.key_of(claim, 'quick')}.npz")
    SPOILS[claim.name](spoilt)
    after = judged(claim, "quick", spoilt)
    assert sum(check.passed is True for check in after.checks) < sum(
        check.passed is True for check in outcome.checks
    )
    assert after.verdict != "reproduced" or after.words != outcome.words
    return outcome


def small(calls, settings=None, fail_at=None):
    """A claim of three cells that counts what it computes, and may be broken off."""

    def measure(settings, memo):
        def make(i):
            if i == fail_at:
                raise KeyboardInterrupt
            calls.append(i)
            return {"value": np.full(2, i)}

        parts = [cache.Part(f"cell-{i}", lambda i=i: make(i)) for i in range(3)]
        return {"total": float(sum(cell["value"][0] for cell in memo.all(parts)))}

    sizes = {"quick": settings or {"a": 1}, "full": {"a": 2}}
    return Claim(
        "small",
        "t",
        "s",
        "says",
        sizes,
        measure,
        lambda data, settings: [at_least("total", 3.0, data["total"], 3.0)],
        lambda data: [Table("t", ["a"], [[1]])],
        lambda data: [],
    )


def test_a_hit_does_no_work_and_a_changed_setting_misses(tmp_path):
    calls = []
    first, _ = reproduce(small(calls), "quick", tmp_path)
    again, _ = reproduce(small(calls), "quick", tmp_path)
    assert calls == [0, 1, 2]
    assert (first.cached, again.cached) == (False, True)
    assert first._replace(cached=True) == again
    reproduce(small(calls, {"a": 5}), "quick", tmp_path)
    reproduce(small(calls), "full", tmp_path)
    reproduce(small(calls)._replace(depends=lambda settings: "other data"), "quick", tmp_path)
    assert calls == [0, 1, 2] * 4
    reproduce(small(calls), "quick", tmp_path, fresh=True)
    assert calls == [0, 1, 2] * 5


def test_a_broken_off_run_goes_on_where_it_was(tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        reproduce(small(calls, fail_at=2), "quick", tmp_path)
    outcome, _ = reproduce(small(calls), "quick", tmp_path)
    assert calls == [0, 1, 2]
    assert outcome.verdict == "reproduced"


def test_recorded_parts_are_taken_and_told_unless_all_is_measured_anew(tmp_path, monkeypatch):
    calls, recorded = [], tmp_path / "recorded"
    monkeypatch.setattr(claims, "RECORDED", recorded)
    with pytest.raises(KeyboardInterrupt):
        reproduce(small(calls, fail_at=2), "quick", recorded)
    (damaged,) = recorded.glob("small/*-cells/cell-1.npz")
    damaged.write_bytes(damaged.read_bytes()[:-50])
    calls.clear()
    outcome, _ = reproduce(small(calls), "quick", tmp_path / "cache")
    assert calls == [1, 2]
    assert "Of its parts 1 were not measured here" in outcome.about[-1]
    again, _ = reproduce(small(calls), "quick", tmp_path / "cache")
    assert (again.about, again.verdict) == (outcome.about, "reproduced")
    fresh, _ = reproduce(small(calls), "quick", tmp_path / "cache", fresh=True)
    assert calls == [1, 2, 0, 1, 2]
    assert fresh.about == []
    whole = cache.read(next(recorded.parent.glob("cache/small/*.npz")))
    assert "recorded" not in whole


def test_helpers_read_recorded_parts_too(tmp_path, monkeypatch):
    """A helper that did not would measure again what is there."""
    calls, recorded = [], tmp_path / "recorded"
    reproduce(small(calls), "quick", recorded)
    monkeypatch.setattr(claims, "find", lambda name: small(calls))
    monkeypatch.setattr(helper, "_end_with_input", lambda: None)
    words = ["papers.helper", "small", "quick", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", [*words, str(recorded / "small")])
    helper.main()
    assert calls == [0, 1, 2]
    monkeypatch.setattr(sys, "argv", [*words[:-1], str(tmp_path / "another"), ""])
    helper.main()
    assert calls == [0, 1, 2] * 2


def chain(calls):
    """A claim of two cells, each a trial and two runs that come after it."""

    def measure(settings, memo):
        def make(key, *needed):
            calls.append(key)
            needs = [one["key"] for one in needed]
            return {"key": key, "needed": needs, "curve": np.arange(99.0), "few": np.ones(2)}

        parts = []
        for cell in ("0-sgd", "10-sgd"):
            parts.append(cache.Part(f"{cell}-lr", partial(make, f"{cell}-lr")))
            parts += [
                cache.Part(f"{cell}-{i}", partial(make, f"{cell}-{i}"), after=[f"{cell}-lr"])
                for i in range(2)
            ]
        return {"total": float(len(memo.all(parts)))}

    return small(calls)._replace(
        measure=measure, judge=lambda data, settings: [at_least("total", 6.0, data["total"], 6.0)]
    )


def test_selected_parts_are_measured_with_what_they_need_and_serve_the_whole(tmp_path, monkeypatch):
    calls = []
    found = claims.select(chain(calls), "quick", tmp_path, "0-sgd-1")
    assert calls == list(found) == ["0-sgd-lr", "0-sgd-1"]
    assert found["0-sgd-1"]["needed"] == ["0-sgd-lr"]
    assert list(claims.select(chain(calls), "quick", tmp_path, "0-*-?")) == [
        "0-sgd-lr",
        "0-sgd-0",
        "0-sgd-1",
    ]
    assert calls == ["0-sgd-lr", "0-sgd-1", "0-sgd-0"]
    outcome, _ = reproduce(chain(calls), "quick", tmp_path)
    assert outcome.verdict == "reproduced"
    assert sorted(calls) == sorted(f"{cell}-sgd-{one}" for cell in (0, 10) for one in ("lr", 0, 1))
    with pytest.raises(InputError, match="no part's name matches 'sgd'; the parts are: 0-sgd-lr, "):
        claims.select(chain(calls), "quick", tmp_path, "sgd")
    whole = small(calls)._replace(measure=lambda settings, memo: {"total": 3.0})
    with pytest.raises(InputError, match="small is measured as a whole"):
        claims.select(whole, "quick", tmp_path, "*")

    monkeypatch.setattr(claims, "RECORDED", tmp_path)
    calls.clear()
    claims.select(chain(calls), "quick", tmp_path / "another", "*")
    assert calls == []


def test_a_helper_measures_selected_parts_alone(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(claims, "find", lambda name: chain(calls))
    monkeypatch.setattr(helper, "_end_with_input", lambda: None)
    words = ["papers.helper", "small", "quick", str(tmp_path), "", "10-sgd-0"]
    monkeypatch.setattr(sys, "argv", words)
    helper.main()
    assert calls == ["10-sgd-lr", "10-sgd-0"]


def test_a_key_depends_on_the_modules_that_the_measuring_one_imports(monkeypatch):
    """`niid-tuned` runs what stands in `niid_federation`."""
    read = cache.inspect.getsource
    before = cache.key_of(small([]), "quick")

    def changed(module):
        return read(module) + "# changed" * (module.__name__ == "papers.niid_federation")

    sources = cache._sources("papers.niid_tuned")
    monkeypatch.setattr(cache.inspect, "getsource", changed)
    assert cache._sources("papers.niid_tuned") != sources
    assert cache._sources("papers.emnist") == [read(emnist)]
    assert cache.key_of(small([]), "quick") == before


def test_the_time_left_follows_what_was_measured_in_this_run(tmp_path, monkeypatch):
    clock, told = [0.0], []
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])

    def part(key, size, seconds):
        def make():
            clock[0] += seconds
            return {}

        return cache.Part(key, make, size)

    cache.Store(tmp_path)("kept", dict)
    store = cache.Store(tmp_path, tell=lambda *args: told.append(args))
    store.all([part("kept", 5, 0), part("a", 1, 10), part("b", 2, 50), part("c", 1, 7)])
    assert told == [(2, 4, 10 / 1 * 3), (3, 4, 60 / 3 * 1), (4, 4, 0.0)]


def test_the_time_left_counts_the_processes_at_work(tmp_path, monkeypatch):
    clock, told, at_work = [0.0], [], [3]
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])

    def part(key):
        def make():
            clock[0] += 10
            at_work[0] -= key == "b"  # one of them has ended
            return {}

        return cache.Part(key, make)

    tell = lambda done, parts, left: told.append(left)  # noqa: E731
    store = cache.Store(tmp_path, tell=tell, processes=lambda: at_work[0])
    store.all([part(key) for key in "abcde"])
    # four are left for three, three for two, two for two, one for one
    assert told == [10 * 4 / 3, 10 * 3 / 2, 10, 10, 0]


def test_processes_share_the_parts_and_make_each_once(tmp_path):
    """Two stores of one folder, each in a thread of its own: locks are those of open files."""
    made, both = [], threading.Barrier(2, timeout=60)

    def parts(name):
        def make(i, *needed):
            if i < 2:
                both.wait()  # each of the two has one of the first two parts
            made.append((name, i))
            return {"value": i + sum(one["value"] for one in needed)}

        first = [cache.Part(f"{i}", partial(make, i)) for i in range(4)]
        return [*first, cache.Part("sum", partial(make, 4), after=["0", "1", "2", "3"])]

    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(cache.Store(tmp_path, tell=lambda *told: None).all, parts(name))
            for name in "ab"
        ]
        found = [[one["value"] for one in run.result(60)] for run in runs]
    assert found == [[0, 1, 2, 3, 4 + 6]] * 2
    assert sorted(i for _, i in made) == [0, 1, 2, 3, 4]
    assert {name for name, _ in made} == {"a", "b"}
    assert not list(tmp_path.glob("*.lock"))


def test_the_part_of_a_process_that_died_is_made_by_another(tmp_path):
    (tmp_path / "one.lock").touch()  # it was killed: its lock is free
    [found] = cache.Store(tmp_path).all([cache.Part("one", lambda: {"value": 1})])
    assert found["value"] == 1
    with pytest.raises(ValueError, match="two comes after parts that are not there"):
        cache.Store(tmp_path).all([cache.Part("two", dict, after=["three"])])


@pytest.mark.process
def test_a_helper_measures_a_claim_and_ends_with_the_first_process(tmp_path):
    """All of it, as nobody else does: the first process finds the result."""
    claim = find("theorem2-lower-bound")
    kept = tmp_path / claim.name
    with helping(claim.name, "quick", tmp_path, 1) as at_work:
        assert at_work() == 1
        until = time.monotonic() + 120
        while not (kept / f"{cache.key_of(claim, 'quick')}.npz").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
    assert at_work() == 0
    outcome, _ = reproduce(claim, "quick", tmp_path)
    assert outcome.cached
    assert outcome.verdict == "reproduced"


def test_a_damaged_result_is_made_again_and_no_pickle_is_read(tmp_path):
    calls = []
    reproduce(small(calls), "quick", tmp_path)
    for path in tmp_path.rglob("*.npz"):
        path.write_bytes(path.read_bytes()[:40])
    reproduce(small(calls), "quick", tmp_path)
    assert calls == [0, 1, 2] * 2
    np.savez(tmp_path / "evil.npz", json=np.array([{}], dtype=object))
    assert cache.read(tmp_path / "evil.npz") is None


def test_what_is_kept_comes_back():
    def there_and_back(value, folder):
        cache.write(folder, {"value": value})
        return cache.read(folder)["value"]

    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.npz"
        value = [1, 2.5, None, "text", {"a": [float("inf")]}, np.arange(6.0).reshape(2, 3)]
        back = there_and_back(value, path)
    assert back[:5] == value[:5]
    np.testing.assert_array_equal(back[5], value[5])


def test_undecided_and_shown_checks_decide_nothing():
    good, bad = at_most("a", 0.0, 0.0, 1.0), at_most("b", 0.0, 2.0, 1.0)
    shown, open_ = bad._replace(kind="report"), bad._replace(passed=None)
    assert verdict([good, shown, open_])[0] == "reproduced"
    assert verdict([good, bad])[0] == "partly"
    assert verdict([bad, bad, good])[0] == "not"
    assert verdict([open_])[0] == "not"


def test_a_paper_that_is_wrong_is_not_our_failure():
    wrong = Check("words", 1.0, 0.0, "equal", False, kind="paper")
    claim = small([])._replace(
        judge=lambda data, settings: [at_least("total", 3.0, 3.0, 3.0), wrong]
    )
    outcome = judged(claim, "quick", {"total": 3.0})
    assert outcome.verdict == "partly"
    assert outcome.failed == 0
    assert "the paper's words do not hold" in outcome.words


@pytest.mark.parametrize("algorithm", [scaffold(), fedavg()], ids=["scaffold", "fedavg"])
def test_rounds_by_hand_are_the_engines(algorithm):
    problem = quadratic(3, 2, mu=0.2, seed=1, x0=[1.0, -2.0])
    gradients = quadratic_gradients(*problem.records)
    done = list(play(algorithm, gradients, np.array([1.0, -2.0]), lr=0.3, local_steps=4, rounds=7))
    run = simulate(algorithm, problem, rounds=7, local_steps=4, lr=0.3, precision="float64")
    np.testing.assert_allclose(done[-1].x, run.vector, rtol=1e-12)


def emnist_file(folder, seed):
    rng = np.random.default_rng(seed)
    labels = np.arange(620) % 62
    pictures = rng.integers(0, 40, (620, 28, 28), dtype=np.uint8)
    pictures[np.arange(620), labels % 28, labels // 28] = 255
    np.savez(
        folder / "emnist_byclass62.npz",
        x_train=pictures[:496],
        y_train=labels[:496],
        x_test=pictures[496:],
        y_test=labels[496:],
    )


@pytest.fixture
def without_data(monkeypatch):
    """As on a machine without EMNIST: the quick size is quick."""
    monkeypatch.delenv("FEDSCAFFOLD_DATA", raising=False)
    emnist.pictures.cache_clear()
    yield
    emnist.pictures.cache_clear()


@pytest.mark.slow
def test_every_run_of_table_5_is_kept(tmp_path, monkeypatch, without_data):
    """Broken off in any run, it goes on with that run; the best step size by held-out records is that of the seeds."""
    settings = dict(find("table5").settings("quick")) | {
        "similarities": [0],
        "rows": [["scaffold", 5]],
        "grid": [0.1, 1.0, 30.0],
        "seeds": [0, 1],
        "at_once": 1,
        "rounds": 6,
        "tune_least": 6,
        "tune_most": 6,
        "hidden": 10,
        "clients": 30,
    }
    asked, swept = [], emnist._swept

    def watched(problem, cell, settings, *, lr, seeds, rounds):
        asked.append((tuple(lr), tuple(seeds), rounds))
        if len(asked) == 2 or (len(asked) == 5 and seeds == [0]):
            raise KeyboardInterrupt
        return swept(problem, cell, settings, lr=lr, seeds=seeds, rounds=rounds)

    monkeypatch.setattr(emnist, "_swept", watched)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            emnist.measure(settings, cache.Store(tmp_path))
    data = emnist.measure(settings, cache.Store(tmp_path))
    [cell] = data["cells"]
    best = min(cell["tuning"], key=lambda one: one[1:])[0]
    assert cell["lr"] == best
    assert len(cell["runs"]) == 2
    seed = emnist.TUNING_SEED
    tried = [((lr,), (seed,), 6) for lr in (0.1, 1.0, 1.0, 30.0)]  # the second one twice
    assert asked == [*tried, *(((best,), (seed,), 6) for seed in (0, 0, 1))]
    # the same as all step sizes, and all seeds, in one sweep
    monkeypatch.setattr(emnist, "_swept", swept)
    both = emnist._problems(emnist._pictures(settings), 0, settings)
    given = {"settings": settings, "cell": emnist.Cell(0, "scaffold", 5, 0.2, None)}
    grid = swept(both[0], **given, lr=settings["grid"], seeds=[seed], rounds=6)
    whole = [
        [lr, *emnist._score(runs[0], False)]
        for lr, runs in zip(settings["grid"], grid, strict=True)
    ]
    assert cell["tuning"] == whole
    [runs] = swept(both[1], **given, lr=[best], seeds=[0, 1], rounds=6)
    assert [run["best"] for run in cell["runs"]] == [emnist._told(run)["best"] for run in runs]


@pytest.mark.slow
def test_tables_read_the_users_emnist(tmp_path, monkeypatch, without_data):
    quick = find("table3")
    assert quick.settings("quick")["dataset"] == "digits"
    assert "with_emnist" not in quick.settings("quick")
    monkeypatch.setenv("FEDSCAFFOLD_DATA", str(tmp_path))
    emnist.pictures.cache_clear()
    settings = dict(find("table3").sizes["full"]) | {
        "clients": 8,
        "similarities": [0],
        "rows": [["scaffold", 1]],
        "rounds": 2,
        "tune_least": 1,
        "tune_most": 1,
        "grid": [0.1, 0.3],
        "seeds": [0],
        "target": 0.99,
        "validation": 100,
        "fixed": [["sgd", 1, 0.01]],
    }
    assert "digits stand in" in emnist.pictures("emnist", 100, None, None).about
    keys = []
    for seed in (1, 2):
        emnist_file(tmp_path, seed)
        emnist.pictures.cache_clear()
        keys.append(emnist.fingerprint(settings))
    assert keys[0] != keys[1]
    assert (quick.settings("quick")["dataset"], quick.settings("quick")["target"]) == (
        "emnist",
        0.5,
    )
    assert quick.settings("full") == quick.sizes["full"]
    data = emnist.measure(settings, cache.Store(tmp_path / "kept"))
    assert data["dataset"] == "emnist"
    assert data["cells"][0]["lr"] in (0.1, 0.3)
    assert len(data["cells"][0]["runs"]) == 1
    assert [(cell["method"], cell["lr"], len(cell["runs"])) for cell in data["fixed"]] == [
        ("sgd", 0.01, 1)
    ]


def test_a_row_of_sgd_like_that_of_a_small_step_is_said_to_be():
    def cell(similarity, rounds, lr):
        run = {"reached": rounds, "rounds": 500}
        return {
            "method": "sgd",
            "epochs": 1,
            "similarity": similarity,
            "lr": lr,
            "runs": [run],
            "seeds": 1,
        }

    tuned = [cell(0, 39, 1.0), cell(10, 35, 1.0), cell(100, 14, 1.0)]
    words = {}
    for last in (264, 500):
        small = [cell(0, 248, 0.03), cell(10, 248, 0.03), cell(100, last, 0.03)]
        words[last] = find("table3").errata({"cells": tuned, "fixed": small, "rounds": 500})[-1]
        assert (
            f"With a step of 0.03 we find 248, 248, {last}; with a step tuned on a wide grid 39, 35, 14."
            in words[last]
        )
    assert "small step" in words[264]
    assert "small step" not in words[500]


@pytest.mark.parametrize(
    ("error", "last", "passed"), [(0.03, 0.031, True), (0.03, 0.02, False), (0.06, 0.031, None)]
)
def test_a_variance_is_judged_only_where_it_is_known_well_enough(error, last, passed):
    scaled = {10: 0.032, 100: 0.033, 1000: last}
    cells = {n: {"variance": v / n, "variance_error": error * v / n} for n, v in scaled.items()}
    assert speedup_fig1._constant("N Var", cells).passed is passed


def test_a_variance_over_runs_and_its_standard_error():
    """Of rounds alike within a run, so that they count once: 2 / (n - 1) of the square, d = 4 times over."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        models = np.repeat(1.0 + rng.normal(size=(24, 4, 1)), 3, axis=2)
        found.append(speedup_fig1._variance(models))
    values, errors = np.array(found).T
    assert values.mean() == pytest.approx(4, abs=4 * values.std() / 20)
    assert errors.mean() == pytest.approx(np.sqrt(2 * 4 / 23), rel=0.1)


def test_tuning_never_sees_the_test_set(monkeypatch):
    """The problem that tuning is given has the held-out records as its test set, none of which is a training record."""
    held = emnist.pictures("digits", 100, None, None)
    validation, test = emnist._problems(held, 0, {"clients": 10})
    np.testing.assert_array_equal(validation.test[0], held.validation[0])
    np.testing.assert_array_equal(test.test[0], held.train.x_test)
    assert len(held.validation[1]) + len(held.train.y) == 1400
    np.testing.assert_array_equal(validation.records[0], test.records[0])


@pytest.mark.slow
def test_the_page_holds_everything_and_asks_for_nothing(tmp_path):
    outcomes, figures = [], {}
    for name in ("drift-fig1", "theorem2-lower-bound"):
        outcome, drawings = reproduce(find(name), "quick", tmp_path)
        outcomes.append(outcome)
        with plotting.style():
            figures |= {one.name: plotting.svg(one.figure) for one in drawings}
    text = page(outcomes, figures, {"command": "python -m papers", "versions": "all"})
    for outcome in outcomes:
        assert f'id="{outcome.name}"' in text
        for check in outcome.checks:
            assert check.statement.replace("'", "&#x27;").replace(">", "&gt;") in text
    assert "film-play" in text
    assert "1/131072" in text
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert not re.search(r"@import|url\(", text)
    lines = terminal(outcomes[1])
    assert lines[0].startswith("theorem2-lower-bound (004 Theorem II): reproduced")


def command(monkeypatch, capsys, *words):
    """Exit code, output and errors of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["papers", *words])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    return left.value.code, told.out, told.err


def test_the_command_prints_selected_parts_and_makes_no_page(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(claims, "find", lambda name: chain(calls))
    monkeypatch.setattr(cache, "home", lambda: tmp_path / "cache")
    monkeypatch.setattr(papers_command, "_settle", lambda processes: None)
    monkeypatch.chdir(tmp_path)
    run = partial(command, monkeypatch, capsys, "small", "--only")
    code, told, _ = run("0-sgd-0", "--json")
    assert code == 0
    part = json.loads(told)["parts"]["0-sgd-0"]
    assert part["needed"] == ["0-sgd-lr"]
    assert part["curve"] == list(range(99))
    code, told, _ = run("0-sgd-0")
    assert code == 0
    assert '0-sgd-0: {"seconds": ' in told
    assert '"few": [1.0, 1.0]' in told
    assert "curve" not in told
    assert not (tmp_path / "runs").exists()
    for more in (["--fresh"], ["--out", "x"], ["another"]):
        code, _, said = run("*", *more)
        assert (code, said.count("\n")) == (2, 1)
        assert "--only prints parts of one claim, without --fresh and --out" in said
    code, _, said = run("x")
    assert (code, said.count("\n")) == (2, 1)
    assert "the parts are: 0-sgd-lr, 0-sgd-0" in said
    assert len(calls) == 2


def test_mistakes_and_the_list(monkeypatch, capsys):
    code, _, said = command(monkeypatch, capsys, "quadratics-fig9")
    assert code == 2
    assert "did you mean 'quadratics-fig" in said
    assert command(monkeypatch, capsys)[0] == 2
    assert command(monkeypatch, capsys, "talk-bias", "--all")[0] == 2
    code, out, _ = command(monkeypatch, capsys, "--list", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(out)["claims"]] == list(CLAIMS)


def test_a_long_claim_says_how_far_it_is_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    """Broken off in its third part: the first two are kept, and told with the time that is left."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fedscaffold.status_line.LOG", 0.0)  # a line for every part
    monkeypatch.setattr(
        "papers.command._settle", lambda processes: None
    )  # JAX is set up for the other tests
    monkeypatch.setattr("papers.claims.find", lambda name: small(calls, fail_at=2))
    code, _, said = command(monkeypatch, capsys, "small", "--out", str(tmp_path))
    assert code == 130
    assert (
        said.splitlines()[-1]
        == "fedscaffold: stopped; what was measured is kept: the same command goes on"
    )
    assert [line for line in said.splitlines() if "left" in line] == [
        "  1 of 3 parts, about 0 s left",
        "  2 of 3 parts, about 0 s left",
    ]
    monkeypatch.setattr("papers.claims.find", lambda name: small(calls))
    assert command(monkeypatch, capsys, "small", "--out", str(tmp_path))[0] == 0
    assert calls == [0, 1, 2]


def test_the_covariance_of_independent_clients_is_that_of_their_mean_hessian():
    """Figure 5's cell that falls by a quarter: off by the square of gamma H beyond what one step leaves."""
    problem = quadratic(8, 6, mu=0.01, smoothness=1.0, seed=100)
    exact = [
        8 * np.trace(stationary(problem, lr=lr, local_steps=h, noise=1.0).x_covariance)
        for lr, h in ((0.01, 100), (0.01, 50), (0.01, 1))
    ]
    predicted = quadratics_fig5.of_mean_hessian(problem, 0.01)
    assert exact[0] / predicted == pytest.approx(1, abs=0.1)
    assert exact[2] / predicted == pytest.approx(1, abs=0.01 / 2)  # 1 / (1 - lr a / 2), a <= 1
    assert (exact[0] - exact[2]) / (exact[1] - exact[2]) == pytest.approx(4, rel=0.15)


def test_the_covariance_of_many_local_steps_is_that_of_each_client_alone():
    """Up to the noise of c, which is the mean of H gradients."""
    problem = quadratic(4, 3, mu=0.1, smoothness=1.0, seed=100)
    limit = quadratics_fig5.of_unbounded_steps(problem, 0.5)
    off = [
        4 * np.trace(stationary(problem, lr=0.5, local_steps=h, noise=1.0).x_covariance) - limit
        for h in (1000, 2000)
    ]
    assert off[0] == pytest.approx(0, abs=limit / 100)
    assert off[0] / off[1] == pytest.approx(2, rel=0.01)


def test_all_leaves_out_a_claim_whose_data_are_not_there(tmp_path, monkeypatch, capsys):
    def absent(settings):
        raise FileNotFoundError("heart not found")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "papers.command._settle", lambda processes: None
    )  # JAX is set up for the other tests
    monkeypatch.setattr("papers.claims.CLAIMS", {"small": "", "heart": ""})
    claims = {"small": small([]), "heart": small([])._replace(name="heart", depends=absent)}
    monkeypatch.setattr("papers.claims.find", claims.get)
    code, out, _ = command(monkeypatch, capsys, "--all", "--json", "--out", str(tmp_path))
    assert code == 0
    assert [one["name"] for one in json.loads(out)["claims"]] == ["small"]
    assert command(monkeypatch, capsys, "heart", "--out", str(tmp_path))[0] == 2


@pytest.mark.process
def test_the_command(tmp_path, monkeypatch):
    """In a process of its own, as it sets JAX up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["theorem2-lower-bound", "--quick", "--out", "here", "--json"]
    answers = []
    for _ in range(2):
        done = forkserver.run("from papers.__main__ import main; main()", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["claims"][0])
    assert [one["verdict"] for one in answers] == ["reproduced", "reproduced"]
    assert [one["cached"] for one in answers] == [False, True]
    assert (tmp_path / "here" / "reproduction.html").exists()
    assert {path.suffix for path in (tmp_path / "here").iterdir()} == {
        ".html",
        ".json",
        ".svg",
        ".pdf",
        ".png",
    }


@pytest.mark.slow
def test_no_bit_of_a_kept_result_can_change_unseen(tmp_path):
    path = tmp_path / "one.npz"
    data = {
        "x": np.linspace(0, 1, 5),
        "flag": np.array([True, False]),
        "words": ["a", None],
        "y": float("nan"),
    }
    cache.write(path, data)
    whole = path.read_bytes()
    trusted = repr(cache.read(path))
    for place in range(len(whole)):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
        )
        found = cache.read(path)
        assert found is None or repr(found) == trusted, (
            place
        )  # of a date in the archive nothing depends
        path.write_bytes(whole[:place])
        assert cache.read(path) is None
    np.savez(
        path, json=np.frombuffer(b'{"x": 1}', np.uint8)
    )  # a whole archive, without the checksum
    assert cache.read(path) is None

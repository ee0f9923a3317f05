"""`diagnose RUN`: faults that are really put into a state are found and named, a healthy run is left alone, and every
number is that of an oracle in plain NumPy."""

import json
import shutil
import sys
from dataclasses import replace

import deploy_case
import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold import cli
from fedscaffold.checks import InputError
from fedscaffold.cli.diagnose import print_diagnosis
from fedscaffold.diagnose.control_checks import NUMBERS, Diagnosis, longest_absence
from fedscaffold.diagnose.diagnose_run import diagnose
from fedscaffold.diagnose.read_checkpoint import open_checkpoint
from fedscaffold.diagnose.regime import noise_of_means
from fedscaffold.diagnose.state_checks import examine_run
from fedscaffold.experiments import compare
from fedscaffold.experiments.build_problem import build
from fedscaffold.experiments.config_file import load, parse, to_toml
from fedscaffold.run_config import RunConfig
from fedscaffold.runs import read
from fedscaffold.simulation.program import prepare
from fedscaffold.state import commit, latest
from fedscaffold.theory.round_map import client_quadratics
from fedscaffold.theory.stable_step import stable_step

N, STEPS, LR, ROUNDS = 8, 5, 0.3, 60
CONFIG = f"""
rounds = {ROUNDS}
precision = "float64"
seed = 3
problem = {{dataset = "quadratic", clients = {N}, dim = 4, mu = 0.2}}
local = {{steps = {STEPS}, lr = {LR}}}
cohort = {{size = 0.5}}
"""


def ran(folder, *overrides):
    """A run's folder, as `fedscaffold run` leaves it."""
    config = parse(CONFIG, overrides)
    built = build(config.problem)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    study = compare.run(config, built, "fedscaffold run", checkpoint=folder / "checkpoint")
    compare.write_results(study, folder)
    return folder


def found_in(folder):
    config = load(folder / "config.toml")
    return {one.about: one for one in diagnose(folder, config, build(config.problem)).findings}


def damaged(folder, change):
    """Commit a changed state over the last one, whole and with a good checksum."""
    state = folder / ("checkpoint" if (folder / "checkpoint").is_dir() else "state")
    snapshot = latest(state)
    arrays = {name: array.copy() for name, array in snapshot.arrays.items()}
    change(arrays)
    commit(state, arrays, snapshot.facts, after=snapshot.generation)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("runs") / "healthy", "rounds=25")


@pytest.fixture
def copy(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "run")


@pytest.mark.slow
def test_a_healthy_run_has_no_finding_above_ok_and_its_numbers_are_right(healthy):
    found = found_in(healthy)
    assert {"residual", "ages", "norms", "alignment", "drift", "step size", "progress"} == set(
        found
    )
    assert Diagnosis("", 0, list(found.values())).severity == "ok", found
    problem = build(load(healthy / "config.toml").problem).problem
    a, b = client_quadratics(problem)
    state = latest(healthy / "checkpoint").arrays
    x, c, c_i = (state[f"state.{name}"] for name in ("server.x", "server.c", "memory.c_i"))
    g = np.einsum("nij,j->ni", a, x) - b
    apart = np.sqrt(np.mean(np.sum((g - g.mean(0)) ** 2, axis=1)))
    left = np.sqrt(np.mean(np.sum((c_i - c - g + g.mean(0)) ** 2, axis=1))) / apart
    assert found["residual"].number <= np.linalg.norm(c - c_i.mean(0)) + 1e-15
    assert found["norms"].number == pytest.approx(np.linalg.norm(c_i, axis=1).max(), rel=1e-12)
    assert found["alignment"].number == pytest.approx(left, rel=1e-6)
    y = np.tile(x, (N, 1))
    for _ in range(STEPS):
        y = y - LR * (np.einsum("nij,nj->ni", a, y) - b - c_i + c)
    assert found["drift"].number == pytest.approx(np.linalg.norm(y - x, axis=1).max(), rel=1e-9)
    assert found["step size"].number == pytest.approx(
        LR / stable_step(problem, lr=LR, local_steps=STEPS).lr
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["problem.noise=2000"], {"regime"}),
        (["problem.noise=2000", "cohort.size=1.0"], set()),  # corrections sum to zero
        (["problem.noise=2000", "cohort.size=1.0", "local.optimizer=momentum"], set()),
        (["problem.noise=2000", "cohort.size=1.0", "local.optimizer=adam"], {"regime"}),
        (["cohort.size=1", "rounds=4"], {"visits"}),
    ],
)
def test_a_run_in_which_control_variates_do_not_pay_is_told(tmp_path, changes, said):
    folder = ran(tmp_path, "rounds=6", "local.lr=0.001", *changes)
    found = found_in(folder)
    assert {"regime", "visits"} & set(found) == said
    assert all(found[one].severity == "watch" and "fedavg" in found[one].do for one in said)
    if "regime" in said:  # tr C / K over the variance of the g_i, in plain NumPy
        a, b = client_quadratics(build(load(folder / "config.toml").problem).problem)
        g = np.einsum("nij,j->ni", a, latest(folder / "checkpoint").arrays["state.server.x"]) - b
        apart = np.var(g, axis=0, ddof=1).sum()
        assert found["regime"].number == pytest.approx(4 * 2000 / STEPS / apart, rel=1e-6)


@pytest.mark.parametrize(
    "way",
    [
        {"local_steps": 5},
        {"local_steps": 5, "draw": "shuffle"},
        {"local_epochs": 2},
        {"local_epochs": 2, "drop_last": True},
        {"local_steps": 5, "accumulate": 2},
    ],
    ids=str,
)
def test_the_noise_of_a_mean_gradient_is_that_of_the_draws(way):
    """Of gradients x - b at x = 0, so of records: the simulator's own draws, within 4 standard errors."""
    values = [np.array([0.0, 1.0, 5.0, -2.0, 3.0, 3.0, 7.0]), np.array([1.0, -4.0, 2.0])]
    problem = fs.problems.Problem(
        lambda x, batch: ((x - batch) ** 2).mean() / 2, np.zeros(1), [v[:, None] for v in values]
    )
    config = RunConfig(fs.scaffold(), problem, rounds=1, lr=0.1, batch_size=2, **way)
    found = noise_of_means(config, problem, np.arange(2), [0.0])
    rounds, drawer = 4000, prepare(config, [0]).drawer
    draws, flat = drawer.draw(0, 0, rounds, rounds), np.concatenate(values)
    for i, own in enumerate(values):
        k = drawer.steps[i]
        share = 1 / drawer.batch[i] if draws.row_weights is None else draws.row_weights[:, i, :k]
        means = (share * flat[draws.rows[:, i, :k]]).sum(axis=2).mean(axis=1)
        errors = np.square(means - own.mean())
        assert found[i] == pytest.approx(
            errors.mean(), abs=4 * errors.std() / np.sqrt(rounds) + 1e-12
        )


@pytest.mark.parametrize(
    ("way", "told"), [({"local_steps": 6}, True), ({"local_epochs": 1}, False)]
)
def test_whole_passes_have_no_noise_of_batches(tmp_path, way, told):
    """Clients that are nearly equal, and much noise from record to record: batches make the regime, passes do not."""
    rng = np.random.default_rng(0)
    held = [rng.normal(size=(6, 2)) for _ in range(N)]
    clients = [own - own.mean(axis=0) + 0.1 * rng.normal(size=2) for own in held]
    problem = fs.problems.Problem(
        lambda x, batch: ((x - batch) ** 2).sum(axis=1).mean() / 2, np.ones(2), clients
    )
    given = {"rounds": 20, "lr": 0.05, "batch_size": 1, "cohort": 0.5, "metrics": ("loss",), **way}
    fs.simulate(fs.scaffold(), problem, checkpoint=tmp_path, **given)
    config = RunConfig(fs.scaffold(), problem, **given)
    with open_checkpoint(tmp_path, config) as standing:
        found = {one.about: one for one in examine_run(config, standing)}
    assert ("regime" in found) == told


def test_a_schedule_over_rounds_is_judged_by_the_present_rounds_step_size(tmp_path):
    problem = fs.problems.quadratic(num_clients=N, dim=4, mu=0.2, seed=1)
    rounds, done = 40, 12
    given = {
        "local_steps": STEPS,
        "lr": lambda round: LR / round,
        "precision": "float64",
        "metrics": ("loss",),
    }
    whole = RunConfig(fs.scaffold(), problem, rounds=rounds, **given)
    fs.simulate(fs.scaffold(), problem, rounds=done, checkpoint=tmp_path, **given)
    a, b = client_quadratics(problem)
    for config, number in ((whole, done + 1), (replace(whole, rounds=done), done)):
        with open_checkpoint(tmp_path, config) as standing:
            found = {one.about: one for one in examine_run(config, standing)}
            x = np.asarray(standing.state.x)
        lr = LR / number
        reach = STEPS * lr * np.linalg.norm(np.einsum("nij,j->ni", a, x) - b, axis=1)
        assert f"gradients alone would lead to {np.median(reach):.2g}" in found["drift"].sentence
        stable = stable_step(problem, lr=lr, local_steps=STEPS, exact=True).lr
        assert found["step size"].number == pytest.approx(lr / stable)


def overwrite(row):
    return lambda arrays: arrays["state.memory.c_i"].__setitem__(2, row)


@pytest.mark.parametrize(
    ("change", "said", "client"),
    [
        (overwrite(np.array([3.0, -1.0, 2.0, 0.5])), "client 2 alone would explain it", "client 2"),
        (overwrite(0.0), "client 2 is exactly zero although heard, so it was lost", "client 2"),
        (
            lambda arrays: arrays["state.server.c"].__setitem__(slice(None), 0.0),
            "c is exactly zero, so it was lost",
            None,
        ),
        (lambda arrays: arrays["state.server.c"].__setitem__(0, 0.01), "so c was changed", None),
        (
            lambda arrays: arrays["state.memory.c_i"].__iadd__(0.01),
            "rows of c_i were changed",
            None,
        ),
    ],
    ids=["overwritten row", "lost row", "lost c", "changed c", "changed rows"],
)
def test_a_mismatch_is_found_and_who_is_to_blame(copy, change, said, client):
    """Each of these is whole by its checksum; only c = sum p_i c_i tells."""
    one = found_in(damaged(copy, change))["residual"]
    arrays = latest(copy / "checkpoint").arrays
    off = np.linalg.norm(arrays["state.server.c"] - arrays["state.memory.c_i"].mean(axis=0))
    assert one.severity == "wrong"
    assert one.number == pytest.approx(off, rel=1e-9)
    assert said in one.sentence, one.sentence
    assert one.clients == (() if client is None else (client,))
    assert "never heals" in one.do


def test_values_that_are_not_finite_are_found(copy):
    def spoil(arrays):
        arrays["state.server.x"][1] = np.nan
        arrays["state.memory.c_i"][5, 0] = np.inf

    one = found_in(damaged(copy, spoil))["finite"]
    assert one.severity == "wrong"
    assert one.clients == ("client 5",)
    assert "1 of 4 values" in one.sentence


def test_a_damaged_or_edited_folder_is_found(copy):
    newest = max((copy / "checkpoint").glob("state-*"))
    newest.write_bytes(newest.read_bytes()[:-9])
    assert found_in(copy)["checkpoint"].severity == "watch"  # the one before is whole
    for path in (copy / "checkpoint").glob("state-*"):
        path.write_bytes(path.read_bytes()[:-9])
    assert found_in(copy)["checkpoint"].severity == "wrong"


def test_a_configuration_that_did_not_run_is_found(copy):
    path = copy / "config.toml"
    path.write_text(
        path.read_text(encoding="utf-8").replace(f"lr = {LR}", "lr = 0.2"), encoding="utf-8"
    )
    one = found_in(copy)["config"]
    assert (one.severity, "lr: was 0.3, is 0.2" in one.sentence) == ("wrong", True)


def test_a_step_above_the_stable_range_is_found_before_and_after_it_diverges(tmp_path):
    limit = stable_step(build(parse(CONFIG).problem).problem, lr=LR, local_steps=STEPS).lr
    early = found_in(ran(tmp_path / "early", f"local.lr={1.2 * limit}", "rounds=4"))
    assert early["step size"].severity == "wrong"
    assert early["step size"].number == pytest.approx(1.2, rel=1e-9)
    assert early["progress"].severity == "ok"  # too early to say
    late = found_in(ran(tmp_path / "late", f"local.lr={3 * limit}", "rounds=2000"))
    assert {late[name].severity for name in ("step size", "progress")} == {"wrong"}


def away(tmp_path, last):
    """Client 5 is there for `last` rounds and then no more."""
    trace = np.ones((400, N), int)
    trace[last:, 5] = 0
    np.savetxt(tmp_path / "there.csv", trace, "%d", ",")
    where = tmp_path / "there.csv"
    return found_in(ran(tmp_path / "run", "rounds=400", f"cohort.availability='{where}'")), latest(
        tmp_path / "run" / "checkpoint"
    ).arrays


@pytest.mark.parametrize(
    ("last", "said"), [(0, "never heard in 400 rounds"), (10, "not heard for 39")]
)
def test_a_client_that_is_heard_no_more_is_found_and_where_that_ends(tmp_path, last, said):
    found, arrays = away(tmp_path, last)
    one = found["ages"]
    assert (one.severity, one.clients) == ("wrong", ("client 5",))
    assert said in one.sentence
    a, b = client_quadratics(build(parse(CONFIG).problem).problem)
    x, c_i = arrays["state.server.x"], arrays["state.memory.c_i"]
    pull = np.linalg.norm(a[5] @ x - b[5] - c_i[5]) / N
    assert (
        f"training ends at a gradient of {pull:.2g} (now {pull:.2g})" in one.sentence
    )  # as it has
    assert np.linalg.norm(a.mean(0) @ x - b.mean(0)) == pytest.approx(pull, rel=1e-9)
    assert (found["progress"].severity, "has stalled" in found["progress"].sentence) == (
        "watch",
        True,
    )
    assert found["residual"].severity == "ok"  # c is the mean of the c_i all the same
    assert found["progress"].number_name == "norm of the gradient"
    for one in found.values():  # every number has a name in words
        assert one.number is None or one.number_name or NUMBERS[one.about]


def test_sampling_explains_ages_as_often_as_it_says():
    """The bound of 1/1000 is one: of 2000 drawn federations two, or a few more, may have anybody away for longer."""
    rng, n, size = np.random.default_rng(0), 20, 5
    longest = longest_absence(n, size / n)
    rounds = int(longest) + 1  # nobody may be away for that long
    drawn = np.argpartition(rng.random((2000, rounds, n)), size, axis=-1)[..., :size].reshape(
        2000, -1
    )
    absent = sum(len(np.unique(heard)) < n for heard in drawn)
    assert absent <= 2 + 3 * np.sqrt(2)  # expected at most 2, three standard deviations above
    assert n * (1 - size / n) ** longest == pytest.approx(1e-3)


def test_a_method_without_memory_is_judged_by_its_course(tmp_path):
    found = found_in(
        ran(tmp_path / "run", "algorithm.name=fedavg", "cohort.size=1.0", "rounds=100")
    )
    assert "residual" not in found
    assert (found["progress"].severity, "away from the optimum" in found["progress"].sentence) == (
        "watch",
        True,
    )
    bias = fs.theory.bias(
        build(parse(CONFIG).problem).problem, lr=LR, local_steps=STEPS, algorithm=fs.fedavg()
    )
    a, _ = client_quadratics(build(parse(CONFIG).problem).problem)
    assert found["progress"].number == pytest.approx(np.linalg.norm(a.mean(0) @ bias), rel=1e-6)


def radius(problem, lr, steps, server_lr):
    """Spectral radius of a round of SCAFFOLD with everybody, (x, c_i) -> (x, c_i), from rounds of every basis vector."""
    a, _ = client_quadratics(problem)
    n, d = a.shape[:2]

    def after(vector):
        x, c_i = vector[:d], vector[d:].reshape(n, d)
        y, c = np.tile(x, (n, 1)), c_i.mean(axis=0)
        for _ in range(steps):
            y = y - lr * (np.einsum("nij,nj->ni", a, y) - c_i + c)
        return np.concatenate(
            [x + server_lr * (y - x).mean(axis=0), (c_i - c + (x - y) / (steps * lr)).ravel()]
        )

    return np.abs(
        np.linalg.eigvals(np.transpose([after(unit) for unit in np.eye((n + 1) * d)]))
    ).max()


def test_the_largest_stable_step_is_where_rounds_cease_to_contract():
    problem = build(parse(CONFIG).problem).problem
    for server_lr in (1.0, 1.5):
        lr = stable_step(
            problem, lr=LR, local_steps=3, algorithm=fs.scaffold(server_lr=server_lr)
        ).lr
        assert (
            radius(problem, lr * 0.999, 3, server_lr)
            < 1
            < radius(problem, lr * 1.001, 3, server_lr)
        )
    a, _ = client_quadratics(problem)
    mean = np.linalg.eigvalsh(a.mean(axis=0))[-1]
    assert stable_step(problem, lr=LR, local_steps=3, algorithm=fs.sgd()).lr == pytest.approx(
        2 / mean, rel=1e-3
    )


@pytest.mark.parametrize("steps", [2000, 20_000])
def test_many_local_steps_are_no_reason_to_refuse(steps, tmp_path):
    """Steps a little above 2/L overflow in so long a round: they are unstable, and the run below them is healthy."""
    folder = ran(tmp_path / "run", f"local.steps={steps}", "local.lr=0.01", "rounds=5")
    found = found_in(folder)["step size"]
    assert found.severity == "ok"
    largest = build(parse(CONFIG).problem).problem.smoothness
    for algorithm in (fs.scaffold(), fs.fedavg()):
        limit = stable_step(
            build(parse(CONFIG).problem).problem, lr=0.01, local_steps=steps, algorithm=algorithm
        )
        assert limit.lr == pytest.approx(2 / largest, rel=0.01)
        assert not limit.unstable
    assert stable_step(
        build(parse(CONFIG).problem).problem, lr=3 / largest, local_steps=steps
    ).unstable


def test_curvature_at_x_is_measured_where_the_bound_does_not_hold():
    problem = fs.problems.two_datasets("logistic", 4, records=20)
    x = np.cos(np.arange(problem.dim))
    from fedscaffold.theory.derivatives import client_hessians

    steepest = np.linalg.eigvalsh(client_hessians(problem, x)).max()
    found = stable_step(problem, lr=10 / problem.smoothness, local_steps=5, at=x)
    assert (found.source, found.radius) == ("curvature at x", None)
    assert found.lr == pytest.approx(2 / steepest, rel=1e-6)
    assert (
        stable_step(problem, lr=1 / problem.smoothness, local_steps=5).lr == 2 / problem.smoothness
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "file"])
def test_clients_who_are_away_are_diagnosed_all_the_same(tmp_path, kind):
    """The store is named in the TOML, gives the bits of the array, and its rows are looked at, damaged or not."""
    more = ("rounds=25", "metrics=['distance']")
    folder = ran(tmp_path / kind, f"client_state={kind}", *more)
    plain = ran(tmp_path / "array", *more)
    digests = [read(one).runs[0].digest for one in (folder, plain)]
    assert digests[0] == digests[1]
    here, there = found_in(folder), found_in(plain)
    assert Diagnosis("", 0, list(here.values())).severity == "ok"
    for name in ("norms", "alignment", "drift", "ages"):
        assert here[name].number == pytest.approx(there[name].number, rel=1e-9)
    one = found_in(
        damaged(folder, lambda arrays: arrays["state.server.c"].__setitem__(slice(None), 0.0))
    )["residual"]
    assert "c is exactly zero" in one.sentence
    if kind == "file":
        base = max((folder / "checkpoint").glob("rows-*-*"))
        base.write_bytes(b"x" * base.stat().st_size)
        assert found_in(folder)["checkpoint"].severity in ("watch", "wrong")


def test_the_store_in_the_configuration(tmp_path):
    with pytest.raises(
        InputError, match=r"unknown key 'client_stat' \(did you mean 'client_state'\?\)"
    ):
        parse("client_stat = 'file'")
    with pytest.raises(
        InputError, match="unknown client_state 'disk'; known: array, auto, file, sparse"
    ):
        parse("client_state = 'disk'")
    tuned = parse(CONFIG, ["client_state=file", "local.lr=tuned"])
    with pytest.raises(InputError, match="is for one run at a time"):
        compare.validate_run(tuned, build(tuned.problem))
    with pytest.raises(InputError, match="is for one run at a time"):
        compare.compare(
            parse(CONFIG, ["client_state=file"]), build(tuned.problem), ["scaffold"], 1, None, ""
        )
    huge = parse(CONFIG, ["client_state=auto", "rounds=10"])
    assert compare.validate_run(huge, build(huge.problem)).client_state == "array"


def typed(monkeypatch, capsys, *words):
    """What the command line does: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, *capsys.readouterr()


def test_the_verb(monkeypatch, capsys, copy, tmp_path):
    code, out, _ = typed(monkeypatch, capsys, "diagnose", copy, "--json")
    answer = json.loads(out)
    assert (code, answer["severity"], answer["round"]) == (0, "ok", 25)
    code, out, _ = typed(monkeypatch, capsys, "diagnose", damaged(copy, overwrite(1.0)))
    assert code == 1
    assert "1 thing is wrong" in out
    assert "WRONG  residual: c differs from the mean of the c_i by" in out
    code, _, said = typed(monkeypatch, capsys, "diagnose", tmp_path)
    assert (code, "holds no run" in said) == (2, True)
    code, _, said = typed(monkeypatch, capsys, "diagnose", copy, "--clients", "3")
    assert (code, "takes --data and --json only, got --clients" in said) == (2, True)


def test_resume_keeps_the_store_that_auto_chose(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fedscaffold.simulation.out_of_core.choose", lambda *size: "file")
    config = tmp_path / "config.toml"
    config.write_text(f"client_state = 'auto'\nmetrics = ['distance']\n{CONFIG}", encoding="utf-8")
    folder = tmp_path / "run"
    given = ("--set", f"output.dir={folder}", "--set", "rounds=5", "--json")
    assert typed(monkeypatch, capsys, "run", config, *given)[0] == 0
    monkeypatch.undo()
    assert load(folder / "config.toml").client_state == "file"
    code, out, _ = typed(monkeypatch, capsys, "resume", folder, "--rounds", "9", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 9)
    rows = set((folder / "checkpoint").glob("rows-*"))
    assert rows
    assert (
        typed(
            monkeypatch,
            capsys,
            "run",
            folder / "config.toml",
            *given[:4],
            "--set",
            "client_state=array",
        )[0]
        == 0
    )
    assert not rows & set((folder / "checkpoint").glob("rows-*"))


@pytest.mark.slow
def test_a_comparison_is_judged_by_its_metrics(tmp_path):
    config = parse(CONFIG, ["rounds=10"])
    built = build(config.problem)
    ask = config, built, ["scaffold", "fedavg"], 1, None, "fedscaffold compare"
    study = compare.compare(*ask, workers=1).study
    compare.write_results(study, tmp_path)
    found = diagnose(tmp_path, config, built)
    assert found.severity == "ok"
    assert [one.about for one in found.findings].count("progress") == 2
    broken = replace(study, runs=[replace(study.runs[0], residual=0.1), study.runs[1]])
    compare.write_results(broken, tmp_path)
    assert diagnose(tmp_path, config, built).severity == "wrong"


def test_a_deployed_server(tmp_path, capsys):
    config = deploy_case.settings()
    deploy_case.run_quietly(config, tmp_path, rounds=6)
    assert print_diagnosis(tmp_path, None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {one["severity"] for one in answer["findings"]} == {"ok"}
    damaged(tmp_path, lambda arrays: arrays["c_i.cow"].__setitem__(slice(None), 0.0))
    assert print_diagnosis(tmp_path, None, as_json=False) == 1
    assert (
        "the control variate of cow is exactly zero although heard, so it was lost"
        in capsys.readouterr().out
    )
    log = tmp_path / "audit.jsonl"
    log.write_text(
        log.read_text(encoding="utf-8").replace("committed", "Committed", 1), encoding="utf-8"
    )
    assert print_diagnosis(tmp_path, None, as_json=False) == 1
    assert "was changed" in capsys.readouterr().out


def test_a_site_of_a_deployment_that_stays_away(tmp_path, capsys):
    config = deploy_case.settings()
    server = deploy_case.server_of(config, tmp_path)
    deploy_case.everybody(server, config)
    deploy_case.play(server, config, tmp_path)
    for _ in range(12):
        deploy_case.play(server, config, tmp_path, present=deploy_case.SITES[1:])
    print_diagnosis(tmp_path, None, as_json=True)
    [ages] = [
        one for one in json.loads(capsys.readouterr().out)["findings"] if one["about"] == "ages"
    ]
    assert (ages["severity"], ages["clients"]) == ("watch", ["ant"])
    assert "ant not heard for 12 rounds".replace("ant", "Ant") in ages["sentence"]

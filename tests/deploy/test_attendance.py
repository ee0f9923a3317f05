"""Every site that did not count is named with its round and cause: in the status, on the page, in the log, at the end."""

import json
import sys

import numpy as np
import pytest
from deploy_case import SITES, learner, server_of, settings

from fedscaffold.cli import main
from fedscaffold.deploy import InProcess, Stopped, drive
from fedscaffold.deploy.audit import read_verified
from fedscaffold.deploy.client import make_walk
from fedscaffold.runs.deployed import Deployed


def broken(**sites):
    """A learner whose sites are changed: name=function of the open site; None where its data cannot be read."""
    one = learner()
    usual = one.site

    def site(name):
        if name not in sites:
            return usual(name)
        if sites[name] is None:
            raise FileNotFoundError(f"/records/{name}.csv")
        return sites[name](usual(name))

    one.site = site
    return one


def raising(site):
    def train(work):
        raise ZeroDivisionError

    return site._replace(train=train)


def diverging(site):
    def train(work):
        done = site.train(work)
        return done._replace(walk=make_walk(work, np.full_like(work.x, np.nan), done.steps))

    return site._replace(train=train)


def not_a_number(site):
    return site._replace(evaluate=lambda x, buffers: {"loss": float("nan")})


def run(config, one, folder, rounds=3):
    server = server_of(config, folder)
    return server, drive(server, InProcess(one, config, folder), rounds, sleep=lambda seconds: None)


def never(server):
    return [site for site, one in server.missed.items() if one["never_counted"]]


def status(folder):
    return json.loads((folder / "status.json").read_text())


def notes(folder):
    return " ".join(Deployed(folder).poll().progress.notes)


def closed(folder):
    """(absent, failed) of each round that was committed."""
    events = read_verified(folder / "audit.jsonl")
    return [
        (e["absent"], e["failed"])
        for e in events
        if e["event"] == "committed" and e["kind"] == "train"
    ]


def test_a_site_that_cannot_read_its_data_is_named_with_the_cause(folder):
    server, summary = run(settings(), broken(bee=None), folder)
    cause = "reading its data failed: FileNotFoundError (reference "
    one = summary.missed["bee"]
    assert (one["round"], one["times"], one["never_counted"], cause in one["cause"]) == (
        3,
        4,
        True,
        True,
    )
    assert list(summary.missed) == never(server) == ["bee"]
    assert all(cause in absent["bee"] for absent, _ in closed(folder))
    assert len(closed(folder)) == 3
    shown = status(folder)
    assert shown["absent"] == ["bee"]
    assert shown["missed"]["bee"] == one
    assert f"bee never counted, at last not in the evaluation after round 3: {cause}" in notes(
        folder
    )


def test_a_site_whose_training_raises_is_named_with_the_cause(folder):
    _, summary = run(settings(), broken(bee=raising), folder)
    cause = "training failed: ZeroDivisionError (reference "
    assert summary.missed["bee"]["sentence"].startswith(
        f"bee never counted, at last not in round 3: {cause}"
    )
    assert all(cause in failed["bee"] for _, failed in closed(folder))
    assert cause in notes(folder)
    assert cause in status(folder)["missed"]["bee"]["cause"]


def test_a_site_that_comes_back_has_missed_rounds_and_counts(folder):
    config = settings()
    sites = {"bee": None}
    one = broken(**sites)
    mended = []

    def tell(outcome):
        if outcome.round == 2 and not mended:
            mended.append(1)
            one.site = learner().site

    server = server_of(config, folder)
    summary = drive(server, InProcess(one, config, folder), 4, tell=tell)
    assert (summary.missed["bee"]["never_counted"], summary.missed["bee"]["round"]) == (False, 2)
    assert summary.missed["bee"]["sentence"].startswith(
        "bee missed 2 rounds, the last was round 2: reading"
    )
    assert server.roster["bee"].applied == 4


def test_a_late_site_and_one_that_is_not_online_are_told_apart(folder):
    config = settings(deploy="deadline = 5")
    now = [0.0]

    class Losing(InProcess):
        def present(self):
            return self.known - {"cow"}

        def collect(self):
            now[0] += 1
            return [(site, reply) for site, reply in super().collect() if site != "bee"]

    server = server_of(config, folder, clock=lambda: now[0])
    summary = drive(
        server,
        Losing(learner(), config, folder),
        2,
        sleep=lambda seconds: now.__setitem__(0, now[0] + 9),
    )
    assert summary.missed["bee"]["cause"] == "no reply before the deadline"
    assert summary.missed["cow"]["cause"] == "its node is not online"
    assert summary.missed["cow"]["times"] == 3


def test_a_restarted_server_still_knows(folder):
    config = settings()
    server, _ = run(config, broken(bee=raising, cow=None), folder)
    again = server_of(config, folder)
    assert again.missed == server.missed
    assert never(again) == never(server) == ["bee", "cow"]


def test_a_site_that_was_not_drawn_has_not_missed_anything(folder):
    server, summary = run(settings("[cohort]\nsize = 1"), learner(), folder, rounds=1)
    assert sum(member.applied == 0 for member in server.roster.values()) == 4
    assert (summary.missed, never(server)) == ({}, [])


@pytest.mark.parametrize("state", ["server", "client"])
def test_nan_everywhere_ends_with_nan_and_the_names(state, folder):
    one = broken(**dict.fromkeys(SITES, diverging))
    slept = []
    config = settings(deploy=f"state = '{state}'")
    server = server_of(config, folder)
    with pytest.raises(Stopped, match="NaN") as stopped:
        drive(server, InProcess(one, config, folder), 3, sleep=slept.append)
    assert all(site in str(stopped.value) for site in SITES)
    assert "smaller local.lr" in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert slept == []  # to try again would bring the same
    assert set(stopped.value.missed) == set(SITES)
    assert status(folder)["phase"] == "stopped"


def test_a_quorum_that_is_not_met_names_every_cause(folder):
    one = broken(ant=diverging, bee=None, cow=raising, dog=raising)
    with pytest.raises(Stopped, match="failed its quorum 11 times") as stopped:
        run(settings(), one, folder)
    for said in (
        "ant: not finite: ",
        "bee: reading its data failed: FileNotFoundError",
        "cow: training failed",
        "dog: training failed",
        "elk: its reply was good, but",
    ):
        assert said in str(stopped.value)
    assert stopped.value.missed["elk"]["never_counted"]


def test_one_sites_nan_metric_is_left_out_and_named(folder):
    config = settings()
    _, summary = run(config, broken(bee=not_a_number), folder)
    _, without = run(config, learner(), folder / "quiet")
    others = [site for site in SITES if site != "bee"]
    x = server_of(config, folder).state.x
    expected = np.mean([learner().site(site).evaluate(x, {})["loss"] for site in others])
    assert summary.metrics["loss"] == pytest.approx(expected, rel=1e-12)
    assert without.metrics["loss"] != summary.metrics["loss"]
    assert summary.unmeasured == status(folder)["unmeasured"] == {"loss": ["bee"]}
    assert "bee" not in summary.missed  # its training counted
    events = [
        e for e in read_verified(folder / "audit.jsonl") if e["event"] in ("committed", "evaluated")
    ]
    assert all(e["unmeasured"] == {"loss": ["bee"]} for e in events)
    assert "loss is without bee" in notes(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) and row["unmeasured"] == {"loss": ["bee"]} for row in rows)


def test_a_metric_that_is_finite_nowhere_is_named_too(folder):
    _, summary = run(settings(), broken(**dict.fromkeys(SITES, not_a_number)), folder)
    assert (summary.metrics, summary.unmeasured) == ({}, {"loss": list(SITES)})


# As the operator meets it

APP = """
import numpy as np
from fedscaffold.deploy import ArraysLearner

def data(site):
    if site == "south":
        SOUTH
    return np.ones((4, 2)), np.ones((4, 2))

def gradient(params, batch):
    a, b = batch
    return {"w": (a * (params["w"] - b)).mean(axis=0)}

def loss(params, batch):
    return float(((params["w"] - batch[1]) ** 2).mean())

def learner(settings):
    return ArraysLearner(gradient, {"w": np.zeros(2)}, data, loss=loss, precision=settings.precision)
"""
SETTINGS = "rounds = 2\n[local]\nsteps = 2\n[deploy]\nsites = ['north', 'south', 'west']\n"


@pytest.fixture
def fedscaffold(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(south, *words, app=APP, toml=SETTINGS):
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / "app" / "app.py").write_text(app.replace("SOUTH", south))
        (tmp_path / "app" / "federation.toml").write_text(toml)
        monkeypatch.setattr(sys, "argv", ["fedscaffold", "deploy", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("south", "said"),
    [
        ("open('/no/such/file')", "reading its data failed: FileNotFoundError"),
        ("return np.ones((0, 2)), np.ones((0, 2))", "reading its data failed: InputError"),
        ("return np.ones((4, 2)), np.ones((3, 2))", "reading its data failed: InputError"),
        ("return None", "reading its data failed: TypeError"),
        ("return np.ones((4, 2)), np.full((4, 2), 'a')", "failed: "),
        ("return np.ones((4, 3)), np.ones((4, 3))", "failed: ValueError"),
        ("return np.ones((4, 2)), np.full((4, 2), np.nan)", "not finite"),
        ("import sys; sys.exit(0)", "reading its data failed: SystemExit"),
    ],
)
def test_a_broken_site_is_named_and_the_exit_code_is_one(south, said, fedscaffold):
    code, out, err = fedscaffold(south, "simulate", "app", "--out", "run")
    assert (code, "south never counted, at last not in" in out) == (1, True), out
    assert said in out
    assert err == "fedscaffold: never counted: south (--allow-missing lets it pass)\n"
    code, out, _ = fedscaffold(south, "status", "run")
    assert (code, said in out) == (0, True)
    code, out, err = fedscaffold(
        south, "simulate", "app", "--out", "other", "--allow-missing", "--json"
    )
    answer = json.loads(out)
    assert (code, err, answer["never_counted"]) == (0, "", ["south"])
    assert said in answer["missed"]["south"]["cause"]
    shown = json.loads(fedscaffold(south, "status", "other", "--json")[1])
    assert shown["missed"] == answer["missed"]


def test_a_site_that_was_mended_ends_the_alarm(fedscaffold):
    assert fedscaffold("open('/no/such/file')", "simulate", "app", "--out", "run")[0] == 1
    code, out, err = fedscaffold("pass", "resume", "run", "--rounds", "3")
    assert (code, err) == (0, "")
    assert "south missed 3 rounds, the last was the evaluation after round 2" in out


def test_two_of_three_that_never_counted(fedscaffold):
    app = APP.replace('site == "south"', 'site != "north"')
    code, out, err = fedscaffold(
        "open('/x')", "simulate", "app", app=app, toml=SETTINGS + "quorum = 1\n"
    )
    assert code == 1
    assert "never counted: south, west" in err
    assert "rounds" in out


@pytest.mark.parametrize(
    ("app", "said"),
    [
        (
            "def learner(settings)\n    return 3",
            "app.py cannot be imported: SyntaxError in line 1: expected ':'",
        ),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError in line 1"),
        ("\n\n1 / 0", "cannot be imported: ZeroDivisionError in line 3"),
        ("def learner(settings):\n    return open('/no/such')", "learner(settings) of "),
        ("def learner(settings):\n    return 3", "must return a TorchLearner or the like, got 3"),
        ("x = 1", "must have a function learner(settings)"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line(app, said, fedscaffold):
    code, out, err = fedscaffold("", "simulate", "app", app=app)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err


def test_nan_everywhere_on_the_command_line(fedscaffold):
    app = APP.replace("(a * (params", "(np.nan * (params")
    code, out, err = fedscaffold("pass", "simulate", "app", "--json", app=app)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "north, south, west: not finite: 2 of the 2 numbers of d are NaN or infinite" in err
    assert set(json.loads(out)["missed"]) == {"north", "south", "west"}

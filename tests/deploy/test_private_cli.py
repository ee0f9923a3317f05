"""Private deployments on the command line and on pages: what was spent, by whom, and who says so."""

import json
import shutil

import private_case as case
import pytest
from forkserver import fedscaffold
from private_case import SITES

from fedscaffold.deploy.site_statement import find_private_sites, state_federation, state_site
from fedscaffold.privacy.accounting import epsilon, round_up
from fedscaffold.runs.deployed import Deployed

APP = """\
import private_case as case


def learner(settings):
    return case.learner(precision=settings.precision)
"""
TABLE = "clip = 0.7\nnoise = 2.0\ndelta = 1e-3\nstop_at_epsilon = 50.0"


def settings_text():
    records = "\n".join(f"{site} = {n}" for site, n in case.COUNTS.items())
    return (
        "precision = 'float64'\nrounds = 2\n[local]\nsteps = 3\nlr = 0.2\nbatch_size = 8\n"
        f"[deploy]\nsites = {list(SITES)}\n[deploy.records]\n{records}\n[privacy]\n{TABLE}\n"
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run by the command line, with all that is asked of it."""
    root = tmp_path_factory.mktemp("private")
    (root / "app").mkdir()
    (root / "app" / "app.py").write_text(APP)
    (root / "app" / "federation.toml").write_text(settings_text())
    shutil.copy(case.__file__, root / "app")
    done = fedscaffold("deploy", "simulate", "app", "--out", "run", "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def spent(site, rounds=2):
    rate = min(1.0, 8 / case.COUNTS[site])
    return epsilon(noise=2.0, rate=rate, steps=3 * rounds, delta=1e-3)


@pytest.mark.process
def test_a_run_ends_with_what_each_site_has_spent(ran):
    root, said = ran
    assert said["epsilon"] == {site: pytest.approx(spent(site)) for site in SITES}
    assert said["metrics"] == {}
    events = [json.loads(line) for line in (root / "run" / "audit.jsonl").read_text().splitlines()]
    closed = [event for event in events if event["event"] == "committed"]
    assert closed[0]["epsilon"] == {site: pytest.approx(spent(site, 1)) for site in SITES}
    status = fedscaffold("deploy", "status", "run", cwd=root).stdout
    for site in SITES:
        assert f"epsilon {round_up(spent(site))} at delta 0.001" in status


@pytest.mark.process
def test_statements_of_the_run_and_of_a_site(ran):
    root, _ = ran
    done = fedscaffold("privacy", "statement", "run", "--html", "page.html", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "REHEARSED on one machine" in done.stdout
    assert f"- ant: ({round_up(spent('ant'))}, 0.001)" in done.stdout
    assert "REHEARSED" in (root / "page.html").read_text()
    where = "run/sites/privacy/ant"
    done = fedscaffold("privacy", "statement", where, "--json", cwd=root)
    facts = json.loads(done.stdout)["statement"]
    assert facts["Guarantee"] == f"({round_up(spent('ant'))}, 0.001)-differential privacy"
    assert facts["Sampling used"] == "poisson, with probability 0.2"
    assert facts["Composition"].startswith("6 steps in 2 requests of 1 run;")
    assert facts["Budget"] == "epsilon 50, by the site's privacy.toml"
    head = case.ledger_of(root / "run", "ant").head
    assert facts["Ledger"] == f"3 lines, the last with hash {head.hash}"
    done = fedscaffold("privacy", "statement", "run/sites", cwd=root)
    assert "holds 3 sites: give one of them" in done.stderr


@pytest.mark.process
def test_a_kit_holds_the_rules_that_the_site_agrees_to(ran):
    root, _ = ran
    (root / "sites.toml").write_text('server = "localhost"\napp = "app"\n')
    assert fedscaffold("deploy", "kit", "sites.toml", "--out", "kits", cwd=root).returncode == 0
    place = root / "kits" / "cow" / "state" / "privacy" / "cow"
    assert (place / "privacy.toml").stat().st_mode & 0o777 == 0o600
    assert find_private_sites(root / "kits" / "cow") == [place]
    done = fedscaffold("privacy", "statement", "kits/cow", cwd=root)
    assert "nothing was trained on the records of cow" in done.stderr
    said = fedscaffold("deploy", "check", "kits/cow", cwd=root).stdout
    assert "good  privacy: noise 2, a budget of epsilon 50, by privacy.toml" in said
    rules = (place / "privacy.toml").read_text()
    (place / "privacy.toml").write_text(rules.replace("noise = 2.0", "noise = 4.0"))
    said = fedscaffold("deploy", "check", "kits/cow", cwd=root).stdout
    assert "BAD   privacy: privacy: noise = 2.0 is asked of cow, which has agreed to 4.0" in said


@pytest.mark.process
def test_the_live_page_shows_epsilon_by_round_and_by_site(ran):
    root, _ = ran
    source = Deployed(root / "run").poll()
    columns = source.study.runs[0].columns
    most = [max(spent(site, r) for site in SITES) for r in (1, 2)]
    assert columns["round"].tolist() == [1, 2]
    assert columns["epsilon"] == pytest.approx(most)
    told = f"cow has spent epsilon {round_up(spent('cow'))}, by its own word."
    assert told in source.progress.notes


def test_a_deployment_without_privacy_has_no_statement():
    from fedscaffold.checks import InputError

    with pytest.raises(InputError, match=r"no table \[privacy\]"):
        state_federation({"round": 1, "sites": {}})


def test_a_statement_does_not_change_what_it_states(tmp_path):
    case.run(case.settings(), tmp_path, rounds=1)
    place = case.place(tmp_path, "bee")
    before = {path: path.read_bytes() for path in place.iterdir()}
    state_site(place)
    assert {path: path.read_bytes() for path in place.iterdir()} == before

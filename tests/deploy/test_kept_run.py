"""A server app that dies is started again, until it has an outcome or died too often; and who is told."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from deploy_case import InProcess, learner, server_of, settings

from fedscaffold.checks import InputError
from fedscaffold.deploy import alerts, drive, host, kept_run, parse
from fedscaffold.deploy.alerts import Alerts
from fedscaffold.deploy.event_log import EventLog, file_log, format_event
from fedscaffold.deploy.kept_run import STOPPED, Gone, KeptRun

SERVER = """
import os, sys, time
from pathlib import Path
from fedscaffold.deploy.kept_run import note_outcome, note_serving
home, lives = Path(sys.argv[1]), int(sys.argv[2])
died = home / "died"
count = len(died.read_text()) if died.exists() else 0
note_serving(home)
if count < lives:
    died.write_text("x" * (count + 1))
    os.kill(os.getpid(), 9)
note_outcome(home, {"rounds": 3} if lives < 9 else {"error": "diverged"})
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_run, "LONGEST_PAUSE", 0.01)
    return tmp_path


def keep(home, lives, told):
    """The outcome of a server app that dies a few times."""
    children = []

    def submit():
        children.append(subprocess.Popen([sys.executable, "-c", SERVER, str(home), str(lives)]))

    run = KeptRun(home, submit, EventLog("keeper", told.append))
    end = time.monotonic() + 120
    try:
        run.start()
        while (outcome := run.look()) is None:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return outcome, len(children)


@pytest.mark.process
def test_a_server_app_is_started_until_it_has_an_outcome(home):
    told = []
    assert keep(home, 2, told) == ({"rounds": 3}, 3)
    assert ["server app died" in line for line in told] == [True, True]
    (home / "died").unlink()
    assert keep(home, 0, told) == ({"rounds": 3}, 1)  # anew, though there was an outcome


@pytest.mark.process
def test_one_that_only_dies_is_given_up_with_its_log_and_one_that_gets_on_is_not(home):
    with pytest.raises(Gone, match=r"the server app died 6 times in a row; see .*server\.log"):
        keep(home, 8, [])
    (home / "died").unlink()
    pauses = kept_run.Backoff("link", home)
    for number in range(20):
        pauses.died(number * (kept_run.HEALTHY + 1))
    assert (pauses.row, pauses.deaths) == (1, 20)


def test_one_that_does_not_start_or_cannot_be_submitted_counts_as_dead(home, monkeypatch):
    monkeypatch.setattr(kept_run, "STARTING", 0.0)
    calls = []

    def submit():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("flwr run failed")

    told = []
    run = KeptRun(home, submit, EventLog("keeper", told.append))
    run.start()
    while len(calls) < 3:
        time.sleep(0.02)
        assert run.look() is None
    assert "did not start" in told[0]
    assert "could not be started: flwr run failed" in told[1]
    (home / "serving.json").write_text(json.dumps({"pid": os.getpid(), "at": 0.0}))
    run.start()  # a server app is at work already
    assert (run.look(), len(calls)) == (None, 3)


@pytest.mark.process
def test_settings_that_changed_end_the_server_app_at_work_and_the_same_do_not(home):
    """A site that was added to a kit counts from the next `run.sh` on, though the run goes on for days."""
    says = "from fedscaffold.deploy.kept_run import note_serving; from pathlib import Path; import time"
    words = [
        sys.executable,
        "-c",
        f"{says}; note_serving(Path({str(home)!r}), 'old'); time.sleep(600)",
    ]
    starts, told = [], []
    submit = lambda: starts.append(1)  # noqa: E731
    with subprocess.Popen(words) as serving:
        try:
            while not (home / kept_run.SERVING).exists():
                assert serving.poll() is None
                time.sleep(0.02)
            for app in ("", "old"):
                KeptRun(home, submit, EventLog("keeper", told.append), app).start()
            assert (serving.poll(), starts, told) == (None, [], [])
            KeptRun(home, submit, EventLog("keeper", told.append), "new").start()
            assert serving.wait(20) == -signal.SIGTERM
        finally:
            serving.kill()
    assert starts == [1]
    assert "as the app is another" in told[0]


def test_after_a_reboot_another_process_may_have_the_number_of_the_server_app(home):
    kept_run.note_serving(home, "app")
    starts, serving = [], json.loads((home / kept_run.SERVING).read_text())
    (home / kept_run.SERVING).write_text(json.dumps(serving | {"started": "1"}))
    KeptRun(home, lambda: starts.append(1), EventLog("keeper", str), "app").start()
    assert starts == [1]


@pytest.mark.parametrize("died", ["site-north", "worker-north", "link", "executor"])
def test_a_server_app_is_started_again_without_waiting_for_sites(died, home):
    """A site that died stays away for over a minute; the server app only needs the link and its executor."""
    local_cluster = pytest.importorskip("fedscaffold.deploy.local_cluster")
    (home / "federation.toml").write_text('[deploy]\nsites = ["north"]\n')
    federation, starts = local_cluster.Federation(home, home / "home"), []
    server = home / "home" / "server"
    server.mkdir(parents=True)

    def submit():
        starts.append(1)
        gone = subprocess.Popen(["true"])
        gone.wait()
        kept_run.write_private(
            server / kept_run.SERVING, json.dumps({"pid": gone.pid, "at": starts})
        )
        if len(starts) == 2:
            kept_run.note_outcome(server, {"rounds": 3})

    federation.run.submit = submit
    federation.submit()
    federation.due[died] = float("inf")
    if died in ("link", "executor"):
        with pytest.raises(local_cluster.Stopped, match="no outcome"):
            federation.outcome(0.5)
        assert len(starts) == 1
    else:
        assert federation.outcome(60.0) == {"rounds": 3}


@pytest.mark.process
def test_the_command_tells_the_outcome_by_its_exit_code(home):
    for name in ("bundle.json", "federation.toml"):  # the package
        (home / name).write_text("")
    for lives, code in ((0, 0), (9, STOPPED)):
        (home / "died").write_text("x" * 9)
        command = [sys.executable, "-c", SERVER, str(home), str(lives)]
        keeper = [
            sys.executable,
            "-m",
            "fedscaffold.deploy.kept_run",
            str(home),
            str(home),
            *command,
        ]
        done = subprocess.run(keeper, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "run ended" in done.stderr) == (code, True), done.stderr


def test_a_log_is_text_or_json_by_the_environment(tmp_path, monkeypatch):
    log = file_log("server", tmp_path / "server.log")
    log("round committed", round=3, missing="")
    monkeypatch.setenv("FEDSCAFFOLD_LOG", "json")
    try:
        raise KeyError("two\nlines")
    except KeyError as error:
        log.crash(error)
    text, row = (tmp_path / "server.log").read_text().splitlines()
    assert text.partition(" ")[2] == "server: round committed, round 3"
    assert {"source": "server", "event": "crashed", "error": "KeyError"}.items() <= json.loads(
        row
    ).items()
    assert (tmp_path / "server.log").stat().st_mode & 0o777 == 0o600
    assert json.loads(format_event("a", "b", {"n": 1}))["n"] == 1


def told_of(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("alert-*"))]


@pytest.fixture
def hook(tmp_path):
    """A command that keeps what it is told."""
    script = tmp_path / "hook.sh"
    script.write_text(f'exec cat > "$(mktemp {tmp_path}/alert-XXXXXX)"\n')
    return f"sh {script}"


class Half(InProcess):
    """Some sites never answer."""

    lost = ("elk",)

    def collect(self):
        came = super().collect()
        return [(site, "its process died" if site in self.lost else reply) for site, reply in came]


@pytest.mark.process
def test_the_operator_is_told_once_of_what_lasts(tmp_path, hook, monkeypatch):
    config = settings(deploy="quorum = 0.5\nalert_after = 2")
    server = server_of(config, tmp_path / "run")
    log = []
    watch = Alerts(hook, tmp_path / "run", EventLog("server", log.append), after=2)
    transport = Half(learner(), config, tmp_path / "run")
    see = lambda outcome: watch.look(server, outcome)  # noqa: E731
    drive(server, transport, 4, see)
    watch.wait()
    (told,) = told_of(tmp_path)
    assert (told["event"], told["site"]) == ("site missing", "elk")
    assert told["text"] == "elk has not counted for 2 rounds"

    transport.lost = ()
    drive(server, transport, 6, see)
    transport.lost = ("elk",)
    usage = host.shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda home: usage)
    drive(server, transport, 9, see)
    watch.wait()
    events = sorted(one["event"] for one in told_of(tmp_path))
    assert events == ["disk nearly full", "site missing", "site missing"]

    class Spent(type(server)):
        fault = "round 9: the residual is 0.1"

    server.__class__ = Spent
    refused = {"ant": "budget: none is left"}
    from fedscaffold.deploy.server import Outcome

    watch.look(server, Outcome(False, "train", 10, (), refused, (), {}))
    watch.tell("run stopped", "round 10 failed")
    watch.wait()
    events = {one["event"] for one in told_of(tmp_path)}
    assert {"residual", "budget spent", "run stopped"} <= events
    assert log == []


@pytest.mark.process
def test_a_certificate_that_ends_is_told(tmp_path, hook):
    keys = pytest.importorskip("fedscaffold.deploy.keys")
    keys.make_authority(tmp_path, days=30)
    keys.make_server(tmp_path, tmp_path, ["localhost"], days=9)
    (tmp_path / "run").mkdir()
    assert alerts._old_certificate(tmp_path / "run") == {
        "": "the server's certificate lasts 9 more days"
    }
    keys.make_server(tmp_path, tmp_path, ["localhost"], days=90)
    assert alerts._old_certificate(tmp_path / "run") == {}


@pytest.mark.process
def test_a_command_that_fails_hangs_or_is_not_there_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "LONGEST", 0.2)
    log = []
    for command in ("false; rm -rf", "sleep 60", "/no/such/command"):
        watch = Alerts(command, tmp_path, EventLog("server", log.append), after=3)
        watch.tell("run stopped", "it diverged")
        watch.wait()
    assert ["alert failed" in line for line in log] == [True] * 3
    assert "exit code 1" in log[0] or "FileNotFoundError" in log[0]  # no shell: `false;` is a name


def test_an_alert_must_be_a_command():
    assert parse('[deploy]\nalert = "mail -s federation admin"').deploy.alert.startswith("mail")
    for wrong in ("3", '"echo \'half"'):
        with pytest.raises(InputError, match=r"deploy\.alert must be a command"):
            parse(f"[deploy]\nalert = {wrong}")

"""The live run: the record is the run's own history whatever breaks, the server lets nobody else in, the page works."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, WHY, Browser
from deploy_case import (
    SITES,
    START,
    InProcess,
    answer,
    data,
    everybody,
    learner,
    loss,
    play,
    server_of,
    settings,
)

import fedscaffold as fs
from fedscaffold.deploy import drive, server_loop
from fedscaffold.deploy.schema import Packet, blob
from fedscaffold.runs import RunRecord, Study, trackers, write
from fedscaffold.runs.deployed import Deployed
from fedscaffold.runs.live import source_of, sources
from fedscaffold.runs.live_server import Server
from fedscaffold.runs.log_writer import LogWriter
from fedscaffold.runs.round_log import NAME, STOP, RoundLog
from fedscaffold.runs.view_model import Progress, Source, view
from fedscaffold.simulation.checkpoint import unfinished

CLIENTS, COHORT, ROUNDS = 7, 2, 30
PROBLEM = fs.problems.quadratic(num_clients=CLIENTS, dim=4, mu=0.1, noise=0.01, seed=0)
ASK = {
    "local_steps": 2,
    "lr": 0.1,
    "cohort": COHORT,
    "seed": 3,
    "rounds": ROUNDS,
    "stale": "refresh:4",
    "every": 10,
}
ASK |= {"metrics": ("distance", "drift"), "evaluate_every": 2}
FACTS = {"clients": CLIENTS, "rounds": ROUNDS, "precision": "float32", "stoppable": True}


def simulated(folder, *callbacks, **more):
    return fs.simulate(
        fs.scaffold(),
        PROBLEM,
        checkpoint=folder / "checkpoint",
        callbacks=callbacks,
        **(ASK | more),
    )


@pytest.fixture(scope="module")
def quiet():
    """A run that nobody follows, and its cohorts: as a follower is told them, and as who follows them ends up there."""
    ask, cohorts = {key: value for key, value in ASK.items() if key != "every"}, []
    run = fs.simulate(fs.scaffold(), PROBLEM, **ask)

    def note(look):
        cohorts.extend(look.cohort(number).tolist() for number in look.columns["round"].tolist())

    assert fs.simulate(fs.scaffold(), PROBLEM, **ask, callbacks=[note]).digest == run.digest
    told = ask | {"cohort": 1.0, "cohorts": cohorts}
    assert fs.simulate(fs.scaffold(), PROBLEM, **told).digest == run.digest
    return run, cohorts


def same(record, run, cohorts):
    """The record says what the run says: bit for bit, with null where nothing was measured."""
    assert record.columns.keys() == run.history.keys()
    for name, column in run.history.items():
        np.testing.assert_array_equal(
            np.array(record.columns[name]).astype(column.dtype), column, err_msg=name
        )
    assert list(record.heard) == cohorts
    assert [
        ROUNDS - record.heard_at[client] for client in range(CLIENTS)
    ] == run.clients.age.tolist()


def test_the_record_is_the_runs_own_history(tmp_path, quiet):
    with LogWriter(tmp_path, FACTS) as record:
        run = simulated(tmp_path, record)
    assert run.digest == quiet[0].digest
    reader = RoundLog(tmp_path)
    assert reader.update()
    same(reader, *quiet)
    assert len(set(run.history["bytes_up"].tolist())) > 1  # renewals are counted across stretches
    assert reader.end["how"] == "finished"
    assert reader.explained == run.explained
    assert reader.clock[-1] == (
        ROUNDS,
        sum(reader.seconds[phase] for phase in ("draw", "rounds", "checkpoint")),
    )
    assert [number for number, _ in reader.stamps] == sorted(number for number, _ in reader.stamps)
    assert {"compile", "draw", "rounds", "checkpoint", "record"} == reader.seconds.keys()
    assert all(seconds > 0 for seconds in reader.seconds.values())


@pytest.mark.parametrize("name", ["top 5%", 'the "error"'])
def test_a_metric_may_have_any_name(tmp_path, name):
    measured = fs.metric(lambda params, data: abs(params).sum(), name=name)
    with LogWriter(tmp_path, FACTS) as record:
        run = simulated(tmp_path, record, metrics=(measured,), evaluate_every=1)
    reader = RoundLog(tmp_path)
    assert reader.update()
    np.testing.assert_array_equal(np.float32(reader.columns[name]), run.history[name])


@pytest.mark.parametrize("lost", ["rounds", "lines", "file"])
def test_after_a_crash_the_record_is_that_of_the_run_without_one(tmp_path, quiet, lost):
    record, reader = LogWriter(tmp_path, FACTS), RoundLog(tmp_path)

    def crash(look):
        if look.round == 20:  # written down, and not yet in a checkpoint
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        simulated(tmp_path, record, crash)
    record.file.close()
    assert unfinished(tmp_path / "checkpoint") == 10
    path = tmp_path / NAME
    with path.open("a") as file:
        file.write('{"round": 21, "dist')  # torn
    assert reader.update()
    assert reader.round == 20
    name = reader.facts["run"]
    if lost == "lines":  # the disk has a checkpoint and not all lines before it
        path.write_text("\n".join(path.read_text().splitlines()[:6]))
    elif lost == "file":
        path.unlink()
    seen = []

    class Looks(fs.Callback):
        def begin(self, look):
            now = RoundLog(tmp_path)
            assert now.update()
            if lost == "rounds":
                reader.update()
            seen.append((now.round, reader.round if lost == "rounds" else now.round))

        after = begin

    with LogWriter(tmp_path, FACTS) as second:
        simulated(tmp_path, second, Looks())
    assert seen[0] == (10, 10)  # rounds that are not in the checkpoint count no longer
    assert seen[-1] == (30, 30)
    for each in (reader, RoundLog(tmp_path)):  # who looked all the time, and who looks now
        assert each.update()
        same(each, *quiet)
    assert (each.facts["run"] == name) == (lost != "file")
    assert (
        each.facts["after"] == {"rounds": 10, "lines": 4, "file": 0}[lost]
    )  # the fifth line has no end


def test_a_file_named_stop_ends_the_run_with_a_checkpoint(tmp_path, quiet):
    (tmp_path / STOP).touch()  # of an earlier time: not for this run

    def ask_to_stop(look):
        if look.round == 10:
            (tmp_path / STOP).touch()

    with LogWriter(tmp_path, FACTS) as record:
        run = simulated(tmp_path, ask_to_stop, record)
    assert (run.outcome, run.rounds) == ("stopped", 10)
    assert unfinished(tmp_path / "checkpoint") == 10
    assert not (tmp_path / STOP).exists()
    reader = RoundLog(tmp_path)
    assert reader.update()
    assert (reader.round, reader.end["how"]) == (10, "stopped")
    with LogWriter(tmp_path, FACTS) as record:
        assert simulated(tmp_path, record).digest == quiet[0].digest
    assert reader.update()
    same(reader, *quiet)
    without = {key: value for key, value in ASK.items() if key != "every"}
    run = fs.simulate(fs.scaffold(), PROBLEM, callbacks=[lambda look: True], **without)
    assert (run.outcome, run.rounds) == ("stopped", 1)  # the first stretch of rounds is one


def test_the_view_says_what_follows_from_the_log():
    columns = {
        "round": np.arange(1, 4),
        "loss": np.array([3.0, np.nan, 1.0]),
        "residual": np.array([1e-9, 2e-8, 3e-9]),
    }
    run = RunRecord(
        algorithm="scaffold",
        seed=0,
        columns=columns | {"bytes_up": np.array([5, 5, 7])},
        explained=1e-7,
    )
    known = {
        "kind": "simulation",
        "phase": "running",
        "round": 3,
        "rounds": 9,
        "marks": ({"heard": [1]},) * 3,
    }
    known |= {
        "clients": 4,
        "heard_at": {1: 3, 2: 1},
        "stamps": ((0, 100.0), (1, 104.0), (3, 105.0)),
    }

    def told(one=run, **changes):
        return view(
            [Source("here", Study(problem="p", runs=[one]), Progress(**(known | changes)))],
            now=107.0,
        )

    progress = told()["progress"]
    assert progress["pace"] == pytest.approx(3 / 5)
    assert progress["left"] == pytest.approx(6 / (3 / 5))
    assert progress["quiet"] == pytest.approx(2.0)
    assert progress["ages"]["oldest"][0] == [2, 2]
    assert (progress["ages"]["never"], progress["ages"]["mean"]) == (2, 1.0)
    assert sum(progress["ages"]["counts"]) == 2
    after = told(all_at=1, heard_at={2: 2})["progress"][
        "ages"
    ]  # all in the first round, and one since
    assert (after["never"], after["mean"], after["counts"][:3]) == (0, (3 * 2 + 1) / 4, [0, 1, 3])
    assert told(phase="stopped")["progress"]["left"] is None
    [held] = told()["groups"][0]["runs"]
    assert held["columns"]["loss"]["values"] == [3.0, None, 1.0]
    assert (held["along"]["up"], held["along"]["round"]) == ([5, 10, 17], [1, 2, 3])
    assert (held["health"], held["relative"]) == ("healthy", pytest.approx(0.2))
    columns["residual"][0] = 0.1
    assert told()["groups"][0]["runs"][0]["health"] == "broken"  # once broken, for good


def test_the_view_of_a_log_of_a_million_rounds_is_small(tmp_path):
    number = 1_000_000
    log = source_of(_folder_with_log(tmp_path))
    log.poll()
    for name in ("round", "loss", "residual"):
        log.log.columns[name] = log.log.columns["round"].__class__(
            "d", np.arange(1.0, number + 1).tobytes()
        )
    told = json.dumps(view([log.poll()]), allow_nan=False)
    assert len(told) < 200_000
    assert json.loads(told)["groups"][0]["runs"][0]["rounds"] == number


def _folder_with_log(folder):
    begin = {"event": "begin", "at": time.time(), "pid": os.getpid(), "after": 0, **FACTS}
    lines = [begin, {"round": 1, "loss": 1.0, "residual": 0.0, "heard": [0]}]
    (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_that_has_not_ended_is_reported_as_it_is(tmp_path, quiet):
    running, over = tmp_path / "running", tmp_path / "over"
    running.mkdir()
    _folder_with_log(running)
    [source] = sources([running])
    assert source.study.runs[0].columns["loss"].tolist() == [1.0]
    assert (source.progress.phase, source.progress.stoppable) == ("unfinished", False)
    record = RunRecord(algorithm="scaffold", seed=3, columns=quiet[0].history)
    write(Study(problem="quadratics", runs=[record]), over)
    both = {Path(source.folder).name: source for source in sources([tmp_path])}
    assert both.keys() == {"running", "over"}
    assert all(source.progress is None for source in both.values())
    (over / "run.json").unlink()  # interrupted: its log is there
    [source] = sources([over])
    assert source.progress.round == len(source.study.runs[0].columns["round"]) == ROUNDS


def test_the_server_answers_nobody_but_its_page(tmp_path):
    begin = {"event": "begin", "at": time.time(), "pid": os.getpid(), "after": 0, **FACTS}
    (tmp_path / NAME).write_text(json.dumps(begin) + "\n")

    def ask(method, path, host=None, **headers):
        line = http.client.HTTPConnection("127.0.0.1", server.http.server_port, timeout=60)
        line.request(
            method,
            path,
            headers={"Host": host or f"127.0.0.1:{server.http.server_port}", **headers},
        )
        answer = line.getresponse()
        with contextlib.closing(line):
            return answer.status, answer.read().decode(), answer.headers

    with Server(tmp_path, source_of(tmp_path)) as server:
        assert server.http.server_address[0] == "127.0.0.1"
        home, port = f"/{server.token}/", server.http.server_port
        assert ask("GET", home)[0] == 200
        assert "default-src 'none'" in ask("GET", home)[2]["Content-Security-Policy"]
        assert ask("GET", home, f"localhost:{port}")[0] == 200
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1",
            f"127.0.0.1.evil.example:{port}",
        ):
            status, said, _ = ask("GET", home + "state", host)
            assert status == 403, host
            assert "rounds" not in said
            assert ask("POST", home + "stop", host)[0] == 403
        for path in (
            "/",
            "/state",
            "/stop",
            f"/{server.token[:-1]}/",
            f"/{'x' * 24}/stop",
            "/%00/",
            "//",
        ):
            assert ask("GET", path)[0] == 403, path
            assert ask("POST", path)[0] == 403, path
        assert ask("POST", home + "stop", Origin="http://evil.example")[0] == 403
        assert ask("GET", home + "etc/passwd")[0] == 404
        assert ask("POST", home)[0] == 404
        assert ask("PUT", home + "stop")[0] == 501
        assert not (tmp_path / STOP).exists()
        assert ask("POST", home + "stop", Origin=f"http://127.0.0.1:{port}")[0] == 200
        assert (tmp_path / STOP).exists()
        told = json.loads(ask("GET", home + "state")[1])
        assert not told["progress"]["stoppable"]
        assert "asked to stop" in told["progress"]["notes"][0]
        assert ask("POST", home + "stop")[0] == 409
        assert ask("GET", home + "state?held=nonsense&version=%27")[0] == 200


class Faulty(InProcess):
    """One site refused, one that breaks down, one too late, in every round but the first; with a clock of its own."""

    time = 0.0

    def collect(self):
        came = super().collect()
        if not came:  # nobody is left but who never answers: the deadline passes
            self.time += 1000
        for site, reply in came:
            if self.known and reply.facts["round"] > 1:
                if site == "bee":
                    reply = Packet(
                        reply.facts, {name: blob(np.full(2, np.nan)) for name in reply.blobs}
                    )
                if site == "cow":
                    reply = "the process was killed"
                if site == "dog":
                    return []
            return [(site, reply)]
        return []


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The folder of a deployed server with faults in rounds 2 and 3."""
    folder = tmp_path_factory.mktemp("deployed")
    config = settings(deploy="deadline = 600\nquorum = 0.2")
    sites = Faulty(learner(), config, folder)
    drive(server_of(config, folder, clock=lambda: sites.time), sites, 3, sleep=lambda seconds: None)
    return folder


def test_a_deployed_servers_folder_is_shown_too(deployed, capsys):
    from fedscaffold.cli.watch import watch

    watch(deployed, as_json=True)
    given = json.loads(capsys.readouterr().out)
    told, [held] = given["progress"], given["groups"][0]["runs"]
    assert (told["kind"], told["phase"], told["round"]) == ("deployment", "finished", 3)
    assert given["title"] == "SCAFFOLD, deployed at 5 sites"
    assert told["clients"] == ["ant", "bee", "cow", "dog", "elk"]
    assert told["marks"][0] == {"heard": ["ant", "bee", "cow", "dog", "elk"]}
    assert (
        told["marks"][1:]
        == [{"heard": ["ant", "elk"], "late": ["dog"], "refused": ["bee"], "failed": ["cow"]}] * 2
    )
    assert dict(told["ages"]["oldest"]) == {"ant": 0, "bee": 2, "cow": 2, "dog": 2, "elk": 0}
    assert held["along"]["round"] == [0, 1, 2, 3]
    sent = np.mean(
        [loss({"w": START}, data(site)) for site in told["clients"]]
    )  # measured at the model sent out
    assert held["columns"]["loss"]["values"][0] == pytest.approx(sent, rel=1e-12)
    assert held["health"] == "healthy"
    assert held["explained"] > 0
    assert told["seconds"].keys() == {"in rounds", "between rounds"}
    assert not told["stoppable"]
    *missed, warning, disk = told["notes"]
    assert warning.startswith("Warning: deploy.clip is off")
    assert re.fullmatch(r"Disk: \d+\.\d GiB free\.", disk)
    assert missed == [
        "bee missed 2 rounds, the last was round 3: not finite: 2 of the 2 numbers of d are NaN or infinite.",
        "cow missed 3 rounds, the last was the evaluation after round 3: the process was killed.",
        "dog missed 3 rounds, the last was the evaluation after round 3: no reply before the deadline.",
    ]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """The folder of a kit's server whose round waits for two sites, one of which failed before."""
    keys = pytest.importorskip("fedscaffold.deploy.keys")
    kit = tmp_path_factory.mktemp("kit")
    keys.make_authority(kit, days=30)
    keys.make_server(kit, kit, ["localhost"], days=9)
    config = settings(deploy="quorum = 0.2", top="robust = 'norm_bound:3'")
    server = server_of(config, kit / "run")
    everybody(server, config)
    play(server, config, kit / "run")
    requests = server.open(SITES)
    server.failed("bee", "the process was killed")
    for site in ("ant", "elk"):
        server.receive(site, answer(requests[site], learner(), config, site, kit / "run" / "sites"))
    server_loop._write_status(server, "waiting")
    return kit / "run"


def test_whom_a_round_waits_for_since_when_and_what_the_machine_has_left(waiting, capsys):
    from fedscaffold.cli.deploy import status

    opened = json.loads((waiting / "status.json").read_text())["opened_at"]
    clock = datetime.fromtimestamp(opened, UTC).strftime("%H:%M:%S UTC")
    notes = Deployed(waiting).poll().progress.notes
    assert notes[0] == f"The round waits for cow, dog, since {clock}."
    assert notes[1] == "bee is not in this round: the process was killed."
    assert re.fullmatch(r"Disk: \d+\.\d GiB free\.", notes[-2])
    assert notes[-1] == "The certificate lasts 9 more days."
    status(waiting)
    said = capsys.readouterr().out
    for site in SITES:
        line = next(one for one in said.splitlines() if one.startswith(f"  {site}: "))
        assert bool(re.search(r"the round has waited \d+ s for it", line)) == (site in "cow dog")
    assert "  bee: not in this round: the process was killed" in said.splitlines()
    assert re.search(r"GiB free; the server's certificate lasts 9 more days", said)


def test_runs_that_are_over_are_shown_too(tmp_path, quiet):
    run = quiet[0]
    known = {"residual": run.residual, "explained": run.explained, "digest": run.digest}
    record = RunRecord(algorithm="scaffold", seed=3, lr=0.1, columns=run.history, **known)
    study = Study(problem="quadratics", runs=[record], seconds={"wall": 1.0})
    write(study, tmp_path / "one")
    told = view([source_of(tmp_path / "one").poll()])
    assert (told["progress"]["phase"], told["progress"]["round"], told["progress"]["marks"]) == (
        "finished",
        ROUNDS,
        [],
    )
    [held] = told["groups"][0]["runs"]
    assert held["columns"]["distance"]["values"][:2] == [
        None,
        pytest.approx(float(run.history["distance"][1])),
    ]
    assert held["along"]["up"][-1] == run.history["bytes_up"].sum()
    assert (held["health"], held["digest"]) == ("healthy", run.digest)
    write(replace(study, runs=[record, replace(record, seed=4)]), tmp_path / "both")
    told = view([source_of(tmp_path / "both").poll()])
    assert (told["title"], told["progress"]) == ("SCAFFOLD, 2 runs", None)


def test_a_folder_with_nothing_to_watch_is_refused_in_one_line(tmp_path):
    with pytest.raises(fs.InputError, match="holds no run: give the folder"):
        source_of(tmp_path)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_before_the_run(name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(
        fs.InputError, match=f"--log {name} needs the package {name}: pip install {name}"
    ):
        trackers.check_trackers([name])


def test_tensorboard_reads_the_events_of_a_run_that_was_broken_off(tmp_path, quiet):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with LogWriter(tmp_path, FACTS, trackers.make_trackers(["tensorboard"], tmp_path)) as record:
        assert simulated(tmp_path, record, lambda look: look.start > 0).outcome == "stopped"
    with LogWriter(tmp_path, FACTS, trackers.make_trackers(["tensorboard"], tmp_path)) as record:
        simulated(tmp_path, record)

    def check():
        events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        for name in ("drift", "residual", "bytes_up"):
            found = events.Scalars(name)
            assert [event.step for event in found] == list(range(1, ROUNDS + 1))
            np.testing.assert_array_equal(
                [np.float32(event.value) for event in found], quiet[0].history[name]
            )
        assert [event.step for event in events.Scalars("distance")] == list(range(2, ROUNDS + 1, 2))

    check()
    assert (
        trackers.replay(tmp_path, ["tensorboard"]) == ROUNDS
    )  # told once more: each round still once
    check()


CONFIG = """
rounds = 1000000
metrics = ["loss", "distance", "drift"]
[problem]
dataset = "quadratic"
clients = 60
mu = 0.1
[local]
steps = 100
lr = 0.001
[cohort]
size = 20
[output]
dir = "out"
"""
# What everybody must be able to read: no text that sticks out, is tiny, or has too little contrast with its ground.
READABLE = """(() => {
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = one => { for (let e = one; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (c !== "rgba(0, 0, 0, 0)" && c !== "transparent") return c; } return "rgb(255, 255, 255)"; };
  const shown = [...document.querySelectorAll("body *")].filter(one => !["SCRIPT", "STYLE", "NOSCRIPT"].includes(one.tagName)
    && [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()) && one.getClientRects().length);
  const contrast = one => { const css = getComputedStyle(one), ink = one.closest("svg") ? css.fill : css.color;
    const [a, b] = [light(ink), light(ground(one))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
  return { wide: document.documentElement.scrollWidth, window: innerWidth,
    cut: shown.filter(one => !one.closest("svg") && (one.scrollWidth > one.clientWidth + 1) && getComputedStyle(one).display !== "inline").map(one => one.textContent),
    out: shown.filter(one => !one.closest(".wide") && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.textContent),
    smallest: Math.min(...shown.map(one => parseFloat(getComputedStyle(one).fontSize) * (one.tagName === "SUB" ? 2 : 1))),
    faint: shown.filter(one => !one.disabled && contrast(one) < 4.5).map(one => [one.textContent, contrast(one)]),
    ground: getComputedStyle(document.body).backgroundColor };
})()"""


def readable(browser, width, dark):
    browser.look(width, dark=dark)
    browser.until(
        f"innerWidth === {width} && document.querySelector('#charts figure > svg').viewBox.baseVal.width <= {width}"
    )
    seen = browser.run(READABLE)
    assert seen["wide"] <= seen["window"] == width, seen
    assert seen["cut"] == seen["out"] == seen["faint"] == [], seen
    assert seen["smallest"] >= 11.5, seen
    assert (seen["ground"] == "rgb(255, 255, 255)") != dark
    return seen


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WHY)
def test_the_page_of_a_running_run_in_a_browser(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    command = [
        sys.executable,
        "-c",
        "from fedscaffold.cli import main; main()",
        "run",
        "run.toml",
        "--watch",
    ]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    limit = threading.Timer(600, run.kill)
    limit.start()
    try:
        said = next(line for line in run.stderr if line.startswith("live page: "))
        address = said.removeprefix("live page: ").strip()
        with Browser(tmp_path) as browser:
            played(browser, address)
            rest = run.stderr.read()
            assert run.wait(120) == 130
            browser.until("document.getElementById('phase').textContent === 'Stopped'")
            assert all(asked.startswith((address, "data:")) for asked in browser.asked), (
                browser.asked
            )
            assert browser.faults == []
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
        limit.cancel()
    reader = RoundLog(tmp_path / "out")
    assert reader.update()
    assert reader.end["how"] == "stopped"
    assert reader.round == unfinished(tmp_path / "out" / "checkpoint")
    assert f"stopped after round {reader.round}; go on with: fedscaffold resume out" in rest


def played(browser, address):
    """The page as somebody uses it, with the keyboard alone; ends with the run asked to stop."""
    points = "(document.querySelector('figure[data-name=drift] .curve') || {getAttribute: () => ''}).getAttribute('d').length"
    count = "Number(document.getElementById('count').textContent.split(' ')[1])"
    browser.go(address)
    browser.until(f"{points} > 0", 120)  # it compiles first
    before = browser.run(f"[{points}, {count}]")
    browser.until(f"{count} > {before[1]} && {points} !== {before[0]}")  # the curves grow
    for width, dark in ((400, False), (1600, True), (1600, False), (400, True)):
        readable(browser, width, dark)
    assert "left" in browser.run("document.getElementById('pace').textContent")
    assert browser.run("document.querySelectorAll('#judged .healthy').length") == 1
    assert browser.run("document.querySelectorAll('#map .heard').length") == 1
    assert browser.run("document.querySelectorAll('#ages .bars i').length") > 1
    # every control has a name and takes the focus
    unnamed = "[...document.querySelectorAll('button, input, svg[role=img]')].filter(one => !(one.getAttribute('aria-label') || one.textContent.trim() || (one.labels && one.labels.length))).length"
    assert browser.run(unnamed) == 0
    browser.run("document.getElementById('look').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    assert browser.run("document.getElementById('latest').getAttribute('aria-pressed')") == "false"
    browser.press("Home")
    assert browser.run("document.getElementById('looked').textContent") == "1"
    browser.press("Tab")
    browser.press("Enter", text="\r")  # follow the latest again
    assert browser.run("document.getElementById('latest').getAttribute('aria-pressed')") == "true"
    browser.run("document.getElementById('later').focus()")  # 60 clients: the next 20
    browser.press(" ", "Space", " ")
    assert browser.run("document.getElementById('shown').textContent") == "clients 40 to 59 of 60"
    browser.run(
        "document.getElementById('title').tabIndex = -1; document.getElementById('title').focus()"
    )
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "stop"
    browser.press("Enter", text="\r")


@pytest.mark.process
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WHY)
def test_the_page_of_a_deployed_server_in_a_browser(tmp_path, deployed):
    with Server(deployed, source_of(deployed)) as server, Browser(tmp_path) as browser:
        browser.go(server.address)
        browser.until("document.querySelector('#map svg') !== null")
        shapes = browser.run(
            "[...document.querySelectorAll('#legend path')].map(one => [one.getAttribute('class'), one.getAttribute('d')])"
        )
        assert [word for word, _ in shapes] == ["heard", "late", "refused", "failed", "none"]
        assert len({shape for _, shape in shapes}) == 5  # not by colour alone
        found = browser.run(
            "[...document.querySelectorAll('#map path')].map(one => [one.getAttribute('class'), one.getAttribute('d').split('M').length - 1])"
        )
        assert dict(found) == {"heard": 9, "late": 2, "refused": 2, "failed": 2}
        assert browser.run("document.getElementById('stop').hidden")
        assert "late: dog" in browser.run("document.getElementById('told').textContent")
        for width, dark in ((400, True), (1600, False)):
            readable(browser, width, dark)
        assert browser.faults == []


@pytest.mark.process
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WHY)
def test_the_page_of_a_round_that_waits(tmp_path, waiting):
    with Server(waiting, source_of(waiting)) as server, Browser(tmp_path) as browser:
        browser.go(server.address)
        browser.until("document.querySelectorAll('#notes li').length > 2")
        notes = browser.run("[...document.querySelectorAll('#notes li')].map(e => e.textContent)")
        assert notes[0].startswith("The round waits for cow, dog, since ")
        assert notes[-1] == "The certificate lasts 9 more days."
        browser.look(400, dark=True)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.faults == []

"""`deploy metrics`: what Prometheus reads of a deployment."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from deploy_case import SITES, run_quietly, settings

pytest.importorskip("prometheus_client")
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedscaffold.checks import InputError
from fedscaffold.deploy import keys
from fedscaffold.deploy.exporter import make_registry


def read(text):
    """Values by name and label."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exporter") / "run"
    server, _ = run_quietly(settings(), folder, rounds=3)
    return folder, server


def test_metrics_are_those_of_the_server_at_each_scrape(run):
    folder, server = run
    registry = make_registry(folder)
    text = generate_latest(registry).decode()
    found = read(text)
    assert found["fedscaffold_round",] == 3
    assert found["fedscaffold_rounds",] == 30
    assert found["fedscaffold_residual",] == server.residual
    assert found["fedscaffold_phase", "finished"] == 1
    for site in SITES:
        assert found["fedscaffold_site_counted_round", site] == 3
        assert found["fedscaffold_site_waited_for", site] == 0
        assert found["fedscaffold_site_silent_seconds", site] >= 0
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert found["fedscaffold_metric", "loss"] == json.loads(rows[-1])["loss"]
    if shutil.which("promtool"):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stderr) == (0, "")

    keys.make_authority(folder.parent, days=30)
    keys.make_server(folder.parent, folder.parent, ["localhost"], days=9)  # as in a kit
    status = json.loads((folder / "status.json").read_text())
    changed = status | {"round": 4, "waiting_for": ["bee"], "absent": ["fox"], "at": 0.0}
    changed["sites"]["bee"]["epsilon"] = 1.5
    changed |= {"opened_at": 5.0, "missed": {"bee": {"times": 2}}}
    (folder / "status.json").write_text(json.dumps(changed))
    with (folder / "metrics.jsonl").open("a") as half:
        half.write('{"loss": ')  # a server that is writing
    later = read(generate_latest(registry).decode())
    assert later["fedscaffold_round",] == 4
    assert 8 < later["fedscaffold_certificate_days",] < 10
    assert later["fedscaffold_site_waited_for", "bee"] == 1
    assert later["fedscaffold_site_absent", "fox"] == 1
    assert later["fedscaffold_round_open_seconds",] > 1e9
    assert later["fedscaffold_site_missed_rounds", "bee"] == 2
    assert 0 < later["fedscaffold_disk_free_bytes",] <= shutil.disk_usage(folder).total
    assert later["fedscaffold_site_epsilon", "bee"] == 1.5
    assert later["fedscaffold_status_age_seconds",] > 1e9
    assert later["fedscaffold_metric", "loss"] == found["fedscaffold_metric", "loss"]


def test_workers_are_seen_at_their_site_and_on_one_machine(tmp_path):
    told = {"pid": os.getpid(), "starts": 2, "requests": 7, "at": 1.0, "seconds": 0.5}
    for place in ("home/sites/north/worker", "kits/south/state/worker"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "status.json").write_text(json.dumps(told | {"busy_until": 9.0}))
    (tmp_path / "kits" / "south" / "site.json").write_text('{"site": "south"}')
    for folder, site in (("home", "north"), ("kits/south", "south")):
        found = read(generate_latest(make_registry(tmp_path / folder)).decode())
        names = ("up", "busy", "requests", "starts", "request_seconds")
        values = [found[f"fedscaffold_worker_{name}", site] for name in names]
        assert values == [1, 1, 7, 2, 0.5]
        assert ("fedscaffold_worker_peak_bytes", site) not in found


def test_a_folder_without_a_server_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no status\.json"):
        make_registry(tmp_path)


@pytest.mark.process
def test_the_command_prints_and_serves_them_on_this_machine_alone(run):
    program = Path(sys.executable).parent / "fedscaffold"
    command = [str(program), "deploy", "metrics", str(run[0])]
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
    assert told["fedscaffold_rounds"] == 30
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert served.stderr.readline() == f"http://127.0.0.1:{port}/metrics\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert read(page.read().decode())["fedscaffold_rounds",] == 30
        taken = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=120
        )
        assert (taken.returncode, len(taken.stderr.splitlines())) == (2, 1)
        served.send_signal(signal.SIGINT)
        assert served.wait(60) in (130, -signal.SIGINT)
    finally:
        served.kill()
        served.communicate()

"""`deploy bundle`: what support gets to see, and what it does not."""

import hashlib
import json
import sys
import zipfile

import pytest
from deploy_case import data, learner, server_of, settings

from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, drive, keys
from fedscaffold.deploy.bundle import write_bundle

SECRET = "patient 4711"


def failing(site):
    if site == "bee":
        raise ValueError(f"cannot parse the row of {SECRET}")
    return data(site)


@pytest.fixture
def run(tmp_path):
    """A run in which a site's code failed with a patient's number, beside keys and an outer file."""
    folder, config = tmp_path / "run", settings(deploy="quorum = 3")
    transport = InProcess(learner(data=failing), config, folder)
    drive(server_of(config, folder), transport, 2)
    keys.make_site_key(folder / "secrets" / "ant.key", folder / "secrets" / "ant.pub")
    outside = tmp_path / "outside.toml"
    outside.write_text(SECRET)
    (folder / "federation.toml").symlink_to(outside)
    assert any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*.log"))
    return folder


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_bundle_has_the_facts_and_nothing_private(run, tmp_path):
    made = write_bundle(run, tmp_path / "bundle.zip")
    held = contents(made.path)
    assert set(held) == {"status.json", "metrics.jsonl", "audit.jsonl", "facts.json"}
    for name, text in held.items():
        if name != "facts.json":
            assert text == (run / name).read_bytes()
        assert SECRET.encode() not in text
        assert b"PRIVATE KEY" not in text
    facts = json.loads(held["facts.json"])
    assert facts["files"]["audit.jsonl"] == hashlib.sha256(held["audit.jsonl"]).hexdigest()
    assert facts["versions"]["fedscaffold"]
    # the site's operator can find the text by its reference
    logs = {path.stem for path in run.rglob("errors/*.log")}
    assert logs == set(facts["error_references"]) != set()
    assert made.path.stat().st_mode & 0o077 == 0
    assert made.left_out > 0


def test_a_bundle_has_what_was_started_again_and_why_the_server_died(run, tmp_path):
    for name in ("server.log", "logs/keeper.log", "logs/worker-ant.log"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(f"{name} crashed\n")
    held = contents(write_bundle(run, tmp_path / "bundle.zip").path)
    assert held["server.log"] == b"server.log crashed\n"
    assert held["logs/keeper.log"] == b"logs/keeper.log crashed\n"
    assert "logs/worker-ant.log" not in held  # of a site


def test_a_bundle_of_something_else_is_refused_and_none_is_overwritten(run, tmp_path):
    with pytest.raises(InputError, match="is not the folder of a deployment"):
        write_bundle(tmp_path / "run" / "secrets", tmp_path / "bundle.zip")
    (run / "outcome.json").write_bytes((run / "secrets" / "ant.key").read_bytes())
    with pytest.raises(InputError, match=r"outcome\.json holds a private key: nothing was written"):
        write_bundle(run, tmp_path / "bundle.zip")
    assert not (tmp_path / "bundle.zip").exists()
    (run / "outcome.json").unlink()
    write_bundle(run, tmp_path / "bundle.zip")
    with pytest.raises(InputError, match="exists: give another --out"):
        write_bundle(run, tmp_path / "bundle.zip")


def test_the_server_of_a_kit_has_a_bundle_before_it_has_run(tmp_path):
    (tmp_path / "kit" / "app").mkdir(parents=True)
    (tmp_path / "kit" / "start-link.sh").touch()
    keys.make_secret(tmp_path / "kit" / "superexec.secret")
    (tmp_path / "kit" / "app" / "federation.toml").write_text("rounds = 3\n")
    made = write_bundle(tmp_path / "kit", tmp_path / "bundle.zip")
    assert made.files == ["app/federation.toml", "facts.json"]


def test_long_logs_are_cut_at_a_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr("fedscaffold.deploy.bundle.MOST", 100)
    audit = contents(write_bundle(run, tmp_path / "bundle.zip").path)["audit.jsonl"]
    assert len(audit) <= 100
    assert all(isinstance(json.loads(line), dict) for line in audit.splitlines())


def test_the_command_writes_a_bundle(run, tmp_path, monkeypatch, capsys):
    from fedscaffold.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedscaffold", "deploy", "bundle", "run", "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    answer = json.loads(capsys.readouterr().out)
    assert (left.value.code, answer["path"]) == (0, "bundle.zip")
    assert set(answer["files"]) == set(contents(tmp_path / "bundle.zip"))

"""A server that lies to a private site: other settings, metrics, replays, more rounds, vectors of its choosing."""

import logging
import sys

import numpy as np
import private_case as case
import pytest
from private_case import SITES

from fedscaffold.deploy.schema import Blob, Packet, digest_of
from fedscaffold.privacy.accounting import epsilon


def ask_as(config, request, folder, one=None):
    """The answer where the server has also replaced the app's settings, with all digests."""
    facts = {"settings": config.digest, "app": digest_of(config.app)}
    return case.ask(Packet(request.facts | facts, request.blobs), config, folder, one)


def local(steps=case.STEPS, batch=case.BATCH):
    return f"steps = {steps}\nlr = {case.LR}\nbatch_size = {batch}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"table": "clip = 9.0\nnoise = 0.15\ndelta = 1e-3"}, "clip = 9.0 is asked of ant, which"),
        ({"table": "clip = 0.7\nnoise = 0.05\ndelta = 1e-3"}, "noise = 0.05 is asked of ant"),
        ({"local": local(steps=30)}, "steps = 30 is asked of ant, which has agreed to 3"),
        ({"local": local(batch=20)}, "rate = 0.5 is asked of ant, which has agreed to 0.2"),
        ({"algorithm": "name = 'sgd'"}, "rate = 1.0 is asked of ant"),
    ],
)
def test_other_settings_than_the_site_has_agreed_to_are_refused_by_name(tmp_path, given, said):
    config, lie = case.settings(), case.settings(**given)
    _, requests = case.requests_of(config, tmp_path)
    case.ask(requests["ant"], config, tmp_path)
    reply = ask_as(lie, requests["ant"], tmp_path)
    assert reply.facts["kind"] == "refusal"
    assert said in reply.facts["reason"]
    assert "privacy.toml" in reply.facts["reason"]
    assert len(case.ledger_of(tmp_path, "ant").charges) == 1


def test_another_app_is_refused_before_it_is_imported(tmp_path):
    """By the site's own rules; one that agrees to any app leaves the line out."""
    from fedscaffold.deploy.apps import open_app
    from fedscaffold.deploy.gate import Refused
    from fedscaffold.deploy.site_privacy import open_private

    app = tmp_path / "app"
    app.mkdir()
    source = (
        "precision = 'float64'\n[local]\nsteps = 1\n[deploy]\nsites = ['ant']\n"
        "[deploy.records]\nant = 9\n[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-3\n"
    )
    (app / "federation.toml").write_text(source)
    good = "import private_case as case\n\ndef learner(settings):\n    return case.learner()\n"
    (app / "app.py").write_text(good)

    def check(settings):
        return open_private(settings, "ant", tmp_path / "sites")

    open_app(app, check)
    (app / "app.py").write_text(f"import os; os.mkdir({str(tmp_path / 'stolen')!r})\n{good}")
    with pytest.raises(Refused, match=r"app = \w+ is asked of ant, which has agreed to"):
        open_app(app, check)
    assert not (tmp_path / "stolen").exists()
    rules = case.place(tmp_path, "ant") / "privacy.toml"
    kept = [line for line in rules.read_text().splitlines() if not line.startswith("app")]
    rules.write_text("\n".join(kept))
    open_app(app, check)


def test_flowers_client_refuses_another_app_and_settings_before_it_imports_the_app(
    tmp_path, monkeypatch
):
    pytest.importorskip("flwr")
    from flwr.app import Context, Message, MessageType, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedscaffold.deploy.app_files import pack_app
    from fedscaffold.deploy.flower_client import client_app
    from fedscaffold.deploy.flower_records import from_record, to_record

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    source = (
        "precision = 'float64'\n[local]\nsteps = 1\n[deploy]\nsites = ['ant']\n"
        "[deploy.records]\nant = 9\n[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-3\n"
    )
    good = "import private_case as case\n\ndef learner(settings):\n    return case.learner()\n"
    evil = f"import os; os.mkdir({str(tmp_path / 'stolen')!r})\n{good}"

    def greet(number, app, settings):
        place, package = tmp_path / f"app{number}", tmp_path / f"package{number}"
        place.mkdir()
        (place / "app.py").write_text(app)
        (place / "federation.toml").write_text(settings)
        pack_app(place, package)
        node = {"site": "ant", "folder": str(tmp_path / "site"), "worker": "none"}
        message = Message(to_record(Packet({"kind": "hello"}, {})), 1, MessageType.QUERY)
        message.metadata.__dict__["_message_id"] = "m1"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(package), *sys.path])
            reply = client_app(message, Context(1, 1, node, RecordDict(), {}))
        return from_record(reply.content).facts

    assert greet(1, good, source)["kind"] == "hello"
    assert "which has agreed to" in greet(2, evil, source)["reason"]
    without = source.partition("[privacy]")[0]
    assert "ant trains privately only" in greet(3, evil, without)["reason"]
    assert not (tmp_path / "stolen").exists()
    assert greet(4, good, source)["kind"] == "hello"


def test_settings_without_privacy_are_refused(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    case.ask(requests["ant"], config, tmp_path)
    reply = ask_as(config._replace(privacy=None), requests["ant"], tmp_path)
    assert (
        reply.facts["reason"]
        == "privacy: ant trains privately only, and there is no [privacy] here"
    )
    hello = case.answer(
        Packet({"kind": "hello"}, {}),
        case.learner(),
        config._replace(privacy=None),
        "ant",
        tmp_path / "sites",
    )
    assert hello.facts["kind"] == "refusal"


def test_a_looser_budget_or_delta_of_the_server_does_not_count(tmp_path):
    tight = case.settings(table="clip = 0.7\nnoise = 2.0\ndelta = 1e-3\nstop_at_epsilon = 1.0")
    loose = case.settings(table="clip = 0.7\nnoise = 2.0\ndelta = 1e-2\nstop_at_epsilon = 900.0")
    _, requests = case.requests_of(tight, tmp_path)
    for config in (tight, loose, loose):
        reply = ask_as(config, requests["cow"], tmp_path)
        assert "and its own budget is 1" in reply.facts["reason"]
    rules = case.place(tmp_path, "cow") / "privacy.toml"
    rules.write_text(rules.read_text().replace("stop_at_epsilon = 1.0", "stop_at_epsilon = 900.0"))
    reply = ask_as(tight, requests["cow"], tmp_path)  # the site's own hand
    assert reply.facts["epsilon"] == pytest.approx(
        epsilon(noise=2.0, rate=1.0, steps=case.STEPS, delta=1e-3)
    )


@pytest.mark.parametrize("facts", [{"kind": "evaluate"}, {"evaluate": True}])
def test_metrics_that_nobody_noised_are_refused_by_name(tmp_path, facts):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    reply = case.ask(Packet(requests["ant"].facts | facts, requests["ant"].blobs), config, tmp_path)
    assert "metrics on the records of ant are not noised: none are sent" in reply.facts["reason"]
    assert not any(name.startswith("metric.") for name in reply.facts)


def test_what_is_sent_beside_the_noised_vectors_follows_from_the_settings(tmp_path):
    """Two sites of one name with other records, and other numbers of them: the same facts."""
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    told = []
    for many in (40, 7):
        one = case.learner()
        one.data = lambda site, many=many: (np.full((many, 3), many), np.full(many, 5.0 * many))
        folder = tmp_path / str(many)
        hello = case.answer(Packet({"kind": "hello"}, {}), one, config, "ant", folder / "sites")
        reply = case.ask(requests["ant"], config, folder, one)
        assert set(reply.blobs) == {"d"}
        told.append((hello, reply.facts))
    assert told[0] == told[1]
    assert told[0][1]["records"] == 40
    assert set(told[0][1]) == {
        *("kind", "site", "round", "nonce", "schema", "records", "steps", "memory", "own"),
        *("epsilon", "delta", "charged"),
    }


def test_a_server_that_asks_for_ever_is_refused_at_the_budget_whatever_it_sends(tmp_path):
    """Rounds that repeat, go back and leap, vectors of its choosing, other runs: all are charged."""
    table = "clip = 0.7\nnoise = 2.0\ndelta = 1e-3\nstop_at_epsilon = 3.0"
    config = case.settings(table=table)
    _, requests = case.requests_of(config, tmp_path)
    rng, replies = np.random.default_rng(0), []
    for i in range(12):
        blobs = {}
        for name, held in requests["cow"].blobs.items():
            values = rng.normal(size=4) * 10.0 ** rng.integers(-3, 150)
            blobs[name] = Blob(held.dtype, held.shape, values.tobytes())
        lie = {"round": int(rng.integers(1, 9)), "run": f"run{i % 3}", "nonce": str(i)}
        with np.errstate(over="ignore", invalid="ignore"):
            replies.append(case.ask(Packet(requests["cow"].facts | lie, blobs), config, tmp_path))
    kinds = [reply.facts["kind"] for reply in replies]
    charged = len(case.ledger_of(tmp_path, "cow").charges)
    taken = epsilon(noise=2.0, rate=1.0, steps=charged * case.STEPS, delta=1e-3)
    more = epsilon(noise=2.0, rate=1.0, steps=(charged + 1) * case.STEPS, delta=1e-3)
    assert taken <= 3.0 < more
    assert kinds.count("train") <= charged < 12
    assert all("budget" in reply.facts["reason"] for reply in replies[charged:])


@pytest.mark.parametrize("name", ["x", "shift"])
def test_numbers_that_are_not_finite_are_refused_before_a_charge(tmp_path, name):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    held = requests["ant"].blobs[name]
    bad = {name: Blob(held.dtype, held.shape, np.full(4, np.nan).tobytes())}
    reply = case.ask(Packet(requests["ant"].facts, requests["ant"].blobs | bad), config, tmp_path)
    assert reply.facts["reason"].startswith("not finite")
    assert not (case.place(tmp_path, "ant") / "privacy.ledger").exists()


@pytest.mark.parametrize("run", ["../../outside", "/tmp", "privacy", "errors", "", "a/b", "a" * 99])
def test_a_run_is_a_name_and_no_path(tmp_path, run):
    """It names a folder at the site, where its state would be written."""
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    lie = Packet(requests["ant"].facts | {"run": run}, requests["ant"].blobs)
    assert "run must be a name" in case.ask(lie, config, tmp_path).facts["reason"]


def test_a_server_that_knows_of_charges_which_are_not_there_gets_nothing(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    lie = Packet(requests["ant"].facts | {"charged": 5}, requests["ant"].blobs)
    assert "lacks charges of this run" in case.ask(lie, config, tmp_path).facts["reason"]


def test_the_secret_is_its_owners_and_nowhere_else(tmp_path, caplog):
    config = case.settings()
    caplog.set_level(logging.DEBUG)
    server, requests = case.requests_of(config, tmp_path)
    replies = [case.ask(request, config, tmp_path) for request in requests.values()]
    for site, reply in zip(requests, replies, strict=True):
        server.receive(site, reply)
    server.close()
    secrets = {site: (case.place(tmp_path, site) / "secret").read_bytes() for site in SITES}
    assert len(set(secrets.values())) == len(SITES)
    said = repr([*requests.values(), *replies]).encode() + caplog.text.encode()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "secret"]
    assert len(files) > 9
    for site, secret in secrets.items():
        path = case.place(tmp_path, site) / "secret"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        for text in (secret, secret.hex().encode(), repr(secret)[2:-1].encode()):
            assert text not in said
            assert not any(text in file.read_bytes() for file in files)


def test_a_bundle_of_the_app_holds_nothing_of_a_site(tmp_path):
    """What `deploy` sends of an app folder leaves out a site's privacy folder, were it beside app.py."""
    from fedscaffold.deploy.app_files import app_files

    (tmp_path / "app.py").write_text("")
    (tmp_path / "federation.toml").write_text("")
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path / "runs")
    case.ask(requests["ant"], config, tmp_path / "runs")
    assert (case.place(tmp_path / "runs", "ant") / "secret").is_file()
    assert not [path for path in app_files(tmp_path) if "secret" in str(path)]

"""What a site's own code says when it fails stays at the site: a type and a reference travel, whatever the path."""

import json
import stat
import sys
import traceback

import numpy as np
import pytest
from deploy_case import SITES, answer, data, gradient, learner, loss, server_of, settings

from fedscaffold.deploy import ArraysLearner, InProcess, Server, drive
from fedscaffold.deploy.app_files import pack_app
from fedscaffold.deploy.client_state import Lost
from fedscaffold.deploy.errors import MOST_KEPT, Failed, guarded, public_type_of
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import Packet

SECRET = (
    "patient 471147114711"  # longer than the random references of errors, which hold digits too
)


class Unspeakable(ValueError):
    def __str__(self):
        raise RuntimeError(SECRET)


def chained():
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(f"no such row: {SECRET}") from error


def raised(error):
    def fail(*_):
        raise error

    return fail


def grouped(*_):
    raise ExceptionGroup(SECRET, [ValueError(SECRET)])


ERRORS = {
    "plain": (raised(ValueError(f"cannot parse {SECRET}")), "ValueError"),
    "chained": (lambda *_: chained(), "ValueError"),
    "type": (raised(type(SECRET, (KeyError,), {})("x")), "KeyError"),
    "exit": (raised(SystemExit(SECRET)), "SystemExit"),
    "group": (grouped, "ExceptionGroup"),
    "base": (raised(type("Own" + SECRET, (BaseException,), {})(SECRET)), "BaseException"),
    "unspeakable": (raised(Unspeakable()), "ValueError"),
    "our own Refused": (raised(Refused("x", SECRET)), "ValueError"),
    "our own Lost": (raised(Lost(SECRET)), "InputError"),
    "our own Failed": (raised(Failed(SECRET)), "RuntimeError"),
    "in its fields": (raised(OSError(2, SECRET, SECRET)), "FileNotFoundError"),
}


def everything(folder):
    """All that the server keeps, but for what lies in the folders of the sites."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and "sites" not in path.relative_to(folder).parts
    ]
    return {path.name: path.read_bytes() for path in files}


def told(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("where", ["data", "train", "evaluate"])
def test_a_type_and_a_reference_travel_and_the_text_stays(where, how, folder):
    fail, kind = ERRORS[how]
    broken = "bee"
    config = settings()

    class Broken(ArraysLearner):
        def site(self, name):
            if name != broken:
                return super().site(name)
            if where == "data":
                fail()
            site = super().site(name)
            return site._replace(**{where: fail})

    one = Broken(gradient, {"w": np.zeros(2)}, data, loss=loss, precision="float64")
    server = Server(config, one.schema, one.start, folder)
    summary = drive(server, InProcess(one, config, folder), 2)
    doing = {"data": "reading its data", "train": "training", "evaluate": "measuring"}[where]
    cause = summary.missed[broken]["cause"]
    assert summary.missed[broken]["never_counted"]
    assert f"{doing} failed: {kind} (reference " in cause
    assert not [name for name, content in everything(folder).items() if b"patient" in content]
    reference = cause.split("reference ")[1].removesuffix(")")
    log = folder / "sites" / "errors" / f"{reference}.log"
    text = log.read_text()
    assert broken in text
    assert SECRET in text or how in ("unspeakable", "type")
    assert (stat.S_IMODE(log.stat().st_mode), stat.S_IMODE(log.parent.stat().st_mode)) == (
        0o600,
        0o700,
    )


@pytest.mark.parametrize(
    "metrics",
    [
        {SECRET * 4: 1.0},
        {"loss": SECRET},
        {"loss": [SECRET]},
        {471147114711: 1.0},
        {f"m{i}": 0.0 for i in range(40)},
    ],
)
def test_metrics_are_numbers_under_short_names(metrics, folder):
    config, one = settings(), learner()
    open_ = one.site
    one.site = lambda name: open_(name)._replace(evaluate=lambda x, buffers: metrics)
    reply = answer(Packet({"kind": "hello"}, {}), one, config, "ant", folder)
    server = server_of(config, folder / "server")
    server.hello("ant", reply)
    reply = answer(server.open(["ant"])["ant"], one, config, "ant", folder)
    assert reply.facts["kind"] == "refusal"
    assert "measuring failed: " in reply.facts["reason"]
    assert "471147114711" not in str(reply)


def test_a_metric_that_only_one_site_names_is_not_kept(folder):
    config = settings()

    def evaluate(name):
        return {"loss": 1.0, f"of-{name}": 2.0}

    one = learner()
    open_ = one.site
    one.site = lambda name: open_(name)._replace(evaluate=lambda x, buffers: evaluate(name))
    summary = drive(server_of(config, folder), InProcess(one, config, folder), 1)
    assert summary.metrics == {"loss": 1.0}
    assert not [name for name, content in everything(folder).items() if b"of-bee" in content]


def test_interrupts_are_no_errors_of_the_site(folder):
    with pytest.raises(KeyboardInterrupt), guarded("training", folder, "ant"):
        raise KeyboardInterrupt
    assert not (folder / "errors").exists()


def test_a_log_that_shows_a_failure_does_not_show_the_error(folder):
    with pytest.raises(Failed) as failed, guarded("training", folder, "ant"):
        raise ValueError(SECRET)
    assert SECRET not in "".join(traceback.format_exception(failed.value))


def test_where_nothing_can_be_written_the_text_is_still_kept_back(folder):
    (folder / "errors").write_text("in the way")
    with pytest.raises(Failed) as failed, guarded("training", folder, "ant"):
        raise ValueError(SECRET)
    assert (
        str(failed.value) == "training failed: ValueError (which could not be written down there)"
    )


def test_old_logs_make_room(folder):
    for _ in range(MOST_KEPT + 5):
        with pytest.raises(Failed), guarded("training", folder, "ant"):
            raise ValueError(SECRET)
    assert len(list((folder / "errors").iterdir())) == MOST_KEPT


def test_names_of_types_are_pythons():
    assert public_type_of(np.linalg.LinAlgError("x")) == "ValueError"
    assert public_type_of(type("ValueError", (KeyError,), {})()) == "KeyError"
    assert (
        public_type_of(UnicodeDecodeError("utf-8", b"\xff", 0, 1, SECRET)) == "UnicodeDecodeError"
    )


# Through Flower


@pytest.fixture
def client(tmp_path, monkeypatch):
    """The real client app of Flower, on an app's folder; returns what it replies to a packet."""
    pytest.importorskip("flwr")
    from flwr.app import Context, Message, MessageType, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedscaffold.deploy.flower_client import client_app
    from fedscaffold.deploy.flower_records import from_record, to_record

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    def call(app, packet):
        place = tmp_path / "app"
        place.mkdir()
        (place / "app.py").write_text(app)
        (place / "federation.toml").write_text("[deploy]\nsites = ['north']\n")
        pack_app(place, tmp_path / "package")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "package"), *sys.path])
        node = {"site": "north", "folder": str(tmp_path / "site"), "worker": "none"}
        context = Context(1, 1, node, RecordDict(), {})
        message = Message(to_record(packet), 1, MessageType.QUERY)
        message.metadata.__dict__["_message_id"] = "m1"
        reply = client_app(message, context)
        assert not reply.has_error()
        return from_record(reply.content)

    return call


@pytest.mark.parametrize(
    ("app", "kind"),
    [
        (f"raise ValueError('{SECRET}')", "ValueError"),
        (f"import sys; sys.exit('{SECRET}')", "SystemExit"),
        (f"def learner(settings):\n    return '{SECRET}'", "InputError"),
        (f"def learner(settings):\n    raise KeyError('{SECRET}')", "KeyError"),
        (f"x = '{SECRET}", "SyntaxError"),
        (f"import no_such_module_{SECRET.replace(' ', '_')}", "ModuleNotFoundError"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_a_reply_of_a_line(app, kind, client, tmp_path):
    reply = client(app, Packet({"kind": "hello"}, {}))
    assert (reply.facts["kind"], reply.facts["site"]) == ("refusal", "north")
    assert f"loading the app failed: {kind} (reference " in reply.facts["reason"]
    assert "471147114711" not in str(reply)
    (log,) = (tmp_path / "site" / "errors").iterdir()
    assert "471147114711" in log.read_text()


def test_the_engines_own_words_are_not_read():
    pytest.importorskip("flwr")
    from fedscaffold.deploy import flower_app

    class Reply:
        class error:
            code, reason = 2, f"<class 'ValueError'>:<'{SECRET}'>"

        def has_error(self):
            return True

    assert flower_app._read_reply(Reply()) == "its app raised an error"
    Reply.error.code = 99
    assert flower_app._read_reply(Reply()) == "the engine reports error 99"


def test_a_server_names_whom_it_could_not_let_in(folder):
    config = settings()
    server = server_of(config, folder)
    one = learner(data=raised(FileNotFoundError(SECRET)))
    with pytest.raises(Refused, match="failed: reading its data failed: FileNotFoundError"):
        server.hello(
            "ant", answer(Packet({"kind": "hello"}, {}), one, config, "ant", folder / "sites")
        )
    (event,) = [event for event in told(folder) if event["event"] == "refused"]
    assert (event["site"], event["round"]) == ("ant", 1)
    assert (
        "ant never counted: reading its data failed: FileNotFoundError"
        in server.missed["ant"]["sentence"]
    )
    assert list(SITES) == list(config.deploy.sites)

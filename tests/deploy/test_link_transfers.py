"""Replies that take long to come: Flower's own grid, handlers and state of a link, without HTTP in between."""

import platform
import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr")
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from fedscaffold.deploy import flower_app
from fedscaffold.deploy.flower_records import to_record
from fedscaffold.deploy.local_cluster import engine_environment
from fedscaffold.deploy.packets import Blob, Packet

SITES = ("ant", "bee", "cow", "dog")


def reply_of(site):
    return Packet({"site": site}, {"d": Blob("uint8", (3,), site.encode())})


class Link:
    """A link in this process: what its HTTP server calls, on the state that it keeps."""

    def __init__(self):
        manager, objects = NoOpFederationManager(), ObjectStoreFactory()
        self.state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, objects).state()
        about = ({}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        self.run = self.state.create_run("", "", "", *about)
        self.nodes = {}
        for site in SITES:
            node = self.state.create_node(NOOP_FLWR_AID, "", site.encode(), 3600.0, name=site)
            self.state.activate_node(node, 3600.0)
            self.nodes[site] = node
        self.given = []
        """Sites whose replies were said to be there."""
        self.lost = 0
        """How many answers to uploads are lost, after which an engine's client asks again."""

    def __getattr__(self, name):
        """The call of this name in the protocol between server app and link."""
        handler = getattr(runtime_handlers, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())

        def call(request):
            response = handler(request, self.state, Task(run_id=self.run))
            if name == "PushObject" and self.lost:
                self.lost -= 1
                response = handler(request, self.state, Task(run_id=self.run))
            if name == "PullMessages":
                sources = [message.metadata.src_node_id for message in response.messages_list]
                self.given += [site for site, node in self.nodes.items() if node in sources]
            return response

        return call

    def transport(self):
        """A transport over this link that knows all sites, each asked for something."""
        grid = HttpGrid(token="none")
        grid._client = self
        grid.set_run(Run.create_empty(self.run))
        transport = flower_app.FlowerTransport(grid, 600.0)
        transport.names = {node: site for site, node in self.nodes.items()}
        transport.send({site: Packet({"site": site}, {}) for site in SITES})
        return transport

    def announce(self, site):
        """Say that a site's reply comes, as a node does first; return what uploads it then."""
        (request,) = self.state.get_message_ins(self.nodes[site], 1)
        reply = Message(to_record(reply_of(site)), reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects, session = get_all_nested_objects(reply), self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(reply), get_object_tree(reply), session
        )
        assert stored

        def upload():
            for name in missing:
                assert self.state.store_object(self.run, session, name, objects[name].deflate())

        return upload


@pytest.fixture
def link(monkeypatch):
    made = Link()
    for name, value in (("_run_id", made.run), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(flower_app, "PATIENCE", 0.0)
    monkeypatch.setattr(flower_app, "LOOK", 0.0)
    monkeypatch.setattr(flower_app, "GLANCE", 0.05)
    monkeypatch.setitem(pull_objects.__kwdefaults__, "initial_backoff", 0.01)
    monkeypatch.setitem(pull_objects.__kwdefaults__, "backoff_cap", 0.01)
    return made


def collect(transport, number):
    """What a transport returns, once it is so much."""
    found, end = {}, time.monotonic() + 60.0
    while len(found) < number:
        assert time.monotonic() < end, f"there are only {found}"
        found |= dict(transport.collect())
    return found


def test_a_reply_that_takes_long_counts_and_the_others_do_not_wait_for_it(link):
    """It is asked for once, as the link forgets it then: asked again, it says that the reply is gone."""
    transport = link.transport()
    uploads = {site: link.announce(site) for site in SITES[:3]}
    uploads["bee"]()
    assert collect(transport, 1) == {"bee": reply_of("bee")}
    assert "ant" in link.given
    for site in ("ant", "cow"):
        uploads[site]()
    assert collect(transport, 2) == {site: reply_of(site) for site in ("ant", "cow")}
    assert sorted(link.given) == ["ant", "bee", "cow"]


def test_no_more_than_two_replies_are_on_their_way_into_memory(link):
    transport = link.transport()
    uploads = {site: link.announce(site) for site in SITES}
    while len(link.given) < 2:
        assert transport.collect() == []
    for _ in range(5):  # a third would be asked for now
        assert transport.collect() == []
    assert link.given == ["ant", "bee"]
    for site in SITES:
        uploads[site]()
    assert collect(transport, 4) == {site: reply_of(site) for site in SITES}


def test_a_site_that_dies_while_it_uploads_is_named_with_the_cause(link, monkeypatch):
    transport = link.transport()
    with monkeypatch.context() as patch:
        patch.setattr(in_memory_corestate, "OBJECT_PUSH_SESSION_TTL_SECONDS", -1)
        link.announce("ant")
    for site in SITES[1:]:
        link.announce(site)()
    found = collect(transport, 4)
    assert found["ant"] == "its request expired, or its reply was not sent to its end"
    assert [found[site] for site in SITES[1:]] == [reply_of(site) for site in SITES[1:]]


def test_a_request_that_the_link_lost_on_its_way_is_sent_again(link, monkeypatch):
    """However long it had been on its way: the link refuses an upload that it has stored."""
    monkeypatch.setattr(flower_app, "OUTAGE", 0.0)
    link.lost = 1
    transport = link.transport()
    for site in SITES:
        link.announce(site)()
    assert collect(transport, 4) == {site: reply_of(site) for site in SITES}


HOLD_THE_LAST = """
import platform
import re
from pathlib import Path

pieces = [b"x" * (5 << 20)]
pieces.clear()
pieces = [bytes([i]) * (5 << 20) for i in range(40)]
last = pieces.pop()
pieces.clear()
print(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about its allocator")
def test_what_pieces_of_a_message_took_is_given_back(tmp_path):
    """All but the last of 40 pieces are freed: in Flower's processes here, and in others."""
    ours = engine_environment(tmp_path)
    others = {name: value for name, value in ours.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", HOLD_THE_LAST]
    held = [int(subprocess.check_output(command, env=env)) >> 10 for env in (ours, others)]
    assert held[0] < 60 < 150 < held[1]  # MiB

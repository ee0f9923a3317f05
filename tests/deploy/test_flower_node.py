"""A node's replies stay in step with its requests, whatever dies while they are under way."""

import threading

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as engine
from flwr.supernode.start_client_internal import RunNotRunningException

from fedscaffold.deploy.flower_node import AnsweringState, in_step

OLD, NEW = 11, 12  # runs


@pytest.fixture
def node(monkeypatch):
    return Node(monkeypatch)


class Node:
    """The real state of a node, and a link that has requests for it."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.store = InMemoryObjectStore()
        self.state = AnsweringState(self.store)
        self.state.set_node_id(5)
        self.sent = []

    def request(self, run, number):
        for name, value in (("_run_id", run), ("_node_id", 1), ("_task_id", 1)):
            self.patch.setattr(TaskIdentity, name, value)
        message = Message(RecordDict({"facts": ConfigRecord({"number": number})}), 5, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def reply(self, request):
        """What the process of a request stores."""
        reply = Message(RecordDict(), reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.state._store_generated_message(reply)
        assert self.state.store_message(reply)

    def pull(self, pull, run, dead=()):
        message = self.request(run, len(self.sent))
        objects = {one: it.deflate() for one, it in get_all_nested_objects(message).items()}

        def pull_object(run, one):
            if run in dead:
                raise RunNotRunningException
            return objects[one]

        class Run:
            run_id, series_id, fab_hash, primary_task_type = run, run, "hash", TaskType.SERVER_APP

        self.patch.setattr(self.state, "get_run", lambda run: Run)
        given = dict.fromkeys(("node_config", "get_run", "get_fab", "trusted_entities"))
        found = pull(
            state=self.state,
            object_store=self.store,
            receive=lambda: (message, get_object_tree(message)),
            pull_object=pull_object,
            confirm_message_received=lambda run, one: None,
            **given,
        )
        return message, found

    def push(self, push):
        def send(message, tree, seconds):
            self.sent.append(message.metadata.reply_to_message_id)
            return set(), ""

        push(state=self.state, object_store=self.store, send=send, push_object=None)


def test_a_request_of_a_run_that_ended_does_not_put_the_node_out_of_step(node):
    pull, push = in_step(engine._pull_and_store_message, engine._push_messages)
    orphan, found = node.pull(pull, OLD, dead=[OLD])
    assert found is None
    mine, found = node.pull(pull, NEW)
    assert found == NEW
    node.reply(orphan)  # its process had taken it
    later = threading.Timer(0.7, node.reply, [mine])
    later.start()
    node.push(push)
    later.join()
    assert node.sent == [orphan.metadata.message_id, mine.metadata.message_id]
    assert node.state.msg_store == {}


def test_the_engine_still_needs_it(node):
    """Flower's own loop sends one reply for the other; without this defect our node is not needed any more."""
    orphan, _ = node.pull(engine._pull_and_store_message, OLD, dead=[OLD])
    mine, _ = node.pull(engine._pull_and_store_message, NEW)
    node.reply(orphan)
    node.push(engine._push_messages)
    assert node.sent == [orphan.metadata.message_id]
    assert mine.metadata.message_id in node.state.msg_store


def test_a_request_whose_process_died_before_it_took_it_has_a_reply(node):
    mine, _ = node.pull(engine._pull_and_store_message, NEW)
    (task,) = node.state.get_tasks()
    node.state.claim_task(task.task_id)
    node.state.activate_task(task.task_id)
    (token,) = node.state.task_token_store.values()
    token.active_until = token.active_until.replace(year=2000)
    (reply,) = node.state.get_messages_legacy(is_reply=True)  # for which the node waits
    assert reply.metadata.reply_to_message_id == mine.metadata.message_id
    assert reply.has_error()

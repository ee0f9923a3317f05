"""The engine's node (`flower-supernode`), whose replies stay in step with its requests.

Flower's node pulls a request, sends whatever reply is there next, and then pulls again. A run that
ends while the node pulls a request of it leaves that request behind: its reply is taken for that of
the next request, whose own reply then waits for the one after it, and so on. Such a node answers
each round when the next one begins, for ever. Here a request that was not pulled to its end is
forgotten, and the node pulls again when the last one has its own reply.

A request whose process died before it took it never has a reply in Flower, and the node waits for
it for ever. Here it has the reply that its process died.

`python -m fedscaffold.deploy.flower_node` takes the arguments of `flower-supernode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.supernode import start_client_internal as engine
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

__all__ = ["AnsweringState", "in_step", "main"]


class AnsweringState(InMemoryNodeState):
    """Flower's state of a node, in which a request gets a reply though no process has taken it."""

    def _on_task_tokens_expired(self, tasks: list[Any]) -> None:
        runs = {task.run_id for task in tasks}
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                # Flower replies to requests that were taken; replies must still be sent
                is_request = not entry.message.metadata.reply_to_message_id
                if is_request and entry.message.metadata.run_id in runs:
                    entry.is_retrieved = True
        super()._on_task_tokens_expired(tasks)


def in_step(
    pull: Callable[..., int | None], push: Callable[..., None]
) -> tuple[Callable[..., int | None], Callable[..., None]]:
    """Return Flower's two functions of a node's loop, as they are called there, in step.

    Args:
        pull: Pulls a request; returns its run, or None where there is none.
        push: Waits for replies and sends them.
    """
    last: list[str] = []

    def pull_request(state: AnsweringState, object_store: Any, **more: Any) -> int | None:
        before = set(state.msg_store)
        run = pull(state=state, object_store=object_store, **more)
        with state.lock_msg_store:
            last[:] = [
                one
                for one, entry in state.msg_store.items()
                if one not in before and not entry.message.metadata.reply_to_message_id
            ]
        if run is None:
            state.delete_messages(message_ids=last)
            for one in last:
                object_store.delete(one)
        return run

    def push_reply(state: AnsweringState, **more: Any) -> None:
        push(state=state, **more)
        while any(one in state.msg_store for one in last):  # sent with its reply, it is removed
            push(state=state, **more)

    return pull_request, push_reply


def main() -> None:
    """Run the node."""
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.nodestate import nodestate_factory

    node: Any = engine
    factory: Any = nodestate_factory
    factory.InMemoryNodeState = AnsweringState
    node._pull_and_store_message, node._push_messages = in_step(
        node._pull_and_store_message, node._push_messages
    )
    flower_supernode()


if __name__ == "__main__":
    main()

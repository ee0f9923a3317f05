"""The server as a Flower app (flwr 1.41), with Flower's messages, processes, TLS and keys.

Flower only transports packets (`flower_records.py`). `context.state` is not used, since it is held
in memory and can be lost silently. A node is identified by its registered name (`flwr supernode
register --name SITE`); where nodes are not registered, by its greeting.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fedscaffold.checks import InputError
from fedscaffold.deploy.alerts import Alerts
from fedscaffold.deploy.app_files import digest_package, unpack_app
from fedscaffold.deploy.apps import open_app
from fedscaffold.deploy.event_log import EventLog, file_log
from fedscaffold.deploy.flower_records import SPARE, from_record, package_folder, to_record
from fedscaffold.deploy.kept_run import LOG, note_outcome, note_serving
from fedscaffold.deploy.packets import Packet
from fedscaffold.deploy.server import Outcome, Server
from fedscaffold.deploy.server_loop import Stopped, drive
from fedscaffold.state.files import make_folder, owned

__all__ = ["FlowerTransport", "server_app"]

PATIENCE = 30.0  # seconds after which others are pulled beside a reply that takes longer
AT_ONCE = 2  # replies that are pulled at once: each is in memory several times over
LOOK = 0.5  # seconds between polls for replies; sites look for their own as often
GLANCE = 1.0  # seconds for which a poll is waited for
OUTAGE = 30.0  # seconds for which a link that fails is asked again
# seconds until a node that failed to greet is asked again; doubled each time, up to LONGEST
AGAIN = 10.0
LONGEST = 300.0
BROKEN = {
    1: "its app could not be loaded",
    2: "its app raised an error",
    3: "its request expired, or its reply was not sent to its end",
    4: "its reply is gone",
    5: "its node is not online",
    7: "its copy of the app is damaged",
    8: "its process died",
}
"""Flower's error codes.

Flower's messages are not shown, as they may contain a site's error texts.
"""

server_app = ServerApp()
T = TypeVar("T")


class LinkLost(RuntimeError):
    """The link does not answer; a new server app may go on when it does."""


class FlowerTransport:
    """Transport over a Flower grid.

    It polls itself, as Flower's own loop sleeps 3 s and may block for minutes.
    """

    def __init__(self, grid: Grid, deadline: float, asynchronous: bool = False) -> None:
        self.grid, self.deadline, self.asynchronous = grid, deadline, asynchronous
        self.names: dict[int, str] = {}
        """Sites by node that has greeted."""
        self.online: set[int] = set()
        self.later: dict[int, tuple[float, float]] = {}
        """By node that failed to greet: when to ask again, and the current pause."""
        self.asked: dict[str, tuple[int, str]] = {}
        """By message id: the node and the site it was sent to; site "" for a greeting."""
        self.found: list[tuple[int, str, Packet | str]] = []
        self.greeted: list[tuple[int, str, Packet | str]] = []
        """Greetings that came while a round was open."""
        self.lock = threading.Lock()
        self.looking: threading.Thread | None = None
        """The thread that asks for replies."""
        self.pulling: dict[str, float] = {}
        """By message id whose reply is asked for: since when."""
        self.next_look = 0.0

    def greetings(self) -> dict[str, Packet]:
        """Request greetings from new nodes; return those that have arrived."""
        nodes = {
            node.node_id: getattr(node, "name", "") or "" for node in _insist(self.grid.get_nodes)
        }
        self.online = set(nodes)
        with self.lock:
            # a node that is gone will not reply; it is asked again when it is back
            self.asked = {
                message: (node, site)
                for message, (node, site) in self.asked.items()
                if site or node in self.online
            }
            # a reply that has come, but was not looked at yet, is waited for too
            came = [(node, site) for node, site, _ in [*self.greeted, *self.found]]
            waiting = {node for node, site in [*self.asked.values(), *came] if site == ""}
        now = time.monotonic()
        put_off = {node for node, (at, _) in self.later.items() if now < at}
        new = [node for node in nodes if node not in self.names and node not in waiting | put_off]
        hello = Packet({"kind": "hello"}, {})
        for node, message in zip(
            new, self._push([(node, hello) for node in new], MessageType.QUERY), strict=True
        ):
            if message is not None:
                self.asked[message] = (node, "")
        out: dict[str, Packet] = {}
        greeted, self.greeted = self.greeted, []
        for node, site, reply in [*greeted, *self._take_replies()]:
            if site:
                if self.asynchronous:  # for the next round; else it is late
                    self.found.append((node, site, reply))
                continue
            if isinstance(reply, str):
                reply = Packet(
                    {"kind": "refusal", "site": nodes.get(node, ""), "reason": reply}, {}
                )
            claimed = reply.facts.get("site")
            registered = nodes.get(node)
            name = registered or (claimed if isinstance(claimed, str) else "")
            holder = next((old for old, site in self.names.items() if site == name), None)
            # a key that was rotated is another node, with the name of one that is gone; a name that
            # is only claimed stays with the node that had it first
            if not name or holder in self.online or (holder is not None and not registered):
                continue
            out[name] = reply
            if reply.facts.get("kind") == "hello":
                self.names.pop(holder, None)  # type: ignore[arg-type]
                self.names[node] = name
            else:
                pause = min(LONGEST, 2 * self.later[node][1] if node in self.later else AGAIN)
                self.later[node] = now + pause, pause
        return out

    def present(self) -> set[str]:
        """Return the sites whose node is online."""
        return {site for node, site in self.names.items() if node in self.online}

    def send(self, requests: Mapping[str, Packet]) -> None:
        """Push the requests; one that cannot be pushed counts as a failed client."""
        # replies to older requests are ignored, unless their sites go on working; those that greet
        # take as long as they need, be it several rounds
        with self.lock:
            self.asked = {
                message: (node, site)
                for message, (node, site) in self.asked.items()
                if not site or (self.asynchronous and site not in requests)
            }
        nodes = {site: node for node, site in self.names.items()}
        for site in requests:  # one by one: each holds vectors of the model's size
            (message,) = self._push([(nodes[site], requests[site])], MessageType.TRAIN)
            if message is None:
                self.found.append((nodes[site], site, "its request could not be sent"))
            else:
                self.asked[message] = (nodes[site], site)

    def collect(self) -> list[tuple[str, Packet | str]]:
        """Return the replies that have arrived; greetings wait for the end of the round."""
        came = self._take_replies()
        self.greeted += [one for one in came if not one[1]]
        return [(site, reply) for _, site, reply in came if site]

    def _push(self, packets: list[tuple[int, Packet]], kind: str) -> list[str | None]:
        """Push packets to nodes; return the message ids, None for those not pushed."""
        if not packets:
            return []
        messages = [
            Message(to_record(p), node, kind, ttl=self.deadline + SPARE) for node, p in packets
        ]
        # a message that is pushed twice is one, as its id is a digest
        pushed = list(_insist(lambda: self.grid.push_messages(messages)))
        self.next_look = 0.0
        return [*pushed, *[None] * (len(packets) - len(pushed))]

    def _take_replies(self) -> list[tuple[int, str, Packet | str]]:
        """Return what arrived since the last call.

        Replies are pulled in a thread, as flwr may block for minutes: a site may die while it
        uploads. Where one takes long, another thread goes on with the others.
        """
        now = time.monotonic()
        with self.lock:
            messages = [message for message in self.asked if message not in self.pulling]
            alive = self.looking is not None and self.looking.is_alive()
            slow = bool(self.pulling) and max(self.pulling.values()) < now - PATIENCE
            if alive and not (slow and len(self.pulling) < AT_ONCE):
                messages = []
            if messages and now >= self.next_look:
                self.next_look = now + LOOK
                self.looking = threading.Thread(target=self._pull, args=(messages,), daemon=True)
                self.looking.start()
        if self.looking is not None:
            self.looking.join(GLANCE)
        with self.lock:
            found, self.found = self.found, []
        return found

    def _pull(self, messages: list[str]) -> None:
        """Pull replies one by one, until another thread does.

        In one call for all, a reply that Flower cannot decode would discard the others, and all
        would be in memory at once. A reply that is being pulled must not be asked for again: the
        link has removed it when it said that it is there, and would report that it is gone.
        """
        for message in messages:
            with self.lock:
                if self.looking is not threading.current_thread():
                    return
                if message not in self.asked:
                    continue
                self.pulling[message] = time.monotonic()
            with contextlib.suppress(
                Exception
            ):  # link down or undecodable reply: the round goes on
                self._pull_reply(message)
            with self.lock:
                del self.pulling[message]

    def _pull_reply(self, message: str) -> None:
        """Pull the reply to a message, if it is there."""
        for reply in self.grid.pull_messages([message]):
            content = _read_reply(reply)
            with self.lock:
                sent = self.asked.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:
                    self.found.append((*sent, content))


def _insist(call: Callable[[], T]) -> T:
    """Call the link, and again while it fails, for a while.

    Flower itself waits for a link that is not there, but gives up where it dies within a handshake.
    """
    failed: float | None = None  # when it first did: a large message may be on its way for minutes
    while True:
        try:
            return call()
        except Exception as error:
            now = time.monotonic()
            failed = now if failed is None else failed
            if now > failed + OUTAGE:
                raise LinkLost(f"the link failed for {OUTAGE:.0f} s") from error
            time.sleep(1.0)


def _read_reply(reply: Message) -> Packet | str:
    """Return the packet of a reply, or why there is none."""
    if reply.has_error():
        return BROKEN.get(reply.error.code, f"the engine reports error {int(reply.error.code)}")
    return from_record(reply.content)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the federation.

    State, log and model are written to the folder `home` of the run's configuration. The result is
    an outcome, and so is a run that cannot go on; anything else is a crash, after which a new
    server app goes on from the last commit (`kept_run.py`).
    """
    home = Path(str(context.run_config["home"]))
    make_folder(home, private=True)
    with owned(home):
        note_serving(home, digest_package(package_folder()))
        log = file_log("server", home / LOG)
        log("started", pid=os.getpid())
        try:
            outcome = _federate(grid, str(context.run_config["files"]), home, log)
        except (Stopped, InputError) as error:
            log("stopped", why=str(error))
            missed = error.missed if isinstance(error, Stopped) else {}
            note_outcome(home, {"error": str(error), "missed": missed})
            raise
        except BaseException as error:
            log.crash(error)
            raise
        log("finished", rounds=outcome["rounds"])
        note_outcome(home, outcome)


def _federate(grid: Grid, beside: str, home: Path, log: EventLog) -> dict[str, Any]:
    """Run all rounds; return the summary."""
    app = unpack_app(package_folder(), home / "apps", Path(beside) if beside else None)
    settings, learner = open_app(app)
    deploy = settings.deploy
    alerts = Alerts(deploy.alert, home, log, deploy.alert_after)
    try:
        server = Server(settings, learner.schema, learner.start, home, buffers=learner.buffers)

        def tell(outcome: Outcome) -> None:
            log(
                "round committed" if outcome.committed else "round abandoned",
                round=outcome.round,
                heard=", ".join(outcome.heard),
                missing=", ".join([*outcome.missing, *outcome.refused]),
            )
            alerts.look(server, outcome)

        transport = FlowerTransport(grid, deploy.deadline, deploy.mode == "async")
        summary = drive(server, transport, settings.rounds, tell)
    except (Stopped, InputError) as error:
        alerts.tell("run stopped", str(error))
        raise
    finally:
        alerts.wait()
    return {**summary._asdict(), "model": str(summary.model)}

"""The loop of a deployment: greet, open, send, collect, close, until the rounds are done or nobody is left to wait for.

A transport carries packets to sites and back; it may lose, delay, repeat and reorder them. Everything that must not go
wrong is the server's business, so this loop is the same for processes on this machine, a real federation and a test.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedscaffold.deploy.attendance import IN_VAIN, LATE, listed
from fedscaffold.deploy.client import Learner, answer
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.rounds import rounding, shares
from fedscaffold.deploy.schema import Array, Packet, Schema
from fedscaffold.deploy.server import Outcome, Server
from fedscaffold.deploy.settings import Settings
from fedscaffold.state import tensors
from fedscaffold.state.files import create, write_private

__all__ = ["InProcess", "Stopped", "Summary", "Transport", "drive"]

POLL = 0.1  # seconds between two looks for replies
LONGEST_PAUSE = 30.0


class Stopped(RuntimeError):
    """The run ended before its rounds were done; the text says why. What was committed is intact."""

    missed: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (never changed)
    """Sites that did not count, as in `Summary`."""


class Transport(Protocol):
    """Carries packets between the server and its sites."""

    def greetings(self) -> dict[str, Packet]:
        """What sites that were not there before say of themselves."""

    def present(self) -> set[str]:
        """Sites that can be reached now."""

    def send(self, requests: Mapping[str, Packet]) -> None:
        """Send requests; returns at once."""

    def collect(self) -> list[tuple[str, Packet | str]]:
        """What came back since: a reply, or the reason why there is none."""


class Summary(NamedTuple):
    """What came of a run."""

    rounds: int
    residual: float | None
    """|c - sum p_i c_i|; None where the clients keep the c_i, and only they know."""
    metrics: dict[str, float]
    seconds: float
    model: Path
    missed: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (never changed)
    """By site that did not count: round, kind, cause and how often, and whether it never did."""
    unmeasured: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)
    """By metric: sites where it was no finite number; they are not in its mean."""


class InProcess:
    """All sites in this process, one after the other: the protocol with no network."""

    def __init__(self, learner: Learner, settings: Settings, folder: Path) -> None:
        self.learner, self.settings, self.folder = learner, settings, folder
        self.queue: dict[str, Packet] = {}
        self.known: set[str] = set()

    def greetings(self) -> dict[str, Packet]:
        """All sites that are not in yet; one that could not greet is asked again."""
        new = [site for site in self.settings.deploy.sites if site not in self.known]
        said = {site: self._answer(site, Packet({"kind": "hello"}, {})) for site in new}
        self.known |= {site for site, packet in said.items() if packet.facts["kind"] == "hello"}
        return said

    def present(self) -> set[str]:
        """All sites."""
        return self.known

    def send(self, requests: Mapping[str, Packet]) -> None:
        """Keep the requests for `collect`."""
        self.queue |= requests

    def collect(self) -> list[tuple[str, Packet | str]]:
        """Answer one request."""
        if not self.queue:
            return []
        site, request = next(iter(self.queue.items()))
        del self.queue[site]
        return [(site, self._answer(site, request))]

    def _answer(self, site: str, request: Packet) -> Packet:
        return answer(request, self.learner, self.settings, site, self.folder / "sites")


def drive(
    server: Server,
    transport: Transport,
    rounds: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Summary:
    """Run a deployment up to `rounds` rounds in all; raises `Stopped` when its quorum cannot be met any more."""
    began = time.monotonic()
    for site in sorted(set(server.roster) - set(server.settings.deploy.sites)):
        server.leave(site)  # its name was taken out of the settings
    _welcome(server, transport, sleep)
    while server.state.round < rounds:
        outcome = _round(server, transport, sleep, evaluate=False)
        if outcome is not None:
            tell(outcome)
            _record(server, outcome)
        diverged = outcome is not None and _diverged(server, outcome)
        if diverged or server.attempt > server.settings.deploy.retries:
            raise _stopped(server, outcome, diverged)
        if outcome is None or not outcome.committed:
            sleep(min(LONGEST_PAUSE, 0.5 * 2**server.attempt))
        _greet(server, transport)
    last = _round(server, transport, sleep, evaluate=True)
    model = server.folder / "model.safetensors"
    save_model(server, model)
    gauge, metrics, unmeasured = server.residual, {}, {}
    if last is not None:
        metrics, unmeasured = last.metrics, last.unmeasured
        _line(server, {**metrics, "round": server.state.round, **_without(last), "residual": gauge})
    summary = Summary(server.state.round, gauge, metrics, time.monotonic() - began, model, server.missed, unmeasured)
    _status(server, "finished", unmeasured)
    return summary


def _diverged(server: Server, outcome: Outcome) -> bool:
    """Whether a round failed because every site's numbers did: to try it again would bring the same."""
    everybody = set(outcome.refused) >= set(server.roster)
    causes = outcome.refused.values()
    return not outcome.committed and everybody and all(cause.startswith(("not finite", "overflow")) for cause in causes)


def _stopped(server: Server, outcome: Outcome | None, diverged: bool) -> Stopped:
    """Why the run ends here, with every site that did not count and its cause."""
    _status(server, "stopped")
    number = server.state.round + 1
    if diverged:
        why = f"round {number}: every site's update holds NaN or infinite numbers, so training diverged"
        why += "; take a smaller local.lr, and look for NaN in the data"
    else:
        why = f"round {number} failed its quorum {server.attempt} times in a row"
    if outcome is None:
        causes = {site: missed.cause for site, missed in server.attendance.missed.items() if missed.round == number}
    else:
        causes = outcome.absent | dict.fromkeys(outcome.heard, IN_VAIN)
        causes |= dict.fromkeys(outcome.missing, LATE) | outcome.refused
    committed = f"rounds 1 to {server.state.round} are" if server.state.round else "nothing is"
    stopped = Stopped(f"{why} ({listed(causes)}); {committed} committed in {server.folder}")
    stopped.missed = server.missed
    return stopped


def _without(outcome: Outcome) -> dict[str, Any]:
    return {"unmeasured": outcome.unmeasured} if outcome.unmeasured else {}


def save_model(server: Server, path: Path) -> None:
    """Write the server's model as named arrays in a safetensors file."""
    arrays = server.schema.filed(server.state.x, {**server.untrained, **server.state.buffers})
    write_model(path, arrays, {"round": str(server.state.round), "run": server.run})


def save_simulated(folder: Path, schema: Schema, x: Array, rows: Sequence[Mapping[str, Any]], run: str) -> Path:
    """Write what a run in the simulator leaves: its metrics and its model, whose path is returned."""
    write_private(folder / "metrics.jsonl", "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in rows))
    model = folder / "model.safetensors"
    write_model(model, schema.filed(x, {}), {"round": str(len(rows)), "run": run})
    return model


def write_model(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, str]) -> None:
    """Write named arrays in a safetensors file for its owner; whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    fd = create(temporary, private=True)
    try:
        tensors.write(fd, tensors.encode(arrays, facts))
    finally:
        os.close(fd)
    temporary.replace(path)


def _welcome(server: Server, transport: Transport, sleep: Callable[[float], None]) -> None:
    """Let sites in until all are here (or have said why they cannot be), or the time to wait for them is over."""
    began = server.clock()
    while True:
        _greet(server, transport)
        _status(server, "gathering")
        waited = server.clock() - began
        if transport.present() & set(server.roster) | server.declined.keys() >= set(server.settings.deploy.sites):
            return
        if waited >= server.settings.deploy.wait:
            return
        sleep(POLL)


def _greet(server: Server, transport: Transport) -> None:
    for site, packet in sorted(transport.greetings().items()):
        try:
            server.hello(site, packet)
        except Refused:
            continue  # named in the audit log and the status


def _round(server: Server, transport: Transport, sleep: Callable[[float], None], evaluate: bool) -> Outcome | None:
    requests = server.open(transport.present(), evaluate)
    if not requests:
        return None
    _status(server, "waiting")
    transport.send(requests)
    while not server.due():
        came = transport.collect()
        for site, reply in came:
            if isinstance(reply, str):
                server.failed(site, reply)
            else:
                server.receive(site, reply)
        if came:
            _status(server, "waiting")
        elif not server.due():
            sleep(POLL)
    return server.close()


def _record(server: Server, outcome: Outcome) -> None:
    _status(server, "between rounds", outcome.unmeasured)
    if outcome.committed and outcome.kind == "train":
        row: dict[str, Any] = {**outcome.metrics, "round": outcome.round - 1, "heard": list(outcome.heard)}
        _line(server, {**row, **_without(outcome), "residual": server.residual})


def _line(server: Server, row: dict[str, Any]) -> None:
    path = server.folder / "metrics.jsonl"
    if not path.exists():
        write_private(path, "")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _status(server: Server, phase: str, unmeasured: dict[str, list[str]] | None = None) -> None:
    """Write status.json for `deploy status`; only a view, so it need not be durable, but it is never half written."""
    now, wall = server.clock(), time.time()
    p = shares(server.roster)
    sites = {
        site: {
            "records": member.records,
            "share": p[site],
            "counted_in_round": member.applied,
            "last_seen": None if site not in server.seen else wall - (now - server.seen[site]),
            "told": member.told,
        }
        for site, member in server.roster.items()
    }
    status = {
        "phase": phase,
        "round": server.state.round,
        "rounds": server.settings.rounds,
        "waiting_for": list(server.waiting),
        "absent": [site for site in server.settings.deploy.sites if site not in server.roster],
        "attempt": server.attempt,
        "residual": server.residual,
        "explained": rounding(server.state) if server.server_keeps else None,
        "precision": server.settings.precision,
        "at": wall,
        "pid": os.getpid(),
        "sites": sites,
        "missed": server.missed,
        "unmeasured": unmeasured or {},
        "warnings": server.warnings,
    }
    write_private(server.folder / "status.json", json.dumps(status))

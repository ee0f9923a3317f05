"""The main loop of a deployment, for any transport.

A transport carries packets to sites and back, and may lose, delay, repeat or reorder them. All
guarantees are the server's (`server.py`), so the same loop serves in-process sites, local processes
and a real federation.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedscaffold.deploy.aggregation import rounding_bound, shares
from fedscaffold.deploy.client import Learner, answer
from fedscaffold.deploy.host import read_host
from fedscaffold.deploy.schema import Array, Packet
from fedscaffold.deploy.server import Outcome, Server
from fedscaffold.deploy.settings import Settings
from fedscaffold.state import safetensors_io
from fedscaffold.state.files import write_private

__all__ = ["InProcess", "Stopped", "Summary", "Transport", "drive", "write_model"]

POLL = 0.1  # seconds between polls for replies
LONGEST_PAUSE = 30.0
MOST_CAUSES = 6  # named when a run stops


class Stopped(RuntimeError):
    """The run ended before its last round; the committed state is intact."""

    missed: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (never changed)
    """Sites that missed rounds, as in `Summary`."""


class Transport(Protocol):
    """Carries packets between the server and its sites."""

    def greetings(self) -> dict[str, Packet]:
        """Return the greetings of sites that are new since the last call."""

    def present(self) -> set[str]:
        """Return the sites that can be reached now."""

    def send(self, requests: Mapping[str, Packet]) -> None:
        """Send requests without waiting for replies; a site's earlier request is void."""

    def collect(self) -> list[tuple[str, Packet | str]]:
        """Return what arrived since the last call: by site a reply, or why there is none."""


class Summary(NamedTuple):
    """Result of a run."""

    rounds: int
    residual: float | None
    """|c - sum p_i c_i|; None where clients keep the c_i."""
    metrics: dict[str, float]
    seconds: float
    model: Path
    missed: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (never changed)
    """By site that missed rounds: the last round, its kind, the cause, how often, and whether it
    never counted."""
    unmeasured: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)
    """By metric: sites where it was not finite, which its mean leaves out."""
    epsilon: dict[str, float] = {}  # noqa: RUF012 (never changed)
    """What each private site has spent, by its own word."""


class InProcess:
    """Transport that runs all sites sequentially in this process, without a network."""

    def __init__(self, learner: Learner, settings: Settings, folder: Path) -> None:
        self.learner, self.settings, self.folder = learner, settings, folder
        self.queue: dict[str, Mapping[str, Packet]] = {}
        self.known: set[str] = set()
        if settings.deploy.secure:
            from fedscaffold.deploy.secure_rules import provision

            provision(settings, folder, folder / "sites")

    def greetings(self) -> dict[str, Packet]:
        """Return the greetings of sites that are not registered yet, including earlier failures."""
        new = [site for site in self.settings.deploy.sites if site not in self.known]
        hello, place = Packet({"kind": "hello"}, {}), self.folder / "sites"
        said = {site: answer(hello, self.learner, self.settings, site, place) for site in new}
        self.known |= {site for site, packet in said.items() if packet.facts["kind"] == "hello"}
        return said

    def present(self) -> set[str]:
        """All sites."""
        return self.known

    def send(self, requests: Mapping[str, Packet]) -> None:
        """Queue the requests for `collect`."""
        self.queue |= dict.fromkeys(requests, requests)

    def collect(self) -> list[tuple[str, Packet | str]]:
        """Answer one queued request."""
        if not self.queue:
            return []
        site = next(iter(self.queue))
        request = self.queue.pop(site)[site]
        return [(site, answer(request, self.learner, self.settings, site, self.folder / "sites"))]


def drive(
    server: Server,
    transport: Transport,
    rounds: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Summary:
    """Run a deployment until `rounds` rounds are committed in total.

    Args:
        server: The server, new or resumed.
        transport: The connection to the sites.
        rounds: Total number of rounds, including those committed before a restart.
        tell: Called with the outcome of every round.
        sleep: Called to wait; tests pass a fake.

    Returns:
        The summary, with metrics of the final model. A private run has none, and also ends where
        too few sites have a budget for another round.

    Raises:
        Stopped: If training diverged at every site, or the quorum was missed more than
            `deploy.retries` times in a row.
    """
    began = time.monotonic()
    for site in sorted(set(server.roster) - set(server.settings.deploy.sites)):
        server.leave(site)  # removed from the settings
    _await_sites(server, transport, sleep)
    private = server.settings.privacy is not None
    while server.state.round < rounds:
        outcome = _run_round(server, transport, sleep, evaluate=False)
        if outcome is not None:
            tell(outcome)
            _write_status(server, "between rounds", outcome.unmeasured)
            if outcome.committed and outcome.kind == "train":
                # metrics are of the model before the round; what was spent is after it
                _append_metrics(server, outcome, outcome.round - (0 if private else 1))
        why = _reason_to_stop(server, outcome)
        if outcome is not None and _budgets_are_spent(server, outcome, why is not None):
            break
        if why is not None:
            _write_status(server, "stopped")
            stopped = Stopped(why)
            stopped.missed = server.missed
            raise stopped
        if outcome is None or not outcome.committed:
            sleep(min(LONGEST_PAUSE, 0.5 * 2**server.attempt))
        _register_new_sites(server, transport)
    last = None if private else _run_round(server, transport, sleep, evaluate=True)
    model = server.folder / "model.safetensors"
    arrays = server.schema.filed(server.state.x, {**server.untrained, **server.state.buffers})
    write_model(model, arrays, {"round": str(server.state.round), "run": server.run})
    metrics, unmeasured = ({}, {}) if last is None else (last.metrics, last.unmeasured)
    if last is not None:
        _append_metrics(server, last, server.state.round)
    summary = Summary(
        rounds=server.state.round,
        residual=server.residual,
        metrics=metrics,
        seconds=time.monotonic() - began,
        model=model,
        missed=server.missed,
        unmeasured=unmeasured,
        epsilon=server.spent,
    )
    _write_status(server, "finished", unmeasured)
    return summary


def _budgets_are_spent(server: Server, outcome: Outcome, last: bool) -> bool:
    """Return whether a round missed its quorum for want of budget alone.

    Other sites are asked first, unless it was the `last` try.
    """
    spent = {site for site, cause in outcome.refused.items() if cause.startswith("budget")}
    if outcome.committed or not spent or spent != set(outcome.refused) or outcome.missing:
        return False
    return last or {*spent, *outcome.heard} >= set(server.roster)


def _reason_to_stop(server: Server, outcome: Outcome | None) -> str | None:
    """Return why the run cannot go on, with the sites' causes; None if it can."""
    number = server.state.round + 1
    refused = {} if outcome is None or outcome.committed else outcome.refused
    spoilt = {
        site for site, cause in refused.items() if cause.startswith(("not finite", "overflow"))
    }
    if refused and spoilt >= {*refused, *server.roster}:
        why = (
            f"round {number}: every site's update holds NaN or infinite numbers, so training "
            "diverged"
        )
        why += "; take a smaller local.lr, and look for NaN in the data"
    elif server.attempt > server.settings.deploy.retries:
        why = f"round {number} failed its quorum {server.attempt} times in a row"
    else:
        return None
    groups: dict[str, list[str]] = {}
    for site, missed in server.audit.missed.items():
        if missed.round == number:
            groups.setdefault(missed.cause, []).append(site)
    causes = [f"{', '.join(sites)}: {cause}" for cause, sites in groups.items()]
    more = len(causes) - MOST_CAUSES
    causes = [*causes[:MOST_CAUSES], *([f"and {more} more causes"] if more > 0 else [])]
    committed = f"rounds 1 to {server.state.round} are" if server.state.round else "nothing is"
    return f"{why} ({'; '.join(causes)}); {committed} committed in {server.folder}"


def write_model(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, str]) -> None:
    """Write named arrays atomically to a safetensors file that only its owner can read."""
    write_private(path, lambda fd: safetensors_io.write(fd, safetensors_io.encode(arrays, facts)))


def _await_sites(server: Server, transport: Transport, sleep: Callable[[float], None]) -> None:
    """Register sites until all are present or declined, or `deploy.wait` seconds pass."""
    began = server.clock()
    while True:
        _register_new_sites(server, transport)
        _write_status(server, "gathering")
        waited = server.clock() - began
        if transport.present() & set(server.roster) | server.declined.keys() >= set(
            server.settings.deploy.sites
        ):
            return
        if waited >= server.settings.deploy.wait:
            return
        sleep(POLL)


def _register_new_sites(server: Server, transport: Transport) -> None:
    """Register the sites that have greeted since the last call.

    Those that are refused are in the audit log and the status.
    """
    if greetings := transport.greetings():
        server.welcome(greetings)


def _run_round(
    server: Server, transport: Transport, sleep: Callable[[float], None], evaluate: bool
) -> Outcome | None:
    """Run one round; return its outcome, None if too few sites are present."""
    requests = server.open(transport.present(), evaluate)
    if server.open_round is None:
        return None
    while requests:
        _write_status(server, "waiting")
        transport.send(requests)
        while not server.due():
            came = transport.collect()
            for site, reply in came:
                if isinstance(reply, str):
                    server.failed(site, reply)
                else:
                    server.receive(site, reply)
            if came:
                _write_status(server, "waiting")
            elif not server.due():
                sleep(POLL)
        requests = server.advance()
    return server.close()


def _append_metrics(server: Server, outcome: Outcome, round: int) -> None:
    """Append the metrics of the model after `round` rounds to metrics.jsonl."""
    row: dict[str, Any] = {**outcome.metrics, "round": round}
    row |= {"heard": list(outcome.heard)} if outcome.kind == "train" else {}
    row |= {"unmeasured": outcome.unmeasured} if outcome.unmeasured else {}
    row |= {"stale": outcome.stale} if outcome.stale else {}
    row["residual"] = server.residual
    if spent := server.spent:
        row |= {"epsilon": max(spent.values()), "epsilon_by_site": spent}
    path = server.folder / "metrics.jsonl"
    if path.is_symlink() or not path.exists():  # never write through a link: replace it by a file
        write_private(path, "")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _write_status(
    server: Server, phase: str, unmeasured: dict[str, list[str]] | None = None
) -> None:
    """Write status.json, which `deploy status` displays; replaced atomically."""
    now, wall, current = server.clock(), time.time(), server.open_round
    p, privacy = shares(server.roster), server.settings.privacy
    sites = {
        site: {
            "records": member.records,
            "share": p[site],
            "counted_in_round": member.applied,
            "last_seen": None if site not in server.seen else wall - (now - server.seen[site]),
            "told": member.told,
            "epsilon": member.epsilon,
            "delta": member.delta,
        }
        for site, member in server.roster.items()
    }
    status = {
        "phase": phase,
        "round": server.state.round,
        "rounds": server.settings.rounds,
        "waiting_for": list(server.waiting),
        "opened_at": None if current is None else wall - (now - current.began),
        "failed": {} if current is None else current.failed,
        "exchange": server.exchange,
        "absent": [site for site in server.settings.deploy.sites if site not in server.roster],
        "attempt": server.attempt,
        "residual": server.residual,
        "explained": rounding_bound(server.state) if server.server_keeps else None,
        "precision": server.settings.precision,
        "at": wall,
        "pid": os.getpid(),
        "sites": sites,
        "missed": server.missed,
        "unmeasured": unmeasured or {},
        "warnings": server.warnings,
        "privacy": None if privacy is None else asdict(privacy),
        **read_host(server.folder)._asdict(),
    }
    write_private(server.folder / "status.json", json.dumps(status))

"""The deployment server: runs one round at a time and commits each before the next request is sent.

    open     -> requests        sample a cohort among the sites present, draw one nonce per request,
                                start the deadline
    receive  -> verdict         validate a reply (`gate.py`); a refused reply does not end the round
    due      -> bool            all sites have replied or failed, or the deadline has passed; in
                                asynchronous rounds (`asynchronous.py`) as many as make a step
    advance  -> requests        of the next exchange, where a round has several (`secure_round.py`)
    close    -> outcome         quorum met: aggregate and commit; otherwise the state is unchanged,
                                to be retried

The server is independent of the transport (`server_loop.drive` passes it messages), and its
deadlines use a monotonic clock. It can be killed at any time and resumes from the last commit. Each
request tells the client whether its previous reply was applied (`told`, and the digest of the c_i
it must hold).

With `state = "client"`, a client may lose its c_i or return with an outdated one. Then c would
contain a term that no client holds, so the next round is a resync: every client reports its c_i, c
is recomputed from the reports, and clients that do not report restart from zeros. To bound the
cost, a member that reports a loss more than `FREE` times is excluded from training for 8 rounds,
then 16, 32, ...: at most 3 + log2(R / 4) resyncs of one member in R rounds.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedscaffold import robust
from fedscaffold.algorithms import make
from fedscaffold.algorithms.round import exchange, fitted
from fedscaffold.checks import InputError
from fedscaffold.damping import damping_of
from fedscaffold.deploy import aggregation, gate
from fedscaffold.deploy.aggregation import Member, State
from fedscaffold.deploy.audit import Audit
from fedscaffold.deploy.blocks import is_large, norm, spill
from fedscaffold.deploy.closing import close_round, recompute_means
from fedscaffold.deploy.cohort import quorum_of, sample_sites
from fedscaffold.deploy.gate import Asked, Refused, Update
from fedscaffold.deploy.requests import Asker, Requests
from fedscaffold.deploy.schema import Array, Packet, Schema, fingerprint
from fedscaffold.deploy.secure_vector import smallest_sum, threshold_of
from fedscaffold.deploy.server_state import SavedState, load_state, save_state
from fedscaffold.deploy.settings import Settings
from fedscaffold.metrics import complaint
from fedscaffold.state.files import make_folder
from fedscaffold.state.vectors import remove_vectors

if TYPE_CHECKING:
    from fedscaffold.deploy.secure_round import SecureRound

__all__ = ["Outcome", "Server", "Verdict"]

FREE = 3  # losses of c_i that a member may report before it is excluded: disks do fail
REST = 8  # rounds of the first exclusion; each later one is twice as long
MOST_DOUBLINGS = 32
# share of the total weight above which an unconfirmed number of records is warned about
HEAVY = 0.5
OTHER_MEMORY = "the c_i it reports is not the one that counted last"
REPLIES = "replies"  # folder of the large replies of an open round


class Verdict(NamedTuple):
    """Result of receiving a reply."""

    counted: bool
    reason: str


class Outcome(NamedTuple):
    """Result of a closed round."""

    committed: bool
    kind: str
    round: int
    heard: tuple[str, ...]
    refused: dict[str, str]
    missing: tuple[str, ...]
    metrics: dict[str, float]
    """Weighted means over the clients that replied, measured at the model they were sent."""
    unmeasured: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)
    """By metric: clients where it was not finite, which its mean leaves out."""
    absent: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Sites that could not be asked, and why."""
    stale: dict[str, int] = {}  # noqa: RUF012 (never changed)
    """By site whose reply is to an older model: the steps of the server since."""


class Open(NamedTuple):
    """An open round."""

    kind: str
    asked: dict[str, Asked]
    updates: dict[str, Update]
    failed: dict[str, str]
    began: float
    need: int
    absent: dict[str, str]
    """Sites that could not be asked, and why."""
    secure: SecureRound | None = None
    """The sum of a round whose replies the server does not see; `asked` and `updates` are then
    those of its present exchange."""


class Server:
    """The server's side of the protocol.

    Args:
        settings: The deployment's settings; `deploy.sites` must not be empty.
        schema: The arrays of the model.
        start: The initial model, used when `folder` holds no state.
        folder: Folder of the committed state and the audit log.
        buffers: Initial values of the arrays that the model keeps but does not train.
        clock: Monotonic clock in seconds.
        token: Seed of the run id and the nonces; random by default.

    Attributes:
        state: The last committed state.
        residual: |c - sum p_i c_i|; None where clients keep the c_i, which the server then does not
            know.
        resync: Whether the next round recomputes c from the clients' c_i.
        attempt: Rounds that missed their quorum since the last one that was committed, resyncs
            apart.
        at_work: Between asynchronous rounds, what is expected of the sites that are at work.
        seen: When each site was last heard of, by `clock`.
        declined: Why sites that have greeted were not admitted.
    """

    def __init__(
        self,
        settings: Settings,
        schema: Schema,
        start: Array,
        folder: Path,
        buffers: dict[str, Array] | None = None,
        clock: Callable[[], float] = time.monotonic,
        token: str | None = None,
    ) -> None:
        if not settings.deploy.sites:
            raise InputError("deploy.sites must name the sites that may take part")
        self.settings, self.schema, self.folder, self.clock = settings, schema, Path(folder), clock
        self.algorithm = fitted(make(**settings.algorithm), schema)
        self.filter = robust.of(settings.robust)
        if self.filter is not None and schema.buffers and settings.local.buffers == "average":
            raise InputError(
                "robust does not see the buffers of the model, which are averaged: write "
                'local.buffers = "local"'
            )
        self.server_keeps = settings.deploy.state == "server"
        self.clients_keep = not self.server_keeps and self.algorithm.has_memory
        # nonces differ between restarts
        self.token = secrets.token_hex(8) if token is None else token
        self.open_round: Open | None = None
        self.at_work: dict[str, Asked] = {}
        self.attempt = self.lives = 0
        self.seen: dict[str, float] = {}
        self.untrained = dict(buffers or {})
        if not {row[0] for row in (*schema.buffers, *schema.frozen)} <= self.untrained.keys():
            raise InputError(
                "the model keeps arrays that are not trained; give the server "
                "buffers=learner.buffers"
            )
        if is_large(schema.size):
            make_folder(self.folder / REPLIES, private=True)
            remove_vectors(self.folder / REPLIES, ())  # of a process that was killed
        kept = load_state(self.folder / "state", settings, schema)
        if kept is None:
            x = np.asarray(start, settings.precision)
            averaged = schema.buffers if settings.local.buffers == "average" else ()
            state = aggregation.initial_state(
                self.algorithm, x, {name: self.untrained[name] for name, *_ in averaged}
            )
            kept = SavedState(state, secrets.token_hex(8) if token is None else token, 0, False, ())
        self.audit = Audit(self.folder / "audit.jsonl", kept.audit)
        self.declined: dict[str, str] = {}
        for warning in kept.warnings:
            self.audit.write("fallback", note=warning)
        for change in kept.changes:
            self.audit.write("settings", round=kept.state.round, note=change)
        self.state, self.run, self.generation = kept.state, kept.run, kept.generation
        self.asker = Asker(settings, schema, self.algorithm, self.run)
        self.residual = (
            aggregation.residual(self.algorithm, self.state) if self.server_keeps else None
        )
        self.resync = kept.resync and self.clients_keep
        self.behind = self._rounds_lost()
        if self.behind:
            self.audit.write("behind", round=self.state.round, note=self.behind)
        self.audit.write(
            "started", run=self.run, round=self.state.round, algorithm=self.algorithm.name
        )
        if self.fault is not None:
            self.audit.write("unsound", round=self.state.round, note=self.fault)
        if self.audit.broken:
            self._commit(self.state, self.resync)  # the state now refers to the new log

    def _rounds_lost(self) -> str:
        """Return what the log knows of that the state does not; "" if there is nothing."""
        known, round = self.audit.round, self.state.round
        if known <= round + 1:  # a crash explains a difference of one
            return ""
        lost = "is gone: training began anew"
        if round:
            lost = f"is that of round {round}: an older one was put back"
        return f"the log knows of {known} rounds, and the state {lost}"

    # Membership

    def hello(self, site: str, packet: Packet) -> None:
        """Register a site, or renew its registration, between rounds.

        Args:
            site: The site's name.
            packet: Its greeting.

        Raises:
            Refused: If the site may not take part.
        """
        for refusal in self.welcome({site: packet}).values():
            raise refusal

    def welcome(self, greetings: Mapping[str, Packet]) -> dict[str, Refused]:
        """Register several sites between rounds, by one commit.

        Args:
            greetings: By site, its greeting.

        Returns:
            By site that may not take part, why.
        """
        self._require_idle()
        state, resync, refused = self.state, self.resync, {}
        for site, packet in sorted(greetings.items()):
            try:
                records = self._check_greeting(site, packet)
            except Refused as refusal:
                refused[site] = refusal
                continue
            old = state.roster.get(site)
            mass = float(records) if self.settings.weights == "records" else 1.0
            if old is not None and (old.records, old.mass) == (records, mass):
                continue
            new = Member(records, mass) if old is None else old._replace(records=records, mass=mass)
            # a new mass rescales a c_i that only the client holds, so c must be recomputed
            resync |= (
                self.clients_keep and old is not None and old.mass != mass and old.digest != ""
            )
            state = aggregation.add_member(self.algorithm, state, site, new)
            event = "joined" if old is None else "changed"
            self.audit.write(event, site=site, records=records, members=len(state.roster))
        if state is not self.state:
            self._commit(state, resync)
        return refused

    def _check_greeting(self, site: str, packet: Packet) -> int:
        """Return a site's number of records; log and raise `Refused` if it may not take part."""
        old = self.roster.get(site)
        try:
            before = None if old is None else old.records
            records = gate.check_greeting(packet, site, self.schema, self.settings, before)
        except Refused as refusal:
            if site in self.settings.deploy.sites:
                # the site's own report
                cause = self.declined[site] = str(refusal).removeprefix("failed: ")
                self.audit.write(
                    "refused",
                    site=site,
                    code=refusal.code,
                    reason=cause,
                    round=self.state.round + 1,
                )
            else:
                self.audit.write("refused", site=site, code=refusal.code, reason=str(refusal))
            raise
        self.seen[site] = self.clock()
        self.declined.pop(site, None)
        return records

    def leave(self, site: str) -> None:
        """Remove a member between rounds; if only it holds its c_i, a resync follows."""
        self._require_idle()
        member = self.state.roster.get(site)
        if member is None:
            raise InputError(
                f"{site!r} is not in the roster; members: "
                f"{', '.join(sorted(self.roster)) or 'none'}"
            )
        self.at_work.pop(site, None)
        state = aggregation.remove_member(self.algorithm, self.state, site)
        self.audit.write("left", site=site, members=len(state.roster))
        self._commit(state, self.resync or (self.clients_keep and member.digest != ""))

    @property
    def buffer(self) -> int | None:
        """Replies that make a step in asynchronous rounds; None in synchronous ones."""
        return self.settings.deploy.buffer

    @property
    def roster(self) -> dict[str, Member]:
        """Members by site."""
        return self.state.roster

    @property
    def spent(self) -> dict[str, float]:
        """The epsilon of each private member, by its own word."""
        members = sorted(self.roster.items())
        return {site: one.epsilon for site, one in members if one.epsilon is not None}

    @property
    def fault(self) -> str | None:
        """A message if the residual exceeds what rounding explains, else None."""
        if self.residual is None:
            return None
        return complaint(self.state.round, self.residual, aggregation.rounding_bound(self.state))

    @property
    def warnings(self) -> list[str]:
        """Warnings for the operator, one sentence each."""
        deploy, p = self.settings.deploy, aggregation.shares(self.roster)
        out: list[str] = []
        if self.filter is not None:
            out += [
                f"{site} has {share:.0%} of all weight, and robust = {self.filter.name!r} trusts "
                "whoever has that much"
                for site, share in sorted(p.items())
                if share > self.filter.most and len(p) > 1
            ]
        elif deploy.clip is None:
            out.append("deploy.clip is off: nothing bounds how far one site moves the model")
        if self.settings.weights == "records" and len(p) > 2:
            out += [
                f"{site} has {share:.0%} of all weight by its own word: confirm its records under "
                "[deploy.records]"
                for site, share in sorted(p.items())
                if share > HEAVY and site not in deploy.records
            ]
        out += [
            f"{site} has lost its c_i {member.lost} times and is not asked before round "
            f"{member.rests + 1}"
            for site, member in sorted(self.roster.items())
            if member.rests > self.state.round
        ]
        notes = (self.fault, self.behind, self.audit.broken, self.audit.trouble)
        return out + [message for message in notes if message]

    @property
    def missed(self) -> dict[str, dict[str, object]]:
        """By site that missed a round: the last time, the cause, and a `sentence` for display."""
        never = {
            site: not (site in self.roster and self.roster[site].applied)
            for site in self.settings.deploy.sites
        }
        return {
            site: {
                **missed._asdict(),
                "never_counted": never[site],
                "sentence": missed.sentence(site, never[site]),
            }
            for site, missed in sorted(self.audit.missed.items())
            if site in never
        }

    # Rounds

    def open(self, present: Collection[str], evaluate: bool = False) -> Mapping[str, Packet]:
        """Open a round.

        Args:
            present: Sites that can be reached.
            evaluate: Measure the model at every member instead of training.

        Returns:
            Requests by site that has no task yet, each made when it is asked for. No round is open
            afterwards if too few members are present for the quorum.
        """
        self._require_idle()
        deploy, roster, share = self.settings.deploy, self.roster, self.settings.cohort
        here = [site for site in deploy.sites if site in roster and site in present]
        absent = {
            site: self.declined.get(
                site, "its node is not online" if site in roster else "it has not joined"
            )
            for site in deploy.sites
            if site not in here
        }
        kind = "evaluate" if evaluate else "resync" if self.resync else "train"
        working, steps_on = self._continue_tasks(kind), kind == "train" and self.buffer is not None
        size = sum(site in roster for site in deploy.sites)
        if kind == "train":
            size = min(size, share) if isinstance(share, int) else max(1, round(share * size))
        need = quorum_of(self.settings, kind, size, len(here))
        if len({*here, *working}) < need:
            self.attempt += 1
            self.audit.write(
                "waiting", round=self.state.round + 1, present=here, quorum=need, absent=absent
            )
            return {}
        awake = [site for site in here if kind != "train" or roster[site].rests <= self.state.round]
        among = [site for site in (awake if len(awake) >= need else here) if site not in working]
        size = max(0, size - len(working))
        cohort = sample_sites(among, size, self.settings.seed, self.state.round, self.attempt)
        self.lives += 1
        secure = self._open_secure(kind, len(cohort), need) if deploy.secure else None
        requests, expected = self._ask(kind, cohort, secure)
        if steps_on:
            now, sent = self.clock(), self.state.server
            begun = {site: reply._replace(began=now, sent=sent) for site, reply in expected.items()}
            expected = working | begun
        self.open_round = Open(
            kind=kind,
            asked=expected,
            updates={},
            failed={},
            began=self.clock(),
            need=need,
            absent=absent,
            secure=secure,
        )
        self.audit.write(
            "opened", round=self.state.round + 1, kind=kind, cohort=cohort, attempt=self.attempt
        )
        return requests

    def _continue_tasks(self, kind: str) -> dict[str, Asked]:
        """Return what is expected of sites at work; tasks that are too old are given up.

        So are all tasks before a round of another kind.
        """
        working, since = self.at_work, self.clock() - self.settings.deploy.deadline
        self.at_work = {
            site: asked
            for site, asked in working.items()
            if kind == "train" and asked.began is not None and asked.began > since
        }
        for site in working.keys() - self.at_work.keys():
            self._set_told(site, f"too late: its task of round {working[site].round} was given up")
        return self.at_work

    def receive(self, site: str, packet: Packet) -> Verdict:
        """Validate a reply and add it to the open round.

        An invalid reply is refused and logged, not raised.
        """
        self.seen[site] = self.clock()
        current = self.open_round
        try:
            if site not in self.roster:
                raise Refused("stranger", f"{site!r} is not in the roster")
            if current is None or site not in current.asked:
                raise Refused(
                    "late", "no reply of it is awaited: the round is closed, or went to others"
                )
            if current.secure is not None and site in current.updates:
                return Verdict(True, "already here: counted once")  # and cannot be taken out
            if gate.read_text(packet.facts, "kind", "") in ("lost", "lost own", "refusal"):
                gate.check_fresh(packet, current.asked[site])
                return self._handle_decline(site, packet, current)
            update = gate.admit(packet, current.asked[site])
            if site in current.updates:
                return Verdict(True, "already here: counted once")
            current.failed.pop(site, None)
            current.updates[site] = self._spill(self._check_update(site, update, current))
            if update.spent is not None:
                self.roster[site] = self.roster[site]._replace(**update.spent._asdict())
            return Verdict(True, "")
        except Refused as refusal:
            self._refuse(site, refusal)
            return Verdict(False, str(refusal))

    def failed(self, site: str, reason: str) -> None:
        """Record that the transport could not deliver a reply of `site`."""
        current = self.open_round
        if current is not None and site in current.asked and site not in current.updates:
            current.failed.setdefault(site, reason)
            self.audit.write("failed", site=site, round=self.state.round + 1, reason=reason[:300])

    @property
    def waiting(self) -> tuple[str, ...]:
        """Sites of the open round that have neither replied nor failed."""
        current = self.open_round
        if current is None:
            return ()
        return tuple(s for s in current.asked if s not in current.updates | current.failed)

    @property
    def exchange(self) -> str:
        """The present exchange of a secure sum; "" in other rounds, and between rounds."""
        current = self.open_round
        return "" if current is None or current.secure is None else current.secure.exchange

    @property
    def awaited(self) -> tuple[str, ...]:
        """Sites of the open round that may still reply before their deadline."""
        current = self.open_round
        if current is None:
            return ()
        since = self.clock() - self.settings.deploy.deadline
        begun = {site: current.asked[site].began for site in self.waiting}
        return tuple(s for s, at in begun.items() if (current.began if at is None else at) > since)

    def due(self) -> bool:
        """Return whether to close the open round: nobody is awaited, or a step can be made."""
        current = self.open_round
        full = (
            current is not None
            and current.kind == "train"
            and self.buffer is not None
            and len(current.updates) >= self.buffer
        )
        return full or not self.awaited

    def advance(self) -> Mapping[str, Packet]:
        """Go on to the next exchange of the open round.

        Returns:
            Requests by site; empty where the round has no further exchange, or too few sites for
            it: then it is to be closed.
        """
        current = self.open_round
        if current is None or current.secure is None:
            return {}
        before, late = current.secure.exchange, self.waiting
        sites = current.secure.advance(current.updates)
        if not sites:
            return {}
        for site in late:
            self.failed(site, f"no reply before the deadline (exchange {before!r})")
        requests, expected = self._ask(current.kind, sites, current.secure)
        self.open_round = current._replace(asked=expected, updates={}, began=self.clock())
        return requests

    def close(self) -> Outcome:
        """Close the round: commit it if the quorum is met, otherwise leave the state unchanged."""
        current = self.open_round
        if current is None:
            raise RuntimeError("no round is open")
        if current.secure is not None:
            current = self.open_round = self._finish_secure(current, current.secure)
        kind, missing = current.kind, self.waiting
        if kind == "train" and self.buffer is not None:
            self.at_work = {site: current.asked[site] for site in self.awaited}
            missing = tuple(site for site in missing if site not in self.at_work)
        state, residual = self._next_state(current)
        committed = state is not None
        number = self.state.round + 1 if state is None else state.round
        for site in missing:
            self._set_told(site, f"too late for round {number}: it was closed without you", state)
        metrics, unmeasured = self._mean_metrics(current) if committed else ({}, {})
        self.open_round = None
        if not committed:
            self.attempt += 1
        elif kind != "resync":
            # else a site that loses its c_i in every round would be asked for ever
            self.attempt = 0
        outcome = Outcome(
            committed=committed,
            kind=kind,
            round=number,
            heard=tuple(sorted(current.updates)),
            refused=dict(current.failed),
            missing=missing,
            metrics=metrics,
            unmeasured=unmeasured,
            absent=current.absent,
            stale=self._staleness(current) if committed else {},
        )
        # Logged before the commit, which stores the log's head: a crash in between leaves a log
        # longer than its head, which is valid. So an evaluation commits too.
        self._log_closed(outcome, residual)
        resync = self.resync and not (committed and kind == "resync")
        self._commit(state or self.state, resync, residual)
        return outcome

    def _log_closed(self, outcome: Outcome, residual: float | None) -> None:
        """Write the outcome of a round to the audit log."""
        done = "evaluated" if outcome.kind == "evaluate" else "committed"
        facts: dict[str, object] = {
            "heard": list(outcome.heard),
            "failed": outcome.refused,
            "missing": list(outcome.missing),
            "absent": outcome.absent,
        }
        if outcome.unmeasured:
            facts["unmeasured"] = outcome.unmeasured
        if outcome.stale:
            facts["stale"] = outcome.stale
        if outcome.committed:
            facts["residual"] = residual
        if spent := self.spent:
            facts["epsilon"] = spent
        event = done if outcome.committed else "abandoned"
        self.audit.write(event, round=outcome.round, kind=outcome.kind, **facts)

    # Internals

    def _mean_metrics(self, current: Open) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the mean metrics of a round, and by metric the sites without it."""
        if current.secure is not None:
            return current.secure.metrics
        return aggregation.mean_metrics(self.roster, current.updates)

    def _open_secure(self, kind: str, cohort: int, need: int) -> SecureRound:
        """Return the sum of a new round."""
        from fedscaffold.deploy.secure_round import SecureRound
        from fedscaffold.deploy.secure_rules import IDENTITIES, read_identities

        return SecureRound(
            self.settings,
            self.schema,
            self.algorithm,
            read_identities(self.folder / IDENTITIES),
            self.asker.common_facts(kind, self.state.round + 1),
            # sites of a kit refuse sums of fewer than half of a whole cohort, also if some are away
            max(threshold_of(self.settings, cohort), min(cohort, smallest_sum(self.settings))),
            need,
        )

    def _finish_secure(self, current: Open, secure: SecureRound) -> Open:
        """Return the round with the sites that its sum is of, if it could be unmasked."""
        masses = {site: member.mass for site, member in self.roster.items()}
        for site, refusal in secure.finish(masses).items():
            self._refuse(site, refusal)
            if secure.means is None:  # a new attempt is made without it
                rests = self.state.round + REST
                self.roster[site] = self.roster[site]._replace(rests=rests)
        if secure.trouble:
            self.audit.write("garbage", round=self.state.round + 1, note=secure.trouble)
            in_vain = dict.fromkeys(current.updates, secure.trouble)
            return current._replace(updates={}, failed={**current.failed, **in_vain})
        if secure.means is None:
            return current
        failed = {site: why for site, why in current.failed.items() if site not in secure.updates}
        return current._replace(asked={}, updates=dict(secure.updates), failed=failed)

    def _require_idle(self) -> None:
        if self.open_round is not None:
            raise RuntimeError("a round is open; close it first")

    def _ask(
        self, kind: str, sites: Iterable[str], secure: SecureRound | None
    ) -> tuple[Requests, dict[str, Asked]]:
        """Return requests, and by site the reply expected.

        Their nonces are unique to this attempt and server process, and to the exchange of a
        `secure` sum.
        """
        step = "" if secure is None else secure.exchange
        words = f"{self.run} {self.token} {self.attempt} {self.lives} {self.state.round + 1} {kind}"
        nonces = {
            site: hashlib.sha256(f"{words} {site} {step}".encode()).hexdigest()[:16]
            for site in sites
        }
        return self.asker.ask(kind, self.state, nonces, secure)

    def _refuse(self, site: str, refusal: Refused, state: State | None = None) -> None:
        """Record a refused reply in the round, the log and the sender's next request."""
        current = self.open_round
        if current is not None and site in current.asked and refusal.code not in ("stale", "late"):
            current.failed.setdefault(site, str(refusal))
            current.updates.pop(site, None)
        self._set_told(site, f"refused, {refusal}", state)
        self.audit.write("refused", site=site, code=refusal.code, reason=str(refusal))

    def _set_told(self, site: str, told: str, state: State | None = None) -> None:
        """Set what a member is told with its next request."""
        roster = (state or self.state).roster
        if site in roster:
            roster[site] = roster[site]._replace(told=told)

    def _handle_decline(self, site: str, packet: Packet, current: Open) -> Verdict:
        """Handle a reply by which a client declines the request or reports lost state."""
        reason = gate.read_printable(packet.facts, "reason")
        if packet.facts["kind"] == "lost own" and self.roster[site].own:
            self.audit.write("lost", site=site, round=self.state.round + 1, reason=reason)
            # private state restarts; no one else depends on it
            self.roster[site] = self.roster[site]._replace(own="")
        counts = self.clients_keep and site not in current.updates and current.kind != "evaluate"
        if packet.facts["kind"] == "lost" and counts:
            if not self.roster[site].digest:
                raise Refused(
                    "implausible", "it says that its c_i is lost where zeros are expected of it"
                )
            self.audit.write("lost", site=site, round=self.state.round + 1, reason=reason)
            if current.kind == "resync":  # a valid answer: the client restarts from zeros
                current.updates[site] = Update({}, 0.0, {})
                return Verdict(True, reason)
            if site not in current.failed:
                lost = self.roster[site].lost + 1
                self.roster[site] = self.roster[site]._replace(lost=lost)
                if lost > FREE:
                    until = self.state.round + 1 + REST * 2 ** min(lost - FREE - 1, MOST_DOUBLINGS)
                    self.roster[site] = self.roster[site]._replace(rests=until)
                    self.audit.write("resting", site=site, lost=lost, until=until)
            self.resync = True
        self.failed(site, reason)
        return Verdict(False, reason)

    def _check_update(self, site: str, update: Update, current: Open) -> Update:
        """Check the digests of an admitted reply; measure and clip its update."""
        kind, secure, digest = current.kind, current.secure, self.roster[site].digest
        if kind == "train" and (secure is None or secure.exchange == "masked"):
            gate.check_digests(update, self.clients_keep, self.algorithm.has_own)
        if secure is not None:
            lies = update.memory not in ("", digest)  # "" if it is lost
            if kind == "resync" and secure.exchange == "masked" and lies:
                raise Refused("implausible", OTHER_MEMORY)
            return secure.add(site, update)
        if kind == "resync":
            memory = tuple(update.vectors.values())
            if (fingerprint(memory) != digest) if digest else any(map(np.any, memory)):
                raise Refused("implausible", OTHER_MEMORY)
            return update._replace(length=math.hypot(*map(norm, memory)))
        return self._measure(site, update, current) if kind == "train" else update

    def _measure(self, site: str, update: Update, current: Open) -> Update:
        """Measure and clip an update."""
        clip, most, asked = self.settings.deploy.clip, update.travel, current.asked[site]
        if exchange(self.algorithm).travel:  # scaled per step, by others' steps
            most = max(other.lr * other.most_steps for other in current.asked.values())
        if asked.sent is not None:
            update = update._replace(sent=asked.sent, damping=self._damping(asked))
        sent = self.state.server if update.sent is None else update.sent
        measured = aggregation.measure(update, self.algorithm, sent, most, clip)
        if measured.clipped:
            self.audit.write(
                "clipped", site=site, round=self.state.round + 1, norm=measured.clipped, cap=clip
            )
        return measured

    def _damping(self, asked: Asked) -> float:
        """Return by how much the move of a reply counts in this round."""
        damping = damping_of(self.settings.deploy.staleness)
        late = np.array(self.state.round + 1 - asked.round)
        return 1.0 if damping is None else float(damping(late))

    def _staleness(self, current: Open) -> dict[str, int]:
        """Return how many steps late the replies of an asynchronous round are, where they are."""
        if current.kind != "train" or self.buffer is None:
            return {}
        late = {site: self.state.round + 1 - current.asked[site].round for site in current.updates}
        return {site: steps for site, steps in sorted(late.items()) if steps}

    def _spill(self, update: Update) -> Update:
        """Move the vectors of a large model's reply to files, which end with the update."""
        if not is_large(self.schema.size):
            return update
        folder = self.folder / REPLIES
        return update._replace(
            vectors={
                name: spill(value, folder) if value.ndim else value
                for name, value in update.vectors.items()
            }
        )

    def _next_state(self, current: Open) -> tuple[State | None, float | None]:
        """Return the state after the round and its residual; None below the quorum."""
        if current.secure is not None:
            return self._state_of_sum(current.kind, current.secure), self.residual
        if current.kind == "evaluate":
            return self.state if len(current.updates) >= current.need else None, self.residual
        state, refused = close_round(
            self.algorithm,
            self.state,
            current.kind,
            current.updates,
            current.need,
            self.filter,
            self.server_keeps,
            self.folder / "state",
        )
        for site, refusal in refused.items():
            self._refuse(site, refusal, state)
        if state is None or not self.server_keeps:
            return state, self.residual
        state, residual, before = recompute_means(self.algorithm, state)
        if before is not None:
            self.audit.write("remade", round=state.round, residual=before)
        return state, residual

    def _state_of_sum(self, kind: str, secure: SecureRound) -> State | None:
        """Return the state after the round of a secure sum; None without one."""
        from fedscaffold.deploy.secure_round import apply_means, apply_resync

        if secure.means is None:
            return None
        if kind == "evaluate":
            return self.state
        with np.errstate(over="ignore", invalid="ignore"):
            if kind == "resync":
                state = apply_resync(self.schema, self.algorithm, self.state, secure)
            else:
                state = apply_means(self.settings, self.schema, self.algorithm, self.state, secure)
        if (what := aggregation.find_nonfinite(state)) is None:
            return state
        self.audit.write("garbage", round=self.state.round + 1, note=f"{what} would not be finite")
        return None

    def _commit(self, state: State, resync: bool, residual: float | None = None) -> None:
        """Commit a state durably; its residual is computed unless given."""
        resync = resync and self.clients_keep
        kept = SavedState(
            state, self.run, self.generation, resync, (), self.audit.head, self.algorithm.means
        )
        self.generation = save_state(self.folder / "state", kept, self.settings, self.schema)
        if residual is None and self.server_keeps:
            residual = aggregation.residual(self.algorithm, state)
        self.state, self.resync, self.residual = state, resync, residual

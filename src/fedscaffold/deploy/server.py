"""The deployment server: runs one round at a time and commits each before the next request is sent.

    open     -> requests        sample a cohort among the sites present, draw one nonce per request, start the deadline
    receive  -> verdict         validate a reply (`gate.py`); a refused reply does not end the round
    due      -> bool            all sites have replied or failed, or the deadline has passed
    close    -> outcome         quorum met: aggregate and commit; otherwise the state is unchanged, to be retried

The server is independent of the transport (`server_loop.drive` passes it messages), and its deadlines use a monotonic
clock. It can be killed at any time and resumes from the last commit. Each request tells the client whether its
previous reply was applied (`told`, and the digest of the c_i it must hold).

With `state = "client"`, a client may lose its c_i or return with an outdated one. Then c would contain a term that no
client holds, so the next round is a resync: every client reports its c_i, c is recomputed from the reports, and clients
that do not report restart from zeros. To bound the cost, a member that reports a loss more than `FREE` times is
excluded from training for 8 rounds, then 16, 32, ...: at most 3 + log2(R / 4) resyncs of one member in R rounds.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from fedscaffold.algorithms.round import exchange, fitted
from fedscaffold.checks import InputError
from fedscaffold.deploy import aggregation, gate, messages, site_sampling
from fedscaffold.deploy.aggregation import Member, State
from fedscaffold.deploy.attendance import Attendance
from fedscaffold.deploy.audit import Audit, read_verified
from fedscaffold.deploy.gate import Reach, Refused, Update
from fedscaffold.deploy.outcomes import Open, Outcome, Verdict
from fedscaffold.deploy.record_arithmetic import Record, blank_memory, flatten
from fedscaffold.deploy.schema import Array, Packet, Schema, fingerprint
from fedscaffold.deploy.server_state import SavedState, load_state, save_state
from fedscaffold.deploy.settings import Settings, algorithm_of
from fedscaffold.metrics import complaint

__all__ = ["Outcome", "Server", "Verdict"]

FREE = 3  # losses of c_i that a member may report before it is excluded: disks do fail
REST = 8  # rounds of the first exclusion; each later one is twice as long
MOST_DOUBLINGS = 32
DIGEST = re.compile(r"[0-9a-f]{32}")
HEAVY = 0.5  # share of the total weight above which an unconfirmed number of records is warned about


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
        resync: Whether the next round recomputes c from the clients' c_i.
        attempt: Rounds that missed their quorum since the last one that was committed, resyncs apart.
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
        self.algorithm = fitted(algorithm_of(settings), schema)
        self.server_keeps = settings.deploy.state == "server"
        self.clients_keep = not self.server_keeps and self.algorithm.remember is not None
        self.token = secrets.token_hex(8) if token is None else token  # nonces differ between restarts
        self.open_round: Open | None = None
        self.attempt = self.lives = 0
        self.seen: dict[str, float] = {}
        self._residual_cache: tuple[State, float] | None = None
        self.untrained = dict(buffers or {})
        if not {row[0] for row in (*schema.buffers, *schema.frozen)} <= self.untrained.keys():
            raise InputError("the model keeps arrays that are not trained; give the server buffers=learner.buffers")
        kept = load_state(self.folder / "state", settings, schema)
        if kept is None:
            x = np.asarray(start, settings.precision)
            averaged = schema.buffers if settings.local.buffers == "average" else ()
            state = aggregation.initial_state(self.algorithm, x, {name: self.untrained[name] for name, *_ in averaged})
            kept = SavedState(state, secrets.token_hex(8) if token is None else token, 0, False, ())
        self.audit = Audit(self.folder / "audit.jsonl", kept.audit)
        events = read_verified(self.audit.path)
        self.attendance = Attendance(events)
        self.declined: dict[str, str] = {}
        for warning in kept.warnings:
            self.audit.write("fallback", note=warning)
        self.state, self.run, self.generation = kept.state, kept.run, kept.generation
        self.resync = kept.resync and self.clients_keep
        self.behind = _rollback_warning(events, self.state.round)
        if self.behind:
            self.audit.write("behind", round=self.state.round, note=self.behind)
        self.audit.write("started", run=self.run, round=self.state.round, algorithm=self.algorithm.name)
        if self.fault is not None:
            self.audit.write("unsound", round=self.state.round, note=self.fault)
        if self.audit.broken:
            self._commit(self.state, self.resync)  # the state now refers to the new log

    # Membership

    def hello(self, site: str, packet: Packet) -> None:
        """Register a site, or renew its registration, between rounds.

        Args:
            site: The site's name.
            packet: Its greeting.

        Raises:
            Refused: If the site may not take part.
        """
        self._require_idle()
        try:
            records = self._check_registration(site, packet)
        except Refused as refusal:
            if site in self.settings.deploy.sites:
                cause = self.declined[site] = str(refusal).removeprefix("failed: ")  # the site's own report
                self._log("refused", site=site, code=refusal.code, reason=cause, round=self.state.round + 1)
            else:
                self.audit.write("refused", site=site, code=refusal.code, reason=str(refusal))
            raise
        self.seen[site] = self.clock()
        self.declined.pop(site, None)
        mass = float(records) if self.settings.weights == "records" else 1.0
        old = self.state.roster.get(site)
        if old is not None and (old.records, old.mass) == (records, mass):
            return
        member = Member(records, mass) if old is None else old._replace(records=records, mass=mass)
        # a new mass rescales a c_i that only the client holds, so c must be recomputed
        moved = self.clients_keep and old is not None and old.mass != mass and old.digest != ""
        state = aggregation.add_member(self.algorithm, self.state, site, member)
        self.audit.write("joined" if old is None else "changed", site=site, records=records, members=len(state.roster))
        self._commit(state, self.resync or moved)

    def leave(self, site: str, memory: Record = None) -> None:
        """Remove a site from the roster between rounds.

        Args:
            site: A member.
            memory: The client's own memory, where clients keep it; without it a resync follows.
        """
        self._require_idle()
        member = self.state.roster.get(site)
        if member is None:
            raise InputError(f"{site!r} is not in the roster; members: {', '.join(sorted(self.roster)) or 'none'}")
        told = None if memory is None else flatten(memory)
        known = self.server_keeps or not member.digest or fingerprint(told) == member.digest
        state = aggregation.remove_member(self.algorithm, self.state, site, memory if known else None)
        self.audit.write("left", site=site, members=len(state.roster))
        self._commit(state, self.resync or not known)

    @property
    def roster(self) -> dict[str, Member]:
        """Members by site."""
        return self.state.roster

    @property
    def residual(self) -> float | None:
        """|c - sum p_i c_i|; None where clients keep the c_i, which the server then does not know."""
        return self._residual_of(self.state)

    @property
    def fault(self) -> str | None:
        """A message if the residual exceeds what rounding explains, else None."""
        gap = self.residual
        return None if gap is None else complaint(self.state.round, gap, aggregation.rounding_bound(self.state))

    @property
    def warnings(self) -> list[str]:
        """Warnings for the operator, one sentence each."""
        deploy, p = self.settings.deploy, aggregation.shares(self.roster)
        out: list[str] = []
        if deploy.clip is None:
            out.append("deploy.clip is off: nothing bounds how far one site moves the model")
        if self.settings.weights == "records" and len(p) > 2:
            out += [
                f"{site} has {share:.0%} of all weight by its own word: confirm its records under [deploy.records]"
                for site, share in sorted(p.items())
                if share > HEAVY and site not in deploy.records
            ]
        out += [
            f"{site} has lost its c_i {member.lost} times and is not asked before round {member.rests + 1}"
            for site, member in sorted(self.roster.items())
            if member.rests > self.state.round
        ]
        notes = (self.fault, self.behind, self.audit.broken, self.audit.trouble)
        return out + [message for message in notes if message]

    @property
    def never(self) -> list[str]:
        """Sites that were due in some round and have not counted in any."""
        counted = {site for site, member in self.roster.items() if member.applied}
        return [site for site in self.settings.deploy.sites if site in self.attendance.missed and site not in counted]

    @property
    def missed(self) -> dict[str, dict[str, object]]:
        """By site that missed a round: the last time, the cause, and a `sentence` for display."""
        never = self.never
        return {
            site: {**missed._asdict(), "never_counted": site in never, "sentence": missed.sentence(site, site in never)}
            for site, missed in sorted(self.attendance.missed.items())
            if site in self.settings.deploy.sites
        }

    # Rounds

    def open(self, present: Collection[str], evaluate: bool = False) -> dict[str, Packet]:
        """Open a round.

        Args:
            present: Sites that can be reached.
            evaluate: Measure the model at every member instead of training.

        Returns:
            Requests by site; empty if too few members are present for the quorum.
        """
        self._require_idle()
        members = [site for site in self.settings.deploy.sites if site in self.roster]
        here = [site for site in members if site in present]
        kind = "evaluate" if evaluate else "resync" if self.resync else "train"
        size = site_sampling.cohort_size(self.settings.cohort, len(members)) if kind == "train" else len(members)
        need = 1 if evaluate else site_sampling.quorum_size(self.settings.deploy.quorum, size)
        absent = self._absent(here)
        if len(here) < max(need, 1):
            self.attempt += 1
            self._log("waiting", round=self.state.round + 1, present=here, quorum=need, absent=absent)
            return {}
        awake = [site for site in here if kind != "train" or self.roster[site].rests <= self.state.round]
        cohort = site_sampling.sample_sites(
            awake if len(awake) >= max(need, 1) else here, size, self.settings.seed, self.state.round, self.attempt
        )
        life = f"{self.run} {self.token} {self.attempt} {self.lives}"
        self.lives += 1
        told = self.state, self.schema, self.settings, self.algorithm
        asked = {site: messages.make_asked(site, kind, *told, life) for site in cohort}
        self.open_round = Open(kind, asked, {}, {}, self.clock(), need, absent)
        self.audit.write("opened", round=self.state.round + 1, kind=kind, cohort=cohort, attempt=self.attempt)
        return {
            site: messages.make_request(asked[site], kind, self.run, self.state, self.settings, self.algorithm)
            for site in cohort
        }

    def receive(self, site: str, packet: Packet) -> Verdict:
        """Validate a reply and add it to the open round; an invalid one is refused and logged, not raised."""
        self.seen[site] = self.clock()
        try:
            return self._admit(site, packet)
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
        return () if current is None else tuple(s for s in current.asked if s not in current.updates | current.failed)

    def due(self) -> bool:
        """Whether the open round should be closed: no site is awaited, or the deadline has passed."""
        current = self.open_round
        late = current is not None and self.clock() - current.began >= self.settings.deploy.deadline
        return late or not self.waiting

    def close(self) -> Outcome:
        """Close the round: commit it if the quorum is met, otherwise leave the state unchanged."""
        current = self.open_round
        if current is None:
            raise RuntimeError("no round is open")
        missing, state = self.waiting, self._next_state(current)
        heard, committed = tuple(sorted(current.updates)), state is not None
        number = self.state.round + 1 if state is None else state.round
        for site in missing:
            self._set_told(site, f"too late for round {number}: it was closed without you", state)
        done = "evaluated" if current.kind == "evaluate" else "committed"
        event = done if committed else "abandoned"
        gauge = {} if state is None else {"residual": self._residual_of(state)}
        facts = {"heard": list(heard), "failed": current.failed, "missing": list(missing), "absent": current.absent}
        self.open_round = None
        if not committed:
            self.attempt += 1
        elif current.kind != "resync":  # else a site that loses its c_i in every round would be asked for ever
            self.attempt = 0
        metrics, unmeasured = self._mean_metrics(current) if committed else ({}, {})
        # Logged before the commit, which stores the log's head: a crash in between leaves a log longer than its head,
        # which is valid.
        facts |= {"unmeasured": unmeasured} if unmeasured else {}
        self._log(event, round=number, kind=current.kind, **facts, **gauge)
        self._commit(state or self.state, self.resync and not (committed and current.kind == "resync"))
        failed = dict(current.failed)
        return Outcome(committed, current.kind, number, heard, failed, missing, metrics, unmeasured, current.absent)

    # Internals

    def _log(self, event: str, **facts: Any) -> None:
        """Write an event to the audit log and the attendance record."""
        self.audit.write(event, **facts)
        self.attendance.take({"event": event, **facts})

    def _absent(self, here: Collection[str]) -> dict[str, str]:
        """Return the cause of absence of every site not in `here`."""
        return {
            site: self.declined.get(site, "its node is not online" if site in self.roster else "it has not joined")
            for site in self.settings.deploy.sites
            if site not in here
        }

    def _require_idle(self) -> None:
        if self.open_round is not None:
            raise RuntimeError("a round is open; close it first")

    def _check_registration(self, site: str, packet: Packet) -> int:
        """Return the number of records that a greeting registers; raise `Refused` if it is not admissible."""
        if site not in self.settings.deploy.sites or gate.read_text(packet.facts, "site") != site:
            raise Refused("stranger", f"{site!r} is not one of the sites of this federation")
        if gate.read_text(packet.facts, "kind", "") == "refusal":
            raise Refused("failed", gate.read_printable(packet.facts, "reason"))
        for what, mine in (("schema", self.schema.digest), ("settings", self.settings.digest)):
            if gate.read_text(packet.facts, what) != mine:
                other = gate.frozen_mismatches(packet, self.schema) if what == "schema" else []
                if other:
                    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
                    said = f"frozen parameters of {site} are not the server's: {', '.join(other[:3])}{more}"
                    raise Refused("config", f"{said}; load them from the same file everywhere")
                raise Refused("config", f"its {what} differ from the server's; give it the same app and TOML")
        records = gate.read_int(packet.facts, "records")
        if not 1 <= records <= self.settings.deploy.max_records:
            raise Refused("implausible", f"{records} records; 1 to {self.settings.deploy.max_records} are allowed")
        agreed, old = self.settings.deploy.records.get(site), self.roster.get(site)
        if agreed is not None and records != agreed:
            raise Refused("implausible", f"{records} records where {agreed} stand under [deploy.records]")
        if agreed is None and old is not None and records != old.records:
            do = f"if that is right, the operator writes {site} = {records} under [deploy.records] and resumes"
            raise Refused("implausible", f"{records} records where {old.records} were registered; {do}")
        return records

    def _refuse(self, site: str, refusal: Refused) -> None:
        """Record a refused reply in the round, the log and the sender's next request."""
        current = self.open_round
        if current is not None and site in current.asked and refusal.code not in ("stale", "late"):
            current.failed.setdefault(site, str(refusal))
            current.updates.pop(site, None)
        self._set_told(site, f"refused, {refusal}")
        self.audit.write("refused", site=site, code=refusal.code, reason=str(refusal))

    def _set_told(self, site: str, told: str, state: State | None = None) -> None:
        roster = (state or self.state).roster
        if site in roster:
            roster[site] = roster[site]._replace(told=told)

    def _admit(self, site: str, packet: Packet) -> Verdict:
        if site not in self.roster:
            raise Refused("stranger", f"{site!r} is not in the roster")
        current = self.open_round
        if current is None or site not in current.asked:
            raise Refused("late", "no reply of it is awaited: the round is closed, or went to others")
        asked = current.asked[site]
        if gate.read_text(packet.facts, "kind", "") in ("lost", "lost own", "refusal"):
            gate.check_fresh(packet, asked)
            return self._handle_decline(site, packet, current)
        update = gate.admit(packet, asked)
        if site in current.updates:
            return Verdict(True, "already here: counted once")
        current.failed.pop(site, None)
        current.updates[site] = self._check_update(site, update, current.kind)
        return Verdict(True, "")

    def _handle_decline(self, site: str, packet: Packet, current: Open) -> Verdict:
        """Handle a reply by which a client declines the request or reports lost state."""
        reason = gate.read_printable(packet.facts, "reason")
        if packet.facts["kind"] == "lost own" and self.roster[site].own:
            self.audit.write("lost", site=site, round=self.state.round + 1, reason=reason)
            self.roster[site] = self.roster[site]._replace(own="")  # private state restarts; no one else depends on it
        counts = self.clients_keep and site not in current.updates and current.kind != "evaluate"
        if packet.facts["kind"] == "lost" and counts:
            if not self.roster[site].digest:
                raise Refused("implausible", "it says that its c_i is lost where zeros are expected of it")
            self.audit.write("lost", site=site, round=self.state.round + 1, reason=reason)
            if current.kind == "resync":  # a valid answer: the client restarts from zeros
                current.updates[site] = Update({}, 1, {}, "", {})
                return Verdict(True, reason)
            if site not in current.failed:
                self._count_loss(site)
            self.resync = True
        self.failed(site, reason)
        return Verdict(False, reason)

    def _count_loss(self, site: str) -> None:
        """Count a reported loss of c_i; exclude the member from training after too many."""
        member = self.roster[site]
        lost = member.lost + 1
        rests = member.rests
        if lost > FREE:
            rests = self.state.round + 1 + REST * 2 ** min(lost - FREE - 1, MOST_DOUBLINGS)
        self.roster[site] = member._replace(lost=lost, rests=rests)
        if lost > FREE:
            self.audit.write("resting", site=site, lost=lost, until=rests)

    def _check_update(self, site: str, update: Update, kind: str) -> Update:
        """Check the digests of an admitted reply; measure and clip its update."""
        if kind == "resync":
            memory, digest = flatten(self._reported_memory(update)), self.roster[site].digest
            if (fingerprint(memory) != digest) if digest else np.any(memory):
                raise Refused("implausible", "the c_i it reports is not the one that counted last")
            return update._replace(length=gate.norm(memory))
        if kind == "evaluate":
            return update
        if self.clients_keep and not DIGEST.fullmatch(update.memory):
            raise Refused("schema", "it does not say which c_i it holds now")
        if update.memory and not self.clients_keep:  # a later "lost" would trigger a needless resync
            raise Refused("schema", "it names a c_i of its own where sites keep none")
        if bool(DIGEST.fullmatch(update.own)) != (self.algorithm.own is not None):
            raise Refused("schema", "it does not say what it keeps for itself now, or says so where nothing is kept")
        clip, reach = self.settings.deploy.clip, self._reach(update)
        update = gate.measure(update, reach)
        if clip is None or update.length <= clip:
            return update
        self.audit.write("clipped", site=site, round=self.state.round + 1, norm=update.length, cap=clip)
        return gate.clip_update(update, reach, clip)

    def _reach(self, update: Update) -> Reach:
        travel = most = self._travel(update)
        if exchange(self.algorithm).travel and self.open_round is not None:  # scaled per step, by others' steps
            most = self.settings.local.lr * max(asked.most_steps for asked in self.open_round.asked.values())
        return Reach(self.algorithm, self.state.told, travel, most)

    def _travel(self, update: Update) -> float:
        return update.steps * self.settings.local.lr

    def _reported_memory(self, update: Update) -> Record:
        """Return the memory that a client reported in a resync."""
        return type(blank_memory(self.algorithm, self.state.x))(**update.vectors)

    def _next_state(self, current: Open) -> State | None:
        """Return the state after the round, dropping replies that would make it non-finite; None below the quorum."""
        if current.kind == "evaluate":
            return self.state if len(current.updates) >= current.need else None
        lengths = {site: update.length for site, update in current.updates.items()}
        self._refuse_outsized(lengths, self.state.x)
        for name, usual in self.state.buffers.items():
            if usual.dtype.kind == "f":
                came = {site: update.buffers.get(name) for site, update in current.updates.items()}
                self._refuse_outsized({site: gate.norm(one) for site, one in came.items() if one is not None}, usual)
        while len(current.updates) >= current.need:
            with np.errstate(over="ignore", invalid="ignore"):
                state = self._apply_updates(current)
            what = aggregation.find_nonfinite(state)
            if what is None:
                return self._recompute_means(state)
            # retry without the site whose c_i overflowed, or without the longest update
            site = what if what in current.updates else max(sorted(current.updates), key=lambda one: lengths[one])
            self._refuse(site, Refused("overflow", f"with it {what} would not be finite"))
        return None

    def _refuse_outsized(self, lengths: dict[str, float], usual: Array) -> None:
        """Refuse outsized replies; `usual` sets the scale when there is only one reply."""
        for site, refusal in gate.find_outsized(lengths, gate.norm(usual), usual.dtype).items():
            self._refuse(site, refusal)

    def _apply_updates(self, current: Open) -> State:
        if current.kind == "resync":
            reports = {s: self._reported_memory(u) for s, u in current.updates.items() if u.vectors}
            return aggregation.resync_means(self.algorithm, self.state, reports)
        travel = {site: self._travel(update) for site, update in current.updates.items()}
        return aggregation.aggregate(self.algorithm, self.state, current.updates, travel, self.server_keeps)

    def _recompute_means(self, state: State) -> State:
        """Recompute c from the c_i if it still carries rounding errors of larger c_i that have since been replaced.

        Otherwise a site that once sent numbers of 1e15 would leave c off by 0.1 permanently. A residual that rounding
        does not explain is a fault and is left for `residual` to show.
        """
        gap = self._residual_of(state)
        if gap is None or not self.algorithm.means:
            return state
        now = state._replace(scale=aggregation.memory_scale(self.algorithm, state))
        if not aggregation.rounding_bound(now) < gap <= aggregation.rounding_bound(state):
            return state
        self.audit.write("remade", round=state.round, residual=gap)
        return now._replace(server=state.server._replace(**aggregation.memory_means(self.algorithm, state)))

    def _residual_of(self, state: State) -> float | None:
        """Return |c - sum p_i c_i| of a state, cached because it costs as much as an aggregation."""
        if not self.server_keeps:
            return None
        if self._residual_cache is None or self._residual_cache[0] is not state:
            self._residual_cache = state, aggregation.residual(self.algorithm, state)
        return self._residual_cache[1]

    def _commit(self, state: State, resync: bool) -> None:
        resync = resync and self.clients_keep
        kept = SavedState(state, self.run, self.generation, resync, (), self.audit.head, self.algorithm.means)
        self.generation = save_state(self.folder / "state", kept, self.settings, self.schema)
        self.state, self.resync = state, resync

    def _mean_metrics(self, current: Open) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Average the metrics that most clients report; also return, by metric, the sites where it is not finite."""
        p, updates = aggregation.shares(self.roster), current.updates
        means: dict[str, float] = {}
        unmeasured: dict[str, list[str]] = {}
        named = Counter(name for update in updates.values() for name in update.metrics)
        for name in sorted(name for name, sites in named.items() if 2 * sites > len(updates)):
            values = {site: updates[site].metrics.get(name, math.nan) for site in sorted(updates)}
            finite = {site: value for site, value in values.items() if math.isfinite(value)}
            if finite:
                heard = sum(p[site] for site in finite)
                means[name] = sum(p[site] * value for site, value in finite.items()) / heard
            if len(finite) < len(values):
                unmeasured[name] = [site for site in values if site not in finite]
        return means, unmeasured


def _rollback_warning(events: list[dict[str, Any]], round_: int) -> str:
    """Return a warning if the state is older than its log; "" otherwise, or if a crash explains the difference."""
    rounds_ = [event["round"] for event in events if event["event"] == "committed" and event.get("kind") == "train"]
    if not rounds_ or rounds_[-1] <= round_ + 1:
        return ""
    lost = "is gone: training began anew" if round_ == 0 else f"is that of round {round_}: an older one was put back"
    return f"the log knows of {rounds_[-1]} rounds, and the state {lost}"

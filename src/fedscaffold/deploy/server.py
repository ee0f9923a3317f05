"""The server: one round at a time, every reply through the gate, every round committed before the next request.

    open     -> requests        choose a cohort among those present, one nonce for each request, start the clock
    receive  -> verdict         a reply passes the gate or is refused by name; the round goes on
    due      -> bool            all have answered or failed, or the deadline has passed
    close    -> outcome         quorum met: aggregate and commit; else: nothing has changed, try again

The server knows no transport and no wall clock: `drive` feeds it messages, deadlines run on a monotonic clock. It may
be killed at any moment: what was committed is the truth, and what was not never happened. Clients learn from the next
request what became of their last reply (`told`, and the digest of the c_i they must hold).

Where clients keep their own c_i and one of them has lost it (or brings an old one, or another run's), c would keep a
share that nobody holds. Then the next round is a resync: all report their c_i, c is made anew from them, and who does
not report starts again from zeros. A member that says so again and again would halve everybody's progress: after its
third time it rests for 8 rounds, then 16, 32 ..., so that R rounds take no more than 3 + log2(R / 4) resyncs of it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy import cohorts, gate, requests, rounds
from fedscaffold.deploy.attendance import Attendance
from fedscaffold.deploy.audit import Audit, verified
from fedscaffold.deploy.gate import Refused, Update
from fedscaffold.deploy.outcomes import Open, Outcome, Verdict
from fedscaffold.deploy.rounds import Member, State
from fedscaffold.deploy.schema import Array, Packet, Schema, fingerprint
from fedscaffold.deploy.settings import Settings, algorithm_of
from fedscaffold.deploy.store import Kept, keep, recall
from fedscaffold.metrics import complaint

__all__ = ["Outcome", "Server", "Verdict"]

FREE = 3  # times that a member may lose its c_i before it rests: disks do fail
REST = 8  # rounds of its first rest; each is twice as long as the one before
HEAVY = 0.5  # share of all weight that a site should not have by its own word alone


class Server:
    """The server's side of the protocol; `state` is what was committed last."""

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
        self.algorithm = algorithm_of(settings)
        self.server_keeps = settings.deploy.state == "server"
        self.token = secrets.token_hex(8) if token is None else token  # makes the nonces of this life its own
        self.open_round: Open | None = None
        self.attempt = self.lives = 0
        self.seen: dict[str, float] = {}
        self._gauge: tuple[State, float] | None = None
        self.untrained = dict(buffers or {})
        if not {row[0] for row in (*schema.buffers, *schema.frozen)} <= self.untrained.keys():
            raise InputError("the model keeps arrays that are not trained; give the server buffers=learner.buffers")
        kept = recall(self.folder / "state", settings, schema)
        if kept is None:
            x = np.asarray(start, settings.precision)
            c = np.zeros(x.size) if self.algorithm.remember is not None else None
            averaged = schema.buffers if settings.local.buffers == "average" else ()
            state = State(0, x, c, {}, {}, {name: self.untrained[name] for name, *_ in averaged})
            kept = Kept(state, secrets.token_hex(8) if token is None else token, 0, False, ())
        self.audit = Audit(self.folder / "audit.jsonl", kept.audit)
        self.attendance = Attendance(verified(self.audit.path))
        self.declined: dict[str, str] = {}
        """Why sites that have greeted could not be let in."""
        for warning in kept.warnings:
            self.audit.write("fallback", note=warning)
        self.state, self.run, self.generation, self.resync = kept.state, kept.run, kept.generation, kept.resync
        self.audit.write("started", run=self.run, round=self.state.round, algorithm=self.algorithm.name)
        if self.fault is not None:
            self.audit.write("unsound", round=self.state.round, note=self.fault)
        if self.audit.broken:
            self._commit(self.state, self.resync)  # the new log is the one to go by from here on

    # Who is in

    def hello(self, site: str, packet: Packet) -> None:
        """Let a site in, or renew its registration, between rounds; `Refused` where it may not take part."""
        self._idle()
        try:
            records = self._registered(site, packet)
        except Refused as refusal:
            if site in self.settings.deploy.sites:
                cause = self.declined[site] = str(refusal).removeprefix("failed: ")  # it says so itself
                self._write("refused", site=site, code=refusal.code, reason=cause, round=self.state.round + 1)
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
        moved = old is not None and old.mass != mass and old.digest != ""  # we do not have the c_i it weighs
        state = rounds.joined(self.state, site, member)
        self.audit.write("joined" if old is None else "changed", site=site, records=records, members=len(state.roster))
        self._commit(state, self.resync or moved)

    def leave(self, site: str, c_i: Array | None = None) -> None:
        """Take a site out of the roster, between rounds; the c_i it keeps itself is wanted, else a resync follows."""
        self._idle()
        member = self.state.roster.get(site)
        if member is None:
            raise InputError(f"{site!r} is not in the roster; members: {', '.join(sorted(self.roster)) or 'none'}")
        known = self.server_keeps or not member.digest or fingerprint(c_i) == member.digest
        state = rounds.left(self.state, site, c_i if known else None)
        self.audit.write("left", site=site, members=len(state.roster))
        self._commit(state, self.resync or not known)

    @property
    def roster(self) -> dict[str, Member]:
        """The members."""
        return self.state.roster

    @property
    def residual(self) -> float | None:
        """|c - sum p_i c_i|, the health gauge; None where the clients keep the c_i, and only they know."""
        return self._gauged(self.state)

    @property
    def fault(self) -> str | None:
        """What is wrong with the state, where the residual is more than rounding explains."""
        gap = self.residual
        return None if gap is None else complaint(self.state.round, gap, rounds.rounding(self.state))

    @property
    def warnings(self) -> list[str]:
        """What the operator should know, in sentences: what is not bounded, who weighs much, who rests, c, the log."""
        deploy, p = self.settings.deploy, rounds.shares(self.roster)
        out = [] if deploy.clip is not None else ["deploy.clip is off: nothing bounds how far one site moves the model"]
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
        return out + [said for said in (self.fault, self.audit.broken, self.audit.trouble) if said]

    @property
    def never(self) -> list[str]:
        """Sites that have not counted in any round, though they were to."""
        sites, missed = self.settings.deploy.sites, self.attendance.missed
        return [site for site in sites if site in missed and not (site in self.roster and self.roster[site].applied)]

    @property
    def missed(self) -> dict[str, dict[str, object]]:
        """Sites that did not count, the last time and why; `sentence` says it in a line."""
        never = self.never
        return {
            site: {**missed._asdict(), "never_counted": site in never, "sentence": missed.sentence(site, site in never)}
            for site, missed in sorted(self.attendance.missed.items())
            if site in self.settings.deploy.sites
        }

    # A round

    def open(self, present: Collection[str], evaluate: bool = False) -> dict[str, Packet]:
        """Open a round among the members present; returns the requests, none where the quorum cannot be met."""
        self._idle()
        members = [site for site in self.settings.deploy.sites if site in self.roster]
        here = [site for site in members if site in present]
        kind = "evaluate" if evaluate else "resync" if self.resync else "train"
        size = cohorts.size_of(self.settings.cohort, len(members)) if kind == "train" else len(members)
        need = 1 if evaluate else cohorts.needed(self.settings.deploy.quorum, size)
        absent = self._absent(here)
        if len(here) < max(need, 1):
            self.attempt += 1
            self._write("waiting", round=self.state.round + 1, present=here, quorum=need, absent=absent)
            return {}
        awake = [site for site in here if kind != "train" or self.roster[site].rests <= self.state.round]
        cohort = cohorts.chosen(
            awake if len(awake) >= max(need, 1) else here, size, self.settings.seed, self.state.round, self.attempt
        )
        life = f"{self.run} {self.token} {self.attempt} {self.lives}"
        self.lives += 1
        told = self.state, self.schema, self.settings, self.algorithm
        asked = {site: requests.asked_of(site, kind, *told, life) for site in cohort}
        self.open_round = Open(kind, asked, {}, {}, self.clock(), need, absent)
        self.audit.write("opened", round=self.state.round + 1, kind=kind, cohort=cohort, attempt=self.attempt)
        return {
            site: requests.request_for(asked[site], kind, self.run, self.state, self.settings, self.algorithm)
            for site in cohort
        }

    def receive(self, site: str, packet: Packet) -> Verdict:
        """Judge a reply. Whatever is wrong with it, the round goes on."""
        self.seen[site] = self.clock()
        try:
            return self._admitted(site, packet)
        except Refused as refusal:
            self._refuse(site, refusal)
            return Verdict(False, str(refusal))

    def failed(self, site: str, reason: str) -> None:
        """Note that the transport lost a client of this round."""
        current = self.open_round
        if current is not None and site in current.asked and site not in current.updates:
            current.failed.setdefault(site, reason)
            self.audit.write("failed", site=site, round=self.state.round + 1, reason=reason[:300])

    @property
    def waiting(self) -> tuple[str, ...]:
        """Whom the open round waits for."""
        current = self.open_round
        return () if current is None else tuple(s for s in current.asked if s not in current.updates | current.failed)

    def due(self) -> bool:
        """Whether the open round is to be closed: nobody is left to wait for, or the deadline has passed."""
        current = self.open_round
        late = current is not None and self.clock() - current.began >= self.settings.deploy.deadline
        return late or not self.waiting

    def close(self) -> Outcome:
        """Close the round: commit it if its quorum was heard, else leave everything as it was."""
        current = self.open_round
        if current is None:
            raise RuntimeError("no round is open")
        missing, state = self.waiting, self._settled(current)
        heard, committed = tuple(sorted(current.updates)), state is not None
        number = self.state.round + 1 if state is None else state.round
        for site in missing:
            self._tell(site, f"too late for round {number}: it was closed without you", state)
        done = "evaluated" if current.kind == "evaluate" else "committed"
        event = done if committed else "abandoned"
        gauge = {} if state is None else {"residual": self._gauged(state)}
        facts = {"heard": list(heard), "failed": current.failed, "missing": list(missing), "absent": current.absent}
        self.open_round = None
        self.attempt = 0 if committed else self.attempt + 1
        metrics, unmeasured = self._means(current) if committed else ({}, {})
        # before the commit, which holds the log's head: a crash between the two leaves a line too many, and no alarm
        facts |= {"unmeasured": unmeasured} if unmeasured else {}
        self._write(event, round=number, kind=current.kind, **facts, **gauge)
        self._commit(state or self.state, self.resync and not (committed and current.kind == "resync"))
        failed = dict(current.failed)
        return Outcome(committed, current.kind, number, heard, failed, missing, metrics, unmeasured, current.absent)

    # Inside

    def _write(self, event: str, **facts: Any) -> None:
        """Log an event that says who did not count."""
        self.audit.write(event, **facts)
        self.attendance.take({"event": event, **facts})

    def _absent(self, here: Collection[str]) -> dict[str, str]:
        """Why those who are not here are not."""
        return {
            site: self.declined.get(site, "its node is not online" if site in self.roster else "it has not joined")
            for site in self.settings.deploy.sites
            if site not in here
        }

    def _idle(self) -> None:
        if self.open_round is not None:
            raise RuntimeError("a round is open; close it first")

    def _registered(self, site: str, packet: Packet) -> int:
        """The number of records of a site that may take part."""
        if site not in self.settings.deploy.sites or gate.text(packet.facts, "site") != site:
            raise Refused("stranger", f"{site!r} is not one of the sites of this federation")
        if gate.text(packet.facts, "kind", "") == "refusal":
            raise Refused("failed", gate.said(packet.facts, "reason"))
        for what, mine in (("schema", self.schema.digest), ("settings", self.settings.digest)):
            if gate.text(packet.facts, what) != mine:
                other = gate.frozen_apart(packet, self.schema) if what == "schema" else []
                if other:
                    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
                    said = f"frozen parameters of {site} are not the server's: {', '.join(other[:3])}{more}"
                    raise Refused("config", f"{said}; load them from the same file everywhere")
                raise Refused("config", f"its {what} differ from the server's; give it the same app and TOML")
        records = gate.whole(packet.facts, "records")
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
        """Name a reply that was not let in: in the round, to its sender, in the log."""
        current = self.open_round
        if current is not None and site in current.asked and refusal.code not in ("stale", "late"):
            current.failed.setdefault(site, str(refusal))
            current.updates.pop(site, None)
        self._tell(site, f"refused, {refusal}")
        self.audit.write("refused", site=site, code=refusal.code, reason=str(refusal))

    def _tell(self, site: str, told: str, state: State | None = None) -> None:
        roster = (state or self.state).roster
        if site in roster:
            roster[site] = roster[site]._replace(told=told)

    def _admitted(self, site: str, packet: Packet) -> Verdict:
        if site not in self.roster:
            raise Refused("stranger", f"{site!r} is not in the roster")
        current = self.open_round
        if current is None or site not in current.asked:
            raise Refused("late", "no reply of it is awaited: the round is closed, or went to others")
        asked = current.asked[site]
        if gate.text(packet.facts, "kind", "") in ("lost", "refusal"):
            gate.fresh(packet, asked)
            return self._declined(site, packet, current)
        update = gate.admit(packet, asked)
        if site in current.updates:
            return Verdict(True, "already here: counted once")
        current.failed.pop(site, None)
        current.updates[site] = self._limited(site, update, current.kind)
        return Verdict(True, "")

    def _declined(self, site: str, packet: Packet, current: Open) -> Verdict:
        """A client that says itself why it cannot take part."""
        reason = gate.said(packet.facts, "reason")
        counts = not self.server_keeps and site not in current.updates and current.kind != "evaluate"
        if packet.facts["kind"] == "lost" and counts:
            if not self.roster[site].digest:
                raise Refused("implausible", "it says that its c_i is lost where zeros are expected of it")
            self.audit.write("lost", site=site, round=self.state.round + 1, reason=reason)
            if current.kind == "resync":  # it has answered: it holds nothing, and starts again from zeros
                current.updates[site] = Update({}, 1, {}, "", {})
                return Verdict(True, reason)
            if site not in current.failed:
                self._forgetful(site)
            self.resync = True
        self.failed(site, reason)
        return Verdict(False, reason)

    def _forgetful(self, site: str) -> None:
        """Count a loss of c_i; who loses it too often rests."""
        member = self.roster[site]
        lost = member.lost + 1
        rests = self.state.round + 1 + REST * 2 ** (lost - FREE - 1) if lost > FREE else member.rests
        self.roster[site] = member._replace(lost=lost, rests=rests)
        if lost > FREE:
            self.audit.write("resting", site=site, lost=lost, until=rests)

    def _limited(self, site: str, update: Update, kind: str) -> Update:
        """Check a reported c_i against its digest; clip or refuse a pair that is too long."""
        if kind == "resync":
            c_i, digest = update.vectors["c_i"], self.roster[site].digest
            if (fingerprint(c_i) != digest) if digest else np.any(c_i):
                raise Refused("implausible", "the c_i it reports is not the one that counted last")
            return update._replace(length=gate.length_of(c_i))
        if kind == "evaluate":
            return update
        if not self.server_keeps and self.algorithm.remember is not None and len(update.memory) != 32:
            raise Refused("schema", "it does not say which c_i it holds now")
        clip, travel = self.settings.deploy.clip, self._travel(update)
        update = gate.measured(update, self.state.told, travel)
        if self.algorithm.normalised and self.open_round is not None:  # it counts per step: few claimed, much moved
            most = max(asked.most_steps for asked in self.open_round.asked.values())
            update = update._replace(length=update.length * most / update.steps)
        if clip is None or update.length <= clip:
            return update
        self.audit.write("clipped", site=site, round=self.state.round + 1, norm=update.length, cap=clip)
        return gate.clipped(update, self.state.told, travel, clip)

    def _travel(self, update: Update) -> float:
        return update.steps * self.settings.local.lr

    def _settled(self, current: Open) -> State | None:
        """The state after a round, without those whose replies would spoil it for all; None below the quorum."""
        if current.kind == "evaluate":
            return self.state if len(current.updates) >= current.need else None
        lengths = {site: update.length for site, update in current.updates.items()}
        self._compare(lengths, self.state.x)
        for name, usual in self.state.buffers.items():
            if usual.dtype.kind == "f":
                came = {site: update.buffers.get(name) for site, update in current.updates.items()}
                self._compare({site: gate.length_of(one) for site, one in came.items() if one is not None}, usual)
        while len(current.updates) >= current.need:
            with np.errstate(over="ignore", invalid="ignore"):
                state = self._after(current)
            what = rounds.overflowed(state)
            if what is None:
                return self._remade(state)
            # its own c_i, or the longest: the round is tried again without it
            site = what if what in current.updates else max(sorted(current.updates), key=lambda one: lengths[one])
            self._refuse(site, Refused("overflow", f"with it {what} would not be finite"))
        return None

    def _compare(self, lengths: dict[str, float], usual: Array) -> None:
        """Refuse what would drown the others' numbers; `usual` is the size to go by where nobody else replied."""
        for site, refusal in gate.outsized(lengths, gate.length_of(usual), usual.dtype).items():
            self._refuse(site, refusal)

    def _after(self, current: Open) -> State:
        if current.kind == "resync":
            return rounds.resynced(self.state, {s: u.vectors["c_i"] for s, u in current.updates.items() if u.vectors})
        travel = {site: self._travel(update) for site, update in current.updates.items()}
        return rounds.aggregated(self.algorithm, self.state, current.updates, travel, self.server_keeps)

    def _remade(self, state: State) -> State:
        """The state with c made anew from the c_i where it still carries the rounding of larger ones that are gone.

        A site that once sent numbers of 1e15 would otherwise leave c off by 0.1 for good. What rounding does not
        explain is left as it is: that is a fault, and the gauge is to show it.
        """
        gap = self._gauged(state)
        if gap is None or state.c is None:
            return state
        now = state._replace(scale=rounds.scale_of(state))
        if not rounds.rounding(now) < gap <= rounds.rounding(state):
            return state
        self.audit.write("remade", round=state.round, residual=gap)
        return now._replace(c=rounds.mean_of(state))

    def _gauged(self, state: State) -> float | None:
        """|c - sum p_i c_i| of a state, once each: it costs as much as a round's sum."""
        if not self.server_keeps:
            return None
        if self._gauge is None or self._gauge[0] is not state:
            self._gauge = state, rounds.residual(state)
        return self._gauge[1]

    def _commit(self, state: State, resync: bool) -> None:
        kept = Kept(state, self.run, self.generation, resync, (), self.audit.head)
        self.generation = keep(self.folder / "state", kept, self.settings, self.schema)
        self.state, self.resync = state, resync

    def _means(self, current: Open) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Means of the metrics that most report, over those where they are finite; and where they are not."""
        p, updates = rounds.shares(self.roster), current.updates
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

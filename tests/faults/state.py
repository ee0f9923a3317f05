"""Faults of processes, disks and membership: scenarios 1 to 15. Each returns True if the fault is handled correctly."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fedscaffold.deploy.audit import read_verified
from fedscaffold.deploy.schema import Packet
from fedscaffold.deploy.server_loop import Stopped, drive
from fedscaffold.state import StateError
from tests.faults.lab import SITES, Lab

__all__ = ["SCENARIOS"]

Verdict = bool
CLIENT = 'state = "client"\n'


class Crash(BaseException):
    """Simulated loss of power."""


def killed_client() -> Verdict:
    """Kill a client in the middle of many rounds: those rounds close without it."""
    lab, random = Lab(), np.random.default_rng(0)
    for _ in range(20):
        victim = str(random.choice(SITES))
        outcome = lab.round(lost=lambda site, victim=victim: site == victim)  # type: ignore[misc]
        if not outcome.committed or victim in outcome.heard:
            return False
    return lab.quiet().well


def below_quorum() -> Verdict:
    """All sites but one are dead: the round is abandoned, retried with back-off, and the run ends with a reason."""
    lab = Lab()
    pauses: list[float] = []

    class Dead:
        def greetings(self) -> dict[str, Packet]:
            return {}

        def present(self) -> set[str]:
            return set(SITES)

        def send(self, requests: Mapping[str, Packet]) -> None:
            self.requests = dict(requests)

        def collect(self) -> list[tuple[str, Packet | str]]:
            return [
                (s, lab.reply(s, r) if s == "ash" else "dead") for s, r in self.requests.items()
            ]

    before = lab.server.state.x.tobytes()
    try:
        drive(lab.server, Dead(), 5, sleep=pauses.append)
    except Stopped as stopped:
        grows = pauses == sorted(pauses) and len(pauses) == lab.settings.deploy.retries
        return "quorum" in str(stopped) and grows and lab.server.state.x.tobytes() == before
    return False


def straggler() -> Verdict:
    """A reply after the deadline is refused as late, its c_i is rolled back, and the client is told."""
    lab = Lab(CLIENT)
    for _ in range(10):
        requests = lab.server.open(SITES)
        replies = {site: lab.reply(site, request) for site, request in requests.items()}
        for site in SITES[1:]:
            lab.server.receive(site, replies[site])
        lab.now += 11
        if not lab.server.due() or lab.server.close().missing != ("ash",):
            return False
        if not lab.server.receive("ash", replies["ash"]).reason.startswith("late"):
            return False
    return "late" in lab.server.roster["ash"].told and lab.quiet().well


def lost_replies() -> Verdict:
    """30 % of the replies are lost after the client has stored its new c_i."""
    lab, random = Lab(CLIENT), np.random.default_rng(1)
    for _ in range(30):
        lab.round(lost=lambda site: random.random() < 0.3)
    return lab.quiet().well


def duplicates() -> Verdict:
    """Every reply comes twice, and once more after the server was restarted: counted once."""
    lab, quiet = Lab(), Lab()
    old: dict[str, Packet] = {}
    for _ in range(5):
        if any(lab.server.receive(site, reply).counted for site, reply in old.items()):
            return False
        requests = lab.server.open(SITES)
        if any(lab.server.receive(site, reply).counted for site, reply in old.items()):
            return False
        old = {site: lab.reply(site, request) for site, request in requests.items()}
        for site in SITES * 2:
            lab.server.receive(site, old[site])
        lab.server.close()
        lab.reborn()
    return lab.server.state.x.tobytes() == quiet.quiet(5).server.state.x.tobytes()


def replays() -> Verdict:
    """Replies recorded in an older round and in another run are refused and logged."""
    lab, other = Lab(), Lab()
    old = {site: lab.reply(site, request) for site, request in lab.server.open(SITES).items()}
    for site in SITES:
        lab.server.receive(site, old[site])
    lab.server.close()
    foreign = {
        site: other.reply(site, request)
        for site, request in other.quiet(1).server.open(SITES).items()
    }
    requests = lab.server.open(SITES)
    refused = [
        not lab.server.receive(site, reply).counted
        for reply in (old["ash"], foreign["ash"])
        for site in ("ash",)
    ]
    for site in SITES:
        lab.server.receive(site, lab.reply(site, requests[site]))
    logged = [
        e
        for e in read_verified(lab.folder / "audit.jsonl")
        if e["event"] == "refused" and e["code"] == "stale"
    ]
    return all(refused) and len(logged) == 2 and lab.server.close().heard == SITES


def reordered() -> Verdict:
    """Replies in the opposite order: the same bits."""
    lab, quiet = Lab(), Lab().quiet(5)
    for _ in range(5):
        lab.round(reverse=True)
    return lab.server.state.x.tobytes() == quiet.server.state.x.tobytes()


def killed_server() -> Verdict:
    """Kill the server before every single write, sync and rename of two rounds: the resumed run has the same bits."""
    quiet = Lab().quiet(2).server.state.x.tobytes()
    for point in range(10_000):
        left = [point]

        def dying(function: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return function(*args, **kwargs)

            return call

        lab = Lab()
        names = ("write", "fsync", "replace", "rename")
        with ExitStack() as patched:
            for name in names:
                patched.enter_context(mock.patch.object(os, name, dying(getattr(os, name))))
            try:
                lab.quiet(2)
            except Crash:
                pass
            else:
                return point > 10
        lab.reborn()
        while lab.server.state.round < 2:
            lab.round()
        if lab.server.state.x.tobytes() != quiet or lab.mismatch > 1e-13:
            return False
        shutil.rmtree(lab.folder)
    return False


def damaged_checkpoint() -> Verdict:
    """The newest checkpoint is truncated or has one bit flipped: the one before is used, and the log says so."""
    quiet = Lab().quiet(4).server.state.x.tobytes()
    cut: Callable[[bytes], bytes] = lambda data: data[: len(data) // 2]  # noqa: E731
    flip: Callable[[bytes], bytes] = lambda data: data[:-1] + bytes([data[-1] ^ 1])  # noqa: E731
    for damage in (cut, flip):
        lab = Lab().quiet(3)
        newest = max((lab.folder / "state").glob("state-*"))
        newest.write_bytes(damage(newest.read_bytes()))
        lab.reborn()
        said = [
            event
            for event in read_verified(lab.folder / "audit.jsonl")
            if event["event"] == "fallback"
        ]
        while lab.server.state.round < 4:
            lab.round()
        if not said or lab.server.state.x.tobytes() != quiet:
            return False
    return True


def full_disk() -> Verdict:
    """No space for the checkpoint (a real limit of the system): a clean stop, the old one intact."""
    lab = Lab().quiet(2)
    before = lab.server.state.x.tobytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    requests = lab.server.open(SITES)
    for site in SITES:
        lab.server.receive(site, lab.reply(site, requests[site]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        lab.server.close()
        stopped = False
    except StateError as error:
        stopped = "full" in str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lab.reborn()
    return stopped and lab.server.state.x.tobytes() == before and lab.quiet().well


def restarted_client() -> Verdict:
    """A client restarts between rounds and continues from its file."""
    lab = Lab(CLIENT)
    for _ in range(10):
        lab.learner = lab.new_learner()  # nothing but the file is left
        if lab.round().heard != SITES:
            return False
    return lab.quiet().well


def lost_state() -> Verdict:
    """A client's file is gone: detected by digest, repaired by a resync round, nothing of it remains in c."""
    lab = Lab(CLIENT).quiet(5)
    shutil.rmtree(lab.site_folder("cedar"))
    first, second = lab.round(), lab.round()
    return "cedar" in first.refused and second.kind == "resync" and lab.quiet().well


def old_state() -> Verdict:
    """A client returns with an old c_i (a restored snapshot) or that of another run: repaired by a resync."""
    lab, other = Lab(CLIENT).quiet(3), Lab(CLIENT).quiet(3)
    shutil.copytree(lab.site_folder("elm"), lab.folder / "snapshot")
    lab.quiet(4)
    for source in (lab.folder / "snapshot", other.site_folder("elm")):
        shutil.rmtree(lab.site_folder("elm"))
        shutil.copytree(source, lab.site_folder("elm"))
        if "elm" not in lab.round().refused or lab.round().kind != "resync":
            return False
        lab.quiet(3)
    return lab.quiet().well


def rolled_back_server() -> Verdict:
    """The server is restored to one round earlier, and to five: clients step back, or c is recomputed."""
    for back in (1, 5):
        lab = Lab(CLIENT).quiet(4)
        shutil.copytree(lab.folder / "state", lab.folder / "backup")
        lab.quiet(back)
        shutil.rmtree(lab.folder / "state")
        Path(lab.folder / "backup").rename(lab.folder / "state")
        lab.reborn()
        outcome = lab.round()
        if back == 1 and outcome.heard != SITES:
            return False
        if not lab.quiet().well:
            return False
    return True


def joins_and_leaves() -> Verdict:
    """Sites join and leave: N, the weights and c follow exactly, and the run ends at the new optimum."""
    for mode in ("", CLIENT):
        lab = Lab(mode, sites=SITES[:3]).quiet(5)
        for site in SITES[3:]:
            lab.join(site)
            if lab.mismatch > 1e-13:
                return False
            lab.quiet(2)
        lab.server.leave("ash")
        lab.quiet(2)
        lab.server.leave("fir")
        if not lab.quiet().well or len(lab.server.roster) != 3:
            return False
    return True


SCENARIOS: dict[int, tuple[str, Callable[[], Verdict]]] = {
    1: ("client killed in mid-round", killed_client),
    2: ("below quorum", below_quorum),
    3: ("straggler after the deadline", straggler),
    4: ("30 % of replies lost after the client stored", lost_replies),
    5: ("duplicate replies, also after a restart", duplicates),
    6: ("replay of an older round and of another run", replays),
    7: ("replies in another order", reordered),
    8: ("server killed before any write", killed_server),
    9: ("checkpoint cut or flipped", damaged_checkpoint),
    10: ("disk full while saving", full_disk),
    11: ("client restarts, state kept", restarted_client),
    12: ("client restarts, state lost", lost_state),
    13: ("client brings an old or foreign c_i", old_state),
    14: ("server rolled back, clients ahead", rolled_back_server),
    15: ("sites join and leave", joins_and_leaves),
}

"""Malicious or faulty members: scenarios 22, 23 and 29 to 36. Each returns True if the fault is handled correctly."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.aggregation import shares
from fedscaffold.deploy.audit import Audit, read_verified
from fedscaffold.deploy.client import greeting
from fedscaffold.deploy.gate import Refused
from fedscaffold.deploy.schema import Array, Blob, Packet, blob
from fedscaffold.deploy.server_loop import InProcess, drive
from fedscaffold.deploy.server_state import peek_state
from fedscaffold.deploy.settings import parse
from tests.faults.lab import SITES, Lab

__all__ = ["SCENARIOS"]

Verdict = bool
Change = Callable[[Array], Array]
LIAR = "elm"


def _changed(**changes: Change) -> Callable[[str, Packet], Packet]:
    """Return a change of the liar's replies that applies functions to its vectors."""

    def change(site: str, reply: Packet) -> Packet:
        if site != LIAR:
            return reply
        vectors = {name: np.frombuffer(item.data, item.dtype) for name, item in reply.blobs.items()}
        return reply._replace(
            blobs={n: blob(changes[n](v) if n in changes else v) for n, v in vectors.items()}
        )

    return change


def byzantine() -> Verdict:
    """One of five members scales its updates, flips them or adds noise: bounded by its share of deploy.clip per round.

    Once it stops, the run reaches the optimum again. Without deploy.clip, the server warns.
    """
    random = np.random.default_rng(3)
    attacks: list[Change] = [
        lambda d: 1e6 * d,
        lambda d: -10 * d,
        lambda d: d + 100 * random.standard_normal(d.size),
    ]
    cap, rounds = 5.0, 8
    for attack in attacks:
        lab = Lab(f"clip = {cap}\n").quiet()
        best = lab.server.state.x
        for done in range(rounds):
            outcome = lab.round(change=_changed(d=attack))
            # from the optimum the others only pull back, so the bound is its share of the cap per round
            if LIAR not in outcome.heard or np.linalg.norm(lab.server.state.x - best) > (
                done + 1
            ) * cap / len(SITES):
                return False
        if lab.mismatch > 1e-12 or not lab.quiet(30).well:
            return False
    return (
        any("deploy.clip is off" in said for said in Lab().server.warnings)
        and not lab.server.warnings
    )


def poisoned_controls() -> Verdict:
    """A false change of c_i beside an honest move: not accepted, or both are clipped by one factor.

    With plain SGD one vector is sent, and more are refused; where two are sent (option I), c stays the mean of the c_i.
    """
    lab = Lab()
    extra = blob(np.array([1e3, -1e3]))
    for name in ("c_i", "move", "change"):
        outcome = lab.round(
            change=lambda s, r, name=name: (
                r._replace(blobs={**r.blobs, name: extra}) if s == LIAR else r
            )  # type: ignore[misc]
        )
        if not outcome.refused.get(LIAR, "").startswith("s"):  # size or schema
            return False
    both = Lab("clip = 5.0\n[algorithm]\nname = 'scaffold'\noption = 1\n")
    for _ in range(10):
        both.round(change=_changed(d=lambda d: d + 1e3))
        if both.mismatch > 1e-12 or np.linalg.norm(both.server.state.server.c) > 100:
            return False
    return lab.quiet().well and both.quiet(40).well


def overflows() -> Verdict:
    """Finite replies of 1e200 to 1.7e308, with and without deploy.clip, and a restart of the server after each."""
    for clip in ("", "clip = 5.0\n"):
        lab = Lab(clip)
        for value in (1e200, -1e308, np.finfo(float).max, 5e-324):
            outcome = lab.round(change=_changed(d=lambda d, value=value: np.full_like(d, value)))  # type: ignore[misc]
            if not outcome.committed or not set(outcome.heard) >= set(SITES) - {LIAR}:
                return False
            lab.reborn()
        if not lab.quiet(30).well:
            return False
    return True


def growing_records() -> Verdict:
    """A site that returns with 10^9 records: refused until the operator confirms; a large first claim is warned about."""
    lab = Lab(top="weights = 'records'\n", sites=SITES[:4])
    before = shares(lab.server.roster)
    hello = greeting(lab.learner, lab.settings, "ash")
    claim = hello._replace(facts={**hello.facts, "records": 10**9})
    for _ in range(2):
        try:
            lab.server.hello("ash", claim)
            return False
        except Refused as refusal:
            if "[deploy.records]" not in str(refusal) or shares(lab.server.roster) != before:
                return False
        lab.reborn()
    if not lab.quiet().well:
        return False
    first = greeting(lab.learner, lab.settings, "fir")
    lab.server.hello("fir", first._replace(facts={**first.facts, "records": 10**9}))
    if not any(said.startswith("fir has 100% of all weight") for said in lab.server.warnings):
        return False
    lab.settings = parse(f"weights = 'records'\n{lab.toml}[deploy.records]\nash = 1000000000\n")
    lab.reborn().hello("ash", claim)
    return abs(shares(lab.server.roster)["ash"] - 0.5) < 1e-8 and lab.mismatch < 1e-12


def said_to_be_lost() -> Verdict:
    """A member keeps reporting that its c_i is lost: few resyncs, then it is excluded for a while, by name."""
    lab, opened = Lab('state = "client"\n'), 20

    def change(site: str, reply: Packet) -> Packet:
        lies = (
            site == LIAR and reply.facts["kind"] == "train" and lab.server.roster[LIAR].digest != ""
        )
        facts: dict[str, Any] = {**reply.facts, "kind": "lost", "reason": "gone"}
        return Packet(facts, {}) if lies else reply

    for _ in range(opened):
        lab.round(change=change)
    named = any(said.startswith(f"{LIAR} has lost its c_i") for said in lab.server.warnings)
    few = opened - lab.server.state.round <= 3 + math.log2(opened / 4)
    while lab.server.roster[LIAR].rests > lab.server.state.round:
        lab.round()
    return named and few and lab.quiet(25).well


def unasked_memory() -> Verdict:
    """A c_i named, then reported lost, where sites keep none: refused, and no resync follows."""
    for top, extra in (("algorithm.name = 'fedavg'\n", 'state = "client"\n'), ("", "")):
        lab = Lab(extra, top=top)
        lies: list[dict[str, Any]] = [
            {"memory": "e" * 32},
            {"kind": "lost", "reason": "gone"},
            {"memory": "x"},
        ]
        for lie in lies:
            outcome = lab.round(
                change=lambda site, reply, lie=lie: (
                    Packet({**reply.facts, **lie}, reply.blobs) if site == LIAR else reply
                )  # type: ignore[misc]
            )
            others = set(SITES) - {LIAR}
            if outcome.kind != "train" or set(outcome.heard) != others or lab.server.resync:
                return False
        if set(lab.round().heard) != set(SITES):
            return False
    return lab.quiet().well


def long_numbers() -> Verdict:
    """Numbers of 5,000 digits, lists nested 5,000 deep and such shapes, in every field of a greeting and a reply."""
    lab, deep = Lab(sites=SITES[:4]), []  # type: ignore[var-annotated]
    for _ in range(5000):
        deep = [deep]
    odd: list[Any] = [10**5000, -(10**5000), deep, {"a": deep}, "9" * 5000, float("nan")]
    hello = greeting(lab.learner, lab.settings, "fir")
    for value in odd:
        for name in ("site", "records", "schema", "settings"):
            try:
                lab.server.hello("fir", hello._replace(facts={**hello.facts, name: value}))
                return False
            except Refused:
                continue
        for name in ("site", "round", "nonce", "schema", "records", "steps", "memory", "kind"):
            lab.round(
                change=lambda s, r, name=name, value=value: (  # type: ignore[misc]
                    r._replace(facts={**r.facts, name: value}) if s == LIAR else r
                )
            )
        shaped = (
            Blob("float64", (value,), bytes(16)),
            Blob("float64", value, bytes(16)),
            Blob(value, (2,), bytes(16)),
        )
        for item in shaped:
            outcome = lab.round(
                change=lambda s, r, item=item: r._replace(blobs={"d": item}) if s == LIAR else r  # type: ignore[misc]
            )
            if not outcome.committed or LIAR in outcome.heard:
                return False
    return lab.quiet().well


def touched_log() -> Verdict:
    """The audit log is deleted, emptied, truncated, reordered or replaced by a valid one: detected and recorded."""
    for how in ("deleted", "emptied", "cut", "reordered", "replaced"):
        lab = Lab().quiet(2)
        path = lab.folder / "audit.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        left = {"cut": lines[:-1], "reordered": [*lines[:2], lines[3], lines[2], *lines[4:]]}.get(
            how, []
        )
        path.write_text("".join(left), encoding="utf-8")
        if how == "deleted":
            path.unlink()
        if how == "replaced":
            forger = Audit(path)
            for _ in lines:
                forger.write("opened")
        kept = peek_state(lab.folder / "state")
        try:
            read_verified(path, None if kept is None else kept.audit)
            return False
        except InputError:
            lab.reborn()
        events = read_verified(path, lab.server.audit.head)
        if events[0]["event"] != "broken" or not lab.server.warnings or not lab.quiet().well:
            return False
    return True


def names_and_modes() -> Verdict:
    """Sites named server, authority, ../x or like a device; files of a run or a kit that others could read."""
    for name in ("server", "Authority", "ca", "../x", "con", "-rf", "a" * 65, "nоrth"):
        try:
            parse(f"[deploy]\nsites = [{json.dumps(name)}]")
            return False
        except InputError:
            continue
    home = Path(tempfile.mkdtemp())
    umask = os.umask(0)
    try:
        lab = Lab('state = "client"\n', folder=home / "run")
        drive(lab.server, InProcess(lab.learner, lab.settings, lab.folder), 2)
        _kit(home)
    finally:
        os.umask(umask)
    public = {".crt", ".pub", ".py", ".toml"}
    made = [path for top in ("run", "kits") for path in (home / top, *(home / top).rglob("*"))]
    private = all(not path.stat().st_mode & 0o077 for path in made if path.suffix not in public)
    return private and [path.parent.name for path in made if path.name == "ca.key"] == ["authority"]


def _kit(home: Path) -> None:
    from fedscaffold.deploy.provisioning import make_kit

    (home / "app").mkdir()
    (home / "app" / "federation.toml").write_text(
        "[deploy]\nsites = ['north', 'south']\n", encoding="utf-8"
    )
    (home / "sites.toml").write_text("server = 'localhost'\n", encoding="utf-8")
    make_kit(home / "sites.toml", home / "kits")


def telling_errors() -> Verdict:
    """A site's code fails with a patient's number in its error: a type and a reference leave the site, no text."""
    lab, secret = Lab(), "patient 4711"
    whole = lab.learner.data

    def data(site: str) -> Any:
        if site == LIAR:
            raise ValueError(f"cannot parse the row of {secret}")
        return whole(site)

    lab.learner.data = data
    outcome = lab.round()
    said = outcome.refused.get(LIAR, "")
    kept = [
        path
        for path in lab.folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    at_site = lab.folder / "sites"
    if (
        "ValueError" not in said
        or "reference" not in said
        or not kept
        or any(at_site not in p.parents for p in kept)
    ):
        return False
    lab.learner.data = whole
    return outcome.committed and lab.quiet().well


SCENARIOS: dict[int, tuple[str, Callable[[], Verdict]]] = {
    22: ("attackers who scale, flip or add noise", byzantine),
    23: ("poisoning of the control variates alone", poisoned_controls),
    29: ("finite numbers that overflow", overflows),
    30: ("record counts that grow", growing_records),
    31: ("c_i said to be lost each time", said_to_be_lost),
    32: ("numbers of 5,000 digits, deep nests", long_numbers),
    33: ("an audit log cut, replaced or deleted", touched_log),
    34: ("a site called server, files others can read", names_and_modes),
    35: ("error texts that name a patient", telling_errors),
    36: ("a c_i named and lost where sites keep none", unasked_memory),
}

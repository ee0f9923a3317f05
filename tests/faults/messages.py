"""Faults of messages, identities and clocks: scenarios 16 to 21 and 24 to 26."""

from __future__ import annotations

import resource
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fedscaffold.deploy.audit import read_verified
from fedscaffold.deploy.client import greeting
from fedscaffold.deploy.gate import Refused, admit
from fedscaffold.deploy.schema import Blob, Packet, blob
from tests.faults.lab import SITES, Lab

__all__ = ["SCENARIOS"]

Verdict = bool
FUZZED = 20_000


def _refused(changes: list[tuple[Callable[[Packet], Packet], str]]) -> Verdict:
    """Check that each change gets one client's reply refused for the given reason, and the run still converges."""
    lab = Lab()
    for change, code in changes:
        outcome = lab.round(
            change=lambda site, reply, change=change: change(reply) if site == "birch" else reply  # type: ignore[misc]
        )
        if not outcome.committed or not outcome.refused.get("birch", "").startswith(code):
            return False
        if code not in lab.server.roster["birch"].told:
            return False
    logged = [
        event for event in read_verified(lab.folder / "audit.jsonl") if event["event"] == "refused"
    ]
    return len(logged) == len(changes) and lab.quiet().well


def _with(name: str, item: Any) -> Callable[[Packet], Packet]:
    return lambda reply: reply._replace(blobs={**reply.blobs, name: item})


def _fact(name: str, value: Any) -> Callable[[Packet], Packet]:
    return lambda reply: reply._replace(facts={**reply.facts, name: value})


def not_finite() -> Verdict:
    """NaN and infinity in an update."""
    bad = [np.array([np.nan, 0.0]), np.array([0.0, np.inf]), np.array([-np.inf, np.nan])]
    return _refused([(_with("d", blob(array)), "not finite") for array in bad])


def wrong_schema() -> Verdict:
    """Wrong shape, one that would broadcast, wrong dtype, missing and extra names."""
    return _refused(
        [
            (_with("d", blob(np.ones(1))), "schema"),
            (_with("d", blob(np.ones((1, 2)))), "schema"),
            (_with("d", blob(np.ones(2, np.float32))), "schema"),
            (_with("d", blob(np.ones(4, np.float32))), "schema"),
            (lambda reply: reply._replace(blobs={}), "schema"),
            (lambda reply: reply._replace(blobs={"e": reply.blobs["d"]}), "schema"),
            (_with("e", Blob("float64", (0,), b"")), "schema"),
            (_fact("schema", "another"), "schema"),
        ]
    )


def bombs() -> Verdict:
    """Claims of 10 GB and 1 TiB, and 50 MB of real bytes: refused before anything is allocated."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    real = bytes(50_000_000)
    good = _refused(
        [
            (_with("d", Blob("float64", (10 * 2**30 // 8,), b"")), "size"),
            (_with("d", Blob("float64", (2**38,), bytes(64))), "size"),
            (_with("d", Blob("float64", (2**40, 2**40, 2**40), b"")), "size"),
            (_with("d", Blob("float64", (2,), real)), "size"),
            (
                lambda reply: reply._replace(
                    facts={**reply.facts, **{f"x{i}": 1 for i in range(10**4)}}
                ),
                "size",
            ),
        ]
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return good and grown < 100_000  # kilobytes


def hostile_objects() -> Verdict:
    """Pickles that would run code when loaded: read as numbers, or refused."""
    touched = Path(tempfile.mkdtemp()) / "touched"
    payload = f"cos\nsystem\n(S'touch {touched}'\ntR.".encode()
    good = _refused(
        [
            (_with("d", Blob("object", (2,), payload)), "s"),
            (_with("d", Blob("float64", (len(payload) // 8,), payload)), "s"),
            (_with("d", Blob("|O", (2,), payload[:16])), "schema"),
        ]
    )
    return good and not touched.exists()


def fuzzed() -> Verdict:
    """Random values in every field: only typed refusals."""
    lab, random = Lab(), np.random.default_rng(2)
    requests = lab.server.open(SITES)
    reply = lab.reply("ash", requests["ash"])
    assert lab.server.open_round is not None
    asked = lab.server.open_round.asked["ash"]
    pool: list[Any] = [
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "ash",
        "x" * 999,
        b"",
        [],
        {},
    ]
    shapes: list[Any] = [(), (2,), (3,), (-1,), (2**70,), [2], None, ("2",), (2.0,)]
    kinds: list[Any] = ["float64", "float32", "object", "", None, 7]
    let_in = 0
    for _ in range(FUZZED):
        facts, blobs = dict(reply.facts), dict(reply.blobs)
        for _ in range(random.integers(0, 3)):
            facts[str(random.choice([*facts, "junk"]))] = pool[random.integers(len(pool))]
        if random.random() < 0.7:
            data: Any = [
                random.bytes(int(random.integers(0, 33))),
                reply.blobs["d"].data,
                None,
                "text",
            ][random.integers(4)]
            item = Blob(
                kinds[random.integers(len(kinds))], shapes[random.integers(len(shapes))], data
            )
            blobs["d" if random.random() < 0.8 else "e"] = item if random.random() < 0.9 else None  # type: ignore[assignment]
        try:
            let_in += bool(np.isfinite(admit(Packet(facts, blobs), asked).vectors["d"]).all())
        except Refused:
            continue
    return 0 < let_in < FUZZED


def lying_weights() -> Verdict:
    """Records of 10^12, -1, 0 and NaN, and such step counts: bounded by the registration."""
    lies: list[Any] = [10**12, -1, 0]
    changes = [(_fact("records", lie), "implausible") for lie in lies]
    changes += [(_fact("steps", lie), "implausible") for lie in lies]
    changes += [(_fact("records", float("nan")), "schema"), (_fact("records", True), "schema")]
    return _refused(changes)


def strangers() -> Verdict:
    """Unknown or impersonating sites, plain text, another authority, an expired certificate: all refused."""
    lab = Lab(sites=SITES[:3])
    claims = [("oak", "oak"), ("elm", "ash")]
    for site, claimed in claims:
        facts = {**greeting(lab.learner, lab.settings, "ash").facts, "site": claimed}
        try:
            lab.server.hello(site, Packet(facts, {}))
        except Refused as refusal:
            if refusal.code == "stranger":
                continue
        return False
    requests = lab.server.open(SITES)
    stolen = lab.reply("ash", requests["ash"])
    lab.server.receive("birch", stolen)  # a reply of another site
    if (
        lab.server.receive("oak", stolen).counted
        or "birch" in (lab.server.open_round or requests).updates  # type: ignore[union-attr]
    ):
        return False
    return _tls_refuses()


def _tls_refuses() -> Verdict:
    """Check that a TLS server with our certificates is trusted by our sites and no others."""
    from fedscaffold.deploy import keys

    folder = Path(tempfile.mkdtemp())
    for name, days in (("good", 30), ("other", 30), ("expired", 30)):
        keys.make_authority(folder / name, days)
    keys.make_server(folder / "good", folder / "good", ["localhost"], 30)
    keys.make_server(folder / "expired", folder / "expired", ["localhost"], 0)
    return (
        _connects(folder / "good", folder / "good" / "ca.crt")
        and not _connects(folder / "good", folder / "other" / "ca.crt")
        and not _connects(folder / "expired", folder / "expired" / "ca.crt")
        and not _connects(folder / "good", None)
    )


def _connects(server: Path, trust: Path | None) -> bool:
    """Return whether a client that trusts `trust` (None: plain text) gets an answer from a TLS server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.crt", server / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
                connection.settimeout(5)
                with context.wrap_socket(connection, server_side=True) as secure:
                    secure.sendall(b"welcome")
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=5) as plain:
                if trust is None:
                    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return plain.recv(7) == b"welcome"
                ours = ssl.create_default_context(cafile=str(trust))
                with ours.wrap_socket(plain, server_hostname="localhost") as secure:
                    return secure.recv(7) == b"welcome"
        except OSError:
            return False
        finally:
            thread.join()


def wrong_settings() -> Verdict:
    """A site with another step size or another model: refused when it joins, and before it trains."""
    lab, other = Lab(sites=SITES[:4]), Lab("clip = 5.0\n[algorithm]\nname = 'fedprox'\n", sites=())
    try:
        lab.server.hello("fir", greeting(other.learner, other.settings, "fir"))
        return False
    except Refused as refusal:
        if refusal.code != "config":
            return False
    requests = lab.server.open(SITES)
    reply = other.reply("ash", requests["ash"])
    if reply.facts["kind"] != "refusal" or lab.server.receive("ash", reply).counted:
        return False
    for site in SITES[1:4]:
        lab.server.receive(site, lab.reply(site, requests[site]))
    outcome = lab.server.close()
    return outcome.committed and "config" in outcome.refused["ash"] and lab.quiet().well


def wrong_clocks() -> Verdict:
    """The wall clock jumps by an hour either way, and a site is suspended: deadlines do not move."""
    for jump in (3600.0, -3600.0):
        lab = Lab()
        real = time.time()
        with mock.patch.object(time, "time", lambda real=real, jump=jump: real + jump):
            requests = lab.server.open(SITES)
            lab.now += 9.9
            if lab.server.due():
                return False
            for site in SITES:
                lab.server.receive(site, lab.reply(site, requests[site]))
        if not lab.server.due() or not lab.server.close().committed:
            return False
    return True


SCENARIOS: dict[int, tuple[str, Callable[[], Verdict]]] = {
    16: ("NaN or infinity in an update", not_finite),
    17: ("wrong shape, dtype or names", wrong_schema),
    18: ("size bombs: 10 GB, 1 TiB", bombs),
    19: ("objects that run code", hostile_objects),
    20: ("fuzzed payloads", fuzzed),
    21: ("lies about records and steps", lying_weights),
    24: ("strangers, impersonation, TLS", strangers),
    25: ("other settings or code at a site", wrong_settings),
    26: ("clock skew of an hour", wrong_clocks),
}

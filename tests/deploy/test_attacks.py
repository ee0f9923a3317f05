"""One site against the federation: whatever it sends, it causes nothing but its own refusal."""

import json
import math
import os
import shutil
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from deploy_case import (
    CURVATURE,
    SITES,
    answer,
    crash_after,
    data,
    everybody,
    greeting,
    learner,
    memory_folder,
    open_to_others,
    optimum,
    play,
    run_quietly,
    server_of,
    settings,
)
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as some

from fedscaffold.algorithms.scaffold import Memory
from fedscaffold.checks import InputError
from fedscaffold.cli import main
from fedscaffold.deploy import InProcess, Server, Stopped, drive, gate, parse
from fedscaffold.deploy.aggregation import norm, residual, rounding_bound, shares
from fedscaffold.deploy.audit import Audit, read_verified
from fedscaffold.deploy.gate import Asked, Refused
from fedscaffold.deploy.schema import Blob, Packet, blob
from fedscaffold.deploy.server_state import peek_state

DEPLOYED = ["scaffold", "scaffold'\noption = 1 #", "fedavg", "fedprox", "feddyn", "fednova", "sgd"]


@pytest.fixture
def tmp_path():
    folder = memory_folder()
    yield folder
    shutil.rmtree(folder)


def attacked(server, config, folder, change, by=("ant",), present=SITES):
    """One round in which the replies of some sites are changed on their way."""
    requests = server.open(present)
    for site, request in requests.items():
        reply = answer(request, learner(config.precision), config, site, folder / "sites")
        server.receive(site, change(site, reply) if site in by else reply)
    return server.close()


def full_of(value):
    """All vectors of a reply full of one number."""
    return lambda site, reply: reply._replace(
        blobs={
            name: blob(np.full(item.shape, value, item.dtype)) for name, item in reply.blobs.items()
        }
    )


def at_rounding(server):
    """Whether c is the mean of the c_i, and everything finite."""
    state = server.state
    records = (state.server, *state.memory.values())
    finite = all(np.isfinite(vector).all() for record in records for vector in record)
    return finite and residual(server.algorithm, state) <= rounding_bound(state)


HUGE = {"float64": [1e200, -1e308, 1.7e308], "float32": [1e20, -1e30, 3.4e38]}


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("clip", ["", "clip = 2.0"])
@pytest.mark.parametrize("algorithm", DEPLOYED)
def test_one_huge_reply_is_the_end_of_nobody(algorithm, clip, precision, tmp_path):
    config = settings(deploy=clip, algorithm=f"name = '{algorithm}'", top="")
    config = config._replace(precision=precision)
    server = server_of(config, tmp_path)
    everybody(server, config)
    for value in HUGE[precision]:
        outcome = attacked(server, config, tmp_path, full_of(value))
        assert outcome.committed
        assert set(outcome.heard) >= set(SITES[1:])
        assert clip or outcome.heard == SITES[1:]
        assert at_rounding(server)
        server = server_of(config, tmp_path)  # and again after a restart
    assert np.abs(server.state.x).max() < 100
    assert play(server, config, tmp_path).heard == SITES


@pytest.mark.slow
def test_after_a_huge_reply_the_run_still_reaches_the_optimum(tmp_path):
    for clip in ("", "clip = 5.0"):
        config = settings(deploy=clip, local="steps = 3\nlr = 0.3")
        folder = tmp_path / str(len(clip))
        server = server_of(config, folder)
        everybody(server, config)
        for value in HUGE["float64"]:
            attacked(server, config, folder, full_of(value))
        for _ in range(60):
            play(server, config, folder)
        np.testing.assert_allclose(server.state.x, optimum(shares(server.roster)), atol=1e-9)
        assert residual(server.algorithm, server.state) < 1e-12


@pytest.mark.parametrize(("precision", "value"), [("float64", 1e13), ("float32", 1e6)])
def test_a_large_reply_leaves_no_bias_behind(precision, value, tmp_path):
    """c is a sum: the rounding of 1e13 would stay in it, and in the model, for good."""
    config = settings(local="steps = 3\nlr = 0.3")._replace(precision=precision)
    server = server_of(config, tmp_path)
    everybody(server, config)
    outcome = attacked(server, config, tmp_path, full_of(value))
    assert outcome.heard == SITES  # within bounds: nothing but deploy.clip would stop it
    for i in range(75 if precision == "float64" else 50):
        play(server, config, tmp_path)
        if i == 20:
            server = server_of(config, tmp_path)
    eps = float(np.finfo(precision).eps)
    goal = optimum(shares(server.roster))
    np.testing.assert_allclose(server.state.x, goal, atol=1000 * eps * np.abs(goal).max())
    assert residual(server.algorithm, server.state) <= rounding_bound(server.state) < 1e-10
    assert "remade" in {event["event"] for event in read_verified(tmp_path / "audit.jsonl")}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("algorithm", DEPLOYED)
def test_the_clip_bounds_what_a_site_does_to_the_model_whatever_steps_it_claims(
    algorithm, steps, tmp_path
):
    """The same round with two opposite attacks: the models differ by no more than twice the site's share of the cap."""
    steps = 1 if algorithm == "sgd" else steps
    config, ends = settings(deploy="clip = 2.0", algorithm=f"name = '{algorithm}'"), []
    for sign in (1.0, -1.0):
        folder = tmp_path / str(sign)
        server = server_of(config, folder)
        everybody(server, config)
        play(server, config, folder)

        def change(site, reply, sign=sign):
            return full_of(sign * 1e3)(site, reply)._replace(facts={**reply.facts, "steps": steps})

        assert attacked(server, config, folder, change).heard == SITES
        ends.append(server.state.x)
    most = (
        2 * 2.0 / len(SITES) * (2 if algorithm == "feddyn" else 1)
    )  # FedDyn's server counts a move in x and in c
    assert np.linalg.norm(ends[0] - ends[1]) <= most * (1 + 1e-12)


def test_a_buffer_that_drowns_the_others_is_refused(tmp_path):
    """BatchNorm's running means are averaged like the model."""

    one = learner()
    one.schema = one.schema._replace(buffers=(("mean", (2,), "float32"),))
    config = settings()
    server = Server(
        config, one.schema, one.start, tmp_path, buffers={"mean": np.ones(2, np.float32)}
    )
    for site in SITES:
        server.hello(site, greeting(one, config, site))
    requests = server.open(SITES)
    for site, request in requests.items():
        value = 3e38 if site == "ant" else 2.0
        facts = {key: request.facts[key] for key in ("site", "round", "nonce", "schema")} | {
            "records": 2,
            "steps": 1,
        }
        facts["records"] = server.roster[site].records
        blobs = {"d": blob(np.ones(2)), "buffer.mean": blob(np.full(2, value, np.float32))}
        server.receive(site, Packet({**facts, "kind": "train"}, blobs))
    outcome = server.close()
    assert outcome.heard == SITES[1:]
    assert outcome.refused["ant"].startswith("norm")
    np.testing.assert_allclose(server.state.buffers["mean"], 2.0)


@pytest.mark.parametrize("present", [SITES, SITES[:2]])
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0, 10])
def test_one_site_neither_runs_a_counter_away_nor_moves_an_index(value, present, tmp_path):
    """A counter over its end turns negative at every site; an index out of its table ends every site's training."""
    one = learner()
    one.schema = one.schema._replace(buffers=(("batches", (), "int64"), ("places", (2,), "int64")))
    config = settings(deploy="quorum = 2")
    start = {"batches": np.array(4), "places": np.arange(2)}
    server = Server(config, one.schema, one.start, tmp_path, buffers=start)
    for site in SITES:
        server.hello(site, greeting(one, config, site))
    requests = server.open(present)
    for site, request in requests.items():
        facts = {key: request.facts[key] for key in ("site", "round", "nonce", "schema")}
        facts |= {"records": server.roster[site].records, "steps": 3, "kind": "train"}
        batches, places = (value, np.full(2, value)) if site == "ant" else (7, np.arange(2))
        buffers = {"buffer.batches": blob(np.array(batches)), "buffer.places": blob(places)}
        server.receive(site, Packet(facts, {"d": blob(np.ones(2)), **buffers}))
    assert server.close().heard == present
    assert isinstance(server.state.buffers["batches"], np.ndarray)  # torch takes no NumPy scalars
    assert 4 <= server.state.buffers["batches"] <= 7
    assert server.state.buffers["batches"] == 7 or present != SITES
    np.testing.assert_array_equal(server.state.buffers["places"], np.arange(2))


def test_it_is_named_and_told(tmp_path):
    config = settings()
    server = server_of(config, tmp_path)
    everybody(server, config)
    assert (
        attacked(server, config, tmp_path, full_of(1e200))
        .refused["ant"]
        .startswith("norm: its update is")
    )
    assert (
        attacked(server, config, tmp_path, full_of(1.7e308))
        .refused["ant"]
        .startswith("overflow: numbers up to")
    )
    assert "overflow" in server.open(SITES)["ant"].facts["told"]
    codes = [
        event["code"]
        for event in read_verified(tmp_path / "audit.jsonl")
        if event["event"] == "refused"
    ]
    assert codes == ["norm", "overflow"]


@pytest.mark.parametrize("state", ["server", "client"])
@pytest.mark.parametrize("algorithm", DEPLOYED)
def test_when_all_overflow_the_round_is_abandoned_and_nothing_changes(algorithm, state, tmp_path):
    """Each is finite, a majority is huge, and the server's own factor makes the sum infinite."""
    rate = "" if algorithm in ("sgd", "fednova") or "#" in algorithm else "\nserver_lr = 1e10"
    config = settings(
        deploy=f"state = '{state}'\nretries = 1", algorithm=f"name = '{algorithm}'{rate}"
    )
    server = server_of(config, tmp_path)
    everybody(server, config)
    play(server, config, tmp_path)
    before = server.state.x.tobytes()
    outcome = attacked(server, config, tmp_path, full_of(1e307), by=SITES)
    assert at_rounding(server) if state == "server" else np.isfinite(server.state.x).all()
    if not outcome.committed:
        assert server.state.x.tobytes() == before
        assert set(outcome.refused) >= set(SITES[:3])
    assert np.isfinite(server_of(config, tmp_path).state.x).all()


def test_a_c_i_that_would_overflow_is_refused_alone(tmp_path):
    """c_i+ = d - (c - c_i): the server's own sum, for one site only."""
    config = settings()
    server = server_of(config, tmp_path)
    everybody(server, config)
    play(server, config, tmp_path)
    most = np.finfo(np.float64).max
    server.state.memory["ant"] = Memory(
        np.array([most, 0.0])
    )  # what no gate has seen: a state restored by hand, say
    requests = server.open(SITES)
    for site in SITES:
        reply = answer(requests[site], learner(), config, site, tmp_path)
        if site == "ant":
            reply = reply._replace(blobs={"d": blob(np.array([most / 20, 0.0]))})
        server.receive(site, reply)
    server.open_round.updates["ant"] = server.open_round.updates["ant"]._replace(length=1.0)
    server.state.server.c[:] = -most / 4
    outcome = server.close()
    assert outcome.committed
    assert "with it ant would not be finite" in outcome.refused["ant"]


values = some.floats(width=64) | some.sampled_from(
    [5e-324, -5e-324, 1e-310, 1e150, 1e155, -1e299, 1.79e308, 0.0]
)


@contextmanager
def host(clip, precision):
    """A fresh server: what is within bounds does harm a model, and is to harm one only."""
    config = settings(deploy="clip = 3.0" if clip else "")._replace(precision=precision)
    folder = memory_folder()
    server = server_of(config, folder)
    everybody(server, config)
    try:
        yield server, config, folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@limits(max_examples=60, deadline=None)
@given(
    wrong=some.dictionaries(
        some.sampled_from(SITES), some.tuples(values, values), min_size=1, max_size=4
    ),
    steps=some.sampled_from([1, 2, 3]),
    metric=some.floats() | some.sampled_from([1e308, -1e308, 10**400, True, "x", None]),
    clip=some.booleans(),
    precision=some.sampled_from(["float32", "float64"]),
)
def test_mutated_numbers_never_stop_or_spoil_a_server(wrong, steps, metric, clip, precision):
    def change(site, reply):
        kept = reply.facts | {"steps": steps, "metric.loss": metric, "metric.\x1b[2J": 1.0}
        with np.errstate(over="ignore"):
            blobs = {
                name: blob(np.array(wrong[site]).astype(item.dtype))
                for name, item in reply.blobs.items()
            }
        return Packet(kept, blobs)

    with host(clip, precision) as (server, config, folder):
        outcome = attacked(server, config, folder, change, by=tuple(wrong))
        assert set(outcome.heard) | set(outcome.refused) == set(SITES)
        assert at_rounding(server)
        assert all(np.isfinite(value) for value in outcome.metrics.values())
        if len(wrong) < 3:  # a majority is honest
            assert outcome.committed
            assert set(SITES) - set(wrong) <= set(outcome.heard)
        read_verified(folder / "audit.jsonl", server.audit.head)
        assert np.isfinite(server_of(config, folder).state.x).all()


def test_norms_neither_overflow_nor_vanish():
    rng = np.random.default_rng(0)
    for scale in (1e-300, 1e-160, 1.0, 1e160, 1e300):
        v = rng.standard_normal(50)
        assert norm(scale * v) == pytest.approx(scale * float(np.linalg.norm(v)), rel=1e-14)
    v = rng.standard_normal(50).astype(np.float32)
    for scale in (np.float32(1e-30), np.float32(1e30)):
        exact = float(np.linalg.norm(v.astype(np.float64) * float(scale)))
        assert norm(scale * v) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    "metrics", [{}, {"metric.evil": 1.0}, {"metric.loss": "x"}, {"metric.round": 7.0}]
)
def test_one_site_neither_takes_a_metric_away_nor_adds_one(metrics, tmp_path):
    config = settings()
    server = server_of(config, tmp_path)
    everybody(server, config)

    def change(site, reply):
        kept = {
            name: value for name, value in reply.facts.items() if not name.startswith("metric.")
        }
        return reply._replace(facts=kept | metrics)

    outcome = attacked(server, config, tmp_path, change)
    assert outcome.heard == SITES
    assert list(outcome.metrics) == ["loss"]
    assert outcome.unmeasured == {"loss": ["ant"]}


# Logs


@pytest.mark.parametrize(
    "odd",
    [
        float("inf"),
        float("-inf"),
        float("nan"),
        10**5000,
        -(10**5000),
        "\ud800\udfff",
        "\x00\x1b[2J",
        b"\xff",
        {1: {2: 3}},
        np.float32(1.5),
        np.array([1, 2]),
        {"a": float("nan")},
        [[[[[[1]]]]]],
        {1, 2},
        object(),
        "x" * 10**6,
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_log_line_ends_a_server(odd, tmp_path):
    log = Audit(tmp_path / "audit.jsonl")
    log.write("odd", value=odd, inner={"deep": [odd]})
    log.write("after")
    events = read_verified(tmp_path / "audit.jsonl", log.head)
    assert [event["event"] for event in events] == ["odd", "after"]
    assert max(map(len, (tmp_path / "audit.jsonl").read_text().splitlines())) < 10_000


def test_lines_that_the_disk_does_not_take_are_kept_until_it_does(tmp_path, monkeypatch):
    log = Audit(tmp_path / "audit.jsonl")
    log.write("first")
    real = os.write

    def half(fd, data):
        real(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    for i in range(3):
        log.write("unwritten", number=i)
    assert "No space left" in log.trouble
    assert [event["event"] for event in read_verified(tmp_path / "audit.jsonl", log.head)] == [
        "first"
    ]
    monkeypatch.undo()
    log.write("last")
    events = read_verified(tmp_path / "audit.jsonl", log.head)
    assert [event["event"] for event in events] == ["first", *["unwritten"] * 3, "last"]
    assert log.trouble == ""


# The gate: `Refused`, whatever comes

odd_things = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.sampled_from([2**63, -(2**63) - 1, float("nan"), float("inf"), 1e308])
    | some.sampled_from([4301, 5000]).map(lambda digits: -(10**digits))
    | some.floats()
    | some.text(max_size=20)
    | some.sampled_from(["x" * 10**5, "\ud800", "\x1b[2J", "ant", "n"])
    | some.binary(max_size=20),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
names = some.sampled_from(
    [
        "site",
        "round",
        "nonce",
        "schema",
        "records",
        "steps",
        "memory",
        "kind",
        "reason",
        "metric.loss",
        "metric.\n",
        "x",
    ]
)
odd_blobs = (
    some.none()
    | odd_things
    | some.builds(
        Blob,
        odd_things | some.just("float64"),
        odd_things
        | some.lists(some.integers(-2, 2**80), max_size=3).map(tuple)
        | some.sampled_from([4301, 5000]).map(lambda digits: (10**digits, 2))
        | some.just((2,)),
        odd_things | some.binary(min_size=16, max_size=16),
    )
)
nested = []
for _ in range(5000):
    nested = [nested]


def told():
    schema = learner().schema
    facts = {
        "site": "ant",
        "round": 2,
        "nonce": "n",
        "schema": schema.digest,
        "records": 2,
        "steps": 3,
    }
    return Packet(facts, {"d": blob(np.ones(2))}), Asked(
        "ant", 2, "n", {"d": ((2,), "float64")}, schema, records=2, most_steps=3, lr=0.5
    )


@pytest.mark.slow
@limits(max_examples=150, deadline=None)
@given(
    facts=some.dictionaries(names, odd_things) | odd_things,
    blobs=some.dictionaries(
        some.sampled_from(["d", "", "x" * 999, "\ud800"]), odd_blobs, max_size=2
    )
    | odd_things,
    keep=some.booleans(),
)
def test_every_entry_of_the_gate_refuses_whatever_comes(facts, blobs, keep):
    good, asked = told()
    if keep and isinstance(facts, dict):
        facts = good.facts | facts
    packet = Packet(facts, blobs)
    entries = [
        lambda: gate.admit(packet, asked),
        lambda: gate.check_fresh(packet, asked),
        lambda: gate.read_vector(packet, "d", np.zeros(2)),
        lambda: gate.read_array(packet, "d", (2,), "float64"),
        *(lambda name=name: gate.read_text(facts, name) for name in ("site", "memory")),
        *(lambda name=name: gate.read_printable(facts, name) for name in ("reason",)),
        *(lambda name=name: gate.read_int(facts, name) for name in ("round", "records", "steps")),
    ]
    for entry in entries:
        said = ""
        try:
            entry()
        except Refused as refusal:
            said = str(refusal)
        assert len(said) <= 500
        assert said.isprintable()


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), 2**63, nested, "9" * 5000, {"a": nested}], ids=range(6)
)
@pytest.mark.parametrize(
    "where", ["round", "records", "steps", "nonce", "site", "schema", "memory", "kind", "reason"]
)
def test_long_numbers_and_deep_nests_are_refused_at_the_server(value, where, tmp_path):
    config = settings()
    server = server_of(config, tmp_path)
    everybody(server, config, SITES[1:])
    hello = greeting(learner(), config, "ant")
    if where in hello.facts and where != "kind":
        with pytest.raises(Refused):
            server.hello("ant", hello._replace(facts={**hello.facts, where: value}))
    everybody(server, config, SITES[:1])
    for kind in ("train", "lost", "refusal"):
        outcome = attacked(
            server,
            config,
            tmp_path,
            lambda s, r, k=kind: r._replace(facts={**r.facts, "kind": k, where: value}),
        )
        assert outcome.committed
        assert where in ("kind", "reason") or outcome.heard == SITES[1:]
    assert at_rounding(server)


@pytest.mark.parametrize(
    "shape",
    [(10**5000,), (2, 10**5000), (2**63,), (-1,), (2,) * 40, [2], (2.0,), (True, 2), nested],
)
def test_shapes_of_any_size_are_refused(shape):
    packet, asked = told()
    with pytest.raises(Refused):
        gate.admit(packet._replace(blobs={"d": Blob("float64", shape, bytes(16))}), asked)


def test_what_a_site_says_cannot_steer_a_terminal(tmp_path):
    config = settings()
    server = server_of(config, tmp_path)
    everybody(server, config)
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\u2066 gone"

    def refuses(site, reply):
        return reply._replace(facts={**reply.facts, "kind": "refusal", "reason": evil})

    outcome = attacked(server, config, tmp_path, refuses)
    assert outcome.refused["ant"].isprintable()
    assert all(
        str(event.get("reason", "")).isprintable()
        for event in read_verified(tmp_path / "audit.jsonl")
    )


# The log's head


def logged(folder):
    """A finished run: its log, and the head that its last commit holds."""
    config = settings()
    run_quietly(config, folder, rounds=3)
    return config, folder / "audit.jsonl", peek_state(folder / "state").audit


def damaged(lines, how):
    swapped = [*lines[:4], lines[5], lines[4], *lines[6:]]
    return {
        "cut by one": lines[:-1],
        "cut by five": lines[:-5],
        "emptied": [],
        "beheaded": lines[1:],
        "one removed": lines[:3] + lines[4:],
        "reordered": swapped,
        "changed": [*lines[:3], lines[3].replace("joined", "jOined"), *lines[4:]],
        "doubled": lines + lines[-1:],
    }[how]


def called(words, monkeypatch):
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["fedscaffold", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


HOW = [
    "cut by one",
    "cut by five",
    "emptied",
    "beheaded",
    "one removed",
    "reordered",
    "changed",
    "doubled",
    "deleted",
    "replaced tail",
    "replaced",
]


@pytest.mark.parametrize("how", HOW)
def test_whatever_is_done_to_the_log_is_found(how, tmp_path, monkeypatch, capsys):
    config, path, head = logged(tmp_path)
    lines = path.read_text().splitlines()
    assert len(read_verified(path, head)) == head.lines == len(lines)
    if how == "deleted":
        path.unlink()
    elif how in (
        "replaced",
        "replaced tail",
    ):  # a chain of its own, whole, and longer than the old one
        path.write_text("".join(line + "\n" for line in ([] if how == "replaced" else lines[:-2])))
        forger = Audit(path)
        for i in range(len(lines) + 3):
            forger.write("opened", round=i)
    else:
        path.write_text("".join(line + "\n" for line in damaged(lines, how)))
    with pytest.raises(InputError, match=r"audit\.jsonl"):
        read_verified(path, head)
    assert called(["deploy", "status", str(tmp_path)], monkeypatch) == 2
    assert called(["diagnose", str(tmp_path)], monkeypatch) == 1
    again, _ = run_quietly(config, tmp_path, rounds=4)  # it goes on, and says so for good
    events = read_verified(path, peek_state(tmp_path / "state").audit)
    assert events[0]["event"] == "broken"
    assert "audit.jsonl" in events[0]["note"]
    assert (tmp_path / "audit.jsonl.broken-1").exists() == (how != "deleted")
    assert again.state.round == 4
    assert called(["deploy", "status", str(tmp_path)], monkeypatch) == 0
    assert "broken" in capsys.readouterr().out


def test_a_crash_at_any_point_is_no_alarm(tmp_path):
    """Power fails before any write, sync or rename: the log may be longer than its head, never shorter or other."""
    config = settings(deploy="quorum = 1")
    points, seen_longer = 0, False
    while True:
        folder = tmp_path / "crashed"
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            crash = crash_after(patch, points)
            try:
                server = server_of(config, folder)
                everybody(server, config, SITES[:2])
                play(server, config, folder, SITES[:2])
                break
            except crash:
                points += 1
        kept = peek_state(folder / "state")
        head = kept.audit if kept is not None else None
        found = read_verified(folder / "audit.jsonl", head)
        seen_longer = seen_longer or (head is not None and len(found) > head.lines)
        again = server_of(config, folder)
        assert again.audit.broken == ""
        assert "broken" not in {
            event["event"] for event in read_verified(folder / "audit.jsonl", again.audit.head)
        }
    assert points > 15
    assert seen_longer


# Records


@pytest.mark.parametrize("weights", ["records", "equal"])
def test_record_counts_are_agreed_once(weights, tmp_path):
    config = settings(top=f"weights = '{weights}'", local="steps = 3\nlr = 0.3")
    server = server_of(config, tmp_path)
    everybody(server, config)
    before = shares(server.roster)
    hello = greeting(learner(), config, "ant")
    for lie in (10**9, 1, 3):
        with pytest.raises(
            Refused, match=r"where 2 were registered; .* ant = \d+ under \[deploy.records\]"
        ):
            server.hello("ant", hello._replace(facts={**hello.facts, "records": lie}))
        server = server_of(config, tmp_path)  # nor after a restart
    assert shares(server.roster) == before
    assert play(server, config, tmp_path).heard == SITES


@pytest.mark.parametrize("state", ["server", "client"])
def test_the_operator_confirms_another_count(state, tmp_path):
    """His word changes the weight, exactly; a site that claims anything else stays out."""
    more = {"ant": 7}

    def grown(site):
        return tuple(np.repeat(a[:1], more.get(site, 4), axis=0) for a in (data(site)))

    config = settings(
        deploy=f"state = '{state}'", top="weights = 'records'", local="steps = 3\nlr = 0.3"
    )
    first = learner(data=lambda site: tuple(np.repeat(a[:1], 4, axis=0) for a in data(site)))
    server = Server(config, first.schema, first.start, tmp_path)
    drive(server, InProcess(first, config, tmp_path), 3)
    again = learner(data=grown)
    server = Server(config, again.schema, again.start, tmp_path)
    drive(server, InProcess(again, config, tmp_path), 4)
    assert server.roster["ant"].records == 4
    assert "ant" not in {
        site
        for event in read_verified(tmp_path / "audit.jsonl")[-4:]
        for site in event.get("heard", [])
    }
    confirmed = config._replace(deploy=config.deploy._replace(records=more))
    server = Server(confirmed, again.schema, again.start, tmp_path)
    drive(server, InProcess(again, confirmed, tmp_path), 60)
    assert shares(server.roster)["ant"] == 7 / 23
    goal = sum(p * CURVATURE[s] * data(s)[1][0] for s, p in shares(server.roster).items())
    goal = goal / sum(p * CURVATURE[s] for s, p in shares(server.roster).items())
    np.testing.assert_allclose(server.state.x, goal, atol=1e-9)
    assert state == "client" or residual(server.algorithm, server.state) < 1e-13


def test_a_first_claim_is_held_against_the_operators_word_or_shown(tmp_path):
    config = settings(top="weights = 'records'", extra="[deploy.records]\nant = 2")
    server = server_of(config, tmp_path)
    hello = greeting(learner(), config, "ant")
    with pytest.raises(Refused, match=r"1000000000 records where 2 stand under \[deploy.records\]"):
        server.hello("ant", hello._replace(facts={**hello.facts, "records": 10**9}))
    everybody(server, config)
    assert not any("weight" in said for said in server.warnings)
    config = settings(top="weights = 'records'")
    server = server_of(config, tmp_path / "other")
    everybody(server, config, SITES[1:])
    server.hello("ant", hello._replace(facts={**hello.facts, "records": 10**9}))
    assert any(
        said.startswith("ant has 100% of all weight by its own word") for said in server.warnings
    )


def test_nothing_bounds_a_site_without_clip_and_the_operator_is_told(tmp_path, monkeypatch, capsys):
    run_quietly(settings(), tmp_path, rounds=1)
    assert called(["deploy", "status", str(tmp_path)], monkeypatch) == 0
    assert "warning: deploy.clip is off" in capsys.readouterr().out
    assert not server_of(settings(deploy="clip = 1.0"), tmp_path / "other").warnings


# Folders that others have been in


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_logged_through_a_link(there, tmp_path):
    config, outside = settings(), tmp_path / "outside.jsonl"
    server_of(config, tmp_path / "run")
    log = tmp_path / "run" / "audit.jsonl"
    log.rename(outside)
    before = outside.read_bytes() + b"half a line"  # which a start sets apart
    outside.write_bytes(before) if there else outside.unlink()
    log.symlink_to(outside)
    with pytest.raises(InputError, match="symbolic link"):
        server_of(config, tmp_path / "run")
    assert (outside.read_bytes() == before) if there else not outside.exists()


@pytest.mark.parametrize("there", [True, False])
def test_metrics_are_not_written_through_a_link(there, tmp_path):
    outside = tmp_path / "outside.jsonl"
    if there:
        outside.write_text("theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(outside)
    run_quietly(settings(), tmp_path / "run", rounds=2)
    assert outside.exists() == there
    assert not there or outside.read_text() == "theirs"
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["round"] for row in rows] == [0, 1, 2]


def test_a_state_that_is_gone_or_older_than_its_log_is_told(tmp_path):
    config, folder = settings(), tmp_path / "run"
    run_quietly(config, folder, rounds=1)
    shutil.copytree(folder / "state", tmp_path / "old")
    assert not server_of(config, folder).behind
    run_quietly(config, folder, rounds=4)
    assert not server_of(config, folder).behind
    for put_back, words in (
        (tmp_path / "old", "state is that of round 1"),
        (None, "state is gone"),
    ):
        shutil.rmtree(folder / "state")
        if put_back is not None:
            shutil.copytree(put_back, folder / "state")
        server = server_of(config, folder)
        assert any(
            "the log knows of 4 rounds" in said and words in said for said in server.warnings
        )
        assert read_verified(folder / "audit.jsonl")[-2]["event"] == "behind"


# c_i that are said to be lost


def pretends(site, reply):
    """It says that its c_i is lost."""
    told = {**reply.facts, "kind": "lost", "reason": "c_i 1234 is expected and is not here"}
    return reply._replace(facts=told, blobs={})


def worst(server):
    """What costs the others most: to be honest where a lie would be seen, and to have lost all where it would not."""
    return lambda site, reply: (
        pretends(site, reply)
        if reply.facts["kind"] == "train" and server.roster[site].digest
        else reply
    )


def test_members_that_lose_their_c_i_each_time_hardly_slow_the_others_down(tmp_path):
    """Without a bound every second round is a resync."""
    opened, liars = 40, ("ant", "bee")
    config = settings(deploy="state = 'client'", local="steps = 3\nlr = 0.3")
    server = server_of(config, tmp_path)
    everybody(server, config)
    for i in range(opened):
        attacked(server, config, tmp_path, worst(server), by=liars)
        if i == opened // 2:
            server = server_of(config, tmp_path)  # a restart forgets nothing
    lost = opened - server.state.round
    assert 3 < lost <= 3 + math.log2(opened / 4)  # those of both are repaired at once
    resting = [
        event for event in read_verified(tmp_path / "audit.jsonl") if event["event"] == "resting"
    ]
    assert {event["site"] for event in resting} == set(liars)


def test_who_rests_is_named_and_the_optimum_is_still_everybodys(tmp_path):
    config = settings(deploy="state = 'client'", local="steps = 3\nlr = 0.3")
    server = server_of(config, tmp_path)
    everybody(server, config)
    while not any(said.startswith("ant has lost its c_i 4 times") for said in server.warnings):
        attacked(server, config, tmp_path, worst(server))
    while any(
        "lost its c_i" in said for said in server.warnings
    ):  # it rests, then it is asked again
        assert server.roster["ant"].applied < play(server, config, tmp_path).round
    for _ in range(32):
        assert play(server, config, tmp_path).heard == SITES
    np.testing.assert_allclose(server.state.x, optimum(shares(server.roster)), atol=1e-9)


def test_a_loss_in_every_round_ends_a_run_that_cannot_do_without_the_site(tmp_path):
    """Where the quorum needs everybody nobody can rest; a resync between the losses is no progress."""
    config = settings(deploy="state = 'client'\nquorum = 1.0\nretries = 3")
    server = server_of(config, tmp_path)
    asked = []

    class Lying(InProcess):
        def collect(self):
            came = super().collect()
            asked.extend(came)
            assert len(asked) < 500, "the run does not end"
            return [
                (site, worst(server)(site, reply) if site == "ant" else reply)
                for site, reply in came
            ]

    with pytest.raises(
        Stopped, match=r"round 2 failed its quorum 4 times in a row \(.*ant: c_i 1234 is expected"
    ):
        drive(server, Lying(learner(), config, tmp_path), 30, sleep=lambda seconds: None)


def test_the_rest_of_a_site_has_an_end(tmp_path):
    """Its length is a number that can be written down, whatever the site says and however often."""
    config = settings(deploy="state = 'client'")
    server = server_of(config, tmp_path)
    everybody(server, config)
    server.roster["ant"] = server.roster["ant"]._replace(lost=10**5)
    play(server, config, tmp_path)
    attacked(server, config, tmp_path, pretends)
    assert server_of(config, tmp_path).roster["ant"].rests < 2**63


def test_zeros_cannot_be_lost(tmp_path):
    config = settings(deploy="state = 'client'")
    server = server_of(config, tmp_path)
    everybody(server, config)
    outcome = attacked(server, config, tmp_path, pretends)
    assert "where zeros are expected" in outcome.refused["ant"]
    assert not server.resync


@pytest.mark.parametrize(
    ("algorithm", "state"),
    [("fedavg", "client"), ("fednova", "client"), ("scaffold", "server"), ("fedavg", "server")],
)
def test_a_c_i_that_nobody_asked_a_site_to_keep_cannot_be_named_or_lost(algorithm, state, tmp_path):
    """Believed, its loss called for a resync where there is no c: the server ended there, after every restart too."""
    config = settings(deploy=f"state = '{state}'", algorithm=f"name = '{algorithm}'")
    server = server_of(config, tmp_path)
    everybody(server, config)

    def names(site, reply):
        return reply._replace(facts={**reply.facts, "memory": "e" * 32})

    for change in (names, pretends, names):
        outcome = attacked(server, config, tmp_path, change)
        assert (outcome.kind, outcome.heard, outcome.committed) == ("train", SITES[1:], True)
        assert not server.resync
        assert at_rounding(server)
    assert "names a c_i of its own" in outcome.refused["ant"]
    assert play(server_of(config, tmp_path), config, tmp_path).heard == SITES


def test_an_operators_word_on_records_makes_no_resync_where_the_server_keeps_the_c_i(tmp_path):
    """A state in which a site had named a c_i of its own, of before that was refused."""
    config = settings(top="weights = 'records'")
    server = server_of(config, tmp_path)
    everybody(server, config)
    play(server, config, tmp_path)
    server._commit(
        server.state._replace(
            roster={s: m._replace(digest="e" * 32) for s, m in server.roster.items()}
        ),
        True,
    )
    config = settings(top="weights = 'records'", deploy="records = {ant = 7}")
    server = server_of(config, tmp_path)
    said = greeting(learner(), config, "ant")
    server.hello("ant", said._replace(facts={**said.facts, "records": 7}))
    assert play(server, config, tmp_path, SITES[1:]).kind == "train"
    assert at_rounding(server)


@pytest.mark.parametrize("memory", ["", "e" * 31, "E" * 32, "\n" * 32, "\ud800" * 32, "../" * 11])
def test_the_c_i_that_a_site_holds_is_named_by_its_fingerprint(memory, tmp_path):
    config = settings(deploy="state = 'client'")
    server = server_of(config, tmp_path)
    everybody(server, config)
    outcome = attacked(
        server,
        config,
        tmp_path,
        lambda site, reply: reply._replace(facts={**reply.facts, "memory": memory}),
    )
    assert outcome.heard == SITES[1:]
    assert "which c_i it holds" in outcome.refused["ant"]


# Names and who may read


@pytest.mark.parametrize(
    "name",
    [
        "server",
        "Server",
        "AUTHORITY",
        "ca",
        "secrets",
        "logs",
        "state",
        "link",
        "con",
        "NUL",
        "com1",
        "LPT9",
        "..",
        ".",
        "a/b",
        "../up",
        "-rf",
        "_x",
        "",
        "a" * 65,
        "a.b",
        "nоrth",
        "north\u200b",
        "a\n",
        "a b",
        "ﬁr",
        "a\x00",
        "~root",
        "*",
    ],
)
def test_names_that_collide_or_deceive_are_refused(name):
    with pytest.raises(InputError, match=r"deploy\.sites"):
        parse(f"[deploy]\nsites = ['north', {json.dumps(name)}]")


def test_names_differ_by_more_than_capitals():
    with pytest.raises(InputError, match="not by capitals alone"):
        parse("[deploy]\nsites = ['north', 'North']")
    assert parse("[deploy]\nsites = ['n-1_A', '2nd', 'servers']").deploy.sites == (
        "n-1_A",
        "2nd",
        "servers",
    )


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("state", ["server", "client"])
def test_what_a_run_leaves_is_its_owners_only(state, umask, tmp_path):
    config = settings(deploy=f"state = '{state}'")
    before = os.umask(umask)
    try:
        run_quietly(config, tmp_path / "run", rounds=2)
        run_quietly(config, tmp_path / "run", rounds=3)  # after every file was replaced
    finally:
        os.umask(before)
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"state", "audit.jsonl", "metrics.jsonl", "status.json", "model.safetensors"} <= made
    assert open_to_others(tmp_path / "run") == {}


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_kit_is_its_owners_only(umask, tmp_path):
    pytest.importorskip("cryptography")
    from fedscaffold.deploy.provisioning import make_kit

    app = tmp_path / "app"
    app.mkdir()
    (app / "app.py").write_text("")
    (app / "federation.toml").write_text("[deploy]\nsites = ['north', 'south']\n")
    (tmp_path / "sites.toml").write_text("server = 'localhost'\napp = 'app'\n")
    before = os.umask(umask)
    try:
        make_kit(tmp_path / "sites.toml", tmp_path / "kits")
    finally:
        os.umask(before)
    assert open_to_others(tmp_path / "kits") == {}
    assert [path.parent.name for path in (tmp_path / "kits").rglob("ca.key")] == ["authority"]
    for script in (tmp_path / "kits").rglob("*.sh"):
        assert "umask 077" in script.read_text().splitlines()[:3]

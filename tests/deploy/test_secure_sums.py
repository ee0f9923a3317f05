"""Secure sums, deployed: the plain run's numbers to the stated bound, whoever dies where, and nothing of a single site."""

import json
import shutil

import numpy as np
import pytest
from deploy_case import RECORDS, SITES, play, run_quietly, server_of
from deploy_case import everybody as join
from deploy_case import settings as plain
from secure_case import Case, settings, with_blob

from fedscaffold.algorithms import ALGORITHMS
from fedscaffold.checks import InputError
from fedscaffold.deploy.secure_rules import provision
from fedscaffold.secure.transcript import EXCHANGES

RECORDED = "[deploy.records]\n" + "".join(f"{site} = {n}\n" for site, n in RECORDS.items())
WEIGHTED = {"top": "weights = 'records'", "extra": RECORDED}
EPOCHS = {"local": "epochs = 1\nbatch_size = 2\nlr = 0.2"}
ROUNDS = 3


def bound(config):
    """Of the difference of two runs of `ROUNDS` rounds.

    A round adds the ring's error to the means of d and move, and what differed before passes through local steps that
    contract, times a travel below 1: at most 4 errors a round for x and c each, which the next rounds carry on. Double
    precision adds a few hundred roundings of numbers of size 10.
    """
    return 4 * ROUNDS**2 * config.ring.error + 1e-12


def both(tmp_path, algorithm="name = 'scaffold'", **more):
    """The states of the plain run and the secure one."""
    config = settings(algorithm=algorithm, **more)
    states = []
    for name, one in (
        ("plain", plain(deploy="state = 'client'", algorithm=algorithm, **more)),
        ("secure", config),
    ):
        server, summary = run_quietly(one, tmp_path / name, ROUNDS)
        assert server.state.round == ROUNDS
        states.append((server, summary))
    return config, *states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("name = 'scaffold'", {}),
        ("name = 'scaffold'", WEIGHTED | EPOCHS),
        ("name = 'fednova'", EPOCHS),
    ],
)
def test_the_run_is_the_plain_one_to_the_stated_bound(tmp_path, algorithm, more):
    config, (one, plainly), (other, securely) = both(tmp_path, algorithm, **more)
    for a, b in zip(one.state.server, other.state.server, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=bound(config))
    assert securely.metrics.keys() == plainly.metrics.keys()
    # the loss is quadratic: with curvatures below 3 at distances below 20 it moves by 100 for 1
    assert abs(securely.metrics["loss"] - plainly.metrics["loss"]) < 100 * bound(config)
    assert [m.applied for m in other.roster.values()] == [ROUNDS] * 5


# the cases above are those that take different ways through the server
@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("more", [{}, EPOCHS])
def test_every_algorithm_that_is_deployed_goes_by_sums(tmp_path, name, more):
    try:
        plain(algorithm=f"name = '{name}'", **more)
    except InputError:
        return
    config, (one, _), (other, _) = both(tmp_path, f"name = '{name}'", **more)
    for a, b in zip(one.state.server, other.state.server, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=10 * bound(config))


def test_c_is_the_mean_of_the_c_i_on_the_disks(tmp_path):
    case = Case(tmp_path, settings("limit = 1e9", **WEIGHTED))
    for _ in range(ROUNDS):
        assert case.play().committed
    # the c_i are made from the rounded message: no error of the ring, which is coarse here
    assert case.gap() < 1e-12 < case.config.ring.error


# Dropouts


@pytest.mark.slow
def test_two_of_five_die_between_masking_and_unmasking(tmp_path):
    """The round commits the sum of all five; the two are told so, and hold the c_i that counts."""
    for name, dying in (("survivors", EXCHANGES[3:]), ("reveal", EXCHANGES[4:])):
        case = Case(tmp_path / name)
        outcome = case.play(
            answers=lambda step, site, dying=dying: step not in dying or site < "dog"
        )
        assert outcome.committed
        assert outcome.heard == SITES
        assert outcome.refused == {}
        whole = Case(tmp_path / f"{name}-all")
        whole.play()
        for a, b in zip(case.server.state.server, whole.server.state.server, strict=True):
            np.testing.assert_array_equal(a, b)  # integers are exact in any order
        assert case.gap() < 1e-12
        assert case.server.roster["elk"].told == "round 1 applied"
        assert case.play().committed
        assert case.gap() < 1e-12


def test_a_round_is_of_those_that_are_there_when_two_of_five_are_away(tmp_path):
    """The threshold of three alone would be two, and sums of two are below what the sites' rules allow."""
    case = Case(tmp_path)
    outcome = case.play(present=SITES[:3])
    assert (outcome.committed, outcome.heard) == (True, SITES[:3])
    # and then all of them must stay
    died = case.play(SITES[:3], lambda step, site: site != "bee" or step in EXCHANGES[:4])
    assert not died.committed
    assert case.gap() < 1e-12


@pytest.mark.parametrize("exchange", EXCHANGES[:3])
def test_a_site_that_dies_before_its_vector_arrives_is_left_out(tmp_path, exchange):
    """As in a plain round without it: x, c and the divisor are those of the four that were heard."""
    case = Case(tmp_path / "secure")
    late = EXCHANGES.index(exchange)
    outcome = case.play(answers=lambda step, site: site != "bee" or EXCHANGES.index(step) < late)
    assert outcome.heard == ("ant", "cow", "dog", "elk")
    assert outcome.refused == {"bee": "died"}
    one = plain(deploy="state = 'client'")
    server = server_of(one, tmp_path / "plain")
    join(server, one)
    play(server, one, tmp_path / "plain", present=[site for site in SITES if site != "bee"])
    for a, b in zip(server.state.server, case.server.state.server, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=bound(case.config))
    assert case.gap() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_below_the_threshold_nothing_changes_and_the_retry_has_new_keys(tmp_path, exchange):
    case = Case(tmp_path)
    case.play()
    before, first = case.server.state, EXCHANGES.index(exchange)
    outcome = case.play(answers=lambda step, site: EXCHANGES.index(step) < first or site < "cow")
    assert not outcome.committed
    assert case.server.state.server is before.server
    assert case.server.state.round == 1
    if exchange != "reveal":
        assert not [step for _, step, request, _ in case.seen[25:] if step == "reveal"]
    assert case.play().committed
    assert case.gap() < 1e-12
    keys = [reply.blobs["keys"].data[:64] for _, step, _, reply in case.seen if step == "keys"]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_server_dies_in_each_exchange(tmp_path, exchange):
    case = Case(tmp_path)
    case.play()
    requests = case.play_until(exchange)
    case.exchange(dict(list(requests.items())[:2]))
    x = case.server.state.x
    case.restart()
    np.testing.assert_array_equal(case.server.state.x, x)
    assert case.play().committed
    assert case.server.state.round == 2
    assert case.gap() < 1e-12


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_reply_is_lost_and_the_site_asked_again(tmp_path, exchange):
    """A site that died after it had answered gives the same answer again, or none: never another."""
    case = Case(tmp_path)
    requests = case.play_until(exchange)
    first = case.ask("ant", requests["ant"])
    again = case.ask("ant", requests["ant"])
    if exchange in ("shares", "masked"):
        assert again.facts["reason"].startswith("secure: ")
        assert again.facts["reason"].endswith("already")
        assert again.blobs == {}
    elif exchange != "keys" and exchange != "survivors":  # signatures are random
        assert again == first
    case.exchange(requests, answers=lambda step, site: site != "ant")
    while requests := case.server.advance():
        case.exchange(requests)
    assert case.server.close().committed
    assert case.gap() < 1e-12


@pytest.mark.parametrize("exchange", EXCHANGES[1:])
def test_a_site_that_lost_its_record_leaves_the_sum(tmp_path, exchange):
    case = Case(tmp_path)
    requests = case.play_until(exchange)
    shutil.rmtree(tmp_path / "sites" / case.server.run / "ant" / "secure")
    reply = case.ask("ant", requests["ant"])
    assert reply.facts["reason"] == "secure: no such attempt is under way here"
    case.exchange(requests)
    while requests := case.server.advance():
        case.exchange(requests)
    outcome = case.server.close()
    assert outcome.committed
    assert ("ant" in outcome.heard) == (exchange in ("survivors", "reveal"))
    assert case.play().committed
    assert case.gap() < 1e-12


def test_a_damaged_record_is_not_replaced_by_the_one_before(tmp_path):
    """The record before would sign another list of survivors."""
    case = Case(tmp_path)
    requests = case.play_until("reveal")
    place = tmp_path / "sites" / case.server.run / "ant" / "secure"
    newest = max(place.glob("state-*"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    reply = case.ask("ant", requests["ant"])
    assert reply.facts["reason"] == "secure: no such attempt is under way here"


def test_late_repeated_and_reordered_replies_change_nothing(tmp_path):
    case = Case(tmp_path / "one")
    requests = case.server.open(SITES)
    old = []
    while requests:
        replies = [(site, case.ask(site, request)) for site, request in requests.items()]
        for site, reply in [*reversed(replies), *replies, *old]:
            case.server.receive(site, reply)
        old += replies
        requests = case.server.advance()
    assert case.server.close().heard == SITES
    for site, reply in old:
        assert not case.server.receive(site, reply).counted
    other = Case(tmp_path / "other")
    other.play()
    np.testing.assert_array_equal(case.server.state.x, other.server.state.x)


def test_a_deadline_ends_an_exchange_and_the_round_goes_on(tmp_path):
    now = [0.0]
    case = Case(tmp_path, settings("deadline = 10.0"), clock=lambda: now[0])
    requests = case.server.open(SITES)
    while requests:
        case.exchange({site: request for site, request in requests.items() if site != "cow"})
        assert case.server.waiting == (("cow",) if "cow" in requests else ())
        now[0] += 11
        assert case.server.due()
        requests = case.server.advance()
        assert not requests or not case.server.due()
    outcome = case.server.close()
    assert outcome.heard == ("ant", "bee", "dog", "elk")
    assert outcome.refused == {"cow": "no reply before the deadline (exchange 'keys')"}


# Resync


@pytest.mark.slow
def test_a_lost_c_i_is_made_good_by_a_secure_sum(tmp_path):
    case = Case(tmp_path)
    case.play()
    shutil.rmtree(tmp_path / "sites" / case.server.run / "cow")
    outcome = case.play()
    assert outcome.refused["cow"].startswith("c_i ")
    assert case.server.resync
    outcome = case.play()
    assert (outcome.committed, outcome.kind) == (True, "resync")
    assert case.server.roster["cow"].digest == ""
    # the c_i are rounded to the ring in this sum alone
    assert case.gap() < 2 * case.config.ring.error + 1e-12
    assert not any("c_i" in reply.blobs for *_, reply in case.seen)
    assert case.play().kind == "train"
    assert case.gap() < 2 * case.config.ring.error + 1e-12


def test_a_resync_succeeds_where_most_have_lost_theirs(tmp_path):
    case = Case(tmp_path)
    case.play()
    for site in SITES[:4]:
        shutil.rmtree(tmp_path / "sites" / case.server.run / site)
    assert not case.play().committed
    assert case.play().kind == "resync"
    assert [site for site, m in case.server.roster.items() if m.digest] == ["elk"]
    assert case.gap() < 2 * case.config.ring.error + 1e-12


def test_a_member_leaves_and_another_joins(tmp_path):
    case = Case(tmp_path, settings(**WEIGHTED), sites=SITES[:4])
    case.play()
    case.server.leave("bee")
    assert case.play().kind == "resync"
    join(case.server, case.config, ["elk"])
    assert case.play().heard == ("ant", "cow", "dog", "elk")
    assert case.gap() < 2 * case.config.ring.error + 1e-12


# Garbage


def garbled(exchange, how):
    def change(step, site, reply):
        if step != exchange or site != "bee":
            return reply
        ((name, held),) = reply.blobs.items()
        rng = np.random.default_rng(0)
        size = int(np.prod(held.shape)) if how == "random" else 3
        dtype = "uint8" if held.dtype == "uint8" else "uint64"
        array = rng.integers(0, 256 if dtype == "uint8" else 2**64, size, dtype=dtype)
        return with_blob(reply, name, array.reshape(held.shape) if how == "random" else array)

    return change


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_garbage_of_another_shape_is_refused_and_its_sender_named(tmp_path, exchange):
    case = Case(tmp_path)
    outcome = case.play(change=garbled(exchange, "short"))
    assert outcome.committed
    if EXCHANGES.index(exchange) < 3:
        assert outcome.refused["bee"].startswith("schema")
        assert "bee" not in outcome.heard
    log = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [e["site"] for e in map(json.loads, log) if e["event"] == "refused"] == ["bee"]
    assert case.gap() < 1e-12


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_garbage_of_the_right_shape(tmp_path, exchange):
    """The sender is named, but for a masked vector: of a sum nobody can say whose part was garbage."""
    case = Case(tmp_path)
    outcome = case.play(change=garbled(exchange, "random"))
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    refused = [e["site"] for e in events if e["event"] == "refused"]
    if exchange == "masked":
        # 192 sums are uniform mod 2^64, and the bound leaves less than half of the ring
        assert not outcome.committed
        (said,) = [e["note"] for e in events if e["event"] == "garbage"]
        assert "which one cannot be known" in said
        assert outcome.refused == dict.fromkeys(SITES, said)  # what the run says when it gives up
        assert refused == []
    elif (
        exchange == "shares"
    ):  # found when its seed is to be recovered: abandoned, and done without it
        assert not outcome.committed
        assert refused == ["bee"]
        outcome = case.play()
        assert outcome.heard == ("ant", "cow", "dog", "elk")
    else:
        assert outcome.committed
        assert refused == ["bee"]
        assert ("bee" in outcome.heard) == (exchange in ("survivors", "reveal"))
    if exchange != "masked":
        assert case.gap() < 1e-12


def test_the_round_after_garbage_is_the_round_without_it(tmp_path):
    case = Case(tmp_path / "one")
    assert not case.play(change=garbled("masked", "random")).committed
    assert case.play().committed
    other = Case(tmp_path / "other")
    other.play()
    np.testing.assert_array_equal(case.server.state.x, other.server.state.x)


# What is told


def test_nothing_of_a_single_site_is_in_its_replies_or_the_log(tmp_path):
    case = Case(tmp_path, settings(local="epochs = 1\nbatch_size = 2\nlr = 0.2"))
    for _ in range(2):
        case.play()
    case.play(evaluate=True)
    common = {"site", "round", "nonce", "schema", "kind", "records", "steps"}
    for _, step, request, reply in case.seen:
        more = {"memory", "own"} if step == "masked" and request.facts["kind"] == "train" else set()
        metrics = {name for name in reply.facts if name.startswith("metric.")}
        assert reply.facts.keys() == common | more | metrics
        assert reply.facts["steps"] == 1  # never the number of steps taken
        assert metrics <= {"metric.loss"}
        assert all(reply.facts[name] == 0.0 for name in metrics)
        assert len(reply.blobs) == 1
    for line in (tmp_path / "audit.jsonl").read_text().splitlines():
        assert not json.loads(line).keys() & {"norm", "length", "metrics", "steps", "loss"}


def test_the_digest_of_a_c_i_is_salted(tmp_path):
    from fedscaffold.deploy.schema import fingerprint

    case = Case(tmp_path)
    case.play()
    for site in SITES:
        assert case.server.roster[site].digest != fingerprint(case.held(site))


def test_a_metric_that_one_site_lacks_has_no_mean_and_the_site_no_name(tmp_path, monkeypatch):
    from fedscaffold.deploy import arrays_client

    real = arrays_client.ArraysLearner.site

    def site(self, name):
        opened = real(self, name)
        if name != "cow":
            return opened
        return opened._replace(evaluate=lambda x, buffers: {"loss": float("nan")})

    monkeypatch.setattr(arrays_client.ArraysLearner, "site", site)
    outcome = Case(tmp_path).play(evaluate=True)
    assert outcome.metrics == {}
    assert outcome.unmeasured == {"loss": ["1 of them"]}


@pytest.mark.slow
def test_updates_are_clipped_at_the_site(tmp_path):
    """As the server clips them where it sees them: the same x and c."""
    clip = "clip = 0.5"
    case = Case(tmp_path / "secure", settings(clip))
    one = plain(deploy=clip)
    server = server_of(one, tmp_path / "plain")
    join(server, one)
    free = Case(tmp_path / "free")
    for _ in range(ROUNDS):
        play(server, one, tmp_path / "plain")
        case.play()
    free.play()
    for a, b in zip(server.state.server, case.server.state.server, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=bound(case.config))
    assert case.gap() < 1e-12
    assert np.linalg.norm(free.server.state.x - case.server.state.x) > 0.1


def test_numbers_beyond_the_limit_are_refused_by_name_and_not_clipped(tmp_path):
    case = Case(tmp_path, settings("limit = 4.0"))
    outcome = case.play()  # d of elk, whose centre is at (4, -15), is beyond it
    assert "elk" in outcome.refused
    assert outcome.refused["elk"] == "range: d has numbers beyond deploy.limit = 4"


# With what else there is


@pytest.mark.slow
def test_private_sites_sum_their_noised_updates_and_a_new_attempt_costs_nothing(tmp_path):
    """x, c and c_i by hand from the sites' own draws; an attempt that is abandoned once all vectors were masked is repeated."""
    import private_case as private

    pytest.importorskip("dp_accounting")
    config = private.settings(deploy="state = 'client'\nsecure = true")
    provision(config, tmp_path, tmp_path / "sites")
    server = private.server_of(config, tmp_path)
    for site in private.SITES:
        server.hello(site, private.greeting(private.learner(), config, site))
    for deaths in (1, 0):
        requests = server.open(private.SITES)
        while requests:
            for site, request in requests.items():
                if deaths and request.facts["exchange"] == "survivors":
                    server.failed(site, "died")
                else:
                    server.receive(site, private.ask(request, config, tmp_path))
            requests = server.advance()
        assert server.close().committed == (not deaths)
    p = {site: n / sum(private.COUNTS.values()) for site, n in private.COUNTS.items()}
    x, c, _ = private.by_hand(tmp_path, [private.SITES], p)
    atol = 4 * config.ring.error + 1e-12
    np.testing.assert_allclose(server.state.x, x, rtol=0, atol=atol)
    np.testing.assert_allclose(server.state.server.c, c, rtol=0, atol=atol)
    assert [len(private.ledger_of(tmp_path, site).charges) for site in private.SITES] == [1, 1, 1]
    assert set(server.spent) == set(private.SITES)


@pytest.mark.slow
def test_buffers_are_averaged_by_sums_too(tmp_path):
    """A torch network with batch normalisation: running means and the counter of batches are those of the plain run."""
    torch = pytest.importorskip("torch")
    from fedscaffold.deploy import InProcess, Server, TorchLearner, drive, parse

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    def data(site):
        source = torch.Generator().manual_seed(ord(site))
        x = torch.randn(8, 3, generator=source, dtype=torch.float64)
        return x, x[:, :2] + ord(site) % 5

    def loss(module, batch):
        return ((module(batch[0]) - batch[1]) ** 2).mean()

    found = []
    for secure in ("false", "true"):
        config = parse(
            "precision = 'float64'\n[local]\nsteps = 2\nlr = 0.1\nbatch_size = 4\n[deploy]\n"
            f"sites = ['a', 'b', 'c']\nwait = 0\nstate = 'client'\nsecure = {secure}\n"
        )
        learner = TorchLearner(model, loss, data, precision="float64")
        folder = tmp_path / secure
        server = Server(config, learner.schema, learner.start, folder, buffers=learner.buffers)
        drive(server, InProcess(learner, config, folder), 2)
        found.append(server.state)
    atol = 40 * config.ring.error + 1e-12
    np.testing.assert_allclose(found[1].x, found[0].x, rtol=0, atol=atol)
    assert found[0].buffers.keys() == found[1].buffers.keys()
    for name, value in found[0].buffers.items():
        assert found[1].buffers[name].dtype == value.dtype
        np.testing.assert_allclose(found[1].buffers[name], value, rtol=0, atol=atol)
    counters = [v for v in found[1].buffers.values() if v.dtype.kind == "i"]
    assert [int(v) for v in counters] == [4]  # two rounds of two batches


# Settings


@pytest.mark.parametrize(
    ("deploy", "more", "said"),
    [
        ("secure = true", {}, 'needs deploy.state = "client"'),
        ("secure = 1\nstate = 'client'", {}, "must be true or false"),
        ("secure = true\nstate = 'client'", {"top": "weights = 'records'"}, r"\[deploy.records\]"),
        ("secure = true\nstate = 'client'\nlimit = 1e17", {}, "smaller limit"),
        ("secure = true\nstate = 'client'\nthreshold = 1.5", {}, "deploy.threshold"),
        (
            "secure = true\nstate = 'client'\nclip = 1.0",
            EPOCHS | {"algorithm": "name = 'fednova'"},
            "needs local.steps",
        ),
    ],
)
def test_what_does_not_go_with_secure_sums_is_refused_by_name(deploy, more, said):
    with pytest.raises(InputError, match=said):
        plain(deploy=deploy, **more)


def test_two_sites_are_too_few():
    from fedscaffold.deploy import parse

    with pytest.raises(InputError, match="at least 3 sites"):
        parse("[deploy]\nsites = ['a', 'b']\nstate = 'client'\nsecure = true")


def test_the_server_needs_the_list_of_identities(tmp_path):
    case = Case(tmp_path)
    (tmp_path / "identities.toml").unlink()
    with pytest.raises(InputError, match="secure sums need the public keys of all sites"):
        case.server.open(SITES)

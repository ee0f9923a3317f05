"""A site's own ledger: charged before training, replayed byte for byte, never overspent, put back, killed, lost."""

import json
import shutil

import numpy as np
import private_case as case
import pytest
from private_case import SITES, STEPS

from fedscaffold.deploy import Stopped
from fedscaffold.deploy.schema import Blob, Packet
from fedscaffold.deploy.site_privacy import PrivateSite
from fedscaffold.deploy.site_statement import state_site
from fedscaffold.privacy.accounting import epsilon
from fedscaffold.state import StateError

COSTLY = "clip = 0.7\nnoise = 2.0\ndelta = 1e-3"  # few rounds fit into a small budget


def resend(request, **facts):
    """The same request, sent once more."""
    return Packet({**request.facts, "nonce": "again", **facts}, dict(request.blobs))


def moved(request, name, by):
    """The same request with another vector."""
    held = request.blobs[name]
    data = (np.frombuffer(held.data) + by).tobytes()
    return Packet(dict(request.facts), {**request.blobs, name: Blob(held.dtype, held.shape, data)})


def direction(reply):
    assert "d" in reply.blobs, reply.facts
    return np.frombuffer(reply.blobs["d"].data)


def test_a_request_that_comes_again_is_answered_with_the_same_bytes_and_costs_nothing(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    first = case.ask(requests["ant"], config, tmp_path)
    one = case.learner()
    one.record_gradients = None  # a second training would fail
    one.site = lambda name, site=one.site: site(name)._replace(not_private=lambda: None)
    again = case.ask(resend(requests["ant"]), config, tmp_path, one)
    assert again.blobs == first.blobs
    assert again.facts == first.facts | {"nonce": "again"}
    assert len(case.ledger_of(tmp_path, "ant").charges) == 1


@pytest.mark.parametrize("name", ["x", "shift"])
def test_another_model_or_shift_in_the_same_round_is_charged_and_has_noise_of_its_own(
    tmp_path, name
):
    """Equal noise would cancel in the difference, and leave the difference of two clipped sums."""
    config = case.settings(local=f"steps = {STEPS}\nlr = {case.LR}\nbatch_size = 1.0")
    _, requests = case.requests_of(config, tmp_path)
    first = direction(case.ask(requests["ant"], config, tmp_path))
    second = direction(case.ask(moved(requests["ant"], name, 1e-9), config, tmp_path))
    ledger = case.ledger_of(tmp_path, "ant")
    assert [charge.round for charge, _ in ledger.charges] == [1, 1]
    scale = case.NOISE * case.CLIP / case.COUNTS["ant"] / np.sqrt(STEPS)
    assert np.abs(second - first).max() > 0.01 * scale  # the models differ by 1e-9
    third = direction(case.ask(requests["ant"], config, tmp_path))  # after another: charged anew
    assert len(case.ledger_of(tmp_path, "ant").charges) == 3
    assert np.abs(third - first).max() > 0.01 * scale


def test_a_round_that_misses_its_quorum_is_tried_again_at_no_cost(tmp_path):
    """By a server that was started anew, too: the vectors are the same, and so are the replies."""
    config, sent = case.settings(deploy="quorum = 3"), []
    for attempt in range(3):
        server, requests = case.requests_of(config, tmp_path)
        replies = {site: case.ask(q, config, tmp_path) for site, q in requests.items()}
        sent.append({site: reply.blobs for site, reply in replies.items()})
        for site in SITES[: attempt + 1]:
            assert server.receive(site, replies[site]).counted
        assert server.close().committed == (attempt == 2)
    assert sent[0] == sent[1] == sent[2]
    assert [len(case.ledger_of(tmp_path, site).charges) for site in SITES] == [1, 1, 1]


def test_a_site_that_fails_in_training_has_been_charged_and_goes_on_from_that_charge(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    seen = []

    def failing(params, batch):
        seen.append(len(case.ledger_of(tmp_path, "ant").charges))
        raise KeyError("patient 4711")

    reply = case.ask(requests["ant"], config, tmp_path, case.learner(record_gradients=failing))
    assert seen == [1]  # before the first gradient
    assert reply.facts["kind"] == "refusal"
    assert "KeyError" not in reply.facts["reason"]  # the type would tell of a record
    again = case.ask(resend(requests["ant"]), config, tmp_path)
    assert np.isfinite(direction(again)).all()
    assert len(case.ledger_of(tmp_path, "ant").charges) == 1


def test_no_round_is_trained_beyond_the_budget_and_the_run_ends_there(tmp_path):
    rate = {site: min(1.0, 20 / n) for site, n in case.COUNTS.items()}
    one_round = epsilon(noise=2.0, rate=rate["cow"], steps=STEPS, delta=1e-3)
    budget = 1.5 * one_round
    local = f"steps = {STEPS}\nlr = {case.LR}\nbatch_size = 20"
    config = case.settings(f"stop_at_epsilon = {budget}", table=COSTLY, local=local)
    server, summary = case.run(config, tmp_path, rounds=60)
    assert summary.rounds == server.state.round < 60
    assert (tmp_path / "model.safetensors").is_file()
    for site in SITES:
        taken = sum(charge.steps for charge, _ in case.ledger_of(tmp_path, site).charges)
        given = {"noise": 2.0, "rate": rate[site], "delta": 1e-3}
        assert epsilon(steps=taken, **given) <= budget
        assert summary.epsilon[site] == pytest.approx(epsilon(steps=taken, **given), rel=1e-9)
        if site != "ant":  # it alone is less than a quorum
            assert epsilon(steps=taken + STEPS, **given) > budget
            assert summary.missed[site]["cause"].startswith("budget: another round would take")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, summary.rounds + 1))
    told = rows[-1]["epsilon_by_site"]
    assert rows[-1]["epsilon"] == max(told.values())
    assert told["cow"] == summary.epsilon["cow"]
    assert told["ant"] < summary.epsilon["ant"]  # also charged for the round without a quorum


def test_runs_share_the_budget_of_the_ledger(tmp_path):
    """A second run, and one that was started anew by a server that forgot all, compose with the first."""
    table = "clip = 0.7\nnoise = 2.0\ndelta = 1e-3\nstop_at_epsilon = 1e6"
    config = case.settings(table=table)
    case.run(config, tmp_path, rounds=2)
    for path in ("state", "audit.jsonl", "metrics.jsonl", "status.json"):
        where = tmp_path / path
        shutil.rmtree(where) if where.is_dir() else where.unlink()
    server, _ = case.run(config, tmp_path, rounds=1)
    assert len({charge.run for charge, _ in case.ledger_of(tmp_path, "ant").charges}) == 2
    whole = epsilon(noise=2.0, rate=8 / 40, steps=3 * STEPS, delta=1e-3)
    assert server.spent["ant"] == pytest.approx(whole, rel=1e-9)


def test_a_run_with_other_settings_is_charged_on_top_of_what_was_spent(tmp_path):
    """After the site has changed its rules by its own hand."""
    first = case.settings(table=COSTLY)
    case.run(first, tmp_path / "a", rounds=1)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "sites", tmp_path / "b" / "sites")
    more = COSTLY.replace("2.0", "4.0")
    with pytest.raises(Stopped, match=r"noise = 4\.0 is asked of"):
        case.run(case.settings(table=more), tmp_path / "b", rounds=1)
    for site in SITES:
        rules = case.place(tmp_path / "b", site) / "privacy.toml"
        rules.write_text(rules.read_text().replace("noise = 2.0", "noise = 4.0"))
    server, _ = case.run(case.settings(table=more), tmp_path / "b", rounds=1)
    steps = {"rate": 1.0, "steps": STEPS, "delta": 1e-3}
    # of Gaussians on all records: the noises' inverse squares add up
    both = (1 / 2.0**2 + 1 / 4.0**2) ** -0.5
    assert server.spent["cow"] == pytest.approx(epsilon(noise=both, **steps), rel=2e-3)
    assert server.spent["cow"] > epsilon(noise=2.0, **steps)


def test_an_old_ledger_put_back_is_refused_by_what_the_site_stores(tmp_path):
    config = case.settings()
    case.run(config, tmp_path, rounds=1)
    path = case.place(tmp_path, "ant") / "privacy.ledger"
    old = path.read_bytes()
    case.run(config, tmp_path, rounds=2)
    path.write_bytes(old)
    _, summary = case.run(config, tmp_path, rounds=3)
    assert "charging its privacy ledger failed: InputError" in summary.missed["ant"]["cause"]
    assert path.read_bytes() == old
    text = "".join(p.read_text() for p in (tmp_path / "sites" / "errors").iterdir())
    assert "it lacks charges" in text
    with pytest.raises(StateError, match="it lacks charges"):  # nor is it stated to anybody
        state_site(path.parent)
    path.unlink()  # and one that is gone, with its secret
    (path.parent / "secret").unlink()
    _, summary = case.run(config, tmp_path, rounds=4)
    assert "charging its privacy ledger failed" in summary.missed["ant"]["cause"]
    assert not path.exists()


def test_a_whole_folder_put_back_is_refused_by_what_the_server_knows(tmp_path):
    config = case.settings()
    case.run(config, tmp_path, rounds=1)
    shutil.copytree(tmp_path / "sites", tmp_path / "old")
    case.run(config, tmp_path, rounds=2)
    shutil.rmtree(tmp_path / "sites")
    (tmp_path / "old").rename(tmp_path / "sites")
    server = case.server_of(config, tmp_path)
    outcome = case.drive(server, case.InProcess(case.learner(), config, tmp_path), 2)
    assert outcome.rounds == 2  # nothing is asked
    with pytest.raises(Stopped, match="lacks charges of this run that the server knows of"):
        case.run(config, tmp_path, rounds=3)


def test_a_whole_folder_put_back_never_repeats_noise_at_another_model(tmp_path):
    """Where nothing can tell: equal requests have equal bytes, and others noise of their own."""
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    case.ask(resend(requests["ant"], run="before"), config, tmp_path)
    shutil.copytree(tmp_path / "sites", tmp_path / "old")
    first = case.ask(requests["ant"], config, tmp_path)
    shutil.rmtree(tmp_path / "sites")
    shutil.copytree(tmp_path / "old", tmp_path / "sites")
    assert case.ask(requests["ant"], config, tmp_path).blobs == first.blobs
    shutil.rmtree(tmp_path / "sites")
    (tmp_path / "old").rename(tmp_path / "sites")
    other = case.ask(moved(requests["ant"], "x", 1e-9), config, tmp_path)
    scale = case.NOISE * case.CLIP / case.BATCH / np.sqrt(STEPS)
    assert np.abs(direction(other) - direction(first)).max() > 0.01 * scale


def test_a_new_secret_is_no_excuse_for_noise_that_nobody_charged(tmp_path):
    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    case.ask(requests["ant"], config, tmp_path)
    (case.place(tmp_path, "ant") / "secret").unlink()
    again = case.ask(resend(requests["ant"]), config, tmp_path)
    assert len(case.ledger_of(tmp_path, "ant").charges) == 2
    assert again.facts["charged"] == 2


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda where: _change(where / "privacy.ledger", b'"steps": 3', b'"steps": 1'), "charging"),
        (lambda where: (where / "privacy.toml").unlink(), "privacy.toml of ant is gone"),
        (lambda where: (where / "privacy.toml").write_text("noise = 9"), "reading its own privacy"),
        (lambda where: (where / "secret").write_bytes(b"short"), "charging its privacy ledger"),
        (lambda where: (where / "secret").chmod(0o644), "charging its privacy ledger"),
    ],
    ids=["changed ledger", "no rules", "other rules", "short secret", "open secret"],
)
def test_what_is_damaged_is_not_trained_with(tmp_path, harm, said):
    config = case.settings()
    case.run(config, tmp_path, rounds=1)
    before = case.ledger_of(tmp_path, "ant").head
    harm(case.place(tmp_path, "ant"))
    _, summary = case.run(config, tmp_path, rounds=2)
    assert said in summary.missed["ant"]["cause"]
    if "changed" not in str(harm):
        try:
            assert case.ledger_of(tmp_path, "ant").head == before
        except StateError:
            assert said == "charging"


def _change(path, old, new):
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new))


def test_without_an_accountant_nothing_is_trained(tmp_path, monkeypatch):
    import sys

    config = case.settings()
    _, requests = case.requests_of(config, tmp_path)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    reply = case.ask(requests["ant"], config, tmp_path)
    assert reply.facts["reason"].startswith("privacy: privacy needs an accountant")
    assert not case.place(tmp_path, "ant").exists()


def test_a_ledger_in_use_by_another_process_is_not_charged(tmp_path):
    from fedscaffold.state import locked

    config = case.settings()
    case.run(config, tmp_path, rounds=1)
    with locked(case.place(tmp_path, "ant") / ".lock"):
        _, summary = case.run(config, tmp_path, rounds=2)
    assert "charging its privacy ledger failed" in summary.missed["ant"]["cause"]
    assert len(case.ledger_of(tmp_path, "ant").charges) == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_whatever_comes_in_any_order_no_noise_is_free_and_none_is_used_twice(tmp_path, seed):
    """Requests of two runs at three models, failures before and after training, ledgers put back."""
    rng, config = np.random.default_rng(seed), case.settings()
    _, requests = case.requests_of(config, tmp_path)
    models = [moved(requests["ant"], "x", 1e-9 * k) for k in range(3)]
    path = case.place(tmp_path, "ant") / "privacy.ledger"
    sent, last, copies, refused = {}, {}, [], 0

    def fail(*_):
        raise OSError

    for _ in range(60):
        run, model = f"run{rng.integers(2)}", int(rng.integers(3))
        event = rng.choice(["ask", "ask", "ask", "fail", "die", "copy", "put back"])
        request = resend(models[model], run=run)
        charges = case.ledger_of(tmp_path, "ant").charges
        if event == "copy" and path.exists():
            copies.append(path.read_bytes())
        elif event == "put back" and copies and copies[0] != path.read_bytes():
            now = path.read_bytes()
            path.write_bytes(copies[0])
            assert "d" not in case.ask(request, config, tmp_path).blobs
            path.write_bytes(now)
            refused += 1
        elif event == "fail":
            case.ask(request, config, tmp_path, case.learner(record_gradients=fail))
            last[run] = model
        else:
            with pytest.MonkeyPatch.context() as patch:
                if event == "die":
                    patch.setattr(PrivateSite, "store_reply", fail)
                reply = case.ask(request, config, tmp_path)
            again = last.get(run) == model
            assert len(case.ledger_of(tmp_path, "ant").charges) - len(charges) == (not again)
            last[run] = model
            assert "d" in reply.blobs or event == "die"
            if "d" in reply.blobs:  # one that was stored before is sent, whatever happens now
                key = case.ledger_of(tmp_path, "ant").last(run)[1]
                assert sent.setdefault(key, reply.blobs["d"].data) == reply.blobs["d"].data
    vectors = np.array([np.frombuffer(data) for data in sent.values()])
    apart = np.abs(vectors[:, None] - vectors[None]).max(axis=2) + np.eye(len(vectors))
    assert len(vectors) > 10
    assert apart.min() > 1e-6  # models differ by 1e-9, and so would equal noise
    assert refused

"""The ledger: nothing that was spent is forgotten, by whatever crash, old checkpoint or other setting."""

import json
import shutil

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.privacy.accounting import Charge, compose
from fedscaffold.privacy.ledger import Ledger
from fedscaffold.runs.privacy_statement import statement
from fedscaffold.runs.run_folder import RunRecord
from fedscaffold.simulation.engine import Engine
from fedscaffold.state import StateError

DELTA = 1e-5
SETTINGS = {"clip": 1.0, "noise": 1.1, "delta": DELTA}


def charged(path):
    """A ledger with two charges of one run."""
    ledger = Ledger(path, "data", 2)
    ledger.begin("a", unit="record", seed=0, noise=1.1, rates=[0.1, 0.2])
    ledger.charge("a", rounds=1, steps=[5, 0])
    ledger.charge("a", rounds=3, steps=[15, 5])
    return ledger


def test_charges_are_read_again(tmp_path):
    path = tmp_path / "new" / "privacy.ledger"
    head = charged(path).head
    again = Ledger(path, "data", 2)
    assert again.head == head
    assert again.rounds("a") == 3
    assert again.rounds("b") == 0
    assert again.charged(without="b") == [(Charge(1.1, 0.1, 15),), (Charge(1.1, 0.2, 5),)]
    assert again.charged(without="a") == [(), ()]
    again.charge("a", rounds=2, steps=[9, 9])  # charged already
    assert again.head == head


def test_a_last_line_that_was_not_synced_is_replaced(tmp_path):
    path = tmp_path / "privacy.ledger"
    whole = charged(path)
    with path.open("ab") as file:
        file.write(b'{"kind": "charge", "run": "a", "rou')
    again = Ledger(path, "data", 2)
    assert again.head == whole.head
    again.charge("a", rounds=4, steps=[20, 5])
    assert Ledger(path, "data", 2).rounds("a") == 4


def test_damage_of_any_line_is_an_error(tmp_path):
    path = tmp_path / "privacy.ledger"
    charged(path)
    lines = path.read_bytes().splitlines(keepends=True)
    cases = [lines[:1] + lines[2:], lines[:2] + lines[3:], [*lines[:3], lines[2], lines[3]]]
    cases += [[*lines[:2], lines[2].replace(b"[5, 0]", b"[0, 0]"), lines[3]]]
    cases += [[*lines[:3], b"\x00\n"], [b"[]\n", *lines]]
    for case in cases:
        path.write_bytes(b"".join(case))
        with pytest.raises(StateError, match="is damaged; put a copy back; nothing is trained"):
            Ledger(path, "data", 2)
    path.write_bytes(b"".join(lines))
    with pytest.raises(StateError, match="of other records"):
        Ledger(path, "others", 2)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StateError, match="symbolic link"):
        Ledger(link, "data", 2)


def test_a_ledger_cut_short_or_put_back_is_refused_by_the_checkpoint(tmp_path):
    path = tmp_path / "privacy.ledger"
    head = charged(path).head
    lines = path.read_bytes().splitlines(keepends=True)
    Ledger(path, "data", 2).refuse(list(head))
    path.write_bytes(b"".join(lines[:-1]))
    for seen in (list(head), None, [9, head.hash], [2, head.hash], "x", [0, lines[-1].decode()]):
        with pytest.raises(StateError, match="lacks charges that the checkpoint knows of"):
            Ledger(path, "data", 2).refuse(seen)


def client(i, n):
    rng = np.random.default_rng(i)
    return rng.normal(size=(n, 2)), np.arange(n) % 2


PROBLEM = fs.problems.logistic([client(0, 30), client(1, 40)], l2=0.1)


def simulate(folder, rounds, algorithm=None, problem=PROBLEM, **more):
    private = fs.privacy.records(**SETTINGS | more.pop("privacy", {}))
    given = {"local_steps": 2, "lr": 0.1, "batch_size": 6, "metrics": (), "cohort": 1} | more
    return fs.simulate(
        algorithm or fs.scaffold(),
        problem,
        rounds=rounds,
        privacy=private,
        checkpoint=folder,
        every=1,
        **given,
    )


def charges(run, noise=1.1):
    return [Charge(noise, q, n) for q, n in zip(run.privacy.rates, run.privacy.steps, strict=True)]


@pytest.mark.slow
def test_going_on_costs_what_running_at_once_costs(tmp_path):
    whole = simulate(tmp_path / "whole", 6)
    simulate(tmp_path / "parts", 2)
    parts = simulate(tmp_path / "parts", 6)
    assert parts.digest == whole.digest
    assert parts.privacy.epsilon == whole.privacy.epsilon == whole.history["epsilon"][-1]
    lines = (tmp_path / "parts" / "privacy.ledger").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("rounds") for line in lines] == [None, None, *range(1, 7)]


def test_an_old_checkpoint_put_back_forgets_nothing(tmp_path):
    """The rounds that it lacks are run again with the same noise, and stay charged if they are not."""
    folder = tmp_path / "run"
    simulate(folder, 2)
    shutil.copytree(folder, tmp_path / "old")
    whole = simulate(folder, 6)
    for path in folder.glob("state-*"):
        path.unlink()
    for path in (tmp_path / "old").glob("state-*"):
        shutil.copy(path, folder)
    again = simulate(folder, 3)
    assert again.rounds == 3
    assert again.privacy.epsilon == whole.privacy.epsilon > again.history["epsilon"][-1]
    assert simulate(folder, 6).digest == whole.digest
    assert simulate(folder, 6).privacy.epsilon == whole.privacy.epsilon
    shutil.copy(tmp_path / "old" / "privacy.ledger", folder)  # the ledger itself put back
    with pytest.raises(fs.InputError, match="lacks charges that the checkpoint knows of"):
        simulate(folder, 6)
    (folder / "privacy.ledger").unlink()
    with pytest.raises(fs.InputError, match="lacks charges that the checkpoint knows of"):
        simulate(folder, 6)


@pytest.mark.parametrize("more", [{}, {"lr": 0.2}, {"privacy": {"noise": 1.3}}])
def test_a_restart_with_other_settings_is_charged_on_top(tmp_path, more):
    first = simulate(tmp_path, 4)
    for path in tmp_path.glob("state-*"):  # what --fresh does
        path.unlink()
    more = more | {"seed": 1}
    second = simulate(tmp_path, 3, **more)
    noise = more.get("privacy", {}).get("noise", 1.1)
    both = zip(charges(first), charges(second, noise), strict=True)
    wanted = max(compose(pair, DELTA) for pair in both)
    assert second.privacy.epsilon == pytest.approx(wanted, rel=1e-6)
    assert second.history["epsilon"][0] > first.history["epsilon"][-1] * (1 - 1e-9)
    assert second.privacy.before == pytest.approx(first.privacy.epsilon, rel=1e-6)
    held = RunRecord(algorithm="a", seed=1, columns={}, privacy=second.privacy.facts())
    assert "had spent epsilon" in statement(held)["Composition"]
    limited = more | {"privacy": more.get("privacy", {}) | {"stop_at_epsilon": 0.9 * wanted}}
    with pytest.raises(fs.InputError, match="is spent; after these rounds epsilon would be"):
        simulate(tmp_path, 9, **limited)


def test_other_settings_on_one_seed_would_draw_the_same_noise_and_are_refused(tmp_path):
    """What two such runs release differs by what no noise hides: the ledger adds up only independent runs."""
    given = {"precision": "float64", "cohort": 2, "batch_size": None}
    runs = [simulate(tmp_path / str(lr), 1, lr=lr, **given) for lr in (0.1, 0.2)]
    noise = SETTINGS["noise"] / 40 / np.sqrt(2)  # of a mean over two steps
    assert np.abs(runs[0].clients.c_i - runs[1].clients.c_i).max() < noise / 10
    for path in (tmp_path / "0.1").glob("state-*"):
        path.unlink()
    with pytest.raises(fs.InputError, match="drawn the noise of seed 0"):
        simulate(tmp_path / "0.1", 1, lr=0.2, **given)
    assert simulate(tmp_path / "0.1", 1, lr=0.1, **given).digest == runs[0].digest


def test_units_do_not_mix_on_a_ledger(tmp_path):
    """A run that protects records has an epsilon for whole clients that is many times as large."""
    charged(tmp_path / "privacy.ledger")
    ledger = Ledger(tmp_path / "privacy.ledger", "data", 2)
    with pytest.raises(StateError, match="it holds runs that protect single records"):
        ledger.begin("b", unit="client", seed=1, noise=1.0, rates=[1.0, 1.0])


def test_a_crash_between_charge_and_rounds_leaves_them_charged(tmp_path, monkeypatch):
    """The process dies after the charge of round 3, before its rounds: they count, whatever runs next."""
    simulate(tmp_path, 2)
    genuine = Engine.advance

    def dies(self, state, done, number, rounds=0):
        self._replace(draw=None).charge(done + number)
        raise SystemError

    monkeypatch.setattr(Engine, "advance", dies)
    with pytest.raises(SystemError):
        simulate(tmp_path, 5)
    monkeypatch.setattr(Engine, "advance", genuine)
    after = simulate(tmp_path, 2)
    assert after.rounds == 2
    assert after.privacy.steps.sum() == 2 * 3
    for path in tmp_path.glob("state-*"):
        path.unlink()
    other = simulate(tmp_path, 1, seed=5)
    pairs = zip(charges(after), charges(other), strict=True)
    wanted = max(compose(pair, DELTA) for pair in pairs)
    assert other.privacy.epsilon == pytest.approx(wanted, rel=1e-6)


def test_a_budget_can_be_raised_and_the_run_goes_on(tmp_path):
    short = simulate(tmp_path, 20, privacy={"stop_at_epsilon": 4.0})
    assert short.outcome == "budget"
    longer = simulate(tmp_path, 20, privacy={"stop_at_epsilon": 5.0})
    assert longer.rounds > short.rounds
    whole = simulate(tmp_path / "other", 20, privacy={"stop_at_epsilon": 5.0})
    assert longer.digest == whole.digest
    with pytest.raises(fs.InputError, match="is spent; after these rounds"):
        simulate(tmp_path, 20, privacy={"stop_at_epsilon": 4.0})


def test_a_resumed_run_must_be_attended_as_it_was_charged(tmp_path):
    """A function that names others when the process starts anew would leave them uncharged."""
    first = [0]
    given = {"sampling": lambda round, rng: [first[0]]}
    simulate(tmp_path, 2, **given)
    for path in tmp_path.glob("state-*"):
        path.unlink()
    assert simulate(tmp_path, 2, **given).privacy.steps.tolist() == [4, 0]
    lines = (tmp_path / "privacy.ledger").read_bytes()
    ledger = Ledger(tmp_path / "privacy.ledger", json.loads(lines.splitlines()[0])["data"], 2)
    [run] = ledger._runs
    with pytest.raises(StateError, match="charged to other clients than would come now"):
        ledger.refuse_others(run, [0, 4])


def test_other_records_need_another_folder(tmp_path):
    simulate(tmp_path, 1)
    for path in tmp_path.glob("state-*"):
        path.unlink()
    others = fs.problems.logistic([client(0, 30), client(1, 41)], l2=0.1)
    with pytest.raises(fs.InputError, match="of other records; take another folder"):
        simulate(tmp_path, 1, problem=others)


@pytest.mark.slow
def test_clients_out_of_core_are_charged_alike(tmp_path):
    kept = simulate(tmp_path / "array", 3, metrics=("drift",))
    away = simulate(tmp_path / "sparse", 3, metrics=("drift",), client_state="sparse")
    np.testing.assert_allclose(away.vector, kept.vector, rtol=1e-5, atol=1e-7)
    assert away.privacy.epsilon == kept.privacy.epsilon

"""Callbacks: what they see is the run itself, how often they look is their own word, and they change no bit."""

import numpy as np
import pytest

import fedscaffold as fs

ROUNDS = 30
NOISY = fs.problems.quadratic(num_clients=7, dim=4, mu=0.1, noise=0.01, seed=0)
ASK = {
    "rounds": ROUNDS,
    "local_steps": 3,
    "lr": 0.2,
    "cohort": 3,
    "seed": 2,
    "precision": "float64",
    "metrics": ("loss",),
}


class Seen(fs.Callback):
    """Keeps whatever it is shown."""

    def __init__(self, every=None, stop=None):
        self.every, self.stop = every, stop
        self.begun, self.looks, self.ended = [], [], []

    def begin(self, look):
        self.begun.append((look.start, look.round, look.columns))

    def after(self, look):
        model = look.model
        self.looks.append((look.start, look.round, look.columns, model, look.outcome, look.metrics))
        return np.bool_(look.round == self.stop)  # what a comparison of arrays gives

    def end(self, run):
        self.ended.append(run)


@pytest.fixture(scope="module")
def quiet():
    return fs.simulate(fs.scaffold(), NOISY, **ASK)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 7, 30, 100, None])
def test_every_round_is_told_once_and_no_bit_changes(every, quiet):
    seen = Seen(every)
    run = fs.simulate(fs.scaffold(), NOISY, **ASK, callbacks=[seen])
    assert run.digest == quiet.digest
    assert seen.begun[0][:2] == (0, 0)
    assert seen.ended == [run]
    if every is not None:
        assert [look[1] for look in seen.looks] == [*range(every, ROUNDS, every), ROUNDS]
    for name, column in quiet.history.items():
        np.testing.assert_array_equal(
            np.concatenate([look[2][name] for look in seen.looks]), column
        )
    assert [look[4] for look in seen.looks] == [None] * (len(seen.looks) - 1) + ["finished"]
    assert seen.looks[-1][5]["loss"] == quiet.history["loss"][-1]


def test_the_model_is_that_of_the_round_and_stays_after_it(quiet):
    seen = Seen(4)
    fs.simulate(fs.scaffold(), NOISY, **ASK, callbacks=[seen])
    simulator = fs.Simulator(fs.scaffold(), NOISY, **ASK)
    state = simulator.init()
    for _, round, _, model, *_ in seen.looks:
        state, _ = simulator.step(state, round - int(state.round))
        np.testing.assert_array_equal(model, simulator.params(state))
    np.testing.assert_array_equal(seen.looks[-1][3], quiet.x)


def test_callbacks_have_cadences_of_their_own(quiet):
    fast, slow = Seen(2), Seen(9)
    assert fs.simulate(fs.scaffold(), NOISY, **ASK, callbacks=[fast, slow]).digest == quiet.digest
    assert [look[1] for look in fast.looks] == list(range(2, ROUNDS + 1, 2))
    assert [look[1] for look in slow.looks] == [9, 18, 27, ROUNDS]
    assert [look[0] for look in slow.looks] == [0, 9, 18, 27]


def test_a_callback_that_ends_the_run_leaves_a_checkpoint_to_go_on_from(quiet, tmp_path):
    first, second = Seen(5, stop=15), Seen(5)
    run = fs.simulate(fs.scaffold(), NOISY, **ASK, checkpoint=tmp_path, callbacks=[first])
    assert (run.outcome, run.rounds, run.reached_at, run.diverged_at) == ("stopped", 15, None, None)
    np.testing.assert_array_equal(run.history["loss"], quiet.history["loss"][:15])
    run = fs.simulate(fs.scaffold(), NOISY, **ASK, checkpoint=tmp_path, callbacks=[second])
    assert (run.outcome, run.digest) == ("finished", quiet.digest)
    start, round, columns = second.begun[0]
    assert (start, round) == (0, 15)  # rounds of the first session are told at the beginning
    np.testing.assert_array_equal(columns["loss"], quiet.history["loss"][:15])
    assert second.looks[0][:2] == (15, 20)


def test_who_asks_to_stop_at_the_last_round_does_not_stop_it():
    run = fs.simulate(fs.scaffold(), NOISY, **ASK, callbacks=[Seen(10, stop=ROUNDS)])
    assert run.outcome == "finished"


@pytest.mark.slow
def test_outcomes_are_told():
    ask = ASK | {
        "stop_at": ("loss", 0.5 * fs.simulate(fs.scaffold(), NOISY, **ASK).history["loss"][0])
    }
    seen = Seen()
    run = fs.simulate(fs.scaffold(), NOISY, **ask, callbacks=[seen])
    assert (run.outcome, seen.looks[-1][4]) == ("target", "target")
    assert seen.looks[-1][1] == run.reached_at == run.rounds
    seen = Seen()
    run = fs.simulate(fs.fedavg(), NOISY, **(ASK | {"lr": 1e9}), callbacks=[seen])
    assert (run.outcome, seen.looks[-1][4]) == ("diverged", "diverged")
    assert seen.looks[-1][1] == run.diverged_at


def test_functions_and_other_objects_will_do(quiet):
    class Plain:
        every = 10

        def __init__(self):
            self.rounds = []

        def after(self, look):
            self.rounds.append(look.round)

    plain, losses = Plain(), []
    run = fs.simulate(
        fs.scaffold(),
        NOISY,
        **ASK,
        callbacks=[plain, lambda look: losses.extend(look.columns["loss"].tolist())],
    )
    assert plain.rounds == [10, 20, 30]
    assert losses == run.history["loss"].tolist()
    assert run.digest == quiet.digest


def test_what_is_no_callback_is_refused():
    class Never(fs.Callback):
        every = 0

    for callbacks, said in (
        ([3], "callbacks must be fs.Callback objects or functions"),
        ([Never()], "every of the callback Never must be a whole number of at least 1, got 0"),
        (Seen(), "callbacks must be a list"),
    ):
        with pytest.raises(fs.InputError, match=said):
            fs.simulate(fs.scaffold(), NOISY, **ASK, callbacks=callbacks)
    with pytest.raises(fs.InputError, match="sweep does not take callbacks"):
        fs.sweep(
            fs.scaffold(), NOISY, rounds=2, local_steps=1, lr=[0.1], seeds=2, callbacks=[Seen()]
        )

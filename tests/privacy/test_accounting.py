"""Epsilon against accountants of our own: closed forms, and privacy losses convolved here; budgets, and failing closed."""

import math
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom, norm

import fedscaffold as fs
from fedscaffold.experiments.config_file import parse, run_arguments, to_toml
from fedscaffold.privacy import accounting
from fedscaffold.privacy.accounting import Charge, capacity, compose
from fedscaffold.privacy.budget import Budget

DELTA = 1e-5


def gaussian(noise, steps, delta=DELTA):
    """The exact epsilon of Gaussian mechanisms without sampling (Balle and Wang 2018)."""
    s = noise / math.sqrt(steps)

    def excess(eps):
        far = math.exp(eps + log_ndtr(-1 / (2 * s) - eps * s))
        return norm.cdf(1 / (2 * s) - eps * s) - far - delta

    return brentq(excess, 0, 1000)


def by_convolution(noise, rate, steps, delta=DELTA, width=2e-4, reach=40.0):
    """Epsilon from the losses of a step on a grid, composed by Fourier transforms: nothing of the library."""
    edges = np.linspace(-14 * noise, 1 + 14 * noise, 400_001)
    found = 0.0
    for removed in (True, False):
        mixed = (1 - rate) * np.diff(norm.cdf(edges, 0, noise)) + rate * np.diff(
            norm.cdf(edges, 1, noise)
        )
        plain = np.diff(norm.cdf(edges, 0, noise))
        middle = (edges[1:] + edges[:-1]) / 2
        loss = np.log1p(rate * np.expm1((2 * middle - 1) / (2 * noise**2)))
        mass, loss = (mixed, loss) if removed else (plain, -loss)
        size = int(2 * reach / width)
        place = np.rint(loss / width).astype(int) + size // 2
        inside = (place >= 0) & (place < size)
        pmf = np.bincount(place[inside], mass[inside], size)
        # the rounding of losses has a mean: shift it away, or it adds up over the steps
        shift = steps * (
            (mass[inside] * (loss[inside] - (place[inside] - size // 2) * width)).sum()
        )
        spectrum = np.fft.rfft(np.fft.ifftshift(pmf))
        composed = np.fft.fftshift(np.fft.irfft(spectrum**steps, size))
        at = (np.arange(size) - size // 2) * width + shift

        def excess(eps, at=at, composed=composed):
            above = at > eps
            return (composed[above] * -np.expm1(eps - at[above])).sum() - delta

        found = max(found, brentq(excess, 0, reach - 1))
    return found


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [(0.7, 0.01, 1000), (5.0, 0.05, 5000), (0.6, 0.2, 50), (0.5, 0.2, 200)],
)
def test_no_order_of_rdp_gives_less(noise, rate, steps):
    """Orders that are no whole numbers decide only where there is no distribution of losses, above epsilon = 50."""
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    by_rdp = dp_accounting.rdp.RdpAccountant().compose(event, steps).get_epsilon(DELTA)
    found = fs.privacy.epsilon(noise=noise, rate=rate, steps=steps, delta=DELTA)
    assert found == by_rdp if by_rdp > accounting.LARGE else found < by_rdp


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (5.0, 10), (20.0, 1000), (40.0, 2000)])
def test_without_sampling_epsilon_is_the_closed_form(noise, steps):
    exact = gaussian(noise, steps)
    found = fs.privacy.epsilon(noise=noise, rate=1.0, steps=steps, delta=DELTA)
    assert exact * (1 - 1e-6) <= found <= 1.003 * exact


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [
        (1.1, 0.01, 1000),
        (1.1, 0.1, 100),
        (0.8, 0.02, 500),
        (2.0, 0.2, 300),
        (1.5, 0.05, 40),
        (4.0, 0.5, 100),
    ],
)
def test_epsilon_is_that_of_losses_convolved_here(noise, rate, steps):
    own = by_convolution(noise, rate, steps)
    found = fs.privacy.epsilon(noise=noise, rate=rate, steps=steps, delta=DELTA)
    assert own * (1 - 1e-5) <= found <= own * (1 + 1e-3)


def test_kinds_of_steps_compose():
    """Equal kinds add up; of unlike kinds the order is no matter; Gaussians compose as one."""
    one = compose([Charge(1.1, 0.1, 30), Charge(1.1, 0.1, 20)], DELTA)
    assert one == fs.privacy.epsilon(noise=1.1, rate=0.1, steps=50, delta=DELTA)
    mixed = [Charge(1.1, 0.1, 30), Charge(3.0, 1.0, 4)]
    assert compose(mixed, DELTA) == compose(mixed[::-1], DELTA)
    assert compose(mixed, DELTA) > max(compose([charge], DELTA) for charge in mixed)
    whole = gaussian(1.0, 4 / 9 + 5 / 16)
    both = compose([Charge(3.0, 1.0, 4), Charge(4.0, 1.0, 5)], DELTA)
    assert whole * (1 - 1e-6) <= both <= 1.003 * whole


def test_rooms_hold_poisson_batches_up_to_the_stated_probability():
    for records, rate in ((100, 0.08), (1000, 0.02), (5000, 0.1)):
        room, overflow = capacity(records, rate)
        assert room < records
        assert binom.logsf(room, records, rate) <= math.log(overflow)
        assert binom.logsf(0.9 * room, records, rate) > math.log(overflow)
    assert capacity(20, 0.3) == (20, 0.0)
    assert capacity(7, 1.0) == (7, 0.0)


def test_batches_that_overflow_are_accounted_for(monkeypatch):
    """A little of delta is set aside; where that does not suffice, there is no epsilon."""
    charges = [Charge(1.1, 0.1, 100)]
    free = compose(charges, DELTA)
    assert free <= compose(charges, DELTA, accounting.OVERFLOW) < free * (1 + 1e-5)
    assert compose(charges, DELTA, overflow=1e-12) == math.inf


def budget(rates=(0.1, 0.2), steps=5, **given):
    settings = fs.privacy.records(clip=1.0, noise=1.5, delta=DELTA, **given)
    everyone = np.arange(len(rates)), np.full(len(rates), steps)
    return Budget(settings, np.array(rates), np.zeros(len(rates)), lambda round: everyone)


def test_the_largest_of_all_clients_is_what_a_round_costs():
    own = budget((0.1, 0.2, 0.05))
    each = own.by_client(4)
    alone = [fs.privacy.epsilon(noise=1.5, rate=q, steps=20, delta=DELTA) for q in (0.1, 0.2, 0.05)]
    assert each.tolist() == alone
    assert own.epsilons(0, 4)[-1] == max(alone) == own.spent(4).epsilon
    assert (np.diff(own.epsilons(0, 4)) > 0).all()


def test_unlike_attendance_is_charged_by_client():
    settings = fs.privacy.records(clip=1.0, noise=1.5, delta=DELTA)
    cohorts = [np.array([0]), np.array([1]), np.array([0])]
    own = Budget(settings, np.array([0.1, 0.2]), np.zeros(2), lambda r: (cohorts[r], np.array([7])))
    assert own.steps(3).tolist() == [14, 7]
    one, two, three = own.epsilons(0, 3)
    assert one == fs.privacy.epsilon(noise=1.5, rate=0.1, steps=7, delta=DELTA)
    assert two == three == fs.privacy.epsilon(noise=1.5, rate=0.2, steps=7, delta=DELTA)


def test_a_limit_is_the_last_round_within_it():
    free = budget()
    column = free.epsilons(0, 12)
    own = budget(stop_at_epsilon=float(column[6]))
    assert own.limit(12) == 7
    assert own.limit(3) == 3
    assert budget(stop_at_epsilon=float(column[6]) - 1e-9).limit(12) == 6
    with pytest.raises(
        fs.InputError, match=r"stop_at_epsilon is 0\.1; after a round epsilon would"
    ):
        budget(stop_at_epsilon=0.1).refuse()


PROBLEM = fs.problems.logistic(
    [
        (np.random.default_rng(i).normal(size=(30 + 10 * i, 2)), np.arange(30 + 10 * i) % 2)
        for i in range(2)
    ],
    l2=0.1,
)
GIVEN = {"local_steps": 2, "lr": 0.1, "batch_size": 6, "metrics": ()}


@pytest.mark.slow
def test_a_run_stops_before_its_budget_is_exceeded():
    private = fs.privacy.records(clip=1.0, noise=1.1, delta=DELTA, stop_at_epsilon=5.0)
    run = fs.simulate(fs.scaffold(), PROBLEM, rounds=50, privacy=private, **GIVEN)
    assert run.outcome == "budget"
    assert run.rounds == len(run.history["epsilon"]) < 50
    assert run.history["epsilon"][-1] == run.privacy.epsilon <= 5.0
    assert run.privacy.by_client().max() == run.privacy.epsilon
    after = fs.privacy.epsilon(noise=1.1, rate=0.2, steps=2 * (run.rounds + 1), delta=DELTA)
    assert after > 5.0
    simulator = fs.Simulator(fs.scaffold(), PROBLEM, rounds=50, privacy=private, **GIVEN)
    state, rows = simulator.step(simulator.init(), rounds=50)
    assert rows["epsilon"].tolist() == run.history["epsilon"].tolist()
    assert len(simulator.step(state)[1]["round"]) == 0
    seen = []
    watched = fs.simulate(
        fs.scaffold(), PROBLEM, rounds=50, privacy=private, callbacks=[seen.append], **GIVEN
    )
    assert (
        np.concatenate([look.columns["epsilon"] for look in seen]).tolist()
        == rows["epsilon"].tolist()
    )
    assert watched.digest == run.digest


@pytest.mark.slow
def test_a_sweep_has_the_epsilon_of_each_seed():
    private = fs.privacy.records(clip=1.0, noise=2.0, delta=DELTA)
    given = GIVEN | {"cohort": 1, "rounds": 3, "privacy": private}
    found = fs.sweep(fs.scaffold(), PROBLEM, seeds=3, **given)
    for seed, run in enumerate(found.runs[0]):
        alone = fs.simulate(fs.scaffold(), PROBLEM, seed=seed, **given)
        assert run.history["epsilon"].tolist() == alone.history["epsilon"].tolist()
        np.testing.assert_allclose(run.vector, alone.vector, rtol=1e-5, atol=1e-7)


def test_without_an_accountant_nothing_is_trained(monkeypatch):
    private = fs.privacy.records(clip=1.0, noise=1.31, delta=DELTA)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(fs.InputError, match=r"pip install 'fedscaffold\[privacy\]'"):
        fs.Simulator(fs.scaffold(), PROBLEM, rounds=2, privacy=private, **GIVEN)


def test_an_accountant_without_a_number_ends_it(monkeypatch):
    monkeypatch.setattr(accounting, "_epsilon", lambda charges, delta: math.nan)
    private = fs.privacy.records(clip=1.0, noise=1.1, delta=DELTA)
    with pytest.raises(fs.InputError, match="the accountant has no epsilon for"):
        fs.Simulator(fs.scaffold(), PROBLEM, rounds=2, privacy=private, **GIVEN)


def test_files_have_a_table_of_privacy():
    config = parse(
        "[privacy]\nclip = 0.5\nnoise = 1.1\ndelta = 1e-5", ["privacy.stop_at_epsilon=8"]
    )
    wanted = fs.privacy.records(clip=0.5, noise=1.1, delta=1e-5, stop_at_epsilon=8)
    assert run_arguments(config)["privacy"] == wanted
    assert parse(to_toml(config)) == config
    clients = run_arguments(parse(to_toml(config), ["privacy.unit=clients"]))["privacy"]
    assert clients == fs.privacy.clients(clip=0.5, noise=1.1, delta=1e-5, stop_at_epsilon=8)
    with pytest.raises(fs.InputError, match=r"privacy\.noise must be given"):
        run_arguments(parse("[privacy]\nclip = 0.5"))
    with pytest.raises(fs.InputError, match=r"did you mean 'privacy\.noise'"):
        parse("[privacy]\nnoize = 0.5")


def test_estimators_and_deployments_refuse_it_by_name():
    with pytest.raises(fs.InputError, match="unknown parameter of FederatedClassifier 'privacy'"):
        fs.FederatedClassifier(privacy=None)
    from fedscaffold.deploy import parse as parse_deployment

    with pytest.raises(fs.InputError, match="privacy"):
        parse_deployment("[privacy]\nclip = 1.0")

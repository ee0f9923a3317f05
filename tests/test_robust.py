"""Filters by brute force, by a minimiser, and by what no order of clients may change."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as some
from scipy.optimize import minimize

import fedscaffold as fs
from fedscaffold import attacks, robust
from fedscaffold.checks import InputError

FILTERS = [robust.krum(0.2), robust.geometric_median(3), robust.norm_bound(3)]


def cohort_of(parts, p=None, last=None):
    """A cohort of everyone, by differences of vectors rather than products."""
    clients = len(parts[0])
    p = np.full(clients, 1 / clients) if p is None else np.asarray(p, float)
    norms = np.stack([np.linalg.norm(part, axis=1) for part in parts], axis=1)
    last = np.full_like(norms, np.nan) if last is None else last

    def distances(k, centre):
        return ((parts[k][:, None] - parts[k][None, :]) ** 2).sum(axis=2)

    return robust.compare(p, norms, last, norms, p, distances, np)


def random_parts(seed, clients=10, dim=4):
    random = np.random.default_rng(seed)
    return [random.normal(size=(clients, dim)) * size for size in (0.3, 20.0)]


def scaled(parts):
    """The parts beside one another, each divided by its median norm, by NumPy's own lower median."""
    pieces = []
    for part in parts:
        norms = np.sort(np.linalg.norm(part, axis=1))
        pieces.append(part / norms[(len(norms) - 1) // 2])
    return np.concatenate(pieces, axis=1)


def krum_by_hand(parts, f):
    """Multi-Krum as printed: the sum over the n - f - 2 closest others; the f largest are refused."""
    v = scaled(parts)
    n = len(v)
    scores = []
    for i in range(n):
        others = sorted(float(np.sum((v[i] - v[j]) ** 2)) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    return np.argsort(np.argsort(scores)) < n - f


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("clients", "f"), [(10, 2), (15, 3), (20, 4), (5, 1)])
def test_krum_is_that_of_the_paper(seed, clients, f):
    parts = random_parts(seed, clients)
    verdict = robust.judge(robust.krum(f / clients), cohort_of(parts), np)
    np.testing.assert_array_equal(verdict.accepted, krum_by_hand(parts, f))


def test_krum_of_weights_is_krum_of_copies():
    """A client of weight 2/12 stands for two of 1/12: its twin is at distance 0 and is not counted."""
    parts = random_parts(3, 10)
    weights = np.array([2.0, 2.0, *[1.0] * 8])
    share = weights / weights.sum()
    v = scaled_by_weight(parts, share)
    room, scores = 1 - 0.25 - 2 / 10, []
    for i in range(10):
        left, score = room, 0.0
        for distance, j in sorted((np.sum((v[i] - v[j]) ** 2), j) for j in range(10) if j != i):
            used = min(left, share[j])
            score, left = score + used * distance, left - used
        scores.append(score)
    spent, refused = 0.0, set()
    for i in np.argsort(scores)[::-1]:
        if spent + share[i] > 0.25 + 1e-9:
            break
        spent, refused = spent + share[i], refused | {int(i)}
    verdict = robust.judge(robust.krum(0.25), cohort_of(parts, share), np)
    assert set(np.flatnonzero(~verdict.accepted).tolist()) == refused


def scaled_by_weight(parts, share):
    pieces = []
    for part in parts:
        norms = np.linalg.norm(part, axis=1)
        order = np.argsort(norms)
        middle = next(i for i in range(10) if share[order[: i + 1]].sum() >= 0.5 - 1e-12)
        pieces.append(part / norms[order[middle]])
    return np.concatenate(pieces, axis=1)


def test_nobody_with_more_weight_than_the_dishonest_may_have_is_refused():
    parts = random_parts(0)
    for part in parts:
        part[0] *= 1e6
        part[3] *= 1e3
    p = np.array([0.4, *[0.6 / 9] * 9])
    verdict = robust.judge(robust.krum(0.2), cohort_of(parts, p), np)
    assert verdict.accepted[0]
    assert not verdict.accepted[3]


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_is_the_minimiser(seed):
    parts = random_parts(seed)
    parts[0][0] += 40.0
    p = np.random.default_rng(seed).uniform(0.5, 1.5, 10)
    cohort = cohort_of(parts, p / p.sum())
    v = np.concatenate(
        [part / usual for part, usual in zip(parts, cohort.usual, strict=True)], axis=1
    )

    def total(z):
        return (p * np.linalg.norm(v - z, axis=1)).sum()

    best = minimize(total, v.mean(axis=0), method="BFGS", options={"gtol": 1e-9}).x
    found = robust._distances_to_median(cohort.apart, cohort.p, np, robust._loop)
    # a minimum is flat: errors of the sum of 1e-12 are errors of the place of 1e-6
    np.testing.assert_allclose(found, np.linalg.norm(v - best, axis=1), atol=1e-5)


def test_norms_are_bound_by_the_federation_and_by_a_clients_own_last():
    """Usual norm 1: more than 3 is refused; 2 passes, but not from one that sent 0.5 before."""
    norms = np.array([[1.0], [1.0], [1.0], [3.1], [2.9], [2.0], [2.0], [0.9], [1.0]])
    last = np.array([[1.0], [1.0], [1.0], [1.0], [1.0], [0.5], [0.7], [1e-9], [np.nan]])
    p = np.full(9, 1 / 9)
    cohort = robust.compare(p, norms, last, norms, p, lambda k, i: np.zeros((9, 9)), np)
    accepted = robust.judge(robust.norm_bound(3), cohort, np).accepted
    assert accepted.tolist() == [True, True, True, False, True, False, True, True, True]


def test_a_cohort_of_liars_does_not_make_its_norms_usual():
    norms, last = np.full((3, 1), 50.0), np.full((3, 1), np.nan)
    latest, p = np.array([[50.0]] * 3 + [[1.0]] * 7), np.full(10, 0.1)
    cohort = robust.compare(p[:3], norms, last, latest, p, lambda k, i: np.zeros((3, 3)), np)
    assert not robust.judge(robust.norm_bound(3), cohort, np).accepted.any()


@pytest.mark.parametrize("filter", FILTERS, ids=lambda filter: filter.name)
@given(order=some.permutations(range(9)), seed=some.integers(0, 50))
@limits(max_examples=30, deadline=None)
def test_a_verdict_follows_the_clients_and_not_their_order(filter, order, seed):
    parts, order = random_parts(seed, 9), np.array(order)
    parts[1][0] *= 30
    p = np.random.default_rng(seed).uniform(0.5, 1.5, 9)
    one = robust.judge(filter, cohort_of(parts, p / p.sum()), np)
    shuffled = [part[order] for part in parts]
    other = robust.judge(filter, cohort_of(shuffled, p[order] / p.sum()), np)
    np.testing.assert_array_equal(one.accepted[order], other.accepted)
    assert not one.accepted[0]


@pytest.mark.parametrize("filter", FILTERS, ids=lambda filter: filter.name)
def test_a_unit_of_measure_does_not_matter(filter):
    parts = random_parts(7)
    parts[0][2] *= 30
    one = robust.judge(filter, cohort_of(parts), np).accepted
    other = robust.judge(filter, cohort_of([1e-8 * parts[0], 1e8 * parts[1]]), np).accepted
    np.testing.assert_array_equal(one, other)
    assert not one[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("filter", FILTERS, ids=lambda filter: filter.name)
def test_what_is_not_finite_is_refused_and_hides_nobody(filter, bad):
    parts = random_parts(1)
    clean = robust.judge(filter, cohort_of([part[1:] for part in parts]), np).accepted
    parts[0][0] = bad
    with np.errstate(all="ignore"):
        accepted = robust.judge(filter, cohort_of(parts), np).accepted
        everyone = robust.judge(filter, cohort_of([part * np.nan for part in parts]), np).accepted
    assert not accepted[0]
    if filter.name.startswith("norm"):
        np.testing.assert_array_equal(accepted[1:], clean)
    assert everyone.all()  # divergence is a result


@pytest.mark.parametrize(("spoilt", "others"), [(1, 1), (2, 0), (3, 0), (9, 0)])
def test_liars_that_are_not_finite_are_of_the_fifth_that_krum_refuses(spoilt, others):
    """Else each of them would cost an honest client its place."""
    parts = random_parts(0)
    parts[1][:spoilt] = np.nan
    with np.errstate(invalid="ignore"):
        accepted = robust.judge(robust.krum(0.2), cohort_of(parts), np).accepted
    assert not accepted[:spoilt].any()
    assert (~accepted[spoilt:]).sum() == others


def test_distances_of_pieces_add_up_to_those_of_vectors():
    rows = np.random.default_rng(0).normal(size=(6, 9))
    rows[5] *= 1e12  # an outlier costs the others no digits
    pieces = [slice(0, 4), slice(4, 9)]
    found = sum(robust.squared_distances(rows[:, part], rows[0, part], np) for part in pieces)
    exact = ((rows[:, None] - rows[None, :]) ** 2).sum(axis=2)
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    np.testing.assert_allclose(found[:5, :5], exact[:5, :5], rtol=1e-12)


def test_filters_are_read_from_words():
    assert robust.of("krum:0.2") is robust.krum(0.2) is robust.of(robust.krum(0.2))
    assert robust.of("none") is None
    for text, said in [
        ("krum:0.6", "most must be below 0.5"),
        ("krum:many", "krum needs a number, such as krum:0.2"),
        ("crum:0.2", "did you mean 'krum'"),
        ("norm_bound:0.5", "beyond must be at least 1"),
        (3, "robust must be a filter such as"),
    ]:
        with pytest.raises(InputError, match=said):
            robust.of(text)


def test_attacks_are_what_their_formulas_say():
    rows = np.random.default_rng(2).normal(size=(6, 3)) + 1.0
    bad, p = np.array([True, True, False, False, False, False]), np.full(6, 1 / 6)
    good = rows[2:]
    mean = good.mean(axis=0)
    for attack, expected in [
        (attacks.sign_flip([0, 1], scale=2), -2 * rows[:2]),
        (attacks.scaling([0, 1], factor=7), 7 * rows[:2]),
        (attacks.constant([0, 1], value=-3), np.full((2, 3), -3.0)),
        (attacks.alie([0, 1], z=0.5), [mean - 0.5 * good.std(axis=0)] * 2),
        (attacks.inner_product([0, 1], scale=0.7), [-0.7 * mean] * 2),
    ]:
        found = attacks.apply(attack, {"d": rows}, None, bad, p, np)["d"]
        np.testing.assert_allclose(found[:2], expected, rtol=1e-12)
        np.testing.assert_array_equal(found[2:], good)
    found = attacks.apply(attacks.min_max([0]), {"d": rows}, None, bad, p, np)["d"][0]
    widest = max(np.linalg.norm(a - b) for a, b in itertools.combinations(good, 2))
    assert np.linalg.norm(good - found, axis=1).max() == pytest.approx(widest, rel=1e-12)
    assert (found - mean) @ mean < 0
    lie = attacks.poison_controls([0, 1])
    found = attacks.apply(lie, {"d": rows, "move": rows}, "move", bad, p, np)
    np.testing.assert_array_equal(found["move"], rows)
    np.testing.assert_array_equal(found["d"][:2], -rows[:2])


def test_the_public_names():
    assert fs.robust is robust
    assert fs.attacks is attacks
    with pytest.raises(InputError, match="each once"):
        attacks.sign_flip([1, 1])

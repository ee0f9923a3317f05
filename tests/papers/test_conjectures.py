"""Linear speed-up: the steps of the proof one by one, the bounds on instances made to break them, and the experiment."""

import numpy as np
import pytest

import fedscaffold as fs
from fedscaffold.checks import InputError
from fedscaffold.theory.quadratics import linear_round
from papers import conjecture_search
from papers.bounds.speed_up import speed_up


def instance(rng, ends=False):
    """Clients with eigenbases of their own; `ends`: eigenvalues at the ends of their range only, a hard case."""
    n, d, kappa = int(rng.integers(1, 9)), int(rng.integers(1, 5)), 10 ** rng.uniform(0, 4)
    values = (
        np.where(rng.random((n, d)) < rng.random(), 1.0, 1 / kappa)
        if ends
        else kappa ** -rng.random((n, d))
    )
    rotations = np.linalg.qr(rng.normal(size=(n, d, d)))[0]
    hessians = rotations * values[:, None] @ np.swapaxes(rotations, 1, 2)
    hessians = (hessians + np.swapaxes(hessians, 1, 2)) / 2
    problem = fs.problems.quadratic(hessians=hessians, linear=np.zeros((n, d)))
    lr = float(rng.choice([1.0, 0.99, 0.5, 0.05]) / values.max())
    return (
        problem,
        hessians,
        values,
        lr,
        max(1, int(10 ** rng.uniform(0, 1.2 * np.log10(kappa) + 1))),
    )


def covariances(rng, n, d):
    """Of trace 1 and of any shape, down to one direction only."""
    roots = rng.normal(size=(n, d, int(rng.integers(1, d + 1))))
    made = roots @ np.swapaxes(roots, 1, 2)
    return made / np.trace(made, axis1=1, axis2=2)[:, None, None]


def test_no_instance_exceeds_what_is_proved():
    rng = np.random.default_rng(0)
    tightest = 0.0
    for k in range(150):
        problem, _, values, lr, steps = instance(rng, ends=k % 2 == 0)
        n, d = values.shape
        proved = speed_up(values, lr=lr, local_steps=steps)
        round_law = fs.theory.stationary(problem, lr=lr, local_steps=steps, noise=1.0)
        ratio = n * np.linalg.eigvalsh(round_law.x_covariance)[-1] / proved.round_noise
        shaped = covariances(rng, n, d)
        law = fs.theory.stationary(problem, lr=lr, local_steps=steps, noise=shaped)
        scale = np.linalg.eigvalsh(shaped)[:, -1].max()  # every C_c <= scale I
        assert ratio <= 1 + 1e-9
        assert n * np.linalg.eigvalsh(law.x_covariance)[-1] <= scale * proved.round_noise * (
            1 + 1e-9
        )
        assert n * np.trace(law.x_covariance) <= proved.any_noise * (1 + 1e-9)
        tightest = max(tightest, ratio)
    assert tightest > 0.9  # the bound is reached, so a smaller one would be wrong


def test_the_steps_of_the_proof():
    rng = np.random.default_rng(1)
    for _ in range(10):
        _, hessians, values, lr, steps = instance(rng)
        steps = min(steps, 30)
        n, d, eye = *values.shape, np.eye(values.shape[1])
        ends = np.stack([np.linalg.matrix_power(eye - lr * a, steps) for a in hessians])
        behind = np.stack(
            [
                eye - np.linalg.solve(a, eye - u) / (lr * steps)
                for a, u in zip(hessians, ends, strict=True)
            ]
        )
        points = np.exp(2j * np.pi * (np.arange(4096) + 0.5) / 4096)
        z = points[:, None, None, None]
        f = np.mean(np.linalg.solve(z * eye - behind, z * eye - ends), axis=1)
        inverse = np.linalg.inv(f)
        hermitian = (f + np.swapaxes(f.conj(), 1, 2)) / 2
        u, v = np.linalg.eigvalsh(ends), np.linalg.eigvalsh(behind)
        least = min(
            lr * steps * values.min(), float(((1 + np.sort(u)) / (1 + np.sort(v)[:, ::-1])).min())
        )
        assert np.linalg.eigvalsh(hermitian).min() >= least * (1 - 1e-9)  # Re F >= m I
        radius = fs.theory.contraction_rate(
            fs.problems.quadratic(hessians=hessians, linear=np.zeros((n, d))),
            lr=lr,
            local_steps=steps,
        ).spectral_radius
        if radius < 0.99:  # else 4096 points do not resolve the integral
            np.testing.assert_allclose(
                inverse.mean(axis=0), eye, atol=1e-9
            )  # the value at infinity
            energy = np.mean(inverse @ np.swapaxes(inverse.conj(), 1, 2), axis=0).real
            delta = (ends - behind).mean(axis=0)
            assert np.linalg.eigvalsh(energy - eye - delta @ delta).min() >= -1e-9


def test_every_step_size_below_two_over_l_is_stable():
    rng = np.random.default_rng(2)
    for k in range(60):
        problem, _, values, _, steps = instance(rng, ends=k % 2 == 0)
        lr = rng.uniform(1.0, 1.999) / values.max()
        assert fs.theory.contraction_rate(problem, lr=lr, local_steps=steps).spectral_radius < 1
        proved = speed_up(values, lr=lr, local_steps=steps)
        law = fs.theory.stationary(problem, lr=lr, local_steps=steps, noise=1.0)
        largest = np.linalg.eigvalsh(law.x_covariance)[-1]
        assert len(values) * largest <= proved.round_noise * (1 + 1e-9)


@pytest.mark.slow
def test_the_constants_that_the_page_states():
    worst = 0.0
    for kappa in (1.0, 1.1, 2.0, 10.0, 1e3, 1e6):
        grid = np.geomspace(1 / kappa, 1, 200)
        for lr in (1.0, 0.6, 0.1, 1e-3):
            for reach in np.geomspace(1e-3, 1e3, 25):  # gamma mu H
                steps = max(1, round(reach * kappa / lr))
                worst = max(
                    worst, speed_up(grid, lr=lr, local_steps=steps).round_noise / (lr * kappa)
                )
    assert 1.0 < worst < 1.12


def test_equal_clients_reach_the_unit():
    a, lr = np.diag([0.1, 1.0]), 0.7
    problem = fs.problems.quadratic(hessians=[a] * 3, linear=np.zeros((3, 2)))
    for steps in (1, 8, 1000):
        law = fs.theory.stationary(problem, lr=lr, local_steps=steps, noise=np.diag([1.0, 0.0]))
        assert 3 * np.trace(law.x_covariance) == pytest.approx(
            conjecture_search._unit(0.1, lr), rel=1e-12
        )


def test_harm_is_what_any_noise_does():
    rng = np.random.default_rng(3)
    for _ in range(10):
        problem, _, values, lr, steps = instance(rng)
        n, d = values.shape
        noise = covariances(rng, n, d)
        given = fs.theory.spectra(problem)
        weights = conjecture_search._harm(
            linear_round(given, conjecture_search.FORM, lr=lr, local_steps=steps)
        )
        turned = np.swapaxes(given.vectors, 1, 2) @ noise @ given.vectors
        law = fs.theory.stationary(problem, lr=lr, local_steps=steps, noise=noise)
        assert np.mean(np.sum(weights * turned, axis=(1, 2))) == pytest.approx(
            n * np.trace(law.x_covariance), rel=1e-9
        )
        worst = np.linalg.eigvalsh(weights)[:, -1].mean()
        assert n * np.trace(law.x_covariance) <= worst * (1 + 1e-9)


def test_stiff_and_noisy_is_the_whole_problem_in_one_direction():
    n, kappa = 7, 49.0
    basis = np.eye(n)
    outer = basis[:, :, None] * basis[:, None, :]
    problem = fs.problems.quadratic(
        hessians=np.eye(n) / kappa + (1 - 1 / kappa) * outer, linear=np.zeros((n, n))
    )
    law = fs.theory.stationary(problem, lr=1.0, local_steps=7, noise=outer)
    assert conjecture_search.stiff_and_noisy(n, kappa) == pytest.approx(
        n / kappa * np.trace(law.x_covariance), rel=1e-6
    )


@pytest.mark.parametrize("kappa", [25.0, 100.0, 400.0])
def test_the_constant_for_any_noise_must_grow_with_the_condition_number(kappa):
    reached = conjecture_search.stiff_and_noisy(5000, kappa)
    proved = speed_up([1 / kappa, 1.0], lr=1.0, local_steps=round(kappa**0.5)).any_noise / kappa
    assert kappa**0.5 / 5 < reached < proved < 1.1 * kappa**0.5


def test_doubling_every_client_changes_nothing():
    one = conjecture_search._random(3, 2, 50.0, np.random.default_rng(4))
    for noise in ("round", "worst"):
        assert conjecture_search._excess(conjecture_search._doubled(one), noise) == pytest.approx(
            conjecture_search._excess(one, noise), rel=1e-9
        )


def test_a_small_experiment_and_its_verdict():
    rng = np.random.default_rng(5)
    flat = conjecture_search._flat((3, 20.0, 1.0, 6, "random"), (4, 16, 64), 8, rng)
    attack = conjecture_search._attack("worst", 2, 20.0, sizes=(1, 2, 4), tries=80, rng=rng)
    stiff = conjecture_search._stiff(100.0, 100)
    again = conjecture_search._flat(
        (3, 20.0, 1.0, 6, "random"), (4, 16, 64), 8, np.random.default_rng(5)
    )
    assert again == flat
    assert attack.excess[0] <= attack.excess[1] * (1 + 1e-9) <= attack.excess[2] * (1 + 2e-9)
    assert attack.excess[-1] > 1.0
    round_one = attack._replace(noise="round")
    holds, verdict = conjecture_search._judged((flat,), (attack, round_one), (stiff,))
    assert holds
    assert "does not rise" in verdict[0]
    rising = flat._replace(slope=0.2, slope_error=0.01)
    assert not conjecture_search._judged((rising,), (attack, round_one), (stiff,))[0]
    broken = attack._replace(proved=tuple(0.9 * e for e in attack.excess))
    holds, verdict = conjecture_search._judged((flat,), (broken, round_one), (stiff,))
    assert not holds
    assert "EXCEEDED" in verdict[2]


def test_slope_is_that_of_a_power_law():
    x = np.array([4.0, 16.0, 64.0])
    slope, error = conjecture_search._slope(x, 3 * x**0.25, 0.03 * x**0.25)
    assert slope == pytest.approx(0.25, rel=1e-12)
    assert error == pytest.approx(
        0.01 / np.sqrt(np.sum((np.log(x) - np.log(x).mean()) ** 2)), rel=1e-12
    )


@pytest.mark.parametrize(
    ("eigenvalues", "lr", "steps", "said"),
    [
        ([], 0.1, 1, "at least one"),
        ([0.0, 1.0], 0.1, 1, "above 0"),
        ([1.0], 2.0, 1, "below 2/L = 2"),
        ([1.0], 0.1, 0, "local_steps must be"),
        ([np.nan], 0.1, 1, "finite"),
    ],
)
def test_speed_up_refuses(eigenvalues, lr, steps, said):
    with pytest.raises(InputError, match=said):
        speed_up(eigenvalues, lr=lr, local_steps=steps)

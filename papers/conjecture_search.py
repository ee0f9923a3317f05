"""The conjectures of linear speed-up, put to the test on clients that are not copies of each other.

The quadratics paper (000) conjectures that SCAFFOLD's covariance in the long run is tr Sigma <~
gamma sigma^2 / (N mu) for any number of local steps and any Hessians. Its own experiment copies
five clients, and copies have N tr Sigma constant whatever the method does (F12). Here the number

    excess = N mu (2 - gamma mu) tr Sigma / (gamma sigma^2)

with sigma^2 the largest tr C_c and mu the least eigenvalue is computed exactly, never simulated.
Equal clients whose noise lies in their flattest direction have 1 (F11). Three experiments, two
sizes:

    flat        random clients with eigenbases of their own, more and more of them: mean over
                draws, standard error, and the slope of log excess over log N
    searched    an adversary changes eigenvalues, eigenbases, lr, H and the noise to raise the
                excess, for N = 1, 2, 4 and so on; every N starts from the best found for half as
                many, each client doubled: the same excess
    stiff       the one family found whose constant grows with the condition number:
                `stiff_and_noisy`

and next to what was found, what is proved (`speed_up.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedscaffold import checks
from fedscaffold.brief import brief
from fedscaffold.problems.problem import Floats
from fedscaffold.problems.quadratic import quadratic
from fedscaffold.theory.error_dynamics import chain, walked
from fedscaffold.theory.quadratics import LinearRound, Spectra, linear_round
from fedscaffold.theory.round_map import SCAFFOLD, Form
from fedscaffold.theory.stationary import by_transfer, doubled, entry
from papers.bounds.speed_up import speed_up

__all__ = ["Conjectures", "Flat", "Searched", "Stiff", "conjectures", "stiff_and_noisy"]

FORM = Form(
    memory=True, at_x=False, drag=0.0, server_lr=1.0, one_step=False
)  # SCAFFOLD's, option II
SIGNIFICANT = 3.0  # standard errors
SETTINGS = (  # dim, condition, lr, local steps (gamma mu H from 0.02 to 10), noise
    (4, 100.0, 1.0, 10, "round"),
    (4, 100.0, 1.0, 200, "random"),
    (4, 1000.0, 0.2, 100, "random"),
    (8, 100.0, 0.05, 20_000, "round"),
)
ATTACKS = (  # noise, dim, condition
    ("round", 1, 100.0),
    ("round", 2, 100.0),
    ("worst", 1, 100.0),
    ("worst", 2, 100.0),
    ("worst", 2, 10_000.0),
    ("worst", 3, 100.0),
)
CONDITIONS = (100.0, 1000.0)


class Flat(NamedTuple):
    """Random clients, more and more of them."""

    dim: int
    condition: float
    lr: float
    local_steps: int
    noise: str
    """round: sigma^2 I / d for all; random: a covariance of its own for every client, of trace
    sigma^2."""
    num_clients: tuple[int, ...]
    excess: tuple[float, ...]
    """Mean over draws."""
    error: tuple[float, ...]
    """Standard error of the mean."""
    slope: float
    """Of log excess over log N, by weighted least squares; 0 for linear speed-up."""
    slope_error: float


class Searched(NamedTuple):
    """The worst that an adversary found."""

    noise: str
    """round: sigma^2 I / d for all; worst: for every client the covariance of trace sigma^2 that
    does most harm."""
    dim: int
    condition: float
    num_clients: tuple[int, ...]
    excess: tuple[float, ...]
    lr: tuple[float, ...]
    local_steps: tuple[int, ...]
    proved: tuple[float, ...]
    """What is proved of the very instance found, in the same unit."""
    tried: int


class Stiff(NamedTuple):
    """`stiff_and_noisy` for growing N = d."""

    condition: float
    num_clients: tuple[int, ...]
    constant: tuple[float, ...]


class Conjectures(NamedTuple):
    """The evidence, and in words what it says."""

    def __repr__(self) -> str:
        return brief(self)

    flat: tuple[Flat, ...]
    searched: tuple[Searched, ...]
    stiff: tuple[Stiff, ...]
    holds: bool
    """Whether nothing found speaks against linear speed-up, and no bound proved was exceeded."""
    verdict: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.verdict)


class _Instance(NamedTuple):
    values: Floats
    vectors: Floats
    lr: float
    steps: int


def conjectures(
    quick: bool = True,
    seed: int = 0,
    *,
    most: int | None = None,
    draws: int | None = None,
    tries: int | None = None,
) -> Conjectures:
    """Test linear speed-up: seconds if `quick`, else minutes.

    Args:
        quick: Fewer settings and sizes.
        seed: Of all draws.
        most: Largest number of random clients; default: 256, or 1,024 if not `quick`.
        draws: Random federations of each size; default: 12 or 40.
        tries: Steps of a search for each size; default: 100 or 3,000.

    >>> from papers.conjecture_search import _attack
    >>> found = _attack("round", 1, 10.0, sizes=(1, 2), tries=40, rng=np.random.default_rng(0))
    >>> 0 < found.excess[0] <= found.excess[1] <= found.proved[1]
    True
    """
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    efforts = zip((most, draws, tries), (256, 12, 100) if quick else (1024, 40, 3000), strict=True)
    most, draws, tries = (usual if asked is None else asked for asked, usual in efforts)
    clients = tuple(2**k for k in range(3, most.bit_length()))
    sizes = tuple(2**k for k in range(5 if quick else 7))
    flat = tuple(
        _flat(setting, clients, draws, rng) for setting in (SETTINGS[:3] if quick else SETTINGS)
    )
    searched = tuple(_attack(*attack, sizes=sizes, tries=tries, rng=rng) for attack in ATTACKS)
    stiff = tuple(_stiff(kappa, 1000 if quick else 10_000) for kappa in CONDITIONS)
    holds, verdict = _judged(flat, searched, stiff)
    return Conjectures(flat, searched, stiff, holds, verdict)


def stiff_and_noisy(num_clients: int, condition: float) -> float:
    """N mu tr Sigma / (gamma sigma^2) of N = d clients, each stiff and noisy in its own direction.

    A_c = mu I + (L - mu) e_c e_c', C_c = sigma^2 e_c e_c', gamma = 1/L, H the whole number nearest
    to sqrt(L / mu), the best one (F10). Each client's noise enters where that client is stiff and
    all others hardly damp it: the number tends to about sqrt(L / mu) / 4 as N grows beyond L / mu.
    So in tr Sigma <= K gamma sigma^2 / (N mu) for noise of
    any shape K must depend on H or on L / mu, and it may: it does not depend on N.

    The matrices being diagonal, all directions are alike, and one with one client that is stiff and
    noisy is enough.

    >>> stiff_and_noisy(30, 100.0) < stiff_and_noisy(300, 100.0) < 100**0.5 / 3
    True
    """
    n, kappa = (
        checks.whole("num_clients", num_clients, at_least=2),
        checks.number("condition", condition, at_least=1),
    )
    hessians, noise = np.full((n, 1, 1), 1 / kappa), np.zeros((n, 1, 1))
    hessians[0] = noise[0] = 1.0
    one_direction = quadratic(hessians=hessians, linear=np.zeros((n, 1)))
    law = chain(
        one_direction,
        lr=1.0,
        local_steps=max(1, round(kappa**0.5)),
        noise=noise,
        algorithm=SCAFFOLD,
    )
    return float(n / kappa * n * by_transfer(law)[0, 0])


def _flat(
    setting: tuple[int, float, float, int, str],
    clients: tuple[int, ...],
    draws: int,
    rng: np.random.Generator,
) -> Flat:
    dim, kappa, lr, steps, kind = setting
    mean, error = [], []
    for n in clients:
        found = []
        for _ in range(draws):
            problem = quadratic(n, dim, mu=1 / kappa, seed=int(rng.integers(2**31)))
            roots = rng.normal(size=(n, dim, dim))
            covariances = roots @ np.swapaxes(roots, 1, 2)
            covariances /= np.trace(covariances, axis1=1, axis2=2)[:, None, None]
            noise = covariances if kind == "random" else np.eye(dim) / dim
            law = chain(problem, lr=lr, local_steps=steps, noise=noise, algorithm=SCAFFOLD)
            found.append(n * np.trace(by_transfer(law)) / _unit(1 / kappa, lr))
        mean.append(float(np.mean(found)))
        error.append(float(np.std(found, ddof=1) / np.sqrt(draws)))
    slope, slope_error = _slope(np.array(clients), np.array(mean), np.array(error))
    return Flat(dim, kappa, lr, steps, kind, clients, tuple(mean), tuple(error), slope, slope_error)


def _unit(mu: float, lr: float) -> float:
    """N tr Sigma of equal clients with noise of variance 1 in their flattest direction (F11)."""
    return lr / (mu * (2 - lr * mu))


def _slope(x: Floats, y: Floats, error: Floats) -> tuple[float, float]:
    """Slope of log y over log x and its standard error, each point weighed by its own."""
    weights = (y / error) ** 2
    away = np.log(x) - np.average(np.log(x), weights=weights)
    total = weights @ away**2
    return float(weights @ (away * np.log(y)) / total), float(1 / np.sqrt(total))


def _stiff(kappa: float, most: int) -> Stiff:
    clients = tuple(10**k for k in range(1, len(str(most))))
    return Stiff(kappa, clients, tuple(stiff_and_noisy(n, kappa) for n in clients))


def _attack(
    noise: str,
    dim: int,
    kappa: float,
    *,
    sizes: tuple[int, ...],
    tries: int,
    rng: np.random.Generator,
) -> Searched:
    best, rows = None, []
    for n in sizes:
        starts = [_random(n, dim, kappa, rng) for _ in range(4)]
        starts += [] if best is None else [_doubled(best)]
        climbed = [_climb(start, noise, kappa, tries // len(starts), rng) for start in starts]
        best, excess = max(climbed, key=lambda found: found[1])
        proved = speed_up(best.values, lr=best.lr, local_steps=best.steps)
        unit = _unit(float(best.values.min()), best.lr)
        # C_c <= sigma^2 I / d where the noise is round; whatever its shape, C_c <= sigma^2 I and tr
        # Sigma <= d |Sigma|
        most = (
            proved.round_noise
            if noise == "round"
            else min(dim * proved.round_noise, proved.any_noise)
        )
        rows.append((excess, best.lr, best.steps, most / unit))
    reached, lrs, steps, bounds = zip(*rows, strict=True)
    return Searched(noise, dim, kappa, sizes, reached, lrs, steps, bounds, tries * len(sizes))


def _random(n: int, dim: int, kappa: float, rng: np.random.Generator) -> _Instance:
    values = np.exp(-np.log(kappa) * rng.random((n, dim)))
    vectors = np.linalg.qr(rng.normal(size=(n, dim, dim)))[0]
    return _Instance(values, vectors, 1.0, max(1, round(kappa ** rng.uniform(0, 1.2))))


def _doubled(one: _Instance) -> _Instance:
    return one._replace(
        values=np.repeat(one.values, 2, axis=0), vectors=np.repeat(one.vectors, 2, axis=0)
    )


def _climb(
    start: _Instance, noise: str, kappa: float, tries: int, rng: np.random.Generator
) -> tuple[_Instance, float]:
    """Take random steps that raise the excess.

    Steps grow where they succeed and shrink where they fail.
    """
    best, highest, size = start, _excess(start, noise), 1.0
    for _ in range(tries):
        other = _moved(best, size, kappa, rng)
        reached = _excess(other, noise)
        size = min(2.0, size * 1.5) if reached > highest else max(1e-3, size * 0.95)
        if reached > highest:
            best, highest = other, reached
    return best, highest


def _moved(one: _Instance, size: float, kappa: float, rng: np.random.Generator) -> _Instance:
    """Another instance near by: some clients changed, and sometimes lr and H."""
    n, d = one.values.shape
    some = rng.random((n, 1)) < max(1 / n, rng.random() ** 2)
    values = one.values * np.exp(size * some * rng.normal(size=(n, d)))
    turned = np.eye(d) + size * some[:, :, None] * rng.normal(size=(n, d, d))
    vectors = np.linalg.qr(one.vectors @ turned)[0] if d > 1 else one.vectors
    by_lr, by_steps = np.exp(size * (rng.random() < 0.5) * rng.normal(size=2))
    lr, steps = (
        float(np.clip(one.lr * by_lr, 1e-4, 1.0)),
        int(np.clip(round(one.steps * by_steps), 1, 10**7)),
    )
    return _Instance(np.clip(values, 1 / kappa, 1.0), vectors, lr, steps)


def _excess(one: _Instance, noise: str) -> float:
    """The excess of an instance, for round noise or for the worst one."""
    given = Spectra(one.values, one.vectors, np.zeros_like(one.values))
    weights = _harm(linear_round(given, FORM, lr=one.lr, local_steps=one.steps))
    harms = np.linalg.eigvalsh(weights)
    each = harms.mean(axis=1) if noise == "round" else harms[:, -1]
    return float(each.mean() / _unit(float(one.values.min()), one.lr))


def _harm(one: LinearRound) -> Floats:
    """(N, d, d) W_c in the clients' own coordinates.

    N tr Sigma = mean over c of tr(W_c C_c), whatever the noise.

    The sum over t of A'^t (I, 0)'(I, 0) A^t weighs a state by all that x will show of it; so the
    noise that does most harm is known, and need not be searched for.
    """
    d, n = one.basis.shape
    shown = np.zeros((d + n, d + n))
    shown[:d, :d] = np.eye(d)
    enters = entry(one, 1.0, 1.0)
    seen = (enters.T @ doubled(one.matrix().T, shown) @ enters).reshape(
        one.num_clients, d, one.num_clients, d
    )
    own = seen[range(one.num_clients), :, range(one.num_clients)]
    harm: Floats = one.num_clients**2 * own * walked(one)
    return harm


def _judged(
    flat: tuple[Flat, ...], searched: tuple[Searched, ...], stiff: tuple[Stiff, ...]
) -> tuple[bool, tuple[str, ...]]:
    level = all(one.slope <= SIGNIFICANT * one.slope_error for one in flat)
    within = all(
        e <= p * (1 + 1e-9) for one in searched for e, p in zip(one.excess, one.proved, strict=True)
    )
    worst_round = max(one.excess[-1] for one in searched if one.noise == "round")
    worst = max(one.excess[-1] for one in searched)
    growth = max(one.excess[-1] / one.excess[-2] for one in searched)
    clients, tried = flat[0].num_clients, sum(one.tried for one in searched)
    family = ", ".join(
        f"{one.constant[-1]:.2f} at condition number {one.condition:g}" for one in stiff
    )
    return level and within, (
        f"Random clients: from N = {clients[0]} to {clients[-1]} the slope of log(N tr Sigma) over "
        "log N is "
        + ", ".join(f"{one.slope:+.4f} +- {one.slope_error:.4f}" for one in flat)
        + f": {'it does not rise' if level else 'IT RISES'}; linear speed-up asks for 0.",
        f"Adversary: in {tried} instances of up to {searched[0].num_clients[-1]} clients, N tr "
        "Sigma rose to "
        f"{worst_round:.3f} times that of equal clients under round noise, to {worst:.3f} times "
        "under the worst noise; "
        f"the last doubling of N raised it by a factor of {growth:.3f} at most.",
        f"Proved: N tr Sigma is bounded whatever N, H and the Hessians (speed_up); "
        f"{'no instance exceeded' if within else 'SOME INSTANCE EXCEEDED'} the bound.",
        f"Limit: N = d clients, each stiff and noisy in a direction of its own, have N mu tr Sigma "
        "/ (gamma sigma^2) = "
        f"{family} (N = {stiff[0].num_clients[-1]}): with noise of any shape, the constant must "
        "grow with H or L / mu.",
    )

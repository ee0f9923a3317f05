"""Accounting: the epsilon of a number of steps, from the library `dp-accounting`.

A step is a Gaussian mechanism on a Poisson sample. Its privacy loss is composed by two accountants,
by privacy loss distributions (PLD) and by Renyi divergences (RDP); both are upper bounds, and the
smaller is returned. Where there is a PLD, which is nearly exact, RDP has whole orders only.
Neighbouring data differ in one record, added or removed; numbers of records are public.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = [
    "Charge",
    "capacity",
    "compose",
    "describe_accountant",
    "epsilon",
    "noise_for",
    "round_up",
]

LARGE = 50.0  # epsilon above which RDP alone is used: loss distributions would fill the memory
# width of the intervals of loss distributions, by the largest number of steps: the epsilon they
# give exceeds that of finer ones by less than about 0.1 %
INTERVALS = ((1_000, 1e-3), (4_000, 5e-4), (25_000, 2e-4), (checks.LARGEST, 1e-4))
LEAST_NOISE, MOST_NOISE = 0.3, 1000.0  # range of noise multipliers that are searched
FINE = 5e-4  # their precision
OVERFLOW = 1e-60  # bound on the probability that a Poisson batch exceeds its capacity
RESERVED = 1e-6  # share of delta that is set aside for such batches


class Charge(NamedTuple):
    """Steps of one kind: Gaussian noise on Poisson samples."""

    noise: float
    """The noise multiplier."""
    rate: float
    """Probability with which a step draws a record."""
    steps: int


def epsilon(*, noise: float, rate: float, steps: int, delta: float) -> float:
    """Return the epsilon of a number of steps, each on a Poisson sample of the records.

    Args:
        noise: The noise multiplier.
        rate: Probability with which a step draws a record.
        steps: Number of steps.
        delta: The delta at which epsilon is meant.

    Returns:
        The smaller bound of PLD and RDP; infinity if neither gives one.

    Raises:
        InputError: The library is not installed, or a value is out of range.

    >>> 5.91 < epsilon(noise=1.1, rate=0.1, steps=100, delta=1e-5) < 5.92
    True
    >>> epsilon(noise=1.1, rate=0.1, steps=0, delta=1e-5)
    0.0
    """
    checks.number("noise", noise, above=0)
    _check_step(rate, steps, delta)
    return compose([Charge(noise, rate, steps)], delta)


def _check_step(rate: float, steps: int, delta: float) -> None:
    checks.number("rate", rate, above=0)
    checks.number("delta", delta, above=0)
    checks.whole("steps", steps, at_least=0)
    if rate > 1 or delta >= 1:
        raise InputError(f"rate must be at most 1 and delta below 1, got {rate} and {delta}")


def noise_for(*, epsilon: float, rate: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier with which some steps stay within an epsilon.

    Args:
        epsilon: The largest epsilon.
        rate: Probability with which a step draws a record.
        steps: Number of steps.
        delta: The delta at which epsilon is meant.

    Returns:
        The multiplier, up to 0.1 %; at least 0.3, below which epsilon grows without bounds.

    Raises:
        InputError: No noise suffices.

    >>> noise = noise_for(epsilon=3.0, rate=0.1, steps=100, delta=1e-5)
    >>> 2.98 < compose([Charge(noise, rate=0.1, steps=100)], delta=1e-5) <= 3.0
    True
    """
    checks.number("epsilon", epsilon, above=0)
    _check_step(rate, steps, delta)
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        found = compose([Charge(math.exp(log_noise), rate, steps)], delta)
        return math.log(max(found, 1e-9) / epsilon)

    low, high = 0.0, math.log(MOST_NOISE)
    if excess(high) > 0:
        raise InputError(
            f"no noise multiplier up to {MOST_NOISE:g} keeps {steps} steps within epsilon "
            f"{epsilon:g} at delta {delta:g}: take fewer steps or smaller batches"
        )
    if excess(low) <= 0:
        low, high = math.log(LEAST_NOISE), low
        if excess(low) <= 0:
            return LEAST_NOISE
    noise = math.exp(brentq(excess, low, high, xtol=FINE))
    while compose([Charge(noise, rate, steps)], delta) > epsilon:
        noise *= 1 + FINE
    return noise


def compose(charges: Iterable[Charge], delta: float, overflow: float = 0.0) -> float:
    """Return the epsilon of steps of several kinds, all on the records of one client.

    Args:
        charges: The steps; two of one kind are added up.
        delta: The delta at which epsilon is meant.
        overflow: Bound on the probability that a step ends the run because its batch is too large.
            The mechanism that never ends is (epsilon, delta') private, where delta' is less than
            `delta` by (1 + exp(epsilon)) times the probability that it ends.
    """
    kinds: dict[tuple[float, float], int] = {}
    for charge in charges:
        kind = float(charge.noise), float(charge.rate)
        kinds[kind] = kinds.get(kind, 0) + int(charge.steps)
    composed = tuple(Charge(*kind, steps) for kind, steps in sorted(kinds.items()) if steps)
    if not composed:
        return 0.0
    found = _epsilon(composed, delta * (1 - RESERVED) if overflow else delta)
    if math.isnan(found):
        raise InputError(f"the accountant has no epsilon for {composed}")
    if overflow:
        steps = sum(charge.steps for charge in composed)
        lost = found + math.log(2 * steps) + math.log(overflow)
        found = math.inf if lost > math.log(RESERVED * delta) else found
    return found


@lru_cache(maxsize=1 << 16)
def _epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    found = _renyi_epsilon(charges, delta, whole=True)
    if not found < LARGE:
        found = _renyi_epsilon(charges, delta, whole=False)
    if found < LARGE:
        steps = sum(charge.steps for charge in charges)
        interval = next(width for most, width in INTERVALS if steps <= most)
        found = min(found, float(_losses(charges, interval).get_epsilon_for_delta(delta)))
    return found


def _renyi_epsilon(charges: tuple[Charge, ...], delta: float, whole: bool) -> float:
    """Return the epsilon by Renyi divergences of all orders, or of whole orders alone.

    Those between take most of the time, and matter where epsilon is large.
    """
    orders, total = None, 0.0
    for noise, rate, steps in charges:
        orders, divergences = _divergences(noise, rate, whole)
        total = total + steps * divergences
    with _quiet():
        return float(_library().rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=256)
def _divergences(noise: float, rate: float, whole: bool) -> tuple[Any, Any]:
    """Return the orders, and the Renyi divergences of a single step."""
    library = _library()
    accountant = library.rdp.RdpAccountant()
    if whole:
        orders = accountant.orders
        accountant = library.rdp.RdpAccountant(orders[orders % 1 == 0])
    event = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
    with _quiet():
        accountant.compose(event)
    return accountant.orders, accountant.rdp


def _losses(charges: tuple[Charge, ...], interval: float) -> Any:
    """Return the privacy loss distribution of some steps."""
    *earlier, (noise, rate, steps) = charges
    one = _losses_of_step(noise, rate, interval)
    losses = one.self_compose(steps) if steps > 1 else one
    return losses.compose(_losses(tuple(earlier), interval)) if earlier else losses


@lru_cache(maxsize=64)
def _losses_of_step(noise: float, rate: float, interval: float) -> Any:
    _library()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )


def round_up(epsilon: float) -> str:
    """Return an epsilon with four digits, which is never less.

    >>> round_up(8.00049), round_up(8.0)
    ('8.001', '8')
    """
    return f"{Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon):.4g}"


def describe_accountant() -> str:
    """Return the names and the version of the accountants.

    >>> describe_accountant()
    'PLD and RDP of dp-accounting ...'
    """
    from importlib.metadata import version

    _library()
    return f"PLD and RDP of dp-accounting {version('dp-accounting')}"


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        raise InputError(
            f"privacy needs an accountant, and {error.name} is not installed: "
            "pip install 'fedscaffold[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence remarks on single orders, which the library leaves out of the minimum."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def capacity(records: int, rate: float) -> tuple[int, float]:
    """Return room for a Poisson batch, and a bound on the probability that it does not suffice.

    By Chernoff's bound P(batch >= b) <= exp(-n KL(b / n, rate)).

    Args:
        records: The number n of the client's records.
        rate: Probability with which each is drawn.

    >>> capacity(10, 0.5), capacity(60_000, 0.001)[0]
    ((10, 0.0), 229)
    """
    low, high = math.ceil(rate * records), records
    if _log_tail(records, rate, high) > math.log(OVERFLOW):
        return records, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        enough = _log_tail(records, rate, middle) <= math.log(OVERFLOW)
        low, high = (low, middle) if enough else (middle, high)
    return high - 1, OVERFLOW


def _log_tail(records: int, rate: float, batch: int) -> float:
    """Return Chernoff's bound on log P(Binomial(records, rate) >= batch), for batch >= mean."""
    share = batch / records
    if share <= rate:
        return 0.0
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - rate))
    return -records * (share * math.log(share / rate) + rest)

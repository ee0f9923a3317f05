"""Published bounds with their conditions, and the two lemmas that tune a step size.

A theorem holds under conditions on the step size, the local steps and the rounds. Every bound is a
record (value, holds, conditions, source): the value is computed whether or not the conditions are
met, and `holds` tells whether they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = [
    "Bound",
    "Condition",
    "Federation",
    "Prescription",
    "Tuned",
    "at_most",
    "bounded",
    "convexity",
    "not_negative",
    "positive",
    "tuned_linear",
    "tuned_sublinear",
]

# A step computed as 1 / L must be found to meet lr <= 1 / L, whatever the last bit of the products.
ROUNDING = 1e-12


class Condition(NamedTuple):
    """One assumption of a theorem, left <= right, with the values of both sides."""

    text: str
    left: float
    right: float
    met: bool

    def __str__(self) -> str:
        return f"{self.text} ({self.left:.4g} {'<=' if self.met else '>'} {self.right:.4g})"


class Bound(NamedTuple):
    """A published bound: `value` by the formula of `source`, valid only if it `holds`."""

    value: float
    holds: bool
    conditions: tuple[Condition, ...]
    source: str

    @property
    def broken(self) -> tuple[Condition, ...]:
        """The conditions that are not met."""
        return tuple(condition for condition in self.conditions if not condition.met)

    def __str__(self) -> str:
        state = "holds" if self.holds else "does not hold: " + "; ".join(map(str, self.broken))
        return f"{self.value:.6g} [{self.source}] {state}"


class Prescription(NamedTuple):
    """The settings that a theorem prescribes, and its bound for them."""

    lr: float
    local_steps: int
    rounds: int
    bound: Bound

    @property
    def gradients(self) -> int:
        """Gradients computed by each client: T H."""
        return self.rounds * self.local_steps


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Constants of the theorems of the original paper (004); mu > 0 is the strongly convex case.

    `smoothness` is beta, `cohort` S (all N if None), `noise_trace` sigma^2 = E||noise||^2,
    (`big_g`, `big_b`) the gradient dissimilarity A1, `delta` the Hessian dissimilarity A2 (2 beta
    always holds), `distance` ||x^0 - x*||, `suboptimality` f(x^0) - f*, `control_distance` the root
    mean square of ||c_i^0 - grad f_i(x*)||, or of
    ||c_i^0 - grad f_i(x^0)|| where not `convex`. A bound that needs a constant left out refuses.

    >>> Federation(smoothness=1.0, local_steps=10, num_clients=4, cohort=5)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: cohort must be a whole number of at least 1 and at most 4, got 5
    """

    smoothness: float
    local_steps: int
    num_clients: int
    cohort: int | None = None
    mu: float = 0.0
    convex: bool = True
    noise_trace: float = 0.0
    server_lr: float = 1.0
    big_g: float | None = None
    big_b: float | None = None
    delta: float | None = None
    distance: float | None = None
    suboptimality: float | None = None
    control_distance: float | None = None

    def __post_init__(self) -> None:
        positive(smoothness=self.smoothness, server_lr=self.server_lr)
        checks.whole("local_steps", self.local_steps)
        checks.whole("cohort", self.heard, at_most=checks.whole("num_clients", self.num_clients))
        not_negative(mu=self.mu, noise_trace=self.noise_trace)
        for name in ("big_g", "big_b", "delta", "distance", "suboptimality", "control_distance"):
            if getattr(self, name) is not None:
                not_negative(**{name: getattr(self, name)})
        if self.mu > self.smoothness or (self.mu > 0 and not self.convex):
            raise InputError(
                f"mu must be at most smoothness, and 0 where not convex, got {self.mu}"
            )

    def need(self, name: str) -> float:
        """Return an optional constant; raise if it was not given."""
        value: float | None = getattr(self, name)
        if value is None:
            raise InputError(f"this bound needs {name}, which was not given")
        return value

    @property
    def heard(self) -> int:
        """S."""
        return self.num_clients if self.cohort is None else self.cohort

    @property
    def unlikeness(self) -> float:
        """Hessian dissimilarity delta; 2 beta by default."""
        return 2 * self.smoothness if self.delta is None else self.delta

    @property
    def case(self) -> str:
        """The case of the theorems: strongly convex, convex or non-convex."""
        return "strongly convex" if self.mu > 0 else "convex" if self.convex else "non-convex"

    @property
    def noise(self) -> float:
        """sigma^2 / (K S) (1 + S / eta_g^2)."""
        return (
            self.noise_trace
            / (self.local_steps * self.heard)
            * (1 + self.heard / self.server_lr**2)
        )

    @property
    def sampling(self) -> float:
        """(1 - S / N) G^2 / S."""
        return (1 - self.heard / self.num_clients) * self.need("big_g") ** 2 / self.heard


class Tuned(NamedTuple):
    """The step chosen by a tuning lemma, and its bound."""

    step: float
    value: float


def at_most(text: str, left: float, right: float) -> Condition:
    """Return the condition left <= right; equal up to rounding counts as met.

    >>> print(at_most("lr <= 1 / L", 0.3, 0.25))
    lr <= 1 / L (0.3 > 0.25)
    """
    return Condition(text, float(left), float(right), bool(left <= right + ROUNDING * abs(right)))


def bounded(value: float, source: str, *conditions: Condition) -> Bound:
    """Return the bound that holds if all its conditions are met.

    >>> print(bounded(0.5, "000 Lemma 1", at_most("lr <= 1 / L", 0.3, 0.25)))
    0.5 [000 Lemma 1] does not hold: lr <= 1 / L (0.3 > 0.25)
    """
    return Bound(float(value), all(condition.met for condition in conditions), conditions, source)


def positive(**values: float) -> None:
    """Refuse any value that is not a finite number above 0.

    >>> positive(lr=0.1, mu=-1.0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: mu must be a number above 0, got -1.0
    """
    for name, value in values.items():
        checks.number(name, value, above=0)


def not_negative(**values: float) -> None:
    """Refuse any value that is not a finite number of at least 0.

    >>> not_negative(noise_trace=0.0, zeta_2=-1.0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: zeta_2 must be a number of at least 0, got -1.0
    """
    for name, value in values.items():
        checks.number(name, value, at_least=0)


def convexity(mu: float, smoothness: float) -> None:
    """Refuse constants that no strongly convex smooth function has: 0 < mu <= L.

    >>> convexity(2.0, 1.0)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: mu must be at most smoothness = 1.0, got 2.0
    """
    positive(mu=mu, smoothness=smoothness)
    if mu > smoothness:
        raise InputError(f"mu must be at most smoothness = {smoothness}, got {mu}")


def tuned_linear(
    *,
    rate: float,
    rounds: int,
    start: float,
    first: float,
    second: float = 0.0,
    largest: float,
    step: float | None = None,
) -> Tuned:
    """Step s = min(s_max, log(max(1, a^2 R d_0 / c)) / (a R)): F26, 004 Lemma 1.

    It is for recursions e_r <= ((1 - a s) d_(r-1) - d_r) / s + c s + c_2 s^2, averaged over r =
    1..R+1 with weights w_r = (1 - a s)^(1-r), whose mean is at most d_0 / (s W) + c s + c_2 s^2;
    that number is returned with the step. Two differences from the paper, each needed for its
    claimed rate: log(...) is never taken below 1/2 (its proof needs R >= 1 / (2 a s); as printed
    the step is 0 where the noise is large), and a term in s^2 is balanced too.

    Args:
        rate: a; mu in the lemma, mu / 2 in Theorems V and VII, mu / 6 in Theorem VIII.
        rounds: R.
        start: d_0.
        first: c.
        second: c_2.
        largest: s_max, at most 1 / a.
        step: s, if not the lemma's own.

    >>> tuned = tuned_linear(rate=1.0, rounds=100, start=1.0, first=0.01, largest=0.5)
    >>> tuned.step == math.log(1e4) / 100
    True
    """
    positive(rate=rate, largest=largest)
    not_negative(start=start, first=first, second=second)
    a, r = rate, checks.whole("rounds", rounds)
    arguments = [a**2 * r * start / first] if first > 0 else []
    arguments += [a**3 * r**2 * start / second] if second > 0 else []
    log = math.log(max(1.0, min(arguments))) if arguments else math.inf
    s = min(largest, max(log, 0.5) / (a * r)) if step is None else step
    q = 1.0 - a * s
    if q < 0:
        return Tuned(s, math.inf)  # the recursion says nothing of such a step
    transient = (
        start * a * q**r / (1.0 - q ** (r + 1))
    )  # d_0 / (s W), W the geometric sum of the R + 1 weights
    return Tuned(s, transient + first * s + second * s**2)


def tuned_sublinear(
    *,
    rounds: int,
    start: float,
    first: float,
    second: float = 0.0,
    largest: float,
    step: float | None = None,
) -> Tuned:
    """Step s = min(s_max, sqrt(d_0 / (c_1 (R+1))), (d_0 / (c_2 (R+1)))^(1/3)): F26, 004 Lemma 2.

    It is for e_r <= (d_(r-1) - d_r) / s + c_1 s + c_2 s^2, whose plain mean over r = 1..R+1 is at
    most d_0 / (s (R+1)) + c_1 s + c_2 s^2; that number is returned with the step. It is at most the
    lemma's d_0 / (s_max (R+1)) + 2 sqrt(c_1 d_0 / (R+1)) + 2 (d_0 / (R+1))^(2/3) c_2^(1/3).

    Args:
        rounds: R.
        start: d_0.
        first: c_1.
        second: c_2.
        largest: s_max.
        step: s, if not the lemma's own.

    >>> tuned_sublinear(rounds=99, start=1.0, first=1.0, largest=1.0)
    Tuned(step=0.1, value=0.2)
    """
    positive(largest=largest)
    not_negative(start=start, first=first, second=second)
    share = start / (checks.whole("rounds", rounds) + 1)
    s = largest
    if start > 0 and first > 0:
        s = min(s, math.sqrt(share / first))
    if start > 0 and second > 0:
        s = min(s, (share / second) ** (1 / 3))
    s = s if step is None else step
    return Tuned(s, share / s + first * s + second * s**2)

"""Attacks of dishonest clients, to try filters with: `fs.simulate(..., attack=...)`.

The attackers train like the others and then replace what they send. They know everything that the
honest clients of the round send, and agree among themselves. In the formulas v_i is the vector that
client i would send, and mean and std are those of the honest v_j, coordinate by coordinate.

    sign_flip(scale)       -scale v_i
    scaling(factor)        factor v_i
    constant(value)        (value, value, ...)
    alie(z)                mean - z std: "a little is enough" (Baruch et al. 2019)
    inner_product(scale)   -scale mean (Xie et al. 2020)
    min_max()              mean - gamma mean / |mean|, with the largest gamma at which no honest
                           client is farther from it than two honest ones are from each other
                           (Shejwalkar and Houmansadr 2021)
    poison_controls(scale) -scale d_i for the direction that makes c_i, and an honest move: the
                           lever of BadSFL (Lan et al. 2025), where both are sent
    flip_labels(...)       honest training on wrong labels: another problem, not another message
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError

__all__ = [
    "Attack",
    "Honest",
    "alie",
    "apply",
    "constant",
    "flip_labels",
    "inner_product",
    "min_max",
    "poison_controls",
    "scaling",
    "sign_flip",
]

Array: TypeAlias = Any  # numpy.ndarray or jax.Array


class Honest(NamedTuple):
    """What attackers know of the honest clients of a round, for one vector of the message."""

    rows: Array
    """(S, d) vectors that all clients would send."""
    honest: Array
    """(S,) whether a client takes part and is honest."""
    mean: Array
    """(d,) mean over the honest clients."""
    std: Array
    """(d,) standard deviation over the honest clients."""


class Attack(NamedTuple):
    """An attack by some clients."""

    name: str
    clients: tuple[int, ...]
    """The attackers, counted from 0."""
    craft: Callable[[Honest, Any], Array]
    """(honest, xp) -> (S, d) or (d,) what attackers send instead."""
    controls_only: bool = False
    """Whether the move is left as it is."""
    begin: int = 1
    """First round of the attack; before it the clients are honest."""


def sign_flip(clients: Iterable[int], scale: float = 1.0, begin: int = 1) -> Attack:
    """Send the opposite, `scale` times as long.

    >>> sign_flip([0, 3]).clients
    (0, 3)
    """
    scale = _size("scale", scale)
    return _attack("sign_flip", clients, begin, lambda known, xp: -scale * known.rows)


def scaling(clients: Iterable[int], factor: float = 10.0, begin: int = 1) -> Attack:
    """Send `factor` times too much.

    >>> scaling([1], factor=100).name
    'scaling'
    """
    factor = _size("factor", factor)
    return _attack("scaling", clients, begin, lambda known, xp: factor * known.rows)


def constant(clients: Iterable[int], value: float = 1.0, begin: int = 1) -> Attack:
    """Send one number everywhere.

    >>> constant([1], value=-3.0).name
    'constant'
    """
    value = checks.number("value", value)
    return _attack("constant", clients, begin, lambda known, xp: xp.full_like(known.rows, value))


def alie(clients: Iterable[int], z: float = 1.5, begin: int = 1) -> Attack:
    """Send the honest mean, shifted by `z` standard deviations in every coordinate.

    >>> alie([1]).name
    'alie'
    """
    z = _size("z", z)
    return _attack("alie", clients, begin, lambda known, xp: known.mean - z * known.std)


def inner_product(clients: Iterable[int], scale: float = 1.0, begin: int = 1) -> Attack:
    """Send the opposite of the honest mean, `scale` times as long.

    >>> inner_product([1]).name
    'inner_product'
    """
    scale = _size("scale", scale)
    return _attack("inner_product", clients, begin, lambda known, xp: -scale * known.mean)


def min_max(clients: Iterable[int], begin: int = 1) -> Attack:
    """Go against the honest mean as far as is possible without standing out from honest clients.

    >>> min_max([1]).name
    'min_max'
    """

    def craft(known: Honest, xp: Any) -> Array:
        rows, honest, mean = known.rows, known.honest, known.mean
        size = xp.sqrt((mean**2).sum())
        along = -mean / xp.where(size > 0, size, 1)
        off = mean - rows
        square = (off**2).sum(axis=1)
        product = off @ off.T
        apart = square[:, None] + square[None, :] - 2 * product
        widest = xp.where(honest[:, None] & honest[None, :], apart, 0).max()
        # |mean + gamma along - v_i|^2 = widest, for the nearest i
        slope = off @ along
        root = xp.sqrt(xp.maximum(slope**2 + widest - square, 0)) - slope
        gamma = xp.where(honest, root, xp.inf).min()
        return mean + xp.where(xp.isfinite(gamma), gamma, 0) * along

    return _attack("min_max", clients, begin, craft)


def poison_controls(clients: Iterable[int], scale: float = 1.0, begin: int = 1) -> Attack:
    """Send the opposite direction d_i, `scale` times as long, beside an honest move.

    >>> poison_controls([1]).controls_only
    True
    """
    scale = _size("scale", scale)
    made = _attack("poison_controls", clients, begin, lambda known, xp: -scale * known.rows)
    return made._replace(controls_only=True)


def flip_labels(clients: Sequence[Any], who: Iterable[int], classes: int) -> list[Any]:
    """Return the clients' records with labels y of some replaced by classes - 1 - y.

    Args:
        clients: By client its records (x, y), as `Problem` takes them.
        who: The clients with wrong labels, counted from 0.
        classes: Number of classes.

    >>> flip_labels([(np.zeros((2, 1)), np.array([0, 2]))], [0], classes=3)[0][1].tolist()
    [2, 0]
    """
    wrong = set(who)
    return [
        (x, (classes - 1 - np.asarray(y)).astype(np.asarray(y).dtype)) if i in wrong else (x, y)
        for i, (x, y) in enumerate(clients)
    ]


def apply(
    attack: Attack, vectors: Mapping[str, Array], move: str | None, bad: Array, p: Array, xp: Any
) -> dict[str, Array]:
    """Return the vectors of a cohort's messages with those of the attackers replaced.

    Args:
        attack: The attack.
        vectors: By field (S, d) vectors as honest clients would send them.
        move: The field that is the move, if it is sent.
        bad: (S,) whether a client attacks in this round.
        p: (S,) weights, 0 for clients that take no part.
        xp: The array module: numpy or jax.numpy.
    """
    honest = ~bad & (p > 0)
    count, found = xp.maximum(honest.sum(), 1), dict(vectors)
    for name, rows in vectors.items():
        if attack.controls_only and name == move:
            continue
        mean = xp.where(honest[:, None], rows, 0).sum(axis=0) / count
        std = xp.sqrt((xp.where(honest[:, None], rows - mean, 0) ** 2).sum(axis=0) / count)
        crafted = attack.craft(Honest(rows, honest, mean, std), xp)
        found[name] = xp.where(bad[:, None], crafted, rows).astype(rows.dtype)
    return found


def _attack(name: str, clients: Iterable[int], begin: int, craft: Any) -> Attack:
    who = tuple(checks.whole("a client of an attack", one, at_least=0) for one in clients)
    if not who or len(set(who)) < len(who):
        raise InputError(
            f"clients of {name} must be numbers of clients, each once, got {checks.shown(who)}"
        )
    return Attack(name, who, craft, begin=checks.whole("begin", begin))


def _size(name: str, value: float) -> float:
    return checks.number(name, value, at_least=0)

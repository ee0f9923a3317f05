"""Filters against a dishonest minority: whole clients are counted or refused, never coordinates.

In a round the server compares what the clients of the cohort sent. Of each vector of a message it
takes the difference from the reference that the algorithm declares; of SCAFFOLD these parts are

    move_i = x - y_i    and    d_i - c = c_i+ - c_i,    the change of c_i

Each part is divided by its usual norm, the weighted median over all clients of the norms that they
sent last, so that no part hides another. Filters see the norms and the squared distances

    D_ij = sum over parts |part_i - part_j|^2 / usual^2

A client that is refused is not heard in the round: its c_i stays as it was, so c = sum p_i c_i.

    krum(most)               refuses those farthest from their nearest neighbours, in every round
    geometric_median(beyond) refuses those farther from the geometric median than `beyond` times
                             the median distance
    norm_bound(beyond)       refuses norms above `beyond` times the usual one, and norms above the
                             usual one that are more than `beyond` times the client's own last norm

Shares are shares of weight: `most=0.2` is a fifth of sum p_i over the cohort, and medians are
weighted, so that a client of weight 0.4 counts for as much as it moves the model.

The functions take the array module as `xp` and run on NumPy and under jit alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from fedscaffold import checks
from fedscaffold.checks import InputError, memoised

__all__ = [
    "Cohort",
    "Filter",
    "Verdict",
    "compare",
    "geometric_median",
    "judge",
    "krum",
    "median",
    "norm_bound",
    "of",
    "squared_distances",
]

Array: TypeAlias = Any  # numpy.ndarray or jax.Array
Repeat: TypeAlias = Callable[[int, Callable[[Array], Array], Array], Array]
ITERATIONS = 100  # of Weiszfeld's algorithm
NEAR = 1e-4  # of the usual norm: messages as close as this differ by rounding, not by intent
SLACK = 1e-9  # rounding of sums of weights


class Cohort(NamedTuple):
    """What a filter sees of the S clients of a round, with P parts of each message."""

    p: Array
    """(S,) weights; clients of weight 0 are ignored."""
    norms: Array
    """(S, P) norms of the parts."""
    last: Array
    """(S, P) norms that counted last; NaN for clients that never counted."""
    usual: Array
    """(P,) weighted medians of the norms that all clients sent last."""
    apart: Array
    """(S, S) squared distances, each part divided by its usual norm."""
    lost: Array = 0.0
    """Share of the cohort's weight whose messages are not finite, and refused already."""


class Verdict(NamedTuple):
    """The result of a filter."""

    accepted: Array
    """(S,) whether a client is counted."""
    excess: Array
    """(S,) how far it stands out, relative to the median client or to its bound."""


class Filter(NamedTuple):
    """A filter of whole clients."""

    name: str
    judge: Callable[[Cohort, Any, Repeat], Verdict]
    """(cohort, xp, repeat) -> verdict."""
    sentence: str
    """What a refused client is told; {} stands for its excess."""
    most: float = 0.5
    """Share of the weight above which the dishonest are not outvoted."""


@memoised
def krum(most: float = 0.2) -> Filter:
    """Refuse in every round the clients whose nearest neighbours are farthest (multi-Krum).

    A client's score is the sum of its squared distances to the nearest others, of weight
    1 - most - 2/S in all, the last of them in part. The highest scores are refused, as long as
    their weight is within `most`. With equal weights and f = most * S these are the S - f - 2
    nearest others, and f clients, of Blanchard et al. (2017).

    Args:
        most: Largest share of the cohort's weight that may be dishonest, below 1/2. A client with
            more weight than that is never refused.

    >>> krum(0.2).name
    'krum:0.2'
    """
    most = checks.number("most", most, above=0)
    if most >= 0.5:
        raise InputError(f"most must be below 0.5, as no filter outvotes a half, got {most:g}")

    def judge(cohort: Cohort, xp: Any, repeat: Repeat) -> Verdict:
        share, count = cohort.p / cohort.p.sum(), (cohort.p > 0).sum()
        left = xp.maximum(most - cohort.lost, 0) / (1 - cohort.lost)  # of those that are finite
        room = xp.maximum(1 - left - 2 / count, 1 / count)
        score = _nearest_sum(cohort.apart, share, room, xp)
        known = (share > 0) & (share <= left + SLACK)
        order = xp.argsort(xp.where(known, -score, xp.inf))
        taken = xp.cumsum(xp.where(known, share, 0)[order])
        refused = known[order] & (taken <= left + SLACK)
        accepted = ~refused[xp.argsort(order)]
        return Verdict(accepted, _relative(score, median(score, share, xp), xp))

    said = "its update is {:.3g} times as far from its nearest neighbours' as the median one"
    return Filter(f"krum:{most:g}", judge, said, most)


@memoised
def geometric_median(beyond: float = 3.0) -> Filter:
    """Refuse clients that are far from the cohort's geometric median.

    Args:
        beyond: Largest distance from it, in multiples of the weighted median of the distances.

    >>> geometric_median(3).name
    'geometric_median:3'
    """
    beyond = _factor(beyond)

    def judge(cohort: Cohort, xp: Any, repeat: Repeat) -> Verdict:
        distance = _distances_to_median(cohort.apart, cohort.p, xp, repeat)
        middle = median(distance, cohort.p, xp)
        accepted = distance <= xp.maximum(beyond * middle, NEAR)
        return Verdict(accepted, _relative(distance, middle, xp))

    said = "its update is {:.3g} times as far from the geometric median as the median one"
    return Filter(f"geometric_median:{beyond:g}", judge, said)


@memoised
def norm_bound(beyond: float = 3.0) -> Filter:
    """Refuse clients whose norms are unusual for the federation, or for themselves.

    Args:
        beyond: Largest norm of a part, in multiples of the usual one. A norm above the usual one
            may also not exceed the client's own last norm by more than this factor.

    >>> norm_bound(3).name
    'norm_bound:3'
    """
    beyond = _factor(beyond)

    def judge(cohort: Cohort, xp: Any, repeat: Repeat) -> Verdict:
        own = xp.where(xp.isnan(cohort.last), xp.inf, cohort.last)
        bound = beyond * xp.minimum(cohort.usual, xp.maximum(cohort.usual / beyond, own))
        accepted = (cohort.norms <= bound).all(axis=1)
        return Verdict(accepted, _relative(cohort.norms, bound, xp).max(axis=1))

    return Filter(
        f"norm_bound:{beyond:g}", judge, "its update is {:.3g} times as long as its bound"
    )


FILTERS: dict[str, Callable[[float], Filter]] = {
    "geometric_median": geometric_median,
    "krum": krum,
    "norm_bound": norm_bound,
}


def of(text: str | Filter | None) -> Filter | None:
    """Parse a filter: krum:0.2, geometric_median:3, norm_bound:3, or none.

    A `Filter` is returned unchanged.

    >>> of("krum:0.2").name, of("norm_bound").name, of("none")
    ('krum:0.2', 'norm_bound:3', None)
    """
    if text is None or isinstance(text, Filter):
        return text
    if not isinstance(text, str):
        raise InputError(
            f"robust must be a filter such as fs.robust.krum(0.2) or 'krum:0.2', got "
            f"{checks.shown(text)}"
        )
    name, given, value = text.partition(":")
    checks.choice("robust", name, ("none", *FILTERS))
    if name == "none":
        return None
    number: Any = checks.written(value) if given else None
    if isinstance(number, str):
        raise InputError(f"{name} needs a number, such as {name}:{0.2 if name == 'krum' else 3}")
    return FILTERS[name]() if number is None else FILTERS[name](number)  # type: ignore[call-arg]


def judge(filter: Filter, cohort: Cohort, xp: Any, repeat: Repeat | None = None) -> Verdict:
    """Apply a filter to a cohort.

    Clients whose norms are not finite are refused, unless all are: a run that diverges at every
    client is to be seen as such.

    Args:
        filter: The filter.
        cohort: The clients of the round.
        xp: The array module: numpy or jax.numpy.
        repeat: (times, step, start) -> the value after so many steps; a Python loop by default.
    """
    finite = xp.isfinite(cohort.norms).all(axis=1)
    some = cohort.p > 0
    both = finite[:, None] & finite[None, :]
    seen = cohort._replace(
        p=xp.where(finite, cohort.p, 0),
        norms=xp.where(finite[:, None], cohort.norms, 0),
        apart=xp.where(both, cohort.apart, 0),
        lost=xp.where(finite, 0, cohort.p).sum() / xp.where(some.any(), cohort.p.sum(), 1),
    )
    seen = seen._replace(lost=xp.where(seen.lost < 1, seen.lost, 0))  # all are: see below
    # with no weight at all the verdict is not used, and must not be NaN
    seen = seen._replace(p=xp.where((seen.p > 0).any(), seen.p, 1))
    found = filter.judge(seen, xp, repeat or _loop)
    accepted = xp.where((some & finite).any(), found.accepted & finite, True) & some
    return Verdict(accepted, xp.where(finite, found.excess, xp.inf))


def compare(
    p: Array,
    norms: Array,
    last: Array,
    latest: Array,
    weights: Array,
    distances: Callable[[int, Array], Array],
    xp: Any,
) -> Cohort:
    """Return what a filter sees of a cohort.

    Args:
        p: (S,) weights of the cohort, 0 for clients to ignore.
        norms: (S, P) norms of the parts of their messages.
        last: (S, P) norms of the cohort's clients that counted last; NaN for none.
        latest: (N, P) the latest norms of all clients: of this round, or that counted last; NaN
            for clients that never counted.
        weights: (N,) weights of all clients.
        distances: (part, client near the middle) -> (S, S) squared distances of the part.
        xp: The array module.
    """
    known = xp.isfinite(latest).all(axis=1)
    weights, latest = xp.where(known, weights, 0), xp.where(known[:, None], latest, 0)
    parts = range(norms.shape[1])
    usual = xp.stack([median(latest[:, k], weights, xp) for k in parts])
    apart = 0.0
    for k in parts:
        off = xp.where((p > 0) & xp.isfinite(norms[:, k]), xp.abs(norms[:, k] - usual[k]), xp.inf)
        apart = apart + distances(k, xp.argmin(off)) / xp.where(usual[k] > 0, usual[k], 1) ** 2
    return Cohort(p, norms, last, usual, apart)


def median(values: Array, weights: Array, xp: Any) -> Array:
    """Return the lower weighted median; values of weight 0 are ignored.

    >>> import numpy as np
    >>> float(median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0]), np))
    2.0
    """
    order = xp.argsort(values)
    below = xp.cumsum(weights[order])
    return values[order][xp.argmax(below >= below[-1] * (0.5 - SLACK))]


def squared_distances(rows: Array, centre: Array, xp: Any) -> Array:
    """Return the (S, S) squared distances of S rows.

    They are computed from products of rows - centre, so that their rounding errors are relative to
    distances from the centre: take a row that is not an outlier. Distances over the coordinates of
    a vector are the sums of those over its pieces.
    """
    off = rows - centre
    product = off @ off.T
    square = xp.diagonal(product)
    found = xp.maximum(square[:, None] + square[None, :] - 2 * product, 0)
    return found * (1 - xp.eye(len(rows)))


def _nearest_sum(apart: Array, share: Array, room: Array, xp: Any) -> Array:
    """Return each client's sum of squared distances to its nearest others of weight `room`."""
    others = share[None, :] * (1 - xp.eye(len(share)))
    order = xp.argsort(apart, axis=1)
    near, weight = (xp.take_along_axis(a, order, axis=1) for a in (apart, others))
    before = xp.cumsum(weight, axis=1) - weight
    return (xp.clip(room - before, 0, weight) * near).sum(axis=1)


def _distances_to_median(apart: Array, p: Array, xp: Any, repeat: Repeat) -> Array:
    """Return each client's distance to the weighted geometric median.

    The median is a convex combination sum w_j v_j of the clients' vectors, so that its squared
    distance to v_i is (D w)_i - w'Dw / 2, and Weiszfeld's algorithm needs D alone.
    """

    def distances(w: Array) -> Array:
        near = apart @ w
        return xp.sqrt(xp.maximum(near - w @ near / 2, 0))

    least = 1e-9 * xp.sqrt(xp.maximum(apart.max(), 1e-300))

    def step(w: Array) -> Array:
        new = p / xp.maximum(distances(w), least)
        return new / new.sum()

    return distances(repeat(ITERATIONS, step, p / p.sum()))


def _loop(times: int, step: Callable[[Array], Array], start: Array) -> Array:
    for _ in range(times):
        start = step(start)
    return start


def _relative(value: Array, to: Array, xp: Any) -> Array:
    """Return value / to, and 0 for 0 / 0."""
    return xp.where(to > 0, value / xp.where(to > 0, to, 1), xp.where(value > 0, xp.inf, 0))


def _factor(beyond: float) -> float:
    beyond = checks.number("beyond", beyond, above=0)
    if beyond < 1:
        raise InputError(f"beyond must be at least 1, got {beyond:g}: it is a multiple of a median")
    return beyond

"""How long clients take for a task, in virtual seconds.

    constant(seconds)          every task takes as long
    lognormal(median, sigma)   log-normal: log of the seconds has standard deviation sigma
    pareto(least, shape)       heavy-tailed: P(seconds > t) = (least / t)^shape for t > least
    slow(share, factor, law)   a share of the clients takes `factor` times as long as the law says

or a trace: rows of seconds, one column per client, whose row k is each client's k-th task; after
the last row the first follows. Delays depend on nothing that is computed, so a run's clock is known
before its first round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError, memoised

__all__ = ["Law", "Tasks", "constant", "draw_seconds", "lognormal", "of", "pareto", "slow"]

LONGEST = 1e12  # seconds of a task: the clock is a sum of these in double precision


class Tasks(NamedTuple):
    """Tasks that clients begin at one time."""

    client: NDArray[np.int64]
    number: NDArray[np.int64]
    """How many tasks each of these clients has had before."""
    num_clients: int
    """Number of all clients."""


class Law(NamedTuple):
    """A law of delays."""

    name: str
    draw: Callable[[Tasks, np.random.Generator], NDArray[np.float64]]
    """(tasks, rng) -> the seconds that each of them takes."""


@memoised
def constant(seconds: float) -> Law:
    """Let every task take the same time.

    >>> constant(2.0).name
    'constant:2'
    """
    seconds = checks.number("seconds", seconds, at_least=0)
    return Law(f"constant:{seconds:g}", lambda tasks, rng: np.full(len(tasks.client), seconds))


@memoised
def lognormal(median: float, sigma: float) -> Law:
    """Draw each task's time from a log-normal law.

    >>> lognormal(1.0, 0.5).name
    'lognormal:1:0.5'
    """
    median = checks.number("median", median, above=0)
    sigma = checks.number("sigma", sigma, at_least=0)

    def draw(tasks: Tasks, rng: np.random.Generator) -> NDArray[np.float64]:
        return median * np.exp(sigma * rng.standard_normal(len(tasks.client)))

    return Law(f"lognormal:{median:g}:{sigma:g}", draw)


@memoised
def pareto(least: float, shape: float) -> Law:
    """Draw each task's time from a Pareto law: heavy-tailed, without a mean for `shape` up to 1.

    >>> pareto(1.0, 1.5).name
    'pareto:1:1.5'
    """
    least = checks.number("least", least, above=0)
    shape = checks.number("shape", shape, above=0)

    def draw(tasks: Tasks, rng: np.random.Generator) -> NDArray[np.float64]:
        return least * np.exp(rng.standard_exponential(len(tasks.client)) / shape)

    return Law(f"pareto:{least:g}:{shape:g}", draw)


@memoised
def slow(share: float, factor: float, law: Law | None = None) -> Law:
    """Let the last `share` of the clients, by number, take `factor` times as long as the others.

    Args:
        share: Share of slow clients, between 0 and 1.
        factor: How many times as long they take.
        law: The law of the others; one second by default.

    >>> tasks = Tasks(np.arange(4), np.zeros(4, np.int64), 4)
    >>> slow(0.25, 10.0).draw(tasks, np.random.default_rng(0)).tolist()
    [1.0, 1.0, 1.0, 10.0]
    """
    share, factor = checks.number("share", share, above=0), checks.number("factor", factor, above=0)
    if share > 1:
        raise InputError(f"share must be a number above 0 and at most 1, got {share:g}")
    others = constant(1.0) if law is None else law

    def draw(tasks: Tasks, rng: np.random.Generator) -> NDArray[np.float64]:
        first = tasks.num_clients - max(1, round(share * tasks.num_clients))
        return np.where(tasks.client >= first, factor, 1.0) * others.draw(tasks, rng)

    of_others = "" if law is None else f", {law.name}"
    return Law(f"slow:{share:g}:{factor:g}{of_others}", draw)


LAWS: dict[str, tuple[Callable[..., Law], str]] = {
    "constant": (constant, "constant:SECONDS"),
    "lognormal": (lognormal, "lognormal:MEDIAN:SIGMA"),
    "pareto": (pareto, "pareto:LEAST:SHAPE"),
    "slow": (slow, "slow:SHARE:FACTOR"),
}


def of(given: Any, num_clients: int) -> Law:
    """Return the law of delays that is given as a `Law`, as text or as a trace.

    >>> of("slow:0.1:10", 20).name, of([[1.0, 2.0]], 2).name
    ('slow:0.1:10', 'trace of 1 tasks')
    """
    if isinstance(given, Law):
        return given
    if isinstance(given, str):
        return _parse(given)
    try:
        trace = np.atleast_2d(np.asarray(given, np.float64))
    except (TypeError, ValueError):
        trace = np.empty((0, 0))
    if trace.ndim != 2 or not len(trace) or trace.shape[1] != num_clients:
        raise InputError(
            "delays must be a law such as fs.delays.pareto(1, 1.5) or 'pareto:1:1.5', or rows of "
            f"seconds with one column for each of the {num_clients} clients, got "
            f"{checks.shown(given)}"
        )
    if not ((trace >= 0) & (trace <= LONGEST)).all():
        raise InputError(f"delays must be seconds from 0 to {LONGEST:g}, got {checks.shown(given)}")
    return Law(
        f"trace of {len(trace)} tasks",
        lambda tasks, rng: trace[tasks.number % len(trace), tasks.client],
    )


def _parse(text: str) -> Law:
    name, *numbers = text.split(":")
    make, form = LAWS[checks.choice("law of delays", name, LAWS)]
    values = [checks.written(number) for number in numbers]
    if len(values) != form.count(":") or any(isinstance(value, str) for value in values):
        raise InputError(f"{name} is written {form}, got {checks.shown(text)}")
    return make(*values)


def draw_seconds(law: Law, tasks: Tasks, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the seconds that tasks take; none is longer than the clock can count."""
    return np.minimum(law.draw(tasks, rng), LONGEST)

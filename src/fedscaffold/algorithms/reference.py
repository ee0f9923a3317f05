"""Reference engine: one round on plain arrays, clients one after the other.

It is the slowest engine and the easiest to read. All arithmetic of a method comes from the
algorithm. Conformance checks, paper experiments and tests compare the other engines with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from fedscaffold.algorithms.base import Algorithm, Gradient, Record, Vector, Walk, travelled
from fedscaffold.algorithms.round import each, reply_of

__all__ = [
    "Advance",
    "Federation",
    "State",
    "adam",
    "begin",
    "descend",
    "heavy_ball",
    "mean_of",
    "play",
]

Advance = Callable[[Any, Any], Any]
"""(d, lr) -> step to subtract from y. It may keep state between the steps of one round."""


class State(NamedTuple):
    """Complete state of a federation between rounds."""

    round: int
    server: Record
    memory: tuple[Record, ...]
    """One entry per client; None each if clients keep no memory."""
    own: tuple[Record, ...]
    """Private records, one per client."""


class Federation(NamedTuple):
    """The clients: weights, local training and gradients."""

    weights: Sequence[float]
    """The p_i; they sum to 1."""
    descend: Callable[[int, Any, Vector, Vector], Walk]
    """(client, start, x, shift) -> walk: the local training of a client."""
    gradient: Callable[[int, Vector], Vector] | None = None
    """(client, x) -> gradient over all of its data; needed only by algorithms with `prepare`."""


def begin(algorithm: Algorithm, x: Vector, clients: int) -> State:
    """Return the state before the first round.

    >>> from fedscaffold.algorithms import scaffold
    >>> begin(scaffold(), 2.0, clients=1)
    State(round=0, server=Server(x=2.0, c=0.0), memory=(Memory(c_i=0.0),), own=(None,))
    """
    memory, own = (algorithm.memory(x),) * clients, (algorithm.own(x),) * clients
    return State(0, algorithm.init(x), memory, own)


def play(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    cohort: Collection[int],
    heard: Collection[int] | None = None,
) -> State:
    """Run one round.

    Args:
        algorithm: The algorithm.
        state: State before the round.
        federation: The clients.
        cohort: Clients that train.
        heard: Clients of the cohort whose messages arrive; all by default. The memory and private
            record of the others do not change.

    Returns:
        The state after the round.
    """
    p = federation.weights
    heard = cohort if heard is None else heard
    server = state.server
    if algorithm.prepare is not None and len(heard):
        assert federation.gradient is not None
        gradients = {i: federation.gradient(i, server.x) for i in heard}
        server = algorithm.prepare(server, mean_of(p, gradients)[0])
    memory, own, messages = list(state.memory), list(state.own), {}
    for i in cohort:
        shift = algorithm.shift(server, memory[i])
        walk = federation.descend(i, algorithm.start(server.x, own[i]), server.x, shift)
        message, new_own = reply_of(algorithm, walk, shift, own[i])
        if i in heard:
            messages[i], own[i] = message, new_own
            memory[i] = algorithm.remember(memory[i], shift, message)
    if not messages:
        return State(state.round + 1, state.server, tuple(memory), tuple(own))
    mean, total = mean_of(p, messages)
    server = algorithm.update(server, server, mean, total)
    return State(state.round + 1, server, tuple(memory), tuple(own))


def mean_of(p: Sequence[float], messages: dict[int, Any]) -> tuple[Any, float]:
    """Return the weighted mean of the clients' vectors or records, and the total weight.

    >>> mean_of([0.5, 0.25, 0.25], {0: 1.0, 2: 4.0})
    (2.0, 0.75)
    """
    total = sum(p[i] for i in messages)

    def mean(*values: Vector) -> Vector:
        return sum(p[i] * value for i, value in zip(messages, values, strict=True)) / total

    return each(mean, *messages.values()), total


def descend(
    algorithm: Algorithm,
    gradient: Callable[..., Vector],
    start: Any,
    x: Vector,
    shift: Vector,
    *,
    lrs: Sequence[Any],
    planned: int | None = None,
    batches: Sequence[Any] | None = None,
    advance: Advance | None = None,
    whole: Gradient | None = None,
    watch: Callable[[Any], Any] = lambda d: d,
    path: list[Any] | None = None,
) -> Walk:
    """Run the local steps of one client.

    Args:
        algorithm: The algorithm, whose `direction` is followed.
        gradient: (y) -> the client's gradient; (y, batch) if `batches` are given.
        start: Start of the local steps: a vector, or a record of vectors.
        x: The model that the client received.
        shift: The shift that it received.
        lrs: Size of each step.
        planned: Number of steps by which the sum of directions is divided; `len(lrs)` by default.
        batches: The batch of each step.
        advance: The optimiser, such as `heavy_ball(0.9)`; plain SGD by default.
        whole: (y) -> gradient over all data; `gradient` by default.
        watch: (d) -> the direction to use, for example clipped.
        path: A list to which every y is appended.

    Returns:
        The walk: the result of the local training.
    """
    count = len(lrs) if planned is None else planned
    plain = advance is None and all(lr is lrs[0] or lr == lrs[0] for lr in lrs)
    y, total = start, None  # total: sum of directions, which plain SGD does not need
    for k, lr in enumerate(lrs):
        slope = gradient if batches is None else partial(gradient, batch=batches[k])
        d = watch(algorithm.direction(slope, y, x, shift))
        step = each(lambda along, lr=lr: lr * along, d) if advance is None else advance(d, lr)
        y = each(lambda at, by: at - by, y, step)
        if not plain:
            total = d if total is None else each(lambda sum, new: sum + new, total, d)
        if path is not None:
            path.append(y)

    def direction() -> Any:
        if plain:
            return each(lambda begun, ended: travelled(begun, ended, count, lrs[0]), start, y)
        return each(lambda sum: sum / count, total)

    return Walk(
        x=lambda: x,
        y=lambda: y,
        move=lambda: each(lambda begun, ended: begun - ended, start, y),
        travel=lambda: sum(lrs),
        d=direction,
        gradient=lambda: (whole or gradient)(x),
    )


def heavy_ball(momentum: float) -> Advance:
    """Return SGD with momentum, with fresh state for one round.

    >>> advance = heavy_ball(0.5)
    >>> advance(2.0, 0.1), advance(2.0, 0.1)
    (0.2, 0.3...)
    """
    velocity = None

    def advance(d: Any, lr: Any) -> Any:
        nonlocal velocity
        velocity = d if velocity is None else each(lambda v, new: momentum * v + new, velocity, d)
        return each(lambda v: lr * v, velocity)

    return advance


def adam(fast: float = 0.9, slow: float = 0.999, least: float = 1e-8) -> Advance:
    """Return Adam, with fresh state for one round.

    `fast` and `slow` are the decay rates of its two moments.

    >>> f"{adam()(2.0, 0.1):.6f}"
    '0.100000'
    """
    first = second = None
    steps = 0

    def advance(d: Any, lr: Any) -> Any:
        nonlocal first, second, steps
        if steps == 0:
            first = second = each(lambda a: 0 * a, d)
        steps += 1
        first = each(lambda m, new: fast * m + (1 - fast) * new, first, d)
        second = each(lambda m, new: slow * m + (1 - slow) * new * new, second, d)

        def step(m: Any, v: Any) -> Any:
            return lr * (m / (1 - fast**steps)) / ((v / (1 - slow**steps)) ** 0.5 + least)

        return each(step, first, second)

    return advance

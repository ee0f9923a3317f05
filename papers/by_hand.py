"""Rounds on NumPy arrays, every local step kept: the reference driver, no engine around it.

For pictures of local steps, starts with given control variates, and as a second path beside the
engine. All clients take part in every round, with equal weight and exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm, Walk
from fedscaffold.algorithms.reference import Federation, State, begin, descend
from fedscaffold.algorithms.reference import play as play_round
from fedscaffold.algorithms.round import work_of

__all__ = ["Gradient", "Round", "play", "quadratic_gradients"]

Array = NDArray[Any]
Gradient = Callable[[Array], Array]


class Round(NamedTuple):
    """What a round did."""

    paths: list[Array]
    """(K + 1, ...) the local models of every client, from x on."""
    x: Array
    """The server's model after it."""
    c_i: list[Any]
    """The clients' control variates after it; None each without memory."""


def play(
    algorithm: Algorithm,
    gradients: Sequence[Gradient],
    x: Array,
    *,
    lr: Any,
    local_steps: int,
    rounds: int,
    c_i: Sequence[Array] | None = None,
) -> Iterator[Round]:
    """Play rounds from x, with control variates zero unless given; `lr` may be an array beside x.

    >>> from fedscaffold.algorithms import fedavg
    >>> pair = quadratic_gradients(np.array([[[2.0]], [[0.0]]]), np.array([[-1.0], [1.0]]))
    >>> rounds = play(fedavg(), pair, np.ones(1), lr=0.1, local_steps=2, rounds=2)
    >>> [one.x.round(6).tolist() for one in rounds]
    [[0.83], [0.6906]]
    """
    paths: list[list[Array]] = []

    def steps(i: int, start: Array, x: Array, shift: Any) -> Walk:
        paths.append([x])
        return descend(algorithm, gradients[i], start, x, shift, lrs=lrs, path=paths[-1])

    clients = range(len(gradients))
    lrs = [lr] * work_of(algorithm, local_steps).steps
    federation = Federation([1 / len(clients)] * len(clients), steps, lambda i, x: gradients[i](x))
    state = begin(algorithm, x, len(clients))
    if c_i is not None:
        state = _remembering(algorithm, state, c_i)
    for _ in range(rounds):
        paths.clear()
        state = play_round(algorithm, state, federation, clients)
        memory = [
            None if one is None else getattr(one, algorithm.means[0][1]) for one in state.memory
        ]
        yield Round([np.stack(path) for path in paths], state.server.x, memory)


def _remembering(algorithm: Algorithm, state: State, c_i: Sequence[Array]) -> State:
    """The state with control variates that are given; the server's is their mean."""
    if not algorithm.has_memory:
        return state
    ((field, of),) = algorithm.means
    server = state.server._replace(**{field: sum(c_i) / len(c_i)})
    return state._replace(
        server=server,
        memory=tuple(one._replace(**{of: own}) for one, own in zip(state.memory, c_i, strict=True)),
    )


def quadratic_gradients(hessians: Array, linear: Array) -> list[Gradient]:
    """The gradients A_c x - b_c of the clients.

    >>> quadratic_gradients(np.array([[[2.0]]]), np.array([[1.0]]))[0](np.array([3.0]))
    array([5.])
    """
    return [lambda x, a=a, b=b: a @ x - b for a, b in zip(hessians, linear, strict=True)]  # type: ignore[misc]

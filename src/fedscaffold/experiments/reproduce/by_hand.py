"""Rounds driven by hand in NumPy, every local step kept: the algorithm's own functions, no engine around them.

For pictures of local steps, starts with given control variates, and as a second path beside the engine. All clients
take part in every round, with equal weight and exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms import Algorithm, travelled

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
    >>> [one.x.round(6).tolist() for one in play(fedavg(), pair, np.ones(1), lr=0.1, local_steps=2, rounds=2)]
    [[0.83], [0.6906]]
    """
    steps = 1 if algorithm.one_step else local_steps
    memory: list[Any] = list(c_i) if c_i is not None else [np.zeros_like(x) for _ in gradients]
    c: Any = sum(memory) / len(memory)
    if algorithm.shift is None:
        memory, c = [None] * len(gradients), None
    for _ in range(rounds):
        paths = []
        for gradient, own in zip(gradients, memory, strict=True):
            shift = None if algorithm.shift is None else algorithm.shift(c, own)
            path = [x]
            for _ in range(steps):
                y = path[-1]
                path.append(y - lr * algorithm.direction(gradient(y), y, x, shift))
            paths.append(np.stack(path))
        means = [travelled(x, path[-1], steps, lr) for path in paths]
        if algorithm.remember is not None:
            memory = [algorithm.remember(c, own, d) for own, d in zip(memory, means, strict=True)]
        move = sum(x - path[-1] for path in paths) / len(paths)
        x, c = algorithm.server(x, c, move, sum(means) / len(means), 1.0)
        yield Round(paths, x, memory)


def quadratic_gradients(hessians: Array, linear: Array) -> list[Gradient]:
    """The gradients A_c x - b_c of the clients.

    >>> quadratic_gradients(np.array([[[2.0]]]), np.array([[1.0]]))[0](np.array([3.0]))
    array([5.])
    """
    return [lambda x, a=a, b=b: a @ x - b for a, b in zip(hessians, linear, strict=True)]  # type: ignore[misc]

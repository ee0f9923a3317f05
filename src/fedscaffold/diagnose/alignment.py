"""How well control variates know the clients' gradients, at the present x.

With g_i = grad f_i(x), g = sum p_i g_i, and rms over clients weighted by p_i:

    left       rms |(c_i - c) - (g_i - g)| / rms |g_i - g|
    noise      rms over clients of the noise of a round's mean gradient / rms |g_i - g|
    cosines    <c_i, g_i> / (|c_i| |g_i|)
    pull       sum over clients heard no more of p_i (g_i - c_i)

`left` is what the corrections leave of the clients' difference: 0 is ideal, 1 is as without them,
and above 1 they do harm. `noise` is the part of it that batches explain, as c_i is the mean of the
gradients of K_i of them.

The pull is where training ends: the c_i of the clients that are heard become their g_i, and the
model rests where c = 0, that is grad f(x) = pull, however long it trains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.problems.problem import Floats

__all__ = ["Alignment", "alignment", "cosines", "pull"]


class Alignment(NamedTuple):
    """Agreement of control variates with gradients; formulas are in the module's docstring."""

    left: float
    noise: float
    cosines: Floats
    errors: Floats
    """|(c_i - c) - (g_i - g)| of each client."""


def alignment(p: Floats, c: Floats, c_i: Floats, gradients: Floats, noise: Floats) -> Alignment:
    """Compare control variates with gradients; `noise` has the variance of each client's mean.

    Clients of weight 0 do not count.

    >>> g, half = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([0.5, 0.5])
    >>> one = alignment(half, np.zeros(2), 0.9 * g, g, np.zeros(2))
    >>> round(one.left, 12), one.cosines
    (0.1, array([1., 1.]))
    """
    mean = p @ gradients
    errors: Floats = np.linalg.norm((c_i - c) - (gradients - mean), axis=1)
    apart = np.sqrt(p @ np.square(gradients - mean).sum(axis=1))
    scale = apart if apart > 0 else 1.0
    left, own = np.sqrt(p @ np.square(errors)) / scale, np.sqrt(p @ noise) / scale
    return Alignment(float(left), float(own), cosines(c_i, gradients), errors)


def cosines(one: Floats, two: Floats) -> Floats:
    """Return the cosines between the rows of `one` and `two` (rows, or one vector).

    The cosine with a zero vector is 0.

    >>> cosines(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([2.0, 0.0])).round(6)
    array([0.707107, 0.      ])
    """
    one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=-1)
    inner = np.einsum("nd,nd->n", one, np.broadcast_to(two, one.shape))
    found: Floats = np.divide(inner, lengths, out=np.zeros(len(one)), where=lengths > 0)
    return found


def pull(p: Floats, c_i: Floats, gradients: Floats, away: NDArray[np.bool_]) -> float:
    """Return |sum p_i (g_i - c_i)| over the clients no longer heard.

    It is the gradient norm at which training ends.

    >>> half, away = np.array([0.5, 0.5]), np.array([True, False])
    >>> pull(half, np.zeros((2, 1)), np.array([[3.0], [1.0]]), away)
    1.5
    """
    return float(np.linalg.norm(p[away] @ (gradients[away] - c_i[away])))

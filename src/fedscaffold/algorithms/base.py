"""What a federated algorithm is: a few pure functions on vectors.

One round, in plain text. The server sends the model x (and its control variate c); every client i of the cohort

    starts at      y = x
    repeats        y <- y - step of its local optimiser along d,   d = direction(g_i(y), y, x, shift(c, c_i))
    forms          d_i = the mean of its d                          travelled() when the steps are plain SGD
    remembers      c_i <- remember(c, c_i, d_i)
    sends          d_i, and its move x - y where that is not (K lr) d_i

and the server, having heard clients of total weight `heard` = sum of their p_i (S/N when all weigh the same),

    averages       D = sum p_i d_i / heard,   move = sum p_i (x - y_i) / heard
    steps          x, c <- server(x, c, move, D, heard)

Three methods need a little more, said by a field each. `anchor`: before the local steps the clients heard exchange
their gradients at x, and g is then the difference of the same batch's gradients at y and at x. `normalised`: moves
are divided by the distance each client was to travel before they are averaged, and multiplied by the mean one
after. `coin`: the number of local steps of a round is drawn, geometric with mean K and the same for all; d_i = (x -
y) / (K lr) all the same, whatever was drawn.

The functions use only + - * / and import no array library: the same text runs under jit in the simulator, on NumPy in
a server and on torch tensors in a client. They return new values and change none of their arguments. All but `server`
are elementwise, so an engine may call them on flat vectors or layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from fedscaffold.brief import brief

__all__ = ["Algorithm", "ServerStep", "Vector", "travelled"]

Vector: TypeAlias = Any  # numpy.ndarray, jax.Array or torch.Tensor; None where an algorithm keeps no memory
ServerStep: TypeAlias = Callable[[Vector, Vector, Vector, Vector, float], tuple[Vector, Vector]]


class Algorithm(NamedTuple):
    """A federated method: what is computed. How clients are run is an engine's business."""

    def __repr__(self) -> str:
        return brief(self)

    name: str
    direction: Callable[[Vector, Vector, Vector, Vector], Vector]
    """(g, y, x, shift) -> d, at every local step; g is the client's gradient at y."""
    server: ServerStep
    """(x, c, move, d, heard) -> x, c, once a round; move and d are averages over the clients heard."""
    shift: Callable[[Vector, Vector], Vector] | None = None
    """(c, c_i) -> shift, once a round; None where clients keep no memory."""
    remember: Callable[[Vector, Vector, Vector], Vector] | None = None
    """(c, c_i, d) -> c_i, once a round; d is the client's mean direction."""
    at_x: bool = False
    """The direction to remember is the one at x, over all local data, instead of the mean one."""
    one_step: bool = False
    """A round is one step on all local data, whatever the number of local steps asked for."""
    by_move: bool = False
    """What the client remembers is made from its move x - y, given as d: (c, c_i, move) -> c_i."""
    anchor: Callable[[Vector, Vector], Vector] | None = None
    """(c, a) -> c, before the local steps; a is the mean over the clients heard of their gradients at x."""
    normalised: bool = False
    """Moves are averaged per unit of travel, so that clients with more local steps do not pull harder."""
    coin: bool = False
    """The number of local steps is drawn each round, geometric with mean `local_steps`, one for all clients."""
    everyone: bool = False
    """Right only if all clients take part in every round; they find c from two models in a row, and are not sent it."""


def travelled(x: Vector, y: Vector, steps: float, lr: float) -> Vector:
    """Mean direction of `steps` plain SGD steps of size `lr` that led from x to y."""
    return (x - y) / (steps * lr)

"""What is run and what comes back: a federation of quadratics, exact, on NumPy arrays.

An adapter is one function, `Case -> Trace`, around somebody's SCAFFOLD. The case says all that happens: who
trains, whose reply is lost, when the process dies; nothing is random. One round, in plain text: each client i
of the cohort starts at y = x with an empty momentum buffer, m = 0, and takes local_steps[i] steps

    d = gradient(i, y) - c_i + c,     m = momentum * m + d,     y <- y - lr[k] * m

Then c_i becomes the mean gradient it saw (option 2) or its gradient at x (option 1). Over the replies that
arrive, x moves by server_lr times the weighted mean of y - x, c by the sum of weights[i] * (change of c_i).

Some cases ask for more: a model in several tensors, clipping and so on. They are only run for an adapter that
says that it `offers` it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks

__all__ = ["FEATURES", "Adapter", "Array", "Call", "Case", "Run", "Trace", "Unsupported", "federation", "offers"]

Array: TypeAlias = NDArray[np.float64]


class Unsupported(Exception):
    """Raised by an adapter for what its implementation does not offer: `raise Unsupported("momentum")`."""


class Call(NamedTuple):
    """One gradient that was asked for: client, point, value."""

    i: int
    y: Array
    g: Array


class Case(NamedTuple):
    """One federation f_i(x) = x'A_i x / 2 - b_i'x, run with exact gradients from control variates of zero."""

    hessians: Array
    """(N, d, d): A_i."""
    linear: Array
    """(N, d): b_i."""
    x0: Array
    """(d,): the first model. Not zero where it can be helped: a zero hides what starts at the model."""
    cohorts: tuple[tuple[int, ...], ...]
    """For every round, the clients that train."""
    lost: tuple[tuple[int, ...], ...]
    """For every round, the clients of the cohort whose reply never reaches the server."""
    local_steps: tuple[int, ...]
    """For every client, its number of local steps."""
    lr: tuple[float, ...]
    """Step size at local step k, the same in every round; as long as the largest of local_steps."""
    server_lr: float
    weights: Array
    """(N,): p_i, summing to 1; the objective is the sum of p_i f_i."""
    momentum: float = 0.0
    """Heavy ball inside the local loop, its buffer empty at the start of every round."""
    option: int = 2
    """How c_i is renewed: 1, the gradient at x; 2, the mean of the gradients seen."""
    restart: int | None = None
    """After so many rounds server and clients end, and go on from what they had saved."""
    frozen: bool = False
    """Control variates are never updated."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The tensors that the model consists of, in the order of x; () for one vector. See `split` and `join`."""
    buffers: Array | None = None
    """(B,): running statistics beside the parameters, as BatchNorm has them; see `forward`."""
    clip: float | None = None
    """Every gradient is scaled down to this norm before it is corrected; c_i is made of clipped gradients."""
    clip_corrected: float | None = None
    """Every direction, gradient - c_i + c, is scaled down to this norm."""
    loss_scale: float = 1.0
    """The loss is multiplied by this, as in mixed precision: so is what `gradient` returns."""
    private: bool = False
    """Take the differentially private optimiser, with no noise and a bound that is never met."""
    precision: str = "float64"
    """The arithmetic that is asked for; `x0` and gradients are of this type."""
    calls: list[Call] | None = None
    """Where `gradient` writes down what it was asked; the judge sets it."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.cohorts)

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.linear)

    def heard(self, r: int) -> tuple[int, ...]:
        """The clients whose reply reaches the server in round r (the first is 0)."""
        return tuple(i for i in self.cohorts[r] if i not in self.lost[r])

    @property
    def asks(self) -> tuple[str, ...]:
        """What of `FEATURES` the case asks for."""
        asked = {
            "tensors": bool(self.shapes),
            "buffers": self.buffers is not None,
            "clipping": self.clip is not None or self.clip_corrected is not None,
            "loss scaling": self.loss_scale != 1.0,
            "private optimiser": self.private,
        }
        return tuple(name for name, yes in asked.items() if yes)

    def gradient(self, i: int, y: Any) -> Any:
        """The gradient of f_i at y, times `loss_scale`. Ask once for every local step: the suite counts on it."""
        point = np.array(np.asarray(y), np.float64)  # a tensor has to become an array first
        g: Array = self.hessians[i] @ point - self.linear[i]
        if self.calls is not None:
            self.calls.append(Call(int(i), point, g))
        return (self.loss_scale * g).astype(self.precision, copy=False)

    def forward(self, i: int, buffers: Any) -> Any:
        """What one training step of client i makes of the running statistics; no gradient has a part in it."""
        old = np.array(np.asarray(buffers), np.float64)
        return (0.9 * old + 0.1 * self.linear[i, : len(old)]).astype(self.precision)

    def split(self, vector: Any) -> list[Any]:
        """A vector as the tensors of the model.

        >>> case = federation([np.eye(3)], [[0.0] * 3], [1.0, 2.0, 3.0], rounds=1, steps=1, lr=0.1)
        >>> case._replace(shapes=((1, 2), (1,))).split(case.x0)
        [array([[1., 2.]]), array([3.])]
        """
        shapes = self.shapes or (self.x0.shape,)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        return [part.reshape(s) for part, s in zip(np.split(vector, ends[:-1]), shapes, strict=True)]

    def join(self, tensors: Any) -> Any:
        """The tensors of the model as one vector."""
        return np.concatenate([np.asarray(tensor).reshape(-1) for tensor in tensors])

    def copy(self) -> Case:
        """A copy that an adapter may write into, with an empty list of calls."""
        return self._replace(
            hessians=self.hessians.copy(),
            linear=self.linear.copy(),
            x0=self.x0.copy(),
            weights=self.weights.copy(),
            buffers=None if self.buffers is None else self.buffers.copy(),
            calls=[],
        )

    def computed_in(self, precision: str) -> Case:
        """The same case in other arithmetic."""
        return self._replace(x0=self.x0.astype(precision), precision=precision)


def federation(hessians: Any, linear: Any, x0: Any, rounds: int, steps: int, lr: float) -> Case:
    """The plainest case: all clients in every round, nothing lost, equal weights, a constant step.

    Everything else is a `_replace` away.

    >>> case = federation([[[1.0]], [[2.0]]], [[1.0], [3.0]], [5.0], rounds=3, steps=2, lr=0.1)
    >>> case.cohorts, case.weights, case.gradient(1, [1.0])
    (((0, 1), (0, 1), (0, 1)), array([0.5, 0.5]), array([-1.]))
    """
    n = len(linear)
    return Case(
        hessians=np.array(hessians, np.float64),
        linear=np.array(linear, np.float64),
        x0=np.array(x0, np.float64),
        cohorts=(tuple(range(n)),) * rounds,
        lost=((),) * rounds,
        local_steps=(steps,) * n,
        lr=(lr,) * steps,
        server_lr=1.0,
        weights=np.full(n, 1.0 / n),
    )


class Trace(NamedTuple):
    """What came out: the states before the first round and after every round."""

    x: Array
    """(rounds + 1, d)"""
    c: Array
    """(rounds + 1, d); zeros where there is no such thing."""
    c_i: Array
    """(rounds + 1, N, d)"""
    buffers: Array | None = None
    """(rounds + 1, B): the server's running statistics; None where clients keep their own."""

    @property
    def vectors(self) -> tuple[Array, Array, Array]:
        """What every SCAFFOLD has: x, c and c_i."""
        return self.x, self.c, self.c_i


Adapter: TypeAlias = Callable[[Case], Trace]
AdapterType = TypeVar("AdapterType", bound=Adapter)

FEATURES = ("tensors", "buffers", "clipping", "loss scaling", "private optimiser")


def offers(*features: str) -> Callable[[AdapterType], AdapterType]:
    """Mark an adapter as one that heeds these of `FEATURES`; without it their rows are not offered.

    >>> @offers("tensors", "clipping")
    ... def adapter(case):
    ...     print(case.shapes, case.clip)
    """
    for feature in features:
        checks.choice("feature", feature, FEATURES)

    def mark(adapter: AdapterType) -> AdapterType:
        adapter.offers = frozenset(features)  # type: ignore[attr-defined]
        return adapter

    return mark


class Run(NamedTuple):
    """A case, what an adapter made of it, and the gradients it asked for on the way."""

    case: Case
    trace: Trace
    calls: tuple[Call, ...] = ()
    met: bool = False
    """Whether c is the mean over the clients heard so far, instead of over all."""

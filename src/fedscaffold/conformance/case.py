"""`Case` and `Trace`, input and output of an adapter: quadratics with exact gradients.

An adapter is one function, `Case -> Trace`, around an implementation of SCAFFOLD. The case
determines everything: who trains, whose reply is lost, when the process restarts; nothing is random
but the noise of a private optimiser, where a case asks for it. In one round each client i of the
cohort starts at y = x with an empty momentum buffer, m = 0, and takes local_steps[i] steps

    d = gradient(i, y) - c_i + c,     m = momentum * m + d,     y <- y - lr[k] * m

Then c_i becomes the mean gradient it saw (option 2) or its gradient at x (option 1). Over the
replies that arrive, x moves by server_lr times the weighted mean of y - x, c by the sum of
weights[i] * (change of c_i).

Some cases need additional features, such as a model in several tensors or clipping. They are run
only if the adapter declares with `offers` that it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks

__all__ = [
    "FEATURES",
    "Adapter",
    "Array",
    "Call",
    "Case",
    "Run",
    "Trace",
    "Unsupported",
    "federation",
    "offers",
]

Array: TypeAlias = NDArray[np.float64]


class Unsupported(Exception):
    """Raised by an adapter for a feature it does not offer: `Unsupported("momentum")`."""


class Call(NamedTuple):
    """One gradient evaluation: client, point, value."""

    i: int
    y: Array
    g: Array


class Case(NamedTuple):
    """One federation f_i(x) = x'A_i x / 2 - b_i'x with exact gradients and c = c_i = 0 at first."""

    hessians: Array
    """(N, d, d): A_i."""
    linear: Array
    """(N, d): b_i."""
    x0: Array
    """(d,): the initial model. Non-zero where possible, as zero hides errors that are proportional
    to it."""
    cohorts: tuple[tuple[int, ...], ...]
    """Clients that train, for each round."""
    lost: tuple[tuple[int, ...], ...]
    """Clients of the cohort whose reply never reaches the server, for each round."""
    local_steps: tuple[int, ...]
    """Number of local steps of each client."""
    lr: tuple[float, ...]
    """Step size at local step k, the same in every round; as long as the largest of local_steps."""
    server_lr: float
    weights: Array
    """(N,): p_i, summing to 1; the objective is the sum of p_i f_i."""
    momentum: float = 0.0
    """Heavy ball inside the local loop, its buffer empty at the start of every round."""
    option: int = 2
    """Update of c_i: 1, the gradient at x; 2, the mean of the gradients seen."""
    restart: int | None = None
    """Number of rounds after which server and clients restart from their saved state."""
    frozen: bool = False
    """Whether control variates are never updated."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The tensors that the model consists of, in the order of x; () for one vector. See `split` and
    `join`."""
    buffers: Array | None = None
    """(B,): running statistics beside the parameters, as BatchNorm has them; see `forward`."""
    clip: float | None = None
    """Norm to which gradients are clipped before the correction; c_i is computed from clipped
    gradients."""
    clip_corrected: float | None = None
    """Norm to which directions, gradient - c_i + c, are clipped."""
    loss_scale: float = 1.0
    """Factor of the loss, as in mixed precision, and so of what `gradient` returns."""
    private: bool = False
    """Whether to use the differentially private optimiser, with the bound `clip` over all tensors
    jointly, or one that is never reached, and with `noise`."""
    noise: float = 0.0
    """Deviation of the Gaussian noise that the private optimiser adds to every coordinate of a
    step's gradient, after clipping and before the correction. The adapter draws it."""
    precision: str = "float64"
    """Data type of `x0` and of gradients."""
    calls: list[Call] | None = None
    """List to which `gradient` appends its calls; set by the judge."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.cohorts)

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.linear)

    def heard(self, r: int) -> tuple[int, ...]:
        """Return the clients whose reply reaches the server in round r, counted from 0."""
        return tuple(i for i in self.cohorts[r] if i not in self.lost[r])

    @property
    def asks(self) -> tuple[str, ...]:
        """Those of `FEATURES` that the case needs."""
        asked = {
            "tensors": bool(self.shapes),
            "buffers": self.buffers is not None,
            "clipping": self.clip is not None or self.clip_corrected is not None,
            "loss scaling": self.loss_scale != 1.0,
            "private optimiser": self.private,
            "private noise": self.noise > 0,
        }
        return tuple(name for name, yes in asked.items() if yes)

    def gradient(self, i: int, y: Any) -> Any:
        """Return the gradient of f_i at y times `loss_scale`.

        Call it exactly once per local step.
        """
        point = np.array(np.asarray(y), np.float64)  # a tensor has to become an array first
        g: Array = self.hessians[i] @ point - self.linear[i]
        if self.calls is not None:
            self.calls.append(Call(int(i), point, g))
        return (self.loss_scale * g).astype(self.precision, copy=False)

    def forward(self, i: int, buffers: Any) -> Any:
        """Return the running statistics after one training step of client i.

        They do not depend on gradients.
        """
        old = np.array(np.asarray(buffers), np.float64)
        return (0.9 * old + 0.1 * self.linear[i, : len(old)]).astype(self.precision)

    def split(self, vector: Any) -> list[Any]:
        """Split a vector into the tensors of the model.

        >>> case = federation([np.eye(3)], [[0.0] * 3], [1.0, 2.0, 3.0], rounds=1, steps=1, lr=0.1)
        >>> case._replace(shapes=((1, 2), (1,))).split(case.x0)
        [array([[1., 2.]]), array([3.])]
        """
        shapes = self.shapes or (self.x0.shape,)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        return [
            part.reshape(s) for part, s in zip(np.split(vector, ends[:-1]), shapes, strict=True)
        ]

    def join(self, tensors: Any) -> Any:
        """Concatenate the tensors of the model into one vector."""
        return np.concatenate([np.asarray(tensor).reshape(-1) for tensor in tensors])

    def copy(self) -> Case:
        """Return a copy that an adapter may modify, with an empty list of calls."""
        return self._replace(
            hessians=self.hessians.copy(),
            linear=self.linear.copy(),
            x0=self.x0.copy(),
            weights=self.weights.copy(),
            buffers=None if self.buffers is None else self.buffers.copy(),
            calls=[],
        )

    def computed_in(self, precision: str) -> Case:
        """Return the same case in another precision."""
        return self._replace(x0=self.x0.astype(precision), precision=precision)


def federation(hessians: Any, linear: Any, x0: Any, rounds: int, steps: int, lr: float) -> Case:
    """Return the basic case: all clients in all rounds, equal weights, a constant step.

    Use `_replace` for everything else.

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
    """Result of a case: the states before the first round and after every round."""

    x: Array
    """(rounds + 1, d)"""
    c: Array
    """(rounds + 1, d); zeros if the method has none."""
    c_i: Array
    """(rounds + 1, N, d)"""
    buffers: Array | None = None
    """(rounds + 1, B): the server's running statistics; None if clients keep their own."""

    @property
    def vectors(self) -> tuple[Array, Array, Array]:
        """x, c and c_i."""
        return self.x, self.c, self.c_i


Adapter: TypeAlias = Callable[[Case], Trace]
AdapterType = TypeVar("AdapterType", bound=Adapter)

FEATURES = (
    "tensors",
    "buffers",
    "clipping",
    "loss scaling",
    "private optimiser",
    "private noise",
)


def offers(*features: str) -> Callable[[AdapterType], AdapterType]:
    """Decorate an adapter with the `FEATURES` that it supports.

    Rows that need others are not offered.

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
    """A case, the trace that an adapter returned, and the gradients it evaluated."""

    case: Case
    trace: Trace
    calls: tuple[Call, ...] = ()
    met: bool = False
    """Whether c is the mean over the clients heard so far rather than over all."""

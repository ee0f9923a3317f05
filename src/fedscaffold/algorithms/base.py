"""The `Algorithm` interface: pure functions on vectors, and the records they pass around.

The server's record has the model x as its first field; a client may keep a memory between rounds.
In one round every client i of the cohort

    receives       x and shift_i = shift(server, memory_i)
    starts at      y = x
    repeats        y <- y - step of its optimiser along d,    d = direction(gradient, y, x, shift_i)
    sends          message_i = message(walk_i, shift_i),            walk_i: its local training
    remembers      memory_i <- remember(memory_i, shift_i, message_i)

and the server, with messages received from clients of total weight `heard` = sum of their p_i (S/N
for equal weights),

    averages       mean = sum p_i message_i / heard                 field by field
    steps          server <- update(server, sent, mean, heard)      sent: what clients received

The memory is computed from the message as the server decoded it. It can therefore be stored at the
client or at the server, and whatever compression, clipping or a lost reply removed from the message
is not in the memory either.

Fields of a record are vectors or numbers (a counter, for example). The shift is a vector, or a
record of vectors and numbers; it is constant during a round.

The functions use only + - * / and comparisons and import no array library: the same code runs under
jit in the simulator, on NumPy in the server and on torch tensors in the client. They return new
values and never modify their arguments. `direction` must be elementwise, as engines may call it
layer by layer; the other functions are given flat vectors and may call a vector's `sum()`. Servers
of deployments compute block by block of coordinates and refuse methods that do. Engines use nothing
but these functions, and never the algorithm's name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from fedscaffold.brief import brief

__all__ = [
    "Algorithm",
    "Form",
    "Gradient",
    "Leaves",
    "LocalWork",
    "Model",
    "Move",
    "Vector",
    "Walk",
    "common_model",
    "one_full_step",
    "travelled",
]

Vector: TypeAlias = Any  # numpy.ndarray, jax.Array or torch.Tensor
Gradient: TypeAlias = Callable[[Vector], Vector]
Record: TypeAlias = Any  # a NamedTuple of vectors and numbers that the algorithm defines


class Model(NamedTuple):
    """Server record of a method that keeps only the model."""

    x: Vector


class Move(NamedTuple):
    """Message of a method that averages models."""

    move: Vector


class Walk:
    """Result of a client's local training. Fields are computed on first access.

    x          the model that the client received
    y          the end of its local steps; `y`, `move` and `d` have the structure that `start`
               returned
    move       start - y
    travel     the sum of its step sizes
    d          its mean direction: the sum of directions divided by the planned number of steps
    gradient   its gradient at x over all of its data
    own        its private record, after the round

    >>> walk = Walk(x=lambda: 3.0, y=lambda: 1.0, move=lambda: walk.x - walk.y)
    >>> walk.move
    2.0
    """

    own: Any

    def __init__(self, **fields: Callable[[], Any]) -> None:
        self._compute = fields

    def __getattr__(self, name: str) -> Any:
        if name not in self._compute:
            raise AttributeError(
                f"a walk has no {name!r}; it has {', '.join(sorted(self._compute))}"
            )
        value = self._compute[name]()
        setattr(self, name, value)
        return value


class Leaves:
    """A vector stored as a list of layers.

    >>> y = Leaves([1.0, 2.0])
    >>> (y - 0.5 * (y + y)).parts
    [0.0, 0.0]
    """

    __slots__ = ("parts",)
    __array_ufunc__ = None  # a NumPy number on the left leaves the operation to this class

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)

    def tree_flatten(self) -> tuple[list[Any], None]:
        """Return the layers, for JAX."""
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Iterable[Any]) -> Leaves:
        """Build from layers, for JAX."""
        return cls(parts)

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> Leaves:
        others = other.parts if isinstance(other, Leaves) else [other] * len(self.parts)
        return Leaves(operation(a, b) for a, b in zip(self.parts, others, strict=True))

    def __add__(self, other: Any) -> Leaves:
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b + a)

    def __sub__(self, other: Any) -> Leaves:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Leaves:
        return self._with(other, operator.mul)

    def __rmul__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b * a)

    def __truediv__(self, other: Any) -> Leaves:
        return self._with(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Leaves:
        return self._with(other, lambda a, b: b / a)

    def __neg__(self) -> Leaves:
        return Leaves(-a for a in self.parts)


class LocalWork(NamedTuple):
    """Local work of one round."""

    steps: Any
    """Number of local steps."""
    batch_size: Any
    """Records per step; None for all records of the client."""
    geometric: bool = False
    """Whether the number of steps is drawn each round, geometric with mean `steps`, the same for
    all clients."""


def nothing(x: Vector) -> None:
    """Return None: the record of a client that keeps none."""


def no_shift(server: Record, memory: Record) -> None:
    """Return None: the shift of a method that sends clients only x."""


def forget(memory: Record, shift: Vector, message: Record) -> Record:
    """Return the memory unchanged."""
    return memory


def common_model(x: Vector, own: Record) -> Vector:
    """Return x: where local steps start, and what a client uses, without a model of its own."""
    return x


def keep_own(own: Record, walk: Walk, shift: Vector) -> Record:
    """Return the private record unchanged."""
    return own


def one_full_step(work: LocalWork) -> LocalWork:
    """Return one step on all local data, whatever the requested work."""
    return LocalWork(1, None)


class Form(NamedTuple):
    """Affine structure of a round on quadratics, from which the theory computes closed forms."""

    memory: bool
    """Whether clients keep a control variate c_i, as in SCAFFOLD."""
    at_x: bool
    """Whether c_i is the gradient at x (option I)."""
    drag: float
    """Proximal coefficient: d = g + drag (y - x), as in FedProx."""
    server_lr: float
    one_step: bool
    """Whether a round is one local step, whatever number is requested."""


class Algorithm(NamedTuple):
    """A federated method as a set of pure functions; engines decide how clients are run.

    `direction`, `message` and `update` suffice for a method without memory. Control variates also
    need `init`, `memory`, `shift`, `remember` and `means`; the other fields serve particular
    methods.
    """

    def __repr__(self) -> str:
        return brief(self)

    @property
    def has_memory(self) -> bool:
        """Whether clients keep a memory, from which the server can compute theirs."""
        return self.memory is not nothing

    @property
    def has_own(self) -> bool:
        """Whether clients keep a record that they never send."""
        return self.own is not nothing

    @property
    def has_personal(self) -> bool:
        """Whether clients use models of their own."""
        return self.personal is not common_model

    name: str
    direction: Callable[[Gradient, Vector, Vector, Vector], Vector]
    """(gradient, y, x, shift) -> d, at every local step; gradient(z) evaluates the step's batch at
    z."""
    message: Callable[[Walk, Vector], Record]
    """(walk, shift) -> message, at the client."""
    update: Callable[[Record, Record, Record, Any], Record]
    """(server, sent, mean, heard) -> server, once a round. `sent` is the weighted mean of the
    records that the clients were sent: in asynchronous rounds those of earlier rounds too."""
    init: Callable[[Vector], Record] = Model
    """(x) -> server, before the first round."""
    memory: Callable[[Vector], Record] = nothing
    """(x) -> memory, before a client's first round."""
    shift: Callable[[Record, Record], Vector] = no_shift
    """(server, memory) -> shift, once a round: everything a client needs besides x."""
    remember: Callable[[Record, Vector, Record], Record] = forget
    """(memory, shift, message) -> memory, once a round, wherever the memory is stored."""
    means: tuple[tuple[str, str], ...] = ()
    """Pairs (server field, memory field): the first always equals the p_i-weighted sum of the
    second."""
    renew: Callable[[Record, Vector], Record] | None = None
    """(memory, gradient) -> memory of a client that was absent for long, from its gradient at x."""
    prepare: Callable[[Record, Vector], Record] | None = None
    """(server, mean gradient at x of the responding clients) -> server, in an extra exchange before
    local steps."""
    own: Callable[[Vector], Record] = nothing
    """(x) -> own: the record that a client never sends, before its first round."""
    start: Callable[[Vector, Record], Any] = common_model
    """(x, own) -> start of the local steps. A record of vectors is stepped field by field."""
    keep: Callable[[Record, Walk, Vector], Record] = keep_own
    """(own, walk, shift) -> own, after the local steps; `message` can read it as `walk.own`."""
    personal: Callable[[Vector, Record], Vector] = common_model
    """(x, own) -> the model that a client uses. Tables of own records with one row per client give
    a table of models."""
    fit: Callable[[Any], Algorithm] | None = None
    """(layout) -> the algorithm for a model with these layers; engines call it once.
    `layout.split(names)` locates layers; a layout of None stands for a model without layers."""
    private: tuple[tuple[int, int], ...] = ()
    """Ranges (begin, end) of coordinates that never leave a client: messages are 0 there and omit
    them."""
    references: tuple[tuple[str, Callable[[Record], Vector]], ...] = ()
    """Pairs (message field, (server) -> reference known to both sides): compression applies to the
    difference."""
    finds: tuple[str, ...] = ()
    """Fields of the server's record that clients derive from the models they receive, and are never
    sent."""
    work: Callable[[LocalWork], LocalWork] | None = None
    """(requested work) -> local work that the method does; None for the requested work."""
    needs: tuple[tuple[str, str], ...] = ()
    """Pairs (condition, reason) that a configuration must meet or be refused. The conditions are
    `everyone`, `plain sgd`, `sgd`, `equal steps`, `exact messages`, `plain server step` and
    `synchronous rounds` (every reply is to the present model). The reason completes a sentence that
    begins with the algorithm's name."""
    form: Form | None = None
    """Affine structure for the closed forms of `fs.theory`; None if the method has none of that
    kind."""


def travelled(x: Vector, y: Vector, steps: Any, lr: Any) -> Vector:
    """Return the mean direction of `steps` plain SGD steps of size `lr` from x to y."""
    return (x - y) / (steps * lr)

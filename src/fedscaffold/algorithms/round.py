"""Parts of a round that all engines share: the work around the local steps, and messages.

An engine supplies the gradient and the loop over local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from fedscaffold.algorithms.base import Algorithm, Leaves, LocalWork, Record, Vector, Walk, forget
from fedscaffold.checks import InputError

__all__ = [
    "Exchange",
    "absorb",
    "each",
    "exchange",
    "fitted",
    "needs",
    "reads_gradient_at_x",
    "rebuild",
    "refuse_asynchronous",
    "reply_of",
    "work_of",
]


class Exchange(NamedTuple):
    """What clients and server exchange in a round, apart from x."""

    record: type
    """Type of the message."""
    reads: frozenset[str]
    """Fields of the walk that the algorithm reads."""
    vectors: tuple[str, ...]
    """Fields of the message that are vectors."""
    travel: tuple[str, ...]
    """Fields of the message that are the client's travel, which the server can compute."""
    d: str | None
    """Field of the message that is the mean direction, if any."""
    move: str | None
    """Field of the message that is the move, if any."""
    down: tuple[str, ...]
    """Vectors of the server's record that a client needs if it stores its own memory."""
    told: tuple[str, ...]
    """Numbers of the server's record that it needs."""
    numbers: tuple[str, ...] = ()
    """Fields of the message that are numbers which the server cannot compute."""
    sums: bool = False
    """Whether a function sums over coordinates: what it returns is then not elementwise."""
    remembered: tuple[str, ...] = ()
    """Vectors of the message from which the client's new memory is computed."""

    def sent(self, plain: bool) -> tuple[str, ...]:
        """Return the vectors that a client sends when the server receives each message separately.

        Args:
            plain: Whether the client took SGD steps of one size. The move is then the travel times
                the mean direction, and one vector carries both.
        """
        return tuple(name for name in self.vectors if name != self.rebuilt(plain))

    def rebuilt(self, plain: bool) -> str | None:
        """Return the field that the server computes from the mean direction."""
        return self.move if plain and self.d is not None else None


@cache
def exchange(algorithm: Algorithm) -> Exchange:
    """Find what an algorithm exchanges, by running one round of it on stand-ins for vectors.

    Raises:
        InputError: A function fails on vectors, or returns another record than it must.

    >>> from fedscaffold.algorithms import fedavg, scaffold
    >>> exchange(scaffold()).sent(plain=True), exchange(scaffold()).sent(plain=False)
    (('d',), ('d', 'move'))
    >>> exchange(scaffold(option=1)).sent(plain=True), exchange(fedavg()).sent(plain=True)
    (('d', 'move'), ('move',))
    >>> exchange(scaffold()).down
    ('c',)
    """
    algorithm = fitted(algorithm, None)
    if algorithm.has_memory == (algorithm.remember is forget):
        raise InputError(f"{algorithm.name} must have both memory and remember, or neither")
    try:
        _try_layers(algorithm)
        noting = type("Vector", (_Vector,), {})  # of its own: it notes whether one was summed
        return _try_round(algorithm, noting(0.25))
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"a function of {algorithm.name} cannot be run: {error}; use + - * / on vectors, and "
            "NamedTuples for records, as fedscaffold.algorithms.base says"
        ) from error


def _try_layers(algorithm: Algorithm) -> None:
    """Compute a direction layer by layer, as engines do, which refuses all but + - * /."""
    layers = Leaves([1.0])
    shift = algorithm.shift(algorithm.init(layers), algorithm.memory(layers))
    start = algorithm.start(layers, algorithm.own(layers))
    algorithm.direction(lambda z: z, start, layers, layers if shift is None else shift)


def _try_round(algorithm: Algorithm, x: _Vector) -> Exchange:
    """Run a round and note which fields its functions read."""
    checked, vector = partial(_check_record, algorithm.name), type(x)
    server, memory, own = (
        checked(function, record, record)
        for function, record in (
            ("init", algorithm.init(x)),
            ("memory", algorithm.memory(x)),
            ("own", algorithm.own(x)),
        )
    )
    for field, of in algorithm.means:
        getattr(server, field), getattr(memory, of)
    seen: set[str] = set()
    shift = algorithm.shift(_ReadRecorder(server, seen), memory)
    needed = [
        name for name in server._fields if name in seen and name not in {"x", *algorithm.finds}
    ]
    down = tuple(name for name in needed if isinstance(getattr(server, name), _Vector))
    told = tuple(name for name in needed if name not in down)
    # fields of the walk are distinct objects with the structure of the start
    start = algorithm.start(x, own)
    ends = {
        name: partial(each, lambda _, number=number: vector(number), start)
        for name, number in (("y", 1.5), ("move", 2.5), ("d", 4.5))
    }
    traced = Walk(
        x=lambda: x, travel=lambda: 3.5, gradient=lambda: vector(5.5), own=lambda: None, **ends
    )
    read: set[str] = set()
    walk: Any = _ReadRecorder(traced, read)
    traced.own = checked("keep", own, algorithm.keep(own, walk, shift))
    message: Any = algorithm.message(walk, shift)
    checked("message", message, message)
    checked("update", server, algorithm.update(server, server, message, 1.0))
    after = checked("remember", memory, algorithm.remember(memory, shift, message))
    at = {role: _fields_holding(message, getattr(traced, role)) for role in ("travel", "d", "move")}
    vectors = tuple(name for name, value in message._asdict().items() if isinstance(value, _Vector))
    numbers = tuple(name for name in message._fields if name not in {*vectors, *at["travel"]})
    first = {role: names[0] if names else None for role, names in at.items()}
    other = {name: message._replace(**{name: vector(6.5)}) for name in vectors}
    remembered = tuple(
        name for name in vectors if algorithm.remember(memory, shift, other[name]) != after
    )
    return Exchange(
        record=type(message),
        reads=frozenset(read),
        vectors=vectors,
        travel=at["travel"],
        d=first["d"],
        move=first["move"],
        down=down,
        told=told,
        numbers=numbers,
        sums=vector.summed,
        remembered=remembered,
    )


def _check_record(algorithm: str, function: str, before: Any, after: Any) -> Any:
    """Return a record, or raise an InputError if it has other fields than `before`."""
    must = f"{function} of {algorithm} must return a record"
    fields, got = (getattr(record, "_fields", None) for record in (before, after))
    if before is not None and (fields is None or got != fields):
        wanted = "" if fields is None else f" with the fields {', '.join(fields)}"
        what = type(after).__name__ if got is None else f"the fields {', '.join(got)}"
        raise InputError(f"{must}{wanted}, got {what}")
    for name, first, value in zip(fields or (), before or (), after or (), strict=True):
        kinds = ["vector" if isinstance(one, _Vector) else "number" for one in (first, value)]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"{must} like the first one: {name} begins as a {kinds[0]} and becomes a {kinds[1]}"
                "; write 0 * x for a vector of zeros"
            )
        if getattr(value, "shape", ()) != ():
            raise InputError(
                f"{must} of numbers and vectors like x; {name} has the shape {value.shape}, "
                "whatever x has"
            )
    return after


class _Vector(float):
    """A scalar that stands for a vector.

    Arithmetic and comparisons yield a vector of the same type; multiplying by True returns the same
    object. Functions of NumPy and Python's `if` are refused, as they are in a compiled round.
    """

    __array_ufunc__ = None
    summed = False
    """Whether a vector of this type was summed over its coordinates."""

    def _lift(name: str) -> Callable[[_Vector, Any], Any]:  # type: ignore[misc]
        def operation(self: _Vector, other: Any) -> _Vector:
            if other is True and "mul" in name:
                return self
            return type(self)(getattr(float, name)(self, float(other)))

        return operation

    __add__, __radd__ = _lift("__add__"), _lift("__radd__")
    __sub__, __rsub__ = _lift("__sub__"), _lift("__rsub__")
    __mul__, __rmul__ = _lift("__mul__"), _lift("__rmul__")
    __truediv__, __rtruediv__ = _lift("__truediv__"), _lift("__rtruediv__")
    __pow__ = _lift("__pow__")  # type: ignore[assignment]
    __lt__, __le__ = _lift("__lt__"), _lift("__le__")
    __gt__, __ge__ = _lift("__gt__"), _lift("__ge__")

    def __neg__(self) -> _Vector:
        return type(self)(-float(self))

    def __abs__(self) -> _Vector:
        return type(self)(abs(float(self)))

    def __bool__(self) -> bool:
        raise TypeError("a vector is not true or false")

    def sum(self) -> float:
        """Return a number."""
        type(self).summed = True
        return float(self)


class _ReadRecorder:
    """Wrap a record and collect the names of the fields that are read."""

    def __init__(self, record: Any, names: set[str]) -> None:
        self.record, self.names = record, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.record, name)
        if not name.startswith("_"):
            self.names.add(name)
        return value


def _fields_holding(message: Any, value: Any) -> tuple[str, ...]:
    """Return the fields of a message that hold this very object, or a field of this record."""
    parts = [value, *value] if isinstance(value, tuple) else [value]
    fields = zip(message._fields, message, strict=True)
    return tuple(name for name, field in fields if any(field is part for part in parts))


@cache
def fitted(algorithm: Algorithm, layout: Any) -> Algorithm:
    """Return the algorithm for a model with these layers.

    Args:
        algorithm: The algorithm as the user gave it.
        layout: The model's layers, with a method `split(names)`; None for a model without layers.
    """
    return algorithm if algorithm.fit is None else algorithm.fit(layout)


def reply_of(algorithm: Algorithm, walk: Walk, shift: Vector, own: Record) -> tuple[Record, Record]:
    """Return a client's message after its local steps, and its private record.

    Args:
        algorithm: The algorithm.
        walk: Result of the local training.
        shift: The shift used in the round.
        own: The client's private record before the round.
    """
    walk.own = algorithm.keep(own, walk, shift)
    return algorithm.message(walk, shift), walk.own


def each(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to vectors, or field by field to records of one type.

    >>> from fedscaffold.algorithms.ditto import Pair
    >>> each(lambda a, b: a - b, 3.0, 1.0), each(lambda a, b: a - b, Pair(3.0, 5.0), Pair(1.0, 1.0))
    (2.0, Pair(y=2.0, v=4.0))
    """
    if not isinstance(values[0], tuple):
        return function(*values)
    return type(values[0])(*(function(*parts) for parts in zip(*values, strict=True)))


def rebuild(
    algorithm: Algorithm, vectors: Mapping[str, Vector], travel: Any, plain: bool
) -> Record:
    """Rebuild the message from the vectors sent and the travel, which the server knows.

    >>> from fedscaffold.algorithms import scaffold
    >>> rebuild(scaffold(), {"d": 3.0}, travel=0.5, plain=True)
    Message(d=3.0, move=1.5)
    """
    known = exchange(algorithm)
    made = known.rebuilt(plain)
    moved = {} if made is None else {made: travel * vectors[str(known.d)]}
    return known.record(**vectors, **moved, **dict.fromkeys(known.travel, travel))


def absorb(algorithm: Algorithm, server: Record, changes: Record) -> Record:
    """Return the server's record after memories changed other than by messages.

    Args:
        algorithm: The algorithm, whose `means` are kept up.
        server: The server's record.
        changes: For each field of the memory the p_i-weighted sum of its change, or None if
            unchanged.
    """
    for field, of in algorithm.means:
        change = getattr(changes, of)
        if change is not None:
            server = server._replace(**{field: getattr(server, field) + change})
    return server


def work_of(algorithm: Algorithm, steps: Any, batch_size: Any = None) -> LocalWork:
    """Return the local work that an algorithm does for the requested steps and batch size.

    >>> from fedscaffold.algorithms import fedavg, sgd
    >>> work_of(fedavg(), 5).steps, work_of(sgd(), 5).steps
    (5, 1)
    """
    asked = LocalWork(steps, batch_size)
    return asked if algorithm.work is None else algorithm.work(asked)


def reads_gradient_at_x(algorithm: Algorithm) -> bool:
    """Return whether clients compute their gradient at x over all of their data in a round.

    >>> from fedscaffold.algorithms import dane, scaffold
    >>> [reads_gradient_at_x(algorithm) for algorithm in (scaffold(), scaffold(option=1), dane())]
    [False, True, True]
    """
    return algorithm.prepare is not None or "gradient" in exchange(algorithm).reads


def refuse_asynchronous(algorithm: Algorithm, damped: bool = False) -> None:
    """Raise an InputError if an algorithm cannot take replies to older models than the present one.

    Args:
        algorithm: The algorithm.
        damped: Whether the moves of stale replies are to count less.

    >>> from fedscaffold.algorithms import dane, scaffold
    >>> refuse_asynchronous(scaffold(), damped=True)
    >>> refuse_asynchronous(dane())
    Traceback (most recent call last):
    fedscaffold.checks.InputError: dane exchanges gradients at one model before the local steps, so
    all wait for all: it runs in synchronous rounds only
    """
    why = needs(algorithm, "synchronous rounds") or needs(algorithm, "everyone")
    if algorithm.prepare is not None:
        why = "exchanges gradients at one model before the local steps, so all wait for all"
    if work_of(algorithm, 1).geometric:
        why = "draws one number of local steps for all clients of a round"
    if why is not None:
        raise InputError(f"{algorithm.name} {why}: it runs in synchronous rounds only")
    if damped and exchange(algorithm).move is None:
        raise InputError(
            f"{algorithm.name} sends no move that could count less when it is late: take "
            "staleness='none'"
        )


def needs(algorithm: Algorithm, condition: str) -> str | None:
    """Return why an algorithm needs a condition; None if it does not.

    >>> from fedscaffold.algorithms import scaffold
    >>> needs(scaffold(), "everyone") is None
    True
    """
    return dict(algorithm.needs).get(condition)

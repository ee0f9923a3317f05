"""What a user may ask of a simulation, and the numbers that follow from it; every argument is checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.stale import Policy

if TYPE_CHECKING:
    from fedscaffold.simulation.compression import Compressor

__all__ = ["Request", "availability", "batch", "block", "cohort_size", "footprint", "lr", "steps"]

CACHE = 1 << 20  # bytes that a block of clients may touch at every step: about a core's second-level cache
MOST = 2**31 - 1  # rounds, steps and records of a batch are counted in 32 bits
MOST_CLIENTS = 256  # in a block: sums over clients are sums of block sums, which keeps their rounding errors small


class Request(NamedTuple):
    """What the user asked for; the arguments of `simulate`."""

    algorithm: Algorithm
    problem: Problem
    rounds: int
    local_steps: int | Sequence[int] | NDArray[Any] | None = None
    local_epochs: int | None = None
    lr: float | Callable[[int], float] | None = None
    cohort: float | int = 1.0
    cohorts: Sequence[Sequence[int]] | None = None
    batch_size: float | int | None = None
    draw: str = "auto"
    weights: str | ArrayLike = "equal"
    local_optimizer: Any = None
    x0: Any = None
    stop_at: str | tuple[str, float] | Mapping[str, float] | None = None
    metrics: Sequence[str] | None = None
    precision: str = "float32"
    block: int | None = None
    availability: ArrayLike | None = None
    server_optimizer: Any = None
    stale: str | Policy = "keep"
    compression: str | Compressor | None = None
    seeds: Sequence[int] = (0,)
    client_state: str = "array"
    devices: int | None = None


def steps(request: Request, batch: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """(N,) numbers of local steps."""
    count = request.problem.counts
    if request.algorithm.one_step:
        return np.ones_like(count)
    if (request.local_steps is None) == (request.local_epochs is None):
        raise InputError("give either local_steps or local_epochs, one of the two")
    if request.local_epochs is not None:
        epochs = checks.whole("local_epochs", request.local_epochs, at_most=MOST)
        each = np.ones_like(count) if batch is None else -(-count // batch)
        if epochs * int(each.max()) > MOST:
            raise InputError(f"local_epochs must make at most {MOST} local steps in a round, got {epochs} epochs")
        return epochs * each
    if not _is_row(request.local_steps):
        return np.full_like(count, checks.whole("local_steps", request.local_steps, at_most=MOST))
    steps = wholes("local_steps", request.local_steps, at_most=MOST)
    if steps.shape != count.shape:
        raise InputError(
            f"local_steps must be one number or one for each of the {len(count)} clients, got {len(steps)}"
        )
    return steps


def wholes(name: str, values: Any, *, at_least: int = 1, at_most: int = checks.LARGEST) -> NDArray[np.int64]:
    """A row of whole numbers from a list or an array, each within its bounds.

    >>> wholes("local_steps", [5, True])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: local_steps must be a whole number of at least 1, got True
    """
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu" and values.size:
        for extreme in (values.min(), values.max()):
            checks.whole(name, extreme, at_least=at_least, at_most=at_most)
        return values.astype(np.int64)
    if not _is_row(values):
        raise InputError(f"{name} must be a list of whole numbers, got {checks.shown(values)}")
    return np.array([checks.whole(name, k, at_least=at_least, at_most=at_most) for k in values], np.int64)


def _is_row(values: Any) -> bool:
    """Whether there is something to go through: a list, a tuple, a range, an array; not text, not a function."""
    if getattr(values, "shape", ()) != ():
        return True
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


def batch(request: Request) -> tuple[NDArray[np.int64] | None, bool]:
    """(N,) records in a batch, None for all; and whether records are shuffled instead of drawn with replacement."""
    checks.choice("draw", request.draw, ("auto", "replacement", "shuffle"))
    shuffle = request.draw == "shuffle" or (request.draw == "auto" and request.local_epochs is not None)
    if request.local_epochs is not None and request.draw == "replacement":
        raise InputError("an epoch goes through all records once: give local_steps with draw='replacement'")
    count = request.problem.counts
    if request.batch_size is None or request.algorithm.one_step:
        return None, shuffle
    size = checks.share("batch_size", request.batch_size, "records", at_most=MOST)
    if isinstance(size, int):
        batch = np.full_like(count, size)
    elif size == 1:
        return None, shuffle
    else:
        batch = np.maximum(np.ceil(size * count - 1e-9), 1).astype(np.int64)
    return (np.minimum(batch, count) if shuffle else batch), shuffle


def cohort_size(request: Request) -> int:
    """S; for a schedule of cohorts, the largest."""
    n = request.problem.num_clients
    if request.cohorts is not None:
        return _schedule_size(request.cohorts, request.rounds, n)
    size = checks.share("cohort", request.cohort, "clients", at_most=n)
    return size if isinstance(size, int) else max(1, round(size * n))


def _schedule_size(cohorts: Sequence[Sequence[int]], rounds: int, n: int) -> int:
    if not _is_row(cohorts):
        wanted = "cohorts must be a list with the clients' numbers for each round, such as [[0, 3], [1, 2]]"
        raise InputError(f"{wanted}, got {checks.shown(cohorts)}")
    if len(cohorts) < rounds:
        raise InputError(f"cohorts must list the clients of all {rounds} rounds, got {len(cohorts)}")
    sizes = [1]
    for r, cohort in enumerate(cohorts):
        try:
            ids = wholes("a client's number", cohort, at_least=0, at_most=n - 1)
        except InputError as error:
            raise InputError(f"cohorts must name clients 0 to {n - 1}, in round {r + 1}: {error}") from None
        if len(np.unique(ids)) != len(ids):
            raise InputError(f"cohorts must name a client once a round, got {checks.shown(cohort)} in round {r + 1}")
        sizes.append(len(ids))
    return max(sizes)


def availability(request: Request) -> NDArray[np.bool_] | None:
    """(T, N) who can be reached in each round, over and over; None where everybody always can."""
    if request.availability is None:
        return None
    n = request.problem.num_clients
    if request.cohorts is not None:
        raise InputError("give either availability or cohorts: a schedule of cohorts says already who comes")
    wanted = f"availability must be rows of {n} zeros and ones, one for each round"
    try:
        trace = np.atleast_2d(np.asarray(request.availability))
    except ValueError:  # rows of unlike lengths
        raise InputError(f"{wanted}, got {checks.shown(request.availability)}") from None
    if trace.ndim != 2 or trace.shape[1] != n or not len(trace):
        raise InputError(f"{wanted}, got {trace.shape}")
    if trace.dtype.kind not in "biuf" or not np.isin(trace, (0, 1)).all():
        raise InputError(f"{wanted}, got {checks.shown(request.availability)}")
    if not trace.any():
        raise InputError("availability must let somebody take part in some round, got zeros only")
    return trace.astype(bool)


def block(request: Request, size: int, footprint: int) -> int:
    """Clients run at once: as many as fit the cache, and a divisor of the cohort where one is near.

    Else blocks as even as they come, the last one filled up with ghosts (at most one for each block).
    """
    if request.block is not None:
        return checks.whole("block", request.block, at_most=size)
    fitting = min(size, MOST_CLIENTS, max(1, CACHE // footprint))
    divisors = [b for b in range(max(1, fitting // 2), min(size, 2 * fitting) + 1) if size % b == 0]
    if divisors:
        return min(divisors, key=lambda b: abs(math.log(b / fitting)))
    return math.ceil(size / math.ceil(size / fitting))


def footprint(request: Request, steps: NDArray[np.int64], batch: NDArray[np.int64] | None) -> int:
    """Bytes that one client touches at every local step: model, gradient, shift and start; its batch; its draws."""
    problem = request.problem
    records = max(1, int(problem.offsets[-1]))
    itemsize = np.dtype(request.precision).itemsize
    row = sum(a.size * min(a.itemsize, itemsize) for a in jax.tree.leaves(problem.records)) // records
    rows = int(problem.counts.max() if batch is None else batch.max())
    model = 4 * problem.dim * itemsize
    drawn = 0 if batch is None else 4 * int(steps.max()) * rows
    checks.fits(f"{steps.max()} local steps on {rows} records drawn for each", drawn)
    return int(model + rows * row + drawn)


def lr(request: Request, steps: NDArray[np.int64]) -> NDArray[Any]:
    """The step size, or one for each local step."""
    if request.local_optimizer is not None:
        if request.lr is not None:
            raise InputError("give either lr or local_optimizer: an optimizer brings its own step size")
        if not hasattr(request.local_optimizer, "update"):
            raise InputError(f"local_optimizer must be an optax transformation, got {request.local_optimizer!r}")
        return np.zeros((), request.precision)
    if request.lr is None:
        raise InputError("lr must be given: a number above 0, or a schedule over the local steps")
    if callable(request.lr):
        checks.fits(f"a schedule of {steps.max()} step sizes", 32 * int(steps.max()))
        values = [checks.number(f"lr({k})", request.lr(k), at_least=0) for k in range(int(steps.max()))]
        return np.array(values, request.precision)
    return np.array(checks.number("lr", request.lr, above=0), request.precision)

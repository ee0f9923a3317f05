"""From what a user asks for to what the engine runs: every argument is checked here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.metrics import ALWAYS, METRICS, target_of
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.simulation.draws import Drawer
from fedscaffold.simulation.evaluation import usual
from fedscaffold.simulation.spec import Federation, Spec, State

__all__ = ["Ready", "Request", "prepare"]

CACHE = 1 << 20  # bytes that a block of clients may touch at every step: about a core's second-level cache
MOST_CLIENTS = 256  # in a block: sums over clients are sums of block sums, which keeps their rounding errors small
NEEDS_RECORDS = {"loss", "gap", "grad_norm", "accuracy"}
NEEDS_OPTIMUM = {"gap", "distance", "control_error"}


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


class Ready(NamedTuple):
    """What the engine runs."""

    spec: Spec
    federation: Federation
    drawer: Drawer
    start: State
    lr: NDArray[Any]
    target: float
    fitting: int
    """How many runs of a sweep fit the cache side by side."""


def prepare(request: Request) -> Ready:
    """Check a request and make everything that the compiled program is given."""
    problem, algorithm = request.problem, request.algorithm
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {algorithm!r}")
    if not isinstance(problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(problem).__name__}")
    checks.whole("rounds", request.rounds)
    checks.choice("precision", request.precision, ("float32", "float64"))
    batch, shuffle = _batch(request)
    steps = _steps(request, batch)
    size = _cohort_size(request)
    touched = _footprint(request, steps, batch)
    block = _block(request, size, touched)
    slots = -(-size // block) * block
    drawer = Drawer(
        problem.num_clients,
        size,
        slots,
        request.cohorts,
        problem.offsets[:-1],
        problem.counts,
        steps,
        batch,
        shuffle,
        request.precision,
    )
    stop, target = (None, math.nan) if request.stop_at is None else target_of(request.stop_at)
    metrics = _metrics(request, stop)
    spec = Spec(
        algorithm,
        problem.functions,
        problem.layout,
        metrics,
        block,
        max_steps=int(steps.max()),
        max_rows=int(problem.counts.max()),
        optimizer=request.local_optimizer,
        scheduled=callable(request.lr),
        unequal=bool((steps != steps[0]).any()),
        full_batch=batch is None,
        ragged_clients=bool((problem.counts != problem.counts[0]).any()),
        everyone=request.cohorts is None and slots == problem.num_clients,
        stop=stop,
    )
    fitting = max(1, CACHE // (block * touched))
    return Ready(spec, _federation(request, spec, steps), drawer, _start(request), _lr(request, steps), target, fitting)


def _steps(request: Request, batch: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """(N,) numbers of local steps."""
    count = request.problem.counts
    if request.algorithm.one_step:
        return np.ones_like(count)
    if (request.local_steps is None) == (request.local_epochs is None):
        raise InputError("give either local_steps or local_epochs, one of the two")
    if request.local_epochs is not None:
        epochs = checks.whole("local_epochs", request.local_epochs)
        return epochs * (np.ones_like(count) if batch is None else -(-count // batch))
    if np.ndim(request.local_steps) == 0:  # type: ignore[arg-type]
        return np.full_like(count, checks.whole("local_steps", request.local_steps))
    steps = np.asarray(request.local_steps)
    if steps.shape != count.shape:
        raise InputError(
            f"local_steps must be one number or one for each of the {len(count)} clients, got {steps.shape}"
        )
    return np.array([checks.whole("local_steps", k) for k in steps.tolist()], np.int64)


def _batch(request: Request) -> tuple[NDArray[np.int64] | None, bool]:
    """(N,) records in a batch, None for all; and whether records are shuffled instead of drawn with replacement."""
    checks.choice("draw", request.draw, ("auto", "replacement", "shuffle"))
    shuffle = request.draw == "shuffle" or (request.draw == "auto" and request.local_epochs is not None)
    if request.local_epochs is not None and request.draw == "replacement":
        raise InputError("an epoch goes through all records once: give local_steps with draw='replacement'")
    size, count = request.batch_size, request.problem.counts
    if size is None or request.algorithm.one_step:
        return None, shuffle
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise InputError(f"batch_size must be a share in (0, 1], a number of records, or None, got {size}")
        if size == 1:
            return None, shuffle
        batch = np.maximum(np.ceil(size * count - 1e-9), 1).astype(np.int64)
    else:
        batch = np.full_like(count, checks.whole("batch_size", size))
    return (np.minimum(batch, count) if shuffle else batch), shuffle


def _cohort_size(request: Request) -> int:
    """S; for a schedule of cohorts, the largest."""
    n, share = request.problem.num_clients, request.cohort
    if request.cohorts is not None:
        return _schedule_size(request.cohorts, request.rounds, n)
    if isinstance(share, bool) or not isinstance(share, (int, float, np.integer, np.floating)):
        raise InputError(f"cohort must be a share in (0, 1] or a number of clients, got {share!r}")
    if isinstance(share, (int, np.integer)):
        return checks.whole("cohort", share, at_most=n)
    if not 0 < share <= 1:
        raise InputError(f"cohort must be a share in (0, 1] or a number of clients (an int), got {share!r}")
    return max(1, round(float(share) * n))


def _schedule_size(cohorts: Sequence[Sequence[int]], rounds: int, n: int) -> int:
    if len(cohorts) < rounds:
        raise InputError(f"cohorts must list the clients of all {rounds} rounds, got {len(cohorts)}")
    for r, cohort in enumerate(cohorts):
        ids = np.asarray(cohort)
        if ids.size and (ids.min() < 0 or ids.max() >= n):
            raise InputError(f"cohorts must name clients 0 to {n - 1}, got {ids.min()} to {ids.max()} in round {r + 1}")
        if len(np.unique(ids)) != len(ids):
            raise InputError(f"cohorts must name a client once a round, got {sorted(cohort)} in round {r + 1}")
    return max(1, *(len(cohort) for cohort in cohorts))


def _block(request: Request, size: int, footprint: int) -> int:
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


def _footprint(request: Request, steps: NDArray[np.int64], batch: NDArray[np.int64] | None) -> int:
    """Bytes that one client touches at every local step: model, gradient, shift and start; its batch; its draws."""
    problem = request.problem
    records = max(1, int(problem.offsets[-1]))
    itemsize = np.dtype(request.precision).itemsize
    row = sum(a.size * min(a.itemsize, itemsize) for a in jax.tree.leaves(problem.records)) // records
    rows = int(problem.counts.max() if batch is None else batch.max())
    model = 4 * problem.dim * itemsize
    drawn = 0 if batch is None else 4 * int(steps.max()) * rows
    return int(model + rows * row + drawn)


def _lr(request: Request, steps: NDArray[np.int64]) -> NDArray[Any]:
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
        values = [checks.number(f"lr({k})", request.lr(k), at_least=0) for k in range(int(steps.max()))]
        return np.array(values, request.precision)
    return np.array(checks.number("lr", request.lr, above=0), request.precision)


def _metrics(request: Request, stop: str | None) -> tuple[str, ...]:
    """Names of the measured columns, in a fixed order."""
    problem = request.problem
    asked = set(usual(problem) if request.metrics is None else request.metrics) - set(ALWAYS)
    asked |= {stop} if stop is not None else set()
    for name in asked:
        checks.choice("metric", name, METRICS)
        if name in NEEDS_OPTIMUM:
            problem.optimum(request.weights)
        if name == "accuracy" and problem.functions.accuracy is None:
            raise InputError(
                f"{problem.name} has no accuracy; give Problem(..., accuracy=function) or choose another metric"
            )
    return (*(name for name in METRICS if name in asked), "residual")


def _federation(request: Request, spec: Spec, steps: NDArray[np.int64]) -> Federation:
    problem, dtype = request.problem, request.precision
    p = weights_of(problem, request.weights)
    records, test = problem.on_device(dtype)
    optimum = controls = optimal_loss = record_weights = None
    if set(spec.metrics) & NEEDS_OPTIMUM:
        optimum = problem.optimum(request.weights)
    if "control_error" in spec.metrics:
        controls = problem.ideal_controls(request.weights)
    if "gap" in spec.metrics:
        optimal_loss = problem.optimal_loss(request.weights)
    if set(spec.metrics) & NEEDS_RECORDS:
        record_weights = np.repeat(p / problem.counts, problem.counts)
    if "accuracy" not in spec.metrics:
        test = None

    def cast(a: Any) -> Any:
        return None if a is None else np.asarray(a, dtype)

    return Federation(
        records,
        problem.offsets[:-1].astype(np.int32),
        problem.counts.astype(np.int32),
        steps.astype(np.int32),
        cast(p),
        test,
        cast(problem.noise),
        cast(optimum),
        cast(controls),
        cast(optimal_loss),
        cast(record_weights),
    )


def _start(request: Request) -> State:
    problem, dtype = request.problem, request.precision
    vector = _vector(problem, problem.params if request.x0 is None else request.x0, dtype)
    zeros = np.zeros(problem.dim, dtype) if request.algorithm.shift is not None else None
    table = None if zeros is None else np.zeros((problem.num_clients, problem.dim), dtype)
    return State(vector, zeros, table, zeros, np.zeros((), dtype), np.int32(0), np.bool_(False))


def _vector(problem: Problem, x: Any, dtype: str) -> NDArray[Any]:
    """The starting model as a flat vector; given as one, or in the user's own structure."""
    flat = isinstance(x, np.ndarray) and x.shape == (problem.dim,)
    if not flat and Layout.of(x) != problem.layout:
        raise InputError(f"x0 must be shaped like the problem's params, or a flat vector of {problem.dim} numbers")
    vector = x.astype(dtype) if flat else problem.layout.flatten(x, dtype)
    if not np.isfinite(vector).all():
        raise InputError("x0 must be finite, got NaN or infinite values")
    return vector

"""Resolve arguments against the problem: local work, cohorts, step sizes, blocks of clients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.privacy.clients import Clients
from fedscaffold.privacy.gradients import Mechanism
from fedscaffold.privacy.mechanism import records_at_once, sampling_rate
from fedscaffold.privacy.messages import MessageMechanism
from fedscaffold.privacy.records import Records
from fedscaffold.problems.batches import work_bytes
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import MOST, RunConfig
from fedscaffold.simulation.participation import (
    Availability,
    Sampling,
    check_availability,
    check_sampling,
)
from fedscaffold.simulation.sampling import Drawer

__all__ = [
    "BatchPlan",
    "Schedule",
    "availability",
    "block",
    "buffer_size",
    "cohort_size",
    "footprint",
    "in_precision",
    "local_work",
    "mechanism",
    "message_mechanism",
    "poisson_rates",
    "sampling",
    "schedule_of",
    "step_sizes",
]

WANTED = (
    "lr must be a number above 0, or a function of `round`, of `step`, or of both by these names"
)
# bytes that a block of clients may touch at every step: about a core's second-level cache
CACHE = 1 << 20
# in a block: sums over clients are sums of block sums, which keeps their rounding errors small
MOST_CLIENTS = 256


class BatchPlan(NamedTuple):
    """The local steps of all clients, and how their batches are drawn."""

    steps: NDArray[np.int64]
    """(N,) numbers of steps that the algorithm takes."""
    batch: NDArray[np.int64] | None
    """(N,) records of a step; None for full batches."""
    shuffle: bool
    """Whether records are shuffled, or else sampled with replacement."""
    used: NDArray[np.int64] | None
    """(N,) records of an epoch where incomplete batches are left out; None for all."""


def local_work(config: RunConfig) -> BatchPlan:
    """Return the local work of all clients."""
    algorithm, count, size = config.algorithm, config.problem.counts, config.batch_size
    shuffle = config.draw == "shuffle"
    if config.local_epochs is not None:
        shuffle |= config.draw == "auto"
        if config.draw == "replacement":
            raise InputError(
                "an epoch goes through all records once: give local_steps with draw='replacement'"
            )
    batch = None
    if size is not None and algorithm.work is not None:
        size = work_of(algorithm, 1, size).batch_size
    if isinstance(size, int):
        batch = np.full_like(count, size)
    elif size is not None and size != 1:
        batch = np.maximum(np.ceil(size * count - 1e-9), 1).astype(np.int64)
    used = None
    if batch is not None:
        if config.drop_last and shuffle:
            used = _whole_batches(count, batch)
        batch = batch * config.accumulate
        batch = np.minimum(batch, count if used is None else used) if shuffle else batch
    elif config.batch_size is None and (config.drop_last or config.accumulate > 1):
        given = "drop_last" if config.drop_last else "accumulate"
        raise InputError(f"{given} needs batch_size: without it a step takes all records")
    taken = None
    if config.local_steps is not None or config.local_epochs is not None:
        taken = _requested_steps(config, batch, count if used is None else used)
    if algorithm.work is not None:
        try:
            taken = work_of(algorithm, taken).steps
        except TypeError:  # its work is a function of what is asked for
            if taken is not None:
                raise
    if taken is None:
        raise InputError("give either local_steps or local_epochs, one of the two")
    steps = np.broadcast_to(np.asarray(taken, np.int64), count.shape)
    return BatchPlan(steps, batch, shuffle, used)


def _whole_batches(count: NDArray[np.int64], batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (N,) numbers of records in whole batches."""
    used = count - count % batch
    if (used == 0).any():
        i = int(np.argmin(used))
        raise InputError(
            f"drop_last leaves incomplete batches out, and client {i} has {count[i]} records, "
            f"fewer than a batch of {batch[i]}: take a smaller batch_size"
        )
    return used


def _requested_steps(
    config: RunConfig, batch: NDArray[np.int64] | None, used: NDArray[np.int64]
) -> NDArray[np.int64]:
    count = config.problem.counts
    if config.local_steps is not None and config.local_epochs is not None:
        raise InputError("give either local_steps or local_epochs, one of the two")
    if config.local_epochs is not None:
        epochs = config.local_epochs
        each = np.ones_like(count) if batch is None else -(-used // batch)
        if epochs * int(each.max()) > MOST:
            raise InputError(
                f"local_epochs must make at most {MOST} local steps in a round, got {epochs} epochs"
            )
        return epochs * each
    if not _is_row(config.local_steps):
        return np.full_like(count, checks.whole("local_steps", config.local_steps, at_most=MOST))
    steps = wholes("local_steps", config.local_steps, at_most=MOST)
    if steps.shape != count.shape:
        raise InputError(
            f"local_steps must be one number or one for each of the {len(count)} clients, got "
            f"{len(steps)}"
        )
    return steps


def wholes(
    name: str, values: Any, *, at_least: int = 1, at_most: int = checks.LARGEST
) -> NDArray[np.int64]:
    """Return a list or array of integers as int64, after checking the bounds of each.

    >>> wholes("local_steps", [5, True])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: local_steps must be a whole number of at least 1, got True
    """
    if (
        isinstance(values, np.ndarray)
        and values.ndim == 1
        and values.dtype.kind in "iu"
        and values.size
    ):
        for extreme in (values.min(), values.max()):
            checks.whole(name, extreme, at_least=at_least, at_most=at_most)
        return values.astype(np.int64)
    if not _is_row(values):
        raise InputError(f"{name} must be a list of whole numbers, got {checks.shown(values)}")
    return np.array(
        [checks.whole(name, k, at_least=at_least, at_most=at_most) for k in values], np.int64
    )


def _is_row(values: Any) -> bool:
    """Return whether `values` is a sequence or an array of at least one dimension, and not text."""
    if getattr(values, "shape", ()) != ():
        return True
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


def poisson_rates(config: RunConfig) -> NDArray[np.float64]:
    """Return the (N,) probabilities with which private batches draw a record."""
    size, count = config.batch_size, config.problem.counts
    if size is None or work_of(config.algorithm, 1, size).batch_size is None:
        size = None
    return np.full(len(count), sampling_rate(size, count))


def mechanism(config: RunConfig) -> Mechanism | None:
    """Return how the gradients of a run are clipped and noised that protects records."""
    asked = config.privacy
    if not isinstance(asked, Records):
        return None
    rates = poisson_rates(config)
    problem, itemsize = config.problem, np.dtype(config.precision).itemsize
    mean = float((rates * problem.counts).max())
    size = None if (rates == 1).all() else config.batch_size
    at_once = records_at_once(mean, problem.dim, itemsize)
    return Mechanism(clip=asked.clip, noise=asked.noise, batch=size, at_once=at_once)


def message_mechanism(config: RunConfig) -> MessageMechanism | None:
    """Return how the messages of a run are clipped and noised that protects clients."""
    asked = config.privacy
    return MessageMechanism(asked.clip, asked.noise) if isinstance(asked, Clients) else None


def cohort_size(config: RunConfig) -> int:
    """Return the number of clients in a cohort; for explicit cohorts, that of the largest."""
    n = config.problem.num_clients
    if config.cohorts is not None:
        if config.cohort != 1.0:
            raise InputError(
                "give either cohort or cohorts: a schedule of cohorts says already how many come"
            )
        return _schedule_size(config.cohorts, config.rounds, n)
    if isinstance(config.cohort, int):
        return checks.whole("cohort", config.cohort, at_most=n)
    return max(1, round(config.cohort * n))


def buffer_size(config: RunConfig, cohort: int) -> int:
    """Return the number of replies that make a server step in asynchronous rounds."""
    if config.buffer is None or config.delays is None:
        raise InputError(
            "buffer is for rounds that wait for nobody: give delays, which say who replies when"
        )
    if config.buffer > cohort:
        raise InputError(
            f"buffer must be at most the number of clients at work (cohort), {cohort}, got "
            f"{config.buffer}"
        )
    return config.buffer


def _schedule_size(cohorts: Sequence[Sequence[int]], rounds: int, n: int) -> int:
    if not _is_row(cohorts):
        raise InputError(
            "cohorts must be a list with the clients' numbers for each round, such as "
            f"[[0, 3], [1, 2]], got {checks.shown(cohorts)}"
        )
    if len(cohorts) < rounds:
        raise InputError(
            f"cohorts must list the clients of all {rounds} rounds, got {len(cohorts)}"
        )
    sizes = [1]
    for r, cohort in enumerate(cohorts):
        try:
            ids = wholes("a client's number", cohort, at_least=0, at_most=n - 1)
        except InputError as error:
            raise InputError(
                f"cohorts must name clients 0 to {n - 1}, in round {r + 1}: {error}"
            ) from None
        if len(np.unique(ids)) != len(ids):
            raise InputError(
                f"cohorts must name a client once a round, got {checks.shown(cohort)} in round "
                f"{r + 1}"
            )
        sizes.append(len(ids))
    return max(sizes)


def sampling(config: RunConfig, size: int) -> Sampling | None:
    """Return how cohorts are sampled: a function or weights."""
    if config.cohorts is not None:
        raise InputError(
            "give either sampling or cohorts: a schedule of cohorts says already who comes"
        )
    if callable(config.sampling) and config.availability is not None:
        raise InputError(
            "give either availability or a function for sampling, which says already who comes"
        )
    return check_sampling(config.sampling, config.problem.num_clients, size)


def availability(config: RunConfig) -> NDArray[np.bool_] | Availability:
    """Return the (T, N) availability mask, repeated every T rounds, or a function."""
    n = config.problem.num_clients
    if config.cohorts is not None:
        raise InputError(
            "give either availability or cohorts: a schedule of cohorts says already who comes"
        )
    if callable(config.availability):
        return check_availability(config.availability, n)
    wanted = f"availability must be rows of {n} zeros and ones, one for each round"
    try:
        trace = np.atleast_2d(np.asarray(config.availability))
    except ValueError:  # rows of unlike lengths
        raise InputError(f"{wanted}, got {checks.shown(config.availability)}") from None
    if trace.ndim != 2 or trace.shape[1] != n or not len(trace):
        raise InputError(f"{wanted}, got {trace.shape}")
    if trace.dtype.kind not in "biuf" or not np.isin(trace, (0, 1)).all():
        raise InputError(f"{wanted}, got {checks.shown(config.availability)}")
    if not trace.any():
        raise InputError("availability must let somebody take part in some round, got zeros only")
    return trace.astype(bool)


def block(config: RunConfig, size: int, footprint: int) -> int:
    """Return the number of clients to vectorise over: as many as fit the cache.

    Preferably it is a divisor of `size`. If no divisor is within a factor of two, blocks are as
    even as possible and the last is padded with clients of weight 0 (at most one per block).
    """
    if config.block is not None:
        return checks.whole("block", config.block, at_most=size)
    fitting = min(size, MOST_CLIENTS, max(1, CACHE // footprint))
    divisors = [b for b in range(max(1, fitting // 2), min(size, 2 * fitting) + 1) if size % b == 0]
    if divisors:
        return min(divisors, key=lambda b: abs(math.log(b / fitting)))
    return math.ceil(size / math.ceil(size / fitting))


def footprint(config: RunConfig, drawer: Drawer) -> int:
    """Return the bytes that a client touches per local step.

    Four model-sized vectors, the batch, the draws, and the patches of convolutions.
    """
    steps, batch = int(drawer.steps.max()), drawer.batch
    problem = config.problem
    records = max(1, int(problem.offsets[-1]))
    itemsize = np.dtype(config.precision).itemsize
    row = (
        sum(a.size * min(a.itemsize, itemsize) for a in jax.tree.leaves(problem.records)) // records
    )
    rows = int(problem.counts.max() if batch is None else batch.max())
    model = 4 * problem.dim * itemsize
    drawn = 0 if batch is None else 4 * steps * rows
    checks.fits(f"{steps} local steps on {rows} records drawn for each", drawn)
    patches = _patches(problem, rows, config.precision)
    checks.fits(f"the convolutions of a local step on {rows} records", patches)
    private = None if config.privacy is None else mechanism(config)
    single = 0 if private is None else private.at_once * problem.dim * itemsize
    return int(model + rows * row + drawn + patches + single)


def _patches(problem: Problem, rows: int, precision: str) -> int:
    """Return the bytes that convolutions of a batch take as matrix products."""
    dtype = np.dtype(precision)

    def shaped(array: Any, *shape: int) -> jax.ShapeDtypeStruct:
        kind = dtype if jax.numpy.issubdtype(array.dtype, np.floating) else array.dtype
        return jax.ShapeDtypeStruct(shape, kind)

    params = jax.tree.map(lambda a: shaped(a, *a.shape), problem.params)
    batch = jax.tree.map(lambda a: shaped(a, rows, *a.shape[1:]), problem.records)
    with jax.enable_x64(dtype.itemsize > 4):
        state = jax.tree.map(lambda a: shaped(a, *a.shape), problem.state)
        shapes, tree = jax.tree.flatten((params, batch, state))
        return work_bytes(problem.functions, problem.kinds, tree, tuple(shapes))


def step_sizes(config: RunConfig, steps: NDArray[np.int64]) -> Callable[[int], NDArray[Any]]:
    """Return a function (round) -> its step size, (), or those of its local steps, (K,)."""
    if config.local_optimizer is not None:
        if config.lr is not None:
            raise InputError(
                "give either lr or local_optimizer: an optimizer brings its own step size"
            )
        constant = np.zeros((), config.precision)
    elif config.lr is None:
        raise InputError(
            "lr must be given: a number above 0, or a schedule over rounds or local steps"
        )
    elif callable(config.lr):
        schedule, most, least = schedule_of(config.lr), int(steps.max()), int(steps.min())
        if schedule.by_round:
            return lambda round: schedule.values(round, most, least, config.precision)
        constant = schedule.values(1, most, least, config.precision)
    else:
        constant = in_precision(config.lr, config.precision)
    return lambda round: constant


class Schedule(NamedTuple):
    """A step size schedule. Rounds count from 1, as in a run's history; local steps from 0."""

    function: Callable[..., Any]
    by_round: bool
    by_step: bool
    named: bool = True
    """Whether arguments are passed by the names `round` and `step`; a single argument of another
    name is the step."""

    def values(self, round: int, steps: int, least: int, dtype: str) -> NDArray[Any]:
        """Return the step sizes of a round: shape (), or (steps,) if they vary over local steps.

        Args:
            round: The round, counted from 1.
            steps: Largest number of local steps of any client.
            least: Smallest number: at least one of so many step sizes must be above 0, as the mean
                direction is the move divided by their sum.
            dtype: Precision of the run.

        >>> schedule_of(lambda round: 1 / round).values(4, 3, 3, "float64")
        array(0.25)
        >>> schedule_of(lambda round, step: 1 / (round + step)).values(1, 2, 2, "float64")
        array([1. , 0.5])
        """
        if not self.by_step:
            return in_precision(self._at(round, None), dtype)
        checks.fits(f"a schedule of {steps} step sizes", 32 * steps)
        values = in_precision([self._at(round, k) for k in range(steps)], dtype)
        if not values[:least].any():
            where = f" of round {round}" if self.by_round else ""
            whose = "" if least == steps else f" of the client that takes {least}"
            raise InputError(
                f"lr must be above 0 at some of the {least} local steps{where}{whose}, "
                "got zeros only"
            )
        return values

    def _at(self, round: int, step: int | None) -> float:
        if not self.named:
            return checks.number(f"lr({step})", self.function(step), at_least=0)
        given = {"round": round} if self.by_round else {}
        if step is None:  # the mean direction is the move divided by this step size
            return checks.number(f"lr(round={round})", self.function(**given), above=0)
        given |= {"step": step}
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        return checks.number(f"lr({said})", self.function(**given), at_least=0)


def in_precision(lr: Any, dtype: str) -> NDArray[Any]:
    """Return step sizes in the run's precision.

    Raise an InputError if one overflows it, or vanishes in it.

    >>> in_precision(1e-50, "float32")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be from 1.2e-38 to 3.4e+38 in float32, got 1e-50
    """
    wanted, limits = np.array(lr, np.float64), np.finfo(dtype)
    wrong = wanted[(wanted > limits.max) | ((wanted != 0) & (wanted < limits.tiny))]
    if wrong.size:
        raise InputError(
            f"lr must be from {limits.tiny:.2g} to {limits.max:.2g} in {dtype}, got {wrong[0]:g}"
        )
    return wanted.astype(dtype)


def schedule_of(lr: Callable[..., Any]) -> Schedule:
    """Return the schedule of a function, according to the names of its arguments.

    >>> schedule_of(lambda k: 0.1).by_step, schedule_of(lambda round: 0.1).by_step
    (True, False)
    >>> schedule_of(lambda epoch, k: 0.1)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr must be a number above 0, or a function of `round`, of `step`,
    or of both by these names, got one of (epoch, k)
    """
    try:
        parameters = inspect.signature(lr).parameters.values()
    except (TypeError, ValueError):  # built-in callables have none
        return Schedule(lr, False, True, named=False)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named &= {"round", "step"}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    if named and set(required) <= named:
        return Schedule(lr, "round" in named, "step" in named)
    if not named and len(required) <= 1 and parameters:
        return Schedule(lr, False, True, named=False)
    raise InputError(f"{WANTED}, got one of {inspect.signature(lr)}")

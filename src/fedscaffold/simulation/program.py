"""Prepare a run: turn a `RunConfig` into the spec, federation and initial state that the engine runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import fitted, reads_gradient_at_x, work_of
from fedscaffold.checks import InputError
from fedscaffold.metrics import ALWAYS, METRICS, Stop, stop_of
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.problems.records import is_float, narrowed
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import compression, resolve, stale
from fedscaffold.simulation.compatibility import refuse
from fedscaffold.simulation.compression import Compressor
from fedscaffold.simulation.evaluation import default_metrics
from fedscaffold.simulation.evaluation_batches import Batches, evaluation_batches
from fedscaffold.simulation.out_of_core import refuse_out_of_core
from fedscaffold.simulation.own_metrics import OnHost, OwnMetrics, own_metrics
from fedscaffold.simulation.resolve import CACHE
from fedscaffold.simulation.sampling import Drawer, most_steps
from fedscaffold.simulation.sharding import Shards, make_shards
from fedscaffold.simulation.spec import Federation, Spec, State
from fedscaffold.simulation.stale import Policy
from fedscaffold.simulation.step_sizes import by_step

__all__ = ["PreparedRun", "prepare"]

NEEDS_RECORDS = {"loss", "gap", "grad_norm", "accuracy"}
NEEDS_OPTIMUM = {"gap", "distance", "control_error"}


class PreparedRun(NamedTuple):
    """A prepared run: everything the engine needs."""

    spec: Spec
    federation: Federation
    drawer: Drawer
    start: State
    lr: NDArray[Any]
    target: float
    fitting: int
    """Number of runs of a sweep that fit the cache at once."""
    shards: Shards | None = None
    """Placement of clients on several devices; `federation` and `start` are then host arrays."""
    host: OnHost | None = None
    """The user's metrics that are evaluated on the host."""


def prepare(config: RunConfig, seeds: Sequence[int] | None = None) -> PreparedRun:
    """Check a config against its problem and build all inputs of the compiled program.

    Args:
        config: The run.
        seeds: The seeds of a sweep; defaults to the seed of `config`.

    Raises:
        InputError: An argument is invalid, or two arguments are incompatible.
    """
    _check_types(config)
    config = replace(config, algorithm=fitted(config.algorithm, config.problem.layout))
    problem, algorithm = config.problem, config.algorithm
    batch, shuffle = resolve.batch(config)
    steps = resolve.steps(config, batch)
    size = resolve.cohort_size(config)
    policy = _resolve_policy(config)
    away = config.client_state != "array"
    refuse(config, steps, size, policy)
    mean_steps = int(steps[0]) if work_of(algorithm, 1).geometric else None
    if mean_steps is not None:
        steps = np.full_like(steps, most_steps(mean_steps, seeds or (config.seed,), config.rounds))
    touched = resolve.footprint(config, steps, batch)
    block = resolve.block(config, size, touched)
    slots = -(-size // block) * block
    drawer = _make_drawer(config, size, slots, steps, batch, shuffle, mean_steps)
    own = own_metrics(config)
    stop, target = (
        (None, math.nan) if config.stop_at is None else stop_of(config.stop_at, own.rises)
    )
    metrics = _resolve_metrics(config, stop, own)
    kinds = problem.inspected.kinds
    ragged = bool((problem.counts != problem.counts[0]).any())
    branches = kinds.gradient == "coupled"
    whole = batch is None or policy.refresh_after is not None or reads_gradient_at_x(algorithm)
    spec = Spec(
        algorithm,
        problem.functions,
        problem.layout,
        metrics,
        block,
        max_steps=int(steps.max()),
        max_rows=int(problem.counts.max()),
        optimizer=config.local_optimizer,
        scheduled=by_step(config.lr),
        unequal=bool((steps != steps[0]).any()),
        full_batch=batch is None,
        ragged_clients=ragged,
        everyone=away or (drawer.always and slots == problem.num_clients),
        stop=stop,
        mean_steps=mean_steps,
        server_optimizer=config.server_optimizer,
        policy=policy,
        compressor=_resolve_compressor(config),
        ages=policy.name != "keep" or "age" in metrics,
        silences=_may_be_silent(config, drawer),
        kinds=kinds,
        batch_sizes=drawer.sizes if branches and drawer.ragged else (),
        client_sizes=tuple(np.unique(problem.counts).tolist())
        if branches and ragged and whole
        else (),
        own=own.measures,
        local_buffers=problem.state is not None and config.buffers == "local",
    )
    shards = None if config.devices in (None, 1) else make_shards(config, size, touched, block)
    if shards is not None:
        spec = shards.spec(spec)
    rows = (
        slots
        if away
        else problem.num_clients
        if shards is None
        else shards.own.stop - shards.own.start
    )
    federation = (
        _cohort_federation(config, spec, slots) if away else _federation(config, spec, steps)
    )
    federation, host = federation._replace(measured=own.data), own.on_host(config, spec, target)
    lr, fitting = resolve.lr(config, steps), max(1, CACHE // (block * touched))
    return PreparedRun(
        spec,
        federation,
        drawer,
        _initial_state(config, spec, rows),
        lr,
        target,
        fitting,
        shards,
        host,
    )


def _check_types(config: RunConfig) -> None:
    if not isinstance(config.algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {config.algorithm!r}")
    if not isinstance(config.problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(config.problem).__name__}")


def _resolve_policy(config: RunConfig) -> Policy:
    wanted: Any = config.stale
    if not isinstance(wanted, (str, Policy)):
        raise InputError(
            f"stale must be a policy such as fs.stale.drop(20) or 'drop:20', got "
            f"{checks.shown(wanted)}"
        )
    return stale.of(wanted) if isinstance(wanted, str) else wanted


def _resolve_compressor(config: RunConfig) -> Compressor | None:
    wanted: Any = config.compression
    if wanted is not None and not isinstance(wanted, (str, Compressor)):
        example = "fs.compression.top_k(0.1) or 'top_k:0.1'"
        raise InputError(
            f"compression must be a compressor such as {example}, got {checks.shown(wanted)}"
        )
    return compression.of(wanted) if isinstance(wanted, str) else wanted


def _make_drawer(
    config: RunConfig,
    size: int,
    slots: int,
    steps: NDArray[np.int64],
    batch: NDArray[np.int64] | None,
    shuffle: bool,
    mean_steps: int | None,
) -> Drawer:
    problem = config.problem
    return Drawer(
        num_clients=problem.num_clients,
        size=size,
        slots=slots,
        schedule=config.cohorts,
        first=problem.offsets[:-1],
        counts=problem.counts,
        steps=steps,
        batch=batch,
        shuffle=shuffle,
        precision=config.precision,
        available=resolve.availability(config),
        mean_steps=mean_steps,
        lr=resolve.lr_by_round(config, steps),
        sampling=resolve.sampling(config, size),
    )


def _may_be_silent(config: RunConfig, drawer: Drawer) -> bool:
    """Return whether a round may have no client of positive weight."""
    trace, sampling = drawer.available, drawer.sampling
    if (
        callable(trace)
        or callable(config.sampling)
        or not weights_of(config.problem, config.weights).all()
    ):
        return True
    if (
        trace is not None and sampling is not None
    ):  # those who are available may have weight 0 in the draw
        return True
    if trace is not None:
        return not bool(trace.any(axis=1).all())
    return config.cohorts is not None and not all(len(cohort) for cohort in config.cohorts)


def _resolve_metrics(config: RunConfig, stop: Stop | None, own: OwnMetrics) -> tuple[str, ...]:
    """Return the names of the metric columns, in a fixed order."""
    problem, wanted = config.problem, config.metrics
    if wanted is not None and (isinstance(wanted, str) or not isinstance(wanted, Collection)):
        raise InputError(
            f"metrics must be a list of names such as ['loss'], or of functions, got "
            f"{checks.shown(wanted)}"
        )
    names = [name for name in wanted or () if isinstance(name, str)]
    for name in names:
        checks.choice("metric", name, (*METRICS, *ALWAYS))
    asked = set(default_metrics(problem) if wanted is None else names) - set(ALWAYS)
    asked |= {stop.metric} if stop is not None else set()
    for name in asked:
        if name in NEEDS_OPTIMUM:
            problem.optimum(config.weights)
        if name == "accuracy" and problem.functions.accuracy is None:
            raise InputError(
                f"{problem.name} has no accuracy; give Problem(..., accuracy=function) or choose "
                "another metric"
            )
    return (*(name for name in METRICS if name in asked), *own.columns, "residual")


def _federation(config: RunConfig, spec: Spec, steps: NDArray[np.int64]) -> Federation:
    problem, dtype = config.problem, config.precision
    p = weights_of(problem, config.weights)
    # with several devices the records stay on the host: each process copies its own shard
    records, test = (
        problem.on_device(dtype) if spec.mesh is None else (problem.records, problem.test)
    )
    optimum = controls = optimal_loss = record_weights = None
    if set(spec.metrics) & NEEDS_OPTIMUM:
        optimum = problem.optimum(config.weights)
    if "control_error" in spec.metrics:
        controls = problem.ideal_controls(config.weights)
    if "gap" in spec.metrics:
        optimal_loss = problem.optimal_loss(config.weights)
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
        None if problem.noise is None else narrowed("the noise levels", problem.noise, dtype),
        cast(optimum),
        cast(controls),
        cast(optimal_loss),
        cast(record_weights),
        evaluation=_client_batches(problem, spec, cast(p)),
        test_evaluation=_test_batches(problem, spec, dtype),
        shares=p if spec.keeps else None,
    )


def _client_batches(problem: Problem, spec: Spec, p: NDArray[Any]) -> dict[str, list[Batches]]:
    of = {"loss": spec.kinds.loss, "gap": spec.kinds.loss, "grad_norm": spec.kinds.gradient}
    of |= {"accuracy": spec.kinds.accuracy} if problem.test is None else {}
    kinds = {of[name] for name in spec.metrics if name in of}
    return evaluation_batches(problem, kinds, problem.records, problem.offsets, p)


def _test_batches(problem: Problem, spec: Spec, dtype: str) -> dict[str, list[Batches]]:
    if problem.test is None or "accuracy" not in spec.metrics:
        return {}
    offsets = np.array([0, len(jax.tree.leaves(problem.test)[0])])
    return evaluation_batches(
        problem, {spec.kinds.accuracy}, problem.test, offsets, np.ones(1, dtype)
    )


def _cohort_federation(config: RunConfig, spec: Spec, slots: int) -> Federation:
    """Return the cohort-sized federation of out-of-core clients.

    Shapes, and what is constant over rounds.
    """
    refuse_out_of_core(config, spec)
    problem, dtype = config.problem, np.dtype(config.precision)

    def room(column: NDArray[Any]) -> NDArray[Any]:
        kind = dtype if np.issubdtype(column.dtype, np.floating) else column.dtype
        return np.zeros((slots * spec.max_rows, *column.shape[1:]), kind)

    def cast(a: Any) -> Any:
        return a.astype(dtype) if np.issubdtype(a.dtype, np.floating) else a

    numbers = np.zeros(slots, np.int32)
    noise = None if problem.noise is None else cast(problem.noise)
    return Federation(
        jax.tree.map(room, problem.records),
        np.arange(slots, dtype=np.int32) * np.int32(spec.max_rows),
        numbers,
        numbers,
        np.zeros(slots, dtype),
        jax.tree.map(cast, problem.test) if "accuracy" in spec.metrics else None,
        noise
        if noise is None or noise.ndim < 3 or len(noise) == 1
        else np.resize(noise, (slots, *noise.shape[1:])),
        problem.optimum(config.weights).astype(dtype) if "distance" in spec.metrics else None,
        None,
        None,
        None,
        numbers,
        test_evaluation=_test_batches(problem, spec, config.precision),
        shares=np.zeros(slots) if spec.keeps else None,
    )


def _initial_state(config: RunConfig, spec: Spec, rows: int) -> State:
    problem, dtype = config.problem, config.precision
    vector = _flat_model(problem, problem.params if config.x0 is None else config.x0, dtype)
    algorithm = config.algorithm
    means = {field for field, _ in algorithm.means}
    begun = algorithm.init(vector)
    memory: Any = None if algorithm.memory is None else algorithm.memory(vector)
    server = type(begun)(
        *(
            np.asarray(value, np.float64 if field in means else dtype)
            for field, value in zip(begun._fields, begun, strict=True)
        )
    )

    buffers = jax.tree.map(
        lambda a: a.astype(dtype if is_float(a) else jax.dtypes.canonicalize_dtype(a.dtype)),
        problem.state,
    )

    def table(record: Any) -> Any:
        return jax.tree.map(lambda a: np.repeat(np.asarray(a, dtype)[None], rows, axis=0), record)

    return State(
        server,
        None if memory is None else table(memory),
        tuple(
            np.broadcast_to(np.asarray(getattr(memory, of), np.float64), problem.dim)
            for _, of in algorithm.means
        ),
        np.zeros((), dtype),
        np.int32(0),
        np.bool_(False),
        None
        if spec.server_optimizer is None
        else jax.tree.map(np.asarray, spec.server_optimizer.init(vector)),
        np.zeros(rows, np.int32) if spec.ages else None,
        {name: np.zeros((rows, problem.dim), dtype) for name in spec.errors} or None,
        None if algorithm.own is None else table(algorithm.own(vector)),
        None if spec.local_buffers else buffers,
        jax.tree.map(lambda a: np.repeat(a[None], rows, axis=0), buffers)
        if spec.local_buffers
        else None,
    )


def _flat_model(problem: Problem, x: Any, dtype: str) -> NDArray[Any]:
    """Return the initial model as a flat vector, from a flat vector or a pytree like the problem's params."""
    flat = isinstance(x, (np.ndarray, jax.Array)) and x.shape == (problem.dim,)
    if not flat and Layout.of(x) != problem.layout:
        raise InputError(
            f"x0 must be shaped like the problem's params, or a flat vector of {problem.dim} "
            "numbers"
        )
    vector = np.asarray(x, dtype) if flat else problem.layout.flatten(x, dtype)
    if not np.isfinite(vector).all():
        raise InputError("x0 must be finite, got NaN or infinite values")
    return vector

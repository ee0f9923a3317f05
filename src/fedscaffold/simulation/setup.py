"""From what a user asks for to what the engine runs: every argument is checked here, once."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.metrics import ALWAYS, METRICS, target_of
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.simulation import asked, compression, stale
from fedscaffold.simulation.asked import CACHE, Request
from fedscaffold.simulation.away import refuse_away
from fedscaffold.simulation.compression import Compressor
from fedscaffold.simulation.draws import Drawer, most_steps
from fedscaffold.simulation.evaluation import usual
from fedscaffold.simulation.evaluation_batches import Batches, evaluation_batches
from fedscaffold.simulation.guards import refuse
from fedscaffold.simulation.mesh import Shards, shards_of
from fedscaffold.simulation.spec import Federation, Spec, State
from fedscaffold.simulation.stale import Policy

__all__ = ["Ready", "Request", "prepare"]

NEEDS_RECORDS = {"loss", "gap", "grad_norm", "accuracy"}
NEEDS_OPTIMUM = {"gap", "distance", "control_error"}


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
    shards: Shards | None = None
    """Which clients are on which device, where there are several; `federation` and `start` are then the host's."""


def prepare(request: Request) -> Ready:
    """Check a request and make everything that the compiled program is given."""
    _check(request)
    problem, algorithm = request.problem, request.algorithm
    batch, shuffle = asked.batch(request)
    steps = asked.steps(request, batch)
    size = asked.cohort_size(request)
    trace = asked.availability(request)
    policy = _policy(request)
    away = request.client_state != "array"
    refuse(request, steps, size, policy)
    mean_steps = int(steps[0]) if algorithm.coin else None
    if mean_steps is not None:
        steps = np.full_like(steps, most_steps(mean_steps, request.seeds, request.rounds))
    touched = asked.footprint(request, steps, batch)
    block = asked.block(request, size, touched)
    slots = -(-size // block) * block
    given = (problem.offsets[:-1], problem.counts, steps, batch, shuffle, request.precision, trace, mean_steps)
    drawer = Drawer(problem.num_clients, size, slots, request.cohorts, *given)
    stop, target = (None, math.nan) if request.stop_at is None else target_of(request.stop_at)
    metrics = _metrics(request, stop)
    kinds = problem.inspected.kinds
    ragged = bool((problem.counts != problem.counts[0]).any())
    branches = kinds.gradient == "coupled"
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
        ragged_clients=ragged,
        everyone=away or (request.cohorts is None and trace is None and slots == problem.num_clients),
        stop=stop,
        mean_steps=mean_steps,
        server_optimizer=_optimizer(request),
        policy=policy,
        compressor=_compressor(request),
        ages=policy.name != "keep" or "age" in metrics,
        silences=_silences(request, trace),
        kinds=kinds,
        batch_sizes=drawer.sizes if branches and drawer.ragged else (),
        client_sizes=tuple(np.unique(problem.counts).tolist()) if branches and ragged else (),
    )
    shards = None if request.devices is None else shards_of(request, size, touched, block)
    if shards is not None:
        spec = shards.spec(spec)
    rows = slots if away else problem.num_clients if shards is None else shards.own.stop - shards.own.start
    federation = _cohort_federation(request, spec, slots) if away else _federation(request, spec, steps)
    lr, fitting = asked.lr(request, steps), max(1, CACHE // (block * touched))
    return Ready(spec, federation, drawer, _start(request, spec, rows), lr, target, fitting, shards)


def _check(request: Request) -> None:
    if not isinstance(request.algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {request.algorithm!r}")
    if not isinstance(request.problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(request.problem).__name__}")
    checks.whole("rounds", request.rounds, at_most=asked.MOST)
    checks.choice("precision", request.precision, ("float32", "float64"))


def _optimizer(request: Request) -> Any:
    optimizer = request.server_optimizer
    if optimizer is not None and not hasattr(optimizer, "update"):
        raise InputError(f"server_optimizer must be an optax transformation, got {optimizer!r}")
    return optimizer


def _policy(request: Request) -> Policy:
    wanted: Any = request.stale
    if not isinstance(wanted, (str, Policy)):
        raise InputError(f"stale must be a policy such as fs.stale.drop(20) or 'drop:20', got {checks.shown(wanted)}")
    return stale.of(wanted) if isinstance(wanted, str) else wanted


def _compressor(request: Request) -> Compressor | None:
    wanted: Any = request.compression
    if wanted is not None and not isinstance(wanted, (str, Compressor)):
        example = "fs.compression.top_k(0.1) or 'top_k:0.1'"
        raise InputError(f"compression must be a compressor such as {example}, got {checks.shown(wanted)}")
    return compression.of(wanted) if isinstance(wanted, str) else wanted


def _silences(request: Request, trace: NDArray[np.bool_] | None) -> bool:
    """Whether nobody is heard in some round."""
    if trace is not None:
        return not bool(trace.any(axis=1).all())
    return request.cohorts is not None and not all(len(cohort) for cohort in request.cohorts)


def _metrics(request: Request, stop: str | None) -> tuple[str, ...]:
    """Names of the measured columns, in a fixed order."""
    problem, wanted = request.problem, request.metrics
    if wanted is not None and (isinstance(wanted, str) or not isinstance(wanted, Collection)):
        raise InputError(f"metrics must be a list of names such as ['loss'], got {checks.shown(wanted)}")
    for name in wanted or ():
        checks.choice("metric", name, (*METRICS, *ALWAYS))
    asked = set(usual(problem) if wanted is None else wanted) - set(ALWAYS)
    asked |= {stop} if stop is not None else set()
    for name in asked:
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
    # of records spread over devices each process takes its own, so they stay where they are
    records, test = problem.on_device(dtype) if spec.mesh is None else (problem.records, problem.test)
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
    return evaluation_batches(problem, {spec.kinds.accuracy}, problem.test, offsets, np.ones(1, dtype))


def _cohort_federation(request: Request, spec: Spec, slots: int) -> Federation:
    """A federation as large as a cohort: shapes to compile for, and what is the same in every round."""
    refuse_away(request, spec)
    problem, dtype = request.problem, np.dtype(request.precision)

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
        noise if noise is None or noise.ndim < 3 or len(noise) == 1 else np.resize(noise, (slots, *noise.shape[1:])),
        problem.optimum(request.weights).astype(dtype) if "distance" in spec.metrics else None,
        None,
        None,
        None,
        numbers,
        test_evaluation=_test_batches(problem, spec, request.precision),
        shares=np.zeros(slots) if spec.keeps else None,
    )


def _start(request: Request, spec: Spec, rows: int) -> State:
    problem, dtype = request.problem, request.precision
    vector = _vector(problem, problem.params if request.x0 is None else request.x0, dtype)
    zeros = np.zeros(problem.dim, np.float64 if spec.keeps else dtype)
    shape = (rows, problem.dim)
    return State(
        vector,
        zeros if request.algorithm.shift is not None else None,
        np.zeros(shape, dtype) if spec.keeps else None,
        zeros if spec.keeps else None,
        np.zeros((), dtype),
        np.int32(0),
        np.bool_(False),
        None if spec.server_optimizer is None else jax.tree.map(np.asarray, spec.server_optimizer.init(vector)),
        np.zeros(rows, np.int32) if spec.ages else None,
        np.zeros(shape, dtype) if spec.compressor is not None and spec.sends_move else None,
    )


def _vector(problem: Problem, x: Any, dtype: str) -> NDArray[Any]:
    """The starting model as a flat vector; given as one, or in the user's own structure."""
    flat = isinstance(x, np.ndarray) and x.shape == (problem.dim,)
    if not flat and Layout.of(x) != problem.layout:
        raise InputError(f"x0 must be shaped like the problem's params, or a flat vector of {problem.dim} numbers")
    vector = x.astype(dtype) if flat else problem.layout.flatten(x, dtype)
    if not np.isfinite(vector).all():
        raise InputError("x0 must be finite, got NaN or infinite values")
    return vector

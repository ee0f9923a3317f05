"""Prepare a run: turn a `RunConfig` into the inputs of the compiled program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import exchange, fitted, reads_gradient_at_x, work_of
from fedscaffold.checks import InputError, is_word
from fedscaffold.damping import damping_of
from fedscaffold.metrics import ALWAYS, METRICS, Stop, stop_of
from fedscaffold.precision import narrowed
from fedscaffold.privacy.accounting import capacity
from fedscaffold.privacy.budget import Budget
from fedscaffold.privacy.records import Records
from fedscaffold.problems.batches import Kinds
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.robust import Filter
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import compression, delays, resolve, stale
from fedscaffold.simulation.compatibility import refuse
from fedscaffold.simulation.evaluation import ON_RECORDS, default_metrics
from fedscaffold.simulation.evaluation_batches import client_batches, test_batches
from fedscaffold.simulation.filtering import initial_guard
from fedscaffold.simulation.forecast import Forecast, forecast
from fedscaffold.simulation.local import UNROLL
from fedscaffold.simulation.out_of_core import cohort_federation
from fedscaffold.simulation.own_metrics import OnHost, OwnMetrics, own_metrics
from fedscaffold.simulation.sampling import ROOM_BYTES, Drawer, most_steps
from fedscaffold.simulation.sharding import Shards, make_shards
from fedscaffold.simulation.spec import Federation, Spec, State
from fedscaffold.simulation.spending import budget_of
from fedscaffold.simulation.threads import HEAVY, choose_threads, client_operations

__all__ = ["PreparedRun", "prepare"]

NEEDS_OPTIMUM = {"gap", "distance", "control_error"}


class PreparedRun(NamedTuple):
    """A prepared run: everything the engine needs."""

    spec: Spec
    federation: Federation
    drawer: Drawer
    start: State
    fitting: int
    """Number of runs of a sweep that fit the cache at once."""
    size: Forecast
    """Parameters and memory."""
    budget: Budget | None = None
    """The epsilon of a private run with this seed."""
    seed: int = 0
    shards: Shards | None = None
    """Placement of clients on several devices; `federation` and `start` are then host arrays."""
    host: OnHost | None = None
    """The user's metrics that are evaluated on the host."""

    @property
    def several(self) -> bool:
        """Whether the run is distributed over several processes."""
        return self.shards is not None and jax.process_count() > 1


def prepare(config: RunConfig, seeds: Sequence[int] | None = None) -> PreparedRun:
    """Check a config against its problem and build all inputs of the compiled program.

    Args:
        config: The run.
        seeds: The seeds of a sweep; defaults to the seed of `config`.

    Raises:
        InputError: An argument is invalid, or two arguments are incompatible.
    """
    if not isinstance(config.algorithm, Algorithm):
        raise InputError(f"algorithm must be one such as fs.scaffold(), got {config.algorithm!r}")
    if not isinstance(config.problem, Problem):
        raise InputError(f"problem must be a Problem, got {type(config.problem).__name__}")
    if config.algorithm.fit is not None:
        config = replace(config, algorithm=fitted(config.algorithm, config.problem.layout))
    choose_threads()
    drawer = _make_drawer(config, seeds or (config.seed,))
    touched = resolve.footprint(config, drawer)
    block = resolve.block(config, drawer.size, touched)
    # room for more local steps than a run takes costs time: no more than the clients' models do
    models = drawer.size * config.problem.dim * np.dtype(config.precision).itemsize
    room = int(np.clip(models, *ROOM_BYTES))
    drawer = replace(drawer, slots=-(-drawer.size // block) * block, room=room)
    own, stop, target = None, None, math.nan
    if not all(isinstance(one, str) for one in config.metrics or ()):
        own = own_metrics(config)
    if config.stop_at is not None:
        stop, target = stop_of(config.stop_at, {} if own is None else own.rises)
    spec = _make_spec(config, drawer, block, own, stop, heavy=touched > resolve.CACHE)
    shards = None
    if config.devices not in (None, 1):
        shards = make_shards(config, drawer.size, touched, block)
        spec = shards.spec(spec)
    elif drawer.slots > block and jax.default_backend() == "cpu":
        work = client_operations(config.problem, drawer.steps, drawer.batch)
        spec = spec._replace(by_blocks=work >= HEAVY and not spec.compares)
    rows = config.problem.num_clients if config.client_state == "array" else drawer.slots
    if shards is not None:
        rows = shards.own.stop - shards.own.start
    size = forecast(config, spec, drawer, touched, rows, runs=len(seeds or (config.seed,)))
    if config.client_state == "array":
        federation = _federation(config, spec, drawer)
    else:
        federation = cohort_federation(config, spec, drawer.slots)
    return PreparedRun(
        spec=spec,
        federation=federation._replace(
            measured=() if own is None else own.data,
            target=np.array(target, config.precision),
        ),
        drawer=drawer,
        start=_initial_state(config, spec, rows, drawer.at_work),
        fitting=max(1, resolve.CACHE // (block * touched)),
        size=size,
        budget=None if config.privacy is None else budget_of(config, drawer),
        seed=config.seed,
        shards=shards,
        host=None if own is None else own.on_host(config, spec, target),
    )


def _make_drawer(config: RunConfig, seeds: Sequence[int]) -> Drawer:
    """Resolve who takes part and what they do, and refuse what does not go together."""
    problem = config.problem
    steps, batch, shuffle, used = resolve.local_work(config)
    rates = None
    if isinstance(config.privacy, Records) and batch is not None:
        rates = resolve.poisson_rates(config)
        rooms = [capacity(n, q)[0] for n, q in zip(problem.counts.tolist(), rates, strict=True)]
        batch = np.array(rooms, np.int64)
    cohort = resolve.cohort_size(config)
    size = cohort if config.buffer is None else resolve.buffer_size(config, cohort)
    lr = resolve.step_sizes(config, steps)
    refuse(config, steps, size, scheduled=lr(1).ndim > 0)
    mean_steps = None
    if config.algorithm.work is not None and work_of(config.algorithm, 1).geometric:
        mean_steps = int(steps[0])
        steps = np.full_like(steps, most_steps(mean_steps, seeds, config.rounds))
    uniform = is_word(config.sampling, "uniform")
    return Drawer(
        num_clients=problem.num_clients,
        size=size,
        slots=size,
        schedule=config.cohorts,
        first=problem.offsets[:-1],
        counts=problem.counts,
        steps=steps,
        batch=batch,
        shuffle=shuffle,
        lr=lr,
        precision=config.precision,
        available=None if config.availability is None else resolve.availability(config),
        mean_steps=mean_steps,
        sampling=None if uniform else resolve.sampling(config, size),
        used=used,
        rates=rates,
        delays=None if config.delays is None else delays.of(config.delays, problem.num_clients),
        at_work=None if config.buffer is None else cohort,
        damping=None if config.buffer is None else damping_of(config.staleness),
    )


def _make_spec(
    config: RunConfig,
    drawer: Drawer,
    block: int,
    own: OwnMetrics | None,
    stop: Stop | None,
    heavy: bool,
) -> Spec:
    """Return the static description of the program, for one device."""
    problem, algorithm, steps = config.problem, config.algorithm, drawer.steps
    policy, compressor = stale.KEEP, None
    if not is_word(config.stale, "keep"):
        policy = stale.of(config.stale)
    if config.compression is not None and not is_word(config.compression, "none"):
        compressor = compression.of(config.compression)
    metrics = _resolve_metrics(config, stop, own)
    kinds = problem.kinds
    ragged = bool((problem.counts != problem.counts[0]).any())
    refreshes = policy.refresh_after is not None
    whole = drawer.batch is None or refreshes or reads_gradient_at_x(algorithm)
    everyone = drawer.always and drawer.slots == problem.num_clients
    mechanism = None if config.privacy is None else resolve.mechanism(config)
    sizes = partial(_branches, kinds, heavy and block == 1 and mechanism is None)
    known, scheduled = exchange(algorithm), drawer.lr(1).ndim > 0
    plain = config.local_optimizer is None and config.clip_norm is None and not scheduled
    sent, referred = known.sent(plain), dict(algorithm.references)
    return Spec(
        algorithm,
        known,
        problem.functions,
        problem.layout,
        metrics,
        block,
        sent=sent,
        rebuilt=known.rebuilt(plain),
        errors=() if compressor is None else tuple(name for name in sent if name not in referred),
        noise_steps=0 if problem.noise is None else int(steps.max()),
        many_steps=bool(steps.min() >= UNROLL),
        max_rows=int(problem.counts.max()),
        optimizer=config.local_optimizer,
        clip_norm=config.clip_norm,
        scheduled=scheduled,
        unequal=bool((steps != steps[0]).any()),
        full_batch=drawer.batch is None,
        ragged_clients=ragged,
        everyone=everyone or config.client_state != "array",
        stop=stop,
        mean_steps=drawer.mean_steps,
        server_optimizer=config.server_optimizer,
        policy=policy,
        compressor=compressor,
        ages=policy.name != "keep" or "age" in metrics,
        kinds=kinds,
        batch_sizes=sizes(drawer.sizes) if drawer.shape[2] else (),
        client_sizes=sizes(np.unique(problem.counts).tolist()) if ragged and whole else (),
        own=() if own is None else own.measures,
        privacy=mechanism,
        message_privacy=None if config.privacy is None else resolve.message_mechanism(config),
        heavy=heavy,
        local_buffers=problem.state is not None and config.buffers == "local",
        filter=cast("Filter | None", config.robust),  # its check has read the words
        attack=config.attack,
        damped=drawer.damping is not None,
    )


def _branches(kinds: Kinds, cuts: bool, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of batches that have a branch of the program to themselves.

    Args:
        kinds: Kinds of the problem's functions.
        cuts: Whether padding is worth a branch: clients run one by one, and their steps are heavy.
        sizes: All sizes that occur, in ascending order.
    """
    if kinds.gradient == "coupled":
        return tuple(sizes)
    if kinds.gradient == "mean" and cuts:
        return tuple(sorted({-(-sizes[-1] // 2), sizes[-1]}))
    return ()


def _resolve_metrics(
    config: RunConfig, stop: Stop | None, own: OwnMetrics | None
) -> tuple[str, ...]:
    """Return the names of the metric columns, in a fixed order."""
    problem, wanted = config.problem, config.metrics
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
    columns = () if own is None else own.columns
    return (*(name for name in METRICS if name in asked), *columns, "residual")


def _federation(config: RunConfig, spec: Spec, drawer: Drawer) -> Federation:
    """Return the clients' data, and what the metrics need."""
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
    if set(spec.metrics) & ON_RECORDS:
        record_weights = np.repeat(p / problem.counts, problem.counts)
    if "accuracy" not in spec.metrics:
        test = None

    means = set(spec.kinds) == {"mean"}  # measured record by record, in any order

    def cast(a: Any) -> Any:
        return None if a is None else np.asarray(a, dtype)

    return Federation(
        records=records,
        first=problem.offsets[:-1].astype(np.int32),
        counts=problem.counts.astype(np.int32),
        steps=drawer.steps.astype(np.int32),
        weights=cast(p),
        test=test,
        noise=None if problem.noise is None else narrowed("the noise levels", problem.noise, dtype),
        optimum=cast(optimum),
        controls=cast(controls),
        optimal_loss=cast(optimal_loss),
        record_weights=cast(record_weights),
        evaluation={} if means else client_batches(problem, spec, cast(p)),
        test_evaluation={} if means else test_batches(problem, spec, dtype),
        shares=p if spec.keeps else None,
    )


def _initial_state(config: RunConfig, spec: Spec, rows: int, at_work: int | None) -> State:
    problem, dtype, x = config.problem, config.precision, config.x0
    x = problem.params if x is None else x
    flat = isinstance(x, (np.ndarray, jax.Array)) and x.shape == (problem.dim,)
    if not flat and Layout.of(x) != problem.layout:
        raise InputError(
            f"x0 must be shaped like the problem's params, or a flat vector of {problem.dim} "
            "numbers"
        )
    vector = np.asarray(x, dtype) if flat else problem.layout.flatten(x, dtype)
    if not np.isfinite(vector).all():
        raise InputError("x0 must be finite, got NaN or infinite values")
    algorithm, optimizer = config.algorithm, spec.server_optimizer
    means = {field for field, _ in algorithm.means}
    begun = algorithm.init(vector)
    memory: Any = algorithm.memory(vector)
    server = type(begun)(
        *(
            np.asarray(value, np.float64 if field in means else dtype)
            for field, value in zip(begun._fields, begun, strict=True)
        )
    )
    buffers = jax.tree.map(lambda a: narrowed("the state", a, dtype), problem.state)

    def table(record: Any, dtype: Any, rows: int = rows) -> Any:
        """Return a view: rows are written where a run needs them."""
        return jax.tree.map(
            lambda a: np.broadcast_to(np.asarray(a, dtype), (rows, *np.shape(a))), record
        )

    return State(
        server=server,
        memory=table(memory, dtype),
        mean=tuple(
            np.broadcast_to(np.asarray(getattr(memory, of), np.float64), problem.dim)
            for _, of in algorithm.means
        ),
        scale=np.zeros((), dtype),
        round=np.int32(0),
        done=np.bool_(False),
        optimizer=None if optimizer is None else jax.tree.map(np.asarray, optimizer.init(vector)),
        heard_at=np.zeros(rows, np.int32) if spec.ages else None,
        errors={name: table(np.zeros(problem.dim), dtype) for name in spec.errors} or None,
        own=table(algorithm.own(vector), dtype),
        buffers=None if spec.local_buffers else buffers,
        own_buffers=table(buffers, None) if spec.local_buffers else None,
        guard=None if spec.filter is None else initial_guard(spec, rows, dtype),
        sent=None if at_work is None else table(server, dtype, rows=at_work),
    )

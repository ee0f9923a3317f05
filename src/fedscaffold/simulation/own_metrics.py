"""User-defined metrics: functions of the model and a data set, on all data or client by client.

Functions never see padded data. For a metric by client, clients with equally many records are
vectorised, so each distinct number of records is compiled separately. Functions that JAX cannot
trace are called on the host, between chunks of rounds, which end at the rounds to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.metrics import ALWAYS, METRICS, Metric, Stop, metric
from fedscaffold.precision import narrowed
from fedscaffold.problems.batches import bound
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.problems.records import counted, joined
from fedscaffold.problems.rewriting import as_products
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.evaluation_batches import EVALUATION_BYTES
from fedscaffold.simulation.sharding import sum_over_devices as over_devices
from fedscaffold.simulation.spec import Array, Federation, Measure, Spec, State
from fedscaffold.simulation.table_rows import take_rows

__all__ = ["Data", "Group", "OnHost", "OwnMetrics", "evaluate_compiled", "own_metrics"]


class Group(NamedTuple):
    """Clients with data sets of one size, in a table with `width` per row, padded with N."""

    client: Array
    """(rows, width) client numbers."""
    first: Array
    """(rows, width) first record of each client."""
    place: Array
    """(size,) 0, 1, ..., size - 1; None if all clients share one data set."""


class Data(NamedTuple):
    """Data of a compiled metric."""

    records: Any
    """One data set, or those of all clients concatenated; None for the training records."""
    groups: list[Group] | None = None
    weights: Array = None
    """(N,) weights p_i."""


class OnHost(NamedTuple):
    """The metrics that are evaluated on the host, with NumPy arrays."""

    measures: tuple[Measure, ...]
    data: tuple[Callable[[int], Any], ...]
    """For each metric, (client) -> data set; constant if it is not by client."""
    places: tuple[tuple[int, ...], ...]
    """For each metric, its columns in the table of metrics."""
    algorithm: Algorithm
    layout: Layout
    weights: NDArray[np.float64]
    stop: tuple[Stop, int, float] | None
    """Stop condition, its column and the target, if it is on one of these metrics."""

    def fill(self, state: State, rows: NDArray[Any]) -> bool:
        """Write a state's metrics into the last row; return whether the target is reached."""
        for measure, data, places in zip(self.measures, self.data, self.places, strict=True):
            rows[-1, list(places)] = self.values(measure, data, state)
        if self.stop is None:
            return False
        stop, place, target = self.stop
        return bool(stop.met(rows[-1, place], target))

    def values(self, measure: Measure, data: Callable[[int], Any], state: State) -> list[float]:
        """Return the values of a metric's columns."""
        x, buffers = np.asarray(state.x), jax.tree.map(np.asarray, state.buffers)
        if state.own_buffers is not None:
            rows = jax.tree.map(np.asarray, state.own_buffers)
            buffers = jax.tree.map(lambda a: _like(np, np.tensordot(self.weights, a, 1), a), rows)
        if not measure.summary:
            return [evaluate_on_host(measure, self.layout.unflatten(x), data(0), buffers)]
        each = np.zeros(len(self.weights))
        for i in range(len(each)):
            if state.own_buffers is not None:
                buffers = jax.tree.map(lambda a: a[i], rows)  # noqa: B023
            own = jax.tree.map(lambda a: np.asarray(a[i]), state.own)  # noqa: B023
            model = self.algorithm.personal(x, own) if measure.personal else x
            each[i] = evaluate_on_host(measure, self.layout.unflatten(model), data(i), buffers)
        return [float(summarise(np, one, each, self.weights)) for one in measure.summary]


class OwnMetrics(NamedTuple):
    """The user-defined metrics of a run."""

    measures: tuple[Measure, ...] = ()
    data: tuple[Data, ...] = ()
    """Data of the compiled metrics."""
    host: tuple[Callable[[int], Any], ...] = ()
    """Data of the metrics evaluated on the host."""
    rises: dict[str, bool | None] = {}  # noqa: RUF012 (never changed)
    """By column, whether larger is better; None if unspecified."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the order given."""
        return tuple(column for measure in self.measures for column in measure.columns)

    def on_host(self, config: RunConfig, spec: Spec, target: float) -> OnHost | None:
        """Return what the engine calls between chunks of rounds; None without host metrics."""
        called = tuple(measure for measure in self.measures if not measure.compiled)
        if not called:
            return None
        places = tuple(tuple(map(spec.metrics.index, measure.columns)) for measure in called)
        stop = spec.stop
        mine = stop is not None and any(stop.metric in measure.columns for measure in called)
        goal = (
            (stop, spec.metrics.index(stop.metric), target) if stop is not None and mine else None
        )
        p = weights_of(config.problem, config.weights)
        return OnHost(called, self.host, places, config.algorithm, config.problem.layout, p, goal)


def own_metrics(config: RunConfig) -> OwnMetrics:
    """Check the user's metrics, determine which JAX can trace, and prepare their data."""
    listed = config.metrics if isinstance(config.metrics, Collection) else ()
    asked = [
        one if isinstance(one, Metric) else metric(one)
        for one in listed
        if not isinstance(one, str)
    ]
    _refuse_names(asked)
    measures, data, host = [], [], []
    for one in asked:
        _refuse(config, one)
        sets = _data_sets(config.problem, one)
        measure = _measure(config, one, sets)
        measures.append(measure)
        if measure.compiled:
            data.append(_prepare_data(config, one, sets))
        else:
            host.append(sets)
    rises = {column: one.maximize for one in asked for column in one.columns}
    return OwnMetrics(tuple(measures), tuple(data), tuple(host), rises)


def _refuse_names(asked: Sequence[Metric]) -> None:
    seen = {"round", "time", *METRICS, *ALWAYS}
    for column in (column for one in asked for column in one.columns):
        if column in seen:
            raise InputError(
                f"two metrics are called {column!r}: give yours another name, fs.metric(..., "
                "name='...')"
            )
        seen.add(column)


def _refuse(config: RunConfig, one: Metric) -> None:
    """Raise an InputError for a metric that this run cannot measure."""
    n, trained = config.problem.num_clients, isinstance(one.on, str) and one.on == "train"
    if isinstance(one.on, str) and one.on == "test" and config.problem.test is None:
        raise InputError(
            f"{one.name} is measured on test data, and {config.problem.name} has none; give on=data"
        )
    if one.by_client and isinstance(one.on, list) and len(one.on) != n:
        raise InputError(
            f"{one.name} by client needs one data set for each of the {n} clients, got "
            f"{len(one.on)}"
        )
    if one.model == "own" and not config.algorithm.has_personal:
        raise InputError(
            f"{config.algorithm.name} gives clients no models of their own to measure {one.name} "
            "on; take ditto"
        )
    if trained and config.client_state != "array":
        raise InputError(
            f"{one.name} would look at all clients in a round; with "
            f"client_state={config.client_state!r} measure it "
            "on test data or on data of your own"
        )
    if trained and not one.by_client and config.devices not in (None, 1):
        raise InputError(
            f"{one.name} looks at all clients' records together, which are spread over devices; "
            "measure it by client, "
            "or on data of your own"
        )


def _data_sets(problem: Problem, one: Metric) -> Callable[[int], Any]:
    """Return a function (client) -> data set of a metric, as NumPy arrays."""
    if isinstance(one.on, list) and one.by_client:
        each = [jax.tree.map(np.asarray, data) for data in one.on]
        return each.__getitem__
    if isinstance(one.on, str) and one.on == "train":
        records, bounds = problem.records, problem.offsets
        if not one.by_client:
            return lambda client: records
        return lambda client: jax.tree.map(
            lambda a: a[bounds[client] : bounds[client + 1]], records
        )
    same = problem.test if isinstance(one.on, str) else jax.tree.map(np.asarray, one.on)
    return lambda client: same


def _measure(config: RunConfig, one: Metric, sets: Callable[[int], Any]) -> Measure:
    """Return the `Measure` of a metric.

    Compiled if JAX can trace it, unless the user set `compiled`.
    """
    better = {
        True: "min",
        False: "max",
        None: "worst",
    }  # the worst client has the least value if larger is better
    summary = (
        tuple(better[one.maximize] if s == "worst" else s for s in one.summary)
        if one.by_client
        else ()
    )
    measure = Measure(
        one.name, one.function, one.columns, summary, one.model == "own", said=_describe(one)
    )
    dtype, buffers = config.precision, config.problem.state
    params = config.problem.layout.unflatten(
        config.problem.layout.flatten(config.problem.params, dtype)
    )
    if one.compiled is not False:
        data = _cast(sets(0), dtype)  # refuses numbers that JAX would wrap around, on the host too
        try:
            shape = jax.eval_shape(_bind_buffers(one.function, buffers), params, data)
        except Exception as error:
            if one.compiled:
                raise InputError(
                    f"JAX cannot trace {one.name}: {_first_line(error)}; leave compiled=True out"
                ) from None
        else:
            _refuse_shape(one.name, shape)
            return measure
    if jax.process_count() > 1:
        raise InputError(
            f"{one.name} is no JAX function, and several processes cannot call it; write it with "
            "jax.numpy"
        )
    measure = measure._replace(compiled=False, said=f"{measure.said}, on the host")
    try:
        evaluate_on_host(measure, params, sets(0), buffers)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{one.name} fails on the starting model: {_first_line(error)}") from error
    return measure


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _refuse_shape(name: str, result: Any) -> None:
    single = jax.tree_util.all_leaves([result])
    if not single or result.shape != ():
        got = f"shape {result.shape}" if single else f"a {type(result).__name__}"
        raise InputError(f"{name}(params, data) must be one number, got {got}")


def evaluate_on_host(measure: Measure, params: Any, data: Any, buffers: Any = None) -> float:
    """Evaluate a metric on the host and check that it is one number."""
    value = _bind_buffers(measure.function, buffers)(params, data)
    try:
        number = np.asarray(value)
        if number.shape == () and number.dtype.kind in "biuf":
            return float(number)
    except ValueError:  # rows of unlike lengths
        pass
    raise InputError(f"{measure.name}(params, data) must be one number, got {checks.shown(value)}")


def _describe(one: Metric) -> str:
    """Describe the data that a metric is measured on."""
    own = ", with its own model" if one.model == "own" else ""
    if isinstance(one.on, str) and one.on == "train":
        return (
            f"all records of each client at once{own}"
            if one.by_client
            else "all clients' records together"
        )
    what = "the test data" if isinstance(one.on, str) else "the user's own data"
    each = " of each client" if isinstance(one.on, list) and one.by_client else ""
    return f"{what}{each} at once{own}"


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda a: narrowed("a metric's data", a, dtype), tree)


def _prepare_data(config: RunConfig, one: Metric, sets: Callable[[int], Any]) -> Data:
    """Return the data of a compiled metric, in the run's precision."""
    problem, dtype = config.problem, config.precision
    trained = isinstance(one.on, str) and one.on == "train"
    if not one.by_client:
        return Data(None if trained else _cast(sets(0), dtype))
    clients, weights = (
        np.arange(problem.num_clients),
        weights_of(problem, config.weights).astype(dtype),
    )
    model = problem.dim * np.dtype(dtype).itemsize
    if not trained and not isinstance(one.on, list):
        data = _cast(sets(0), dtype)
        width = max(1, EVALUATION_BYTES // (_bytes(data) + model))
        return Data(
            data,
            [_group(clients, np.zeros_like(clients), None, problem.num_clients, width)],
            weights,
        )
    records, offsets = (problem.records, problem.offsets) if trained else _concatenate(one)
    counts = np.diff(offsets)
    row = _bytes(records) // max(1, int(offsets[-1]))
    groups = []
    for size in np.unique(counts).tolist():
        width = max(1, EVALUATION_BYTES // (size * row + model))
        here = clients[counts == size]
        groups.append(_group(here, offsets[here], size, problem.num_clients, width))
    return Data(None if trained else _cast(records, dtype), groups, weights)


def _concatenate(one: Metric) -> tuple[Any, NDArray[np.int64]]:
    """Return the concatenated data sets of all clients and their offsets."""
    return joined(one.on), np.concatenate([[0], np.cumsum(counted(one.on))])


def _bytes(tree: Any) -> int:
    return sum(a.size * a.itemsize for a in jax.tree.leaves(tree))


def _group(
    clients: NDArray[Any], first: NDArray[Any], size: int | None, ghost: int, width: int
) -> Group:
    width = min(len(clients), width)
    rows = -(-len(clients) // width)

    def laid(column: NDArray[Any], filling: int) -> NDArray[np.int32]:
        table = np.full(rows * width, filling, np.int32)
        table[: len(column)] = column
        return table.reshape(rows, width)

    place = None if size is None else np.arange(size, dtype=np.int32)
    return Group(laid(clients, ghost), laid(first, 0), place)


def _like(xp: Any, mean: Array, rows: Array) -> Array:
    """Return a mean with the type of its rows; means of whole numbers are rounded."""
    return (mean if jnp.issubdtype(rows.dtype, jnp.floating) else xp.round(mean)).astype(rows.dtype)


def mean_buffers(spec: Spec, federation: Federation, state: State) -> Any:
    """Return the state that metrics of the common model use.

    The averaged one, or the mean of the clients' own.
    """
    if not spec.local_buffers:
        return state.buffers

    def mean(rows: Array) -> Array:
        found = over_devices(spec, jnp.tensordot(federation.weights, rows.astype(state.x.dtype), 1))
        return _like(jnp, found, rows)

    return jax.tree.map(mean, state.own_buffers)


def _bind_buffers(function: Callable[..., Any], buffers: Any) -> Callable[..., Any]:
    """Bind the state that a problem's loss updates to a metric that takes `state` by name."""
    return function if buffers is None else bound(function, state=buffers)


def evaluate_compiled(spec: Spec, federation: Federation, state: State) -> dict[str, Array]:
    """Evaluate the compiled metrics, inside the program; return their columns."""
    columns: dict[str, Array] = {}
    buffers = mean_buffers(spec, federation, state)
    compiled = [measure for measure in spec.own if measure.compiled]
    for measure, data in zip(compiled, federation.measured, strict=True):
        records = federation.records if data.records is None else data.records
        if not measure.summary:
            function = as_products(_bind_buffers(measure.function, buffers))
            values = [function(spec.layout.unflatten(state.x), records)]
        else:
            each = _evaluate_clients(spec, federation, state, measure, records, data, buffers)
            values = [summarise(jnp, one, each, data.weights) for one in measure.summary]
        columns |= {
            column: jnp.asarray(value, state.x.dtype)
            for column, value in zip(measure.columns, values, strict=True)
        }
    return columns


def _evaluate_clients(
    spec: Spec,
    federation: Federation,
    state: State,
    measure: Measure,
    records: Any,
    data: Data,
    buffers: Any,
) -> Array:
    """Return the (N,) values of the clients, each with its own buffers where it has some."""
    here = 0 if federation.who is None else federation.who[0]  # the first client on this device

    def one(client: Array, first: Array, place: Array) -> Array:
        x, row, used = state.x, jnp.minimum(client - here, len(federation.first) - 1), buffers
        if spec.local_buffers:
            used = jax.tree.map(lambda a: a[row], state.own_buffers)
        if measure.personal:
            x = spec.algorithm.personal(x, jax.tree.map(lambda a: a[row], state.own))
        own = records
        if place is not None:
            own = jax.tree.map(lambda a: take_rows(a, first + place), records)
        function = as_products(_bind_buffers(measure.function, used))
        return jnp.asarray(function(spec.layout.unflatten(x), own), x.dtype)

    values = jnp.zeros(len(data.weights), state.x.dtype)
    for group in data.groups or ():

        def row(
            values: Array, entries: tuple[Array, Array], place: Array = group.place
        ) -> tuple[Array, None]:
            client, first = entries
            new = jax.vmap(lambda c, f: one(c, f, place))(client, first)
            return values.at[client].set(new, mode="drop"), None

        values, _ = jax.lax.scan(row, values, (group.client, group.first))
    return over_devices(spec, values)


def summarise(xp: Any, what: str | float, values: Array, weights: Array) -> Array:
    """Return a statistic of the clients' values: "mean", "min", "max" or a quantile.

    >>> values, p = np.array([1.0, 2.0, 6.0]), np.array([0.5, 0.5, 0.0])
    >>> [float(summarise(np, what, values, p)) for what in ("mean", "max", 0.5)]
    [1.5, 6.0, 2.0]
    """
    if what == "mean":
        return weights @ xp.where(weights > 0, values, 0)
    if what == "min":
        return values.min()
    return values.max() if what == "max" else xp.quantile(values, what)

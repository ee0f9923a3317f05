"""Evaluation inside the compiled program: one row of metrics per round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedscaffold.problems.batches import Kind, value
from fedscaffold.problems.problem import Problem
from fedscaffold.problems.rewriting import patch_bytes
from fedscaffold.simulation.evaluation_batches import EVALUATION_BYTES, sum_over
from fedscaffold.simulation.local import gradient
from fedscaffold.simulation.own_metrics import evaluate_compiled, mean_buffers
from fedscaffold.simulation.sharding import sum_over_devices
from fedscaffold.simulation.spec import Array, Federation, Spec, State
from fedscaffold.simulation.staleness import ages, decay_memory

__all__ = ["ON_RECORDS", "SHARES", "default_metrics", "evaluate", "sum_records"]

Totals = dict[str, Any]
ON_RECORDS = {"loss", "gap", "grad_norm", "accuracy"}  # metrics that are sums over records
SHARES = 16  # of the records, for several cores to sum; their number shows in the bits


def default_metrics(problem: Problem) -> tuple[str, ...]:
    """Return the default metrics of a problem."""
    accuracy = problem.functions.accuracy is not None
    measured = "loss" if problem.functions.has_loss else "grad_norm"
    return (
        measured,
        *(["accuracy"] if accuracy else []),
        *(["distance"] if problem.facts.optimum is not None else []),
    )


def evaluate(
    spec: Spec,
    federation: Federation,
    state: State,
    drift: Array,
    due: Array,
    totals: Totals | None = None,
) -> tuple[State, Array]:
    """Measure a round.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        state: The state after the round.
        drift: Drift of its cohort.
        due: Whether the metrics are evaluated in this round.
        totals: Those of `sum_records`, if they are known.

    Returns:
        The state, which says whether the run has ended, and the round's row of metrics, NaN if it
        is not due.
    """
    names = spec.metrics
    unknown = jnp.full(len(names), jnp.nan, state.x.dtype)
    measured = unknown
    if names != ("residual",):
        measured = jax.lax.cond(
            due, lambda: _evaluate_row(spec, federation, state, totals), lambda: unknown
        )
    # the distance of the server's fields from the running means they must equal
    residual = jnp.zeros((), state.x.dtype)
    if spec.algorithm.means:
        with jax.enable_x64(True):
            pairs = zip(spec.algorithm.means, state.mean, strict=True)
            off = [getattr(state.server, field) - mean for (field, _), mean in pairs]
        residual = jnp.linalg.norm(jnp.concatenate([a.astype(state.x.dtype) for a in off]))
    cheap = {"drift": drift, "residual": residual}
    row = jnp.stack([cheap.get(name, measured[j]) for j, name in enumerate(names)])
    ours = row
    if spec.own:  # user-defined metrics may be NaN
        ours = jnp.stack([row[j] for j, name in enumerate(names) if name not in spec.own_columns])
    broken = ~jnp.isfinite(state.x).all()
    # the end of a private run is seen by all, and must not tell of a metric that nothing noised
    if spec.privacy is None and spec.message_privacy is None:
        broken = broken | (due & ~jnp.isfinite(ours).all())
    done = state.done | broken
    if spec.stop is not None:
        done = done | spec.stop.met(row[names.index(spec.stop.metric)], federation.target)
    return state._replace(done=done), row


def sum_records(
    spec: Spec, federation: Federation, state: State, share: Array | None = None
) -> Totals:
    """Return the weighted sums over records that the metrics need, by the function summed.

    Args:
        spec: Static description of the program.
        federation: The clients' data.
        state: The state to measure.
        share: Which of `SHARES` equal parts of the records to sum over; None for all of them.
            Functions that are no means over records are part of the first.
    """
    leaves = spec.layout.leaves(state.x)
    params, buffers = spec.layout.tree(leaves), state.buffers
    if spec.local_buffers:
        buffers = mean_buffers(spec, federation, state)
    kinds, asked = spec.kinds, set(spec.metrics)

    def total(
        records: Any, weights: Array, batches: Any, kind: Kind, measure: Callable[..., Any]
    ) -> Any:
        if kind == "mean":
            return _sum_over_records(records, weights, measure, share)
        whole = partial(sum_over, records, batches[kind], kind, measure)
        if share is None:
            return whole()
        shape = jax.eval_shape(whole)
        return jax.lax.cond(
            share == 0,
            whole,
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape),
        )

    def of_batch(batch: Any, weights: Array) -> Any:
        return gradient(spec, leaves, batch, weights, buffers=buffers, train=False)[0]

    measured: dict[str, tuple[Kind, Callable[..., Any]]] = {}
    tested: dict[str, tuple[Kind, Callable[..., Any]]] = {}
    if asked & {"loss", "gap"}:
        loss = partial(value, spec.functions.loss, kinds.loss, params, state=buffers)
        measured["loss"] = kinds.loss, loss
    if "grad_norm" in asked:
        measured["gradient"] = kinds.gradient, of_batch
    if "accuracy" in asked:
        assert spec.functions.accuracy is not None
        right = partial(value, spec.functions.accuracy, kinds.accuracy, params, state=buffers)
        (measured if federation.test is None else tested)["accuracy"] = kinds.accuracy, right
    data = federation.records, federation.record_weights, federation.evaluation
    totals: Totals = {name: total(*data, *one) for name, one in measured.items()}
    if spec.mesh is not None and totals:
        totals = sum_over_devices(spec, totals)
    if tested:  # every device has all test data
        size = len(jax.tree.leaves(federation.test)[0])
        data = federation.test, jnp.full(size, 1 / size, state.x.dtype), federation.test_evaluation
        totals |= {name: total(*data, *one) for name, one in tested.items()}
    return totals


def _evaluate_row(spec: Spec, federation: Federation, state: State, totals: Totals | None) -> Array:
    sums = sum_records(spec, federation, state) if totals is None else totals

    def grad_norm() -> Array:
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in sums["gradient"]))

    measures: dict[str, Callable[[], Array]] = {
        "loss": lambda: sums["loss"],
        "accuracy": lambda: sums["accuracy"],
        "grad_norm": grad_norm,
        "gap": lambda: sums["loss"] - federation.optimal_loss,
        "distance": lambda: jnp.linalg.norm(state.x - federation.optimum),
        "control_error": lambda: _control_error(spec, federation, state),
        "age": lambda: sum_over_devices(
            spec, federation.weights @ ages(state).astype(state.x.dtype)
        ),
    }
    unknown = jnp.full((), jnp.nan, state.x.dtype)  # filled in by the host or by `evaluate`
    own = evaluate_compiled(spec, federation, state) if spec.own else {}
    return jnp.stack(
        [measures[name]() if name in measures else own.get(name, unknown) for name in spec.metrics]
    )


def _control_error(spec: Spec, federation: Federation, state: State) -> Array:
    held = jnp.zeros_like(federation.controls)
    if spec.algorithm.means:
        rows = getattr(state.memory, spec.algorithm.means[0][1])
        held = rows
        if spec.policy.rate is not None:
            with jax.enable_x64(True):
                held = decay_memory(spec, state, rows).astype(state.x.dtype)
    return jnp.sqrt(
        sum_over_devices(
            spec, federation.weights @ jnp.sum((held - federation.controls) ** 2, axis=1)
        )
    )


def _sum_over_records(
    records: Any,
    weights: Array,
    measure: Callable[[Any, Array], Any],
    share: Array | None = None,
) -> Any:
    """Sum `measure(batch, weights)` over all records in chunks, or over a share of the chunks.

    The last chunk may overlap, with weight 0.
    """
    total = len(weights)
    row_bytes = sum(a.dtype.itemsize * a.size // total for a in jax.tree.leaves(records))
    one = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), (records, weights)
    )
    stretch = max(1, min(total, EVALUATION_BYTES // max(1, row_bytes + patch_bytes(measure, *one))))

    def part(start: Array | int, fresh: Array | int) -> Any:
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=stretch)
        again = jnp.arange(stretch) < fresh
        return measure(jax.tree.map(cut, records), jnp.where(again, 0, cut(weights)))

    def add(i: Array, sums: Any) -> Any:
        start = jnp.minimum(i * stretch, total - stretch)
        return jax.tree.map(jnp.add, sums, part(start, i * stretch - start))

    chunks = -(-total // stretch)
    if share is None and chunks == 1:
        return part(0, 0)
    if share is None:
        return jax.lax.fori_loop(1, chunks, add, part(0, 0))
    shape = jax.eval_shape(part, 0, 0)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)
    first, end = share * chunks // SHARES, (share + 1) * chunks // SHARES
    return jax.lax.fori_loop(first, end, add, nothing)

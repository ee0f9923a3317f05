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

__all__ = ["default_metrics", "evaluate"]


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
    spec: Spec, federation: Federation, state: State, drift: Array, due: Array
) -> tuple[Array, Array]:
    """Return one row of metrics, NaN if the round is not due, and whether the run has ended."""
    names = spec.metrics
    unknown = jnp.full(len(names), jnp.nan, state.x.dtype)
    measured = unknown
    if names != ("residual",):
        measured = jax.lax.cond(
            due, lambda: _evaluate_row(spec, federation, state), lambda: unknown
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
    broken = ~jnp.isfinite(state.x).all() | (due & ~jnp.isfinite(ours).all())
    if spec.stop is None:
        return row, broken
    return row, broken | spec.stop.met(row[names.index(spec.stop.metric)], federation.target)


def _evaluate_row(spec: Spec, federation: Federation, state: State) -> Array:
    leaves = spec.layout.leaves(state.x)
    params, buffers = spec.layout.tree(leaves), state.buffers
    if spec.local_buffers:
        buffers = mean_buffers(spec, federation, state)
    kinds = spec.kinds

    def everywhere(kind: Kind, measure: Callable[[Any, Array], Any]) -> Any:
        if kind == "mean":
            total = _sum_over_records(federation.records, federation.record_weights, measure)
        else:
            total = sum_over(federation.records, federation.evaluation[kind], kind, measure)
        return total if spec.mesh is None else sum_over_devices(spec, total)

    def loss() -> Array:
        of_batch = partial(value, spec.functions.loss, kinds.loss, params, state=buffers)
        return everywhere(kinds.loss, of_batch)

    def accuracy() -> Array:
        assert spec.functions.accuracy is not None
        kind = kinds.accuracy
        of_batch = partial(value, spec.functions.accuracy, kind, params, state=buffers)
        if federation.test is None:
            return everywhere(kind, of_batch)
        if kind != "mean":
            return sum_over(federation.test, federation.test_evaluation[kind], kind, of_batch)
        size = len(jax.tree.leaves(federation.test)[0])
        return _sum_over_records(federation.test, jnp.full(size, 1 / size, state.x.dtype), of_batch)

    def grad_norm() -> Array:
        def of_batch(batch: Any, weights: Array) -> Any:
            return gradient(spec, leaves, batch, weights, buffers=buffers, train=False)[0]

        total = everywhere(kinds.gradient, of_batch)
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in total))

    measures: dict[str, Callable[[], Array]] = {
        "loss": loss,
        "accuracy": accuracy,
        "grad_norm": grad_norm,
        "gap": lambda: loss() - federation.optimal_loss,
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


def _sum_over_records(records: Any, weights: Array, measure: Callable[[Any, Array], Any]) -> Any:
    """Sum `measure(batch, weights)` over all records in chunks.

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

    return jax.lax.fori_loop(1, -(-total // stretch), add, part(0, 0))

"""Measuring a round: one row of metrics, inside the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedscaffold.metrics import met
from fedscaffold.problems.batches import Kind, value
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.aging import ages, faded
from fedscaffold.simulation.double import in_double
from fedscaffold.simulation.evaluation_batches import EVALUATION_BYTES, sum_over
from fedscaffold.simulation.local import gradient
from fedscaffold.simulation.mesh import joined
from fedscaffold.simulation.spec import Array, Federation, Settings, Spec, State

__all__ = ["evaluate", "usual"]


def usual(problem: Problem) -> tuple[str, ...]:
    """The metrics that are measured unless others are asked for."""
    accuracy = problem.functions.accuracy is not None
    measured = "loss" if problem.functions.has_loss else "grad_norm"
    return (measured, *(["accuracy"] if accuracy else []), *(["distance"] if problem.facts.optimum is not None else []))


def evaluate(
    spec: Spec, federation: Federation, settings: Settings, state: State, drift: Array, every: Array
) -> tuple[Array, Array]:
    """Return one row of metrics and whether the run is over; rounds that are not due have NaN."""
    names = spec.metrics
    due = state.round % every == 0
    unknown = jnp.full(len(names), jnp.nan, state.x.dtype)
    measured = (
        jax.lax.cond(due, lambda: _row(spec, federation, state), lambda: unknown) if names != ("residual",) else unknown
    )
    cheap = {"drift": drift, "residual": _residual(state)}
    row = jnp.stack([cheap.get(name, measured[j]) for j, name in enumerate(names)])
    broken = ~jnp.isfinite(state.x).all() | (due & ~jnp.isfinite(row).all())
    if spec.stop is None:
        return row, broken
    return row, broken | met(spec.stop, row[names.index(spec.stop)], settings.target)


def _residual(state: State) -> Array:
    if state.mean is None:
        return jnp.zeros((), state.x.dtype)
    return jnp.linalg.norm(in_double(jnp.subtract)(state.c, state.mean).astype(state.x.dtype))


def _row(spec: Spec, federation: Federation, state: State) -> Array:
    leaves = spec.layout.leaves(state.x)
    params = spec.layout.tree(leaves)

    kinds = spec.kinds

    def everywhere(kind: Kind, measure: Callable[[Any, Array], Any]) -> Any:
        if kind == "mean":
            return joined(spec, _over(federation.records, federation.record_weights, measure))
        return joined(spec, sum_over(federation.records, federation.evaluation[kind], kind, measure))

    def loss() -> Array:
        of_batch = partial(value, spec.functions.loss, kinds.loss, params)
        return everywhere(kinds.loss, of_batch)

    def accuracy() -> Array:
        assert spec.functions.accuracy is not None
        of_batch, kind = partial(value, spec.functions.accuracy, kinds.accuracy, params), kinds.accuracy
        if federation.test is None:
            return everywhere(kind, of_batch)
        if kind != "mean":
            return sum_over(federation.test, federation.test_evaluation[kind], kind, of_batch)
        size = len(jax.tree.leaves(federation.test)[0])
        return _over(federation.test, jnp.full(size, 1 / size, state.x.dtype), of_batch)

    def grad_norm() -> Array:
        total = everywhere(kinds.gradient, lambda batch, w: gradient(spec, leaves, batch, w))
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in total))

    measures: dict[str, Callable[[], Array]] = {
        "loss": loss,
        "accuracy": accuracy,
        "grad_norm": grad_norm,
        "gap": lambda: loss() - federation.optimal_loss,
        "distance": lambda: jnp.linalg.norm(state.x - federation.optimum),
        "control_error": lambda: _control_error(spec, federation, state),
        "age": lambda: joined(spec, federation.weights @ ages(state).astype(state.x.dtype)),
    }
    nothing = jnp.zeros((), state.x.dtype)
    return jnp.stack([measures[name]() if name in measures else nothing for name in spec.metrics])


def _control_error(spec: Spec, federation: Federation, state: State) -> Array:
    held = jnp.zeros_like(federation.controls) if state.c_i is None else faded(spec, state, state.c_i)
    return jnp.sqrt(joined(spec, federation.weights @ jnp.sum((held - federation.controls) ** 2, axis=1)))


def _over(records: Any, weights: Array, measure: Callable[[Any, Array], Any]) -> Any:
    """Sum `measure(batch, weights)` over all records, a stretch of them at a time; the last stretch may overlap."""
    total = len(weights)
    row_bytes = sum(a.dtype.itemsize * a.size // total for a in jax.tree.leaves(records))
    stretch = max(1, min(total, EVALUATION_BYTES // max(1, row_bytes)))

    def part(start: Array | int, fresh: Array | int) -> Any:
        def cut(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, start, stretch)

        again = jnp.arange(stretch) < fresh
        return measure(jax.tree.map(cut, records), jnp.where(again, 0, cut(weights)))

    def add(i: Array, sums: Any) -> Any:
        start = jnp.minimum(i * stretch, total - stretch)
        return jax.tree.map(jnp.add, sums, part(start, i * stretch - start))

    return jax.lax.fori_loop(1, -(-total // stretch), add, part(0, 0))

"""Learner for JAX: a loss on any pytree of parameters, as in simulation.

    def learner(settings):
        return JaxLearner(loss, params, data, precision=settings.precision)

`loss(params, batch)` returns the mean loss over a batch. `data(site)` returns the site's records: a
pytree of arrays with one row per record, as in `fs.Problem`. A loss with an argument named `key`
gets a random key at every local step, derived from the site's seed of the round, and None in
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from fedscaffold.checks import InputError, one_number, taken_by_name
from fedscaffold.deploy.arrays_client import descend, one_row_each
from fedscaffold.deploy.client import Site, Trained, Work
from fedscaffold.deploy.schema import Array, Schema

__all__ = ["JaxLearner"]

Tree: TypeAlias = Any
STEPS, AT_X = 2, 3  # streams of a site's key, as in simulation: local steps, gradient at x


class JaxLearner:
    """Local training with a JAX loss.

    Args:
        loss: (params, batch) -> mean loss over a batch; may take `weights` and `key` as well.
        params: The initial model, a pytree of arrays.
        data: site -> the site's records, a pytree of arrays with one row per record.
        metrics: By name: (params, batch) -> a further metric.
        test: site -> the records to evaluate on; `data` by default.
        precision: float32 or float64.

    >>> loss = lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2).mean()
    >>> learner = JaxLearner(loss, {"w": np.zeros(3)}, lambda site: (np.ones((4, 3)), np.ones(4)))
    >>> learner.schema.names, learner.site("north").records
    (("['w']",), 4)
    """

    def __init__(
        self,
        loss: Callable[[Tree, Tree], Any],
        params: Tree,
        data: Callable[[str], Tree],
        *,
        metrics: dict[str, Callable[[Tree, Tree], Any]] | None = None,
        test: Callable[[str], Tree] | None = None,
        precision: str = "float32",
    ) -> None:
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(params)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        self.schema = Schema.of(arrays, precision)
        self.start = self.schema.flatten(arrays)
        self.buffers: dict[str, Array] = {}
        self.data, self.test = data, test or data
        self.loss, self.params = loss, params
        self._bound_loss = _bind_arguments("loss", loss)
        self.precise = precision == "float64"
        self.random = "key" in taken_by_name(loss)
        measures = {"loss": self._loss} | {
            name: _bind_arguments(name, function) for name, function in (metrics or {}).items()
        }
        self._measures = {name: self._compile(function) for name, function in measures.items()}
        self._gradient = self._compile(jax.grad(self._loss))

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = jax.tree.map(np.asarray, self.data(name))
        number = one_row_each(name, jax.tree.leaves(records))

        def train(work: Work) -> Trained:
            def gradient(y: Array, rows: Array | None, step: int | None) -> Array:
                batch = records if rows is None else jax.tree.map(lambda a: a[rows], records)
                key = step_key(work.seed, step) if self.random else None
                leaves = jax.tree.leaves(self._gradient(y, batch, key))
                return np.concatenate(
                    [np.asarray(leaf, self.schema.dtype).ravel() for leaf in leaves]
                )

            return descend(work, number, gradient)

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            held_out = self.test(name)
            return {
                metric: float(measure(x, held_out)) for metric, measure in self._measures.items()
            }

        return Site(number, train, evaluate)

    def _loss(self, params: Tree, batch: Tree, key: Any = None) -> Any:
        value = self._bound_loss(params, batch, key)
        one_number("loss(params, batch)", np.shape(value))
        return value

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of parameters as one of the flat vector."""

        def of_vector(y: Any, batch: Tree, key: Any) -> Any:
            return function(
                jax.tree.unflatten(self.structure, list(self.schema.unflatten(y).values())),
                batch,
                key,
            )

        compiled = jax.jit(of_vector)

        def call(y: Array, batch: Tree, key: Any = None) -> Any:
            with jax.enable_x64(self.precise):
                return compiled(y, batch, key)

        return call


def step_key(seed: int, step: int | None) -> Any:
    """Return the random key of a local step, counted from 0.

    A step of None stands for the gradient at x over all data.
    """
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    site = jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")
    if step is None:
        return jax.random.fold_in(site, AT_X)
    return jax.random.fold_in(jax.random.fold_in(site, STEPS), step)


def _bind_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (params, batch, key) that passes on only what `function` takes.

    Batches of a site contain no padding, so the weights are equal.
    """
    taken = taken_by_name(function, name)
    weighed, random = "weights" in taken, "key" in taken
    if more := taken & {"state", "train"}:
        raise InputError(
            f"{name} takes {' and '.join(sorted(more))}, which JAX sites do not keep: deploy a "
            "torch module, whose buffers are kept, or a model without running statistics"
        )

    def called(params: Tree, batch: Tree, key: Any = None) -> Any:
        size = len(jax.tree.leaves(batch)[0])
        dtype = jax.numpy.result_type(*jax.tree.leaves(params))
        even = {"weights": jax.numpy.full(size, 1 / size, dtype)} if weighed else {}
        return function(params, batch, **even, **({"key": key} if random else {}))

    return called

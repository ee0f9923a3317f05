"""A learner for JAX: a loss on any pytree of parameters, rows of arrays as data; the same loss as in simulation.

    def learner(settings):
        return JaxLearner(loss, params, data, precision=settings.precision)

`loss(params, batch)` is the mean loss over a batch, `data(site)` the site's records: a tree of arrays with one row a
record, as `fs.Problem` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from fedscaffold.checks import InputError, one_number, takes_weights
from fedscaffold.deploy.arrays_client import descend
from fedscaffold.deploy.client import Site, Trained, Work
from fedscaffold.deploy.schema import Array, Schema

__all__ = ["JaxLearner"]

Tree: TypeAlias = Any


class JaxLearner:
    """A JAX loss and its parameters; see the module.

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
        self.loss, self.params, self.clients = loss, params, data
        metrics = {name: _on_batch(name, function) for name, function in (metrics or {}).items()}
        self._of_batch = _on_batch("loss", loss)
        self.precise = precision == "float64"
        measures = {"loss": self._loss, **metrics}
        self._measures = {name: self._compiled(function) for name, function in measures.items()}
        self._gradient = self._compiled(jax.grad(self._loss))
        self.metrics = metrics

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = jax.tree.map(np.asarray, self.data(name))
        sizes = {len(leaf) for leaf in jax.tree.leaves(records)}
        if len(sizes) != 1 or sizes == {0}:
            raise InputError(f"the arrays of {name} must have one row a record each, got lengths {sorted(sizes)}")
        number = sizes.pop()

        def gradient(y: Array, rows: Array | None) -> Array:
            batch = records if rows is None else jax.tree.map(lambda a: a[rows], records)
            leaves = jax.tree.leaves(self._gradient(y, batch))
            return np.concatenate([np.asarray(leaf, self.schema.dtype).ravel() for leaf in leaves])

        def train(work: Work) -> Trained:
            return descend(work, number, gradient)

        return Site(number, train, lambda x, buffers: self._evaluate(x, self.test(name)))

    def _loss(self, params: Tree, batch: Tree) -> Any:
        value = self._of_batch(params, batch)
        one_number("loss(params, batch)", np.shape(value))
        return value

    def _compiled(self, function: Callable[[Tree, Tree], Any]) -> Callable[[Array, Tree], Any]:
        """A function of parameters as one of the flat vector, compiled, in the learner's precision."""

        def of_vector(y: Any, batch: Tree) -> Any:
            return function(jax.tree.unflatten(self.structure, list(self.schema.unflatten(y).values())), batch)

        compiled = jax.jit(of_vector)

        def call(y: Array, batch: Tree) -> Any:
            with jax.enable_x64(self.precise):
                return compiled(y, batch)

        return call

    def _evaluate(self, x: Array, records: Tree) -> dict[str, float]:
        return {name: float(measure(x, records)) for name, measure in self._measures.items()}


def _on_batch(name: str, function: Callable[..., Any]) -> Callable[[Tree, Tree], Any]:
    """A function of (params, batch); one that takes `weights` is given even ones, as a site's batches are real."""
    if not takes_weights(name, function):
        return function

    def weighed(params: Tree, batch: Tree) -> Any:
        size = len(jax.tree.leaves(batch)[0])
        dtype = jax.numpy.result_type(*jax.tree.leaves(params))
        return function(params, batch, weights=jax.numpy.full(size, 1 / size, dtype))

    return weighed

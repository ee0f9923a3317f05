"""Learner for JAX: a loss on any pytree of parameters, as in simulation.

    def learner(settings):
        return JaxLearner(loss, params, data, precision=settings.precision)

`loss(params, batch)` returns the mean loss over a batch. `data(site)` returns the site's records: a
pytree of arrays with one row per record, as in `fs.Problem`. As there, a loss may take by name

key        A random key at every local step, derived from the site's seed of the round; None in
           evaluation.
state      Arrays that gradients do not train, such as running statistics. The loss then returns a
           pair: its value and the new state. They are sent as buffers, or kept at the site,
           by the setting `local.buffers`.
train      True in training, False in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import numpy as np

from fedscaffold.checks import InputError, one_number, taken_by_name
from fedscaffold.deploy.arrays_client import descend, one_row_each
from fedscaffold.deploy.client import Site, Trained, Work
from fedscaffold.deploy.schema import Array, Schema
from fedscaffold.model_functions import bound, even_weights, measured, new_state, refuse_state
from fedscaffold.precision import narrowed

__all__ = ["JaxLearner"]

Tree: TypeAlias = Any
COMPARED = 16  # records on which the gradient is compared with the mean over single ones
STEPS, AT_X = 2, 3  # streams of a site's key, as in simulation: local steps, gradient at x


class JaxLearner:
    """Local training with a JAX loss.

    Args:
        loss: (params, batch) -> mean loss over a batch; may take `weights`, `key`, `state` and
            `train` as well.
        params: The initial model, a pytree of arrays.
        data: site -> the site's records, a pytree of arrays with one row per record.
        metrics: By name: (params, batch) -> a further metric; may take `weights`, `state` and
            `train` as well.
        test: site -> the records to evaluate on; `data` by default.
        precision: float32 or float64.
        state: The initial state, a pytree of arrays, where the loss takes one.

    >>> loss = lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2).mean()
    >>> learner = JaxLearner(loss, {"w": np.zeros(3)}, lambda site: (np.ones((4, 3)), np.ones(4)))
    >>> learner.schema.names, learner.site("north").records
    (("['w']",), 4)
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Tree,
        data: Callable[[str], Tree],
        *,
        metrics: dict[str, Callable[..., Any]] | None = None,
        test: Callable[[str], Tree] | None = None,
        precision: str = "float32",
        state: Tree | None = None,
    ) -> None:
        functions = {"loss": loss} | (metrics or {})
        self.stateful = "state" in taken_by_name(loss, "loss")
        state = None if state is None else jax.tree.map(np.asarray, state)
        refuse_state(functions, self.stateful, state, "JaxLearner")
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(params)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        kept, self.state_structure = jax.tree_util.tree_flatten_with_path(state)
        self.buffers: dict[str, Array] = {
            f"state{jax.tree_util.keystr(path)}": leaf.astype(precision)
            if leaf.dtype.kind == "f"
            else leaf
            for path, leaf in kept
        }
        self.schema = Schema.of(arrays, precision, self.buffers)
        self.start = self.schema.flatten(arrays)
        self.data, self.test = data, test or data
        self.loss, self.params = loss, params
        self.precise = precision == "float64"
        self.random = "key" in taken_by_name(loss)
        self._measures = {
            name: self._compile(_measure(name, function)) for name, function in functions.items()
        }
        self._gradient = self._compile(jax.grad(self._loss, has_aux=True))
        self._of_records = self._compile(self._record_gradients)

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = jax.tree.map(partial(self._narrow, name), self.data(name))
        number = one_row_each(name, jax.tree.leaves(records))

        def train(work: Work) -> Trained:
            if self.stateful and isinstance(work.start, tuple):
                raise InputError(
                    f"{work.algorithm.name} trains several models at once, and a loss with a "
                    "state has one state: take another algorithm"
                )
            running = _Running(self._state(work.buffers))

            def gradient(y: Array, rows: Array | None, step: int | None) -> Array:
                batch = records if rows is None else jax.tree.map(lambda a: a[rows], records)
                key = step_key(work.seed, step) if self.random else None
                slope, new = self._gradient(y, batch, running.before(step), key)
                if step is not None and y is not work.x:  # a gradient at x leaves no trace
                    running.after = new
                return np.concatenate(
                    [np.asarray(leaf, self.schema.dtype).ravel() for leaf in jax.tree.leaves(slope)]
                )

            def of_records(y: Array, rows: Array, places: Array) -> Array:
                assert work.private is not None
                room = min(work.private.at_once(y, number), number)
                padded = np.resize(rows, room)  # one shape for all batches, so one program
                batch = jax.tree.map(lambda a: a[padded], records), np.resize(places, room)
                key = step_key(work.seed, work.private.taken - 1) if self.random else None
                slopes = self._of_records(y, batch, None, key)
                return np.concatenate(
                    [np.asarray(leaf).reshape(room, -1) for leaf in jax.tree.leaves(slopes)], axis=1
                )[: len(rows)]

            trained = descend(work, number, gradient, of_records)
            return trained._replace(buffers=self._buffers(running.after))

        @cache
        def held_out() -> Tree:
            return jax.tree.map(partial(self._narrow, name), self.test(name))

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            state = self._state(buffers)
            return {
                metric: float(measure(x, held_out(), state))
                for metric, measure in self._measures.items()
            }

        return Site(number, train, evaluate, lambda: self._not_private(records, number))

    def _not_private(self, records: Tree, number: int) -> str | None:
        """Return why a record has no gradient of its own; None if it has."""
        if self.stateful:
            return "its loss updates a state from whole batches; take group or layer normalisation"
        if "weights" in taken_by_name(self.loss):
            return "its loss takes the weights of a batch; take a loss that is a mean over records"
        some = jax.tree.map(lambda a: a[: min(number, COMPARED)], records)
        x, key = self.start, step_key(0, 0) if self.random else None
        whole, _ = self._gradient(x, some, None, key)
        places = np.arange(min(number, COMPARED))
        means = jax.tree.map(
            lambda a: np.asarray(a).mean(axis=0), self._of_records(x, (some, places), None, key)
        )
        close = float(np.finfo(self.schema.dtype).eps) ** 0.5
        pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(means), strict=True)
        if not self.random and not all(np.allclose(a, b, close, close) for a, b in pairs):
            return "its loss is no mean over records; take one that is"
        return None

    def _record_gradients(self, params: Tree, batch: Tree, state: Tree, key: Any) -> Tree:
        """Return the gradient on each record, as batches of one: one row per record."""

        def one(record: Tree, place: Any) -> Tree:
            own = None if key is None else jax.random.fold_in(key, place)
            alone = jax.tree.map(lambda a: a[None], record)
            return jax.grad(self._loss, has_aux=True)(params, alone, None, own)[0]

        return jax.vmap(one)(*batch)

    def _state(self, buffers: dict[str, Array]) -> Tree:
        """Return buffers as a state."""
        return jax.tree.unflatten(self.state_structure, [buffers[name] for name in self.buffers])

    def _buffers(self, state: Tree) -> dict[str, Array]:
        """Return a state as buffers, with their types."""
        leaves = zip(self.buffers.items(), jax.tree.leaves(state), strict=True)
        return {name: np.asarray(leaf, old.dtype) for (name, old), leaf in leaves}

    def _loss(self, params: Tree, batch: Tree, state: Tree, key: Any) -> tuple[Any, Tree]:
        """Return the loss of a batch in training, and the new state."""
        given = _weights(self.loss, params, batch)
        value = bound(self.loss, key, state, train=True)(params, batch, **given)
        if self.stateful:
            value, state = new_state("loss", value, state)
        one_number("loss(params, batch)", value)
        return value, state

    def _narrow(self, site: str, array: Any) -> Array:
        return narrowed(f"the records of {site}", array, self.schema.dtype)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of parameters as one of the flat vector."""

        def of_vector(y: Any, batch: Tree, state: Tree, key: Any) -> Any:
            arrays = list(self.schema.unflatten(y).values())
            return function(jax.tree.unflatten(self.structure, arrays), batch, state, key)

        compiled = jax.jit(of_vector)

        def call(y: Array, batch: Tree, state: Tree, key: Any = None) -> Any:
            with jax.enable_x64(self.precise):
                return compiled(y, batch, state, key)

        return call


class _Running:
    """The state before and after the current local step."""

    def __init__(self, state: Tree) -> None:
        self.begun = self.now = self.after = state
        self.step = -1

    def before(self, step: int | None) -> Tree:
        """Return the state that a gradient of a step uses; None stands for that at x."""
        if step is None:
            return self.begun
        if step != self.step:
            self.step, self.now = step, self.after
        return self.now


def step_key(seed: int, step: int | None) -> Any:
    """Return the random key of a local step, counted from 0.

    A step of None stands for the gradient at x over all data.
    """
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    site = jax.random.wrap_key_data(jax.numpy.asarray(words), impl="threefry2x32")
    if step is None:
        return jax.random.fold_in(site, AT_X)
    return jax.random.fold_in(jax.random.fold_in(site, STEPS), step)


def _measure(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return (params, batch, state, key) -> the value of a function where it is measured."""

    def value(params: Tree, batch: Tree, state: Tree, key: Any) -> Any:
        found = measured(function, state)(params, batch, **_weights(function, params, batch))
        one_number(f"{name}(params, batch)", found, floating=False)
        return found

    return value


def _weights(function: Callable[..., Any], params: Tree, batch: Tree) -> dict[str, Any]:
    """Return equal weights for a function that takes weights: batches here have no padding."""
    return {"weights": even_weights(params, batch)} if "weights" in taken_by_name(function) else {}

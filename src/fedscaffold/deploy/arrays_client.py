"""A learner for plain arrays: NumPy functions for the gradient and the loss, rows of arrays as data.

    learner = ArraysLearner(gradient, start={"w": zeros, "b": zeros}, data=data, loss=loss)

`gradient(params, batch)` returns the mean gradient over the batch's records, by the names of `start`; `data(site)`
returns the site's records as a tuple of arrays with one row a record, as scikit-learn takes them: (x, y).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Site, Trained, Work
from fedscaffold.deploy.schema import Array, Schema
from fedscaffold.deploy.settings import Local

__all__ = ["ArraysLearner", "descend", "draws"]

Params = Mapping[str, Array]
Batch = tuple[Array, ...]


class ArraysLearner:
    """NumPy functions and arrays; see the module.

    >>> def gradient(params, batch):
    ...     return {"w": params["w"] - batch[0].mean(axis=0)}
    >>> learner = ArraysLearner(gradient, {"w": np.zeros(2)}, lambda site: (np.ones((4, 2)),), precision="float64")
    >>> learner.site("north").records, learner.schema.size
    (4, 2)
    """

    def __init__(
        self,
        gradient: Callable[[Params, Batch], Params],
        start: Params,
        data: Callable[[str], Batch],
        loss: Callable[[Params, Batch], float] | None = None,
        accuracy: Callable[[Params, Batch], float] | None = None,
        precision: str = "float32",
    ) -> None:
        self.gradient, self.data, self.loss, self.accuracy = gradient, data, loss, accuracy
        self.schema = Schema.of({name: np.asarray(value) for name, value in start.items()}, precision)
        self.start = self.schema.flatten(start)
        self.buffers: dict[str, Array] = {}

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = tuple(np.asarray(a) for a in self.data(name))
        sizes = {len(a) for a in records}
        if len(sizes) != 1 or sizes == {0}:
            raise InputError(f"the arrays of {name} must have one row a record each, got lengths {sorted(sizes)}")

        def gradient(y: Array, rows: Array | None) -> Array:
            batch = records if rows is None else tuple(a[rows] for a in records)
            return self.schema.flatten(self.gradient(self.schema.unflatten(y), batch))

        def train(work: Work) -> Trained:
            return descend(work, sizes_of(records), gradient)

        return Site(sizes_of(records), train, lambda x, buffers: self._evaluate(x, records))

    def _evaluate(self, x: Array, records: Batch) -> dict[str, float]:
        functions = {"loss": self.loss, "accuracy": self.accuracy}
        params = self.schema.unflatten(x)
        return {name: float(f(params, records)) for name, f in functions.items() if f is not None}


def sizes_of(records: Batch) -> int:
    """Number of records."""
    return len(records[0])


def descend(work: Work, records: int, gradient: Callable[[Array, Array | None], Array]) -> Trained:
    """The local steps on flat NumPy vectors, for any optimiser the settings name; `None` rows are all records."""
    algorithm, local = work.algorithm, work.local
    if local.optimizer == "own":
        raise InputError('local.optimizer = "own" is for torch apps; take sgd, momentum or adam')
    y = work.x.copy()
    total = np.zeros_like(y) if work.collect and not algorithm.at_x else None
    velocity = np.zeros_like(y)
    second = np.zeros_like(y)
    steps = 0
    for rows in draws(local, records, work.seed, one_step=algorithm.one_step):
        d = algorithm.direction(gradient(y, rows), y, work.x, work.shift)
        steps += 1
        if local.optimizer == "sgd":
            y = y - local.lr * d
        elif local.optimizer == "momentum":
            velocity = local.momentum * velocity + d
            y = y - local.lr * velocity
        else:
            velocity, second = 0.9 * velocity + 0.1 * d, 0.999 * second + 0.001 * d * d
            scale = np.sqrt(second / (1 - 0.999**steps)) + 1e-8
            y = y - local.lr * (velocity / (1 - 0.9**steps)) / scale
        if total is not None:
            total += d
    d = None if total is None else total / steps
    if algorithm.at_x:
        d = algorithm.direction(gradient(work.x, None), work.x, work.x, work.shift)
    return Trained(y.astype(work.x.dtype, copy=False), steps, d)


def draws(local: Local, records: int, seed: int, one_step: bool = False) -> Iterator[Any]:
    """Rows of each local step's batch; None for all records.

    >>> [rows.tolist() for rows in draws(Local(epochs=1, batch_size=2), 4, seed=0)]
    [[..., ...], [..., ...]]
    """
    if one_step:
        yield None
        return
    size = local.batch_size
    batch = None if size is None else max(1, int(np.ceil(size * records - 1e-9))) if isinstance(size, float) else size
    per_epoch = 1 if batch is None else -(-records // min(batch, records))
    steps = local.steps if local.steps is not None else (local.epochs or 1) * per_epoch
    shuffle = local.draw == "shuffle" or (local.draw == "auto" and local.steps is None)
    random = np.random.default_rng(seed)
    order = np.arange(0)
    for k in range(steps):
        if batch is None:
            yield None
        elif shuffle:
            if k % per_epoch == 0:
                order = random.permutation(records)
            at = k % per_epoch * batch
            yield order[at : at + batch]
        else:
            yield random.integers(records, size=batch)

"""Learner for NumPy: functions for the gradient and the loss, rows of arrays as data.

    learner = ArraysLearner(gradient, start={"w": zeros, "b": zeros}, data=data, loss=loss)

`gradient(params, batch)` returns the mean gradient over the batch by the names of `start`.
`data(site)` returns the site's records as a tuple of arrays with one row per record, such as
scikit-learn's (x, y).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fedscaffold.algorithms import Algorithm, reference
from fedscaffold.algorithms.round import each, work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Site, Trained, Work
from fedscaffold.deploy.errors import Hint
from fedscaffold.deploy.schema import Array, Schema
from fedscaffold.deploy.settings import Local

__all__ = ["ArraysLearner", "descend", "draw_batches"]

Params = Mapping[str, Array]
Batch = tuple[Array, ...]
Gradient = Callable[[Array, Array | None, int | None], Array]
"""(y, rows, step) -> mean gradient at y over rows of a site's records; rows of None are all. `step`
counts the local steps from 0, and is None for the gradient at x over all data."""


class ArraysLearner:
    """Local training with NumPy functions.

    Args:
        gradient: (params, batch) -> mean gradient over the batch, by the names of `start`.
        start: The initial model, by name.
        data: site -> the site's records, a tuple of arrays with one row per record.
        loss: (params, batch) -> mean loss, measured at the sites.
        accuracy: (params, batch) -> mean accuracy, measured at the sites.
        precision: float32 or float64.
        record_gradients: (params, batch) -> the gradient of each record of the batch, by the names
            of `start`, one row each; needed with `[privacy]`.

    >>> def gradient(params, batch):
    ...     return {"w": params["w"] - batch[0].mean(axis=0)}
    >>> learner = ArraysLearner(gradient, {"w": np.zeros(2)}, lambda site: (np.ones((4, 2)),))
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
        record_gradients: Callable[[Params, Batch], Params] | None = None,
    ) -> None:
        self.record_gradients = record_gradients
        self.gradient, self.data, self.loss, self.accuracy = gradient, data, loss, accuracy
        self.schema = Schema.of(
            {name: np.asarray(value) for name, value in start.items()}, precision
        )
        self.start = self.schema.flatten(start)
        self.buffers: dict[str, Array] = {}

    def site(self, name: str) -> Site:
        """Open a site's data."""
        records = tuple(np.asarray(a) for a in self.data(name))
        number = one_row_each(name, records)

        def gradient(y: Array, rows: Array | None, step: int | None) -> Array:
            batch = records if rows is None else tuple(a[rows] for a in records)
            made = self.gradient(self.schema.unflatten(y), batch)
            return self._flatten("gradient", made, name)

        def of_records(y: Array, rows: Array, places: Array) -> Array:
            assert self.record_gradients is not None
            batch = tuple(a[rows] for a in records)
            made = self.record_gradients(self.schema.unflatten(y), batch)
            return self._flatten("record_gradients", made, name, len(rows))

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            functions = {"loss": self.loss, "accuracy": self.accuracy}
            params = self.schema.unflatten(x)
            return {
                name: float(f(params, records)) for name, f in functions.items() if f is not None
            }

        def train(work: Work) -> Trained:
            return descend(work, number, gradient, of_records)

        lacks = "ArraysLearner has the gradient of whole batches alone; give it record_gradients"
        reason = lacks if self.record_gradients is None else None
        return Site(number, train, evaluate, lambda: reason)

    def _flatten(self, function: str, made: Params, site: str, *rows: int) -> Array:
        """Return a gradient as a vector, or those of some records as rows.

        Raise `InputError` if their shapes are not the model's.
        """
        parts = []
        for key, shape in zip(self.schema.names, self.schema.shapes, strict=True):
            part = np.asarray(made[key], self.schema.dtype)
            if part.shape != (*rows, *shape):
                raise InputError(
                    f"{function}(params, batch)[{key!r}] has shape {part.shape} at {site} where "
                    f"{'a row for each record of ' if rows else ''}the model has {shape}"
                )
            parts.append(part.reshape(*rows, -1))
        return np.concatenate(parts, axis=-1)


def one_row_each(site: str, arrays: Iterable[Array]) -> int:
    """Return the number of records in a site's arrays.

    Raise `InputError` if it is 0 or they disagree.
    """
    sizes = {len(a) for a in arrays}
    if len(sizes) != 1 or sizes == {0}:
        raise InputError(
            f"the arrays of {site} must have one row a record each, got lengths {sorted(sizes)}"
        )
    return sizes.pop()


def descend(
    work: Work,
    records: int,
    gradient: Gradient,
    of_records: Callable[[Array, Array, Array], Array],
) -> Trained:
    """Run the local steps of a round on flat NumPy vectors, with SGD, momentum or Adam.

    Args:
        work: The input of local training.
        records: Number of the site's records.
        gradient: The mean gradient over a batch.
        of_records: (y, rows, their places in the batch) -> the gradients of single records at y,
            one row each, which private steps clip.
    """
    local = work.local
    optimizers = {
        "sgd": None,
        "momentum": reference.heavy_ball(local.momentum),
        "adam": reference.adam(),
    }
    if local.optimizer not in optimizers:
        raise InputError(
            f'local.optimizer = "{local.optimizer}" is for torch apps; take sgd, momentum or adam'
        )
    advance = optimizers[local.optimizer]
    if local.clip_norm is not None:
        advance = _clipped(local.clip_norm, advance or (lambda d, lr: each(lambda v: lr * v, d)))
    private = work.private
    if private is None:
        batches = list(enumerate(draw_batches(work.algorithm, local, records, work.seed)))
    else:
        batches = [(step, None) for step in range(private.steps)]
    start = each(np.array, work.start)  # not work.x itself: `gradient` may tell y from x

    def slope(y: Array, batch: tuple[int, Array | None]) -> Array:
        step, rows = batch
        if private is None:
            return gradient(y, rows, step)
        return private.gradient(step, records, y, lambda *places: of_records(y, *places))

    walk = reference.descend(
        work.algorithm,
        slope,
        start,
        work.x,
        work.shift,
        lrs=[local.lr] * len(batches),
        batches=batches,
        advance=advance,
        whole=lambda y: gradient(y, None, None),
    )
    return Trained(walk, len(batches))


def _clipped(most: float, advance: reference.Advance) -> reference.Advance:
    """Return an optimiser that is given each direction scaled to a norm of at most `most`."""

    def clip(d: Array) -> Array:
        norm = float(np.linalg.norm(d))
        return d if norm <= most else d * (most / norm)

    return lambda d, lr: advance(each(clip, d), lr)


def draw_batches(
    algorithm: Algorithm, local: Local, records: int, seed: int, accumulate: int = 1
) -> Iterator[Any]:
    """Yield the row indices of each local step; None for all records.

    Args:
        algorithm: The algorithm, which may ask for other steps or batches.
        local: The settings of local training.
        records: Number of the site's records.
        seed: Seed of the site's draws in the round.
        accumulate: Number of batches that a step takes together.

    >>> from fedscaffold.algorithms import fedavg, sgd
    >>> [rows.tolist() for rows in draw_batches(fedavg(), Local(epochs=1, batch_size=2), 4, seed=0)]
    [[..., ...], [..., ...]]
    >>> list(draw_batches(sgd(), Local(epochs=1, batch_size=2), 4, seed=0))
    [None]
    >>> dropped = Local(epochs=1, batch_size=2, drop_last=True)
    >>> [len(rows) for rows in draw_batches(fedavg(), dropped, 5, seed=0)]
    [2, 2]
    """
    size = local.rows(records)
    shuffle = local.draw == "shuffle" or (local.draw == "auto" and local.steps is None)
    used, largest = records, None
    if size is not None:
        used -= records % size if local.drop_last and shuffle else 0
        largest = size * accumulate
    per_epoch = -(-used // (largest or records))
    asked = local.steps if local.steps is not None else (local.epochs or 1) * max(1, per_epoch)
    steps, batch, _ = work_of(algorithm, asked, largest)
    if size is not None and batch is not None and used == 0:
        raise Hint("too few", records=records, batch=size)
    per_epoch = -(-used // (batch or records))
    random = np.random.default_rng(seed)
    order = np.arange(0)
    for k in range(steps):
        if batch is None:
            yield None
        elif shuffle:
            if k % per_epoch == 0:
                order = random.permutation(records)[:used]
            at = k % per_epoch * batch
            yield order[at : at + batch]
        else:
            yield random.integers(records, size=batch)

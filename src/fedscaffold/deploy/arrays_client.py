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
    ) -> None:
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
            for key, shape in zip(self.schema.names, self.schema.shapes, strict=True):
                if np.shape(made[key]) != shape:
                    raise InputError(
                        f"gradient(params, batch)[{key!r}] has shape {np.shape(made[key])} at "
                        f"{name} where the model has {shape}"
                    )
            return self.schema.flatten(made)

        def evaluate(x: Array, buffers: dict[str, Array]) -> dict[str, float]:
            functions = {"loss": self.loss, "accuracy": self.accuracy}
            params = self.schema.unflatten(x)
            return {
                name: float(f(params, records)) for name, f in functions.items() if f is not None
            }

        return Site(number, lambda work: descend(work, number, gradient), evaluate)


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


def descend(work: Work, records: int, gradient: Gradient) -> Trained:
    """Run the local steps of a round on flat NumPy vectors, with SGD, momentum or Adam."""
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
    batches = list(enumerate(draw_batches(work.algorithm, local, records, work.seed)))
    start = each(np.array, work.start)  # not work.x itself: `gradient` may tell y from x
    walk = reference.descend(
        work.algorithm,
        lambda y, batch: gradient(y, batch[1], batch[0]),
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

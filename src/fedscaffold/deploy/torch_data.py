"""Records of a torch site, and their batches: tensors in memory, a `Dataset` or a `DataLoader`.

Tensors (a tensor, or nested tuples and dicts of tensors or NumPy arrays, with one row per record)
and data sets are batched by the settings, with the same rows as NumPy arrays are. A `DataLoader`
makes its own batches.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy.app_imports import own_module
from fedscaffold.deploy.arrays_client import draw_batches
from fedscaffold.deploy.client import Work
from fedscaffold.deploy.errors import Hint

__all__ = ["Part", "Records", "map_leaves", "move", "open_records"]

Batch: TypeAlias = Any
PLAIN = (RandomSampler, SequentialSampler)
WAYS = "give a tuple or dict of tensors, a Dataset or a DataLoader"


class Part(NamedTuple):
    """A batch and the number of its records."""

    batch: Batch
    rows: int


class Records(NamedTuple):
    """The records of a site."""

    number: int
    take: Callable[[list[int]], Batch] | None
    """Rows -> the batch of these records; None for a loader that chooses its records itself."""
    loader: Any = None
    """The site's `DataLoader`, if it gave one."""
    held: Any = None
    """The tensors, if they are in memory."""

    def steps(self, work: Work, accumulate: int = 1) -> Iterator[list[Part] | None]:
        """Yield the batches of each local step of a round.

        None stands for all records, to be taken in several batches.

        Args:
            work: The input of local training.
            accumulate: Number of batches of a step; an epoch's last step may have fewer.
        """
        if self.loader is not None:
            yield from self._loaded_steps(work, accumulate)
            return
        size = work.local.rows(self.number)
        if accumulate > 1 and size is None:
            raise InputError(
                "accumulate needs the batches of local.batch_size or of a DataLoader; without "
                "them a step takes all records"
            )
        assert self.take is not None
        for rows in draw_batches(work.algorithm, work.local, self.number, work.seed, accumulate):
            if rows is None:
                yield None if self.held is None else [Part(self.held, self.number)]
            else:
                piece = size or len(rows)
                cuts = [rows[at : at + piece].tolist() for at in range(0, len(rows), piece)]
                yield [Part(self.take(cut), len(cut)) for cut in cuts]

    def _loaded_steps(self, work: Work, accumulate: int) -> Iterator[list[Part] | None]:
        """Yield the batches of each step as the site's loader makes them."""
        algorithm, local = work.algorithm, work.local
        if work_of(algorithm, 1, 1).batch_size is None:  # full batches: one step per epoch
            for _ in range(work_of(algorithm, local.steps or local.epochs or 1).steps):
                yield None
            return
        for name in ("batch_size", "drop_last"):
            if getattr(local, name):
                raise InputError(
                    f"local.{name} and a DataLoader's own {name.replace('_', ' ')} are both "
                    "given; leave one out"
                )
        per_epoch = -(-len(self.loader) // accumulate)
        asked = local.steps if local.steps is not None else (local.epochs or 1) * per_epoch
        left = work_of(algorithm, asked, local.batch_size).steps
        while left > 0:
            gathered: list[Part] = []
            before = left
            for part in self._loaded(self.loader):
                gathered.append(part)
                if len(gathered) == accumulate:
                    yield gathered
                    gathered, left = [], left - 1
                    if left == 0:
                        return
            if gathered:
                yield gathered
                left -= 1
            if left == before:
                raise Hint("no batch", records=self.number)

    def parts(self, size: int) -> Iterator[Part]:
        """Yield all records in batches of `size`, or as a loader that chooses records does."""
        if self.take is None:
            yield from self._loaded(self.loader)
            return
        if self.loader is not None and self.loader.num_workers:
            same = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")
            more = {name: getattr(self.loader, name) for name in same}
            batches = iter(DataLoader(self.loader.dataset, size, **more))
        else:
            cuts = (range(at, min(at + size, self.number)) for at in range(0, self.number, size))
            batches = (self.take(list(cut)) for cut in cuts)
        for at, batch in zip(range(0, self.number, size), batches, strict=True):
            yield Part(batch, min(size, self.number - at))

    def usual(self, size: int) -> int:
        """Return the batch size of the site's loader; `size` without one."""
        return size if self.loader is None else self.loader.batch_size or size

    def _loaded(self, loader: Any) -> Iterator[Part]:
        """Yield the batches of a loader with their numbers of records."""
        left = self.number
        for batch in loader:
            lengths = {len(leaf) for leaf in _leaves(batch) if _is_array(leaf) and leaf.ndim}
            given = loader.batch_size
            if len(lengths) == 1:
                rows = lengths.pop()
            elif given is not None and type(loader.sampler) in PLAIN:
                rows = min(given, left)
            else:
                raise InputError(
                    f"the records of a batch cannot be counted: its tensors have "
                    f"{sorted(lengths) or 'no'} rows; give the DataLoader a batch_size instead of "
                    "a batch_sampler, or collate tensors with one row per record"
                )
            left -= rows
            yield Part(batch, rows)


def open_records(site: str, given: Any) -> Records:
    """Return the records that `data(site)` or `test(site)` gave.

    Raises:
        InputError: If they cannot be batched, with what to give instead.
    """
    loader = given if isinstance(given, DataLoader) else None
    source = given if loader is None else loader.dataset
    if isinstance(source, IterableDataset) and (loader is None or not hasattr(source, "__len__")):
        raise InputError(
            f"data({site!r}) is an IterableDataset, whose records have no number and no order to "
            "draw batches from: give list(dataset), which is a Dataset"
        )
    if loader is not None:
        return _of_loader(site, loader)
    if isinstance(given, list) and all(_is_array(one) for one in given):
        raise InputError(
            f"data({site!r}) is a list of tensors, which may be columns or records: give a tuple "
            "(x, y) of columns, or a Dataset of records"
        )
    if _is_array(given) or isinstance(given, (tuple, Mapping)):
        return _in_memory(site, given)
    if not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        raise InputError(f"data({site!r}) is of type {type(given).__name__}: {WAYS}")
    number = _some(site, len(given))
    collate = torch.utils.data.default_collate
    many = getattr(given, "__getitems__", None)  # as a DataLoader reads several at once

    def take(rows: list[int]) -> Batch:
        return collate(many(rows) if callable(many) else [given[row] for row in rows])

    return Records(number, take)


def move(batch: Batch, device: Any, dtype: Any) -> Batch:
    """Return a batch on a device, as tensors; floating-point ones with the model's dtype.

    >>> move({"x": np.ones(2), "y": [torch.tensor([1, 2])]}, "cpu", torch.float32)
    {'x': tensor([1., 1.]), 'y': [tensor([1, 2])]}
    """

    def moved(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        tensor = torch.as_tensor(leaf)
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return map_leaves(moved, batch)


def _in_memory(site: str, tree: Any) -> Records:
    """Return records whose columns are tensors or arrays."""
    odd = [leaf for leaf in _leaves(tree) if not _is_array(leaf) or not leaf.ndim]
    if odd:
        raise InputError(
            f"data({site!r}) must hold tensors or arrays with one row per record, got "
            f"{type(odd[0]).__name__} among them: {WAYS}"
        )
    held = map_leaves(torch.as_tensor, tree)
    lengths = {len(leaf) for leaf in _leaves(held)}
    if len(lengths) > 1:
        raise InputError(
            f"the tensors of {site} must have one row per record each, got lengths "
            f"{sorted(lengths)}"
        )
    number = _some(site, lengths.pop() if lengths else 0)

    def take(rows: list[int]) -> Batch:
        if rows == list(range(rows[0], rows[-1] + 1)):
            # a copy, as below: a loss may change its batch, and must not change the records
            return map_leaves(lambda leaf: leaf[rows[0] : rows[-1] + 1].clone(), held)
        index = torch.tensor(rows)
        return map_leaves(lambda leaf: leaf[index.to(leaf.device)], held)

    return Records(number, take, held=held)


def _of_loader(site: str, loader: Any) -> Records:
    """Return records that come in the batches of a `DataLoader`."""
    number = _some(site, len(loader.dataset))
    _refuse_new_processes(site, loader)
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in PLAIN
    if not plain:
        return Records(number, None, loader)
    dataset, collate = loader.dataset, loader.collate_fn
    return Records(number, lambda rows: collate([dataset[row] for row in rows]), loader)


def _refuse_new_processes(site: str, loader: Any) -> None:
    """Raise if workers are started that cannot import what the app itself defines."""
    context = loader.multiprocessing_context or multiprocessing
    if not loader.num_workers or context.get_start_method() == "fork":
        return
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        if (module := own_module(getattr(loader, name))) is not None:
            raise InputError(
                f"the DataLoader of {site} starts its workers by {context.get_start_method()!r}, "
                f"and they cannot import its {name} from the app's own {module}.py: take "
                "multiprocessing_context='fork' or num_workers=0"
            )


def _some(site: str, number: int) -> int:
    if number < 1:
        raise InputError(f"{site} holds no records; every site needs at least one")
    return number


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dicts."""
    if isinstance(tree, dict):
        return type(tree)((key, map_leaves(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(function, value) for value in tree)
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]

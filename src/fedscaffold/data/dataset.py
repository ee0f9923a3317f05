"""`Dataset`: training and test records as plain arrays, with their natural clients, if any."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedscaffold.brief import brief
from fedscaffold.checks import InputError

__all__ = ["Array", "Dataset", "Floats", "Indices", "Labels", "check_dataset", "finite"]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.int32]
Indices: TypeAlias = npt.NDArray[np.intp]


class Dataset(NamedTuple):
    """Records of a learning task; an image is a flat row with values from 0 to 1."""

    def __repr__(self) -> str:
        return brief(self)

    name: str
    x: Floats
    """(records, features), finite."""
    y: Array
    """int32 labels 0 .. classes - 1, or float32 targets of a regression."""
    x_test: Floats
    y_test: Array
    classes: int
    """The number of labels; 0 for a regression."""
    groups: Labels | None = None
    """The natural client of every training record, where the data have one."""
    source: str = ""
    """Where the data come from, in one sentence."""


def check_dataset(dataset: Dataset) -> Dataset:
    """Return `dataset` unchanged, after checking it.

    Shapes must match, values must be finite and labels in range; else an InputError is raised.

    >>> x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 2], np.int32)
    >>> check_dataset(Dataset("mine", x, y, x, y, classes=2))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: mine: training labels must be whole numbers from 0 to 1, got 0 to
        2
    """
    name, x, y, x_test, y_test, classes, groups, *_ = dataset
    for part, inputs, labels in (("training", x, y), ("test", x_test, y_test)):
        if inputs.ndim != 2 or labels.ndim != 1 or len(inputs) != len(labels) or not inputs.size:
            shapes = f"got {inputs.shape} and {labels.shape}"
            raise InputError(
                f"{name}: {part} x and y must be (n, features) and (n,) with n of at least 1, "
                f"{shapes}"
            )
        if not finite(inputs) or not finite(labels):
            raise InputError(
                f"{name}: {part} records must be finite, found NaN or inf; clean or impute them "
                "first"
            )
        low, high = labels.min(), labels.max()
        if classes and (labels.dtype.kind not in "iu" or low < 0 or high >= classes):
            allowed = f"whole numbers from 0 to {classes - 1}"
            raise InputError(f"{name}: {part} labels must be {allowed}, got {low} to {high}")
    if x.shape[1] != x_test.shape[1]:
        raise InputError(
            f"{name}: training has {x.shape[1]} features, test has {x_test.shape[1]}; make them "
            "equal"
        )
    if groups is not None and groups.shape != y.shape:
        raise InputError(
            f"{name}: groups must have one entry per training record {y.shape}, got {groups.shape}"
        )
    return dataset


def finite(values: Array) -> bool:
    """Return whether all values are finite, from the extremes, without a temporary array.

    >>> finite(np.array([1.0, np.nan]))
    False
    """
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))

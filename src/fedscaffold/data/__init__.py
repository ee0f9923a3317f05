"""Data sets by name, and splits of them among clients.

A new data set is one function and one row of `DATASETS` in `loaders.py`; a new split is one
function and one row of `SPLITS` in `splits.py`.
"""

from __future__ import annotations

from fedscaffold.data.dataset import Dataset
from fedscaffold.data.federated import FederatedData, describe, federate
from fedscaffold.data.loaders import DATASETS, load
from fedscaffold.data.splits import SPLITS, split

__all__ = [
    "DATASETS",
    "SPLITS",
    "Dataset",
    "FederatedData",
    "describe",
    "federate",
    "load",
    "split",
]

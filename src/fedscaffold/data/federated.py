"""A data set split among clients, and summary statistics of the split."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedscaffold.brief import brief
from fedscaffold.data.dataset import Array, Dataset, check_dataset
from fedscaffold.data.splits import split

__all__ = ["FederatedData", "describe", "federate"]


class FederatedData(NamedTuple):
    """The training records of every client, and one test set for all."""

    def __repr__(self) -> str:
        return brief(self)

    clients: list[tuple[Array, Array]]
    """(x, y) of every client."""
    test: tuple[Array, Array]
    classes: int
    """The number of labels; 0 for a regression."""
    split: str
    name: str
    label_counts: npt.NDArray[np.int64]
    """(clients, classes) records of every label at every client; (clients, 1) records for a
    regression."""


def federate(
    dataset: Dataset, split_spec: str, num_clients: int | None = None, *, seed: int = 0
) -> FederatedData:
    """Divide `dataset` among `num_clients` clients as `split_spec` says (see `SPLITS`).

    The clients' arrays are slices of one reordered copy of the training records.

    >>> from fedscaffold.data import load
    >>> federated = federate(load("digits"), "similarity:0", 10)
    >>> len(federated.clients), federated.clients[0][0].shape, federated.label_counts.shape
    (10, (140, 64), (10, 10))
    """
    name, x, y, x_test, y_test, classes, groups, *_ = check_dataset(dataset)
    members = split(split_spec, y, num_clients, seed=seed, groups=groups)
    order, sizes = np.concatenate(members), np.array([len(client) for client in members])
    cuts = np.cumsum(sizes)[:-1]
    clients = list(zip(np.split(x[order], cuts), np.split(y[order], cuts), strict=True))
    return FederatedData(
        clients, (x_test, y_test), classes, split_spec, name, count_labels(y[order], sizes, classes)
    )


def count_labels(
    labels: Array, sizes: npt.NDArray[np.int64], classes: int
) -> npt.NDArray[np.int64]:
    """Return the (clients, classes) label counts, from labels ordered by client.

    >>> count_labels(np.array([0, 1, 1]), np.array([1, 2]), 2).tolist()
    [[1, 0], [0, 2]]
    """
    if not classes:
        return sizes[:, None]
    cells = np.repeat(np.arange(len(sizes)) * classes, sizes) + labels
    return np.bincount(cells, minlength=len(sizes) * classes).reshape(len(sizes), classes)


def describe(federated: FederatedData) -> dict[str, Any]:
    """Return statistics as JSON: numbers of records, and heterogeneity of the clients.

    `labels_per_client` is the mean number of labels a client has. `heterogeneity` is the mean over
    clients of the total variation distance between the client's label distribution and that of all
    records together: 0 if all are equal, near 1 if no label is shared. Both are None for
    regression.

    >>> from fedscaffold.data import load
    >>> facts = describe(federate(load("digits"), "similarity:0", 10))
    >>> facts["records"], facts["clients"], facts["smallest"], facts["largest"]
    (1400, 10, 140, 140)
    """
    counts = federated.label_counts
    sizes = counts.sum(axis=1)
    facts: dict[str, Any] = {
        "name": federated.name,
        "split": federated.split,
        "records": int(sizes.sum()),
        "test_records": len(federated.test[1]),
        "features": int(federated.test[0].shape[1]),
        "classes": federated.classes,
        "clients": len(federated.clients),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "labels_per_client": None,
        "heterogeneity": None,
    }
    if federated.classes:
        facts["labels_per_client"] = float((counts > 0).sum(axis=1).mean())
        facts["heterogeneity"] = heterogeneity(counts)
    return facts


def heterogeneity(counts: npt.NDArray[np.int64]) -> float:
    """Return the mean total variation distance between the rows' shares and the total's.

    >>> heterogeneity(np.array([[5, 0], [0, 5]]))
    0.5
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    overall = counts.sum(axis=0) / counts.sum()
    return float(np.abs(shares - overall).sum(axis=1).mean() / 2)

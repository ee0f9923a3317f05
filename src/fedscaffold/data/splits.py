"""Splits of a data set among clients, and into training and test records.

A split assigns each record to exactly one client.

    similarity:S      S % of the records are assigned evenly at random, the rest sorted by label in
                      consecutive equal shares (Karimireddy et al. 2020, section 7)
    iid               similarity:100
    dirichlet:ALPHA   each label is divided among the clients in proportions drawn from a symmetric
                      Dirichlet distribution with parameter ALPHA (Yurochkin et al. 2019); smaller
                      is more heterogeneous
    shards:K          sorted by label, cut into N K shards, K of them to each of the N clients at
                      random (McMahan et al. 2017)
    natural           the data's own clients, such as hospitals
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.data.dataset import Array, Indices, finite

__all__ = ["SPLITS", "holdout", "split"]

SPLITS: dict[str, str] = {
    "similarity": "similarity:S with S from 0 to 100, as in similarity:10",
    "dirichlet": "dirichlet:ALPHA with ALPHA above 0, as in dirichlet:0.3",
    "shards": "shards:K with K a whole number of at least 1, as in shards:2",
    "iid": "iid",
    "natural": "natural",
}


def split(
    spec: str,
    labels: npt.ArrayLike,
    num_clients: int | None,
    *,
    seed: int,
    groups: npt.ArrayLike | None = None,
) -> list[Indices]:
    """Return the record indices of each client, in ascending order; no client is empty.

    `natural` takes the clients from `groups`, which has the client of each record; `num_clients`
    may then be None. A client that `dirichlet` leaves without records receives a random record of
    another client.

    >>> [client.tolist() for client in split("similarity:0", [0, 1, 0, 1, 1, 0], 2, seed=0)]
    [[0, 2, 5], [1, 3, 4]]
    """
    name, parameter = parse_split(spec)
    values = np.asarray(labels)
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iufb" or not finite(values):
        raise InputError(
            f"labels must be a row of at least one finite number, got {values.dtype} {values.shape}"
        )
    rng = np.random.default_rng(checks.whole("seed", seed, at_least=0))
    if name == "natural":
        owner, clients = natural(groups, len(values), num_clients)
        return records_by_client(owner, clients)
    if num_clients is None:
        raise InputError(f"split {spec!r} needs a number of clients; give num_clients")
    clients = checks.whole("num_clients", num_clients)
    if clients > len(values):
        raise InputError(
            f"num_clients must be at most the number of records {len(values)}, got {clients}"
        )
    if name == "dirichlet":
        return records_by_client(dirichlet(values, clients, parameter, rng), clients)
    if name == "shards":
        return records_by_client(shards(values, clients, int(parameter), rng), clients)
    return records_by_client(similarity(values, clients, parameter, rng), clients)


def parse_split(spec: str) -> tuple[str, float]:
    """The name of a split and its checked number; 100 (i.i.d.) where a split takes none.

    >>> parse_split("dirichlet:0.3"), parse_split("iid")
    (('dirichlet', 0.3), ('iid', 100.0))
    >>> parse_split("similarity")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: split must read similarity:S with S from 0 to 100, as in
    similarity:10, got 'similarity'
    """
    if not isinstance(spec, str):
        raise InputError(f"split must be one of the texts {', '.join(SPLITS)}, got {spec!r}")
    name, colon, text = spec.partition(":")
    checks.choice("split", name, SPLITS)
    refusal = InputError(f"split must read {SPLITS[name]}, got {spec!r}")
    if name in ("iid", "natural"):
        if colon:
            raise refusal
        return name, 100.0
    try:
        value = float(text)
    except ValueError:
        raise refusal from None
    within = {
        "similarity": 0 <= value <= 100,
        "dirichlet": 0 < value < np.inf,
        "shards": 1 <= value < np.inf,
    }
    if not within[name] or (name == "shards" and value != int(value)):
        raise refusal
    return name, value


def similarity(
    labels: Array, num_clients: int, percent: float, rng: np.random.Generator
) -> Indices:
    """Return the owner of each record: `percent` % at random, the rest by label.

    Sizes differ by one at most.

    >>> similarity(np.array([0, 1, 0, 1]), 2, 0.0, np.random.default_rng(0)).tolist()
    [0, 1, 0, 1]
    """
    order = rng.permutation(len(labels))
    mixed = round(len(labels) * percent / 100)
    rest = order[mixed:]
    # stable: equal labels stay in random order
    rest = rest[np.argsort(labels[rest], kind="stable")]
    # what does not divide goes to the first clients in one part, to the last in the other: sizes
    # stay even
    sizes = even_sizes(mixed, num_clients), even_sizes(len(rest), num_clients)[::-1]
    clients = np.arange(num_clients)
    owner = np.empty(len(labels), np.intp)
    owner[order[:mixed]] = np.repeat(clients, sizes[0])
    owner[rest] = np.repeat(clients, sizes[1])
    return owner


def dirichlet(labels: Array, num_clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """The owner of every record, each label divided in Dirichlet proportions, no client left empty.

    >>> owner = dirichlet(np.array([0, 1] * 4), 2, 1e308, np.random.default_rng(0))
    >>> np.bincount(owner).tolist()
    [4, 4]
    """
    if labels.dtype.kind == "f":
        raise InputError(
            "split dirichlet needs whole-number labels; use similarity:S or iid for a regression"
        )
    order = rng.permutation(len(labels))
    _, inverse, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    order = order[np.argsort(inverse, kind="stable")]
    # beyond 1e9 the proportions are even to the last record, and the sum of the parameters must not
    # overflow
    shares = rng.dirichlet(np.full(num_clients, min(alpha, 1e9)), size=len(counts))
    cuts = np.rint(np.cumsum(shares, axis=1) * counts[:, None]).astype(np.intp)
    cuts[:, -1] = counts  # rounding errors of the sum must lose no record
    sizes = np.diff(np.minimum(cuts, counts[:, None]), axis=1, prepend=0)
    owner = np.empty(len(labels), np.intp)
    owner[order] = np.repeat(np.tile(np.arange(num_clients), len(counts)), sizes.ravel())
    return fill_empty_clients(owner, num_clients, rng)


def fill_empty_clients(owner: Indices, num_clients: int, rng: np.random.Generator) -> Indices:
    """Owners after every client without a record took one, at random, that its owner can spare.

    Drawing again until nobody is empty, the common remedy, may never end with many clients and a
    small alpha.

    >>> sorted(fill_empty_clients(np.array([1, 1, 1]), 3, np.random.default_rng(0)).tolist())
    [0, 1, 2]
    """
    empty = np.flatnonzero(np.bincount(owner, minlength=num_clients) == 0)
    order = rng.permutation(len(owner))
    # one record, at random, stays with every owner
    _, kept = np.unique(owner[order], return_index=True)
    spare = np.delete(order, kept)[: len(empty)]
    owner = owner.copy()
    owner[spare] = empty
    return owner


def shards(labels: Array, num_clients: int, each: int, rng: np.random.Generator) -> Indices:
    """The owner of every record, each client holding `each` shards of the records sorted by label.

    >>> owner = shards(np.array([0, 0, 1, 1]), 2, 2, np.random.default_rng(0))
    >>> np.bincount(owner).tolist()
    [2, 2]
    """
    number = num_clients * each
    if number > len(labels):
        most = len(labels) // num_clients
        raise InputError(
            f"shards:K with {num_clients} clients and {len(labels)} records: K at most {most}, "
            f"got {each}"
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shard_owner = rng.permutation(number) % num_clients
    owner = np.empty(len(labels), np.intp)
    owner[order] = np.repeat(shard_owner, even_sizes(len(labels), number))
    return owner


def natural(
    groups: npt.ArrayLike | None, records: int, num_clients: int | None
) -> tuple[Indices, int]:
    """The owner of every record by the data's own groups, and the number of groups.

    >>> owner, clients = natural([7, 3, 7], 3, None)
    >>> owner.tolist(), clients
    ([1, 0, 1], 2)
    >>> natural([7, 3, 7], 3, 5)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: split natural has 2 clients here, got num_clients 5; leave it out
    """
    if groups is None:
        raise InputError(
            "split natural needs data with clients of their own (heart has); use similarity:S or "
            "iid"
        )
    values = np.asarray(groups)
    if values.shape != (records,):
        raise InputError(
            f"groups must have one entry per record ({records}), got shape {values.shape}"
        )
    names, owner = np.unique(values, return_inverse=True)
    if num_clients is not None and checks.whole("num_clients", num_clients) != len(names):
        raise InputError(
            f"split natural has {len(names)} clients here, got num_clients {num_clients}; leave "
            "it out"
        )
    return owner, len(names)


def even_sizes(total: int, parts: int) -> npt.NDArray[np.intp]:
    """Sizes of `parts` shares of `total` that differ by one at most, the larger first.

    >>> even_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def records_by_client(owner: Indices, num_clients: int) -> list[Indices]:
    """The records of every client, in ascending order.

    >>> [client.tolist() for client in records_by_client(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    cuts = np.cumsum(np.bincount(owner, minlength=num_clients))[:-1]
    return np.split(np.argsort(owner, kind="stable"), cuts)


def holdout(strata: Any, size: int, *, seed: int) -> tuple[Indices, Indices]:
    """Return record numbers for training, and `size` for the test, evenly from every stratum.

    A stratum gives its exact share rounded down or up, the largest remainders up; both parts
    ascend.

    >>> train, test = holdout([0, 0, 0, 0, 1, 1], 3, seed=0)
    >>> len(train), len(test), (test > 3).sum()
    (3, 3, np.int64(1))
    """
    _, inverse, counts = np.unique(np.asarray(strata), return_inverse=True, return_counts=True)
    total = len(inverse)
    checks.whole("size", size, at_most=total - 1)
    quota = counts * size // total
    short = size - quota.sum()
    quota[np.argsort(-(counts * size % total), kind="stable")[:short]] += 1
    order = np.random.default_rng(seed).permutation(total)
    order = order[np.argsort(inverse[order], kind="stable")]
    place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = place < np.repeat(quota, counts)
    return np.sort(order[~chosen]), np.sort(order[chosen])

"""Group rows by client, train, and continue training by one round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold.checks import InputError
from fedscaffold.problems.problem import weights_of
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import Run, Simulator
from fedscaffold.simulation.spec import State

__all__ = [
    "Owners",
    "TrainingState",
    "group_by_owner",
    "train",
    "train_one_round",
    "training_state",
]

METRICS = (
    "loss",
)  # the training loss; held-out scores are computed by the user, as usual in scikit-learn


class Owners(NamedTuple):
    """Rows by client."""

    labels: NDArray[Any]
    """The clients, in sorted order."""
    rows: list[NDArray[np.intp]]
    """Row indices of each client."""

    def parts(self, *columns: NDArray[Any]) -> list[tuple[NDArray[Any], ...]]:
        """Return the records of each client."""
        return [tuple(column[rows] for column in columns) for rows in self.rows]


class TrainingState(NamedTuple):
    """State from which the next round starts."""

    server: Any
    memory: Any
    """Clients' memory: each field a table of one row per client; None if the algorithm has none."""
    own: Any
    """Clients' private state, likewise."""
    labels: NDArray[Any]
    weights: NDArray[Any]
    rounds: int
    scale: float
    """The largest root mean square of the clients' memory so far."""


def group_by_owner(clients: ArrayLike | None, rows: int) -> Owners:
    """Group rows by owner; a single client holds all rows if `clients` is None.

    >>> group_by_owner(["b", "a", "b"], 3).rows
    [array([1]), array([0, 2])]
    """
    if clients is None:
        return Owners(np.zeros(1, np.int64), [np.arange(rows)])
    labels = np.asarray(clients)
    if labels.shape != (rows,):
        raise InputError(
            f"clients must say of each of the {rows} rows who holds it, got shape {labels.shape}; "
            "in a pipeline it is passed as STEP__clients"
        )
    missing = (
        sum(map(_is_missing, labels.tolist()))
        if labels.dtype == object
        else int((labels != labels).sum())
    )
    if missing:
        raise InputError(
            f"clients must say of every row who holds it, got {missing} without (NaN or None); "
            "give these rows an owner or drop them"
        )
    try:
        known, index = np.unique(labels, return_inverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(label).__name__ for label in labels.tolist()}))
        raise InputError(
            f"clients must be names or numbers, all of one kind, got {kinds}; make them str"
        ) from None
    order = np.argsort(index, kind="stable")
    return Owners(known, np.split(order, np.cumsum(np.bincount(index))[:-1]))


def _is_missing(label: Any) -> bool:
    """Return whether a label is None, NaN or pandas' NA, whose comparison has no truth value."""
    try:
        return label is None or bool(label != label)
    except TypeError:
        return True


def train(config: RunConfig) -> Run:
    """Run all rounds from the start."""
    return refuse_divergence(Simulator.of(config).run())


def train_one_round(config: RunConfig, before: TrainingState, labels: NDArray[Any]) -> Run:
    """Run the round after those of `before`.

    Its draws follow from the seed and the round's number.
    """
    simulator = Simulator.of(replace(config, rounds=before.rounds + 1))
    state, rows = simulator.step(_resume_state(simulator.ready.start, before, config, labels))
    return refuse_divergence(simulator.result(state, rows))


def training_state(run: Run, config: RunConfig, labels: NDArray[Any]) -> TrainingState:
    """Return the state from which the next round starts."""
    weights = weights_of(config.problem, config.weights)
    return TrainingState(
        run.server, run.clients.memory, run.clients.own, labels, weights, run.rounds, run.scale
    )


def refuse_divergence(run: Run) -> Run:
    """Return the run; raise InputError with its advice if it diverged."""
    if run.advice is not None:
        raise InputError(run.advice)
    return run


def _resume_state(
    fresh: State, before: TrainingState, config: RunConfig, labels: NDArray[Any]
) -> State:
    """Return the state to continue from.

    c is recomputed as the mean of the c_i if clients or weights changed.
    """
    server = type(fresh.server)(
        *(np.asarray(a, b.dtype) for a, b in zip(before.server, fresh.server, strict=True))
    )
    memory, own = (
        _carry_rows(held, new, before.labels, labels)
        for held, new in ((before.memory, fresh.memory), (before.own, fresh.own))
    )
    p, means = weights_of(config.problem, config.weights), config.algorithm.means
    mean = tuple(p @ getattr(memory, of) for _, of in means)
    if not (np.array_equal(labels, before.labels) and np.array_equal(p, before.weights)):
        server = server._replace(
            **{field: total for (field, _), total in zip(means, mean, strict=True)}
        )
    return fresh._replace(
        server=server,
        memory=memory,
        own=own,
        mean=mean,
        scale=np.asarray(before.scale, config.precision),
        round=np.int32(before.rounds),
    )


def _carry_rows(held: Any, fresh: Any, labels_then: NDArray[Any], labels: NDArray[Any]) -> Any:
    """Return the tables of the present clients.

    Known clients keep their rows, new ones have initial rows.
    """
    if held is None:
        return None
    where = {label: row for row, label in enumerate(labels_then.tolist())}
    known = [row for row, label in enumerate(labels.tolist()) if label in where]
    rows = [where[label] for label in labels[known].tolist()]
    tables = [np.array(table) for table in fresh]
    for table, old in zip(tables, held, strict=True):
        table[known] = old[rows]
    return type(fresh)(*tables)

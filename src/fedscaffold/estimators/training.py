"""From rows with owners to a trained model, and one round more from where the training stands."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.simulation.engine import Seconds, start
from fedscaffold.simulation.run import Run, finished, noise_key, simulate
from fedscaffold.simulation.setup import Request, prepare
from fedscaffold.simulation.spec import Settings, State

__all__ = ["Kept", "Owners", "kept", "one_more", "owners", "trained"]

Client = tuple[NDArray[Any], NDArray[Any]]
METRICS = ("loss",)  # the training loss; scores on data set apart are the user's business, as ever in scikit-learn


class Owners(NamedTuple):
    """Who holds which rows."""

    labels: NDArray[Any]
    """The clients, in sorted order."""
    rows: list[NDArray[np.intp]]
    """The rows of each."""

    def parts(self, x: NDArray[Any], y: NDArray[Any]) -> list[Client]:
        """The records of each client."""
        return [(x[rows], y[rows]) for rows in self.rows]


class Kept(NamedTuple):
    """What the next round starts from: the model, c, and the clients with their c_i."""

    x: NDArray[Any]
    c: NDArray[Any] | None
    c_i: NDArray[Any] | None
    """One row for each client."""
    labels: NDArray[Any]
    weights: NDArray[Any]
    rounds: int
    scale: float
    """The largest size of the c_i so far."""


def owners(clients: ArrayLike | None, rows: int) -> Owners:
    """Sort rows by their owners; without any, one client holds them all.

    >>> owners(["b", "a", "b"], 3).rows
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
    missing = sum(map(_absent, labels.tolist())) if labels.dtype == object else int((labels != labels).sum())
    if missing:
        raise InputError(
            f"clients must say of every row who holds it, got {missing} without (NaN or None); "
            "give these rows an owner or drop them"
        )
    try:
        known, index = np.unique(labels, return_inverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(label).__name__ for label in labels.tolist()}))
        raise InputError(f"clients must be names or numbers, all of one kind, got {kinds}; make them str") from None
    order = np.argsort(index, kind="stable")
    return Owners(known, np.split(order, np.cumsum(np.bincount(index))[:-1]))


def _absent(label: Any) -> bool:
    """Whether a label stands for none: None, NaN, or pandas' NA, which is neither equal to itself nor not."""
    try:
        return label is None or bool(label != label)
    except TypeError:
        return True


def trained(request: Request) -> Run:
    """Run all rounds from the start."""
    asked = request._asdict()
    (seed,) = asked.pop("seeds")
    return sound(simulate(**asked, seed=seed, progress=False))


def one_more(request: Request, before: Kept, labels: NDArray[Any]) -> Run:
    """Run the round after those of `before`, whose draws follow from the seed and its number."""
    (seed,) = request.seeds
    done = before.rounds
    asked = request._replace(rounds=done + 1)
    with jax.enable_x64(request.precision == "float64"):
        ready = prepare(asked)
        ready = ready._replace(start=_state(ready.start, before, asked, labels))
        settings = Settings(ready.lr, noise_key(seed), np.array(ready.target, request.precision))
        engine, state = start(ready, settings, [seed], 1, None)
        state, rows = engine.advance(state, done, 1)
        earlier = np.full((done, rows.shape[-1]), np.nan, rows.dtype)
        state = jax.tree.map(np.asarray, state)
        run = finished(asked, ready, seed, state, np.concatenate([earlier, rows]), Seconds(0.0, 0.0, 0.0))
    return sound(run)


def kept(run: Run, request: Request, labels: NDArray[Any]) -> Kept:
    """What the next round starts from."""
    weights = weights_of(request.problem, request.weights)
    return Kept(run.vector, run.server.c, run.clients.c_i, labels, weights, run.rounds, run.scale)


def sound(run: Run) -> Run:
    """Refuse a run that diverged, with what to do about it."""
    if run.advice is not None:
        raise InputError(run.advice)
    return run


def _state(fresh: State, before: Kept, request: Request, labels: NDArray[Any]) -> State:
    """The state to go on from: c as it was among the same clients, else again the mean of the c_i there are now."""
    x = before.x.astype(request.precision)
    c, c_i, mean = before.c, before.c_i, None
    if c_i is not None:
        c_i, p = _carried(before, request.problem, labels), weights_of(request.problem, request.weights)
        mean = p @ c_i
        if not (np.array_equal(labels, before.labels) and np.array_equal(p, before.weights)):
            c = mean
    scale = np.asarray(before.scale, request.precision)
    return fresh._replace(x=x, c=c, c_i=c_i, mean=mean, scale=scale, round=np.int32(before.rounds))


def _carried(before: Kept, problem: Problem, labels: NDArray[Any]) -> NDArray[Any]:
    """The c_i of the clients there are now: each its own, zero for those who are new."""
    assert before.c_i is not None
    c_i = np.zeros((problem.num_clients, problem.dim), before.c_i.dtype)
    where = {label: row for row, label in enumerate(before.labels.tolist())}
    for row, label in enumerate(labels.tolist()):
        if label in where:
            c_i[row] = before.c_i[where[label]]
    return c_i

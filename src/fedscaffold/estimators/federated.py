"""Base class of the estimators: parameters, data by client, and incremental training."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import cloudpickle
import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.estimators.training import (
    METRICS,
    TrainingState,
    group_by_owner,
    train,
    train_one_round,
    training_state,
)
from fedscaffold.estimators.weighted_rows import Client
from fedscaffold.problems import Problem
from fedscaffold.run_config import ARGUMENTS, RunConfig

__all__ = ["Federated", "Rows"]

DEFAULTS = {"local_epochs": 5, "lr": "auto", "weights": "records", "rounds": 100}
RUN_PARAMETERS = (
    "rounds",
    "local_epochs",
    "local_steps",
    "batch_size",
    "lr",
    "cohort",
    "weights",
    "precision",
)
"""Arguments of `simulate` that are parameters of the estimators."""
OWN_PARAMETERS: dict[str, tuple[Any, str]] = {
    "algorithm_params": (
        None,
        'the named algorithm\'s own parameters, such as {"mu": 0.1} of "fedprox"',
    ),
    "l2": (0.0, "the penalty l2/2 |params|^2, intercepts included"),
    "random_state": (0, "seed of cohorts, batches and the network's start"),
}
SENTENCES = {
    "lr": 'local step size; "auto" is 1 / L where L is known (all but "mlp"), else 0.1',
    "local_steps": "steps in a round; where given, `local_epochs` is not looked at",
    "weights": 'of the clients in the objective: "records" (the loss over all rows, as if they '
    'were pooled), "equal", '
    "or one number for each in the order of `clients_`",
}
"""Descriptions of arguments whose meaning differs from `simulate`."""
UNKNOWN_L = 0.1  # step size if L is unknown, as for networks


class Rows(NamedTuple):
    """Rows of data."""

    x: Any
    """Features, dense or sparse."""
    y: NDArray[Any]
    weights: NDArray[Any]
    clients: ArrayLike | None
    """Owner of each row; None if a single client holds all."""

    def counted(self) -> Rows:
        """Return the rows whose weight is not zero, with dense features.

        Raises:
            InputError: No row counts, or dense features do not fit in memory.
        """
        there = self.weights > 0
        if not there.any():
            raise InputError("the weights of all rows are zero: give some rows a positive weight")
        x, clients = self.x, self.clients
        if scipy.sparse.issparse(x):
            checks.fits(
                f"sparse X of shape {x.shape}, which is made dense,", 8 * math.prod(x.shape)
            )
            x = x.toarray()
        if there.all():
            return self._replace(x=x)
        if clients is not None and np.shape(clients) == there.shape:
            clients = np.asarray(clients)[there]
        return Rows(x[there], self.y[there], self.weights[there], clients)


class Federated(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Parameters and training of the federated estimators."""

    algorithm: str | Algorithm
    seed_: int
    history_: dict[str, NDArray[Any]]

    PARAMETERS: ClassVar[dict[str, tuple[Any, str]]] = {}
    """Parameters of a subclass: name to default and description."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        _add_parameters(cls)

    def fit(
        self,
        X: Any,
        y: Any,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Train from the start.

        Args:
            X: (rows, features), dense or sparse.
            y: (rows,) labels or responses.
            clients: (rows,) owner of each row; None if a single client holds all rows.
            sample_weight: (rows,) weights of the rows; a row of weight 0 does not count.
        """
        rows = self._rows(X, y, clients, sample_weight, None)
        return self._train(rows, None, once=False)

    def _train(self, rows: Rows, before: TrainingState | None, *, once: bool) -> Self:
        """Train on checked rows."""
        raise NotImplementedError

    def _rows(
        self,
        X: Any,
        y: Any,
        clients: ArrayLike | None,
        sample_weight: ArrayLike | None,
        before: TrainingState | None,
    ) -> Rows:
        """Check rows as scikit-learn does; `before` is the state of earlier rounds."""
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=np.float64,
            y_numeric=is_regressor(self),
            reset=before is None,
        )
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        return Rows(X, y, weights, clients)

    def _learn(
        self,
        model: Callable[[list[Client], int], Problem],
        rows: Rows,
        before: TrainingState | None,
        once: bool,
    ) -> None:
        """Train from the start, or one more round; fitted attributes are unchanged on failure.

        Args:
            model: (rows of each client, seed) -> problem.
            rows: Features, targets, weights and owners.
            before: State to continue from, or None to start.
            once: Whether to run a single round.
        """
        rows = rows.counted()
        who = group_by_owner(rows.clients, len(rows.y))
        seed = self._seed() if before is None else self.seed_
        parts: Any = who.parts(rows.x, rows.y, rows.weights)
        config = self._run_config(model(parts, seed), seed)
        if isinstance(self.weights, str) and self.weights == "records":
            config = replace(config, weights=[weights.sum() for *_, weights in parts])
        if before is None:
            run = train(replace(config, rounds=1) if once else config)
            self.history_ = run.history
        else:
            run = train_one_round(config, before, who.labels)
            new = {name: column[before.rounds :] for name, column in run.history.items()}
            self.history_ = {
                name: np.concatenate([column, new[name]]) for name, column in self.history_.items()
            }
        self.seed_ = seed
        self.params_ = run.x
        self.residual_ = run.residual
        self.n_iter_ = run.rounds
        self.clients_ = who.labels
        self._training = training_state(run, config, who.labels)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __getstate__(self) -> Any:
        """Return the state to pickle, with an algorithm, which consists of functions, as bytes."""
        state = dict(super().__getstate__())
        if isinstance(self.algorithm, Algorithm):
            state["algorithm"] = cloudpickle.dumps(self.algorithm)
        return state

    def __setstate__(self, state: Any) -> None:
        if isinstance(state.get("algorithm"), bytes):
            state = state | {"algorithm": cloudpickle.loads(state["algorithm"])}
        super().__setstate__(state)

    def _seed(self) -> int:
        """Return the user's seed, or one drawn from their random state."""
        state = self.random_state
        if isinstance(state, numbers.Integral):
            return int(state)
        return int(check_random_state(state).randint(np.iinfo(np.int32).max))

    def _run_config(self, problem: Problem, seed: int) -> RunConfig:
        automatic = UNKNOWN_L if problem.smoothness is None else 1 / problem.smoothness
        if isinstance(self.lr, str) and self.lr != "auto":
            raise InputError(f"lr must be a number above 0 or 'auto', got {self.lr!r}")
        given = {name: getattr(self, name) for name in RUN_PARAMETERS}
        given |= {
            "lr": automatic if isinstance(self.lr, str) else self.lr,
            "metrics": METRICS,
            "seed": seed,
        }
        given |= {} if self.local_steps is None else {"local_epochs": None}
        cohort = checks.share("cohort", self.cohort, "clients")
        if isinstance(cohort, int):  # a fold may lack some clients
            given["cohort"] = min(cohort, problem.num_clients)
        return RunConfig(self._algorithm(), problem, progress=False, **given)

    def _algorithm(self) -> Algorithm:
        given = self.algorithm_params or {}
        if isinstance(self.algorithm, str):
            return algorithms.make(self.algorithm, **given)
        if given:
            raise InputError(
                "algorithm_params go with an algorithm's name; fs.fedprox(mu=0.1) has its own "
                "already"
            )
        return self.algorithm


def _add_parameters(estimator: type[Federated]) -> None:
    """Add the constructor and the parameters' docstring lines to an estimator."""
    stated: dict[str, tuple[Any, str]] = estimator.PARAMETERS | OWN_PARAMETERS
    for name in RUN_PARAMETERS:
        argument = ARGUMENTS[name]
        stated[name] = DEFAULTS.get(name, argument.default), SENTENCES.get(name, argument.sentence)

    def init(self: Federated, algorithm: str | Algorithm = "scaffold", **given: Any) -> None:
        for name in given:
            checks.choice(f"parameter of {estimator.__name__}", name, stated)
        self.algorithm = algorithm
        for name, (default, _) in stated.items():
            setattr(self, name, given.get(name, default))

    own = [
        one
        for one in inspect.signature(init).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=at)
        for name, (at, _) in stated.items()
    ]
    init.__signature__ = inspect.Signature([*own, *named])  # type: ignore[attr-defined]
    init.__name__ = "__init__"
    estimator.__init__ = init  # type: ignore[method-assign, assignment]
    lines = "\n".join(f"        {name}: {sentence}." for name, (_, sentence) in stated.items())
    estimator.__doc__ = (estimator.__doc__ or "").replace("        PARAMETERS", lines)

"""What both estimators share: plain parameters, rows with owners, a model that goes on round by round."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from fedscaffold import algorithms
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.estimators.training import METRICS, Client, Kept, kept, one_more, owners, trained
from fedscaffold.problems import Problem
from fedscaffold.simulation.setup import Request

__all__ = ["Federated"]

UNKNOWN_L = 0.1  # step size where L is not known, as for networks


class Federated(BaseEstimator):  # type: ignore[misc] # scikit-learn has no types
    """Parameters and training of the federated estimators."""

    seed_: int
    history_: dict[str, NDArray[Any]]

    def __init__(
        self,
        algorithm: str | Algorithm = "scaffold",
        *,
        algorithm_params: dict[str, Any] | None = None,
        rounds: int = 100,
        local_epochs: int = 5,
        local_steps: int | None = None,
        batch_size: int | float | None = None,
        lr: float | str = "auto",
        cohort: int | float = 1.0,
        weights: str | ArrayLike = "records",
        l2: float = 0.0,
        precision: str = "float32",
        random_state: Any = 0,
    ) -> None:
        self.algorithm = algorithm
        self.algorithm_params = algorithm_params
        self.rounds = rounds
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.lr = lr
        self.cohort = cohort
        self.weights = weights
        self.l2 = l2
        self.precision = precision
        self.random_state = random_state

    def _learn(
        self,
        model: Callable[[list[Client], int], Problem],
        x: NDArray[Any],
        y: NDArray[Any],
        clients: ArrayLike | None,
        before: Kept | None,
        once: bool,
    ) -> None:
        """Train `model(records, seed)` from the start or one round more; what is known stays if this fails."""
        who = owners(clients, len(x))
        seed = self._seed() if before is None else self.seed_
        request = self._request(model(who.parts(x, y), seed), seed)
        if before is None:
            run = trained(request._replace(rounds=1) if once else request)
            self.history_ = run.history
        else:
            run = one_more(request, before, who.labels)
            new = {name: column[before.rounds :] for name, column in run.history.items()}
            self.history_ = {name: np.concatenate([column, new[name]]) for name, column in self.history_.items()}
        self.seed_ = seed
        self.params_ = run.x
        self.residual_ = run.residual
        self.n_iter_ = run.rounds
        self.clients_ = who.labels
        self._kept = kept(run, request, who.labels)

    def _seed(self) -> int:
        """The user's own seed, or one drawn from their random state."""
        state = self.random_state
        if isinstance(state, numbers.Integral):
            return int(state)
        return int(check_random_state(state).randint(np.iinfo(np.int32).max))

    def _request(self, problem: Problem, seed: int) -> Request:
        automatic = UNKNOWN_L if problem.smoothness is None else 1 / problem.smoothness
        if isinstance(self.lr, str) and self.lr != "auto":
            raise InputError(f"lr must be a number above 0 or 'auto', got {self.lr!r}")
        return Request(
            self._algorithm(),
            problem,
            self.rounds,
            local_steps=self.local_steps,
            local_epochs=self.local_epochs if self.local_steps is None else None,
            lr=automatic if isinstance(self.lr, str) else self.lr,
            cohort=self.cohort,
            batch_size=self.batch_size,
            weights=self.weights,
            metrics=METRICS,
            precision=self.precision,
            seeds=(seed,),
        )

    def _algorithm(self) -> Algorithm:
        given = self.algorithm_params or {}
        if isinstance(self.algorithm, str):
            return algorithms.make(self.algorithm, **given)
        if given:
            raise InputError("algorithm_params go with an algorithm's name; fs.fedprox(mu=0.1) has its own already")
        return self.algorithm

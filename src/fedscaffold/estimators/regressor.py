"""`FederatedRegressor`: linear regression trained on data held by clients."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from fedscaffold import checks
from fedscaffold.estimators.federated import Federated, Rows
from fedscaffold.estimators.training import TrainingState
from fedscaffold.estimators.weighted_rows import Client, weighted_problem
from fedscaffold.problems import Problem

__all__ = ["FederatedRegressor"]


class FederatedRegressor(RegressorMixin, Federated):  # type: ignore[misc] # scikit-learn has no types
    """Federated linear regression: half the mean squared error plus l2/2 |params|^2.

    Args:
        algorithm: a name such as "scaffold" or "fedavg", or an algorithm such as
            `fs.fedprox(mu=0.1)`.
        PARAMETERS

    After `fit`: the attributes of `FederatedClassifier` but for `classes_`, beside `coef_` and
        `intercept_`.

    >>> import fedscaffold as fs
    >>> X = np.array([[-1.0], [0.0], [1.0], [2.0]])
    >>> model = fs.FederatedRegressor(rounds=200).fit(X, 3 * X.ravel() + 1, clients=[0, 0, 1, 1])
    >>> model.coef_.round(3), round(model.intercept_, 3)
    (array([3.]), 1.0)
    """

    def partial_fit(
        self,
        X: Any,
        y: Any,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Train one more round, or the first one; see `FederatedClassifier.partial_fit`."""
        before: TrainingState | None = getattr(self, "_training", None)
        rows = self._rows(X, y, clients, sample_weight, before)
        return self._train(rows, before, once=True)

    def _train(self, rows: Rows, before: TrainingState | None, *, once: bool) -> Self:
        self._learn(self._model, rows, before, once)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predicted response of each row."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        expected: NDArray[Any] = X @ self.coef_ + self.intercept_
        return expected

    @property
    def coef_(self) -> NDArray[Any]:
        """Weights of the features."""
        check_is_fitted(self)
        return np.asarray(self.params_[:-1], np.float64)

    @property
    def intercept_(self) -> float:
        """Prediction where all features are 0."""
        check_is_fitted(self)
        return float(self.params_[-1])

    def _model(self, clients: list[Client], seed: int) -> Problem:
        return weighted_problem("linear", clients, l2=checks.number("l2", self.l2, at_least=0))

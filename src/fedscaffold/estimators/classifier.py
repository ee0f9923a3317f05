"""`FederatedClassifier`: softmax or logistic regression, or a network, trained where the rows are held."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedscaffold import checks, problems
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.estimators.base import Federated
from fedscaffold.estimators.training import Client, Kept
from fedscaffold.problems import Problem
from fedscaffold.problems.models import logits

__all__ = ["FederatedClassifier"]


class FederatedClassifier(ClassifierMixin, Federated):  # type: ignore[misc] # scikit-learn has no types
    """A classifier whose rows stay with their owners: `fit(X, y, clients=...)`, then as any of scikit-learn's.

    Args:
        algorithm: a name such as "scaffold" or "fedavg", or an algorithm such as `fs.fedprox(mu=0.1)`.
        model: "softmax", "mlp:WIDTH" (a hidden layer with ReLU), or "logistic" (two classes).
        algorithm_params: the named algorithm's own parameters, such as {"mu": 0.1} of "fedprox".
        rounds: communication rounds of `fit`.
        local_epochs: passes of a client over its rows in a round.
        local_steps: steps in a round; where given, `local_epochs` is not looked at.
        batch_size: rows in a batch: a number (int), a share of the client's own (float), or None for all.
        lr: local step size; "auto" is 1 / L where L is known (all but "mlp"), else 0.1.
        cohort: who takes part in a round, drawn at random: a share (float) or a number (int) of the clients.
        weights: of the clients in the objective: "records" (the loss over all rows, as if they were pooled), "equal",
            or one number for each in the order of `clients_`.
        l2: the penalty l2/2 |params|^2, intercepts included.
        precision: "float32" or "float64".
        random_state: seed of cohorts, batches and the network's start.

    After `fit`: `classes_`, `clients_`, `params_` (the model's arrays), `history_` (columns by round), `residual_`
    (|c - sum p_i c_i|: more than rounding is a bias), `n_iter_` (rounds), `seed_`.

    >>> import fedscaffold as fs
    >>> X, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array(["no", "no", "yes", "yes"])
    >>> model = fs.FederatedClassifier(rounds=20).fit(X, y, clients=["a", "a", "b", "b"])
    >>> model.predict([[3.0]]), model.score(X, y), model.clients_
    (array(['yes'], dtype='<U3'), 1.0, array(['a', 'b'], dtype='<U1'))
    """

    classes_: NDArray[Any]

    def __init__(
        self,
        algorithm: str | Algorithm = "scaffold",
        *,
        model: str = "softmax",
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
        super().__init__(
            algorithm,
            algorithm_params=algorithm_params,
            rounds=rounds,
            local_epochs=local_epochs,
            local_steps=local_steps,
            batch_size=batch_size,
            lr=lr,
            cohort=cohort,
            weights=weights,
            l2=l2,
            precision=precision,
            random_state=random_state,
        )
        self.model = model

    def fit(self, X: Any, y: Any, clients: ArrayLike | None = None) -> FederatedClassifier:
        """Train from the start; `clients` names the owner of each row, None that one client holds them all."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        return self._taught(X, y, None, clients, None, once=False)

    def partial_fit(
        self, X: Any, y: Any, classes: ArrayLike | None = None, clients: ArrayLike | None = None
    ) -> FederatedClassifier:
        """Train one round more, or the first; `classes` names them all where the first `y` does not have them all.

        A client known from before goes on with its control variate, whichever rows it holds now; a new one starts at 0.
        """
        before: Kept | None = getattr(self, "_kept", None)
        X, y = validate_data(self, X, y, dtype=np.float64, reset=before is None)
        return self._taught(X, y, classes, clients, before, once=True)

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """The probabilities of the classes, one row each, in the order of `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if self.model == "logistic":
            score = X @ self.params_[:-1] + self.params_[-1]
            scores = np.stack([np.zeros_like(score), score], axis=1)
        else:
            scores = np.asarray(logits(self.params_, X), np.float64)
        likely: NDArray[Any] = softmax(scores, axis=1)
        return likely

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        likely = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[likely.argmax(axis=1)]
        return found

    def _taught(
        self,
        x: NDArray[Any],
        y: Any,
        classes: ArrayLike | None,
        clients: ArrayLike | None,
        before: Kept | None,
        *,
        once: bool,
    ) -> FederatedClassifier:
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        known = self.classes_ if before is not None else np.unique(y if classes is None else np.asarray(classes))
        strange = np.setdiff1d(y, known)
        if strange.size:
            raise InputError(
                f"y has labels that are not among the classes {known.tolist()}: {strange.tolist()}; "
                "name all in classes at the first partial_fit"
            )
        if before is not None and classes is not None and not np.array_equal(np.unique(classes), known):
            raise InputError(f"classes must stay those of the first partial_fit, {known.tolist()}")
        if len(known) < 2:
            raise InputError(f"a classifier needs rows of at least two classes, got one class: {known.tolist()}")
        self._learn(partial(self._model, len(known)), x, np.searchsorted(known, y), clients, before, once)
        self.classes_ = known
        return self

    def _model(self, classes: int, clients: list[Client], seed: int) -> Problem:
        name, _, width = str(self.model).partition(":")
        checks.choice("model", name, ("logistic", "mlp", "softmax"))
        if name == "softmax":
            return problems.softmax(clients, classes=classes, l2=self.l2)
        if name == "mlp":
            hidden = checks.whole("the width in model 'mlp:WIDTH'", checks.written(width or "300"))
            return problems.mlp(clients, hidden, classes=classes, l2=self.l2, seed=seed)
        if classes != 2:
            raise InputError(f"model 'logistic' is for two classes, got {classes}; use model='softmax'")
        return problems.logistic(with_intercept(clients), l2=self.l2)


def with_intercept(clients: list[Client]) -> list[Client]:
    """A last column of ones: the regressions have no intercept of their own.

    >>> with_intercept([(np.zeros((1, 1)), np.zeros(1))])[0][0]
    array([[0., 1.]])
    """
    return [(np.hstack([x, np.ones((len(x), 1))]), y) for x, y in clients]
